"""LoRA experts over one base against LoRA on a full expert in every slot; gradients are those of x,
the LoRA pairs and the slots' weights.

`LoRA per slot` computes base and pairs expert by expert, for the tokens that chose the expert;
`weights made whole` adds the pairs to a copy of the base for each expert and runs the op of full
experts. The floor is the base's MLP, once per token.
"""

import functools

import pytest
import torch
import torch.nn.functional as F

from moe_runtime.bench import machine
from moe_runtime.bench.bench_layer import DTYPES, random_experts
from moe_runtime.bench.machine import DEVICE, fits
from moe_runtime.ops.lora import LoRA, lora_mlp
from moe_runtime.ops.moe_mlp import moe_mlp

KIND = "layer"
RANK = 16
NAMES = ("gate", "up", "down")


class LoRAVariants:
    """Base, pairs, tokens and routing of one shape, and each variant as a function."""

    def __init__(self, shape, dtype):
        torch.manual_seed(0)
        T, H, I, E, K, _ = shape

        random = functools.partial(machine.random, dtype=dtype)
        self.E = E
        self.scaling = 2.0
        self.x = random(T, H).requires_grad_()
        self.base = []
        self.pairs = {}
        for name, (out, into) in zip(
            NAMES,
            ((I, H), (I, H), (H, I)),
            strict=True,
        ):
            self.base.append(random(out, into) * into**-0.5)
            a = random(E, RANK, into) * into**-0.5
            b = random(E, RANK, out) * 0.1
            self.pairs[name] = LoRA(a.requires_grad_(), b.requires_grad_())
        self.halves = [half for pair in self.pairs.values() for half in pair]
        self.topk_idx = random_experts(shape)
        self.topk_weight = torch.rand(T, K, device=DEVICE).softmax(-1).requires_grad_()
        self.dout = random(T, H)

    def ours(self):
        return lora_mlp(
            self.x,
            *self.base,
            self.topk_weight,
            self.topk_idx,
            **self.pairs,
            scaling=self.scaling,
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
        """The experts' op on merged weights, merging included."""
        whole = []
        for weight, (a, b) in zip(
            self.base,
            self.pairs.values(),
            strict=True,
        ):
            base = weight.expand(self.E, -1, -1)
            whole.append(
                torch.baddbmm(
                    base,
                    b.transpose(1, 2),
                    a,
                    alpha=self.scaling,
                )
            )
        gate, up, down = whole
        return moe_mlp(
            self.x,
            torch.cat([gate, up], 1),
            down,
            self.topk_weight,
            self.topk_idx,
        )

    def bytes(self, backward: bool) -> int:
        """Return the least bytes moved: base, pairs, x, out, and gradients except the base's."""
        pairs = sum(half.numel() for half in self.halves)
        base = sum(weight.numel() for weight in self.base)
        elements = base + pairs + 2 * self.x.numel()
        if backward:
            elements += base + 2 * pairs + 3 * self.x.numel()
        return self.x.element_size() * elements

    def dense(self):
        gate, up, down = self.base
        return F.linear(F.silu(F.linear(self.x, gate)) * F.linear(self.x, up), down)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "backward",
    [False, True],
    ids=["forward", "both"],
)
def bench_lora_experts(interleaved, shape, backward, dtype):
    with fits():
        layer = LoRAVariants(shape, dtype)
    learned = [layer.x, layer.topk_weight, *layer.halves]

    def step_of(function, leaves=learned):
        def step():
            with torch.set_grad_enabled(backward):
                out = function()
            return torch.autograd.grad(out, leaves, layer.dout) if backward else out

        return step

    variants = {
        "base once (floor)": step_of(layer.dense, [layer.x]),
        "moe_runtime": step_of(layer.ours),
        "LoRA per slot": step_of(layer.per_slot),
        "weights made whole": step_of(layer.whole),
    }
    interleaved(
        variants,
        flops=6 * shape.T * shape.H * shape.I * (2 if backward else 1),  # of the floor: no pairs
        bytes=layer.bytes(backward),
        tokens=shape.T,
        dtype=dtype,
        compare=None if backward else "moe_runtime",
    )
