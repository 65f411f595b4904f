"""Plants mutants, runs the cheapest tests that should see each, and writes docs/mutants.md: who saw which, and who lived.

    python -m tests.stress.mutate --each 6 --minutes 12 --seed 0

Each mutant is a copy of the project with one line changed, and a process of its own, forked from one that has torch and
triton; it ends at the first test that fails. What kills the process is seen too. A mutant that the table has is not run again
(`--anew` runs all); one whose line is gone leaves the table.
"""

import argparse
import contextlib
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

if __name__ == "__main__":  # before Triton is imported
    os.environ |= {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}

import hypothesis  # noqa: F401  loaded once, for all that is forked
import pytest
import torch
import triton  # noqa: F401

from tests.stress import mutant_table
from tests.stress.generic_mutants import ROOT, Mutant, files, mutants_of, planted

OPS, STRESS = "tests/ops/test_{}.py", "tests/stress/test_ops.py::test_is_the_equation[{}]"
# the ops behind a file, whose drawn cases see most of its mutants; then the tests of its own
CASES_OF = {
    "activation": ("moe_mlp", "lora_mlp"), "combine": ("combine", "moe_mlp"),
    "dispatch": ("dispatch", "moe_mlp"), "expansion": ("gram", "dare_merge"), "fusion": ("fused_cross_entropy",),
    "fusion_torch": ("fused_cross_entropy",),
    "grouped_gemm": ("grouped_gemm", "moe_mlp"), "grouped_gemm_backward": ("grouped_gemm", "moe_mlp"),
    "lora": ("lora_mlp",), "lora_backward": ("lora_mlp",), "lora_torch": ("lora_mlp",),
    "merging": ("merge_experts", "merged_linear"),
    "moe_layer": ("moe_layer",), "moe_mlp": ("moe_mlp",),
    "moe_mlp_cpp": ("moe_mlp", "moe_layer"), "moe_mlp_torch": ("moe_mlp", "moe_layer"),
    "moe_mlp_triton": ("moe_mlp", "moe_layer"), "routing": ("route", "moe_layer"), "shared_expert": (), "tiles": (),
    "balance": (), "expert_rows": ("moe_mlp", "grouped_gemm"),
}  # fmt: skip
TESTS_OF = {
    "kernels/activation": ("moe_mlp_forms",),
    "kernels/combine": ("combine_kernel",),
    "kernels/dispatch": ("dispatch_kernel",),
    "kernels/expansion": ("expansion_kernel", "expansion"),
    "kernels/fusion": ("fusion_kernel", "fusion_memory"),
    "kernels/grouped_gemm": ("grouped_gemm_kernel", "grouped_gemm_kernel_op", "grouped_gemm_memory", "moe_mlp_kernel"),
    "kernels/grouped_gemm_backward": ("grouped_gemm_kernel", "grouped_gemm_memory", "moe_mlp_forms", "moe_mlp_kernel"),
    "kernels/lora": ("lora_kernel", "lora"),
    "kernels/lora_backward": ("lora_kernel", "lora"),
    "kernels/merging": ("merging_kernel", "merged_linear"),
    "kernels/routing": ("routing_kernel",),
    "kernels/shared_expert": ("moe_mlp_kernel_graph", "moe_mlp_forms"),
    "kernels/tiles": ("grouped_gemm_kernel", "moe_mlp_kernel"),
    "ops/router_load": ("router_load", "tests/hf/dropin/test_stats.py"),
    "ops/activation": ("activation", "moe_mlp_forms", "moe_mlp"),
    "ops/expert_rows": ("moe_mlp", "grouped_gemm"),
    "ops/fusion_gradients": ("fusion", "fusion_memory"),
    "ops/fusion_torch": ("fusion", "fusion_memory"),
    "ops/lora_torch": ("lora",),
    "ops/merging": ("merging", "merged_linear", "merging_cpp"),
    "ops/merging_cpp": ("merging_cpp",),
    "ops/moe_mlp": ("moe_mlp", "moe_mlp_forms", "moe_mlp_graph"),
    "ops/moe_mlp_cpp": ("moe_mlp_cpp", "moe_mlp_forms"),
    "ops/moe_mlp_torch": ("moe_mlp", "moe_mlp_forms", "workspace"),
    "ops/moe_mlp_triton": ("moe_mlp_kernel", "moe_mlp_kernel_graph"),
}


def tests_of(file: str) -> list[str]:
    """What is run for a mutant of `file`, the cheapest first."""
    path = Path(file)
    short = f"{path.parent.name}/{path.stem}"
    kernel = path.parent.name == "kernels"
    drawn = []
    for op in CASES_OF.get(path.stem, ()):
        backends = ("triton",) if kernel or "triton" in path.stem else ("torch", "triton", "cpp")
        backends = ("cpp",) if path.stem.endswith("_cpp") else backends
        backends = ("torch",) if path.stem == "moe_mlp_torch" else backends
        drawn += [f"{op}-{backend}" for backend in backends if backend != "cpp" or op.startswith(("moe_", "merge"))]
    drawn.sort(key=lambda name: ("torch", "cpp", "triton").index(name.rsplit("-")[-1]))
    own = TESTS_OF.get(short, (path.stem,))
    return [STRESS.format(name) for name in drawn] + [name if "/" in name else OPS.format(name) for name in own]


class _Witness:
    """Remembers the first test that failed."""

    def __init__(self):
        self.name = ""

    def pytest_runtest_logreport(self, report):
        if report.failed and not self.name:
            self.name = report.nodeid

    def pytest_collectreport(self, report):
        if report.failed and not self.name:
            self.name = f"{report.nodeid}, which cannot be loaded"


def _look(folder: Path, tests: list[str], into: Path) -> None:
    """Run the tests in `folder` until one fails, and write its name into a file: "" if none does. Ends the process."""
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    for name in [name for name in sys.modules if name.split(".")[0] in ("tests", "moe_runtime")]:
        del sys.modules[name]
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1), os.dup2(null, 2)
    torch.set_num_threads(1)
    witness = _Witness()
    # one after the other: a later file need not be loaded for what the first one sees
    for test in tests:
        pytest.main(["-x", "-q", "-p", "no:cacheprovider", "--rootdir", str(folder), test], plugins=[witness])
        if witness.name:
            break
    into.write_text(witness.name)
    os._exit(0)


def _ends(child: int, seconds: float) -> bool:
    """Wait for a process; False if it still runs after that time."""
    end = time.monotonic() + seconds
    while not os.waitpid(child, os.WNOHANG)[0]:
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


def witness_of(folder: Path, tests: list[str], seconds: float) -> str:
    """Name the test that fails in `folder`; "" if none does in that time."""
    into = folder / "witness"
    into.unlink(missing_ok=True)
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.setsid()
        _look(folder, tests, into)
    try:
        if not _ends(child, seconds):
            return mutant_table.TIMED_OUT
    finally:  # it may have children of its own, and is none of ours if we are stopped
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(child, 0)
    if into.is_file():
        return into.read_text()
    return "the process, which ended at once"


def copy_project(folder: Path) -> None:
    """What the tests of ops need, without anything that was made."""
    ignore = shutil.ignore_patterns("__pycache__", "*.pyc", "results")
    for name in ("moe_runtime", "kernels", "csrc", "tests"):
        shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=ignore)
    shutil.copy(ROOT / "pyproject.toml", folder)


def look_at(folder: Path, mutant: Mutant, seconds: float) -> str:
    """Plant a mutant in the copy, look who sees it, and take it out."""
    place = folder / mutant.file
    clean = place.read_text()
    place.write_text(planted(mutant, folder))
    try:
        return witness_of(folder, tests_of(mutant.file), seconds)
    finally:
        place.write_text(clean)


def sample(seed: int, each: int) -> list[Mutant]:
    """`each` mutants of every file, mixed so that a run that ends early has some of all."""
    drawn = []
    for file in files():
        found = mutants_of(file)
        drawn += list(enumerate(random.Random(f"{seed} {file}").sample(found, min(each, len(found)))))
    return [mutant for _, mutant in sorted(drawn, key=lambda pair: pair[0])]


def main(argv: list[str] | None = None) -> None:
    """Run the sample, as many as the time allows, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--each", type=int, default=6, help="mutants of each file")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=60.0, help="no further mutant is begun after so long")
    parser.add_argument("--limit", type=float, default=90.0, help="seconds for one mutant; what then runs is undecided")
    parser.add_argument("--only", default="", help="files whose path has this in it")
    parser.add_argument("--anew", action="store_true", help="run also what the table has")
    args = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    there = {mutant.key for file in files() for mutant in mutants_of(file)}
    known = {} if args.anew else {key: seen for key, seen in mutant_table.read().items() if key in there}
    end, new = time.monotonic() + 60 * args.minutes, {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name).resolve()
        copy_project(folder)
        for mutant in sample(args.seed, args.each):
            if args.only not in mutant.file or mutant.key in known or time.monotonic() > end:
                continue
            start = time.monotonic()
            new[mutant.key] = look_at(folder, mutant, args.limit)
            print(
                f"{time.monotonic() - start:5.1f} s  {mutant.file}  {mutant.new}\n    {new[mutant.key] or 'LIVES'}",
                flush=True,
            )
            mutant_table.write(known | new)


if __name__ == "__main__":
    main()
