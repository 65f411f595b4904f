"""Names in docstrings, messages and pages exist: every dotted name of ours can be imported."""

import ast
import functools
import importlib
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("moe_runtime", "papers", "kernels", "bench")
ROOMS = "backends|native|io|ops|modules|hf|methods|tools|cli"
METHODS = "lora|xft|esft|upit|ultrafuser"  # as their users import them
WORDS = f"moe_runtime|papers|{ROOMS}|{METHODS}"
NAME = re.compile(rf"(?<![\w./@{{-])(?:{WORDS})(?:\.[A-Za-z_]\w*)+(?![\w/(-]*[/-])")
# files, torch ops, the format of recorded routing, and kernels
OTHERS = re.compile(
    r"\.(py|md|yaml|json|so|csv|jsonl|safetensors|png)$|^moe_runtime\.(moe_mlp|route|routing)$|^lora\.(_|training$)"
)


def texts() -> Iterator[tuple[str, str]]:
    """Yield each file's texts that may contain a name."""
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    yield f"{path.relative_to(ROOT)}:{node.lineno}", node.value
    for path in [*sorted((ROOT / "docs").rglob("*.md")), ROOT / "README.md"]:
        yield str(path.relative_to(ROOT)), path.read_text()


@functools.cache
def exists(name: str) -> bool:
    """Return whether a dotted name is a module, or an attribute of one."""
    first = name.split(".")[0]
    if first in ROOMS.split("|"):
        name = f"moe_runtime.{name}"
    elif first in METHODS.split("|"):
        name = f"moe_runtime.methods.{name}"
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        try:
            value = importlib.import_module(".".join(parts[:count]))
        except ModuleNotFoundError:
            continue
        except ImportError:
            return True  # of an optional package
        for part in parts[count:]:
            if not hasattr(value, part) and part not in getattr(value, "__annotations__", {}):
                return False
            value = getattr(value, part, None)
        return True
    return False


def test_dotted_names_can_be_imported():
    missing = []
    for where, text in texts():
        for match in NAME.finditer(text):
            name = match[0]
            if not OTHERS.search(name) and not exists(name):
                missing.append(f"{where}: {name}")
    assert not missing, "\n".join(missing)
