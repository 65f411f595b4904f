"""The six matrix products of a layer, one launch each, for a profiler.

    python -m moe_runtime.bench.profile_products SHAPE [T]
    ncu --profile-from-start off --kernel-name regex:^_ \\
        python -m moe_runtime.bench.profile_products Qwen3-30B-A3B

Each product is compiled and run once before profiling starts.
"""

import sys

import torch

from moe_runtime.kernels import tiles
from moe_runtime.tools import tune
from moe_runtime.tools.layer_shapes import LAYERS


def main(arguments: list[str]) -> None:
    """Launch each product once between cudaProfilerStart and cudaProfilerStop, with its config."""
    name = arguments[0]
    T = int(arguments[1]) if len(arguments) > 1 else 16384
    device, _ = tune.find_gpu()
    for product in tune.PRODUCTS:
        problem = tune.problem_of(
            product,
            LAYERS[name],
            T,
            "bfloat16",
            device,
        )
        tile = tiles.lookup(problem, tiles.device_name(device))
        run = tune.runner(
            product,
            LAYERS[name],
            T,
            "bfloat16",
            device,
        )
        run(tile)
        torch.cuda.synchronize()
        torch.cuda.profiler.start()
        run(tile)
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()
        print(f"{name}, {T} tokens, {product}: {tile.short()}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
