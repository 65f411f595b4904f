"""Each Triton kernel of a layer: matrix products against a dense matmul of the same FLOPs, the
others against a copy of the bytes that they must move. GPU only; --tiny uses the interpreter.
"""

import pytest
import torch
import torch.nn.functional as F

from moe_runtime.bench import shapes
from moe_runtime.bench.bench_cuda import cost
from moe_runtime.bench.bench_layer import random_experts
from moe_runtime.bench.clock import copy_floor
from moe_runtime.bench.machine import DEVICE, fits, random
from moe_runtime.kernels import combine, dispatch, merging, routing, tiles
from moe_runtime.tools import tune

KIND = "op"
pytestmark = pytest.mark.gpu
GPU_SHAPES = shapes.kernels()
DTYPE = torch.bfloat16


class RowLayout:
    """The row layout of a layer, for random experts."""

    def __init__(self, shape):
        self.idx = random_experts(shape)
        self.offsets, self.token, self.slot, self.slot_row = dispatch.dispatch_forward(
            self.idx, shape.E
        )


def sizes(product: str, shape) -> tuple[int, int]:
    """N and K of a product over the layer's rows; for dw, of the weight's gradient."""
    H = shape.H
    I = shape.I
    return {
        "up": (2 * I, H),
        "down": (H, I),
        "dz": (I, H),
        "dx": (H, 2 * I),
        "dw_up": (2 * I, H),
        "dw_down": (H, I),
    }[product]


def others(product: str, shape) -> dict:
    """A dense matmul and torch's grouped_mm of the same FLOPs, gathered rows, no epilogue."""
    R, (N, K) = shape.T * shape.K, sizes(product, shape)
    ends = RowLayout(shape).offsets[1:].contiguous()
    if product.startswith("dw"):
        a = random(R, N).t()
        out = random(N, K)
        b = first = random(R, K)
    else:
        a = random(R, K)
        out = random(R, N)
        # the sum runs along the stored rows for up and down, across them for dz and dx
        if product in ("up", "down"):
            b = random(shape.E, N, K).transpose(1, 2)
        else:
            b = random(shape.E, K, N)
        first = b[0]
    return {
        "dense matmul (floor)": lambda: torch.mm(a, first, out=out),
        "torch grouped_mm, product only": lambda: F.grouped_mm(a, b, offs=ends),
    }


@pytest.mark.parametrize("product", tune.PRODUCTS)
def bench_product(interleaved, shape, product):
    layer = tune.Layer(
        shape.H,
        shape.I,
        shape.E,
        shape.K,
        shape.shared,
    )
    device = torch.empty(0, device=DEVICE).device
    problem = tune.problem_of(
        product,
        layer,
        shape.T,
        "bfloat16",
        device,
    )
    tile = tiles.lookup(problem, tiles.device_name(device))
    with fits():
        run = tune.runner(
            product,
            layer,
            shape.T,
            "bfloat16",
            device,
        )
        baselines = others(product, shape)
    (floor, dense), (grouped, other) = baselines.items()
    R, (N, K) = shape.T * shape.K, sizes(product, shape)
    # rows, result and weights once
    bytes = 2 * (R * (N + K) + shape.E * N * K)
    notes = {"moe_runtime": tile.short()}
    variants = {
        floor: dense,
        "moe_runtime": lambda: run(tile),
        grouped: other,
    }
    interleaved(
        variants,
        flops=2 * R * N * K,
        bytes=bytes,
        tokens=shape.T,
        dtype=DTYPE,
        notes=notes,
    )


def move(kernel: str, shape):
    """Return a function that calls a kernel."""
    T, H, I, E, K, shared = shape
    R = T * K
    routed = E - shared
    gate = "xft" if shared else "softmax_topk_renorm"
    if kernel in ("merge", "dalpha"):
        weight = random(E, I, H)
        dout = random(I, H)
        alpha = torch.full([E], 1 / E, device=DEVICE)
        if kernel == "merge":
            return lambda: merging.merge_experts_forward(weight, alpha)
        return lambda: merging.merge_experts_backward_alpha(dout, weight)
    if kernel.startswith("route"):
        logits = random(T, routed)
        dweight = torch.randn(T, K, device=DEVICE)
        if kernel == "route":
            return lambda: routing.route_forward(
                logits,
                None,
                K,
                gate,
                int(shared),
            )
        idx = routing.route_forward(
            logits,
            None,
            K,
            gate,
            int(shared),
        )[1]
        return lambda: routing.route_backward(
            dweight,
            logits,
            idx,
            gate,
            int(shared),
        )
    at = RowLayout(shape)
    if kernel == "dispatch":
        return lambda: dispatch.dispatch_forward(at.idx, E)
    y = random(R, H)
    weight = torch.rand(T, K, device=DEVICE)
    if kernel == "combine":
        return lambda: combine.combine_forward(
            y,
            weight,
            at.slot_row,
            at.offsets[E:],
        )
    partial = torch.randn(R, -(-I // 128), device=DEVICE)
    return lambda: combine.sum_rows(
        y,
        at.slot_row,
        partial,
        T,
        K,
        at.offsets[E:],
    )


@pytest.mark.parametrize(
    "kernel", ["dispatch", "combine", "sum_rows", "route", "route_backward", "merge", "dalpha"]
)
def bench_moving(interleaved, shape, kernel):
    bytes, flops = cost(kernel, shape, id_bytes=8)
    with fits():
        variants = {"moe_runtime": move(kernel, shape)}
        variants = copy_floor(bytes, DEVICE) | variants
    interleaved(
        variants,
        bytes=bytes,
        flops=flops,
        tokens=shape.T,
        dtype=DTYPE,
    )
