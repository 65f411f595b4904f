"""moe-runtime xft: upcycle a dense model, make the tuned MoE model mergeable, merge it."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from moe_runtime import config
from moe_runtime.cli import verbs
from moe_runtime.cli.verbs import (
    Overwrite,
    Seed,
    ShardSize,
    Source,
    Target,
    group,
    option,
    verb,
    with_bar,
)

app = group(
    "xft",
    "XFT: from a dense model to experts and back.",
    "upcycle llama-1b moe",
)
GATE = "xft, nonorm, topk_softmax, softmax_topk, softmax_topk_renorm or sigmoid_topk."
FOR = (
    "Stock family for an exact `export --to`: selects gate and top-k, and rejects options that it "
    "does not support."
)
PRESET = "Defaults of the options below: xft-paper, or xft-official for the released code's."


@verb(app, "llama-1b llama-1b-moe --num-experts 8 --top-k 6", push="target")
def upcycle(
    source: Source,
    target: Target,
    num_experts: Annotated[int, option("Experts per layer, including the shared one.")] = 8,
    top_k: Annotated[
        int | None, option("Experts per token, including the shared one (default: 6).")
    ] = None,
    for_: Annotated[str | None, option(FOR, "--for", words=config.STOCK_FAMILIES)] = None,
    preset: Annotated[str, option(PRESET, words=("xft-paper", "xft-official"))] = "xft-paper",
    gate: Annotated[str | None, option(GATE, words=config.GATES)] = None,
    router: Annotated[str | None, option("linear or mlp.", words=config.ROUTERS)] = None,
    noisy_gate: Annotated[bool | None, option("Noise on the router logits in training.")] = None,
    balance_loss: Annotated[
        str | None, option("none, cv2 or switch.", words=config.BALANCE_LOSSES)
    ] = None,
    balance_loss_coef: Annotated[float | None, option("Weight of the balance loss.")] = None,
    layers: Annotated[
        str | None, option("Layers to upcycle, such as 0-3,8 (default: all).")
    ] = None,
    init: Annotated[
        str, option("Experts at first: copy, noise or drop (redrawn).", words="copy noise drop")
    ] = "copy",
    ratio: Annotated[float, option("Share of neurons that noise and drop change.")] = 0.5,
    granularity: Annotated[int, option("Smaller experts that each one is cut into.")] = 1,
    max_shard_size: ShardSize = "2GB",
    seed: Seed = 42,
    overwrite: Overwrite = False,
) -> Any:
    """Upcycle a dense model to an MoE model.

    Copies of every MLP become experts with a router.
    """
    from moe_runtime.config import check_choice
    from moe_runtime.hf.models import stock
    from moe_runtime.methods.xft import folders
    from moe_runtime.methods.xft.presets import PRESETS

    check_choice("preset", preset, tuple(PRESETS))
    if num_experts == 1:
        raise ValueError(
            "num_experts must be at least 2, but got 1, which is the dense model itself"
        )
    if for_ is not None:
        gate, top_k = stock.exact_settings(for_, gate, top_k)
    given = {"gate": gate, "router": router, "noisy_gate": noisy_gate, "balance_loss": balance_loss}
    given["balance_loss_coef"] = balance_loss_coef
    settings = PRESETS[preset] | {name: value for name, value in given.items() if value is not None}
    if (settings["balance_loss"] == "none") != (settings["balance_loss_coef"] == 0):
        raise ValueError(
            f"balance_loss is {settings['balance_loss']!r} and balance_loss_coef is "
            f"{settings['balance_loss_coef']}. Pass both or neither, such as --balance-loss cv2 "
            "--balance-loss-coef 0.01"
        )
    receipt = with_bar(
        "upcycling",
        folders.upcycle_folder,
        source,
        target,
        layers=verbs.numbers(layers),
        seed=seed,
        max_shard_size=max_shard_size,
        overwrite=overwrite,
        num_experts=num_experts,
        top_k=6 if top_k is None else top_k,
        export_to=for_,
        init=init,
        ratio=ratio,
        granularity=granularity,
        **settings,
    )
    _print_receipt(receipt)
    typer.echo(f"next: moe-runtime train --model {target} --data pairs.jsonl --output_dir tuned")
    return receipt


@verb(app, "tuned mergeable --shared-rate 0.75", push="target")
def to_mergeable(
    source: Source,
    target: Target,
    shared_rate: Annotated[
        float, option("lambda: the mixing coefficient of the shared expert.")
    ] = 0.75,
    soup: Annotated[
        bool, option("Learn the coefficients of all experts (learned soup).", "--soup")
    ] = False,
    max_shard_size: ShardSize = "2GB",
    overwrite: Overwrite = False,
) -> Any:
    """Let a tuned MoE model learn how to merge.

    Each MLP weight becomes a sum over the experts with trainable coefficients.
    """
    from moe_runtime.methods.xft import folders

    receipt = with_bar(
        "writing",
        folders.mergeable_folder,
        source,
        target,
        shared_rate=shared_rate,
        soup=soup,
        max_shard_size=max_shard_size,
        overwrite=overwrite,
    )
    _print_receipt(receipt)
    typer.echo(
        f"next: moe-runtime train --model {target} --data pairs.jsonl --learning_rate 1e-2 "
        "--output_dir mixed"
    )
    typer.echo("then: moe-runtime xft merge mixed dense")
    return receipt


def _alpha(text: str) -> str | list[float]:
    return text if text == "uniform" else [float(part) for part in text.split(",")]


ALPHA = "Coefficients instead of the learned ones: uniform, or E numbers a,b,... that sum to 1."
Alpha = Annotated[str | None, option(ALPHA, parser=_alpha, metavar="<str>")]


@verb(app, "mixed dense", push="target")
def merge(
    source: Source,
    target: Target,
    shared_rate: Annotated[
        float | None, option("lambda of a merge without training (default: 0.75).")
    ] = None,
    alpha: Alpha = None,
    max_shard_size: ShardSize = "2GB",
    overwrite: Overwrite = False,
) -> Any:
    """Merge the experts into a dense model.

    Of the base's architecture, with the learned or the initial coefficients.
    """
    from moe_runtime.methods.xft import folders

    receipt = with_bar(
        "merging",
        folders.merge_folder,
        source,
        target,
        shared_rate=shared_rate,
        alpha=alpha,
        max_shard_size=max_shard_size,
        overwrite=overwrite,
    )
    _print_receipt(receipt)
    typer.echo(receipt.mixing)
    for layer, row in zip(receipt.layers, receipt.alpha):
        typer.echo(f"layer {layer}: alpha " + " ".join(f"{value:.4f}" for value in row))
    return receipt


TO = "Stock family of transformers; in xft export also official (XFT code)."
To = Annotated[
    str,
    option(
        TO,
        "--to",
        "--as",
        words=(*config.STOCK_FAMILIES, "official"),
    ),
]


@verb(app, "moe mixtral --to mixtral", push="target")
def export(
    source: Source,
    target: Target,
    to: To = "mixtral",
    check: Annotated[bool, option("Load both models and compare their logits.", "--check")] = False,
    keep_rope: Annotated[
        bool, option("With --to official: keep a rotary base that it ignores.", "--keep-rope")
    ] = False,
    max_shard_size: ShardSize = "2GB",
    overwrite: Overwrite = False,
) -> Any:
    """Export an MoE model for other packages.

    To a format that does not need this one. For a dense model, merge.
    """
    if to == "official" and check:
        raise ValueError("--check is not valid with --to official")
    if to != "official" and keep_rope:
        raise ValueError(f"--keep-rope is not valid with --to {to}")
    if to == "official":
        from moe_runtime.methods.xft.official import export_official

        return convert(
            export_official,
            source,
            target,
            keep_rope=keep_rope,
            max_shard_size=max_shard_size,
            overwrite=overwrite,
        )
    return to_stock(
        source,
        target,
        to,
        check=check,
        max_shard_size=max_shard_size,
        overwrite=overwrite,
    )


@verb(app, "official-moe moe", push="target")
def import_official(
    source: Source,
    target: Target,
    ffn_folder: Annotated[
        Path | None, option("Folder of ffn_layer files (default: the config's).")
    ] = None,
    rope_theta: Annotated[
        float | None, option("Rotary base (default: the released code's).")
    ] = None,
    max_shard_size: ShardSize = "2GB",
    overwrite: Overwrite = False,
) -> Any:
    """Convert an MoE model saved by the released XFT code."""
    from moe_runtime.methods.xft.official import import_official

    return convert(
        import_official,
        source,
        target,
        ffn_folder=ffn_folder,
        rope_theta=rope_theta,
        max_shard_size=max_shard_size,
        overwrite=overwrite,
    )


def to_stock(source: Path, target: Path, to: str, **options: Any) -> Any:
    """Write a stock model, print how far its logits differ, and return its receipt."""
    from moe_runtime.hf.models.stock import export_stock

    receipt = convert(export_stock, source, target, to=to, **options)
    if receipt.logits_error is None:
        error = ""
    else:
        error = f"; the logits differ by {receipt.logits_error:.1e} relative"
    typer.echo(f"{to} computes the same{error}")
    return receipt


def convert(write: Callable[..., Any], source: Path, target: Path, **options: Any) -> Any:
    """Write a folder in another format with `write`; return its receipt."""
    receipt = with_bar("writing", write, source, target, **options)
    typer.echo(f"wrote {receipt.path}: {receipt.tensors} tensors, {receipt.bytes / 1e6:,.1f} MB")
    return receipt


def _print_receipt(receipt) -> None:
    c = receipt.config
    typer.echo(f"wrote {receipt.path}: {receipt.tensors} tensors, {receipt.bytes / 1e6:,.1f} MB")
    typer.echo(
        f"experts: {c.num_experts}, {c.top_k} per token, gate {c.gate}, {c.hidden_size} x "
        f"{c.intermediate_size}"
    )
    if receipt.mlp_error is not None:
        typer.echo(f"the MLPs against the formula: largest relative error {receipt.mlp_error:.1e}")
