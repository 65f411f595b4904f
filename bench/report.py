"""Markdown from results files: python -m moe_runtime.bench.report FILE.json [FILE.jsonl ...]; -o OUT.json writes them as one.

Of a CPU's file the layer's table, the stock models' and the CPU's goals; of a GPU's its goals and by how much they are met or
missed, then every table.
"""

import argparse
import contextlib
import json
from pathlib import Path
from typing import NamedTuple

from moe_runtime.bench import shapes
from moe_runtime.bench.records import Records, benchmarks

PASSES = {"bench_forward": "forward", "bench_forward_backward": "forward + backward"}
VARIANTS = ("moe_runtime", "transformers eager", "transformers grouped_mm")


def rows_of(path: str | Path) -> dict:
    """Return {(benchmark, variant): row} of a results file."""
    return {(b["name"], name): row for b in benchmarks(path) for name, row in b["extra_info"]["rows"].items()}


def cpu_table(rows: dict) -> str:
    """Return the layer's table: times of the dense-matmul floor, one line per shape, dtype and pass."""
    lines = ["| shape | dtype | pass | " + " | ".join(VARIANTS) + " |", "|---|---|---|" + "---|" * len(VARIANTS)]
    for shape in ("coarse", "fine"):
        for dtype in ("fp32", "bf16"):
            for function, name in PASSES.items():
                ratios = (rows[f"{function}[{shape}-{dtype}]", variant]["ratio"] for variant in VARIANTS)
                lines.append(f"| {shape} | {dtype} | {name} | " + " | ".join(f"{ratio:.2f}" for ratio in ratios) + " |")
    return "\n".join(lines)


STEPS = {"bench_decoder_layer": "decoder layer, forward + backward", "bench_training_step": "training step of 4 layers"}


def steps_table(rows: dict) -> str:
    """Return the table of stock models on the CPU: our milliseconds, and how many times that transformers' take."""
    others = VARIANTS[1:]
    lines = ["| tiny Qwen3-MoE | dtype | " + " | ".join(VARIANTS) + " |", "|---|---|" + "---|" * len(VARIANTS)]
    for function, name in STEPS.items():
        for dtype in ("fp32", "bf16"):
            found = {variant: rows[f"{function}[tiny-Qwen3-MoE-{dtype}]", variant] for variant in VARIANTS}
            cells = [f"{found['moe_runtime']['ms']:.0f} ms", *(f"{found[other]['ratio']:.2f}" for other in others)]
            lines.append(f"| {name} | {dtype} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


class Goal(NamedTuple):
    """What is wanted of a number of each of some benchmarks; `least` or `most`."""

    what: str
    benchmarks: list[str]
    value: object  # rows of one benchmark (variant -> row) -> number
    least: float | None = None
    most: float | None = None

    def met(self, value: float) -> bool:
        return value >= self.least if self.most is None else value <= self.most

    def want(self) -> str:
        return f">= {self.least:g}" if self.most is None else f"<= {self.most:g}"


def _layers(function: str, *tokens: int, names=tuple(shapes.GPU)) -> list[str]:
    return [f"{function}[{name}-{T}-bf16]" for T in tokens for name in names]


def _share(rows):
    return rows["moe_runtime"]["share"]


def _faster(variant: str):
    return lambda rows: rows[variant]["ms"] / rows["moe_runtime"]["ms"]


def _of_copy(variant: str):
    return lambda rows: rows["copy (floor)"]["ms"] / rows[variant]["ms"]


def _of_all(rows):
    return rows["moe_runtime, apart"]["ms"] / rows["all experts (floor)"]["ms"]


def _saved(rows):
    return 1 - _of_all(rows)


def _gradients(rows):
    """What the weights' gradients take beside x's and the gate weights'."""
    apart, whole, none = (rows[name]["kept MiB"] for name in ("moe_runtime, apart", "all experts (floor)", "no expert"))
    return (apart - none) / (whole - none)


def _each(function: str, *ways: str, names=tuple(shapes.GPU)) -> list[str]:
    return [f"{function}[{name}-{way}]" for name in names for way in ways]


HF = "transformers grouped_mm"


def _than_triton(rows):
    return rows["moe_runtime triton"]["ms"] / rows["moe_runtime cuda"]["ms"]


NAIVE = "sum of logits, cross_entropy (naive)"
FUSED = [f"bench_fused_loss[V=32000-{train}]" for train in ("all", "gate")]
GOALS = (
    Goal("forward, share of the matmul ceiling, T >= 16384", _layers("bench_forward", 16384, 65536), _share, 0.80),
    Goal(
        "forward + backward, share of the matmul ceiling, T >= 16384",
        _layers("bench_forward_backward", 16384, 65536), _share, 0.70,
    ),
    Goal(
        "forward + backward, share of the matmul ceiling, T = 4096, small experts",
        _layers("bench_forward_backward", 4096, names=("OLMoE", "Qwen3-30B-A3B")), _share, 0.45,
    ),
    Goal(f"forward + backward, times faster than {HF}", _layers("bench_forward_backward", *shapes.TOKENS), _faster(HF), 2.0),
    Goal(f"forward, times faster than {HF}: never slower", _layers("bench_forward", *shapes.TOKENS), _faster(HF), 1.0),
    Goal(
        f"layer and training step of a stock model, times faster than {HF}: never slower",
        [f"{function}[{name}-bf16]" for function in STEPS for name in shapes.STEPS], _faster(HF), 1.0,
    ),
    Goal(
        "router, times of its bytes' copy, T = 16384", _each("bench_route", "forward", "backward"),
        lambda rows: rows["moe_runtime"]["ms"] / rows["copy (floor)"]["ms"], most=2.0,
    ),
    Goal(
        "merge and dalpha, share of the copy's bandwidth", _each("bench_merge_experts", "merge", "dalpha"),
        _of_copy("moe_runtime triton"), 0.85,
    ),
    Goal(
        "EWA's averaging, share of the copy's bandwidth", [f"bench_average_experts[{name}]" for name in shapes.GPU],
        _of_copy("moe_runtime triton"), 0.85,
    ),
    Goal(
        "XFT's merge stage, forward + backward of a layer, times faster than the official form",
        [f"bench_mixing_layer[{name}]" for name in shapes.MIXING], _faster("official"), 2.0,
    ),
    Goal(
        "a fifth of the experts trains: share of the time saved", [f"bench_partly_trained[{name}]" for name in shapes.FINE],
        _saved, 0.20,
    ),
    Goal(
        "6 of 64 experts train: share of the time saved", ["bench_selected_experts[DeepSeek-V2-Lite]"], _saved, 0.20,
    ),
    Goal(
        "6 of 64 experts train: memory of their gradients, times of all", ["bench_selected_experts[DeepSeek-V2-Lite]"],
        _gradients, most=0.10,
    ),
    Goal(
        "UltraFuser's loss, 3 x Llama-2-13B, times faster than the naive",
        [f"bench_fused_loss[3xLlama-2-13B-{T}-{train}]" for T in (2048, 8192) for train in ("all", "gate")],
        lambda rows: rows[NAIVE]["ms"] / rows["moe_runtime triton"]["ms"], 1.0,
    ),
    Goal(
        "dispatch in CUDA C++, times faster than Triton's, T <= 2048",
        [f"bench_cuda_kernel[{name}-dispatch]" for name, shape in shapes.plans().items() if shape.T <= 2048],
        _than_triton, 1.0,
    ),
)  # fmt: skip
CPU_GOALS = (
    Goal(
        "XFT's merge stage, a step, times of a dense tuning step", ["bench_mixing_step"],
        lambda rows: rows["moe_runtime"]["ms"] / rows["dense SFT step (floor)"]["ms"], most=1.25,
    ),
    Goal(
        "a fifth of the experts trains: backward, times of training all", ["bench_partly_trained_backward[fine]"],
        _of_all, most=0.85,
    ),
    Goal(
        "a fifth of the experts trains: forward + backward, and a step with AdamW, times of training all",
        ["bench_partly_trained[fine]", "bench_partly_trained_step[fine]"], _of_all, most=0.95,
    ),
    Goal(
        "UltraFuser's loss, forward + backward, times of the naive", FUSED[:1],
        lambda rows: rows["moe_runtime torch"]["ms"] / rows[NAIVE]["ms"], most=1.0,
    ),
    Goal(
        "its stage 1, times of the naive", FUSED[1:],
        lambda rows: rows["moe_runtime torch"]["ms"] / rows[NAIVE]["ms"], most=0.6,
    ),
    Goal(
        "its peak memory, share of the naive", FUSED,
        lambda rows: rows["moe_runtime torch"]["peak MiB"] / rows[NAIVE]["peak MiB"], most=0.35,
    ),
    Goal(
        "LoRA experts on one base, forward + backward, times faster than per slot", ["bench_lora_experts[coarse-both-fp32]"],
        lambda rows: rows["LoRA per slot"]["ms"] / rows["moe_runtime"]["ms"], 2.5,
    ),
)  # fmt: skip


def goals(rows: dict, wanted: tuple[Goal, ...] = GOALS) -> str:
    """Return one line per goal, and one per benchmark that misses it."""
    lines, missed = ["| goal | want | worst | best | met | not measured |", "|---|---|---|---|---|---|"], []
    for goal in wanted:
        values = {}
        for name in goal.benchmarks:
            found = {variant: row for (benchmark, variant), row in rows.items() if benchmark == name}
            with contextlib.suppress(KeyError):
                values[name] = goal.value(found)
        met = [name for name, value in values.items() if goal.met(value)]
        ordered = [f"{value:.2f}" for value in sorted(values.values(), reverse=goal.most is not None)]
        ends = f"{ordered[0]} | {ordered[-1]}" if ordered else " | "
        left = len(goal.benchmarks) - len(values)
        lines.append(f"| {goal.what} | {goal.want()} | {ends} | {len(met)} of {len(values)} | {left} |")
        limit = goal.least if goal.most is None else goal.most
        missed += [
            f"* {goal.what}: {name} is {value:.2f}, {abs(value / limit - 1):.0%} off"
            for name, value in values.items()
            if name not in met
        ]
    return "\n".join([*lines, "", *missed])


def gpu_tables(paths: list[str | Path]) -> str:
    """Return a table per function: a line per benchmark, each variant's milliseconds, share of the ceiling, peak memory."""
    tables, notes = {}, []
    for bench in (bench for path in paths for bench in benchmarks(path)):
        tables.setdefault(bench["name"].partition("[")[0], []).append(bench)
        notes += [f"* {bench['name']}: {name}: {note}" for name, note in bench["extra_info"].get("notes", {}).items()]
    lines = []
    for function, found in tables.items():
        variants = list(dict.fromkeys(name for bench in found for name in bench["extra_info"]["rows"]))
        lines += ["", f"| {function} | " + " | ".join(variants) + " |", "|---|" + "---|" * len(variants)]
        for bench in found:
            rows = bench["extra_info"]["rows"]
            cells = (_cell(rows[name]) if name in rows else "" for name in variants)
            lines.append(f"| {bench['name'].partition('[')[2].rstrip(']')} | " + " | ".join(cells) + " |")
    return "\n".join([*lines, "", *notes])


def _cell(row: dict) -> str:
    parts = [f"{row['ms']:.3f} ms"]
    parts += [f"{row['share']:.0%}"] if "share" in row else []
    parts += [f"{row['peak MiB']:.0f} MiB"] if "peak MiB" in row else []
    # results of two correct implementations differ by their rounding
    parts += [f"differs by {row['difference']:.0e}"] if not row.get("difference", 0) < 0.05 else []
    return ", ".join(parts)


def cuda_table(paths: list[str | Path]) -> list[dict]:
    """Return moe_runtime/cuda_table.json's rows: the ops whose kernels in csrc/ beat Triton's at every shape measured.

    An op counts on a device only if bench_cuda.py measured all its kernels there at all of its shapes, and gained at least 3 %
    at the worst of them: what differs by less differs from run to run.
    """
    from moe_runtime.bench.bench_cuda import KERNELS

    found: dict[tuple[str, str], dict[str, float]] = {}
    infos = {}
    for bench in (bench for path in paths for bench in benchmarks(path)):
        name, info = bench["name"], bench["extra_info"]
        if name.startswith("bench_cuda_kernel[") and {"moe_runtime cuda", "moe_runtime triton"} <= info["rows"].keys():
            kernel = name.rstrip("]").rpartition("-")[2]
            found.setdefault((KERNELS[kernel], info["machine"]), {})[name] = _than_triton(info["rows"])
            infos[info["machine"]] = {key: info[key] for key in ("date", "torch", "triton")}
    return [
        {"op": op, "device": device, **infos[device], "times_faster": round(min(values.values()), 3)}
        for (op, device), values in sorted(found.items())
        if len(values) == len(shapes.plans()) * list(KERNELS.values()).count(op) and min(values.values()) >= 1.03
    ]


def machine(paths: list[str | Path]) -> str:
    """Return a line per set of machine, versions and ceilings that the files were measured with."""
    seen = {}
    for info in (bench["extra_info"] for path in paths for bench in benchmarks(path)):
        ceilings = ", ".join(f"{value:.0f} {unit}" for unit, value in info.get("ceilings", {}).items())
        names = ("machine", "driver", "torch", "triton", "transformers", "commit", "date", "tiles")
        seen[", ".join([*(f"{name} {info[name]}" for name in names if name in info), f"ceilings {ceilings}"])] = None
    return "\n".join(f"* {line}" for line in seen)


def main(arguments: list[str] | None = None) -> None:
    """Print the report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("-o", "--out", type=Path, help="write the benchmarks of all files as one JSON file")
    parser.add_argument("--goals", action="store_true", help="of a GPU's files, the goals alone")
    parser.add_argument(
        "--cuda-table", type=Path, help="write moe_runtime/cuda_table.json from bench_cuda.py's results"
    )
    options = parser.parse_args(arguments)
    if options.cuda_table:
        measured = cuda_table(options.files)
        options.cuda_table.write_text(json.dumps({"measured": measured}, indent=2) + "\n")
        print(
            f"{options.cuda_table}: {', '.join(row['op'] for row in measured) or 'nothing'} faster than Triton everywhere"
        )
        return None
    rows = {key: row for path in options.files for key, row in rows_of(path).items()}
    if options.out:
        found = [{key: b[key] for key in ("name", "extra_info")} for path in options.files for b in benchmarks(path)]
        options.out.write_text(json.dumps({"benchmarks": found}, indent=1) + "\n")
    if ("bench_forward[coarse-fp32]", "moe_runtime") in rows:
        print(cpu_table(rows))
        if ("bench_training_step[tiny-Qwen3-MoE-fp32]", "moe_runtime") in rows:
            print(f"\n{steps_table(rows)}")
        print(f"\n{goals(rows, CPU_GOALS)}")
        return None
    print(f"{machine(options.files)}\n\n{goals(rows)}")
    if options.goals:
        return None
    print(gpu_tables(options.files))
    lines = [line for path in options.files if path.suffix == ".jsonl" for line in Records(path).lines()]
    for state in ("skipped", "failed", "broken"):
        for line in lines:
            if state in line:
                print(f"\n{state}: {line['name']}: {line[state]}")
    return None


if __name__ == "__main__":
    main()
