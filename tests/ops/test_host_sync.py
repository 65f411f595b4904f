"""No launcher reads a value from the GPU: the Triton backend of every op runs on tensors on the
meta device, which have none.
"""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from moe_runtime.ops.library import ARGUMENTS
from moe_runtime.tools.conformance.cases import CASES
from moe_runtime.tools.conformance.draw import Draw
from moe_runtime.tools.conformance.measure import run
from tests.support.aot import record

pytest.importorskip("triton")
from moe_runtime.kernels import decode

NAMES = [*CASES]
IN_TORCH = {"fused_nll_backward_gate", "fused_loss_backward", "merged_linear"}


class Calls(TorchDispatchMode):
    """Records the calls of our ops, forward and backward."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "moe_runtime":
            self.calls.append((func, args))
        return func(*args, **(kwargs or {}))


def on_meta(func, args, backend: str):
    """Run a backend of an op, not its fake implementation, on the meta device."""
    args = list(tree_map_only(torch.Tensor, lambda t: t.detach().to("meta"), args))
    args[ARGUMENTS[func._opname].index("backend")] = backend
    return func.redispatch(torch._C.DispatchKeySet(torch._C.DispatchKey.CPU), *args)


@pytest.mark.parametrize("small", [decode.SMALL, 0], ids=["few slots", "many slots"])
@pytest.mark.parametrize("name", NAMES)
def test_no_launcher_asks_for_a_value(name, small, monkeypatch):
    monkeypatch.setattr(decode, "SMALL", small)
    launched = {}
    for number in range(8):
        with Calls() as seen:
            run(CASES[name][1](Draw.numbered(torch.bfloat16, number)), "torch")
        for func, args in seen.calls:
            launches = record(lambda func=func, args=args: on_meta(func, args, "triton"))
            launched[func._opname] = launched.get(func._opname, 0) + len(launches)
    for op, count in launched.items():
        assert count > 0 or op in IN_TORCH, op


def test_the_backend_that_loops_on_the_host_is_seen():
    with Calls() as seen:
        run(CASES["grouped_gemm"][1](Draw.numbered(torch.float32, 1)), "torch")
    with pytest.raises((RuntimeError, TypeError)):
        on_meta(*seen.calls[0], "torch")
