"""moe-runtime shrink: prune or merge the experts of a MoE model, or make it dense."""

from pathlib import Path
from typing import Annotated, Any

import typer

from moe_runtime.cli.verbs import (
    HUB,
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
    option,
    verb,
    with_bar,
)
from moe_runtime.io import console
from moe_runtime.io.rows import require

SHRINK = "Smaller MoE models and dense ones: prune, merge, densify."
app = group("shrink", SHRINK, "prune olmoe olmoe-48 --statistics olmoe.safetensors --keep 48")
Statistics = Annotated[Path, option("The file written by shrink score.")]
Keep = Annotated[int, option("Experts that stay in each layer.")]
TopK = Annotated[int | None, option("Experts per token (default: unchanged).")]


@verb(app, "olmoe --data text.jsonl --out olmoe.safetensors", resumes=True)
def score(
    model: Source,
    data: Data,
    out: Annotated[Path, option("The statistics to write, a .safetensors file.")],
    outputs: Annotated[
        bool,
        option("Run every expert on every token, for merge, acp and do-acp.", "--outputs"),
    ] = False,
    tokens: Annotated[int, option("Tokens to read, at most.")] = 131072,
    max_length: MaxLength = 4096,
    pack: Annotated[
        bool, option("Pack short examples into samples of --max-length tokens.")
    ] = True,
    batch_size: Annotated[int, option("Samples per forward pass.")] = 1,
    prompt: Prompt = "plain",
    seed: Seed = 0,
    overwrite: Overwrite = False,
) -> Any:
    """Measure what each expert does on a text.

    One pass: how often each expert is chosen, with which weights, and how large its outputs are.
    """
    require("datasets")
    from moe_runtime.methods.shrink.runs import score_folder

    with console.bar("scoring", "token") as update:
        statistics = score_folder(
            model,
            data,
            out,
            outputs=outputs,
            n_tokens=tokens,
            max_length=max_length,
            packed=pack,
            batch_size=batch_size,
            prompt=prompt,
            seed=seed,
            overwrite=overwrite,
            progress=update,
        )
    experts = len(next(iter(statistics.layers.values()))["count"])
    if console.is_main():
        typer.echo(
            f"{statistics.tokens:,} tokens, {len(statistics.layers)} layers of {experts} experts"
        )
        typer.echo(f"wrote {out}")
        typer.echo(
            f"next: moe-runtime shrink prune {model} OUT --statistics {out} --keep {experts // 2}"
        )
    return {
        "tokens": statistics.tokens,
        "layers": len(statistics.layers),
        "experts": experts,
        "files": [out],
    }


@verb(app, "olmoe olmoe-48 --statistics olmoe.safetensors --keep 48", push="out")
def prune(
    model: Source,
    out: Target,
    statistics: Statistics,
    keep: Keep,
    by: Annotated[str, option("reap or frequency.", words="reap frequency")] = "reap",
    top_k: TopK = None,
    max_shard_size: ShardSize = "2GB",
    overwrite: Overwrite = False,
) -> Any:
    """Keep the most important experts of each layer.

    Their bytes stay the same; the result loads in transformers as the model does.
    """
    from moe_runtime.methods.shrink.folders import prune_folder

    receipt = with_bar(
        "pruning",
        prune_folder,
        model,
        statistics,
        out,
        keep,
        by=by,
        top_k=top_k,
        max_shard_size=max_shard_size,
        overwrite=overwrite,
    )
    return _tell(receipt)


@verb(app, "olmoe olmoe-48 --statistics olmoe.safetensors --keep 48", push="out")
def merge(
    model: Source,
    out: Target,
    statistics: Statistics,
    keep: Keep,
    by: Annotated[str, option("ream, m-smoe or hc-smoe.", words="ream m-smoe hc-smoe")] = "ream",
    align: Annotated[
        bool | None, option("Match the experts' neurons first (default: ream and m-smoe).")
    ] = None,
    group_size: Annotated[int, option("Most experts that ream merges to one.")] = 16,
    top_k: TopK = None,
    max_shard_size: ShardSize = "2GB",
    overwrite: Overwrite = False,
) -> Any:
    """Merge similar experts of each layer.

    Needs statistics with --outputs.
    """
    require("scipy")
    from moe_runtime.methods.shrink.folders import merge_folder

    receipt = with_bar(
        "merging",
        merge_folder,
        model,
        statistics,
        out,
        keep,
        by=by,
        align=align,
        group_size=group_size,
        top_k=top_k,
        max_shard_size=max_shard_size,
        overwrite=overwrite,
    )
    return _tell(receipt)


@verb(app, "qwen3-moe dense --statistics qwen3.safetensors --keep 8", push="out")
def to_dense(
    model: Source,
    out: Target,
    statistics: Statistics,
    keep: Annotated[int, option("Experts that become the MLP of each layer.")],
    by: Annotated[str, option("do-acp, acp or cp.", words="do-acp acp cp")] = "do-acp",
    max_shard_size: ShardSize = "2GB",
    overwrite: Overwrite = False,
) -> Any:
    """Make a dense model of the most needed experts.

    Train it afterwards: moe-runtime train --distill MODEL.
    """
    from moe_runtime.methods.shrink.dense import dense_folder

    receipt = with_bar(
        "writing",
        dense_folder,
        model,
        statistics,
        out,
        keep,
        by=by,
        max_shard_size=max_shard_size,
        overwrite=overwrite,
    )
    return _tell(receipt)


@verb(app, "olmoe olmoe-48 --data held-out.jsonl")
def compare(
    before: Source,
    after: Annotated[Path, argument("Folder or Hub id of the other model."), HUB],
    data: Data,
    limit: Annotated[int, option("Examples to read, at most.")] = 64,
    max_length: MaxLength = 1024,
    batch_size: Annotated[int, option("Samples per forward pass.")] = 1,
    prompt: Prompt = "plain",
    train_on: TrainOn = "all",
) -> Any:
    """Compare two models' predictions on a text.

    Losses, divergence of the next token's distribution, and how often both predict the same one.
    """
    require("datasets")
    from moe_runtime.methods.shrink.runs import compare_folders

    found = compare_folders(
        before,
        after,
        data,
        limit=limit,
        max_length=max_length,
        batch_size=batch_size,
        prompt=prompt,
        train_on=train_on,
    )
    typer.echo(f"loss per token: {found.loss_before:.4f} before, {found.loss:.4f} after")
    typer.echo(
        f"KL divergence {found.divergence:.4f}; both predict the same token for "
        f"{found.agreement:.1%} of {found.tokens:,} tokens of {found.examples} examples"
    )
    return found


def _tell(receipt: Any) -> Any:
    """Print a receipt."""
    typer.echo(
        f"wrote {receipt.path}: {receipt.experts} of {receipt.experts_before} experts, "
        f"{receipt.parameters / 1e6:,.1f} of {receipt.parameters_before / 1e6:,.1f} million "
        f"parameters, {receipt.bytes / 1e6:,.1f} of {receipt.bytes_before / 1e6:,.1f} MB"
    )
    if receipt.left_out:
        typer.echo(
            f"left out {len(receipt.left_out)} tensors of multi-token prediction, whose layers "
            "have experts too"
        )
    return receipt
