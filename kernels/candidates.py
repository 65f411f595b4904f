"""Launch configs that `moe-runtime tune` measures in addition to those of `kernels.tiles`."""

from moe_runtime.kernels import tiles
from moe_runtime.kernels.tiles import Problem, Tile, read_tile


def _read(text: str) -> dict[str, list[Tile]]:
    """Return kernel -> configs; dx has those of down."""
    pool = {}
    for line in text.strip().splitlines():
        kernel, *words = line.split()
        pool.setdefault(kernel, []).append(read_tile(words))
    pool["dx"] = pool["down"]
    return pool


# kernel, blocks, warps, stages, options
_HOPPER = _read("""
up    128x128x64   8  3  TMA joined
up    128x128x64   8  3  group16 TMA joined
up    128x128x64   8  4  TMA
up    128x128x64   8  3
up    128x64x64    8  4  TMA
up    64x128x64    4  4  TMA
up    64x128x64    4  4  TMA joined
up    64x128x64    8  4  TMA
up    64x128x64    4  3
up    64x64x64     4  5  TMA
up    32x128x64    4  4  TMA
up    16x128x64    4  4  TMA
up    16x64x128    4  4  TMA
down  128x256x64   8  3  TMA
down  128x256x64   8  4  TMA
down  128x256x64   8  3  group16 TMA
down  128x256x64   8  3  TMA persistent
down  128x256x64   8  4  TMA persistent
down  128x256x64   8  3
down  128x128x64   8  4  TMA
down  128x128x64   8  4  TMA persistent
down  128x128x64   4  4  TMA
down  256x128x64   8  3  TMA
down  64x256x64    8  4  TMA
down  64x256x64    4  4  TMA
down  64x128x64    4  4  TMA
down  64x128x128   4  3  TMA
down  32x128x64    4  4  TMA
down  16x128x128   4  4  TMA
dz    128x256x64   8  3  TMA
dz    128x256x64   8  4  TMA
dz    128x256x64   8  3  group16 TMA
dz    128x128x64   8  3  TMA
dz    128x128x64   8  4  TMA
dz    128x128x64   8  3
dz    128x64x64    8  4  TMA
dz    64x256x64    8  4  TMA
dz    64x128x64    8  3  TMA
dz    64x128x64    4  4  TMA
dz    64x64x64     4  4  TMA
dz    32x128x64    4  4  TMA
dz    16x128x64    4  4  TMA
dw    128x256x64   8  5  TMA
dw    128x256x64   8  7  TMA
dw    256x128x64   8  5  TMA
dw    128x256x64   8  5  group16 TMA
dw    128x256x64   8  5
dw    128x256x64   8  7
dw    128x128x64   8  5  TMA
dw    128x128x64   8  5
dw    128x128x64   4  5  TMA
dw    128x128x128  8  5
dw    64x256x64    4  5
dw    64x128x64    4  7  TMA
""")
_AMPERE = _read("""
up    128x64x64    8  3
up    128x64x32    8  4
up    128x32x64    4  3
up    128x64x64    8  3  group16
up    64x64x64     4  3
up    64x64x32     4  4
up    64x128x32    8  4
up    32x64x64     4  3
up    16x64x64     4  3
up    16x64x128    4  3
down  128x128x64   8  3
down  128x128x32   8  4
down  128x128x32   4  4
down  128x256x32   8  3
down  128x128x64   8  3  group16
down  128x64x64    4  4
down  64x128x64    4  3
down  64x256x32    8  4
down  64x128x32    4  4
down  32x128x64    4  3
down  16x128x64    4  3
down  16x128x128   4  3
dz    128x128x64   8  3
dz    128x128x32   8  4
dz    128x128x64   8  3  group16
dz    128x64x64    8  3
dz    128x64x64    4  3
dz    64x128x32    4  4
dz    64x128x64    8  3
dz    64x64x64     4  3
dz    32x64x64     4  3
dz    16x64x64     4  3
dz    16x128x64    4  3
dw    128x128x64   8  5
dw    128x128x64   8  7
dw    128x128x32   8  7
dw    128x128x32   4  7
dw    128x256x32   8  5
dw    256x128x32   8  5
dw    128x128x64   8  5  group16
dw    128x64x64    4  5
dw    64x128x64    4  5
dw    64x64x64     4  5
""")
_FLOAT32 = [
    read_tile(line.split())
    for line in (
        "64x64x32     8  2",
        "64x64x32     4  3",
        "64x64x32     4  2",
        "128x64x32    8  2",
        "64x128x32    8  2",
        "128x128x32   8  2",
        "64x64x64     8  2",
        "32x64x32     4  2",
        "16x64x32     4  2",
        "16x128x32    4  2",
    )
]
_INTERPRETER = (
    Tile(16, 32, 32, 4, 1),
    Tile(32, 32, 32, 4, 1),
    Tile(16, 32, 32, 4, 1, TMA=True),
)


def candidates(problem: Problem) -> list[Tile]:
    """Return the configs to try for these rows and this GPU, the built-in one first."""
    if problem.arch == 0:
        pool = _INTERPRETER
    elif problem.dtype == "float32":
        pool = _FLOAT32
    else:
        hopper = tiles.nearest(problem.arch) in (90, 100)
        pool = (_HOPPER if hopper else _AMPERE)[problem.kernel]
    if problem.kernel != "dw" and problem.arch:
        # a tile with many more rows than an expert has computes mostly padding, and one with far
        # fewer reads the weights often
        low, high = min(64, problem.rows // 4), max(32, 2 * problem.rows)
        pool = [tile for tile in pool if low <= tile.BLOCK_M <= high]
    return list(
        dict.fromkeys([tiles.heuristic(problem), *(tiles.clip(tile, problem) for tile in pool)])
    )
