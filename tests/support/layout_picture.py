"""docs/architecture.svg, the folders of moe_runtime and their imports: python -m
tests.support.layout_picture.

tests.support.layout.RANK defines which imports are allowed. An arrow that is implied by two others
is not drawn.
"""

from pathlib import Path

from tests.support.layout import ROOT, arrows, folder_of

PATH = ROOT / "docs" / "architecture.svg"
WIDTH = 760
ROW = 66
BOX = 34
TOP = 16
ROWS = [  # from the top, with a folder below those that import it; "" leaves room for arrows
    ["papers"],
    ["cli"],
    ["tools"],
    ["methods.upit", "", "", ""],
    ["methods.xft", "methods.esft", "methods.shrink", "methods.ultrafuser"],
    ["methods.lora"],
    ["hf.training"],
    ["hf.models", "hf.dropin"],
    ["modules"],
    ["ops"],
    ["backends", "kernels"],
    ["native", "io", "config"],
    ["csrc"],
]
COLOURS = {  # one for each part of the package
    "kernels": "#FBE3C8",
    "csrc": "#FBE3C8",
    "config": "#E8E8E8",
    "native": "#E8E8E8",
    "io": "#E8E8E8",
    "backends": "#E8E8E8",
    "ops": "#F6CFA0",
    "modules": "#CFE3F5",
    "hf": "#B9D5EE",
    "methods": "#BFDFB2",
    "tools": "#E3D6EE",
    "cli": "#D2BEE4",
    "papers": "#D8EBD0",
}
LABELS = {
    "kernels": "kernels (Triton)",
    "csrc": "csrc (CUDA, C++)",
    "papers": "papers (from a clone)",
}
EXTRA_ARROWS = {("native", "csrc")}  # not an import: it compiles and loads them


def folder_arrows(root: Path) -> set[tuple[str, str]]:
    """Return the arrows between folders, except those of the package's own __init__, which only
    re-exports names.
    """
    pairs = {
        (folder_of(arrow.source), folder_of(arrow.target)) for arrow in arrows(root)
    } | EXTRA_ARROWS
    pairs = {
        (folder_of_init(a), folder_of_init(b))
        for a, b in pairs
        if {a, b}.isdisjoint(("", "__main__", "methods"))
    }
    return {(a, b) for a, b in pairs if a != b}


def folder_of_init(folder: str) -> str:
    """Return the box of a folder; the __init__ of hf and of methods, and papers, have no parts."""
    if folder.startswith("papers"):
        return "papers"
    return {
        "hf": "hf.training",
        "hf.common": "hf.models",
        "methods": "methods.upit",
    }.get(folder, folder)


def reduced(pairs: set[tuple[str, str]]) -> set[tuple[str, str]]:
    """Leave out each arrow that is implied by a longer path; two folders that import each other
    imply none.
    """
    targets: dict[str, set[str]] = {}
    for a, b in pairs:
        targets.setdefault(a, set()).add(b)

    def reach(folder: str, seen: set[str]) -> set[str]:
        for target in targets.get(folder, set()) - seen:
            seen.add(target)
            reach(target, seen)
        return seen

    def is_between(c: str, a: str, b: str) -> bool:
        return (
            c != b
            and (c, a) not in pairs
            and not {(b, c), (c, b)} <= pairs
            and b in reach(c, set())
        )

    return {(a, b) for a, b in pairs if not any(is_between(c, a, b) for c in targets[a])}


def places() -> dict[str, tuple[float, float, float]]:
    """Return the horizontal center, the top and the width of each folder's box."""
    found = {}
    for number, row in enumerate(ROWS):
        widths = [8 * len(LABELS.get(folder, folder or "methods.upit")) + 22 for folder in row]
        gap = min(70, (WIDTH - 20 - sum(widths)) / max(len(row) - 1, 1))
        x = (WIDTH - sum(widths) - gap * (len(widths) - 1)) / 2
        for folder, width in zip(row, widths, strict=True):
            found[folder] = (x + width / 2, TOP + ROW * number, width)
            x += width + gap
    found.pop("")
    return found


def path(a: tuple[float, float, float], b: tuple[float, float, float]) -> str:
    """Return the path of an arrow between two boxes: downwards, sideways within a row, or around a
    box in between.
    """
    (xa, ya, wa) = a
    (xb, yb, wb) = b
    if ya != yb:
        start = _toward(xa, wa, xb)
        end = _toward(xb, wb, xa)
        return (
            f"M{start:.1f} {ya + BOX} C{start:.1f} {ya + BOX + 22} {end:.1f} {yb - 24} {end:.1f} "
            f"{yb - 2}"
        )
    side = 1 if xb > xa else -1
    if abs(xb - xa) - (wa + wb) / 2 < 80:
        return (
            f"M{xa + side * wa / 2:.1f} {ya + BOX / 2} L{xb - side * (wb / 2 + 2):.1f} "
            f"{yb + BOX / 2}"
        )
    return (
        f"M{xa + side * wa / 4:.1f} {ya} C{xa:.1f} {ya - 24} {xb:.1f} {yb - 24} "
        f"{xb - side * wb / 4:.1f} {yb - 2}"
    )


def draw(root: Path) -> str:
    """Return the figure as SVG, with the same text for the same imports."""
    pairs = reduced(folder_arrows(root))
    at = places()
    height = TOP + ROW * (len(ROWS) - 1) + BOX + TOP
    lines = [
        (
            '<svg xmlns="http://www.w3.org/2000/svg" '
            'viewBox="0 '
            "0 "
            f"{WIDTH} "
            f'{height:.0f}" '
            'font-family="sans-serif" font-size="14">'
        ),
        (
            "<style>@media (prefers-color-scheme: dark) { svg { filter: invert(0.9) "
            "hue-rotate(180deg) } }</style>"
        ),
        '<defs><marker id="tip" viewBox="0 0 '
        "8 "
        '8" '
        'refX="7" '
        'refY="4" '
        'markerWidth="7" '
        'markerHeight="7" orient="auto">'
        '<path d="M0 0 L8 4 L0 8 z" fill="#555"/></marker></defs>',
        f'<rect width="{WIDTH}" height="{height:.0f}" fill="white"/>',
    ]
    for a, b in sorted(pairs):
        lines.append(
            f'<path d="{path(at[a], at[b])}" '
            'fill="none" '
            'stroke="#555" '
            'stroke-width="1.2" '
            'marker-end="url(#tip)"/>'
        )
    for folder, (x, y, width) in at.items():
        colour = COLOURS[folder.split(".")[0]]
        label = LABELS.get(folder, folder.replace(".", "/"))
        lines.append(
            f'<rect x="{x - width / 2:.1f}" '
            f'y="{y:.1f}" '
            f'width="{width}" '
            f'height="{BOX}" '
            'rx="5" '
            f'fill="{colour}" stroke="#777"/>'
            f'<text x="{x:.1f}" y="{y + BOX / 2 + 5:.1f}" text-anchor="middle">{label}</text>'
        )
    return "\n".join([*lines, "</svg>"]) + "\n"


def _toward(x: float, width: float, other: float) -> float:
    """Return a point on a box's edge that is shifted towards `other`."""
    return x + max(-0.35, min(0.35, (other - x) / 600)) * width


if __name__ == "__main__":
    PATH.write_text(draw(ROOT))
    print(PATH.relative_to(ROOT))
