"""`moe-runtime tune` without the command line's packages: python -m moe_runtime.bench.tune_layers
FILE [--shape NAME,...]

Exit code 3 where the CUDA context is lost: the next process goes on behind what broke it.
"""

import argparse
import sys
from pathlib import Path

from moe_runtime.config import check_choice
from moe_runtime.tools import tune
from moe_runtime.tools.layer_shapes import LAYERS


def main(arguments: list[str]) -> int:
    """Measure the layers of published models into FILE."""
    parser = argparse.ArgumentParser(
        prog="python -m moe_runtime.bench.tune_layers", description=__doc__.splitlines()[0]
    )
    parser.add_argument("file", type=Path)
    parser.add_argument(
        "--shape", default="all", help="names of moe_runtime.tools.layer_shapes, or all"
    )
    parser.add_argument("--tokens", default="16384,4096")
    parser.add_argument("--seconds", type=float, help="after which nothing new begins")
    given = parser.parse_args(arguments)
    known = {name.lower(): name for name in LAYERS}
    counts = {}
    names = list(known) if given.shape == "all" else given.shape.split(",")
    for name in names:
        check_choice("shape", name, (*known, "all"))
    layers = {}
    for name in names:
        layers[known[name]] = LAYERS[known[name]]
    try:
        for step in tune.tune(
            layers,
            [*map(int, given.tokens.split(","))],
            ["bfloat16"],
            given.file,
            seconds=given.seconds,
        ):
            counts[step.state] = counts.get(step.state, 0) + 1
            print(f"[{step.number}/{step.of}] {step}", flush=True)
    except tune.ContextLost as lost:
        print(f"error: {lost}", flush=True)
        return 3
    print(f"{given.file}: " + ", ".join(f"{count} {state}" for state, count in counts.items()))
    return int(set(counts) == {"failed"})


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
