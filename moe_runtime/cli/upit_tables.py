"""moe-runtime upit: the UpIT paper's tables and figures, one command each; beside the verbs of the method itself."""

from pathlib import Path
from typing import Annotated

import typer

from moe_runtime.cli.tables import KEPT, Out, Overwrite, RecipeFile, Seeds, prepare, preset_of, table
from moe_runtime.cli.verbs import choices, verb

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None)

Preset = preset_of("upit")
OUT = Path("runs/upit")
Form = Annotated[
    str | None,
    typer.Option(
        help="Experts of the table: ffn or lora; the recipe's first unless given.",
        show_default=False,
        autocompletion=choices("ffn", "lora"),
    ),
]


@verb(app, example="moe-runtime upit main --seeds 3", kept=KEPT)
def main(
    preset: Preset = None, recipe: RecipeFile = None, out: Out = OUT, seeds: Seeds = 3, overwrite: Overwrite = False
):
    """Compare UpIT with dense tuning, copied experts and router-only tuning, whole experts and LoRA (Table 1, Figure 5)."""
    return _table("main", preset, recipe, out, seeds, overwrite)


def _strategies(command: str, what: str, names: str) -> None:
    """Add a table's verb whose arguments are strategies."""
    found = choices(*names.split())
    Strategies = Annotated[
        list[str] | None, typer.Argument(help=f"Some of {names}; all unless given.", autocompletion=found)
    ]

    def run(
        strategies: Strategies = None,
        form: Form = None,
        preset: Preset = None, recipe: RecipeFile = None, out: Out = OUT, seeds: Seeds = 3, overwrite: Overwrite = False,
    ):  # fmt: skip
        given = {"strategies": tuple(strategies)} if strategies else {}
        return _table(command, preset, recipe, out, seeds, overwrite, form=form, **given)

    verb(app, command, help=what, example=f"moe-runtime upit {command} {names}", kept=KEPT)(run)


_strategies("ckpt", "Choose checkpoints in three ways (Tables 2 and 8).", "front uniform back")
_strategies("expand", "Expand experts in three ways, or not at all (Tables 2 and 9).", "none random genetic")
_strategies("router", "Begin with three kinds of routers (Tables 2 and 10, Figure 5).", "none random skilled")


@verb(app, "experts", example="moe-runtime upit experts --experts 4 --experts 8 --active 1 --active 2", kept=KEPT)
def experts_(
    experts: Annotated[
        list[int] | None, typer.Option(help="Experts, as often as you like; the recipe's m and n unless given.")
    ] = None,
    active: Annotated[list[int] | None, typer.Option(help="Experts per token; 1, 2 and 4 unless given.")] = None,
    form: Form = None,
    preset: Preset = None, recipe: RecipeFile = None, out: Out = OUT, seeds: Seeds = 3, overwrite: Overwrite = False,
):  # fmt: skip
    """Vary the experts and how many of them a token takes, UpIT and copied experts (Figure 4)."""
    given = ({"sizes": tuple(experts)} if experts else {}) | ({"active": tuple(active)} if active else {})
    return _table("experts", preset, recipe, out, seeds, overwrite, form=form, **given)


@verb(app, example="moe-runtime upit data 0.25 0.5 1", kept=KEPT)
def data(
    shares: Annotated[
        list[float] | None, typer.Argument(help="Shares of the rows; 0.1 0.2 0.4 1 unless given.", show_default=False)
    ] = None,
    form: Form = None,
    preset: Preset = None, recipe: RecipeFile = None, out: Out = OUT, seeds: Seeds = 3, overwrite: Overwrite = False,
):  # fmt: skip
    """Tune on a share of the rows: dense, copied experts, UpIT (Figure 3)."""
    return _table(
        "data", preset, recipe, out, seeds, overwrite, form=form, **({"shares": tuple(shares)} if shares else {})
    )


@verb(app, example="moe-runtime upit epochs 2,2 2,6 4,4", kept=KEPT)
def epochs(
    pairs: Annotated[
        list[str] | None,
        typer.Argument(help="Epochs before and after, such as 2,6; 2,2 2,6 4,4 unless given.", show_default=False),
    ] = None,
    form: Form = None,
    preset: Preset = None, recipe: RecipeFile = None, out: Out = OUT, seeds: Seeds = 3, overwrite: Overwrite = False,
):  # fmt: skip
    """Vary the epochs of the two trainings: dense, copied experts, UpIT (Figure 6)."""
    given = {"pairs": tuple(map(_pair, pairs))} if pairs else {}
    return _table("epochs", preset, recipe, out, seeds, overwrite, form=form, **given)


def _pair(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise ValueError(f"epochs is {text!r}; want two numbers, such as 2,6") from None


def _table(command: str, preset: str | None, recipe: Path | None, *arguments, **options) -> dict:
    prepare(preset, recipe)
    from moe_runtime.methods.upit import tables as upit_tables
    from moe_runtime.methods.upit.recipe import shipped_recipes

    return table(upit_tables.run, shipped_recipes(), command, preset, recipe, *arguments, **options)
