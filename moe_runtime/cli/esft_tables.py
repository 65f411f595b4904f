"""moe-runtime esft: the ESFT paper's tables and figures, one command each; beside the verbs of the method itself."""

from pathlib import Path
from typing import Annotated

import typer

from moe_runtime.cli.tables import KEPT, Out, Overwrite, RecipeFile, Seeds, prepare, preset_of, table
from moe_runtime.cli.verbs import choices, verb

Preset = preset_of("esft")
OUT = Path("runs/esft")
ScoreOf = Annotated[str, typer.Option(help="gate or token.", autocompletion=choices("gate", "token"))]
Top = Annotated[int, typer.Option(help="Experts of a layer that are compared.")]

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None)


def _without_options(command: str, what: str) -> None:
    """Add a table's verb that has only the options which all have."""

    def run(
        preset: Preset = None, recipe: RecipeFile = None, out: Out = OUT, seeds: Seeds = 3, overwrite: Overwrite = False
    ):
        return _table(command, preset, recipe, out, seeds, overwrite)

    verb(app, command, help=what, example=f"moe-runtime esft {command} --seeds 3", kept=KEPT)(run)


_without_options(
    "main", "Compare base, FFT, LoRA, ESFT-Token and ESFT-Gate, on tasks and general text (Tables 1 and 2)."
)
_without_options("random-experts", "Compare the selected experts with as many drawn ones (Table 4).")
_without_options(
    "counts", "Show the experts that each task's selection trains, and where in text (Figures 2, 4 and 9)."
)


@verb(app, example="moe-runtime esft sweep-p .05 .1 .2 .4 --score gate --rank 2 --rank 8", kept=KEPT)
def sweep_p(
    ps: Annotated[list[float] | None, typer.Argument(help="Thresholds; .05 .1 .2 .4 unless given.")] = None,
    score: Annotated[str, typer.Option(help="gate, token or both.", autocompletion=choices("gate", "token", "both"))] = "both",
    rank: Annotated[
        list[int] | None, typer.Option(help="A rank of LoRA, as often as you like; 1, the recipe's and 4 times it.")
    ] = None,
    preset: Preset = None, recipe: RecipeFile = None, out: Out = OUT, seeds: Seeds = 3, overwrite: Overwrite = False,
):  # fmt: skip
    """Train more and more: ESFT by p, LoRA by rank (Figure 6)."""
    given = ({"ps": ps} if ps else {}) | ({"ranks": rank} if rank else {})
    return _table("sweep-p", preset, recipe, out, seeds, overwrite, score=score, **given)


@verb(app, example="moe-runtime esft shared-grid --score token", kept=KEPT)
def shared_grid(
    score: ScoreOf = "token",
    preset: Preset = None, recipe: RecipeFile = None, out: Out = OUT, seeds: Seeds = 3, overwrite: Overwrite = False,
):  # fmt: skip
    """Train relevant experts, shared experts and all that is no expert, in seven combinations (Table 3)."""
    return _table("shared-grid", preset, recipe, out, seeds, overwrite, score=score)


@verb(app, example="moe-runtime esft group-size 1 2 4", kept=KEPT)
def group_size(
    sizes: Annotated[list[int] | None, typer.Argument(help="Experts of a group; 1 2 4 unless given.")] = None,
    preset: Preset = None, recipe: RecipeFile = None, out: Out = OUT, seeds: Seeds = 3, overwrite: Overwrite = False,
):  # fmt: skip
    """Route by groups of experts, as if the experts were coarser, and tune with FFT and ESFT (Figure 7)."""
    return _table("group-size", preset, recipe, out, seeds, overwrite, **({"sizes": sizes} if sizes else {}))


@verb(app, example="moe-runtime esft sample-size 1024 8192 --top 6", kept=KEPT)
def sample_size(
    sizes: Annotated[list[int] | None, typer.Argument(help="Tokens of a sample; powers of two unless given.")] = None,
    top: Top = 6,
    score: ScoreOf = "gate",
    preset: Preset = None, recipe: RecipeFile = None, out: Out = OUT, seeds: Seeds = 3, overwrite: Overwrite = False,
):  # fmt: skip
    """Show how much text finds the same experts again (Figure 8)."""
    given = {"sizes": sizes} if sizes else {}
    return _table("sample-size", preset, recipe, out, seeds, overwrite, top=top, score=score, **given)


@verb(app, example="moe-runtime esft overlap --top 6", kept=KEPT)
def overlap(
    top: Top = 6,
    score: ScoreOf = "gate",
    preset: Preset = None, recipe: RecipeFile = None, out: Out = OUT, seeds: Seeds = 3, overwrite: Overwrite = False,
):  # fmt: skip
    """Show how many top experts two samples share, of one task and of two (Figure 3)."""
    return _table("overlap", preset, recipe, out, seeds, overwrite, top=top, score=score)


@verb(app, example="moe-runtime esft mix-data 0 1", kept=KEPT)
def mix_data(
    ratios: Annotated[
        list[float] | None, typer.Argument(help="Rows of general text per row of the task; 0 1 unless given.")
    ] = None,
    preset: Preset = None, recipe: RecipeFile = None, out: Out = OUT, seeds: Seeds = 3, overwrite: Overwrite = False,
):  # fmt: skip
    """Tune with and without general text mixed in (Tables 9 and 10)."""
    return _table("mix-data", preset, recipe, out, seeds, overwrite, **({"ratios": ratios} if ratios else {}))


def _table(command: str, preset: str | None, recipe: Path | None, *arguments, **options) -> dict:
    prepare(preset, recipe)
    from moe_runtime.methods.esft import tables as esft_tables
    from moe_runtime.methods.esft.recipe import shipped_recipes

    return table(esft_tables.run, shipped_recipes(), command, preset, recipe, *arguments, **options)
