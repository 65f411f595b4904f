"""Two results files side by side: how many times the milliseconds of A each variant takes in B, and
what is a regression.

A variant is slower if its time grew by more than 5 % and by more than the two interquartile ranges
of its rounds together, and so did its ratio to the benchmark's first variant (where that is ours:
to the others' median pace), so that a slower machine is not a regression. The peak of memory is a
regression if it grew by more than 10 % and 8 MiB, what is saved for backward if it grew by more
than 1 %. A variant of ours that is missing in B or failed there is a regression, too. Ours are the
variants whose names begin with moe_runtime, and of a breakdown the parts that we compute.
"""

import statistics
from pathlib import Path
from typing import NamedTuple

from moe_runtime.bench.described import KINDS, markdown
from moe_runtime.bench.records import benchmarks, failures

LEAST = 0.05  # what differs by less differs from run to run
ROUNDS = 3  # with fewer, the noise is unknown
FEW = 5  # with fewer a quartile is one round or two: the whole spread is the noise
# column: times and MiB (KiB) that it may grow
MEMORY = {"peak MiB": (1.10, 8.0), "saved KiB/token": (1.01, 0.0)}
OURS = "moe_runtime"
PARTS = ("whole step", "router", "experts forward", "experts backward")  # of a breakdown, and ours
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
    """A variant of a benchmark in both files; `grew` names the columns that got worse beyond their
    noise.
    """

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
        """Return slower, more memory, faster or nothing."""
        if self.grew:
            return ", ".join(
                f"{'slower' if name == 'ms' else name} x{times:.2f}"
                for name, times in self.grew.items()
            )
        return "faster" if self.faster else ""


class Missing(NamedTuple):
    """A variant that the first file has, of a benchmark that ran or failed in the second, which has
    it not.
    """

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


class Comparison(NamedTuple):
    """What two files have in common, what the second one lost, and what warns of comparing them."""

    rows: list[Row]
    missing: list[Missing]
    warnings: list[str]
    alone: tuple[list[str], list[str]]  # benchmarks that only A has, only B

    @property
    def regressions(self) -> list[Row | Missing]:
        regressions = []
        for one in (*self.rows, *self.missing):
            if one.regression:
                regressions.append(one)
        return regressions


def compare(a: Path, b: Path) -> Comparison:
    """Compare what both files measured."""
    one = {}
    for bench in benchmarks(a):
        one[bench["name"]] = bench["extra_info"]
    other = {}
    for bench in benchmarks(b):
        other[bench["name"]] = bench["extra_info"]
    rows = []
    for name in one:
        if name in other:
            rows.extend(_rows(name, one[name], other[name]))
    alone = [name for name in one if name not in other], [name for name in other if name not in one]
    failed = failures(b)
    missing = []
    for name in one:
        missing.extend(_missing(name, one[name], other.get(name), failed))
    return Comparison(rows, missing, _warnings(one, other), alone)


def _is_ours(variant: str, kind: str) -> bool:
    return variant.startswith(OURS) or (kind == "breakdown" and variant in PARTS)


def _missing(name: str, a: dict, b: dict | None, failed: dict[str, str]) -> list[Missing]:
    if b is None and name not in failed:
        return []
    notes, rows = (b.get("notes", {}), b["rows"]) if b else ({}, {})
    why = "no note says why" if b else f"the benchmark failed: {failed[name]}"
    lost = []
    for variant in a["rows"]:
        if variant not in rows:
            lost.append(variant)
    missing = []
    for variant in lost:
        missing.append(Missing(name, a.get("kind", "op"), variant, notes.get(variant, why)))
    return missing


def _rows(name: str, a: dict, b: dict) -> list[Row]:
    kind = b.get("kind", "op")
    both = []
    for variant in a["rows"]:
        if variant in b["rows"]:
            both.append(variant)
    others = [
        b["rows"][name]["ms"] / a["rows"][name]["ms"] for name in both if not _is_ours(name, kind)
    ]
    floor = next(iter(a["rows"]))
    pace = statistics.median(others) if others and _is_ours(floor, kind) else None
    relative = floor == next(iter(b["rows"])) and pace is None
    rows = []
    for variant in both:
        rows.append(_row(name, a, b, variant, relative and variant != floor, pace))
    return rows


def _row(name: str, a: dict, b: dict, variant: str, relative: bool, pace: float | None) -> Row:
    """Compare a variant; the machine's own pace is not the variant's, and shows in the floor or
    else in who is not ours.
    """
    one = a["rows"][variant]
    other = b["rows"][variant]
    kind = b.get("kind", "op")
    rounds = _rounds(a, b)
    ratio = other["ms"] / one["ms"]
    told = rounds >= ROUNDS and kind != "memory" and all("spread" in row for row in (one, other))
    if told:
        noise = max(LEAST, sum(_noise(row, rounds < FEW) for row in (one, other)))
    else:
        noise = float("inf")
    paces = [ratio, *([ratio / pace] if pace else [])]
    if relative and "ratio" in one and "ratio" in other:
        paces.append(other["ratio"] / one["ratio"])
    grew = {"ms": ratio} if min(paces) > 1 + noise else {}
    for column, (times, much) in MEMORY.items():
        if column in one and column in other:
            before = one[column]
            now = other[column]
            if now > times * before and now - before > much:
                grew[column] = now / before if before else float("inf")
    faster = max(paces) < 1 / (1 + noise)
    return Row(name, kind, variant, (one["ms"], other["ms"]), ratio, noise, grew, faster)


def _rounds(a: dict, b: dict) -> int:
    return min(a.get("rounds", 0), b.get("rounds", 0))


def _noise(row: dict, few: bool) -> float:
    return row["spread"] if few else row.get("iqr", row["spread"] / 2)


def _warnings(one: dict, other: dict) -> list[str]:
    both = [name for name in one if name in other]
    if not both:
        return ["the files have no benchmark in common"]
    warnings = []
    for key in SAME:
        pairs = set()
        for name in both:
            pairs.add((one[name].get(key), other[name].get(key)))
        for a, b in sorted(pairs, key=str):
            if a != b and None not in (a, b):
                warnings.append(f"{key} differs: {a} and {b}")
    few = []
    for name in both:
        if _rounds(one[name], other[name]) < ROUNDS:
            few.append(name)
    if few:
        warnings.append(
            f"{len(few)} benchmarks have fewer than {ROUNDS} rounds, too few to detect regressions"
        )
    for unit in ("TFLOP/s", "GB/s"):
        ratios = []
        for name in both:
            a = one[name].get("ceilings", {})
            b = other[name].get("ceilings", {})
            if unit in a and unit in b:
                ratios.append(b[unit] / a[unit])
        if ratios and not 0.9 < (times := statistics.median(ratios)) < 1.1:
            warnings.append(
                f"the machine's own {unit} are {times:.2f} times as many in the second file"
            )
    return warnings


def by_kind(found: Comparison) -> list[tuple[str, str, int, float, float, float]]:
    """Return kind, variant, number of benchmarks and least, median, most ratio."""
    groups: dict[tuple[str, str], list[float]] = {}
    for row in found.rows:
        groups.setdefault((row.kind, row.variant), []).append(row.ratio)
    order = {kind: i for i, kind in enumerate(KINDS)}
    # stable: variants as they come
    keys = sorted(groups, key=lambda key: order.get(key[0], len(order)))
    return [
        (*key, len(groups[key]), min(groups[key]), statistics.median(groups[key]), max(groups[key]))
        for key in keys
    ]


def text(found: Comparison) -> str:
    """Return the comparison as Markdown tables, the worst last."""
    rows = []
    for row in found.rows:
        noise = "unknown" if row.noise == float("inf") else f"{row.noise:.0%}"
        numbers = [f"{row.ms[0]:.3f}", f"{row.ms[1]:.3f}", f"{row.ratio:.3f}", noise]
        rows.append([row.benchmark, row.variant, *numbers, row.verdict])
    kinds = []
    for kind, variant, count, *ratios in by_kind(found):
        kinds.append([kind, variant, str(count), *(f"{ratio:.3f}" for ratio in ratios)])
    lines = []
    for warning in found.warnings:
        lines.append(f"warning: {warning}")
    heads = ["benchmark", "variant", "A ms", "B ms", "B / A", "noise", ""]
    lines += ["", markdown(heads, rows)]
    heads = ["kind", "variant", "benchmarks", "least B / A", "median", "most"]
    lines += ["", markdown(heads, kinds)]
    lines.append("")
    for which, names in zip("AB", found.alone):
        for name in names:
            lines.append(f"only in {which}: {name}")
    for lost in found.missing:
        if not lost.regression:
            lines.append(f"missing in B: {lost.benchmark}: {lost.variant}: {lost.why}")
    for row in found.regressions:
        lines.append(f"regression: {row.benchmark}: {row.variant}: {row.verdict}")
    lines += [] if found.regressions else ["no regression of ours"]
    return "\n".join(lines).strip()


def as_json(found: Comparison) -> dict:
    """Return the comparison as one JSON object; unknown noise is null."""

    def row_of(row: Row) -> dict:
        noise = None if row.noise == float("inf") else row.noise
        grew = {}
        for name, times in row.grew.items():
            grew[name] = None if times == float("inf") else times
        a, b = row.ms
        head = {
            "benchmark": row.benchmark,
            "kind": row.kind,
            "variant": row.variant,
            "ms_a": a,
            "ms_b": b,
            "ratio": row.ratio,
        }
        return head | {
            "noise": noise,
            "grew": grew,
            "regression": row.regression,
            "verdict": row.verdict,
        }

    names = ("kind", "variant", "benchmarks", "least", "median", "most")
    return {
        "warnings": found.warnings,
        "rows": [row_of(row) for row in found.rows],
        "kinds": [dict(zip(names, group)) for group in by_kind(found)],
        "missing": [lost._asdict() | {"regression": lost.regression} for lost in found.missing],
        "only_in_a": found.alone[0],
        "only_in_b": found.alone[1],
        "regressions": [
            {"benchmark": row.benchmark, "variant": row.variant} for row in found.regressions
        ],
    }
