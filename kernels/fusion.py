"""Mix specialists' logits tile by tile, with the softmax's sums in the epilogue.

The equations are in `moe_runtime.ops.fusion`. A specialist's logits are never stored, the mixed
ones only if their gradient is needed. What a row's softmax needs from each tile (highest logit, sum
of exp, expectations) is stored in `partial`, 2 + S numbers for BLOCK_N logits.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from moe_runtime.kernels.compiling import named
from moe_runtime.kernels.tiles import (
    SHARED_MEMORY,
    arch_of,
    cells,
    nearest,
    outer,
    precision,
    tile_of,
)

ROWS = 8192  # tokens whose partial sums are in memory at a time
BLOCK_V = 4096


class FusionTile(NamedTuple):
    """A launch config: BLOCK_M tokens by BLOCK_N ids, BLOCK_K along a specialist's width."""

    BLOCK_M: int
    BLOCK_N: int
    BLOCK_K: int
    num_warps: int
    num_stages: int
    PRECISION: str  # of float32 operands
    GROUP_M: int = 8  # row tiles that iterate over the ids together


class FusedSums(NamedTuple):
    """Outputs of the forward kernel."""

    logits: torch.Tensor | None  # [T, V] float32
    # [2, or 2 + S if EXPECT, T, tiles] float32: highest logit, sum of exp, and of exp times o_s
    partial: torch.Tensor
    # [T, 1, or 1 + S if EXPECT] float32: the label's logit, and o_s of it; only for valid labels
    target: torch.Tensor


@triton.jit
def _logits_of(
    hidden_ptr,
    head_ptr,
    t,
    v,
    T,
    V,
    H: tl.constexpr,
    TILE: tl.constexpr,
):
    """One specialist's logits [BLOCK_M, BLOCK_N] of tokens t and ids v; 0 outside."""
    BLOCK_M: tl.constexpr = TILE.BLOCK_M
    BLOCK_N: tl.constexpr = TILE.BLOCK_N
    BLOCK_K: tl.constexpr = TILE.BLOCK_K
    k = tl.arange(0, BLOCK_K)
    hidden = hidden_ptr + cells(t.to(tl.int64), H, k)
    head = head_ptr + (v.to(tl.int64)[None, :] * H + k[:, None])
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k0 in range(0, H, BLOCK_K):
        rows = (t < T)[:, None]
        columns = (v < V)[None, :]
        if H % BLOCK_K != 0:
            rows = rows & (k0 + k < H)[None, :]
            columns = columns & (k0 + k < H)[:, None]
        a = tl.load(hidden, mask=rows, other=0.0)
        b = tl.load(head, mask=columns, other=0.0)
        acc = tl.dot(a, b, acc, input_precision=TILE.PRECISION)
        hidden += BLOCK_K
        head += BLOCK_K
    return acc


@triton.jit(do_not_specialize=["T"], repr=named("fused_logits_fwd", "TILE", "S"))
def _fused_logits_fwd_kernel(
    hidden_ptrs,  # S of [T, SIZES[s]], one float dtype
    head_ptrs,  # S of [V or more, SIZES[s]], the same dtype
    gate_ptr,  # [T, S] float32
    labels_ptr,  # [T] int32 or int64
    out,  # FusedSums
    T,
    V,
    tiles,
    S: tl.constexpr,
    SIZES: tl.constexpr,
    EXPECT: tl.constexpr,
    TILE: tl.constexpr,  # FusionTile
):
    tl.static_assert(TILE.BLOCK_M >= 16 and TILE.BLOCK_N >= 16, "a tile must be at least 16x16")
    tl.static_assert(TILE.BLOCK_K >= 16, "tl.dot requires BLOCK_K >= 16")
    BLOCK_M: tl.constexpr = TILE.BLOCK_M
    BLOCK_N: tl.constexpr = TILE.BLOCK_N
    tile_m, tile_n = tile_of(tl.program_id(0), tl.cdiv(T, BLOCK_M), tiles, TILE.GROUP_M)
    t = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    v = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    row = t.to(tl.int64)
    live = t < T
    logits = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    parts = ()
    for s in tl.static_range(S):
        part = _logits_of(
            hidden_ptrs[s],
            head_ptrs[s],
            t,
            v,
            T,
            V,
            SIZES[s],
            TILE,
        )
        if EXPECT:
            parts = parts + (part,)
        else:
            weight = tl.load(gate_ptr + row * S + s, mask=live, other=0.0)
            logits += weight[:, None] * part
    if EXPECT:  # mixed after the loops, which then need one accumulator less
        for s in tl.static_range(S):
            weight = tl.load(gate_ptr + row * S + s, mask=live, other=0.0)
            logits += weight[:, None] * parts[s]
    if out.logits is not None:
        at = out.logits + cells(row, V, v)
        tl.store(at, logits, mask=outer(live, v < V))
    logits = tl.where((v < V)[None, :], logits, float("-inf"))
    top = tl.max(logits, 1)
    p = tl.exp(logits - top[:, None])
    label = tl.load(labels_ptr + row, mask=live, other=-1)
    hit = v[None, :] == label[:, None]
    known = live & (label >= tile_n * BLOCK_N) & (label < tl.minimum(tile_n * BLOCK_N + BLOCK_N, V))
    partial = out.partial + row * tiles + tile_n
    field = T.to(tl.int64) * tiles
    WIDTH: tl.constexpr = 1 + S if EXPECT else 1
    target = out.target + row * WIDTH
    tl.store(partial, top, mask=live)
    tl.store(partial + field, tl.sum(p, 1), mask=live)
    tl.store(target, tl.sum(tl.where(hit, logits, 0.0), 1), mask=known)
    if EXPECT:
        for s in tl.static_range(S):
            mean = partial + field * (2 + s)
            tl.store(mean, tl.sum(p * parts[s], 1), mask=live)
            logit = target + 1 + s
            tl.store(logit, tl.sum(tl.where(hit, parts[s], 0.0), 1), mask=known)


@triton.jit(repr=named("fused_logits_bwd"))
def _fused_logits_bwd_kernel(
    logits_ptr,  # [T, V] float32
    lse_ptr,  # [T] float32
    scale_ptr,  # [T] float32: gradient of the token's loss
    labels_ptr,  # [T] int32 or int64
    dlogits_ptr,  # [T, V], any float; may be logits_ptr
    V,
    BLOCK_V: tl.constexpr,
):
    t = tl.program_id(0).to(tl.int64)
    v = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    logits = tl.load(logits_ptr + (t * V + v), mask=v < V, other=0.0)
    scale = tl.load(scale_ptr + t)
    p = tl.exp(logits - tl.load(lse_ptr + t))
    dlogits = tl.where(v == tl.load(labels_ptr + t), p - 1, p) * scale
    # 0 for an ignored token, even if its logits overflow
    dlogits = tl.where(scale == 0, 0.0, dlogits)
    at = dlogits_ptr + (t * V + v)
    dlogits = dlogits.to(dlogits_ptr.dtype.element_ty)
    tl.store(at, dlogits, mask=v < V)


@triton.jit(do_not_specialize=["T"], repr=named("fused_hidden_bwd"))
def _fused_hidden_bwd_kernel(
    dx_ptr,  # [T, H]: dlogits times one specialist's head
    hidden_ptr,  # [T, H]
    gate_ptr,  # [T] float32, stride_gate apart
    dgate_ptr,  # [T] float32, stride_gate apart
    dhidden_ptr,  # [T, H] or None: gate * dx
    scaled_ptr,  # [T, H] or None: gate * hidden
    T,
    H,
    stride_gate,
    BLOCK_T: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    row = t.to(tl.int64)
    live = t < T
    gate = tl.load(gate_ptr + row * stride_gate, mask=live, other=0.0)
    total = tl.zeros([BLOCK_T], tl.float32)
    for h0 in range(0, H, BLOCK_H):
        h = h0 + tl.arange(0, BLOCK_H)
        mask = outer(live, h < H)
        at = cells(row, H, h)
        dx = tl.load(dx_ptr + at, mask=mask, other=0.0).to(tl.float32)
        hidden = tl.load(hidden_ptr + at, mask=mask, other=0.0).to(tl.float32)
        total += tl.sum(dx * hidden, 1)
        if dhidden_ptr is not None:
            dhidden = dhidden_ptr + at
            value = gate[:, None] * dx
            tl.store(dhidden, value.to(dhidden_ptr.dtype.element_ty), mask=mask)
        if scaled_ptr is not None:
            scaled = scaled_ptr + at
            value = gate[:, None] * hidden
            tl.store(scaled, value.to(scaled_ptr.dtype.element_ty), mask=mask)
    tl.store(dgate_ptr + row * stride_gate, total, mask=live)


def fused_loss_forward(
    gate: torch.Tensor,
    labels: torch.Tensor,
    hidden: list[torch.Tensor],
    heads: list[torch.Tensor],
    V: int,
    ignore_index: int,
    need_score: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the loss of each token [T] and its gradient in the gate's weights [T, S], float32.

    The gradient is [0] unless `need_score`. `gate` [T, S] float32, `labels` [T], `hidden` S of
    [T, H_s], `heads` S of [V or more, H_s]. `_forward` describes the launch.
    """
    T, S = gate.shape
    nll = gate.new_empty(T)
    score = gate.new_empty((T, S) if need_score else 0)
    for start in range(0, T, ROWS):
        rows = slice(start, start + ROWS)
        outputs = _forward(
            gate[rows],
            labels[rows],
            [h[rows] for h in hidden],
            heads,
            V,
            ignore_index,
            need_score,
        )
        nll[rows] = outputs[0]
        if need_score:
            score[rows] = outputs[2]
    return nll, score


def fused_logits_backward(
    gate: torch.Tensor,
    labels: torch.Tensor,
    scale: torch.Tensor,
    hidden: list[torch.Tensor],
    heads: list[torch.Tensor],
    V: int,
    ignore_index: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the loss of each token [T], and the gradient of `scale` times it in the logits [T, V].

    Grid of the second launch: a token by BLOCK_V ids; T V logits are read and written.
    """
    logits = gate.new_empty(gate.shape[0], V)
    nll, lse, _ = _forward(
        gate,
        labels,
        hidden,
        heads,
        V,
        ignore_index,
        False,
        logits,
    )
    dlogits = (
        logits
        if hidden[0].dtype == logits.dtype
        else torch.empty_like(logits, dtype=hidden[0].dtype)
    )
    with torch.cuda.device_of(gate):  # Triton launches on the current device
        _fused_logits_bwd_kernel[(gate.shape[0], triton.cdiv(V, BLOCK_V))](
            logits,
            lse,
            scale.contiguous(),
            labels.contiguous(),
            dlogits,
            V,
            BLOCK_V=BLOCK_V,
            num_warps=8,
            enable_fp_fusion=True,
        )
    return nll, dlogits


def fused_hidden_backward(
    dx: torch.Tensor,
    hidden: torch.Tensor,
    gate: torch.Tensor,
    dgate: torch.Tensor,
    dhidden: torch.Tensor | None,
    scaled: torch.Tensor | None,
) -> None:
    """Write <dx, hidden> to `dgate` [T], gate * dx to `dhidden`, gate * hidden to `scaled`.

    `gate` and `dgate` are columns of tensors [T, S] float32 with the same strides. Grid: blocks of
    8 tokens; a program loops over their columns. 2 T H elements are read, 2 T H written.
    """
    T, H = dx.shape
    assert gate.stride() == dgate.stride()
    with torch.cuda.device_of(dx):
        _fused_hidden_bwd_kernel[(triton.cdiv(T, 8),)](
            dx,
            hidden,
            gate,
            dgate,
            dhidden,
            scaled,
            T,
            H,
            gate.stride(0),
            BLOCK_T=8,
            BLOCK_H=min(512, triton.next_power_of_2(H)),
            num_warps=4,
            # a product fused with the sum over lanes would give each lane another last bit
            enable_fp_fusion=False,
        )


def _forward(
    gate,
    labels,
    hidden,
    heads,
    V,
    ignore_index,
    need_score,
    logits=None,
    config=None,
):
    """Return loss, log of the softmax's sum, and gradient in the gate's weights or None.

    For the tokens of one pass. `config` overrides `fusion_config`.

    Grid: the tiles of [T, V], in groups of GROUP_M row tiles. A program multiplies BLOCK_M tokens
    by BLOCK_N ids, one specialist after the other. At least the states and the heads are read; the
    states are loaded cdiv(V, BLOCK_N) times and the heads cdiv(T, BLOCK_M) times from L2 or memory.
    T V float32 logits, if requested, and (2 + S) T cdiv(V, BLOCK_N) sums are written.
    """
    T, S = gate.shape
    sizes = tuple(h.shape[1] for h in hidden)
    x = hidden[0]
    if config is None:
        config = fusion_config(arch_of(x.device), x.dtype, precision(x), sizes, need_score)
    tiles = triton.cdiv(V, config.BLOCK_N)
    partial = gate.new_empty(2 + S * need_score, T, tiles)
    # NaN for an invalid label, and so is its loss: checking would wait for the GPU
    target = gate.new_full((T, 1 + S * need_score), float("nan"))
    out = FusedSums(logits, partial, target)
    operands = (tuple(h.contiguous() for h in hidden), tuple(head.contiguous() for head in heads))
    with torch.cuda.device_of(x):
        _fused_logits_fwd_kernel[(triton.cdiv(T, config.BLOCK_M) * tiles,)](
            *operands,
            gate.contiguous(),
            labels.contiguous(),
            out,
            T,
            V,
            tiles,
            S=S,
            SIZES=sizes,
            EXPECT=need_score,
            TILE=config,
            num_warps=config.num_warps,
            num_stages=config.num_stages,
            enable_fp_fusion=True,
        )
    top = partial[0].amax(1, keepdim=True)
    share = (partial[0] - top).exp_()
    total = (partial[1] * share).sum(1)
    lse = top[:, 0] + total.log()
    valid = labels != ignore_index
    nll = torch.where(valid, lse - target[:, 0], 0.0)
    if not need_score:
        return nll, lse, None
    mean = (partial[2:] * share).sum(2) / total
    return nll, lse, torch.where(valid[:, None], mean.t() - target[:, 1:], 0.0)


def fusion_config(
    arch: int, dtype: torch.dtype, precision: str, sizes: tuple[int, ...], expect: bool
) -> FusionTile:
    """Return the forward kernel's launch config on sm_`arch` (0: the interpreter).

    With expectations every specialist has an accumulator besides that of the mixed logits, so more
    specialists need narrower tiles.
    """
    rows = 128
    wide = 64
    if expect:
        rows = 64
        wide = min(128, max(16, 512 // triton.next_power_of_2(len(sizes) + 1)))
    if arch == 0:
        return FusionTile(
            16,
            32,
            32,
            4,
            1,
            precision,
        )
    if dtype == torch.float32 or any(size % 16 for size in sizes):
        # unaligned loads are element by element, and the pointers of a wide tile spill
        return FusionTile(
            64,
            min(wide, 64),
            32,
            8,
            2,
            precision,
        )
    if SHARED_MEMORY[nearest(arch)] < 128 << 10:
        return FusionTile(
            rows,
            min(wide, 64),
            32,
            8,
            4,
            precision,
        )
    if expect or nearest(arch) == 80:
        return FusionTile(
            rows,
            wide,
            64,
            8,
            4,
            precision,
        )
    return FusionTile(
        128,
        128,
        64,
        8,
        4,
        precision,
    )
