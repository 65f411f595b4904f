"""UltraFuser's loss of three specialists: the formula in torch against the op, training all
parameters or only the gate.
"""

import functools

import pytest
import torch
import torch.nn.functional as F

from moe_runtime.bench import machine, shapes
from moe_runtime.bench.goals import NAIVE
from moe_runtime.bench.machine import CUDA, DEVICE, random
from moe_runtime.ops.fusion import fused_cross_entropy

KIND = "op"
DTYPE = torch.bfloat16 if CUDA else torch.float32
SIZES = (shapes.FUSION_GPU, shapes.FUSION_CPU, shapes.FUSION_TINY)


@pytest.fixture
def step(size):
    """A function that computes the gradients of a loss with respect to the trained tensors."""
    T, H, S, V = size
    hidden = [random(T, H, dtype=DTYPE) for _ in range(S)]
    heads = [random(V, H, dtype=DTYPE) * H**-0.5 for _ in range(S)]
    gate = random(T, S, dtype=torch.float32).softmax(-1).requires_grad_()
    labels = torch.randint(0, V, (T,), device=DEVICE)

    def gradients(loss, frozen):
        leaves = [*hidden, *heads]
        for leaf in leaves:
            leaf.requires_grad_(not frozen)
        if frozen:
            leaves = []
        return torch.autograd.grad(loss(hidden, heads, gate, labels), [gate, *leaves])

    return gradients


def _naive(hidden, heads, gate, labels):
    logits = 0
    for h, head, weight in zip(
        hidden,
        heads,
        gate.split(1, 1),
        strict=True,
    ):
        logits = logits + weight * F.linear(h, head).float()
    return F.cross_entropy(logits, labels)


@pytest.mark.parametrize("train", ["all", "gate"])
def bench_fused_loss(interleaved, step, size, train):
    """Forward and backward; "gate" is stage 1, whose backward pass has no matrix products."""
    T, H, S, V = size
    passes = 1 if train == "gate" else 3
    losses = {NAIVE: _naive}
    for backend in machine.runnable("fused_cross_entropy", DTYPE):
        losses[f"moe_runtime {backend}"] = functools.partial(fused_cross_entropy, backend=backend)
    variants = {}
    for name, loss in losses.items():
        variants[name] = functools.partial(step, loss, train == "gate")
    flops = 2 * T * V * S * H * passes
    # states and heads; no logits
    bytes = DTYPE.itemsize * S * H * (T + V) * passes
    interleaved(
        variants,
        flops=flops,
        bytes=bytes,
        tokens=T,
        dtype=DTYPE,
    )
