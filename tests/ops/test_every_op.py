"""What every op guarantees besides its equation, on the cases of the conformance table.

tests/conformance compares small inputs with the equations. Here the sizes span several blocks and
tiles, on each instruction set of the CPU library, and the other tests hold for any values:
reproducible bits, each gradient on its own, torch.compile, torch's rules for custom ops.
"""

from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from moe_runtime import backends
from moe_runtime.ops import moe_mlp_cpp
from moe_runtime.tools.conformance.cases import CASES
from moe_runtime.tools.conformance.draw import Draw
from moe_runtime.tools.conformance.measure import run
from tests.conformance.test_ops import check_case, skip_without
from tests.support.opcheck import opcheck
from tests.support.oracle import assert_same

pytestmark = pytest.mark.filterwarnings("ignore:(invalid|divide by zero|overflow):RuntimeWarning")
NAMES = [*CASES]
NUMBERS = {"torch": 8, "cpp": 8, "cuda": 8, "triton": 2}  # the interpreter takes a second per case


def runs(*names: str) -> list:
    """List the cases that each backend has kernels for."""
    found = []
    for backend in names:
        for name in NAMES:
            if backend == "torch" or CASES[name][0] in backends.KERNELS[backend]:
                found.append(
                    pytest.param(
                        name,
                        backend,
                        id=f"{name}-{backend}",
                    )
                )
    return found


RUNS = runs("torch", "cpp", "triton")


class Blocks(Draw):
    """Draws sizes beyond a block of any kernel, and more slots than a step of the sort."""

    def size(self) -> int:
        return self.of(65, 130, 40, 270)

    def tokens(self) -> int:
        return self.of(70, 130, 33)


def case_of(name: str, number: int, dtype=torch.float32, draw=Draw):
    return CASES[name][1](draw.numbered(dtype, number))


@pytest.mark.parametrize(
    "dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)], ids=str
)
@pytest.mark.parametrize("name, backend", runs("torch", "triton"))
def test_several_blocks(name, backend, dtype, device, monkeypatch):
    skip_without(CASES[name][0], backend, device)
    if backend == "triton":
        from moe_runtime.kernels import decode

        # run the steps as separate launches, whatever the number of slots
        monkeypatch.setattr(decode, "SMALL", 0)
    for number in range(NUMBERS[backend]):
        check_case(case_of(name, number, dtype, Blocks), backend, device)


@pytest.mark.parametrize("rows", [0, 1 << 20], ids=["matmuls", "one call"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name, backend", runs("cpp"))
def test_every_instruction_set(name, backend, dtype, rows, variant, monkeypatch):
    monkeypatch.setattr(moe_mlp_cpp, "few_rows", lambda dtype: rows)
    for draw in (Draw, Blocks):
        for number in range(NUMBERS["cpp"]):
            check_case(case_of(name, number, dtype, draw), backend)


@pytest.mark.parametrize("name, backend", RUNS)
def test_runs_give_the_same_bits(name, backend, device):
    skip_without(CASES[name][0], backend, device)
    for number in range(NUMBERS[backend]):
        case = case_of(name, number)
        first = run(case, backend, device=torch.device(device))
        assert_same(
            run(
                case,
                backend,
                device=torch.device(device),
            ),
            first,
        )


@pytest.mark.parametrize("name, backend", RUNS)
def test_each_gradient_alone(name, backend, device):
    skip_without(CASES[name][0], backend, device)
    for number in range(1, 1 + NUMBERS[backend]):
        case = case_of(name, number)
        every = run(case, backend, device=torch.device(device))
        for leaf, tensor in case.leaves.items():
            if f"d{leaf}" not in every:
                continue
            others = {key: other for key, other in case.leaves.items() if key != leaf}
            alone = replace(
                case,
                leaves={leaf: tensor},
                fixed=case.fixed | others,
            )
            got = run(alone, backend, device=torch.device(device))
            # the loss of frozen specialists has its own code path
            if name == "fused_cross_entropy":
                torch.testing.assert_close(
                    got[f"d{leaf}"],
                    every[f"d{leaf}"],
                    rtol=1e-4,
                    atol=1e-5,
                )
            else:
                assert_same([got[f"d{leaf}"]], [every[f"d{leaf}"]])


@pytest.mark.parametrize("name, backend", RUNS)
def test_compiles_without_a_graph_break(name, backend, device):
    skip_without(CASES[name][0], backend, device)
    if (name, backend) == ("merged_linear", "triton"):
        pytest.skip("its case calls remerge_experts, which cannot be in a graph")
    for number in (5, 9):
        torch._dynamo.reset()
        case = case_of(name, number)
        product = torch.compile(case.product, fullgraph=True, backend="aot_eager")
        expected = run(case, backend, device=torch.device(device))
        got = run(
            replace(case, product=product),
            backend,
            device=torch.device(device),
        )
        assert_same(got, expected)


class Calls(TorchDispatchMode):
    """Records the calls of our ops, forward and backward, by the op's name."""

    def __init__(self):
        super().__init__()
        self.calls = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "moe_runtime":
            self.calls[func.name()] = (func, args)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name, backend", RUNS)
def test_torchs_rules_for_ops(name, backend, device):
    skip_without(CASES[name][0], backend, device)
    for number in range(NUMBERS[backend] // 2):
        with Calls() as seen:
            run(
                case_of(name, number),
                backend,
                device=torch.device(device),
            )
        for op, args in seen.calls.values():
            if "backward" in op.name():
                args = tree_map_only(torch.Tensor, torch.Tensor.detach, args)
            opcheck(op, args, is_traced=number == 0)


@pytest.mark.parametrize("name", NAMES)
def test_float64_is_never_computed_in_float32(name, monkeypatch):
    op = CASES[name][0]
    monkeypatch.setenv("MOE_RUNTIME_BACKEND", "triton")
    case = case_of(name, 3, torch.float64)
    check_case(case, None)
    if op not in (None, "dispatch") and not backends.why_not(
        "triton",
        op,
        torch.device("cpu"),
    ):
        with pytest.raises(ValueError, match="Use backend 'torch' for float64"):
            run(case, "triton")


@pytest.mark.parametrize("name", NAMES)
def test_a_backward_pass_under_autocast_rounds_nothing(name):
    case = case_of(name, 3)
    leaves = {key: leaf.clone().requires_grad_() for key, leaf in case.leaves.items()}
    outputs = case.product(leaves | case.fixed, "torch")
    loss = sum(t.double().square().sum() for t in outputs.values() if t.requires_grad)
    if not leaves or not torch.is_tensor(loss):
        return
    options = {"retain_graph": True, "allow_unused": True}
    expected = torch.autograd.grad(
        loss,
        list(leaves.values()),
        **options,
    )
    with torch.autocast("cpu", torch.bfloat16):
        got = torch.autograd.grad(
            loss,
            list(leaves.values()),
            **options,
        )
    for a, b in zip(got, expected, strict=True):
        assert (a is None and b is None) or torch.equal(a, b)
