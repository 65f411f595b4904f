"""The messages in docs/troubleshooting.md are the ones that users get: each is provoked and
compared.
"""

import json
import os
import shlex
import shutil
import sys
import traceback

import pytest

import moe_runtime.kernels.tiles  # noqa: F401  interpreted or compiled, as the other kernels are
from moe_runtime.methods.xft.folders import upcycle_folder
from moe_runtime.native.library import cuda
from tests.hf.dropin.test_layers import TOKENIZER, stock
from tests.hf.tiny import dense
from tests.support.captured import captured
from tests.support.fences import ROOT, Fence, fences, run_cli
from tests.support.patience import PATIENCE

PAGE = ROOT / "docs" / "troubleshooting.md"
CONSOLE = [fence for fence in fences(PAGE) if fence.language == "console"]
PYCON = [fence for fence in fences(PAGE) if fence.language == "pycon"]
place = {"ids": lambda fence: f"line-{fence.line}"}


class Missing:
    """Import hook that makes a module look as if it were not installed."""

    def __init__(self, name: str):
        self.name = name

    def find_spec(self, name, path=None, target=None):
        if name == self.name:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Inputs of the failures: a dense, a stock and an upcycled model, and folders that are
    truncated, incomplete or pickled.
    """
    folder = tmp_path_factory.mktemp("troubles")
    base = folder / "base"
    dense("llama").save_pretrained(base)
    stock().save_pretrained(folder / "qwen3-moe")
    for name in ("base", "qwen3-moe"):
        TOKENIZER.save_pretrained(folder / name)
    upcycle_folder(
        base,
        folder / "moe",
        num_experts=4,
        top_k=2,
    )
    for name in ("broken", "pickled", "half", "coded"):
        (folder / name).mkdir()
        shutil.copy(base / "config.json", folder / name)
    coded = {
        "model_type": "coded",
        "auto_map": {"AutoConfig": "configuration.Config"},
    }
    (folder / "coded" / "config.json").write_text(json.dumps(coded))
    weights = (base / "model.safetensors").read_bytes()
    (folder / "broken" / "model.safetensors").write_bytes(weights[:4000])
    (folder / "pickled" / "pytorch_model.bin").touch()
    index = '{"weight_map": {"lm_head.weight": "model-00001-of-00002.safetensors"}}'
    (folder / "half" / "model.safetensors.index.json").write_text(index)
    (folder / "rows.jsonl").write_text('{"text": "3 and 4 make 7"}\n' * 4)
    (folder / "odd.jsonl").write_text('{"question": "a", "reply": "b"}\n')
    return folder


@pytest.fixture
def folder(models, tmp_path, monkeypatch):
    shutil.copytree(models, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    for name in ("MOE_RUNTIME_BACKEND", "TRITON_INTERPRET", "MOE_RUNTIME_DEBUG"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def make(words: list[str], folder) -> str:
    """Run the Makefile with a missing .venv; return the line that it fails with before it installs
    anything.
    """
    command = [
        *words,
        f"VENV={folder}/venv",
        "--no-print-directory",
        "-C",
        str(ROOT),
    ]
    env = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    done = captured(command, env=env, timeout=PATIENCE)
    assert done.returncode != 0
    assert not (folder / "venv").exists()
    return done.stderr.splitlines()[0]


@pytest.mark.parametrize("fence", CONSOLE, **place)
def test_commands_end_as_the_page_says(fence: Fence, folder, monkeypatch):
    command, *says = fence.text.splitlines()
    assert command.startswith("$ ")
    assert says
    words = shlex.split(command.removeprefix("$ "))
    if words[0] == "make":
        assert make(words, folder) == "\n".join(says)
        return
    if missing := fence.options.get("without"):
        monkeypatch.delitem(
            sys.modules,
            missing,
            raising=False,
        )
        monkeypatch.setattr(sys, "meta_path", [Missing(missing), *sys.meta_path])
    before = sorted(path.name for path in folder.iterdir())
    code, out, err = run_cli(words, monkeypatch)
    assert code == 1
    is_error = says[0].startswith("error:")
    printed = (err if is_error else out).replace(str(folder.resolve()), "/home/me")
    assert printed.splitlines()[-len(says) :] == says
    assert sum(line.startswith("error:") for line in err.splitlines()) == is_error
    assert sorted(path.name for path in folder.iterdir()) == before, "it left files behind"


@pytest.mark.parametrize("fence", PYCON, **place)
def test_python_ends_as_the_page_says(fence: Fence, folder, monkeypatch):
    *lines, says = fence.text.splitlines()
    for line in lines:
        assert line.startswith(">>> ")
    monkeypatch.setattr(cuda, "places", list)  # pretend that the library is not built
    cuda.use(None)
    names: dict = {}
    try:
        for line in lines[:-1]:
            exec(line.removeprefix(">>> "), names)
        with pytest.raises(Exception) as caught:
            exec(lines[-1].removeprefix(">>> "), names)
    finally:
        cuda.use(None)
    assert "".join(traceback.format_exception_only(caught.value)).strip() == says
