"""What the commands of every paper's tables share: their options, and how a table is made, printed and found again."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

Preset = Annotated[str | None, typer.Option(help="A shipped recipe; tiny unless given, minutes on two cores.")]
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
) -> None:  # fmt: skip
    """Make a table with a method's `run`, print it and say where it lies."""
    from moe_runtime.config import check_choice

    if recipe is None:
        preset = preset or "tiny"
        check_choice("preset", preset, tuple(presets))
    start = time.perf_counter()

    def say(text: str) -> None:
        print(f"[{time.perf_counter() - start:4.0f} s] {text}", flush=True)

    report = run(command, recipe or preset, out, seeds=seeds, say=say, overwrite=overwrite, **options)
    if int(os.environ.get("RANK", 0)) == 0:
        show(report, Path(out))


def prepare(preset: str | None, recipe: Path | None) -> None:
    """Refuse two recipes, and take one GPU, before torch looks."""
    if preset is not None and recipe is not None:
        raise ValueError(f"preset is {preset!r}, recipe is {str(recipe)!r}; want one of the two")
    if "LOCAL_RANK" not in os.environ:
        # one GPU is enough, and Trainer would spread a single process over all that it sees
        os.environ.setdefault("CUDA_VISIBLE_DEVICES", "0")


def show(report, out: Path) -> None:
    """Print the table and what it says."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{report.title} ({report.source})")
    for name, justify in report.columns():
        table.add_column(name, justify=justify, no_wrap=True)
    for row in report.rows():
        table.add_row(*row)
    Console(width=400).print(table)  # a narrow terminal folds lines; cut numbers would be lost
    for line in (report.legend(), *report.summary):
        print(line)
    print(f"numbers: {out / report.command}.json   picture: {out / report.command}.png")
