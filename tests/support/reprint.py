"""`python -m tests.support.reprint docs/esft-tables.md --out runs/esft`: run the commands of a
page's tables again.

What each prints replaces the table below its name on the page; `--only counts` runs those whose
table is named so. What the page says about the numbers is written by hand.
"""

import argparse
import contextlib
import io
import re
import shlex
from pathlib import Path

from moe_runtime.io.files import atomic_write_text
from tests.support.cli import PAPERS

TABLE = re.compile(
    r"^`python -m papers ([^`\n]+)`\n\n```text\n(.*?)^```",
    re.MULTILINE | re.DOTALL,
)


class Terminal(io.StringIO):
    """Standard output that gets tables with lines, as a terminal does."""

    def isatty(self) -> bool:
        return True


def printed(words: list[str]) -> str:
    """Run a command, whose last word is the folder that it writes to; return its table and what is
    said below.
    """
    with contextlib.redirect_stdout(Terminal()) as out:
        PAPERS.app(words, standalone_mode=False)
    text = re.sub(r"\x1b\[[0-9;]*m", "", out.getvalue())
    lines = [line.rstrip() for line in text[text.index("┏") :].splitlines()]
    # but the files that it wrote
    return "".join(f"{line}\n" for line in lines if words[-1] not in line)


def reprint(page: Path, out: Path, only: str | None = None) -> int:
    """Replace the tables of a page; return how many."""
    count = 0

    def again(found: re.Match) -> str:
        nonlocal count
        words = shlex.split(found[1])
        if only not in (None, words[1]):
            return found[0]
        count += 1
        return f"`{PAPERS.name} {found[1]}`\n\n```text\n{printed([*words, '--out', str(out)])}```"

    atomic_write_text(page, TABLE.sub(again, page.read_text()))
    return count


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("page", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only")
    options = parser.parse_args()
    print(f"{options.page}: {reprint(options.page, options.out, options.only)} tables")
