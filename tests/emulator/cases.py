"""Layers on the emulator against float64, and faults planted in their PTX.

    python -m tests.emulator.cases 90             # every case, as on a GPU of capability 9.0
    python -m tests.emulator.cases 90 --quick     # those of `make test`
    python -m tests.emulator.cases 90 --faults    # every fault

Prints a line of JSON for each: {"name": ..., "error": largest relative error, "problem": ...}.
"""

import argparse
import json
import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

os.environ["TRITON_INTERPRET"] = "0"

import torch
import yaml

from moe_runtime.kernels import tiles
from moe_runtime.kernels.candidates import candidates
from moe_runtime.kernels.tiles import Problem, Tile
from moe_runtime.ops.moe_mlp import moe_mlp
from tests.emulator import driver
from tests.emulator.library import ARRIVALS, EmulationError

BOUND = 1e-2  # relative error of bfloat16 outputs and gradients


class Case(NamedTuple):
    """A layer: T tokens of size H, E experts of size I and one more that no token selects."""

    T: int
    H: int
    I: int
    E: int
    top_k: int
    tile: dict[str, Tile]
    backward: bool = True
    shared: str = "group"  # "dense": every token also selects expert 0, the last of its slots


def pools(arch: int) -> list[dict[str, Tile]]:
    """Return the tuner's candidates for `arch`, one of each kernel at a time."""
    found = {}
    for kernel in tiles.KERNELS:
        found[kernel] = candidates(
            Problem(kernel, arch, "bfloat16", 2048, 2048, 4096, gated=kernel == "up")
        )
    rounds = range(max(map(len, found.values())))
    return [{kernel: pool[i % len(pool)] for kernel, pool in found.items()} for i in rounds]


def cases(arch: int) -> dict[str, Case]:
    """Return every tile of the table for `arch`, on sums longer than the pipeline, the tuner's
    candidates, and edges.
    """
    table = tiles.TABLE[tiles.nearest(arch)]
    result = {}
    for row in range(max(map(len, table.values()))):
        tile = {}
        for kernel, entries in table.items():
            tile[kernel] = entries[min(row, len(entries) - 1)][1]
        # ragged: 16 divides every size, a block none; a gradient's sum is over rows
        many = Case(T=291, H=400, I=336, E=2, top_k=2, tile=tile)
        result[f"row {row}"] = many
        if arch >= 90:
            result[f"row {row}, persistent"] = many._replace(
                tile={kernel: one._replace(PERSISTENT=True) for kernel, one in tile.items()}
            )
    small = next(reversed(result.values())).tile
    for number, tile in enumerate(pools(arch)):
        result[f"candidates {number}"] = many._replace(T=259, tile=tile)
    result["one token"] = Case(T=1, H=64, I=32, E=4, top_k=2, tile=small)
    shared = Case(T=70, H=128, I=96, E=3, top_k=2, tile=small, shared="dense")
    result["shared expert"] = shared
    result["more experts than rows"] = Case(T=3, H=96, I=80, E=29, top_k=1, tile=small)
    return result


AMPERE = {"up": Tile(64, 64, 64, 4, 3), "down": Tile(16, 64, 64, 4, 3)}
HOPPER = {
    "up": Tile(64, 64, 64, 4, 3, TMA=True, JOINED=True),
    "down": Tile(64, 128, 64, 4, 3, TMA=True, PERSISTENT=True),
}
BLACKWELL = {
    "up": Tile(64, 64, 64, 4, 3, TMA=True),
    "down": Tile(128, 64, 64, 4, 3, TMA=True, PERSISTENT=True),
}
# smaller ones, with the instructions of all: up to 512 slots are sorted by one kernel, and the down
# projection of few rows is one with the sum over slots
QUICK = {
    80: {
        "few": Case(40, 256, 64, 20, 2, AMPERE, backward=False),
        "many": Case(259, 256, 256, 2, 2, AMPERE, backward=False),
    },
    90: {
        "few": Case(70, 256, 128, 2, 1, HOPPER, backward=False),
        "many": Case(259, 256, 256, 2, 2, HOPPER, backward=False),
    },
    100: {
        "few": Case(70, 256, 128, 2, 1, BLACKWELL, backward=False),
        "many": Case(259, 256, 256, 2, 2, BLACKWELL, backward=False),
    },
}


class Inputs(NamedTuple):
    """A layer's tensors."""

    leaves: list[torch.Tensor]  # x, up, down, the weights of slots
    idx: torch.Tensor
    upstream: torch.Tensor


def inputs(case: Case) -> Inputs:
    """Draw a layer's tensors."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).bfloat16()

    E = case.E + 1
    up = draw(E, 2 * case.I, case.H) / case.H**0.5
    down = draw(E, case.H, case.I) / case.I**0.5
    chosen = [torch.randperm(case.E, generator=generator)[: case.top_k] for _ in range(case.T)]
    idx = torch.stack(chosen)
    if case.shared == "dense":
        idx = torch.cat([idx + 1, torch.zeros(case.T, 1, dtype=torch.int64)], 1)
    weights = torch.rand(*idx.shape, generator=generator)
    leaves = [draw(case.T, case.H), up, down, weights]
    return Inputs(leaves, idx, draw(case.T, case.H))


def results(case: Case, given: Inputs, backend: str, dtype: torch.dtype | None) -> list:
    """Return the layer's output and, with a backward pass, the gradients of its tensors."""
    leaves = [(t if dtype is None else t.to(dtype)).clone() for t in given.leaves]
    for leaf in leaves:
        leaf.requires_grad_(case.backward)
    out = moe_mlp(*leaves, given.idx, backend=backend, shared=case.shared)
    if not case.backward:
        return [out]
    upstream = given.upstream.to(out.dtype)
    return [out.detach(), *torch.autograd.grad(out, leaves, upstream)]


def largest_error(actual: list, expected: list) -> float:
    """Return the largest relative Frobenius error; infinity for NaN."""
    worst = 0.0
    for a, e in zip(actual, expected, strict=True):
        error = float((a.double() - e).norm() / e.norm())
        worst = max(worst, error if error == error else float("inf"))
    return worst


def run(case: Case, arrivals: tuple[str, ...] = ARRIVALS) -> dict:
    """Run a case in every order of time; its results must have the same bits in each."""
    given = inputs(case)
    expected = results(case, given, "torch", torch.float64)
    first = None
    with tiles.force(**case.tile):
        for seed, arrival in enumerate(arrivals):
            try:
                with driver.scheduled(arrival, seed):
                    actual = results(case, given, "triton", None)
            except EmulationError as error:
                return {"error": float("inf"), "problem": f"{arrival}: {error}"}
            error = largest_error(actual, expected)
            if not error < BOUND:
                return {"error": error, "problem": f"{arrival}: wrong results"}
            first = first or actual
            if not all(map(torch.equal, actual, first)):
                return {"error": error, "problem": f"{arrival}: other bits than {arrivals[0]}"}
    return {"error": error, "problem": None}


class Fault(NamedTuple):
    """A text in a kernel's PTX, replaced where it matches for the `nth` time; -1: everywhere."""

    what: str
    arch: int
    case: str  # of QUICK
    kernel: str  # the beginning of its name
    old: str  # a regular expression
    new: str
    nth: int = -1


_FAULTS = yaml.safe_load(Path(__file__).with_name("faults.yaml").read_text())
FAULTS = [Fault(**fields) for fields in _FAULTS]


def planted(fault: Fault) -> Callable[[str, str], str]:
    """Return what plants a fault in the kernels that it names."""

    def edit(name: str, ptx: str) -> str:
        if not re.match(fault.kernel, name):
            return ptx
        places = list(re.finditer(fault.old, ptx))
        if fault.nth >= 0:
            places = places[fault.nth : fault.nth + 1]
        for place in reversed(places):
            ptx = ptx[: place.start()] + place.expand(fault.new) + ptx[place.end() :]
        planted_in.extend([name] * len(places))
        return ptx

    return edit


planted_in: list[str] = []  # kernels that a fault was planted in


def run_fault(fault: Fault) -> dict:
    """Run the quick case of a fault's GPU with the fault; a problem is what must come out."""
    planted_in.clear()
    driver.forget()
    driver.edits[:] = [planted(fault)]
    try:
        result = run(QUICK[fault.arch][fault.case])
    finally:
        driver.edits.clear()
        driver.forget()
    if not planted_in:
        result["problem"] = None  # not planted, so not caught
    return result | {"planted": len(planted_in)}


def all_results(args: argparse.Namespace) -> Iterator[tuple[str, dict]]:
    """Yield the name and the result of each case or fault."""
    if args.faults:
        for fault in FAULTS:
            if fault.arch == args.arch and args.only in fault.what:
                yield fault.what, run_fault(fault)
        return
    selected = QUICK[args.arch] if args.quick else cases(args.arch)
    for name, case in selected.items():
        if args.only in name:
            yield name, run(case)


def main() -> None:
    """Run what the arguments select."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("arch", type=int, help="10 * major + minor of the compute capability")
    parser.add_argument("--quick", action="store_true", help="only a small case")
    parser.add_argument("--faults", action="store_true", help="plant faults")
    parser.add_argument("--only", default="", help="a part of a name")
    args = parser.parse_args()
    driver.install(args.arch)
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    start = time.monotonic()
    for name, result in all_results(args):
        seconds = round(time.monotonic() - start, 1)
        print(json.dumps({"name": name, "seconds": seconds} | result), flush=True)
        start = time.monotonic()


if __name__ == "__main__":
    main()
