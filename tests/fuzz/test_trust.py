"""Restrictions on files: no pickle of more than tensors is loaded, a folder's code only runs on
request, and no network is needed.
"""

import ast
import json
import os
import pickle
import re
import shutil
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from moe_runtime.methods.xft.official import load_tensors
from papers.engine.tiny import train_tokenizer
from tests.fuzz.attempts import attempt
from tests.hf import tiny
from tests.support.captured import captured
from tests.support.patience import PATIENCE
from tests.support.pickled import Planted

pytestmark = pytest.mark.stress
ROOT = Path(__file__).resolve().parents[2]
# reads the index of torch.distributed.checkpoint, restricted to the classes that it consists of
RESTRICTED = "moe_runtime/hf/training/checkpoint_files.py"
UNSAFE = {
    "pickle",
    "cPickle",
    "_pickle",
    "dill",
    "cloudpickle",
    "joblib",
    "shelve",
    "marshal",
}
LOADERS = {
    "load",
    "load_all",
    "unsafe_load",
    "unsafe_load_all",
    "full_load",
    "full_load_all",
}


def name_of(node: ast.expr) -> str:
    """Return a dotted name, or an empty string for any other expression."""
    return ast.unparse(node) if isinstance(node, ast.Attribute | ast.Name) else ""


def unsafe(source: str) -> list[tuple[int, str]]:
    """List the lines of a source that could execute code from a file."""
    lines = []
    for node in ast.walk(ast.parse(source)):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        for name in names:
            if name.partition(".")[0] in UNSAFE:
                lines.append((node.lineno, name))
        if not isinstance(node, ast.Call):
            continue
        name = name_of(node.func)
        given = {word.arg: word.value for word in node.keywords}
        safe = (
            isinstance(given.get("weights_only"), ast.Constant)
            and given["weights_only"].value is True
        )
        if name == "torch.load" and not safe:
            lines.append((node.lineno, "torch.load without weights_only=True"))
        module, _, function = name.rpartition(".")
        if (module == "yaml" and function in LOADERS) or name in ("eval", "exec"):
            lines.append((node.lineno, name))
        if name in ("np.load", "numpy.load") and "allow_pickle" in given:
            lines.append((node.lineno, f"{name} with allow_pickle"))
        trusted = given.get("trust_remote_code")
        # these may prompt at the terminal
        asks = re.fullmatch(r"(Auto\w+|kind)\.from_(pretrained|config)", name)
        if (asks and trusted is None) or (
            isinstance(trusted, ast.Constant) and trusted.value is not False
        ):
            lines.append((node.lineno, "trust_remote_code"))
    return lines


def test_no_source_loads_what_may_run():
    files = [
        *(ROOT / "moe_runtime").rglob("*.py"),
        *(ROOT / "kernels").rglob("*.py"),
    ]
    bad = []
    allowed = []

    for path in files:
        for line, what in unsafe(path.read_text()):
            name = str(path.relative_to(ROOT))
            if (name, what) == (RESTRICTED, "pickle"):
                allowed.append(line)
            else:
                bad.append(f"{name}:{line}: {what}")

    assert len(files) > 100
    assert len(allowed) == 1
    assert not bad, "\n".join(bad)


@pytest.mark.parametrize("by", ["torch", "pickle"])
def test_a_pickle_that_would_run_is_refused(tmp_path, by):
    touched = tmp_path / "touched"
    file = tmp_path / "pytorch_model.bin"
    value = {"a": torch.zeros(2), "b": Planted(touched)}
    torch.save(value, file) if by == "torch" else file.write_bytes(pickle.dumps(value))

    assert not attempt(lambda: load_tensors(file), file.name).is_read
    assert not touched.exists()
    torch.load(file, weights_only=False) if by == "torch" else pickle.loads(file.read_bytes())
    assert touched.exists()  # the payload works


EVIL = "import pathlib\npathlib.Path({touched!r}).touch()\n" + "raise ValueError('ran')\n"
# every verb that reads a model folder
VERBS = (
    "xft upcycle {model} {out} --num-experts 4 --top-k 2",
    "xft to-mergeable {model} {out}",
    "xft merge {model} {out}",
    "xft export {model} {out}",
    "xft export {model} {out} --to official",
    "xft import-official {model} {out}",
    "train --model {model} --data {data} --output_dir {out} --max_steps 1",
    "stats {model} --data {data} --out {out}",
    "papers run {recipe} --out {out}",
    "esft score {model} --data {data} --out {out}.json",
    "esft train {model} --config {selection} --data {data} --out {out} --steps 1",
    "esft apply {model} {model}",
    "esft merge {model} {model} {out}",
    "lora convert {model} {model} {out}",
    "lora export {model} {model} {out} --to merged",
    "upit grow {model} {model} --base {model} --count 3 --out {out}",
    "upit init-routers {model} {model} --data {data} --out {out}",
    "upit assemble {model} {model} --out {out}",
    "upit export {model} {out}",
    "ultrafuser fuse {model} {model} --name a --name b --out {out}",
    "ultrafuser generate {model} --prompt a",
    "papers eval {model} --tasks arithmetic --limit 1 --max-new-tokens 1 --out {out}",
    "tune --model {model} --out {out}",
)
# TRL itself loads this one
TEMPLATE = (
    "train --model {plain} --data {data} --output_dir {out} --max_steps 1 --chat_template_path "
    "{model}"
)
STEPS = {"steps": 1, "learning_rate": 1e-3, "batch_size": 1}


def evil_folder(folder: Path, touched: Path, model_type: str) -> None:
    """Write a model whose config.json, tokenizer, processor and generation config ask for the
    folder's own code.
    """
    tiny.dense("llama").save_pretrained(folder)
    (folder / "custom_generate").mkdir()
    for name in (
        "modeling_evil",
        "configuration_evil",
        "tokenization_evil",
        "processing_evil",
        "modeling_moe_runtime",
        "custom_generate/generate",
    ):
        (folder / f"{name}.py").write_text(EVIL.format(touched=str(touched)))
    for name in ("processor_config", "preprocessor_config"):
        kinds = ("AutoProcessor", "AutoImageProcessor", "AutoFeatureExtractor")
        values = {
            "auto_map": dict.fromkeys(kinds, "processing_evil.Evil"),
            "processor_class": "Evil",
        }
        (folder / f"{name}.json").write_text(json.dumps(values))
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


# in one process, as imports take seconds: each verb runs without network, at a terminal where the
# answer to every prompt is yes
RUN = """
import io, json, os, socket, sys
attempts = []
def refuse(self, address):
    attempts.append(str(address))
    raise OSError(101, "Network is unreachable")
socket.socket.connect = socket.socket.connect_ex = refuse
socket.getaddrinfo = lambda *a, **k: refuse(None, a[:2])
from moe_runtime import cli
from tests.support.cli import program_of
report = []
sys.report, commands = sys.argv[1], json.loads(sys.argv[2])
for command in commands:
    found = len(attempts)
    program, arguments = program_of(command)
    sys.argv = [program.argv0, *arguments]
    code, error, sys.stderr = 0, "", io.StringIO()
    try:
        cli.main(program.commands)
    except SystemExit as stop:
        code = stop.code
    except BaseException as fault:
        code, error = -1, f"{type(fault).__name__}: {fault}"
    said, sys.stderr = sys.stderr.getvalue(), sys.__stderr__
    tried = attempts[found:]
    one = {"command": command[:3], "code": code, "error": error, "said": said, "network": tried}
    report.append(one)
open(sys.report, "w").write(json.dumps(report))
"""


def run_verbs(commands: list[list[str]], folder: Path) -> list[dict]:
    """Run command lines in one process without network; return the exit code, uncaught error,
    stderr and attempted connections of each.
    """
    report = folder / "report.json"
    keyboard, terminal = os.openpty()
    os.write(keyboard, b"y\n" * 300)
    env = dict(os.environ)
    env.pop("HF_HUB_OFFLINE", None)
    env.pop("TRITON_INTERPRET", None)
    env |= {
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "HF_HOME": str(folder / "hf"),
        "CUDA_VISIBLE_DEVICES": "",
    }
    done = captured(
        [sys.executable, "-c", RUN, report, json.dumps(commands)],
        env=env,
        cwd=folder,
        stdin=terminal,
        timeout=PATIENCE,
    )
    os.close(keyboard)
    os.close(terminal)
    assert report.is_file(), done.stderr[-3000:]
    assert "Traceback" not in done.stderr, done.stderr[-3000:]
    return json.loads(report.read_text())


def pickled(folder: Path) -> None:
    """Save the weights as a pickle."""
    torch.save(
        load_file(folder / "model.safetensors"),
        folder / "pytorch_model.bin",
    )
    (folder / "model.safetensors").unlink()


TYPES = ("evil", "llama", "t5")  # transformers knows t5, but not as a causal language model
BROKEN = {
    "negative": {"hidden_size": -1},
    "nan": {"hidden_size": float("nan")},
    "act": {"hidden_act": "no\nsuch"},
    "block": {
        "model_type": "moe_runtime_llama",
        "architectures": [],
        "moe_runtime": {"stage": "moe"},
    },
}
WEIGHTS = {"pickled": pickled}
# a typical workflow, in which each verb reads the output of an earlier one
WORKFLOW = (
    "xft upcycle {model} {folder}/moe --num-experts 4 --top-k 2",
    "stats {folder}/moe --data {data} --out {folder}/stats",
    "xft to-mergeable {folder}/moe {folder}/mergeable",
    "xft merge {folder}/mergeable {folder}/dense",
)


@pytest.fixture(scope="module")
def ran(tmp_path_factory) -> tuple[Path, dict[str, list[dict]]]:
    """Run all verbs on folders with code or damage in them, and the workflow on a plain one; return
    the folder and the outcome of each.
    """
    folder = tmp_path_factory.mktemp("verbs")
    data = folder / "rows.jsonl"
    plain = folder / "plain"
    commands = {}
    data.write_text('{"prompt": "a", "completion": "b"}\n' * 4)
    (folder / "selection.json").write_text(json.dumps({"experts": {"0": [0]}}))
    tokenizer = train_tokenizer(["a b"], 300)
    tiny.dense("llama", vocab_size=300).save_pretrained(plain)
    tokenizer.save_pretrained(plain)
    for kind in (*TYPES, *BROKEN, *WEIGHTS):
        if kind in TYPES:
            evil_folder(folder / kind, folder / "touched", kind)
        else:
            shutil.copytree(plain, folder / kind)
        if kind in BROKEN:
            values = json.loads((plain / "config.json").read_text()) | BROKEN[kind]
            (folder / kind / "config.json").write_text(json.dumps(values))
        elif kind in WEIGHTS:
            WEIGHTS[kind](folder / kind)
        recipe = {
            "method": "xft",
            "base_model": str(folder / kind),
            "experts": {"num_experts": 4, "top_k": 2},
        }
        recipe |= {"data": {"train": str(data), "held_out_rows": 1}} | dict.fromkeys(
            ("sft", "tune", "mix"), STEPS
        )
        (folder / f"{kind}.yaml").write_text(json.dumps(recipe))  # which is YAML as well
        names = {
            "model": folder / kind,
            "data": data,
            "recipe": folder / f"{kind}.yaml",
            "selection": folder / "selection.json",
        }
        commands[kind] = [
            verb.format(
                out=folder / f"{kind}{i}",
                **names,
            )
            for i, verb in enumerate(VERBS)
        ]
        commands[kind] += [
            TEMPLATE.format(
                plain=plain,
                out=folder / f"{kind}-template",
                **names,
            )
        ] * (kind in TYPES)
    commands["plain"] = [
        verb.format(
            model=plain,
            data=data,
            folder=folder,
        )
        for verb in WORKFLOW
    ]
    report = iter(
        run_verbs(
            [one.split() for kind in commands for one in commands[kind]],
            folder,
        )
    )
    return folder, {kind: [next(report) for _ in commands[kind]] for kind in commands}


@pytest.mark.parametrize("kind", [*TYPES, *BROKEN, *WEIGHTS])
def test_no_verb_runs_the_code_of_a_folder_or_reads_a_broken_one(ran, kind):
    folder, report = ran
    assert not (folder / "touched").exists()
    for one in report[kind]:
        lines = one["said"].splitlines()
        refused = (
            one["code"] == 1
            and lines
            and [line for line in lines if line.startswith("error: ")] == lines[-1:]
        )
        # for "llama" only the tokenizer asks for code; `grow` never evaluates the activation
        assert refused or (one["code"] == 0 and kind in ("llama", "act")), one


def test_no_network_is_needed(ran):
    _, report = ran
    assert [one["code"] for one in report["plain"]] == [0] * len(WORKFLOW), report["plain"]
    assert not [one for kind in report for one in report[kind] if one["network"]]
