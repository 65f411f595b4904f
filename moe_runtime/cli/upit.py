"""moe-runtime upit: from checkpoints to experts to one MoE model, step by step on folders."""

from pathlib import Path
from typing import Annotated, Any

import typer

from moe_runtime import config
from moe_runtime.cli.verbs import (
    Bf16,
    Checkpointing,
    Data,
    MaxLength,
    Overwrite,
    Prompt,
    Seed,
    ShardSize,
    Source,
    Target,
    TrainOn,
    argument,
    group,
    one_gpu,
    option,
    verb,
    with_bar,
)
from moe_runtime.cli.xft import To, to_stock
from moe_runtime.io import console

UPIT = "UpIT: turn checkpoints into the experts of an MoE."
app = group("upit", UPIT, "choose runs/sft/experts --count 4")
UNSHARED = tuple(gate for gate in config.GATES if gate not in config.SHARED_GATES)
Experts = Annotated[list[Path], argument("Experts' folders: models or LoRA adapters, of one base.")]
Base = Annotated[
    Path | None, option("Folder of the dense model that all were tuned from, if needed.")
]
Out = Annotated[Path, option("Folder to write.")]


@verb(app, "runs/sft/experts --count 4")
def choose(
    folder: Annotated[
        Path, argument("Folder with the experts or checkpoints that a tuning run saved.")
    ],
    count: Annotated[int, option("Number of checkpoints to choose.")] = 4,
    which: Annotated[
        str, option("back (the last ones), front or uniform.", words="back front uniform")
    ] = "back",
) -> Any:
    """Print which checkpoints become experts.

    One folder per line.
    """
    from moe_runtime.methods.upit import choose_checkpoints

    checkpoints = choose_checkpoints(folder, count, which)
    for path in checkpoints:
        typer.echo(path)
    return {"checkpoints": checkpoints}


@verb(
    app, "step-100 step-200 --count 8 --base llama --out grown", resumes=True, drop=("--overwrite",)
)
def grow(
    experts: Experts,
    out: Out,
    base: Annotated[Path, option("Folder of the dense model that all were tuned from.")],
    count: Annotated[int, option("Experts at the end, including the given ones.")] = 8,
    metric: Annotated[
        str, option("Distance between experts: cosine or l2.", words="cosine l2")
    ] = "cosine",
    parents: Annotated[
        str, option("farthest, as in the paper, or random.", words="farthest random")
    ] = "farthest",
    drop: Annotated[float, option("Share of changes that DARE drops.")] = 0.5,
    seed: Seed = 0,
    overwrite: Overwrite = False,
) -> Any:
    """Create more experts from those that differ most.

    Each is a weighted, mutated sum of the two most different ones. Rerun to resume.
    """
    from moe_runtime.methods.upit import expand_experts

    expansion = with_bar(
        "growing",
        expand_experts,
        experts,
        count,
        out,
        base=base,
        metric=metric,
        parents=parents,
        drop=drop,
        seed=seed,
        overwrite=overwrite,
    )
    for child in expansion.children:
        (i, j), (a, b) = child.parents, child.weights
        typer.echo(
            f"{child.folder}: {a:.3f} of expert {i}, {b:.3f} of expert {j}; their distance "
            f"{child.distance:.4f}"
        )
    typer.echo(
        f"next: moe-runtime upit init-routers {' '.join(map(str, expansion.experts))} --data "
        "rows.jsonl --out routers"
    )
    return expansion


@verb(app, "step-100 step-200 --data rows.jsonl --out routers", resumes=True, drop=("--overwrite",))
def init_routers(
    experts: Experts,
    data: Data,
    out: Out,
    base: Base = None,
    share: Annotated[float, option("Share of the examples that are drawn as seed data.")] = 0.01,
    at_least: Annotated[int, option("Examples of seed data, at least.")] = 500,
    capacity: Annotated[
        int | None, option("Examples per expert, at most (default: equal shares).")
    ] = None,
    tokens: Annotated[
        str, option("Tokens of the perplexity: response or all.", words="response all")
    ] = "response",
    alpha: Annotated[
        float, option("Weight of the language model's loss against the router's.")
    ] = 0.5,
    epochs: Annotated[float, option("Epochs over each expert's examples.")] = 4.0,
    learning_rate: Annotated[
        float | None, option("Constant learning rate (default: 2e-5, or 2e-4 with LoRA).")
    ] = None,
    vector_learning_rate: Annotated[
        float | None, option("Learning rate of the vectors (default: --learning-rate).")
    ] = None,
    batch_size: Annotated[int, option("Examples per optimizer step.")] = 128,
    per_device_batch_size: Annotated[
        int | None, option("Examples per forward pass (default: the batch).")
    ] = None,
    bf16: Bf16 = False,
    gradient_checkpointing: Checkpointing = False,
    max_length: MaxLength = 2048,
    prompt: Prompt = "plain",
    train_on: TrainOn = "assistant",
    seed: Seed = 0,
    overwrite: Overwrite = False,
) -> Any:
    """Tune each expert on the examples that it is best at.

    Assigns the examples, and tunes the experts and their routing vectors. Rerun to resume.
    """
    one_gpu()
    from moe_runtime.methods.upit.folders import route_folders

    done = route_folders(
        experts,
        data,
        out,
        base=base,
        share=share,
        at_least=at_least,
        capacity=capacity,
        tokens=tokens,
        alpha=alpha,
        max_length=max_length,
        prompt=prompt,
        train_on=train_on,
        seed=seed,
        epochs=epochs,
        learning_rate=learning_rate,
        vector_learning_rate=vector_learning_rate,
        batch_size=batch_size,
        per_device_batch_size=per_device_batch_size,
        bf16=bf16,
        gradient_checkpointing=gradient_checkpointing,
        overwrite=overwrite,
    )
    if not console.is_main():
        return None
    rows = zip(done.buckets, done.before, done.after, strict=True)
    for i, (examples, before, after) in enumerate(rows):
        typer.echo(
            f"expert {i}: {examples} examples, mean sigmoid of its vectors {before:.3f} -> "
            f"{after:.3f}"
        )
    typer.echo(f"next: moe-runtime upit assemble --routers {done.path} --out moe")
    return done


@verb(app, "--routers routers --out moe", push="out")
def assemble(
    experts: Annotated[
        list[Path] | None, argument("Experts' folders, for a random router.")
    ] = None,
    out: Out = ...,
    routers: Annotated[Path | None, option("Folder of init-routers: experts and vectors.")] = None,
    base: Base = None,
    top_k: Annotated[int, option("Experts per token.")] = 2,
    gate: Annotated[str, option(", ".join(UNSHARED), words=UNSHARED)] = "softmax_topk_renorm",
    balance_loss: Annotated[
        str, option("switch, cv2 or none.", words=config.BALANCE_LOSSES)
    ] = "switch",
    balance_loss_coef: Annotated[float, option("Weight of the balance loss.")] = 0.01,
    backbone: Annotated[
        str, option("Other weights: the experts' mean, or the base's.", words="mean base")
    ] = "mean",
    max_shard_size: ShardSize = "2GB",
    seed: Seed = 42,
    overwrite: Overwrite = False,
) -> Any:
    """Combine experts with a router into an MoE model.

    The router consists of their routing vectors; the model can be tuned like any other.
    """
    from moe_runtime.methods.upit.folders import assemble_folders

    done = with_bar(
        "assembling",
        assemble_folders,
        experts or (),
        out,
        routers=routers,
        base=base,
        top_k=top_k,
        gate=gate,
        balance_loss=balance_loss,
        balance_loss_coef=balance_loss_coef,
        backbone=backbone,
        seed=seed,
        max_shard_size=max_shard_size,
        overwrite=overwrite,
    )
    typer.echo(f"wrote {done.path}: {done.config.num_experts} experts, {done.bytes / 1e6:,.1f} MB")
    typer.echo(f"next: moe-runtime train --model {done.path} --data rows.jsonl --output_dir tuned")
    return done


@verb(app, "tuned mixtral", push="target")
def export(
    source: Source,
    target: Target,
    to: To = "mixtral",
    max_shard_size: ShardSize = "2GB",
    overwrite: Overwrite = False,
) -> Any:
    """Write an MoE model as a stock MoE model.

    By default as a Mixtral, which runs without this package.
    """
    return to_stock(source, target, to, max_shard_size=max_shard_size, overwrite=overwrite)
