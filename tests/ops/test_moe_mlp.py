"""The experts of a layer on every backend: cases that the conformance table does not draw."""

import pytest
import torch

from moe_runtime.ops import expert_rows, moe_mlp_torch
from moe_runtime.ops.moe_mlp import moe_mlp
from tests.support import layouts
from tests.support.layer import moe_layer
from tests.support.oracle import (
    assert_parity,
    assert_same,
    make_case,
    moe_mismatches,
    moe_oracle,
    run,
)

OP = "moe_mlp"
NAN = float("nan")
SIZES = (19, 33, 17, 4, 2)  # T, H, I, E, K
EACH_DTYPE = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


@pytest.fixture
def layer(backend, monkeypatch):
    """layer(**options) runs the experts on a backend."""
    if backend == "triton":
        from moe_runtime.kernels import decode

        # run the sort, the map and the sum as separate launches, whatever the number of slots;
        # test_decode_kernel.py compares the fused ones with them
        monkeypatch.setattr(decode, "SMALL", 0)

    def layer(**options):
        return moe_layer(backend=backend, **options)

    return layer


def expanded_biases(case):
    E = case.leaves["up"].shape[0]
    for name in ("up_bias", "down_bias"):
        case.leaves[name] = case.leaves[name][:1].clone()
    case.view = lambda v: v | {name: v[name].expand(E, -1) for name in ("up_bias", "down_bias")}


def one_layout_each(case):
    case.leaves["up"] = case.leaves["up"].transpose(1, 2).contiguous()
    case.leaves["down"] = case.leaves["down"].permute(1, 2, 0).contiguous()
    case.view = lambda v: v | {"up": v["up"].transpose(1, 2), "down": v["down"].permute(2, 0, 1)}


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(layouts.experts_last, id="weights whose fastest dim is the expert"),
        pytest.param(one_layout_each, id="two layouts in one layer"),
        pytest.param(expanded_biases, id="E views of one bias"),
        pytest.param(layouts.expanded_gradient, id="gradient with stride 0, as of sum()"),
    ],
)
def test_layouts(change, layer, tolerance, device):
    case = make_case(*SIZES, bias=True)
    change(case)
    assert not moe_mismatches(layer(), case, tolerance[torch.float32], device)


@EACH_DTYPE
@pytest.mark.parametrize(
    "T, K, routing",
    [
        (24, 2, "halves"),
        (13, 1, "all"),
        (13, 4, "random"),
    ],
)
def test_as_many_rows_as_tokens(T, K, routing, dtype, layer, tolerance, device):
    """An expert with T rows may see each token once, or half of them twice."""
    case = make_case(T, 33, 17, 4, K, dtype, routing, bias=True)
    assert not moe_mismatches(layer(), case, tolerance[dtype], device)


@pytest.mark.parametrize("bias", ["up_bias", "down_bias"])
def test_one_bias_alone(bias, layer, tolerance, device):
    case = make_case(*SIZES, routing="dropped", bias=True)
    del case.leaves[bias]
    assert not moe_mismatches(layer(), case, tolerance[torch.float32], device)


@pytest.mark.parametrize("gate_dtype", [torch.bfloat16, torch.float64], ids=str)
def test_gates_of_another_dtype_get_their_gradient_in_it(gate_dtype, layer, device):
    case = make_case(*SIZES)
    case.leaves["topk_weight"] = case.leaves["topk_weight"].to(gate_dtype)
    got = run(case, layer(), device=device)
    assert got["dtopk_weight"].dtype == gate_dtype
    bound = 1e-5 if gate_dtype == torch.float64 else 1e-2
    assert_parity(got, run(case, moe_oracle, torch.float64), bound)


def test_gates_are_not_rounded_to_the_dtype_of_the_layer(layer, device):
    # 257 / 256 is 1 in bfloat16; rounding a weight would shift every output by that much. With four
    # experts the sum averages out the rounding of each expert's output
    case = make_case(64, 64, 64, 4, 4, torch.bfloat16)
    case.leaves["topk_weight"] = torch.full((64, 4), 257 / 256)
    got = run(case, layer(), device=device)["out"].double()
    expected = run(case, moe_oracle, torch.float64)["out"]
    slope = (got * expected).sum() / expected.square().sum()
    assert abs(slope - 1) < 2**-10


@EACH_DTYPE
@pytest.mark.parametrize("value", [NAN, float("inf")])
def test_what_dropped_slots_and_idle_experts_hold_may_be_anything(value, dtype, layer, device):
    case = make_case(12, 40, 24, 5, 2, dtype, "dropped", bias=True)
    case.topk_idx[case.topk_idx == 3] = -1  # no token chooses expert 3
    case.topk_idx[7] = -1
    dead = (case.topk_idx < 0) | (case.topk_idx >= 5)
    case.leaves["topk_weight"][dead] = 0
    expected = run(case, layer(), device=device)
    case.leaves["topk_weight"][dead] = value
    case.leaves["x"][7] = value
    case.dout[7] = value
    for name in ("up", "down", "up_bias", "down_bias"):
        case.leaves[name][3] = value
    got = run(case, layer(), device=device)
    assert_same(got, expected)
    assert not got["dtopk_weight"][dead].any()
    assert not got["out"][7].any()
    assert not got["dx"][7].any()
    for name in ("dup", "ddown", "dup_bias", "ddown_bias"):
        assert not got[name][3].any()


@pytest.mark.parametrize("routing", ["random", "all", "skip"])
def test_frozen_experts_get_zero_and_all_else_is_the_same(routing, layer, device):
    case = make_case(*SIZES, routing=routing, bias=True)
    trainable = torch.tensor([True, False, True, False])
    expected = run(case, layer(), device=device)
    for name in ("dup", "ddown", "dup_bias", "ddown_bias"):
        expected[name][~trainable] = 0
    assert_same(
        run(
            case,
            layer(trainable=trainable.to(device)),
            device=device,
        ),
        expected,
    )


def test_unassigned_rows_get_zero(backend, device):
    """Rows without an expert in the map get zero, in memory filled with NaN."""
    case = make_case(*SIZES)
    x, up, down, weight = (leaf.to(device) for leaf in case.leaves.values())
    places = torch.tensor([3, -1, 1, -1], dtype=torch.int32, device=device)
    trained = (torch.randn(5, *up.shape[1:]), torch.randn(5, *down.shape[1:]))
    trained = tuple(rows.to(device).requires_grad_() for rows in trained)
    out = moe_mlp(
        x,
        up,
        down,
        weight,
        case.topk_idx.to(device),
        trainable=places,
        trained=trained,
        backend=backend,
    )
    for grad in torch.autograd.grad(out.square().sum(), trained):
        assert grad.isfinite().all()
        assert grad.flatten(1).any(1).tolist() == [False, True, False, True, False]


@pytest.mark.parametrize(
    "order",
    [
        pytest.param((0, 1, 2), id="stacks as they are"),
        pytest.param((0, 2, 1), id="stacks stored in x out"),
        pytest.param((1, 2, 0), id="stacks with the expert last"),
    ],
)
@pytest.mark.parametrize("recompute", [False, True], ids=["save", "recompute"])
def test_trained_weights_are_separate(recompute, order, layer, tolerance, device):
    """Experts 2 and 0 train, in this order; the frozen stacks hold NaN for them."""
    case = make_case(19, 40, 24, 4, 2, bias=True)
    expected = run(case, moe_oracle, torch.float64)
    for name in ("dup", "ddown", "dup_bias", "ddown_bias"):
        expected[name][[1, 3]] = 0
    inverse = torch.tensor(order).argsort().tolist()

    def stored(stack):
        frozen = stack.detach().clone()
        frozen[[0, 2]] = NAN
        return frozen.permute(order).contiguous().permute(inverse)

    def call(x, up, down, *args, **kwargs):
        places = torch.tensor([1, -1, 0, -1], dtype=torch.int32, device=device)
        trained = (up[[2, 0]], down[[2, 0]])
        run_layer = layer(trainable=places, trained=trained, recompute=recompute)
        return run_layer(
            x,
            stored(up),
            stored(down),
            *args,
            **kwargs,
        )

    assert_parity(
        run(case, call, device=device),
        expected,
        tolerance[torch.float32],
    )


@pytest.mark.parametrize(
    "T, E, K",
    [
        (13, 3, 1),
        (13, 1, 1),
        (0, 4, 2),
        (19, 4, 3),
    ],
)
def test_dense_shared_expert(T, E, K, layer, tolerance, device):
    """Every token has expert 0 in its last slot, and nowhere else."""
    case = make_case(T, 40, 24, E, K, bias=True)
    if E > 1:
        case.topk_idx = case.topk_idx % (E - 1) + 1
    case.topk_idx[:, -1] = 0
    assert not moe_mismatches(
        layer(shared="dense"),
        case,
        tolerance[torch.float32],
        device,
    )


def test_gradients_of_stacks_stored_in_x_out_are_not_copied(backend, device):
    assert layouts.copies_of_transposed_gradients(moe_mlp, backend, device=device) == []


@pytest.mark.parametrize(
    "form", ["grad", "transposed stacks", layouts.NARROW, "main_grad", "a layer with its router"]
)
def test_gradients_are_added_in_place(form, backend, device):
    layouts.check_accumulation(form, backend, device)


@EACH_DTYPE
def test_rows_beyond_one_block_of_the_elementwise_work(dtype, tolerance, monkeypatch):
    monkeypatch.setattr(moe_mlp_torch, "BLOCK_ELEMENTS", 1, raising=False)
    torchs = moe_layer(backend="torch")
    case = make_case(71, 33, 17, 3, 2, dtype, bias=True)
    assert not moe_mismatches(torchs, case, tolerance[dtype])
    case = make_case(37, 33, 17, 3, 1, dtype, "all", gated=False)
    assert not moe_mismatches(torchs, case, tolerance[dtype])


@pytest.mark.parametrize("routing", ["random", "skip", "dropped", "halves", "all"])
def test_grouped_and_separate_experts_give_the_same_result(routing, monkeypatch):
    torchs = moe_layer(backend="torch")
    case = make_case(40, 33, 17, 6, 2, torch.float32, routing, bias=True)
    expected = run(case, torchs)
    for rows in (1, 9, 25, 60):  # maximum number of rows of a group, if it has more than one expert
        monkeypatch.setattr(expert_rows, "GROUP_ELEMENTS", rows * 34)
        torch.testing.assert_close(run(case, torchs), expected, rtol=1e-5, atol=1e-5)


ARGUMENTS = {
    "x": torch.randn(6, 33),
    "gate_up_proj": torch.randn(4, 34, 33),
    "down_proj": torch.randn(4, 33, 17),
    "topk_weight": torch.rand(6, 2),
    "topk_idx": torch.zeros(6, 2, dtype=torch.int64),
}


@pytest.mark.parametrize(
    "name, value, words",
    [
        ("x", torch.randn(6, 33).bfloat16(), "torch.bfloat16"),
        ("gate_up_proj", torch.randn(4, 33, 34), "gate_up_proj is (4, 33, 34)"),
        ("down_proj", torch.ones(4, 33, 0), "I >= 1"),
        ("topk_idx", torch.zeros(6, 2), "topk_idx (6, 2) torch.float32"),
        ("gate_up_bias", torch.randn(4, 17), "gate_up_bias is (4, 17)"),
        ("trainable", torch.ones(4), "trainable is (4,) torch.float32"),
    ],
)
def test_bad_arguments_are_named(name, value, words):
    with pytest.raises(ValueError) as error:
        moe_mlp(**ARGUMENTS | {name: value})
    assert words in str(error.value)
