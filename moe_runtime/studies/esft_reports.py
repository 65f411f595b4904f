"""What a table of ESFT says beside the losses on the tasks: losses on general text, what was trained, what it cost."""

import math
import statistics
from dataclasses import asdict, dataclass
from functools import cached_property

from moe_runtime.significance import LEVEL
from moe_runtime.studies.reports import Entry, Report, difference_of, finite, p_of

MANY = 3  # tasks beyond that have no columns of their own


@dataclass
class GeneralReport(Report):
    """The same methods, judged on general text."""

    label = "general loss per label token (lower is better)"


@dataclass
class EsftReport(Report):
    """A table of methods that were each tuned on every task; its losses are over the held-out rows of all tasks."""

    label = "loss per label token of the tasks (lower is better)"

    @cached_property
    def general(self) -> Report:
        """The same table on general text."""
        entries = [Entry(entry.name, list(map(_general, entry.results))) for entry in self.entries]
        names = ("command", "title", "source", "settings", "seeds", "reference")
        return GeneralReport(entries=entries, **{name: getattr(self, name) for name in names})

    @property
    def tasks(self) -> tuple[str, ...]:
        """The tasks' names."""
        return tuple(self.entries[0].results[0].tasks)

    def task_loss(self, entry: Entry, task: str) -> float:
        """Return a method's loss on one task, the mean over the seeds."""
        return statistics.fmean(result.tasks[task].loss for result in entry.results)

    def to_dict(self) -> dict:
        """Return all of the report as JSON-ready values."""
        values = super().to_dict()
        for method, entry in zip(values["methods"], self.entries, strict=True):
            general = self.general.entry(entry.name)
            method |= {"general_loss": general.loss, "general_loss_sd": general.sd}
            method |= {name: _mean(entry, name) for name in ("trained_parameters", "optimizer_bytes")}
            for seed, result in zip(method["seeds"], entry.results, strict=True):
                del seed["folder"]  # of the first task alone
                seed["tasks"] = {task: _of_task(one) for task, one in result.tasks.items()}
        values |= {
            "tasks": self.tasks,
            "general_rows": len(self.entries[0].results[0].general_tokens),
            "general_tokens": sum(self.entries[0].results[0].general_tokens),
            "general_comparisons": [asdict(one) for one in self.general.comparisons],
        }
        return finite(values)

    def columns(self) -> list[tuple[str, str]]:
        """Return the table's columns and how they are aligned."""
        tasks = self.tasks if 1 < len(self.tasks) <= MANY else ()
        own = ("all tasks", f"vs {self.reference}", "p")
        general = ("general", f"vs {self.reference}", "p")
        costs = ("trained", "share", "optimizer MB", "train s")
        right = [(name, "right") for name in (*tasks, *own)]
        return [
            ("method", "left"), *right, ("verdict", "left"), *((name, "right") for name in general), ("verdict", "left"),
            *((name, "right") for name in costs),
        ]  # fmt: skip

    def _row(self, entry: Entry) -> tuple[str, ...]:
        tasks = self.tasks if 1 < len(self.tasks) <= MANY else ()
        general, first = self.general.entry(entry.name), entry.results[0]
        trained = _mean(entry, "trained_parameters")
        costs = (
            f"{trained:,.0f}", f"{trained / first.parameters:.1%}", f"{_mean(entry, 'optimizer_bytes') / 1e6:,.2f}",
            f"{entry.seconds:,.0f}",
        )  # fmt: skip
        return (
            entry.name,
            *(f"{self.task_loss(entry, task):.4f}" for task in tasks),
            *_compared(entry, self),
            *_compared(general, self.general),
            *(costs if trained else ("", "", "", "")),
        )

    def legend(self) -> str:
        """Return what the table's numbers are, in lines."""
        result = self.entries[0].results[0]
        over = f"mean ± sd over {len(self.seeds)} seeds" if len(self.seeds) > 1 else "one seed"
        return (
            f"{len(result.tokens)} held-out rows of the tasks {', '.join(self.tasks)}, {sum(result.tokens):,} label tokens; "
            f"{len(result.general_tokens)} rows of general text, {sum(result.general_tokens):,}; {over}.\n"
            f"A model per task; trained, optimizer and train s are means over them; train s: scoring and tuning.\n"
            f"vs {self.reference}: difference of the losses with its {1 - LEVEL:.0%} interval; p: Wilcoxon over the rows, "
            f"corrected by Holm for the {len(self.comparisons)} comparisons of a column."
        )


def _general(result):
    """A result as if the general rows were those it is judged by."""
    values = {of: getattr(result, f"general_{of}") for of in ("loss", "losses", "tokens")}
    return result._replace(**values)


def _compared(entry: Entry, report: Report) -> tuple[str, str, str, str]:
    sd = "" if math.isnan(entry.sd) else f" ± {entry.sd:.4f}"
    one = report.comparison(entry.name)
    if one is None:
        return f"{entry.loss:.4f}{sd}", "", "", "reference"
    return f"{entry.loss:.4f}{sd}", difference_of(one), p_of(one.p_corrected), one.verdict


def _of_task(result) -> dict:
    names = ("loss", "steps", "seconds", "total_seconds", "trained_parameters", "optimizer_bytes", "experts", "history")
    return {"folder": "/".join(result.folder.parts[-2:])} | {name: getattr(result, name) for name in names}


def _mean(entry: Entry, name: str) -> float:
    return statistics.fmean(getattr(result, name) for result in entry.results)
