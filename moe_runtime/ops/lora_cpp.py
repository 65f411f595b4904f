"""The cpp backend of `lora_mlp`'s mixed activation: csrc/cpu/lora.h, one call per pass.

A row is a pair of a token and an expert that it selected. The rows' values are summed per token as
they are computed; only the backward pass holds them, for some tokens at a time.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from moe_runtime.native.library import cpp
from moe_runtime.ops.lora_torch import (
    MixedGradients,
    Pairs,
    chosen_experts,
    mixed_weight,
    wide_zeros,
)
from moe_runtime.ops.moe_mlp_cpp import address
from moe_runtime.ops.workspace import scratch


class _Rows(NamedTuple):
    """Rows by expert, then by token."""

    offsets: Tensor  # [E + 1] int32
    token: Tensor  # [rows] int32
    expert: Tensor  # [rows]
    weight: Tensor  # [rows]

    @classmethod
    def of(cls, i: Any, T: int) -> "_Rows":
        chosen = chosen_experts(i.topk_idx, T, i.E)
        expert, token = chosen.t().nonzero().unbind(1)
        offsets = torch.zeros(i.E + 1, dtype=torch.int32)
        rows_of = chosen.sum(0)
        offsets[1:] = rows_of.cumsum(0)
        weight = mixed_weight(i.topk_weight, i.topk_idx, i.E)
        return cls(offsets, token.to(torch.int32), expert, weight[token, expert])


def _call(
    name: str, i: Any, z: Tensor, pairs: Pairs, low: Tensor, rows: _Rows, *rest: Tensor | None
) -> None:
    """Call the library's function `name`; `rest` are the tensors after the scratch memory."""
    T, Z = z.shape
    most = i.E
    if i.topk_idx is not None:
        most = min(i.topk_idx.shape[1], i.E)
    sizes = (T, Z // 2, i.E, low.shape[2] // i.E, most)
    dtype = cpp.DTYPES[z.dtype]
    threads = torch.get_num_threads()
    handle = cpp.library().handle
    size = handle.moert_cpu_lora_bytes(dtype, *sizes, name.endswith("backward"), threads)
    space = scratch("one call", (size,), z, torch.uint8)
    halves = (pairs.gate_b, pairs.up_b, pairs.down_a)
    getattr(handle, name)(
        dtype,
        cpp.ACTS[i.act],
        i.scaling,
        *map(address, (z, low, *halves, rows.offsets, rows.token, rows.weight)),
        *sizes,
        space.data_ptr(),
        *map(address, rest),
        threads,
    )


def mixed(i: Any, z: Tensor, pairs: Pairs, low: Tensor) -> Tensor:
    """Compute `lora_torch.mixed`."""
    T = z.shape[0]
    h = scratch("lora h", (T, z.shape[1] // 2), z)
    _call("moert_cpu_lora", i, z, pairs, low, _Rows.of(i, T), h, low[2])
    return h


def mixed_backward(
    i: Any,
    dh: Tensor,
    dq: Tensor | None,
    z: Tensor,
    pairs: Pairs,
    low: Tensor,
    needs: Pairs,
) -> MixedGradients:
    """Compute `lora_torch.mixed_backward`."""
    T, I = dh.shape
    rows = _Rows.of(i, T)
    dz = scratch("lora dz", (T, 2 * I), z)
    dlow = z.new_zeros(2, T, low.shape[2])
    dots = torch.empty(rows.token.shape, dtype=torch.float32)
    grads = [
        wide_zeros(pairs.gate_b, needs.gate_b),
        wide_zeros(pairs.up_b, needs.up_b),
        wide_zeros(pairs.down_a, needs.down_a and dq is not None),
    ]
    _call("moert_cpu_lora_backward", i, z, pairs, low, rows, dh, dq, dz, dlow, dots, *grads)
    dweight = torch.zeros(T, i.E)
    dweight[rows.token, rows.expert] = dots
    narrow = [None if grad is None else grad.to(z.dtype) for grad in grads]
    return MixedGradients(dz, dlow, dweight, *narrow)
