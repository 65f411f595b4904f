"""Write a repository for the pip package `kernels` and the Hub: `python -m moe_runtime.native.hub
OUT` (docs/build.md).

A kernel is loaded from any folder under the id in its metadata, possibly several versions in one
process. A variant therefore holds the files of this package that its functions need, with relative
imports and torch.ops.<id> instead of torch.ops.moe_runtime:

    OUT/README.md
    OUT/build/torch-cuda/                                  Triton, any torch with CUDA; torch-cpu/
                                                           is the same without a GPU
    OUT/build/torch-stable-abi211-cu130-x86_64-linux/      with the CUDA library as well: --library
        __init__.py  metadata.json  ops/  kernels/  ...  moe_runtime/__init__.py (for versions of `kernels` that look there)
"""

import argparse
import ast
import base64
import hashlib
import json
import re
import shutil
import sys
from pathlib import Path

from moe_runtime.io.files import atomic_folder, check_out_dir
from moe_runtime.native.build import NAMES, SUFFIXES, csrc_dir

PACKAGE = Path(__file__).resolve().parents[1]
VERSION = 0  # of the API on the Hub; 0 is not yet stable
FUNCTIONS = {  # the public functions: name -> module
    "route": "ops.routing",
    "dispatch": "ops.dispatch",
    "grouped_gemm": "ops.grouped_gemm",
    "combine": "ops.combine",
    "moe_mlp": "ops.moe_mlp",
    "merge_experts": "ops.merging",
    "merged_linear": "ops.merging",
    "lora_mlp": "ops.lora",
    "fused_cross_entropy": "ops.fusion",
}
# the library depends on neither, but a variant's name must state the oldest torch and the CUDA
# version
TORCH = "211"
CUDA = "cu130"
ARCHS = ("8.0", "8.6", "8.9", "9.0", "10.0+PTX", "12.0")
GLIBC = (2, 28)  # the newest that the Hub accepts
IMPORT = re.compile(r"^(\s*)from moe_runtime(\.[\w.]+)? import ", re.M)

CARD = """---
library_name: kernels
license: apache-2.0
tags: [kernel]
---

# moe_runtime

Kernels of Mixture-of-Experts layers: routing, dispatch, grouped matrix products with activations, combine, merging of
experts, LoRA experts on one base, cross-entropy of fused specialists. Forward and backward, deterministic.

```python
from kernels import get_kernel

moe = get_kernel("OWNER/moe-runtime", version={version})
weight, idx = moe.route(router_logits, 6)
out = moe.moe_mlp(x, gate_up_proj, down_proj, weight, idx)
```

Functions: {functions}.
"""

COMPATIBLE = '''"""The kernel, for versions of `kernels` that look for a folder of the repository's name."""

import importlib.util
import sys
from pathlib import Path

_path = Path(__file__).resolve().parents[1] / "__init__.py"
if "{id}" not in sys.modules:
    _spec = importlib.util.spec_from_file_location("{id}", _path)
    sys.modules["{id}"] = importlib.util.module_from_spec(_spec)
    _spec.loader.exec_module(sys.modules["{id}"])
_kernel = sys.modules["{id}"]
__all__ = _kernel.__all__
globals().update({{name: getattr(_kernel, name) for name in __all__}})
'''


def needed(functions: dict[str, str] = FUNCTIONS) -> dict[str, str]:
    """Return path -> text of the package's modules that `functions` import, directly or lazily."""
    found: dict[str, str] = {}
    waiting = sorted({module.replace(".", "/") + ".py" for module in functions.values()})
    while waiting:
        path = waiting.pop()
        if path in found:
            continue
        found[path] = (PACKAGE / path).read_text()
        for node in ast.walk(ast.parse(found[path])):
            if (
                isinstance(node, ast.ImportFrom)
                and (node.module or "").split(".")[0] == "moe_runtime"
            ):
                stem = "/".join(node.module.split(".")[1:])
                names = [f"{stem}/{alias.name}.py".lstrip("/") for alias in node.names]
                waiting += [name for name in [f"{stem}.py", *names] if (PACKAGE / name).is_file()]
    return dict(sorted(found.items()))


def relocated(path: str, text: str, unique: str) -> str:
    """Return a module's text with relative imports and its ops in torch.ops.<unique>."""
    dots = "." * (path.count("/") + 1)
    text = IMPORT.sub(
        lambda found: f"{found[1]}from {dots}{(found[2] or '').lstrip('.')} import ", text
    )
    text = text.replace("torch.ops.moe_runtime", f"torch.ops.{unique}").replace(
        '"moe_runtime::', f'"{unique}::'
    )
    return text.replace('Library("moe_runtime"', f'Library("{unique}"')


def glibc(library: Path) -> tuple[int, int]:
    """Return the oldest glibc version that provides all symbols of the library."""
    found = re.findall(rb"GLIBC_(\d+)\.(\d+)", library.read_bytes())
    return max(((int(major), int(minor)) for major, minor in found), default=(0, 0))


def write_variant(folder: Path, backend: str, library: Path | None = None) -> None:
    """Write one build variant for `backend`, "cuda" or "cpu"."""
    modules = needed()
    digest = hashlib.sha256(
        repr((backend, modules)).encode() + (library.read_bytes() if library else b"")
    )
    unique = f"_moe_runtime_{backend}_{digest.hexdigest()[:12]}"
    files = {path: relocated(path, text, unique) for path, text in modules.items()}
    lines = [f"from .{module} import {name}" for name, module in FUNCTIONS.items()]
    files["__init__.py"] = "\n".join([*lines, "", f"__all__ = {list(FUNCTIONS)!r}", ""])
    files["ops/__init__.py"] = ""
    files["native/cuda_table.json"] = (PACKAGE / "native/cuda_table.json").read_text()
    files["moe_runtime/__init__.py"] = COMPATIBLE.format(id=unique)
    for path, text in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    if library:
        (folder / "_lib").mkdir()
        shutil.copyfile(library, folder / "_lib" / NAMES["cuda"])
        (folder / "_csrc").mkdir()
        for source in csrc_dir("cuda").iterdir():
            if source.suffix in SUFFIXES["cuda"]:
                shutil.copyfile(source, folder / "_csrc" / source.name)
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    hashes = {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).digest()
        for path in paths
    }
    metadata = {
        "name": "moe-runtime",
        "id": unique,
        "version": VERSION,
        "license": "apache-2.0",
        "python-depends": [],
        "backend": {"type": backend} | ({"archs": list(ARCHS)} if backend == "cuda" else {}),
        "digest": {
            "algorithm": "sha256",
            "files": {name: base64.b64encode(value).decode() for name, value in hashes.items()},
        },
    }
    (folder / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n")


def write_repository(out: Path, library: Path | None = None, overwrite: bool = False) -> None:
    """Write the repository `out` atomically, with a variant for the CUDA library `library` if
    given.

    Raises ValueError for a library that the Hub would reject, and for a folder that is not empty.
    """
    check_out_dir(out, overwrite, [library])
    if library is not None and glibc(library) > GLIBC:
        needs, most = (".".join(map(str, version)) for version in (glibc(library), GLIBC))
        raise ValueError(
            f"The library {library} needs glibc {needs}, but the Hub accepts {most} or older. "
            f"Link it with CXX='zig cc -target x86_64-linux-gnu.{most}'"
        )
    with atomic_folder(out, overwrite) as folder:
        for name, backend in (("torch-cuda", "cuda"), ("torch-cpu", "cpu")):
            write_variant(folder / "build" / name, backend)
        if library is not None:
            write_variant(
                folder / "build" / f"torch-stable-abi{TORCH}-{CUDA}-x86_64-linux", "cuda", library
            )
        (folder / "README.md").write_text(
            CARD.format(version=VERSION, functions=", ".join(FUNCTIONS))
        )


def main(arguments: list[str] | None = None) -> int:
    """Write the repository and return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m moe_runtime.native.hub", description=__doc__.splitlines()[0]
    )
    parser.add_argument("out", type=Path, help="new folder for the repository")
    parser.add_argument(
        "--library", type=Path, help=f"{NAMES['cuda']} linked for glibc {'.'.join(map(str, GLIBC))}"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace an existing folder")
    options = parser.parse_args(arguments)
    try:
        write_repository(options.out, options.library, options.overwrite)
    except ValueError as error:
        print(f"error: {str(error).replace('overwrite=True', '--overwrite')}", file=sys.stderr)
        return 2
    except OSError as error:
        print(
            f"error: {error.filename or options.out} cannot be read or written ({error.strerror})",
            file=sys.stderr,
        )
        return 2
    print(
        f"{options.out}: "
        f"{', '.join(sorted(path.name for path in (options.out / 'build').iterdir()))}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
