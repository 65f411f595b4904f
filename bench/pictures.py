"""Pictures of a results file, PNG and SVG beside it: python -m moe_runtime.bench.pictures FILE.json [-o FOLDER].

The layer's times of its floor, rooflines, tokens/s against T, memory per token, a step's parts, XFT's tuning step: each if
the file has something of it. What was not measured is left out, and a loss is drawn like a win.
"""

import argparse
from pathlib import Path

from moe_runtime.bench.pictures_bars import breakdown, memory, xft
from moe_runtime.bench.pictures_layer import layer
from moe_runtime.bench.pictures_roofline import roofline
from moe_runtime.bench.pictures_style import read
from moe_runtime.bench.pictures_tokens import throughput
from moe_runtime.io.files import atomic_file
from moe_runtime.io.rows import require

PICTURES = {
    "layer": layer,
    "roofline": roofline,
    "throughput": throughput,
    "memory": memory,
    "breakdown": breakdown,
    "xft": xft,
}
# text as text, the font that matplotlib brings, ids that are the same in every run
SETTINGS = {
    "svg.fonttype": "none",
    "svg.hashsalt": "moe_runtime",
    "font.family": "DejaVu Sans",
    "text.parse_math": False,  # a name with two $ is no formula
}


def write_pictures(json_path: str | Path, out: str | Path | None = None) -> list[Path]:
    """Draw what a results file holds into `out`, else beside it; return the files, a PNG and an SVG per picture.

    Raises ValueError for what is no results file, ImportError without matplotlib.
    """
    json_path = Path(json_path)
    benches, matplotlib = read(json_path), require("matplotlib", "bench")
    folder = Path(out) if out is not None else json_path.parent
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    with matplotlib.rc_context(SETTINGS):
        for name, draw in PICTURES.items():
            if (figure := draw(benches)) is not None:
                written += [_save(figure, folder / f"{json_path.stem}-{name}.{kind}") for kind in ("png", "svg")]
    return written


def _save(figure, path: Path) -> Path:
    # the same numbers make the same file: no date, no version
    metadata = {"Date": None, "Creator": None} if path.suffix == ".svg" else {"Software": None}
    with atomic_file(path) as beside:
        figure.savefig(beside, dpi=150, metadata=metadata)
    return path


def main(arguments: list[str] | None = None) -> None:
    """Draw the pictures and print their paths."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path, help="what `make bench` or bench/gpu.sh wrote")
    parser.add_argument("-o", "--out", type=Path, help="folder for the pictures; default: the file's")
    options = parser.parse_args(arguments)
    for path in write_pictures(options.file, options.out):
        print(path)


if __name__ == "__main__":
    main()
