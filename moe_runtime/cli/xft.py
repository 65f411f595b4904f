"""moe-runtime xft: the XFT paper's tables and figures, one command each, and its official checkpoints."""

from pathlib import Path
from typing import Annotated

import typer

from moe_runtime.cli.tables import KEPT, Out, Overwrite, RecipeFile, Seeds, prepare, preset_of, table
from moe_runtime.cli.verbs import ReplaceTarget, ShardSize, Source, Target, Whole, verb
from moe_runtime.io import console

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="XFT's tables and figures: train what a table compares, test the differences, print, draw and write it.",
    epilog="Example: moe-runtime xft table1 --seeds 3",
)

Preset = preset_of("xft")
OUT = Path("runs/xft")


def _without_options(command: str, what: str) -> None:
    """Add a table's verb that has only the options which all have."""

    def run(
        preset: Preset = None, recipe: RecipeFile = None, out: Out = OUT, seeds: Seeds = 3, overwrite: Overwrite = False
    ):
        return _table(command, preset, recipe, out, seeds, overwrite)

    verb(app, command, help=what, example=f"moe-runtime xft {command} --seeds 3", kept=KEPT)(run)


_without_options("table1", "Compare base, SFT, EWA, the mixture and XFT's dense model (Tables 1 to 3).")
_without_options(
    "ablate-gate", "Compare the mixture's gate with one without normalization and two without shared expert (Table 4)."
)
_without_options(
    "ablate-merge", "Compare ways to merge one mixture: learned, initial, learned soup, uniform (Table 5)."
)
_without_options(
    "budget", "Compare XFT with SFT for as many steps, and for as much time (Table 8 of the long version)."
)
_without_options("ewa-schedule", "Compare EWA with a constant and a linear share rate, on the way too (Figure 3).")


@verb(app, example="moe-runtime xft sweep-lambda 0 .25 .5 .75 1", kept=KEPT)
def sweep_lambda(
    rates: Annotated[list[float] | None, typer.Argument(help="lambdas; 0 .25 .5 .75 1 unless given.")] = None,
    preset: Preset = None, recipe: RecipeFile = None, out: Out = OUT, seeds: Seeds = 3, overwrite: Overwrite = False,
):  # fmt: skip
    """Merge one mixture with several rates of the shared expert, each learned (Table 6 of the long version)."""
    return _table("sweep-lambda", preset, recipe, out, seeds, overwrite, **({"shared_rates": rates} if rates else {}))


@verb(app, example="moe-runtime xft sweep-topk 2 4 6", kept=KEPT)
def sweep_topk(
    top_ks: Annotated[list[int] | None, typer.Argument(help="Experts per token; 2 4 6 unless given.")] = None,
    preset: Preset = None, recipe: RecipeFile = None, out: Out = OUT, seeds: Seeds = 3, overwrite: Overwrite = False,
):  # fmt: skip
    """Tune and merge mixtures with several numbers of experts per token (footnote 1)."""
    return _table("sweep-topk", preset, recipe, out, seeds, overwrite, **({"top_ks": top_ks} if top_ks else {}))


@verb(app, example="moe-runtime xft routing-stats --data java.jsonl --data rust.jsonl", kept=KEPT)
def routing_stats(
    data: Annotated[
        list[str] | None, typer.Option(help="A jsonl or parquet file, a text more; as often as you like.")
    ] = None,
    tokens: Annotated[int, typer.Option(help="Tokens of each text, at most.")] = 16384,
    preset: Preset = None, recipe: RecipeFile = None, out: Out = OUT, seeds: Seeds = 3, overwrite: Overwrite = False,
):  # fmt: skip
    """Show which experts the tokens of different texts go to (Figure 4)."""
    return _table("routing-stats", preset, recipe, out, seeds, overwrite, texts=data or [], tokens=tokens)


@verb(app, example="moe-runtime xft import-official official-moe moe", kept=Whole("target"))
def import_official(
    source: Source,
    target: Target,
    ffn_folder: Annotated[
        Path | None,
        typer.Option(
            help="Folder of a weighted model's ffn_layer files; its config's unless given.", show_default=False
        ),
    ] = None,
    rope_theta: Annotated[
        float | None,
        typer.Option(help="Rotary base, in place of the one that the official code computes with.", show_default=False),
    ] = None,
    max_shard_size: ShardSize = "2GB",
    overwrite: ReplaceTarget = False,
):
    """Read a mixture that the official XFT code saved, and write it in this package's form."""
    return _convert(
        "import_official", source, target, ffn_folder=ffn_folder, rope_theta=rope_theta, max_shard_size=max_shard_size,
        overwrite=overwrite,
    )  # fmt: skip


@verb(app, example="moe-runtime xft export-official moe official-moe", kept=Whole("target"))
def export_official(
    source: Source,
    target: Target,
    keep_rope: Annotated[
        bool, typer.Option("--keep-rope", help="Write a rotary base too that the official code will not heed.")
    ] = False,
    max_shard_size: ShardSize = "2GB",
    overwrite: ReplaceTarget = False,
):
    """Write a mixture in the form that the official XFT code reads."""
    return _convert(
        "export_official", source, target, keep_rope=keep_rope, max_shard_size=max_shard_size, overwrite=overwrite
    )


def _table(command: str, preset: str | None, recipe: Path | None, *arguments, **options) -> dict:
    prepare(preset, recipe)
    from moe_runtime.experiments.recipe import shipped_recipes
    from moe_runtime.methods.xft import tables as xft_tables

    return table(xft_tables.run, shipped_recipes(), command, preset, recipe, *arguments, **options)


def _convert(name: str, source: Path, target: Path, **options):
    from moe_runtime.methods.xft import official as xft_official

    with console.bar("converting", "B") as update:
        receipt = getattr(xft_official, name)(source, target, progress=update, **options)
    typer.echo(f"wrote {receipt.path}: {receipt.tensors} tensors, {receipt.bytes / 1e6:,.1f} MB")
    return receipt
