"""moe-runtime lora: PEFT adapters of MoE models, as today's PEFT, an inference engine or a merged model has them."""

from pathlib import Path
from typing import Annotated

import typer

from moe_runtime.cli.verbs import Kept, Overwrite, ShardSize, Source, Target, argument, group, option, verb, with_bar

app = group("lora", "LoRA adapters on experts: convert, export, merge.", "export olmoe adapter adapter-vllm --to vllm")
Adapter = Annotated[Path, argument("Folder of the adapter, as PEFT saved it.")]


@verb(app, "olmoe old-adapter adapter", Kept("{out}"))
def convert(base: Source, adapter: Adapter, out: Target, overwrite: Overwrite = False):
    """Write an adapter on expert stacks that PEFT 0.18 or 0.19 saved as PEFT 0.20 and later read it."""
    from moe_runtime.methods.lora.stacks import convert_folder

    receipt = convert_folder(adapter, base, out, overwrite=overwrite)
    typer.echo(f"wrote {out}: {receipt.stacks} stacks of peft_version {receipt.peft_version} with today's axes")
    return receipt


@verb(app, "olmoe adapter adapter-vllm --to vllm", Kept("{out}"))
def export(
    base: Source, adapter: Adapter, out: Target,
    to: Annotated[str, option("vllm, sglang, or merged: a whole model.", words="vllm sglang merged")],
    max_shard_size: ShardSize = "2GB", overwrite: Overwrite = False,
):  # fmt: skip
    """Write an adapter as vLLM or SGLang reads it, or a copy of the base with it merged, tensor by tensor."""
    from moe_runtime.config import check_choice
    from moe_runtime.methods.lora.serving import ENGINES, export_adapter
    from moe_runtime.methods.lora.stacks import merge_folder

    check_choice("to", to, (*ENGINES, "merged"))
    if to == "merged":
        receipt = with_bar("merging", merge_folder, base, adapter, out, max_shard_size=max_shard_size, overwrite=overwrite)
        typer.echo(
            f"wrote {out}: {receipt.tensors} tensors, {receipt.bytes / 1e6:,.1f} MB, {receipt.changed} of them changed by "
            f"{adapter}, {receipt.experts} experts; and {', '.join(receipt.side_files)}"
        )
        return receipt
    receipt = export_adapter(adapter, base, out, to, overwrite=overwrite)
    typer.echo(
        f"wrote {out}: {receipt.tensors} tensors of rank {receipt.rank}, {receipt.bytes / 1e6:,.1f} MB, by the names of "
        f"{to} {receipt.version}; {receipt.layers} layers with experts"
        + (f", zeros for {len(receipt.filled)} stacks such as {receipt.filled[0]}" if receipt.filled else "")
    )
    if to == "vllm":
        typer.echo(f"next: vllm serve {base} --enable-lora --max-lora-rank {receipt.rank} --lora-modules NAME={out}")
    return receipt
