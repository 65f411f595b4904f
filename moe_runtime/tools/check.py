"""Check every op on every available backend against float64, on small and unusual shapes: `moe-runtime doctor --check`.

The error of an output or a gradient is the norm of its difference from float64 relative to the norm. A slice along the first
dimension (a token, an expert) may have four times the error; integers must be equal. `python -m moe_runtime.tools.check` does
the same without the command line's packages.
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
from moe_runtime.tools.check_cases import CASES, LAYERS, Draw
from moe_runtime.tools.doctor import interpreter_problem

TOLERANCE = {torch.float64: 1e-12, torch.float32: 5e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}
DTYPES = {
    "torch": [*TOLERANCE], "cpp": [*cpp.DTYPES], "cuda": [*cuda.DTYPES],
    "triton": [torch.bfloat16, torch.float32, torch.float16],  # the first one has all cases
}  # fmt: skip
SLICE = 4.0  # factor on the tolerance for a slice
SHOWN = 20  # maximum number of printed failures
SMALL = 1.0  # lower bound of the root mean square in a relative error, as some gradients cancel to zero


class Result(NamedTuple):
    """Outcome of an op's cases on a backend: the largest error over its tolerance, where it occurred, and the failures."""

    op: str
    backend: str
    cases: int
    worst: float
    at: str
    failures: list[str]


def _with_gradients(outputs: dict, leaves: dict) -> dict[str, torch.Tensor]:
    """Return `outputs` on the CPU and, as d<leaf>, the gradients of their sum with random weights."""
    floats, rng = {n: t for n, t in leaves.items() if t.requires_grad}, torch.Generator().manual_seed(21)
    weights = {n: torch.randn(t.shape, generator=rng, dtype=torch.float64).to(t) for n, t in sorted(outputs.items())}
    roots = [n for n, t in outputs.items() if t.requires_grad]
    into = [weights[n] for n in roots]
    grads = torch.autograd.grad([outputs[n] for n in roots], [*floats.values()], into, allow_unused=True) if roots else []
    found = {f"d{n}": torch.zeros_like(t) if g is None else g for (n, t), g in zip(floats.items(), grads)}
    return {n: t.detach().cpu() for n, t in (outputs | found).items()}


def _errors(case: tuple, backend: str, device: torch.device, dtype: torch.dtype) -> dict[str, float]:
    """Return each output's and gradient's error divided by its tolerance, infinite if it is missing or NaN."""
    tensors, run, want = case
    learns = {n: t.is_floating_point() and not n.startswith("_") for n, t in tensors.items()}
    leaves = {n: t.detach().to(device).requires_grad_(learns[n]) for n, t in tensors.items()}
    got = _with_gradients(run(leaves, backend), leaves)
    leaves = {n: t.detach().double() if t.is_floating_point() else t for n, t in tensors.items()}
    leaves = {n: t.requires_grad_(learns[n]) for n, t in leaves.items()}
    true = _with_gradients(want(leaves, got), leaves)
    return {n: _error(got[n], true[n], dtype) if n in got and n in true else math.inf for n in got | true}


def _error(got: torch.Tensor, want: torch.Tensor, dtype: torch.dtype) -> float:
    if got.shape != want.shape or not got.is_floating_point():
        return 0.0 if torch.equal(got, want.to(got.dtype)) else math.inf
    if got.numel() == 0:
        return 0.0
    off, want = (t.reshape(len(t) if t.dim() else 1, -1) for t in (got.double() - want, want.double()))
    small = max(want.square().mean().sqrt().item(), SMALL) * want.shape[1] ** 0.5  # norm of an average slice
    slices = (off.norm(dim=1) / want.norm(dim=1).clamp_min(small)).max().item()
    error = max(off.norm().item() / (small * len(off) ** 0.5), slices / SLICE) / max(TOLERANCE[dtype], TOLERANCE[got.dtype])
    return error if math.isfinite(error) else math.inf


def check(ops: Iterable[str] = CASES, only: Iterable[str] = backends.BACKENDS) -> tuple[list[Result], dict[str, str]]:
    """Check `ops` on the backends in `only`; return the results, and why a backend cannot run here."""
    gpu = torch.device("cuda" if torch.cuda.is_available() and not backends.interpreted() else "cpu")
    found, reasons, threads = [], {}, torch.get_num_threads()
    for op, backend in itertools.product(ops, only):
        kernel, device = CASES[op][1], torch.device("cpu") if backend == "cpp" else gpu
        if backend != "torch" and kernel not in backends.KERNELS[backend]:
            continue
        reason = None if backend == "torch" else backends.why_not(backend, kernel, device)
        if reason is not None:
            reasons[backend] = reason
            continue
        torch.set_num_threads(threads if backend == "cpp" else 1)  # the sizes are small; only the library uses threads
        found.append(_check_op(op, backend, device))
        torch.set_num_threads(threads)
    return found, reasons


def _check_op(op: str, backend: str, device: torch.device) -> Result:
    make, _, first, second = CASES[op]
    pairs, dtypes, few = itertools.product(first, second), DTYPES[backend], backend == "triton"
    if few:  # interpreting and compiling are slow: each argument once in the first dtype, a third of them in the others
        first = [one for one in first if one != LAYERS[-1] or device.type != "cpu"]
        n = max(len(first), len(second))
        pairs = [(first[i % len(first)], second[i % len(second)]) for i in range(n)]
        known = device.type != "cpu" or backends.interpreter_knows_bfloat16
        dtypes = [dtype for dtype in dtypes if dtype != torch.bfloat16 or known]
    cases = [(*a, *b) for a, b in pairs]
    chosen = [(d, c) for i, d in enumerate(dtypes) for j, c in enumerate(cases) if not few or i == 0 or j % 3 == i % 3]
    worst, at, failures = 0.0, "", []
    for dtype, arguments in chosen:
        where = f"{op} on {backend}, {str(dtype).removeprefix('torch.')}, {' '.join(map(str, arguments))}"
        try:
            errors = _errors(make(Draw(dtype), *arguments), backend, device, dtype)
        except Exception as error:
            errors = {(str(error).strip() or type(error).__name__).splitlines()[0]: math.inf}
        part = max(errors, key=errors.get)
        if errors[part] > 1:
            failures.append(f"{where}: {part}: the error is {errors[part]:.3g} times its tolerance")
        if errors[part] >= worst:
            worst, at = errors[part], f"{where}: {part}"
    return Result(op, backend, len(chosen), worst, at, failures)


def _children(only: list[str], interpreted: bool) -> list[Result]:
    """Check each op in a separate process, as many at a time as there are cores, as compiling takes most of the time.

    This also separates interpreted from compiled kernels, which one process cannot mix.
    """

    def run(op: str) -> list[Result]:
        command = [sys.executable, "-W", "ignore", "-m", __spec__.name, "--json", "--ops", op, "--backends", *only]
        env = os.environ | {"TRITON_INTERPRET": str(int(interpreted))}
        done = subprocess.run(command, env=env, capture_output=True, text=True)
        if done.returncode not in (0, 1) or not done.stdout:
            last = (done.stderr.strip() or "no output").splitlines()[-1]
            text = f"{op}: the process failed with exit code {done.returncode}: {last}"
            return [Result(op, "interpreter" if interpreted else only[0], 0, math.inf, "", [text])]
        found = [Result(**one)._replace(worst=float(one["worst"])) for one in json.loads(done.stdout)["results"]]
        return [one._replace(backend="interpreter") for one in found] if interpreted else found

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(itertools.chain(*pool.map(run, CASES)))


def report(
    ops: Iterable[str] = CASES, only: Iterable[str] = backends.BACKENDS, interpret: bool = False, apart: bool = True
) -> dict:
    """Run the checks, print a table of the worst errors and each failure, and return them."""
    if interpret and (problem := interpreter_problem()):
        raise ValueError(problem)
    began = time.monotonic()
    on_gpu = apart and torch.cuda.is_available() and not backends.interpreted()
    gpu = [name for name in only if on_gpu and name != "cpp"]
    results, reasons = check(ops, [name for name in only if name not in gpu])
    reasons |= {name: why for name in gpu if (why := backends.why_not(name, "route", torch.device("cuda")))}
    results += _children(gpu, False) if gpu else []
    results += _children(["triton"], True) if interpret else []
    names = [name for name in (*backends.BACKENDS, "interpreter") if any(one.backend == name for one in results)]
    cells = {(one.op, one.backend): "FAILED" if one.failures else f"{one.worst:.2f}" for one in results}
    rows = [[op, *(cells.get((op, name), "-") for name in names)] for op in dict.fromkeys(one.op for one in results)]
    failures = [line for one in results for line in one.failures]
    print_table("worst error / tolerance", [("op", "left"), *((name, "right") for name in names)], rows)
    for name in sorted(reasons.keys() - names):
        print(f"not checked: {name}: {reasons[name]}{'. Pass --interpret' * (name == 'triton' and not interpret)}")
    total, more = sum(one.cases for one in results), [f"and {len(failures) - SHOWN} more"] * (len(failures) > SHOWN)
    print(f"{total} cases in {time.monotonic() - began:.0f} s, {len(failures)} failed", *failures[:SHOWN], *more, sep="\n  ")
    results = [one._asdict() | {"worst": one.worst if math.isfinite(one.worst) else "inf"} for one in results]
    return {"results": results, "not checked": reasons, "failures": failures}


def main(arguments: list[str] | None = None) -> int:
    """Run the checks and return the exit code, 1 if one fails."""
    parser = argparse.ArgumentParser(prog="python -m moe_runtime.tools.check", description=__doc__.splitlines()[0])
    parser.add_argument("--interpret", action="store_true", help="also run the Triton kernels in its interpreter")
    parser.add_argument("--json", action="store_true", help="print one JSON object; everything else goes to stderr")
    parser.add_argument("--ops", nargs="+", default=CASES, choices=CASES)
    parser.add_argument("--backends", nargs="+", default=backends.BACKENDS, choices=backends.BACKENDS)
    given = parser.parse_args(arguments)
    with contextlib.redirect_stdout(sys.stderr) if given.json else contextlib.nullcontext():
        found = report(given.ops, given.backends, given.interpret, apart=given.ops is CASES)
    if given.json:
        print(json.dumps(found))
    return int(bool(found["failures"]))


if __name__ == "__main__":
    sys.exit(main())
