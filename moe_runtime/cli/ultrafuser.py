"""moe-runtime fuser: UltraFuser's tables and figures, training on your own data, answers; and moe-runtime fuse."""

import os
from pathlib import Path
from typing import Annotated

import typer

from moe_runtime.cli.tables import KEPT, Out, Overwrite, RecipeFile, Seeds, prepare, preset_of, table
from moe_runtime.cli.verbs import GoesOn, choices, verb

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Fuse specialists token by token (UltraFuser): train on your own data, generate, and make the paper's tables.",
    epilog="Example: moe-runtime fuser ablate --seeds 3",
)

Preset = preset_of("ultrafuser")
OUT = Path("runs/ultrafuser")
FUSE = "moe-runtime fuse ultralm-13b codellama-13b --template ultralm --template codellama --out fused"


@verb(app, example="moe-runtime fuser ablate --seeds 3", kept=KEPT)
def ablate(
    preset: Preset = None, recipe: RecipeFile = None, out: Out = OUT, seeds: Seeds = 3, overwrite: Overwrite = False
):
    """Compare specialists, specialists tuned further, and fused ones: direct, two-stage, balanced (Tables 2 and 4)."""
    return _table("ablate", preset, recipe, out, seeds, overwrite)


@verb(app, example="moe-runtime fuser weights --rows 100", kept=KEPT)
def weights(
    rows: Annotated[int | None, typer.Option(help="Held-out rows of each domain; all unless given.")] = None,
    preset: Preset = None, recipe: RecipeFile = None, out: Out = OUT, seeds: Seeds = 3, overwrite: Overwrite = False,
):  # fmt: skip
    """Show the gate's weights by domain, as a map and token by token on a page (Table 6, Figures 6 to 8)."""
    return _table("weights", preset, recipe, out, seeds, overwrite, **({} if rows is None else {"rows": rows}))


@verb(app, example="moe-runtime fuser stability --checkpoints 12", kept=KEPT)
def stability(
    checkpoints: Annotated[int, typer.Option(help="Times that stage 2 is looked at.")] = 12,
    preset: Preset = None, recipe: RecipeFile = None, out: Out = OUT, seeds: Seeds = 3, overwrite: Overwrite = False,
):  # fmt: skip
    """Show the losses along stage 2, with the balanced sampler and without (Table 5)."""
    return _table("stability", preset, recipe, out, seeds, overwrite, checkpoints=checkpoints)


@verb(app, example="moe-runtime fuser train --config mine.yaml --out runs/mine", kept=GoesOn())
def train(
    config: Annotated[
        Path,
        typer.Option(help="A recipe: specialists with their templates, a file of rows per domain, the two stages."),
    ],
    out: Annotated[Path, typer.Option(help="Folder for the stages; a later run goes on there.")] = OUT,
    seed: Annotated[int | None, typer.Option(help="Seed; the recipe's unless given.", show_default=False)] = None,
):
    """Fuse your own specialists: train the gate, then all, on rows of each domain; what is there is not made again.

    OUT/model leads to the fused model.

    On several GPUs: accelerate launch --config_file FILE -m moe_runtime.cli fuser train --config FILE --out OUT.
    """
    prepare(None, config)
    from moe_runtime.methods.ultrafuser import study as ultrafuser_study

    return {"out": out, "results": ultrafuser_study.run(config, out, seed=seed)}


@verb(app, example='moe-runtime fuser generate fused --prompt "Write a function that reverses a list."')
def generate(
    folder: Annotated[Path, typer.Argument(help="Folder of a fused model.", show_default=False)],
    prompt: Annotated[list[str], typer.Option(help="A prompt, as often as you like; put in each one's template.")],
    max_new_tokens: Annotated[int, typer.Option(help="Tokens of an answer, at most.")] = 256,
    temperature: Annotated[float, typer.Option(help="Of sampling; 0 takes the most probable token.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Seed of sampling.")] = 0,
    system: Annotated[str | None, typer.Option(help="A system text, for templates that have one.")] = None,
):
    """Answer prompts with a fused model, each specialist reading them in its own template."""
    from moe_runtime.config import check_number, check_positive

    check_positive("max_new_tokens", max_new_tokens)
    check_number("temperature", temperature)
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "0")
    from moe_runtime.methods.ultrafuser import folders as ultrafuser_folders

    sampling = {"do_sample": True, "temperature": temperature} if temperature else {"do_sample": False}
    answers = ultrafuser_folders.answer(
        folder, prompt, system=system, seed=seed, max_new_tokens=max_new_tokens, **sampling
    )
    for text in answers:
        typer.echo(text)
    return {"answers": [{"prompt": asked, "answer": text} for asked, text in zip(prompt, answers)]}


def fuse(
    specialists: Annotated[list[str], typer.Argument(help="Folders or ids of two models or more.", show_default=False)],
    out: Annotated[Path, typer.Option(help="Folder to write; must not exist.")],
    template: Annotated[
        list[str] | None,
        typer.Option(
            help="A specialist's template, in their order, or one for all: ultralm, codellama, wizardmath, chat, or a text "
            "with {prompt}. Unless given, its own chat template, or the prompt as it is."
        ),
    ] = None,
    name: Annotated[
        list[str] | None, typer.Option(help="A specialist's name, in their order; its folder's unless given.")
    ] = None,
    gate: Annotated[
        str,
        typer.Option(
            help="mlp, as in the paper's appendix, or linear, as in its text.", autocompletion=choices("mlp", "linear")
        ),
    ] = "mlp",
    joint: Annotated[
        bool, typer.Option("--joint", help="A gate that sees all states at once, for several hidden sizes.")
    ] = False,
    copy: Annotated[
        bool, typer.Option("--copy", help="Copy the specialists; else the folder says where they are.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Seed of the gate, which is not trained yet.")] = 0,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the target folder if it exists.")] = False,
):
    """Put specialists of one tokenizer behind a gate that is yet to be trained: the folder of a fused model."""
    from moe_runtime.methods.ultrafuser import folders as ultrafuser_folders

    receipt = ultrafuser_folders.fuse_folders(
        specialists,
        out,
        templates=template,
        names=name,
        gate=gate,
        joint=joint,
        copy=copy,
        seed=seed,
        overwrite=overwrite,
    )
    typer.echo(f"wrote {receipt.path}: {', '.join(receipt.names)}; a gate of {receipt.gate_parameters:,} parameters")
    typer.echo("next: give its specialists and templates to a recipe, and moe-runtime fuser train --config RECIPE")
    return receipt


def _table(command: str, preset: str | None, recipe: Path | None, *arguments, **options) -> dict:
    prepare(preset, recipe)
    from moe_runtime.methods.ultrafuser import tables as ultrafuser_tables
    from moe_runtime.methods.ultrafuser.recipe import shipped_recipes

    return table(ultrafuser_tables.run, shipped_recipes(), command, preset, recipe, *arguments, **options)
