"""UpIT at an equal number of optimizer steps: SFT has one learning rate schedule, UpIT one per
stage.

    SFT                     sft.epochs + post.epochs of dense tuning with post's schedule; also SWA
                            of its checkpoints
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
import statistics
from collections.abc import Iterator
from pathlib import Path

from torch.optim.swa_utils import AveragedModel

from moe_runtime.hf.training import ranks
from moe_runtime.methods.upit.experts import saved_experts
from papers.engine.domains import Judged
from papers.engine.tables import Entry, Report, Run, against
from papers.upit import study
from papers.upit.study import Pool

SFT = "SFT"
SWA = "SFT, SWA"
PT = "Upcycle_PT"
COPIES = "Upcycle_SFT"
UPIT = "UpIT"
ANNEALED = f"{UPIT}, stage 1 annealed"
EQUAL = f"{UPIT}, two equal schedules"
BRANCHES = f"{UPIT}, an expert per domain"


class Stages(study.Stages):
    """The stages of a study, with SWA and experts tuned on one domain each."""

    only: str | None = None  # the domain to tune on; None: all

    @property
    def train_rows(self):
        """The training examples of the one domain, or of all, tokenized."""
        return self.part(f"{self.only}-train") if self.only else super().train_rows

    def _settings(self, training) -> dict:
        return super()._settings(training) | ({"only": self.only} if self.only else {})

    def branches(self) -> Pool:
        """Return an expert per domain: the last checkpoint of stage 1 on that domain's examples
        only.
        """
        tuned = []
        for domain in self.recipe.domains:
            other = copy.copy(self)
            other.only = domain
            tuned.append(other.prepared("ffn"))
        last = []
        for one in tuned:
            last.append(saved_experts(one.folder)[-1])
        made = {"experts": [path.relative_to(self.out).as_posix() for path in last], "parents": []}
        settings = {"branches": list(self.recipe.domains)}
        pool = self._stage(
            "pool",
            BRANCHES,
            settings,
            tuned,
            lambda tmp, checkpoints: made,
            holds="experts",
            result=Pool,
        )
        return pool._replace(experts=[str(path) for path in last])

    def averaged(self, tuned: Judged) -> Judged:
        """Return SWA (arXiv 1803.05407): the mean of the checkpoints from the second half of the
        steps of `prepared`.
        """
        saved = {}
        for path in saved_experts(tuned.folder):
            saved[int(path.name.rpartition("-")[2])] = path
        late = []
        for step, path in saved.items():
            if 2 * step > max(saved):
                late.append(path)

        def make(tmp: Path, checkpoints: Path) -> dict:
            with ranks.leading() as main:
                if main:
                    mean = AveragedModel(self._load(late[0], device=False).float())
                    for path in late:
                        mean.update_parameters(self._load(path, device=False).float())
                    ranks.save_whole(mean.module, self.tokenizer, tmp / "model", self.recipe.dtype)
            return self._judge(lambda: self._load(tmp / "model"))

        return self._stage(
            "averaged", SWA, {"checkpoints": [path.name for path in late]}, [tuned], make
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

    def plan(stages: Stages) -> Iterator[tuple[str, Judged]]:
        yield "base", stages.base()._replace(history=[])
        one = stages.change(**annealed)
        sft = one.change(ffn__sft__epochs=epochs).prepared("ffn")
        yield SFT, sft
        yield SWA, one.averaged(sft)
        yield PT, one.upcycled("pt")
        yield COPIES, _after(stages.prepared("ffn"), stages.upcycled("sft"))
        for name, changes in {UPIT: {}, ANNEALED: annealed, EQUAL: equal}.items():
            changed = stages.change(**changes)
            yield name, _after(changed.prepared("ffn"), changed.upit("ffn"))
        if len(recipe.domains) == recipe.experts.num_experts:
            yield BRANCHES, stages.upit("ffn", stages.branches())._replace(history=[])

    return {"entries": process.collect(plan), "reference": SFT, "summary": _summary, "extra": {}}


def _after(first: Judged, second: Judged) -> Judged:
    """Return the result of a second stage with the steps and losses of both."""
    history = [*first.history, *((first.steps + step, loss) for step, loss in second.history)]
    return second._replace(history=history, steps=first.steps + second.steps)


def _summary(report: Report) -> list[str]:
    """Compare UpIT with every other method, and list held-out losses by step: they rise where the
    second schedule starts.
    """
    names = []
    for entry in report.entries:
        if entry.name not in (UPIT, "base"):
            names.append(entry.name)
    upit = against(report.entries, UPIT, names)
    watched = []
    for entry in report.entries:
        if entry.results[0].history:
            watched.append(entry)
    histories = {}
    for entry in watched:
        histories[entry.name] = _means(entry)
    steps = sorted({step for history in histories.values() for step in history})
    width = max(map(len, histories))
    lines = [f"{'held-out loss at step':{width}s}" + "".join(f"{step:8d}" for step in steps)]
    for name, history in histories.items():
        lines.append(
            f"{name:{width}s}"
            + "".join(
                f"{history[step]:8.4f}" if step in history else " " * 8 for step in steps
            ).rstrip()
        )
    return [*upit, *lines]


def _means(entry: Entry) -> dict[int, float]:
    """Return the held-out loss by step, the mean over the seeds."""
    histories = []
    for result in entry.results:
        histories.append(dict(result.history))
    means = {}
    for step in histories[0]:
        means[step] = statistics.fmean(history[step] for history in histories)
    return means
