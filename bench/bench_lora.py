"""LoRA experts over one base against LoRA on a full expert in every slot; gradients of x, the pairs
and the slots' weights.

`LoRA per slot` goes expert by expert over the tokens that chose it, base and pairs alike; `weights
made whole` adds the pairs to a copy of the base for each expert and runs the op of whole experts.
The floor is the base's MLP alone, once per token.
"""

import pytest
import torch
import torch.nn.functional as F

from moe_runtime.bench.bench_layer import DTYPES, random_experts
from moe_runtime.bench.machine import DEVICE, fits
from moe_runtime.ops.lora import LoRA, lora_mlp
from moe_runtime.ops.moe_mlp import moe_mlp

KIND = "layer"
RANK = 16
NAMES = ("gate", "up", "down")


class Layer:
    """A base, pairs, tokens and routing of one shape, and every variant as a function of no
    argument.
    """

    def __init__(self, shape, dtype):
        torch.manual_seed(0)
        where = {"dtype": dtype, "device": DEVICE}
        T, H, I, E, K, _ = shape
        self.E = E
        self.scaling = 2.0
        self.x = torch.randn(T, H, **where, requires_grad=True)
        self.base = [
            torch.randn(*size, **where) * size[1] ** -0.5 for size in ((I, H), (I, H), (H, I))
        ]
        self.pairs = {}
        for name, (size, out) in zip(NAMES, ((H, I), (H, I), (I, H))):
            a = torch.randn(E, RANK, size, **where) * size**-0.5
            b = torch.randn(E, RANK, out, **where) * 0.1
            self.pairs[name] = LoRA(a.requires_grad_(), b.requires_grad_())
        self.topk_idx = random_experts(shape)
        self.topk_weight = torch.rand(T, K, device=DEVICE).softmax(-1).requires_grad_()
        self.dout = torch.randn(T, H, **where)

    def ours(self):
        return lora_mlp(
            self.x, *self.base, self.topk_weight, self.topk_idx, **self.pairs, scaling=self.scaling
        )

    def per_slot(self):
        out = torch.zeros_like(self.x)
        for e in range(self.E):
            token, slot = torch.where(self.topk_idx == e)
            rows = self.x[token]
            h = F.silu(self.linear(rows, 0, e)) * self.linear(rows, 1, e)
            y = self.linear(h, 2, e) * self.topk_weight[token, slot, None]
            out = out.index_add(0, token, y.to(out.dtype))
        return out

    def linear(self, rows, i: int, e: int):
        a, b = self.pairs[NAMES[i]]
        return F.linear(rows, self.base[i]) + F.linear(rows, a[e]) @ b[e] * self.scaling

    def whole(self):
        """The experts' op on weights that are made whole first."""
        gate, up, down = (
            torch.baddbmm(
                weight.expand(self.E, -1, -1), pair.b.transpose(1, 2), pair.a, alpha=self.scaling
            )
            for weight, pair in zip(self.base, self.pairs.values())
        )
        return moe_mlp(self.x, torch.cat([gate, up], 1), down, self.topk_weight, self.topk_idx)

    def bytes(self, backward: bool) -> int:
        """Return what is read and written at least: base and pairs, x and out; with their
        gradients, the base has none.
        """
        pairs = sum(half.numel() for pair in self.pairs.values() for half in pair)
        base = sum(weight.numel() for weight in self.base)
        elements = base + pairs + 2 * self.x.numel()
        return self.x.element_size() * (
            elements + (base + 2 * pairs + 3 * self.x.numel() if backward else 0)
        )

    def dense(self):
        gate, up, down = self.base
        return F.linear(F.silu(F.linear(self.x, gate)) * F.linear(self.x, up), down)

    def leaves(self, floor: bool) -> list[torch.Tensor]:
        if floor:
            return [self.x]
        return [self.x, self.topk_weight, *(half for pair in self.pairs.values() for half in pair)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "both"])
def bench_lora_experts(interleaved, shape, backward, dtype):
    with fits():
        layer = Layer(shape, dtype)
    functions = {
        "base once (floor)": layer.dense,
        "moe_runtime": layer.ours,
        "LoRA per slot": layer.per_slot,
        "weights made whole": layer.whole,
    }

    def step(function):
        if not backward:
            with torch.no_grad():
                return function()
        return torch.autograd.grad(function(), layer.leaves(function == layer.dense), layer.dout)

    variants = {
        name: lambda function=function: step(function) for name, function in functions.items()
    }
    # the floor's: the pairs' are not in
    flops = 6 * shape.T * shape.H * shape.I * (2 if backward else 1)
    compare = None if backward else "moe_runtime"
    interleaved(
        variants,
        flops=flops,
        bytes=layer.bytes(backward),
        tokens=shape.T,
        dtype=dtype,
        compare=compare,
    )
