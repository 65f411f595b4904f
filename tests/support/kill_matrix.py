"""Record, for each planted bug, all tests that fail because of it.

    python -m tests.support.kill_matrix               # record what is missing or has changed
    python -m tests.support.kill_matrix --only io/    # some bugs, by a part of their file or text
    python -m tests.support.kill_matrix --budget 60   # at most about 60 s of tests per bug
    python -m tests.support.kill_matrix --named       # only the files that each bug names; no trace
    python -m tests.support.kill_matrix --report      # print a report of the records

The first run traces `make test` once, with coverage.py in one process, which takes about an hour;
the trace is kept in runs/kill_matrix. A bug is then planted in a copy of the tree, and only the
tests that run the changed lines are run: those of the trace, and all tests of the files that the
bug names. For a changed constant, all tests of its file's functions are run; for a change in C++ or
CUDA, the tests that load the libraries. Each bug's record is saved when it is complete, and is
updated if its file or its tests have changed. The trace may be older than the tree, since lines are
looked up in the traced tree; trace again (--trace) after larger changes.

A test is a function, file::name; its parametrizations are merged. The report lists the bugs that
no test detects, those that exactly one test detects, and the tests that could be removed without
missing a bug.
"""

import argparse
import hashlib
import json
import os
import re
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from tests.support import planted
from tests.support.kill_trace import (
    Trace,
    Untraced,
    file_of,
    numbers_of,
    ranges,
    record_trace,
    run_selected,
)
from tests.support.planted import ROOT, Bug

OUT = Path(__file__).with_name("kill_matrix.json")
TRACE = ROOT / "runs" / "kill_matrix"


class Record(NamedTuple):
    """The known results of a bug."""

    key: str  # hash of the bug and its tests
    left: int  # tests that have not run
    fails: set[str]


class Matrix:
    """The records of a file, and all tests that have run for any of them."""

    def __init__(self, file: Path):
        self.file = file
        self.records = {}
        self.ran = set()
        if file.exists():
            self._read(json.loads(file.read_text()))

    def _read(self, values: dict) -> None:
        names = []
        for path, functions in values["tests"].items():
            for function in functions.split():
                names.append(f"tests/{path}::{function}")
        self.ran = set(names)
        for what, text in values["bugs"].items():
            key, left, fails = text.split(" ")
            failed = {names[i] for i in numbers_of(fails)}
            self.records[what] = Record(key, int(left), failed)

    def save(self) -> None:
        """Write a line for each test file and each bug, with tests as numbers."""
        names = sorted(self.ran)
        number = {name: i for i, name in enumerate(names)}
        tests = defaultdict(str)
        for name in names:
            path, _, function = name.removeprefix("tests/").partition("::")
            tests[path] += f"{function} "
        bugs = {}
        for what, record in sorted(self.records.items()):
            fails = ranges(number[name] for name in record.fails)
            bugs[what] = f"{record.key} {record.left} {fails}"
        fresh = self.file.with_suffix(".new")
        fresh.write_text(json.dumps({"tests": tests, "bugs": bugs}, indent=0) + "\n")
        os.replace(fresh, self.file)


def title(bug: Bug) -> str:
    return f"{bug.file}: {bug.what}"


def key_of(bug: Bug, names: Iterable[str]) -> str:
    """Return a hash of the file with the bug and of the tests."""
    text = planted.locate(ROOT, bug).read_text()
    digest = hashlib.sha256(planted.with_bug(text, bug).encode())
    ordered = sorted(names)
    digest.update("\n".join(ordered).encode())
    for path in dict.fromkeys(map(file_of, ordered)):
        digest.update((ROOT / path).read_bytes())
    return digest.hexdigest()[:12]


def within(bug: Bug, names: set[str], seconds: dict[str, float], budget: float) -> list[str]:
    """Return the tests of the bug's files, and the fastest others that fit the budget."""
    files = bug.test_files()
    chosen = [name for name in names if file_of(name) in files]
    spent = sum(seconds[name] for name in chosen)
    others = names.difference(chosen)
    for name in sorted(others, key=seconds.get):
        spent += seconds[name]
        if spent > budget:
            break
        chosen.append(name)
    return sorted(chosen, key=lambda name: (file_of(name) not in files, name))


class Work:
    """A bug and the tests to run for it."""

    def __init__(self, bug: Bug, trace: Trace | Untraced, budget: float):
        self.bug = bug
        seeing = trace.seeing(bug)
        self.seeing = {name for name in seeing if (ROOT / file_of(name)).is_file()}
        for file in bug.test_files():  # some tests may be newer than the trace
            functions = re.findall(r"^def (test_\w+)", (ROOT / file).read_text(), re.M)
            self.seeing.update(f"{file}::{function}" for function in functions)
        self.seeing -= trace.broken
        seconds = {name: trace.seconds.get(name, 0.0) for name in self.seeing}
        self.names = within(bug, self.seeing, seconds, budget)
        self.seconds = sum(seconds[name] for name in self.names)
        self.key = key_of(bug, self.seeing)

    def is_done(self, matrix: Matrix) -> bool:
        """Whether a record covers as many of the same tests."""
        before = matrix.records.get(title(self.bug))
        if before is None or before.key != self.key:
            return False
        return before.left <= len(self.seeing) - len(self.names)

    def run(self, root: Path, matrix: Matrix, timeout: float) -> None:
        """Plant the bug below `root`, run the tests and save the record."""
        start = time.monotonic()
        with planted.planted(planted.locate(root, self.bug), self.bug):
            fails, late = run_selected(root, self.names, timeout)
        ran = set(self.names) - late
        left = len(self.seeing - ran)
        matrix.ran |= ran
        matrix.records[title(self.bug)] = Record(self.key, left, fails)
        matrix.save()
        seconds = time.monotonic() - start
        print(
            f"{seconds:4.0f} s  {title(self.bug)}: {len(fails)} of {len(ran)} tests fail,",
            f"{left} not run",
            flush=True,
        )


def run_all(
    matrix: Matrix, trace: Trace | Untraced, selected: list[Bug], args: argparse.Namespace
) -> None:
    """Record the bugs whose records are missing or outdated, the fastest first."""
    every = [Work(bug, trace, args.budget) for bug in selected]
    todo = [work for work in every if not work.is_done(matrix)]
    print(f"{len(todo)} of {len(every)} bugs to record", flush=True)
    with tempfile.TemporaryDirectory(prefix="matrix-") as folder:
        root = planted.copy_tree(Path(folder))
        for work in sorted(todo, key=lambda work: work.seconds):
            work.run(root, matrix, args.timeout)


def spare_tests(matrix: Matrix) -> list[tuple[int, str]]:
    """Return tests without which every bug is still detected, and how many bugs each one
    detects.
    """
    seen = defaultdict(list)
    for record in matrix.records.values():
        seers = set(record.fails)
        for name in record.fails:
            seen[name].append(seers)
    spare = []
    for count, name in sorted((len(seen[name]), name) for name in matrix.ran):
        if all(len(seers) > 1 for seers in seen[name]):
            spare.append((count, name))
            for seers in seen[name]:
                seers.remove(name)
    return spare


def report(matrix: Matrix, known: list[Bug]) -> None:
    """Print the bugs that no test or only one test detects, and the redundant tests."""
    titles = list(map(title, known))
    matrix.records = {what: matrix.records[what] for what in titles if what in matrix.records}
    undetected = []
    single = []
    partly = 0
    for what, record in matrix.records.items():
        partly += record.left > 0
        if not record.fails:
            undetected.append(f"  {what}")
        if len(record.fails) == 1:
            single.append(f"  {what}: {min(record.fails)}")
    print(f"{len(matrix.records)} of {len(titles)} bugs are recorded,")
    print(f"{partly} of them without all tests that run their lines")
    print(f"\n{len(undetected)} bugs that no test detects:", *undetected, sep="\n")
    print(f"\n{len(single)} bugs that one test detects:", *single, sep="\n")
    spare = spare_tests(matrix)
    print(f"\n{len(spare)} of {len(matrix.ran)} tests are removable by the matrix, with the number")
    print("of bugs that each detects; without all of them every bug is still detected:")
    for count, name in spare:
        print(f"  {count:4} {name}")


def main() -> None:
    """Record or report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--out", type=Path, default=OUT, help="the file of the records")
    add("--report", action="store_true", help="print a report of the records")
    add("--only", default="", help="a part of a bug's file or description")
    add("--named", action="store_true", help="only the tests of the files that a bug names")
    add("--trace", action="store_true", help="trace the tests again")
    add("--trace-in", type=Path, default=TRACE, help="the folder of the trace")
    add("--budget", type=float, default=float("inf"), help="traced seconds of tests a bug")
    add("--timeout", type=float, default=3600, help="seconds a bug, at most")
    args = parser.parse_args()
    matrix = Matrix(args.out)
    selected = planted.bugs(args.only)
    if args.report:
        report(matrix, selected)
        return
    if planted.check(ROOT, selected) < len(selected):
        sys.exit("correct the table first")
    if args.named:
        run_all(matrix, Untraced(), selected, args)
        return
    if args.trace or not any(args.trace_in.glob("data/tests-*.json")):
        record_trace(args.trace_in)
    run_all(matrix, Trace(args.trace_in), selected, args)


if __name__ == "__main__":
    main()
