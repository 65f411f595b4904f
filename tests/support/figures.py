"""`python -m tests.support.figures`: put the tables and pictures of the newest CPU results into the
README and docs/.

Tables are found by their head, pictures go below the headings that are named here. What is said
about them is written by hand.
"""

import re
from pathlib import Path

from moe_runtime.bench import goals, report
from moe_runtime.io.files import atomic_file

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "bench" / "results"
README = ROOT / "README.md"
PAGE = ROOT / "docs" / "performance.md"
CAPTIONS = {
    "layer": (
        "Bars: times of a layer's experts as multiples of moe_runtime's, for two shapes, two "
        "dtypes and both passes"
    ),
    "roofline": (
        "Points below a roof: TFLOP/s of the layers and adapters over FLOPs per byte, under the "
        "machine's two ceilings"
    ),
    "throughput": (
        "Lines: tokens per second of each implementation over the number of tokens, from 1 to 4096"
    ),
    "memory": (
        "Bars: KiB per token that each implementation keeps for the backward pass; moe_runtime "
        "keeps the least"
    ),
    "breakdown": (
        "Stacked bars: milliseconds of a training step in experts, attention, loss and optimizer"
    ),
    "xft": "Bars: tokens per second and total memory of XFT's tuning step by implementation",
}
SHOWN_FIRST = "layer"  # the one of the README


def newest() -> Path:
    """Return the newest results file of a CPU."""
    return max(RESULTS.glob("*-cpu.json"))


def tables(path: Path) -> dict[Path, list[str]]:
    """Return each page's tables, as the file has them."""
    rows = report.rows_of(path)
    return {
        README: [report.cpu_table(rows)],
        PAGE: [report.steps_table(rows), goals.goals(rows, goals.CPU_GOALS)],
    }


def pictures(folder: str) -> dict[str, str]:
    """Return the line that shows the newest picture of each kind, of those that are there."""
    found = {}
    for name, caption in CAPTIONS.items():
        if paths := sorted(RESULTS.glob(f"*-{name}.svg")):
            found[name] = f"![{caption}]({folder}{paths[-1].name})"
    return found


def put_table(text: str, table: str) -> str:
    """Replace the table of the same first columns, and the list of what missed its goal; ValueError
    where there is none.
    """
    start = " | ".join(table.split("\n")[0].split(" | ")[:2])
    changed, count = re.subn(
        rf"^{re.escape(start)}.*\n(?:\|.*\n)+(?:\n(?:\* .* off\n)+)?",
        lambda _: table.strip() + "\n",
        text,
        flags=re.MULTILINE,
    )
    if count != 1:
        raise ValueError(f"the page has {count} tables that begin with {start!r}; want one")
    return changed


def put_pictures(text: str, heading: str, lines: list[str]) -> str:
    """Put pictures below a heading, which is made if it is new, and take away those of results that
    stand on the page.
    """
    text = re.sub(
        r"^!\[[^]]+\]\((?:bench/)?results/[^)]+\)\n\n?",
        "",
        text,
        flags=re.MULTILINE,
    )
    if not lines:
        return text
    if f"{heading}\n\n" not in text:
        text = text.replace("\n## ", f"\n{heading}\n\n## ", 1)
    return text.replace(
        f"{heading}\n\n", f"{heading}\n\n" + "".join(f"{line}\n\n" for line in lines), 1
    )


def main() -> None:
    path = newest()
    shown = pictures("bench/results/")
    more = pictures("results/")
    for page, found in tables(path).items():
        text = page.read_text()
        for table in found:
            text = put_table(text, table)
        if page == README:
            text = put_pictures(
                text,
                "## Performance",
                [shown[SHOWN_FIRST]] if SHOWN_FIRST in shown else list(shown.values())[:1],
            )
        else:
            text = put_pictures(text, "## Pictures", list(more.values()))
        with atomic_file(page) as beside:
            beside.write_text(text)
        print(
            f"{page.relative_to(ROOT)}: {len(found)} tables; the name of the file and what is said "
            "of it are yours to write"
        )


if __name__ == "__main__":
    main()
