"""moe-runtime upcycle, to-mergeable, merge, export: XFT's conversions of model folders, a tensor at a time."""

from typing import Annotated

import typer

from moe_runtime import config
from moe_runtime.cli.verbs import ReplaceTarget, Seed, ShardSize, Source, Target, Whole, choices, numbers, verb
from moe_runtime.io import console
from moe_runtime.io.console import jsonable

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None)

SharedRate = Annotated[float, typer.Option(help="lambda: the shared expert's mixing coefficient.")]


@verb(app, example="moe-runtime upcycle llama-1b llama-1b-moe --num-experts 8 --top-k 6", kept=Whole("target"))
def upcycle(
    source: Source,
    target: Target,
    num_experts: Annotated[int, typer.Option(help="Experts per layer, the shared one counted.")] = 8,
    top_k: Annotated[int, typer.Option(help="Experts per token, the shared one counted.")] = 6,
    preset: Annotated[
        str,
        typer.Option(
            help="What the options below are unless given: xft-paper, or xft-official for its code's.",
            autocompletion=choices(*config.PRESETS),
        ),
    ] = "xft-paper",
    gate: Annotated[
        str | None,
        typer.Option(
            help="xft, nonorm, topk_softmax, softmax_topk, softmax_topk_renorm or sigmoid_topk.",
            autocompletion=choices(*config.GATES),
        ),
    ] = None,
    router: Annotated[str | None, typer.Option(help="linear or mlp.", autocompletion=choices(*config.ROUTERS))] = None,
    noisy_gate: Annotated[
        bool | None, typer.Option("--noisy-gate/--no-noisy-gate", help="Noise on the router logits while training.")
    ] = None,
    balance_loss: Annotated[
        str | None, typer.Option(help="none, cv2 or switch.", autocompletion=choices(*config.BALANCE_LOSSES))
    ] = None,
    balance_loss_coef: Annotated[float | None, typer.Option(help="Weight of the balance loss.")] = None,
    layers: Annotated[str | None, typer.Option(help="Layers to upcycle, such as 0-3,8; all by default.")] = None,
    check: Annotated[bool, typer.Option("--check", help="Load both models and compare their logits.")] = False,
    max_shard_size: ShardSize = "2GB",
    seed: Seed = 42,
    overwrite: ReplaceTarget = False,
):
    """Turn a dense model into a mixture of experts: every MLP becomes copies of itself behind a router."""
    from moe_runtime.config import PRESETS, check_choice
    from moe_runtime.methods.xft import folders as xft_folders

    check_choice("preset", preset, tuple(PRESETS))
    given = {
        "gate": gate, "router": router, "noisy_gate": noisy_gate, "balance_loss": balance_loss,
        "balance_loss_coef": balance_loss_coef,
    }  # fmt: skip
    settings = PRESETS[preset] | {name: value for name, value in given.items() if value is not None}
    if (settings["balance_loss"] == "none") != (settings["balance_loss_coef"] == 0):
        raise ValueError(
            f"balance_loss is {settings['balance_loss']!r}, balance_loss_coef is {settings['balance_loss_coef']}; want "
            "both or neither, such as --balance-loss cv2 --balance-loss-coef 0.01"
        )
    with console.bar("upcycling", "B") as update:
        receipt = xft_folders.upcycle_folder(
            source, target, layers=numbers(layers), seed=seed, max_shard_size=max_shard_size, overwrite=overwrite,
            progress=update, num_experts=num_experts, top_k=top_k, **settings,
        )  # fmt: skip
    _say(receipt)
    error = None
    if check:
        with console.bar("checking", "model") as update:
            error = xft_folders.compare_folders(source, target, update)
        typer.echo(f"upcycled against dense logits: relative error {error:.1e}")
    typer.echo(f"next: moe-runtime train --model {target} --data pairs.jsonl --output_dir tuned")
    return jsonable(receipt) | {"logits_error": error}


@verb(app, example="moe-runtime to-mergeable tuned mergeable --shared-rate 0.75", kept=Whole("target"))
def to_mergeable(
    source: Source,
    target: Target,
    shared_rate: SharedRate = 0.75,
    soup: Annotated[bool, typer.Option("--soup", help="Learn the coefficients of all experts (learned soup).")] = False,
    max_shard_size: ShardSize = "2GB",
    overwrite: ReplaceTarget = False,
):
    """Make a tuned mixture mergeable: its MLP weights become a mixture of the experts with logits to train."""
    from moe_runtime.methods.xft import folders as xft_folders

    with console.bar("writing", "B") as update:
        receipt = xft_folders.mergeable_folder(
            source, target, shared_rate=shared_rate, soup=soup, max_shard_size=max_shard_size, overwrite=overwrite,
            progress=update,
        )  # fmt: skip
    _say(receipt)
    typer.echo(
        f"next: moe-runtime train --model {target} --data pairs.jsonl --output_dir mixed; then moe-runtime merge mixed dense"
    )
    return receipt


@verb(app, example="moe-runtime merge mixed dense", kept=Whole("target"))
def merge(
    source: Source,
    target: Target,
    shared_rate: Annotated[
        float | None, typer.Option(help="lambda of a merge without training; 0.75 unless given.", show_default=False)
    ] = None,
    alpha: Annotated[
        str | None,
        typer.Option(help="Coefficients in place of the learned ones: uniform, or E numbers a,b,... that sum to 1."),
    ] = None,
    max_shard_size: ShardSize = "2GB",
    overwrite: ReplaceTarget = False,
):
    """Merge the experts to a dense model of the base's own architecture, with the learned or the initial coefficients."""
    from moe_runtime.methods.xft import folders as xft_folders

    with console.bar("merging", "B") as update:
        receipt = xft_folders.merge_folder(
            source, target, shared_rate=shared_rate, alpha=_alpha(alpha), max_shard_size=max_shard_size,
            overwrite=overwrite, progress=update,
        )  # fmt: skip
    _say(receipt)
    for layer, row in zip(receipt.layers, receipt.alpha):
        typer.echo(f"layer {layer}: alpha " + " ".join(f"{value:.4f}" for value in row))
    return receipt


@verb(app, example="moe-runtime export moe mixtral", kept=Whole("target"))
def export(
    source: Source,
    target: Target,
    to: Annotated[
        str,
        typer.Option(
            help="mixtral (transformers' own), or official (the code of the XFT paper).",
            autocompletion=choices("mixtral", "official"),
        ),
    ] = "mixtral",
    max_shard_size: ShardSize = "2GB",
    overwrite: ReplaceTarget = False,
):
    """Write a mixture as others read it, without this package; to a dense model, merge does."""
    from moe_runtime.config import check_choice

    check_choice("to", to, ("mixtral", "official"))
    if to == "mixtral":
        from moe_runtime.methods.upit.mixtral import export_mixtral as write
    else:
        from moe_runtime.methods.xft.official import export_official as write
    with console.bar("writing", "B") as update:
        receipt = write(source, target, max_shard_size=max_shard_size, overwrite=overwrite, progress=update)
    typer.echo(f"wrote {receipt.path}: {receipt.tensors} tensors, {receipt.bytes / 1e6:,.1f} MB")
    return receipt


def _alpha(text: str | None) -> str | list[float] | None:
    if text is None or text == "uniform":
        return text
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"alpha is {text!r}; want 'uniform' or numbers such as 0.75,0.125,0.125") from None


def _say(receipt) -> None:
    c = receipt.config
    typer.echo(
        f"wrote {receipt.path}: {receipt.tensors} tensors, {receipt.bytes / 1e6:,.1f} MB"
        + (f", and {', '.join(receipt.side_files)}" if receipt.side_files else "")
    )
    typer.echo(f"experts: {c.num_experts}, {c.top_k} per token, gate {c.gate}, {c.hidden_size} x {c.intermediate_size}")
    if receipt.mlp_error is not None:
        typer.echo(f"the MLPs against the formula: largest relative error {receipt.mlp_error:.1e}")
