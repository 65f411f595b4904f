"""The launchers of the grouped GEMMs alone against float64 loops over rows: every row of the tile
map, and not one more.
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
from moe_runtime.kernels import grouped_gemm, grouped_gemm_backward, operands
from moe_runtime.kernels.tiles import Tile

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
# a tail, none, a full tile and one row more, one row
COUNTS = [21, 0, 33, 1]
DROPPED = 5
SLOTS = 2
# neither is a multiple of a block; 16-byte rows in every dtype, so descriptors can hold them
H = 40
I = 24
PLAIN = Tile(16, 32, 32)
TILES = [
    pytest.param(PLAIN, torch.float32, id="16x32x32-float32"),
    pytest.param(PLAIN, torch.float16, id="16x32x32-float16"),
    pytest.param(PLAIN, torch.bfloat16, id="16x32x32-bfloat16"),
    pytest.param(PLAIN._replace(TMA=True), torch.float32, id="descriptors-float32"),
    pytest.param(PLAIN._replace(TMA=True), torch.bfloat16, id="descriptors-bfloat16"),
    pytest.param(
        Tile(16, 16, 16, GROUP_M=2, PERSISTENT=True), torch.bfloat16, id="persistent-bfloat16"
    ),
    pytest.param(Tile(32, 16, 64, GROUP_M=1), torch.float16, id="one block along the sum-float16"),
    pytest.param(
        Tile(64, 32, 16, GROUP_M=3, TMA=True, PERSISTENT=True), torch.float16, id="both-float16"
    ),
    pytest.param(
        Tile(16, 32, 16, TMA=True, JOINED=True), torch.float16, id="gate and up joined-float16"
    ),
    pytest.param(
        Tile(16, 256, 32, TMA=True), torch.float32, id="the epilogue in eight pieces-float32"
    ),
]


@pytest.fixture
def rows(device):
    return make_rows(COUNTS, DROPPED, SLOTS, device)


def of_tokens(rows, width, dtype):
    """[T, width]; tokens of dropped rows alone are NaN."""
    x = torch.randn(len(rows.expert) // rows.slots, width)
    used = {t for t, e in zip(rows.tokens, rows.expert) if e < len(COUNTS)}
    x[[t for t in range(len(x)) if t not in used]] = NAN
    return x.to(rows.offsets.device, dtype)


def of_rows(rows, width, dtype):
    """[R, width]; dropped rows are NaN."""
    a = torch.randn(len(rows.expert), width)
    a[sum(COUNTS) :] = NAN
    return a.to(rows.offsets.device, dtype)


def of_experts(*shape, dtype, device):
    """[E, ...], outputs are O(1); the expert without rows is NaN."""
    weight = torch.randn(len(COUNTS), *shape) / (shape[-1] ** 0.5 if len(shape) > 1 else 1)
    weight[COUNTS.index(0)] = NAN
    return weight.to(device, dtype)


def weights_of(rows):
    """[T, K] float32; those of dropped slots are NaN."""
    weight = 0.2 + torch.rand(len(rows.expert) // rows.slots, rows.slots)
    weight.view(-1)[rows.row_slot[sum(COUNTS) :].long().cpu()] = NAN
    return weight.to(rows.offsets.device)


@pytest.mark.parametrize(
    "gated, act, bias", [(True, "silu", False), (True, "gelu", True), (False, "relu2", True)]
)
@pytest.mark.parametrize("tile, dtype", TILES)
def test_up(tile, gated, act, bias, dtype, rows, device):
    x = of_tokens(rows, H, dtype)
    up = of_experts(2 * I if gated else I, H, dtype=dtype, device=device)
    bias = of_experts(up.shape[1], dtype=dtype, device=device) if bias else None
    args = (
        x,
        up,
        bias,
        rows.row_slot,
        tile_map(rows.offsets, len(rows.expert), tile.BLOCK_M),
        SLOTS,
        act,
        gated,
    )
    z, h = grouped_gemm.up_forward(*args, True, tile)
    want_z, want_h = up_rows(x, up, bias, rows, act, gated)
    assert_rounded_once(z, want_z)
    assert_rounded_once(h, want_h)
    nothing, again = grouped_gemm.up_forward(*args, False, tile)
    assert nothing.numel() == 0 and again.view(torch.uint8).equal(h.view(torch.uint8))


@pytest.mark.parametrize("k_last, bias", [(True, False), (True, True), (False, False)])
@pytest.mark.parametrize("tile, dtype", TILES)
def test_product(tile, k_last, bias, dtype, rows, device):
    a = of_rows(rows, I, dtype)
    weight = of_experts(H, I, dtype=dtype, device=device)
    bias = of_experts(H, dtype=dtype, device=device) if bias else None
    stored = weight if k_last else weight.transpose(1, 2).contiguous()
    tiles = tile_map(rows.offsets, len(rows.expert), tile.BLOCK_M)
    y = grouped_gemm.grouped_gemm_forward(a, stored, bias, tiles, k_last, tile)
    assert_rounded_once(y, product_rows(a, weight, bias, rows))


@pytest.mark.parametrize(
    "gated, act, bias, need_wh",
    [(True, "silu", False, True), (True, "gelu_tanh", True, False), (False, "gelu", True, True)],
)
@pytest.mark.parametrize("tile, dtype", TILES)
def test_dz(tile, gated, act, bias, need_wh, dtype, rows, device):
    dout = of_tokens(rows, H, dtype)
    down = of_experts(H, I, dtype=dtype, device=device)
    bias = of_experts(H, dtype=dtype, device=device) if bias else None
    z = of_rows(rows, 2 * I if gated else I, dtype)
    weight = weights_of(rows)
    tiles = tile_map(rows.offsets, len(rows.expert), tile.BLOCK_M)
    dz, wh, partial = grouped_gemm_backward.dz_backward(
        dout, down, bias, weight, rows.row_slot, tiles, z, act, gated, need_wh, tile
    )
    want_dz, want_wh, want_dweight = dz_rows(dout, down, bias, weight, z, rows, act, gated)
    assert_rounded_once(dz, want_dz)
    assert_rounded_once(wh, want_wh if need_wh else want_wh[:0])
    assert partial.dtype == torch.float32 and partial.shape == (
        len(rows.expert),
        -(-I // tile.BLOCK_N),
    )
    torch.testing.assert_close(
        partial.cpu().double().sum(1), want_dweight, rtol=1e-5, atol=2e-5, equal_nan=True
    )


def trained_maps(device):
    """What `trained` may say of four experts: frozen ones get zero, or have no place in a compact
    output.
    """
    frozen = torch.tensor([0, -1, -1, 0], dtype=torch.int32, device=device)
    places = torch.tensor([2, 0, -1, 1], dtype=torch.int32, device=device)
    return {"all": (None, None), "frozen": (frozen, None), "compact": (places, 3)}


def by_map(dw, trained, num_trained=None):
    """The gradients that a map asks for."""
    if trained is None:
        return dw
    trained = trained.cpu()
    if num_trained is None:
        return torch.where((trained >= 0).view(-1, *[1] * (dw.dim() - 1)), dw, 0)
    return torch.stack([dw[trained.tolist().index(place)] for place in range(num_trained)])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("which", ["all", "frozen", "compact"])
@pytest.mark.parametrize("gather", ["x", "dy", None])
@pytest.mark.parametrize("tma", [False, True], ids=["pointers", "ragged descriptors"])
def test_weight_gradient(tma, gather, which, dtype, rows, device):
    trained, num_trained = trained_maps(device)[which]
    dy = (of_tokens if gather == "dy" else of_rows)(rows, H, dtype)
    x = (of_tokens if gather == "x" else of_rows)(rows, I, dtype)
    tile = Tile(16, 32, 16, GROUP_M=2, TMA=tma) if gather else Tile(32, 16, 32, GROUP_M=1, TMA=tma)
    order = (rows.row_slot, rows.offsets, SLOTS)
    dw = grouped_gemm_backward.weight_backward(dy, x, *order, gather, tile, trained, num_trained)
    assert_rounded_once(
        dw, by_map(weight_rows(dy, x, rows, gather, len(COUNTS)), trained, num_trained)
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("which", ["all", "frozen", "compact"])
@pytest.mark.parametrize("gather, weighted", [(False, False), (True, True)])
def test_bias_gradient(gather, weighted, which, dtype, rows, device):
    trained, _ = trained_maps(device)[which]
    dy = (of_tokens if gather else of_rows)(rows, 70, dtype)  # more than a block of columns
    weight = weights_of(rows) if weighted else None
    order = (rows.row_slot, rows.offsets, SLOTS)
    db = grouped_gemm_backward.bias_backward(dy, weight, *order, gather, trained)
    assert_rounded_once(db, by_map(bias_rows(dy, weight, rows, gather, len(COUNTS)), trained))


def test_bias_gradient_of_more_rows_than_a_block(device):
    rows = make_rows([150, 0, 65, 64], 3, 1, device)
    dy = torch.randn(282, 20, device=device)
    db = grouped_gemm_backward.bias_backward(dy, None, rows.row_slot, rows.offsets, 1, False)
    assert_rounded_once(db, bias_rows(dy, None, rows, False, 4))


def test_experts_in_front_of_the_map_stay_unwritten(rows, device):
    tile = PLAIN
    tiles = tile_map(rows.offsets, len(rows.expert), tile.BLOCK_M, first_expert=1)
    x = of_tokens(rows, H, torch.float32)
    up = of_experts(2 * I, H, dtype=torch.float32, device=device)
    up[0] = NAN
    z, h = grouped_gemm.up_forward(
        x, up, None, rows.row_slot, tiles, SLOTS, "silu", True, True, tile
    )
    want_z, want_h = up_rows(x, up, None, rows, "silu", True, first_expert=1)
    assert_rounded_once(z, want_z)
    assert_rounded_once(h, want_h)
    y = grouped_gemm.grouped_gemm_forward(z, up.transpose(1, 2), None, tiles, True, tile)
    assert_rounded_once(y, product_rows(z, up.transpose(1, 2), None, rows, first_expert=1))


@pytest.mark.parametrize("tma", [False, True], ids=["pointers", "asked for descriptors"])
@pytest.mark.parametrize("k_last", [True, False])
def test_trained_weights_lie_apart(k_last, tma, rows, device):
    tile = PLAIN._replace(TMA=tma)
    tiles = tile_map(rows.offsets, len(rows.expert), 16)
    place = torch.tensor([1, -1, -1, 0], dtype=torch.int32, device=device)
    whole = of_experts(H, I, dtype=torch.float32, device=device)
    apart = whole[[3, 0]]
    stack = whole.clone()
    stack[[0, 3]] = NAN  # nobody reads the frozen weight of an expert that trains
    a = of_rows(rows, I, torch.float32)

    def turned(w):
        return w if k_last else w.transpose(1, 2).contiguous()

    trained = operands.Trained(place, turned(apart))
    y = grouped_gemm.grouped_gemm_forward(a, turned(stack), None, tiles, k_last, tile, trained)
    assert_rounded_once(y, product_rows(a, whole, None, rows))
    x = of_tokens(rows, I, torch.float32)
    up_trained = operands.Trained(place, apart)
    _, h = grouped_gemm.up_forward(
        x, stack, None, rows.row_slot, tiles, SLOTS, "silu", False, False, tile, up_trained
    )
    assert_rounded_once(h, up_rows(x, whole, None, rows, "silu", False)[1])
    weight = weights_of(rows)
    z = of_rows(rows, I, torch.float32)
    dout = of_tokens(rows, H, torch.float32)
    args = (dout, stack, None, weight, rows.row_slot, tiles, z, "silu", False, False, tile)
    dz, *_ = grouped_gemm_backward.dz_backward(*args, operands.Trained(place, apart))
    assert_rounded_once(dz, dz_rows(dout, whole, None, weight, z, rows, "silu", False)[0])


def test_rows_outside_of_the_map_keep_what_the_output_held(rows, device):
    a = of_rows(rows, I, torch.float32)
    weight = of_experts(H, I, dtype=torch.float32, device=device)
    y = torch.full((len(rows.expert), H), 7.0, device=device)
    tiles = tile_map(rows.offsets, len(rows.expert), 16)
    assert grouped_gemm.grouped_gemm_forward(a, weight, None, tiles, True, PLAIN, y=y) is y
    assert_rounded_once(y, product_rows(a, weight, None, rows).nan_to_num(nan=7.0))


@pytest.mark.parametrize("first", [1, 4])
def test_weight_gradients_in_front_stay_unwritten(first, rows, device):
    dz = of_rows(rows, H, torch.float32)
    x = of_tokens(rows, I, torch.float32)
    order = (rows.row_slot, rows.offsets, SLOTS)
    want = weight_rows(dz, x, rows, "x", len(COUNTS))
    want[:first] = NAN
    assert_rounded_once(
        grouped_gemm_backward.weight_backward(dz, x, *order, "x", PLAIN, first=first), want
    )


@pytest.mark.parametrize("act", ACT)
def test_activations_at_the_edges(act, device):
    """Far from zero, at both zeros and at NaN the numbers are torch's."""
    edges = torch.tensor(
        [-1e4, -200, -88, -30, -10, -1, -1e-3, -0.0, 0.0, 1e-3, 1, 10, 30, 88, 200, NAN]
    )
    rows = make_rows([1], 0, 1, device)
    tiles = torch.tensor([[0], [0], [1]], dtype=torch.int32, device=device)
    zeros = torch.zeros(1, 16, 16, device=device)
    z = edges.to(device)[None]
    _, h = grouped_gemm.up_forward(
        zeros[0, :1], zeros, z, rows.row_slot, tiles, 1, act, False, False, PLAIN
    )
    pre = edges.clone().requires_grad_()
    want = ACT[act](pre)
    torch.testing.assert_close(h[0].cpu(), want.detach(), rtol=2e-6, atol=2e-6, equal_nan=True)
    one = torch.ones(1, 1, device=device)
    down = torch.ones(1, 1, 16, device=device)
    dz, *_ = grouped_gemm_backward.dz_backward(
        one, down, None, one, rows.row_slot, tiles, z, act, False, False, PLAIN
    )
    (slope,) = torch.autograd.grad(want.sum(), pre)
    torch.testing.assert_close(dz[0].cpu(), slope, rtol=2e-6, atol=2e-6, equal_nan=True)


# layouts of the weights

LAYOUTS = [
    pytest.param((4, 48, 40), lambda w: w, id="contiguous"),
    pytest.param((4, 40, 48), lambda w: w.transpose(1, 2), id="transposed"),
    pytest.param((48, 40, 4), lambda w: w.permute(2, 0, 1), id="the expert as the fastest dim"),
    pytest.param((1, 48, 40), lambda w: w.expand(4, -1, -1), id="E views of one expert (stride 0)"),
    pytest.param((8, 48, 40), lambda w: w[::2], id="every other expert"),
    pytest.param((4, 48, 44), lambda w: w[:, :, 4:], id="rows longer than the matrix"),
    pytest.param((4, 48, 80), lambda w: w[:, :, 1::2], id="strided rows"),
    pytest.param((4, 49, 41), lambda w: w[:, 1:, 1:], id="a base that no 16 bytes divide"),
]


@pytest.mark.parametrize("tma", [False, True], ids=["pointers", "descriptors"])
@pytest.mark.parametrize("shape, view", LAYOUTS)
def test_layouts(shape, view, tma, device):
    rows = make_rows([18, 0, 5, 1], 0, 2, device)
    tile = Tile(16, 32, 32, TMA=tma)
    w = view(torch.randn(shape, device=device) / 6)
    tiles = tile_map(rows.offsets, 24, 16)
    x = torch.randn(12, 40, device=device)
    z, h = grouped_gemm.up_forward(x, w, None, rows.row_slot, tiles, 2, "silu", True, True, tile)
    want_z, want_h = up_rows(x, w, None, rows, "silu", True)
    assert_rounded_once(z, want_z)
    assert_rounded_once(h, want_h)
    a = torch.randn(24, 48, device=device)
    y = grouped_gemm.grouped_gemm_forward(a, w, None, tiles, False, tile)
    assert_rounded_once(y, product_rows(a, w.transpose(1, 2), None, rows))
    weight = torch.rand(12, 2, device=device)
    down = w.transpose(1, 2)
    args = (x, down, None, weight, rows.row_slot, tiles, a, "gelu", False, True, tile)
    dz, wh, _ = grouped_gemm_backward.dz_backward(*args)
    want_dz, want_wh, _ = dz_rows(x, down, None, weight, a, rows, "gelu", False)
    assert_rounded_once(dz, want_dz)
    assert_rounded_once(wh, want_wh)


# nothing to do
def test_no_rows(device):
    rows = make_rows([0, 0, 0], 0, 2, device)
    tile = PLAIN
    tiles = tile_map(rows.offsets, 0, 16)
    assert tiles.shape == (3, 0)
    x = torch.randn(0, H, device=device)
    w = torch.randn(3, 2 * I, H, device=device)
    order = (rows.row_slot, rows.offsets, 2)
    z, h = grouped_gemm.up_forward(x, w, None, rows.row_slot, tiles, 2, "silu", True, True, tile)
    assert z.shape == (0, 2 * I) and h.shape == (0, I)
    assert grouped_gemm.grouped_gemm_forward(z, w, None, tiles, False, tile).shape == (0, H)
    weight = torch.rand(0, 2, device=device)
    down = torch.randn(3, H, I, device=device)
    dz, wh, partial = grouped_gemm_backward.dz_backward(
        x, down, None, weight, rows.row_slot, tiles, z, "silu", True, True, tile
    )
    assert dz.shape == z.shape and wh.shape == h.shape and partial.shape == (0, 1)
    dw = grouped_gemm_backward.weight_backward(dz, x, *order, "x", tile)
    db = grouped_gemm_backward.bias_backward(dz, None, *order, False)
    assert dw.equal(torch.zeros_like(w)) and db.equal(torch.zeros(3, 2 * I, device=device))


def test_dropped_rows_only(device):
    rows = make_rows([0, 0], 8, 2, device)
    tile = PLAIN
    tiles = tile_map(rows.offsets, 8, 16)
    x = torch.full((4, H), NAN, device=device)
    w = torch.full((2, 2 * I, H), NAN, device=device)
    z, h = grouped_gemm.up_forward(x, w, None, rows.row_slot, tiles, 2, "silu", True, True, tile)
    assert z.isnan().all() and h.isnan().all()
    dw = grouped_gemm_backward.weight_backward(z, x, rows.row_slot, rows.offsets, 2, "x", tile)
    assert not dw.any()


def test_no_expert_is_trained(rows, device):
    trained = torch.full((4,), -1, dtype=torch.int32, device=device)
    dz = of_rows(rows, I, torch.float32)
    x = of_tokens(rows, H, torch.float32)
    tile = PLAIN
    order = (rows.row_slot, rows.offsets, SLOTS)
    assert grouped_gemm_backward.weight_backward(dz, x, *order, "x", tile, trained, 0).shape == (
        0,
        I,
        H,
    )
    assert not grouped_gemm_backward.weight_backward(dz, x, *order, "x", tile, trained).any()
    assert not grouped_gemm_backward.bias_backward(dz, None, *order, False, trained).any()


# order of the tiles
@pytest.mark.parametrize("GROUP_M", [1, 2, 3, 8])
def test_every_tile_is_computed_once(GROUP_M, device):
    # 7 row tiles, so that no group size but 1 divides them; 3 column tiles; the sanitizer sees one
    # that is written twice
    rows = make_rows([7 * 16], 0, 1, device)
    a = torch.randn(112, 16, device=device)
    weight = torch.randn(1, 40, 16, device=device)
    want = product_rows(a, weight, None, rows)
    for persistent in (False, True):
        tile = Tile(16, 16, 16, GROUP_M=GROUP_M, PERSISTENT=persistent)
        tiles = tile_map(rows.offsets, 112, 16)[:, :7].contiguous()  # the bound is one more
        assert_rounded_once(
            grouped_gemm.grouped_gemm_forward(a, weight, None, tiles, True, tile), want
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_three_runs_give_the_same_bits(dtype, rows, device):
    tile = Tile(16, 32, 16, PERSISTENT=True)
    tiles = tile_map(rows.offsets, len(rows.expert), 16)
    x = of_tokens(rows, H, dtype)
    up = of_experts(2 * I, H, dtype=dtype, device=device)
    dout = of_tokens(rows, H, dtype)
    down = of_experts(H, I, dtype=dtype, device=device)
    weight = weights_of(rows)

    def step():
        z, h = grouped_gemm.up_forward(
            x, up, None, rows.row_slot, tiles, SLOTS, "silu", True, True, tile
        )
        args = (dout, down, None, weight, rows.row_slot, tiles, z, "silu", True, True, tile)
        dz, wh, partial = grouped_gemm_backward.dz_backward(*args)
        dw = grouped_gemm_backward.weight_backward(
            dz, x, rows.row_slot, rows.offsets, SLOTS, "x", tile
        )
        return [t.view(torch.uint8) for t in (z, h, dz, wh, partial, dw)]

    first = step()
    assert all(a.equal(b) for _ in range(2) for a, b in zip(first, step(), strict=True))


class _Launches(TorchDispatchMode):
    """Counts the ops of torch that would launch a kernel or a memset on a GPU."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.overloadpacket in (
            torch.ops.aten.new_zeros,
            torch.ops.aten.zeros_like,
            torch.ops.aten.zeros,
        )
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("need_x", [False, True])
def test_no_descriptor_before_the_first_launch_of_a_thread(need_x, monkeypatch, device):
    """Autograd's thread has no CUDA context before its first launch; the weight's gradient encodes
    descriptors.
    """
    counts = []
    launch = grouped_gemm_backward.weight_backward
    monkeypatch.setattr(
        grouped_gemm_backward,
        "weight_backward",
        lambda *args: counts.append(launches.count) or launch(*args),
    )
    x, dy, weight = (torch.randn(shape, device=device) for shape in ((6, 16), (6, 8), (2, 8, 16)))
    offsets = torch.tensor([0, 2, 6], dtype=torch.int32, device=device)
    with _Launches() as launches:
        grouped_gemm_op._backward(
            dy, x, weight, offsets, None, None, [need_x, True, False], "triton"
        )
    assert counts and counts[0] > 0
