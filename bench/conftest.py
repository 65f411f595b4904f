"""`interleaved`: all variants in turn, round after round, in one process, so that a noisy machine is noisy for all of them.

What it prints and writes are medians: milliseconds, TFLOP/s or GB/s, and the ratio to the first variant (the floor).
"""

import importlib.metadata
import platform
import statistics
import subprocess
import time
from pathlib import Path

import pytest
import torch

from bench import shapes

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"


def pytest_addoption(parser):
    parser.addoption(
        "--tiny", action="store_true", help="run every benchmark once, at a shape that only proves that it runs"
    )
    parser.addoption("--rounds", type=int, default=15, help="rounds per benchmark")


def pytest_generate_tests(metafunc):
    if "shape" in metafunc.fixturenames:
        tiny = metafunc.config.getoption("--tiny")
        table = shapes.TINY if tiny else shapes.GPU if CUDA else shapes.CPU
        metafunc.parametrize("shape", [pytest.param(shape, id=name) for name, shape in table.items()])


def _commit() -> str:
    run = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=Path(__file__).parent
    )
    return run.stdout.strip() or "unknown"


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
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip() if CUDA else "none"


def pytest_benchmark_update_machine_info(config, machine_info):
    """Results are published: whose machine it was is nobody's business."""
    machine_info.pop("node", None)


@pytest.fixture
def interleaved(benchmark, request):
    """Call as interleaved({name: function}, flops=..., bytes=...); the first name is the floor of the ratios."""
    rounds = 1 if request.config.getoption("--tiny") else request.config.getoption("--rounds")
    wait = torch.cuda.synchronize if CUDA else lambda: None

    def run(variants, *, flops=0, bytes=0):
        times = {name: [] for name in variants}
        for function in variants.values():
            function()  # warm up, and fail, outside the timing
        wait()

        def one_round():
            for name, function in variants.items():
                start = time.perf_counter()
                function()
                wait()
                times[name].append(time.perf_counter() - start)

        benchmark.pedantic(one_round, rounds=rounds)
        floor = next(iter(times.values()))
        rows = {}
        for name, seconds in times.items():
            median = statistics.median(seconds)
            rows[name] = {
                "ms": median * 1e3,
                "ratio": statistics.median(s / f for s, f in zip(seconds, floor, strict=True)),
                "spread": (max(seconds) - min(seconds)) / median,
                **({"TFLOP/s": flops / median / 1e12} if flops else {}),
                **({"GB/s": bytes / median / 1e9} if bytes else {}),
            }
        benchmark.extra_info.update(_machine(), rounds=rounds, rows=rows)
        return rows

    return run


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
            line = f"  {variant:24s}{row['ms']:10.2f} ms{row['ratio']:8.3f} x {floor}{rate}"
            terminalreporter.write_line(f"{line}   spread {row['spread']:.0%}")
