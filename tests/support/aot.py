"""Kernels compiled for GPUs that are not present, for tests/kernels/test_aot.py and
docs/kernels.md.

Run as a program, it compiles the [case, target] pairs from its standard input, in a process that
does not interpret.
"""

import collections
import functools
import importlib
import importlib.metadata
import inspect
import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import torch

from tests.emulator import library as emulator
from tests.support.captured import captured
from tests.support.stress import share

ROOT = Path(__file__).resolve().parents[2]
CAPABILITIES = (80, 86, 89, 90, 100, 120)
AMD = "gfx942"
PROCESSES = 2
FEATURES = {  # name -> instructions in PTX and in SASS; AMD's assembly has only mfma
    "wide": (r"ld\.global[\w.:]*\.v(2\.b64|4\.b32|4\.b64|8\.b32)", r"LDG\.E\.(\w+\.)*(128|256)"),
    "tcgen05": (r"tcgen05\.mma", r"UTC\w+MMA"),
    "wgmma": (r"wgmma\.mma_async", r"HGMMA"),
    "mma.sync": (r"mma\.sync", r"HMMA"),
    "mfma": (r"v_mfma", r"v_mfma"),
    "tma": (r"cp\.async\.bulk\.tensor", r"UTMALDG"),
    "cp.async": (r"cp\.async\.c[ag]", r"LDGSTS"),
}
TENSOR = {"tcgen05", "wgmma", "mma.sync"}
# PTX names the state space unless the address is generic
GLOBAL_ATOMICS = (r"(atom|red)\.(?!\S*shared)", r"(REDG?|ATOMG?|UTMAREDG?|UBLKRED)(\.|$)")
SHARED_ATOMICS = r"(atom|red)\.\S*shared"
KERNEL = r"_\w+_kernel"
BLOCKS = ("BLOCK_M", "BLOCK_N", "BLOCK_K")


class Case(NamedTuple):
    """A kernel with the types, constants and launch options that one of our launchers passes."""

    kernel: str  # module.name, such as "routing._route_fwd_kernel"
    # argument -> "*bf16:16", "i32:16" (":16" where the JIT specializes on divisibility by 16),
    # "fp32"; for a tuple or a group, one of these or a constant per member
    signature: dict[str, str | tuple | dict[str, object]]
    constants: dict[str, object]  # a dict for a group
    num_warps: int = 4
    num_stages: int = 3
    capabilities: tuple[int, ...] = CAPABILITIES
    expect: tuple[str, ...] = ()  # a subset of FEATURES
    max_registers: int = 255
    note: str = ""  # distinguishes it from the kernel's other cases
    listed: bool = False  # in docs/kernels.md
    shared_atomics: bool = False  # whether atomics in shared memory are allowed
    # Triton version, such as "3.6" -> bytes that are known to spill with it
    stack: dict[str, int] = {}

    def allowed_stack(self) -> int:
        """Return the bytes that may spill with the installed Triton; for an unknown version, the
        largest known number.
        """
        version = ".".join(importlib.metadata.version("triton").split(".")[:2])
        return self.stack.get(version, max(self.stack.values(), default=0))

    def constant(self, name: str, default=None):
        """Return a constant of the kernel, or of one of its groups."""
        for group in (self.constants, *self.constants.values()):
            if isinstance(group, dict) and name in group:
                return group[name]
        return default

    def types(self) -> list[str]:
        """Return the types of all arguments, including those in groups."""
        types = []
        for given in self.signature.values():
            members = given.values() if isinstance(given, dict) else given
            types += [given] if isinstance(given, str) else members
        return [t for t in types if isinstance(t, str)]

    def title(self) -> str:
        """Return the tile, or the constants of a kernel without one."""
        c = {}
        for name, value in self.constants.items():
            c |= value if isinstance(value, dict) else {name: value}
        if all(name in c for name in BLOCKS):
            return (
                "x".join(str(c[name]) for name in BLOCKS)
                + " persistent" * bool(c.get("PERSISTENT"))
                + " joined" * bool(c.get("JOINED"))
            )
        return " ".join(
            f"{name}={value}"
            for name, value in c.items()
            if name.startswith("BLOCK") or name.endswith("PAD")
        )


class Report(NamedTuple):
    """Result of compiling a case; if that fails, only `error` is set."""

    error: str = ""
    registers: int = 0
    stack: int = 0  # bytes; spilled registers need some
    shared: int = 0  # bytes
    features: tuple[str, ...] = ()
    global_atomics: int = 0
    shared_atomics: int = 0
    hazards: tuple[str, ...] = ()  # known miscompilations by Triton or ptxas


TYPES = {
    "bfloat16": "bf16",
    "float16": "fp16",
    "float32": "fp32",
    "int64": "i64",
    "int32": "i32",
    "int16": "i16",
    "int8": "i8",
    "uint8": "u8",
    "bool": "i1",
}


@functools.cache
def kernels() -> dict[str, object]:
    """Return the kernels of kernels/ by the names that cases use."""
    names = sorted(path.stem for path in (ROOT / "kernels").glob("*.py"))
    modules = {}
    for name in names:
        modules[name] = vars(importlib.import_module(f"moe_runtime.kernels.{name}"))
    return {
        f"{m}.{name}": fn
        for m, all_ in modules.items()
        for name, fn in all_.items()
        if re.fullmatch(KERNEL, name)
    }


@functools.cache
def _parameters(kernel: str) -> tuple[dict[str, bool], set[str]]:
    """Return the kernel's arguments, whether each is a constant, and those that the JIT must not
    specialize.
    """
    import triton.language as tl

    fn = kernels()[kernel]
    # the interpreter keeps the arguments of triton.jit
    plain = fn.kwargs["do_not_specialize"] if hasattr(fn, "kwargs") else fn.do_not_specialize
    parameters = inspect.signature(fn.fn).parameters
    return {
        name: parameter.annotation is tl.constexpr for name, parameter in parameters.items()
    }, set(plain or ())


def record(step: Callable[[], object]) -> list[Case]:
    """Run `step`, which calls launchers on tensors on the meta device, and return a case for each
    launch instead of running it.
    """
    found = []

    def run(
        kernel: str, *args, grid, warmup, num_warps=4, num_stages=3, enable_fp_fusion=True, **kwargs
    ):
        parameters, plain = _parameters(kernel)
        given = dict(zip(parameters, args)) | kwargs
        assert given.keys() == parameters.keys(), given.keys() ^ parameters.keys()
        types = {}
        for name, v in given.items():
            types[name] = _constant(v) if parameters[name] else _type(v, name not in plain)
        signature = {
            name: t
            for name, t in types.items()
            if isinstance(t, str | tuple | dict) and not parameters[name]
        }
        constants = {name: t for name, t in types.items() if name not in signature}
        found.append(
            Case(
                kernel,
                signature,
                constants,
                num_warps,
                num_stages,
            )
        )

    try:
        for name, fn in kernels().items():
            fn.run = functools.partial(run, name)
        step()
    finally:
        for fn in kernels().values():
            vars(fn).pop("run", None)
    return found


def cases_of(
    step: Callable[[], object], not_specialised: tuple[str, ...] = (), **fields
) -> list[Case]:
    """Record `step` with some fields replaced and some integers that the JIT does not
    specialize.
    """
    cases = []
    for case in record(step):
        loose = dict.fromkeys(
            set(not_specialised) & set(case.signature),
            "i32",
        )
        cases.append(
            case._replace(
                signature=case.signature | loose,
                **fields,
            )
        )
    return cases


def meta(*shape: int, dtype=torch.int32) -> torch.Tensor:
    """Return a tensor without memory."""
    return torch.empty(shape, dtype=dtype, device="meta")


def name_of(dtype: torch.dtype) -> str:
    """Return a dtype's name without its package."""
    return str(dtype).removeprefix("torch.")


# tensor core instructions by capability
CORES = {
    80: "mma.sync",
    86: "mma.sync",
    89: "mma.sync",
    90: "wgmma",
    100: "tcgen05",
    120: "mma.sync",
}


def _constant(value):
    """Return a constant; a group becomes a dict."""
    return value._asdict() if hasattr(value, "_fields") else value


def _type(value, specialise: bool = True) -> str | int | tuple | dict | None:
    """Return the type that the JIT would give an argument, or the argument itself if the JIT makes
    it a constant.
    """
    if hasattr(value, "_fields"):
        values = {}
        for name, v in value._asdict().items():
            values[name] = _type(v, specialise)
        return values
    if isinstance(value, tuple):  # of tensors
        return tuple(_type(v, specialise) for v in value)
    if value is None or (isinstance(value, int) and value == 1 and specialise):
        return value
    if isinstance(value, int):
        return ("i32" if -(2**31) <= value < 2**31 else "i64") + ":16" * (
            specialise and value % 16 == 0
        )
    if isinstance(value, float):
        return "fp32"
    if hasattr(value, "block_shape"):
        block = ",".join(map(str, value.block_shape))
        return f"tensordesc<{_type(value.base)[1:].removesuffix(':16')}[{block}]>"
    return f"*{TYPES[str(value.dtype).removeprefix('torch.')]}" + ":16" * (
        value.data_ptr() % 16 == 0
    )


def all_cases() -> list[Case]:
    """Collect the CASES of every file in aot_cases/; if a kernel lists none, its first case is
    listed.
    """
    names = sorted(path.stem for path in (Path(__file__).parent / "aot_cases").glob("*.py"))
    cases = [
        case
        for name in names
        for case in importlib.import_module(f"tests.support.aot_cases.{name}").CASES
    ]
    listed = {case.kernel for case in cases if case.listed}
    for i, case in enumerate(cases):
        if case.kernel not in listed:
            cases[i] = case._replace(listed=True)
            listed.add(case.kernel)
    return cases


def jobs(cases: list[Case]) -> list[tuple[int, int | str]]:
    """List (index into cases, target): the capabilities of every case, and AMD once per kernel, for
    a case without descriptors.

    A case that leaves its capabilities open is compiled for all of them if it is listed, else for
    the two most common ones; `make test` uses only one of these, alternating between a kernel's
    cases.
    """
    pairs = []
    first = {}
    turns = collections.Counter()
    for i, case in enumerate(cases):
        if case.capabilities != CAPABILITIES or case.listed:
            pairs += [(i, capability) for capability in case.capabilities]
        else:
            pairs += [
                (i, capability) for capability in share([80, 90], turns[case.kernel] % 2, of=2)
            ]
            turns[case.kernel] += 1
        if 80 in case.capabilities and not any("tensordesc" in t for t in case.types()):
            first.setdefault(case.kernel, i)
    return pairs + [(i, AMD) for i in first.values()]


def compile_all(work: list[tuple[Case, int | str]]) -> list[Report]:
    """Compile each case for its target (see `jobs`), in PROCESSES processes."""
    parts = [work[i::PROCESSES] for i in range(PROCESSES)]
    with ThreadPoolExecutor(PROCESSES) as pool:
        found = list(pool.map(_compile_part, parts))
    return [found[i % PROCESSES][i // PROCESSES] for i in range(len(work))]


def _compile_part(work: list) -> list[Report]:
    """Start one process after another until all cases are done, since a failed assertion in the
    compiler ends the process.
    """
    env = {}
    for name, value in os.environ.items():
        if name != "TRITON_INTERPRET":
            env[name] = value
    found = []
    while left := work[len(found) :]:
        pairs = json.dumps([[case._asdict(), target] for case, target in left])
        command = [sys.executable, "-m", "tests.support.aot"]
        done = captured(command, input=pairs, env=env, cwd=ROOT)
        if not done.stdout.startswith("ready"):
            raise RuntimeError(done.stderr[-2000:])
        for line in done.stdout.splitlines():
            if line.startswith("report "):  # a failing compiler prints whole programs here
                fields = json.loads(line.removeprefix("report "))
                found.append(
                    Report(
                        **fields | {name: tuple(fields[name]) for name in ("features", "hazards")}
                    )
                )
        if done.returncode:
            found.append(Report(error=f"the compiler died: {done.stderr[:300]}"))
    return found


def _work() -> None:
    print("ready", flush=True)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        for case, target in json.load(sys.stdin):
            try:
                report = _compile(Case(**case), target, Path(file.name))
            except Exception as error:
                report = Report(error=f"{type(error).__name__}: {str(error).strip()[-300:]}")
            print("\nreport " + json.dumps(report._asdict()), flush=True)


def assemble(case: Case, target: int | str):
    """Compile a case for its target; `asm` of Triton's result has the text of each stage."""
    import triton
    from triton.backends.compiler import GPUTarget

    fn = kernels()[case.kernel]
    types = dict.fromkeys(fn.arg_names, "constexpr")
    attrs = {}
    constants = {}
    for name, value in case.constants.items():
        if isinstance(value, dict):
            value = collections.namedtuple(name, value)(**value)
        # JSON has no tuples
        constants[name] = tuple(value) if isinstance(value, list) else value
    for name, given in case.signature.items():
        place = (fn.arg_names.index(name),)
        if isinstance(given, str):
            members = {place: given}
        else:
            values = given.values() if isinstance(given, dict) else given
            members = {(*place, i): t for i, t in enumerate(values)}
        plain = []
        for path, t in members.items():
            if not isinstance(t, str):
                constants[path] = t
                plain.append("constexpr")
                continue
            if t.endswith(":16"):
                attrs[path] = [["tt.divisibility", 16]]
            plain.append(t.removesuffix(":16"))
        if isinstance(given, str):
            types[name] = plain[0]
        elif isinstance(given, dict):
            types[name] = collections.namedtuple(name, given)(*plain)
        else:
            types[name] = tuple(plain)
    source = triton.compiler.ASTSource(
        fn,
        types,
        constexprs=constants,
        attrs=attrs,
    )
    gpu = GPUTarget("hip", target, 64) if target == AMD else GPUTarget("cuda", target, 32)
    options = {
        "num_warps": case.num_warps,
        "num_stages": case.num_stages,
        "enable_fp_fusion": True,
    }
    return triton.compile(source, target=gpu, options=options)


def _compile(case: Case, target: int | str, file: Path) -> Report:
    compiled = assemble(case, target)
    if target == AMD:
        return _read_amd(compiled.asm["amdgcn"], compiled.metadata.shared)
    file.write_bytes(compiled.asm["cubin"])
    usage = re.search(
        r"REG:(\d+) STACK:(\d+)",
        _cuobjdump("-res-usage", file),
    )
    ptx = compiled.asm["ptx"]
    report = _read_ptx(
        ptx,
        int(usage[1]),
        int(usage[2]),
        compiled.metadata.shared,
    )
    hazards = chained_products(compiled.asm["ttir"]) + unknown_opcodes(ptx)
    # newer versions deliberately leave them out
    if not importlib.metadata.version("triton").startswith("3.6."):
        hazards += missing_fences(ptx)
    listed = case.listed and TENSOR & set(case.expect)
    if listed or REGISTER_A.search(ptx):  # disassembling takes longer than most compilations
        dump = _cuobjdump("-sass", file)
        hazards += rewritten_operands(dump)
        if listed:
            _check_sass(report, dump)
    return report._replace(hazards=tuple(hazards))


def chained_products(ttir: str) -> list[str]:
    """Find products of one loop iteration that are added to each other, which is wrong on sm_100
    with Triton 3.6 to 3.8 (triton#10821).
    """
    found = []
    open_regions = []
    products = {}
    for number, line in enumerate(ttir.splitlines()):
        if line.lstrip().startswith("}"):
            open_regions.pop()
        loops = [region for region in open_regions if region is not None]
        if product := re.search(
            r"(%[\w#]+) = tt\.dot(?:_scaled)? %\S+, %\S+, (%[\w#]+)",
            line,
        ):
            if loops and products.get(product[2]) == loops[-1]:
                found.append(f"two tl.dot into one accumulator in a loop: {line.strip()[:60]}")
            products[product[1]] = loops[-1] if loops else None
        if re.sub(r" loc\(#loc\d*\)$", "", line).endswith("{"):
            open_regions.append(number if re.search(r"scf\.(for|while)|^\s*} do", line) else None)
    return found


def unknown_opcodes(ptx: str) -> list[str]:
    """Return what tests/emulator does not know of a kernel, so that it cannot execute it."""
    if shutil.which("g++") is None:
        return []
    try:
        emulator.Program(ptx)
    except emulator.EmulationError as error:
        return [f"tests/emulator: {error}"]
    return []


def missing_fences(ptx: str) -> list[str]:
    """Find loops in which tensor cores read what cp.async wrote, without a fence between the two
    proxies (triton#9610).
    """
    lines = ptx.splitlines()
    labels = {}
    found = []
    for number, line in enumerate(lines):
        if label := re.match(r"(\$\w+):", line):
            labels[label[1]] = number
        branch = re.search(r"\bbra(?:\.uni)?\s+(\$\w+);", line)
        if branch and branch[1] in labels:
            body = "\n".join(lines[labels[branch[1]] : number])
            mixed = re.search(r"cp\.async\.c[ag]", body) and re.search(
                r"wgmma\.mma_async|tcgen05\.mma", body
            )
            if mixed and "fence.proxy.async" not in body:
                found.append(
                    f"no fence.proxy.async in the loop {branch[1]}, where a product reads what "
                    "cp.async wrote"
                )
    return found


# wgmma's A is in registers: the accumulators are followed by more registers, not by a descriptor
REGISTER_A = re.compile(r"wgmma\.mma_async\S+ \{[^}]*\}, \{")
SASS = re.compile(
    r"^\s+/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)\s*([^;]*);", re.MULTILINE
)


def loops(sass: str) -> tuple[list, list[list]]:
    """Return a program as (address, instruction, operands), and its loops that contain tensor core
    products.
    """
    program = []
    for at, op, rest in SASS.findall(sass):
        # on newer architectures, scheduling notes follow after a gap
        operands = re.split(r"\s{2,}", rest)[0]
        program.append((int(at, 16), op, [part.strip() for part in operands.split(",")]))
    places = {at: i for i, (at, _, _) in enumerate(program)}
    found = []
    for i, (_, op, rest) in enumerate(program):
        if op.startswith("BRA") and rest[-1].startswith("0x"):
            start = places.get(int(rest[-1], 16), i + 1)
        else:
            start = i + 1
        if start <= i and any(op.startswith("HGMMA") for _, op, _ in program[start:i]):
            found.append(program[start : i + 1])
    return program, found


def steady(body: list) -> list:
    """Return a loop's instructions without those that a branch skips: a tile's first and last."""
    kept = []
    end = 0
    last = body[-1][0]
    for at, op, rest in body:
        if at >= end:
            kept.append((at, op, rest))
        if op.startswith("BRA") and rest[-1].startswith("0x") and int(rest[-1], 16) <= last:
            end = max(end, int(rest[-1], 16))
    return kept


def main_loop(case: Case) -> str:
    """Compile a case for sm_90; return its registers, its stack and the instructions of a step of
    its shortest loop with products.
    """
    compiled = assemble(case, 90)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(compiled.asm["cubin"])
        usage = re.search(
            r"REG:(\d+) STACK:(\d+)",
            _cuobjdump("-res-usage", Path(file.name)),
        )
        body = steady(min(loops(_cuobjdump("-sass", Path(file.name)))[1], key=len))
    kinds = collections.Counter(
        op if op.startswith("HGMMA") else op.split(".")[0] for _, op, _ in body
    )
    shown = ("HGMMA", "LDGSTS", "UTMALDG", "UTMASTG", "LDS", "STSM", "BAR", "FENCE")
    parts = []
    for op, count in kinds.items():
        if op.startswith(shown):
            parts.append(f"{count} {op}")
    return (
        f"{usage[1]} registers, {usage[2]} bytes of stack, {len(body)} instructions: "
        f"{', '.join(parts)}"
    )


def rewritten_operands(sass: str) -> list[str]:
    """Find registers that are written while an asynchronous product may still read its A from them
    (triton#11781).
    """
    program, bodies = loops(sass)
    return sorted(
        {line for body in (program, *(body * 2 for body in bodies)) for line in _rewritten(body)}
    )


def _rewritten(body: list) -> list[str]:
    # A's registers of the products that may be running: of complete groups, and of the open one
    found = []
    groups = []
    read = set()
    for at, op, rest in body:
        busy = read.union(*groups)
        if early := written(op, rest) & busy:
            found.append(f"{op} at {at:#x} writes R{min(early)}, which a product may still read")
        if op.startswith("HGMMA"):
            if number := re.match(r"R(\d+)", rest[1]):
                read |= set(range(int(number[1]), int(number[1]) + 4))
            if rest[-1] == "gsb0":
                groups = [*groups, read]
                read = set()
        elif op.startswith("WARPGROUP.DEPBAR"):
            groups = groups[len(groups) - min(int(rest[-1], 16), len(groups)) :]
    return found


def written(op: str, operands: list[str]) -> set[int]:
    """Return the numbers of the registers that an instruction writes."""
    # a predicate, if any, comes first
    first = next(
        (part for part in operands[:2] if not re.fullmatch(r"!?U?P\w+", part)),
        "",
    )
    number = re.match(r"R(\d+)", first)
    if number is None or op.startswith(("ST", "RED", "BAR", "SYNCS", "UTMA")):
        return set()
    if ".128" in op or op.endswith(".4"):
        count = 4
    elif ".64" in op or ".WIDE" in op or op.endswith(".2"):
        count = 2
    else:
        count = 1
    if tile := re.match(r"HGMMA\.64x(\d+)x\d+\.F32", op):
        count = int(tile[1]) // 2
    return set(range(int(number[1]), int(number[1]) + count))


def _cuobjdump(what: str, file: Path) -> str:
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    return captured([tool, what, file], check=True).stdout


def _read_ptx(ptx: str, registers: int, stack: int, shared: int) -> Report:
    ops = re.findall(r"^\s+(?:@!?%\w+\s+)?([a-z][\w.:]+)", ptx, re.MULTILINE)

    def count(pattern: str) -> int:
        return sum(bool(re.match(pattern, op)) for op in ops)

    features = tuple(name for name, (pattern, _) in FEATURES.items() if count(pattern))
    return Report(
        "", registers, stack, shared, features, count(GLOBAL_ATOMICS[0]), count(SHARED_ATOMICS)
    )


def _check_sass(report: Report, dump: str) -> None:
    """Fail if ptxas generates other instructions than the PTX asks for, or spills without a
    stack.
    """
    ops = re.findall(
        r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)",
        dump,
        re.MULTILINE,
    )
    assert ops, "cuobjdump printed no program"
    features = tuple(
        name for name, (_, pattern) in FEATURES.items() if any(re.match(pattern, op) for op in ops)
    )
    assert features == report.features, f"SASS has {features}, PTX {report.features}"
    spills, atomics = (
        sum(bool(re.match(p, op)) for op in ops) for p in ("LDL|STL", GLOBAL_ATOMICS[1])
    )
    assert spills == 0 or report.stack, f"{spills} instructions spill without a stack"
    assert bool(atomics) == bool(report.global_atomics), (
        f"{atomics} atomics in SASS, {report.global_atomics} in PTX"
    )


def _read_amd(assembly: str, shared: int) -> Report:
    def number(name: str) -> int:
        return int((re.search(rf"\.{name}:\s+(\d+)", assembly) or [0, 0])[1])

    def count(pattern: str) -> int:
        return len(re.findall(rf"^\s+{pattern}", assembly, re.MULTILINE))

    features = ("mfma",) if count(FEATURES["mfma"][0]) else ()
    atomics = count(r"(global|flat|buffer)_atomic")
    counters = count(r"ds_(add|or|max|min|inc)_")
    stack = number("private_segment_fixed_size")
    registers = number("vgpr_count")
    return Report("", registers, stack, shared, features, atomics, counters)


def complaints(case: Case, target: int | str, report: Report) -> list[str]:
    """List the problems of a compiled case. For AMD, it only has to compile."""
    from moe_runtime.kernels.tiles import SHARED_MEMORY

    if report.error or target == AMD:
        return [report.error] if report.error else []
    bad = []
    if report.stack > (allowed := case.allowed_stack()):
        bad.append(f"spills into {report.stack} bytes of stack; want {allowed}")
    if report.registers > case.max_registers:
        bad.append(f"{report.registers} registers; want {case.max_registers}")
    if report.shared > SHARED_MEMORY[target]:
        bad.append(
            f"{report.shared} bytes of shared memory; sm_{target} has {SHARED_MEMORY[target]}"
        )
    if report.global_atomics or (report.shared_atomics and not case.shared_atomics):
        bad.append(
            f"{report.global_atomics} atomics on global memory, {report.shared_atomics} on shared; "
            "want none"
        )
    if missing := [name for name in case.expect if name not in report.features]:
        bad.append(
            f"no {', '.join(missing)}; has {', '.join(report.features) or 'nothing special'}"
        )
    grouped = case.kernel.startswith("grouped_gemm")
    if target >= 100 and case.constant("TMA") and not case.constant("EVEN_K"):
        bad.append(
            "descriptors for a sum that ends inside of a block; sm_100 multiplies wrongly "
            "(triton#10927)"
        )
    width = case.constant("BLOCK_N", 0)
    if "up_fwd" in case.kernel and case.constant("INTERLEAVED"):
        width *= 2
    if grouped and 100 <= target < 110 and width > 128:
        bad.append(
            f"a product of {width} columns; want 128 on sm_100 until one has run a wider one"
        )
    return bad + list(report.hazards)


if __name__ == "__main__":
    _work()
