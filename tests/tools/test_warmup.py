"""`moe_runtime.warmup` compiles what a model launches, and reports a missing GPU; the message of a
first launch.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import moe_runtime
from moe_runtime import backends
from tests.support.captured import captured

pytest.importorskip("triton")
ROOT = Path(__file__).resolve().parents[2]


def run(command: list[str], cache: Path, *path: str) -> subprocess.CompletedProcess:
    """Run Python without the interpreter, with an empty Triton cache and with `path` before all
    packages.
    """
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    paths = os.pathsep.join([*path, str(ROOT), *filter(None, [env.get("PYTHONPATH")])])
    env |= {"TRITON_CACHE_DIR": str(cache), "PYTHONPATH": paths}
    done = captured([sys.executable, *command], env=env, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-3000:]
    return done


@pytest.mark.aot
@pytest.mark.parametrize(
    "case", ["stock model", pytest.param("layer with its router", marks=pytest.mark.slow)]
)
def test_a_model_launches_nothing_that_was_not_compiled(case, tmp_path):
    pytest.importorskip("transformers")
    done = run(["-m", "tests.support.warmed", case], tmp_path)
    result = json.loads(done.stdout.splitlines()[-1])
    variants, compiled, cached, failed = result["warmup"]
    assert compiled == variants > 5
    assert cached == 0
    assert failed == []
    assert result["missed"] == 0
    assert result["launched"] >= variants
    assert "compiled, 0 already cached, 0 failed in" in done.stdout


ADAPTED = """
import copy
from concurrent.futures import Future
from unittest import mock
import torch
from peft import LoraConfig, get_peft_model
from triton.runtime import driver
from triton.runtime.jit import KernelInterface
from moe_runtime.tools import warmup
from tests.support import warmed

class Compiler:
    "Compiles nothing, and fails for the first kernel."

    def __init__(self, threads):
        self.count = 0

    __enter__ = lambda self: self
    __exit__ = lambda *_: None

    def submit(self, compile):
        future = Future()
        self.count += 1
        if self.count == 1:
            future.set_exception(RuntimeError("no registers"))
        else:
            future.set_result(None)
        return future

launch = KernelInterface.__getitem__
model, _ = warmed.CASES["stock model"]()
with mock.patch.object(warmup, "ThreadPoolExecutor", Compiler):
    frozen = warmup.warmup(model.requires_grad_(False), 24, backward=True, arch=90)
    stacks = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    model = get_peft_model(model, LoraConfig(r=4, target_parameters=stacks))
    adapted = warmup.warmup(model, [1, 24], backward=True, arch=90)
    layer, _ = warmed.CASES["layer with its router"]()
    forward = warmup.warmup(layer, 24, arch=90)
    trained = warmup.warmup(layer, 24, backward=True, arch=90)
    layers = torch.nn.ModuleList([layer, copy.deepcopy(layer).float()])
    both = warmup.warmup(layers, 24, arch=90)
assert forward.variants < min(trained.variants, both.variants)
assert KernelInterface.__getitem__ is launch and driver._active is None
print(frozen.variants, adapted.variants, adapted.compiled, *adapted.failed)
"""


def test_adapters_and_frozen_experts_are_compiled_and_failures_are_reported(tmp_path):
    pytest.importorskip("peft")
    done = run(["-c", ADAPTED], tmp_path)
    frozen, adapted, compiled, why = done.stdout.splitlines()[-1].split(maxsplit=3)
    assert int(adapted) > int(frozen) > 3
    assert int(compiled) == int(adapted) - 1
    assert why == "RuntimeError: no registers"
    assert "cannot run" not in done.stdout


def test_without_a_gpu_there_is_nothing_to_compile(monkeypatch, capsys):
    monkeypatch.setattr(backends, "interpreted", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert moe_runtime.warmup(torch.nn.Linear(2, 2)) == (0, 0, 0, ())
    assert (
        capsys.readouterr().out
        == "moe_runtime.warmup: nothing to compile: torch.cuda.is_available() is False\n"
    )


@pytest.mark.parametrize(
    "tokens, says",
    [
        (0, "tokens must be at least 1, but got \\[0\\]"),
        (8, "No layer of Linear runs on moe_runtime. Call moe_runtime.patch"),
    ],
)
def test_what_cannot_be_warmed_up(tokens, says, monkeypatch):
    monkeypatch.setattr(backends, "interpreted", lambda: False)
    with pytest.raises(ValueError, match=says):
        moe_runtime.warmup(torch.nn.Linear(2, 2), tokens, arch=90)


# two kernels compile, as in their first launches
FIRST = """
import torch, triton
from moe_runtime.tools import warmup
from moe_runtime.kernels import compiling, dispatch, tiles
from triton.runtime import driver

compiling.SECONDS = 0.0
driver.set_active(warmup.Driver(90))
for dtype in (torch.int32, torch.int64):
    idx, out = torch.zeros(64, dtype=dtype), torch.zeros(64, dtype=torch.int32)
    kernel = dispatch._dispatch_fwd_count_kernel
    kernel.warmup(idx, out, 64, 4, 1, BLOCK_S=128, BLOCK_E=32, grid=(1,))
print(triton.__version__)
"""


def versions() -> list:
    """The installed Triton, and other versions next to it."""
    others = sorted((Path(sys.prefix) / "triton").glob("*.*"))
    return ["", *(pytest.param(str(other), marks=pytest.mark.slow) for other in others)]


@pytest.mark.aot
@pytest.mark.parametrize("path", versions(), ids=lambda path: Path(path).name or "installed")
def test_a_line_tells_that_first_launches_compile(path, tmp_path):
    """It appears once per process, on stderr, and not for cached kernels."""
    first, second = (run(["-c", FIRST], tmp_path, *filter(None, [path])) for _ in range(2))
    assert first.stdout.strip() == (Path(path).name or first.stdout.strip())
    assert first.stderr.count("moe_runtime.warmup(model)") == 1
    assert "moe_runtime.warmup" not in second.stderr
