"""UpIT at an equal number of optimizer steps: SFT has one learning rate schedule, UpIT one per
stage.

    SFT                     sft.epochs + post.epochs of dense tuning with post's schedule; also SWA
                            of its checkpoints, and every smaller whole number of epochs
    Upcycle_PT              the same epochs and schedule, all of them as an MoE model
    UpIT, Upcycle_SFT       as in the recipe, with its schedule of stage 1
    stage 1 annealed        with post's schedule in stage 1 too
    two equal schedules     half of the epochs in each stage, both with post's schedule
    an expert per domain    stage 1 is a tuning run per domain, whose last checkpoint is the expert

Steps of stage 2 continue the count of stage 1, so that losses are compared at equal steps;
initializing the routers takes some extra rows. Experts per domain require as many domains as
experts and are skipped otherwise.
"""

import copy
import math
import statistics
from collections.abc import Iterator
from pathlib import Path

from torch.optim.swa_utils import AveragedModel

from moe_runtime.hf.training import ranks
from moe_runtime.methods.upit.experts import saved_experts
from papers.engine.domains import Judged
from papers.engine.tables import Report, Run, against
from papers.upit import study
from papers.upit.study import ExpertPool

SFT = "SFT"
SWA = "SFT, SWA"
SHORTER = "SFT, epochs: {}"
PT = "Upcycle_PT"
COPIES = "Upcycle_SFT"
UPIT = "UpIT"
ANNEALED = f"{UPIT}, stage 1 annealed"
EQUAL = f"{UPIT}, two equal schedules"
BRANCHES = f"{UPIT}, an expert per domain"


class BudgetStages(study.UpitStages):
    """The stages of a study, with SWA and experts tuned on one domain each."""

    only: str | None = None  # the domain to tune on; None: all

    @property
    def train_rows(self):
        """The training examples of the one domain, or of all, tokenized."""
        if self.only:
            return self.part(f"{self.only}-train")
        return super().train_rows

    def _settings(self, training) -> dict:
        settings = super()._settings(training)
        if self.only:
            settings["only"] = self.only
        return settings

    def branches(self) -> ExpertPool:
        """Return an expert per domain: the last checkpoint of stage 1 on that domain's examples
        only.
        """
        tuned = []
        last = []
        for domain in self.recipe.domains:
            other = copy.copy(self)
            other.only = domain
            tuned.append(other.prepared("ffn"))
            last.append(saved_experts(tuned[-1].folder)[-1])

        def make(tmp: Path, checkpoints: Path) -> dict:
            experts = [path.relative_to(self.out).as_posix() for path in last]
            return {"experts": experts, "parents": []}

        settings = {"branches": list(self.recipe.domains)}
        pool = self._stage(
            "pool",
            BRANCHES,
            settings,
            tuned,
            make,
            holds="experts",
            result=ExpertPool,
        )
        return pool._replace(experts=[*map(str, last)])

    def averaged(self, tuned: Judged) -> Judged:
        """Return SWA (arXiv 1803.05407): the mean of the checkpoints from the second half of the
        steps of `prepared`.
        """
        saved = {int(path.name.rpartition("-")[2]): path for path in saved_experts(tuned.folder)}
        late = [path for step, path in saved.items() if 2 * step > max(saved)]

        def make(tmp: Path, checkpoints: Path) -> dict:
            with ranks.leading() as main:
                if main:
                    mean = AveragedModel(self._load(late[0], device=False).float())
                    for path in late:
                        mean.update_parameters(self._load(path, device=False).float())
                    ranks.save_whole(
                        mean.module,
                        self.tokenizer,
                        tmp / "model",
                        self.recipe.dtype,
                    )
            return self._judge(lambda: self._load(tmp / "model"))

        settings = {"checkpoints": [path.name for path in late]}
        return self._stage(
            "averaged",
            SWA,
            settings,
            [tuned],
            make,
        )


def make(process: Run) -> dict:
    """Train SFT, UpIT and its variants with equal optimizer steps."""
    recipe = process.recipe
    epochs = recipe.ffn.whole.epochs
    schedule = recipe.ffn.post.schedule
    annealed = {"ffn__sft__schedule": schedule}
    equal = annealed | {"ffn__sft__epochs": epochs / 2, "ffn__post__epochs": epochs / 2}
    for changes in ({}, equal):
        process.all[0].change(**changes).check("ffn")

    def plan(stages: BudgetStages) -> Iterator[tuple[str, Judged]]:
        yield "base", stages.base()._replace(history=[])
        one = stages.change(**annealed)
        sft = one.change(ffn__sft__epochs=epochs).prepared("ffn")
        yield SFT, sft
        yield SWA, one.averaged(sft)
        for fewer in range(1, math.ceil(epochs)):
            shorter = one.change(ffn__sft__epochs=fewer).prepared("ffn")
            yield SHORTER.format(fewer), shorter._replace(history=[])
        yield PT, one.upcycled("pt")
        yield COPIES, _after(stages.prepared("ffn"), stages.upcycled("sft"))
        for name, changes in {UPIT: {}, ANNEALED: annealed, EQUAL: equal}.items():
            changed = stages.change(**changes)
            yield name, _after(changed.prepared("ffn"), changed.upit("ffn"))
        if len(recipe.domains) == recipe.experts.num_experts:
            yield BRANCHES, stages.upit("ffn", stages.branches())._replace(history=[])

    return {
        "entries": process.collect(plan),
        "reference": SFT,
        "summary": _summary,
        "extra": {},
    }


def _after(first: Judged, second: Judged) -> Judged:
    """Return the result of a second stage with the steps and losses of both."""
    history = [*first.history, *((first.steps + step, loss) for step, loss in second.history)]
    return second._replace(history=history, steps=first.steps + second.steps)


def _summary(report: Report) -> list[str]:
    """Compare UpIT with every other method, and list held-out losses by step: they rise where the
    second schedule starts.
    """
    names = []
    histories = {}
    for entry in report.entries:
        if entry.name not in (UPIT, "base"):
            names.append(entry.name)
        if entry.results[0].history:
            of_seeds = [dict(result.history) for result in entry.results]
            means = {}
            for step in of_seeds[0]:
                means[step] = statistics.fmean(losses[step] for losses in of_seeds)
            histories[entry.name] = means
    steps = sorted({step for history in histories.values() for step in history})
    width = max(map(len, histories))
    lines = [f"{'held-out loss at step':{width}s}" + "".join(f"{step:8d}" for step in steps)]
    for name, history in histories.items():
        line = f"{name:{width}s}"
        for step in steps:
            cell = ""
            if step in history:
                cell = f"{history[step]:.4f}"
            line += f"{cell:>8s}"
        lines.append(line.rstrip())
    return [*against(report.entries, UPIT, names), *lines]
