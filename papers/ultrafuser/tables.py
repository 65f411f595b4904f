"""The tables of UltraFuser (arXiv 2403.08281), one command each, on the stages of `study`.

    ablate     specialists, specialists tuned further, and fused models:    Tables 2 and 4,
               the gate alone, directly, in two stages, balanced            Figure 5
    weights    the gate's weights by domain                                 Table 6, Figure 6

The measure is the held-out loss per response token of every domain, in place of the paper's
benchmarks.
"""

import functools

from papers.engine import tables
from papers.engine.compare import signed
from papers.engine.domains import DomainReport
from papers.engine.tables import Command, Run, each
from papers.ultrafuser import weights_study
from papers.ultrafuser.study import UltrafuserStages

GATE = "stage 1 alone, balanced"
FULL = "two-stage, balanced"
DIRECT = "direct"
TWO_STAGE = "two-stage"


def _ablate(process: Run) -> dict:
    names = list(process.recipe.specialists)

    def plan(stages: UltrafuserStages):
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
            best = min(names, key=lambda name: table.entry(f"specialist {name}").loss)
            one = table.comparison(f"specialist {best}")
            lines.append(
                f"{domain}: the best specialist is {best}, {table.entry(one.name).loss:.4f}; fused "
                f"{table.entry(FULL).loss:.4f}; against the fused model {one.name} "
                f"{signed(one.difference)} ({one.verdict})."
            )
        return [*lines, *each(report)]

    return {"entries": process.collect(plan), "reference": FULL, "summary": summary}


COMMANDS = {
    "ablate": Command(
        "What fuses specialists",
        "UltraFuser, Tables 2 and 4",
        _ablate,
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
}
run = functools.partial(tables.run, COMMANDS, UltrafuserStages)
