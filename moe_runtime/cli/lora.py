"""moe-runtime lora: convert PEFT adapters of MoE models for current PEFT, an inference engine or a
merged model.
"""

from pathlib import Path
from typing import Annotated

import typer

from moe_runtime.cli.verbs import (
    HUB,
    Overwrite,
    ShardSize,
    Source,
    Target,
    argument,
    group,
    option,
    verb,
    with_bar,
)

LORA = "LoRA adapters on experts: convert old ones, and export them for serving."
app = group("lora", LORA, "export olmoe adapter adapter-vllm --to vllm")
# the command that serves the files of each engine
SERVE = {
    "vllm": "vllm serve {base} --enable-lora --max-lora-rank {rank} --lora-modules NAME={out}",
    "sglang": (
        "python -m sglang.launch_server --model-path {base} --enable-lora --lora-paths NAME={out}"
    ),
}
Adapter = Annotated[Path, argument("Folder or Hub id of the adapter, as PEFT saved it."), HUB]


@verb(app, "olmoe old-adapter adapter", push="out")
def convert(base: Source, adapter: Adapter, out: Target, overwrite: Overwrite = False):
    """Convert an adapter on expert stacks, saved by PEFT 0.18 or 0.19, for PEFT 0.20 and later."""
    from moe_runtime.methods.lora.stacks import WRITES, convert_folder

    receipt = convert_folder(adapter, base, out, overwrite=overwrite)
    version = "no version, so before 0.18" if receipt.peft_version is None else receipt.peft_version
    typer.echo(
        f"{adapter}: peft_version {version}, with old axes in A and B of {receipt.stacks} stacks"
    )
    typer.echo(f"wrote {out}: the same change of every weight, in the layout of PEFT {WRITES}")
    return receipt


@verb(app, "olmoe adapter adapter-vllm --to vllm", push="out")
def export(
    base: Source,
    adapter: Adapter,
    out: Target,
    to: Annotated[str, option("vllm, sglang, or merged: a whole model.", words=(*SERVE, "merged"))],
    max_shard_size: ShardSize = "2GB",
    overwrite: Overwrite = False,
):
    """Export an adapter for vLLM or SGLang, or merge it into a copy of the base, tensor by
    tensor.
    """
    from moe_runtime.config import check_choice
    from moe_runtime.methods.lora.serving import ENGINES, export_adapter

    check_choice("to", to, (*ENGINES, "merged"))
    if to == "merged":
        return _merge(base, adapter, out, max_shard_size, overwrite)
    receipt = export_adapter(adapter, base, out, to, overwrite=overwrite)
    if receipt.filled:
        typer.echo(
            f"{adapter} does not change {len(receipt.filled)} stacks, such as {receipt.filled[0]}; "
            "they get zeros"
        )
    typer.echo(
        f"{receipt.tensors} tensors of rank {receipt.rank}, named as in {to} {receipt.version} "
        f"(read {receipt.read})"
    )
    typer.echo(
        f"wrote {out}: {receipt.bytes / 1e6:,.1f} MB, {receipt.layers} layers with LoRA on experts"
    )
    typer.echo(f"next: {SERVE[to].format(base=base, rank=receipt.rank, out=out)}")
    return receipt


def _merge(base: Path, adapter: Path, out: Path, max_shard_size: str, overwrite: bool):
    """Write a merged model, with a progress bar."""
    from moe_runtime.methods.lora.stacks import merge_folder

    receipt = with_bar(
        "merging",
        merge_folder,
        base,
        adapter,
        out,
        max_shard_size=max_shard_size,
        overwrite=overwrite,
    )
    typer.echo(
        f"{adapter} changes {receipt.experts} experts, {receipt.changed} of {receipt.tensors} "
        "tensors in all"
    )
    typer.echo(f"wrote {out}: {receipt.bytes / 1e6:,.1f} MB; and {', '.join(receipt.side_files)}")
    return receipt
