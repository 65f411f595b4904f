"""What a file may not do: no pickle of more than tensors is loaded, no code of a folder runs unasked, no network is needed."""

import ast
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from moe_runtime.hf.models.tiny import train_tokenizer
from moe_runtime.methods.xft.official import load_tensors
from tests.fuzz.attempts import attempt
from tests.hf import tiny
from tests.support.stress import STRESS

pytestmark = pytest.mark.stress
ROOT = Path(__file__).resolve().parents[2]
UNSAFE = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
LOADERS = {"load", "load_all", "unsafe_load", "unsafe_load_all", "full_load", "full_load_all"}


def name_of(node: ast.expr) -> str:
    """Return a dotted name, empty for another expression."""
    return ast.unparse(node) if isinstance(node, ast.Attribute | ast.Name) else ""


def unsafe(source: str) -> list[tuple[int, str]]:
    """List the lines of a source that may run what a file says."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            found += [(node.lineno, name) for name in names if name.partition(".")[0] in UNSAFE]
        if not isinstance(node, ast.Call):
            continue
        name, given = name_of(node.func), {word.arg: word.value for word in node.keywords}
        safe = isinstance(given.get("weights_only"), ast.Constant) and given["weights_only"].value is True
        if name == "torch.load" and not safe:
            found.append((node.lineno, "torch.load without weights_only=True"))
        module, _, function = name.rpartition(".")
        if (module == "yaml" and function in LOADERS) or name in ("eval", "exec"):
            found.append((node.lineno, name))
        if name in ("np.load", "numpy.load") and "allow_pickle" in given:
            found.append((node.lineno, f"{name} with allow_pickle"))
        trusted = given.get("trust_remote_code")
        if isinstance(trusted, ast.Constant) and trusted.value is not False:
            found.append((node.lineno, "trust_remote_code"))
    return found


@pytest.mark.parametrize(
    "source",
    ["import pickle", "from dill import loads", "torch.load(f)", "torch.load(f, weights_only=False)", "yaml.load(f)",
     "exec(text)", "np.load(f, allow_pickle=True)", "A.from_pretrained(f, trust_remote_code=True)"],
)  # fmt: skip
def test_what_is_unsafe_is_seen(source):
    assert unsafe(source)


def test_no_source_loads_what_may_run():
    files = [*(ROOT / "moe_runtime").rglob("*.py"), *(ROOT / "kernels").rglob("*.py")]
    bad = [f"{path.relative_to(ROOT)}:{line}: {what}" for path in files for line, what in unsafe(path.read_text())]
    assert len(files) > 100 and not bad, "\n".join(bad)


class Touch:
    """Makes a file where it is unpickled."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("by", ["torch", "pickle"])
def test_a_pickle_that_would_run_is_refused(tmp_path, by):
    touched, file = tmp_path / "touched", tmp_path / "pytorch_model.bin"
    value = {"a": torch.zeros(2), "b": Touch(touched)}
    torch.save(value, file) if by == "torch" else file.write_bytes(pickle.dumps(value))
    assert not attempt(lambda: load_tensors(file), file.name).is_read
    assert not touched.exists()
    torch.load(file, weights_only=False) if by == "torch" else pickle.loads(file.read_bytes())
    assert touched.exists()  # the file is what it is said to be


EVIL = "import pathlib\npathlib.Path({touched!r}).touch()\n" + "raise ValueError('ran')\n"
VERBS = (
    "xft upcycle {model} {out} --num-experts 4 --top-k 2 --check", "xft to-mergeable {model} {out}", "xft merge {model} {out}",
    "upit export {model} {out}", "stats {model} --data {data} --out {out}",
    *["train --model {model} --data {data} --output_dir {out} --max_steps 1"] * STRESS, "xft import-official {model} {out}",
    "xft export {model} {out} --to official", "esft score {model} --data {data} --out {out}.json",
    "esft merge {model} {model} {out}", "upit assemble {model} {model} --out {out}",
    "ultrafuser fuse {model} {model} --name a --name b --out {out}",
)  # fmt: skip


def evil_folder(folder: Path, touched: Path, model_type: str) -> None:
    """Write a model whose config.json and tokenizer ask for the folder's own code."""
    tiny.dense("llama").save_pretrained(folder)
    for name in ("modeling_evil", "configuration_evil", "tokenization_evil", "modeling_moe_runtime"):
        (folder / f"{name}.py").write_text(EVIL.format(touched=str(touched)))
    values = json.loads((folder / "config.json").read_text())
    values |= {"model_type": model_type, "architectures": ["EvilForCausalLM"]}
    values["auto_map"] = {
        "AutoConfig": "configuration_evil.EvilConfig",
        "AutoModelForCausalLM": "modeling_evil.EvilForCausalLM",
    }
    (folder / "config.json").write_text(json.dumps(values))
    auto_map = {"AutoTokenizer": ["tokenization_evil.EvilTokenizer", None]}
    tokenizer = {"tokenizer_class": "EvilTokenizer", "auto_map": auto_map}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))


# in one process, as imports take seconds: each verb with the network refused, stdin closed
RUN = """
import json, os, socket, sys
attempts = []
def refuse(self, address):
    attempts.append(str(address))
    raise OSError(101, "Network is unreachable")
socket.socket.connect = socket.socket.connect_ex = refuse
socket.getaddrinfo = lambda *a, **k: refuse(None, a[:2])
from moe_runtime import cli
report = []
for command in json.loads(sys.argv[1]):
    found = len(attempts)
    sys.argv = ["moe-runtime", *command]
    code, error = 0, ""
    try:
        cli.main()
    except SystemExit as stop:
        code = stop.code
    except BaseException as fault:
        code, error = -1, f"{type(fault).__name__}: {fault}"
    report.append({"command": command[:2], "code": code, "error": error, "network": attempts[found:]})
os.write(3, json.dumps(report).encode())
"""


def run_verbs(commands: list[list[str]], folder: Path) -> list[dict]:
    """Run command lines in one process without network; return each one's exit code, naked error and connections tried."""
    read, write = os.pipe()
    env = {key: value for key, value in os.environ.items() if key not in ("HF_HUB_OFFLINE", "TRITON_INTERPRET")}
    env |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HOME": str(folder / "hf"), "CUDA_VISIBLE_DEVICES": ""}
    code = RUN.replace("os.write(3,", f"os.write({write},")
    done = subprocess.run(
        [sys.executable, "-c", code, json.dumps(commands)], capture_output=True, text=True, env=env, cwd=folder,
        stdin=subprocess.DEVNULL, timeout=280, pass_fds=(write,),
    )  # fmt: skip
    os.close(write)
    with os.fdopen(read) as pipe:
        text = pipe.read()
    assert text, done.stderr[-3000:]
    assert "Traceback" not in done.stderr, done.stderr[-3000:]
    return json.loads(text)


# what a user does, one verb on what the one before it wrote
WAY = (
    "xft upcycle {model} {folder}/moe --num-experts 4 --top-k 2 --check",
    "stats {folder}/moe --data {data} --out {folder}/stats",
    "xft to-mergeable {folder}/moe {folder}/mergeable",
    "xft merge {folder}/mergeable {folder}/dense",
)


@pytest.fixture(scope="module")
def ran(tmp_path_factory) -> tuple[Path, dict[str, list[dict]]]:
    """Run all verbs on two folders with code in them, and the way of a plain one; return where and what became of each."""
    folder = tmp_path_factory.mktemp("verbs")
    data, plain, commands = folder / "rows.jsonl", folder / "plain", {}
    data.write_text('{"prompt": "a", "completion": "b"}\n' * 4)
    for kind in ("evil", "llama"):
        evil_folder(folder / kind, folder / "touched", kind)
        names = {"model": folder / kind, "data": data}
        commands[kind] = [verb.format(out=folder / f"{kind}{i}", **names) for i, verb in enumerate(VERBS)]
    tokenizer = train_tokenizer(["a b"], 300)
    tiny.dense("llama", vocab_size=300).save_pretrained(plain)
    tokenizer.save_pretrained(plain)
    commands["plain"] = [verb.format(model=plain, data=data, folder=folder) for verb in WAY]
    report = iter(run_verbs([one.split() for kind in commands for one in commands[kind]], folder))
    return folder, {kind: [next(report) for _ in commands[kind]] for kind in commands}


@pytest.mark.slow
def test_no_verb_runs_the_code_of_a_folder(ran):
    folder, report = ran
    assert not (folder / "touched").exists()
    assert all(one["code"] == 1 for one in report["evil"]), report["evil"]
    assert not [one for one in (*report["evil"], *report["llama"]) if one["error"]]


def test_no_network_is_needed(ran):
    _, report = ran
    assert [one["code"] for one in report["plain"]] == [0] * len(WAY), report["plain"]
    assert not [one for kind in report for one in report[kind] if one["network"]]
