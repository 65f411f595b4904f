"""Choose K experts and their weights per token from router logits; and the gradient.

The equations are in `moe_runtime.ops.routing`. A program holds BLOCK_T rows of logits in registers.
Experts are chosen in K rounds over int32 keys that are ordered like the logits: the largest key,
and of equal ones the lowest id. A chosen expert's key becomes its slot, below the keys of all
logits.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from moe_runtime.kernels import compiling
from moe_runtime.kernels.compiling import named

compiling.install()

# most logits per warp. Most programs have one warp, so they need no barriers, and at T = 4096 every
# SM has a program
TILE = 512
DEAD = tl.constexpr(-(2**31))  # 2^23 below the key of -inf


@triton.jit
def _key(x):
    """int32 ordered like float32 `x`: -0.0 equals 0.0, and every NaN is the largest."""
    bits = x.to(tl.int32, bitcast=True)
    key = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    is_nan = (bits & 0x7FFFFFFF) > 0x7F800000
    return tl.where(is_nan, 0x7FFFFFFF, tl.where(key == -1, 0, key))


@triton.jit
def _column(
    idx_ptr,
    t,
    slot,
    T,
    K: tl.constexpr,
    SHARED: tl.constexpr,
):
    """Column [BLOCK_T, 1] of the logits of the expert in `slot` of tokens `t`."""
    at = idx_ptr + t * (K + SHARED) + slot
    expert = tl.load(at, mask=t < T, other=-1) - SHARED
    return expert[:, None]


@triton.jit
def _top(x, chosen, FORCED: tl.constexpr):
    """The largest chosen logit, which is the largest of all unless FORCED."""
    if FORCED:
        x = tl.where(chosen, x, -float("inf"))
    return tl.max(x, 1)


@triton.jit
def _sum_slots(value, chosen, count, FORCED: tl.constexpr):
    """Sum of `value` [BLOCK_T, E_PAD] over the slots; the caller may repeat an expert."""
    if FORCED:
        value = value * count
    return tl.sum(tl.where(chosen, value, 0.0), 1)


@triton.jit
def _per_slot(value, count, FORCED: tl.constexpr):
    """`value` once for each slot of an expert."""
    if FORCED:
        value = value * count
    return value


class Route(NamedTuple):
    """Constants of a router."""

    STRIDE_T: int  # of the logits; constant, as its divisors determine the width of loads
    E: int  # routed experts
    K: int  # routed experts per token
    SHARED: int  # 1 if there is a shared expert, else 0
    GATE: str
    FORCED: bool  # the caller chose the experts
    BLOCK_T: int
    E_PAD: int  # E, rounded up to a power of two


@triton.jit
def route_rows(
    first_token,
    logits_ptr,
    bias_ptr,
    weight_ptr,
    idx_ptr,
    T,
    ROUTE: tl.constexpr,
):
    """Route BLOCK_T tokens from `first_token` (int64) on; see `_route_fwd_kernel`."""
    E: tl.constexpr = ROUTE.E
    K: tl.constexpr = ROUTE.K
    SHARED: tl.constexpr = ROUTE.SHARED
    GATE: tl.constexpr = ROUTE.GATE
    FORCED: tl.constexpr = ROUTE.FORCED
    BLOCK_T: tl.constexpr = ROUTE.BLOCK_T
    E_PAD: tl.constexpr = ROUTE.E_PAD
    t = first_token + tl.arange(0, BLOCK_T)
    e = tl.arange(0, E_PAD)[None, :]
    mask = (t < T)[:, None] & (e < E)
    row_ptr = logits_ptr + (t * ROUTE.STRIDE_T)[:, None]
    x = tl.load(row_ptr + e, mask=mask, other=0.0)
    x = x.to(tl.float32)
    x = tl.where(e < E, x, -float("inf"))
    if bias_ptr is None:
        choice = x
    else:
        score = tl.sigmoid(x)
        choice = score + tl.load(bias_ptr + e, mask=e < E, other=0.0)
    if FORCED:
        key = None
        count = tl.zeros([BLOCK_T, E_PAD], tl.float32)
        for slot in range(K):
            here = e == _column(
                idx_ptr,
                t,
                slot,
                T,
                K,
                SHARED,
            )
            count += tl.where(here, 1.0, 0.0)
        chosen = count > 0
    else:
        count = None
        key = tl.where(e < E, _key(choice), DEAD + E_PAD)
        for slot in range(K):
            best = tl.max(key, 1)
            first = tl.min(tl.where(key == best[:, None], e, E_PAD), 1)
            key = tl.where(e == first[:, None], DEAD + slot, key)
        chosen = key < DEAD + K
    if GATE == "sigmoid_topk":
        weight = tl.sigmoid(x)
    elif (GATE == "topk_softmax") | (GATE == "softmax_topk_renorm"):
        top = _top(x, chosen, FORCED)
        exp = tl.exp(x - top[:, None])
        total = _sum_slots(exp, chosen, count, FORCED)
        weight = exp / total[:, None]
    else:
        top = tl.max(x, 1)
        exp = tl.exp(x - top[:, None])
        largest = 1 / tl.sum(exp, 1)  # probability
        weight = exp * largest[:, None]
        if FORCED:
            is_first = e == _column(
                idx_ptr,
                t,
                0,
                T,
                K,
                SHARED,
            )
            largest = tl.sum(tl.where(is_first, weight, 0.0), 1)
        if GATE == "xft":
            exp = tl.exp(weight)
            factor = largest / _sum_slots(exp, chosen, count, FORCED)
            weight = exp * factor[:, None]
    base = first_token * (K + SHARED)
    weight_ptr += base
    slots = tl.arange(0, BLOCK_T) * (K + SHARED)
    if FORCED:
        for slot in range(K):
            here = e == _column(
                idx_ptr,
                t,
                slot,
                T,
                K,
                SHARED,
            )
            at = weight_ptr + slots + slot
            value = tl.sum(tl.where(here, weight, 0.0), 1)
            tl.store(at, value, mask=t < T)
    idx_ptr += base
    if not FORCED:
        out = tl.where(mask & chosen, slots[:, None] + (key & 0x7FFFFFFF), -1)
        tl.store(weight_ptr + out, weight, mask=out >= 0)
        at = idx_ptr + out
        experts = e + SHARED + tl.zeros([BLOCK_T, 1], tl.int32)
        tl.store(at, experts, mask=out >= 0)
    if SHARED:
        tl.store(weight_ptr + slots + K, 1 - largest, mask=t < T)
        if not FORCED:
            at = idx_ptr + slots + K
            tl.store(at, tl.zeros([BLOCK_T], tl.int32), mask=t < T)


@triton.jit(do_not_specialize=["T"], repr=named("route_fwd", "ROUTE"))
def _route_fwd_kernel(
    logits_ptr,  # [T, E], any float
    bias_ptr,  # [E] float32 or None
    weight_ptr,  # [T, K + SHARED] float32
    idx_ptr,  # [T, K + SHARED] int32, written; read instead if FORCED
    T,
    ROUTE: tl.constexpr,  # Route
):
    first_token = tl.program_id(0).to(tl.int64) * ROUTE.BLOCK_T
    route_rows(
        first_token,
        logits_ptr,
        bias_ptr,
        weight_ptr,
        idx_ptr,
        T,
        ROUTE,
    )


@triton.jit(do_not_specialize=["T"], repr=named("route_bwd", "ROUTE"))
def _route_bwd_kernel(
    dweight_ptr,  # [T, K + SHARED], any float
    logits_ptr,  # [T, E], any float
    idx_ptr,  # [T, K + SHARED] int32
    dlogits_ptr,  # [T, E], dtype of logits
    T,
    ROUTE: tl.constexpr,  # Route
):
    E: tl.constexpr = ROUTE.E
    K: tl.constexpr = ROUTE.K
    SHARED: tl.constexpr = ROUTE.SHARED
    GATE: tl.constexpr = ROUTE.GATE
    FORCED: tl.constexpr = ROUTE.FORCED
    BLOCK_T: tl.constexpr = ROUTE.BLOCK_T
    E_PAD: tl.constexpr = ROUTE.E_PAD
    t = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    row = t < T
    e = tl.arange(0, E_PAD)[None, :]
    mask = row[:, None] & (e < E)
    row_ptr = logits_ptr + (t * ROUTE.STRIDE_T)[:, None]
    x = tl.load(row_ptr + e, mask=mask, other=0.0)
    x = tl.where(e < E, x.to(tl.float32), -float("inf"))
    d = tl.zeros([BLOCK_T, E_PAD], tl.float32)
    slot_of = tl.full([BLOCK_T, E_PAD], K, tl.int32)
    count = None
    if FORCED:
        # slots per expert: the caller may repeat one
        count = tl.zeros([BLOCK_T, E_PAD], tl.float32)
    slots = t * (K + SHARED)
    for slot in range(K):
        here = e == _column(
            idx_ptr,
            t,
            slot,
            T,
            K,
            SHARED,
        )
        dw = tl.load(dweight_ptr + slots + slot, mask=row, other=0.0)
        dw = dw.to(tl.float32)
        if FORCED:
            d += tl.where(here, dw[:, None], 0.0)
            count += tl.where(here, 1.0, 0.0)
        else:
            d = tl.where(here, dw[:, None], d)
        slot_of = tl.where(here, slot, slot_of)
    chosen = slot_of < K
    if FORCED:
        is_first = e == _column(
            idx_ptr,
            t,
            0,
            T,
            K,
            SHARED,
        )
    else:
        is_first = slot_of == 0
    if GATE == "sigmoid_topk":
        s = tl.sigmoid(x)
        dx = tl.where(chosen, d * s * (1 - s), 0.0)
    elif (GATE == "topk_softmax") | (GATE == "softmax_topk_renorm"):
        top = _top(x, chosen, FORCED)
        y = tl.exp(x - top[:, None])
        total = _sum_slots(y, chosen, count, FORCED)
        y = tl.where(chosen, y / total[:, None], 0.0)
        mean = tl.sum(y * d, 1)
        dx = y * (d - _per_slot(mean[:, None], count, FORCED))
        dx = tl.where(y == 0, 0.0, dx)  # for experts not chosen, even in a row of NaN
    else:
        top = tl.max(x, 1)
        y = tl.exp(x - top[:, None])
        largest = 1 / tl.sum(y, 1)
        y = y * largest[:, None]
        if FORCED:
            largest = tl.sum(tl.where(is_first, y, 0.0), 1)
        if GATE == "xft":
            q = tl.where(chosen, tl.exp(y), 0.0)
            total = _sum_slots(q, chosen, count, FORCED)
            q = q / total[:, None]
            mean = tl.sum(q * d, 1)
            d = largest[:, None] * q * (d - _per_slot(mean[:, None], count, FORCED))
            d = tl.where(is_first, d + mean[:, None], d)
        if SHARED:
            dshared = tl.load(dweight_ptr + slots + K, mask=row, other=0.0)
            dshared = dshared.to(tl.float32)
            d = tl.where(is_first, d - dshared[:, None], d)
        mean = tl.sum(y * d, 1)
        dx = y * (d - mean[:, None])
    at = dlogits_ptr + (t * E)[:, None] + e
    dx = dx.to(dlogits_ptr.dtype.element_ty)
    tl.store(at, dx, mask=mask)


def route_forward(
    router_logits: torch.Tensor,
    bias: torch.Tensor | None,
    top_k: int,
    gate: str,
    shared: int,
    topk_idx: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`router_logits` [T, E], `bias` [E] -> weights [T, top_k] float32, ids [T, top_k] int32.

    E is at least 1, `shared` is 0 or 1. `topk_idx` [T, top_k] int32 are the ids if the caller
    chose them.

    Grid: blocks of BLOCK_T tokens, one per program. T E elements are read, 2 T top_k written.
    """
    T = router_logits.shape[0]
    router_logits = route_operand(router_logits)
    weight = torch.empty(T, top_k, dtype=torch.float32, device=router_logits.device)
    if topk_idx is None:
        idx = torch.empty(T, top_k, dtype=torch.int32, device=router_logits.device)
    else:
        idx = topk_idx.contiguous()
    if bias is not None:
        bias = bias.to(torch.float32).contiguous()
    if T:
        route = route_of(router_logits, top_k, gate, shared, topk_idx is not None)
        with torch.cuda.device_of(router_logits):
            _route_fwd_kernel[(triton.cdiv(T, route.BLOCK_T),)](
                router_logits,
                bias,
                weight,
                idx,
                T,
                ROUTE=route,
                **options_of(route),
            )
    return weight, idx


def route_backward(
    dweight: torch.Tensor,
    router_logits: torch.Tensor,
    topk_idx: torch.Tensor,
    gate: str,
    shared: int,
    is_forced: bool = False,
) -> torch.Tensor:
    """`dweight` [T, K], `router_logits` [T, E], `topk_idx` [T, K] -> dlogits [T, E].

    Grid: as in `route_forward`. T (E + 2 K) elements are read, T E written.
    """
    T, E = router_logits.shape
    router_logits = route_operand(router_logits)
    dlogits = torch.empty(T, E, dtype=router_logits.dtype, device=router_logits.device)
    if T:
        route = route_of(router_logits, topk_idx.shape[1], gate, shared, is_forced)
        with torch.cuda.device_of(router_logits):
            _route_bwd_kernel[(triton.cdiv(T, route.BLOCK_T),)](
                dweight.contiguous(),
                router_logits,
                topk_idx.contiguous(),
                dlogits,
                T,
                ROUTE=route,
                **options_of(route),
            )
    return dlogits


def route_operand(logits: torch.Tensor) -> torch.Tensor:
    """Return the logits with contiguous rows, at any stride."""
    return logits if logits.stride(1) == 1 or logits.shape[1] == 1 else logits.contiguous()


def route_of(logits: torch.Tensor, top_k: int, gate: str, shared: int, forced: bool) -> Route:
    """Return the constants of a launch, with as many tokens per program as its registers allow."""
    E = logits.shape[1]
    E_PAD = triton.next_power_of_2(E)
    # with as many rows as lanes, Triton moves loads in the backward kernel's loop through shared
    # memory; 16 rows of 16 may spill
    BLOCK_T = max(1, min(16 if E_PAD <= 8 else 8, TILE // E_PAD))
    return Route(
        logits.stride(0),
        E,
        top_k - shared,
        shared,
        gate,
        forced,
        BLOCK_T,
        E_PAD,
    )


def options_of(route: Route) -> dict:
    """Return the options of a launch."""
    return {"num_warps": min(16, max(1, route.E_PAD // TILE)), "enable_fp_fusion": True}
