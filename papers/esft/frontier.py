"""ESFT's frontier: how much of general text each method forgets by the time all have learned a task
equally well.

Each method is tuned on the task's rows alone, at several learning rates, and evaluated along the
way. At point i its task loss is t_i and the loss of general row r is g_i[r]. Where the task loss
first reaches t, `depth` below the base's, row r has loss

    g[r] = (1 - w) g_{i-1}[r] + w g_i[r]
    w = (t_{i-1} - t) / (t_{i-1} - t_i),  t_{i-1} > t >= t_i

All runs take the same number of steps. For each depth, validation rows choose among a method's
rates that reach it with every seed; the table, its significance tests and the picture use held-out
rows.
"""

import functools
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

from moe_runtime.config import check_number
from moe_runtime.hf.training import fit as trainers
from moe_runtime.io import rows as data
from moe_runtime.methods.esft.runs import EsftTraining
from papers.engine import plots
from papers.engine.compare import LEVEL, compare
from papers.engine.domains import places_of
from papers.engine.tables import (
    MARKS,
    Command,
    Entry,
    Finding,
    Run,
    columns_of,
    compared,
    different,
    finite,
    over_seeds,
)
from papers.esft.recipe import EsftRecipe
from papers.esft.results import FFT, GATE, LORA, RANDOM, TOKEN
from papers.esft.study import GENERAL, EsftStages

FACTORS = (0.1, 0.3, 1.0)
DEPTHS = (0.12, 0.15, 0.18)
KINDS = ("validation", "held_out")


class Course(NamedTuple):
    """A training run on one task, evaluated along the way; the tuned model is not saved."""

    name: str
    folder: Path
    rate: float
    loss: float  # on the task's held-out rows at the end, like `exact`
    exact: list[int]
    total_seconds: float
    trained_parameters: int
    # (step, part -> losses of its rows), from step 0 on; parts: task- and general-validation and
    # -held_out
    history: list
    tokens: dict[str, list[int]]  # part -> label tokens of its rows

    def means(self, part: str) -> list[float]:
        """Return the loss per label token of a part at every point."""
        tokens = self.tokens[part]
        return [trainers.mean_loss(losses[part], tokens) for _, losses in self.history]

    def at(self, depth: float, kind: str) -> list[float] | None:
        """Return the general rows' losses where the task loss is first `depth` below the base's;
        None if it never is.
        """
        task = self.means(f"task-{kind}")
        level = task[0] - depth
        for i, loss in enumerate(task):
            if loss <= level:
                w = (task[i - 1] - level) / (task[i - 1] - loss)
                (_, before), (_, after) = self.history[i - 1 : i + 1]
                part = f"{GENERAL}-{kind}"
                pairs = zip(before[part], after[part], strict=True)
                return [(1 - w) * a + w * b for a, b in pairs]
        return None


class Courses(EsftStages):
    """The stages of a study at `factor` times its learning rates, tuned on a task's rows alone,
    each returning a Course.
    """

    def __init__(self, stages: EsftStages, factor: float):
        vars(self).update(vars(stages))
        r = stages.recipe
        rates = {
            "fft": r.fft,
            "lora__training": r.lora.training,
            "esft": r.esft,
        }
        self.recipe = r.change(
            **{f"{of}__learning_rate": factor * one.learning_rate for of, one in rates.items()}
        )

    def _tuned(
        self,
        kind: str,
        task: str,
        training: EsftTraining,
        make,
        save,
        *,
        parents=(),
        more: Mapping = {},
        dtype: str | None = None,
    ) -> Course:
        base = self.base()
        training = training.change(keep_best=False)
        parts = {}
        for part in KINDS:
            parts[f"task-{part}"] = self.part(f"{task}-{part}")
            parts[f"{GENERAL}-{part}"] = self.part(f"{GENERAL}-{part}")
        places = places_of({of: len(part) for of, part in parts.items()})
        rows = data.require("datasets").concatenate_datasets(list(parts.values()))
        end = places["task-held_out"]
        name = f"{kind} {task}, rate {training.learning_rate:g}"

        def whole(tmp: Path, checkpoints: Path) -> dict:
            model, _ = make(self._load(base.folder, dtype=dtype))
            first, tokens, _ = trainers.row_losses(
                model,
                rows,
                self.tokenizer,
                batch_size=self._batch,
                bf16=training.bf16,
            )
            trained = self._train(
                name,
                model,
                self.part(f"{task}-train"),
                rows,
                training,
                checkpoints,
            )
            points = (0, first), *trained.history.rows
            return {
                "rate": training.learning_rate,
                "loss": trainers.mean_loss(trained.losses[end], tokens[end]),
                "exact": trained.exact[end],
                "steps": trained.steps,
                "seconds": trained.history.seconds,
                "trained_parameters": trained.trained_parameters,
                "tokens": {of: tokens[at] for of, at in places.items()},
                "history": [
                    (step, {of: losses[at] for of, at in places.items()}) for step, losses in points
                ],
            }

        settings = self._settings(training) | {"task": task} | dict(more)
        return self._stage(
            f"course-{kind}",
            name,
            settings,
            [base, *parents],
            whole,
            holds=".",
            result=Course,
        )


def general_at(entry: Entry, depth: float, kind: str = "held_out") -> float:
    """Return a run's general loss per label token at `depth`, mean over the seeds; infinite unless
    all reach it.
    """
    rows = [course.at(depth, kind) for course in entry.results]
    if None in rows:
        return math.inf
    tokens = entry.results[0].tokens[f"{GENERAL}-{kind}"]
    return statistics.fmean(trainers.mean_loss(losses, tokens) for losses in rows)


def curve(entry: Entry) -> list[tuple[float, ...]]:
    """Return a run's points (step, task loss, general loss), means over the seeds."""
    histories = []
    for one in entry.results:
        steps = [step for step, _ in one.history]
        histories.append([steps, one.means("task-held_out"), one.means(f"{GENERAL}-held_out")])
    means = []
    for columns in zip(*histories, strict=True):
        means.append(map(statistics.fmean, zip(*columns, strict=True)))
    return [*zip(*means, strict=True)]


@dataclass(kw_only=True)
class Frontier(Finding):
    """General losses at equal task losses: a row for each method and learning rate."""

    task: str
    depths: tuple[float, ...]
    ladders: dict[str, list[Entry]]  # method -> its runs, one for each rate

    def __post_init__(self):
        self.chosen: dict[float, dict[str, Entry]] = {}
        self.comparisons = {}
        tokens = self.ladders[TOKEN][0].results[0].tokens[f"{GENERAL}-held_out"]
        for depth in self.depths:
            chosen = {}
            losses = {}
            for name, ladder in self.ladders.items():
                entry = _by_validation(ladder, depth)
                if entry is not None:
                    chosen[name] = entry
                    losses[name] = [course.at(depth, "held_out") for course in entry.results]
            self.chosen[depth] = chosen
            self.comparisons[depth] = []
            if TOKEN in losses:
                self.comparisons[depth] = compare(losses, TOKEN, tokens)

    def shown(self, name: str) -> Entry:
        """Return a method's run for the deepest level that both it and ESFT-Token reached, else the
        run of its first rate.
        """
        shown = self.ladders[name][0]
        for chosen in self.chosen.values():
            if {TOKEN, name} <= chosen.keys():
                shown = chosen[name]
        return shown

    def columns(self) -> list[tuple[str, str]]:
        """Return the table's columns and how they are aligned."""
        depths = map("-{:g}".format, self.depths)
        return columns_of("method", "rate", "trained", *depths, "task", "exact match", "general")

    def rows(self) -> list[tuple[str, ...]]:
        """Return the table's rows as text, in the order of `columns`."""
        rows = []
        for name, ladder in self.ladders.items():
            for entry in ladder:
                first = entry.results[0]
                _, task, general = curve(entry)[-1]
                row = [name, f"{first.rate:g}", f"{first.trained_parameters:,}"]
                for depth in self.depths:
                    row.append(self._cell(name, entry, depth))
                row += [f"{task:.4f}", f"{entry.exact:.3f}", f"{general:.4f}"]
                rows.append(tuple(row))
        return rows

    def _cell(self, name: str, entry: Entry, depth: float) -> str:
        loss = general_at(entry, depth)
        if not math.isfinite(loss):
            return ""
        cell = f"{loss:.4f}"
        if self.chosen[depth].get(name) is entry:
            cell += "*"
            for one in self.comparisons[depth]:
                if one.name == name:
                    cell += MARKS.get(one.verdict, "")
        return cell

    def legend(self) -> str:
        """Return what the table's numbers are, in lines."""
        first = self.ladders[TOKEN][0].results[0]
        task = _described(first, "task-held_out")
        general = _described(first, f"{GENERAL}-held_out")
        return (
            f"{self.task}: {task}; general text: {general}; loss per label token; "
            f"{over_seeds(self.seeds).replace(' ± sd', '')}.\n"
            "-d: general loss where the task loss is first d below the base's; *: the rate that "
            "validation rows choose; - and\n"
            f"+: lower and higher than {TOKEN}'s by Wilcoxon over the rows (level {LEVEL:g}, "
            "corrected by Holm for a column).\n"
            "task, exact match, general: at the end of the training."
        )

    def to_dict(self) -> dict:
        """Return all of the report as JSON-ready values."""
        ladders: dict[str, dict] = {}
        for name, ladder in self.ladders.items():
            ladders[name] = {}
            for entry in ladder:
                general = [general_at(entry, depth) for depth in self.depths]
                ladders[name][f"{entry.results[0].rate:g}"] = [curve(entry), general]
        comparisons = {f"{d:g}": [*map(asdict, them)] for d, them in self.comparisons.items()}
        return super().to_dict() | finite({"ladders": ladders, "comparisons": comparisons})


def _by_validation(ladder: Sequence[Entry], depth: float) -> Entry | None:
    """Return the run that the validation rows choose among those that reach `depth`."""
    reaching = []
    for entry in ladder:
        if math.isfinite(general_at(entry, depth)):
            reaching.append((general_at(entry, depth, "validation"), len(reaching), entry))
    loss, _, entry = min(reaching, default=(math.inf, 0, None))
    return entry if math.isfinite(loss) else None


def _described(course: Course, part: str) -> str:
    return f"{len(course.tokens[part])} held-out rows, base {course.means(part)[0]:.4f}"


def summary(report: Frontier) -> list[str]:
    """Return a line per depth that compares the methods with ESFT-Token, each at the rate chosen
    for that depth.
    """
    lines = []
    for depth, them in report.comparisons.items():
        each = "; ".join(f"{one.name} {compared(one)[0]}, {one.verdict}" for one in them)
        where = f"At {depth:g} below the base's task loss"
        lines.append(f"{where}, general loss against {TOKEN}: {each or 'no comparison'}.")
    return lines


def _frontier(process: Run, factors: Sequence[float], depths: Sequence[float]) -> dict:
    task = next(iter(process.recipe.tasks))
    rank = process.recipe.lora.rank
    makes: dict[str, Callable] = {
        TOKEN: lambda at: at.esft(task, at.selection(task, "token")),
        GATE: lambda at: at.esft(task, at.selection(task, "gate")),
        RANDOM.format(TOKEN): lambda at: at.esft(
            task,
            at.drawn(task, "token"),
            scored=False,
        ),
    }
    for one in (rank, max(rank // 2, 1)):
        makes[f"{LORA}, rank {one}"] = lambda at, one=one: at.lora(task, one)
    makes[FFT] = lambda at: at.fft(task)

    def plan(stages: EsftStages) -> Iterator[tuple[str, Course]]:
        for name, make in makes.items():
            for factor in factors:
                yield f"{name} x {factor:g}", make(Courses(stages, factor))

    ladders: dict[str, list[Entry]] = {}
    for entry in process.collect(plan):
        ladders.setdefault(entry.name.rpartition(" x ")[0], []).append(entry)
    return {"task": task, "depths": depths, "ladders": ladders, "summary": summary}


def picture(report: Frontier):
    """Plot general loss against task loss along the runs, means over the seeds: each method's
    chosen rate, others faint.
    """
    figure, axes = plots.figure_of(report, (7.6, 6.0))
    rises = []
    looks = plots.cycle(len(report.ladders))
    for (name, ladder), (colour, marker) in zip(report.ladders.items(), looks, strict=True):
        for entry in ladder:
            _, task, general = zip(*curve(entry), strict=True)
            if entry is report.shown(name):
                label = f"{name}, rate {entry.results[0].rate:g}"
                axes.plot(
                    task,
                    general,
                    marker,
                    color=colour,
                    ls="-",
                    ms=5,
                    label=label,
                    zorder=3,
                )
                rises.append(max(general) - general[0])
            else:
                axes.plot(
                    task,
                    general,
                    color=colour,
                    alpha=0.35,
                    linewidth=0.9,
                )
    for depth in report.depths:
        axes.axvline(
            task[0] - depth,
            color=plots.GREY,
            linestyle=":",
            linewidth=1,
            zorder=1,
        )
    # one that forgets far more would flatten the others
    top = max(3 * statistics.median(rises), 0.01)
    axes.set_ylim(general[0] - 0.1 * top, general[0] + top)
    axes.invert_xaxis()
    axes.set_xlabel(f"task loss, {report.task} (lower is better; tuning moves right)")
    axes.set_ylabel("general loss (lower is better)")
    axes.grid()
    over = f"held-out examples, mean of {len(report.seeds)} seed{'s' * (len(report.seeds) > 1)}"
    about = f"{over}; faint: other rates; dotted: levels; lines may leave at the top"
    plots.legend_below(figure, axes, about)
    return figure


def _check(
    recipe: EsftRecipe, factors: Sequence[float] = FACTORS, depths: Sequence[float] = DEPTHS
) -> dict:
    for name, values in (("factor", factors), ("depth", depths)):
        different(
            name,
            values,
            functools.partial(check_number, name, positive=True),
        )
    return {"factors": sorted(factors), "depths": sorted(depths)}


COMMANDS = {
    "frontier": Command(
        "Forgetting at equal task loss", "ESFT, Sec. 5", _frontier, picture, _check, Frontier
    )
}
