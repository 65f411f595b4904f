"""The tables and figures of the ESFT paper (arXiv 2407.01906), one command each, on the stages of
`study`.

    main            base, FFT, LoRA, ESFT-Token, ESFT-Gate           Tables 1 and 2, Figure 5
    sweep-p         ESFT by p, LoRA by rank                          Figure 6
    shared-grid     which modules train: all, relevant, shared, ...  Table 3
    random-experts  as many experts, drawn at random                 Table 4
    group-size      coarser experts                                  Figure 7
    mix-data        with and without general data                    Tables 9 and 10
    other-tasks     tuned on one task, judged on the others          Table 8
    frontier        general losses at equal task losses              not in the paper (frontier)
    counts, overlap, sample-size                                     Figures 2, 3, 4, 8, 9 (figures)

The measure is the held-out loss per label token, on the tasks and on general text, in place of the
paper's benchmarks. A table also shows what was trained and at what cost.
"""

import functools
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property

from moe_runtime.config import check_choice, check_number, check_positive
from moe_runtime.hf.training.ranks import routing_of
from moe_runtime.methods import esft
from moe_runtime.methods.esft.selection import SCORES, check_p
from papers.engine import plots, tables
from papers.engine.compare import LEVEL, compare
from papers.engine.tables import (
    Command,
    Entry,
    Report,
    Run,
    best,
    compared,
    different,
    each,
    finite,
    over_seeds,
)
from papers.esft import figures, frontier
from papers.esft.recipe import EsftRecipe
from papers.esft.results import BASE, FFT, GATE, LORA, TOKEN, Tuned, join
from papers.esft.study import Stages

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
        entries = [Entry(entry.name, list(map(part, entry.results))) for entry in self.entries]
        names = ("command", "title", "source", "settings", "seeds", "reference")
        return kind(entries=entries, **{name: getattr(self, name) for name in names})

    @property
    def solved(self) -> tuple[str, ...]:
        """The tasks with at least one exact match by any model; only these have a column of exact
        matches.
        """
        return tuple(task for task, table in self.of_tasks.items() if table.is_solved)

    @property
    def both(self) -> tuple:
        """The two tables, by what they are evaluated on."""
        return ("On the tasks", self), ("On general text", self.general)

    @property
    def tasks(self) -> tuple[str, ...]:
        """The tasks' names."""
        return tuple(self.entries[0].results[0].tasks)

    def to_dict(self) -> dict:
        """Return all of the report as JSON-ready values."""
        values = super().to_dict()
        for method, entry in zip(values["methods"], self.entries, strict=True):
            general = self.general.entry(entry.name)
            method |= {"general_loss": general.loss, "general_loss_sd": general.sd}
            method |= {
                name: _mean(entry, name) for name in ("trained_parameters", "optimizer_bytes")
            }
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
        own, general = (
            (name, f"vs {self.reference}", "p", "verdict") for name in ("all tasks", "general")
        )
        exact = (f"exact {task}" for task in self.solved[:MANY])
        names = (
            "method",
            *tasks,
            *exact,
            *own,
            *general,
            "trained",
            "share",
            "optimizer MB",
            "train s",
        )
        return [(name, "left" if name in ("method", "verdict") else "right") for name in names]

    def _row(self, entry: Entry) -> tuple[str, ...]:
        tasks = self.tasks if 1 < len(self.tasks) <= MANY else ()
        general = self.general.entry(entry.name)
        first = entry.results[0]
        trained = _mean(entry, "trained_parameters")
        memory = _mean(entry, "optimizer_bytes") / 1e6
        costs = (
            f"{trained:,.0f}",
            f"{trained / first.parameters:.1%}",
            f"{memory:,.2f}",
            f"{entry.seconds:,.0f}",
        )
        losses = (f"{self.of_tasks[task].entry(entry.name).loss:.4f}" for task in tasks)
        exact = (self.of_tasks[task].exact_cell(entry.name) for task in self.solved[:MANY])
        own = *losses, *exact, entry.mean_sd(), *compared(self.comparison(entry.name))
        others = general.mean_sd(), *compared(self.general.comparison(entry.name))
        return entry.name, *own, *others, *(costs if trained else ("", "", "", ""))

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
            f"Wilcoxon over the rows, corrected by Holm for the {len(self.comparisons)} "
            "comparisons of a column."
            + self.exact_legend([task for task in self.tasks if task not in self.solved])
        )


def _general(result):
    """Return a result with the general rows in place of the task's."""
    values = {of: getattr(result, f"general_{of}") for of in ("loss", "losses", "tokens", "exact")}
    return result._replace(**values)


def _of_task(result) -> dict:
    names = (
        "loss",
        "steps",
        "seconds",
        "total_seconds",
        "trained_parameters",
        "optimizer_bytes",
        "experts",
        "history",
    )
    exact = {"exact_match": tables.exact_match(result)}
    return (
        {"folder": "/".join(result.folder.parts[-2:])}
        | {name: getattr(result, name) for name in names}
        | exact
    )


def _mean(entry: Entry, name: str) -> float:
    return statistics.fmean(getattr(result, name) for result in entry.results)


PS = (0.05, 0.1, 0.2, 0.4)
GROUP_SIZES = (1, 2, 4)
RATIOS = (0.0, 1.0)
OF_SCORE = {"token": TOKEN, "gate": GATE}
# Table 3, in its order: which routed experts train, whether shared ones do, whether everything else
# does
GRID = {
    "all experts, shared, others": ("all", True, True),
    "relevant, shared": ("relevant", True, False),
    "relevant": ("relevant", False, False),
    "shared": ("none", True, False),
    "shared, others": ("none", True, True),
    "relevant, shared, others": ("relevant", True, True),
    "nothing (base)": ("none", False, False),
}


def _over(stages: Stages, name: str, make: Callable[[str], Tuned]) -> tuple[str, Tuned]:
    """Return a method's name and its result over all tasks of the recipe."""
    return name, join(name, {task: make(task) for task in stages.recipe.tasks})


def _esft(
    stages: Stages, score: str, name: str | None = None, p: float | None = None, **settings
) -> tuple[str, Tuned]:
    def make(task: str) -> Tuned:
        selection = stages.selection(task, score, p, settings.get("group_size", 1))
        return stages.esft(task, selection, **settings)

    return _over(stages, name or OF_SCORE[score], make)


def _main(process: Run) -> dict:
    def plan(stages: Stages):
        yield BASE, stages.base()
        yield _over(stages, FFT, stages.fft)
        yield _over(stages, LORA, stages.lora)
        yield _esft(stages, "token")
        yield _esft(stages, "gate")

    def summary(report: EsftReport) -> list[str]:
        lines = [
            f"{where}, {of.comparison(name)}."
            for where, of in report.both
            for name in (LORA, TOKEN, GATE)
        ]
        return [*lines, *(_cost(report, name) for name in (LORA, TOKEN, GATE))]

    return {"entries": process.collect(plan), "reference": FFT, "summary": summary}


def _cost(report: EsftReport, name: str) -> str:
    """Return a sentence on what a method trains, relative to FFT; seconds depend on what else the
    machine did.
    """
    (fft, one) = (report.entry(of).results for of in (FFT, name))
    share = {
        of: sum(getattr(r, of) for r in one) / sum(getattr(r, of) for r in fft)
        for of in ("trained_parameters", "optimizer_bytes")
    }
    return (
        f"{name} trained {share['trained_parameters']:.1%} of FFT's parameters, with "
        f"{share['optimizer_bytes']:.1%} of the optimizer's bytes."
    )


def _sweep_p(
    process: Run, ps: Sequence[float], scores: Sequence[str], ranks: Sequence[int]
) -> dict:
    names = {(score, p): f"{OF_SCORE[score]}, p {p:g}" for score in scores for p in ps}
    loras = {rank: f"{LORA}, rank {rank}" for rank in ranks}

    def plan(stages: Stages):
        yield BASE, stages.base()
        yield _over(stages, FFT, stages.fft)
        for (score, p), name in names.items():
            yield _esft(stages, score, name, p)
        for rank, name in loras.items():
            yield _over(stages, name, lambda task, rank=rank: stages.lora(task, rank))

    entries = process.collect(plan)
    swept = [*names.values(), *loras.values()]
    shares = {
        entry.name: [100 * r.trained_parameters / r.parameters for r in entry.results]
        for entry in entries
    }
    share = {name: sum(of) / len(of) for name, of in shares.items() if name in swept}
    extra = {"x": share, "x_label": "parameters that are trained, % of the base's", "x_log": True}
    return {"entries": entries, "reference": FFT, "summary": best(swept), "extra": extra}


def _shared_grid(process: Run, score: str) -> dict:
    def result(stages: Stages, experts: str, shared: bool, others: bool, task: str) -> Tuned:
        if experts == "all":
            return stages.fft(task)
        selection = stages.selection(task, score, shared_experts=shared, non_expert_modules=others)
        if experts == "none":
            selection = esft.ExpertSelection(
                experts={}, shared_experts=shared, non_expert_modules=others
            )
        return stages.esft(task, selection, scored=experts == "relevant")

    def plan(stages: Stages):
        for name, (experts, shared, others) in GRID.items():
            if not (shared or others or experts != "none"):
                yield name, stages.base()
                continue
            row = experts, shared, others
            yield _over(stages, name, lambda task, row=row: result(stages, *row, task))

    def summary(report: EsftReport) -> list[str]:
        return [f"{where}, {one}" for where, of in report.both for one in each(of)]

    return {"entries": process.collect(plan), "reference": "relevant", "summary": summary}


def _random_experts(process: Run) -> dict:
    drawn = {score: f"{name}, random experts" for score, name in OF_SCORE.items()}

    def plan(stages: Stages):
        yield BASE, stages.base()
        for score, name in drawn.items():
            yield _esft(stages, score)
            yield _over(
                stages,
                name,
                lambda task, score=score: stages.esft(
                    task, stages.drawn(task, score), scored=False
                ),
            )

    def summary(report: EsftReport) -> list[str]:
        tokens = report.entries[0].results[0].tokens
        lines = []
        for score, name in drawn.items():
            pair = {
                of: [r.losses for r in report.entry(of).results] for of in (OF_SCORE[score], name)
            }
            lines += [f"{one}." for one in compare(pair, OF_SCORE[score], tokens)]
        return lines

    return {"entries": process.collect(plan), "reference": GATE, "summary": summary}


def _group_size(process: Run, sizes: Sequence[int]) -> dict:
    names = {
        (method, size): f"{method}, groups of {size}"
        for size in sizes
        for method in (FFT, TOKEN, GATE)
    }

    def plan(stages: Stages):
        for size in sizes:
            yield _over(
                stages, names[FFT, size], lambda task, size=size: stages.fft(task, group_size=size)
            )
            for score, method in OF_SCORE.items():
                yield _esft(stages, score, names[method, size], group_size=size)

    def summary(report: EsftReport) -> list[str]:
        low = min(sizes)
        high = max(sizes)
        losses = {name: report.entry(name).loss for name in names.values()}
        change = {
            method: losses[names[method, high]] - losses[names[method, low]]
            for method in (FFT, TOKEN, GATE)
        }
        return [
            f"{method}: {value:+.4f} from groups of {low} to groups of {high}."
            for method, value in change.items()
        ]

    extra = {
        "x": {name: size for (_, size), name in names.items()},
        "x_label": "experts of a group",
    }
    return {
        "entries": process.collect(plan),
        "reference": names[FFT, sizes[0]],
        "summary": summary,
        "extra": extra,
    }


def _mix_data(process: Run, ratios: Sequence[float]) -> dict:
    names = {
        (method, mix): f"{method}, mix {mix:g}"
        for method in (FFT, LORA, TOKEN, GATE)
        for mix in ratios
    }

    def plan(stages: Stages):
        for (method, mix), name in names.items():
            if method in (FFT, LORA):
                make = stages.fft if method == FFT else stages.lora
                yield _over(stages, name, lambda task, make=make, mix=mix: make(task, mix=mix))
            else:
                yield _esft(stages, method.rpartition("-")[2].lower(), name, mix=mix)

    def summary(report: EsftReport) -> list[str]:
        lines = []
        for method in (FFT, LORA, TOKEN, GATE):
            first, last = (names[method, mix] for mix in (min(ratios), max(ratios)))
            change = [
                table.entry(last).loss - table.entry(first).loss
                for table in (report, report.general)
            ]
            lines.append(
                f"{method}, from mix {min(ratios):g} to {max(ratios):g}: {change[0]:+.4f} on the "
                f"tasks, {change[1]:+.4f} on general text."
            )
        return lines

    extra = {
        "x": {name: mix for (_, mix), name in names.items()},
        "x_label": "rows of general text per row of the task",
    }
    return {
        "entries": process.collect(plan),
        "reference": names[FFT, ratios[0]],
        "summary": summary,
        "extra": extra,
    }


def _other_tasks(process: Run, mix: float) -> dict:
    def plan(stages: Stages):
        base = stages.base()
        yield _over(stages, BASE, lambda task: stages.elsewhere(base.tasks[task], task))
        for name, make in ((FFT, stages.fft), (LORA, stages.lora)):
            yield _over(
                stages, name, lambda task, make=make: stages.elsewhere(make(task, mix=mix), task)
            )
        for score, name in OF_SCORE.items():
            chosen = {task: stages.selection(task, score) for task in stages.recipe.tasks}
            yield _over(
                stages,
                name,
                lambda task, of=chosen: stages.elsewhere(
                    stages.esft(task, of[task], mix=mix), task
                ),
            )

    return {"entries": process.collect(plan), "reference": BASE, "summary": each}


def _check_other_tasks(recipe: EsftRecipe, mix: float = 0.0) -> dict:
    if len(recipe.tasks) < 2:
        raise ValueError(
            "other-tasks requires at least two tasks, but the recipe has only "
            f"{', '.join(recipe.tasks)}"
        )
    check_number("mix", mix)
    return {"mix": float(mix)}


@dataclass(kw_only=True)
class OtherTasksReport(EsftReport):
    """A table of models evaluated on the tasks that they were not tuned on."""

    label = "loss per label token of the other tasks (lower is better)"

    def legend(self) -> str:
        """Return what the table's numbers are, in lines."""
        return (
            "Models tuned on one task each; a task's column and `all tasks`: on the others' "
            "rows.\n"
            f"{super().legend()}"
        )


def _check_sweep(
    recipe: EsftRecipe,
    ps: Sequence[float] = PS,
    score: str = "both",
    ranks: Sequence[int] | None = None,
) -> dict:
    check_choice("score", score, (*SCORES, "both"))
    if ranks is None:
        ranks = sorted({1, recipe.lora.rank, 4 * recipe.lora.rank})
    ps = different("p", map(float, ps), check_p)
    ranks = different("rank", ranks, lambda rank: check_positive("rank", rank)) if ranks else ()
    return {"ps": ps, "scores": ("token", "gate") if score == "both" else (score,), "ranks": ranks}


def _check_grid(recipe: EsftRecipe, score: str = "token") -> dict:
    check_choice("score", score, SCORES)
    return {"score": score}


def _check_groups(recipe: EsftRecipe, sizes: Sequence[int] | None = None) -> dict:
    """Check the given sizes; by default return those of GROUP_SIZES that divide the base's numbers
    of experts.
    """
    small = recipe.pretrain
    E, K = (small.num_experts, small.top_k) if small else routing_of(recipe.base_model)

    def fits(size: int) -> bool:
        return not ((K or 0) % size or (E or 0) % size)

    if sizes is not None:
        sizes = different("group_size", sizes, lambda size: check_positive("group_size", size))
    bad = [size for size in sizes or () if not fits(size)]
    if bad:
        raise ValueError(
            f"group_size must divide num_experts ({E}) and top_k ({K}), but got {bad[0]}"
        )
    return {"sizes": sizes or tuple(filter(fits, GROUP_SIZES))}


def _check_mix(recipe: EsftRecipe, ratios: Sequence[float] = RATIOS) -> dict:
    return {"ratios": different("mix", map(float, ratios), lambda mix: check_number("mix", mix))}


def _losses(
    title: str,
    source: str,
    make: Callable,
    draw: Callable = plots.dots,
    check: Callable | None = None,
) -> Command:
    return Command(title, f"ESFT, {source}", make, draw, check or (lambda recipe: {}), EsftReport)


COMMANDS = {
    "main": _losses("ESFT and its baselines", "Tables 1 and 2", _main),
    "sweep-p": _losses("How much is trained", "Figure 6", _sweep_p, plots.sweep, _check_sweep),
    "shared-grid": _losses("Which modules train", "Table 3", _shared_grid, check=_check_grid),
    "random-experts": _losses("Relevant and random experts", "Table 4", _random_experts),
    "group-size": _losses("Coarser experts", "Figure 7", _group_size, plots.sweep, _check_groups),
    "mix-data": _losses(
        "General data mixed in", "Tables 9 and 10", _mix_data, plots.sweep, _check_mix
    ),
    "other-tasks": _losses(
        "Tuned on one task, judged on the others", "Table 8", _other_tasks, check=_check_other_tasks
    )._replace(report=OtherTasksReport),
    **figures.COMMANDS,
    **frontier.COMMANDS,
}
run = functools.partial(tables.run, COMMANDS, Stages)
