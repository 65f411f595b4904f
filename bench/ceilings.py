"""The machine's limits, measured in the same process: FLOP/s of matrix products, bytes/s of a copy.

For a GPU they are measured by a product of 8192^3 and a copy of 4 GiB; for a CPU by the faster of
multiply-adds on registers (csrc/cpu) and a few products, and by a copy of 512 MiB.
"""

import functools
import statistics
import timeit

import torch

from moe_runtime.bench.machine import CUDA, random
from moe_runtime.native.library import cpp

ROUNDS = 7
PRODUCTS = ((1024, 1024, 1024), (2048, 2048, 2048), (8192, 1024, 1024))
TINY = ((64, 64, 64),)
_BEST: dict[torch.dtype, dict[str, float]] = {}  # of this process so far


def ceilings(dtype: torch.dtype, tiny: bool = False) -> dict[str, float]:
    """Return TFLOP/s of products of `dtype` and GB/s of a copy, read plus written.

    A CPU is measured at every call, its products at the first, and the best of all is returned:
    other work on the processor slows a measurement down for seconds, and nothing makes it faster
    than the machine. With `tiny` they are meaningless, but fast to measure.
    """
    if CUDA:
        return _of_gpu(dtype)
    best = _BEST.setdefault(dtype, {"TFLOP/s": _products(dtype, tiny), "GB/s": 0.0})
    best["TFLOP/s"] = max(best["TFLOP/s"], _peak(dtype, tiny))
    best["GB/s"] = max(best["GB/s"], _copy(tiny))
    return dict(best)


@functools.cache  # large products take seconds
def _products(dtype: torch.dtype, tiny: bool) -> float:
    """TFLOP/s of the fastest of a few products."""
    small = _product(256, 256, 256, dtype)
    # torch's products in bfloat16 are far slower without AVX-512, and large ones take minutes
    if small < _peak(dtype, tiny) / 8:
        return small
    return max(_product(*size, dtype) for size in (TINY if tiny else PRODUCTS))


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
    return run() / _seconds(run) / 1e12


def _product(M: int, N: int, K: int, dtype: torch.dtype) -> float:
    a = torch.randn((M, K), dtype=dtype)
    b = torch.randn((K, N), dtype=dtype)
    out = torch.randn((M, N), dtype=dtype)
    return 2 * M * N * K / _seconds(lambda: torch.mm(a, b, out=out)) / 1e12


def _copy(tiny: bool) -> float:
    """GB/s of a copy, which does not depend on a dtype."""
    size = 1 << (20 if tiny else 29)
    source = torch.ones(size, dtype=torch.uint8)
    target = torch.zeros(size, dtype=torch.uint8)
    return 2 * size / _seconds(lambda: target.copy_(source)) / 1e9


def _seconds(function) -> float:
    """Seconds of the fastest of several calls."""
    return min(timeit.repeat(function, number=1, repeat=ROUNDS))


@functools.cache  # once per process
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
