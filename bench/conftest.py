"""The fixture `interleaved`: runs all variants in turn, round after round, in one process, so that
noise affects all of them.

It prints and saves medians: milliseconds, TFLOP/s or GB/s, the ratio to the first variant (the
floor), the share of a ceiling measured in the same process, and each variant's peak memory. On a
GPU it uses CUDA events, and replaces variants that do not run by a note. A file's KIND is the kind
of its benchmarks, its ROUNDS the most rounds.
"""

import contextlib
import gc
import importlib.util
import math
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
    add = parser.addoption
    add("--tiny", action="store_true", help="run every benchmark once, at a tiny shape")
    add("--rounds", type=int, default=15, help="rounds per benchmark")
    add("--seconds", type=float, default=3.0, help="seconds of timing per benchmark, on a GPU")
    add("--budget", type=float, default=math.inf, help="seconds after which no benchmark starts")
    add("--owner", type=int, help="parent process, without which no benchmark starts")
    add("--shapes", default="", help="comma-separated shapes to run, in this order")
    add("--restarted", action="store_true", help="the last run died in its last benchmark")
    add("--results", type=Path, help="JSON lines file, one line per benchmark; none runs twice")


def pytest_configure(config):
    config.records = Written(config.getoption("--results"))
    config.began = time.monotonic()
    if config.getoption("--restarted") and (name := config.records.unfinished()):
        config.records.write(name, failed="the process died")
    config.pluginmanager.register(config.records, "bench-records")
    config.addinivalue_line("markers", "gpu: needs a CUDA GPU")
    config.interpreted = config.getoption("--tiny") and not CUDA and _interpret()


def _interpret() -> bool:
    """Run Triton's kernels in its interpreter, patched as in the tests; False without tests/."""
    with contextlib.suppress(ModuleNotFoundError):
        if importlib.util.find_spec("tests.support.interp_fix"):
            os.environ["TRITON_INTERPRET"] = "1"  # before a benchmark imports triton
            from tests.support import interp_fast, interp_fix

            interp_fix.install()
            interp_fast.install()
            return True
    return False


def pytest_generate_tests(metafunc):
    tiny = metafunc.config.getoption("--tiny")
    tables = {}
    if "size" in metafunc.fixturenames:  # SIZES: for a GPU, for a CPU, tiny
        tables["size"] = metafunc.module.SIZES[2 if tiny else not CUDA]
    if "shape" in metafunc.fixturenames:
        name, table = ("GPU_SHAPES", shapes.GPU) if CUDA else ("CPU_SHAPES", shapes.CPU)
        table = shapes.TINY if tiny else getattr(metafunc.module, name, table)
        chosen = _chosen(metafunc.config)
        if chosen:
            table = {name: table[name] for name in chosen if name in table}
        tables["shape"] = table
    for argument, table in tables.items():
        metafunc.parametrize(
            argument,
            list(table.values()),
            ids=list(table),
        )


def _chosen(config) -> list[str]:
    return list(filter(None, config.getoption("--shapes").split(",")))


def pytest_collection_modifyitems(config, items):
    done = config.records.done()
    if CUDA and clock.launch_configs() != "built in":  # moe-runtime tune may have run since
        done -= config.records.measured_with("built in")
    has_kernels = CUDA or config.interpreted
    out = []
    left = []
    for item in items:
        is_out = item.name in done or (item.get_closest_marker("gpu") and not has_kernels)
        (out if is_out else left).append(item)
    if out:
        config.hook.pytest_deselected(items=out)
        items[:] = left
    # run first on a GPU, since a run may be cut short
    first = {name for goal in GOALS for name in goal.benchmarks}
    items.sort(key=lambda item: item.name not in first)
    if chosen := _chosen(config):  # all functions of a shape before those of the next
        items.sort(key=lambda item: _place(item, chosen))


def _place(item, chosen: list[str]) -> int:
    parameters = f"-{item.callspec.id}-" if hasattr(item, "callspec") else ""
    return next((i for i, name in enumerate(chosen) if f"-{name}-" in parameters), len(chosen))


def pytest_collection_finish(session):
    # freezes the objects of imports: otherwise garbage collection takes half a second, twice per
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
    # an error outside the timing; all later benchmarks would fail
    if report.failed and CUDA and clock.context_lost():
        item.config.records.pytest_runtest_logreport(report)
        pytest.exit(f"{item.name} broke the CUDA context", returncode=LOST)
    return report


def pytest_benchmark_update_machine_info(config, machine_info):
    """Results are published, so they must not name the machine."""
    machine_info.pop("node", None)


@pytest.fixture
def interleaved(benchmark, request):
    """Call as interleaved({name: function}, flops=..., bytes=..., tokens=..., notes={name: why}).

    `notes` has the reasons for missing variants. Ratios are to the first variant, the floor.
    `compare` names the variant with whose result the others' are compared. `dtype` selects the
    ceiling of products. `details` {name: {column: value}} are measurements of the benchmark itself,
    which override those made here. `held` is called after the variants, and returns the bytes in
    use before a call.
    """
    option = request.config.getoption
    records: Records = request.config.records
    name = request.node.name
    rounds = min(option("--rounds"), getattr(request.module, "ROUNDS", option("--rounds")))
    if option("--tiny"):
        rounds = 1
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
        computed = described.dtype_of(request, dtype)
        info = machine.describe() | described.fields(request, dtype, flops, bytes, tokens)
        info |= {
            "tiny": option("--tiny"),
            "asked": option("--rounds"),
            "backend": machine.default("moe_mlp", computed),
            "ceilings": ceilings(computed, option("--tiny")),
        }
        notes = dict(notes or {})
        if CUDA:
            broken = records.broken(name)
            notes |= broken
            runs = {variant: run for variant, run in variants.items() if variant not in broken}
            try:
                times, measured = clock.measure_gpu(
                    runs,
                    rounds,
                    option("--seconds"),
                    benchmark.pedantic,
                    notes,
                    compare,
                )
            except clock.VariantCrashed as lost:
                # a variant that is already excluded means that restarting does not help
                if lost.variant in broken:
                    records.write(name, failed=str(lost))
                else:
                    records.write(name, broken={lost.variant: lost.note})
                pytest.exit(str(lost), returncode=LOST)
            info["tiles"] = clock.launch_configs()
        else:
            times, measured = clock.measure_cpu(
                variants, rounds, benchmark.pedantic, notes, compare
            )
        if held:
            measured |= clock.totals(measured, held())
        for variant, row in (details or {}).items():
            measured[variant] = measured.get(variant, {}) | row
        info["ceilings"] = ceilings(computed, option("--tiny"))  # the best before and after
        info["rounds"] = len(next(iter(times.values())))
        info["rows"] = clock.rows_of(
            times,
            measured,
            flops,
            bytes,
            info["ceilings"],
            tokens,
        )
        if notes:
            info["notes"] = {
                variant: machine.public(clock.first_line(note)) for variant, note in notes.items()
            }
        benchmark.extra_info.update(info)
        records.write(name, extra_info=info)
        return info["rows"]

    try:
        yield run
    finally:
        clock.free()


def pytest_terminal_summary(terminalreporter, config):
    session = getattr(config, "_benchmarksession", None)
    write = terminalreporter.write_line
    for bench in getattr(session, "benchmarks", None) or ():
        if not isinstance(bench, dict):
            bench = vars(bench)
        info = bench["extra_info"]
        if "rows" not in info:
            continue
        about = f"{info['machine']}, torch {info['torch']}, {info['rounds']} rounds"
        write(f"\n{bench['name']}   ({about})")
        floor = next(iter(info["rows"]))
        for variant, row in info["rows"].items():
            write(f"  {variant:24s}{described.line(row, floor)}")
        for variant, note in info.get("notes", {}).items():
            write(f"  {variant:24s}{note}")
