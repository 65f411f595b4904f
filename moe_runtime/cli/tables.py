"""What the commands of every paper's tables share: their options, and how a table is made, printed and found again."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from moe_runtime.cli.verbs import GoesOn, choices, recipes
from moe_runtime.io import console
from moe_runtime.io.console import print_table

KEPT = GoesOn(what="the stages that are done are kept in {}")  # of a verb that makes a table


def preset_of(method: str):
    """Return the type of a method's option --preset."""
    found = choices(recipes(method))
    return Annotated[
        str | None,
        typer.Option(help="A shipped recipe; tiny unless given, minutes on two cores.", autocompletion=found),
    ]


RecipeFile = Annotated[
    Path | None, typer.Option("--recipe", help="A recipe's YAML file, for your own model and data.", show_default=False)
]
Out = Annotated[Path, typer.Option(help="Folder of the stages, which commands share, and of the tables and pictures.")]
Seeds = Annotated[int, typer.Option(help="How many seeds; the rows and the base are the same for all.")]
Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="Replace this table's report if it was made with other settings.")
]


def table(
    run: Callable, presets: list[str], command: str, preset: str | None, recipe: Path | None, out: Path, seeds: int,
    overwrite: bool, **options,
) -> dict:  # fmt: skip
    """Make a table with a method's `run`, print it and say where it lies; return its report and its files."""
    from moe_runtime.config import check_choice

    if recipe is None:
        preset = preset or "tiny"
        check_choice("preset", preset, tuple(presets))
    start = time.perf_counter()

    def say(text: str) -> None:
        print(f"[{time.perf_counter() - start:4.0f} s] {text}", flush=True)

    report = run(command, recipe or preset, out, seeds=seeds, say=say, overwrite=overwrite, **options)
    if console.is_main():
        show(report, Path(out))
    return report.to_dict() | {"files": [Path(out) / f"{command}.json", Path(out) / f"{command}.png"]}


def prepare(preset: str | None, recipe: Path | None) -> None:
    """Refuse two recipes, and take one GPU, before torch looks."""
    if preset is not None and recipe is not None:
        raise ValueError(f"preset is {preset!r}, recipe is {str(recipe)!r}; want one of the two")
    if "LOCAL_RANK" not in os.environ:
        # one GPU is enough, and Trainer would spread a single process over all that it sees
        os.environ.setdefault("CUDA_VISIBLE_DEVICES", "0")


def show(report, out: Path) -> None:
    """Print the table and what it says."""
    print_table(f"{report.title} ({report.source})", report.columns(), report.rows(), width=400)
    for line in (report.legend(), *report.summary):
        print(line)
    print(f"numbers: {out / report.command}.json   picture: {out / report.command}.png")
