"""The backend "cuda": kernels of csrc/ with the names and signatures of the Triton launchers in
kernels/.

The file of each op states what its kernel computes; csrc/moert.h is the interface. Outputs are
allocated here, as the library allocates nothing, and no launch waits for the GPU. Any strides are
accepted; tensors are copied where the kernels need it.
"""

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from moe_runtime.config import GATES
from moe_runtime.native.library import cuda

MAX_EXPERTS = 1024  # limit of the route and dispatch kernels


class _Tiles(ctypes.Structure):
    """moert_tiles: one map of row tiles."""

    _fields_ = [
        ("map", ctypes.c_void_p),
        ("block_m", ctypes.c_int32),
        ("first_expert", ctypes.c_int32),
    ]


def fits(num_experts: int) -> bool:
    """Return whether the kernels of route and dispatch support this number of experts."""
    return num_experts <= MAX_EXPERTS


def check_experts(num_experts: int) -> None:
    """Raise ValueError for more experts than the kernels of route and dispatch support."""
    if not fits(num_experts):
        raise ValueError(
            f"num_experts must be at most {MAX_EXPERTS} for backend 'cuda', but got {num_experts}"
        )


def route_forward(
    router_logits: Tensor,
    bias: Tensor | None,
    top_k: int,
    gate: str,
    shared: int,
    topk_idx: Tensor | None = None,
    block_count: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Route `router_logits` [T, E], E >= 1 -> weights [T, top_k] float32, ids int32.

    `bias` is [E], `shared` 0 or 1. `topk_idx` [T, top_k] int32 are the ids if the caller has
    selected them. `block_count` of `new_block_count` is filled with the number of slots of each
    block of tokens for each expert, for `route_plan`.
    """
    T, E = router_logits.shape
    router_logits = _rows(router_logits)
    weight = router_logits.new_empty(T, top_k, dtype=torch.float32)
    if topk_idx is None:
        idx = router_logits.new_empty(T, top_k, dtype=torch.int32)
    else:
        idx = topk_idx.int().contiguous()
    if bias is not None:
        bias = bias.to(torch.float32).contiguous()
    cuda.launch(
        "moert_route_forward",
        router_logits,
        router_logits,
        _dtype(router_logits),
        router_logits.stride(0),
        bias,
        T,
        E,
        top_k,
        GATES.index(gate),
        int(topk_idx is not None),
        weight,
        idx,
        block_count,
    )
    return weight, idx


def new_block_count(router_logits: Tensor, shared: int) -> Tensor:
    """Return an uninitialized [blocks of tokens, E + shared] int32 for `route_forward`."""
    T, E = router_logits.shape
    return router_logits.new_empty(-(-T // block_tokens(T, E)), E + shared, dtype=torch.int32)


def block_tokens(T: int, E: int) -> int:
    """Return the number of tokens (of T) per row of `block_count`, for a router with E logits."""
    return cuda.library().handle.moert_route_block_tokens(T, E)


def route_backward(
    dweight: Tensor,
    router_logits: Tensor,
    topk_idx: Tensor,
    gate: str,
    shared: int,
    is_forced: bool = False,
) -> Tensor:
    """Return the gradient of `router_logits` [T, E] in their dtype from `dweight` [T, K]."""
    T, E = router_logits.shape
    K = topk_idx.shape[1]
    router_logits = _rows(router_logits)
    dweight = dweight.contiguous()
    dlogits = router_logits.new_empty(T, E)
    cuda.launch(
        "moert_route_backward",
        router_logits,
        dweight,
        _dtype(dweight),
        router_logits,
        _dtype(router_logits),
        router_logits.stride(0),
        topk_idx.int().contiguous(),
        T,
        E,
        K,
        GATES.index(gate),
        int(is_forced),
        dlogits,
    )
    return dlogits


def dispatch_forward(topk_idx: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Sort the slots of `topk_idx` [T, K] of integers -> the four arrays of `Dispatch`."""
    return route_plan(topk_idx, num_experts)[:4]


def route_plan(
    topk_idx: Tensor,
    num_experts: int,
    block_rows: Sequence[int] = (),
    first_expert: int = 0,
    block_count: Tensor | None = None,
    count_tokens: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor, list[Tensor]]:
    """Compute `dispatch_forward` and up to 4 `tile_map`s, of `block_rows`, in a single launch.

    `block_count` [blocks, E] contains the counts of `route_forward` for these ids, `count_tokens`
    is the tokens of a block.
    """
    idx, id_bytes = _index(topk_idx)
    R = idx.numel()
    E = num_experts
    K = topk_idx.shape[1]
    offsets = idx.new_empty(E + 1, dtype=torch.int32)
    rows = [idx.new_empty(R, dtype=torch.int32) for _ in range(3)]
    maps = _new_maps(offsets, R, block_rows)
    # with the router's counts, blocks need not count again
    if block_count is not None:
        workspace_bytes = 0
    else:
        workspace_bytes = cuda.library().handle.moert_route_plan_workspace(R, E)
    workspace = idx.new_empty(workspace_bytes, dtype=torch.uint8) if workspace_bytes else None
    cuda.launch(
        "moert_route_plan",
        idx,
        idx,
        id_bytes,
        R,
        E,
        K,
        block_count,
        count_tokens * K,
        offsets,
        *rows,
        _tiles(maps, block_rows, first_expert),
        len(maps),
        workspace,
        workspace_bytes,
    )
    row_token, row_slot, slot_row = rows
    return offsets, row_token, row_slot, slot_row, maps


def merge_experts_forward(
    weight: Tensor, alpha: Tensor, out: Tensor | None = None, seen: Tensor | None = None
) -> Tensor:
    """Compute sum_e alpha[e] weight[e] -> `out` [...], in weight's dtype unless given.

    `weight` is [E, ...], `alpha` [E] float32. With `seen` [E] float32 the kernel leaves `out`
    unchanged if alpha equals it, without synchronizing with the host.
    """
    weight, stride_e, P = _experts(weight)
    if out is None:
        out = weight.new_empty(weight.shape[1:])
    cuda.launch(
        "moert_merge_forward",
        weight,
        weight,
        _dtype(weight),
        alpha.contiguous(),
        seen,
        weight.shape[0],
        P,
        stride_e,
        out,
        _dtype(out),
    )
    return out


def merge_experts_backward_alpha(dout: Tensor, weight: Tensor) -> Tensor:
    """dalpha[e] = <dout, weight[e]>: `dout` [...], `weight` [E, ...] -> [E] float32."""
    weight, stride_e, P = _experts(weight)
    dout = dout.contiguous()
    E = weight.shape[0]
    dalpha = weight.new_empty(E, dtype=torch.float32)
    workspace_bytes = cuda.library().handle.moert_merge_backward_alpha_workspace(E, P)
    workspace = weight.new_empty(workspace_bytes, dtype=torch.uint8)
    cuda.launch(
        "moert_merge_backward_alpha",
        weight,
        dout,
        _dtype(dout),
        weight,
        _dtype(weight),
        E,
        P,
        stride_e,
        dalpha,
        workspace,
        workspace_bytes,
    )
    return dalpha


def combine_forward(
    y: Tensor, topk_weight: Tensor, slot_row: Tensor, num_rows: Tensor | None = None
) -> Tensor:
    """Sum each token's rows of `y` [R, H], times their weights -> [T, H] in y's dtype.

    `topk_weight` is [T, K] float32, `slot_row` [R] or [T, K] of integers. `num_rows` [1] int32 is
    read on the device: slots whose row is not below it contribute nothing, whatever their values.
    """
    T, K = topk_weight.shape
    H = y.shape[1]
    y = y.contiguous()
    slot_row, row_bytes = _index(slot_row)
    out = y.new_empty(T, H)
    weight = topk_weight.contiguous()
    cuda.launch(
        "moert_combine_forward",
        y,
        y,
        _dtype(y),
        weight,
        slot_row,
        row_bytes,
        num_rows,
        T,
        K,
        H,
        out,
    )
    return out


def combine_backward(
    dout: Tensor, y: Tensor, topk_weight: Tensor, slot_row: Tensor
) -> tuple[Tensor, Tensor]:
    """Return dy [R, H] in y's dtype and dweight [T, K] float32 from `dout` [T, H]."""
    if dout.dtype != y.dtype:  # autograd passes y's dtype
        dy, dweight = combine_backward(dout.float(), y.float(), topk_weight, slot_row)
        return dy.to(y.dtype), dweight
    T, K = topk_weight.shape
    H = y.shape[1]
    dout = dout.contiguous()
    y = y.contiguous()
    slot_row, row_bytes = _index(slot_row)
    weight = topk_weight.contiguous()
    dy = y.new_empty(y.shape)
    dweight = weight.new_empty(T, K)
    cuda.launch(
        "moert_combine_backward",
        y,
        dout,
        y,
        _dtype(y),
        weight,
        slot_row,
        row_bytes,
        T,
        K,
        H,
        dy,
        dweight,
    )
    return dy, dweight


def _dtype(tensor: Tensor) -> int:
    if tensor.dtype not in cuda.DTYPES:
        raise ValueError(
            f"dtype must be float32, float16 or bfloat16 for backend 'cuda', but got {tensor.dtype}"
        )
    return cuda.DTYPES[tensor.dtype]


def _index(index: Tensor) -> tuple[Tensor, int]:
    """Return `index` as contiguous int32 or int64, and its item size in bytes."""
    if index.dtype not in (torch.int32, torch.int64):
        index = index.int()
    return index.contiguous(), index.element_size()


def _rows(logits: Tensor) -> Tensor:
    """Return `logits` with contiguous rows; the row stride is arbitrary."""
    if logits.stride(1) == 1 or logits.shape[1] == 1:
        return logits
    return logits.contiguous()


def _experts(weight: Tensor) -> tuple[Tensor, int, int]:
    """Return `weight` with contiguous experts; the stride between experts is arbitrary, even 0."""
    if not weight[0].is_contiguous():
        weight = weight.contiguous()
    return weight, weight.stride(0), weight[0].numel()


def _new_maps(like: Tensor, R: int, block_rows: Sequence[int]) -> list[Tensor]:
    E = like.numel() - 1
    return [like.new_empty(3, R // rows + min(E, R)) for rows in block_rows]


def _tiles(maps: list[Tensor], block_rows: Sequence[int], first_expert: int) -> ctypes.Array:
    tiles = zip(maps, block_rows, strict=True)
    return (_Tiles * len(maps))(
        *(_Tiles(out.data_ptr(), rows, first_expert) for out, rows in tiles)
    )
