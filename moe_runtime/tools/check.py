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
import threading
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import torch

from moe_runtime import backends
from moe_runtime.io.console import print_table
from moe_runtime.native.library import cpp, cuda
from moe_runtime.tools.conformance import measure
from moe_runtime.tools.conformance.cases import CASES, ONCE
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
# of a process on a GPU: a case compiles about 9 variants of kernels, a second each on one core
CASES_A_PART = 2
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
    ops: Iterable[str] = CASES,
    only: Iterable[str] = backends.BACKENDS,
    part: tuple[int, int] = (0, 1),
) -> tuple[list[Result], dict[str, str]]:
    """Check `ops` on the backends in `only`; return the results, and why a backend cannot run here.

    `part` (i, n) checks every n-th case of an op from the i-th on.
    """
    gpu = torch.device(
        "cuda" if torch.cuda.is_available() and not backends.interpreted() else "cpu"
    )
    found = []
    reasons = {}
    threads = torch.get_num_threads()
    for op, backend in itertools.product(ops, only):
        kernel = CASES[op][0] or "none"
        device = torch.device("cpu") if backend == "cpp" else gpu
        if backend != "torch" and kernel not in backends.KERNELS[backend]:
            continue
        reason = None if backend == "torch" else backends.why_not(backend, kernel, device)
        if reason is not None:
            reasons[backend] = reason
            continue
        # the sizes are small; only the library uses threads
        torch.set_num_threads(threads if backend == "cpp" else 1)
        found.append(_check_op(op, backend, device, part))
        torch.set_num_threads(threads)
    return found, reasons


def _cases_of(op: str, backend: str, device: torch.device) -> list[tuple[torch.dtype, int]]:
    """Return the dtype and the number of each case."""
    dtypes = DTYPES[backend]
    is_slow = backend == "triton"  # to interpret, and to compile
    if is_slow and device.type == "cpu" and not backends.interpreter_knows_bfloat16:
        dtypes = [dtype for dtype in dtypes if dtype != torch.bfloat16]
    count = 1 if op in ONCE else CASES_OF[backend]
    cases = []
    for i, dtype in enumerate(dtypes):
        for number in range(count):
            # other dtypes than the first have a third of the cases
            if not is_slow or i == 0 or number % 3 == i % 3:
                cases.append((dtype, number))
    return cases


def _check_op(op: str, backend: str, device: torch.device, part: tuple[int, int]) -> Result:
    number, parts = part
    chosen = _cases_of(op, backend, device)[number::parts]
    worst = 0.0
    at = ""
    failures = []
    for dtype, number in chosen:
        where = f"{op} on {backend}, {str(dtype).removeprefix('torch.')}, case {number}"
        try:
            case = CASES[op][1](Draw.numbered(dtype, number))
            where = f"{where} ({case.note})"
            upstream: measure.Tensors = {}
            got = measure.run(case, backend, upstream, device)
            errors = measure.errors(got, measure.allowance(case, got, upstream))
        except Exception as error:
            errors = {(str(error).strip() or type(error).__name__).splitlines()[0]: math.inf}
        name = max(errors, key=errors.get)
        if errors[name] > 1:
            failures.append(f"{where}: {name}: the error is {errors[name]:.3g} times its allowance")
        if errors[name] >= worst:
            worst = errors[name]
            at = f"{where}: {name}"
    return Result(op, backend, len(chosen), worst, at, failures)


class CheckProcess(NamedTuple):
    """A process of `_children`: every `parts`-th case of an op from the `number`-th on."""

    op: str
    number: int
    parts: int

    def __str__(self) -> str:
        return self.op if self.parts == 1 else f"{self.op} ({self.number + 1} of {self.parts})"


def _parts(interpreted: bool) -> list[CheckProcess]:
    """Return the processes, those of the ops with the most cases first."""
    children = []
    for op in CASES:
        # an interpreter compiles nothing, and starting a process takes longer than a case
        if interpreted or CASES[op][0] is None:
            cases = 0
        else:
            cases = len(_cases_of(op, "triton", torch.device("cuda")))
        parts = max(-(-cases // CASES_A_PART), 1)
        children += [CheckProcess(op, number, parts) for number in range(parts)]
    return sorted(children, key=lambda child: -child.parts)


def _run_child(
    child: CheckProcess, only: list[str], interpreted: bool, timeout: float | None
) -> list[Result]:
    """Return what a process finds; a process that fails is a failure of its op."""
    command = [
        sys.executable,
        "-W",
        "ignore",
        "-m",
        __spec__.name,
        "--json",
        "--ops",
        child.op,
        "--backends",
        *only,
    ]
    command += ["--part", f"{child.number}/{child.parts}"]
    env = os.environ | {"TRITON_INTERPRET": str(int(interpreted))}
    try:
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=timeout)
    except subprocess.TimeoutExpired:
        problem = f"the process was killed after {timeout:.0f} s"
    else:
        if done.returncode in (0, 1) and done.stdout:
            found = [
                Result(**one)._replace(worst=float(one["worst"]))
                for one in json.loads(done.stdout)["results"]
            ]
            return [one._replace(backend="interpreter") for one in found] if interpreted else found
        last = (done.stderr.strip() or "no output").splitlines()[-1]
        problem = f"the process failed with exit code {done.returncode}: {last}"
    return [
        Result(
            child.op,
            "interpreter" if interpreted else only[-1],
            0,
            math.inf,
            "",
            [f"{child}: {problem}"],
        )
    ]


def _children(
    only: list[str], interpreted: bool, seconds: float | None = None, lines: Path | None = None
) -> tuple[list[Result], list[CheckProcess]]:
    """Check the ops in separate processes, as many at a time as there are cores, as compiling takes
    most of the time.

    This also separates interpreted from compiled kernels, which one process cannot mix. What a
    process found is printed, and appended to `lines`, as it ends. After `seconds` no process is
    started. Return the results, and what was not started.
    """
    began = time.monotonic()
    lock = threading.Lock()
    left = []

    def run(child: CheckProcess) -> list[Result]:
        start = time.monotonic()
        if seconds is not None and start - began > seconds:
            left.append(child)
            return []
        timeout = None if seconds is None else LAST * seconds - (start - began)
        found = _run_child(child, only, interpreted, timeout)
        with lock:
            _tell(child, found, time.monotonic() - start, lines)
        return found

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        results = list(itertools.chain(*pool.map(run, _parts(interpreted))))
    return _joined(results), left


def _tell(child: CheckProcess, found: list[Result], seconds: float, lines: Path | None) -> None:
    """Print what a process found, and append it to `lines` as the outcome of a test."""
    failures = [line for one in found for line in one.failures]
    cases = sum(one.cases for one in found)
    outcome = "failed" if failures else "passed"
    print(
        f"{child}: {cases} cases in {seconds:.0f} s, {outcome}",
        *failures[:1],
        sep="\n  ",
        flush=True,
    )
    if lines is not None:
        line = {
            "name": f"check {child}",
            "outcome": outcome,
            "seconds": round(seconds, 1),
            "why": "\n".join(failures[:SHOWN]),
        }
        with lines.open("a") as file:
            file.write(json.dumps(line) + "\n")


def _joined(results: list[Result]) -> list[Result]:
    """Return one result for each op and backend."""
    joined = {}
    for one in results:
        before = joined.get((one.op, one.backend))
        if before is not None:
            worse = max(before, one, key=lambda result: result.worst)
            one = worse._replace(
                cases=before.cases + one.cases, failures=before.failures + one.failures
            )
        joined[one.op, one.backend] = one
    return list(joined.values())


def report(
    ops: Iterable[str] = CASES,
    only: Iterable[str] = backends.BACKENDS,
    interpret: bool = False,
    apart: bool = True,
    *,
    part: tuple[int, int] = (0, 1),
    seconds: float | None = None,
    lines: Path | None = None,
) -> dict:
    """Run the checks, print a table of the worst errors and each failure, and return them.

    On a GPU each op runs in processes of its own, unless `apart` is False; `seconds` and `lines`
    are those of `_children`.
    """
    if interpret and (problem := interpreter_problem()):
        raise ValueError(problem)
    began = time.monotonic()
    on_gpu = apart and torch.cuda.is_available() and not backends.interpreted()
    gpu = [name for name in only if on_gpu and name != "cpp"]
    results, reasons = check(ops, [name for name in only if name not in gpu], part)
    reasons |= {
        name: why for name in gpu if (why := backends.why_not(name, "route", torch.device("cuda")))
    }
    left = []
    for names, interpreted in ((gpu, False), (["triton"] if interpret else [], True)):
        if names:
            found, late = _children(names, interpreted, seconds, lines)
            results += found
            left += late
    names = [
        name
        for name in (*backends.BACKENDS, "interpreter")
        if any(one.backend == name for one in results)
    ]
    cells = {
        (one.op, one.backend): "FAILED" if one.failures else f"{one.worst:.2f}" for one in results
    }
    rows = [
        [op, *(cells.get((op, name), "-") for name in names)]
        for op in dict.fromkeys(one.op for one in results)
    ]
    failures = [line for one in results for line in one.failures]
    print_table(
        "worst error / allowance", [("op", "left"), *((name, "right") for name in names)], rows
    )
    for name in sorted(reasons.keys() - names):
        print(
            f"not checked: {name}: "
            f"{reasons[name]}{'. Pass --interpret' * (name == 'triton' and not interpret)}"
        )
    if left:
        print(f"not checked in {seconds:.0f} s: {', '.join(map(str, left))}")
    total = sum(one.cases for one in results)
    more = [f"and {len(failures) - SHOWN} more"] * (len(failures) > SHOWN)
    print(
        f"{total} cases in {time.monotonic() - began:.0f} s, {len(failures)} failed",
        *failures[:SHOWN],
        *more,
        sep="\n  ",
    )
    results = [
        one._asdict() | {"worst": one.worst if math.isfinite(one.worst) else "inf"}
        for one in results
    ]
    return {"results": results, "not checked": reasons, "failures": failures}


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
    parser.add_argument("--ops", nargs="+", default=CASES, choices=CASES)
    parser.add_argument(
        "--part", default="0/1", help="I/N: every N-th case of an op from the I-th on"
    )
    parser.add_argument(
        "--seconds", type=float, help="on a GPU, start no process after so many seconds"
    )
    parser.add_argument(
        "--lines",
        type=Path,
        help="on a GPU, append each process's outcome to this file of JSON lines",
    )
    parser.add_argument(
        "--backends", nargs="+", default=backends.BACKENDS, choices=backends.BACKENDS
    )
    given = parser.parse_args(arguments)
    with contextlib.redirect_stdout(sys.stderr) if given.json else contextlib.nullcontext():
        number, _, parts = given.part.partition("/")
        found = report(
            given.ops,
            given.backends,
            given.interpret,
            apart=given.ops is CASES,
            part=(int(number), int(parts)),
            seconds=given.seconds,
            lines=given.lines,
        )
    if given.json:
        print(json.dumps(found))
    return int(bool(found["failures"]))


if __name__ == "__main__":
    sys.exit(main())
