"""The experts of one layer against the floor (dense matmuls of the same FLOPs) and transformers'
implementations.

Gradients of x, both weights and the gate weights. The floor writes into buffers that exist already.
On a GPU also against a dense FFN of the same FLOPs, a composition of torch's grouped_mm, and the
packages of bench/peers.py that are installed.
"""

import functools

import pytest
import torch

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
EAGER = 4096  # tokens up to which transformers' loop over experts is worth the wait
BATCHED = 64  # and its batched_mm, which is for decoding


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
    idx = (
        torch.rand(shape.T, shape.E - shape.shared, device=DEVICE)
        .topk(shape.K - shape.shared)
        .indices
        + shape.shared
    )
    return torch.cat([idx, idx.new_zeros(shape.T, int(shape.shared))], 1)


class Layer:
    """Weights, tokens and routing of one shape, and every variant as a function of no argument."""

    def __init__(self, shape, dtype):
        torch.manual_seed(0)
        self.shape = shape
        where = {"dtype": dtype, "device": DEVICE}
        T, H, I, E, K, _ = shape
        self.x = torch.randn(T, H, **where, requires_grad=True)
        self.up = torch.nn.Parameter(torch.randn(E, 2 * I, H, **where) * H**-0.5)
        self.down = torch.nn.Parameter(torch.randn(E, H, I, **where) * I**-0.5)
        self.topk_idx = random_experts(shape)
        self.topk_weight = torch.rand(T, K, device=DEVICE).softmax(-1).requires_grad_()
        self.dout = torch.randn(T, H, **where)
        self.flops = 6 * T * K * H * I
        self.buffers = {
            name: torch.randn(*size, **where)
            for name, size in {
                "rows": (T * K, H),
                "z": (T * K, 2 * I),
                "h": (T * K, I),
                "y": (T * K, H),
                "w1": (2 * I, H),
                "w2": (H, I),
                "dz": (T * K, 2 * I),
                "dh": (T * K, I),
                "dx": (T * K, H),
                "dw1": (2 * I, H),
                "dw2": (H, I),
            }.items()
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
        torch.mm(b["dz"].t(), b["rows"], out=b["dw1"])
        torch.mm(b["dz"], b["w1"], out=b["dx"])

    def bytes(self, backward: bool = False) -> int:
        """Return what the layer reads and writes at least: weights that are used, x and out, and
        their gradients.
        """
        T, H, I, *_ = self.shape
        used = len(self.topk_idx.unique()) * 3 * H * I
        # backward reads the weights once more and writes their gradients; it reads x, dout and
        # writes dx
        return self.x.element_size() * (
            used * (3 if backward else 1) + T * H * (5 if backward else 2)
        )

    def ours(self, **options):
        return moe_mlp(self.x, self.up, self.down, self.topk_weight, self.topk_idx, **options)

    def transformers(self, implementation):
        experts = mixtral_experts(self.up, self.down, self.shape.K, implementation)
        return lambda: experts(self.x, self.topk_idx, self.topk_weight)

    def official(self):
        """The experts as the released XFT code runs them, expert by expert, given this routing."""
        _, H, I, E, K, _ = self.shape
        moe = MoE(
            MoEConfig(hidden_size=H, intermediate_size=I, num_experts=E, top_k=K), device="meta"
        )
        moe.experts.gate_up_proj = self.up
        moe.experts.down_proj = self.down
        block = OfficialBlock(moe)

        def call():
            return block.run_experts(self.x, self.topk_idx, self.topk_weight.to(self.x.dtype))

        return call, [self.x, *block.parts(), self.topk_weight], self.dout

    def dense(self):
        """A gated FFN over as many rows as all experts have together."""
        rows = self.buffers["rows"].detach().requires_grad_()
        w1 = self.buffers["w1"].detach().requires_grad_()
        w2 = self.buffers["w2"].detach().requires_grad_()

        def call():
            gate, up = torch.nn.functional.linear(rows, w1).chunk(2, -1)
            return torch.nn.functional.linear(torch.nn.functional.silu(gate) * up, w2)

        return call, [rows, w1, w2], self.buffers["y"]

    def variants(self, notes):
        """Return name -> function, or name -> (function, what to differentiate by, gradient of its
        output).

        Why others are missing goes into `notes`.
        """
        names = ["eager", "grouped_mm", *self.batched(notes)]
        if reason := machine.missing("transformers"):
            for name in names:
                notes[f"transformers {name}"] = reason
            names = []
        functions = {}
        for name in names:
            functions[f"transformers {name}"] = self.transformers(name)
        return (
            {"moe_runtime": self.ours}
            | functions
            | {"torch grouped_mm": lambda: peers.grouped_mm(self)}
        )

    def batched(self, notes) -> list[str]:
        """Return batched_mm where it is worth the wait: it gathers the weights of every slot, once
        more for the gradients.
        """
        if self.shape.T > BATCHED:
            return []
        T, H, I, _, K, _ = self.shape
        need = 2 * 3 * T * K * H * I * self.x.element_size()
        there = machine.free_memory()
        if need <= there:
            return ["batched_mm"]
        why = (
            f"gathers {need / 2**30:.1f} GiB of weights and gradients, and {there / 2**30:.1f} are "
            "free"
        )
        notes["transformers batched_mm"] = why
        return []

    def gpu_variants(self, notes):
        """Return `variants` and those that are measured on a GPU only; `notes` says why others are
        missing.
        """
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


def variants_of(layer: Layer, tiny: bool) -> tuple[dict, dict]:
    """Return every variant that runs here, and why others do not."""
    notes: dict = {}
    variants = layer.gpu_variants(notes) if CUDA or tiny else layer.variants(notes)
    # torch's loop on a GPU, as transformers' own
    names = []
    for name in machine.others("moe_mlp", layer.x.dtype):
        if not CUDA or name != "torch" or layer.shape.T <= EAGER:
            names.append(name)
    for name in names:
        variants[f"moe_runtime {name}"] = functools.partial(layer.ours, backend=name)
    return variants | ({"official": layer.official()} if layer.shape.shared else {}), notes


def measure(
    interleaved, layer: Layer, variants: dict, notes: dict, floor: dict, backward: bool = False
) -> None:
    """Measure the variants behind a floor that may be none, forward without gradients or both
    passes.
    """
    work = {
        "flops": layer.flops * (3 if backward else 1),
        "bytes": layer.bytes(backward),
        "tokens": layer.shape.T,
    }
    make, compare = (layer.both, None) if backward else (layer.forward, "moe_runtime")
    functions = floor | {name: make(variant) for name, variant in variants.items()}
    with torch.set_grad_enabled(backward):
        interleaved(functions, **work, dtype=layer.x.dtype, notes=notes, compare=compare)


@pytest.mark.parametrize("dtype", DTYPES)
def bench_forward(interleaved, shape, dtype, request):
    with fits():
        layer = Layer(shape, dtype)
    floor = {"dense matmul (floor)": layer.floor_forward}
    measure(interleaved, layer, *variants_of(layer, request.config.getoption("--tiny")), floor)


@pytest.mark.parametrize("dtype", DTYPES)
def bench_forward_backward(interleaved, shape, dtype, request):
    with fits():
        layer = Layer(shape, dtype)
    floor = {"dense matmul (floor)": layer.floor_both}
    measure(
        interleaved,
        layer,
        *variants_of(layer, request.config.getoption("--tiny")),
        floor,
        backward=True,
    )
