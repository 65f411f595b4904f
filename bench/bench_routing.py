"""The router of a layer, including its matmul: one kernel for the gate against torch's operations
and a copy of x's bytes.
"""

import pytest
import torch
import torch.nn.functional as F

from moe_runtime import backends
from moe_runtime.bench.clock import copy_floor
from moe_runtime.bench.machine import CUDA, DEVICE, random
from moe_runtime.ops.routing import route

KIND = "op"
pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(
    "backward",
    [False, True],
    ids=["forward", "backward"],
)
def bench_route(interleaved, shape, backward):
    T, H, _, E, K, shared = shape
    gate = "xft" if shared else "softmax_topk_renorm"
    x = random(T, H).requires_grad_()
    weight = torch.nn.Parameter(random(E - shared, H) * H**-0.5)
    dweight = torch.randn(T, K, device=DEVICE)
    # forward reads x; backward reads it for the router's gradient and writes dx
    bytes = 2 * T * H * (2 if backward else 1)

    def variant(backend):
        def forward():
            return route(
                F.linear(x, weight),
                K,
                gate,
                backend=backend,
            )[0]

        if not backward:
            return forward
        out = forward()
        return lambda: torch.autograd.grad(
            out,
            [x, weight],
            dweight,
            retain_graph=True,
        )

    ours = "triton" if CUDA or backends.interpreted() else "torch"
    with torch.set_grad_enabled(backward):
        variants = {"moe_runtime": variant(ours), "torch": variant("torch")}
        variants = copy_floor(bytes, DEVICE) | variants
        interleaved(
            variants,
            bytes=bytes,
            flops=bytes * (E - shared),
            tokens=T,
            dtype=x.dtype,
        )
