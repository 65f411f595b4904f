"""Backend "cuda" on the CPU, by the emulator, against "torch" through the public ops; bit for bit
where the order is fixed.
"""

import pytest
import torch

from moe_runtime import backends
from moe_runtime.native.library import cuda
from moe_runtime.ops import cuda_kernels
from moe_runtime.ops import moe_layer as moe_layer_op
from moe_runtime.ops import moe_mlp as moe_mlp_op
from moe_runtime.ops.combine import combine
from moe_runtime.ops.dispatch import dispatch
from moe_runtime.ops.expert_rows import ExpertStacks
from moe_runtime.ops.merging import merge_experts
from moe_runtime.ops.routing import route
from moe_runtime.tools.conformance.draw import Draw
from tests.conformance.test_ops import check
from tests.csrc import emulator
from tests.modules.test_merged import make
from tests.ops.test_routing import SHARED, forced_weight
from tests.support.oracle import GATES, relative_error

pytestmark = [emulator.needs_cxx, pytest.mark.usefixtures("emulated")]
needs_interpreter = pytest.mark.skipif(
    not backends.interpreted(), reason="the emulator's tensors are the CPU's"
)
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.fixture(scope="module")
def emulated():
    cuda.use(cuda.bind(emulator.build()))
    yield
    cuda.use(None)


def both(f, *leaves, **kwargs):
    """The outputs of `f` and the gradients of `leaves`, by torch and by the CUDA library."""
    found = []
    for backend in ("torch", "cuda"):
        inputs = [leaf.detach().clone().requires_grad_() for leaf in leaves]
        out = f(*inputs, **kwargs, backend=backend)
        dout = torch.cos(torch.arange(out.numel())).view_as(out).to(out.dtype)  # the same for both
        found.append([out.detach(), *torch.autograd.grad(out, inputs, dout)])
    return zip(*found)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["route", "dispatch", "combine", "merge_experts", "merged_linear"])
def test_is_the_equation(name, dtype):
    """The table of cases that every backend is held to, which has every layout and kind of ids."""
    for number in range(24):
        check(name, "cuda", "cpu", Draw.numbered(dtype, number))


def test_dispatch_of_more_slots_than_a_block_takes():
    idx = torch.randint(-1, 9, (2100, 4))
    for pair in zip(
        dispatch(idx, 8, "cuda"),
        dispatch(idx, 8, "torch"),
        strict=True,
    ):
        assert torch.equal(*pair)
    # no id wraps
    assert dispatch(
        torch.tensor([[2**32, 1]]),
        2,
        "cuda",
    ).expert_offsets.tolist() == [0, 0, 1]


@pytest.mark.parametrize(
    "T, E", [(5, 7), (1700, 7), (330, 30)], ids=["one block", "small rows", "wide rows"]
)
def test_the_routers_counts_and_the_maps_make_one_launch_of_the_plan(T, E):
    K = 6
    logits = torch.randn(T, E)
    count = cuda_kernels.new_block_count(logits, 1)
    _, idx = cuda_kernels.route_forward(logits, None, K, "xft", 1, block_count=count)
    assert (
        count.sum(0).tolist()
        == torch.bincount(
            idx.flatten(),
            minlength=E + 1,
        ).tolist()
    )
    tokens = cuda_kernels.block_tokens(T, E)
    *got, maps = cuda_kernels.route_plan(
        idx,
        E + 1,
        (16, 128),
        1,
        count,
        tokens,
    )
    want = dispatch(idx, E + 1, "torch")
    for pair in zip(got, want, strict=True):
        assert torch.equal(*pair)
    for rows, tiles in zip((16, 128), maps):
        assert torch.equal(
            tiles,
            cuda_kernels.tile_map(
                want.expert_offsets,
                T * K,
                rows,
                1,
            ),
        )
        live = tiles[:, tiles[0] >= 0].long()
        size = (live[2] - live[1]).clamp(max=rows)
        assert live[0].min() >= 1
        assert size.sum() == T * K - want.expert_offsets[1]
        owner = (
            torch.bucketize(
                live[1],
                want.expert_offsets,
                right=True,
            )
            - 1
        )
        assert torch.equal(owner, live[0])
        assert torch.equal(
            live[2],
            want.expert_offsets[live[0] + 1].long(),
        )


@pytest.mark.parametrize("gate", GATES)
def test_route_of_ties_bad_rows_and_any_layout(gate):
    logits = torch.randn(9, 6)
    logits[1], logits[2], logits[3, ::2] = float("nan"), -float("inf"), float("nan")
    logits[4], logits[5, :2], logits[6] = torch.tensor([0.0, -0.0] * 3), float("inf"), logits[0, 0]
    for view in (logits, logits.t().contiguous().t(), logits.repeat(1, 2)[:, ::2], logits[::2]):
        got = route(view, 4, gate, backend="cuda")
        want = route(view, 4, gate, backend="torch")
        assert torch.equal(got.topk_idx, want.topk_idx)
        torch.testing.assert_close(
            got.topk_weight, want.topk_weight, rtol=1e-6, atol=1e-7, equal_nan=True
        )


@pytest.mark.parametrize(
    "top, ids",
    [
        pytest.param(1.0, [[3, 3, 5], [4, 0, 4], [2, 2, 2]], id="one expert twice"),
        pytest.param(104.0, [[3, 4, 5], [5, 3, 4], [4, 3, 5]], id="104 below the largest"),
    ],
)
@pytest.mark.parametrize("gate", GATES)
def test_forced_ids_that_no_router_would_choose(gate, top, ids):
    shared = int(gate in SHARED)
    logits = torch.randn(3, 6)
    logits[:, :3] += top
    chosen = torch.tensor(ids)
    idx = torch.cat([chosen + shared, chosen.new_zeros(3, shared)], 1)
    wide = logits.double().requires_grad_()
    want = forced_weight(wide, chosen, gate)
    logits.requires_grad_()
    got = route(logits, 3 + shared, gate, topk_idx=idx, backend="cuda").topk_weight
    dweight = torch.randn(3, 3 + shared)
    (dlogits,) = torch.autograd.grad(got, logits, dweight)
    (dwide,) = torch.autograd.grad(want, wide, dweight.double())
    for one, other in ((got, want), (dlogits, dwide)):
        torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "shape",
    [
        (8, 34, 33),
        (1, 7),
        (3, 17),
        (4,),
        (2, 0, 7),
        (33, 129),
        (5, 64),
    ],
    ids=str,
)
def test_merge(shape, dtype, tolerance):
    weight = torch.randn(shape).to(dtype)
    alpha = torch.rand(shape[0])
    for name, (want, got) in zip(
        ("out", "dweight", "dalpha"),
        both(merge_experts, weight, alpha),
    ):
        if name == "dalpha":
            assert relative_error(got, want) < tolerance[torch.float32]
        else:  # products and sums rounded one by one, in torch's order
            assert torch.equal(got, want), name


def test_merge_into_another_dtype_and_not_at_all():
    weight = torch.randn(3, 33)
    alpha = torch.rand(3)
    want = merge_experts(weight, alpha)
    out = torch.zeros(33, dtype=torch.bfloat16)
    cuda_kernels.merge_experts_forward(
        weight,
        alpha,
        out,
        seen=alpha.clone(),
    )
    assert not out.any()
    cuda_kernels.merge_experts_forward(
        weight,
        alpha,
        out,
        seen=alpha + 1,
    )
    assert torch.equal(out, want.bfloat16())


def test_a_kept_mixture_is_merged_again_only_when_alpha_changes(monkeypatch):
    monkeypatch.setenv("MOE_RUNTIME_BACKEND", "cuda")
    layer = make()
    x = torch.randn(3, 33)
    want = layer(x)
    kept = layer._mixture.weights
    for weight in kept.values():
        weight.fill_(7.0)
    assert not torch.equal(layer(x), want)
    for weight in kept.values():
        assert (weight == 7).all()
    layer.mixing_logits.data[2] += 1e-6  # no version is counted
    got = layer(x)
    assert layer._mixture.weights is kept
    layer._mixture = None
    assert torch.equal(got, layer(x))


def fused_sum(y, weight, slot_row):
    """One fused multiply-add per slot, in order: float64 holds the product of two float32
    exactly.
    """
    (T, K), total = (
        weight.shape,
        torch.zeros(
            weight.shape[0],
            y.shape[1],
        ),
    )
    rows = y.double()[slot_row].view(T, K, y.shape[1])
    for k in range(K):
        total = (weight[:, k, None].double() * rows[:, k] + total).float()
    return total.to(y.dtype)


def test_combine_of_any_layout_and_rows_that_nobody_wrote():
    y = torch.randn(8, 12).t()
    weight = torch.rand(3, 4).t()
    slot_row = torch.randperm(12)
    want = combine(
        y.contiguous(),
        weight.contiguous(),
        slot_row,
        "cuda",
    )
    for index in (slot_row.int(), slot_row.to(torch.uint8), slot_row.repeat_interleave(2)[::2]):
        assert torch.equal(
            combine(y, weight, index, "cuda"),
            want,
        )
    y = y.clone()
    limit = torch.tensor([7], dtype=torch.int32)
    y[7:] = float("nan")
    got = cuda_kernels.combine_forward(y, weight, slot_row, limit)
    assert torch.equal(
        got,
        fused_sum(
            torch.where(y.isnan(), 0, y),
            weight,
            slot_row,
        ),
    )


@needs_interpreter
@pytest.mark.parametrize("shared", ["group", "dense"])
@pytest.mark.parametrize("T", [0, 1, 9])
def test_the_experts_between_the_plan_and_combine(T, shared, monkeypatch, tolerance):
    """moe_layer and moe_mlp with csrc/'s kernels around Triton's products, the same as Triton's
    own.
    """
    x = torch.randn(T, 16)
    router = torch.randn(3, 16)
    up = torch.randn(4, 24, 16)
    down = torch.randn(4, 16, 12) / 16
    found = {}
    launched = []
    launch = cuda.launch
    monkeypatch.setattr(
        cuda, "launch", lambda name, *args: launched.append(name) or launch(name, *args)
    )
    for name in ("triton", "cuda"):
        monkeypatch.setattr(
            moe_layer_op,
            "pick",
            lambda *_, name=name: name,
        )
        monkeypatch.setattr(
            moe_mlp_op,
            "pick",
            lambda *_, name=name: name,
        )
        leaves = [t.clone().requires_grad_() for t in (x, router, up, down)]
        layer = moe_layer_op.moe_layer(
            *leaves[:2],
            ExpertStacks(*leaves[2:], shared=shared),
            3,
            "xft",
        )
        weight = layer.topk_weight.detach().requires_grad_()
        out = moe_mlp_op.moe_mlp(
            x,
            leaves[2],
            leaves[3],
            weight,
            layer.topk_idx,
            shared=shared,
        )
        grads = torch.autograd.grad(
            layer.out.square().sum() + out.square().sum(), [*leaves, weight]
        )
        found[name] = [
            layer.out.detach(),
            out.detach(),
            layer.topk_idx,
            *grads,
        ]
    for want, got in zip(found["triton"], found["cuda"], strict=True):
        assert relative_error(got, want) < tolerance[torch.float32]
    # one launch of the plan has the maps too; the products' gradients stay Triton's
    plan = ["moert_route_plan", "moert_combine_forward"]
    assert launched == ["moert_route_forward", *plan, *plan, "moert_route_backward"]


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_the_emulator_rounds_as_the_hardware_does(dtype):
    every = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)  # each number there is
    assert torch.equal(
        every.float().isnan(),
        every.isnan(),
    )
    numbers = every[~every.isnan()].float()
    between = (numbers + numbers.roll(1)) / 2  # ties, and what overflows
    probes = torch.cat(
        [
            numbers,
            between,
            torch.nextafter(between, numbers),
            torch.tensor([65520.0, 3.4e38]),
        ]
    )
    probes = probes[~probes.isnan()]
    out = torch.empty_like(probes, dtype=dtype)
    cuda_kernels.merge_experts_forward(
        probes[None],
        torch.ones(1),
        out,
    )
    assert torch.equal(out, probes.to(dtype))
    assert torch.equal(
        cuda_kernels.merge_experts_forward(
            out[None],
            torch.ones(1),
        ),
        out,
    )


def test_what_the_kernels_do_not_take_is_refused():
    with pytest.raises(
        ValueError, match="num_experts must be at most 1024 for backend 'cuda', but got 1025"
    ):
        dispatch(
            torch.zeros(2, 2, dtype=torch.int64),
            1025,
            "cuda",
        )
    with pytest.raises(ValueError, match="num_experts must be .*but got 1025"):
        route(torch.zeros(2, 1025), 2, "softmax_topk", backend="cuda")
    with pytest.raises(ValueError, match="Use backend 'torch' for float64"):
        combine(
            torch.randn(4, 2, dtype=torch.float64),
            torch.rand(2, 2),
            torch.arange(4),
            "cuda",
        )
    with pytest.raises(
        RuntimeError, match="moert_route_plan failed: the workspace is missing or too small"
    ):
        cuda.launch(
            "moert_route_plan",
            torch.empty(0),
            *plan_arguments(torch.zeros(9000, dtype=torch.int32)),
            None,
            0,
            None,
            0,
        )
    with pytest.raises(RuntimeError, match="moert_tile_map failed: an argument is invalid"):
        cuda_kernels.tile_map(
            torch.zeros(3, dtype=torch.int32),
            4,
            1,
            -1,
        )


def plan_arguments(idx):
    outputs = [
        torch.empty(
            idx.numel() + 8,
            dtype=torch.int32,
        )
        for _ in range(4)
    ]
    return idx, 4, idx.numel(), 2, 1, None, 0, *outputs
