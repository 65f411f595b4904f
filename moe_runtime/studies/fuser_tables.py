"""The tables and figures of the UltraFuser paper (arXiv 2403.08281), one command each, on the stages of `fuser_stages`.

    ablate     specialists, tuned further, fused: directly, in two stages, balanced     Tables 2 and 4, Figure 5
    weights    the gate's weights by domain, and token by token                         Table 6, Figures 6 to 8
    stability  the losses on the way, with the balanced sampler and without             Table 5

The measure is the held-out loss per response token of every domain, in the place of the paper's benchmarks. A stage that
OUT holds already is read, not trained, whichever command made it; so a command that was killed goes on.
"""

from collections.abc import Callable
from pathlib import Path

from moe_runtime.studies import fuser_pictures, fuser_stability, fuser_weights, tables
from moe_runtime.studies.domain_reports import DomainReport, said
from moe_runtime.studies.fuser_recipe import FuserRecipe, load_recipe
from moe_runtime.studies.fuser_stages import Stages
from moe_runtime.studies.tables import Command, Run, each

DIRECT, TWO_STAGE, FULL = "direct", "two-stage", "two-stage, balanced"
GATE = "stage 1 alone, balanced"


def run(
    command: str,
    recipe: FuserRecipe | str | Path = "tiny",
    out: str | Path = "runs/ultrafuser",
    *,
    seeds: int = 3,
    say: Callable[[str], None] = print,
    overwrite: bool = False,
    **options,
):
    """Make a table, as `tables.run` says."""
    return tables.run(
        COMMANDS, Stages, load_recipe, command, recipe, out, seeds=seeds, say=say, overwrite=overwrite, **options
    )


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
            alone = min((f"specialist {name}" for name in names), key=lambda name: table.entry(name).loss)
            one = table.comparison(alone)
            lines.append(
                f"{domain}: the best specialist is {alone.partition(' ')[2]}, {table.entry(alone).loss:.4f}; fused "
                f"{table.entry(FULL).loss:.4f}; against the fused model {said(one)}."
            )
        return [*lines, *each(report)]

    return {"entries": process.collect(plan), "reference": FULL, "summary": summary}


COMMANDS = {
    "ablate": Command(
        "What fuses specialists", "UltraFuser, Tables 2 and 4", _ablate, fuser_pictures.losses, report=DomainReport
    ),
    "weights": Command(
        "Weights of the specialists", "UltraFuser, Table 6 and Figure 6", fuser_weights.measure, fuser_pictures.weights,
        fuser_weights.check, fuser_weights.GateWeights,
    ),
    "stability": Command(
        "Stage 2 on the way", "UltraFuser, Table 5", fuser_stability.measure, fuser_pictures.stability,
        fuser_stability.check, fuser_stability.Stability,
    ),
}  # fmt: skip
