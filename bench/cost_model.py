"""Predicts the time of each launch of a layer on an H200, from its launch config, its main loop's
instructions and the bytes that it moves. All numbers are predictions: no kernel has run on a GPU.

    python -m tests.support.aot_table --loops > loops.txt   # reads SASS; minutes
    python -m moe_runtime.bench.cost_model [--loops loops.txt]

A program computes one tile after another. Each step of its sum takes as long as its slowest part:
tensor cores, loads from the L2 cache, operands read from shared memory, and, with `--loops`, the
instructions issued. A tile adds a prologue, unless the next tile's loads run during the epilogue,
and the epilogue. A launch takes as long as its waves of tiles, or as its bytes from memory.

The constants are published or derived and not calibrated; expect an error of 0.1 of the ceiling.
"""

import argparse
import math
import re
from pathlib import Path
from typing import NamedTuple

from moe_runtime.bench import shapes
from moe_runtime.kernels.tiles import Problem, Tile, heuristic

PROCESSORS = 132
CLOCK = 1.62e9  # Hz under load
FLOPS = 4096 * 0.95  # of tensor cores, per clock and processor, in bfloat16
L2 = 38.8  # bytes per clock and processor
SHARED = 128  # bytes per clock and processor
ISSUE = 4  # warp instructions per clock and processor
MEMORY = 4.3e12  # bytes per second of a copy
CEILING = 790e12  # FLOP/s of a product of 8192^3
CACHE = 40e6  # bytes of x that stay in the L2 cache
LAUNCH = 3e-6  # seconds between dependent launches of a captured graph
# kernel -> seconds of the prologue, clocks of the epilogue, bytes that it writes per column
EDGES = {
    "up": (1.6e-6, 2600, 3),
    "down": (1.1e-6, 1200, 2),
    "dz": (2.4e-6, 3000, 10),
    "dx": (1.1e-6, 1200, 2),
    "dw": (1.8e-6, 1300, 2),
}
DRAIN = 36  # bytes of an epilogue per clock and processor, while other tiles compute
# tokens -> goals forward and forward + backward, and published shares of other kernels
GOALS = {
    16384: (0.80, 0.72, "Liger 0.61 and 0.44 (H100), SonicMoE 0.70 and 0.68 (GH200, E=8)"),
    4096: (0.55, 0.50, "vLLM's tuned kernel 0.41 forward, Liger 0.22 both (H100)"),
}
# one token, 8 experts: the weights take 20 us; peers 185 us; the goal 40 us
DECODE = shapes.Shape(1, 2560, 704, 64, 8)


class Launch(NamedTuple):
    """A launch's work and its prediction."""

    name: str
    tile: Tile
    flops: float
    seconds: float
    bound: str  # its slowest part

    def line(self) -> str:
        share = self.flops / self.seconds / CEILING
        return (
            f"  {self.name:8s} {self.seconds * 1e6:8.0f} us {share:5.2f}  {self.bound:13s} "
            f"{self.tile.short()}"
        )


def read_loops(text: str) -> dict[str, int]:
    """Return product -> instructions of a main loop's step, from `aot_table --loops`."""
    loops = {}
    for line in text.splitlines():
        found = re.match(r"\S+ (up|down|dz|dx|dw)\b.*?, (\d+) instructions", line)
        if found:
            loops.setdefault(found[1], int(found[2]))
    return loops


def product(
    kernel: str,
    shape: shapes.Shape,
    sizes: tuple[int, int],
    memory: float,
    loops: dict[str, int],
) -> Launch:
    """Predict one grouped product; `sizes` are its output columns and the length of its sum."""
    N, K = sizes
    R = shape.T * shape.K
    mean = R / min(shape.E, R)
    rows = 1 << max(int(mean), 1).bit_length() - 1
    gated = kernel == "up"
    tile = heuristic(Problem(kernel, 90, "bfloat16", N, K, rows, gated))
    columns = tile.BLOCK_N * (1 + gated)
    experts = min(shape.E, R)
    if kernel == "dw":
        tiles = experts * math.ceil(K / tile.BLOCK_M) * math.ceil(N / tile.BLOCK_N)
        length = mean
    else:
        # of randomly routed rows, half a tile of each expert is empty
        tiles = max(R / tile.BLOCK_M + experts / 2, experts) * math.ceil(N / tile.BLOCK_N)
        length = K
    steps = math.ceil(length / tile.BLOCK_K)
    operands = (tile.BLOCK_M + columns) * tile.BLOCK_K * 2
    groups = max(tile.num_warps // 4, 1)  # each reads all columns
    parts = {
        "tensor cores": 2 * tile.BLOCK_M * columns * tile.BLOCK_K / FLOPS,
        "L2": operands / L2,
        "shared memory": (tile.BLOCK_M + groups * columns) * tile.BLOCK_K * 2 / SHARED,
        "instructions": loops.get(kernel, 0) * tile.num_warps / ISSUE,
    }
    bound = max(parts, key=lambda part: parts[part])
    prologue, arithmetic, written = EDGES[kernel]
    edges = max(arithmetic * tile.BLOCK_M / 128, written * tile.BLOCK_M * columns / DRAIN)
    if not tile.PERSISTENT:
        edges += prologue * CLOCK
    clocks = steps * parts[bound] + edges
    waves = math.ceil(tiles / PROCESSORS)
    flops = 2 * R * N * K * (1 + gated)
    if waves * clocks / CLOCK < memory / MEMORY:
        return Launch(kernel, tile, flops, memory / MEMORY, "memory")
    return Launch(kernel, tile, flops, waves * clocks / CLOCK, bound)


def layer(shape: shapes.Shape, loops: dict[str, int]) -> tuple[list[Launch], list[Launch]]:
    """Predict the launches of the forward and of the backward pass."""
    T, H, I, E, K, _ = shape
    R = T * K
    used = min(E, R)
    up = 2 * used * 2 * I * H
    down = 2 * used * I * H
    x = 2 * T * H
    # tokens are read again for each expert if they do not stay in the cache
    if x >= CACHE:
        x *= K
    rows_h = 2 * R * H
    rows_i = 2 * R * I
    summed = Launch("combine", Tile(1, H, 1), 0, (rows_h + 2 * T * H) / MEMORY, "memory")
    forward = [
        product("up", shape, (I, H), x + up + 3 * rows_i, loops),
        product("down", shape, (H, I), rows_i + down + rows_h, loops),
        summed,
    ]
    backward = [
        product("dz", shape, (I, H), x + down + 5 * rows_i, loops),
        product("dx", shape, (H, 2 * I), 2 * rows_i + up + rows_h, loops),
        product("dw", shape, (H, 2 * I), 1.3 * (2 * rows_i + x) + up, loops),
        product("dw", shape, (I, H), 1.3 * (rows_i + x) + down, loops),
        summed._replace(name="sum rows"),
    ]
    return forward, backward


def seconds(launches: list[Launch]) -> float:
    return sum(launch.seconds + LAUNCH for launch in launches)


def print_decode() -> None:
    """Predict one token's launches: few tiles, each limited by its processor's loads."""
    up, down, _ = layer(DECODE, {})[0]
    total = 2 * LAUNCH  # after the plan, and after up
    work = [(up, DECODE.I, 2 * DECODE.H), (down, DECODE.H, DECODE.I)]
    for launch, N, elements in work:
        tiles = DECODE.K * math.ceil(N / launch.tile.BLOCK_N)
        each = 2 * elements * launch.tile.BLOCK_N
        of_processors = math.ceil(tiles / PROCESSORS) * each / L2 / CLOCK
        time = max(of_processors, tiles * each / MEMORY)
        print(f"  {launch.name:8s} {time * 1e6:8.1f} us  {tiles} programs, {launch.tile.short()}")
        total += time
    least = DECODE.K * 3 * DECODE.I * DECODE.H * 2 / MEMORY
    print(f"  in all {total * 1e6:.0f} us, {least / total:.2f} of the bandwidth; goal 40 us")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--loops", type=Path, help="output of tests.support.aot_table --loops")
    file = parser.parse_args(arguments).loops
    loops = read_loops(file.read_text()) if file else {}
    print("predicted, not measured; share of 790 TFLOP/s; H200, bfloat16")
    for name, shape in shapes.kernels().items():
        forward, backward = layer(shape, loops)
        flops = sum(launch.flops for launch in forward)
        one = flops / seconds(forward) / CEILING
        both = 3 * flops / (seconds(forward) + seconds(backward)) / CEILING
        goal, goal_both, published = GOALS[shape.T]
        print(
            f"\n{name}: forward {one:.2f} (goal {goal:.2f}), forward + backward {both:.2f} "
            f"(goal {goal_both:.2f}); published: {published}"
        )
        for launch in forward + backward:
            print(launch.line())
    print(f"\ndecode, 1 token, {DECODE.K} experts, H={DECODE.H}, I={DECODE.I}:")
    print_decode()


if __name__ == "__main__":
    main()
