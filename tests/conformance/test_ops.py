"""Every op on every backend that is available against the float64 equations of the installed case
table; `make stress` lets hypothesis draw many more cases.
"""

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from moe_runtime import backends
from moe_runtime.ops.library import LIB
from moe_runtime.tools.conformance.cases import CASES
from moe_runtime.tools.conformance.draw import Draw
from moe_runtime.tools.conformance.measure import allowance, errors, run
from tests.support.stress import STRESS

HALF = (torch.bfloat16, torch.float16)
DTYPES = {
    "torch": (torch.float32, torch.float64, *HALF),
    "cpp": (torch.float32, torch.bfloat16),
    "cuda": (torch.float32, *HALF),
    "triton": (torch.float32, *HALF),
}
# the interpreter takes a second per case
NUMBERS = {"torch": 16, "cpp": 12, "cuda": 12, "triton": 4}
EXAMPLES = {"torch": 1500, "cpp": 1500, "cuda": 1500, "triton": 250}  # drawn by hypothesis
RUNS = [
    pytest.param(name, backend, dtype, id=f"{name}-{backend}-{str(dtype).removeprefix('torch.')}")
    for name, (op, _) in CASES.items()
    for backend, dtypes in DTYPES.items()
    for dtype in dtypes
    if backend == "torch" or op in backends.KERNELS[backend]
]
pytestmark = pytest.mark.filterwarnings("ignore:(invalid|divide by zero|overflow):RuntimeWarning")


def skip_without(op: str | None, backend: str, device: str) -> None:
    """Skip a test whose backend cannot run on the device."""
    if op is not None and (why := backends.why_not(backend, op, torch.device(device))):
        pytest.skip(why)


def check_case(case, backend: str | None, device="cpu") -> None:
    upstream = {}
    got = run(case, backend, upstream, torch.device(device))
    of_allowance = errors(got, allowance(case, got, upstream))
    bad = {name: error for name, error in of_allowance.items() if error > 1}
    assert not bad, f"{case}: errors as multiples of the allowed ones: {bad}"


def check(name: str, backend: str, device: str, draw: Draw) -> None:
    check_case(CASES[name][1](draw), backend, device)


@pytest.mark.parametrize("name, backend, dtype", RUNS)
def test_is_the_equation(name, backend, dtype, device):
    skip_without(CASES[name][0], backend, device)
    for number in range(NUMBERS[backend]):
        check(name, backend, device, Draw.numbered(dtype, number))


@pytest.mark.stress
@pytest.mark.skipif(not STRESS, reason="make stress runs it")
@pytest.mark.parametrize("name, backend, dtype", RUNS)
def test_is_the_equation_on_what_hypothesis_draws(name, backend, dtype, device):
    skip_without(CASES[name][0], backend, device)

    @settings(
        max_examples=EXAMPLES[backend],
        database=None,
        deadline=None,
        print_blob=True,
        suppress_health_check=list(HealthCheck),
        phases=(Phase.generate, Phase.shrink),
    )
    @given(st.data())
    def drawn(data):
        def choose(options):
            return data.draw(st.sampled_from(options))

        check(name, backend, device, Draw(dtype, choose, data.draw(st.integers(0, 2**31 - 1))))

    drawn()


class Calls(TorchDispatchMode):
    """Record the names of our ops that ran."""

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
        for number in range(12):
            case = make(Draw.numbered(torch.float32, number))
            with calls:
                run(case, "torch", {})
    assert calls.names == LIB._op_defs


PLANTED = {
    "a thousandth off": lambda t: t * 1.001,
    "a row of another": lambda t: t.roll(1, 0),
    "the last row zero": lambda t: torch.cat([t[:-1], torch.zeros_like(t[-1:])]),
    "not a number": lambda t: torch.cat([t[:-1], torch.full_like(t[-1:], float("nan"))]),
}


@pytest.mark.parametrize("name", sorted(CASES.keys() - {"dispatch"}))
def test_the_error_measure_detects_planted_errors(name):
    """One output or gradient is wrong at a time, in rows that are not smaller than the others."""
    seen = set()
    for number in range(40):
        case = CASES[name][1](Draw.numbered(torch.float32, number))
        upstream = {}
        got = run(case, "torch", upstream)
        allowed = allowance(case, got, upstream)
        for part, tensor in got.items():
            # too few elements hide an error, and so do gradients whose terms cancel
            if part not in allowed.moved or tensor.numel() < 20:
                continue
            if tensor.norm() <= 0.1 * case.scales.get(part, 0.0):
                continue
            for planted, change in PLANTED.items():
                wrong = change(tensor)
                if (wrong - tensor).norm() <= 9e-4 * tensor.norm():
                    continue  # the row is zero, or all rows are equal
                assert errors(got | {part: wrong}, allowed)[part] > 1, f"{planted}: {part}: {case}"
                seen.add(planted)
    assert seen == PLANTED.keys()
