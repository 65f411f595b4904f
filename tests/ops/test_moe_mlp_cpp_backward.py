"""The backward pass of the cpp backend in one call: gradients, the order of sums, memory, and cases
that torch handles.
"""

import math

import pytest
import torch

from moe_runtime.ops import moe_mlp_cpp
from moe_runtime.ops.expert_rows import NOWHERE, ExpertStacks, Gradients
from tests.support import layouts
from tests.support.layer import moe_layer
from tests.support.oracle import (
    assert_same,
    bounds,
    choose_experts,
    make_case,
    mismatches,
    moe_eager,
    run,
)

FLOATS = [torch.float32, torch.bfloat16]
EACH_DTYPE = pytest.mark.parametrize("dtype", FLOATS, ids=str)
CALL = moe_mlp_cpp._one_call_back
LAYER = moe_layer(backend="cpp")
ALL = Gradients(True, True, True, True, False, False)


@pytest.fixture(autouse=True)
def calls(monkeypatch, cpu_library):
    """Let the library run every backward pass that it supports; return the calls."""
    made = []

    def counted(*args):
        made.append(1)
        return CALL(*args)

    monkeypatch.setattr(moe_mlp_cpp, "few_rows", lambda *_: moe_mlp_cpp.ANY)
    monkeypatch.setattr(moe_mlp_cpp, "_one_call_back", counted)
    return made


def moe_mismatches(case, table) -> list[str]:
    """Like the oracle's, but by expert instead of by row."""
    expected = run(case, moe_eager, torch.float64)
    return mismatches(
        run(case, LAYER),
        expected,
        bounds(run(case, moe_eager), expected, table),
    )


SIZES = [
    pytest.param(70, 128, 96, 4, 2, id="whole vectors"),
    pytest.param(65, 130, 65, 3, 2, id="remainders"),
    pytest.param(560, 40, 33, 2, 1, id="rows of several blocks"),
    pytest.param(21, 580, 530, 2, 2, id="long sums"),
    pytest.param(35, 1060, 540, 2, 1, id="longer sums"),
    pytest.param(
        1100,
        24,
        17,
        1,
        1,
        id="two parts",
        marks=pytest.mark.slow,
    ),
]


@EACH_DTYPE
@pytest.mark.parametrize("T, H, I, E, K", SIZES)
def test_gradients_are_those_of_float64(T, H, I, E, K, dtype, variant, tolerance, calls):
    case = make_case(T, H, I, E, K, dtype, "dropped")
    assert not moe_mismatches(case, tolerance[dtype])
    assert calls


@EACH_DTYPE
@pytest.mark.parametrize("gated", [True, False])
def test_recomputing_a_group_at_a_time_gives_the_same_bits(gated, dtype, monkeypatch, calls):
    case = make_case(19, 33, 37, 4, 2, dtype, "dropped", "gelu", gated)
    expected = run(case, LAYER)
    monkeypatch.setattr(moe_mlp_cpp, "BACK_ELEMENTS", 12 * 111)  # groups of about one expert
    assert_same(run(case, moe_layer(backend="cpp", recompute=True)), expected)
    assert len(calls) == 2


def gradients(v, idx, needs=ALL, into=NOWHERE, **options):
    """Return dx, d up, d down and dweight of one call with the leaves `v`."""
    experts = ExpertStacks(v["up"], v["down"], **options)
    _, z, *rows = moe_mlp_cpp.forward(
        v["x"],
        experts,
        v["topk_weight"],
        idx,
        True,
    )
    dout = torch.cos(v["x"])
    weight = v["topk_weight"]
    return moe_mlp_cpp.backward(
        dout,
        v["x"],
        experts,
        weight,
        z,
        *rows,
        needs,
        into=into,
    )[:4]


@EACH_DTYPE
@pytest.mark.parametrize("T, H, I", [(300, 96, 130), (1300, 70, 33)])
def test_threads_change_no_bit(T, H, I, dtype, monkeypatch, variant, calls):
    case = make_case(T, H, I, 3, 2, dtype, "dropped")
    expected = gradients(case.leaves, case.topk_idx)
    for threads in (1, 5, 64):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        assert_same(gradients(case.leaves, case.topk_idx), expected)
    assert len(calls) == 4


@EACH_DTYPE
def test_adding_gives_the_bits_of_separate_adds(dtype, variant, calls):
    case = make_case(600, 40, 33, 2, 1, dtype, "halves")
    _, up, down, _ = gradients(case.leaves, case.topk_idx)
    old_up = torch.randn_like(up)
    old_down = torch.randn_like(down)
    into = NOWHERE._replace(up=old_up.clone(), down=old_down.clone())
    _, up_sum, down_sum, _ = gradients(
        case.leaves,
        case.topk_idx,
        into=into,
    )
    assert up_sum is into.up
    assert_same([up_sum, down_sum], [old_up + up, old_down + down])
    assert len(calls) == 2


@pytest.mark.parametrize(
    "form", ["plain", "main_grad", "transposed stacks", layouts.NARROW, "a layer with its router"]
)
def test_accumulating_parameters(form, calls):
    layouts.check_accumulation(form, "cpp")
    assert bool(calls) == (form not in ("transposed stacks", layouts.NARROW))


def test_frozen_and_idle_experts_get_zeros_and_spread_no_nan(calls):
    case = make_case(40, 33, 17, 5, 2)
    idx = choose_experts(40, 4, 2, "random")  # none for the last
    expected = gradients(case.leaves, idx)
    for name in ("up", "down"):
        case.leaves[name][4] = float("nan")
    for stack in expected[1:3]:
        stack[[1, 4]] = 0
    trainable = torch.tensor([True, False, True, True, True])
    assert_same(gradients(case.leaves, idx, trainable=trainable), expected)
    assert len(calls) == 2


@pytest.mark.parametrize("change", [None, layouts.transposed_weights], ids=["bias", "in x out"])
def test_what_it_does_not_serve_goes_to_torch(change, tolerance, calls):
    case = make_case(21, 33, 17, 4, 2, bias=change is None)
    if change:
        change(case)
    assert not moe_mismatches(case, tolerance[torch.float32])
    assert not calls


@EACH_DTYPE
@pytest.mark.parametrize("T, H, I", [(21, 33, 17), (300, 96, 130)])
def test_weights_that_train_separately_give_the_same_bits(T, H, I, dtype, variant, calls):
    case = make_case(T, H, I, 4, 2, dtype)
    v = case.leaves
    rows = torch.tensor([1, -1, 0, -1], dtype=torch.int32)
    trains = (rows >= 0)[:, None, None]  # their rows of the stacks are not read
    frozen = dict(v)
    for name in ("up", "down"):
        frozen[name] = v[name].masked_fill(trains, math.nan)
    trained = {"up_trained": v["up"][[2, 0]], "down_trained": v["down"][[2, 0]]}
    got = gradients(frozen, case.topk_idx, trainable=rows, **trained)
    dx, up, down, dweight = gradients(v, case.topk_idx)
    assert_same(got, (dx, up[[2, 0]], down[[2, 0]], dweight))
    turned = trained["up_trained"].transpose(1, 2).contiguous().transpose(1, 2)
    others = gradients(frozen, case.topk_idx, trainable=rows, **trained | {"up_trained": turned})
    assert len(calls) == 2  # torch computes other strides than the stack's
    for other, one in zip(others, got):
        assert (other - one).abs().max() < 0.02 * one.abs().max()


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("T, E", [(1100, 1), (900, 6)])
def test_its_memory_is_what_it_asks_for(T, E, recompute, monkeypatch, variant, calls):
    case = make_case(T, 70, 90, E, 1)
    spaces = []

    def scratch(name, shape, like, dtype):
        spaces.append(torch.full((shape[0] + 4096,), 77, dtype=dtype))
        return spaces[-1][: shape[0]]

    monkeypatch.setattr(moe_mlp_cpp, "BACK_ELEMENTS", 300 * 270)
    monkeypatch.setattr(moe_mlp_cpp, "scratch", scratch)
    run(case, moe_layer(backend="cpp", recompute=recompute))
    assert calls
    for space in spaces:
        assert (space[-4096:] == 77).all()
    # in addition to each thread's own: dx of the rows; dz, wh and z of a group's rows; and indices
    group = T if E == 1 else 300
    rest = 4 * (T * 70 + group * (270 + 180 * recompute)) + 64 * (T + E)
    each = 4 * max(256 * (128 + 512) + 512 * 512, 4 * (512 + 1024) * 64)
    assert spaces[-1].numel() - 4096 <= torch.get_num_threads() * each + rest
