"""The machine's limits, measured in the same process: FLOP/s of matrix products, bytes/s of a copy.

For a GPU they are measured by a product of 8192^3 and a copy of 4 GiB; for a CPU by the faster of
multiply-adds on registers (csrc/cpu) and a few products, and by a copy of several times its
last-level cache.
"""

import functools
import statistics
import time
from pathlib import Path

import torch

from moe_runtime.bench.machine import CUDA, random
from moe_runtime.native.library import cpp

ROUNDS = 5
PRODUCTS = ((1024, 1024, 1024), (2048, 2048, 2048), (8192, 1024, 1024))
TINY = ((64, 64, 64),)
SMALL = (256, 256, 256)


def ceilings(dtype: torch.dtype, tiny: bool = False) -> dict[str, float]:
    """Return TFLOP/s of products of `dtype` and GB/s of a copy, read plus written.

    With `tiny` they are meaningless, but fast to measure.
    """
    return _measured(dtype, tiny)


@functools.cache  # once per process; no defaults, as they would give a call another key
def _measured(dtype: torch.dtype, tiny: bool) -> dict[str, float]:
    if CUDA:
        return _of_gpu(dtype)
    flops = _peak(dtype, tiny)
    # torch's products in bfloat16 are far slower without AVX-512, and large ones take minutes
    if _product(*SMALL, dtype) > flops / 8:
        flops = max(flops, *(_product(*size, dtype) for size in (TINY if tiny else PRODUCTS)))
    return {
        "TFLOP/s": flops,
        "GB/s": _copy(tiny),
    }


def _peak(dtype: torch.dtype, tiny: bool) -> float:
    """TFLOP/s of multiply-adds on registers; 0 without the library or the dtype."""
    library = cpp.find()
    if isinstance(library, str) or dtype not in cpp.DTYPES:
        return 0.0
    threads = torch.get_num_threads()
    rounds = 8 * threads
    sink = torch.empty(rounds)
    steps = 1 << (8 if tiny else 16)
    arguments = (cpp.DTYPES[dtype], rounds, steps, sink.data_ptr(), threads)
    run = functools.partial(library.handle.moert_cpu_peak, *arguments)
    return run() / _median(run) / 1e12


def _product(M: int, N: int, K: int, dtype: torch.dtype) -> float:
    a = torch.randn((M, K), dtype=dtype)
    b = torch.randn((K, N), dtype=dtype)
    out = torch.randn((M, N), dtype=dtype)
    return 2 * M * N * K / _median(lambda: torch.mm(a, b, out=out)) / 1e12


@functools.cache
def _copy(tiny: bool) -> float:
    """GB/s of a copy, which does not depend on a dtype."""
    size = 1 << 20 if tiny else 4 * max(_last_cache(), 32 << 20)
    source = torch.ones(size, dtype=torch.uint8)
    target = torch.zeros(size, dtype=torch.uint8)
    return 2 * size / _median(lambda: target.copy_(source)) / 1e9


def _median(function) -> float:
    """Median seconds of a call, after two warm-up calls."""
    seconds = []
    for _ in range(ROUNDS + 2):
        start = time.perf_counter()
        function()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[2:])


def _last_cache() -> int:
    """Bytes of the last-level cache, 0 if unknown, at most 256 MiB to limit the copy's memory."""
    try:
        text = Path("/sys/devices/system/cpu/cpu0/cache/index3/size").read_text().strip()
        return min(int(text.rstrip("KM")) << (20 if text.endswith("M") else 10), 256 << 20)
    except (OSError, ValueError):
        return 0


def _of_gpu(dtype: torch.dtype) -> dict[str, float]:
    from moe_runtime.tools.tune import EventTimer

    n = 8192
    size = 1 << 32
    if torch.cuda.mem_get_info()[1] < 24 << 30:
        size //= 8
    a, b, c = (random(n, n, dtype=dtype) for _ in range(3))
    source = random(size // 2)
    target = random(size // 2)
    timer = EventTimer(source.device)
    functions = [lambda: torch.mm(a, b, out=c), lambda: target.copy_(source)]
    rounds = [timer.round(functions) for _ in range(13)][3:]
    matmul, copy = map(statistics.median, zip(*rounds, strict=True))
    return {
        "TFLOP/s": 2 * n**3 / matmul / 1e9,
        "GB/s": 2 * size / copy / 1e6,
    }
