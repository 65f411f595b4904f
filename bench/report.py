"""Markdown from results files: python -m moe_runtime.bench.report FILE.json [FILE.jsonl ...]; -o
OUT.json writes them as one.

Machine and ceilings; the layer's table and the stock models' where they were measured on a CPU; the
goals of the device, which are met and which are missed by how much; then a table of every function.
"""

import argparse
import contextlib
from collections import Counter
from pathlib import Path

from moe_runtime.bench import described, shapes
from moe_runtime.bench.goals import CPU_GOALS, GOALS, PASSES, goals, than_triton
from moe_runtime.bench.pictures_bars import ordered
from moe_runtime.bench.records import Records, benchmarks
from moe_runtime.io.files import atomic_write_json

VARIANTS = ("moe_runtime", "transformers eager", "transformers grouped_mm")


def rows_of(path: str | Path) -> dict:
    """Return {(benchmark, variant): row} of a results file."""
    rows = {}
    for b in benchmarks(path):
        for name, row in b["extra_info"]["rows"].items():
            rows[(b["name"], name)] = row
    return rows


def cpu_table(rows: dict) -> str:
    """Return the layer's table, a line per shape, dtype and pass: our milliseconds, and the others'
    times as multiples.
    """
    places = []
    for shape in ("coarse", "fine"):
        for dtype in ("fp32", "bf16"):
            for function in PASSES:
                places.append((shape, dtype, function))
    names = []
    for shape, dtype, function in places:
        names.append(f"{function}[{shape}-{dtype}]")
    variants = ordered(variant for name, variant in rows if name in names)
    heads = []
    for variant in variants:
        heads.append(variant.removesuffix(" (floor)"))
    lines = [
        "| shape | dtype | pass | " + " | ".join(heads) + " |",
        "|---|---|---|" + "---|" * len(variants),
    ]
    for name, (shape, dtype, function) in zip(names, places, strict=True):
        ours = rows[name, "moe_runtime"]["ms"]
        cells = []
        for other in variants[1:]:
            cells.append(f"{rows[name, other]['ms'] / ours:.2f}" if (name, other) in rows else "-")
        lines.append(
            f"| {shape} | {dtype} | {PASSES[function]} | "
            + " | ".join([f"{ours:.0f} ms", *cells])
            + " |"
        )
    return "\n".join(lines)


STEPS = {
    "bench_decoder_layer": "decoder layer, forward + backward",
    "bench_training_step": "training step of 4 layers",
}


def steps_table(rows: dict) -> str:
    """Return the table of stock models on the CPU: our milliseconds, and how many times that
    transformers' take.
    """
    others = VARIANTS[1:]
    lines = [
        "| tiny Qwen3-MoE | dtype | " + " | ".join(VARIANTS) + " |",
        "|---|---|" + "---|" * len(VARIANTS),
    ]
    for function, name in STEPS.items():
        for dtype in ("fp32", "bf16"):
            found = {}
            for variant in VARIANTS:
                found[variant] = rows[f"{function}[tiny-Qwen3-MoE-{dtype}]", variant]
            cells = [
                f"{found['moe_runtime']['ms']:.0f} ms",
                *(f"{found[other]['ratio']:.2f}" for other in others),
            ]
            lines.append(f"| {name} | {dtype} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def tables(paths: list[str | Path]) -> str:
    """Return a table per function, kind by kind, of milliseconds, share of the ceiling, memory and
    what else was measured.

    Benchmarks lie across or variants do, whichever are fewer; why variants are missing stands
    below.
    """
    groups = {}
    notes = []
    for bench in (bench for path in paths for bench in benchmarks(path)):
        info = bench["extra_info"]
        function = bench["name"].partition("[")[0]
        groups.setdefault((info.get("kind", "op"), function), {})[bench["name"]] = info["rows"]
        for name, note in info.get("notes", {}).items():
            notes.append(f"* {bench['name']}: {name}: {note}")
    order = {kind: i for i, kind in enumerate(described.KINDS)}
    lines = []
    for kind, function in sorted(groups, key=lambda key: order.get(key[0], len(order))):
        lines += ["", *_table(function, groups[kind, function])]
    return "\n".join([*lines, "", *notes])


def _table(function: str, found: dict[str, dict]) -> list[str]:
    """Return the lines of one function's table."""
    variants = list(dict.fromkeys(name for rows in found.values() for name in rows))
    short = {}
    for name in found:
        short[name] = name.partition("[")[2].rstrip("]") or "all"
    cells = {}
    for name, rows in found.items():
        for variant, row in rows.items():
            cells[(name, variant)] = described.cell(row)
    if len(variants) <= max(len(found), 4):
        head = variants
        body = []
        for name in found:
            body.append((short[name], [cells.get((name, v), "") for v in variants]))
    else:
        head = list(short.values())
        body = []
        for v in variants:
            body.append((v, [cells.get((name, v), "") for name in found]))
    lines = [f"| {function} | " + " | ".join(head) + " |", "|---|" + "---|" * len(head)]
    return lines + [f"| {first} | " + " | ".join(others) + " |" for first, others in body]


def cuda_table(paths: list[str | Path]) -> list[dict]:
    """Return moe_runtime/native/cuda_table.json's rows: the ops whose kernels in csrc/ beat
    Triton's at every shape measured.

    An op counts on a device only if bench_cuda.py measured all its kernels there at all of its
    shapes, and gained at least 3 % at the worst of them: what differs by less differs from run to
    run.
    """
    from moe_runtime.bench.bench_cuda import KERNELS

    found: dict[tuple[str, str], dict[str, float]] = {}
    infos = {}
    for bench in (bench for path in paths for bench in benchmarks(path)):
        name = bench["name"]
        info = bench["extra_info"]
        if (
            name.startswith("bench_cuda_kernel[")
            and {"moe_runtime cuda", "moe_runtime triton"} <= info["rows"].keys()
        ):
            kernel = name.rstrip("]").rpartition("-")[2]
            found.setdefault((KERNELS[kernel], info["machine"]), {})[name] = than_triton(
                info["rows"]
            )
            infos[info["machine"]] = {key: info[key] for key in ("date", "torch", "triton")}
    table = []
    for (op, device), values in sorted(found.items()):
        if (
            len(values) == len(shapes.plans()) * list(KERNELS.values()).count(op)
            and min(values.values()) >= 1.03
        ):
            table.append(
                {
                    "op": op,
                    "device": device,
                    **infos[device],
                    "times_faster": round(min(values.values()), 3),
                }
            )
    return table


def machine(paths: list[str | Path]) -> str:
    """Return a line per set of machine, versions and ceilings that the files were measured with."""
    names = (
        "machine",
        "driver",
        "python",
        "torch",
        "triton",
        "transformers",
        "commit",
        "date",
        "tiles",
    )
    seen: dict[str, dict[str, str]] = {}
    for info in (bench["extra_info"] for path in paths for bench in benchmarks(path)):
        line = ", ".join(
            f"{name} {info[name]}" for name in names if info.get(name, "none") != "none"
        )
        limits = []
        for unit, value in info.get("ceilings", {}).items():
            limits.append(f"{value:,.{0 if value >= 10 else 3}f} {unit}")
        seen.setdefault(line, {})[info.get("dtype", "")] = ", ".join(limits)
    return "\n".join(f"* {', '.join([line, *_ceilings(limits)])}" for line, limits in seen.items())


def _ceilings(limits: dict[str, str]) -> list[str]:
    ceilings = []
    for dtype, text in limits.items():
        if text:
            ceilings.append(f"ceilings {f'of {dtype} ' if dtype else ''}{text}")
    return ceilings


def outcomes(paths: list[Path]) -> str:
    """Return how many tests passed, and which failed and why, of files that
    tests/support/outcomes.py wrote into too.
    """
    found = []
    for path in paths:
        if path.suffix == ".jsonl":
            for line in Records(path).lines():
                if "outcome" in line:
                    found.append(line)
    last = {line["name"]: line for line in found}
    counts = Counter(line["outcome"] for line in last.values())
    if last:
        lines = ["Tests: " + ", ".join(f"{count} {outcome}" for outcome, count in counts.items())]
    else:
        lines = []
    failed = {}
    for name, line in last.items():
        if line["outcome"] == "failed":
            failed[name] = line.get("why", "")
    return "\n".join(
        [*lines, *(f"* {name}: {' '.join(why.split())[-300:]}" for name, why in failed.items())]
    )


def text(paths: list[Path]) -> str:
    """Return the whole report: machine, tests, goals, the tables of stock models and layers on a
    CPU, every other table.
    """
    rows = {}
    for path in paths:
        for key, row in rows_of(path).items():
            rows[key] = row
    parts = []
    for part in (machine(paths), outcomes(paths)):
        if part:
            parts.append(part)
    for table in (cpu_table, steps_table):
        with contextlib.suppress(KeyError):  # of what was not measured, or is a GPU's
            parts.append(table(rows))
    names = {name for name, _ in rows}
    wanted = tuple(
        goal
        for goal in (GOALS if _is_gpu(paths) else CPU_GOALS)
        if not names.isdisjoint(goal.benchmarks)
    )
    return "\n\n".join(
        [*parts, *([goals(rows, wanted).strip()] if wanted else []), tables(paths).strip()]
    )


def _is_gpu(paths: list[Path]) -> bool:
    devices = []
    for path in paths:
        if path.suffix == ".jsonl":
            for line in Records(path).lines():
                devices.append(line.get("device"))
    # of device_check, when no benchmark ended
    if any(device and "capability" in device for device in devices):
        return True
    return any(
        bench["extra_info"].get("driver", "none") != "none"
        for path in paths
        for bench in benchmarks(path)
    )


def main(arguments: list[str] | None = None) -> None:
    """Print the report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument(
        "-o", "--out", type=Path, help="write the benchmarks of all files as one JSON file"
    )
    parser.add_argument(
        "--markdown",
        type=Path,
        help="write the report there, and print only the tests and the goals",
    )
    parser.add_argument("--goals", action="store_true", help="the goals alone")
    parser.add_argument(
        "--cuda-table",
        type=Path,
        help="write moe_runtime/native/cuda_table.json from bench_cuda.py's results",
    )
    options = parser.parse_args(arguments)
    if options.cuda_table:
        measured = cuda_table(options.files)
        atomic_write_json(options.cuda_table, {"measured": measured})
        print(
            f"{options.cuda_table}: {', '.join(row['op'] for row in measured) or 'nothing'} faster "
            "than Triton everywhere"
        )
        return
    if options.out:
        found = []
        for path in options.files:
            for b in benchmarks(path):
                found.append({key: b[key] for key in ("name", "extra_info")})
        atomic_write_json(options.out, {"benchmarks": found})
    if options.goals:
        print(goals_of(options.files))
    elif options.markdown:
        options.markdown.write_text(whole(options.files) + "\n")
        print("\n".join(filter(None, (outcomes(options.files), goals_of(options.files)))))
    else:
        print(whole(options.files))


def whole(paths: list[Path]) -> str:
    """Return the report, and what was skipped or failed."""
    parts = [text(paths)]
    lines = []
    for path in paths:
        if path.suffix == ".jsonl":
            lines.extend(Records(path).lines())
    for state in ("skipped", "failed", "broken"):
        for line in lines:
            if state in line:
                parts.append(f"{state}: {line['name']}: {line[state]}")
    return "\n\n".join(parts)


def goals_of(paths: list[Path]) -> str:
    """Return the goals alone."""
    rows = {}
    for path in paths:
        for key, row in rows_of(path).items():
            rows[key] = row
    return goals(rows, GOALS if _is_gpu(paths) else CPU_GOALS)


if __name__ == "__main__":
    main()
