"""`make test-matrix`: a telling part of the suite with the oldest, the pinned and the newest
versions, on each Python.

python -m tests.support.matrix                        # what has no result yet, one cell at a time,
                                                      then the page's table
python -m tests.support.matrix floors-3.11 --again    # that cell once more, in a new environment
python -m tests.support.matrix --list                 # the cells, and what is known of each

Each cell has an environment of its own in .venv-matrix, which goes when its tests have passed;
results stay there as json, so a run that was stopped goes on. A cell whose interpreter or wheels
are not to be had says so, in the table too.
"""

import argparse
import datetime
import json
import os
import re
import shutil
import subprocess
import sys
import time
import tomllib
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import Requirement

from moe_runtime.io.files import atomic_write_json, atomic_write_text

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / ".venv-matrix"
PAGE = ROOT / "docs" / "dependencies.md"
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
SHOWN = ("torch", "triton", "transformers", "numpy")
HEAD = ("cell", "Python", *SHOWN, "passed", "skipped", "failed", "run on")
# of the dev extra, what the tests below do without
UNUSED = ("build", "mkdocs-material", "pre-commit", "ruff")
# minutes on one core: kernels in the interpreter and compiled, the drop-in, saved forms, methods,
# data, command line, of each the most telling tests
SELECTION = (
    "tests/test_config.py",
    "tests/kernels/test_interpreter.py",
    "tests/io/test_checkpoint.py",
    "tests/io/test_checkpoint_refusals.py",
    "tests/io/test_files.py",
    "tests/io/test_rows.py",
    "tests/ops/test_library.py",
    "tests/ops/test_moe_layer.py::test_is_the_two_halves",
    "tests/ops/test_every_op.py::test_compiles_without_a_graph_break",
    "tests/hf/dropin/test_layers.py::test_trainers_come_to_eagers_losses_and_weights",
    "tests/hf/dropin/test_layers.py::test_generate_takes_any_number_of_tokens",
    "tests/hf/models/test_modeling.py::test_sharded",
    "tests/hf/models/test_modeling.py::test_in_a_fresh_process",
    "tests/hf/models/test_modeling.py::test_trainer_trains_saves_and_resumes",
    "tests/methods/xft/test_xft.py::test_receipt_measures_equality_for_every_family",
    "tests/methods/xft/test_xft.py::test_merged_folder_is_a_stock_model",
    "tests/methods/esft/test_folders.py::test_every_family_in_its_saved_form",
    "tests/hf/models/test_stock.py::test_a_stock_model_computes_the_same",
    "tests/cli/test_app.py::test_the_way_of_folders",
)
DESELECTED = "not memory_limit and not killed"


@dataclass(frozen=True)
class Cell:
    """One environment: a Python, and which versions: the floors, the pinned ones, the newest or
    newest but for `pins`.
    """

    name: str
    python: str
    versions: str
    pins: tuple[str, ...] = ()


CELLS = [
    Cell("floors-3.11", "3.11", "floors"),
    Cell("newest-3.13", "3.13", "newest"),
    *(Cell(f"pinned-{python}", python, "pinned") for python in PYTHONS),
    Cell("floors-3.12", "3.12", "floors"),
    Cell("floors-3.13", "3.13", "floors"),
    Cell("newest-3.11", "3.11", "newest"),
    Cell("newest-3.14", "3.14", "newest"),
    Cell("torch-2.12", "3.11", "newest", ("torch==2.12.1", "triton==3.7.1")),
    Cell("torch-2.14", "3.12", "newest", ("torch==2.14.1", "triton==3.8.0")),
]


def requirements(python: str, *extras: str) -> list[Requirement]:
    """Return what pyproject.toml asks for on that Python, of the package and of extras."""
    values = _project()
    texts = [
        *values["dependencies"],
        *(line for extra in extras for line in values["optional-dependencies"][extra]),
    ]
    found = [Requirement(text) for text in texts]
    environment = {"python_version": python, "platform_system": "Linux"}
    items = []
    for r in found:
        if r.name not in UNUSED and (r.marker is None or r.marker.evaluate(environment)):
            items.append(r)
    return items


def floors(python: str) -> list[str]:
    """Return the oldest version that pyproject.toml allows users, of what it gives one for."""
    lowest = []
    for requirement in requirements(python, "train"):
        lowest += [
            f"{requirement.name}=={s.version}" for s in requirement.specifier if s.operator == ">="
        ]
    return lowest


def _project() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def interpreter(python: str) -> str | None:
    """Return a Python of that version: of the path, or of pyenv, whose shims are there
    without it.
    """
    places = (
        Path(
            os.environ.get(
                "PYENV_ROOT",
                Path.home() / ".pyenv",
            )
        )
        / "versions"
    )
    candidates = [
        shutil.which(f"python{python}"),
        *sorted(places.glob(f"{python}.*/bin/python{python}"), reverse=True),
    ]
    check = "import sys, venv, ensurepip; sys.exit('%d.%d' % sys.version_info[:2] != sys.argv[1])"
    for path in filter(None, candidates):
        if (
            subprocess.run(
                [path, "-c", check, python],
                capture_output=True,
            ).returncode
            == 0
        ):
            return str(path)
    return None


def build(cell: Cell, place: Path) -> str | None:
    """Make the cell's environment; return what was in the way, or None."""
    python = interpreter(cell.python)
    if python is None:
        return f"no Python {cell.python} on the machine"
    shutil.rmtree(place, ignore_errors=True)
    place.parent.mkdir(exist_ok=True)
    made = subprocess.run(
        [python, "-m", "venv", str(place)],
        capture_output=True,
        text=True,
    )
    if made.returncode:
        return f"no environment: {_last_line(made.stdout + made.stderr)}"
    constraints = place / "constraints.txt"
    pins = {"floors": floors(cell.python), "newest": []}
    constraints.write_text("\n".join([*pins.get(cell.versions, []), *cell.pins]) + "\n")
    given = ROOT / "constraints.txt" if cell.versions == "pinned" else constraints
    wanted = []
    for r in requirements(cell.python, "train", "dev"):
        wanted.append(f"{r.name}{r.specifier}")
    pip = [
        place / "bin" / "python",
        "-m",
        "pip",
        "install",
        "--disable-pip-version-check",
        "-c",
        given,
    ]
    # torch alone and first: what follows then keeps the build that is installed; an old pip needs
    # minutes to choose the rest
    for names in (["--upgrade", "pip>=23"], ["torch"], wanted):
        done = subprocess.run(
            [*map(str, pip), *names],
            capture_output=True,
            text=True,
        )
        if done.returncode:
            (FOLDER / f"{cell.name}.log").write_text(done.stdout + done.stderr)
            return f"pip: {_last_line(done.stderr)}"
    return None


def run_tests(place: Path, report: Path, selection: list[str]) -> dict:
    """Run the selection in that environment, and return its counts and what failed."""
    python = place / "bin" / "python"
    env = os.environ | {
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "PYTHONPYCACHEPREFIX": str(place / "pycache"),
    }
    command = [
        python,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        f"--junitxml={report}",
        "-k",
        DESELECTED,
    ]
    with report.with_suffix(".log").open("w") as log:
        code = subprocess.run(
            [*map(str, command), *selection], env=env, cwd=ROOT, stdout=log, stderr=log
        ).returncode
    if not report.is_file():
        return {
            "problem": (
                f"pytest ended with {code}: {_last_line(report.with_suffix('.log').read_text())}"
            )
        }
    cases = list(ElementTree.parse(report).iter("testcase"))
    report.unlink()
    bad = []
    for case in cases:
        if case.find("failure") is not None or case.find("error") is not None:
            bad.append(case)
    skipped = sum(case.find("skipped") is not None for case in cases)
    return {
        "passed": len(cases) - len(bad) - skipped,
        "skipped": skipped,
        "failed": len(bad),
        "failures": [f"{case.get('classname')}::{case.get('name')}" for case in bad],
    }


def run_cell(cell: Cell, *, again: bool, keep: bool, selection: list[str]) -> dict:
    """Build the cell's environment, from scratch if `again`, run the tests in it and keep the
    result.
    """
    place = FOLDER / cell.name
    start = time.monotonic()
    result = {
        "python": cell.python,
        "date": datetime.date.today().isoformat(),
    }
    ready = place / "ready"
    if again:
        ready.unlink(missing_ok=True)
    if not ready.is_file():
        if problem := build(cell, place):
            result |= {"problem": problem}
        else:
            ready.touch()
    if "problem" not in result:
        result |= {"versions": _versions(place)} | run_tests(
            place, FOLDER / f"{cell.name}.xml", selection
        )
    result["seconds"] = round(time.monotonic() - start)
    if selection == list(SELECTION):
        atomic_write_json(FOLDER / f"{cell.name}.json", result)
    if not keep and result.get("failed") == 0:
        shutil.rmtree(place)
    return result


def _versions(place: Path) -> dict[str, str]:
    code = (
        "import importlib.metadata as m, json, sys; print(json.dumps({n: m.version(n) for n in "
        "sys.argv[1:]}))"
    )
    found = subprocess.run(
        [
            place / "bin" / "python",
            "-c",
            code,
            *SHOWN,
        ],
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(found.stdout)


def _last_line(text: str) -> str:
    lines = []
    for line in text.splitlines():
        if line.strip() and not line.startswith(("WARNING", "[notice]")):
            lines.append(line)
    return lines[-1].strip()[:200] if lines else "nothing was said"


def results() -> dict[str, dict]:
    """Return what was run on this machine: {cell: result}."""
    values = {}
    for file in FOLDER.glob("*.json"):
        values[file.stem] = json.loads(file.read_text())
    return values


def row(cell: Cell, result: dict | None) -> str:
    """Return the cell's line of the table."""
    result = result or {"problem": "not run yet"}
    if "problem" in result:
        text = result["problem"].replace("|", "/")
        middle = ["", *[""] * (len(SHOWN) - 1), text, "", ""]
    else:
        versions = [result["versions"][name] for name in SHOWN]
        middle = [
            *versions,
            *(str(result[name]) for name in ("passed", "skipped", "failed")),
        ]
    return (
        "| "
        + " | ".join(
            [
                cell.name,
                cell.python,
                *middle,
                result.get("date", ""),
            ]
        )
        + " |"
    )


def table(known: dict[str, dict], text: str = "") -> str:
    """Return the table, with the lines of `text` for the cells that were not run on this
    machine.
    """
    lines = [f"| {' | '.join(HEAD)} |", f"|{'---|' * len(HEAD)}"]
    for cell in CELLS:
        old = re.search(
            rf"^\| {re.escape(cell.name)} \|.*$",
            text,
            re.MULTILINE,
        )
        lines.append(row(cell, known.get(cell.name)) if cell.name in known or not old else old[0])
    return "\n".join(lines) + "\n"


def write_page(known: dict[str, dict]) -> None:
    """Put the table into docs/dependencies.md; ValueError where the page has none."""
    text = PAGE.read_text()
    changed, count = re.subn(
        r"^\| cell \| Python \|.*\n(?:\|.*\n)+",
        lambda found: table(known, found[0]),
        text,
        flags=re.MULTILINE,
    )
    if count != 1:
        raise ValueError(f"{PAGE} has {count} tables of cells; want one")
    atomic_write_text(PAGE, changed)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.support.matrix", description=__doc__.splitlines()[0]
    )
    names = [cell.name for cell in CELLS]
    parser.add_argument(
        "cells", nargs="*", metavar="CELL", help=f"of {', '.join(names)}; all by default"
    )
    parser.add_argument(
        "--again",
        action="store_true",
        help="run cells that have a result once more, in a new environment",
    )
    parser.add_argument(
        "--keep", action="store_true", help="leave the environments of cells that passed"
    )
    parser.add_argument(
        "--list",
        action="store_true",
        help="print the table and run nothing",
    )
    parser.add_argument(
        "--tests",
        nargs="+",
        default=list(SELECTION),
        help="run these, whatever is known, and keep no result",
    )
    given = parser.parse_args()
    if unknown := set(given.cells) - set(names):
        parser.error(f"CELL is {', '.join(sorted(unknown))}; want of {', '.join(names)}")
    ran = []
    known = results()
    for cell in [] if given.list else CELLS:
        if given.cells and cell.name not in given.cells:
            continue
        # what was in the way, as a network that was down, may be gone
        has_result = "problem" not in known.get(cell.name, {"problem": ""})
        if has_result and not given.again and given.tests == list(SELECTION):
            continue
        print(f"{cell.name} ...", flush=True)
        ran.append(
            run_cell(
                cell,
                again=given.again,
                keep=given.keep,
                selection=given.tests,
            )
        )
        print(
            row(cell, ran[-1]),
            *ran[-1].get("failures", []),
            sep="\n  ",
            flush=True,
        )
    known = results()
    print(table(known))
    if not given.list and given.tests == list(SELECTION):
        write_page(known)
    return int(any(result.get("failed") or "problem" in result for result in ran))


if __name__ == "__main__":
    sys.exit(main())
