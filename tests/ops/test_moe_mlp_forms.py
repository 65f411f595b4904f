"""Experts whose gate and up are clamped, shifted or interleaved, on every backend.

Rounding alone may move a value near the limit to its other side, which is no error but looks like
one. Every case therefore puts its limit into a gap between the values that occur, and asserts that
some are beyond it, on each side, and some are not.
"""

import math

import pytest
import torch

from moe_runtime.ops.activation import Activation
from moe_runtime.ops.expert_rows import ExpertStacks
from tests.ops.test_moe_mlp_kernel import everywhere
from tests.support import layouts
from tests.support.layer import moe_layer
from tests.support.oracle import gate_and_up, make_case, moe_mismatches, run

pytest.importorskip("triton")
from moe_runtime.kernels.tiles import Tile

OP = "moe_mlp"
LIMITED = [  # act, form; each case chooses its limit
    pytest.param(
        "quick_gelu",
        {"limit": 1, "up_offset": 1.0, "interleaved": True},
        id="GPT-OSS",
    ),
    pytest.param("silu", {"limit": 1}, id="DeepSeek-V4"),
    pytest.param("gelu", {"limit": 1, "up_offset": -0.5}, id="clamped and shifted, gate first"),
    pytest.param("relu2", {"limit": 1, "interleaved": True}, id="clamped, interleaved"),
]
GPT_OSS = LIMITED[0].values


def in_a_gap(case) -> None:
    """Put the case's limit into a gap between the values of gate and up, and check that all sides
    occur.
    """
    v = case.view({name: leaf.double() for name, leaf in case.leaves.items()})
    z = []
    for t, ids in enumerate(case.topk_idx.tolist()):
        for e in ids:
            if 0 <= e < len(v["up"]):
                z.append(v["up"][e] @ v["x"][t] + v["up_bias"][e])
    gate, up = gate_and_up(torch.stack(z), case.form.get("interleaved", False))
    values = torch.cat([gate.flatten(), up.abs().flatten()])
    values = values[(values > 0.4) & (values < 1.2)].sort().values
    widest = values.diff().argmax()
    limit = values[widest : widest + 2].mean().item()
    case.form["limit"] = limit
    for beyond in (gate > limit, up > limit, up < -limit):
        assert 0.02 < beyond.double().mean() < 0.5
    assert (gate < -limit).any()  # the gate has no lower limit; if it had one, this would detect it


def made(act, form, dtype=torch.float32, sizes=(19, 33, 17, 4, 2), routing="dropped", change=None):
    case = make_case(*sizes, dtype, routing, act, bias=True)
    case.form = dict(form)
    if change:
        change(case)
    in_a_gap(case)
    return case


@pytest.fixture
def check_kernels(device, tolerance):
    """check_kernels(case, **options) compares Triton's kernels with the oracle."""

    def check(case, **options):
        layer = moe_layer(backend="triton", **options)
        assert not moe_mismatches(
            layer,
            case,
            tolerance[case.leaves["x"].dtype],
            device,
        )

    return check


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("act, form", LIMITED)
def test_parity(act, form, dtype, backend, tolerance, device):
    case = made(act, form, dtype)
    assert not moe_mismatches(
        moe_layer(backend=backend),
        case,
        tolerance[dtype],
        device,
    )


TILES = [
    pytest.param(Tile(16, 16, 16, GROUP_M=1), id="small"),
    pytest.param(Tile(32, 32, 32, TMA=True), id="descriptors"),
    pytest.param(Tile(16, 32, 32, TMA=True, PERSISTENT=True), id="descriptors, persistent"),
    pytest.param(Tile(64, 64, 64), id="one tile holds an expert"),
    pytest.param(Tile(16, 256, 16, TMA=True), id="more columns than a descriptor's block may have"),
]


@pytest.mark.parametrize(
    "change", [None, layouts.transposed_weights], ids=["[E, 2I, H]", "[E, H, 2I] transposed"]
)
@pytest.mark.parametrize("tile", TILES)
def test_tiles(tile, change, check_kernels):
    I = 72  # more than one tile of 32 columns of up
    if tile.BLOCK_N == 256:
        I = 136  # not clipped to one tile
    with everywhere(tile):
        check_kernels(
            made(
                *GPT_OSS,
                torch.float16,
                (21, 40, I, 2, 2),
                "random",
                change,
            )
        )


def exactly_at_the_limit(form):
    """Return one token that is e_0, so that gate and up are the first columns of the weights: at
    the limit, just below it and beyond.
    """
    limit = 0.75
    below = math.nextafter(0.75, 0)
    gate = torch.tensor(
        [
            limit,
            below,
            -limit,
            1.0,
            limit,
            limit,
            limit,
            -2.0,
            0.5,
        ]
    )
    up = torch.tensor(
        [
            limit,
            limit,
            limit,
            limit,
            -limit,
            1.0,
            -1.0,
            0.25,
            -limit,
        ]
    )
    case = make_case(1, 4, 9, 1, 1, torch.float32, act="quick_gelu")
    case.form = form | {"limit": limit}
    case.leaves["x"] = torch.tensor([[1.0, 0, 0, 0]])
    z = torch.cat([gate, up])
    if form.get("interleaved"):
        z = torch.stack([gate, up], 1).flatten()
    case.leaves["up"][0, :, 0] = z
    return case


@pytest.mark.parametrize(
    "form", [{}, {"interleaved": True, "up_offset": 1.0}], ids=["gate first", "interleaved"]
)
def test_a_value_on_the_limit_has_a_gradient_and_one_beyond_has_none(
    form, backend, tolerance, device
):
    case = exactly_at_the_limit(form)
    layer = moe_layer(backend=backend)
    assert not moe_mismatches(layer, case, tolerance[torch.float32], device)
    dup = run(case, layer, device=device)["dup"][0, :, 0]
    gate, up = gate_and_up(dup, form.get("interleaved", False))
    assert (gate != 0).tolist() == [True, True, True, False, True, True, True, True, True]
    assert (up != 0).tolist() == [True, True, True, True, True, False, False, True, True]


@pytest.mark.parametrize("form", [GPT_OSS[1], {"limit": 1}], ids=["interleaved", "gate first"])
@pytest.mark.parametrize("I", [40, 272], ids=["one block", "two blocks of its activation"])
def test_shared_expert_by_torchs_matmul(I, form, check_kernels):
    """Expert 0 is in the last slot of every token, and nowhere else."""
    case = make_case(9, 24, I, 3, 2, act="quick_gelu", bias=True)
    case.topk_idx = case.topk_idx % 2 + 1
    case.topk_idx[:, -1] = 0
    case.form = dict(form)
    in_a_gap(case)
    with everywhere(Tile(16, 32, 32)):
        check_kernels(case, shared="dense")


@pytest.mark.parametrize("op", ["moe_mlp", "moe_mlp_backward", "moe_layer", "moe_layer_backward"])
def test_experts_are_what_the_schemas_say(op):
    schema = getattr(torch.ops.moe_runtime, op).default._schema
    names = [argument.name for argument in schema.arguments]
    *tensors, _, shared = ExpertStacks._fields
    fields = [*tensors, *Activation._fields, shared]
    at = names.index("up")
    assert names[at : at + len(fields)] == fields
    assert ExpertStacks.unpack(range(len(fields))).pack() == tuple(range(len(fields)))
