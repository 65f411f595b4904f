"""`python -m tests.support.notebooks [NAME ...]`: run the notebooks of docs/ and save their output
in them.
"""

import sys
import tempfile
from pathlib import Path

from tests.support.patience import PATIENCE

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "notebooks"


def execute(path: Path, folder: Path):
    """Run a notebook in a folder with a kernel of this Python, and return it with only stdout as
    outputs, and without metadata but its language.
    """
    import nbformat
    from nbclient import NotebookClient

    book = nbformat.read(path, as_version=4)
    NotebookClient(
        book, timeout=PATIENCE, kernel_name="python3", resources={"metadata": {"path": str(folder)}}
    ).execute()
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    book.metadata = {"kernelspec": kernel, "language_info": {"name": "python"}}
    for cell in book.cells:
        cell.metadata = {}
        if cell.cell_type == "code":
            printed = "".join(out.text for out in cell.outputs if out.get("name") == "stdout")
            if printed:
                cell.outputs = [
                    nbformat.v4.new_output(
                        "stream",
                        name="stdout",
                        text=printed,
                    )
                ]
            else:
                cell.outputs = []
    return book


if __name__ == "__main__":
    import nbformat

    for path in (
        path
        for path in sorted(FOLDER.glob("*.ipynb"))
        if not sys.argv[1:] or path.stem in sys.argv[1:]
    ):
        with tempfile.TemporaryDirectory() as folder:
            book = execute(path, Path(folder))
        path.write_text(nbformat.writes(book) + "\n")
        print(path)
