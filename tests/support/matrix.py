"""`make test-matrix`: part of the suite with the oldest, the pinned and the newest versions.

python -m tests.support.matrix                # every cell, with each installed Python
python -m tests.support.matrix floors-3.11    # one cell

Each cell has an environment in .venv-matrix, which is deleted when its tests have passed. The
printed lines are those of the table in docs/dependencies.md.
"""

import importlib.metadata
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

from packaging.requirements import Requirement

from tests.support.captured import captured

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / ".venv-matrix"
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
VERSIONS = ("floors", "pinned", "newest")
SHOWN = ("torch", "triton", "transformers", "numpy")
# minutes on one core: the most telling tests of kernels, drop-in, saved formats, methods, data and
# commands
SELECTION = (
    "tests/test_config.py",
    "tests/kernels/test_interpreter.py",
    "tests/io",
    "tests/ops/test_library.py",
    "tests/ops/test_moe_layer.py",
    "tests/hf/dropin/test_layers.py",
    "tests/hf/models/test_modeling.py",
    "tests/methods/xft/test_xft.py",
    "tests/methods/esft/test_folders.py",
    "tests/methods/upit/test_mixtral.py",
    "tests/cli/test_app.py",
)


def floors() -> list[str]:
    """Return the oldest versions that pyproject.toml allows."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pins = []
    for text in project["dependencies"] + project["optional-dependencies"]["train"]:
        requirement = Requirement(text)
        for bound in requirement.specifier:
            if bound.operator == ">=":
                pins.append(f"{requirement.name}=={bound.version}")
    return pins


def run_cell(versions: str, version: str) -> bool:
    """Build an environment, run the tests in it and print a line; return whether all passed."""
    folder = FOLDER / f"{versions}-{version}"
    shutil.rmtree(folder, ignore_errors=True)
    subprocess.run([f"python{version}", "-m", "venv", folder], check=True)
    python = folder / "bin" / "python"
    constraints = ROOT / "constraints.txt"
    if versions != "pinned":
        constraints = folder / "constraints.txt"
        constraints.write_text("\n".join(floors()) if versions == "floors" else "")
    # torch is installed first and separately, so that the other packages keep its build
    pip = [python, "-m", "pip", "install", "-qq", "-c", constraints]
    for words in (["--upgrade", "pip>=23"], ["torch"], ["-e", f"{ROOT}[train,dev]"]):
        subprocess.run([*pip, *words], check=True)
    command = [python, "-m", "pytest", "-q", "-m", "not slow", *SELECTION]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    tests = captured(command, cwd=ROOT, env=env)
    site = [str(path) for path in folder.glob("lib/python*/site-packages")]
    found = {}
    for one in importlib.metadata.distributions(path=site):
        found[one.name] = one.version
    cells = [folder.name, version, *(found[name] for name in SHOWN)]
    cells.append(tests.stdout.strip().splitlines()[-1])
    print(f"| {' | '.join(cells)} |", flush=True)
    if tests.returncode == 0:
        shutil.rmtree(folder)
    return tests.returncode == 0


def main(names: list[str]) -> int:
    """Run the named cells, or all cells of the installed Pythons; return 1 if any test failed."""
    passed = True
    for version in PYTHONS:
        for versions in VERSIONS:
            is_named = f"{versions}-{version}" in names
            if is_named or (not names and shutil.which(f"python{version}")):
                passed = run_cell(versions, version) and passed
    return int(not passed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
