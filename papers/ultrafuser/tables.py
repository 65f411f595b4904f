"""The tables and figures of the UltraFuser paper (arXiv 2403.08281), one command each, on the
stages of `study`.

    ablate     specialists, tuned further, fused: directly, in two stages, balanced     Tables 2 and 4, Figure 5
    weights    the gate's weights by domain, and token by token                         Table 6, Figures 6 to 8
    sample-level  a specialist selected for each prompt, beside the fused model         Sec. 3.1
    stability  the losses on the way, with the balanced sampler and without             Table 5
    sums       sums solved: by specialists, single models, simpler fusions              as in Table 2's benchmarks

The measure is the held-out loss per response token of every domain, in place of the paper's
benchmarks. Table 5 shows its mean and standard deviation over checkpoints spread evenly over the
last seven ninths of stage 2, as the paper's are from step 2000 to 9000.
"""

import functools
import statistics
from dataclasses import dataclass

from moe_runtime.config import check_positive
from moe_runtime.hf.training.fit import mean_loss
from papers.engine import tables
from papers.engine.domains import DomainReport, with_difference
from papers.engine.tables import Command, Finding, Run, each, finite
from papers.ultrafuser import sums_study, weights_study
from papers.ultrafuser.recipe import FuserRecipe
from papers.ultrafuser.sums_study import FULL, GATE, Stages

CHECKPOINTS = 12
VARIANTS = {"no balance": False, "balanced": True}
ALL = "all"


@dataclass(kw_only=True)
class Stability(Finding):
    """Losses during stage 2 for every variant, seed and checkpoint."""

    course: dict[str, list]  # variant -> [seeds][(step, {domain or "all": loss})]
    folders: dict[str, list[str]]

    @property
    def names(self) -> tuple[str, ...]:
        """The domains' names, and "all"."""
        return tuple(next(iter(self.course.values()))[0][0][1])

    def spread(self, variant: str, name: str) -> tuple[list[float], list[float]]:
        """Return the means and the standard deviations over the checkpoints, one of each
        per seed.
        """
        losses = [[at[name] for _, at in way] for way in self.course[variant]]
        return [*map(statistics.fmean, losses)], [*map(statistics.stdev, losses)]

    def columns(self) -> list[tuple[str, str]]:
        """Return the table's columns and how they are aligned."""
        return [("sampling", "left"), *((name, "right") for name in self.names)]

    def rows(self) -> list[tuple[str, ...]]:
        """Return the table's rows as text, in the order of `columns`."""
        return [
            (variant, *(self._cell(variant, name) for name in self.names))
            for variant in self.course
        ]

    def _cell(self, variant: str, name: str) -> str:
        mean, sd = map(statistics.fmean, self.spread(variant, name))
        return f"{mean:.4f} ± {sd:.4f}"

    def legend(self) -> str:
        """Return what the table's numbers are, in a line."""
        steps = [step for step, _ in next(iter(self.course.values()))[0]]
        over = f", the mean over {len(self.seeds)} seeds" if len(self.seeds) > 1 else ""
        return (
            f"held-out loss: mean ± sd over {len(steps)} checkpoints, steps {steps[0]} to "
            f"{steps[-1]} of stage 2{over}."
        )

    def to_dict(self) -> dict:
        """Return all of the report as JSON-ready values."""
        spread = {
            variant: {
                name: dict(zip(("mean", "sd"), self.spread(variant, name), strict=True))
                for name in self.names
            }
            for variant in self.course
        }
        return super().to_dict() | {"spread": finite(spread)}


def check(recipe: FuserRecipe, checkpoints: int = CHECKPOINTS) -> dict:
    """Return the options of `measure`; raises ValueError for too few checkpoints, or for more than
    the steps allow.
    """
    check_positive("checkpoints", checkpoints)
    steps = recipe.stage2.steps
    if not 2 <= checkpoints <= 7 * steps // 9:
        raise ValueError(
            f"checkpoints must be at least 2 and at most seven ninths of the {steps} steps of "
            f"stage 2, but got {checkpoints}"
        )
    return {"checkpoints": checkpoints}


def steps_of(total: int, checkpoints: int) -> list[int]:
    """Return `checkpoints` evenly spaced steps up to `total`, none in its first two ninths (the
    last 7 of 9 by default).
    """
    parts = (9 * checkpoints + 3) // 7
    return [
        (2 * total * end + parts) // (2 * parts)
        for end in range(parts - checkpoints + 1, parts + 1)
    ]


def measure(process, checkpoints: int) -> dict:
    """Train the fused model with and without balanced batches, otherwise by the recipe, and record
    its losses along the way.
    """
    steps = steps_of(process.recipe.stage2.steps, checkpoints)
    course: dict[str, list] = {}
    folders: dict[str, list[str]] = {}
    for variant, balanced in VARIANTS.items():
        for stages in process.all:
            fused = stages.fused(balanced=balanced, checkpoints=steps)
            totals = dict(fused.history)
            way = [(step, losses | {ALL: totals[step]}) for step, losses in fused.course]
            course.setdefault(variant, []).append(way)
            folders.setdefault(variant, []).append("/".join(fused.folder.parts[-2:]))
            process.say(f"seed {stages.seed}: {variant}, held-out loss {fused.loss:.4f}")
    return {"course": course, "folders": folders, "summary": _summary}


def _summary(report: Stability) -> list[str]:
    first, second = report.course
    lines = []
    for name in report.names:
        (means, sds), (others, other_sds) = report.spread(second, name), report.spread(first, name)
        lower = [
            sum(a < b for a, b in zip(*pair, strict=True))
            for pair in ((means, others), (sds, other_sds))
        ]
        lines.append(
            f"{name}: {second} has the lower mean with {lower[0]} of {len(report.seeds)} seeds, "
            f"the lower deviation with {lower[1]}."
        )
    return lines


DIRECT = "direct"
TWO_STAGE = "two-stage"


def _ablate(process: Run) -> dict:
    names = list(process.recipe.specialists)

    def plan(stages: Stages):
        for name in names:
            yield f"specialist {name}", stages.specialist(name)
        for name in names:
            yield f"{name}, tuned further", stages.further(name)
        yield GATE, stages.gate(balanced=True)
        yield DIRECT, stages.fused(two_stage=False, balanced=False)
        yield TWO_STAGE, stages.fused(two_stage=True, balanced=False)
        yield FULL, stages.fused(two_stage=True, balanced=True)

    def summary(report: DomainReport) -> list[str]:
        lines = []
        for domain, table in report.of_domains.items():
            alone = min(
                (f"specialist {name}" for name in names), key=lambda name: table.entry(name).loss
            )
            one = table.comparison(alone)
            lines.append(
                f"{domain}: the best specialist is {alone.partition(' ')[2]}, "
                f"{table.entry(alone).loss:.4f}; fused {table.entry(FULL).loss:.4f}; against the "
                f"fused model {with_difference(one)}."
            )
        return [*lines, *each(report)]

    return {"entries": process.collect(plan), "reference": FULL, "summary": summary}


SELECTED = "sample-level selector"


def _sample_level(process: Run) -> dict:
    names = [f"specialist {name}" for name in process.recipe.specialists]

    def plan(stages: Stages):
        for label, name in zip(names, process.recipe.specialists, strict=True):
            yield label, stages.specialist(name)
        yield SELECTED, stages.selected()
        yield GATE, stages.gate(balanced=True)
        yield FULL, stages.fused(two_stage=True, balanced=True)

    def summary(report: DomainReport) -> list[str]:
        first = [report.entry(name).results[0] for name in names]
        least = [min(of) for of in zip(*(one.losses for one in first), strict=True)]
        perfect = mean_loss(least, first[0].tokens)
        return [
            *each(report),
            (
                "A selector that always takes the specialist with the lowest loss would have "
                f"{perfect:.4f}."
            ),
        ]

    return {"entries": process.collect(plan), "reference": SELECTED, "summary": summary}


COMMANDS = {
    "ablate": Command(
        "What fuses specialists",
        "UltraFuser, Tables 2 and 4",
        _ablate,
        weights_study.losses,
        report=DomainReport,
    ),
    "sample-level": Command(
        "One specialist per prompt",
        "UltraFuser, Sec. 3.1",
        _sample_level,
        weights_study.losses,
        report=DomainReport,
    ),
    "weights": Command(
        "Weights of the specialists",
        "UltraFuser, Table 6 and Figure 6",
        weights_study.measure,
        weights_study.weights,
        weights_study.check,
        weights_study.GateWeights,
    ),
    "stability": Command(
        "Stage 2 on the way",
        "UltraFuser, Table 5",
        measure,
        weights_study.stability,
        check,
        Stability,
    ),
    "sums": Command(
        "Sums that are solved",
        "UltraFuser, in the place of Table 2's benchmarks",
        sums_study.measure,
        sums_study.picture,
        sums_study.check,
        DomainReport,
    ),
}
run = functools.partial(tables.run, COMMANDS, Stages)
