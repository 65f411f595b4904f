"""The tables of UpIT (arXiv 2410.01610), one command each, on the stages of `study`.

    main      UpIT with whole experts and with LoRA experts,    Table 1, Figure 5
              and their baselines
    budget    equal optimizer steps: SFT with one schedule,     Sec. 3.1
              UpIT with one or two (see `budget`)

The measure is the held-out loss per label token of every domain, in place of the paper's
benchmarks.
"""

import functools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from moe_runtime.config import check_choice
from papers.engine import domains, plots, tables
from papers.engine.domains import DomainReport, Routed
from papers.engine.tables import Command, Entry, Run, against
from papers.upit import budget
from papers.upit.budget import BudgetStages
from papers.upit.recipe import UpitRecipe
from papers.upit.study import NAMES, STARTS

DENSE = {"ffn": "SFT", "lora": "LoRA"}
COPIES = {"ffn": "Upcycle", "lora": "LoRAMoE"}


@dataclass(kw_only=True)
class UpitReport(DomainReport):
    """A table of models evaluated on several domains, with their active parameters."""

    def columns(self) -> list[tuple[str, str]]:
        """Return the table's columns and how they are aligned."""
        columns = super().columns()
        position = columns.index(("trained", "right"))
        return [*columns[:position], ("per token", "right"), *columns[position:]]

    def _row(self, entry: Entry) -> tuple[str, ...]:
        *row, trained, seconds = super()._row(entry)
        return *row, f"{entry.results[0].active_parameters:,}", trained, seconds


def _main(process: Run) -> dict:
    forms = process.recipe.forms
    for form in forms:
        process.all[0].check(form)

    def plan(stages: BudgetStages):
        yield "base", stages.base()
        for form in forms:
            copied = stages.upcycled if form == "ffn" else stages.loramoe
            yield DENSE[form], stages.dense(form)
            for start in STARTS:
                yield f"{COPIES[form]}_{start.upper()}", copied(start)
            yield f"Self-MoE ({NAMES[form]})", stages.self_moe(form)
            yield f"UpIT ({NAMES[form]})", stages.upit(form)

    entries = process.collect(plan)
    routed, sentences = _routing(process, entries)

    def summary(report: UpitReport) -> list[str]:
        lines = []
        for form in forms:
            copies = [f"{COPIES[form]}_{start.upper()}" for start in STARTS]
            others = [DENSE[form], *copies, f"Self-MoE ({NAMES[form]})"]
            lines += against(
                report.entries,
                f"UpIT ({NAMES[form]})",
                others,
            )
        return lines + sentences

    return {
        "entries": entries,
        "reference": DENSE[forms[0]],
        "summary": summary,
        "extra": routed,
    }


def _routing(process: Run, entries: Sequence[Entry]) -> tuple[dict, list[str]]:
    """Save the picture of the experts that the domains' tokens go to (Figure 5).

    Returns the report's extra fields, and sentences on how differently the domains are routed.
    """
    routed: dict[str, list[Routed]] = {}
    for entry in entries:
        if entry.name.startswith((*COPIES.values(), "UpIT")):
            pairs = zip(process.all, entry.results, strict=True)
            routed[entry.name] = [stages.routed(result) for stages, result in pairs]
    file = "main-routing.png"
    if process.is_main:
        title = "Experts that the domains' tokens go to (UpIT, Figure 5)"
        plots.save(domains.picture(title, routed), process.out / file)
    values = {}
    sentences = []
    for name, results in routed.items():
        distances = [domains.mean_distance(result.counts) for result in results]
        values[name] = {
            "layers": results[0].layers,
            "slots": [result.counts for result in results],
            "distance_between_domains": distances,
        }
        if len(results[0].counts) > 1:
            sentences.append(
                f"{name}: two domains' shares of the experts differ by "
                f"{statistics.fmean(distances):.3f} (total variation, 0 to 1)."
            )
    sentences.append(f"routing: {process.out / file}")
    return {"routing": values, "files": [file]}, sentences


def _check_ffn(recipe: UpitRecipe) -> dict:
    check_choice("form", "ffn", recipe.forms)
    return {}


COMMANDS = {
    "main": Command(
        "UpIT and its baselines", "UpIT, Table 1", _main, plots.dots, report=UpitReport
    ),
    "budget": Command(
        "Equal optimizer steps",
        "UpIT, Sec. 3.1",
        budget.make,
        plots.curves,
        _check_ffn,
        report=UpitReport,
    ),
}
run = functools.partial(tables.run, COMMANDS, BudgetStages)
