"""Experts whose gate and up are clamped, shifted or stored in turns, on both backends, against
float64 loops.

A value near the limit may fall on either side of it by rounding alone, which is no error but looks
like one: every case puts its limit into a gap between the values that occur, and asserts that some
lie beyond it, on each side, and some do not.
"""

import math

import pytest
import torch

from moe_runtime.backends import interpreted
from moe_runtime.ops.activation import ACT_BACKWARD, Activation
from moe_runtime.ops.expert_rows import ExpertStacks
from moe_runtime.ops.moe_mlp import moe_mlp, moe_mlp_reference, run_experts
from tests.ops.test_moe_mlp_kernel import everywhere
from tests.support import layouts
from tests.support.layer import moe_layer
from tests.support.oracle import (
    assert_parity,
    gate_and_up,
    gated_product,
    make_case,
    moe_mismatches,
    moe_oracle,
    run,
)

pytest.importorskip("triton")
from moe_runtime.kernels.tiles import Tile

BACKENDS = ["torch", "triton"]
LIMITED = [  # act, form; what a limit is, the case decides
    pytest.param("quick_gelu", {"limit": 1, "up_offset": 1.0, "interleaved": True}, id="GPT-OSS"),
    pytest.param("silu", {"limit": 1}, id="DeepSeek-V4"),
    pytest.param("gelu", {"limit": 1, "up_offset": -0.5}, id="clamped and shifted, gate first"),
    pytest.param("relu2", {"limit": 1, "interleaved": True}, id="clamped, in turns"),
]
FORMS = [
    *LIMITED,
    pytest.param("silu", {"interleaved": True}, id="in turns"),
    pytest.param("gelu_tanh", {"up_offset": 1.0}, id="shifted"),
    pytest.param("quick_gelu", {}, id="quick_gelu alone"),
]
GPT_OSS = LIMITED[0].values


def device_of(backend: str) -> str:
    return "cuda" if backend == "triton" and not interpreted() else "cpu"


def in_a_gap(case) -> None:
    """Put the case's limit between two of the values that gate and up take, where nothing is near;
    see that all sides occur.
    """
    if not case.form.get("limit"):
        return
    v = case.view({name: leaf.double() for name, leaf in case.leaves.items()})
    z = [
        v["up"][e] @ v["x"][t] + (v["up_bias"][e] if "up_bias" in v else 0)
        for t, ids in enumerate(case.topk_idx.tolist())
        for e in ids
        if 0 <= e < v["up"].shape[0]
    ]
    if not z:
        return
    gate, up = gate_and_up(torch.stack(z), case.form.get("interleaved", False))
    values = torch.cat([gate.flatten(), up.abs().flatten()])
    values = values[(values > 0.4) & (values < 1.2)].sort().values
    widest = values.diff().argmax()
    case.form["limit"] = limit = (values[widest : widest + 2].mean()).item()
    for beyond in (gate > limit, up > limit, up < -limit):
        assert 0.02 < beyond.double().mean() < 0.5
    assert (gate < -limit).any()  # the gate has no lower limit: only so is one seen


def on_a_grid(case) -> None:
    """x, up and its bias of few bits, so that gate and up are multiples of 1/8 in any dtype:
    between these is room.
    """
    leaves = case.leaves
    leaves["x"] = leaves["x"].clamp(-1, 1).round()
    for name in ("up", "up_bias"):
        leaves[name] = (leaves[name] * (leaves["x"].shape[1] if name == "up" else 64) ** 0.5).clamp(
            -1, 1
        ).round() / 8


def transposed_on_a_grid(case) -> None:
    on_a_grid(case)
    layouts.transposed_weights(case)


def made(
    act,
    form,
    dtype=torch.float32,
    sizes=(19, 33, 17, 4, 2),
    routing="dropped",
    change=None,
    bias=True,
):
    case = make_case(*sizes, dtype, routing, act, bias=bias)
    case.form = dict(form)
    if change:
        change(case)
    in_a_gap(case)
    return case


def check(case, tolerance, backend, **options):
    dtype = case.leaves["x"].dtype
    assert not moe_mismatches(
        moe_layer(backend=backend, **options), case, tolerance[dtype], device_of(backend)
    )


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("act, form", FORMS)
def test_parity(act, form, dtype, backend, tolerance):
    check(made(act, form, dtype), tolerance, backend)


@pytest.mark.parametrize(
    "form", [LIMITED[0].values, LIMITED[2].values], ids=["in turns", "gate first"]
)
def test_parity_in_float64(form, tolerance):
    check(made(*form, torch.float64), tolerance, "torch")


SHAPES = [  # T, H, I, E, K, routing
    pytest.param(0, 33, 17, 4, 2, "random", id="no tokens"),
    pytest.param(19, 33, 17, 4, 2, "skip", id="an expert without tokens"),
    pytest.param(13, 33, 17, 4, 1, "all", id="one expert sees every token once, in order"),
    pytest.param(13, 32, 16, 4, 4, "random", id="K = E, nothing is ragged"),
    pytest.param(19, 33, 17, 1, 1, "random", id="E = 1"),
    pytest.param(19, 33, 17, 4, 2, "twice", id="one token twice at one expert"),
]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("T, H, I, E, K, routing", SHAPES)
def test_shapes(T, H, I, E, K, routing, bias, backend, tolerance):
    check(made(*GPT_OSS, sizes=(T, H, I, E, K), routing=routing, bias=bias), tolerance, backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("act, form", [LIMITED[0], LIMITED[1]])
@pytest.mark.parametrize(
    "change",
    [
        layouts.transposed_weights,
        layouts.experts_last,
        layouts.transposed_x,
        layouts.expanded_gradient,
    ],
)
def test_layouts(change, act, form, backend, tolerance):
    with everywhere(Tile(16, 32, 32, TMA=True)):
        check(made(act, form, sizes=(13, 40, 24, 3, 2), change=change), tolerance, backend)


TILES = [
    pytest.param(Tile(16, 16, 16, GROUP_M=1), id="small"),
    pytest.param(Tile(32, 32, 32, TMA=True), id="descriptors"),
    pytest.param(Tile(16, 32, 32, TMA=True, PERSISTENT=True), id="descriptors, persistent"),
    pytest.param(Tile(64, 64, 64), id="one tile holds an expert"),
    pytest.param(
        Tile(16, 256, 16, TMA=True),
        id="twice its columns are more than a descriptor's block may have",
    ),
]


@pytest.mark.parametrize(
    "change", [None, layouts.transposed_weights], ids=["[E, 2I, H]", "[E, H, 2I] transposed"]
)
@pytest.mark.parametrize("tile", TILES)
def test_tiles(tile, change, tolerance):
    # 72 columns of up: more than one tile of 32, and at 256 one that is not clipped to it
    I = 136 if tile.BLOCK_N == 256 else 72
    with everywhere(tile):
        check(
            made(*GPT_OSS, torch.float16, (21, 40, I, 2, 2), "random", change), tolerance, "triton"
        )


def test_the_tiles_of_a_gpu(tolerance):
    """128 rows by 128 columns of gate and as many of up in one accumulator, by descriptors, at
    sizes that have tails.
    """
    with everywhere(Tile(128, 128, 64, TMA=True), dw=Tile(128, 256, 64)):
        case = made(*GPT_OSS, torch.bfloat16, (150, 72, 136, 2, 2), "twice", transposed_on_a_grid)
        check(case, tolerance, "triton")


def exactly_at_the_limit(form):
    """One token that is e_0: gate and up are the first columns of the weights, at the limit, just
    below it and beyond.
    """
    limit = 0.75
    below = math.nextafter(0.75, 0)
    gate = torch.tensor([limit, below, -limit, 1.0, limit, limit, limit, -2.0, 0.5])
    up = torch.tensor([limit, limit, limit, limit, -limit, 1.0, -1.0, 0.25, -limit])
    case = make_case(1, 4, 9, 1, 1, torch.float32, act="quick_gelu")
    case.form = form | {"limit": limit}
    case.leaves["x"] = torch.tensor([[1.0, 0, 0, 0]])
    z = torch.stack([gate, up], 1).flatten() if form.get("interleaved") else torch.cat([gate, up])
    case.leaves["up"][0, :, 0] = z
    return case


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "form", [{}, {"interleaved": True, "up_offset": 1.0}], ids=["gate first", "in turns"]
)
def test_a_value_on_the_limit_has_a_gradient_and_one_beyond_has_none(form, backend, tolerance):
    case = exactly_at_the_limit(form)
    check(case, tolerance, backend)
    got = run(case, moe_layer(backend=backend), device=device_of(backend))["dup"][0, :, 0]
    gate, up = gate_and_up(got, form.get("interleaved", False))
    assert (gate != 0).tolist() == [True, True, True, False, True, True, True, True, True]
    assert (up != 0).tolist() == [True, True, True, True, True, False, False, True, True]
    # as torch.clamp's own gradient has it
    z = case.leaves["up"][0, :, 0].clone().requires_grad_()
    pattern = torch.cos(torch.arange(9.0))
    activation = {"act": "quick_gelu", "gated": True, **case.form}
    (want,) = torch.autograd.grad((Activation(**activation).apply(z) * pattern).sum(), z)
    again = z.detach().double().requires_grad_()
    product = gated_product(again, lambda x: x * torch.sigmoid(1.702 * x), **case.form)
    (oracle,) = torch.autograd.grad((product * pattern).sum(), again)
    torch.testing.assert_close(want, oracle.float())


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradient_of_a_nan_beyond_the_limit_is_nan_or_zero_and_the_output_shows_it(backend):
    """A NaN is not taken for a number by the clamps."""
    case = exactly_at_the_limit({})
    case.leaves["up"][0, 0, 0] = float("nan")
    assert run(case, moe_layer(backend=backend), device=device_of(backend))["out"].isnan().all()


@pytest.mark.parametrize("routing", ["random", "dropped"])
@pytest.mark.parametrize("act, form", FORMS)
def test_reference_follows_the_equation(act, form, routing):
    case = made(act, form, torch.float64, routing=routing)

    def reference(*args, up_bias, down_bias, **kwargs):
        return moe_mlp_reference(*args, gate_up_bias=up_bias, down_bias=down_bias, **kwargs)

    assert_parity(run(case, reference), run(case, moe_oracle), 1e-12)


@pytest.mark.parametrize("act, form", LIMITED)
def test_gradcheck(act, form):
    case = made(act, form, torch.float64, (5, 4, 3, 3, 2))
    leaves = [leaf.requires_grad_() for leaf in case.leaves.values()]

    def f(x, up, down, topk_weight, up_bias, down_bias):
        options = {"gate_up_bias": up_bias, "down_bias": down_bias, "act": act, **case.form}
        return moe_mlp(x, up, down, topk_weight, case.topk_idx, **options, backend="torch")

    assert torch.autograd.gradcheck(f, leaves, fast_mode=False)


def test_quick_gelu_has_the_derivative_of_its_definition():
    x = torch.linspace(-8, 8, 101, dtype=torch.float64).requires_grad_()
    (want,) = torch.autograd.grad((x / (1 + torch.exp(-1.702 * x))).sum(), x)
    torch.testing.assert_close(
        ACT_BACKWARD["quick_gelu"](torch.ones_like(x), x.detach()), want, rtol=1e-12, atol=1e-14
    )


# what the forms have to do with each other
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_in_turns_is_the_other_order_of_the_rows(dtype, backend):
    case = made("silu", {"limit": 1, "up_offset": 1.0}, dtype)
    # row of [gate; up] that stands at each place
    order = torch.arange(34).view(2, 17).t().flatten()
    device = device_of(backend)
    want = run(case, moe_layer(backend=backend), device=device)
    case.form["interleaved"] = True
    for name in ("up", "up_bias"):
        case.leaves[name] = case.leaves[name][:, order].contiguous()
        want[f"d{name}"] = want[f"d{name}"][:, order]
    got = run(case, moe_layer(backend=backend), device=device)
    assert_parity(got, want, {torch.float32: 2e-6, torch.bfloat16: 8e-3}[dtype])


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_limit_that_nothing_reaches_changes_nothing(backend):
    case = made("silu", {})
    device = device_of(backend)
    want = run(case, moe_layer(backend=backend), device=device)
    got = run(case, moe_layer(backend=backend, limit=1e4), device=device)
    assert_parity(got, want, 1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_recompute_and_a_second_run_give_the_same_bits(dtype, backend):
    case = made(*GPT_OSS, dtype)
    device = device_of(backend)
    want = run(case, moe_layer(backend=backend), device=device)
    for options in ({"recompute": True}, {}):
        got = run(case, moe_layer(backend=backend, **options), device=device)
        assert all(torch.equal(got[name], want[name]) for name in want)


@pytest.mark.parametrize("backend", BACKENDS)
def test_frozen_experts_get_zero_and_all_else_is_the_same(backend):
    case = made(*GPT_OSS)
    device = device_of(backend)
    trainable = torch.tensor([True, False, True, False], device=device)
    want, got = (
        run(case, moe_layer(backend=backend, trainable=t), device=device) for t in (None, trainable)
    )
    for name in ("dup", "ddown", "dup_bias", "ddown_bias"):
        mask = trainable.cpu().view(4, *[1] * (got[name].dim() - 1))
        assert torch.equal(got[name], torch.where(mask, want[name], 0))
    assert all(torch.equal(got[name], want[name]) for name in ("out", "dx", "dtopk_weight"))


@pytest.mark.parametrize("backend", BACKENDS)
def test_trained_weights_lie_apart(backend, tolerance):
    """Experts 2 and 0 train, in this order, beside stacks stored in x out; the others' gradients
    are nobody's.
    """
    case = made(*GPT_OSS, sizes=(19, 40, 24, 4, 2))
    device = device_of(backend)
    want = run(case, moe_oracle, torch.float64)
    for name in ("up", "down", "up_bias", "down_bias"):
        want[f"d{name}"][[1, 3]] = 0

    def call(x, up, down, *args, **kwargs):
        order = torch.tensor([2, 0], device=x.device)
        place = torch.tensor([1, -1, 0, -1], device=x.device).int()
        stacks = (w.detach().transpose(1, 2).contiguous().transpose(1, 2) for w in (up, down))
        layer = moe_layer(backend=backend, trainable=place, trained=(up[order], down[order]))
        return layer(x, *stacks, *args, **kwargs)

    assert_parity(run(case, call, device=device), want, tolerance[torch.float32])


def dense_case(sizes, **form):
    """Expert 0 in the last slot of every token, and nowhere else."""
    case = make_case(*sizes, act="quick_gelu", bias=True)
    case.topk_idx = case.topk_idx % (sizes[3] - 1) + 1
    case.topk_idx[:, -1] = 0
    case.form = form
    in_a_gap(case)
    return case


@pytest.mark.parametrize("form", [GPT_OSS[1], {"limit": 1}], ids=["in turns", "gate first"])
@pytest.mark.parametrize("I", [40, 272], ids=["one block", "two blocks of its activation"])
def test_shared_expert_by_torchs_matmul(I, form, tolerance):
    with everywhere(Tile(16, 32, 32)):
        check(dense_case((9, 24, I, 3, 2), **form), tolerance, "triton", shared="dense")


# graphs, fakes, arguments
@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [None, True], ids=["as it comes", "dynamic"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_compiles_without_a_graph_break(backend, dynamic):
    torch._dynamo.reset()
    case = made(*GPT_OSS, sizes=(12, 33, 17, 3, 2))
    device = device_of(backend)
    compiled = torch.compile(
        moe_layer(backend=backend), fullgraph=True, backend="aot_eager", dynamic=dynamic
    )
    with everywhere(Tile(32, 32, 64)):
        # dynamo may make a variable of a number that changes
        for limit in (case.form["limit"], 0.5, 7):
            case.form["limit"] = limit
            got, want = (
                run(case, f, device=device) for f in (compiled, moe_layer(backend=backend))
            )
            assert all(torch.equal(got[name], want[name]) for name in want)


@pytest.mark.parametrize("backend", BACKENDS)
def test_offsets_count_the_slots(backend):
    case = made(*GPT_OSS)
    device = device_of(backend)
    x, up, down, weight, *_ = (leaf.to(device) for leaf in case.leaves.values())
    experts = ExpertStacks(up, down, activation=Activation(**case.form))
    out, offsets = run_experts(x, experts, weight, case.topk_idx.to(device), backend=backend)
    counts = [(case.topk_idx == e).sum().item() for e in range(4)]
    assert offsets.diff().tolist() == counts and offsets[0] == 0 and offsets.dtype == torch.int32
    again = moe_mlp(x, up, down, weight, case.topk_idx.to(device), **case.form, backend=backend)
    assert torch.equal(out, again)


@pytest.mark.parametrize("op", ["moe_mlp", "moe_mlp_backward", "moe_layer", "moe_layer_backward"])
def test_experts_are_what_the_schemas_say(op):
    names = [
        argument.name for argument in getattr(torch.ops.moe_runtime, op).default._schema.arguments
    ]
    *tensors, _, shared = ExpertStacks._fields
    fields = [*tensors, *Activation._fields, shared]
    at = names.index("up")
    assert names[at : at + len(fields)] == fields
    assert ExpertStacks.unpack(range(len(fields))).pack() == tuple(range(len(fields)))
