"""The experts of a layer against float64 loops over tokens and slots: values, every gradient,
shapes, layouts, dtypes.
"""

import pytest
import torch

from moe_runtime.config import ACTIVATIONS
from moe_runtime.native.library import cpp
from moe_runtime.ops import expert_rows, moe_mlp_torch
from moe_runtime.ops.moe_mlp import moe_mlp, moe_mlp_reference
from tests.ops.test_grouped_gemm import filled_memory
from tests.support import layouts
from tests.support.oracle import assert_parity, make_case, moe_mismatches, moe_oracle, run


@pytest.fixture(autouse=True)
def _library(monkeypatch):
    """The torch backend; test_moe_mlp_cpp.py runs the same tests with csrc/cpu's library."""
    monkeypatch.setattr(cpp, "_found", "the CPU library is not built")


LOW = [torch.float16, torch.bfloat16]


def layer(**options):
    def call(x, up, down, topk_weight, topk_idx, *, up_bias, down_bias, act, gated, **form):
        biases = {"gate_up_bias": up_bias, "down_bias": down_bias}
        return moe_mlp(
            x, up, down, topk_weight, topk_idx, act=act, gated=gated, **form, **biases, **options
        )

    return call


def check(case, tolerance, **options):
    dtype = case.leaves["x"].dtype
    assert not moe_mismatches(layer(**options), case, tolerance[dtype])
    assert run(case, layer(**options))["out"].dtype == dtype


SHAPES = [  # T, H, I, E, K, routing
    pytest.param(0, 33, 17, 4, 2, "random", id="no tokens"),
    pytest.param(1, 33, 17, 4, 2, "random", id="one token"),
    pytest.param(29, 33, 17, 4, 2, "random", id="ragged T, I=17, H=33"),
    pytest.param(29, 33, 17, 4, 2, "skip", id="an expert without tokens"),
    pytest.param(29, 33, 17, 4, 2, "all", id="all slots on one expert"),
    pytest.param(13, 33, 17, 4, 1, "all", id="one expert sees every token once, in order"),
    pytest.param(13, 32, 16, 4, 4, "random", id="K = E: every expert sees every token"),
    pytest.param(29, 33, 17, 1, 1, "random", id="E = 1"),
    pytest.param(29, 33, 17, 3, 2, "random", id="E = 3"),
    pytest.param(29, 33, 17, 8, 6, "random", id="XFT: 8 experts, 6 slots"),
    pytest.param(29, 33, 17, 4, 2, "dropped", id="dropped slots: -1 and ids >= E"),
    pytest.param(29, 33, 17, 4, 2, "twice", id="one token twice at one expert"),
    pytest.param(24, 33, 17, 4, 2, "halves", id="an expert with T rows that are not all tokens"),
    pytest.param(3, 33, 17, 16, 2, "random", id="more experts than slots"),
    pytest.param(5, 1, 1, 2, 1, "random", id="H = I = 1"),
    pytest.param(4, 33, 17, 4, 0, "random", id="K = 0: no slots"),
]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, *LOW], ids=str)
@pytest.mark.parametrize("T, H, I, E, K, routing", SHAPES)
def test_parity(T, H, I, E, K, routing, dtype, tolerance):
    check(make_case(T, H, I, E, K, dtype, routing), tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, *LOW], ids=str)
@pytest.mark.parametrize("gated", [True, False], ids=["gated", "not gated"])
@pytest.mark.parametrize("act", ACTIVATIONS)
def test_activations_and_biases(act, gated, dtype, tolerance):
    check(make_case(19, 33, 17, 4, 2, dtype, "dropped", act, gated, bias=True), tolerance)


@pytest.mark.parametrize("routing", ["random", "all", "skip", "twice"])
def test_biases(routing, tolerance):
    check(make_case(19, 33, 17, 4, 2, torch.float32, routing, bias=True), tolerance)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize(
    "idx", [torch.int32, torch.int64, torch.int16, torch.int8, torch.uint8], ids=str
)
def test_index_dtypes_and_recompute(idx, recompute, tolerance):
    check(
        make_case(19, 33, 17, 4, 2, routing="twice", bias=True, idx=idx),
        tolerance,
        recompute=recompute,
    )


LAYOUTS = [
    pytest.param(layouts.stride_zero, id="E views of one expert (stride 0)"),
    pytest.param(layouts.transposed_weights, id="weights stored in x out"),
    pytest.param(layouts.experts_last, id="weights with the expert as the fastest dim"),
    pytest.param(layouts.strided_x, id="every other column of x"),
    pytest.param(layouts.transposed_x, id="x transposed"),
    pytest.param(layouts.expanded_x, id="one token, expanded"),
    pytest.param(layouts.transposed_gates, id="weights and ids stored [K, T]"),
    pytest.param(layouts.expanded_gradient, id="gradient with stride 0, as of sum()"),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("routing", ["random", "all"])
@pytest.mark.parametrize("change", LAYOUTS)
def test_layouts(change, routing, dtype, tolerance):
    case = make_case(19, 33, 17, 4, 1 if routing == "all" else 2, dtype, routing)
    change(case)
    check(case, tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_beyond_one_block_of_the_elementwise_work(dtype, tolerance, monkeypatch):
    monkeypatch.setattr(moe_mlp_torch, "BLOCK_ELEMENTS", 1, raising=False)
    check(make_case(71, 33, 17, 3, 2, dtype, bias=True), tolerance)
    check(make_case(37, 33, 17, 3, 1, dtype, "all", gated=False), tolerance)


@pytest.mark.parametrize("routing", ["random", "skip", "dropped", "halves", "all"])
def test_experts_that_go_together_and_each_alone_give_the_same_bits(routing, monkeypatch):
    case = make_case(40, 33, 17, 6, 2, torch.float32, routing, bias=True)
    want = run(case, layer())
    for rows in (1, 9, 25, 60):  # of a group, at most, if it has more than one expert
        monkeypatch.setattr(expert_rows, "GROUP_ELEMENTS", rows * 34)
        got = run(case, layer())
        assert all(torch.equal(got[name], value) for name, value in want.items()), rows


@pytest.mark.parametrize("routing", ["random", "dropped"])
def test_reference_follows_the_equation(routing):
    case = make_case(19, 33, 17, 4, 2, torch.float64, routing, bias=True)

    def reference(*args, up_bias, down_bias, **kwargs):
        return moe_mlp_reference(*args, gate_up_bias=up_bias, down_bias=down_bias, **kwargs)

    assert_parity(run(case, reference), run(case, moe_oracle), 1e-12)


def test_float64_layer_with_float32_gates():
    case = make_case(19, 33, 17, 4, 2, torch.float64)
    case.leaves["topk_weight"] = case.leaves["topk_weight"].float()
    assert_parity(
        run(case, layer()),
        run(case, moe_oracle, torch.float64),
        {"out": 1e-12, "dx": 1e-12, "dup": 1e-12, "ddown": 1e-12, "dtopk_weight": 1e-6},
    )


@pytest.mark.parametrize("gate_dtype", [torch.bfloat16, torch.float64], ids=str)
def test_gates_of_another_dtype_get_their_gradient_in_it(gate_dtype):
    case = make_case(19, 33, 17, 4, 2, torch.float32)
    case.leaves["topk_weight"] = case.leaves["topk_weight"].to(gate_dtype)
    got = run(case, layer())
    assert got["dtopk_weight"].dtype == gate_dtype
    assert_parity(
        got, run(case, moe_oracle, torch.float64), 1e-5 if gate_dtype == torch.float64 else 1e-2
    )


@pytest.mark.parametrize("dtype", LOW, ids=str)
def test_gates_are_not_rounded_to_the_dtype_of_the_layer(dtype):
    # 257 / 256 is 1 in bfloat16; a gate that is off by its last bits shifts every output by as
    # much, here of four experts, whose sum spreads what the rounding of each one's output does to
    # it
    case = make_case(64, 64, 64, 4, 4, dtype)
    case.leaves["topk_weight"] = torch.full(
        (64, 4), 1 + 2**-8 if dtype == torch.bfloat16 else 1 + 2**-11
    )
    got = run(case, layer())["out"].double()
    want = run(case, moe_oracle, torch.float64)["out"]
    slope = (got * want).sum() / want.square().sum()
    assert abs(slope - 1) < (2**-10 if dtype == torch.bfloat16 else 2**-13)


@pytest.mark.parametrize("case_of", ["gated", "not gated"])
@pytest.mark.parametrize("act", ["silu", "gelu", "gelu_tanh"])
def test_gradcheck(act, case_of):
    case = make_case(5, 4, 3, 3, 2, torch.float64, "dropped", act, case_of == "gated", bias=True)
    leaves = [leaf.requires_grad_() for leaf in case.leaves.values()]

    def f(x, up, down, topk_weight, up_bias, down_bias):
        return layer()(
            x,
            up,
            down,
            topk_weight,
            case.topk_idx,
            up_bias=up_bias,
            down_bias=down_bias,
            act=act,
            gated=case.gated,
        )

    assert torch.autograd.gradcheck(f, leaves, fast_mode=False)


def test_second_gradient_is_refused_and_not_wrong():
    case = make_case(5, 4, 3, 3, 2, torch.float64)
    leaves = [leaf.requires_grad_() for leaf in case.leaves.values()]
    with pytest.raises(RuntimeError, match="moe_mlp has no second derivative"):
        torch.autograd.gradgradcheck(lambda *v: moe_mlp(*v, case.topk_idx), leaves)


# dropped slots, frozen experts
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weight_of_a_dropped_slot_may_be_anything(value, dtype):
    case = make_case(12, 33, 17, 4, 2, dtype, "dropped")
    dead = (case.topk_idx < 0) | (case.topk_idx >= 4)
    case.leaves["topk_weight"][dead] = 0
    want = run(case, layer())
    case.leaves["topk_weight"][dead] = value
    got = run(case, layer())
    assert all(torch.equal(got[name], want[name]) for name in want)
    assert not got["dtopk_weight"][dead].any()


def test_a_token_without_experts_gets_zero_and_gives_no_gradient():
    case = make_case(7, 33, 17, 4, 2)
    case.topk_idx[3] = -1
    case.leaves["x"][3] = float("nan")
    got = run(case, layer())
    assert not got["out"][3].any() and not got["dx"][3].any()
    assert not any(tensor.isnan().any() for tensor in got.values())


def test_nothing_but_dropped_slots():
    case = make_case(7, 33, 17, 4, 2)
    case.topk_idx.fill_(-1)
    assert not any(tensor.any() for tensor in run(case, layer()).values())


@pytest.mark.parametrize("routing", ["random", "all", "skip"])
def test_frozen_experts_get_zero_and_all_else_is_the_same(routing):
    case = make_case(19, 33, 17, 4, 2, routing=routing, bias=True)
    trainable = torch.tensor([True, False, True, False])
    want = run(case, layer())
    got = run(case, layer(trainable=trainable))
    for name in ("dup", "ddown", "dup_bias", "ddown_bias"):
        assert torch.equal(
            got[name], torch.where(trainable.view(4, *[1] * (got[name].dim() - 1)), want[name], 0)
        )
    assert all(torch.equal(got[name], want[name]) for name in ("out", "dx", "dtopk_weight"))


def check_rows_of_nobody(backend: str, device="cpu"):
    """What the map names no expert for gets zero, in memory that holds NaN."""
    case = make_case(19, 33, 17, 4, 2)
    x, up, down, weight = (leaf.to(device) for leaf in case.leaves.values())
    places = torch.tensor([3, -1, 1, -1], dtype=torch.int32, device=device)
    trained = [
        torch.randn(5, *stack.shape[1:], device=device, requires_grad=True) for stack in (up, down)
    ]
    with filled_memory():
        out = moe_mlp(
            x,
            up,
            down,
            weight,
            case.topk_idx.to(device),
            trainable=places,
            trained=tuple(trained),
            backend=backend,
        )
        grads = torch.autograd.grad(out.square().sum(), trained)
    for grad in grads:
        assert grad.isfinite().all() and grad.flatten(1).any(1).tolist() == [
            False,
            True,
            False,
            True,
            False,
        ]


def test_rows_of_nobody_get_zero():
    check_rows_of_nobody("torch")


@pytest.mark.parametrize("routing", ["random", "skip", "all"])
def test_recompute_gives_the_same_bits(routing):
    case = make_case(29, 33, 17, 4, 2, torch.bfloat16, routing, bias=True)
    got = run(case, layer(recompute=True))
    want = run(case, layer())
    assert all(torch.equal(got[name], want[name]) for name in want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_twenty_runs_give_the_same_bits(dtype):
    case = make_case(64, 33, 17, 8, 3, dtype, "dropped", bias=True)
    first = run(case, layer())
    for _ in range(20):
        again = run(case, layer())
        assert all(torch.equal(again[name], first[name]) for name in first)


def test_backward_inside_autocast_is_not_rounded():
    case = make_case(19, 33, 17, 4, 2, bias=True)
    want = run(case, layer())
    leaves = {name: leaf.requires_grad_() for name, leaf in case.leaves.items()}
    v = {"gate_up_bias": leaves["up_bias"], "down_bias": leaves["down_bias"]}
    out = moe_mlp(
        leaves["x"], leaves["up"], leaves["down"], leaves["topk_weight"], case.topk_idx, **v
    )
    # its matmul would be bfloat16 in the kernels of the backward pass too
    with torch.autocast("cpu", torch.bfloat16):
        got = torch.autograd.grad(out, list(leaves.values()), case.dout)
    assert all(torch.equal(grad, want[f"d{name}"]) for name, grad in zip(leaves, got))


def test_permuted_tokens_give_permuted_outputs():
    case = make_case(29, 33, 17, 4, 2, torch.float64)
    x, up, down, weight = case.leaves.values()
    order = torch.randperm(29)
    got = moe_mlp(x[order], up, down, weight[order], case.topk_idx[order])
    torch.testing.assert_close(
        got, moe_mlp(x, up, down, weight, case.topk_idx)[order], rtol=1e-12, atol=1e-12
    )


def test_permuted_experts_change_nothing():
    case = make_case(29, 33, 17, 4, 2, torch.float64)
    x, up, down, weight = case.leaves.values()
    order = torch.randperm(4)
    got = moe_mlp(x, up[order], down[order], weight, order.argsort()[case.topk_idx.long()])
    torch.testing.assert_close(
        got, moe_mlp(x, up, down, weight, case.topk_idx), rtol=1e-12, atol=1e-12
    )


def _bad(**change):
    base = {
        "x": torch.randn(6, 33),
        "gate_up_proj": torch.randn(4, 34, 33),
        "down_proj": torch.randn(4, 33, 17),
        "topk_weight": torch.rand(6, 2),
        "topk_idx": torch.zeros(6, 2, dtype=torch.int64),
    }
    return base | change


@pytest.mark.parametrize(
    "change, words",
    [
        pytest.param({"x": torch.randn(2, 3, 33)}, "x is (2, 3, 33)", id="batch dims"),
        pytest.param({"x": torch.randn(6, 32)}, "x (6, 32)", id="another H"),
        pytest.param(
            {"gate_up_proj": torch.randn(4, 33, 34)},
            "gate_up_proj is (4, 33, 34)",
            id="weights in x out",
        ),
        pytest.param(
            {"down_proj": torch.randn(3, 33, 17)}, "down_proj (3, 33, 17)", id="another E"
        ),
        pytest.param(
            {"gate_up_proj": torch.randn(0, 34, 33), "down_proj": torch.randn(0, 33, 17)},
            "(0, 34, 33)",
            id="E = 0",
        ),
        pytest.param(
            {"topk_weight": torch.rand(6, 3)}, "topk_weight is (6, 3)", id="weights and ids differ"
        ),
        pytest.param(
            {"topk_idx": torch.zeros(5, 2, dtype=torch.int64), "topk_weight": torch.rand(5, 2)},
            "(5, 2)",
            id="another T",
        ),
        pytest.param(
            {"topk_idx": torch.zeros(6, 2)}, "topk_idx (6, 2) torch.float32", id="float ids"
        ),
        pytest.param(
            {"topk_weight": torch.ones(6, 2, dtype=torch.int64)},
            "topk_weight is (6, 2) torch.int64",
            id="integer weights",
        ),
        pytest.param({"act": "tanh"}, "act must be", id="unknown activation"),
        pytest.param(
            {"gate_up_bias": torch.randn(4, 17)},
            "gate_up_bias is (4, 17)",
            id="bias of another size",
        ),
        pytest.param({"down_bias": torch.randn(33)}, "down_bias is (33,)", id="bias without E"),
        pytest.param(
            {"x": torch.randn(6, 33).bfloat16()},
            "torch.bfloat16",
            id="x and weights differ in dtype",
        ),
        pytest.param(
            {"down_bias": torch.randn(4, 33).half()},
            "down_bias is (4, 33) torch.float16",
            id="bias of another dtype",
        ),
        pytest.param(
            {"gate_up_proj": torch.ones(3, 0, 33), "down_proj": torch.ones(3, 33, 0)},
            "I >= 1",
            id="I = 0",
        ),
        pytest.param(
            {"trainable": torch.ones(4)},
            "trainable is (4,) torch.float32",
            id="trainable is no mask",
        ),
        pytest.param(
            {"trainable": torch.ones(3, dtype=torch.bool)},
            "trainable is (3,)",
            id="trainable of another E",
        ),
        pytest.param({"x": torch.ones(6, 33, dtype=torch.int64)}, "torch.int64", id="integer x"),
    ],
)
def test_bad_arguments_are_named(change, words):
    with pytest.raises(ValueError) as error:
        moe_mlp(**_bad(**change))
    assert words in str(error.value)


def test_gradients_of_stacks_stored_in_x_out_are_not_copied():
    assert layouts.copies_of_transposed_gradients(moe_mlp, None) == []


@pytest.mark.parametrize(
    "form", ["grad", "transposed stacks", layouts.NARROW, "main_grad", "a layer with its router"]
)
def test_gradients_are_added_in_place(form):
    layouts.check_accumulation(form, None)
