"""The time and memory of each variant: the wall clock on a CPU, CUDA events on a GPU."""

import contextlib
import ctypes
import gc
import math
import random
import re
import statistics
import time
from pathlib import Path

import torch

from moe_runtime.ops import workspace

STATUS = Path("/proc/self/status")
CLEAR = Path("/proc/self/clear_refs")
OUT_OF_TIME = "out of time"
PATIENCE = 15.0  # seconds of a call on a CPU
# the GPU waits this long for the launches of a call, so that a peer with 60 launches is not limited
# by Python
AHEAD_MS = 3.0


class VariantCrashed(RuntimeError):
    """A variant broke the CUDA context, so nothing can run in this process anymore."""

    def __init__(self, variant: str, note: str):
        super().__init__(f"{variant} broke the CUDA context: {note}")
        self.variant = variant
        self.note = note


def measure_cpu(variants, rounds: int, pedantic, notes: dict, compare: str | None = None):
    """Wall-clock seconds of every call; then each variant's memory and distance from `compare`.

    Every round has a random order, the same in each run, so that a variant does not always find the
    caches in the state that the same other variant leaves. A variant other than ours whose
    first call takes longer than PATIENCE seconds is left out, with its time in `notes`: without
    AVX-512, torch's products in bfloat16 are a hundred times as slow as those in float32.
    """
    orders = random.Random(0)
    runs = {}
    for name, function in variants.items():
        start = time.perf_counter()
        function()  # warm up, and fail, outside the timing
        seconds = time.perf_counter() - start
        if seconds <= PATIENCE or name in (compare, "moe_runtime"):
            runs[name] = function
        else:
            notes[name] = f"one call takes {seconds:.0f} s"
    variants = runs
    times = {name: [] for name in variants}

    def one_round():
        for name, function in orders.sample(list(variants.items()), len(variants)):
            start = time.perf_counter()
            function()
            times[name].append(time.perf_counter() - start)

    pedantic(one_round, rounds=rounds)
    distance = _Distance(variants, compare)
    details = {}
    for name in distance.order:
        details[name], result = resident(variants[name])
        details[name] |= distance.of(name, result)
    return times, details


class _Distance:
    """Distances of results, except the floor's, from that of `compare`, the first in `order`."""

    def __init__(self, variants, compare: str | None):
        self.order = sorted(variants, key=lambda name: name != compare)
        self.floor = next(iter(variants))
        self.compare = compare
        self.expected = None

    def of(self, name: str, result) -> dict[str, float]:
        """Return the difference of a variant's result, as a column."""
        if name == self.compare:
            self.expected = result
        elif self.compare is None or name == self.floor:
            return {}
        return difference(result, self.expected)


def resident(function) -> tuple[dict[str, float], object]:
    """Return the MiB of CPU memory that a call adds, at its peak and with its result; and the
    result.

    Measured as the process's resident set; empty where /proc cannot reset the peak.
    """
    _give_back()
    try:
        CLEAR.write_text("5")  # resets the peak
        before = _status("VmRSS")
    except (OSError, TypeError):  # not Linux, or a sandbox
        return {}, function()
    result = function()
    peak = _status("VmHWM")
    _give_back()
    sizes = {
        "peak MiB": peak - before,
        "kept MiB": _status("VmRSS") - before,
    }
    return {name: max(size, 0) / 2**20 for name, size in sizes.items()}, result


def _status(name: str) -> int:
    """Bytes of the entry `name` in /proc/self/status."""
    return int(re.search(name + r":\s+(\d+) kB", STATUS.read_text())[1]) << 10


def _give_back() -> None:
    """Free our pools and the allocator's unused blocks, which would hide a call's allocations."""
    gc.collect()
    workspace.release()
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):  # glibc's
        trim(0)


def difference(result, expected) -> dict[str, float]:
    """Return a result's difference from the expected one as a column, if they are comparable."""
    # not imported earlier, as it imports triton, and --tiny must enable the interpreter before
    from moe_runtime.tools.tune import worst_row

    if expected is None or result.shape != expected.shape:
        return {}
    worst = worst_row(result.detach(), expected.detach())
    # None for a result with NaN or infinity, which JSON does not have
    return {"difference": worst if math.isfinite(worst) else None}


def measure_gpu(variants, rounds: int, seconds: float, pedantic, notes: dict, compare: str | None):
    """Seconds of every call between CUDA events; each variant's memory and distance from `compare`.

    Errors of variants are added to `notes`, except the first's, the floor's, which is raised. There
    are at most `rounds` rounds, of about `seconds` in total.
    """
    from moe_runtime.tools.tune import EventTimer

    distance = _Distance(variants, compare)
    details = {}
    for name in distance.order:
        try:
            row = _memory(variants[name])
            if compare is not None:
                row |= distance.of(name, variants[name]())
            details[name] = row
        except Exception as error:
            _check_context(name, error)
            if name == distance.floor:
                raise
            notes[name] = one_line(error)
        free()
    del distance
    runs = {name: function for name, function in variants.items() if name in details}
    timer = EventTimer(torch.device("cuda", torch.cuda.current_device()), AHEAD_MS)
    times = {name: [] for name in runs}

    def one_round():
        for name, ms in zip(
            runs,
            timer.round(runs.values()),
            strict=True,
        ):
            times[name].append(ms / 1e3)

    try:
        one_round()  # its time determines the number of rounds
        first = sum(values.pop() for values in times.values())
        count = max(3, min(rounds, int(seconds / max(first, 1e-9))))
        pedantic(one_round, rounds=count if rounds > 1 else 1)
    except Exception as error:
        _check_context("one of the variants", error)
        raise
    return times, details


def held_bytes(model, optimizer) -> int:
    """Return the bytes of a model's tensors and an optimizer's states, each storage once."""
    tensors = [*model.parameters(), *model.buffers()]
    for state in optimizer.state.values():
        tensors += filter(torch.is_tensor, state.values())
    storages = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def totals(details: dict, held: int) -> dict:
    """Return the details with a column of total memory next to each variant's peak."""
    totals = {}
    for name, row in details.items():
        if "peak MiB" in row:
            totals[name] = row | {"total MiB": held / 2**20 + row["peak MiB"]}
    return totals


def _memory(function) -> dict[str, float]:
    """MiB that a second call adds, at its peak and with its result.

    Scratch memory that the torch backend would reuse is freed first, so it counts, as on a CPU.
    """
    function()
    torch.cuda.synchronize()
    workspace.release()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = function()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated()
    workspace.release()
    after = torch.cuda.memory_allocated()
    del result
    # at least 0, as garbage of an earlier call may be freed meanwhile
    return {
        "peak MiB": max(peak - before, 0) / 2**20,
        "kept MiB": max(after - before, 0) / 2**20,
    }


def _check_context(name: str, error: Exception) -> None:
    if context_lost():
        raise VariantCrashed(name, one_line(error)) from None


def context_lost() -> bool:
    """Whether no CUDA call can succeed in this process anymore."""
    try:
        torch.cuda.synchronize()
    except Exception:  # torch.AcceleratorError or RuntimeError, by version
        return True
    return False


def free() -> None:
    """Free the memory of a benchmark."""
    gc.collect()
    if torch.cuda.is_available():
        with contextlib.suppress(RuntimeError):  # if the context is lost
            torch.cuda.empty_cache()


def one_line(error: BaseException) -> str:
    name = type(error).__name__
    text = first_line(str(error))
    return f"{name}: {text}" if text else name


def first_line(text: str) -> str:
    return text.strip().partition("\n")[0][:250]


def random_bytes(bytes: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Source and target of a copy that moves this many bytes, read plus written."""
    return torch.randint(
        0,
        1 << 15,
        (2, max(bytes // 4, 1)),
        dtype=torch.int16,
        device=device,
    ).unbind()


def copy_floor(bytes: int, device: str) -> dict:
    """Return the floor of operations that only move bytes: a copy of as many."""
    source, target = random_bytes(bytes, device)
    return {"copy (floor)": lambda: target.copy_(source)}


def launch_configs() -> str:
    """Return which launch configs our kernels use."""
    from moe_runtime.kernels import tiles

    device = torch.device("cuda", torch.cuda.current_device())
    tuned = tiles.read_tuned().get(tiles.device_name(device), {})
    return f"{len(tuned)} tuned" if tuned else "built in"


def rows_of(
    times: dict[str, list[float]],
    details: dict,
    flops: float,
    bytes: float,
    limits: dict | None,
    tokens=0,
) -> dict:
    """Return the printed and saved row of each variant; its share is of the nearest ceiling."""
    floor = next(iter(times.values()))
    work = {
        "TFLOP/s": flops / 1e12,
        "GB/s": bytes / 1e9,
        "tokens/s": tokens,
    }
    rows = {}
    for name, seconds in times.items():
        median = statistics.median(seconds)
        row = {
            "ms": median * 1e3,
            "ratio": statistics.median(s / f for s, f in zip(seconds, floor, strict=True)),
            "spread": (max(seconds) - min(seconds)) / median,
        }
        for unit, amount in work.items():
            if amount:
                row[unit] = amount / median
        row |= details.get(name, {})
        if len(seconds) >= 4:  # a spread without disturbed rounds
            low, _, high = statistics.quantiles(seconds, n=4, method="inclusive")
            row["iqr"] = (high - low) / median
        shares = [row[unit] / limit for unit, limit in (limits or {}).items() if unit in row]
        if shares:
            row["share"] = max(shares)
        rows[name] = row
    return rows
