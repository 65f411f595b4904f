"""Memory per GPU, communication and bounds of a step for each engine of `memory --gpus N`.

    DDP      every GPU holds everything; gradients are all-reduced in buckets, which are a copy of
             them
    FSDP2    weights, gradients and state are sharded; a block's weights are gathered for its
             forward and backward pass
    ZeRO-3   sharded in the same way; up to a billion gathered weights stay
             (stage3_max_live_parameters)
    EP       the stacks of experts are sharded, everything else as in DDP; tokens are sent to their
             experts and back

Bytes that a GPU sends per optimizer step, with gathered weights P, gradients G and f = (n - 1) / n:

    DDP             2 f G
    FSDP2, ZeRO-3   f (2 P m + G m)
    EP              f (2 G_rest + 2 (2 + recomputed) m R H s L)

with m micro-batches, R = T K rows of H elements of s bytes, and L MoE layers. A step takes at least
the longest of its FLOPs at the GPU's rate, its bytes at the link's, and its weights, gradients and
state at the memory's.
"""

import math
from typing import NamedTuple

from torch import nn

from moe_runtime.hf.dropin import experts as dropin
from moe_runtime.modules.moe import MoE
from moe_runtime.tools import memory
from moe_runtime.tools.memory import Estimate

ENGINES = ("ddp", "fsdp2", "zero3", "ep")
LIVE = 10**9  # gathered weights that ZeRO-3 keeps by default


class Gpu(NamedTuple):
    """A GPU's data sheet: dense bfloat16 FLOP/s, and bytes/s of memory, of NVLink and of the
    network (one direction).
    """

    flops: float
    memory: float
    link: float
    network: float = 50e9  # 400 Gbit/s per GPU
    per_node: int = 8


GPUS = {
    "H100": Gpu(989e12, 3.35e12, 450e9),
    "H200": Gpu(989e12, 4.8e12, 450e9),
    "A800": Gpu(312e12, 2.04e12, 200e9, 25e9),
}


class Shapes(NamedTuple):
    """Sizes of a model that determine how it is sharded, in bytes of its weights; T tokens per
    micro-batch.
    """

    weights: int
    block: int  # of the largest layer
    blocks: int  # number of layers
    outside: int  # outside the layers
    expert_share: float  # of weights
    moe_layers: int
    row_bytes: int  # of a micro-batch's rows of one layer, T K H s
    active_experts: float  # share of a layer's experts that process a token


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


def shapes_of(model: nn.Module, tokens: int, size: int) -> Shapes:
    """Return the shapes of a model for micro-batches of `tokens` tokens of elements of `size`
    bytes.
    """
    wrapped = set(getattr(model, "_no_split_modules", None) or ())  # what accelerate wraps
    layers = [m for m in model.modules() if type(m).__name__ in wrapped]
    blocks = [sum(map(memory.nbytes, layer.parameters())) for layer in layers] or [0]
    weights = sum(map(memory.nbytes, model.parameters()))
    layers = 0
    K = 0
    H = 0
    E = 1
    for module in model.modules():
        if isinstance(module, MoE):
            c = module.config
            layers = layers + 1
            K = c.top_k or c.num_experts
            H = c.hidden_size
            E = c.num_experts
        elif dropin.is_experts(module):
            c = module.config
            layers = layers + 1
            K = getattr(c, "num_experts_per_tok", 1)
            H = c.hidden_size
            E = module.num_experts
    share = sum(map(memory.nbytes, memory.stacks_of(model))) / max(weights, 1)
    outside = weights - sum(blocks)
    rows = tokens * K * H * size
    return Shapes(
        weights,
        max(blocks),
        len(blocks),
        outside,
        share,
        layers,
        rows,
        K / E,
    )


def share_of(
    found: Estimate, shapes: Shapes, engine: str, gpus: int, compute: float = 1.0
) -> Share:
    """Return what each of `gpus` GPUs holds; `compute` is the size of a gathered weight relative to
    a stored one.
    """
    weights = found.experts + found.rest + found.adapters
    if gpus > 1 and engine != "ddp":
        active = found.active
    else:
        active = found.activations + found.temporary - found.overlap
    if engine == "ep":
        kept = 1 - shapes.expert_share * (1 - 1 / gpus)
        parts = [math.ceil(kept * size) for size in (weights, found.gradients, found.optimizer)]
        buckets = (1 - shapes.expert_share) * found.gradients
        return Share(
            *parts,
            active,
            math.ceil(buckets) + 2 * shapes.row_bytes if gpus > 1 else 0,
        )
    if engine == "ddp" or gpus == 1:
        return Share(
            weights,
            found.gradients,
            found.optimizer,
            active,
            found.gradients if gpus > 1 else 0,
        )
    if engine == "fsdp2":
        live = 2 * shapes.block + shapes.outside
    else:
        live = min(weights, LIVE * (shapes.weights / found.parameters))
    gathered = compute * (
        live + (shapes.block + shapes.outside) * found.gradients / max(weights, 1)
    )
    parts = [math.ceil(size / gpus) for size in (weights, found.gradients, found.optimizer)]
    return Share(
        *parts,
        active,
        math.ceil(gathered),
    )


class Wire(NamedTuple):
    """What one GPU sends per optimizer step."""

    bytes: int
    collectives: dict[str, int]


def wire_of(
    found: Estimate,
    shapes: Shapes,
    engine: str,
    gpus: int,
    micro: int = 1,
    compute: float = 1.0,
    checkpointing: bool = False,
) -> Wire:
    """Return the bytes that a GPU sends per optimizer step of `micro` micro-batches, and its
    collectives.
    """
    if gpus == 1:
        return Wire(0, {})
    f = (gpus - 1) / gpus
    if engine == "ddp":
        return Wire(math.ceil(2 * f * found.gradients), {"all_reduce": _buckets(found.gradients)})
    if engine == "ep":
        experts = shapes.expert_share * shapes.weights
        rest = found.gradients * (1 - experts / max(shapes.weights, 1))
        exchanges = shapes.moe_layers * micro * (4 + 2 * checkpointing)
        # the counts are sent as well, once in each forward pass
        count = {
            "all_to_all": shapes.moe_layers * micro * (5 + 3 * checkpointing),
            "all_reduce": _buckets(rest),
        }
        return Wire(math.ceil(f * (2 * rest + exchanges * shapes.row_bytes)), count)
    # weights outside the blocks are gathered once and stay until the backward pass ends
    inside = shapes.weights - shapes.outside
    gathered = compute * (2 * inside + shapes.outside) * micro
    count = {
        "all_gather": (2 * shapes.blocks + 1) * micro,
        "reduce_scatter": (shapes.blocks + 1) * micro,
    }
    return Wire(math.ceil(f * (gathered + compute * found.gradients * micro)), count)


def _buckets(gradients: float) -> int:
    """Return the number of DDP's all-reduces for gradients of this size: the first bucket has 1
    MiB, the others 25 MiB.
    """
    return 1 + math.ceil(max(gradients - 2**20, 0) / (25 * 2**20))


def seconds_of(
    found: Estimate, wire: Wire, gpu: Gpu, gpus: int, tokens: int, active: int, engine: str = "ddp"
) -> dict[str, float]:
    """Return lower bounds of the seconds per step from its FLOPs (6 per token and active weight),
    the link and the memory.
    """
    link = gpu.link if gpus <= gpu.per_node else gpu.network
    states = found.states / (gpus if engine in ("fsdp2", "zero3") else 1)
    return {
        "compute": 6 * tokens * active / gpu.flops,
        "link": wire.bytes / link,
        "memory": 3 * states / gpu.memory,
    }
