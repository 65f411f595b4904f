"""docs/mutants.md: which test saw which mutant, who lived and why. Read back, it is what need not run again."""

import ast
import json
from collections import Counter

from tests.stress.generic_mutants import ROOT

PAGE = ROOT / "docs" / "mutants.md"
REASONS = ROOT / "tests" / "stress" / "survivors.json"
TIMED_OUT = "nobody in the limit of time"
Key = tuple[str, str, str, str]
INTRODUCTION = """# Mutants

A test is worth what it catches. So a machine plants mistakes in the files of the ops and of the kernels, one at a time:
another operator or comparison, a number off by one, a mask dropped, a narrower dtype, two arguments exchanged, a statement
gone. Then it runs the tests of that op, the cheapest first, until one fails. The mutants are a sample with a seed; this makes
the page anew, and runs what it has not yet:

```bash
python -m tests.stress.mutate
```

Its options name another seed, more mutants of each file, or one step of the way. Kernels run in Triton's interpreter, with
a check of every access to memory. Not mutated: launch configs (another one gives the same numbers, more slowly), the refusals
of wrong input, the fakes that `torch.compile` traces, the all-to-all and the CUDA library's launchers, which run elsewhere.

Beside these, {written} mutants are written by hand, each with the test that must see it, and run with the test suite: in
{places}.
"""


def _cell(text: str) -> str:
    return "`" + text.replace("|", "¦").replace("`", "'") + "`"


def _plain(cell: str) -> str:
    return cell.strip().strip("`").replace("¦", "|")


def read() -> dict[Key, str]:
    """The rows of the page: mutant to the test that saw it, "" for who lived."""
    found = {}
    for line in PAGE.read_text().splitlines() if PAGE.exists() else []:
        cells = line.strip().strip("|").split(" | ")
        if len(cells) == 5 and cells[0].strip().startswith("`"):
            witness = _plain(cells[4])
            found[tuple(map(_plain, cells[:4]))] = "" if witness == "none" else witness
    return found


def reasons() -> dict[Key, str]:
    """Why survivors are no faults of the tests: rows of file, function, old, new, reason."""
    rows = json.loads(REASONS.read_text()) if REASONS.exists() else []
    return {(row["file"], row["function"], row["old"], row["new"]): row["reason"] for row in rows}


def hand_written() -> Counter:
    """How many mutants each test file plants itself: the cases of its lists of mutants."""
    found = Counter()
    for path in sorted([*ROOT.glob("tests/ops/test_*.py"), *ROOT.glob("tests/csrc/test_*.py")]):
        found[path.relative_to(ROOT).as_posix()] = _count(path.read_text())
    return +found


def _count(source: str) -> int:
    total = 0
    for node in ast.walk(ast.parse(source)):
        if (
            isinstance(node, ast.Assign)
            and "MUTANTS" in ast.unparse(node.targets[0])
            and isinstance(node.value, ast.List)
        ):
            total += len(node.value.elts)
    return total


def page(rows: dict[Key, str]) -> str:
    """Return the page of these rows."""
    written, why = hand_written(), reasons()
    places = ", ".join(f"`{path}` ({count})" for path, count in written.items())
    lived = [key for key, witness in rows.items() if witness in ("", TIMED_OUT)]
    late = sum(rows[key] == TIMED_OUT for key in lived)
    explained = sum(key in why for key in lived)
    lines = [
        INTRODUCTION.format(written=sum(written.values()), places=places),
        f"Of {len(rows)} mutants that the machine planted, {len(rows) - len(lived)} were seen. {len(lived)} lived, {late} of "
        f"them because the time was over before a test had ended. {explained} of the {len(lived)} are explained: they change "
        f"nothing that a test could ask for, or a test was written since; {len(lived) - explained} are open.",
        "\n## Who lived\n",
        "| file | function | line | mutant | why |",
        "|---|---|---|---|---|",
    ]
    for key in sorted(lived):
        file, function, old, new = key
        reason = why.get(key, "open" if rows[key] == "" else "open: out of time")
        lines.append(f"| {file} | {function} | {_cell(old)} | {_cell(new)} | {reason} |")
    lines += ["\n## All\n", "| file | function | line | mutant | seen by |", "|---|---|---|---|---|"]
    for key in sorted(rows):
        lines.append("| " + " | ".join(map(_cell, (*key, rows[key] or "none"))) + " |")
    return "\n".join(lines) + "\n"


def write(rows: dict[Key, str]) -> None:
    """Write the page."""
    partial = PAGE.with_suffix(".partial")
    partial.write_text(page(rows))
    partial.replace(PAGE)
