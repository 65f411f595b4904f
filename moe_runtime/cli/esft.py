"""moe-runtime esft: score experts, select some, train those alone, and put the adapter into its base."""

import os
from pathlib import Path
from typing import Annotated

import typer

from moe_runtime.cli import esft_scores, esft_tables
from moe_runtime.cli.esft_scores import Data, MaxLength, Model, Overwrite, Pack, Prompt, say_selection
from moe_runtime.cli.verbs import GoesOn, ShardSize, Whole, choices, mount, verb
from moe_runtime.io import console

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="ESFT: tune only the experts of a mixture that a task uses, ship those alone; and the paper's tables and figures.",
    epilog="Example: moe-runtime esft main --seeds 3",
)

Folder = Annotated[Path, typer.Argument(help="Folder of the adapter.", show_default=False)]
AnyWeights = Annotated[
    bool, typer.Option("--any-weights", help="Take a base whose weights are not those that the adapter was trained on.")
]
TrainedDtype = Annotated[
    str | None,
    typer.Option(
        help="Of all that trains; the model's unless given, and float32 if that is bfloat16 or float16.",
        show_default=False,
        autocompletion=choices("float32", "bfloat16", "float16"),
    ),
]
TrainShared = Annotated[
    bool | None,
    typer.Option(
        "--shared-experts/--no-shared-experts", help="Train the shared experts too; as the file says unless given."
    ),
]
TrainOthers = Annotated[
    bool | None,
    typer.Option(
        "--non-expert-modules/--no-non-expert-modules",
        help="Train all that is no expert too; as the file says unless given.",
    ),
]
mount(esft_scores.app, app)


@verb(
    app,
    example="moe-runtime esft train olmoe --config law/config.json --data law.jsonl --out law/adapter",
    kept=GoesOn(what="checkpoints are kept in {}-checkpoints", suffix="-checkpoints"),
)
def train(
    model: Model,
    config: Annotated[
        Path, typer.Option(help="What select wrote, or an official expert_cfg.json.", show_default=False)
    ],
    data: Data,
    out: Annotated[Path, typer.Option(help="Folder of the adapter; must not exist.", show_default=False)],
    held_out: Annotated[
        str | None,
        typer.Option(help="Rows to take the loss on; one in fifty of data unless given.", show_default=False),
    ] = None,
    steps: Annotated[int, typer.Option(help="Optimizer steps.")] = 500,
    learning_rate: Annotated[float, typer.Option(help="Constant learning rate of AdamW.")] = 1e-5,
    batch_size: Annotated[int, typer.Option(help="Samples of a step, over all processes.")] = 32,
    per_device_batch_size: Annotated[int, typer.Option(help="Samples that a process takes at once.")] = 1,
    weight_decay: Annotated[float, typer.Option(help="Of AdamW.")] = 0.1,
    max_length: MaxLength = 4096,
    pack: Pack = True,
    prompt: Prompt = "plain",
    dtype: TrainedDtype = None,
    bf16: Annotated[bool, typer.Option("--bf16", help="Compute in bfloat16 (autocast).")] = False,
    gradient_checkpointing: Annotated[bool, typer.Option("--gradient-checkpointing", help="Save activations.")] = False,
    save_steps: Annotated[int, typer.Option(help="A checkpoint every so many steps, to go on from; 0 for none.")] = 100,
    shared_experts: TrainShared = None,
    non_expert_modules: TrainOthers = None,
    seed: Annotated[int, typer.Option(help="Seed of the batches.")] = 0,
    overwrite: Overwrite = False,
):
    """Train the selected experts of a model and write them as an adapter; the same call goes on after a crash.

    The best weights by held-out loss are kept. On several GPUs: accelerate launch -m moe_runtime.cli esft train ...
    """
    if "LOCAL_RANK" not in os.environ:
        # one GPU is enough, and Trainer would spread a single process over all that it sees; before torch looks
        os.environ.setdefault("CUDA_VISIBLE_DEVICES", "0")
    from moe_runtime.io.rows import require

    require("datasets")
    from dataclasses import replace

    from moe_runtime.config import check_choice
    from moe_runtime.experiments.recipe import DTYPES
    from moe_runtime.hf.training import fit
    from moe_runtime.methods.esft.adapters import load_selection
    from moe_runtime.methods.esft.recipe import Tuning
    from moe_runtime.methods.esft.runs import train_folder

    if dtype is not None:
        check_choice("dtype", dtype, tuple(DTYPES))
    selection = load_selection(config)
    flags = {"shared_experts": shared_experts, "non_expert_modules": non_expert_modules}
    selection = replace(selection, **{name: flag for name, flag in flags.items() if flag is not None})
    training = Tuning(
        steps=steps, learning_rate=learning_rate, batch_size=batch_size, per_device_batch_size=per_device_batch_size,
        weight_decay=weight_decay, bf16=bf16, gradient_checkpointing=gradient_checkpointing, save_steps=save_steps or None,
    )  # fmt: skip
    fit.quiet()
    with console.bar("training") as on_step:
        receipt = train_folder(
            model, selection, data, out, training, held_out=held_out, max_length=max_length, packed=pack, prompt=prompt,
            dtype=dtype, seed=seed, overwrite=overwrite, on_step=on_step,
        )  # fmt: skip
    if console.is_main():
        _say_training(receipt)
        typer.echo(f"next: moe-runtime esft merge {model} {out} tuned")
    return receipt


@verb(app, example="moe-runtime esft apply olmoe law/adapter --data law-test.jsonl")
def apply(
    model: Model,
    adapter: Folder,
    data: Annotated[
        str | None, typer.Option(help="Rows to take the loss on, without the adapter and with it.", show_default=False)
    ] = None,
    limit: Annotated[int, typer.Option(help="Rows of them, at most.")] = 256,
    max_length: MaxLength = 4096,
    batch_size: Annotated[int, typer.Option(help="Rows of a forward pass.")] = 1,
    prompt: Prompt = "plain",
    any_weights: AnyWeights = False,
):
    """Say what an adapter holds and whether it belongs to a model; with data, what it does to the loss. Writes nothing."""
    if data is not None:
        from moe_runtime.io.rows import require

        require("datasets")
    from moe_runtime.methods.esft.runs import check_folder

    found = check_folder(
        model, adapter, data, limit=limit, max_length=max_length, batch_size=batch_size, prompt=prompt,
        check_weights=not any_weights,
    )  # fmt: skip
    say_selection(found.adapter.selection)
    others = len(found.adapter.others)
    typer.echo(
        f"{found.adapter.num_parameters:,} parameters, {found.adapter.nbytes / 1e6:,.1f} MB"
        + (f", of them {others} tensors that are no experts'" if others else "")
    )
    typer.echo(f"it belongs to {model}, and changes {found.tensors} of its tensors")
    if found.loss is not None:
        typer.echo(f"loss of {found.rows} rows: {found.base_loss:.4f} without, {found.loss:.4f} with it")
    return {
        "selection": found.adapter.selection.to_dict(), "parameters": found.adapter.num_parameters,
        "bytes": found.adapter.nbytes, "tensors": found.tensors, "rows": found.rows, "base_loss": found.base_loss,
        "loss": found.loss,
    }  # fmt: skip


@verb(app, example="moe-runtime esft merge olmoe law/adapter olmoe-law", kept=Whole("out"))
def merge(
    base: Model,
    adapter: Folder,
    out: Annotated[Path, typer.Argument(help="Folder to write; must not exist.", show_default=False)],
    max_shard_size: ShardSize = "2GB",
    any_weights: AnyWeights = False,
    overwrite: Overwrite = False,
):
    """Write the base with the adapter's experts in it, a folder like the base's; never holds the whole model."""
    from moe_runtime.methods.esft.folders import merge_folder

    with console.bar("merging", "B") as update:
        receipt = merge_folder(
            base, adapter, out, max_shard_size=max_shard_size, overwrite=overwrite, check_weights=not any_weights,
            progress=update,
        )  # fmt: skip
    typer.echo(
        f"wrote {receipt.path}: {receipt.tensors} tensors, {receipt.bytes / 1e6:,.1f} MB, {receipt.changed} of them with the "
        f"{receipt.experts} experts of {adapter}; and {', '.join(receipt.side_files)}"
    )
    return receipt


mount(esft_tables.app, app)


def _say_training(receipt) -> None:
    share = receipt.trained_parameters / receipt.total_parameters
    typer.echo(
        f"trained {receipt.trained_parameters:,} of {receipt.total_parameters:,} parameters ({share:.1%}), "
        f"{receipt.steps} steps in {receipt.seconds:.0f} s, optimizer {receipt.optimizer_bytes / 1e6:,.1f} MB"
    )
    typer.echo(f"held-out loss: {receipt.loss_before:.4f} -> {receipt.loss:.4f}")
    typer.echo(f"wrote {receipt.path}")
