"""`python -m tests.support.figures`: put the tables and pictures of the newest CPU results into the README and docs/.

Tables are found by their head, pictures go below the headings that are named here. What is said about them is written by hand.
"""

import re
from pathlib import Path

from moe_runtime.bench import goals, report
from moe_runtime.io.files import atomic_file

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "bench" / "results"
README, PAGE = ROOT / "README.md", ROOT / "docs" / "performance.md"
CAPTIONS = {
    "layer": "time of a layer's experts, times of the dense-matmul floor",
    "roofline": "each kernel against the machine's ceilings",
    "throughput": "tokens per second against the number of tokens",
    "memory": "bytes kept for the backward pass, per token",
    "breakdown": "where the time of a training step goes",
    "xft": "XFT's tuning step: tokens per second, and peak memory with weights and optimizer state where a file has it",
}
SHOWN_FIRST = "layer"  # the one of the README


def newest() -> Path:
    """Return the newest results file of a CPU."""
    return max(RESULTS.glob("*-cpu.json"))


def tables(path: Path) -> dict[Path, list[str]]:
    """Return each page's tables, as the file has them."""
    rows = report.rows_of(path)
    return {README: [report.cpu_table(rows)], PAGE: [report.steps_table(rows), goals.goals(rows, goals.CPU_GOALS)]}


def pictures(path: Path, folder: str) -> dict[str, str]:
    """Return the line that shows each picture of a results file, of those that are there."""
    found = {}
    for name, caption in CAPTIONS.items():
        if (picture := RESULTS / f"{path.stem}-{name}.svg").is_file():
            found[name] = f"![{caption}]({folder}{picture.name})"
    return found


def put_table(text: str, table: str) -> str:
    """Replace the table of the same first columns, and the list of what missed its goal; ValueError where there is none."""
    start = " | ".join(table.split("\n")[0].split(" | ")[:2])
    changed, count = re.subn(
        rf"^{re.escape(start)}.*\n(?:\|.*\n)+(?:\n(?:\* .* off\n)+)?", lambda _: table.strip() + "\n", text, flags=re.MULTILINE
    )
    if count != 1:
        raise ValueError(f"the page has {count} tables that begin with {start!r}; want one")
    return changed


def put_pictures(text: str, heading: str, lines: list[str]) -> str:
    """Put pictures below a heading, which is made if it is new, and take away those of results that stand on the page."""
    text = re.sub(r"^!\[[^]]+\]\((?:bench/)?results/[^)]+\)\n\n?", "", text, flags=re.MULTILINE)
    if not lines:
        return text
    if f"{heading}\n\n" not in text:
        text = text.replace("\n## ", f"\n{heading}\n\n## ", 1)
    return text.replace(f"{heading}\n\n", f"{heading}\n\n" + "".join(f"{line}\n\n" for line in lines), 1)


def main() -> None:
    path = newest()
    shown, more = pictures(path, "bench/results/"), pictures(path, "results/")
    for page, found in tables(path).items():
        text = page.read_text()
        for table in found:
            text = put_table(text, table)
        if page == README:
            text = put_pictures(
                text, "## Performance", [shown[SHOWN_FIRST]] if SHOWN_FIRST in shown else list(shown.values())[:1]
            )
        else:
            text = put_pictures(text, "## Pictures", list(more.values()))
        with atomic_file(page) as beside:
            beside.write_text(text)
        print(f"{page.relative_to(ROOT)}: {len(found)} tables; the name of the file and what is said of it are yours to write")


if __name__ == "__main__":
    main()
