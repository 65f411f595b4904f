"""The backward pass of the cpp backend in one call: gradients, the order of sums, memory, and what
is left to torch.
"""

import math

import pytest
import torch

from moe_runtime.ops import moe_mlp_cpp
from moe_runtime.ops.expert_rows import NOWHERE, ExpertStacks, Gradients
from tests.ops.test_moe_mlp import layer
from tests.ops.test_moe_mlp_cpp import FLOATS, FORMS, _library, variant  # noqa: F401  fixtures
from tests.support import layouts
from tests.support.oracle import bounds, choose_experts, make_case, mismatches, moe_eager, run

CALL = moe_mlp_cpp._one_call_back


@pytest.fixture(autouse=True)
def calls(monkeypatch):
    """All backward passes that the library can do, it does; how often it did."""
    made = []
    monkeypatch.setattr(moe_mlp_cpp, "few_rows", lambda *_: moe_mlp_cpp.ANY)
    monkeypatch.setattr(moe_mlp_cpp, "_one_call_back", lambda *args: made.append(1) or CALL(*args))
    return made


def moe_mismatches(call, case, table) -> list[str]:
    """As the oracle's, expert by expert instead of row by row."""
    want = run(case, moe_eager, torch.float64)
    return mismatches(run(case, call), want, bounds(run(case, moe_eager), want, table))


# less and more than a panel of columns and than what is laid out at once; odd sums; last rows of
# blocks and pieces
SIZES = [
    pytest.param(70, 128, 96, 4, 2, id="whole vectors"),
    pytest.param(65, 130, 65, 3, 2, id="rests"),
    pytest.param(5, 31, 7, 6, 2, id="few"),
    pytest.param(560, 40, 33, 2, 1, id="rows of several blocks"),
    pytest.param(21, 580, 530, 2, 2, id="long sums"),
    pytest.param(35, 1060, 540, 2, 1, id="longer sums"),
    pytest.param(1100, 24, 17, 1, 1, id="two pieces", marks=pytest.mark.slow),
]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("T, H, I, E, K", SIZES)
def test_gradients_are_those_of_float64(T, H, I, E, K, dtype, variant, tolerance, calls):  # noqa: F811
    case = make_case(T, H, I, E, K, dtype, "dropped")
    assert not moe_mismatches(layer(backend="cpp"), case, tolerance[dtype])
    assert calls


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("form", [None, {}, *FORMS], ids=str)
def test_forms_and_recomputing(form, dtype, tolerance, monkeypatch, calls):
    case = make_case(19, 33, 37, 4, 2, dtype, "dropped", "gelu", form is not None)
    case.form = dict(form or {})
    if dtype == torch.bfloat16 and "limit" in case.form:
        case.form["limit"] = 20.0  # the slope at a near one depends on how z is rounded
    assert not moe_mismatches(layer(backend="cpp"), case, tolerance[dtype])
    want = run(case, layer(backend="cpp"))
    monkeypatch.setattr(moe_mlp_cpp, "BACK_ELEMENTS", 12 * 111)  # groups of about an expert
    again = run(case, layer(backend="cpp", recompute=True))
    assert all(torch.equal(again[name], want[name]) for name in want)
    assert len(calls) == 3


def gradients(case, needs=(True,) * 3, trainable=None, into=NOWHERE):
    """dx, d up, d down and dweight of one call."""
    v = case.leaves
    experts = ExpertStacks(v["up"], v["down"], trainable=trainable)
    _, z, *rows = moe_mlp_cpp.forward(v["x"], experts, v["topk_weight"], case.topk_idx, True)
    needs = Gradients(*needs, True, False, False)
    grads = moe_mlp_cpp.backward(
        torch.cos(v["x"]), v["x"], experts, v["topk_weight"], z, *rows, needs, into=into
    )
    return grads[:4]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("T, H, I", [(300, 96, 130), (1300, 70, 33)])
def test_threads_change_no_bit(T, H, I, dtype, monkeypatch, variant, calls):  # noqa: F811
    case = make_case(T, H, I, 3, 2, dtype, "dropped")
    want = gradients(case)
    for threads in (1, 5, 64):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        assert all(map(torch.equal, gradients(case), want))
    assert len(calls) == 4


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_adding_gives_the_bits_of_separate_adds(dtype, variant, calls):  # noqa: F811
    case = make_case(600, 40, 33, 2, 1, dtype, "halves")
    _, up, down, _ = gradients(case)
    old = [torch.randn_like(up), torch.randn_like(down)]
    into = NOWHERE._replace(up=old[0].clone(), down=old[1].clone())
    _, up_sum, down_sum, _ = gradients(case, into=into)
    assert (
        up_sum is into.up
        and torch.equal(up_sum, old[0] + up)
        and torch.equal(down_sum, old[1] + down)
    )
    assert len(calls) == 2


@pytest.mark.parametrize(
    "form", ["plain", "main_grad", "transposed stacks", layouts.NARROW, "a layer with its router"]
)
def test_accumulating_parameters(form, calls):
    layouts.check_accumulation(form, "cpp")
    assert bool(calls) == (form not in ("transposed stacks", layouts.NARROW))


@pytest.mark.parametrize(
    "needs",
    [(False, True, False), (True, False, False), (False, False, True), (False,) * 3],
    ids=str,
)
def test_what_is_not_needed_is_not_computed(needs):
    case = make_case(40, 33, 17, 4, 2, routing="skip")
    for got, want, need in zip(
        gradients(case, needs), gradients(case), (*needs, True), strict=True
    ):
        assert torch.equal(got, want) if need else got is None


def test_frozen_and_idle_experts_get_zeros_and_spread_no_nan(calls):
    case = make_case(40, 33, 17, 5, 2)
    case.topk_idx.copy_(choose_experts(40, 4, 2, "random"))  # none for the last
    want = gradients(case)
    for name in ("up", "down"):
        case.leaves[name][4] = float("nan")
    trainable = torch.tensor([True, False, True, True, True])
    dx, up, down, dweight = gradients(case, trainable=trainable)
    assert torch.equal(dx, want[0]) and torch.equal(dweight, want[3])
    for got, all_of_them in ((up, want[1]), (down, want[2])):
        assert torch.equal(got[[0, 2, 3]], all_of_them[[0, 2, 3]]) and not got[[1, 4]].any()
    assert len(calls) == 2


def test_only_dropped_slots():
    case = make_case(6, 33, 17, 3, 2)
    case.topk_idx.fill_(-1)
    assert not any(grad.any() for grad in gradients(case))


@pytest.mark.parametrize("what", ["bias", "transposed", "apart", "wider main_grad"])
def test_what_it_does_not_serve_goes_the_other_way(what, tolerance, calls):
    case = make_case(21, 33, 17, 4, 2, bias=what == "bias")
    if what == "transposed":
        layouts.transposed_weights(case)
    if what == "apart":
        v = case.leaves
        rows = torch.tensor([0, -1, 1, -1], dtype=torch.int32)
        trains = (rows >= 0)[:, None, None]  # whose rows of the stacks are not read
        experts = ExpertStacks(
            v["up"].masked_fill(trains, math.nan),
            v["down"].masked_fill(trains, math.nan),
            trainable=rows,
            up_trained=v["up"][[0, 2]],
            down_trained=v["down"][[0, 2]],
        )
        _, z, *indices = moe_mlp_cpp.forward(v["x"], experts, v["topk_weight"], case.topk_idx, True)
        needs = Gradients(True, True, True, True, False, False)
        got = moe_mlp_cpp.backward(
            torch.cos(v["x"]), v["x"], experts, v["topk_weight"], z, *indices, needs
        )
        assert not calls
        for a, b in zip(got[1:3], gradients(case)[1:3], strict=True):
            torch.testing.assert_close(a, b[[0, 2]], rtol=1e-4, atol=1e-5)
    elif what == "wider main_grad":
        case = make_case(21, 33, 17, 4, 2, torch.bfloat16)
        up, down = (torch.zeros(case.leaves[name].shape) for name in ("up", "down"))
        gradients(case, into=NOWHERE._replace(up=up, down=down))
        assert up.any() and not calls
    else:
        assert not moe_mismatches(layer(backend="cpp"), case, tolerance[torch.float32])
        assert not calls


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("T, E", [(1100, 1), (900, 6)])
def test_its_memory_is_what_it_asks_for(T, E, recompute, monkeypatch, variant, calls):  # noqa: F811
    case = make_case(T, 70, 90, E, 1)
    asked = []

    def scratch(name, shape, like, dtype):
        asked.append(torch.full((shape[0] + 4096,), 77, dtype=dtype))
        return asked[-1][: shape[0]]

    monkeypatch.setattr(moe_mlp_cpp, "BACK_ELEMENTS", 300 * 270)
    monkeypatch.setattr(moe_mlp_cpp, "scratch", scratch)
    run(case, layer(backend="cpp", recompute=recompute))
    assert calls and all((space[-4096:] == 77).all() for space in asked)
    # beside what each thread has: dx of the rows; dz, wh and z of a group's; and indices
    group = T if E == 1 else 300
    rest = 4 * (T * 70 + group * (270 + 180 * recompute)) + 64 * (T + E)
    each = 4 * max(256 * (128 + 512) + 512 * 512, 4 * (512 + 1024) * 64)
    assert asked[-1].numel() - 4096 <= torch.get_num_threads() * each + rest
