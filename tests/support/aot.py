"""Kernels as they would be compiled for GPUs that are not there: what tests/test_aot.py and docs/kernels.md are made of."""

import collections
import functools
import importlib
import inspect
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
CAPABILITIES = (80, 86, 89, 90, 100, 120)
AMD = "gfx942"
PROCESSES = 2
FEATURES = {  # name -> instructions; of SASS, mfma of AMD's assembly
    "wide": r"LDG\.E\.(\w+\.)*(128|256)",
    "wgmma": r"HGMMA",
    "tcgen05": r"UTC\w+MMA",
    "mma.sync": r"HMMA",
    "tma": r"UTMALDG",
    "cp.async": r"LDGSTS",
    "mfma": r"v_mfma",
}
TENSOR = ("tcgen05", "wgmma", "mma.sync", "mfma")
GLOBAL_ATOMICS = r"(REDG?|ATOMG?|UTMAREDG?|UBLKRED)(\.|$)"
BLOCKS = ("BLOCK_M", "BLOCK_N", "BLOCK_K")


class Case(NamedTuple):
    """A kernel with the types, constants and launch options that a launcher of ours gives it."""

    kernel: str  # module.name, such as "routing._route_fwd_kernel"
    signature: dict[str, str]  # argument -> "*bf16:16", "i32:16" (":16" as the JIT specialises what 16 divides), "fp32"
    constants: dict[str, object]
    num_warps: int = 4
    num_stages: int = 3
    capabilities: tuple[int, ...] = CAPABILITIES
    expect: tuple[str, ...] = ()  # of FEATURES
    max_registers: int = 255
    note: str = ""  # what sets it apart from the kernel's other cases
    listed: bool = False  # in docs/kernels.md; a kernel without a listed case shows its first one
    shared_atomics: bool = False  # whether it may count in shared memory
    stack: dict[str, int] = {}  # Triton version, such as "3.6" -> bytes that are known to spill there

    def title(self) -> str:
        """Return the tile, or whatever constants the kernel has in its place."""
        c = self.constants
        if all(name in c for name in BLOCKS):
            return "x".join(str(c[name]) for name in BLOCKS) + " persistent" * bool(c.get("PERSISTENT"))
        return " ".join(
            f"{name}={value}" for name, value in c.items() if name.startswith("BLOCK") or name.endswith("PAD")
        )


class Report(NamedTuple):
    """What a case became; `error` alone if it did not compile."""

    error: str = ""
    registers: int = 0
    stack: int = 0
    spills: int = 0  # instructions
    shared: int = 0  # bytes
    features: tuple[str, ...] = ()
    global_atomics: int = 0
    shared_atomics: int = 0


TYPES = {
    "bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "int64": "i64", "int32": "i32", "int16": "i16", "int8": "i8",
    "uint8": "u8", "bool": "i1",
}  # fmt: skip


def record(step: Callable[[], object]) -> list[Case]:
    """Run `step`, which calls launchers on tensors of the meta device, and return a case for each launch in its place."""
    import triton.language as tl

    found, kernels = [], {}
    for path in (ROOT / "kernels").glob("*.py"):
        module = importlib.import_module(f"moe_runtime.kernels.{path.stem}")
        kernels |= {
            f"{path.stem}.{name}": fn for name, fn in vars(module).items() if re.fullmatch(r"_\w+_kernel", name)
        }

    def run(name: str, *args, grid, warmup, num_warps=4, num_stages=3, **kwargs):
        parameters = inspect.signature(kernels[name].fn).parameters
        given = dict(zip(parameters, args)) | kwargs
        assert given.keys() == parameters.keys(), given.keys() ^ parameters.keys()
        types = {a: given[a] if p.annotation is tl.constexpr else _type(given[a]) for a, p in parameters.items()}
        constants = {
            a: t for a, t in types.items() if parameters[a].annotation is tl.constexpr or not isinstance(t, str)
        }
        signature = {a: t for a, t in types.items() if a not in constants}
        found.append(Case(name, signature, constants, num_warps, num_stages))

    try:
        for name, fn in kernels.items():
            fn.run = functools.partial(run, name)
        step()
    finally:
        for fn in kernels.values():
            del fn.run
    return found


def _type(value) -> str | int | None:
    """The type that the JIT would give an argument; itself where the JIT makes a constant of it."""
    if value is None or (isinstance(value, int) and value == 1):
        return value
    if isinstance(value, int):
        return ("i32" if -(2**31) <= value < 2**31 else "i64") + ":16" * (value % 16 == 0)
    if hasattr(value, "block_shape"):
        return f"tensordesc<{_type(value.base)[1:].removesuffix(':16')}[{','.join(map(str, value.block_shape))}]>"
    return f"*{TYPES[str(value.dtype).removeprefix('torch.')]}" + ":16" * (value.data_ptr() % 16 == 0)


def all_cases() -> list[Case]:
    """Collect the CASES of every file in aot_cases/."""
    names = sorted(path.stem for path in (Path(__file__).parent / "aot_cases").glob("*.py"))
    modules = [importlib.import_module(f"tests.support.aot_cases.{name}") for name in names]
    return [case for module in modules for case in module.CASES]


def jobs(cases: list[Case]) -> list[tuple[int, int | str]]:
    """List (index into cases, target): every capability of every case, and AMD once a kernel where it has no descriptor."""
    pairs = [(i, capability) for i, case in enumerate(cases) for capability in case.capabilities]
    first = {}
    for i, case in enumerate(cases):
        if 80 in case.capabilities and not any(t.startswith("tensordesc") for t in case.signature.values()):
            first.setdefault(case.kernel, i)
    return pairs + [(i, AMD) for i in first.values()]


def compile_all(pairs: list[tuple[int, int | str]]) -> dict[tuple[int, int | str], Report]:
    """Compile `pairs` of `jobs(all_cases())` in PROCESSES processes that do not interpret."""
    with ThreadPoolExecutor(PROCESSES) as pool:
        parts = pool.map(_compile_part, (pairs[i::PROCESSES] for i in range(PROCESSES)))
        return {pair: report for part in parts for pair, report in part.items()}


def _compile_part(pairs) -> dict[tuple[int, int | str], Report]:
    """Run one process after another until every pair has its report: a failed assertion of LLVM ends the process."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), env.get("PYTHONPATH")]))
    found = {}
    while left := [pair for pair in pairs if pair not in found]:
        command = [sys.executable, "-m", "tests.support.aot"]
        done = subprocess.run(command, input=json.dumps(left), env=env, capture_output=True, text=True, cwd=ROOT)
        if not done.stdout.startswith("ready"):
            raise RuntimeError(done.stderr[-2000:])
        for line in done.stdout.splitlines():
            if line.startswith("report "):  # a compiler that fails prints whole programs here
                i, target, fields = json.loads(line.removeprefix("report "))
                found[i, target] = Report(**fields | {"features": tuple(fields["features"])})
        if dead := [pair for pair in left if pair not in found]:
            found[dead[0]] = Report(error=f"the compiler died: {done.stderr[-500:]}")
    return found


def _work() -> None:
    cases = all_cases()
    print("ready", flush=True)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        for i, target in json.load(sys.stdin):
            try:
                report = _compile(cases[i], target, Path(file.name))
            except Exception as error:
                report = Report(error=f"{type(error).__name__}: {str(error).strip()[-300:]}")
            print("report " + json.dumps([i, target, report._asdict()]), flush=True)


def _compile(case: Case, target: int | str, file: Path) -> Report:
    import triton
    from triton.backends.compiler import GPUTarget

    module, _, kernel = case.kernel.partition(".")
    fn = getattr(importlib.import_module(f"moe_runtime.kernels.{module}"), kernel)
    attrs = {
        (fn.arg_names.index(a),): [["tt.divisibility", 16]] for a, t in case.signature.items() if t.endswith(":16")
    }
    types = {a: case.signature.get(a, "constexpr").removesuffix(":16") for a in fn.arg_names}
    source = triton.compiler.ASTSource(fn, types, constexprs=case.constants, attrs=attrs)
    gpu = GPUTarget("hip", target, 64) if target == AMD else GPUTarget("cuda", target, 32)
    options = {"num_warps": case.num_warps, "num_stages": case.num_stages, "enable_fp_fusion": True}
    compiled = triton.compile(source, target=gpu, options=options)
    if target == AMD:
        return _read_amd(compiled.asm["amdgcn"], compiled.metadata.shared)
    file.write_bytes(compiled.asm["cubin"])
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    dump = subprocess.run([tool, "-sass", "-res-usage", file], capture_output=True, text=True, check=True).stdout
    return _read_sass(dump, compiled.metadata.shared)


def _read_sass(dump: str, shared: int) -> Report:
    ops = collections.Counter(
        re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)", dump, re.MULTILINE)
    )
    usage = re.search(r"REG:(\d+) STACK:(\d+)", dump)
    assert usage is not None and ops, "cuobjdump printed no program"

    def count(pattern: str) -> int:
        return sum(n for op, n in ops.items() if re.match(pattern, op))

    features = tuple(name for name, pattern in FEATURES.items() if count(pattern))
    spills, atomics = count(r"LDL|STL"), count(GLOBAL_ATOMICS)
    return Report("", int(usage[1]), int(usage[2]), spills, shared, features, atomics, count(r"ATOMS"))


def _read_amd(assembly: str, shared: int) -> Report:
    def number(name: str) -> int:
        return int((re.search(rf"\.{name}:\s+(\d+)", assembly) or [0, 0])[1])

    def count(pattern: str) -> int:
        return len(re.findall(rf"^\s+{pattern}", assembly, re.MULTILINE))

    features = ("mfma",) if count(FEATURES["mfma"]) else ()
    stack, spills = number("private_segment_fixed_size"), number("vgpr_spill_count")
    atomics, counters = count(r"(global|flat|buffer)_atomic"), count(r"ds_(add|or|max|min|inc)_")
    return Report("", number("vgpr_count"), stack, spills, shared, features, atomics, counters)


if __name__ == "__main__":
    _work()
