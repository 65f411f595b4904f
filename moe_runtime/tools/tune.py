"""Measure launch configs on this GPU, for `kernels.tiles` to look up: `moe-runtime tune`.

A config belongs to a `tiles.Problem`: kernel, GPU, dtype, the layer's sizes, and the mean number of
rows per expert as a power of two. Each candidate runs on random rows and must match the result of
the built-in config; then all are timed in turn. The file is written after every problem, so an
interrupted run can be resumed. A process reads it at its first launch.
"""

import contextlib
import functools
import itertools
import json
import math
import os
import statistics
import time
from collections.abc import Callable, Hashable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from torch.utils import collect_env

from moe_runtime import backends
from moe_runtime.config import Layer, one_line
from moe_runtime.io import files
from moe_runtime.kernels import dispatch, tiles
from moe_runtime.kernels.candidates import candidates
from moe_runtime.kernels.grouped_gemm import grouped_gemm_forward, up_forward
from moe_runtime.kernels.grouped_gemm_backward import dz_backward, weight_backward
from moe_runtime.kernels.tiles import Problem, Tile
from moe_runtime.ops._torch_private import wait_on_gpu
from moe_runtime.tools.warmup import compile_only

DTYPES = ("bfloat16", "float16", "float32")
# dw is one kernel with two problems per layer
PRODUCTS = ("up", "down", "dz", "dx", "dw_up", "dw_down")
# largest error of a row against the built-in config relative to the rows' mean norm: both round to
# the dtype once
TOLERANCE = {"bfloat16": 2e-2, "float16": 4e-3, "float32": 4e-3}
GAIN = 0.01  # smallest relative gain for which a candidate replaces the built-in config
# limits on the timing of one problem
ROUNDS = 15
SECONDS = 1.5
LOSER = 1.25  # configs slower than the best by this factor after three rounds are not timed further


class ContextLost(RuntimeError):
    """A config broke the CUDA context, so nothing can run in this process anymore."""

    def __init__(self, tile: Tile, note: str):
        super().__init__(
            f"{tile} broke the CUDA context ({note}). Rerun the command, which will skip this "
            "config"
        )
        self.tile = tile


class Results:
    """The file of measured configs for one GPU, and of configs that must not be tried again.

    What is being tried stands in a file beside it, and remains there if the process dies.
    """

    def __init__(self, path: Path, device: str):
        self.path = files.check_out_file(path, overwrite=True)
        self.device = device
        self.marker = path.with_name(f".{path.name}.trying")
        tiles.read_tuned.__wrapped__(path)  # raises ValueError if it is not a file of ours

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Keep other processes from measuring, and record the config that ended an earlier one."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.marker.touch()
        with files.locked(self.marker, wait=False) as is_free:
            if is_free is False:
                raise ValueError(
                    f"Another process is measuring into {self.path}. Wait until it ends, or pass "
                    "another file"
                )
            try:
                with contextlib.suppress(ValueError):  # empty: nothing was being tried
                    died = json.loads(self.marker.read_text())
                    self.save_broken(died["key"], died["tile"], "the process died")
                yield
            finally:
                self.marker.unlink()

    def read(self) -> dict:
        """Return the GPU's part of the file."""
        return self._load()["devices"].get(self.device, {"tiles": {}})

    def broken(self, key: str) -> list[Tile | None]:
        """Return the configs that killed a process; None stands for compiling many at once."""
        entries = self.read().get("broken", {}).get(key, ())
        return [entry["tile"] and Tile(**entry["tile"]) for entry in entries]

    def save(self, key: str, entry: dict) -> None:
        """Write the entry of a problem."""
        self._change(lambda device: device["tiles"].update({key: entry}))

    def save_broken(self, key: str, tile: dict | None, note: str) -> None:
        """Record a config that killed a process, None for compiling many at once."""

        def add(device: dict) -> None:
            entries = device.setdefault("broken", {}).setdefault(key, [])
            entries.append({"tile": tile, "note": note})

        self._change(add)

    def forget_broken(self) -> None:
        """Let all configs be tried again."""
        if "broken" in self.read():
            self._change(lambda device: device.pop("broken"))

    @contextlib.contextmanager
    def trying(self, key: str, tile: Tile | None) -> Iterator[None]:
        """Note what is tried in the block, in case that the process dies there."""
        self.marker.write_text(json.dumps({"key": key, "tile": tile and tile._asdict()}))
        try:
            yield
        finally:
            self.marker.write_text("")

    def _load(self) -> dict:
        return files.read_json(self.path) if self.path.exists() else {"format": 1, "devices": {}}

    def _change(self, change: Callable[[dict], object]) -> None:
        values = self._load()
        change(values["devices"].setdefault(self.device, {"tiles": {}}))
        files.atomic_write_json(self.path, values)
        # whatever the umask, as the kernels refuse writable files
        self.path.chmod(self.path.stat().st_mode & 0o755)


class EventTimer:
    """Measure milliseconds of GPU work between two events, with a cold L2 cache for every call.

    The GPU sleeps before each call while its launches are queued, so that launch overhead is not
    measured, as it would be with triton.testing.do_bench.
    """

    def __init__(self, device: torch.device, ahead_ms: float = 0.2):
        size = max(torch.cuda.get_device_properties(device).L2_cache_size, 1 << 24)
        # four times the size of the cache
        self.other = torch.zeros(size, dtype=torch.float32, device=device)
        self.cycles = int(ahead_ms * 2e6)  # at most 2 GHz, so it sleeps at least this long
        self.device = device

    def round(self, functions: Iterable[Callable[[], object]]) -> list[float]:
        """Call each function once, in turn; return their milliseconds."""
        pairs = []
        for function in functions:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            self.other.sum()  # reading leaves no dirty cache lines to write back during the call
            wait_on_gpu(self.cycles)
            start.record()
            function()
            end.record()
            pairs.append((start, end))
        torch.cuda.synchronize(self.device)
        return [start.elapsed_time(end) for start, end in pairs]


def time_all(
    functions: dict[Hashable, Callable], timer: Any, rounds: int, seconds: float
) -> dict[Hashable, float]:
    """Return the median milliseconds of each, timed in turn.

    All but the first drop out after 3 rounds if they are slow; `seconds` limits from 5 rounds on.
    """
    times = {name: [] for name in functions}
    left = dict(functions)
    first = next(iter(functions))
    spent = 0.0
    medians = {}
    for n in range(1, rounds + 1):
        for name, ms in zip(left, timer.round(left.values())):
            times[name].append(ms)
            spent += ms / 1e3
        medians = {name: statistics.median(values) for name, values in times.items()}
        if n == 3:
            limit = LOSER * min(medians.values())
            for name in functions:
                if name != first and medians[name] > limit:
                    del left[name]
        if n >= 5 and spent > seconds:
            break
    return medians


def worst_row(result: Tensor, expected: Tensor) -> float:
    """Return the largest row error relative to the rows' root mean square norm.

    Tensors are [..., n] with rows of n, or [n] with rows of one number; inf for other shapes.
    """
    if result.shape != expected.shape:
        return math.inf
    if not expected.numel():
        return 0.0
    if expected.dim() == 1:
        result, expected = result[:, None], expected[:, None]
    errors = torch.linalg.vector_norm(result - expected, dim=-1, dtype=torch.float32)
    norms = torch.linalg.vector_norm(expected, dim=-1, dtype=torch.float32)
    return float(errors.max() / norms.square().mean().sqrt().clamp_min(1e-15))


def problem_of(product: str, layer: Layer, T: int, dtype: str, device: torch.device) -> Problem:
    """Return the key that `ops.moe_mlp_triton` looks up for this matrix product of the layer with T
    tokens.
    """
    H, I, E, K, _, gated = layer
    Z = I * (1 + gated)
    N, length = {
        "up": (I, H),
        "down": (H, I),
        "dz": (I, H),
        "dx": (H, Z),
        "dw_up": (H, Z),
        "dw_down": (I, H),
    }[product]
    kernel = product.partition("_")[0]
    is_gated = kernel == "up" and gated
    return tiles.problem_of(
        kernel,
        device,
        getattr(torch, dtype),
        N,
        length,
        T * K,
        E,
        is_gated,
    )


def runner(
    product: str, layer: Layer, T: int, dtype: str, device: torch.device
) -> Callable[[Tile], tuple]:
    """Return a function that runs this product with a config; results are about 1."""
    H, I, E, K, shared, gated = layer
    R = T * K
    Z = I * (1 + gated)
    generator = torch.Generator(device).manual_seed(0)
    like = {"generator": generator, "device": device}

    def random(*size: int, scale: float = 1.0) -> Tensor:
        return torch.randn(size, dtype=getattr(torch, dtype), **like).mul_(scale)

    slots = torch.rand(T, E - shared, **like).topk(K - shared).indices + shared
    slots = torch.cat([slots, slots.new_zeros(T, int(shared))], 1)
    offsets, _, row_slot, _ = dispatch.dispatch_forward(slots, E)
    # allocated here, as no kernel runs inside `compile_ahead`
    maps = {BLOCK_M: dispatch.tile_map(offsets, R, BLOCK_M) for BLOCK_M in (16, 32, 64, 128, 256)}
    if product == "up":
        x = random(T, H)
        w = random(E, Z, H, scale=H**-0.5)
        return lambda tile: up_forward(
            x, w, None, row_slot, maps[tile.BLOCK_M], K, "silu", gated, True, tile
        )
    if product == "dz":
        dout = random(T, H)
        w = random(E, H, I, scale=H**-0.5)
        z = random(R, Z)
        weight = torch.rand(T, K, **like)
        form = ("silu", gated, True)
        return lambda tile: dz_backward(
            dout, w, None, weight, row_slot, maps[tile.BLOCK_M], z, *form, tile
        )
    if product in ("down", "dx"):
        is_down = product == "down"
        length = I if is_down else Z
        rows = random(R, length)
        shape = (E, H, I) if is_down else (E, Z, H)
        w = random(*shape, scale=length**-0.5)
        return lambda tile: (
            grouped_gemm_forward(rows, w, None, maps[tile.BLOCK_M], is_down, tile),
        )
    gather = "x" if product == "dw_up" else "dy"
    dy = random(R, Z) if gather == "x" else random(T, H)
    x = random(T, H) if gather == "x" else random(R, I)
    return lambda tile: (weight_backward(dy, x, row_slot, offsets, K, gather, tile),)


def find_gpu() -> tuple[torch.device, EventTimer]:
    """Return the GPU to measure and its timer; raises ValueError without one."""
    reason = "torch.cuda.is_available() is False"
    if torch.cuda.is_available():
        device = torch.device("cuda", torch.cuda.current_device())
        reason = backends.why_not("triton", "moe_mlp", device)
    if reason:
        raise ValueError(f"`tune` requires a CUDA GPU, but {reason}")
    return device, EventTimer(device)


def measure(
    run: Callable[[Tile], tuple],
    problem: Problem,
    pool: list[Tile],
    timer: Any,
    trying: Callable[[Any], Any],
) -> dict:
    """Check and time `pool`, the built-in config first; return the file's entry for this problem.

    `trying(tile)` is entered around each config's first run. Raises RuntimeError if the built-in
    config does not run.
    """
    built_in = pool[0]
    notes = {}
    functions = {}
    expected = None  # of the built-in config
    for tile in pool:
        result = None
        try:
            with trying(tile), _poisoned():
                result = run(tile)
                # the partial sums depend on BLOCK_N, but their sum does not
                if problem.kernel == "dz":
                    result = (*result[:2], result[2].sum(1))
                expected = expected or result
                error = max(worst_row(a, b) for a, b in zip(result, expected))
        except OSError:  # the disk is full, for example
            raise
        except Exception as failure:
            notes[tile] = _one_line(failure)
            _check_context(tile, notes[tile])
            if tile == built_in:
                raise RuntimeError(f"The built-in config does not run: {notes[tile]}") from failure
            continue
        if tile == built_in or error <= TOLERANCE[problem.dtype]:  # false for NaN
            functions[tile] = functools.partial(run, tile)
        else:
            notes[tile] = f"wrong result: the error of a row is {error:.1e}"
    del expected, result  # frees their memory
    times = time_all(functions, timer, ROUNDS, SECONDS)
    best = min(functions, key=times.get)
    if times[best] > times[built_in] * (1 - GAIN):
        best = built_in
    tried = []
    for tile in pool:
        note = notes.get(tile, "")
        tried.append(
            {
                "tile": tile._asdict(),
                "ms": times.get(tile),
                "note": note,
            }
        )
    return {
        "tile": best._asdict(),
        "ms": times[best],
        "table": {"tile": built_in._asdict(), "ms": times[built_in]},
        "candidates": tried,
    }


@contextlib.contextmanager
def _poisoned() -> Iterator[None]:
    """Fill torch.empty with NaN: reused memory could hide a tile that was never written."""
    enabled = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    fill = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(enabled, warn_only=warn_only)
        torch.utils.deterministic.fill_uninitialized_memory = fill


def compile_ahead(run: Callable[[Tile], tuple], pool: list[Tile]) -> None:
    """Compile the kernels of all configs in parallel threads, and ignore what fails.

    A config that fails here fails again when it is measured.
    """
    if not isinstance(tiles.tile_of, triton.JITFunction):  # interpreted
        return
    with compile_only(os.cpu_count() or 1):
        for tile in pool:
            with contextlib.suppress(Exception):
                run(tile)


def _check_context(tile: Tile, note: str) -> None:
    try:
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
    except Exception:
        raise ContextLost(tile, note) from None


def _one_line(error: BaseException) -> str:
    name = type(error).__name__
    text = str(error).strip().partition("\n")[0]
    return f"{name}: {one_line(text, 200)}" if text else name


class Outcome(NamedTuple):
    """The outcome of a problem: measured, kept (from the file), failed, or left for later."""

    state: str
    title: str
    number: int
    of: int
    entry: dict | None = None
    note: str = ""

    def __str__(self) -> str:
        if self.entry is None:
            return ", ".join(filter(None, (f"{self.title}: {self.state}", self.note)))
        tile = Tile(**self.entry["tile"]).short()
        return (
            f"{self.title}: {tile}, {self.entry['ms']:.3f} ms; built in "
            f"{self.entry['table']['ms']:.3f} ms ({self.state})"
        )


def tune(
    layers: dict[str, Layer],
    tokens: list[int],
    dtypes: list[str],
    path: Path | None = None,
    *,
    again: bool = False,
    seconds: float | None = None,
) -> Iterator[Outcome]:
    """Measure every problem of `layers` with `tokens` in `dtypes`, one step each.

    The file is `path`, or the one that the kernels read. Problems that are already in the file are
    skipped unless `again`. After `seconds` no new problem is started. Raises ValueError without a
    GPU or for an invalid file, and ContextLost if nothing can run anymore.
    """
    for layer in layers.values():
        layer.check()
    device, timer = find_gpu()
    results = Results(path or tiles.tuned_path(), tiles.device_name(device))
    begin = time.monotonic()
    todo = {}  # key -> what to run; layers and tokens may share problems
    for T, dtype, (name, layer), product in itertools.product(
        tokens, dtypes, layers.items(), PRODUCTS
    ):
        work = (product, layer, T, dtype, device)
        problem = problem_of(*work)
        title = f"{name}, {T} tokens, {dtype}: {product}"
        todo.setdefault(problem.key(), (problem, title, work))
    with results.alone():
        if again:
            results.forget_broken()
        done = {} if again else results.read()["tiles"]
        for n, (key, (problem, title, work)) in enumerate(todo.items(), 1):
            step = Outcome("failed", title, n, len(todo))
            if key in done:
                yield step._replace(state="kept", entry=done[key])
            elif seconds is not None and time.monotonic() - begin > seconds:
                yield step._replace(state="left")
            else:
                yield _measured(step, results, timer, problem, work)


def _measured(step: Outcome, results: Results, timer, problem: Problem, work: tuple) -> Outcome:
    """Measure one problem and save its entry; return `step` with it, or with what failed."""
    key = problem.key()
    trying = functools.partial(results.trying, key)
    broken = results.broken(key)
    pool = [tile for tile in candidates(problem) if tile not in broken]
    if tiles.heuristic(problem) not in pool:
        return step._replace(
            note="the built-in config killed an earlier process. Pass --overwrite to retry it"
        )
    try:
        run = runner(*work)
        if None not in broken:
            with trying(None):
                compile_ahead(run, pool)
        entry = measure(run, problem, pool, timer, trying)
    except ContextLost as lost:
        results.save_broken(
            key,
            lost.tile._asdict(),
            str(lost),
        )
        raise
    except OSError:
        raise
    except Exception as failure:  # out of memory, or the built-in config does not run on this GPU
        return step._replace(note=_one_line(failure))
    finally:
        run = None
        if torch.cuda.is_initialized():
            with contextlib.suppress(RuntimeError):  # the context may be lost
                torch.cuda.empty_cache()
    _, layer, T, dtype, _ = work
    about = {"layer": layer._asdict(), "tokens": T, "dtype": dtype} | versions()
    results.save(key, entry | about)
    return step._replace(state="measured", entry=entry)


@functools.cache
def versions() -> dict[str, str]:
    """Return the versions that a measurement depends on, and the date."""
    used = {
        "torch": torch.__version__,
        "triton": triton.__version__,
        "driver": collect_env.get_nvidia_driver_version(collect_env.run) or "unknown",
        "date": time.strftime("%Y-%m-%d"),
    }
    if "COMMIT" in os.environ:  # as bench/gpu.sh sets it
        used["commit"] = os.environ["COMMIT"]
    return used
