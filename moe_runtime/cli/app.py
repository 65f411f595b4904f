"""The top-level commands and the groups of the methods. They import lazily: --help is fast."""

from typing import Annotated, Any

import typer

from moe_runtime import __version__
from moe_runtime.cli import esft, lora, shrink, tools, ultrafuser, upit, xft
from moe_runtime.cli.verbs import argument, group, one_gpu, option, verb
from moe_runtime.io.rows import require

app = group(
    "",
    "Mixture-of-Experts runtime: upcycle, tune, merge and fuse models.",
    "xft upcycle llama-1b moe",
)


def _version(value: bool) -> None:
    if value:
        typer.echo(f"moe-runtime {__version__}")
        raise typer.Exit


@app.callback()
def _all(
    version: Annotated[
        bool, option("Print the version.", "--version", callback=_version, is_eager=True)
    ] = False,
):
    pass


@verb(
    app,
    "--model llama-1b-moe --data pairs.jsonl --output_dir tuned",
    watch=False,
    context_settings={
        "allow_extra_args": True,
        "ignore_unknown_options": True,
        "help_option_names": [],
    },
)
def train(context: typer.Context) -> Any:
    """Tune a model with TRL's SFT command.

    All its flags, and --config train.yaml (see train --help).
    """
    require("trl")
    import moe_runtime.methods  # noqa: F401 - their papers, for the model card
    from moe_runtime.hf.training.sft import train_command

    return {"path": train_command(context.args)}


@verb(
    app,
    "llama-1b-moe --tasks hellaswag,arc_easy --batch_size 8",
    name="eval",
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
)
def evaluate(
    context: typer.Context,
    model: Annotated[
        str, argument("Folder or Hub id of a model, dense or MoE, or BASE+ADAPTER (PEFT or ESFT).")
    ],
) -> Any:
    """Evaluate a model with lm-eval.

    All options of `lm-eval run` follow the model.

    `lm-eval run --help` lists them. A task in a YAML file may run Python code of its own.
    """
    if model.startswith("-"):
        raise ValueError(f"Pass the model first, before {model}")
    require("lm_eval", "eval")
    one_gpu()
    from moe_runtime.tools import evaluate as evaluation

    return {
        "model": model,
        "results": evaluation.evaluate(model, context.args),
    }


app.registered_commands += tools.app.registered_commands
for part in (xft.app, esft.app, upit.app, ultrafuser.app, shrink.app, lora.app):
    app.add_typer(part)
