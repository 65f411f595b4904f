"""The parity checks must see planted bugs: each mutant below is a mistake somebody made, and each has to be caught.

A mutant is the code itself with one line changed (so a mutant whose line is gone says so and wants a new one), or one of
its steps wrapped. The checks are those of test_moe_mlp, test_routing, test_combine and test_merging.
"""

import inspect
import itertools
import textwrap

import pytest
import torch

from moe_runtime.ops import combine as combine_ops
from moe_runtime.ops import expert_rows, merging, moe_mlp_torch, routing, workspace
from moe_runtime.ops.combine import combine
from moe_runtime.ops.moe_mlp import moe_mlp
from tests.ops import test_moe_mlp_forms as forms
from tests.support.oracle import make_case, mismatches, moe_mismatches, route_mismatches


def edited(function, old: str, new: str):
    """The function with `old` replaced by `new` in its source."""
    source = textwrap.dedent(inspect.getsource(function))
    assert old in source, f"{function.__name__} has no {old!r} any more; plant this mutant elsewhere"
    names = dict(function.__globals__)
    exec(compile(source.replace(old, new), inspect.getfile(function), "exec"), names)
    return names[function.__name__]


def layer(x, up, down, topk_weight, topk_idx, *, up_bias, down_bias, act, gated, **form):
    biases = {"gate_up_bias": up_bias, "down_bias": down_bias}
    return moe_mlp(x, up, down, topk_weight, topk_idx, act=act, gated=gated, **form, **biases, backend="torch")


ROUTINGS = ("random", "skip", "all", "dropped", "twice", "halves")


def caught(tolerance, dtype=torch.float32) -> set[str]:
    """Which routings show a mismatch."""
    torch.manual_seed(0)
    cases = {r: make_case(24, 33, 17, 4, 2, dtype, r, bias=True) for r in ROUTINGS}
    return {r for r, case in cases.items() if moe_mismatches(layer, case, tolerance[dtype])}


FORWARD, BACKWARD, SORT = moe_mlp_torch.forward, moe_mlp_torch.backward, moe_mlp_torch.sort_slots


def swapped(tensor):
    return tensor[[1, 0, 2, 3]]


def with_experts(change):
    return lambda x, experts, *args: FORWARD(x, change(experts), *args)


def with_offsets(change):
    def sort(topk_idx, num_experts):
        offsets, row_slot = SORT(topk_idx, num_experts)
        return change(offsets), row_slot

    return sort


def without_last_row(topk_idx, num_experts):
    """The last row of expert 0 is dropped, as a tile loop with a wrong bound does."""
    offsets, row_slot = SORT(topk_idx, num_experts)
    a, b = offsets[:2].tolist()
    if a < b:
        dropped = torch.cat([row_slot[: b - 1], row_slot[b:], row_slot[b - 1 : b]])
        return torch.cat([offsets[:1], offsets[1:] - 1]), dropped
    return offsets, row_slot


def shifted(offsets):
    inner = (offsets[1:-1] + 1).clamp(max=offsets[-1].item())
    return torch.cat([offsets[:1], inner, offsets[-1:]])


def changed_gradient(**changes):
    def backward(*args):
        grads = BACKWARD(*args)
        return grads._replace(**{name: change(getattr(grads, name)) for name, change in changes.items()})

    return backward


def poison_scratch():
    """Leave NaN in the memory that the torch backend reuses, as another layer's step would leave its own numbers."""
    for buffer in getattr(workspace._local, "buffers", {}).values():
        if buffer.is_floating_point():
            buffer.fill_(float("nan"))


def after_others(function):
    def call(*args):
        poison_scratch()
        return function(*args)

    return call


def unstable(topk_idx, num_experts):
    """Equal experts in another order: legal for the sum, so this one must NOT be caught."""
    offsets, row_slot = SORT(topk_idx, num_experts)
    bounds = [*offsets.tolist(), row_slot.numel()]
    return offsets, torch.cat([row_slot[a:b].flip(0) for a, b in itertools.pairwise(bounds)])


def reformed(experts, **change):
    return experts._replace(activation=experts.activation._replace(**change))


EVERYWHERE = set(ROUTINGS)
MUTANTS = [  # name in moe_mlp_torch, its replacement, routings that must show it
    pytest.param(
        "forward",
        with_experts(lambda e: e._replace(up=swapped(e.up))),
        {"random", "skip"},
        id="two experts swapped in the up projection",
    ),
    pytest.param(
        "forward",
        with_experts(lambda e: e._replace(down=e.down.roll(1, 0))),
        EVERYWHERE,
        id="down projection of the neighbour",
    ),
    pytest.param("forward", with_experts(lambda e: e._replace(down_bias=None)), EVERYWHERE, id="down bias forgotten"),
    pytest.param("forward", with_experts(lambda e: reformed(e, act="gelu")), EVERYWHERE, id="another activation"),
    pytest.param(
        "forward", with_experts(lambda e: e._replace(up=e.up.roll(17, 1))), EVERYWHERE, id="gate and up exchanged"
    ),
    pytest.param(
        "forward",
        lambda x, e, w, i, save: FORWARD(x, e, torch.ones_like(w), i, save),
        EVERYWHERE,
        id="routing weights forgotten",
    ),
    pytest.param(
        "forward",
        lambda x, e, w, i, save: FORWARD(x, e, w.flip(1), i, save),
        {"random", "skip", "dropped"},
        id="weights of the other slot",
    ),
    pytest.param(
        "forward",
        lambda x, e, w, i, save: FORWARD(x, e, w, i.clamp(0, 3), save),
        {"dropped"},
        id="dropped slots computed",
    ),
    pytest.param("sort_slots", without_last_row, {"random", "skip"}, id="last row of an expert dropped"),
    pytest.param("sort_slots", with_offsets(shifted), {"random", "skip", "dropped"}, id="offsets off by one"),
    pytest.param(
        "invert", lambda row_slot: row_slot, {"random", "skip", "dropped"}, id="combine reads rows in slot order"
    ),
    pytest.param(
        "forward",
        after_others(edited(FORWARD, "y[bounds[E] :].zero_()", "pass")),
        {"dropped"},
        id="rows behind the last expert not zeroed",
    ),
    pytest.param(
        "_is_everyone", lambda tokens, T: tokens.numel() == T, {"halves"}, id="T rows taken for all tokens in order"
    ),
    pytest.param(
        "_blocks",
        edited(moe_mlp_torch._blocks, "range(start, end, step)", "range(start, end - step, step)"),
        EVERYWHERE,
        id="last block of rows skipped",
    ),
    pytest.param(
        "backward",
        after_others(edited(BACKWARD, "dx[bounds[E] :].zero_()", "pass")),
        {"dropped"},
        id="dx behind the last expert not zeroed",
    ),
    pytest.param(
        "new_gradients",
        edited(moe_mlp_torch.new_gradients, "part[row].zero_()", "pass"),
        {"skip", "all", "halves"},
        id="gradient of an idle expert not written",
    ),
    pytest.param(
        "backward", changed_gradient(up=swapped), {"random", "skip"}, id="weight gradients of two experts swapped"
    ),
    pytest.param(
        "backward", changed_gradient(down=lambda g: g * 0.99), EVERYWHERE, id="a gradient one percent too small"
    ),
    pytest.param(
        "backward", changed_gradient(topk_weight=torch.zeros_like), EVERYWHERE, id="no gradient for the router"
    ),
    pytest.param(
        "backward",
        changed_gradient(up_bias=lambda g: g.flip(1)),
        EVERYWHERE,
        id="bias gradient of gate and up exchanged",
    ),
    pytest.param(
        "backward",
        lambda d, x, e, w, *rest: BACKWARD(d, x, e, torch.ones_like(w), *rest),
        EVERYWHERE,
        id="backward without the weights",
    ),
    pytest.param(
        "backward",
        lambda d, x, e, w, z, *rest: BACKWARD(d, x, e, w, z.roll(1, 0), *rest),
        EVERYWHERE,
        id="pre-activation of the next row",
    ),
]


@pytest.mark.parametrize("name, mutant, where", MUTANTS)
def test_mutant_of_the_layer_is_caught(name, mutant, where, tolerance, monkeypatch):
    if name == "_blocks":
        monkeypatch.setattr(moe_mlp_torch, "BLOCK_ELEMENTS", 1)  # or one block holds all rows of a test
    monkeypatch.setattr(moe_mlp_torch, name, mutant)
    assert where <= caught(tolerance)


def test_an_expert_that_takes_its_neighbours_rows_is_caught(tolerance, monkeypatch):
    monkeypatch.setattr(expert_rows.Member, "own", expert_rows.Member.wide)
    assert {"random", "skip"} <= caught(tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_unharmed_code_passes(dtype, tolerance, monkeypatch):
    assert caught(tolerance, dtype) == set()
    monkeypatch.setattr(moe_mlp_torch, "sort_slots", unstable)
    assert caught(tolerance, dtype) == set()


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda e: e._replace(up=swapped(e.up)), id="two experts swapped"),
        pytest.param(lambda e: e._replace(down=e.down * 1.02), id="two percent off"),
        pytest.param(lambda e: e._replace(up_bias=None), id="bias forgotten"),
    ],
)
def test_mutant_is_caught_in_bfloat16(change, tolerance, monkeypatch):
    monkeypatch.setattr(moe_mlp_torch, "forward", with_experts(change))
    assert {"random", "skip"} <= caught(tolerance, torch.bfloat16)


FORM_BACKWARD = moe_mlp_torch._activation_backward
FORM_MUTANTS = [
    pytest.param("forward", with_experts(lambda e: reformed(e, limit=None)), id="no clamp"),
    pytest.param("forward", with_experts(lambda e: reformed(e, up_offset=0.0)), id="offset forgotten"),
    pytest.param("forward", with_experts(lambda e: reformed(e, interleaved=False)), id="in turns taken for gate first"),
    pytest.param("forward", with_experts(lambda e: e._replace(up=e.up.roll(1, 1))), id="gate and up exchanged"),
    pytest.param(
        "_activation_backward",
        edited(FORM_BACKWARD, "torch.where(gate <= limit, grad, 0)", "grad"),
        id="the gate's clamp passes its gradient on",
    ),
    pytest.param(
        "_activation_backward",
        edited(FORM_BACKWARD, "torch.where(up.abs() <= limit, through, 0)", "through"),
        id="up's clamp passes its gradient on",
    ),
    pytest.param(
        "_activation_backward",
        edited(FORM_BACKWARD, "up.abs() <= limit", "up <= limit"),
        id="up's lower clamp passes its gradient on",
    ),
    pytest.param(
        "_activation_backward", edited(FORM_BACKWARD, "grad.mul_(factor)", "grad.mul_(up)"), id="up as it came"
    ),
    pytest.param("_activation_backward", edited(FORM_BACKWARD, "act(below)", "act(gate)"), id="gate as it came"),
]


@pytest.mark.parametrize("name, mutant", FORM_MUTANTS)
def test_mutant_of_a_form_is_caught(name, mutant, tolerance, monkeypatch):
    case = forms.made(*forms.GPT_OSS)
    forms.check(case, tolerance, "torch")
    monkeypatch.setattr(moe_mlp_torch, name, mutant)
    with pytest.raises(AssertionError):
        forms.check(case, tolerance, "torch")


@pytest.mark.parametrize("old, new", [("gate <= limit", "gate < limit"), ("up.abs() <= limit", "up.abs() < limit")])
def test_mutant_on_the_limit_is_caught(old, new, tolerance, monkeypatch):
    monkeypatch.setattr(moe_mlp_torch, "_activation_backward", edited(FORM_BACKWARD, old, new))
    with pytest.raises(AssertionError):
        forms.check(forms.exactly_at_the_limit({}), tolerance, "torch")


REFERENCE = routing.route_reference
ROUTE_MUTANTS = [
    pytest.param("xft", "s.softmax(-1) * s_max", "s * s_max", id="second softmax forgotten"),
    pytest.param(
        "xft",
        "s.softmax(-1) * s_max",
        "selected_logits.softmax(-1) * s_max",
        id="softmax of the logits, not of the probabilities",
    ),
    pytest.param("xft", "s.softmax(-1) * s_max", "s.softmax(-1)", id="s_max forgotten"),
    pytest.param("xft", "1 - s_max", "s_max", id="shared expert gets s_max"),
    pytest.param("xft", "1 - s_max", "1 - s_max.detach()", id="no gradient through the shared expert"),
    pytest.param("xft", "s.softmax(-1) * s_max", "s.softmax(-1) * s_max.detach()", id="no gradient through s_max"),
    pytest.param(
        "nonorm", '"nonorm": lambda: s,', '"nonorm": lambda: s / s.sum(-1, keepdim=True),', id="nonorm normalises"
    ),
    pytest.param(
        "softmax_topk",
        "router_logits.softmax(-1).gather(1, idx)",
        "router_logits.gather(1, idx).softmax(-1)",
        id="softmax after the choice",
    ),
    pytest.param("topk_softmax", "selected_logits.softmax(-1)", "s", id="softmax before the choice"),
    pytest.param("sigmoid_topk", "selected_logits.sigmoid()", "s.sigmoid()", id="sigmoid of the probabilities"),
    pytest.param("xft", "idx + 1", "idx", id="expert ids not shifted past the shared one"),
    pytest.param(
        "softmax_topk",
        "descending=True, stable=True).indices[:, :k]",
        "descending=True, stable=True).indices[:, 1 : k + 1]",
        id="choice off by one",
    ),
    pytest.param("softmax_topk", "indices[:, :k]", "indices[:, :k].sort(-1).values", id="slots in order of id"),
    pytest.param("softmax_topk", "router_logits.sigmoid() + bias", "router_logits", id="unharmed"),
]


@pytest.mark.parametrize("gate, old, new", ROUTE_MUTANTS)
def test_mutant_of_the_router_is_caught(gate, old, new, request, tolerance):
    logits, mutant = torch.randn(23, 7), edited(REFERENCE, old, new)
    found = route_mismatches(mutant, logits, 4, gate, tolerance[torch.float32])
    assert bool(found) == ("unharmed" not in request.node.name)


def test_lost_rule_for_ties_is_caught(tolerance):
    mutant = edited(
        REFERENCE,
        "choice.sort(dim=-1, descending=True, stable=True).indices",
        "choice.flip(-1).sort(dim=-1, descending=True, stable=True).indices.sub(6).neg()",
    )
    assert not route_mismatches(mutant, torch.randn(5, 7), 4, "softmax_topk", tolerance[torch.float32])
    assert route_mismatches(mutant, torch.zeros(5, 7), 4, "softmax_topk", tolerance[torch.float32])


@pytest.mark.parametrize(
    "mutant",
    [
        pytest.param(lambda y, w, s: combine(y, w, s.roll(1)), id="slots shifted by one"),
        pytest.param(lambda y, w, s: combine(y, w, s.argsort()), id="permutation not inverted"),
        pytest.param(lambda y, w, s: combine(y, w.roll(1, 1), s), id="weights of the next slot"),
        pytest.param(lambda y, w, s: combine(y, w.detach(), s) + 0 * w.sum(), id="no gradient for the weights"),
        pytest.param(lambda y, w, s: combine(y, w, s) - y[s[0]] * 1e-3, id="one row counted a thousandth too little"),
    ],
)
def test_mutant_of_combine_is_caught(mutant, tolerance):
    y, weight, slot_row = torch.randn(36, 33), 0.2 + torch.rand(12, 3), torch.randperm(36)

    def step(f, dtype):
        leaves = [t.detach().to(dtype).requires_grad_() for t in (y, weight)]
        out = f(*leaves, slot_row)
        return dict(enumerate([out, *torch.autograd.grad(out.square().sum(), leaves)]))

    want = step(combine_ops.combine, torch.float64)
    assert not mismatches(step(combine, torch.float32), want, tolerance[torch.float32])
    assert mismatches(step(mutant, torch.float32), want, tolerance[torch.float32])


@pytest.mark.parametrize(
    "old, new",
    [
        pytest.param("enumerate(rows)", "enumerate(rows[:-1])", id="last expert left out"),
        pytest.param("alpha[e], out", "alpha[e - 1], out", id="alpha off by one"),
        pytest.param("alpha[e], out", "alpha[e] if e else 1.0, out", id="shared expert unscaled"),
        pytest.param("in blocks(out)", "in list(blocks(out))[:-1]", id="last block left out"),
    ],
)
def test_mutant_of_merging_is_caught(old, new, tolerance):
    weight, alpha = torch.randn(8, 33, 17), torch.rand(8).softmax(-1)
    want = {"out": torch.tensordot(alpha.double(), weight.double(), 1)}
    assert not mismatches({"out": merging._merge(weight, alpha, "torch")}, want, tolerance[torch.float32])
    assert mismatches({"out": edited(merging._merge, old, new)(weight, alpha, "torch")}, want, tolerance[torch.float32])


def test_metrics_see_one_wrong_row_among_many():
    want = torch.randn(4096, 64)
    got = want.clone()
    got[1234] *= 1.001
    assert mismatches({"out": got}, {"out": want}, 5e-5) and not mismatches({"out": want}, {"out": want}, 0.0)
    assert mismatches({"out": torch.full((3, 3), float("nan"))}, {"out": torch.zeros(3, 3)}, 1.0)
    assert mismatches({"out": want[:5]}, {"out": want}, 1.0) and mismatches({}, {"out": want}, 1.0)
    assert mismatches({"out": 1e-5 * want}, {"out": 1e-5 * want.roll(1, 0)}, 1e-2)  # tiny outputs hide nothing
