"""Every op on every backend that runs here, on drawn sizes, dtypes, strides and routings, against
float64 equations.
"""

import pytest
import torch
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from moe_runtime import backends
from moe_runtime.ops.library import LIB
from tests.stress.measure import allowance, mismatches, run
from tests.stress.op_cases import CASES, Draw
from tests.support.stress import STRESS, scaled

DTYPES = {
    "torch": (torch.float32, torch.float64, torch.bfloat16, torch.float16),
    "cpp": (torch.float32, torch.bfloat16),
    "triton": (torch.float32, torch.bfloat16, torch.float16),
}
# what an op takes here, in examples: torch's take milliseconds, the interpreter's up to a second
EXAMPLES = {"torch": scaled(12, 1500), "cpp": scaled(12, 1500), "triton": scaled(3, 250)}
CPU = torch.device("cpu")
RUNS = [
    pytest.param(name, backend, id=f"{name}-{backend}")
    for name, (op, _) in CASES.items()
    for backend in DTYPES
    if op in backends.KERNELS[backend]
]
pytestmark = pytest.mark.stress


def quiet(examples: int):
    return settings(
        max_examples=examples,
        derandomize=not STRESS,
        database=None,
        deadline=None,
        print_blob=True,
        suppress_health_check=list(HealthCheck),
        phases=(Phase.generate, Phase.shrink),
    )


@pytest.mark.filterwarnings("ignore:(invalid|divide by zero|overflow):RuntimeWarning")
@pytest.mark.parametrize("name, backend", RUNS)
def test_is_the_equation(name, backend, device):
    op, make = CASES[name]
    why = backends.why_not(backend, op, CPU)
    if why is not None or device != "cpu":
        pytest.skip(why or "for the CPU")

    @quiet(EXAMPLES[backend])
    @given(st.data())
    def check(data):
        case = make(Draw(data.draw, data.draw(st.sampled_from(DTYPES[backend]))))
        upstream = {}
        got = run(case, backend, upstream)
        bad = mismatches(got, allowance(case, got, upstream))
        assert not bad, f"{case}: {'; '.join(bad)}"

    check()


class Calls(TorchDispatchMode):
    """Names of the ops of ours that ran."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "moe_runtime":
            self.names.add(func.name())
        return func(*args, **(kwargs or {}))


def test_every_op_of_the_library_has_cases():
    assert set(backends.OPS) <= {op for op, _ in CASES.values()}
    calls = Calls()
    for _, make in CASES.values():

        @quiet(20)
        @given(st.data(), st.just(make))
        def visit(data, make):
            case = make(Draw(data.draw, torch.float32))
            with calls:
                run(case, "torch", {})

        visit()
    assert calls.names == LIB._op_defs


PLANTED = {
    "a thousandth off": lambda t: t * 1.001,
    "a row of another": lambda t: t.roll(1, 0),
    "the last row zero": lambda t: torch.cat([t[:-1], torch.zeros_like(t[-1:])]),
    "not a number": lambda t: torch.cat([t[:-1], torch.full_like(t[-1:], float("nan"))]),
}


@pytest.mark.parametrize("name", sorted(CASES.keys() - {"dispatch"}))
def test_the_measure_sees_what_is_planted(name):
    """One output or gradient at a time is wrong, in rows that are no smaller than others."""
    cases = 0

    @quiet(scaled(3, 50))
    @given(st.data())
    def check(data):
        nonlocal cases
        case = CASES[name][1](Draw(data.draw, torch.float32))
        upstream = {}
        got = run(case, "torch", upstream)
        allowed = allowance(case, got, upstream)
        parts = [
            n
            for n, t in got.items()
            if n in allowed.moved and t.dim() and t.numel() >= 20 and t.any()
        ]
        # few numbers, or nothing but zeros, show nothing: such draws are replaced, not counted
        assume(parts)
        cases += 1
        for part in parts:
            for planted, change in PLANTED.items():
                wrong = change(got[part])
                if (wrong - got[part]).norm() <= 9e-4 * got[part].norm():
                    continue  # a row that is zero, or that all are like
                assert mismatches(got | {part: wrong}, allowed), f"{planted}: {part} of {case}"

    check()
    assert cases >= scaled(2, 25)
