"""A Markdown report of results files: machine, ceilings, goals and tables.

    python -m moe_runtime.bench.report FILE.json [FILE.jsonl ...] [-o OUT.json]

The goals are those of the device, with the amount by which they are missed; each benchmark function
has a table. -o writes the results as one file.
"""

import argparse
import itertools
from collections import Counter
from pathlib import Path

from moe_runtime.bench import described, shapes
from moe_runtime.bench.described import markdown
from moe_runtime.bench.goals import CPU_GOALS, GOALS, Goal, goals, than_triton
from moe_runtime.bench.records import Records, benchmarks
from moe_runtime.io.files import atomic_write_json

ABOUT = (
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


def rows_of(path: str | Path) -> dict:
    """Return {(benchmark, variant): row} of a results file."""
    rows = {}
    for bench in benchmarks(path):
        for variant, row in bench["extra_info"]["rows"].items():
            rows[bench["name"], variant] = row
    return rows


def _infos(paths: list[Path]) -> list[tuple[str, dict]]:
    """Return name and extra_info of all benchmarks of the files."""
    return [(bench["name"], bench["extra_info"]) for path in paths for bench in benchmarks(path)]


def _lines(paths: list[Path]) -> list[dict]:
    """Return the lines of the files that have JSON lines."""
    lines = []
    for path in paths:
        if path.suffix == ".jsonl":
            lines.extend(Records(path).lines())
    return lines


def tables(paths: list[str | Path]) -> str:
    """Return a table per function, ordered by kind: milliseconds, share of the ceiling, memory etc.

    The columns are benchmarks or variants, whichever are fewer. Notes on missing variants follow.
    """
    groups: dict[str, dict[str, dict]] = {kind: {} for kind in described.KINDS}
    notes = []
    for name, info in _infos(paths):
        group = groups.setdefault(info["kind"], {})
        group.setdefault(name.partition("[")[0], {})[name] = info["rows"]
        for variant, note in info.get("notes", {}).items():
            notes.append(f"* {name}: {variant}: {note}")
    parts = []
    for group in groups.values():
        parts += itertools.starmap(_table, group.items())
    return "\n\n".join([*parts, "\n".join(notes)])


def _table(function: str, benches: dict[str, dict]) -> str:
    """Return one function's table."""
    cells: dict[str, list[str]] = {}  # per variant
    for i, rows in enumerate(benches.values()):
        for variant, row in rows.items():
            cells.setdefault(variant, [""] * len(benches))[i] = described.cell(row)
    names = [name.partition("[")[2].rstrip("]") or "all" for name in benches]
    if len(cells) <= max(len(benches), 4):
        return markdown([function, *cells], zip(names, *cells.values(), strict=True))
    return markdown([function, *names], ([variant, *row] for variant, row in cells.items()))


def cuda_table(paths: list[str | Path]) -> list[dict]:
    """Return moe_runtime/native/cuda_table.json's rows: the ops whose kernels in csrc/ are faster
    than Triton's at every shape.

    An op is included for a device only if bench_cuda.py measured all its kernels there at all of
    its shapes, and gained at least 3 % at the worst: smaller differences occur between runs.
    """
    from moe_runtime.bench.bench_cuda import KERNELS

    gains: dict[tuple[str, str], list[float]] = {}
    about = {}
    for name, info in _infos(paths):
        is_kernel = name.startswith("bench_cuda_kernel[")
        if is_kernel and {"moe_runtime cuda", "moe_runtime triton"} <= info["rows"].keys():
            op = KERNELS[name.rstrip("]").rpartition("-")[2]]
            device = info["machine"]
            gains.setdefault((op, device), []).append(than_triton(info["rows"]))
            about[device] = {key: info[key] for key in ("date", "torch", "triton")}
    table = []
    for (op, device), times in sorted(gains.items()):
        count = len(shapes.plans()) * list(KERNELS.values()).count(op)
        least = min(times)
        if len(times) == count and least >= 1.03:
            row = {
                "op": op,
                "device": device,
                **about[device],
                "times_faster": round(least, 3),
            }
            table.append(row)
    return table


def machine(paths: list[str | Path]) -> str:
    """Return a line per combination of machine and versions in the files, with best ceilings."""
    machines: dict[str, dict[str, dict[str, float]]] = {}
    for _, info in _infos(paths):
        words = []
        for name in ABOUT:
            if info.get(name, "none") != "none":
                words.append(f"{name} {info[name]}")
        best = machines.setdefault(", ".join(words), {}).setdefault(info["dtype"], {})
        for unit, value in info["ceilings"].items():
            best[unit] = max(value, best.get(unit, 0.0))
    lines = []
    for line, dtypes in machines.items():
        for dtype, best in dtypes.items():
            limits = [f"{value:,.4g} {unit}" for unit, value in best.items()]
            if limits:
                line += f", ceilings of {dtype} {', '.join(limits)}"
        lines.append(f"* {line}")
    return "\n".join(lines)


def outcomes(paths: list[Path]) -> str:
    """Return how many tests passed, and which failed and why, from tests/support/outcomes.py."""
    last = {}
    for line in _lines(paths):
        if "outcome" in line:
            last[line["name"]] = line
    if not last:
        return ""
    counts = Counter(line["outcome"] for line in last.values())
    listed = ", ".join(f"{count} {outcome}" for outcome, count in counts.items())
    lines = [f"Tests: {listed}"]
    for name, line in last.items():
        if line["outcome"] == "failed":
            why = " ".join(line.get("why", "").split())
            lines.append(f"* {name}: {why[-300:]}")
    return "\n".join(lines)


def text(paths: list[Path]) -> str:
    """Return the whole report: machine, tests, goals, a table of every function."""
    parts = [machine(paths), outcomes(paths)]
    rows = _rows(paths)
    names = {name for name, _ in rows}
    reached = [goal for goal in _goals(paths) if not names.isdisjoint(goal.benchmarks)]
    if reached:
        parts.append(goals(rows, reached).strip())
    parts.append(tables(paths).strip())
    return "\n\n".join(filter(None, parts))


def _rows(paths: list[Path]) -> dict:
    """Return the rows of several files; later files override earlier ones."""
    rows = {}
    for path in paths:
        rows |= rows_of(path)
    return rows


def _goals(paths: list[Path]) -> tuple[Goal, ...]:
    """Return the goals for the device of the files."""
    for line in _lines(paths):
        # from device_check, if no benchmark finished
        if "capability" in (line.get("device") or {}):
            return GOALS
    is_gpu = any(info.get("driver", "none") != "none" for _, info in _infos(paths))
    return GOALS if is_gpu else CPU_GOALS


def main(arguments: list[str] | None = None) -> None:
    """Print the report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("files", nargs="+", type=Path)
    add("-o", "--out", type=Path, help="write the benchmarks of all files as one JSON file")
    add("--markdown", type=Path, help="write the report there, and print only tests and goals")
    add("--goals", action="store_true", help="print only the goals")
    add("--cuda-table", type=Path, help="write native/cuda_table.json from bench_cuda.py's results")
    options = parser.parse_args(arguments)
    if options.cuda_table:
        measured = cuda_table(options.files)
        atomic_write_json(options.cuda_table, {"measured": measured})
        listed = ", ".join(row["op"] for row in measured) or "nothing"
        print(f"{options.cuda_table}: {listed} faster than Triton everywhere")
        return
    if options.out:
        measured = [{"name": name, "extra_info": info} for name, info in _infos(options.files)]
        atomic_write_json(options.out, {"benchmarks": measured})
    if options.goals:
        print(goals_of(options.files))
    elif options.markdown:
        options.markdown.write_text(whole(options.files) + "\n")
        print("\n".join(filter(None, (outcomes(options.files), goals_of(options.files)))))
    else:
        print(whole(options.files))


def whole(paths: list[Path]) -> str:
    """Return the report and the skipped and failed benchmarks."""
    parts = [text(paths)]
    for state in ("skipped", "failed", "broken"):
        for line in _lines(paths):
            if state in line:
                parts.append(f"{state}: {line['name']}: {line[state]}")
    return "\n\n".join(parts)


def goals_of(paths: list[Path]) -> str:
    """Return only the goals."""
    return goals(_rows(paths), _goals(paths))


if __name__ == "__main__":
    main()
