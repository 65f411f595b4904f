"""docs/dependencies.md says of every dependency what the metadata says, and which versions were run."""

import importlib.metadata
import re
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from moe_runtime.tools import doctor
from tests.support import matrix

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "dependencies.md").read_text()
PERMISSIVE = {
    "0BSD", "Apache-2.0", "BSD-2-Clause", "BSD-3-Clause", "BSL-1.0", "CC0-1.0", "CNRI-Python", "ISC", "LLVM-exception", "MIT",
    "MIT-CMU", "MPL-2.0", "PSF-2.0", "Zlib",
}  # fmt: skip
# what packages write that have no SPDX expression, without "license"
WRITTEN = {
    "apache": "Apache-2.0", "apache 2.0": "Apache-2.0", "apache software": "Apache-2.0", "bsd": "BSD-3-Clause",
    "bsd 3-clause": "BSD-3-Clause", "isc": "ISC", "isc (iscl)": "ISC", "python software foundation": "PSF-2.0",
}  # fmt: skip


def tables() -> dict[str, list[str]]:
    """The first table: {package: cells}."""
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in re.findall(r"^\|.*\|$", PAGE, re.MULTILINE)
    ]
    end = next(i for i, row in enumerate(rows) if row[0] == "cell")
    return {row[0]: row for row in rows[2:end]}


def licences(name: str) -> set[str]:
    """SPDX words of an installed package: of its expression, or of its short texts and classifiers, those that are known."""
    metadata = importlib.metadata.metadata(name)
    classifiers = [text for text in metadata.get_all("Classifier") or [] if text.startswith("License")]
    texts = [metadata.get("License") or "", *(text.split(" :: ")[-1] for text in classifiers)]
    expression = metadata.get("License-Expression")
    words = set()
    for text in [expression] if expression else texts:
        plain = re.sub(r" ?license", "", text.lower())
        words |= {WRITTEN[plain]} if plain in WRITTEN else set(re.findall(r"[\w.-]+", text)) - {"AND", "OR", "WITH"}
    return words if expression else words & PERMISSIVE or words


def closure() -> set[str]:
    """Names of all that the package and its extras for users bring along, as it is installed here."""
    found: set[str] = set()
    extras = {"extra": ""}
    todo = [requirement for requirement in matrix.requirements("3.11", "train", "plot")]
    while todo:
        requirement = todo.pop()
        name = canonicalize_name(requirement.name)
        if name in found or name.startswith(
            ("nvidia-", "cuda-")
        ):  # NVIDIA's own licence; torch's CUDA builds bring them
            continue
        found.add(name)
        wanted = [Requirement(text) for text in importlib.metadata.distribution(name).requires or []]
        of_extras = [{"extra": extra} for extra in requirement.extras] or [extras]
        todo += [r for r in wanted if r.marker is None or any(r.marker.evaluate(each) for each in of_extras)]
    return found


def test_the_table_names_what_pyproject_does():
    names = [canonicalize_name(r.name) for r in matrix.requirements("3.11", "train", "plot")]
    assert list(tables()) == names


def test_ranges_name_the_floors():
    rows = tables()
    for python in matrix.PYTHONS:
        for requirement in matrix.requirements(python, "train", "plot"):
            bounds = [s.version for s in requirement.specifier]
            cell = rows[canonicalize_name(requirement.name)][2]
            assert all(re.search(rf"\b{re.escape(bound)}\b", cell) for bound in bounds), requirement
            assert bounds or not re.search(r"\bfrom \d", cell), requirement


@pytest.mark.parametrize("name", sorted(closure()))
def test_every_licence_is_permissive(name):
    assert licences(name) and licences(name) <= PERMISSIVE, licences(name)


def test_the_table_s_licences_are_the_installed_packages_():
    for name, row in tables().items():
        assert licences(name) & set(re.findall(r"[\w.-]+\w", row[3])), (name, licences(name), row[3])


def test_the_matrix_has_a_line_for_each_cell_that_is_what_ran():
    lines = re.findall(r"^\| ((?:floors|pinned|newest|torch)-[\d.]+) \| ([\d.]+) \|(.*)\|$", PAGE, re.MULTILINE)
    assert [line[:2] for line in lines] == [(cell.name, cell.python) for cell in matrix.CELLS]
    assert {cell.python for cell in matrix.CELLS} == set(matrix.PYTHONS)
    rows = [[cell.strip() for cell in rest.split("|")] for _, _, rest in lines]
    assert any(cells[0] for cells in rows), "no cell has run; make test-matrix"
    for cells in rows:
        if cells[0]:
            assert int(cells[4]) > 100 and int(cells[6]) == 0, "a cell with failures is mended, not published"
            assert re.fullmatch(r"20\d\d-\d\d-\d\d", cells[7])
        else:
            assert cells[4]  # says what was missing


@pytest.mark.parametrize("python", matrix.PYTHONS)
def test_floors_are_those_of_pyproject(python):
    floors = dict(pin.split("==") for pin in matrix.floors(python))
    assert {"torch", "triton", "transformers", "safetensors", "trl"} == set(floors)
    assert floors["trl"] == ("1.14" if python == "3.10" else "1.16")


def test_the_doctor_wants_what_pyproject_does():
    wanted = {r.name: r.specifier for r in matrix.requirements("3.11") if r.name in doctor.SUPPORTED}
    assert wanted == {name: SpecifierSet(spec) for name, spec in doctor.SUPPORTED.items()}


def test_lines_of_cells_that_were_not_run_here_stay():
    cell = matrix.CELLS[1]
    result = {
        "versions": dict.fromkeys(matrix.SHOWN, "1.0"),
        "passed": 7,
        "skipped": 1,
        "failed": 0,
        "date": "2030-01-01",
    }
    first = matrix.table({cell.name: result})
    assert f"| {cell.name} | {cell.python} | 1.0 | 1.0 | 1.0 | 1.0 | 7 | 1 | 0 | 2030-01-01 |" in first
    other = matrix.CELLS[0]
    second = matrix.table({other.name: {"problem": "pip: no | wheel", "date": "2030-01-02"}}, first)
    assert "| 7 | 1 | 0 | 2030-01-01 |" in second and "pip: no / wheel" in second
    assert len(second.splitlines()) == 2 + len(matrix.CELLS)
    assert matrix.table({}, second) == second


def test_a_python_that_is_not_there_is_said(tmp_path, monkeypatch):
    monkeypatch.setattr(matrix, "FOLDER", tmp_path)
    result = matrix.run_cell(
        matrix.Cell("floors-2.6", "2.6", "floors"), again=False, keep=False, selection=list(matrix.SELECTION)
    )
    assert result["problem"] == "no Python 2.6 on the machine"
    assert matrix.results()["floors-2.6"] == result
