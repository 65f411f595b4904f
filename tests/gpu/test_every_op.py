"""Every op with Triton kernels natively, on the cases of the conformance table, for what only a GPU
can show. tests/conformance and tests/ops/test_every_op.py compare the same cases with their
equations.
"""

import pytest
import torch

from moe_runtime import backends
from moe_runtime.tools.conformance.cases import CASES
from moe_runtime.tools.conformance.draw import Draw, placed
from tests.conformance.test_ops import check_case
from tests.ops.test_every_op import NAMES, Blocks, case_of
from tests.support.oracle import poison

pytestmark = pytest.mark.gpu
OF_TRITON = pytest.mark.parametrize("name", [name for name in NAMES if CASES[name][0] is not None])
NUMBERS = pytest.mark.parametrize("number", range(3))
CUDA = torch.device("cuda")


class Large(Draw):
    """Draws sizes of several tiles in each dimension."""

    def size(self) -> int:
        return self.of(512, 264, 768, 130)

    def tokens(self) -> int:
        return self.of(1500, 333, 4096)


def step_of(name: str, number: int):
    """Return a function that runs an op forward and backward on inputs at fixed addresses."""
    case = case_of(name, number, torch.bfloat16, Large)
    leaves = {key: placed(leaf, CUDA).requires_grad_() for key, leaf in case.leaves.items()}
    fixed = {key: placed(tensor, CUDA) for key, tensor in case.fixed.items()}

    def step() -> list[torch.Tensor]:
        outputs = list(case.product(leaves | fixed, "triton").values())
        roots = [out for out in outputs if out.requires_grad]
        grads = []
        if roots and leaves:
            upstream = [torch.ones_like(root) for root in roots]
            grads = torch.autograd.grad(roots, list(leaves.values()), upstream, allow_unused=True)
        return [tensor.detach() for tensor in (*outputs, *grads) if tensor is not None]

    step()  # compiles the kernels
    torch.cuda.synchronize()
    return step


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@OF_TRITON
def test_is_the_equation_on_poisoned_memory(name, dtype):
    torch.utils.deterministic.fill_uninitialized_memory = False  # as users have it
    for number in range(8):
        poison()
        check_case(case_of(name, number, dtype, Blocks), "triton", "cuda")


@NUMBERS
@OF_TRITON
def test_twenty_runs_give_the_same_bits(name, number):
    step = step_of(name, number)
    first = step()
    for _ in range(20):
        for again, once in zip(step(), first, strict=True):
            assert torch.equal(again, once)


@NUMBERS
@OF_TRITON
def test_no_host_synchronization(name, number):
    step = step_of(name, number)
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@NUMBERS
@OF_TRITON
def test_a_cuda_graph(name, number):
    step = step_of(name, number)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    graph.replay()
    for replayed, expected in zip(captured, step(), strict=True):
        # cuBLAS may sum in a different order during capture
        torch.testing.assert_close(replayed, expected, rtol=2e-2, atol=2e-2)


def test_triton_is_what_a_gpu_gets():
    for op in backends.OPS:
        assert backends.pick(op, torch.empty(0, device=CUDA), cuda_fits=False) == "triton"
