"""Launch configs of the grouped GEMMs: those that the user measured, else a built-in table's.

A config depends on the kernel, the GPU, the dtype, the layer's sizes and the mean rows per expert,
rounded down to a power of two, but never on T itself or on a measurement during a training step.
`moe-runtime tune` measures configs, and `read_tuned` reads its file.
"""

import functools
import json
import os
from pathlib import Path
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from moe_runtime.kernels import compiling

compiling.install()


class Tile(NamedTuple):
    """One launch config: BLOCK_M rows by BLOCK_N columns, BLOCK_K along the sum."""

    BLOCK_M: int
    BLOCK_N: int  # in the up projection: columns of the gate, and as many of up
    BLOCK_K: int
    num_warps: int = 8
    num_stages: int = 3
    GROUP_M: int = 8  # row tiles that iterate over the columns together, to find weights in L2
    # tensor descriptors for weights, and for rows that are not gathered
    TMA: bool = False
    # down and dx, with TMA: one program per processor, which loads its next tile during an epilogue
    PERSISTENT: bool = False
    # up, with TMA: gate and up in one product of 2 BLOCK_N columns, and PERSISTENT
    JOINED: bool = False

    def short(self) -> str:
        """Return the config in a few words."""
        words = [f"{self.BLOCK_M}x{self.BLOCK_N}x{self.BLOCK_K}", f"{self.num_warps} warps"]
        words.append(f"{self.num_stages} stages")
        if self.GROUP_M != 8:
            words.append(f"group {self.GROUP_M}")
        words += ["TMA"] * self.TMA + ["persistent"] * self.PERSISTENT + ["joined"] * self.JOINED
        return ", ".join(words)


class Problem(NamedTuple):
    """The key of a config; `rows` is the mean per expert, rounded down to a power of two."""

    kernel: str  # up | down | dz | dx | dw
    arch: int  # 10 * major + minor, 0 in the interpreter
    dtype: str  # bfloat16 | float16 | float32
    N: int  # output columns; dw: in
    K: int  # length of the sum; dw: out
    rows: int
    gated: bool = False  # up only: two accumulators

    def key(self) -> str:
        """Return the name under which a tuned config is stored."""
        return "|".join(map(str, self))


KERNELS = ("up", "down", "dz", "dx", "dw")
# longest sum (32 steps) whose epilogue takes long enough to hide the loads of the next tile
SHORT = 2048
SHARED_MEMORY = {
    80: 166912,
    86: 101376,
    89: 101376,
    90: 232448,
    100: 232448,
    120: 101376,
}  # most bytes per block


def read_tile(words: list[str]) -> Tile:
    """Return the config of a table's line: blocks, warps, stages and options."""
    blocks, warps, stages, *options = words
    tile = Tile(*map(int, blocks.split("x")), int(warps), int(stages))
    for option in options:
        if option.startswith("group"):
            tile = tile._replace(GROUP_M=int(option.removeprefix("group")))
        else:
            tile = tile._replace(**{option.upper(): True})
    return tile


def _read_table(text: str) -> dict[str, tuple[tuple[int, Tile], ...]]:
    """Return kernel -> (least rows per expert, config), largest first."""
    table = {}
    for line in text.strip().splitlines():
        kernel, rows, *words = line.split()
        table[kernel] = (*table.get(kernel, ()), (int(rows), read_tile(words)))
    return table


# kernel, least rows per expert, blocks, warps, stages, options; 16-bit dtypes.
# up from 0 rows is narrow: one token's experts have few tiles, and more of them load from more
# processors
_HOPPER = _read_table("""
up    128  128x128x64   8  4  TMA joined
up     48  64x128x64    4  4  TMA
up      0  16x64x64     4  4  TMA
down  128  128x256x64   8  3  TMA
down   48  64x128x64    4  4  TMA
down    0  16x128x64    4  4  TMA
dz    128  128x256x64   8  3  TMA
dz     48  64x128x64    8  3  TMA
dz      0  16x128x64    4  4  TMA
dx    128  128x256x64   8  3  TMA
dx     48  64x128x64    4  4  TMA
dx      0  16x128x64    4  4  TMA
dw    256  128x256x64   8  5  TMA
dw      0  128x128x64   8  5  TMA
""")
_AMPERE = _read_table("""
up    192  128x64x64    8  3
up     48  64x64x64     4  3
up      0  16x64x64     4  3
down  192  128x128x64   8  3
down   48  64x128x64    4  3
down    0  16x128x64    4  3
dz    192  128x128x64   8  3
dz     48  64x64x64     4  3
dz      0  16x64x64     4  3
dx    192  128x128x64   8  3
dx     48  64x128x64    4  3
dx      0  16x128x64    4  3
dw      0  128x128x64   8  5
""")
# 99 KiB of shared memory
_SMALL = _read_table("""
up    192  128x64x32    8  4
up     48  64x64x32     4  4
up      0  16x64x64     4  3
down  192  128x128x32   8  4
down   48  64x128x32    4  4
down    0  16x128x64    4  3
dz    192  128x128x32   8  4
dz     48  64x64x32     4  4
dz      0  16x64x64     4  3
dx    192  128x128x32   8  4
dx     48  64x128x32    4  4
dx      0  16x128x64    4  3
dw      0  128x128x64   8  5
""")
_FLOAT32 = {
    kernel: ((48, Tile(64, 64, 32, 8, 2)), (0, Tile(16, 64, 32, 4, 2))) for kernel in KERNELS
}
# unless 16 divides every size, loads are element by element, and the pointers of a large tile spill
UNALIGNED = {
    kernel: ((48, Tile(64, 64, 32, 8, 3)), (0, Tile(16, 64, 32, 4, 3))) for kernel in KERNELS
}
_INTERPRETER = {kernel: ((0, Tile(16, 32, 32, 4, 1)),) for kernel in KERNELS}
TABLE = {80: _AMPERE, 86: _SMALL, 89: _SMALL, 90: _HOPPER, 100: _HOPPER, 120: _SMALL}


def nearest(arch: int) -> int:
    """Return the architecture in TABLE whose configs `arch` uses: usually the newest up to it."""
    # consumer Blackwell has Ampere's tensor instructions; Thor has consumer Blackwell's memory
    if arch // 10 in (12, 11):
        return 120
    return max((known for known in TABLE if known <= arch and known != 120), default=80)


def clip(tile: Tile, problem: Problem) -> Tile:
    """Fit `tile` to small sizes (blocks of at least 16) and to the shared memory.

    Blackwell uses descriptors only if BLOCK_K divides the length of the sum: otherwise products are
    wrong (triton#10927).
    """
    sums = problem.rows if problem.kernel == "dw" else problem.K
    rows = problem.K if problem.kernel == "dw" else tile.BLOCK_M
    tile = tile._replace(
        BLOCK_M=min(tile.BLOCK_M, _power(rows)),
        BLOCK_N=min(tile.BLOCK_N, _power(problem.N), widest(problem.arch)),
        BLOCK_K=min(tile.BLOCK_K, max(_power(sums), 32)),
    )
    joined = tile.JOINED and problem.gated and widest(problem.arch) >= 2 * tile.BLOCK_N
    persistent = joined or (tile.PERSISTENT and problem.kernel in ("down", "dx"))
    tile = tile._replace(JOINED=joined, PERSISTENT=persistent)
    limit = SHARED_MEMORY[nearest(problem.arch)] if problem.arch else 1 << 30
    while shared_bytes(tile, problem) > limit - 2048 and tile.num_stages > 1:
        tile = tile._replace(num_stages=tile.num_stages - 1)
    while shared_bytes(tile, problem) > limit - 2048:
        tile = tile._replace(BLOCK_K=tile.BLOCK_K // 2)
    # the sum of a weight's gradient may have any length: the number of an expert's rows
    uneven = problem.kernel == "dw" or problem.K % tile.BLOCK_K
    tma = tile.TMA and not (problem.arch >= 100 and uneven)
    return tile._replace(TMA=tma, JOINED=tile.JOINED and tma, PERSISTENT=tile.PERSISTENT and tma)


def widest(arch: int) -> int:
    """Return the most columns of a product: 128 on sm_100, where 256 are wrong (marin#7484)."""
    return 128 if arch // 10 == 10 else 256


def in_turns(tile: Tile, arch: int) -> Tile:
    """Fit `tile` to interleaved gate and up: a product of twice as many columns."""
    return tile._replace(BLOCK_N=min(tile.BLOCK_N, widest(arch) // 2))


def shared_bytes(tile: Tile, problem: Problem) -> int:
    """Return the bytes of shared memory that the pipelined operands use."""
    size = {"bfloat16": 2, "float16": 2, "float32": 4}[problem.dtype]
    columns = tile.BLOCK_N * (1 + problem.gated)
    # an index that is loaded inside the loop uses every second stage of the pipeline
    stages = (tile.num_stages + 1) // 2 if problem.kernel == "dw" else tile.num_stages
    # what is stored by descriptor while the next tile is loaded has its own buffers, half as wide
    stored = 0
    if tile.TMA and tile.PERSISTENT:
        stored = tile.BLOCK_M * tile.BLOCK_N // 2
    if tile.JOINED:  # also the factors of a low-rank term
        stored += 64 * (tile.BLOCK_M + tile.BLOCK_N // 2)
    return (stages * tile.BLOCK_K * (tile.BLOCK_M + columns) + stored) * size


def _power(n: int) -> int:
    return max(16, triton.next_power_of_2(n))


def heuristic(problem: Problem) -> Tile:
    """Return the config of the built-in table; there is one for every problem."""
    if problem.arch == 0:
        table = _INTERPRETER
    elif problem.dtype == "float32":
        table = _FLOAT32
    elif problem.N % 16 or problem.K % 16:
        table = UNALIGNED
    else:
        table = TABLE[nearest(problem.arch)]
    tile = next(tile for rows, tile in table[problem.kernel] if problem.rows >= rows)
    streams = table is _HOPPER and nearest(problem.arch) == 90 and problem.kernel in ("down", "dx")
    # one program per processor does not keep enough loads of a narrow product, such as LoRA's, in
    # flight
    if streams and tile.BLOCK_M == 128 and problem.N >= 128 and problem.K <= SHORT:
        tile = tile._replace(PERSISTENT=True)
    return clip(tile, problem)


def tuned_path() -> Path:
    """Return the file of measured configs, in $XDG_CACHE_HOME (by default ~/.cache)/moe_runtime.

    Raises ValueError if the user has no home folder.
    """
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    base = base if base.is_absolute() else Path(os.path.expanduser("~/.cache"))  # as XDG requires
    if not base.is_absolute():
        raise ValueError(
            f"This user has no home folder (HOME is {os.environ.get('HOME')!r}) to store measured "
            "configs in. Set XDG_CACHE_HOME to the full path of a writable folder"
        )
    return base / "moe_runtime" / "tiles.json"


def refused(path: Path) -> str | None:
    """Return why a file of measured configs, if other users can write it, is refused; or None."""
    status = path.stat()
    if status.st_uid in (0, os.geteuid()) and not status.st_mode & 0o022:
        return None
    how = f"belongs to user {status.st_uid}, its mode is {status.st_mode & 0o777:o}"
    return f"{path} is refused: it {how}. Remove it, or run chmod go-w {path} if it is yours"


@functools.cache
def read_tuned(path: Path | None = None) -> dict[str, dict[str, Tile]]:
    """Return device name -> key -> config from `tuned_path()`, or from `path`.

    Empty if there is no file or no home folder, if a folder is not readable (such as another user's
    home in a container), and for a `refused` file. Raises ValueError for any other content.
    """
    try:
        there = path.is_file() if path else (path := tuned_path()).is_file() and not refused(path)
    except (OSError, ValueError):
        return {}
    if not there:
        return {}
    try:
        devices = json.loads(path.read_text())["devices"]
        return {
            name: {key: Tile(**entry["tile"]) for key, entry in device["tiles"].items()}
            for name, device in devices.items()
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path} is not a file of `moe-runtime tune` ({error})") from None


@functools.lru_cache(maxsize=4096)
def lookup(problem: Problem, device: str) -> Tile:
    """Return the config of a problem on the named device: the measured one, else the built-in."""
    tile = read_tuned().get(device, {}).get(problem.key())
    return heuristic(problem) if tile is None else clip(tile, problem)


_forced: dict[str, Tile] = {}


class force:
    """`with force(up=Tile(...))`: run these kernels with these configs. For tests and the tuner."""

    def __init__(self, **tiles: Tile):
        self.tiles = tiles

    def __enter__(self):
        self.before = dict(_forced)
        _forced.update(self.tiles)

    def __exit__(self, *_):
        _forced.clear()
        _forced.update(self.before)


def problem_of(
    kernel: str,
    device: torch.device,
    dtype: torch.dtype,
    N: int,
    K: int,
    R: int,
    E: int,
    gated: bool = False,
) -> Problem:
    """Return the key of a config for R rows over E experts."""
    rows = 1 << max(R // max(E, 1), 1).bit_length() - 1
    return Problem(
        kernel,
        arch_of(device),
        str(dtype).removeprefix("torch."),
        N,
        K,
        rows,
        gated,
    )


def arch_of(device: torch.device) -> int:
    """Return 10 * major + minor of a GPU's capability, 0 elsewhere."""
    return _device(device)[0]


def device_name(device: torch.device) -> str:
    """Return the name under which a GPU's measured configs are stored."""
    return _device(device)[1]


def choose(
    kernel: str,
    x: torch.Tensor,
    N: int,
    K: int,
    R: int,
    E: int,
    gated: bool = False,
) -> Tile:
    """Return the config for `kernel` on x's device and dtype; R rows over E experts."""
    problem = problem_of(
        kernel,
        x.device,
        x.dtype,
        N,
        K,
        R,
        E,
        gated,
    )
    if kernel in _forced:
        return clip(_forced[kernel], problem)
    return lookup(problem, device_name(x.device))


@functools.cache
def _device(device: torch.device) -> tuple[int, str]:
    if device.type != "cuda":
        return 0, "interpreter"
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor, torch.cuda.get_device_name(device)


@functools.cache
def processors(device: torch.device) -> int:
    """Return the number of streaming multiprocessors; 4 in the interpreter."""
    return (
        torch.cuda.get_device_properties(device).multi_processor_count
        if device.type == "cuda"
        else 4
    )


def precision(x: torch.Tensor) -> str:
    """Return the precision of float32 products, as set for torch's matmul."""
    return "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "ieee"


@triton.jit
def tile_of(pid, num_m, num_n, GROUP_M: tl.constexpr):
    """Row and column tile of program `pid`: GROUP_M row tiles iterate over the columns together."""
    width = GROUP_M * num_n
    first = pid // width * GROUP_M
    size = tl.minimum(num_m - first, GROUP_M)
    return first + pid % width % size, pid % width // size


@triton.jit
def outer(rows, columns):
    """The mask [M, N] that is true where both rows [M] and columns [N] are."""
    return rows[:, None] & columns[None, :]


@triton.jit
def cells(rows, stride, columns):
    """Offsets [M, N] of the elements in these rows, `stride` apart, and columns."""
    return rows[:, None] * stride + columns[None, :]
