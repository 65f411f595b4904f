"""kernels/expansion.py natively: what the interpreter cannot show. Its twin without a GPU is
tests/ops/test_expansion.py.
"""

import pytest
import torch

from moe_runtime import backends
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


def test_experts_apart_are_put_side_by_side_in_pieces():
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
def test_a_child_has_the_bits_of_the_cpus(size, dtype):
    parts = [torch.randn(size).to(dtype) for _ in range(3)]
    want = dare_merge(*parts, **ARGS)
    assert torch.equal(
        dare_merge(
            *(p.cuda() for p in parts),
            **ARGS,
            backend="triton",
        ).cpu(),
        want,
    )
    assert torch.equal(
        dare_merge(
            *(p.cuda() for p in parts),
            **ARGS,
            backend="torch",
        ).cpu(),
        want,
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("backend", ["triton", "torch"])
def test_a_child_in_parts_is_the_child(backend, dtype):
    parts = [torch.randn(3 * 4096 + 7, device="cuda").to(dtype) for _ in range(3)]
    cut = [
        slice(0, 4096),
        slice(4096, 4 * 2049),
        slice(4 * 2049, None),
    ]
    made = [
        dare_merge(
            *(p[one] for p in parts),
            **ARGS,
            start=one.start,
            backend=backend,
        )
        for one in cut
    ]
    want = dare_merge(*(p.cpu() for p in parts), **ARGS)
    assert torch.equal(torch.cat(made).cpu(), want)


def test_twenty_runs_give_the_same_bits():
    experts = torch.randn(8, 1 << 20, device="cuda").bfloat16()
    first = gram(experts), dare_merge(*experts[:3], **ARGS)
    for _ in range(20):
        for a, b in zip(
            (gram(experts), dare_merge(*experts[:3], **ARGS)),
            first,
        ):
            assert torch.equal(a, b)


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


def test_no_synchronization_and_a_cuda_graph():
    experts = torch.randn(8, 1 << 18, device="cuda").bfloat16()
    want = gram(experts, experts[0]), dare_merge(*experts[:3], **ARGS)
    torch.cuda.set_sync_debug_mode("error")
    try:
        gram(experts, experts[0])
        dare_merge(*experts[:3], **ARGS)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = gram(experts, experts[0]), dare_merge(*experts[:3], **ARGS)
    graph.replay()
    for a, b in zip(found, want):
        assert torch.equal(a, b)


def test_triton_is_what_a_gpu_gets():
    for op in ("gram", "dare_merge"):
        assert backends.pick(op, torch.empty(0, device="cuda")) == "triton"
