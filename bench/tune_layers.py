"""`moe-runtime tune` without the packages of the command line.

    python -m moe_runtime.bench.tune_layers FILE [--shape NAME,...]

The exit code is 3 if the CUDA context is lost; a rerun continues after the config that broke it.
"""

import argparse
import sys
from collections import Counter
from pathlib import Path

from moe_runtime.tools import tune
from moe_runtime.tools.layer_shapes import find_layers


def main(arguments: list[str]) -> int:
    """Measure the layers of published models, and write the configs to FILE."""
    parser = argparse.ArgumentParser(
        prog="python -m moe_runtime.bench.tune_layers", description=__doc__.splitlines()[0]
    )
    add = parser.add_argument
    add("file", type=Path)
    add("--shape", default="all", help="names of moe_runtime.tools.layer_shapes, or all")
    add("--tokens", default="16384,4096")
    add("--seconds", type=float, help="after which no measurement starts")
    given = parser.parse_args(arguments)
    layers = find_layers(given.shape)
    tokens = [*map(int, given.tokens.split(","))]
    counts: Counter[str] = Counter()
    try:
        for step in tune.tune(
            layers,
            tokens,
            ["bfloat16"],
            given.file,
            seconds=given.seconds,
        ):
            counts[step.state] += 1
            print(f"[{step.number}/{step.of}] {step}", flush=True)
    except tune.ContextLost as lost:
        print(f"error: {lost}", flush=True)
        return 3
    print(f"{given.file}: " + ", ".join(f"{count} {state}" for state, count in counts.items()))
    return int(set(counts) == {"failed"})


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
