"""Record, for each planted bug, the tests of the files it names that fail because of it.

    python -m tests.support.kill_matrix               # record what is missing or has changed
    python -m tests.support.kill_matrix --only io/    # some bugs, by a part of their file or text
    python -m tests.support.kill_matrix --report      # print a report of the records

A bug is planted in a copy of the tree. Each record is saved when it is complete, and is updated if
the bug's file or its tests have changed. A test is a function, file::name; its parametrizations are
merged. The report lists the bugs that no test detects, those that exactly one test detects, and the
tests that could be removed without missing a bug.
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
from pathlib import Path
from typing import NamedTuple

from tests.support import planted
from tests.support.planted import ROOT, Bug

OUT = Path(__file__).with_name("kill_matrix.json")


class Record(NamedTuple):
    """The known results of a bug."""

    key: str  # hash of the bug and its tests
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
            names += [f"tests/{path}::{function}" for function in functions.split()]
        self.ran = set(names)
        for what, text in values["bugs"].items():
            key, _, fails = text.split(" ")
            failed = set()
            for part in filter(None, fails.split(",")):
                first, _, last = part.partition("-")
                failed.update(names[int(first) : int(last or first) + 1])
            self.records[what] = Record(key, failed)

    def save(self) -> None:
        """Write a line for each test file and each bug, with tests as numbers."""
        names = sorted(self.ran)
        number = {name: str(i) for i, name in enumerate(names)}
        tests = defaultdict(str)
        for name in names:
            path, _, function = name.removeprefix("tests/").partition("::")
            tests[path] += f"{function} "
        bugs = {}
        for what, record in sorted(self.records.items()):
            fails = ",".join(number[name] for name in sorted(record.fails))
            bugs[what] = f"{record.key} 0 {fails}"
        fresh = self.file.with_suffix(".new")
        fresh.write_text(json.dumps({"tests": tests, "bugs": bugs}, indent=0) + "\n")
        os.replace(fresh, self.file)


def title(bug: Bug) -> str:
    return f"{bug.file}: {bug.what}"


def tests_of(bug: Bug) -> set[str]:
    """Return the tests of the files that a bug names."""
    found = set()
    for file in bug.test_files():
        functions = re.findall(r"^def (test_\w+)", (ROOT / file).read_text(), re.M)
        found.update(f"{file}::{function}" for function in functions)
    return found


def key_of(bug: Bug) -> str:
    """Return a hash of the file with the bug and of its tests."""
    text = planted.locate(ROOT, bug).read_text()
    digest = hashlib.sha256(planted.with_bug(text, bug).encode())
    names = sorted(tests_of(bug))
    digest.update("\n".join(names).encode())
    for path in dict.fromkeys(name.partition("::")[0] for name in names):
        digest.update((ROOT / path).read_bytes())
    return digest.hexdigest()[:12]


def record_all(matrix: Matrix, selected: list[Bug], timeout: float) -> None:
    """Record the bugs whose records are missing or outdated."""
    keys = {bug: key_of(bug) for bug in selected}
    known = {what: record.key for what, record in matrix.records.items()}
    todo = [bug for bug in selected if known.get(title(bug)) != keys[bug]]
    print(f"{len(todo)} of {len(selected)} bugs to record", flush=True)
    with tempfile.TemporaryDirectory(prefix="matrix-") as folder:
        root = planted.copy_tree(Path(folder))
        for bug in todo:
            start = time.monotonic()
            with planted.planted(planted.locate(root, bug), bug):
                failed = planted.failures(root, bug.test_files(), timeout)
            fails = {name.partition("[")[0] for name in failed} & tests_of(bug)
            matrix.ran |= tests_of(bug)
            matrix.records[title(bug)] = Record(keys[bug], fails)
            matrix.save()
            seconds = time.monotonic() - start
            print(f"{seconds:4.0f} s  {title(bug)}: {len(fails)} tests fail", flush=True)


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
    print(f"{len(matrix.records)} of {len(titles)} bugs are recorded")
    for count, word in ((0, "no test detects"), (1, "one test detects")):
        found = [f"  {what}" for what, r in matrix.records.items() if len(r.fails) == count]
        print(f"\n{len(found)} bugs that {word}:", *found, sep="\n")
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
    parser.add_argument("--out", type=Path, default=OUT, help="the file of the records")
    parser.add_argument("--report", action="store_true", help="print a report of the records")
    parser.add_argument("--only", default="", help="a part of a bug's file or description")
    parser.add_argument("--timeout", type=float, default=3600, help="seconds a bug, at most")
    args = parser.parse_args()
    matrix = Matrix(args.out)
    selected = planted.bugs(args.only)
    if args.report:
        report(matrix, selected)
        return
    if planted.check(ROOT, selected) < len(selected):
        sys.exit("correct the table first")
    record_all(matrix, selected, args.timeout)


if __name__ == "__main__":
    main()
