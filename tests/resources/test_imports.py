"""Cost and side effects of importing: every module of the package, in a fresh process, watched by
an audit hook.
"""

import json
import os
import sys
from pathlib import Path

import pytest

from tests.support.captured import captured

ROOT = Path(__file__).resolve().parents[2]
# an import reads files and compiles; it writes no files, starts no programs or threads, and does
# not use the network
WATCH = """
import json, os, signal, sys, threading, time, warnings

sys.dont_write_bytecode = True
done = []
WATCHED = {
    "subprocess.Popen", "os.posix_spawn", "os.exec", "os.fork",
    "socket.connect", "socket.getaddrinfo", "os.mkdir", "os.rename",
    "os.remove", "os.putenv", "os.unsetenv", "os.chdir", "shutil.rmtree", "tempfile.mkstemp",
}

def hook(event, arguments):
    if event == "open" and isinstance(arguments[1], str) and set(arguments[1]) & set("wax+"):
        done.append(f"open {arguments[0]} {arguments[1]}")
    elif event in WATCHED:
        done.append(f"{event} {str(arguments)[:200]}")

def state():
    found = {
        "environment": dict(os.environ), "folder": os.getcwd(), "threads": threading.active_count(),
        "tasks": len(os.listdir("/proc/self/task")),
        "hook": repr(sys.excepthook),
        "umask": os.umask(0o22),
        "signals": {n: repr(signal.getsignal(n)) for n in (signal.SIGINT, signal.SIGTERM)},
        "path": list(sys.path), "recursion": sys.getrecursionlimit(),
        "finders": [repr(sys.meta_path), repr(sys.path_hooks)],
    }
    os.umask(found["umask"])
    if "logging" in sys.modules:
        import logging
        root = logging.getLogger()
        found["logging"] = [repr(root.handlers), root.level, logging.root.manager.disable]
    if "transformers.trainer" in sys.modules:
        found["callbacks"] = repr(sys.modules["transformers.trainer"].DEFAULT_CALLBACKS)
    if "torch" in sys.modules:
        import torch
        found["torch"] = [
            str(torch.get_default_dtype()),
            torch.get_num_threads(),
            torch.get_num_interop_threads(),
            torch.is_grad_enabled(),
            torch.are_deterministic_algorithms_enabled(),
            torch.get_float32_matmul_precision(),
            torch.initial_seed(),
            int(torch.get_rng_state().sum()),
            torch.backends.cudnn.benchmark,
            torch.backends.cuda.matmul.allow_tf32,
            torch.is_autocast_enabled("cpu"), torch.utils.deterministic.fill_uninitialized_memory,
            torch.cuda.is_initialized(),
            str(torch.get_default_device()),
            torch._C._is_torch_function_enabled(),
        ]
    return found
"""


def child(code: str, **env) -> dict:
    """Run WATCH and `code` in a fresh process, where a warning is an error; return the JSON that it
    prints.
    """
    plain = {}
    for name, value in os.environ.items():
        if not name.startswith(("MOE_", "TRITON_", "PYTEST")):
            plain[name] = value
    done = captured(
        [sys.executable, "-c", WATCH + code],
        cwd=ROOT,
        env=plain | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | env,
    )
    assert done.returncode == 0 and done.stderr == "", done.stderr[-3000:]
    return json.loads(done.stdout)


LIGHT = """
warnings.simplefilter("error")
before, names = state(), set(sys.modules)
sys.addaudithook(hook)
start = time.process_time()
{code}
seconds = time.process_time() - start
after = state()
packages = {{name.partition(".")[0] for name in set(sys.modules) - names}}
brought = sorted(packages - set(sys.stdlib_module_names))
changed = [name for name in before if before[name] != after[name]]
print(json.dumps({{"done": done, "changed": changed, "seconds": seconds, "brought": brought}}))
"""


@pytest.mark.parametrize(
    "code, brought",
    [
        pytest.param("import moe_runtime", {"moe_runtime"}, id="package"),
        pytest.param(
            "import moe_runtime; moe_runtime.MoEConfig",
            {"moe_runtime"},
            id="config",
        ),
        pytest.param(
            "import moe_runtime.cli",
            {"moe_runtime", "typer", "annotated_doc", "shellingham"},
            id="command line",
        ),
        pytest.param(
            "import moe_runtime; dir(moe_runtime), moe_runtime.__version__",
            {"moe_runtime"},
            id="names",
        ),
    ],
)
def test_what_is_light(code, brought):
    """No torch, so neither its CUDA context nor its threads; measures CPU time, since a busy
    machine does not make an import slow.
    """
    result = child(LIGHT.format(code=code))
    assert result["done"] == []
    assert result["changed"] == []
    assert set(result["brought"]) <= brought
    assert result["seconds"] < 1


# transformers and torch write caches and start threads when they are imported; our modules are
# imported afterwards
ALL = """
import importlib, pathlib
import torch, transformers, transformers.models.llama.modeling_llama
import transformers.modeling_utils, transformers.trainer
import peft, accelerate, datasets, trl, triton, triton.language
from transformers import AutoModelForCausalLM, AutoTokenizer
torch.get_rng_state(), torch.get_num_interop_threads()
root = pathlib.Path("moe_runtime").resolve()
names = []
for path in [*root.rglob("*.py"), *(root / "kernels").glob("*.py")]:
    if path.stem != "__main__":
        parts = path.relative_to(root).with_suffix("").parts
        names.append(".".join(["moe_runtime", *(part for part in parts if part != "__init__")]))
names.sort()
before = state()
sys.addaudithook(hook)
for name in dict.fromkeys(names):
    importlib.import_module(name)
after = state()
changed = {}
for name in before:
    if before[name] != after[name]:
        changed[name] = [str(before[name])[:300], str(after[name])[:300]]
print(json.dumps({"done": done, "changed": changed, "modules": len(names)}))
"""


@pytest.mark.slow
def test_every_module_of_ours_changes_nothing():
    result = child(ALL, HF_HUB_OFFLINE="1")
    assert result["modules"] > 120
    assert result["done"] == []
    assert result["changed"] == {}


PUBLIC = """
import moe_runtime
for name in ("merge_experts", "mixing", "route", "moe_mlp", "MoE", "doctor"):
    getattr(moe_runtime, name)
heavy = {"transformers", "triton", "datasets", "accelerate", "matplotlib", "peft", "trl"}
print(json.dumps(sorted(heavy & set(sys.modules))))
"""


def test_the_layer_and_its_ops_bring_torch_alone():
    assert child(PUBLIC) == []


@pytest.mark.parametrize(
    "code, found",
    [
        pytest.param(
            "open(os.devnull, 'w').close()",
            "open /dev/null w",
            id="a file",
        ),
        pytest.param(
            "os.environ['A'] = 'b'",
            "os.putenv",
            id="the environment",
        ),
        pytest.param(
            "import subprocess; subprocess.run(['true'])", "subprocess.Popen", id="a program"
        ),
    ],
)
def test_the_watcher_sees(code, found):
    result = child(LIGHT.format(code=code))
    assert any(line.startswith(found) for line in result["done"])
