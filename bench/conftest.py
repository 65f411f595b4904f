"""`interleaved`: all variants in turn, round after round, in one process, so that a noisy machine is noisy for all of them.

What it prints and writes are medians: milliseconds, TFLOP/s or GB/s, and the ratio to the first variant (the floor). On a GPU
it reads CUDA events, adds each variant's peak memory and its share of a ceiling measured in the same process, and takes
whoever does not run out of the comparison, with a note.
"""

import contextlib
import importlib.metadata
import os
import platform
import subprocess
import time
from pathlib import Path

import pytest
import torch

from bench import clock, shapes
from bench.records import Records

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
LOST = 99  # exit code: the CUDA context is lost, and a run with the same --results goes on behind what broke it


def pytest_addoption(parser):
    parser.addoption(
        "--tiny", action="store_true", help="run every benchmark once, at a shape that only proves that it runs"
    )
    parser.addoption("--rounds", type=int, default=15, help="rounds per benchmark")
    parser.addoption("--seconds", type=float, default=3.0, help="of timing per benchmark, on a GPU")
    parser.addoption("--budget", type=float, default=float("inf"), help="seconds after which nothing new begins")
    parser.addoption("--results", type=Path, help="JSON lines: each benchmark is written as it ends, and not run twice")


def pytest_configure(config):
    config.records = Records(config.getoption("--results"))
    config.began = time.monotonic()
    config.pluginmanager.register(config.records, "bench-records")
    if config.getoption("--tiny") and not CUDA:
        # before a benchmark imports triton: the kernels run interpreted
        os.environ["TRITON_INTERPRET"] = "1"
        from tests.support import interp_fast, interp_fix

        interp_fix.install()
        interp_fast.install()


def pytest_generate_tests(metafunc):
    if "shape" in metafunc.fixturenames:
        tiny = metafunc.config.getoption("--tiny")
        name, default = ("GPU_SHAPES", shapes.GPU) if CUDA else ("CPU_SHAPES", shapes.CPU)
        table = shapes.TINY if tiny else getattr(metafunc.module, name, default)
        metafunc.parametrize("shape", [pytest.param(shape, id=name) for name, shape in table.items()])


def pytest_collection_modifyitems(config, items):
    done = config.records.done()
    cpu = not CUDA and not config.getoption("--tiny")
    out = [item for item in items if item.name in done or (cpu and item.get_closest_marker("gpu"))]
    if out:
        config.hook.pytest_deselected(items=out)
        items[:] = [item for item in items if item not in out]


def pytest_runtest_setup(item):
    if time.monotonic() - item.config.began > item.config.getoption("--budget"):
        pytest.skip(clock.OUT_OF_TIME)


def _commit() -> str:
    return _said("git", "rev-parse", "--short", "HEAD") or "unknown"


def _said(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent).stdout.strip()
    except OSError:  # not installed
        return ""


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def _machine() -> dict:
    name = torch.cuda.get_device_name() if CUDA else f"{_processor()}, {torch.get_num_threads()} threads"
    versions = {name: _version(name) for name in ("torch", "triton", "transformers")}
    return {"machine": name, "driver": _driver(), **versions, "commit": _commit(), "date": time.strftime("%Y-%m-%d")}


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "missing"


def _driver() -> str:
    return _said("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader") if CUDA else "none"


def pytest_benchmark_update_machine_info(config, machine_info):
    """Results are published: whose machine it was is nobody's business."""
    machine_info.pop("node", None)


@contextlib.contextmanager
def fits():
    """What does not fit into the GPU's memory is skipped with a note, not failed."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        pytest.skip(f"does not fit into the memory: {clock.one_line(error)}")


@pytest.fixture
def interleaved(benchmark, request):
    """Call as interleaved({name: function}, flops=..., bytes=..., notes={name: why it is missing}).

    The first name is the floor of the ratios. `compare` names the variant from whose result the others' is measured. `details`
    {name: {column: value}} is what a benchmark measured itself on the CPU.
    """
    option = request.config.getoption
    records: Records = request.config.records
    rounds = 1 if option("--tiny") else option("--rounds")
    if CUDA:
        clock.ceilings()  # once, while the memory is empty

    def run(variants, *, flops=0, bytes=0, notes=None, compare=None, details=None):
        info = dict(_machine())
        if not CUDA:
            times, details = clock.measure_cpu(variants, rounds, benchmark.pedantic), details or {}
        else:
            broken = records.broken(request.node.name)
            variants = {name: function for name, function in variants.items() if name not in broken}
            notes = dict(notes or {}) | broken
            try:
                times, details = clock.measure_gpu(
                    variants, rounds, option("--seconds"), benchmark.pedantic, notes, compare
                )
            except clock.ContextLost as lost:
                records.write(request.node.name, broken={lost.variant: lost.note})
                pytest.exit(str(lost), returncode=LOST)
            info |= {"ceilings": clock.ceilings(), "tiles": clock.launch_configs()}
        rows = clock.rows_of(times, details, flops, bytes, info.get("ceilings"))
        info |= {"rounds": len(next(iter(times.values()))), "rows": rows} | ({"notes": notes} if notes else {})
        benchmark.extra_info.update(info)
        records.write(request.node.name, extra_info=info)
        return rows

    try:
        yield run
    finally:
        clock.free()


def pytest_terminal_summary(terminalreporter, config):
    session = getattr(config, "_benchmarksession", None)
    for bench in getattr(session, "benchmarks", None) or ():
        info = bench["extra_info"] if isinstance(bench, dict) else bench.extra_info
        name = bench["name"] if isinstance(bench, dict) else bench.name
        if "rows" not in info:
            continue
        terminalreporter.write_line(f"\n{name}   ({info['machine']}, torch {info['torch']}, {info['rounds']} rounds)")
        floor = next(iter(info["rows"]))
        for variant, row in info["rows"].items():
            rate = "".join(f"{row[unit]:9.3f} {unit}" for unit in ("TFLOP/s", "GB/s") if unit in row)
            share = f"   {row['share']:.0%} of the ceiling" if "share" in row else ""
            line = f"  {variant:24s}{row['ms']:10.2f} ms{row['ratio']:8.3f} x {floor}{rate}"
            terminalreporter.write_line(f"{line}   spread {row['spread']:.0%}{share}")
        for variant, note in info.get("notes", {}).items():
            terminalreporter.write_line(f"  {variant:24s}{note}")
