"""The experts of a layer by the Triton kernels against float64 loops: values, gradients, shapes,
layouts, dtypes, tiles.
"""

import pytest
import torch

from moe_runtime.config import ACTIVATIONS
from moe_runtime.ops.moe_mlp import moe_mlp
from tests.ops.test_moe_mlp import check_rows_of_nobody
from tests.support import layouts
from tests.support.layer import moe_layer
from tests.support.oracle import assert_parity, make_case, moe_mismatches, moe_oracle, run

pytest.importorskip("triton")
from moe_runtime.kernels import decode, tiles
from moe_runtime.kernels.tiles import Tile

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def layer(**options):
    return moe_layer(backend="triton", **options)


def check(case, tolerance, device, **options):
    dtype = case.leaves["x"].dtype
    made = []

    def kept(*args, **kwargs):
        made.append(layer(**options)(*args, **kwargs))
        return made[-1]

    assert not moe_mismatches(kept, case, tolerance[dtype], device)
    assert made[0].dtype == dtype


def everywhere(tile, **others):
    """The same config for every kernel."""
    return tiles.force(**(dict.fromkeys(tiles.KERNELS, tile) | others))


SHAPES = [  # T, H, I, E, K, routing
    pytest.param(0, 33, 17, 4, 2, "random", id="no tokens"),
    pytest.param(1, 33, 17, 4, 2, "random", id="one token"),
    pytest.param(19, 33, 17, 4, 2, "random", id="ragged T, I=17, H=33"),
    pytest.param(19, 33, 17, 4, 2, "skip", id="an expert without tokens"),
    pytest.param(19, 33, 17, 4, 2, "all", id="all slots on one expert"),
    pytest.param(13, 33, 17, 4, 1, "all", id="one expert sees every token once, in order"),
    pytest.param(13, 32, 16, 4, 4, "random", id="K = E: every expert sees every token"),
    pytest.param(19, 33, 17, 1, 1, "random", id="E = 1"),
    pytest.param(19, 33, 17, 3, 2, "random", id="E = 3"),
    pytest.param(7, 33, 17, 8, 6, "random", id="XFT: 8 experts, 6 slots"),
    pytest.param(19, 33, 17, 4, 2, "dropped", id="dropped slots: -1 and ids >= E"),
    pytest.param(13, 33, 17, 4, 2, "twice", id="one token twice at one expert"),
    pytest.param(16, 33, 17, 4, 2, "halves", id="an expert with T rows that are not all tokens"),
    pytest.param(3, 33, 17, 9, 2, "random", id="more experts than slots"),
    pytest.param(5, 1, 1, 2, 1, "random", id="H = I = 1"),
    pytest.param(4, 33, 17, 4, 0, "random", id="K = 0: no slots"),
    pytest.param(32, 64, 32, 2, 1, "halves", id="nothing is ragged"),
]


@pytest.fixture(autouse=True)
def steps_of_many_slots(monkeypatch):
    """The sort, the map and the sum as launches of their own, whatever the number of slots:
    tests/ops/test_decode_kernel.py compares the fused ones with them.
    """
    monkeypatch.setattr(decode, "SMALL", 0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("T, H, I, E, K, routing", SHAPES)
def test_parity(T, H, I, E, K, routing, dtype, tolerance, device):
    larger = {} if dtype == torch.float32 else dict.fromkeys(tiles.KERNELS, Tile(32, 64, 32))
    with tiles.force(**larger):
        check(make_case(T, H, I, E, K, dtype, routing), tolerance, device)


TILES = [
    pytest.param(Tile(32, 32, 32, TMA=True), id="descriptors"),
    pytest.param(Tile(32, 32, 32, PERSISTENT=True), id="persistent"),
    pytest.param(
        Tile(16, 16, 32, GROUP_M=1, TMA=True, PERSISTENT=True), id="descriptors, persistent, small"
    ),
    pytest.param(Tile(32, 16, 32, TMA=True, JOINED=True), id="gate and up joined"),
    pytest.param(Tile(64, 64, 64, GROUP_M=8), id="one tile holds an expert"),
    pytest.param(Tile(16, 64, 16, GROUP_M=1), id="short blocks along the sum"),
    pytest.param(
        Tile(32, 16, 64, GROUP_M=8, PERSISTENT=True), id="narrow, one block along the sum"
    ),
]


@pytest.mark.parametrize(
    "H, I, dtype, routing",
    [
        pytest.param(
            40, 24, torch.bfloat16, "dropped", id="bfloat16, no block divides, 16-byte rows"
        ),
        pytest.param(33, 17, torch.float16, "skip", id="float16, odd sizes, no descriptors"),
        pytest.param(64, 32, torch.float32, "random", id="float32, every block divides"),
    ],
)
@pytest.mark.parametrize("tile", TILES)
def test_tiles(tile, H, I, dtype, routing, tolerance, device):
    case = make_case(29, H, I, 4, 2, dtype, routing, bias=dtype != torch.float32)
    with everywhere(tile):
        check(case, tolerance, device)


def test_each_kernel_has_a_tile_of_its_own(tolerance, device):
    mixed = {
        "up": Tile(64, 16, 32),
        "down": Tile(16, 32, 16, TMA=True),
        "dz": Tile(32, 32, 32, PERSISTENT=True),
        "dx": Tile(128, 16, 32),
        "dw": Tile(32, 16, 16),
    }
    with tiles.force(**mixed):
        check(make_case(29, 40, 24, 4, 2, torch.float16, "dropped", bias=True), tolerance, device)


def test_the_tiles_of_a_gpu(tolerance, device):
    """128 rows by 128 columns with the Hopper table's flags: what runs there, at sizes that have
    tails.
    """
    with everywhere(Tile(128, 128, 64, TMA=True), dw=Tile(128, 256, 64)):
        check(make_case(180, 136, 200, 2, 2, torch.bfloat16, "twice", bias=True), tolerance, device)


@pytest.mark.parametrize("gated", [True, False], ids=["gated", "not gated"])
@pytest.mark.parametrize("act", ACTIVATIONS)
def test_activations_and_biases(act, gated, tolerance, device):
    with everywhere(Tile(16, 32, 64)):
        for dtype in (torch.float32, torch.bfloat16 if gated else torch.float16):
            check(
                make_case(9, 33, 17, 2, 2, dtype, "dropped", act, gated, bias=True),
                tolerance,
                device,
            )


@pytest.mark.parametrize("bias", ["up_bias", "down_bias"])
def test_one_bias_alone(bias, tolerance, device):
    case = make_case(11, 33, 17, 3, 2, bias=True)
    del case.leaves[bias]
    check(case, tolerance, device)


@pytest.mark.parametrize("idx", [torch.int64, torch.int16, torch.int8, torch.uint8], ids=str)
def test_index_dtypes(idx, tolerance, device):
    check(make_case(11, 33, 17, 3, 2, routing="twice", idx=idx), tolerance, device)


def expanded_biases(case):
    E = case.leaves["up"].shape[0]
    case.leaves |= {name: case.leaves[name][:1].clone() for name in ("up_bias", "down_bias")}
    case.view = lambda v: v | {name: v[name].expand(E, -1) for name in ("up_bias", "down_bias")}


def transposed_biases(case):
    case.leaves |= {name: case.leaves[name].t().contiguous() for name in ("up_bias", "down_bias")}
    case.view = lambda v: v | {name: v[name].t() for name in ("up_bias", "down_bias")}


def one_layout_each(case):
    case.leaves["up"] = case.leaves["up"].transpose(1, 2).contiguous()
    case.leaves["down"] = case.leaves["down"].permute(1, 2, 0).contiguous()
    case.view = lambda v: v | {"up": v["up"].transpose(1, 2), "down": v["down"].permute(2, 0, 1)}


LAYOUTS = [
    pytest.param(layouts.stride_zero, id="E views of one expert (stride 0)"),
    pytest.param(layouts.transposed_weights, id="weights stored in x out"),
    pytest.param(layouts.experts_last, id="weights with the expert as the fastest dim"),
    pytest.param(one_layout_each, id="two layouts in one layer"),
    pytest.param(layouts.strided_x, id="every other column of x"),
    pytest.param(layouts.transposed_x, id="x transposed"),
    pytest.param(layouts.expanded_x, id="one token, expanded"),
    pytest.param(layouts.transposed_gates, id="weights and ids stored [K, T]"),
    pytest.param(layouts.expanded_gradient, id="gradient with stride 0, as of sum()"),
    pytest.param(expanded_biases, id="E views of one bias"),
    pytest.param(transposed_biases, id="biases stored out x E"),
]


@pytest.mark.parametrize("change", LAYOUTS)
def test_layouts(change, tolerance, device):
    case = make_case(13, 32, 16, 4, 2, torch.float32, bias="biases" in change.__name__)
    change(case)
    with everywhere(Tile(16, 32, 32, TMA=True)):  # descriptors where the layout lets them
        check(case, tolerance, device)


def test_gates_are_not_rounded_to_the_dtype_of_the_layer(device):
    # 341 / 256 lies in the middle of two bfloat16; a gate that is off by its last bits shifts every
    # output by as much
    case = make_case(64, 64, 32, 2, 1, torch.bfloat16)
    case.leaves["topk_weight"] = torch.full((64, 1), 341 / 256)
    with everywhere(Tile(64, 64, 64)):
        got = run(case, layer(), device=device)["out"].double()
    want = run(case, moe_oracle, torch.float64)["out"]
    assert abs((got * want).sum() / want.square().sum() - 1) < 2**-10


@pytest.mark.parametrize("gate_dtype", [torch.bfloat16, torch.float64], ids=str)
def test_gates_of_another_dtype_get_their_gradient_in_it(gate_dtype, device):
    case = make_case(13, 33, 17, 4, 2)
    case.leaves["topk_weight"] = case.leaves["topk_weight"].to(gate_dtype)
    got = run(case, layer(), device=device)
    assert got["dtopk_weight"].dtype == gate_dtype
    assert not moe_mismatches(layer(), case, 1e-5 if gate_dtype == torch.float64 else 1e-2, device)


def test_errors_of_half_precision_do_not_grow_with_the_sum(device):
    """The sums over H and I are in float32: 8 times the terms, the same relative error."""
    errors = []
    for size in (64, 512):
        case = make_case(32, size, 32, 1, 1, torch.bfloat16)
        want = run(case, moe_oracle, torch.float64)
        with everywhere(Tile(32, 32, 64, TMA=True)):
            got = run(case, layer(), device=device)
        errors.append(max(((got[n] - want[n]).norm() / want[n].norm()).item() for n in want))
    assert errors[1] < 1.3 * errors[0] < 1e-2


# dropped slots, frozen experts
@pytest.mark.parametrize("tma", [False, True], ids=["pointers", "descriptors"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_dropped_slots_and_idle_experts_hold_may_be_anything(dtype, tma, device):
    case = make_case(12, 40, 24, 5, 2, dtype, "dropped", bias=True)
    case.topk_idx[case.topk_idx == 3] = -1  # nobody picks expert 3
    case.topk_idx[7] = -1
    dead = (case.topk_idx < 0) | (case.topk_idx >= 5)
    with everywhere(Tile(16, 32, 32, TMA=tma)):
        want = run(case, layer(), device=device)
        case.leaves["topk_weight"][dead] = float("nan")
        case.leaves["x"][7], case.dout[7] = float("nan"), float("nan")
        for name in ("up", "down", "up_bias", "down_bias"):
            case.leaves[name][3] = float("nan")
        got = run(case, layer(), device=device)
    assert all(torch.equal(got[name], want[name]) for name in want)
    assert (
        not got["dtopk_weight"][dead].any() and not got["out"][7].any() and not got["dx"][7].any()
    )
    assert not any(got[name][3].any() for name in ("dup", "ddown", "dup_bias", "ddown_bias"))


def test_nothing_but_dropped_slots(device):
    case = make_case(7, 33, 17, 4, 2, bias=True)
    case.topk_idx.fill_(-1)
    assert not any(tensor.any() for tensor in run(case, layer(), device=device).values())


@pytest.mark.parametrize("routing", ["random", "skip"])
def test_frozen_experts_get_zero_and_all_else_is_the_same(routing, device):
    case = make_case(19, 33, 17, 4, 2, routing=routing, bias=True)
    trainable = torch.tensor([True, False, True, False], device=device)
    want, got = (run(case, layer(trainable=t), device=device) for t in (None, trainable))
    for name in ("dup", "ddown", "dup_bias", "ddown_bias"):
        assert torch.equal(
            got[name],
            torch.where(trainable.cpu().view(4, *[1] * (got[name].dim() - 1)), want[name], 0),
        )
    assert all(torch.equal(got[name], want[name]) for name in ("out", "dx", "dtopk_weight"))


def with_trained_apart(places, layout=lambda w: w, **options):
    """The weights of the experts that train in tensors of their own, by `places`; the frozen stacks
    are NaN there.
    """
    order = torch.tensor(
        [places.index(place) for place in range(max(places) + 1)], dtype=torch.int64
    )

    def call(x, up, down, *args, **kwargs):
        stacks = []
        for w in (up, down):
            stack = w.detach().clone()
            stack[order] = float("nan")
            stacks.append(layout(stack))
        trainable = torch.tensor(places, dtype=torch.int32, device=x.device)
        return layer(trainable=trainable, trained=(up[order], down[order]), **options)(
            x, *stacks, *args, **kwargs
        )

    return call


def of_the_trained(places):
    """The equation, with no gradient for weights and biases of the frozen."""
    trains = torch.tensor([place >= 0 for place in places])

    def frozen(w):
        if w is None:
            return None
        return torch.where(trains.view(-1, *[1] * (w.dim() - 1)), w, w.detach())

    def call(x, up, down, *args, up_bias, down_bias, **kwargs):
        up, down, up_bias, down_bias = map(frozen, (up, down, up_bias, down_bias))
        return moe_oracle(x, up, down, *args, up_bias=up_bias, down_bias=down_bias, **kwargs)

    return call


@pytest.mark.parametrize("recompute", [False, True], ids=["save", "recompute"])
@pytest.mark.parametrize(
    "places, routing",
    [
        pytest.param([1, -1, 0, -1], "random", id="two of four, in another order"),
        pytest.param([-1, -1, -1, 0], "skip", id="the one that nobody picks"),
        pytest.param([2, 0, 3, 1], "dropped", id="all"),
        pytest.param([-1, -1, -1, -1], "random", id="none"),
    ],
)
def test_trained_weights_lie_apart(places, routing, recompute, tolerance, device):
    case = make_case(19, 40, 24, 4, 2, torch.float32, routing, bias=True)
    want = run(case, of_the_trained(places), torch.float64)
    got = {}
    with everywhere(Tile(16, 32, 32, TMA=True)):
        got = run(case, with_trained_apart(places, recompute=recompute), device=device)

    assert_parity(got, want, tolerance[torch.float32])


def test_rows_of_nobody_get_zero(device):
    check_rows_of_nobody("triton", device)


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(
            lambda w: w.transpose(1, 2).contiguous().transpose(1, 2), id="stacks stored in x out"
        ),
        pytest.param(
            lambda w: w.permute(1, 2, 0).contiguous().permute(2, 0, 1),
            id="stacks with the expert last",
        ),
    ],
)
def test_trained_weights_in_another_layout_than_the_stacks(layout, tolerance, device):

    places = [1, -1, 0, -1]
    case = make_case(13, 40, 24, 4, 2)
    got = run(case, with_trained_apart(places, layout), device=device)
    assert_parity(got, run(case, of_the_trained(places), torch.float64), tolerance[torch.float32])


def test_gradients_of_stacks_stored_in_x_out_are_not_copied(device):
    assert layouts.copies_of_transposed_gradients(moe_mlp, "triton", device=device) == []


@pytest.mark.parametrize(
    "form", ["grad", "transposed stacks", layouts.NARROW, "main_grad", "a layer with its router"]
)
def test_gradients_are_added_in_place(form, device):
    layouts.check_accumulation(form, "triton", device)
