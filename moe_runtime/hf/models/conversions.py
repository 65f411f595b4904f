"""What the conversions of model folders share: the loop's counts, the receipt, and what an upcycled folder says of itself."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch

from moe_runtime.config import MoEConfig
from moe_runtime.hf.models import families, folders
from moe_runtime.hf.models.configuration import moe_config
from moe_runtime.io.checkpoint import Checkpoint, CheckpointWriter, TensorSpec
from moe_runtime.ops.merging import check_mixture, init_mixture, mixing, uniform_mixture

__all__ = ["FolderReceipt"]  # what users see; the rest is for the conversions

SHARD = 2 * 2**30
Progress = Callable[[int, int], None]  # bytes of the source done, bytes in all


class FolderReceipt(NamedTuple):
    """What a conversion wrote."""

    path: Path
    config: MoEConfig
    tensors: int
    bytes: int
    side_files: list[str]  # tokenizer and the like, copied
    layers: list[int]
    mlp_error: float | None = None  # upcycling: first, middle and last MLP against the formula, relative
    alpha: list[list[float]] | None = None  # merging: [L, E]


class Conversion:
    """What every conversion counts while it walks the source's keys: what it has read, what it has written.

    `source` has the reading half of Checkpoint; `specs` are those of its tensors that are read, all by default.
    """

    def __init__(
        self,
        source: Checkpoint,
        writer: CheckpointWriter,
        progress: Progress | None,
        specs: dict[str, TensorSpec] | None = None,
    ):
        self.source, self.writer, self.progress = source, writer, progress
        self.specs = source.specs() if specs is None else specs
        self.total = sum(spec.nbytes for spec in self.specs.values())
        self.done = self.tensors = self.bytes = 0

    def add(self, key: str, tensor: torch.Tensor) -> None:
        """Write a tensor of the target."""
        self.writer.add(key, tensor)
        self.tensors += 1
        self.bytes += tensor.numel() * tensor.element_size()

    def read(self, *keys: str) -> None:
        """Report tensors of the source as done."""
        self.done += sum(self.specs[key].nbytes for key in keys)
        if self.progress is not None:
            self.progress(self.done, self.total)


def open_upcycled(source: str | Path, stage: str | None = None):
    """Return config, MoEConfig and {path of an upcycled MLP: layer} of an upcycled folder, at `stage` if given."""
    config = folders.read_config(source)
    block = getattr(config, "moe_runtime", None)
    found = None if block is None else block.get("stage")
    if found is None or stage not in (None, found):
        want = "an upcycled model's folder" if found is None else repr(stage)
        raise ValueError(f"model is {str(source)!r} of model_type {config.model_type!r}, stage {found!r}; want {want}")
    family = families.FAMILIES[block["base_model_type"]]
    return config, moe_config(config), {family.path.format(layer): layer for layer in block["layers"]}


def mixture_of(checkpoint: Checkpoint, config, moe: MoEConfig, path: str, shared_rate: float = 0.75) -> torch.Tensor:
    """Return alpha [E] of a layer as its stage says: INIT's at `shared_rate`, the learned one, or EWA's mean."""
    block = config.moe_runtime
    if block["stage"] == "ewa":
        return uniform_mixture(moe.num_experts)
    if block["stage"] == "moe":
        return init_mixture(moe, shared_rate)
    logits = checkpoint.get(f"{path}.mixing_logits")
    alpha = mixing(logits, None if block["soup"] else block["shared_rate"])
    return check_mixture(alpha, f"{path} of {checkpoint.path}")


def expert_rows(checkpoint: Checkpoint, key: str) -> Iterator[torch.Tensor]:
    """Read the stack `key` [E, ...] expert by expert."""
    return (checkpoint.get_rows(key, e) for e in range(checkpoint.specs()[key].shape[0]))
