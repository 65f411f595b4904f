"""moe-runtime ultrafuser: fuse specialists token by token, train the fused model, generate."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from moe_runtime.cli.verbs import Overwrite, RecipeSeed, argument, group, one_gpu, option, verb
from moe_runtime.io.rows import read_rows

FUSE = "ultralm-13b codellama-13b --template ultralm --template codellama --out fused"
app = group(
    "ultrafuser",
    "UltraFuser: fuse specialists token by token.",
    f"fuse {FUSE}",
)


def _check_push(options: dict) -> None:
    """Raise ValueError if the fused folder would refer to local folders."""
    from moe_runtime.methods.cards import check_references

    if not options["copy"]:
        check_references(options["specialists"])


@verb(app, FUSE, push="out", check_push=_check_push)
def fuse(
    specialists: Annotated[list[str], argument("Folders or Hub ids of two or more models.")],
    out: Annotated[Path, option("Folder to write; must not exist.")],
    template: Annotated[
        list[str] | None,
        option(
            "Template of each specialist, in order, or one for all: ultralm, codellama, "
            "wizardmath, chat, or a text with {prompt} (default: its chat template, else the "
            "plain prompt)."
        ),
    ] = None,
    name: Annotated[
        list[str] | None, option("Name of each specialist, in order (default: its folder's).")
    ] = None,
    gate: Annotated[
        str, option("mlp (the paper's appendix), or linear (its text).", words="mlp linear")
    ] = "mlp",
    joint: Annotated[
        bool, option("One gate on all hidden states, which may differ in size.", "--joint")
    ] = False,
    copy: Annotated[
        bool, option("Copy the specialists; otherwise the folder refers to them.", "--copy")
    ] = False,
    seed: Annotated[int, option("Seed of the gate, which is untrained.")] = 0,
    overwrite: Overwrite = False,
) -> Any:
    """Write a fused model with an untrained gate.

    Of specialists that share a tokenizer.
    """
    from moe_runtime.methods.ultrafuser import folders

    receipt = folders.fuse_folders(
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
    typer.echo(
        f"wrote {receipt.path}: {', '.join(receipt.names)}; a gate of {receipt.gate_parameters:,} "
        "parameters"
    )
    typer.echo(
        "next: put its specialists and templates into a recipe, and run moe-runtime ultrafuser "
        "train --config RECIPE"
    )
    return receipt


@verb(app, "--config mine.yaml --out runs/mine", resumes=True)
def train(
    config: Annotated[
        Path,
        option("A YAML file: specialists, their templates, a data file per domain, two stages."),
    ],
    out: Annotated[Path, option("Folder for the stages; a rerun resumes there.")] = Path(
        "runs/ultrafuser"
    ),
    seed: RecipeSeed = None,
) -> Any:
    """Fuse your own specialists.

    Trains the gate, then everything, on examples of each domain; rerun to resume.

    OUT/model is the fused model.

    On several GPUs: accelerate launch --config_file FILE -m moe_runtime ultrafuser train --config
    FILE --out OUT.
    """
    one_gpu()
    from moe_runtime.methods.ultrafuser import runs

    receipt = runs.train_folder(
        config,
        out,
        seed=seed,
        say=typer.echo,
    )
    typer.echo(f"wrote {receipt.path}: the fused model")
    return receipt


@verb(app, 'fused --prompt "Write a function that reverses a list."')
def generate(
    folder: Annotated[Path, argument("Folder of a fused model.")],
    prompt: Annotated[
        list[str] | None,
        option("A prompt; repeatable. Each specialist reads it in its own template."),
    ] = None,
    data: Annotated[
        Path | None, option("Instead of --prompt: a file of chats, pairs or texts to answer.")
    ] = None,
    out: Annotated[
        Path | None,
        option("With --data: .jsonl file to write, a line with prompt and answer each."),
    ] = None,
    batch_size: Annotated[int, option("With --data: prompts per batch, the longest first.")] = 16,
    max_new_tokens: Annotated[int, option("Tokens per answer, at most.")] = 256,
    temperature: Annotated[
        float, option("Sampling temperature; 0 takes the most probable token.")
    ] = 0.0,
    seed: Annotated[int, option("Seed of sampling.")] = 0,
    system: Annotated[str | None, option("System text, for templates with a place for it.")] = None,
    overwrite: Overwrite = False,
) -> Any:
    """Answer prompts with a fused model.

    Each specialist reads them in its own template.
    """
    from moe_runtime.config import check_number, check_positive
    from moe_runtime.io import files

    check_positive("max_new_tokens", max_new_tokens)
    check_positive("batch_size", batch_size)
    check_number("temperature", temperature)
    if bool(prompt) == bool(data) or bool(data) != bool(out):
        given = f"prompt {prompt or None}, data {data} and out {out}"
        raise ValueError(f"Pass either --prompt, or both --data and --out, but got {given}")
    if out is not None:
        files.check_out_file(out, overwrite, [folder, data])
    one_gpu()
    from moe_runtime.methods.ultrafuser import folders

    if temperature:
        settings = {"do_sample": True, "temperature": temperature}
    else:
        settings = {"do_sample": False}
    settings |= {"system": system, "seed": seed, "max_new_tokens": max_new_tokens}
    if data is None:
        answers = folders.answer(folder, prompt, **settings)
    else:
        prompt = [_question(row) for row in read_rows(data, answers=False)]
        answers = folders.answer(folder, prompt, batch_size=batch_size, **settings)
    answered = [{"prompt": question, "answer": text} for question, text in zip(prompt, answers)]
    if out is None:
        for text in answers:
            typer.echo(text)
        return {"answers": answered}
    files.atomic_write_text(
        out, "".join(json.dumps(one, ensure_ascii=False) + "\n" for one in answered)
    )
    typer.echo(f"wrote {out}: {len(answers)} answers")
    return {"path": out, "answers": answered}


def _question(row: dict) -> str | list:
    """Return the question of an example: its prompt, its text, or the turns of a chat up to the
    user's last one.
    """
    turns = list(row.get("messages") or ())
    while turns and turns[-1]["role"] != "user":
        turns.pop()
    return turns or row.get("prompt") or row["text"]
