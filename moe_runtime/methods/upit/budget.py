"""UpIT on a budget of optimizer steps: SFT with one learning rate schedule, and UpIT, whose second stage starts another.

    SFT                        sft.epochs + post.epochs of dense tuning, one schedule, that of post; SWA of its checkpoints
    Upcycle_PT                 the same epochs and schedule, all of them as a mixture
    UpIT, Upcycle_SFT          as in the recipe, with its schedule of stage 1
    stage 1 annealed           with post's schedule in stage 1 too
    two equal schedules        half of the epochs in each stage, both with post's schedule
    an expert per domain       stage 1 is one tuning per domain, each on its own rows; its last checkpoint is the expert

Steps of stage 2 are counted on from stage 1, so that losses are of equal steps. Initializing the routers takes some more rows.
The experts per domain are left out where the recipe has another number of experts than of domains.
"""

import copy
import statistics
from collections.abc import Iterator
from pathlib import Path

from torch.optim.swa_utils import AveragedModel

from moe_runtime.experiments.domains import Judged
from moe_runtime.experiments.tables import Entry, Report, Run, against
from moe_runtime.hf.training import ranks
from moe_runtime.methods.upit import pesc
from moe_runtime.methods.upit.experts import saved_experts
from moe_runtime.methods.upit.study import Pool

SFT, SWA, PT, COPIES, UPIT = "SFT", "SFT, SWA", "Upcycle_PT", "Upcycle_SFT", "UpIT"
ANNEALED, EQUAL, BRANCHES = f"{UPIT}, stage 1 annealed", f"{UPIT}, two equal schedules", f"{UPIT}, an expert per domain"


class Stages(pesc.Stages):
    """The stages of a study, with SWA's and with experts that are tuned on one domain each."""

    only: str | None = None  # the domain that is tuned on

    @property
    def train_rows(self):
        """The training examples of the one domain, or of all, tokenized."""
        return self.part(f"{self.only}-train") if self.only else super().train_rows

    def _settings(self, training) -> dict:
        return super()._settings(training) | ({"only": self.only} if self.only else {})

    def branches(self) -> Pool:
        """Return an expert per domain: the last checkpoint of the first tuning, on the domain's examples alone."""
        tuned = []
        for domain in self.recipe.domains:
            other = copy.copy(self)
            other.only = domain
            tuned.append(other.prepared("ffn"))
        last = [saved_experts(one.folder)[-1] for one in tuned]
        made = {"experts": [path.relative_to(self.out).as_posix() for path in last], "parents": []}
        settings = {"branches": list(self.recipe.domains)}
        pool = self._stage("pool", BRANCHES, settings, tuned, lambda tmp, checkpoints: made, holds="experts", result=Pool)
        return pool._replace(experts=[str(path) for path in last])

    def averaged(self, tuned: Judged) -> Judged:
        """Return SWA (arXiv 1803.05407): the mean of the checkpoints in the second half of the steps of `prepared`."""
        saved = {int(path.name.rpartition("-")[2]): path for path in saved_experts(tuned.folder)}
        late = [path for step, path in saved.items() if 2 * step > max(saved)]

        def make(tmp: Path, checkpoints: Path) -> dict:
            with ranks.leading() as main:
                if main:
                    mean = AveragedModel(self._load(late[0], device=False).float())
                    for path in late:
                        mean.update_parameters(self._load(path, device=False).float())
                    ranks.save_whole(mean.module, self.tokenizer, tmp / "model", self.recipe.dtype)
            return self._judge(lambda: self._load(tmp / "model"))

        return self._stage("averaged", SWA, {"checkpoints": [path.name for path in late]}, [tuned], make)


def make(process: Run) -> dict:
    """Train SFT, UpIT and its variants with equal optimizer steps."""
    recipe = process.recipe
    epochs, schedule = recipe.ffn.whole.epochs, recipe.ffn.post.schedule
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
    """Say how UpIT compares with every other, and the held-out loss on the way: where the second schedule begins it rises."""
    names = [entry.name for entry in report.entries if entry.name not in (UPIT, "base")]
    upit = against(report.entries, UPIT, names)
    watched = [entry for entry in report.entries if entry.results[0].history]
    ways = {entry.name: _means(entry) for entry in watched}
    steps = sorted({step for way in ways.values() for step in way})
    width = max(map(len, ways))
    lines = [f"{'held-out loss at step':{width}s}" + "".join(f"{step:8d}" for step in steps)]
    for name, way in ways.items():
        lines.append(f"{name:{width}s}" + "".join(f"{way[step]:8.4f}" if step in way else " " * 8 for step in steps).rstrip())
    return [*upit, *lines]


def _means(entry: Entry) -> dict[int, float]:
    """Return the held-out loss by step, the mean over the seeds."""
    ways = [dict(result.history) for result in entry.results]
    return {step: statistics.fmean(way[step] for way in ways) for step in ways[0]}
