"""A large layer, forward and backward, many times over: every run must give the bits of the first.

What a kernel's pipeline reads before the copy into shared memory is visible to the tensor cores is wrong once in many runs at
most, and at sizes that keep every multiprocessor busy. Triton 3.6 puts no proxy fence between cp.async and wgmma (triton#9610).
"""

import time

import pytest
import torch

from moe_runtime.ops.moe_mlp import moe_mlp

REPEATS, SECONDS = 2000, 12
NAMES = ("out", "dx", "dup", "ddown", "dtopk_weight")


@pytest.mark.gpu
@pytest.mark.parametrize(
    "T, H, I, E, K",
    [
        pytest.param(16384, 2048, 768, 128, 8, id="Qwen3-30B-A3B"),
        pytest.param(4096, 4096, 14336, 8, 2, id="Mixtral-8x7B: long sums"),
    ],
)
def test_many_runs_give_the_same_bits(T, H, I, E, K, record_property):
    torch.utils.deterministic.fill_uninitialized_memory = False  # a fill between the kernels would hide a race
    where = {"device": "cuda", "dtype": torch.bfloat16}
    leaves = [
        torch.randn(T, H, **where), torch.randn(E, 2 * I, H, **where) * H**-0.5,
        torch.randn(E, H, I, **where) * I**-0.5, torch.rand(T, K, device="cuda"),
    ]  # fmt: skip
    leaves = [leaf.requires_grad_() for leaf in leaves]
    idx, dout = torch.rand(T, E, device="cuda").topk(K).indices, torch.randn(T, H, **where)

    def step() -> list[torch.Tensor]:
        out = moe_mlp(*leaves, idx, backend="triton")
        return [tensor.detach().view(torch.int16) for tensor in (out, *torch.autograd.grad(out, leaves, dout))]

    first, differing = step(), torch.zeros(len(NAMES), dtype=torch.int64, device="cuda")
    began, runs = time.monotonic(), 0
    while runs < REPEATS and time.monotonic() - began < SECONDS:
        for _ in range(20):  # between two waits for the GPU
            differing += torch.stack([(got != want).any() for got, want in zip(step(), first)])
        runs += 20
        torch.cuda.synchronize()
    record_property("runs", runs)
    wrong = {name: count for name, count in zip(NAMES, differing.tolist()) if count}
    assert not wrong, f"of {runs} runs, other bits than the first one's: {wrong}"
