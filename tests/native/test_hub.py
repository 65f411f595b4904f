"""The repository for the pip package `kernels`: its layout, its metadata, and that it runs where
moe_runtime is not.
"""

import base64
import hashlib
import importlib.metadata
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from moe_runtime.native import build, hub
from tests.support.cuda_build import CSRC

SITE = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
ABI = "torch-stable-abi211-cu130-x86_64-linux"


def library(path: Path, newest: str = "GLIBC_2.28") -> Path:
    """What `build_hub` looks at in a library: the names of glibc's versions."""
    path.write_bytes(f"\x7fELF\0GLIBC_2.2.5\0GLIBC_2.3\0{newest}\0".encode())
    return path


@pytest.fixture(scope="module")
def repository(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("hub")
    assert hub.main([str(folder / "repo"), "--library", str(library(folder / "lib.so"))]) == 0
    return folder / "repo"


def test_layout(repository):
    """README.md and build/<variant>/__init__.py, with a folder of the repository's name
    beside it.
    """
    assert {path.name for path in repository.iterdir()} == {"README.md", "build"}
    assert {path.name for path in (repository / "build").iterdir()} == {
        "torch-cuda",
        "torch-cpu",
        ABI,
    }
    for variant in (repository / "build").iterdir():
        assert {"__init__.py", "metadata.json", "moe_runtime"} <= {
            path.name for path in variant.iterdir()
        }
        assert (variant / "moe_runtime" / "__init__.py").is_file()
        assert not (variant / "kernels" / "__init__.py").exists()
    front = (repository / "README.md").read_text().split("---")[1]
    assert "library_name: kernels" in front and "license: apache-2.0" in front


def test_metadata(repository):
    found = {
        path.parent.name: json.loads(path.read_text())
        for path in repository.glob("build/*/metadata.json")
    }
    assert len(found) == 3 == len({metadata["id"] for metadata in found.values()})
    for name, metadata in found.items():
        keys = {"name", "id", "version", "license", "python-depends", "backend", "digest"}
        assert (
            metadata.keys() == keys
            and metadata["name"] == "moe-runtime"
            and metadata["python-depends"] == []
        )
        assert re.fullmatch("[a-z][-a-z0-9]*[a-z0-9]", metadata["name"])
        assert metadata["id"].isidentifier() and isinstance(metadata["version"], int)
        assert metadata["backend"]["type"] == ("cpu" if name == "torch-cpu" else "cuda")
    cuda = found["torch-cuda"]["backend"]["archs"]
    numbers = [arch.replace(".", "") for arch in cuda]
    assert "archs" not in found["torch-cpu"]["backend"] and ";".join(numbers) == build.ARCHS


def test_digest_is_of_every_file(repository):
    for variant in (repository / "build").iterdir():
        digest = json.loads((variant / "metadata.json").read_text())["digest"]
        files = {
            path.relative_to(variant).as_posix(): path
            for path in variant.rglob("*")
            if path.is_file()
        }
        files.pop("metadata.json")
        assert digest["algorithm"] == "sha256" and digest["files"].keys() == files.keys()
        for name, path in files.items():
            assert (
                base64.b64decode(digest["files"][name])
                == hashlib.sha256(path.read_bytes()).digest()
            )


def test_every_import_is_relative_and_nothing_of_ours_is_global(repository):
    """Several versions may be in one process, beside the installed package."""
    for path in repository.rglob("*.py"):
        text = path.read_text()
        assert not re.search(r"^\s*(from|import) moe_runtime", text, re.M), path
        assert (
            "torch.ops.moe_runtime" not in text
            and '"moe_runtime::' not in text
            and 'Library("moe_runtime"' not in text
        )
    unique = json.loads((repository / "build" / "torch-cpu" / "metadata.json").read_text())["id"]
    text = (repository / "build" / "torch-cpu" / "ops" / "library.py").read_text()
    assert f'Library("{unique}", "DEF")' in text and f'f"{unique}::{{name}}"' in text


def test_only_the_allowed_packages_are_imported(repository):
    imported = set()
    for path in (repository / "build" / "torch-cuda").rglob("*.py"):
        imported |= set(re.findall(r"^\s*(?:from|import) (\w+)", path.read_text(), re.M))
    # packaging: in diagnosis.py, which is not of a kernel's functions
    assert imported - sys.stdlib_module_names <= {"torch", "triton", "packaging"}


def test_the_library_is_in_its_variant_with_its_header(repository):
    variant = repository / "build" / ABI
    assert (variant / "_lib" / build.NAMES["cuda"]).read_bytes().startswith(b"\x7fELF")
    assert build.source_hash("cuda", variant / "_csrc") == build.source_hash("cuda", CSRC)
    assert not (repository / "build" / "torch-cuda" / "_lib").exists()


# as the pip package does: a module of the metadata's id, from a path that nobody else knows
LOAD = """
import importlib.util, json, sys
from pathlib import Path
import torch
def load(variant, file="__init__.py", name=None):
    name = name or json.loads((variant / "metadata.json").read_text())["id"]
    spec = importlib.util.spec_from_file_location(name, variant / file)
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
build = Path(sys.argv[1])
x, logits, w = torch.randn(5, 8), torch.randn(5, 7), torch.randn(8, 6, 8)
down, alpha = torch.randn(8, 8, 3), torch.rand(8, requires_grad=True)
found = []
for variant in ("torch-cpu", "torch-cuda"):
    moe = load(build / variant)
    weight, idx = moe.route(logits, 3)
    merged = moe.merge_experts(down, alpha)
    found.append([moe.moe_mlp(x, w, down, weight, idx), merged, *torch.autograd.grad(merged.sum(), alpha)])
assert all(torch.equal(a, b) for a, b in zip(*found))
assert torch.allclose(found[0][1], torch.einsum("e,eij->ij", alpha, down))
other = load(build / "torch-cuda", "moe_runtime/__init__.py", "_loaded_by_older_versions")
installed = [name for name in sys.modules if name.partition(".")[0] == "moe_runtime"]
print(other.moe_mlp is moe.moe_mlp and other.__all__ == moe.__all__, installed)
"""


def test_two_variants_run_side_by_side_without_the_package(repository, tmp_path):
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(SITE), "PYTHONDONTWRITEBYTECODE": "1"}
    env.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-S", "-c", LOAD, repository / "build"]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.stdout.strip() == "True []", done.stderr


# in a process of its own, as the pip package has the name of our folder
CHECK = """
import os, sys
from pathlib import Path
import kernels, torch
from kernels import get_kernel, get_local_kernel
from kernels._rust import Digest, Metadata
from kernels.validate import AllValidator, ArchValidator, DependencyValidator, DirtyValidator, MinverValidator
from kernels.variants import parse_variant
repository = Path(sys.argv[1])
for variant in sorted((repository / "build").iterdir()):
    assert parse_variant(variant.name).variant_str == variant.name
    metadata = Metadata.read_from_file(variant / "metadata.json")
    metadata.digest.validate(Digest.hash_variant(metadata.digest.algorithm, variant))
    validators = [DependencyValidator(), DirtyValidator(), MinverValidator()]
    validators += [ArchValidator()] if torch.cuda.is_available() or variant.name == "torch-cpu" else []
    AllValidator(validators).validate_metadata(metadata=metadata, variant=variant.name)
os.environ["LOCAL_KERNELS"] = f"owner/moe-runtime={repository}"
logits = torch.randn(5, 7)
found = [moe.route(logits, 3) for moe in (get_local_kernel(repository), get_kernel("owner/moe-runtime", version=0))]
assert all(torch.equal(a, b) for a, b in zip(*found)), found
print([name for name in sys.modules if name.partition(".")[0] == "moe_runtime"])
"""


@pytest.mark.slow
def test_the_pip_package_accepts_and_loads_it(repository, tmp_path):
    """Its own checks of every variant: name, metadata, digest, dependencies; and both of its
    loaders.
    """
    try:
        found = Path(importlib.metadata.distribution("kernels").locate_file(""))
    except importlib.metadata.PackageNotFoundError:
        pytest.skip(
            "the pip package kernels is not installed; the tests above check the same rules"
        )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([*SITE, str(found)]), "HF_HUB_OFFLINE": "1"}
    env.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-S", "-c", CHECK, repository]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr


def test_ids_follow_the_contents(tmp_path, monkeypatch):
    def id_of(name):
        hub.write_variant(tmp_path / name, "cuda")
        return json.loads((tmp_path / name / "metadata.json").read_text())["id"]

    first = id_of("a")
    modules = hub.needed()
    assert id_of("b") == first
    monkeypatch.setattr(hub, "needed", lambda: modules | {"config.py": modules["config.py"] + "\n"})
    assert id_of("c") != first


@pytest.mark.parametrize(
    "newest, says",
    [
        pytest.param(
            "GLIBC_2.34",
            r"needs glibc 2\.34, but the Hub accepts 2\.28 or older.*zig cc",
            id="too new",
        ),
        pytest.param(None, "lib.so cannot be read", id="missing"),
    ],
)
def test_a_library_that_the_hub_would_not_take(tmp_path, capsys, newest, says):
    path = library(tmp_path / "lib.so", newest) if newest else tmp_path / "lib.so"
    assert hub.main([str(tmp_path / "out"), "--library", str(path)]) == 2
    assert re.search(says, capsys.readouterr().err) and not (tmp_path / "out").exists()
