"""`interleaved`: all variants in turn, round after round, in one process, so that a noisy machine
is noisy for all of them.

What it prints and writes are medians: milliseconds, TFLOP/s or GB/s, the ratio to the first variant
(the floor), the share of a ceiling measured in the same process, and each variant's peak memory. On
a GPU it reads CUDA events, and leaves variants that do not run out of the comparison, with a note.
A file's KIND says what it measures, its ROUNDS how many rounds are enough.
"""

import gc
import importlib.util
import os
import time
from pathlib import Path

import pytest
import torch

from moe_runtime.bench import clock, described, machine, shapes
from moe_runtime.bench.ceilings import ceilings
from moe_runtime.bench.goals import GOALS
from moe_runtime.bench.machine import CUDA
from moe_runtime.bench.records import LOST, Records, Written


def pytest_addoption(parser):
    parser.addoption(
        "--tiny",
        action="store_true",
        help="run every benchmark once, at a shape that only proves that it runs",
    )
    parser.addoption("--rounds", type=int, default=15, help="rounds per benchmark")
    parser.addoption("--seconds", type=float, default=3.0, help="of timing per benchmark, on a GPU")
    parser.addoption(
        "--budget", type=float, default=float("inf"), help="seconds after which nothing new begins"
    )
    parser.addoption(
        "--owner", type=int, help="process that reads the results: without it nothing new begins"
    )
    parser.addoption(
        "--shapes",
        help="names of the benchmarks' shapes, with commas: only these, and in this order",
    )
    parser.addoption(
        "--restarted",
        action="store_true",
        help="the last run died in what it began last: not again",
    )
    parser.addoption(
        "--results",
        type=Path,
        help="JSON lines: each benchmark is written as it ends, and not run twice",
    )


def pytest_configure(config):
    config.records = Written(config.getoption("--results"))
    config.began = time.monotonic()
    if config.getoption("--restarted") and (name := config.records.unfinished()):
        config.records.write(name, failed="the process died")
    config.pluginmanager.register(config.records, "bench-records")
    config.addinivalue_line("markers", "gpu: needs a CUDA GPU")
    config.interpreted = config.getoption("--tiny") and not CUDA and _interpret()


def _interpret() -> bool:
    """Run Triton's kernels in its interpreter, patched as in the tests; False where the tests are
    not installed.
    """
    try:
        spec = importlib.util.find_spec("tests.support.interp_fix")
    except ModuleNotFoundError:
        return False
    if spec is None:
        return False
    os.environ["TRITON_INTERPRET"] = "1"  # before a benchmark imports triton
    from tests.support import interp_fast, interp_fix

    interp_fix.install()
    interp_fast.install()
    return True


def pytest_generate_tests(metafunc):
    tiny = metafunc.config.getoption("--tiny")
    if "size" in metafunc.fixturenames:  # SIZES: of a GPU, of a CPU, tiny ones
        table = metafunc.module.SIZES[2 if tiny else not CUDA]
        metafunc.parametrize("size", [pytest.param(size, id=name) for name, size in table.items()])
    if "shape" in metafunc.fixturenames:
        name, default = ("GPU_SHAPES", shapes.GPU) if CUDA else ("CPU_SHAPES", shapes.CPU)
        table = shapes.TINY if tiny else getattr(metafunc.module, name, default)
        if chosen := _chosen(metafunc.config):
            table = {name: table[name] for name in chosen if name in table}
        metafunc.parametrize(
            "shape", [pytest.param(shape, id=name) for name, shape in table.items()]
        )


def _chosen(config) -> list[str]:
    return config.getoption("--shapes").split(",") if config.getoption("--shapes") else []


def pytest_collection_modifyitems(config, items):
    done = config.records.done()
    if CUDA and clock.launch_configs() != "built in":  # moe-runtime tune has run since
        done -= config.records.measured_with("built in")
    kernels = CUDA or config.interpreted
    out = [
        item
        for item in items
        if item.name in done or (not kernels and item.get_closest_marker("gpu"))
    ]
    if out:
        config.hook.pytest_deselected(items=out)
        items[:] = [item for item in items if item not in out]
    # run first on a GPU, since a run may be cut short
    wanted = set()
    for goal in GOALS:
        for name in goal.benchmarks:
            wanted.add(name)
    items.sort(key=lambda item: item.name not in wanted)
    if chosen := _chosen(config):  # all functions of a shape before the next one's
        items.sort(key=lambda item: _place(item, chosen))


def _place(item, chosen: list[str]) -> int:
    parameters = f"-{item.callspec.id}-" if hasattr(item, "callspec") else ""
    return next((i for i, name in enumerate(chosen) if f"-{name}-" in parameters), len(chosen))


def pytest_collection_finish(session):
    # freezes what the imports created: otherwise garbage collection takes half a second, twice per
    # variant
    gc.collect()
    gc.freeze()


def pytest_runtest_setup(item):
    if item.config.getoption("--owner") not in (None, os.getppid()):
        pytest.exit("the parent process has exited", returncode=1)
    if time.monotonic() - item.config.began > item.config.getoption("--budget"):
        pytest.skip(clock.OUT_OF_TIME)


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem):
    try:
        return (yield)
    except ImportError as error:
        for package in ("transformers", (error.name or "transformers").partition(".")[0]):
            if reason := machine.missing(package):
                pytest.skip(f"{package} {reason}")
        raise


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    # outside of the timing; all later ones would fail
    if report.failed and CUDA and clock.context_lost():
        item.config.records.pytest_runtest_logreport(report)
        pytest.exit(f"{item.name} broke the CUDA context", returncode=LOST)
    return report


def pytest_benchmark_update_machine_info(config, machine_info):
    """Results are published, so they must not name the machine."""
    machine_info.pop("node", None)


@pytest.fixture
def interleaved(benchmark, request):
    """Call as interleaved({name: function}, flops=..., bytes=..., tokens=..., notes={name: why it
    is missing}).

    The first name is the floor of the ratios. `compare` names the variant from whose result the
    others' is measured. `dtype` says which matmul is the ceiling. `details` {name: {column: value}}
    is what a benchmark measured itself; it goes before what is measured here. `held` returns,
    behind a call of each, the bytes that were there before it.
    """
    option = request.config.getoption
    records: Records = request.config.records
    if option("--tiny"):
        rounds = 1
    else:
        rounds = min(option("--rounds"), getattr(request.module, "ROUNDS", option("--rounds")))
    if CUDA:
        ceilings(torch.bfloat16, option("--tiny"))  # once, while the memory is empty

    def run(
        variants,
        *,
        flops=0,
        bytes=0,
        tokens=0,
        dtype=None,
        notes=None,
        compare=None,
        details=None,
        held=None,
    ):
        info = machine.describe() | described.fields(request, dtype, flops, bytes, tokens)
        info |= {"tiny": option("--tiny"), "asked": option("--rounds")}
        computed = described.dtype_of(request, dtype)
        info |= {
            "backend": machine.default("moe_mlp", computed),
            "ceilings": ceilings(computed, option("--tiny")),
        }
        if not CUDA:
            times, measured = clock.measure_cpu(variants, rounds, benchmark.pedantic, compare)
        else:
            broken = records.broken(request.node.name)
            variants = {name: function for name, function in variants.items() if name not in broken}
            notes = dict(notes or {}) | broken
            try:
                times, measured = clock.measure_gpu(
                    variants, rounds, option("--seconds"), benchmark.pedantic, notes, compare
                )
            except clock.ContextLost as lost:
                # without a name that is new, the next process would get as far as this one
                if lost.variant in broken:
                    known = {"failed": str(lost)}
                else:
                    known = {"broken": {lost.variant: lost.note}}
                records.write(request.node.name, **known)
                pytest.exit(str(lost), returncode=LOST)
            info["tiles"] = clock.launch_configs()
        if held:
            measured = measured | clock.totals(measured, held())
        columns = {}
        for name, row in measured.items():
            columns[name] = row | (details or {}).get(name, {})
        rows = clock.rows_of(times, columns, flops, bytes, info["ceilings"], tokens)
        info |= {"rounds": len(next(iter(times.values()))), "rows": rows}
        if notes:
            info["notes"] = {
                name: machine.public(clock.first_line(note)) for name, note in notes.items()
            }
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
        terminalreporter.write_line(
            f"\n{name}   ({info['machine']}, torch {info['torch']}, {info['rounds']} rounds)"
        )
        floor = next(iter(info["rows"]))
        for variant, row in info["rows"].items():
            terminalreporter.write_line(f"  {variant:24s}{described.line(row, floor)}")
        for variant, note in info.get("notes", {}).items():
            terminalreporter.write_line(f"  {variant:24s}{note}")
