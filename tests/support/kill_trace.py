"""Which tests run which lines, and which tests of a selection fail; for
`tests.support.kill_matrix`.

A trace is a folder with a copy of the tree (tree/) and the output of tests.support.kill_plugin for
one run of `make test` in it (data/).
"""

import ast
import functools
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from tests.support import forked, planted
from tests.support.planted import Bug

PLUGIN = ("-p", "tests.support.kill_plugin")
LIMITS = ("--timeout", "120", "-o", "timeout_method=signal")
# the tests that load the libraries of csrc/
NATIVE = re.compile(r"tests/(ops/\w*cpp\w*|csrc/\w+|native/\w+)\.py::")


def file_of(name: str) -> str:
    """Return the file of a test."""
    return name.partition("::")[0]


def run_selected(root: Path, names: list[str], timeout: float) -> tuple[set[str], set[str]]:
    """Run these tests; return which failed, and which did not end in time.

    A test that ends the process counts as failed, and the others run in a new process.
    """
    deadline = time.monotonic() + timeout
    failed = set()
    left = names
    with tempfile.TemporaryDirectory(prefix="selected-") as folder:
        while left:
            selection = Path(folder, str(len(left)))
            selection.write_text("\n".join(left))
            files = dict.fromkeys(map(file_of, left))
            options = ["--continue-on-collection-errors", "--select", str(selection)]
            seconds = max(deadline - time.monotonic(), 1)
            arguments = [*planted.QUIET, *PLUGIN, *LIMITS, *options, *files]
            code = forked.run_pytest(root, arguments, seconds)
            fresh, started = read_log(Path(f"{selection}.log"))
            failed |= fresh
            last = started[-1:]
            left = sorted(set(left).difference(failed, started))
            if code is None:
                return failed, set(left + last) - failed
            if code in (0, 1, 5):  # 5: no test was collected
                break
            if not last:
                raise RuntimeError(f"pytest ended with {code} before its first test")
            failed.update(last)
    return failed, set()


def read_log(log: Path) -> tuple[set[str], list[str]]:
    """Return the failed and the started tests from a log of the plugin."""
    failed = set()
    started = []
    if log.exists():
        for line in log.read_text().splitlines():
            word, _, name = line.partition(" ")
            if word == "fail":
                failed.add(name)
            else:
                started.append(name)
    return failed, started


def record_trace(folder: Path) -> None:
    """Run `make test` with coverage.py, in one process."""
    shutil.rmtree(folder, ignore_errors=True)
    tree = folder / "tree"
    tree.mkdir(parents=True)
    planted.copy_tree(tree)
    print(f"tracing make test; the trace is kept in {folder}", flush=True)
    data = str(folder / "data")
    options = [*planted.QUIET, *PLUGIN, "--trace-to", data, "--timeout", "1200"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options],
        cwd=tree,
        env=forked.environment(tree),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    if done.returncode not in (0, 1):
        raise RuntimeError(f"pytest ended with {done.returncode} while it was traced")


class Untraced:
    """Stands for a trace where only the tests of the files that a bug names are run."""

    def __init__(self):
        self.seconds = {}
        self.broken = set()

    def seeing(self, bug: Bug) -> set[str]:
        return set()


class Trace:
    """The lines that each test runs."""

    def __init__(self, folder: Path):
        from coverage import CoverageData

        self.tree = folder / "tree"
        self.seconds = {}  # of each test
        self.users = defaultdict(set)  # of a shared fixture or a cached function -> what uses it
        failed = set()
        for path in sorted(folder.glob("data/tests-*.json")):
            table = json.loads(path.read_text())
            self.seconds |= table["seconds"]
            failed.update(table["failed"])
            for name, shared in table["uses"].items():
                for one in shared:
                    self.users[one].add(name)
        combined = folder / "data" / "all"
        if not combined.exists():
            self._combine(folder / "data", combined)
        self.broken = self._broken(folder / "data" / "broken.json", failed)
        self.data = CoverageData(str(combined))
        self.data.read()
        self.files = {}  # the traced name of each file; those of kernels/ have two
        for name in self.data.measured_files():
            self.files[os.path.realpath(self.tree / name)] = name

    def _combine(self, data: Path, combined: Path) -> None:
        from coverage import CoverageData

        joined = CoverageData(str(data / "joining"))
        for path in sorted(data.glob("coverage.*")):
            part = CoverageData(str(path))
            part.read()
            joined.update(part)
        joined.close()
        os.replace(data / "joining", combined)

    def _broken(self, known: Path, failed: set[str]) -> set[str]:
        """Return the tests that fail without a bug, except those that fail only because of
        coverage.py.
        """
        if not known.exists():
            still, late = run_selected(self.tree, sorted(failed), 3600)
            known.write_text(json.dumps(sorted(still | late)))
            for name in sorted(still | late):
                print(f"fails without a bug: {name}", flush=True)
        return set(json.loads(known.read_text()))

    def seeing(self, bug: Bug) -> set[str]:
        """Return the tests that run the lines that a bug changes, and those of its files."""
        files = bug.test_files()
        found = {name for name in self.seconds if file_of(name) in files}
        path = planted.locate(self.tree, bug)
        if path.suffix == ".py":
            found |= self._tests(self._contexts(path, bug))
        else:
            found |= set(filter(NATIVE.match, self.seconds))
        return found - self.broken

    def _contexts(self, path: Path, bug: Bug) -> set[str]:
        """Return the contexts that run the changed lines, or any line of the file's functions if
        the changed lines run only once.
        """
        name = self.files.get(os.path.realpath(self.tree / path))
        if name is None:
            return set()
        by_line = self.data.contexts_by_lineno(name)
        text = (self.tree / path).read_text()
        lines = changed_lines(text, bug)
        if lines is None:
            lines = repeated_lines(text)
        found = set()
        for line in lines:
            found.update(by_line.get(line, ()))
        return found

    def _tests(self, contexts: set[str]) -> set[str]:
        """Return the tests among the contexts, and those that use the other contexts."""
        found = set()
        left = list(contexts)
        while left:
            one = left.pop()
            if one not in found:
                found.add(one)
                left.extend(self.users.get(one, ()))
        return found & self.seconds.keys()


@functools.cache
def statements(text: str) -> list[tuple[int, int, bool]]:
    """Return the first and last line of each statement (of a compound statement, only its head),
    and whether it runs with each test: not outside functions, nor in functions that cache their
    results.
    """
    found = []

    def visit(node: ast.AST, repeats: bool) -> None:
        for child in ast.iter_child_nodes(node):
            inside = repeats
            if isinstance(child, ast.stmt):
                last = child.end_lineno
                body = getattr(child, "body", None)
                if body:
                    last = max(child.lineno, body[0].lineno - 1)
                found.append((child.lineno, last, repeats))
            if isinstance(child, ast.FunctionDef):
                inside = "cache" not in " ".join(map(ast.unparse, child.decorator_list))
            visit(child, inside)

    visit(ast.parse(text), False)
    return found


def repeated_lines(text: str) -> set[int]:
    """Return the lines that run with each test."""
    found = set()
    for first, last, repeats in statements(text):
        if repeats:
            found.update(range(first, last + 1))
    return found


def common(one: str, other: str) -> int:
    """Return the length of the common prefix of two texts."""
    same = 0
    for a, b in zip(one, other, strict=False):
        if a != b:
            break
        same += 1
    return same


def changed_lines(text: str, bug: Bug) -> set[int] | None:
    """Return the lines of the statements that a bug changes, or None if they run only once."""
    place = planted.find(text, bug)
    old = place[0]
    start = common(old, bug.new)
    tail = common(old[start:][::-1], bug.new[start:][::-1])
    first = text.count("\n", 0, place.start() + start) + 1
    last = text.count("\n", 0, max(place.end() - tail, place.start() + start)) + 1
    found = set()
    for line in range(first, last + 1):
        around = [one for one in statements(text) if one[0] <= line <= one[1]]
        if not around:  # an empty line, or a comment
            continue
        a, b, repeats = min(around, key=lambda one: one[1] - one[0])
        if not repeats:
            return None
        found.update(range(a, b + 1))
    return found


def ranges(numbers: Iterable[int]) -> str:
    """Format numbers as 1-3,7."""
    parts = []
    ordered = enumerate(sorted(numbers))
    for _, group in itertools.groupby(ordered, lambda pair: pair[1] - pair[0]):
        run = [number for _, number in group]
        first, last = run[0], run[-1]
        parts.append(f"{first}-{last}" if last > first else f"{first}")
    return ",".join(parts)


def numbers_of(text: str) -> list[int]:
    """Parse the output of `ranges`."""
    found = []
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        found.extend(range(int(first), int(last or first) + 1))
    return found
