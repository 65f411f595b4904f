"""csrc/ natively: parity with Triton and torch, streams, graphs, reproducible bits. Without a GPU:
tests/csrc.
"""

import pytest
import torch

from moe_runtime.config import SHARED_GATES
from moe_runtime.kernels import dispatch as triton_dispatch
from moe_runtime.native.library import cuda
from moe_runtime.ops import cuda_kernels
from moe_runtime.ops.combine import combine
from moe_runtime.ops.dispatch import dispatch
from moe_runtime.ops.expert_rows import ExpertStacks
from moe_runtime.ops.merging import merge_experts
from moe_runtime.ops.moe_layer import moe_layer
from moe_runtime.ops.routing import route
from moe_runtime.tools.conformance.draw import Draw
from tests.conformance.test_ops import check_case
from tests.ops.test_every_op import Blocks, case_of
from tests.support.oracle import poison, relative_error

pytestmark = pytest.mark.gpu
FLOATS = [torch.float32, torch.float16, torch.bfloat16]
ROUNDING = {
    torch.float32: 5e-6,
    torch.float16: 1e-3,
    torch.bfloat16: 8e-3,
}
OTHERS = ["torch", "triton"]


@pytest.fixture(autouse=True)
def _library():
    """bench/gpu.sh builds the library; elsewhere it may be missing."""
    if reason := cuda.why_not(torch.device("cuda")):
        pytest.skip(reason)


def random(*size: int, dtype=torch.float32) -> torch.Tensor:
    return torch.randn(size, device="cuda").to(dtype)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", ["route", "dispatch", "combine", "merge_experts", "merged_linear"])
def test_is_the_equation(name, dtype):
    for draw in (Draw, Blocks):
        for number in range(24):
            check_case(case_of(name, number, dtype, draw), "cuda", "cuda")


PLANS = [
    pytest.param(0, 8, 2, id="no tokens"),
    pytest.param(1, 1, 1, id="one of everything"),
    pytest.param(1, 128, 8, id="one token"),
    pytest.param(17, 3, 3, id="every expert"),
    pytest.param(512, 64, 8, id="one block"),
    pytest.param(4097, 60, 6, id="ragged"),
    pytest.param(4096, 1024, 8, id="maximum number of experts"),
    pytest.param(65536, 8, 6, id="XFT at 65536"),
    pytest.param(65536, 128, 8, id="Qwen3 at 65536"),
    pytest.param(1 << 20, 64, 8, id="8 M rows"),
]


@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize(
    "dtype",
    [torch.int32, torch.int64],
    ids=str,
)
@pytest.mark.parametrize("T, E, K", PLANS)
def test_dispatch_equals(T, E, K, dtype, other):
    idx = torch.randint(-1, E + 1, (T, K), device="cuda", dtype=dtype)
    poison()
    for ours, theirs in zip(
        dispatch(idx, E, "cuda"),
        dispatch(idx, E, other),
    ):
        assert ours.dtype == torch.int32
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("T, E, K", PLANS)
def test_tile_maps_equal_tritons(T, E, K):
    idx = torch.randint(-1, E, (T, K), device="cuda")
    blocks = (16, 64, 128)
    poison()
    offsets, *_, maps = cuda_kernels.route_plan(
        idx,
        E,
        blocks,
        first_expert=E > 2,
    )
    for block, ours in zip(blocks, maps, strict=True):
        expected = triton_dispatch.tile_map(
            offsets,
            T * K,
            block,
            int(E > 2),
        )
        assert torch.equal(ours, expected)


@pytest.mark.parametrize("gate", ["xft", "softmax_topk"])
@pytest.mark.parametrize(
    "T, E, K",
    [
        (1, 8, 2),
        (513, 7, 5),
        (4096, 1023, 8),
        (65536, 128, 8),
    ],
)
def test_the_routers_counts_make_the_same_plan(T, E, K, gate):
    logits = random(T, E, dtype=torch.bfloat16)
    shared = int(gate in SHARED_GATES)
    count = cuda_kernels.new_block_count(logits, shared)
    poison()
    _, idx = cuda_kernels.route_forward(
        logits,
        None,
        K + shared,
        gate,
        shared,
        block_count=count,
    )
    tokens = cuda_kernels.block_tokens(T, E)
    counted = cuda_kernels.route_plan(
        idx,
        E + shared,
        (64,),
        0,
        count,
        tokens,
    )
    *expected, maps = cuda_kernels.route_plan(
        idx,
        E + shared,
        (64,),
    )
    assert same(
        [*counted[:4], *counted[4]],
        [*expected, *maps],
    )


STACKS = [
    (8, 2048, 5504),
    (7, 33, 17),
    (1, 5),
    (3, 1),
    (64, 4096),
    (5, 1 << 20),
]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("shape", STACKS, ids=str)
def test_merging_equals(shape, dtype):
    size = torch.Size(shape).numel()
    weight = random(size + 1, dtype=dtype)[1:].view(shape)  # not aligned to 16 bytes
    alpha = torch.rand(shape[0], device="cuda")
    dout = random(*shape[1:], dtype=dtype)
    poison()
    leaf = alpha.clone().requires_grad_()
    out = merge_experts(weight, leaf, backend="cuda")
    (dalpha,) = torch.autograd.grad(out, leaf, dout)
    expected = torch.einsum("e,e...->...", alpha.double(), weight.double())
    terms = (weight.double() * dout.double()).flatten(1)
    assert relative_error(out.detach(), expected) < ROUNDING[dtype]
    # the error is relative to the terms of each sum, since they cancel
    assert ((dalpha - terms.sum(1)).abs() < 1e-5 * terms.norm(dim=1) + 1e-6).all()


def all_ops(logits, weight, alpha, y, backend="cuda"):
    """Return one result of each op, including gradients."""
    logits, alpha, y = (t.detach().requires_grad_() for t in (logits, alpha, y))
    gate, idx = route(logits, 3, "xft", backend=backend)
    plan = dispatch(idx, logits.shape[1] + 1, backend)
    out = combine(y, gate, plan.slot_row, backend=backend)
    merged = merge_experts(weight, alpha, backend=backend)
    grads = torch.autograd.grad(
        [out.float().sum(), merged.float().square().sum()], [logits, y, alpha]
    )
    return [t.detach() for t in (gate, idx, *plan, out, merged, *grads)]


def samples(T=512):
    dtype = torch.bfloat16
    return (
        random(T, 15),
        random(16, 999, dtype=dtype),
        torch.rand(16, device="cuda"),
        random(3 * T, 128, dtype=dtype),
    )


def same(ours, theirs) -> bool:
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.bfloat16],
    ids=str,
)
@pytest.mark.parametrize("T", [1, 33, 5000])
def test_every_kernel_for_the_sanitizer(T, dtype):
    """bench/gpu.sh runs this under compute-sanitizer: one block and several, and rows whose size is
    not a multiple of 16 bytes.
    """
    inputs = (
        random(T, 15, dtype=dtype),
        random(16, 999, dtype=dtype),
        torch.rand(16, device="cuda"),
        random(3 * T, 33, dtype=dtype),
    )
    for ours, theirs in zip(
        all_ops(*inputs),
        all_ops(*inputs, backend="torch"),
        strict=True,
    ):
        assert ours.dtype == theirs.dtype
        assert (
            relative_error(ours, theirs) < ROUNDING[dtype]
            if ours.is_floating_point()
            else torch.equal(ours, theirs)
        )


def test_twenty_runs_give_the_same_bits():
    inputs = samples(20000)
    first = all_ops(*inputs)
    for _ in range(20):
        assert same(all_ops(*inputs), first)


def test_beyond_two_to_the_31_elements():
    weight = torch.ones(
        3,
        1 << 30,
        device="cuda",
        dtype=torch.bfloat16,
    )
    weight[2].fill_(2.0)
    alpha = torch.tensor([0.25, 0.25, 0.5], device="cuda", requires_grad=True)
    out = merge_experts(weight, alpha, backend="cuda")
    assert (out == 1.5).all()
    (dalpha,) = torch.autograd.grad(
        out,
        alpha,
        torch.ones_like(weight[0]),
    )
    torch.testing.assert_close(
        dalpha, torch.tensor([1.0, 1.0, 2.0], device="cuda") * (1 << 30), rtol=1e-5, atol=0
    )
    del weight, out
    y = torch.ones(
        (1 << 20) + 8,
        1 << 11,
        device="cuda",
        dtype=torch.bfloat16,
    )
    rows = torch.arange(y.shape[0], device="cuda").flip(0)
    y[-1] = 3
    out = combine(
        y,
        torch.ones(y.shape[0] // 2, 2, device="cuda"),
        rows.int(),
        backend="cuda",
    )
    assert (out[0] == 4).all()
    assert (out[1:] == 2).all()


@pytest.mark.parametrize(
    "T",
    [512, 5000],
    ids=["one block", "blocks that wait for each other"],
)
def test_cuda_graph(T):
    inputs = samples(T)
    all_ops(*inputs)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = all_ops(*inputs)
    for tensor in inputs:
        tensor.copy_(torch.rand_like(tensor))
    graph.replay()
    assert same(captured, all_ops(*inputs))


def test_a_side_stream():
    inputs = samples(65536)
    expected = all_ops(*inputs)
    stream = torch.cuda.Stream()
    later = [torch.zeros_like(tensor) for tensor in inputs]
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)  # a launch on another stream would read zeros
        for target, source in zip(later, inputs):
            target.copy_(source)
        got = all_ops(*later)
    torch.cuda.current_stream().wait_stream(stream)
    assert same(got, expected)


@pytest.mark.skipif(
    torch.cuda.device_count() < 2,
    reason="needs two GPUs",
)
def test_a_device_that_is_not_the_current_one():
    inputs = samples()
    expected = all_ops(*inputs)
    got = all_ops(*(tensor.to("cuda:1") for tensor in inputs))
    assert torch.cuda.current_device() == 0
    assert same(
        [tensor.to("cuda:0") for tensor in got],
        expected,
    )


def test_no_op_waits_for_the_gpu():
    inputs = samples()
    all_ops(*inputs)
    torch.cuda.set_sync_debug_mode("error")
    try:
        all_ops(*inputs)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("shared", ["group", "dense"])
@pytest.mark.parametrize("T", [1, 512, 5000])
def test_whole_layer_with_csrc_and_triton_kernels(T, shared, monkeypatch):
    """MOE_RUNTIME_BACKEND=cuda in moe_layer: csrc/'s kernels around Triton's matrix products."""
    x = random(T, 64, dtype=torch.bfloat16)
    router = random(7, 64, dtype=torch.bfloat16)
    up = random(8, 96, 64, dtype=torch.bfloat16)
    down = random(8, 64, 48, dtype=torch.bfloat16)
    found = {}
    for backend in ("triton", "cuda"):
        monkeypatch.setenv("MOE_RUNTIME_BACKEND", backend)
        leaves = [t.clone().requires_grad_() for t in (x, router, up, down)]
        got = moe_layer(
            *leaves[:2],
            ExpertStacks(*leaves[2:], shared=shared),
            3,
            "xft",
        )
        found[backend] = [
            got.out.detach(),
            *torch.autograd.grad(
                got.out.float().square().mean(),
                leaves,
            ),
        ]
    for ours, theirs in zip(found["cuda"], found["triton"], strict=True):
        assert relative_error(ours, theirs) < 2e-2
