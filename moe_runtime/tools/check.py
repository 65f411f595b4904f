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
from moe_runtime.tools.doctor import first_line, interpreter_problem

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
    gpu = torch.device("cpu")
    if torch.cuda.is_available() and not backends.interpreted():
        gpu = torch.device("cuda")
    results = []
    reasons = {}
    threads = torch.get_num_threads()
    for op, backend in itertools.product(ops, only):
        kernel = CASES[op][0] or "none"
        device = gpu
        if backend == "cpp":
            device = torch.device("cpu")
        if backend != "torch":
            if kernel not in backends.KERNELS[backend]:
                continue
            reason = backends.why_not(backend, kernel, device)
            if reason is not None:
                reasons[backend] = reason
                continue
        # the sizes are small; only the library uses threads
        if backend != "cpp":
            torch.set_num_threads(1)
        results.append(_check_op(op, backend, device, part))
        torch.set_num_threads(threads)
    return results, reasons


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
            result = measure.run(case, backend, upstream, device)
            errors = measure.errors(result, measure.allowance(case, result, upstream))
        except Exception as error:
            errors = {first_line(error): math.inf}
        name = max(errors, key=errors.get)
        if errors[name] > 1:
            failures.append(f"{where}: {name}: the error is {errors[name]:.3g} times its allowance")
        if errors[name] >= worst:
            worst = errors[name]
            at = f"{where}: {name}"
    return Result(
        op,
        backend,
        len(chosen),
        worst,
        at,
        failures,
    )


class CheckProcess(NamedTuple):
    """A process of `_children`: every `parts`-th case of an op from the `number`-th on."""

    op: str
    number: int
    parts: int

    def __str__(self) -> str:
        if self.parts == 1:
            return self.op
        return f"{self.op} ({self.number + 1} of {self.parts})"


def _parts(interpreted: bool) -> list[CheckProcess]:
    """Return the processes, those of the ops with the most cases first."""
    children = []
    for op, (kernel, _) in CASES.items():
        parts = 1
        # an interpreter compiles nothing, and starting a process takes longer than a case
        if kernel is not None and not interpreted:
            cases = len(_cases_of(op, "triton", torch.device("cuda")))
            parts = math.ceil(cases / CASES_A_PART)
        for number in range(parts):
            children.append(CheckProcess(op, number, parts))
    return sorted(children, key=lambda child: -child.parts)


def _run_child(
    child: CheckProcess, only: list[str], interpreted: bool, timeout: float | None
) -> list[Result]:
    """Return what a process finds; a process that fails is a failure of its op."""
    command = [sys.executable, "-W", "ignore", "-m", __spec__.name, "--json", "--ops", child.op]
    command += ["--backends", *only, "--part", f"{child.number}/{child.parts}"]
    env = os.environ | {"TRITON_INTERPRET": str(int(interpreted))}
    try:
        done = subprocess.run(
            command,
            env=env,
            capture_output=True,
            text=True,
            timeout=timeout,
        )
    except subprocess.TimeoutExpired:
        problem = f"the process was killed after {timeout:.0f} s"
    else:
        if done.returncode in (0, 1) and done.stdout:
            results = []
            for fields in json.loads(done.stdout)["results"]:
                fields["worst"] = float(fields["worst"])
                if interpreted:
                    fields["backend"] = "interpreter"
                results.append(Result(**fields))
            return results
        last = (done.stderr.strip() or "no output").splitlines()[-1]
        problem = f"the process failed with exit code {done.returncode}: {last}"
    backend = only[-1]
    if interpreted:
        backend = "interpreter"
    return [
        Result(
            child.op,
            backend,
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
        timeout = None
        if seconds is not None:
            if start - began > seconds:
                left.append(child)
                return []
            timeout = LAST * seconds - (start - began)
        results = _run_child(child, only, interpreted, timeout)
        with lock:
            _tell(
                child,
                results,
                time.monotonic() - start,
                lines,
            )
        return results

    joined: dict[tuple[str, str], Result] = {}  # one result for each op and backend
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for one in itertools.chain(*pool.map(run, _parts(interpreted))):
            before = joined.setdefault((one.op, one.backend), one)
            if before is not one:
                worse = max(before, one, key=lambda result: result.worst)
                joined[one.op, one.backend] = worse._replace(
                    cases=before.cases + one.cases, failures=before.failures + one.failures
                )
    return [*joined.values()], left


def _tell(child: CheckProcess, results: list[Result], seconds: float, lines: Path | None) -> None:
    """Print what a process found, and append it to `lines` as the outcome of a test."""
    failures = []
    for one in results:
        failures += one.failures
    cases = sum(one.cases for one in results)
    outcome = "passed"
    if failures:
        outcome = "failed"
    text = f"{child}: {cases} cases in {seconds:.0f} s, {outcome}"
    print(
        text,
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


def report(
    ops: Iterable[str] = CASES,
    only: Iterable[str] = backends.BACKENDS,
    interpret: bool = False,
    *,
    part: tuple[int, int] = (0, 1),
    seconds: float | None = None,
    lines: Path | None = None,
) -> dict:
    """Run the checks, print a table of the worst errors and each failure, and return them.

    On a GPU each op runs in processes of its own, unless `ops` are given; `seconds` and `lines` are
    those of `_children`.
    """
    if interpret and (problem := interpreter_problem()):
        raise ValueError(problem)
    began = time.monotonic()
    gpu = []
    if ops is CASES and torch.cuda.is_available() and not backends.interpreted():
        gpu = [name for name in only if name != "cpp"]
    results, reasons = check(
        ops,
        [name for name in only if name not in gpu],
        part,
    )
    for name in gpu:
        why = backends.why_not(name, "route", torch.device("cuda"))
        if why:
            reasons[name] = why
    left = []
    if gpu:
        more, left = _children(gpu, False, seconds, lines)
        results += more
    if interpret:
        more, late = _children(["triton"], True, seconds, lines)
        results += more
        left += late

    failures = []
    cells: dict[str, dict[str, str]] = {}
    for one in results:
        failures += one.failures
        cells.setdefault(one.op, {})[one.backend] = "FAILED" if one.failures else f"{one.worst:.2f}"
    names = []
    for name in (*backends.BACKENDS, "interpreter"):
        if any(name in row for row in cells.values()):
            names.append(name)
    columns = [("op", "left"), *((name, "right") for name in names)]
    rows = [[op, *(row.get(name, "-") for name in names)] for op, row in cells.items()]
    print_table("worst error / allowance", columns, rows)
    for name in sorted(reasons.keys() - names):
        remedy = ""
        if name == "triton" and not interpret:
            remedy = ". Pass --interpret"
        print(f"not checked: {name}: {reasons[name]}{remedy}")
    if left:
        print(f"not checked in {seconds:.0f} s: {', '.join(map(str, left))}")
    total = sum(one.cases for one in results)
    summary = f"{total} cases in {time.monotonic() - began:.0f} s, {len(failures)} failed"
    print(
        summary,
        *failures[:SHOWN],
        sep="\n  ",
    )
    if len(failures) > SHOWN:
        print(f"  and {len(failures) - SHOWN} more")
    printed = []
    for one in results:
        worst = one.worst
        if math.isinf(worst):
            worst = "inf"
        printed.append(one._asdict() | {"worst": worst})
    return {"results": printed, "not checked": reasons, "failures": failures}


def main(arguments: list[str] | None = None) -> int:
    """Run the checks and return the exit code, 1 if one fails."""
    parser = argparse.ArgumentParser(
        prog="python -m moe_runtime.tools.check", description=__doc__.splitlines()[0]
    )
    add = parser.add_argument
    add("--interpret", action="store_true", help="also run Triton's kernels in its interpreter")
    add("--json", action="store_true", help="print one JSON object; all else goes to stderr")
    add("--ops", nargs="+", default=CASES, choices=CASES)
    add("--part", default="0/1", help="I/N: every N-th case of an op from the I-th on")
    add("--seconds", type=float, help="on a GPU, start no process after so many seconds")
    add("--lines", type=Path, help="on a GPU, append each process's outcome to this JSONL file")
    add(
        "--backends",
        nargs="+",
        default=backends.BACKENDS,
        choices=backends.BACKENDS,
    )
    given = parser.parse_args(arguments)
    output = sys.stdout
    if given.json:
        output = sys.stderr
    number, parts = map(int, given.part.split("/"))
    with contextlib.redirect_stdout(output):
        outcome = report(
            given.ops,
            given.backends,
            given.interpret,
            part=(number, parts),
            seconds=given.seconds,
            lines=given.lines,
        )
    if given.json:
        print(json.dumps(outcome))
    return int(bool(outcome["failures"]))


if __name__ == "__main__":
    sys.exit(main())
