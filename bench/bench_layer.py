"""The experts of one layer against the floor (dense matmuls of the same FLOPs) and transformers' implementations.

Gradients of x, both weights and the gate weights. The floor writes into buffers that exist already.
"""

import pytest
import torch

from bench.conftest import DEVICE
from moe_runtime.ops.moe_mlp import moe_mlp

DTYPES = [pytest.param(torch.float32, id="fp32"), pytest.param(torch.bfloat16, id="bf16")]


class Layer:
    """Weights, tokens and routing of one shape, and every variant as a function of no argument."""

    def __init__(self, shape, dtype):
        torch.manual_seed(0)
        self.shape, where = shape, {"dtype": dtype, "device": DEVICE}
        T, H, I, E, K, shared = shape
        self.x = torch.randn(T, H, **where, requires_grad=True)
        self.up = torch.nn.Parameter(torch.randn(E, 2 * I, H, **where) * H**-0.5)
        self.down = torch.nn.Parameter(torch.randn(E, H, I, **where) * I**-0.5)
        self.topk_idx = torch.rand(T, E - shared, device=DEVICE).topk(K - shared).indices + shared
        if shared:
            self.topk_idx = torch.cat([self.topk_idx, torch.zeros_like(self.topk_idx[:, :1])], 1)
        self.topk_weight = torch.rand(T, K, device=DEVICE).softmax(-1).requires_grad_()
        self.dout = torch.randn(T, H, **where)
        self.flops = 6 * T * K * H * I
        self.buffers = {
            name: torch.randn(*size, **where)
            for name, size in {
                "rows": (T * K, H), "z": (T * K, 2 * I), "h": (T * K, I), "y": (T * K, H), "w1": (2 * I, H), "w2": (H, I),
                "dz": (T * K, 2 * I), "dh": (T * K, I), "dx": (T * K, H), "dw1": (2 * I, H), "dw2": (H, I),
            }.items()
        }  # fmt: skip

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

    def ours(self):
        return moe_mlp(self.x, self.up, self.down, self.topk_weight, self.topk_idx)

    def transformers(self, implementation):
        from transformers import MixtralConfig
        from transformers.models.mixtral.modeling_mixtral import MixtralExperts

        _, H, I, E, K, _ = self.shape
        config = MixtralConfig(hidden_size=H, intermediate_size=I, num_local_experts=E, num_experts_per_tok=K)
        config._experts_implementation = implementation
        with torch.device("meta"):
            experts = MixtralExperts(config)
        # assigned over the registered parameters, as parameters of the same storage
        experts.gate_up_proj, experts.down_proj = self.up, self.down
        return lambda: experts(self.x, self.topk_idx, self.topk_weight)

    def variants(self):
        functions = {f"transformers {name}": self.transformers(name) for name in ("eager", "grouped_mm")}
        return {"moe_runtime": self.ours} | functions

    def both(self, function):
        inputs = [self.x, self.up, self.down, self.topk_weight]
        return lambda: torch.autograd.grad(function(), inputs, self.dout)


@pytest.mark.parametrize("dtype", DTYPES)
def bench_forward(interleaved, shape, dtype):
    layer = Layer(shape, dtype)
    with torch.no_grad():
        interleaved({"dense matmul (floor)": layer.floor_forward, **layer.variants()}, flops=layer.flops)


@pytest.mark.parametrize("dtype", DTYPES)
def bench_forward_backward(interleaved, shape, dtype):
    layer = Layer(shape, dtype)
    functions = {name: layer.both(function) for name, function in layer.variants().items()}
    interleaved({"dense matmul (floor)": layer.floor_both, **functions}, flops=3 * layer.flops)
