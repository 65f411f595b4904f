"""moe-runtime lora: convert PEFT adapters of MoE models for current PEFT, an inference engine or a merged model."""

from pathlib import Path
from typing import Annotated

import typer

from moe_runtime.cli.verbs import HUB, Kept, Overwrite, ShardSize, Source, Target, argument, group, option, verb, with_bar

LORA = "LoRA adapters on experts: convert old ones, and export them for serving."
app = group("lora", LORA, "export olmoe adapter adapter-vllm --to vllm")
# what serves the files of each engine
SERVE = {
    "vllm": "vllm serve {base} --enable-lora --max-lora-rank {rank} --lora-modules NAME={out}",
    "sglang": "python -m sglang.launch_server --model-path {base} --enable-lora --lora-paths NAME={out}",
}
Adapter = Annotated[Path, argument("Folder or Hub id of the adapter, as PEFT saved it."), HUB]


@verb(app, "olmoe old-adapter adapter", Kept("{out}"), push="out")
def convert(base: Source, adapter: Adapter, out: Target, overwrite: Overwrite = False):
    """Write an adapter on expert stacks that PEFT 0.18 or 0.19 saved as PEFT 0.20 and later read it."""
    from moe_runtime.methods.lora.stacks import WRITES, convert_folder

    receipt = convert_folder(adapter, base, out, overwrite=overwrite)
    said = "no version, so before 0.18" if receipt.peft_version is None else receipt.peft_version
    typer.echo(
        f"{adapter}: peft_version {said}, A and B of {receipt.stacks} stacks over the wrong axes for PEFT 0.20 and later"
    )
    typer.echo(f"wrote {out}: the same change of every weight, as PEFT {WRITES} writes it")
    return receipt


@verb(app, "olmoe adapter adapter-vllm --to vllm", Kept("{out}"), push="out")
def export(
    base: Source, adapter: Adapter, out: Target,
    to: Annotated[str, option("vllm, sglang, or merged: a whole model.", words=(*SERVE, "merged"))],
    max_shard_size: ShardSize = "2GB", overwrite: Overwrite = False,
):  # fmt: skip
    """Write an adapter as vLLM or SGLang reads it, or a copy of the base with it merged, tensor by tensor."""
    from moe_runtime.config import check_choice
    from moe_runtime.methods.lora.serving import ENGINES, export_adapter

    check_choice("to", to, (*ENGINES, "merged"))
    if to == "merged":
        return _merge(base, adapter, out, max_shard_size, overwrite)
    receipt = export_adapter(adapter, base, out, to, overwrite=overwrite)
    if receipt.filled:
        typer.echo(f"{adapter} leaves {len(receipt.filled)} stacks alone, such as {receipt.filled[0]}; they have zeros")
    typer.echo(f"{receipt.tensors} tensors of rank {receipt.rank} by the names of {to} {receipt.version}, read {receipt.read}")
    typer.echo(f"wrote {out}: {receipt.bytes / 1e6:,.1f} MB, {receipt.layers} layers with LoRA on experts")
    typer.echo(f"next: {SERVE[to].format(base=base, rank=receipt.rank, out=out)}")
    return receipt


def _merge(base: Path, adapter: Path, out: Path, max_shard_size: str, overwrite: bool):
    """Write a whole model, under a bar."""
    from moe_runtime.methods.lora.stacks import merge_folder

    receipt = with_bar("merging", merge_folder, base, adapter, out, max_shard_size=max_shard_size, overwrite=overwrite)
    typer.echo(f"{adapter} changes {receipt.experts} experts, {receipt.changed} of {receipt.tensors} tensors in all")
    typer.echo(f"wrote {out}: {receipt.bytes / 1e6:,.1f} MB; and {', '.join(receipt.side_files)}")
    return receipt
