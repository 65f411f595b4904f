"""Make a paper's table by one command: a plan for every seed, and the resulting report, picture and
JSON.

methods/METHOD/tables.py has a Command per table; all share a folder of stages. An existing stage is
read instead of trained, whichever command made it, so a killed command resumes. The loss of a
method is its mean over the seeds; verdicts come only from `papers.engine.compare`.
"""

import math
import os
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import moe_runtime
from moe_runtime.config import check_choice, check_positive
from moe_runtime.io.files import atomic_write_json, read_json
from moe_runtime.io.rows import require
from papers.engine import plots
from papers.engine.compare import LEVEL, Comparison, compare, signed
from papers.engine.fairness import budget_of
from papers.engine.recipe import load_recipe

# fields that some results lack
OF_SOME = (
    "alpha",
    "general_loss",
    "trained_parameters",
    "optimizer_bytes",
    "experts",
    "validation",
)
UNEQUAL = "≠"  # a method with another budget than the reference
MARKS = {"lower": "-", "higher": "+"}  # than the reference's number, by the test


@dataclass(frozen=True)
class Entry:
    """One method of a table: a result per seed, in the order of the seeds."""

    name: str
    results: list

    @property
    def losses(self) -> list[float]:
        """Held-out loss per label token of each seed."""
        return [result.loss for result in self.results]

    @property
    def loss(self) -> float:
        """Mean over the seeds."""
        return statistics.fmean(self.losses)

    @property
    def sd(self) -> float:
        """Standard deviation over the seeds; NaN for one seed or a loss that is not finite."""
        losses = self.losses
        if len(losses) > 1 and all(map(math.isfinite, losses)):
            return statistics.stdev(losses)
        return math.nan

    @property
    def exact(self) -> float | None:
        """Share of the held-out examples with an exact match, mean over the seeds; None if a seed
        did not record it.
        """
        rates = [*map(exact_match, self.results)]
        return None if None in rates else statistics.fmean(rates)

    @property
    def perplexity(self) -> float:
        """exp(loss); infinite on overflow, NaN for a loss that is NaN."""
        return math.inf if self.loss > 700 else math.exp(self.loss)

    @property
    def seconds(self) -> float:
        """Seconds of training from the base to this model, over all stages; mean over the seeds."""
        return statistics.fmean(result.total_seconds for result in self.results)

    def mean_sd(self) -> str:
        """Return the loss as text, with its deviation if it has one."""
        if math.isnan(self.sd):
            return f"{self.loss:.4f}"
        return f"{self.loss:.4f} ± {self.sd:.4f}"

    def to_dict(self, seeds: Sequence[int]) -> dict:
        """Return the numbers of the entry and of every seed, JSON-ready after `finite`."""
        first = self.results[0]
        of_seeds = []
        for seed, result in zip(seeds, self.results, strict=True):
            of_seeds.append({"seed": seed, **_of_seed(result)})
        return {
            "name": self.name,
            "loss": self.loss,
            "loss_sd": self.sd,
            "perplexity": self.perplexity,
            "exact_match": self.exact,
            "parameters": first.parameters,
            "active_parameters": first.active_parameters,
            "train_seconds": self.seconds,
            "seeds": of_seeds,
        }


def _of_seed(result) -> dict:
    """Return the numbers of one result, without the rows' losses, which are in its own folder."""
    numbers = {"folder": "/".join(Path(result.folder).parts[-2:])}
    for name in ("loss", "steps", "seconds", "total_seconds", "steps_per_second", "history"):
        numbers[name] = getattr(result, name)
    for name in OF_SOME:
        if hasattr(result, name):
            numbers[name] = getattr(result, name)
    return numbers | {"exact_match": exact_match(result)}


def exact_match(result) -> float | None:
    """Return the share of the held-out examples for which greedy decoding gives the label; None if
    it is not recorded.
    """
    flags = getattr(result, "exact", None)
    return None if flags is None else statistics.fmean(flags)


@dataclass(kw_only=True)
class Finding:
    """Result of a command, ready to be printed, drawn and written."""

    command: str
    title: str
    source: str  # the paper and its table or figure
    settings: dict  # a run with other settings replaces this report only with `overwrite`
    seeds: tuple[int, ...]
    summary: list[str] = field(default_factory=list)

    def fairness(self) -> list[str]:
        """Return lines on what the compared models had besides their methods."""
        return []

    def to_dict(self) -> dict:
        """Return all fields as JSON-ready values."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return finite(values | {"environment": environment()})


@dataclass(kw_only=True)
class Report(Finding):
    """A table of methods: their losses over the seeds, and their comparison with one of them."""

    entries: list[Entry]
    reference: str
    extra: dict = field(default_factory=dict)

    def __post_init__(self):
        tokens = self.entries[0].results[0].tokens
        for entry in self.entries:
            for result in entry.results:
                if [*result.tokens] != [*tokens]:
                    raise ValueError(
                        "The methods are evaluated on different held-out examples. Use one recipe "
                        "for all"
                    )
        self.unequal = self._unequal()
        losses = by_seed(self.entries, "losses")
        self.comparisons: list[Comparison] = compare(losses, self.reference, tokens)
        exact = by_seed([entry for entry in self.entries if entry.exact is not None], "exact")
        self.exact_comparisons = []
        if self.reference in exact:
            self.exact_comparisons = compare(exact, self.reference)

    def _unequal(self) -> dict[str, str]:
        """Return method -> how its budget differs from the reference's, of the first seed."""
        budgets = {}
        for entry in self.entries:
            budgets[entry.name] = budget_of(Path(entry.results[0].folder).parent)
        reference = budgets[self.reference]
        unequal = {}
        for name, budget in budgets.items():
            # the base is not tuned, which needs no mark
            if budget and reference and budget.steps and budget != reference:
                unequal[name] = budget.against(reference)
        return unequal

    def fairness(self) -> list[str]:
        """Return a line for each budget that is not the reference's, with the methods that had
        it.
        """
        names: dict[str, list[str]] = {}
        for name, text in self.unequal.items():
            names.setdefault(text, []).append(name)
        lines = []
        for text, methods in names.items():
            listed = "; ".join(methods)
            lines.append(f"{UNEQUAL} {listed} had another budget than {self.reference}: {text}")
        return lines

    def entry(self, name: str) -> Entry:
        """Return the entry of that name."""
        return next(entry for entry in self.entries if entry.name == name)

    def comparison(self, name: str) -> Comparison | None:
        """Return a method's comparison with the reference; None for the reference itself."""
        return next((one for one in self.comparisons if one.name == name), None)

    def to_dict(self) -> dict:
        """Return all of the report as JSON-ready values."""
        tokens = self.entries[0].results[0].tokens
        return finite(
            {
                "command": self.command,
                "title": self.title,
                "source": self.source,
                "settings": self.settings,
                "reference": self.reference,
                "held_out_rows": len(tokens),
                "held_out_tokens": sum(tokens),
                "methods": [entry.to_dict(self.seeds) for entry in self.entries],
                "level": LEVEL,
                "comparisons": [*map(asdict, self.comparisons)],
                "exact_comparisons": [*map(asdict, self.exact_comparisons)],
                "summary": self.summary,
                "other_budgets": self.unequal,
                **self.extra,
                "environment": environment(),
            }
        )

    def columns(self) -> list[tuple[str, str]]:
        """Return the table's columns and their alignment."""
        exact = ("exact match",) * self.is_solved
        names = ("held-out loss", "perplexity", *exact, "parameters", "per token", "train s")
        columns = columns_of("method", *names, f"vs {self.reference}", "p")
        return [*columns, ("verdict", "left")]

    def rows(self) -> list[tuple[str, ...]]:
        """Return the table's rows as text, in the order of `columns`."""
        rows = []
        for entry in self.entries:
            name, *cells = self._row(entry)
            mark = f" {UNEQUAL}" if entry.name in self.unequal else ""
            rows.append((name + mark, *cells))
        return rows

    def _row(self, entry: Entry) -> tuple[str, ...]:
        first = entry.results[0]
        return (
            entry.name,
            entry.mean_sd(),
            f"{entry.perplexity:,.2f}",
            *(self.exact_cell(entry.name),) * self.is_solved,
            f"{first.parameters:,}",
            f"{first.active_parameters:,}",
            f"{entry.seconds:,.0f}",
            *compared(self.comparison(entry.name)),
        )

    @property
    def is_solved(self) -> bool:
        """Whether any model has an exact match."""
        return any(entry.exact for entry in self.entries)

    def exact_cell(self, name: str) -> str:
        """Return a method's share of exact matches as text, with the test's mark; empty if not
        recorded.
        """
        rate = self.entry(name).exact
        if rate is None:
            return ""
        cell = f"{rate:.3f}"
        for one in self.exact_comparisons:
            if one.name == name:
                cell += MARKS.get(one.verdict, "")
        return cell

    def exact_legend(self, zero: Sequence[str] = ()) -> str:
        """Return a line that explains exact matches, empty without any records; `zero` names parts
        that have none.
        """
        if all(entry.exact is None for entry in self.entries):
            return ""
        notes = []
        if self.is_solved:
            notes.append(f"- and +: lower and higher than {self.reference}'s by the same test")
        if zero:
            notes.append(f"0 on {', '.join(zero)}")
        return (
            "\n"
            "exact match: rows whose label tokens are all the most probable ones, as in greedy "
            f"decoding, of all; {'; '.join(notes)}."
        )

    def legend(self) -> str:
        """Return lines that explain the table's numbers."""
        tokens = self.entries[0].results[0].tokens
        zero = []
        if not self.is_solved:
            zero = ["all rows"]
        return (
            f"{len(tokens)} held-out rows, {sum(tokens):,} label tokens; {over_seeds(self.seeds)}; "
            "train s: all stages after the base, which has its own.\n"
            f"vs {self.reference}: difference of the losses with its {1 - LEVEL:.0%} interval; p: "
            f"Wilcoxon, corrected by Holm for {len(self.comparisons)} comparisons; both over the "
            "rows, and say nothing of other seeds." + self.exact_legend(zero)
        )


def columns_of(first: str, *names: str) -> list[tuple[str, str]]:
    """Return the columns of a table and their alignment: the first one to the left, all others to
    the right.
    """
    return [(first, "left"), *((name, "right") for name in names)]


def by_seed(entries: Iterable[Entry], name: str) -> dict[str, list]:
    """Return a field of the results of each entry."""
    values = {}
    for entry in entries:
        values[entry.name] = [getattr(result, name) for result in entry.results]
    return values


def compared(one: Comparison | None) -> tuple[str, str, str]:
    """Return a comparison's difference with its interval, its p-value and its verdict as text,
    empty if missing.
    """
    if one is None:
        return "", "", "reference"
    difference = ""
    if not math.isnan(one.difference):
        difference = signed(one.difference)
        if not math.isnan(one.low):
            difference += f" [{signed(one.low)}, {signed(one.high)}]"
    p = one.p_corrected
    if math.isnan(p):
        shown = ""
    elif p >= 0.001:
        shown = f"{p:.3f}"
    else:
        shown = f"{p:.1e}"
    return difference, shown, one.verdict


def over_seeds(seeds: Sequence[int]) -> str:
    """Return a phrase for the seeds of a table."""
    return f"mean ± sd over {len(seeds)} seeds" if len(seeds) > 1 else "one seed"


def spread(values: Sequence[float]) -> str:
    """Return the mean of some values as text, with their standard deviation if there are
    several.
    """
    mean = f"{statistics.fmean(values):.3f}"
    if len(values) == 1:
        return mean
    return f"{mean} ± {statistics.stdev(values):.3f}"


def environment() -> dict:
    """Return the date, machine and versions of a run."""
    values = moe_runtime.doctor()
    names = ("system", "packages", "devices", "settings", "backends")
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "moe_runtime": moe_runtime.__version__,
        **{name: values[name] for name in names},
        "load": os.getloadavg()[0],
    }


def finite(value):
    """Return JSON-ready values, with None for NaN and infinities, which JSON lacks."""
    if isinstance(value, dict):
        return dict(
            zip(
                map(str, value),
                map(finite, value.values()),
                strict=True,
            )
        )
    if isinstance(value, list | tuple):
        return [*map(finite, value)]
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def check_report(path: Path, settings: dict, overwrite: bool = False) -> None:
    """Raise ValueError if `path` holds a report with other settings, unless `overwrite`."""
    if overwrite or not path.exists():
        return
    old = read_json(path).get("settings")
    if old != settings:
        changed = _changed(old if isinstance(old, dict) else {}, settings)
        raise ValueError(
            f"{path.name} in {path.parent} was created with other settings ({', '.join(changed)}). "
            "Choose another folder or pass overwrite=True"
        )


def _changed(old: dict, new: dict, prefix: str = "") -> list[str]:
    """Name the keys in which two settings differ."""
    names = []
    for key in sorted({*old, *new}):
        a = old.get(key)
        b = new.get(key)
        if isinstance(a, dict) and isinstance(b, dict):
            names += _changed(a, b, f"{prefix}{key}.")
        elif a != b:
            names.append(f"{prefix}{key}")
    return names


class Run:
    """The seeds of a command, with their stages and progress output."""

    def __init__(
        self,
        stages: type,
        settings: dict,
        recipe,
        out: Path,
        seeds: Sequence[int],
        say: Callable[[str], None],
    ):
        self.settings = settings
        self.recipe = recipe
        self.out = out
        self.seeds = tuple(seeds)
        self.all = [stages(recipe, out, seed=seed, say=say) for seed in self.seeds]
        self.is_main = self.all[0].is_main
        self.say = self.all[0].say

    def collect(self, plan: Callable[[Any], Iterator[tuple[str, Any]]]) -> list[Entry]:
        """Run a plan, which yields names and results, for the stages of every seed; return an entry
        per name, in its order.
        """
        entries: dict[str, Entry] = {}
        count = len(self.all)
        for number, stages in enumerate(self.all, 1):
            for name, result in plan(stages):
                self.say(f"seed {number} of {count}: {name}, held-out loss {result.loss:.4f}")
                entries.setdefault(name, Entry(name, [])).results.append(result)
        return [*entries.values()]


class Command(NamedTuple):
    """The functions that make and draw a table."""

    title: str
    source: str  # the paper and its table or figure
    make: Callable  # (run, **options) -> dict of the report's fields that `run` below does not set
    draw: Callable  # (report) -> Figure
    check: Callable = lambda recipe: {}  # (recipe, **options) -> the options, checked, JSON-ready
    report: type = Report


def run(
    commands: Mapping[str, Command],
    stages: type,
    command: str,
    recipe="tiny",
    out: str | Path | None = None,
    *,
    seeds: int = 3,
    say: Callable[[str], None] = print,
    overwrite: bool = False,
    **options,
):
    """Run one of `commands`: train the stages missing in `out`, write OUT/<command>.json and .png,
    return the report.

    `recipe` is a recipe of the class `stages`, its file or its name; `out` defaults to runs/METHOD;
    `seeds` is the number of seeds, counted from the recipe's own. A report with other settings is
    replaced only with `overwrite`; stages never are. Raises ValueError before anything is trained.
    """
    check_choice("command", command, tuple(commands))
    recipe = load_recipe(stages.Recipe, recipe)
    check_positive("seeds", seeds)
    kind = commands[command]
    out = Path(out or f"runs/{recipe.method}")
    options = kind.check(recipe, **options)
    numbers = tuple(range(recipe.seed, recipe.seed + seeds))
    settings = finite({"recipe": recipe.to_dict(), "seeds": numbers, **options})
    path = out / f"{command}.json"
    check_report(path, settings, overwrite)
    require("scipy.stats", "train")  # fails before minutes of training
    require("matplotlib", "plot")
    process = Run(stages, settings, recipe, out, numbers, say)
    made = kind.make(process, **options)
    summary = made.pop("summary")
    report = kind.report(
        command=command,
        title=kind.title,
        source=kind.source,
        settings=settings,
        seeds=numbers,
        **made,
    )
    report.summary = [*report.fairness(), *summary(report)]
    if process.is_main:
        plots.save(kind.draw(report), path.with_suffix(".png"))
        atomic_write_json(path, report.to_dict())
    return report


def different(name: str, values: Sequence, check: Callable) -> tuple:
    """Return the values of an option, each checked; raises ValueError for an empty list and for
    duplicates.
    """
    values = tuple(values)
    if not values or len(set(values)) < len(values):
        listed = ", ".join(map(str, values)) or "none"
        raise ValueError(f"{name} must have one or more different values, but got {listed}")
    for value in values:
        check(value)
    return values


def each(report: Report) -> list[str]:
    """Return one sentence for every comparison."""
    return [*map("{}.".format, report.comparisons)]


def against(entries: Sequence[Entry], reference: str, names: Sequence[str]) -> list[str]:
    """Return sentences that compare the methods `names` with `reference` instead of the table's
    own.
    """
    losses = by_seed([entry for entry in entries if entry.name in (reference, *names)], "losses")
    return [
        f"{one}."
        for one in compare(
            losses,
            reference,
            entries[0].results[0].tokens,
        )
    ]


def best(names: Iterable[str]) -> Callable[[Report], list[str]]:
    """Return a summary function that names the lowest loss of a sweep, and those below the
    reference by the test.
    """

    def summary(report: Report) -> list[str]:
        entries = [*map(report.entry, names)]
        lowest = min(entries, key=lambda entry: entry.loss)
        below = []
        for entry in entries:
            if report.comparison(entry.name).verdict == "lower":
                below.append(entry.name)
        return [
            f"Lowest of the sweep: {lowest.name}, {lowest.loss:.4f}; not tested against the "
            "others.",
            f"Lower than {report.reference} by the test: {', '.join(below) or 'none of them'}.",
        ]

    return summary
