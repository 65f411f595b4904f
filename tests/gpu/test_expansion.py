"""kernels/expansion.py natively, for what the interpreter cannot show. Without a GPU:
tests/ops/test_expansion.py.
"""

import pytest
import torch

from moe_runtime.ops.expansion import dare_merge, gram
from tests.support.oracle import relative_error

pytestmark = pytest.mark.gpu
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
ARGS = {
    "weights": (1 / 3, 2 / 3),
    "drop": 0.4,
    "seed": (1 << 62) + 5,
    "tensor": "model.layers.0.mlp.up_proj.weight",
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "with_base",
    [False, True],
    ids=["", "base"],
)
@pytest.mark.parametrize(
    "n, P",
    [
        (8, 2048 * 5504),
        (16, 100_003),
        (64, 65536),
        (3, 1),
        (1, 17),
    ],
)
def test_gram_parity_with_float64(n, P, with_base, dtype):
    if with_base:
        base = torch.randn(P, device="cuda").to(dtype)
    else:
        base = None
    experts = torch.randn(n, P, device="cuda").to(dtype)
    rows = experts.double() - (0 if base is None else base.double())
    assert (
        relative_error(
            gram(experts, base, backend="triton"),
            rows @ rows.t(),
        )
        < 2e-6
    )


def test_float32_is_not_rounded_to_tf32(monkeypatch):
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", True)
    experts = torch.randn(4, 1 << 20, device="cuda")
    assert (
        relative_error(
            gram(experts, backend="triton"),
            experts.double() @ experts.double().t(),
        )
        < 2e-6
    )


def test_scattered_experts_are_gathered_in_chunks():
    experts = [torch.randn((1 << 24) + 77, device="cuda") for _ in range(3)]
    stack = torch.stack(experts)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    found = gram(experts)
    assert torch.cuda.max_memory_allocated() - before < 1.3 * stack.numel() * 4
    assert relative_error(found, gram(stack)) < 1e-6


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [2048 * 5504, 100_003, 1])
def test_a_child_is_bit_identical_to_the_cpu_result(size, dtype):
    parts = [torch.randn(size).to(dtype) for _ in range(3)]
    expected = dare_merge(*parts, **ARGS)
    assert torch.equal(
        dare_merge(
            *(p.cuda() for p in parts),
            **ARGS,
            backend="triton",
        ).cpu(),
        expected,
    )
    assert torch.equal(
        dare_merge(
            *(p.cuda() for p in parts),
            **ARGS,
            backend="torch",
        ).cpu(),
        expected,
    )


def test_beyond_two_to_the_31_elements():
    P = (1 << 31) + 4
    parts = torch.zeros(2, P, device="cuda", dtype=torch.bfloat16)
    parts[0, -4:], parts[1, -4:] = 3.0, 5.0
    assert gram(parts).tolist() == [[36, 60], [60, 100]]
    child = dare_merge(
        *parts,
        weights=(1.0, 1.0),
        drop=0.0,
        seed=1,
        tensor=2,
    )
    assert (child[-4:] == 8).all()
    assert not child[:-4].any()
