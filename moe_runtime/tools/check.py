"""Check every op on every available backend against float64, on small and unusual shapes:
`moe-runtime doctor --check`.

The cases, their equations and the allowed errors are those of `moe_runtime.tools.conformance`.
`python -m moe_runtime.tools.check` does the same without the command line's packages.
"""

import argparse
import contextlib
import itertools
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import torch

from moe_runtime import backends
from moe_runtime.io.console import print_table
from moe_runtime.native.library import cpp, cuda
from moe_runtime.tools.conformance import measure
from moe_runtime.tools.conformance.cases import CASES
from moe_runtime.tools.conformance.draw import Draw
from moe_runtime.tools.doctor import interpreter_problem

DTYPES = {
    "torch": [torch.float64, torch.float32, torch.float16, torch.bfloat16],
    "cpp": [*cpp.DTYPES],
    "cuda": [*cuda.DTYPES],
    "triton": [torch.bfloat16, torch.float32, torch.float16],  # the first one has all cases
}
CASES_OF = {"torch": 12, "cpp": 12, "cuda": 12, "triton": 9}  # per op and dtype
SHOWN = 20  # maximum number of printed failures
LAST = 1.2  # a process that runs at this multiple of `seconds` is killed


class Result(NamedTuple):
    """Outcome of an op's cases on a backend: the largest error over its allowance, where it
    occurred, and the failures.
    """

    op: str
    backend: str
    cases: int
    worst: float
    at: str
    failures: list[str]


def check(
    ops: Iterable[str] = CASES, only: Iterable[str] = backends.BACKENDS
) -> tuple[list[Result], dict[str, str]]:
    """Check `ops` on the backends in `only`; return the results, and why a backend cannot run
    here.
    """
    gpu = torch.device("cuda" if _has_gpu() else "cpu")
    results = []
    reasons = {}
    threads = torch.get_num_threads()
    for op, backend in itertools.product(ops, only):
        kernel = CASES[op][0]
        device = torch.device("cpu") if backend == "cpp" else gpu
        if backend != "torch":
            if kernel not in backends.KERNELS[backend]:
                continue
            reason = backends.why_not(backend, kernel, device)
            if reason is not None:
                reasons[backend] = reason
                continue
        # the sizes are small; only the library uses threads
        torch.set_num_threads(threads if backend == "cpp" else 1)
        results.append(_check_op(op, backend, device))
        torch.set_num_threads(threads)
    return results, reasons


def _has_gpu() -> bool:
    return torch.cuda.is_available() and not backends.interpreted()


def _cases_of(backend: str, device: torch.device) -> list[tuple[torch.dtype, int]]:
    """Return the dtype and the number of each case."""
    dtypes = DTYPES[backend]
    is_slow = backend == "triton"  # to interpret, and to compile
    if is_slow and device.type == "cpu" and not backends.interpreter_knows_bfloat16:
        dtypes = [dtype for dtype in dtypes if dtype != torch.bfloat16]
    cases = []
    for i, dtype in enumerate(dtypes):
        for number in range(CASES_OF[backend]):
            # other dtypes than the first have a third of the cases
            if not is_slow or i == 0 or number % 3 == i % 3:
                cases.append((dtype, number))
    return cases


def _check_op(op: str, backend: str, device: torch.device) -> Result:
    chosen = _cases_of(backend, device)
    worst = 0.0
    at = ""
    failures = []
    for dtype, number in chosen:
        where = f"{op} on {backend}, {str(dtype).removeprefix('torch.')}, case {number}"
        try:
            case = CASES[op][1](Draw.numbered(dtype, number))
            where = f"{where} ({case.note})"
            upstream: measure.Tensors = {}
            actual = measure.run(case, backend, upstream, device)
            errors = measure.errors(actual, measure.allowance(case, actual, upstream))
        except Exception as error:
            errors = {(str(error).strip() or type(error).__name__).splitlines()[0]: math.inf}
        name = max(errors, key=errors.get)
        if errors[name] > 1:
            failures.append(f"{where}: {name}: the error is {errors[name]:.3g} times its allowance")
        if errors[name] >= worst:
            worst = errors[name]
            at = f"{where}: {name}"
    return Result(op, backend, len(chosen), worst, at, failures)


def _run_child(op: str, only: list[str], interpreted: bool, timeout: float | None) -> list[Result]:
    """Check an op in a process of its own; one that fails is a failure of the op."""
    command = [sys.executable, "-W", "ignore", "-m", __spec__.name, "--json", "--ops", op]
    env = os.environ | {"TRITON_INTERPRET": str(int(interpreted))}
    try:
        done = subprocess.run(
            [*command, "--backends", *only],
            env=env,
            capture_output=True,
            text=True,
            timeout=timeout,
        )
        results = [Result(**one) for one in json.loads(done.stdout)["results"]]
        results = [one._replace(worst=float(one.worst)) for one in results]
    except subprocess.TimeoutExpired:
        results = [Result(op, only[-1], 0, math.inf, "", [f"{op}: killed after {timeout:.0f} s"])]
    except ValueError:  # it printed no JSON
        last = (done.stderr.strip() or "no output").splitlines()[-1]
        problem = f"{op}: the process failed with exit code {done.returncode}: {last}"
        results = [Result(op, only[-1], 0, math.inf, "", [problem])]
    if interpreted:
        return [one._replace(backend="interpreter") for one in results]
    return results


def _children(
    only: list[str], interpreted: bool, seconds: float | None = None
) -> tuple[list[Result], list[str]]:
    """Check each op in a process of its own, as many at a time as there are cores, as compiling
    takes most of the time.

    This also separates interpreted from compiled kernels, which one process cannot mix. After
    `seconds` no process is started. Return the results, and the ops that were not started.
    """
    began = time.monotonic()
    left = []

    def run(op: str) -> list[Result]:
        passed = time.monotonic() - began
        if seconds is not None and passed > seconds:
            left.append(op)
            return []
        timeout = None if seconds is None else LAST * seconds - passed
        of_op = _run_child(op, only, interpreted, timeout)
        failures = [line for one in of_op for line in one.failures]
        cases = sum(one.cases for one in of_op)
        print(f"{op}: {cases} cases, {len(failures)} failed", *failures[:1], sep="\n  ", flush=True)
        return of_op

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        results = list(itertools.chain(*pool.map(run, CASES)))
    return results, left


def report(
    ops: Iterable[str] | None = None,
    only: Iterable[str] = backends.BACKENDS,
    interpret: bool = False,
    seconds: float | None = None,
) -> dict:
    """Run the checks, print a table of the worst errors and each failure, and return them.

    On a GPU each op runs in a process of its own, unless `ops` are named; `seconds` is that of
    `_children`.
    """
    if interpret and (problem := interpreter_problem()):
        raise ValueError(problem)
    began = time.monotonic()
    here = [*only]
    isolated = []
    if ops is None and _has_gpu():
        isolated = [name for name in only if name != "cpp"]
        here = [name for name in only if name == "cpp"]
    results, reasons = check(CASES if ops is None else ops, here)
    left = []
    if isolated:
        for name in isolated:
            if why := backends.why_not(name, "route", torch.device("cuda")):
                reasons[name] = why
        more, left = _children(isolated, False, seconds)
        results += more
    if interpret:
        more, late = _children(["triton"], True, seconds)
        results += more
        left += late
    failures = [line for one in results for line in one.failures]
    _print(results)
    for name in sorted(reasons.keys() - {one.backend for one in results}):
        hint = ". Pass --interpret" if name == "triton" and not interpret else ""
        print(f"not checked: {name}: {reasons[name]}{hint}")
    if left:
        print(f"not checked in {seconds:.0f} s: {', '.join(left)}")
    total = sum(one.cases for one in results)
    print(f"{total} cases in {time.monotonic() - began:.0f} s, {len(failures)} failed")
    for line in failures[:SHOWN]:
        print(f"  {line}")
    if len(failures) > SHOWN:
        print(f"  and {len(failures) - SHOWN} more")
    # JSON has no infinity
    results = [one._asdict() | {"worst": str(one.worst)} for one in results]
    return {"results": results, "not checked": reasons, "failures": failures}


def _print(results: list[Result]) -> None:
    """Print the table of ops and backends."""
    cells = {}
    for one in results:
        cells[one.op, one.backend] = "FAILED" if one.failures else f"{one.worst:.2f}"
    tested = {one.backend for one in results}
    names = [name for name in (*backends.BACKENDS, "interpreter") if name in tested]
    rows = []
    for op in dict.fromkeys(one.op for one in results):
        rows.append([op, *(cells.get((op, name), "-") for name in names)])
    columns = [("op", "left"), *((name, "right") for name in names)]
    print_table("worst error / allowance", columns, rows)


def main(arguments: list[str] | None = None) -> int:
    """Run the checks and return the exit code, 1 if one fails."""
    parser = argparse.ArgumentParser(
        prog="python -m moe_runtime.tools.check", description=__doc__.splitlines()[0]
    )
    parser.add_argument(
        "--interpret", action="store_true", help="also run the Triton kernels in its interpreter"
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object; everything else goes to stderr"
    )
    parser.add_argument("--ops", nargs="+", choices=CASES, help="all by default")
    parser.add_argument(
        "--seconds", type=float, help="on a GPU, start no process after so many seconds"
    )
    parser.add_argument(
        "--backends", nargs="+", default=backends.BACKENDS, choices=backends.BACKENDS
    )
    given = parser.parse_args(arguments)
    with contextlib.redirect_stdout(sys.stderr) if given.json else contextlib.nullcontext():
        summary = report(given.ops, given.backends, given.interpret, given.seconds)
    if given.json:
        print(json.dumps(summary))
    return int(bool(summary["failures"]))


if __name__ == "__main__":
    sys.exit(main())
