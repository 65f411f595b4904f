"""The distributed package: how it is built, its contents, and what importing it does."""

import ast
import importlib.util
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

import moe_runtime
from tests.support.captured import captured
from tests.support.cuda_build import cubins, needs_nvcc

ROOT = Path(__file__).resolve().parents[1]
SITE = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
IGNORED = shutil.ignore_patterns(
    "__pycache__",
    "build",
    "dist",
    "*.egg-info",
    "runs",
    ".*",
)
WHEEL_BUDGET = 838_000  # bytes
CUDA_WHEEL_BUDGET = 3_000_000

LINKED = ("bench", "kernels")  # folders at the root that the package reaches through symlinks
SOURCES = (".cu", ".cuh", ".h")

# a build backend's hooks, called like pip calls them
BUILD = (
    "import os, sys; from setuptools import build_meta; print(getattr(build_meta, "
    "sys.argv[1])(sys.argv[2]))"
)


def run(*args, cwd: Path, path=(), check: bool = True, **env: str) -> subprocess.CompletedProcess:
    """Run a Python that can import only its standard library, `path` and `cwd`."""
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, path)),
        "PYTHONDONTWRITEBYTECODE": "1",
        **env,
    }
    done = captured([sys.executable, "-S", *map(str, args)], cwd=cwd, env=env)
    assert not check or done.returncode == 0, done.stdout + done.stderr
    return done


def python_files(root: Path) -> set[str]:
    """List the package's modules under `root` as a wheel names them, including kernels/ and
    bench/.
    """
    names = {path.relative_to(root).as_posix() for path in (root / "moe_runtime").rglob("*.py")}
    for folder in LINKED:
        for path in (root / folder).rglob("*.py"):
            names.add(f"moe_runtime/{path.relative_to(root).as_posix()}")
    return names


def git(*words: str) -> str:
    """Run git in the checkout; return its output."""
    done = captured(["git", *words], cwd=ROOT, check=True)
    return done.stdout


def is_source(path: Path) -> bool:
    """Whether a file of csrc/ is shipped."""
    return path.suffix in SOURCES or path.match("cpu/*.cpp")


def data_files(root: Path) -> set[str]:
    """List the other files of a wheel: tables, configs, and the sources of the compiled
    libraries.
    """
    files = {"moe_runtime/py.typed", "moe_runtime/native/cuda_table.json"}
    files.add("moe_runtime/hf/training/fsdp2.yaml")
    for path in (root / "csrc").rglob("*"):
        if is_source(path):
            files.add(f"moe_runtime/_csrc/{path.relative_to(root / 'csrc')}")
    return files


def is_checkout() -> bool:
    return (ROOT / ".git").exists()


def versioned_files() -> list[Path]:
    """List the files under version control, and new ones that are not ignored."""
    names = git("ls-files", "-z", "--cached", "--others", "--exclude-standard").split("\0")
    return [ROOT / name for name in names if name and os.path.lexists(ROOT / name)]


def build(hook: str, out: Path, tree: Path, env: Path, **more):
    """Call a hook of the build backend, like pip."""
    return run(
        "-c",
        BUILD,
        hook,
        out,
        cwd=tree,
        path=[env],
        **more,
    )


def pip_install(*words) -> None:
    """Install a wheel without a network and without its dependencies."""
    command = [sys.executable, "-m", "pip", *words]
    subprocess.run([*command, "--quiet", "--no-deps", "--no-index"], check=True)


@pytest.fixture(scope="session")
def tree(tmp_path_factory) -> Path:
    """A copy of the files under version control, like a clean clone."""
    copy = tmp_path_factory.mktemp("tree") / "clone"
    if not is_checkout():
        return Path(shutil.copytree(ROOT, copy, symlinks=True, ignore=IGNORED))
    for source in versioned_files():
        target = copy / source.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source, target, follow_symlinks=False)
    return copy


@pytest.fixture(scope="session")
def build_env(tmp_path_factory) -> Path:
    """A folder with only setuptools, the one build requirement in pyproject.toml."""
    folder = tmp_path_factory.mktemp("build_env")
    site = Path(importlib.util.find_spec("setuptools").origin).parents[1]
    for path in itertools.chain(site.glob("setuptools*"), site.glob("_distutils_hack")):
        (folder / path.name).symlink_to(path)
    assert run("-c", "import torch", cwd=folder, path=[folder], check=False).returncode != 0
    return folder


@pytest.fixture(scope="session")
def sdist(tree, build_env, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("sdist")
    build("build_sdist", out, tree, build_env)
    return next(out.glob("*.tar.gz"))


def unpacked(sdist: Path, folder: Path) -> Path:
    """Unpack the sdist; return its folder."""
    shutil.unpack_archive(sdist, folder)
    return next(folder.glob("moe_runtime-*/"))


@pytest.fixture(scope="session")
def wheel(sdist, build_env, tmp_path_factory) -> Path:
    """The wheel as a user gets it, built from the sdist."""
    out = tmp_path_factory.mktemp("wheel")
    build("build_wheel", out, unpacked(sdist, out), build_env)
    return next(out.glob("*.whl"))


@pytest.fixture(scope="session")
def installed(wheel, tmp_path_factory) -> Path:
    """The wheel, installed by pip into its own folder."""
    target = tmp_path_factory.mktemp("installed")
    pip_install("install", "--target", target, wheel)
    return target


def test_package_list_is_the_tree():
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    packages = {"moe_runtime._csrc", *(f"moe_runtime.{name}" for name in LINKED)}
    for path in (ROOT / "moe_runtime").rglob("__init__.py"):
        packages.add(".".join(path.parent.relative_to(ROOT).parts))
    assert listed == sorted(packages)


@pytest.mark.parametrize("name", LINKED)
def test_linked_folders_are_symlinks_and_no_packages(name):
    link = ROOT / "moe_runtime" / name
    assert link.is_symlink()
    assert os.readlink(link) == f"../{name}"
    assert not (ROOT / name / "__init__.py").exists()
    if is_checkout():
        staged = git("ls-files", "--stage", f"moe_runtime/{name}")
        assert not staged or staged.startswith("120000")


def test_wheel_holds_the_package_and_no_more(wheel):
    assert wheel.name == f"moe_runtime-{moe_runtime.__version__}-py3-none-any.whl"
    assert wheel.stat().st_size < WHEEL_BUDGET
    files = set()
    info = set()
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            _, is_info, of_info = name.partition(".dist-info/")
            if is_info:
                info.add(of_info)
            else:
                files.add(name)
    assert files == python_files(ROOT) | data_files(ROOT)
    info -= {"", "METADATA", "RECORD", "WHEEL"}
    assert info == {"entry_points.txt", "licenses/LICENSE", "top_level.txt"}


def test_sdist_holds_sources_only(sdist):
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    expected = {"pyproject.toml", "setup.py", "LICENSE", "README.md", "papers/__main__.py"}
    expected |= {"csrc/moert.h", "papers/esft/recipes/tiny.yaml"}
    for path in (*(ROOT / "csrc").rglob("*"), *(ROOT / "papers").rglob("*.yaml")):
        if path.suffix in (*SOURCES, ".yaml"):
            expected.add(path.relative_to(ROOT).as_posix())
    assert expected <= names
    for name in names:
        assert not name.endswith((".so", ".o", ".pyc", ".cubin"))
        assert not name.startswith(("bench/results", "tests"))


def imported_by(path: Path) -> set[str]:
    """List the packages that a file imports."""
    names = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names.append(node.module)
    return {name.partition(".")[0] for name in names}


@pytest.mark.slow
def test_every_import_is_declared():
    text = (ROOT / "pyproject.toml").read_text()
    lists = re.findall(r"^(?:dependencies|train|plot|eval|bench) = \[(.*?)\]$", text, re.S | re.M)
    declared = re.findall(r"""["']([\w-]+)""", " ".join(lists))
    known = {name.replace("-", "_").lower() for name in declared} | sys.stdlib_module_names
    known |= {"moe_runtime", "yaml"}  # pyyaml
    known |= {"pydantic_core", "pyarrow"}  # pydantic and datasets pin them
    # bench/peers.py measures these if they are installed; the interpreter's fixes are for users who
    # have the tests
    known |= {"liger_kernel", "megablocks", "scattermoe", "sonicmoe", "tests"}
    for folder in ("moe_runtime", *LINKED):
        for path in (ROOT / folder).rglob("*.py"):
            assert imported_by(path) <= known, path


@pytest.mark.parametrize(
    "requested, home, says",
    [
        ("1", "nowhere", "CUDA_HOME is nowhere, which has no bin/nvcc"),
        ("90", "nowhere", "CUDA_HOME is nowhere"),
        # a GPU would be queried
        pytest.param("native", "", "architectures must be a list", marks=needs_nvcc),
    ],
)
def test_cuda_is_never_built_in_silence(tree, build_env, tmp_path, requested, home, says):
    done = build(
        "build_wheel",
        tmp_path,
        tree,
        build_env,
        check=False,
        MOE_RUNTIME_BUILD_CUDA=requested,
        CUDA_HOME=home,
    )
    assert done.returncode != 0
    assert not list(tmp_path.iterdir())
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith(f"MOE_RUNTIME_BUILD_CUDA is {requested!r}, but {says}")


@pytest.fixture(scope="session")
def cuda_wheel(sdist, build_env, tmp_path_factory) -> Path:
    """The wheel with the library, from the sdist, in an environment without torch and without a GPU
    to query.
    """
    out = tmp_path_factory.mktemp("cuda_wheel")
    build(
        "build_wheel",
        out,
        unpacked(sdist, out),
        build_env,
        MOE_RUNTIME_BUILD_CUDA="1",
        CUDA_VISIBLE_DEVICES="",
    )
    return next(out.glob("*.whl"))


def checksums(archive: zipfile.ZipFile) -> dict[str, int]:
    """Return the CRC of each file of a wheel, except its metadata."""
    files = {one.filename: one.CRC for one in archive.infolist()}
    return {name: crc for name, crc in files.items() if ".dist-info/" not in name}


@pytest.mark.slow
@needs_nvcc
def test_cuda_wheel_is_the_pure_one_and_the_library(cuda_wheel, wheel):
    stem = f"moe_runtime-{moe_runtime.__version__}"
    platform = re.fullmatch(re.escape(stem) + r"-py3-none-(linux_\w+)\.whl", cuda_wheel.name)[1]
    assert cuda_wheel.stat().st_size < CUDA_WHEEL_BUDGET
    with zipfile.ZipFile(wheel) as pure, zipfile.ZipFile(cuda_wheel) as archive:
        files = checksums(archive)
        assert files.pop("moe_runtime/_lib/libmoert_cuda.so")
        assert files == checksums(pure)
        metadata = f"{stem}.dist-info/METADATA"
        assert archive.read(metadata) == pure.read(metadata)
        text = archive.read(f"{stem}.dist-info/WHEEL").decode()
    assert f"Tag: py3-none-{platform}\n" in text
    assert "Root-Is-Purelib: false" in text


DESCRIBE = "from moe_runtime.native import library; print(library.cuda.describe())"


@pytest.mark.slow
@needs_nvcc
def test_cuda_wheel_has_every_architecture_and_is_found(cuda_wheel, tmp_path):
    pip_install("install", "--target", tmp_path, cuda_wheel)
    library = tmp_path / "moe_runtime" / "_lib" / "libmoert_cuda.so"
    machine, ptx = cubins(library)
    assert machine == ["80", "86", "89", "90", "100", "120"]
    assert ptx == ["100"]
    # takes precedence over a user's own library
    done = run("-c", DESCRIBE, cwd=tmp_path, path=[tmp_path, *SITE])
    assert done.stdout.startswith(f"{library}: nvcc ")


# finds every module, imports those that need only torch and triton, and prints the package's
# location
FIND = """
import importlib, importlib.util, sys
import moe_runtime
for name in sys.argv[1:]:
    if importlib.util.find_spec(name) is None:
        sys.exit(f"{name} is not there")
    if name.startswith("moe_runtime.kernels."):
        importlib.import_module(name)
print(moe_runtime.__file__)
"""


def modules(root: Path) -> list[str]:
    return sorted(
        name[:-3].replace("/__init__", "").replace("/", ".") for name in python_files(root)
    )


@pytest.mark.slow
def test_installed_wheel_imports(installed, tmp_path):
    done = run(
        "-c",
        FIND,
        *modules(ROOT),
        cwd=tmp_path,
        path=[installed, *SITE],
    )
    assert done.stdout.strip() == str(installed / "moe_runtime" / "__init__.py")


@pytest.mark.slow
def test_editable_install_imports(tree, build_env, tmp_path):
    build("build_editable", tmp_path, tree, build_env)
    venv.create(tmp_path / "venv", with_pip=False)
    python = tmp_path / "venv" / "bin" / "python"
    pip_install("--python", python, "install", next(tmp_path.glob("*.whl")))
    # torch and triton come from a .pth file: on PYTHONPATH, an editable install of this checkout
    # would come first
    site = next((tmp_path / "venv").glob("lib/python*/site-packages"))
    (site / "zz_torch.pth").write_text("\n".join(SITE))
    command = [python, "-c", FIND, *modules(ROOT)]
    done = captured(command, cwd=tmp_path)
    assert done.stdout.strip() == str(tree / "moe_runtime" / "__init__.py"), done.stderr


IMPORT = """
import sys
import moe_runtime
heavy = sorted({"torch", "transformers", "triton", "numpy"} & set(sys.modules))
print(heavy, sorted(set(moe_runtime.__all__) - set(dir(moe_runtime))))
"""


def test_import_is_light():
    """No torch, so no CUDA context either."""
    assert run("-c", IMPORT, cwd=ROOT, path=SITE).stdout.strip() == "[] []"


@pytest.mark.parametrize("name", moe_runtime.__all__)
def test_public_names_resolve(name):
    assert getattr(moe_runtime, name) is getattr(moe_runtime, name)


def test_public_functions_are_the_ops():
    for name in ("merge_experts", "mixing", "moe_mlp"):
        assert getattr(moe_runtime, name).__name__ == name


# each runs in a fork of a process that has imported only third-party packages, without transformers
REGISTERED = """
import json, os, sys, traceback
import huggingface_hub, numpy, regex, safetensors.torch, tokenizers, tqdm, yaml
import torch, torch._dynamo, torch.distributed

CHECK = '''
assert "transformers" in sys.modules
from transformers import AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
config = AutoConfig.for_model("moe_runtime_llama")
print(type(config).__name__, MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].__name__)
print([finder for finder in sys.meta_path if type(finder).__module__.startswith("moe_runtime")])
'''
for name, code in json.loads(sys.argv[1]).items():
    assert not {"moe_runtime", "transformers"} & set(sys.modules)
    if os.fork() == 0:
        with open(os.path.join(sys.argv[2], name), "w") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
            try:
                exec(code + CHECK, {"__name__": "__main__", "sys": sys})
            except BaseException:
                traceback.print_exc()
            sys.stdout.flush()
            os._exit(0)
    os.wait()
"""
IMPORTS = {
    "ours-first": "import moe_runtime; from transformers import AutoModelForCausalLM",
    "theirs-first": "from transformers import AutoModelForCausalLM; import moe_runtime",
    "theirs-without-auto-classes": "import transformers, moe_runtime; transformers.AutoConfig",
    # loads the auto classes while a file that our classes depend on is partly imported
    "model-file": "import moe_runtime; from transformers import LlamaForCausalLM",
    "our-own-file": "import moe_runtime.hf.models.modeling",
    "a-method": "from moe_runtime.methods import xft",
}


@pytest.fixture(scope="module")
def registered(tmp_path_factory) -> Path:
    """A folder with the output of a process for each order of imports, by name."""
    folder = tmp_path_factory.mktemp("registered")
    run(
        "-c",
        REGISTERED,
        json.dumps(IMPORTS),
        folder,
        cwd=ROOT,
        path=SITE,
    )
    return folder


def test_auto_config_knows_our_families():
    code = (
        "import moe_runtime; from transformers import AutoConfig; "
        "print(type(AutoConfig.for_model('moe_runtime_llama')).__name__)"
    )
    assert run("-c", code, cwd=ROOT, path=SITE).stdout.strip() == "MoeRuntimeLlamaConfig"


@pytest.mark.slow
@pytest.mark.parametrize("name", IMPORTS)
def test_auto_classes_know_ours(registered, name):
    lines = (registered / name).read_text().splitlines()
    assert lines == ["MoeRuntimeLlamaConfig MoeRuntimeLlamaForCausalLM", "[]"]
