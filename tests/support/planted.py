"""Plausible bugs, planted one at a time: `make test` must fail for each.

    python -m tests.support.planted                 # each bug, with the test files that it names
    python -m tests.support.planted --only io/      # some bugs, by a part of their file or text
    python -m tests.support.planted --check         # only that each bug's text still occurs
                                                    # exactly once

The bugs are in planted.toml. Each is a short text that is replaced in a copy of the working tree.
A text that has moved to another file or has other line breaks is still found; if it has changed,
edit the table: what a bug breaks matters, not where.
"""

import argparse
import ast
import contextlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tests.support import forked

ROOT = Path(__file__).resolve().parents[2]
TABLE = Path(__file__).with_name("planted.toml")
FOLDERS = ("moe_runtime", "kernels", "csrc", "papers", "bench")
SUFFIXES = (".py", ".cu", ".cuh", ".h", ".cpp")
# what `make test` selects
QUIET = ("-q", "-p", "no:cacheprovider", "-m", "not slow")


class Bug(NamedTuple):
    """A text replacement."""

    file: str  # where the text is expected
    what: str  # what it breaks
    old: str
    new: str
    tests: str  # test files that must detect it, separated by spaces, relative to tests/

    def test_files(self) -> list[str]:
        """Return the paths of the tests, from the root."""
        return [f"tests/{name}" for name in self.tests.split()]


def bugs(part: str = "") -> list[Bug]:
    """Return the bugs whose file or description contains `part`."""
    table = tomllib.loads(TABLE.read_text())
    every = [Bug(file, **entry) for file, entries in table.items() for entry in entries]
    return [bug for bug in every if part in f"{bug.file} {bug.what}"]


def sources(root: Path) -> list[Path]:
    """Return the files that a bug may be in, except behind symlinks."""
    return [
        Path(folder, name)
        for top in FOLDERS
        for folder, _, names in os.walk(root / top)
        for name in names
        if name.endswith(SUFFIXES)
    ]


def find(text: str, bug: Bug) -> re.Match | None:
    """Return where `text` contains the bug's text, with any line breaks, if it occurs exactly
    once.
    """
    pattern = ""
    for token in re.findall(r"\w+|\S", bug.old):
        if pattern and re.match(r"\w", token) and re.search(r"\w$", pattern):
            pattern += r"\s+"
        elif token in ")]}":
            pattern += r"\s*,?\s*"  # a trailing comma may follow the last of several lines
        else:
            pattern += r"\s*"
        pattern += re.escape(token)
    found = list(re.finditer(pattern.removeprefix(r"\s*"), text))
    return found[0] if len(found) == 1 else None


def with_bug(text: str, bug: Bug) -> str:
    """Return a file's text with the bug."""
    place = find(text, bug)
    return text[: place.start()] + bug.new + text[place.end() :]


def locate(root: Path, bug: Bug) -> Path:
    """Return the file that contains the bug's text exactly once; LookupError if none or several
    do.
    """
    named = root / bug.file
    if named.is_file() and find(named.read_text(), bug):
        return named
    places = [path for path in sources(root) if find(path.read_text(), bug)]
    if len(places) == 1:
        return places[0]
    raise LookupError(
        f"{bug.file} does not contain {bug.old!r} once, and {len(places)} other files do. "
        f"Plant {bug.what!r} elsewhere"
    )


def copy_tree(folder: Path) -> Path:
    """Copy files that are tracked by git, and new ones that are not ignored, to `folder`."""
    listing = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listing, cwd=ROOT, capture_output=True, check=True).stdout.decode()
    for name in filter(None, names.split("\0")):
        target = folder / name
        if os.path.lexists(ROOT / name):
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target, follow_symlinks=False)
    return folder


@contextlib.contextmanager
def planted(file: Path, bug: Bug) -> Iterator[None]:
    """Replace the bug's text in `file` inside a with block."""
    source = file.read_text()
    file.write_text(with_bug(source, bug))
    try:
        yield
    finally:
        file.write_text(source)


def failures(root: Path, arguments: list[str], timeout: float | None) -> list[str]:
    """Run pytest and return the tests that failed; RuntimeError if it did not finish."""
    with tempfile.TemporaryDirectory(prefix="pytest-") as folder:
        output = Path(folder, "output")
        code = forked.run_pytest(root, [*QUIET, "-rfE", *arguments], timeout, output)
        text = output.read_text()
    if code is None:
        raise RuntimeError(f"not finished after {timeout:.0f} s")
    if code not in (0, 1):
        raise RuntimeError(f"pytest ended with {code}: {text[-500:]}")
    return re.findall(r"^(?:FAILED|ERROR) (\S+(?:\[.*?\])?)(?: - |$)", text, re.MULTILINE)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="a part of a bug's file or description")
    parser.add_argument("--check", action="store_true", help="only look for each bug's text")
    parser.add_argument("--timeout", type=float, default=600, help="seconds per bug")
    return parser.parse_args()


def check(root: Path, selected: list[Bug]) -> int:
    """Print the problems of the table; return the number of bugs that can be planted."""
    fine = 0
    for bug in selected:
        missing = [name for name in bug.test_files() if not (root / name).is_file()]
        if missing:
            print(f"{', '.join(missing)} does not exist; name the tests that detect {bug.what!r}")
            continue
        try:
            file = locate(root, bug)
            if file.suffix == ".py":
                ast.parse(with_bug(file.read_text(), bug))
        except (LookupError, SyntaxError) as error:
            print(f"{bug.what}: {error}")
        else:
            fine += 1
    return fine


def main() -> int:
    """Plant each bug and print which test caught it."""
    args = parse_arguments()
    selected = bugs(args.only)
    fine = check(ROOT, selected)
    if args.check or fine < len(selected):
        print(f"{fine} of {len(selected)} can be planted")
        return int(fine < len(selected))
    caught = 0
    with tempfile.TemporaryDirectory(prefix="planted-") as folder:
        root = copy_tree(Path(folder))
        every = {name for bug in selected for name in bug.test_files()}
        broken = failures(root, sorted(every), None)
        for name in broken:
            print(f"fails without a bug: {name}", flush=True)
        options = ["-x", *(f"--deselect={name}" for name in broken)]
        for number, bug in enumerate(selected, 1):
            start = time.monotonic()
            word = "NOT CAUGHT"
            try:
                with planted(locate(root, bug), bug):
                    seen = failures(root, [*options, *bug.test_files()], args.timeout)
            except RuntimeError as error:
                word = f"UNKNOWN: {error}"
            else:
                if seen:
                    caught += 1
                    word = f"caught by {seen[0]}"
            seconds = time.monotonic() - start
            print(f"{number:3} {seconds:4.0f} s  {bug.file}: {bug.what}: {word}", flush=True)
    print(f"{caught} of {len(selected)} caught")
    return int(caught < len(selected))


if __name__ == "__main__":
    sys.exit(main())
