"""Markdown from a results file: python -m bench.report bench/results/DATE-COMMIT-cpu.json"""

import json
import sys
from pathlib import Path

PASSES = {"bench_forward": "forward", "bench_forward_backward": "forward + backward"}
VARIANTS = ("moe_runtime", "transformers eager", "transformers grouped_mm")


def rows_of(path: str | Path) -> dict:
    """Return {(benchmark, variant): row} of a pytest-benchmark file."""
    benchmarks = json.loads(Path(path).read_text())["benchmarks"]
    return {(b["name"], name): row for b in benchmarks for name, row in b["extra_info"]["rows"].items()}


def cpu_table(rows: dict) -> str:
    """Return the layer's table: times of the dense-matmul floor, one line per shape, dtype and pass."""
    lines = ["| shape | dtype | pass | " + " | ".join(VARIANTS) + " |", "|---|---|---|" + "---|" * len(VARIANTS)]
    for shape in ("coarse", "fine"):
        for dtype in ("fp32", "bf16"):
            for function, name in PASSES.items():
                ratios = (rows[f"{function}[{shape}-{dtype}]", variant]["ratio"] for variant in VARIANTS)
                lines.append(f"| {shape} | {dtype} | {name} | " + " | ".join(f"{ratio:.2f}" for ratio in ratios) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(cpu_table(rows_of(sys.argv[1])))
