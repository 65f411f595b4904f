"""Compare two results files: the ratio of each variant's time in B to that in A, and regressions.

A variant is slower if its time increased by more than 5 % and by more than the sum of its rounds'
interquartile ranges in both files, and so did its ratio to the benchmark's first variant (or, if
that is ours, to the others' median pace), so that a slower machine is not a regression. Peak memory
regresses if it grows by more than 10 % and 8 MiB, memory saved for backward if it grows by more
than 1 %. A variant of ours that is missing in B or failed there is also a regression. Our variants
are those whose names start with moe_runtime and, of a breakdown, the parts that we compute.
"""

import math
import statistics
from pathlib import Path
from typing import NamedTuple

from moe_runtime.bench.described import markdown
from moe_runtime.bench.records import benchmarks, failures
from moe_runtime.io.console import jsonable

LEAST = 0.05  # smaller differences occur between runs
ROUNDS = 3  # with fewer, the noise is unknown
FEW = 5  # with fewer, quartiles are one or two rounds, so the whole spread is the noise
# column -> factor and MiB (KiB) by which it may grow
MEMORY = {"peak MiB": (1.10, 8.0), "saved KiB/token": (1.01, 0.0)}
OURS = "moe_runtime"
PARTS = ("whole step", "router", "experts forward", "experts backward")  # ours, of a breakdown
SAME = (
    "machine",
    "driver",
    "python",
    "torch",
    "triton",
    "transformers",
    "tiles",
    "backend",
    "tiny",
)


class Row(NamedTuple):
    """A variant of a benchmark in both files; `grew` has the columns that regressed."""

    benchmark: str
    kind: str
    variant: str
    ms: tuple[float, float]
    ratio: float
    noise: float
    grew: dict[str, float]
    faster: bool

    @property
    def regression(self) -> bool:
        return bool(self.grew) and _is_ours(self.variant, self.kind)

    @property
    def verdict(self) -> str:
        """Return what increased, by which factor, or faster, or nothing."""
        words = ["faster"] * self.faster
        for name, times in self.grew.items():
            word = "slower" if name == "ms" else name
            words.append(f"{word} x{times:.2f}")
        return ", ".join(words)


class Missing(NamedTuple):
    """A variant of the first file that the second lacks, though its benchmark ran or failed."""

    benchmark: str
    kind: str
    variant: str
    why: str

    @property
    def regression(self) -> bool:
        return _is_ours(self.variant, self.kind)

    @property
    def verdict(self) -> str:
        return f"missing: {self.why}"


class FileComparison(NamedTuple):
    """Common variants of two files, those missing in the second, and warnings."""

    rows: list[Row]
    missing: list[Missing]
    warnings: list[str]
    alone: tuple[list[str], list[str]]  # benchmarks that only A has, and that only B has

    @property
    def regressions(self) -> list[Row | Missing]:
        return [one for one in (*self.rows, *self.missing) if one.regression]


def compare(a: Path, b: Path) -> FileComparison:
    """Compare two results files."""
    one = {bench["name"]: bench["extra_info"] for bench in benchmarks(a)}
    other = {bench["name"]: bench["extra_info"] for bench in benchmarks(b)}
    failed = failures(b)
    rows = []
    missing = []
    for name, info in one.items():
        if name in other:
            rows += _rows(name, info, other[name])
            why = "unknown reason"
        elif name in failed:
            why = f"the benchmark failed: {failed[name]}"
        else:
            continue
        kind = info["kind"]
        now = other.get(name, {"rows": {}})
        for variant in info["rows"]:
            if variant not in now["rows"]:
                note = now.get("notes", {}).get(variant, why)
                missing.append(Missing(name, kind, variant, note))
    alone = [name for name in one if name not in other], [name for name in other if name not in one]
    return FileComparison(
        rows,
        missing,
        _warnings(one, other),
        alone,
    )


def _is_ours(variant: str, kind: str) -> bool:
    return variant.startswith(OURS) or (kind == "breakdown" and variant in PARTS)


def _rows(name: str, a: dict, b: dict) -> list[Row]:
    kind = b["kind"]
    both = [variant for variant in a["rows"] if variant in b["rows"]]
    others = []
    for variant in both:
        if not _is_ours(variant, kind):
            others.append(b["rows"][variant]["ms"] / a["rows"][variant]["ms"])
    floor = next(iter(a["rows"]))
    pace = None
    if others and _is_ours(floor, kind):
        pace = statistics.median(others)
    has_floor = floor == next(iter(b["rows"])) and pace is None
    return [
        _row(
            name,
            a,
            b,
            variant,
            has_floor and variant != floor,
            pace,
        )
        for variant in both
    ]


def _row(name: str, a: dict, b: dict, variant: str, relative: bool, pace: float | None) -> Row:
    """Compare a variant, also relative to the floor or to the pace of variants not ours."""
    one = a["rows"][variant]
    other = b["rows"][variant]
    kind = b["kind"]
    rounds = _rounds(a, b)
    ratio = other["ms"] / one["ms"]
    noise = math.inf
    if rounds >= ROUNDS and kind != "memory" and "spread" in one and "spread" in other:
        noise = max(LEAST, _noise(one, rounds < FEW) + _noise(other, rounds < FEW))
    paces = [ratio]
    if pace:
        paces.append(ratio / pace)
    if relative and "ratio" in one and "ratio" in other:
        paces.append(other["ratio"] / one["ratio"])
    grew = {}
    if min(paces) > 1 + noise:
        grew["ms"] = ratio
    for column, (times, much) in MEMORY.items():
        before = one.get(column, math.inf)
        now = other.get(column, 0.0)
        if now > times * before and now - before > much:
            grew[column] = now / before if before else math.inf
    faster = not grew and max(paces) < 1 / (1 + noise)
    return Row(
        name,
        kind,
        variant,
        (one["ms"], other["ms"]),
        ratio,
        noise,
        grew,
        faster,
    )


def _rounds(a: dict, b: dict) -> int:
    return min(a["rounds"], b["rounds"])


def _noise(row: dict, few: bool) -> float:
    return row["spread"] if few else row.get("iqr", row["spread"] / 2)


def _warnings(one: dict, other: dict) -> list[str]:
    both = [(info, other[name]) for name, info in one.items() if name in other]
    if not both:
        return ["the files have no benchmark in common"]
    warnings = []
    for key in SAME:
        pairs = {(a.get(key), b.get(key)) for a, b in both}
        for a, b in sorted(pairs, key=str):
            if a != b and None not in (a, b):
                warnings.append(f"{key} differs: {a} and {b}")
    few = sum(_rounds(a, b) < ROUNDS for a, b in both)
    if few:
        warnings.append(
            f"{few} benchmarks have fewer than {ROUNDS} rounds, too few to detect regressions"
        )
    for unit in ("TFLOP/s", "GB/s"):
        ratios = []
        for a, b in both:
            before = a["ceilings"]
            now = b["ceilings"]
            if unit in before and unit in now:
                ratios.append(now[unit] / before[unit])
        if ratios and not 0.9 < (times := statistics.median(ratios)) < 1.1:
            warnings.append(
                f"the machine's {unit} in the second file are {times:.2f} times those in the first"
            )
    return warnings


def text(compared: FileComparison) -> str:
    """Return the comparison as a Markdown table, warnings first and regressions last."""
    rows = []
    for row in compared.rows:
        noise = f"{row.noise:.0%}".replace("inf%", "unknown")
        numbers = [f"{number:.3f}" for number in (*row.ms, row.ratio)]
        rows.append([row.benchmark, row.variant, *numbers, noise, row.verdict])
    lines = [*map("warning: {}".format, compared.warnings)]
    heads = ["benchmark", "variant", "A ms", "B ms", "B / A", "noise", ""]
    lines += ["", markdown(heads, rows)]
    lines.append("")
    for which, names in zip("AB", compared.alone, strict=True):
        for name in names:
            lines.append(f"only in {which}: {name}")
    for lost in compared.missing:
        if not lost.regression:
            lines.append(f"missing in B: {lost.benchmark}: {lost.variant}: {lost.why}")
    for row in compared.regressions:
        lines.append(f"regression: {row.benchmark}: {row.variant}: {row.verdict}")
    if not compared.regressions:
        lines.append("no regression of ours")
    return "\n".join(lines).strip()


def as_json(compared: FileComparison) -> dict:
    """Return the comparison as one JSON object; unknown noise is null."""
    rows = []
    for row in compared.rows:
        values = row._asdict()
        values["ms_a"], values["ms_b"] = values.pop("ms")
        del values["faster"]
        rows.append(values | {"regression": row.regression, "verdict": row.verdict})
    only_in_a, only_in_b = compared.alone
    return jsonable(
        {
            "warnings": compared.warnings,
            "rows": rows,
            "missing": [
                lost._asdict() | {"regression": lost.regression} for lost in compared.missing
            ],
            "only_in_a": only_in_a,
            "only_in_b": only_in_b,
            "regressions": [
                {"benchmark": row.benchmark, "variant": row.variant} for row in compared.regressions
            ],
        }
    )
