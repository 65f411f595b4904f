"""How a paper's table is made by one command: its plan for every seed, what it says, its picture, its JSON.

A method's own file (xft_tables, esft_tables) has a Command per table, and its stages in a folder that all commands share. A
stage that is there already is read, not trained, whichever command made it; so a command that was killed goes on.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from moe_runtime.config import check_choice, check_positive
from moe_runtime.data import require
from moe_runtime.studies import pictures
from moe_runtime.studies.reports import Entry, Report, check_report, finite, write_report


class Run:
    """The seeds of a command: the stages of each, and what is said on the way."""

    def __init__(
        self, stages: type, settings: dict, recipe, out: Path, seeds: Sequence[int], say: Callable[[str], None]
    ):
        self.settings, self.recipe, self.out, self.seeds = settings, recipe, out, tuple(seeds)
        self.all = [stages(recipe, out, seed=seed, say=say) for seed in self.seeds]
        self.is_main = self.all[0].is_main
        self.say = say if self.is_main else lambda text: None

    def collect(self, plan: Callable[[Any], Iterator[tuple[str, Any]]]) -> list[Entry]:
        """Run a plan, which yields names and results, for the stages of every seed; return an entry per name, in its order."""
        found: dict[str, list] = {}
        for number, stages in enumerate(self.all, 1):
            for name, result in plan(stages):
                self.say(f"seed {number} of {len(self.all)}: {name}, held-out loss {result.loss:.4f}")
                found.setdefault(name, []).append(result)
        return [Entry(name, results) for name, results in found.items()]


class Command(NamedTuple):
    """How a table is made and drawn."""

    title: str
    source: str  # the paper and its table or figure
    make: Callable  # (run, **options) -> dict of the report's fields but those that `run` below gives
    draw: Callable  # (report) -> Figure
    check: Callable = lambda recipe: {}  # (recipe, **options) -> the options, checked, JSON-ready
    report: type = Report


def run(
    commands: Mapping[str, Command],
    stages: type,
    load: Callable,
    command: str,
    recipe,
    out: str | Path,
    *,
    seeds: int,
    say: Callable[[str], None],
    overwrite: bool,
    **options,
):
    """Make one of `commands`: train what `out` has not yet, write OUT/<command>.json and .png, return the report.

    `recipe` is a recipe or what `load` takes; the seeds are `seeds` in a row from the recipe's own. A report with other
    settings is replaced with `overwrite` only; stages are never. Raises ValueError before anything is trained.
    """
    check_choice("command", command, tuple(commands))
    recipe = load(recipe) if isinstance(recipe, str | Path) else recipe
    check_positive("seeds", seeds)
    kind, out = commands[command], Path(out)
    if out.exists() and not out.is_dir():
        raise ValueError(f"out is {out}, which is a file; want a folder")
    options = kind.check(recipe, **options)
    seeds = tuple(range(recipe.seed, recipe.seed + seeds))
    settings = finite({"recipe": recipe.to_dict(), "seeds": seeds, **options})
    path = out / f"{command}.json"
    check_report(path, settings, overwrite)
    for module, extra in (("scipy.stats", "train"), ("matplotlib", "plot")):
        require(module, extra)  # now, not after minutes of training
    process = Run(stages, settings, recipe, out, seeds, say)
    made = kind.make(process, **options)
    summary = made.pop("summary")
    report = kind.report(command=command, title=kind.title, source=kind.source, settings=settings, seeds=seeds, **made)
    report.summary = summary(report)
    if process.is_main:
        pictures.save(kind.draw(report), path.with_suffix(".png"))
        write_report(path, report.to_dict())
    return report


def each(report: Report) -> list[str]:
    """Say one sentence for every comparison."""
    return [f"{one}." for one in report.comparisons]


def best(names: Iterable[str]) -> Callable[[Report], list[str]]:
    """Return what names the lowest of a sweep, and those of it that the test found below the reference."""

    def summary(report: Report) -> list[str]:
        losses = {name: report.entry(name).loss for name in names}
        lowest = min(losses, key=losses.__getitem__)
        below = [name for name in losses if report.comparison(name).verdict == "lower"]
        found = ", ".join(below) if below else "none of them"
        return [
            f"Lowest of the sweep: {lowest}, {losses[lowest]:.4f}; not tested against the others.",
            f"Lower than {report.reference} by the test: {found}.",
        ]

    return summary
