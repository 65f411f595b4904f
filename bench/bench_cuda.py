"""The kernels of csrc/ against Triton's: each kernel against a copy of its bytes, and the whole
token path.

T ranges from 512, where launches matter, to 65536. GPU only; needs the library of csrc/, built by
python -m moe_runtime.native.build. From the results, bench/report.py decides which backend runs an
op.
"""

import pytest
import torch

from moe_runtime import backends
from moe_runtime.bench import shapes
from moe_runtime.bench.clock import copy_floor
from moe_runtime.bench.machine import CUDA, DEVICE, fits, random
from moe_runtime.ops import cuda_kernels
from moe_runtime.ops.combine import combine
from moe_runtime.ops.dispatch import dispatch
from moe_runtime.ops.grouped_gemm import grouped_gemm
from moe_runtime.ops.merging import merge_experts
from moe_runtime.ops.routing import route

KIND = "op"
pytestmark = pytest.mark.gpu
GPU_SHAPES = shapes.plans()
DTYPE = torch.bfloat16
# by the op that the kernel belongs to
KERNELS = {
    "route": "route",
    "route_backward": "route",
    "dispatch": "dispatch",
    "combine": "combine",
    "combine_backward": "combine",
    "merge": "merge_experts",
    "dalpha": "merge_experts",
}


def cost(kernel: str, shape, id_bytes: int = 4) -> tuple[int, int]:
    """Return the bytes that a kernel must move, and its multiplications and additions.

    A gate has five per logit.
    """
    T, H, I, E, K, shared = shape
    R = T * K
    routed = E - shared
    merge = (2 * (E + 1) * H * I, 2 * E * H * I)
    return {
        "route": (2 * T * routed + 8 * R, 5 * T * routed),
        "route_backward": (4 * T * routed + 8 * R, 5 * T * routed),
        "dispatch": (id_bytes * R + 3 * 4 * R, 0),
        "merge": merge,
        "dalpha": merge,
        "combine": (2 * (R + T) * H + 8 * R, 2 * R * H),
        "combine_backward": (2 * (2 * R + T) * H + 12 * R, 4 * R * H),
        "sum_rows": (2 * (R + T) * H + 4 * R * (-(-I // 128) + 2), R * H),
    }[kernel]


class CudaInputs:
    """Logits, rows and experts of one shape."""

    def __init__(self, shape):
        T, H, I, E, K, shared = shape
        self.shape = shape
        self.gate = "xft" if shared else "softmax_topk_renorm"
        self.logits = random(T, E - shared)
        self.dweight = torch.randn(T, K, device=DEVICE)
        self.weight, self.idx = route(self.logits, K, self.gate, backend="torch")
        self.x = random(T, H)
        self.y = random(T * K, H)
        self.dout = random(T, H)
        self.slot_row = dispatch(self.idx, E, "torch").slot_row
        self.experts = random(E, I, H)
        self.alpha = torch.full([E], 1 / E, device=DEVICE)
        self.dmerged = random(I, H)

    def call(self, kernel: str, backend: str):
        """Return a function without arguments that runs one kernel through its op."""
        op = KERNELS[kernel]
        if op == "dispatch":
            return lambda: dispatch(self.idx, self.shape.E, backend)
        leaf, grad = {
            "route": (self.logits, self.dweight),
            "combine": (self.y, self.dout),
            "merge_experts": (self.alpha, self.dmerged),
        }[op]
        forwards = {
            "route": lambda: route(
                leaf,
                self.shape.K,
                self.gate,
                backend=backend,
            )[0],
            "combine": lambda: combine(leaf, self.weight, self.slot_row, backend),
            "merge_experts": lambda: merge_experts(self.experts, leaf, backend=backend),
        }
        if kernel in ("route", "combine", "merge"):
            return forwards[op]
        leaf = leaf.detach().requires_grad_()
        out = forwards[op]()
        return lambda: torch.autograd.grad(out, leaf, grad, retain_graph=True)

    def way(self, backend: str):
        """Return the whole token path: route, sort, gather, multiply, combine.

        The product is always Triton's.
        """
        product = "triton" if CUDA or backends.interpreted() else "torch"

        def call():
            weight, idx = route(
                self.logits,
                self.shape.K,
                self.gate,
                backend=backend,
            )
            plan = dispatch(idx, self.shape.E, backend)
            rows = grouped_gemm(
                self.x[plan.row_token],
                self.experts,
                plan.expert_offsets,
                backend=product,
            )
            y = grouped_gemm(
                rows,
                self.experts.transpose(1, 2),
                plan.expert_offsets,
                backend=product,
            )
            return combine(y, weight, plan.slot_row, backend)

        return call


def usable() -> tuple[list[str], dict[str, str]]:
    """Return the backends that run here, and the reasons why others do not."""
    device = torch.empty(0, device=DEVICE).device
    reasons = {}
    for name in ("torch", "triton", "cuda"):
        reasons[name] = backends.why_not(name, "dispatch", device)
    return [name for name in reasons if reasons[name] is None], {
        f"moe_runtime {name}": reason for name, reason in reasons.items() if reason is not None
    }


@pytest.mark.parametrize("kernel", KERNELS)
def bench_cuda_kernel(interleaved, shape, kernel):
    names, notes = usable()
    bytes, flops = cost(kernel, shape)
    with fits():
        layer = CudaInputs(shape)
        variants = copy_floor(bytes, DEVICE) | {
            f"moe_runtime {name}": layer.call(kernel, name) for name in names
        }
    interleaved(
        variants,
        bytes=bytes,
        flops=flops,
        tokens=shape.T,
        dtype=DTYPE,
        notes=notes,
    )


@pytest.mark.parametrize(
    "counted",
    [False, True],
    ids=["plan", "route+plan"],
)
def bench_cuda_plan(interleaved, shape, counted):
    """Inputs of the grouped products: rows, offsets and two tile maps.

    `counted` includes the router, which also counts slots.
    """
    from moe_runtime.kernels import dispatch as triton_dispatch
    from moe_runtime.kernels import routing as triton_routing

    T, _, _, E, K, shared = shape
    with fits():
        layer = CudaInputs(shape)
        floor = copy_floor(16 * T * K, DEVICE)
    router = (layer.logits, None, K, layer.gate, int(shared))

    def triton():
        idx = triton_routing.route_forward(*router)[1] if counted else layer.idx
        plan = triton_dispatch.dispatch_forward(idx, E)
        return plan, [
            triton_dispatch.tile_map(
                plan[0],
                T * K,
                block,
            )
            for block in (64, 128)
        ]

    def ours():
        if not counted:
            return cuda_kernels.route_plan(layer.idx, E, (64, 128))
        count = cuda_kernels.new_block_count(layer.logits, int(shared))
        idx = cuda_kernels.route_forward(*router, block_count=count)[1]
        return cuda_kernels.route_plan(
            idx,
            E,
            (64, 128),
            0,
            count,
            cuda_kernels.block_tokens(*layer.logits.shape),
        )

    names, notes = usable()
    variants = {}
    for name in names:
        if name != "torch":
            variants[f"moe_runtime {name}"] = {"triton": triton, "cuda": ours}[name]
    interleaved(
        floor | variants,
        bytes=16 * T * K,
        tokens=T,
        dtype=DTYPE,
        notes=notes,
    )


def bench_cuda_layer(interleaved, shape):
    names, notes = usable()
    T, H, I, _, K, _ = shape
    with fits(), torch.no_grad():
        layer = CudaInputs(shape)
        rows = random(T * K, H)
        weight = random(I, H)
        h = random(T * K, I)
        y = random(T * K, H)

        def floor():
            torch.mm(rows, weight.t(), out=h)
            torch.mm(h, weight, out=y)

        variants = {"dense matmuls (floor)": floor}
        for name in names:
            variants[f"moe_runtime {name}"] = layer.way(name)
        flops = 4 * T * K * H * I
        interleaved(
            variants,
            flops=flops,
            tokens=T,
            dtype=DTYPE,
            notes=notes,
        )
