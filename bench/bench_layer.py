"""The experts of one layer against the floor (dense matmuls of the same FLOPs) and transformers'
implementations.

Gradients are those of x, both weights and the gate weights. The floor writes into existing buffers.
On a GPU also against a dense FFN of the same FLOPs, a composition of torch's grouped_mm, and the
installed packages of bench/peers.py.
"""

import functools

import pytest
import torch
import torch.nn.functional as F

from moe_runtime.bench import machine, peers, shapes
from moe_runtime.bench.machine import CUDA, DEVICE, fits
from moe_runtime.bench.official import OfficialBlock
from moe_runtime.config import MoEConfig
from moe_runtime.modules.moe import MoE
from moe_runtime.ops.moe_mlp import moe_mlp

KIND = "layer"
ROUNDS = 15 if CUDA else 9
DTYPES = [pytest.param(torch.float32, id="fp32")] * (not CUDA) + [
    pytest.param(torch.bfloat16, id="bf16")
]
GPU_SHAPES = shapes.layers()
EAGER = 4096  # most tokens for which transformers' loop over experts is measured
BATCHED = 64  # most tokens for its batched_mm, which is meant for decoding


def mixtral_experts(up, down, K: int, implementation: str):
    """Return transformers' experts on the parameters `up` [E, 2 * I, H] and `down` [E, H, I]."""
    from transformers import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralExperts

    E, H, I = down.shape
    config = MixtralConfig(
        hidden_size=H, intermediate_size=I, num_local_experts=E, num_experts_per_tok=K
    )
    config._experts_implementation = implementation
    with torch.device("meta"):
        experts = MixtralExperts(config)
    experts.gate_up_proj = up
    experts.down_proj = down
    return experts


def random_experts(shape) -> torch.Tensor:
    """Return ids [T, K] of random experts, the shared one last."""
    shared = int(shape.shared)
    scores = torch.rand(
        shape.T,
        shape.E - shared,
        device=DEVICE,
    )
    idx = scores.topk(shape.K - shared).indices + shared
    return torch.cat([idx, idx.new_zeros(shape.T, shared)], 1)


class LayerVariants:
    """Weights, tokens and routing of one shape, and each variant as a function."""

    def __init__(self, shape, dtype):
        torch.manual_seed(0)
        self.shape = shape
        T, H, I, E, K, _ = shape

        random = functools.partial(machine.random, dtype=dtype)
        self.x = random(T, H).requires_grad_()
        self.up = torch.nn.Parameter(random(E, 2 * I, H) * H**-0.5)
        self.down = torch.nn.Parameter(random(E, H, I) * I**-0.5)
        self.topk_idx = random_experts(shape)
        self.topk_weight = torch.rand(T, K, device=DEVICE).softmax(-1).requires_grad_()
        self.dout = random(T, H)
        self.flops = 6 * T * K * H * I
        self.buffers = {
            "rows": random(T * K, H),
            "z": random(T * K, 2 * I),
            "h": random(T * K, I),
            "y": random(T * K, H),
            "w1": random(2 * I, H),
            "w2": random(H, I),
            "dz": random(T * K, 2 * I),
            "dh": random(T * K, I),
            "dx": random(T * K, H),
            "dw1": random(2 * I, H),
            "dw2": random(H, I),
        }

    def floor_forward(self):
        b = self.buffers
        torch.mm(b["rows"], b["w1"].t(), out=b["z"])
        torch.mm(b["h"], b["w2"].t(), out=b["y"])

    def floor_both(self):
        self.floor_forward()
        b = self.buffers
        torch.mm(b["y"], b["w2"], out=b["dh"])
        torch.mm(b["y"].t(), b["h"], out=b["dw2"])
        torch.mm(
            b["dz"].t(),
            b["rows"],
            out=b["dw1"],
        )
        torch.mm(b["dz"], b["w1"], out=b["dx"])

    def bytes(self, backward: bool = False) -> int:
        """Return the least bytes that a layer moves: used weights, x, out and their gradients."""
        T, H, I, *_ = self.shape
        used = len(self.topk_idx.unique()) * 3 * H * I
        elements = used + 2 * T * H
        if backward:
            # weights again and their gradients; x, dout and dx
            elements += 2 * used + 3 * T * H
        return self.x.element_size() * elements

    def ours(self, **options):
        return moe_mlp(
            self.x,
            self.up,
            self.down,
            self.topk_weight,
            self.topk_idx,
            **options,
        )

    def transformers(self, implementation):
        experts = mixtral_experts(
            self.up,
            self.down,
            self.shape.K,
            implementation,
        )
        return lambda: experts(self.x, self.topk_idx, self.topk_weight)

    def official(self):
        """The experts as in the released XFT code, one by one, with this routing."""
        _, H, I, E, K, _ = self.shape
        moe = MoE(
            MoEConfig(hidden_size=H, intermediate_size=I, num_experts=E, top_k=K), device="meta"
        )
        moe.experts.gate_up_proj = self.up
        moe.experts.down_proj = self.down
        block = OfficialBlock(moe)

        def call():
            return block.run_experts(
                self.x,
                self.topk_idx,
                self.topk_weight.to(self.x.dtype),
            )

        return call, [self.x, *block.parts(), self.topk_weight], self.dout

    def dense(self):
        """A gated FFN over as many rows as all experts have in total."""
        rows, w1, w2 = (
            self.buffers[name].detach().requires_grad_() for name in ("rows", "w1", "w2")
        )

        def call():
            gate, up = F.linear(rows, w1).chunk(2, -1)
            return F.linear(F.silu(gate) * up, w2)

        return call, [rows, w1, w2], self.buffers["y"]

    def variants(self, notes):
        """Return name -> function, or name -> (function, differentiated inputs, dout).

        Reasons for missing variants are added to `notes`.
        """
        variants = {"moe_runtime": self.ours}
        reason = machine.missing("transformers")
        for name in ("eager", "grouped_mm", *self.batched(notes)):
            if reason:
                notes[f"transformers {name}"] = reason
            else:
                variants[f"transformers {name}"] = self.transformers(name)
        return variants | {"torch grouped_mm": functools.partial(peers.grouped_mm, self)}

    def batched(self, notes) -> list[str]:
        """Return batched_mm for few tokens: it gathers each slot's weights and their gradients."""
        T, H, I, _, K, _ = self.shape
        if T > BATCHED:
            return []
        need = 2 * 3 * T * K * H * I * self.x.element_size()
        there = machine.free_memory()
        if need <= there:
            return ["batched_mm"]
        notes["transformers batched_mm"] = (
            f"gathers {need / 2**30:.1f} GiB of weights and gradients, and {there / 2**30:.1f} are "
            "free"
        )
        return []

    def gpu_variants(self, notes):
        """Return `variants` and those that are measured only on a GPU, with `notes` for others."""
        variants = self.variants(notes)
        if self.shape.T > EAGER:
            variants.pop("transformers eager", None)
        if self.shape.shared:
            variants["moe_runtime, shared dense"] = functools.partial(self.ours, shared="dense")
        return variants | {"dense FFN": self.dense()} | peers.installed(self, notes)

    def forward(self, variant):
        return variant[0] if isinstance(variant, tuple) else variant

    def both(self, variant):
        inputs = [self.x, self.up, self.down, self.topk_weight]
        dout = self.dout
        if isinstance(variant, tuple):
            variant, inputs, dout = variant
        return lambda: torch.autograd.grad(variant(), inputs, dout)


def variants_of(layer: LayerVariants, tiny: bool) -> tuple[dict, dict]:
    """Return every variant that runs here, and the reasons why others do not."""
    notes: dict = {}
    variants = layer.gpu_variants(notes) if CUDA or tiny else layer.variants(notes)
    for name in machine.others("moe_mlp", layer.x.dtype):
        # on a GPU, torch's loop has the limit of transformers' own
        if not CUDA or name != "torch" or layer.shape.T <= EAGER:
            variants[f"moe_runtime {name}"] = functools.partial(layer.ours, backend=name)
    if layer.shape.shared:
        variants["official"] = layer.official()
    return variants, notes


def measure(
    interleaved, layer: LayerVariants, variants: dict, notes: dict, floor=None, backward=False
):
    """Measure a floor, if given, and the variants: forward without gradients, or both passes."""
    functions = {}
    if floor is not None:
        functions["dense matmul (floor)"] = floor
    for name, variant in variants.items():
        functions[name] = layer.both(variant) if backward else layer.forward(variant)
    with torch.set_grad_enabled(backward):
        interleaved(
            functions,
            flops=layer.flops * (3 if backward else 1),
            bytes=layer.bytes(backward),
            tokens=layer.shape.T,
            dtype=layer.x.dtype,
            notes=notes,
            compare=None if backward else "moe_runtime",
        )


@pytest.mark.parametrize("dtype", DTYPES)
def bench_forward(interleaved, shape, dtype, request):
    with fits():
        layer = LayerVariants(shape, dtype)
    variants, notes = variants_of(layer, request.config.getoption("--tiny"))
    measure(interleaved, layer, variants, notes, layer.floor_forward)


@pytest.mark.parametrize("dtype", DTYPES)
def bench_forward_backward(interleaved, shape, dtype, request):
    with fits():
        layer = LayerVariants(shape, dtype)
    variants, notes = variants_of(layer, request.config.getoption("--tiny"))
    measure(
        interleaved,
        layer,
        variants,
        notes,
        layer.floor_both,
        backward=True,
    )
