"""Results of a run: one JSON line per benchmark, so that an interrupted run can be resumed."""

import json
import os
from pathlib import Path
from typing import Any

from moe_runtime.bench.clock import OUT_OF_TIME
from moe_runtime.bench.machine import public
from moe_runtime.config import shown
from moe_runtime.io.files import naming, read_json

UNWRITTEN = 98  # exit code: the results file cannot be written; the output has the reason
# exit code: the CUDA context is lost; a run with the same --results continues after its cause
LOST = 99
STATES = {"extra_info", "skipped", "failed"}  # keys of the line of a finished benchmark
WRITTEN = "Pass a file written by moe-runtime bench"
LINE = {
    "name": str,
    "extra_info": dict,
    "skipped": str,
    "failed": str,
    "began": bool,
    "planned": int,
    "broken": dict,
}
# of every benchmark, besides its rows and ceilings
ABOUT = {"kind", "dtype", "machine", "commit", "date", "rounds"}
POSITIVE = ("ms", "ratio", "TFLOP/s", "GB/s", "tokens/s")  # numbers used as divisors


class Records:
    """The results file of a run, or none. A pytest plugin, which records skips and failures."""

    def __init__(self, path: Path | None):
        self.path = path

    def write(self, name: str, **what) -> None:
        """Append a line for a benchmark: extra_info, skipped, failed, or a variant that broke."""
        if self.path is None:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        line = json.dumps({"name": name, **what}).encode() + b"\n"
        with naming(self.path, self.path), self.path.open("ab+") as file:
            if file.tell():
                file.seek(-1, os.SEEK_END)
                # a killed process may have left half a line, which must not corrupt this one
                if file.read(1) != b"\n":
                    line = b"\n" + line
            file.write(line)

    def lines(self) -> list[dict]:
        """Return the file's lines, except partial ones. Raises ValueError for invalid lines."""
        if self.path is None or not self.path.exists():
            return []
        try:
            written = self.path.read_bytes()
        except OSError as error:
            raise ValueError(f"Cannot read {self.path} ({error.strerror}). {WRITTEN}") from error
        lines = []
        for number, text in enumerate(written.split(b"\n"), 1):
            try:
                line = json.loads(text)
            except (ValueError, RecursionError):
                continue
            if not isinstance(line, dict) or "name" not in line:
                raise ValueError(
                    f"Line {number} of {self.path} is invalid: {shown(line)}. {WRITTEN}"
                )
            for name in LINE.keys() & line.keys():
                if not isinstance(line[name], LINE[name]):
                    raise ValueError(
                        f"Line {number} of {self.path} has an invalid {name}, {shown(line[name])}. "
                        f"{WRITTEN}"
                    )
            lines.append(line)
        return lines

    def last(self) -> dict[str, dict]:
        """Return the last line of each finished benchmark."""
        return {line["name"]: line for line in self.lines() if STATES & line.keys()}

    def done(self) -> set[str]:
        """Return the finished benchmarks."""
        return set(self.last())

    def measured_with(self, tiles: str) -> set[str]:
        """Return the benchmarks whose last results used these launch configs."""
        names = set()
        for name, line in self.last().items():
            if line.get("extra_info", {}).get("tiles") == tiles:
                names.add(name)
        return names

    def planned(self) -> int:
        """Return how many benchmarks the last run had to run."""
        return next((line["planned"] for line in reversed(self.lines()) if "planned" in line), 0)

    def unfinished(self) -> str | None:
        """Return the benchmark that was running when the process died."""
        lines = self.lines()
        return lines[-1]["name"] if lines and "began" in lines[-1] else None

    def broken(self, name: str) -> dict[str, str]:
        """Return variant -> error that broke the process, for one benchmark."""
        broken = {}
        for line in self.lines():
            if line["name"] == name:
                broken |= line.get("broken", {})
        return broken

    def pytest_collection_finish(self, session) -> None:
        self.write("", planned=len(session.items))

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.write(nodeid.split("::")[-1], began=True)

    def pytest_runtest_logreport(self, report) -> None:
        name = report.nodeid.split("::")[-1]
        why = report.longrepr
        if report.failed:
            crash = getattr(why, "reprcrash", None)
            if crash:
                why = crash.message
            self.write(name, failed=public(str(why))[-500:])
        elif report.skipped:
            if isinstance(why, tuple):
                why = why[2]
            if OUT_OF_TIME in str(why):  # not finished, but also not the cause of a crash
                self.write(name, left=True)
            else:
                self.write(name, skipped=public(str(why)))


class Written(Records):
    """Records that exit pytest if the file cannot be written, instead of raising from its hooks."""

    def write(self, name: str, **what) -> None:
        import pytest

        try:
            super().write(name, **what)
        except OSError as error:
            pytest.exit(f"{error} (errno {error.errno})", returncode=UNWRITTEN)


def benchmarks(path: str | Path) -> list[dict]:
    """Return name and extra_info of each benchmark in a file, pytest-benchmark's JSON or our lines.

    Raises ValueError for other files.
    """
    path = Path(path)
    benches = []
    if path.suffix == ".jsonl":
        for line in Records(path).lines():
            if "extra_info" in line:
                benches.append(line)
    else:
        listed = read_json(path).get("benchmarks", [])
        if not isinstance(listed, list):
            raise ValueError(f"The benchmarks in {path} are invalid: {shown(listed)}. {WRITTEN}")
        for bench in listed:
            info = bench.get("extra_info", {}) if isinstance(bench, dict) else None
            # pytest-benchmark's file may contain other benchmarks besides ours
            if not isinstance(info, dict) or "rows" in info:
                benches.append(bench)
        if not benches:
            raise ValueError(f"{path} contains no benchmarks. {WRITTEN}")
    for bench in benches:
        if not _is_benchmark(bench):
            raise ValueError(f"{path} contains an invalid benchmark: {shown(bench)}. {WRITTEN}")
    return benches


def _is_benchmark(bench: Any) -> bool:
    """Whether a benchmark has a name and rows of numbers, with positive divisors."""
    match bench:
        case {"name": str(), "extra_info": {"rows": {**rows}, "ceilings": {**limits}, **info}}:
            known = bool(rows) and info.keys() >= ABOUT
        case _:
            return False
    return known and all(map(_is_row, [*rows.values(), limits | {"ms": 1.0}]))


def _is_row(row: Any) -> bool:
    if not isinstance(row, dict) or "ms" not in row:
        return False
    for column, value in row.items():
        least = 1e-30 if column in POSITIVE else 0.0
        is_number = type(value) in (int, float) and least <= value <= 1e30
        if not is_number and not (column == "difference" and value is None):
            return False
    return True


def failures(path: str | Path) -> dict[str, str]:
    """Return benchmark -> reason for those that failed and have not finished since."""
    path = Path(path)
    if path.suffix == ".jsonl":
        last = Records(path).last()
        return {name: line["failed"] for name, line in last.items() if "failed" in line}
    failed = read_json(path).get("failed", {})
    if not isinstance(failed, dict):
        raise ValueError(f"`failed` in {path} is invalid: {shown(failed)}. {WRITTEN}")
    return failed
