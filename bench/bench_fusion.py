"""UltraFuser's loss of three specialists: the formula in torch against the op, everything trained
or the gate alone.
"""

import functools

import pytest
import torch
import torch.nn.functional as F

from moe_runtime.bench import machine, shapes
from moe_runtime.bench.goals import NAIVE
from moe_runtime.bench.machine import CUDA, DEVICE
from moe_runtime.ops.fusion import fused_cross_entropy

KIND = "op"
DTYPE = torch.bfloat16 if CUDA else torch.float32
SIZES = (shapes.FUSION_GPU, shapes.FUSION_CPU, shapes.FUSION_TINY)


@pytest.fixture
def step(size):
    """A function of a loss: its gradients in what trains."""
    T, H, S, V = size
    like = {"device": DEVICE, "dtype": DTYPE}
    hidden = [torch.randn(T, H, **like) for _ in range(S)]
    heads = []
    for _ in range(S):
        heads.append(torch.randn(V, H, **like) * H**-0.5)
    gate = torch.randn(T, S, device=DEVICE).softmax(-1)
    labels = torch.randint(0, V, (T,), device=DEVICE)

    def gradients(loss, frozen):
        for t in (*hidden, *heads):
            t.requires_grad_(not frozen)
        gate.requires_grad_()
        return torch.autograd.grad(
            loss(hidden, heads, gate, labels), [gate] if frozen else [gate, *hidden, *heads]
        )

    return gradients


def _naive(hidden, heads, gate, labels):
    logits = sum(
        gate[:, s : s + 1] * F.linear(h, head).float()
        for s, (h, head) in enumerate(zip(hidden, heads))
    )
    return F.cross_entropy(logits, labels)


@pytest.mark.parametrize("train", ["all", "gate"])
def bench_fused_loss(interleaved, step, size, train):
    """Forward and backward; "gate" is stage 1, whose backward pass has no products in either
    variant.
    """
    passes = 1 if train == "gate" else 3
    names = machine.runnable("fused_cross_entropy", DTYPE)
    losses = {}
    for backend in names:
        losses[f"moe_runtime {backend}"] = functools.partial(fused_cross_entropy, backend=backend)
    variants = {}
    for name, loss in {NAIVE: _naive, **losses}.items():
        variants[name] = functools.partial(step, loss, train == "gate")
    flops = 2 * size.T * size.V * size.S * size.H * passes
    # states and heads; no logits
    bytes = DTYPE.itemsize * size.S * size.H * (size.T + size.V) * passes
    interleaved(variants, flops=flops, bytes=bytes, tokens=size.T, dtype=DTYPE)
