"""Memory of trainings on several GPUs: what each GPU holds with each engine, and whether it fits.

DDP      every GPU holds everything; gradients are all-reduced in buckets, which are a copy of
         them
FSDP2    weights, gradients and state are sharded; a block's weights are gathered for its
         forward and backward pass
ZeRO-3   sharded in the same way; up to a billion gathered weights stay
         (stage3_max_live_parameters)
EP       the stacks of experts are sharded, everything else as in DDP; tokens are sent to their
         experts and back
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from moe_runtime.config import check_choice
from moe_runtime.hf.dropin import experts as dropin
from moe_runtime.hf.training.settings import Training
from moe_runtime.modules.moe import MoE
from moe_runtime.tools import memory
from moe_runtime.tools.memory import Estimate

ENGINES = ("ddp", "fsdp2", "zero3", "ep")
RESERVED = 1.5e9  # assumed bytes for the CUDA context, NCCL's buffers and fragmentation
LIVE = 10**9  # gathered weights that ZeRO-3 keeps by default
# names of optimizers in transformers; any other counts as AdamW
OPTIMIZERS = {"adamw_bnb_8bit": "8bit"} | {name: name for name in memory.OPTIMIZERS}


class PlannedTraining(NamedTuple):
    """One training: `make()` builds its model on the meta device, `inputs(B)` a batch."""

    name: str
    make: Callable[[], nn.Module]
    inputs: Callable[[int], dict]
    training: Training
    length: int
    runs: bool = True  # False: a baseline of a table
    prepare: Callable[[nn.Module], Any] | None = None
    packed: str | None = None  # the format of its frozen experts


class Share(NamedTuple):
    """Bytes on one GPU."""

    weights: int
    gradients: int
    optimizer: int
    activations: int  # and temporaries
    buffers: int  # of the engine: buckets, gathered blocks, rows being sent

    @property
    def total(self) -> int:
        """Sum of all parts."""
        return sum(self)


class Shapes(NamedTuple):
    """Sizes of a model that determine how it is sharded, in bytes of its weights."""

    weights: int
    block: int  # of the largest layer
    outside: int  # outside the layers
    expert_share: float  # of weights
    row_bytes: int  # of a micro-batch's rows of one layer


def shapes_of(model: nn.Module, tokens: int, size: int) -> Shapes:
    """Return the shapes of a model for micro-batches of `tokens` tokens of `size`-byte elements."""
    wrapped = set(getattr(model, "_no_split_modules", None) or ())  # what accelerate wraps
    blocks = [0]
    row = 0
    for module in model.modules():
        if type(module).__name__ in wrapped:
            blocks.append(sum(map(memory.nbytes, module.parameters())))
        if isinstance(module, MoE):
            row = (module.config.top_k or module.config.num_experts) * module.config.hidden_size
        elif dropin.is_experts(module):
            row = getattr(module.config, "num_experts_per_tok", 1) * module.config.hidden_size
    weights = sum(map(memory.nbytes, model.parameters()))
    experts = sum(map(memory.nbytes, memory.stacks_of(model)))
    return Shapes(
        weights=weights,
        block=max(blocks),
        outside=weights - sum(blocks),
        expert_share=experts / max(weights, 1),
        row_bytes=tokens * row * size,
    )


def share_of(
    estimate: Estimate, shapes: Shapes, engine: str, gpus: int, compute: float = 1.0
) -> Share:
    """Return what each of `gpus` GPUs holds.

    `compute` is the size of a gathered weight relative to a stored one.
    """
    weights = estimate.experts + estimate.rest + estimate.adapters
    held = (weights, estimate.gradients, estimate.optimizer)
    if engine == "ddp" or gpus == 1:
        active = estimate.activations + estimate.temporary - estimate.overlap
        buckets = estimate.gradients if gpus > 1 else 0
        return Share(*held, active, buckets)
    if engine == "ep":
        fraction = 1 - shapes.expert_share * (1 - 1 / gpus)
        buffers = (1 - shapes.expert_share) * estimate.gradients + 2 * shapes.row_bytes
    else:
        fraction = 1 / gpus
        if engine == "fsdp2":
            live = 2 * shapes.block + shapes.outside
        else:
            live = min(weights, LIVE * (shapes.weights / estimate.parameters))
        reduced = (shapes.block + shapes.outside) * estimate.gradients / max(weights, 1)
        buffers = compute * (live + reduced)
    parts = [math.ceil(fraction * size) for size in held]
    return Share(*parts, estimate.active, math.ceil(buffers))


class Planner:
    """Trainings, and the engines that run them."""

    def __init__(self, stages: Sequence[PlannedTraining], engines: Sequence[str] = ENGINES):
        self.stages = {one.name: one for one in stages}
        self.engines = tuple(engines)
        self._counted = functools.cache(self._count)  # engines share counts

    def engines_for(self, name: str, engine: str | None, gpus: int) -> tuple[str, ...]:
        """Return the engines to compare for a stage: the requested one, or all that apply.

        Raises ValueError for expert parallelism on GPUs that do not divide the experts.
        """
        if engine is not None:
            check_choice("engine", engine, ENGINES)
            engines = (engine,)
        elif gpus > 1:
            engines = self.engines
        else:
            engines = ("ddp",)
        if "ep" not in engines:
            return engines
        counts = {p.shape[0] for p in memory.stacks_of(self.stages[name].make())}
        if counts and all(count % gpus == 0 for count in counts):
            return engines
        if engine == "ep":
            raise ValueError(
                f"Engine ep requires that {gpus} GPUs divide the experts, but {name} has layers "
                f"of {sorted(counts)} experts. Pass another --gpus"
            )
        return tuple(one for one in engines if one != "ep")

    def share(self, name: str, engine: str, gpus: int) -> Share:
        """Return what a GPU holds in a stage with an engine."""
        training = self.stages[name].training
        batch = training.per_device_batch_size or max(training.batch_size // gpus, 1)
        accumulates = training.batch_size >= 2 * batch * gpus
        is_sharded = gpus > 1 and engine in ("fsdp2", "zero3") and training.bf16
        if not is_sharded:
            estimate, shapes = self._counted(name, batch, accumulates, None)
            return share_of(estimate, shapes, engine, gpus)
        # weights are gathered in bfloat16, so autocast saves no casts of them
        estimate, shapes = self._counted(name, batch, accumulates, torch.float32)
        narrow, smaller = self._counted(name, batch, accumulates, torch.bfloat16)
        estimate = estimate._replace(active=narrow.active)
        compute = smaller.weights / max(shapes.weights, 1)
        return share_of(estimate, shapes, engine, gpus, compute)

    def _count(
        self, name: str, batch: int, accumulates: bool, dtype: torch.dtype | None
    ) -> tuple[Estimate, Shapes]:
        stage = self.stages[name]
        model = stage.make()
        # accelerate's FSDP2 casts trainable weights to float32
        if dtype == torch.float32 and stage.prepare is None:
            for p in model.parameters():
                if p.requires_grad:
                    p.data = p.data.float()
        if dtype == torch.bfloat16:
            model = model.to(dtype)
        bf16 = stage.training.bf16
        size = 2 if bf16 else next(model.parameters()).element_size()
        estimate = memory.estimate(
            model,
            lambda: stage.inputs(batch),
            optimizer=OPTIMIZERS.get(stage.training.optimizer, "adamw"),
            checkpointing=stage.training.gradient_checkpointing,
            bf16=bf16,
            accumulate=accumulates,
            prepare=stage.prepare,
            packed=stage.packed,
        )
        return estimate, shapes_of(model, batch * stage.length, size)


COLUMNS = (*Share._fields, "all")
HEADER = f"{'GB':18s}" + "".join(f"{name:>12s}" for name in COLUMNS)


def as_text(stage: str, engine: str, share: Share) -> str:
    """Format a stage as one line: what one GPU holds, in GB."""
    columns = "".join(f"{size / 1e9:12.1f}" for size in (*share, share.total))
    return f"{stage:12s}{engine:>6s}{columns}"
