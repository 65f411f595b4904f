"""moe-runtime lora: convert PEFT adapters of MoE models for current PEFT, or merge them."""

from pathlib import Path
from typing import Annotated, Any

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

LORA = "LoRA on experts: convert and merge adapters."
app = group("lora", LORA, "export olmoe adapter merged --to merged")
Adapter = Annotated[Path, argument("Folder or Hub id of the adapter, as PEFT saved it."), HUB]


@verb(app, "olmoe old-adapter adapter", push="out")
def convert(base: Source, adapter: Adapter, out: Target, overwrite: Overwrite = False) -> Any:
    """Convert an old adapter for current PEFT.

    An adapter on expert stacks, saved by PEFT 0.18 or 0.19, for PEFT 0.20 and later.
    """
    from moe_runtime.methods.lora.stacks import WRITES, convert_folder

    receipt = convert_folder(adapter, base, out, overwrite=overwrite)
    typer.echo(
        f"{adapter}: peft_version {receipt.peft_version}, with old axes in A and B of "
        f"{receipt.stacks} stacks"
    )
    typer.echo(f"wrote {out}: the same change of every weight, in the layout of PEFT {WRITES}")
    return receipt


@verb(app, "olmoe adapter merged --to merged", push="out")
def export(
    base: Source,
    adapter: Adapter,
    out: Target,
    to: Annotated[str, option("merged: a whole model, for any engine.", words=("merged",))],
    max_shard_size: ShardSize = "2GB",
    overwrite: Overwrite = False,
) -> Any:
    """Merge an adapter into a copy of the base.

    Tensor by tensor, for any inference engine.
    """
    from moe_runtime.config import check_choice
    from moe_runtime.methods.lora.stacks import merge_folder

    check_choice("to", to, ("merged",))
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
    typer.echo(f"wrote {out}: {receipt.bytes / 1e6:,.1f} MB")
    return receipt
