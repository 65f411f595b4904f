"""The tables of ESFT (arXiv 2407.01906), one command each, on the stages of `study`.

    main        base, FFT, LoRA, ESFT-Token, ESFT-Gate,   Tables 1 and 2, Figure 5
                and as many random experts as either
    frontier    general losses at equal task losses,      not in the paper (see `frontier`)
                random experts included
    counts      the experts that a selection trains       Figures 2 and 4 (see `counts`)

The measure is the held-out loss per label token, on the tasks and on general text, in place of the
paper's benchmarks. A table also shows what was trained and at what cost.
"""

import functools
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cached_property

from papers.engine import plots, tables
from papers.engine.compare import LEVEL
from papers.engine.tables import Command, Entry, Report, Run, against, compared, finite, over_seeds
from papers.esft import counts, frontier
from papers.esft.results import BASE, FFT, GATE, LORA, RANDOM, TOKEN, join
from papers.esft.study import EsftStages

MANY = 3  # with more tasks than this, tasks have no columns of their own


@dataclass(kw_only=True)
class GeneralReport(Report):
    """The same methods, evaluated on general text."""

    label = "general loss per label token (lower is better)"


@dataclass(kw_only=True)
class EsftReport(Report):
    """A table of methods that were each tuned on every task; its losses are over the held-out rows
    of all tasks.
    """

    label = "loss per label token of the tasks (lower is better)"

    @cached_property
    def general(self) -> Report:
        """The same table on general text."""
        return self._of(_general, GeneralReport)

    @cached_property
    def of_tasks(self) -> dict[str, Report]:
        """The same table on each task."""
        return {
            task: self._of(lambda result, task=task: result.tasks[task], Report)
            for task in self.tasks
        }

    def _of(self, part: Callable, kind: type[Report]) -> Report:
        entries = []
        for entry in self.entries:
            entries.append(Entry(entry.name, list(map(part, entry.results))))
        names = ("command", "title", "source", "settings", "seeds", "reference")
        return kind(entries=entries, **{name: getattr(self, name) for name in names})

    @property
    def solved(self) -> tuple[str, ...]:
        """The tasks with at least one exact match by any model; only these have a column of exact
        matches.
        """
        return tuple(task for task, table in self.of_tasks.items() if table.is_solved)

    @property
    def tasks(self) -> tuple[str, ...]:
        """The tasks' names."""
        return tuple(self.entries[0].results[0].tasks)

    def to_dict(self) -> dict:
        """Return all of the report as JSON-ready values."""
        values = super().to_dict()
        for method, entry in zip(values["methods"], self.entries, strict=True):
            general = self.general.entry(entry.name)
            method["general_loss"] = general.loss
            method["general_loss_sd"] = general.sd
            for name in ("trained_parameters", "optimizer_bytes"):
                method[name] = _mean(entry, name)
            for seed, result in zip(method["seeds"], entry.results, strict=True):
                del seed["folder"]  # of the first task alone
                seed["tasks"] = {task: _of_task(one) for task, one in result.tasks.items()}
        tokens = self.entries[0].results[0].general_tokens
        values |= {
            "tasks": self.tasks,
            "general_rows": len(tokens),
            "general_tokens": sum(tokens),
            "general_comparisons": [*map(asdict, self.general.comparisons)],
        }
        return finite(values)

    def columns(self) -> list[tuple[str, str]]:
        """Return the table's columns and how they are aligned."""
        compared = (f"vs {self.reference}", "p", "verdict")
        names = ["method"]
        if 1 < len(self.tasks) <= MANY:
            names += self.tasks
        names += [f"exact {task}" for task in self.solved[:MANY]]
        names += ["all tasks", *compared, "general", *compared]
        names += ["trained", "share", "optimizer MB", "train s"]
        columns = []
        for name in names:
            columns.append((name, "left" if name in ("method", "verdict") else "right"))
        return columns

    def _row(self, entry: Entry) -> tuple[str, ...]:
        tasks = self.tasks if 1 < len(self.tasks) <= MANY else ()
        general = self.general.entry(entry.name)
        trained = _mean(entry, "trained_parameters")
        costs = ("", "", "", "")
        if trained:
            costs = (
                f"{trained:,.0f}",
                f"{trained / entry.results[0].parameters:.1%}",
                f"{_mean(entry, 'optimizer_bytes') / 1e6:,.2f}",
                f"{entry.seconds:,.0f}",
            )
        return (
            entry.name,
            *(f"{self.of_tasks[task].entry(entry.name).loss:.4f}" for task in tasks),
            *(self.of_tasks[task].exact_cell(entry.name) for task in self.solved[:MANY]),
            entry.mean_sd(),
            *compared(self.comparison(entry.name)),
            general.mean_sd(),
            *compared(self.general.comparison(entry.name)),
            *costs,
        )

    def legend(self) -> str:
        """Return what the table's numbers are, in lines."""
        result = self.entries[0].results[0]
        return (
            f"{len(result.tokens)} held-out rows of the tasks {', '.join(self.tasks)}, "
            f"{sum(result.tokens):,} label tokens; {len(result.general_tokens)} rows of general "
            f"text, {sum(result.general_tokens):,}; {over_seeds(self.seeds)}.\n"
            "A model per task; trained, optimizer and train s are means over them; train s: "
            "scoring and tuning.\n"
            f"vs {self.reference}: difference of the losses with its {1 - LEVEL:.0%} interval; p: "
            f"Wilcoxon; both over the rows; p corrected by Holm for the {len(self.comparisons)} "
            "comparisons of a column."
            + self.exact_legend([task for task in self.tasks if task not in self.solved])
        )


def _general(result):
    """Return a result with the general rows in place of the task's."""
    return result._replace(
        loss=result.general_loss,
        losses=result.general_losses,
        tokens=result.general_tokens,
        exact=result.general_exact,
    )


def _of_task(result) -> dict:
    return {
        "folder": "/".join(result.folder.parts[-2:]),
        "loss": result.loss,
        "steps": result.steps,
        "seconds": result.seconds,
        "total_seconds": result.total_seconds,
        "trained_parameters": result.trained_parameters,
        "optimizer_bytes": result.optimizer_bytes,
        "experts": result.experts,
        "history": result.history,
        "exact_match": tables.exact_match(result),
    }


def _mean(entry: Entry, name: str) -> float:
    return statistics.fmean(getattr(result, name) for result in entry.results)


OF_SCORE = {"token": TOKEN, "gate": GATE}


def _main(process: Run) -> dict:
    def plan(stages: EsftStages):
        tasks = stages.recipe.tasks
        yield BASE, stages.base()
        yield FFT, join(FFT, {task: stages.fft(task) for task in tasks})
        yield LORA, join(LORA, {task: stages.lora(task) for task in tasks})
        for score, name in OF_SCORE.items():
            tuned = {task: stages.esft(task, stages.selection(task, score)) for task in tasks}
            yield name, join(name, tuned)
            control = RANDOM.format(name)
            drawn = {}
            for task in tasks:
                drawn[task] = stages.esft(task, stages.drawn(task, score), scored=False)
            yield control, join(control, drawn)

    def summary(report: EsftReport) -> list[str]:
        lines = []
        for where, table in (("On the tasks", report), ("On general text", report.general)):
            for name in (LORA, TOKEN, GATE):
                lines.append(f"{where}, {table.comparison(name)}.")
            for name in (TOKEN, GATE):
                lines += against(table.entries, RANDOM.format(name), [name])
        for task in report.tasks:
            for score in OF_SCORE:
                lines.append(process.all[0].selected(task, score))
        return lines + [_cost(report, name) for name in (LORA, TOKEN, GATE)]

    return {"entries": process.collect(plan), "reference": FFT, "summary": summary}


def _cost(report: EsftReport, name: str) -> str:
    """Return a sentence on what a method trains, relative to FFT."""
    parameters = _mean(report.entry(name), "trained_parameters")
    optimizer = _mean(report.entry(name), "optimizer_bytes")
    fft = report.entry(FFT)
    return (
        f"{name} trained {parameters / _mean(fft, 'trained_parameters'):.1%} of FFT's parameters, "
        f"with {optimizer / _mean(fft, 'optimizer_bytes'):.1%} of the optimizer's bytes."
    )


COMMANDS = {
    "main": Command(
        "ESFT and its baselines", "ESFT, Tables 1 and 2", _main, plots.dots, report=EsftReport
    ),
    **counts.COMMANDS,
    **frontier.COMMANDS,
}
run = functools.partial(tables.run, COMMANDS, EsftStages)
