"""The launchers of the grouped GEMMs against float64 loops over rows: every row of the tile map,
and no other.
"""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from moe_runtime.ops import grouped_gemm as grouped_gemm_op
from moe_runtime.ops.activation import ACT
from tests.support.rows import (
    NAN,
    assert_rounded_once,
    bias_rows,
    dz_rows,
    make_rows,
    product_rows,
    tile_map,
    up_rows,
    weight_rows,
)

pytest.importorskip("triton")
from moe_runtime.kernels import grouped_gemm, grouped_gemm_backward
from moe_runtime.kernels.tiles import Tile

# a partial tile, none, a full tile plus one row, one row
COUNTS = [21, 0, 33, 1]
DROPPED = 5
SLOTS = 2
# neither is a multiple of a block; rows are multiples of 16 bytes in every dtype, as descriptors
# need
H = 40
I = 24
PLAIN = Tile(16, 32, 32)
TMA = PLAIN._replace(TMA=True)
TILES = [
    pytest.param(PLAIN, torch.float32, id="plain-float32"),
    pytest.param(PLAIN, torch.float16, id="plain-float16"),
    pytest.param(TMA, torch.float32, id="descriptors-float32"),
    pytest.param(TMA, torch.bfloat16, id="descriptors-bfloat16"),
    pytest.param(
        Tile(16, 16, 16, GROUP_M=2, TMA=True, PERSISTENT=True),
        torch.bfloat16,
        id="persistent",
    ),
    pytest.param(
        Tile(32, 16, 64, GROUP_M=1),
        torch.float16,
        id="one block along the sum",
    ),
    pytest.param(
        Tile(64, 32, 16, GROUP_M=3, TMA=True, PERSISTENT=True),
        torch.float16,
        id="both",
    ),
    pytest.param(
        Tile(16, 32, 16, TMA=True, JOINED=True),
        torch.float16,
        id="gate and up joined",
    ),
    pytest.param(
        Tile(16, 256, 32, TMA=True),
        torch.float32,
        id="the epilogue in eight parts",
    ),
]


def tiles_of(rows, tile=PLAIN, first_expert=0):
    return tile_map(rows.offsets, len(rows.expert), tile.BLOCK_M, first_expert)


def check_up(
    rows,
    x,
    up,
    bias=None,
    act="silu",
    gated=True,
    tile=PLAIN,
    first_expert=0,
    trained=None,
    whole=None,
):
    """Compare the up projection; `whole` has the effective weights if some are `trained`."""
    tiles = tiles_of(rows, tile, first_expert)
    args = (x, up, bias, rows.row_slot, tiles, rows.slots, act, gated)
    z, h = grouped_gemm.up_forward(*args, True, tile, trained)
    want_up = up if whole is None else whole
    want_z, want_h = up_rows(
        x,
        want_up,
        bias,
        rows,
        act,
        gated,
        first_expert,
    )
    assert_rounded_once(z, want_z)
    assert_rounded_once(h, want_h)
    nothing, again = grouped_gemm.up_forward(*args, False, tile, trained)
    assert nothing.numel() == 0
    assert again.view(torch.uint8).equal(h.view(torch.uint8))


def check_product(rows, a, weight, bias=None, k_last=True, tile=PLAIN, first_expert=0):
    """Compare the product with weights stored as [E, out, in], or as [E, in, out]."""
    stored = weight if k_last else weight.transpose(1, 2).contiguous()
    tiles = tiles_of(rows, tile, first_expert)
    y = grouped_gemm.grouped_gemm_forward(a, stored, bias, tiles, k_last, tile)
    assert_rounded_once(y, product_rows(a, weight, bias, rows, first_expert))


def check_dz(rows, dout, down, weight, z, bias=None, act="silu", gated=True, tile=PLAIN):
    """Compare the gradients that pass back through the down projection and the activation."""
    args = (dout, down, bias, weight, rows.row_slot, tiles_of(rows, tile), z, act, gated)
    dz, wh, partial = grouped_gemm_backward.dz_backward(*args, True, tile)
    want_dz, want_wh, want_dweight = dz_rows(
        dout,
        down,
        bias,
        weight,
        z,
        rows,
        act,
        gated,
    )
    assert_rounded_once(dz, want_dz)
    assert_rounded_once(wh, want_wh)
    assert partial.dtype == torch.float32
    sums = partial.cpu().double().sum(1)
    torch.testing.assert_close(
        sums,
        want_dweight,
        rtol=1e-4,
        atol=1e-4,
        equal_nan=True,
    )
    _, none, _ = grouped_gemm_backward.dz_backward(*args, False, tile)
    assert none.numel() == 0


@pytest.fixture
def rows(device):
    return make_rows(COUNTS, DROPPED, SLOTS, device)


def of_tokens(rows, width, dtype=torch.float32):
    """[T, width]; tokens with only dropped rows are NaN."""
    x = torch.full((len(rows.expert) // rows.slots, width), NAN)
    for token, e in zip(rows.tokens, rows.expert, strict=True):
        if e < len(COUNTS):
            x[token] = torch.randn(width)
    return x.to(rows.offsets.device, dtype)


def of_rows(rows, width, dtype=torch.float32):
    """[R, width]; dropped rows are NaN."""
    a = torch.randn(len(rows.expert), width)
    a[sum(COUNTS) :] = NAN
    return a.to(rows.offsets.device, dtype)


def of_experts(rows, *shape, dtype=torch.float32):
    """[E, ...], so that outputs are O(1); the expert without rows is NaN."""
    weight = torch.randn(len(COUNTS), *shape)
    if len(shape) > 1:
        weight /= shape[-1] ** 0.5
    weight[COUNTS.index(0)] = NAN
    return weight.to(rows.offsets.device, dtype)


def weights_of(rows):
    """[T, K] float32; those of dropped slots are NaN."""
    weight = 0.2 + torch.rand(len(rows.expert) // rows.slots, rows.slots)
    weight.view(-1)[rows.row_slot[sum(COUNTS) :].long().cpu()] = NAN
    return weight.to(rows.offsets.device)


@pytest.mark.parametrize(
    "gated, act, has_bias",
    [
        (True, "silu", False),
        (True, "gelu", True),
        (False, "relu2", True),
    ],
)
@pytest.mark.parametrize("tile, dtype", TILES)
def test_up(tile, gated, act, has_bias, dtype, rows):
    Z = 2 * I if gated else I
    up = of_experts(rows, Z, H, dtype=dtype)
    bias = of_experts(rows, Z, dtype=dtype) if has_bias else None
    check_up(
        rows,
        of_tokens(rows, H, dtype),
        up,
        bias,
        act,
        gated,
        tile,
    )


@pytest.mark.parametrize(
    "k_last, has_bias",
    [
        (True, False),
        (True, True),
        (False, False),
    ],
)
@pytest.mark.parametrize("tile, dtype", TILES)
def test_product(tile, k_last, has_bias, dtype, rows):
    weight = of_experts(rows, H, I, dtype=dtype)
    bias = of_experts(rows, H, dtype=dtype) if has_bias else None
    check_product(
        rows,
        of_rows(rows, I, dtype),
        weight,
        bias,
        k_last,
        tile,
    )


@pytest.mark.parametrize(
    "gated, act, has_bias",
    [
        (True, "silu", False),
        (True, "gelu_tanh", True),
        (False, "gelu", True),
    ],
)
@pytest.mark.parametrize("tile, dtype", TILES)
def test_dz(tile, gated, act, has_bias, dtype, rows):
    dout = of_tokens(rows, H, dtype)
    down = of_experts(rows, H, I, dtype=dtype)
    bias = of_experts(rows, H, dtype=dtype) if has_bias else None
    z = of_rows(rows, 2 * I if gated else I, dtype)
    check_dz(
        rows,
        dout,
        down,
        weights_of(rows),
        z,
        bias,
        act,
        gated,
        tile,
    )


def places_of(which, device):
    """Return a map of four experts and the number of gradients that it requests: frozen experts get
    zero, or have no place in a compact output.
    """
    if which == "all":
        return None, None
    if which == "frozen":
        return torch.tensor([0, -1, -1, 0], dtype=torch.int32, device=device), None
    return torch.tensor([2, 0, -1, 1], dtype=torch.int32, device=device), 3


def by_map(dw, which):
    """Return the gradients that a map requests."""
    if which == "frozen":
        dw[[1, 2]] = 0
    if which == "compact":
        return dw[[1, 3, 0]]
    return dw


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("which", ["all", "frozen", "compact"])
@pytest.mark.parametrize("gather", ["x", "dy", None])
@pytest.mark.parametrize("tma", [False, True], ids=["pointers", "ragged descriptors"])
def test_weight_gradient(tma, gather, which, dtype, rows, device):
    dy = (
        of_tokens(
            rows,
            H,
            dtype,
        )
        if gather == "dy"
        else of_rows(rows, H, dtype)
    )
    x = (
        of_tokens(
            rows,
            I,
            dtype,
        )
        if gather == "x"
        else of_rows(rows, I, dtype)
    )
    tile = Tile(32, 16, 32, GROUP_M=1, TMA=tma)
    if gather:
        tile = Tile(16, 32, 16, GROUP_M=2, TMA=tma)
    order = (rows.row_slot, rows.offsets, SLOTS)
    places = places_of(which, device)
    dw = grouped_gemm_backward.weight_backward(
        dy,
        x,
        *order,
        gather,
        tile,
        *places,
    )
    assert_rounded_once(
        dw,
        by_map(
            weight_rows(
                dy,
                x,
                rows,
                gather,
                len(COUNTS),
            ),
            which,
        ),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("which", ["all", "frozen"])
@pytest.mark.parametrize("of_slots", [False, True], ids=["rows", "tokens and weights"])
def test_bias_gradient(of_slots, which, dtype, rows, device):
    width = 70  # more than a block of columns
    dy = of_rows(rows, width, dtype)
    weight = None
    if of_slots:
        dy = of_tokens(rows, width, dtype)
        weight = weights_of(rows)
    places, _ = places_of(which, device)
    order = (rows.row_slot, rows.offsets, SLOTS)
    db = grouped_gemm_backward.bias_backward(dy, weight, *order, of_slots, places)
    assert_rounded_once(
        db,
        by_map(
            bias_rows(
                dy,
                weight,
                rows,
                of_slots,
                len(COUNTS),
            ),
            which,
        ),
    )


def test_bias_gradient_of_more_rows_than_a_block(device):
    rows = make_rows([150, 0, 65, 64], 3, 1, device)
    dy = torch.randn(282, 20, device=device)
    db = grouped_gemm_backward.bias_backward(
        dy,
        None,
        rows.row_slot,
        rows.offsets,
        1,
        False,
    )
    assert_rounded_once(db, bias_rows(dy, None, rows, False, 4))


def test_experts_in_front_of_the_map_stay_unwritten(rows):
    up = of_experts(rows, 2 * I, H)
    up[0] = NAN
    check_up(rows, of_tokens(rows, H), up, first_expert=1)
    a = of_rows(rows, 2 * I)
    check_product(rows, a, up.transpose(1, 2), first_expert=1)


def test_rows_outside_of_the_map_keep_what_the_output_held(rows, device):
    a = of_rows(rows, I)
    weight = of_experts(rows, H, I)
    y = torch.full((len(rows.expert), H), 7.0, device=device)
    got = grouped_gemm.grouped_gemm_forward(
        a,
        weight,
        None,
        tiles_of(rows),
        True,
        PLAIN,
        y=y,
    )
    assert got is y
    assert_rounded_once(
        y,
        product_rows(
            a,
            weight,
            None,
            rows,
        ).nan_to_num(nan=7.0),
    )


@pytest.mark.parametrize("first", [1, 4])
def test_weight_gradients_in_front_stay_unwritten(first, rows):
    dz = of_rows(rows, H)
    x = of_tokens(rows, I)
    order = (rows.row_slot, rows.offsets, SLOTS)
    dw = grouped_gemm_backward.weight_backward(
        dz,
        x,
        *order,
        "x",
        PLAIN,
        first=first,
    )
    expected = weight_rows(dz, x, rows, "x", len(COUNTS))
    expected[:first] = NAN
    assert_rounded_once(dw, expected)


@pytest.mark.parametrize("act", ACT)
def test_activations_at_the_edges(act, device):
    """Far from zero, at both zeros and at NaN, values equal torch's."""
    edges = [
        -1e4,
        -200,
        -88,
        -30,
        -10,
        -1,
        -1e-3,
        -0.0,
        0.0,
        1e-3,
        1,
        10,
        30,
        88,
        200,
        NAN,
    ]
    pre = torch.tensor(edges, requires_grad=True)
    rows = make_rows([1], 0, 1, device)
    tiles = torch.tensor(
        [
            [0],
            [0],
            [1],
        ],
        dtype=torch.int32,
        device=device,
    )
    zeros = torch.zeros(1, 16, 16, device=device)
    z = pre.detach().to(device)[None]
    _, h = grouped_gemm.up_forward(
        zeros[0, :1], zeros, z, rows.row_slot, tiles, 1, act, False, False, PLAIN
    )
    expected = ACT[act](pre)
    torch.testing.assert_close(
        h[0].cpu(),
        expected.detach(),
        rtol=2e-6,
        atol=2e-6,
        equal_nan=True,
    )
    one = torch.ones(1, 1, device=device)
    down = torch.ones(1, 1, 16, device=device)
    dz, *_ = grouped_gemm_backward.dz_backward(
        one, down, None, one, rows.row_slot, tiles, z, act, False, False, PLAIN
    )
    (slope,) = torch.autograd.grad(expected.sum(), pre)
    torch.testing.assert_close(
        dz[0].cpu(),
        slope,
        rtol=2e-6,
        atol=2e-6,
        equal_nan=True,
    )


LAYOUTS = [
    pytest.param((4, 48, 40), lambda w: w, id="contiguous"),
    pytest.param(
        (4, 40, 48),
        lambda w: w.transpose(1, 2),
        id="transposed",
    ),
    pytest.param(
        (48, 40, 4),
        lambda w: w.permute(2, 0, 1),
        id="the expert as the fastest dim",
    ),
    pytest.param(
        (1, 48, 40),
        lambda w: w.expand(4, -1, -1),
        id="E views of one expert (stride 0)",
    ),
    pytest.param(
        (8, 48, 40),
        lambda w: w[::2],
        id="every other expert",
    ),
    pytest.param(
        (4, 48, 44),
        lambda w: w[:, :, 4:],
        id="rows longer than the matrix",
    ),
    pytest.param(
        (4, 48, 80),
        lambda w: w[:, :, 1::2],
        id="strided rows",
    ),
    pytest.param(
        (4, 49, 41),
        lambda w: w[:, 1:, 1:],
        id="a base address not aligned to 16 bytes",
    ),
]


@pytest.mark.parametrize("tile", [PLAIN, TMA], ids=["pointers", "descriptors"])
@pytest.mark.parametrize("shape, view", LAYOUTS)
def test_layouts(shape, view, tile, device):
    rows = make_rows([18, 0, 5, 1], 0, 2, device)
    w = view(torch.randn(shape, device=device) / 6)
    x = torch.randn(12, 40, device=device)
    a = torch.randn(24, 48, device=device)
    check_up(rows, x, w, tile=tile)
    y = grouped_gemm.grouped_gemm_forward(
        a,
        w,
        None,
        tiles_of(rows),
        False,
        tile,
    )
    assert_rounded_once(
        y,
        product_rows(
            a,
            w.transpose(1, 2),
            None,
            rows,
        ),
    )
    weight = torch.rand(12, 2, device=device)
    check_dz(
        rows,
        x,
        w.transpose(1, 2),
        weight,
        a,
        act="gelu",
        gated=False,
        tile=tile,
    )


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("GROUP_M", [1, 2, 3, 8])
def test_every_tile_is_computed_once(GROUP_M, persistent, device):
    # 7 row tiles, which no group size but 1 divides; 3 column tiles; the sanitizer detects a tile
    # that is written twice
    rows = make_rows([7 * 16], 0, 1, device)
    a = torch.randn(112, 16, device=device)
    weight = torch.randn(1, 40, 16, device=device)
    tile = Tile(16, 16, 16, GROUP_M=GROUP_M, TMA=persistent, PERSISTENT=persistent)
    tiles = tiles_of(rows)[:, :7].contiguous()  # the bound is one more
    y = grouped_gemm.grouped_gemm_forward(a, weight, None, tiles, True, tile)
    assert_rounded_once(y, product_rows(a, weight, None, rows))


class _Launches(TorchDispatchMode):
    """Counts the torch ops that would launch a kernel or a memset on a GPU."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.overloadpacket.__name__ in ("new_zeros", "zeros_like", "zeros")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("need_x", [False, True])
def test_no_descriptor_before_the_first_launch_of_a_thread(need_x, monkeypatch, device):
    """Autograd's thread has no CUDA context before its first launch, and the weight gradient
    encodes descriptors.
    """
    counts = []
    launch = grouped_gemm_backward.weight_backward

    def recorded(*args):
        counts.append(launches.count)
        return launch(*args)

    monkeypatch.setattr(grouped_gemm_backward, "weight_backward", recorded)
    x = torch.randn(6, 16, device=device)
    dy = torch.randn(6, 8, device=device)
    weight = torch.randn(2, 8, 16, device=device)
    offsets = torch.tensor([0, 2, 6], dtype=torch.int32, device=device)
    needs = [need_x, True, False]
    with _Launches() as launches:
        grouped_gemm_op._backward(dy, x, weight, offsets, None, None, needs, "triton")
    assert counts[0] > 0
