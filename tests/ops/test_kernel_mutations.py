"""The tests of the kernels must see planted bugs: each mutant is one changed line of a kernel or launcher, and is caught.

A mutant names the test that must fail, by a wrong number or because the sanitizer sees memory that is not its own; any other
error is a mutant that does not run, and fails here. Without a change every one of these tests passes (`test_unharmed`).
"""

import inspect
import os

import pytest
import torch

pytest.importorskip("triton")
from moe_runtime.kernels.tiles import Tile
from tests.ops import test_grouped_gemm_kernel as kernels
from tests.ops import test_grouped_gemm_memory as memory
from tests.ops import test_moe_mlp_forms as forms
from tests.ops import test_moe_mlp_kernel as layers
from tests.ops import test_moe_mlp_kernel_graph as graph
from tests.support.mutants import plant
from tests.support.oracle import make_case

# a mutant on a GPU would end the process
pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="for the interpreter")
FLOAT, BF16 = torch.float32, torch.bfloat16
PLAIN, SHORT, TMA = Tile(16, 16, 32), Tile(16, 16, 16), Tile(16, 32, 32, TMA=True)
PERSISTENT = Tile(16, 32, 64, GROUP_M=2, PERSISTENT=True)
ONE = {"row": 1, "stride": 2**31 - 1}
TWO = {"row": 2, "stride": 2**30}


def up(tile=PLAIN, dtype=FLOAT, gated=True, act="gelu", bias=True):
    return kernels.test_up, {"tile": tile, "dtype": dtype, "gated": gated, "act": act, "bias": bias}


def product(tile=SHORT, dtype=FLOAT, k_last=True, bias=True):
    return kernels.test_product, {"tile": tile, "dtype": dtype, "k_last": k_last, "bias": bias}


def dz(tile=PLAIN, dtype=FLOAT, gated=True, act="silu", bias=False):
    return kernels.test_dz, {
        "tile": tile, "dtype": dtype, "gated": gated, "act": act, "bias": bias, "need_wh": True,
    }  # fmt: skip


def dw(gather="x", which="all", dtype=FLOAT):
    return kernels.test_weight_gradient, {"gather": gather, "which": which, "dtype": dtype}


def db(which="all"):
    return kernels.test_bias_gradient, {"gather": True, "weighted": True, "which": which, "dtype": FLOAT}


def layer(act="relu2", **sizes):
    case = make_case(**{"T": 9, "H": 33, "I": 17, "E": 3, "K": 2, "routing": "skip", "act": act, "bias": True} | sizes)
    return layers.check, {"case": case}


def dense(T=9, **sizes):
    return graph.test_dense_shared_expert, {"T": T, "E": 3, "K": 2, "sizes": {"bias": True} | sizes}


def form(act="quick_gelu", **parts):
    """A layer whose gate and up are clamped, shifted and in turns, or as `parts` say."""
    parts = parts or {"limit": 1, "up_offset": 1.0, "interleaved": True}
    return forms.test_parity, {"act": act, "form": parts, "dtype": FLOAT, "backend": "triton"}


def form_tiles(change=None, **tile):
    return forms.test_tiles, {"tile": PLAIN._replace(**tile), "change": change}


CLAMPED = {"limit": 1}  # gate first
ON_THE_LIMIT = (
    forms.test_a_value_on_the_limit_has_a_gradient_and_one_beyond_has_none,
    {"form": {}, "backend": "triton"},
)
FORM_DENSE = (forms.test_shared_expert_by_torchs_matmul, {"I": 272, "form": forms.GPT_OSS[1]})
FORM_STORED_BY_K = (forms.test_layouts, {
    "change": forms.layouts.transposed_weights, "act": "silu", "form": CLAMPED, "backend": "triton",
})  # fmt: skip
ORDER = (kernels.test_every_tile_is_computed_once, {"GROUP_M": 3})
APART = (kernels.test_trained_weights_lie_apart, {"k_last": True, "tma": True})
FIRST = (kernels.test_weight_gradients_in_front_stay_unwritten, {"first": 1})
NO_ROWS = (kernels.test_no_rows, {})
FROZEN = (layers.test_frozen_experts_get_zero_and_all_else_is_the_same, {"routing": "random"})
FAR_TOKENS, FAR_ROWS = (memory.test_token_rows, TWO), (memory.test_rows_in_expert_order, TWO)
FAR_EXPERT = (memory.test_experts, {"e": 2, "stride": 2**30, "apart": False})
FAR_PLACE = (memory.test_experts, {"e": 2, "stride": 2**30, "apart": True})
FAR_WEIGHT = (memory.test_rows_and_columns_of_a_weight, {"k_last": True} | TWO)
FAR_WEIGHT_T = (memory.test_rows_and_columns_of_a_weight, {"k_last": False} | TWO)
FAR_UP, FAR_Y, FAR_DZ = (
    (test, {})
    for test in (memory.test_rows_of_the_up_projection, memory.test_rows_of_the_product, memory.test_rows_of_dz)
)
FAR_PARTIAL, FAR_BIAS = (memory.test_partial_gradients_of_the_weights, {}), (memory.test_far_biases, {})
FAR_DW, FAR_DW_ROW = (memory.test_weight_gradient_of_a_far_expert, {}), (memory.test_far_rows_of_a_weight_gradient, {})


def run(check, monkeypatch, tolerance):
    """Run a test of another file with the fixtures that it asks for."""
    test, args = check
    wanted = inspect.signature(test).parameters
    if {"unfilled", "one_tile"} & wanted.keys():
        monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)
    if "one_tile" in wanted:
        memory.launch_one_tile(monkeypatch)
    torch.manual_seed(0)
    nothing = dict.fromkeys(("unfilled", "room", "one_tile"), lambda: None)
    fixtures = nothing | {
        "device": lambda: "cpu",
        "tolerance": lambda: tolerance,
        "rows": lambda: kernels.make_rows(kernels.COUNTS, kernels.DROPPED, kernels.SLOTS),
        "far_rows": memory.make_far_rows,
    }
    test(**args, **{name: make() for name, make in fixtures.items() if name in wanted})


def caught(check, monkeypatch, tolerance) -> bool:
    try:
        run(check, monkeypatch, tolerance)
    except AssertionError:
        return True
    except Exception as error:  # the interpreter wraps what its sanitizer raises
        if "KernelMemoryError" not in repr(error):
            raise
        return True
    return False


G, B, A, S, O = "grouped_gemm", "grouped_gemm_backward", "activation", "shared_expert", "moe_mlp_triton"
STORE, UP, GEMM = (f"{G}.{f}" for f in ("_store_activation", "_up_tile", "_gemm_tile"))
BLOCK, BASE, OPERAND = (f"{G}.{f}" for f in ("weight_block", "weight_base", "weight_operand"))
STORE_DZ, DZ, DW, DB = (f"{B}.{f}" for f in ("store_dz", "_dz_tile", "_grouped_gemm_bwd_w_kernel", "_bias_bwd_kernel"))
PRECISION, ROUND = "input_precision=PRECISION)", ".to(tl.bfloat16).to(tl.float32)"
MUTANTS = [  # module.function, what is there, what takes its place, the test that sees it, what it is
    # masks
    (UP, "live = m < rows_left", "live = m < BLOCK_M", up(), "rows of a tile's tail are gathered"),
    (UP, "k0 + k < H", "k0 + k <= H", up(), "one column of x too many"),
    (BLOCK, "(k < K)", "(k <= K)", up(), "one column of a weight too many"),
    (BLOCK, "(n < N)", "(n <= N)", up(), "one row of a weight too many"),
    (STORE, "(m < rows_left)", "(m <= rows_left)", up(), "one row of z and h too many"),
    (STORE, "(n < I)", "(n <= I)", up(), "one column of z and h too many"),
    (GEMM, "mask = (m < rows_left)[:, None]\n", "mask = (m >= 0)[:, None]\n", product(), "rows of a tile's tail are read"),
    (GEMM, "k0 + k < K", "k0 + k <= K", product(), "one column of the rows too many"),
    (GEMM, "(m < rows_left)[:, None] & (n", "(m <= rows_left)[:, None] & (n", product(), "one row of y too many"),
    (GEMM, "& (n < N)[None, :])", "& (n <= N)[None, :])", product(), "one column of y too many"),
    (GEMM, "mask=n < N", "mask=n <= N", product(), "one bias too many"),
    (DZ, "live = m < rows_left", "live = m < BLOCK_M", dz(), "rows of a tail in dz"),
    (DZ, "mask & (k0 + k < H)", "mask & (k0 + k <= H)", dz(), "one column of dout too many"),
    (DZ, "in_row = k0 + k < H", "in_row = k0 + k <= H", dz(bias=True), "one bias too many in the weight's gradient"),
    (STORE_DZ, "(n < I)", "(n <= I)", dz(), "one column of dz too many"),
    (STORE_DZ, "(m < rows_left)", "(m <= rows_left)", dz(), "one row of dz too many"),
    (DW, "live = k < end - row", "live = k <= end - row", dw(), "a row of the next expert"),
    (DW, "(n < K)", "(n <= K)", dw(), "one column of x too many in dw"),
    (DW, "(m < N)", "(m <= N)", dw(), "one row too many in dw"),
    (DB, "live = k < end - row", "live = k < BLOCK_K", db(), "rows of the next expert in a bias"),
    (DB, "mask=n < N", "mask=n <= N", db(), "one bias gradient too many"),
    # which rows, which tiles
    (UP, "// SLOTS", "// 1", up(), "slots taken for tokens"),
    (UP, "load(row_slot_ptr + row + m, mask=live, other=0)", "maximum(row + m, 0)", up(), "rows taken for slots"),
    (UP, "pid_m) - row", "pid_m) - row - 1", up(), "the last row of an expert"),
    (GEMM, "tl.load(map_ptr + 2 * num_m + pid_m) - row", "BLOCK_M", product(), "every tile taken for full"),
    (GEMM, "row = tl.load(map_ptr + num_m + pid_m)", "row = tl.load(map_ptr + num_m)", product(), "the first tile's rows"),
    (GEMM, "if e >= 0:", "if e >= -1:", product(), "tiles behind the map"),
    (GEMM, "a.load([row, k0])", "a.load([row + 1, k0])", product(TMA), "descriptor off by a row"),
    (GEMM, "a_ptr += BLOCK_K", "a_ptr += 0", product(), "the first block of the sum again and again"),
    (DW, "range(start, end, BLOCK_K)", "range(start, end - BLOCK_K + 1, BLOCK_K)", dw(), "the last rows of an expert"),
    (DW, "x_row = token", "x_row = at", dw(), "x not gathered"),
    (DW, "dy_row = token", "dy_row = at", dw("dy"), "dout not gathered"),
    (DB, "at = (slot // SLOTS)", "at = (slot // 1)", db(), "dout gathered by slot"),
    (DB, "acc += dy", "acc = dy", (kernels.test_bias_gradient_of_more_rows_than_a_block, {}), "one block of rows"),
    (f"{G}.grid", "triton.cdiv(N, tile.BLOCK_N)", "(N // tile.BLOCK_N)", product(), "the last columns"),
    (f"{G}._grouped_gemm_fwd_kernel", "tl.num_programs(0))", "tl.num_programs(0) + 1)", product(PERSISTENT), "persistent step"),
    (f"{B}._dz_kernel", "tl.range(tl.program_id(0),", "tl.range(0,", dz(PERSISTENT), "every program takes all tiles"),
    (f"{G}._grouped_gemm_fwd_kernel", "tl.cdiv(N, BLOCK_N), tl", "tl.cdiv(N, BLOCK_N) - 1, tl", ORDER, "persistent end"),
    ("tiles.tile_of", "% width % size", "% width // num_n", ORDER, "a tile twice, another never"),
    ("tiles.tile_of", "tl.minimum(num_m - first, GROUP_M)", "GROUP_M", ORDER, "groups of one size"),
    ("tiles.tile_of", "pid % width // size", "pid % num_n", ORDER, "columns and rows do not meet"),
    # which columns, which weight
    (UP, "_store_half(gate0, up0", "_store_half(up0, gate0", up(), "gate and up exchanged"),
    (UP, "gate0, gate1 = halves", "gate1, gate0 = halves", up(), "halves exchanged"),
    (f"{G}.halves", "2, BLOCK_N // 2)), (0, 2, 1)", "BLOCK_N // 2, 2)), (0, 1, 2)", up(), "columns dealt out"),
    (STORE, "tl.store(z + I, up", "tl.store(z + I, gate", up(), "z holds the gate twice"),
    (STORE, "h = h * shifted", "h = h + shifted", up(), "gate added"),
    (UP, "n0 + HALF, I", "n0, I", up(), "the right half written over the left"),
    (UP, "bias += e.to(tl.int64) * N", "bias += e.to(tl.int64) * 0", up(), "bias of the first expert"),
    (UP, "tl.load(bias + n + I", "tl.load(bias + n", up(), "bias of the gate for up"),
    (UP, "weight_block(base, e, I + n0", "weight_block(base, e, n0", up(), "the gate's weight for up"),
    (GEMM, "bias_ptr + e.to(tl.int64) * N", "bias_ptr + (e - 1).to(tl.int64) * N", product(), "bias of the neighbour"),
    (OPERAND, "strides if k_last else strides[::-1]", "strides", product(k_last=False), "strides not transposed"),
    (f"{G}.grouped_gemm_forward", "K % tile.BLOCK_K == 0", "True", product(), "a tail taken for whole blocks"),
    (f"{G}.up_forward", "H % tile.BLOCK_K == 0", "H % 8 == 0", up(), "a tail taken for whole blocks in up"),
    (BASE, "place < 0", "place <= 0", APART, "first trained weight never used"),
    (BASE, "place * stride_te", "e.to(tl.int64) * stride_te", APART, "trained weight of the expert's number"),
    # gradients
    (f"{A}.activate_grad", "s + value * (1 - s)", "s + value", dz(), "slope of silu"),
    (f"{A}.activate_grad", "cdf + x * 0.3989422804014327", "x * 0.3989422804014327", dz(act="gelu"), "slope of gelu"),
    (f"{A}.activate_grad", "3 * 0.044715", "0.044715", dz(act="gelu_tanh"), "slope of gelu_tanh"),
    (f"{A}.activate_grad", "2 * positive", "positive", layer("relu2"), "slope of relu2"),
    (f"{A}.activate_grad", "tl.where(x <= 0, 0.0, 1.0)", "tl.where(x <= 0, 0.1, 1.0)", layer("relu"), "a leaky relu"),
    (f"{A}.activate", "0.044715 * x", "0.0447 * x", up(act="gelu_tanh"), "a constant off by 15 millionths"),
    (STORE_DZ, "weighted = dh * weight[:, None]", "weighted = dh", dz(), "weight forgotten in dz"),
    (STORE_DZ, "weighted * slope", "weighted * weight[:, None] * slope", dz(), "weight twice in dz"),
    (STORE_DZ, "(value * weight[:, None])", "value", dz(), "weight forgotten in weight * h"),
    (STORE_DZ, "dh * value, 0.0", "weighted * value, 0.0", dz(), "weight in its own gradient"),
    (STORE_DZ, "slope = slope * up", "slope = slope", dz(), "up forgotten in the gate's gradient"),
    (STORE_DZ, "value = value * up", "value = value", dz(), "up forgotten in weight * h"),
    (DZ, "n1 = n0 + HALF", "n1 = n0", dz(), "the right half of dz written over the left"),
    (DZ, "dot += _store_dz_half(right", "dot = _store_dz_half(right", dz(), "half of the weight's gradient"),
    (DZ, "* num_n + pid_n, dot", "* num_n, dot", dz(), "every column tile in the first column of partial"),
    (DZ, "tl.where(pid_n == 0, H, 0)", "H", dz(bias=True), "bias once per column tile"),
    (DZ, "* H + k0 + k, mask", "* H + k, mask", dz(bias=True), "the first block of the bias again"),
    (DZ, "weight_ptr + slot,", "weight_ptr + slot // SLOTS,", dz(), "weight of another slot"),
    (DW, "if place >= 0:", "if (place >= 0) & (end > start):", dw(), "an idle expert's gradient not written"),
    (DW, "(row + k)", "(start + k)", dw(None), "the first block of rows again"),
    (f"{B}._segment", "tl.where(trained >= 0, end, start)", "end + 0 * trained", dw("x", "frozen"), "frozen experts"),
    (f"{B}._segment", "place = trained", "place = trained * 0 + e", dw("x", "compact"), "compact rows by expert"),
    (DW, "tl.program_id(1) + FIRST", "tl.program_id(1)", FIRST, "experts in front written"),
    (f"{B}.weight_backward", "== 0 or first == E", "== 0 or x.numel() == 0", NO_ROWS, "no rows, nothing written"),
    (DB, "weight_ptr + slot,", "weight_ptr + slot * 0,", db(), "the first weight for every row of a bias"),
    (f"{B}.bias_backward", "expert_offsets, trained, db", "expert_offsets, expert_offsets, db", db("frozen"), "frozen biases"),
    # clamped, shifted, in turns
    (f"{A}.activate", "1.702 * x", "1.7 * x", form(), "constant of quick_gelu"),
    (f"{A}.activate_grad", "s + 1.702 * value", "s + value", form(), "slope of quick_gelu"),
    (f"{A}.below", "tl.where(x > LIMIT, LIMIT, x)", "x", form(**CLAMPED), "the gate's clamp forgotten"),
    (f"{A}.below", "x > LIMIT", "tl.abs(x) > LIMIT", form(**CLAMPED), "the gate clamped from below"),
    (f"{A}.shifted", "up > LIMIT", "up > 9", form(**CLAMPED), "up's upper clamp forgotten"),
    (f"{A}.shifted", "up < -LIMIT", "up < -9", form(**CLAMPED), "up's lower clamp forgotten"),
    (f"{A}.shifted", "up + UP_OFFSET", "up", form(), "offset forgotten"),
    (f"{A}.shifted", "up = up + UP_OFFSET", "up = up * UP_OFFSET", form(up_offset=1.0), "offset multiplied"),
    (STORE_DZ, "gate <= LIMIT", "gate <= 9", form(**CLAMPED), "gradient through the gate's clamp"),
    (STORE_DZ, "up <= LIMIT", "up <= 9", form(**CLAMPED), "gradient through up's upper clamp"),
    (STORE_DZ, "up >= -LIMIT", "up >= -9", form(**CLAMPED), "gradient through up's lower clamp"),
    (STORE_DZ, "gate <= LIMIT", "gate < LIMIT", ON_THE_LIMIT, "no gradient on the gate's limit"),
    (STORE_DZ, "up <= LIMIT", "up < LIMIT", ON_THE_LIMIT, "no gradient on up's limit"),
    (STORE_DZ, "up >= -LIMIT", "up > -LIMIT", ON_THE_LIMIT, "no gradient on up's lower limit"),
    (STORE_DZ, "below(gate, LIMIT)", "gate", form(**CLAMPED), "slope and value at the gate as it came"),
    (STORE_DZ, "up = shifted(up, LIMIT, UP_OFFSET)", "up = up", form(), "up as it came in dz"),
    (STORE_DZ, "tl.join(dgate, dup)", "tl.join(dup, dgate)", form(), "dgate and dup exchanged"),
    (STORE_DZ, "c < width", "c < I", form(), "half of the columns of dz"),
    (STORE, "c < width", "c < I", form(), "half of the columns of z"),
    (STORE, "col0 * 2 + tl", "col0 + tl", form(), "z of the left half overwritten"),
    (STORE_DZ, "col0 * 2 + tl", "col0 + tl", form(), "dz of the left half again"),
    (STORE, "gate, up = pairs(gate", "up, gate = pairs(gate", form(), "up for gate where they take turns"),
    (f"{G}.pairs", "tl.reshape(tile, (BLOCK_M, BLOCK_N, 2))", "tl.permute(tl.reshape(tile, (BLOCK_M, 2, BLOCK_N)), (0, 2, 1))",
     form(), "in turns taken for gate first"),
    (UP, "c0 = pid_n * WIDTH", "c0 = pid_n * BLOCK_N", form_tiles(), "the first columns again"),
    (f"{G}._store_half", "bias + c + BLOCK_N", "bias + c", form(), "bias of the left piece"),
    (f"{G}._store_half", "c + BLOCK_N < I * 2", "c + BLOCK_N < I", form(), "half of the bias"),
    (f"{G}._store_half", "col0 + HALF", "col0", form(), "the right piece over the left"),
    (f"{B}._store_dz_half", "col0 + HALF", "col0", form(), "the right piece of dz over the left"),
    (f"{B}._store_dz_half", "dot += store_dz", "dot = store_dz", form(), "half of a half of the weight's gradient"),
    (f"{G}.last_contiguous", "not k_last", "k_last", FORM_STORED_BY_K, "a transposed stack summed along n"),
    (f"{S}._shared_activation_fwd_kernel", "(BLOCK_I * 2) +", "BLOCK_I +", FORM_DENSE, "the first block of the shared z"),
    (f"{S}._shared_activation_fwd_kernel", "gate, up = pairs", "up, gate = pairs", FORM_DENSE, "up for gate of the shared"),
    # rounding
    (GEMM, PRECISION, PRECISION + ROUND, product(dtype=BF16), "sum in bfloat16"),
    (UP, PRECISION, PRECISION + ROUND, up(dtype=BF16), "gate and up rounded in front of the activation"),
    (DZ, PRECISION, PRECISION + ROUND, dz(dtype=BF16), "dh rounded"),
    (DW, PRECISION, PRECISION + ROUND, dw(dtype=BF16), "dw summed in bfloat16"),
    (DB, "acc += dy", "acc += dy" + ROUND, db(), "bias gradient rounded"),
    # shared expert by torch's matmul
    (f"{O}.backward", "trained.to(torch.int32) - 1", "trained.to(torch.int32)", FROZEN, "frozen experts trained"),
    (f"{S}._shared_dz_kernel", "(SLOTS - 1)", "0", dense(), "weight of the first slot"),
    (f"{S}._shared_activation_fwd_kernel", "tl.load(z + I", "tl.load(z", dense(), "gate for up of the shared expert"),
    (f"{S}._shared_dz_kernel", "T - row", "T", dense(T=19), "rows behind the shared expert's"),
    (f"{O}.dz", "partial[:T, 0] +=", "partial[:T, 0] =", dense(), "bias alone in the shared weight's gradient"),
    (f"{O}.dw", "out=dw[0]", "out=dw[-1]", dense(), "dw of the last expert"),
    # beyond 2^31 elements
    (UP, "token.to(tl.int64)", "token", FAR_TOKENS, "int32: x"),
    (DZ, "(slot // SLOTS).to(tl.int64)", "(slot // SLOTS)", FAR_TOKENS, "int32: dout"),
    (DW, "// SLOTS).to(tl.int64)", "// SLOTS)", FAR_TOKENS, "int32: gathered rows of dw"),
    (DB, "(slot // SLOTS).to(tl.int64)", "(slot // SLOTS)", FAR_TOKENS, "int32: gathered rows of a bias"),
    (GEMM, "row.to(tl.int64) * stride_a", "row * stride_a", FAR_ROWS, "int32: first row of a tile"),
    (GEMM, "m[:, None].to(tl.int64) * stride_a", "m[:, None] * stride_a", FAR_ROWS, "int32: rows of a tile"),
    (DW, "at = (row + k).to(tl.int64)", "at = row + k", FAR_ROWS, "int32: rows of dw"),
    (DB, "at = (row + k).to(tl.int64)", "at = row + k", FAR_ROWS, "int32: rows of a bias"),
    (BASE, "return w + e.to(tl.int64) * stride_e", "return w + e * stride_e", FAR_EXPERT, "int32: expert"),
    (BASE, "tl.load(trained_ptr + e).to(tl.int64)", "tl.load(trained_ptr + e)", FAR_PLACE, "int32: trained expert"),
    (BLOCK, "n = (n0 + tl.arange(0, BLOCK_N)).to(tl.int64)", "n = n0 + tl.arange(0, BLOCK_N)", FAR_WEIGHT, "int32: n"),
    (BLOCK, "k = (k0 + tl.arange(0, BLOCK_K)).to(tl.int64)", "k = k0 + tl.arange(0, BLOCK_K)", FAR_WEIGHT_T, "int32: k"),
    (STORE, "row.to(tl.int64) * width", "row * width", FAR_UP, "int32: z"),
    (STORE, "row.to(tl.int64) * I", "row * I", FAR_UP, "int32: h"),
    (GEMM, "row.to(tl.int64) * N", "row * N", FAR_Y, "int32: y"),
    (GEMM, "m[:, None].to(tl.int64) * N", "m[:, None] * N", FAR_BIAS, "int32: rows of y in a tile"),
    (GEMM, "e.to(tl.int64) * N", "e * N", FAR_BIAS, "int32: bias"),
    (STORE_DZ, "row.to(tl.int64) * width", "row * width", FAR_DZ, "int32: z and dz"),
    (STORE_DZ, "row.to(tl.int64) * I", "row * I", FAR_DZ, "int32: weight * h"),
    (DZ, "row.to(tl.int64) + m", "row + m", FAR_PARTIAL, "int32: partial"),
    (DW, "place.to(tl.int64) * N", "place * N", FAR_DW, "int32: dw"),
    (DW, "m[:, None].to(tl.int64) * K", "m[:, None] * K", FAR_DW_ROW, "int32: rows of one dw"),
    (DB, "place.to(tl.int64) * N", "place * N", FAR_BIAS, "int32: gradient of a bias"),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("place, old, new, check", [pytest.param(*m[:4], id=m[4]) for m in MUTANTS])
def test_mutant_is_caught(place, old, new, check, tolerance, monkeypatch, tmp_path):
    plant(monkeypatch, tmp_path, place, old, new, (kernels, memory))
    assert caught(check, monkeypatch, tolerance)


CHECKS = {(m[3][0], str(m[3][1])): m[3] for m in MUTANTS}


@pytest.mark.slow
@pytest.mark.parametrize("check", CHECKS.values(), ids=lambda check: check[0].__name__)
def test_unharmed(check, tolerance, monkeypatch, tmp_path):
    plant(monkeypatch, tmp_path, "activation.activate", users=(kernels, memory))
    run(check, monkeypatch, tolerance)
