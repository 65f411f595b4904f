"""Each op of backend "cuda" on CPU tensors, its kernels compiled by g++: schema, fake, gradient, no
graph breaks.
"""

import pytest
import torch

from moe_runtime.native.library import cuda
from moe_runtime.ops.combine import combine
from moe_runtime.ops.dispatch import dispatch
from moe_runtime.ops.merging import merge_experts
from moe_runtime.ops.routing import route
from tests.csrc import emulator
from tests.csrc.emulator import needs_cxx


@pytest.fixture
def emulated():
    """The backend "cuda" on CPU tensors."""
    cuda.use(cuda.bind(emulator.build()))
    yield
    cuda.use(None)


def arguments(op: str) -> tuple:
    """Return arguments of torch.ops.moe_runtime.<op>, of which the last is the backend."""
    T = 5
    E = 4
    K = 2
    H = 6
    logits = torch.randn(T, E, requires_grad=True)
    idx = torch.randint(0, E, (T, K), dtype=torch.int32)
    y = torch.randn(T * K, H, requires_grad=True)
    weight = torch.rand(T, K, requires_grad=True)
    slot_row = torch.randperm(T * K).int()
    stack = torch.randn(E, 3, H)
    alpha = torch.rand(E, requires_grad=True)
    return {
        "route": (logits, None, K, "softmax_topk", "cuda"),
        "route_to": (logits, idx, "topk_softmax", "cuda"),
        "route_backward": (torch.randn(T, K), logits.detach(), idx, "softmax_topk", "cuda"),
        "dispatch": (idx, E, "cuda"),
        "combine": (y, weight, slot_row, "cuda"),
        "combine_backward": (torch.randn(T, H), y.detach(), weight.detach(), slot_row, "cuda"),
        "merge_experts": (stack, alpha, "cuda"),
        "merge_experts_backward_alpha": (torch.randn(3, H), stack, "cuda"),
    }[op]


@needs_cxx
@pytest.mark.parametrize(
    "op",
    [
        "route",
        "route_to",
        "route_backward",
        "dispatch",
        "combine",
        "combine_backward",
        "merge_experts",
        "merge_experts_backward_alpha",
    ],
)
def test_ops_pass_torchs_checks(emulated, op):
    """Schema, fake and gradient of backend "cuda", and the values of "torch"."""
    function = getattr(torch.ops.moe_runtime, op).default
    values = arguments(op)
    # what returns integers alone has no gradient to check
    checks = ("test_schema", "test_faketensor") + ("test_autograd_registration",) * (
        op != "dispatch"
    )
    torch.library.opcheck(function, values, test_utils=checks)
    ours, theirs = (function(*values[:-1], backend) for backend in ("cuda", "torch"))
    if isinstance(ours, torch.Tensor):
        ours = [ours]
        theirs = [theirs]
    for got, want in zip(ours, theirs, strict=True):
        torch.testing.assert_close(got, want, rtol=2e-6, atol=2e-6)


@needs_cxx
def test_ops_compile_without_a_break(emulated):
    def loss(logits, alpha, stack):
        weight, idx = route(logits, 3, "xft", backend="cuda")
        rows = dispatch(
            idx,
            logits.shape[1] + 1,
            "cuda",
        ).slot_row
        y = merge_experts(stack, alpha, backend="cuda").repeat(
            logits.shape[0],
            1,
        )
        return combine(y, weight, rows, "cuda").square().sum()

    leaves = [
        torch.randn(4, 3).requires_grad_(),
        torch.rand(2).requires_grad_(),
        torch.randn(2, 3, 5),
    ]
    want = torch.autograd.grad(loss(*leaves), leaves[:2])
    torch._dynamo.reset()
    got = torch.autograd.grad(
        torch.compile(loss, fullgraph=True, backend="aot_eager")(*leaves), leaves[:2]
    )
    torch.testing.assert_close(got, want)
