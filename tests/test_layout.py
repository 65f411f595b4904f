"""The house rules that a reader of the imports can check: which file may know which, and how long a file may be."""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[1]
# a file imports from its own rank and below
RANK = {
    "kernels": 0,
    "config": 1,
    "backends": 1,
    "build_cpu": 1,
    "build_cuda": 1,
    "cpp": 1,
    "build_hub": 1,
    "checkpoint": 1,
    "cuda": 1,
    "diagnosis": 1,
    "interruption": 1,
    "layer_sizes": 1,
    "native": 1,
    "progress": 1,
    "surroundings": 1,
    "terminal": 1,
    "files": 1,
    "timing": 1,
    "ops": 2,
    "modules": 3,
    "tuning": 3,
    "tuning_file": 1,
    "hf": 4,
    "data": 4,
    "prompts": 1,
    "standard_library": 1,
    "row_files": 1,
    "sampling": 4,
    "significance": 4,
    "stats": 4,
    "methods": 5,
    "studies": 6,
    "demo": 7,
    "cli_tune": 7,
    "cli_xft": 7,
    "cli_esft": 7,
    "cli_esft_scores": 7,
    "cli_esft_tables": 7,
    "cli_folders": 7,
    "cli_fuser": 7,
    "cli_upit": 7,
    "cli_upit_tables": 7,
    "cli_tables": 7,
    "cli_verbs": 7,
    "bench": 7,
    "cli_bench": 7,
    "cli_app": 7,
    "cli": 7,
}
# third-party package: who may import it
OWNERS = {
    "transformers": {"hf"},
    "accelerate": {"hf", "data", "demo", "cli"},
    "datasets": {"hf", "data", "demo", "cli"},
    "peft": {"hf", "data", "demo", "cli"},
    "tokenizers": {"hf", "data", "demo", "cli"},
    "trl": {"hf", "data", "demo", "cli"},
    "matplotlib": {"stats", "studies", "demo", "cli"},
    "scipy": {"significance"},
}
# not installed without an extra, so every module must import without them
EXTRAS = {"accelerate", "datasets", "matplotlib", "peft", "scipy", "trl"}
FACADE = ("moe_runtime/__init__.py", "moe_runtime.hf.models.modeling")  # the one import that the package itself makes
MAX_FILE, MAX_FUNCTION = 400, 80


class Import(NamedTuple):
    """One imported name; `level` counts its leading dots, and a `lazy` one stands inside a function."""

    name: str
    line: int
    level: int
    lazy: bool


def sources(root: Path, *folders: str) -> list[Path]:
    """List the Python files of `folders`; kernels/ and bench/ once, not a second time through their symlinks."""
    links = {root / "moe_runtime" / "kernels", root / "moe_runtime" / "bench"}
    paths = [path for folder in folders for path in sorted((root / folder).rglob("*.py"))]
    return [path for path in paths if links.isdisjoint(path.parents)]


def imports(node: ast.AST, lazy: bool = False) -> Iterator[Import]:
    """Walk all imports of a module, those inside functions too."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from (Import(alias.name, child.lineno, 0, lazy) for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            prefix = f"{child.module}." if child.module else ""
            yield from (Import(prefix + alias.name, child.lineno, child.level, lazy) for alias in child.names)
        else:
            yield from imports(child, lazy or isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)))


def layer_of(path: Path, root: Path) -> str:
    """Return the first word below the package: the file's layer."""
    parts = path.relative_to(root).with_suffix("").parts
    return "kernels" if parts[0] == "kernels" else parts[1]


def complaint(found: Import, layer: str) -> str | None:
    """Say what is wrong with an import in a file of `layer`; None if nothing is."""
    top, _, rest = found.name.partition(".")
    if found.level:
        return "is relative"
    if top == "kernels":
        return "is the pip package of that name; ours is moe_runtime.kernels"
    if top == "tests":
        return "is not shipped"
    if top == "bench":
        return "is the folder; its module is moe_runtime.bench"
    if top in OWNERS and layer not in OWNERS[top]:
        return f"belongs in {', '.join(sorted(OWNERS[top]))}"
    if top in EXTRAS and not found.lazy:
        return "is an extra: import it in the function that uses it"
    if top != "moe_runtime" or rest == "__version__":
        return None
    target = rest.partition(".")[0]
    if target not in RANK:
        return "goes through the package: name the module that defines it"
    if target == "bench" and (layer != "cli_bench" or not found.lazy):
        return "is what cli_bench imports, when it is asked for"
    if RANK[target] > RANK[layer] or (layer == "kernels" and target != "kernels"):
        return f"points up, from {layer} to {target}"
    return None


def bad_imports(root: Path) -> list[str]:
    """List what breaks the layering under `root`."""
    bad = []
    for path in sources(root, "kernels", "moe_runtime"):
        where, layer = path.relative_to(root).as_posix(), layer_of(path, root)
        found = list(imports(ast.parse(path.read_text())))
        if where == FACADE[0]:
            names = [i.name for i in found if i.name.startswith("moe_runtime") or i.name.partition(".")[0] in OWNERS]
            bad += [f"{where}: {name} is loaded with the package" for name in names if name != FACADE[1]]
        elif layer not in RANK:
            bad.append(f"{where}: has no layer; give it one in tests/test_layout.py")
        else:
            bad += [f"{where}:{i.line}: {i.name} {why}" for i in found if (why := complaint(i, layer)) is not None]
    return bad


def import_cycles(root: Path) -> list[str]:
    """List the modules of the package that reach themselves through module-level imports."""
    paths = {path.relative_to(root).with_suffix("").parts: path for path in sources(root, "kernels", "moe_runtime")}
    modules = {".".join(p if p[0] == "moe_runtime" else ("moe_runtime", *p)): path for p, path in paths.items()}
    needs = {}
    for name, path in modules.items():
        names = [i.name for i in imports(ast.parse(path.read_text())) if not i.lazy]
        # `from package import module` names the module, `from module import name` its parent
        needs[name] = {n if n in modules else n.rpartition(".")[0] for n in names} & modules.keys()
    while leaves := [name for name, needed in needs.items() if not needed & needs.keys()]:
        for name in leaves:
            del needs[name]
    return sorted(needs)


def long_places(root: Path) -> list[str]:
    """List files and functions that are longer than the house allows."""
    bad = []
    for path in [*sources(root, "kernels", "moe_runtime", "bench"), root / "setup.py"]:
        text, where = path.read_text(), path.relative_to(root).as_posix()
        if text.count("\n") > MAX_FILE:
            bad.append(f"{where}: {text.count(chr(10))} lines; want at most {MAX_FILE}")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                lines = node.end_lineno - node.lineno + 1
                if lines > MAX_FUNCTION:
                    bad.append(f"{where}:{node.lineno}: {node.name} has {lines} lines; want at most {MAX_FUNCTION}")
    return bad


def test_imports_point_down():
    assert bad_imports(ROOT) == []


def test_imports_have_no_cycles():
    assert import_cycles(ROOT) == []


def test_nothing_is_too_long():
    assert long_places(ROOT) == []


def test_test_folders_are_no_packages():
    # an __init__.py in kernels/ would hide the pip package; in the others it would ship or shadow names
    folders = ("bench", "csrc", "kernels", "tests")
    assert [path for folder in folders for path in (ROOT / folder).rglob("__init__.py")] == []


@pytest.mark.parametrize(
    "file, text, says",
    [
        pytest.param("moe_runtime/ops/x.py", "from moe_runtime.modules import moe", "points up", id="up"),
        pytest.param(
            "moe_runtime/ops/x.py", "def f():\n    import moe_runtime.hf.models.swap", "points up", id="up-lazily"
        ),
        pytest.param("kernels/x.py", "from moe_runtime.config import MoEConfig", "points up", id="kernel-knows-config"),
        pytest.param("moe_runtime/modules/x.py", "from ..ops import routing", "is relative", id="relative"),
        pytest.param("moe_runtime/ops/x.py", "from . import routing", "is relative", id="relative-package"),
        pytest.param("moe_runtime/ops/x.py", "from kernels import routing", "is the pip package", id="pip-kernels"),
        pytest.param("moe_runtime/methods/x.py", "import transformers.utils", "belongs in hf", id="transformers"),
        pytest.param(
            "moe_runtime/cli/__init__.py", "def f():\n    from transformers import AutoModel", "belongs in hf", id="cli"
        ),
        pytest.param("moe_runtime/hf/x.py", "from trl import SFTTrainer", "is an extra", id="extra-at-import"),
        pytest.param(
            "moe_runtime/hf/dropin/stats.py", "import matplotlib.pyplot as plt", "is an extra", id="plot-at-import"
        ),
        pytest.param("moe_runtime/ops/x.py", "from moe_runtime import route", "goes through", id="through-the-package"),
        pytest.param("moe_runtime/ops/x.py", "from tests.support import interp_fix", "is not shipped", id="tests"),
        pytest.param("moe_runtime/hf/dropin/stats.py", "import bench.report", "is the folder", id="bench-folder"),
        pytest.param(
            "moe_runtime/cli/__init__.py", "from moe_runtime.bench import report", "what cli_bench", id="bench"
        ),
        pytest.param("moe_runtime/cli/bench.py", "import moe_runtime.bench.report", "is asked for", id="bench-eagerly"),
        pytest.param("moe_runtime/utils.py", "", "has no layer", id="unknown-file"),
        pytest.param(
            "moe_runtime/__init__.py", "from moe_runtime.ops.routing import route", "with the package", id="eager"
        ),
        pytest.param("moe_runtime/__init__.py", "import transformers", "with the package", id="eager-transformers"),
    ],
)
def test_bad_imports_are_found(tmp_path, file, text, says):
    path = tmp_path / file
    path.parent.mkdir(parents=True)
    path.write_text(text + "\n")
    bad = bad_imports(tmp_path)
    assert len(bad) == 1 and says in bad[0] and bad[0].startswith(file)


def test_good_imports_pass(tmp_path):
    good = {
        "kernels/routing.py": "import triton\nfrom moe_runtime.kernels.tiles import BLOCK\n",
        "kernels/tiles.py": "BLOCK = 1\n",
        "moe_runtime/backends.py": "from moe_runtime.config import check\nimport os\n",
        "moe_runtime/config.py": "",
        "moe_runtime/ops/routing.py": "from moe_runtime import backends\nfrom moe_runtime.kernels import routing\n",
        "moe_runtime/hf/models/swap.py": "import transformers\nfrom moe_runtime.ops.routing import route\n",
        "moe_runtime/io/rows.py": "def read():\n    import datasets\n",
        "moe_runtime/cli/bench.py": "def f():\n    from moe_runtime.bench import report\n",
        "moe_runtime/cli/__init__.py": "from moe_runtime import __version__\ndef f():\n    import moe_runtime.methods.xft\n",
    }
    for file, text in good.items():
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(text)
    (tmp_path / "moe_runtime" / "kernels").symlink_to("../kernels")
    assert bad_imports(tmp_path) == [] and import_cycles(tmp_path) == []


def test_cycles_are_found(tmp_path):
    ops = tmp_path / "moe_runtime" / "ops"
    ops.mkdir(parents=True)
    (ops / "a.py").write_text("from moe_runtime.ops import b\n")
    (ops / "b.py").write_text("from moe_runtime.ops.a import f\n")
    (ops / "c.py").write_text("def f():\n    from moe_runtime.ops import c\n")
    assert import_cycles(tmp_path) == ["moe_runtime.ops.a", "moe_runtime.ops.b"]


def test_long_places_are_found(tmp_path):
    (tmp_path / "setup.py").write_text("def f():\n" + "    pass\n" * MAX_FUNCTION)
    (tmp_path / "moe_runtime").mkdir()
    (tmp_path / "moe_runtime" / "x.py").write_text("\n" * (MAX_FILE + 1))
    assert [line.partition(": ")[0] for line in long_places(tmp_path)] == ["moe_runtime/x.py", "setup.py:1"]


def undocumented(path: Path) -> Iterator[str]:
    """Public functions, methods and classes without a docstring; trainers' callbacks have transformers'."""

    def walk(body, of=""):
        for node in body:
            if not isinstance(node, ast.ClassDef | ast.FunctionDef) or node.name.startswith(("_", "on_")):
                continue
            setter = any(isinstance(mark, ast.Attribute) and mark.attr == "setter" for mark in node.decorator_list)
            if ast.get_docstring(node) is None and not setter:
                yield f"{path.relative_to(ROOT)}:{node.lineno} {of}{node.name}"
            if isinstance(node, ast.ClassDef):
                yield from walk(node.body, f"{node.name}.")

    yield from walk(ast.parse(path.read_text()).body)


def test_public_names_say_what_they_are():
    paths = sources(ROOT, "moe_runtime", "kernels")
    assert len(paths) > 200 and not [found for path in paths for found in undocumented(path)]
