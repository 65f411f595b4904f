"""Many runs of a large layer, forward and backward, must all be bit-identical to the first.

Without a fence between cp.async and wgmma, a tensor core may read stale shared memory: rarely, and
only at sizes that keep every multiprocessor busy. Triton 3.6 omits the fence (triton#9610). In the
interpreter the test is only a smoke test.
"""

import os
import time

import pytest
import torch

from moe_runtime.ops.moe_mlp import moe_mlp

NATIVE = os.environ.get("TRITON_INTERPRET") != "1"
REPEATS, SECONDS = (2000, 12) if NATIVE else (2, 1)
NAMES = ("out", "dx", "dup", "ddown", "dtopk_weight")
LAYERS = {  # T, H, I, E, K
    "Qwen3-30B-A3B": (16384, 2048, 768, 128, 8),
    "Mixtral-8x7B, long sums": (4096, 4096, 14336, 8, 2),
}
SIZES = LAYERS if NATIVE else {"tiny": (24, 32, 16, 4, 2)}


@pytest.fixture(params=SIZES)
def step(request, device):
    """Return a function that runs a layer forward and backward; it has run once, so its kernels are
    compiled.

    This is a fixture because the test's time is limited and compiling takes longer than the test.
    """
    # a fill between the kernels would hide a race
    torch.utils.deterministic.fill_uninitialized_memory = not NATIVE
    T, H, I, E, K = SIZES[request.param]
    where = {"device": device, "dtype": torch.bfloat16}
    leaves = [
        torch.randn(T, H, **where),
        torch.randn(E, 2 * I, H, **where) * H**-0.5,
        torch.randn(E, H, I, **where) * I**-0.5,
        torch.rand(T, K, device=device),
    ]
    leaves = [leaf.requires_grad_() for leaf in leaves]
    idx = torch.rand(T, E, device=device).topk(K).indices
    dout = torch.randn(T, H, **where)

    def run() -> list[torch.Tensor]:
        out = moe_mlp(*leaves, idx, backend="triton")
        return [
            tensor.detach().view(torch.int16)
            for tensor in (out, *torch.autograd.grad(out, leaves, dout))
        ]

    run()
    return run


def test_many_runs_give_the_same_bits(step, device, record_property):
    first = step()
    differing = torch.zeros(
        len(NAMES),
        dtype=torch.int64,
        device=device,
    )
    runs = 0
    counts = [0] * len(NAMES)
    began = time.monotonic()
    while runs < REPEATS and time.monotonic() - began < SECONDS:
        for _ in range(min(20, REPEATS)):  # between two synchronizations
            differing += torch.stack(
                [(got != expected).any() for got, expected in zip(step(), first)]
            )
            runs += 1
        counts = differing.tolist()
    record_property("runs", runs)
    wrong = {name: count for name, count in zip(NAMES, counts) if count}
    assert not wrong, f"of {runs} runs, these differ from the first one: {wrong}"
