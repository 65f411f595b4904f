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
from papers.engine.recipe import load_recipe

# fields that some results lack
OF_SOME = ("alpha", "general_loss", "trained_parameters", "optimizer_bytes", "experts")
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
        rates = []
        for result in self.results:
            rates.append(exact_match(result))
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
        return f"{self.loss:.4f}" + ("" if math.isnan(self.sd) else f" ± {self.sd:.4f}")

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
    names = ("loss", "steps", "seconds", "total_seconds", "steps_per_second", "history", *OF_SOME)
    known = {}
    for name in names:
        if hasattr(result, name):
            known[name] = getattr(result, name)
    return (
        {"folder": "/".join(Path(result.folder).parts[-2:])}
        | known
        | {"exact_match": exact_match(result)}
    )


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

    def to_dict(self) -> dict:
        """Return all fields as JSON-ready values."""
        return finite(
            {f.name: getattr(self, f.name) for f in fields(self)} | {"environment": environment()}
        )


@dataclass(kw_only=True)
class Report(Finding):
    """A table of methods: their losses over the seeds, and their comparison with one of them."""

    entries: list[Entry]
    reference: str
    extra: dict = field(default_factory=dict)

    def __post_init__(self):
        tokens = self.entries[0].results[0].tokens
        if any(
            list(result.tokens) != list(tokens)
            for entry in self.entries
            for result in entry.results
        ):
            raise ValueError(
                "The methods are evaluated on different held-out examples. Use one recipe for all"
            )
        losses = {}
        for entry in self.entries:
            losses[entry.name] = [result.losses for result in entry.results]
        self.comparisons: list[Comparison] = compare(losses, self.reference, tokens)
        exact = {}
        for entry in self.entries:
            if entry.exact is not None:
                exact[entry.name] = [result.exact for result in entry.results]
        self.exact_comparisons = compare(exact, self.reference) if self.reference in exact else []

    def entry(self, name: str) -> Entry:
        """Return the entry of that name."""
        return next(entry for entry in self.entries if entry.name == name)

    def comparison(self, name: str) -> Comparison | None:
        """Return a method's comparison with the reference; None for the reference itself."""
        return next((one for one in self.comparisons if one.name == name), None)

    def to_dict(self) -> dict:
        """Return all of the report as JSON-ready values."""
        return finite(
            {
                "command": self.command,
                "title": self.title,
                "source": self.source,
                "settings": self.settings,
                "reference": self.reference,
                "held_out_rows": len(self.entries[0].results[0].tokens),
                "held_out_tokens": sum(self.entries[0].results[0].tokens),
                "methods": [entry.to_dict(self.seeds) for entry in self.entries],
                "level": LEVEL,
                "comparisons": [asdict(one) for one in self.comparisons],
                "exact_comparisons": [asdict(one) for one in self.exact_comparisons],
                "summary": self.summary,
                **self.extra,
                "environment": environment(),
            }
        )

    def columns(self) -> list[tuple[str, str]]:
        """Return the table's columns and their alignment."""
        exact = ("exact match",) * self.is_solved
        names = (
            "held-out loss",
            "perplexity",
            *exact,
            "parameters",
            "per token",
            "train s",
            f"vs {self.reference}",
            "p",
        )
        return [("method", "left"), *((name, "right") for name in names), ("verdict", "left")]

    def rows(self) -> list[tuple[str, ...]]:
        """Return the table's rows as text, in the order of `columns`."""
        rows = []
        for entry in self.entries:
            rows.append(self._row(entry))
        return rows

    def _row(self, entry: Entry) -> tuple[str, ...]:
        one = self.comparison(entry.name)
        first = entry.results[0]
        numbers = (
            entry.mean_sd(),
            f"{entry.perplexity:,.2f}",
            *(self.exact_cell(entry.name),) * self.is_solved,
            f"{first.parameters:,}",
            f"{first.active_parameters:,}",
            f"{entry.seconds:,.0f}",
        )
        return entry.name, *numbers, *compared(one)

    @property
    def is_solved(self) -> bool:
        """Whether any model has an exact match."""
        return any(entry.exact for entry in self.entries)

    def exact_cell(self, name: str) -> str:
        """Return a method's share of exact matches as text, with the test's mark; empty if not
        recorded.
        """
        rate = self.entry(name).exact
        verdicts = []
        for one in self.exact_comparisons:
            if one.name == name:
                verdicts.append(one.verdict)
        if rate is None:
            return ""
        return f"{rate:.3f}" + "".join(MARKS.get(verdict, "") for verdict in verdicts)

    def exact_legend(self, zero: Sequence[str] = ()) -> str:
        """Return a line that explains exact matches, empty without any records; `zero` names parts
        that have none.
        """
        if all(entry.exact is None for entry in self.entries):
            return ""
        if self.is_solved:
            marks = f"- and +: lower and higher than {self.reference}'s by the same test"
        else:
            marks = ""
        notes = "; ".join(filter(None, (marks, f"0 on {', '.join(zero)}" if zero else "")))
        return (
            "\n"
            "exact match: rows whose label tokens are all the most probable ones, as in greedy "
            f"decoding, of all; {notes}."
        )

    def legend(self) -> str:
        """Return lines that explain the table's numbers."""
        rows = len(self.entries[0].results[0].tokens)
        tokens = sum(self.entries[0].results[0].tokens)
        return (
            f"{rows} held-out rows, {tokens:,} label tokens; {over_seeds(self.seeds)}; train s: "
            "all stages after the base, which has its own.\n"
            f"vs {self.reference}: difference of the losses with its {1 - LEVEL:.0%} interval; p: "
            f"Wilcoxon over the rows, corrected by Holm for {len(self.comparisons)} comparisons."
            + self.exact_legend([] if self.is_solved else ["all rows"])
        )


def compared(one: Comparison | None) -> tuple[str, str, str]:
    """Return a comparison's difference with its interval, its p-value and its verdict as text,
    empty if missing.
    """
    if one is None:
        return "", "", "reference"
    interval = "" if math.isnan(one.low) else f" [{signed(one.low)}, {signed(one.high)}]"
    p = one.p_corrected
    return (
        "" if math.isnan(one.difference) else signed(one.difference) + interval,
        "" if math.isnan(p) else f"{p:.3f}" if p >= 0.001 else f"{p:.1e}",
        one.verdict,
    )


def over_seeds(seeds: Sequence[int]) -> str:
    """Return a phrase for the seeds of a table."""
    return f"mean ± sd over {len(seeds)} seeds" if len(seeds) > 1 else "one seed"


def spread(values: Sequence[float]) -> str:
    """Return the mean of some values as text, with their standard deviation if there are
    several.
    """
    sd = f" ± {statistics.stdev(values):.3f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.3f}{sd}"


def verdict(report: Report, name: str) -> str:
    """Return a sentence or two on whether the method `name` is better than the report's
    reference.
    """
    one = report.comparison(name)
    if one.verdict == "lower":
        return f"{name} gained. {one}."
    if one.verdict == "higher":
        return f"{name} did not help here: its loss is higher. {one}."
    return f"{name} shows no gain here. {one}."


def environment() -> dict:
    """Return the date, machine and versions of a run."""
    values = moe_runtime.doctor()
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "moe_runtime": moe_runtime.__version__,
        **{
            name: values[name] for name in ("system", "packages", "devices", "settings", "backends")
        },
        "load": os.getloadavg()[0],
    }


def finite(value):
    """Return JSON-ready values, with None for NaN and infinities, which JSON lacks."""
    if isinstance(value, dict):
        result = {}
        for key, one in value.items():
            result[str(key)] = finite(one)
        return result
    if isinstance(value, list | tuple):
        return [finite(one) for one in value]
    if isinstance(value, Path):
        return str(value)
    return None if isinstance(value, float) and not math.isfinite(value) else value


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
        self.settings, self.recipe, self.out, self.seeds = settings, recipe, out, tuple(seeds)
        self.all = [stages(recipe, out, seed=seed, say=say) for seed in self.seeds]
        self.is_main = self.all[0].is_main
        self.say = say if self.is_main else lambda text: None

    def collect(self, plan: Callable[[Any], Iterator[tuple[str, Any]]]) -> list[Entry]:
        """Run a plan, which yields names and results, for the stages of every seed; return an entry
        per name, in its order.
        """
        found: dict[str, list] = {}
        for number, stages in enumerate(self.all, 1):
            for name, result in plan(stages):
                self.say(
                    f"seed {number} of {len(self.all)}: {name}, held-out loss {result.loss:.4f}"
                )
                found.setdefault(name, []).append(result)
        collect = []
        for name, results in found.items():
            collect.append(Entry(name, results))
        return collect


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
    out = Path("runs", recipe.method) if out is None else out
    kind = commands[command]
    out = Path(out)
    options = kind.check(recipe, **options)
    seeds = tuple(range(recipe.seed, recipe.seed + seeds))
    settings = finite({"recipe": recipe.to_dict(), "seeds": seeds, **options})
    path = out / f"{command}.json"
    check_report(path, settings, overwrite)
    for module, extra in (("scipy.stats", "train"), ("matplotlib", "plot")):
        require(module, extra)  # fails before minutes of training
    process = Run(stages, settings, recipe, out, seeds, say)
    made = kind.make(process, **options)
    summary = made.pop("summary")
    report = kind.report(
        command=command,
        title=kind.title,
        source=kind.source,
        settings=settings,
        seeds=seeds,
        **made,
    )
    report.summary = summary(report)
    if process.is_main:
        plots.save(kind.draw(report), path.with_suffix(".png"))
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic_write_json(path, report.to_dict())
    return report


def different(name: str, values: Sequence, check: Callable) -> tuple:
    """Return the values of an option, each checked; raises ValueError for an empty list and for
    duplicates.
    """
    values = tuple(values)
    if not values or len(set(values)) < len(values):
        raise ValueError(
            f"{name} must have one or more different values, but got "
            f"{', '.join(map(str, values)) or 'none'}"
        )
    for value in values:
        check(value)
    return values


def each(report: Report) -> list[str]:
    """Return one sentence for every comparison."""
    return [f"{one}." for one in report.comparisons]


def against(entries: Sequence[Entry], reference: str, names: Sequence[str]) -> list[str]:
    """Return sentences that compare the methods `names` with `reference` instead of the table's
    own.
    """
    losses = {}
    for entry in entries:
        losses[entry.name] = [result.losses for result in entry.results]
    tokens = entries[0].results[0].tokens
    sentences = []
    for one in compare({name: losses[name] for name in (reference, *names)}, reference, tokens):
        sentences.append(f"{one}.")
    return sentences


def best(names: Iterable[str]) -> Callable[[Report], list[str]]:
    """Return a summary function that names the lowest loss of a sweep, and those below the
    reference by the test.
    """

    def summary(report: Report) -> list[str]:
        losses = {}
        for name in names:
            losses[name] = report.entry(name).loss
        lowest = min(losses, key=losses.__getitem__)
        below = []
        for name in losses:
            if report.comparison(name).verdict == "lower":
                below.append(name)
        found = ", ".join(below) if below else "none of them"
        return [
            f"Lowest of the sweep: {lowest}, {losses[lowest]:.4f}; not tested against the others.",
            f"Lower than {report.reference} by the test: {found}.",
        ]

    return summary
