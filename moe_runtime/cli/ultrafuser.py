"""moe-runtime ultrafuser: fuse specialists token by token, train the fused model on your own data, generate."""

from pathlib import Path
from typing import Annotated

import typer

from moe_runtime.cli.verbs import Kept, Overwrite, RecipeSeed, argument, group, one_gpu, option, verb

FUSE = "ultralm-13b codellama-13b --template ultralm --template codellama --out fused"
app = group("ultrafuser", "UltraFuser: fuse specialists with gates that weigh them token by token.", f"fuse {FUSE}")


@verb(app, FUSE, Kept("{out}"))
def fuse(
    specialists: Annotated[list[str], argument("Folders or ids of two or more models.")],
    out: Annotated[Path, option("Folder to write; must not exist.")],
    template: Annotated[
        list[str] | None,
        option(
            "A specialist's template, in their order, or one for all: ultralm, codellama, wizardmath, chat, or a text with "
            "{prompt}. Unless given, its own chat template, or the prompt as it is."
        ),
    ] = None,
    name: Annotated[list[str] | None, option("A specialist's name, in their order; its folder's unless given.")] = None,
    gate: Annotated[str, option("mlp (the paper's appendix), or linear (its text).", words="mlp linear")] = "mlp",
    joint: Annotated[bool, option("One gate on all hidden states, which may differ in size.", "--joint")] = False,
    copy: Annotated[bool, option("Copy the specialists; otherwise the folder refers to them.", "--copy")] = False,
    seed: Annotated[int, option("Seed of the gate, which is untrained.")] = 0,
    overwrite: Overwrite = False,
):
    """Put specialists of one tokenizer behind an untrained gate: the folder of a fused model."""
    from moe_runtime.methods.ultrafuser import folders

    receipt = folders.fuse_folders(
        specialists, out, templates=template, names=name, gate=gate, joint=joint, copy=copy, seed=seed, overwrite=overwrite
    )
    typer.echo(f"wrote {receipt.path}: {', '.join(receipt.names)}; a gate of {receipt.gate_parameters:,} parameters")
    typer.echo("next: put its specialists and templates into a recipe, and run moe-runtime ultrafuser train --config RECIPE")
    return receipt


@verb(app, "--config mine.yaml --out runs/mine", Kept("{out}", resumes=True))
def train(
    config: Annotated[Path, option("A recipe: specialists, their templates, a data file per domain, two stages.")],
    out: Annotated[Path, option("Folder for the stages; a rerun resumes there.")] = Path("runs/ultrafuser"),
    seed: RecipeSeed = None,
):
    """Fuse your own specialists: train the gate, then everything, on examples of each domain; rerun to resume.

    OUT/model is the fused model.

    On several GPUs: accelerate launch --config_file FILE -m moe_runtime ultrafuser train --config FILE --out OUT.
    """
    one_gpu()
    from moe_runtime.methods.ultrafuser import study

    return {"out": out, "results": study.run(config, out, seed=seed)}


@verb(app, 'fused --prompt "Write a function that reverses a list."')
def generate(
    folder: Annotated[Path, argument("Folder of a fused model.")],
    prompt: Annotated[list[str], option("A prompt; repeatable. Each specialist reads it in its own template.")],
    max_new_tokens: Annotated[int, option("Tokens per answer, at most.")] = 256,
    temperature: Annotated[float, option("Sampling temperature; 0 takes the most probable token.")] = 0.0,
    seed: Annotated[int, option("Seed of sampling.")] = 0,
    system: Annotated[str | None, option("A system text, for templates that have one.")] = None,
):
    """Answer prompts with a fused model, each specialist reading them in its own template."""
    from moe_runtime.config import check_number, check_positive

    check_positive("max_new_tokens", max_new_tokens)
    check_number("temperature", temperature)
    one_gpu()
    from moe_runtime.methods.ultrafuser import folders

    sampling = {"do_sample": True, "temperature": temperature} if temperature else {"do_sample": False}
    answers = folders.answer(folder, prompt, system=system, seed=seed, max_new_tokens=max_new_tokens, **sampling)
    for text in answers:
        typer.echo(text)
    return {"answers": [{"prompt": asked, "answer": text} for asked, text in zip(prompt, answers)]}
