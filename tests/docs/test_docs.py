"""Every example in docs/ runs unchanged, on a tiny model in a folder `model` and a few lines in
`data.jsonl`.
"""

import json
import os
import sys
from pathlib import Path

import pytest
import torch

from tests.hf.dropin.test_layers import TOKENIZER, stock
from tests.support.captured import captured
from tests.support.fences import fences
from tests.support.patience import PATIENCE

ROOT = Path(__file__).resolve().parents[2]
DROP_IN = ROOT / "docs" / "drop-in.md"


PYTHON = [fence for fence in fences(DROP_IN) if fence.language == "python"]
FILES = {fence.options["file"]: fence for fence in fences(DROP_IN) if "file" in fence.options}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    stock().save_pretrained("model")
    TOKENIZER.save_pretrained("model")
    rows = [{"text": f"{i} and {j} make {i + j}"} for i in range(4) for j in range(4)]
    Path("data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def script(text: str, folder: Path, *launcher: str) -> str:
    """Run Python text as a separate script."""
    path = folder / "example.py"
    path.write_text(text)
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = os.environ | {
        "PYTHONPATH": os.pathsep.join(paths),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    command = [sys.executable, *launcher, str(path)]
    done = captured(command, cwd=folder, env=env, timeout=PATIENCE)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


@pytest.mark.parametrize(
    "block", [block for block in PYTHON if not block.options], ids=lambda block: block.place
)
def test_examples_run(block, folder):
    names: dict = {"__name__": "__main__"}
    exec(compile(block.text, str(DROP_IN), "exec"), names)
    before = stock().state_dict()
    changed = set()
    for name, weight in names.get("merged", names["model"]).state_dict().items():
        if not torch.equal(weight.cpu(), before[name]):
            changed.add(name)
    trains = ".train()\n" in block.text or "optimizer.step()" in block.text
    assert changed == (set(before) if trains else set())


@pytest.mark.slow
def test_the_accelerate_script_on_two_processes(folder):
    options = "--cpu --num_processes 2 --num_machines 1 --mixed_precision no --dynamo_backend no"
    launcher = ["-m", "accelerate.commands.launch", *options.split()]
    script(FILES["train.py"].text, folder, *launcher)
    from transformers import AutoModelForCausalLM

    tuned = AutoModelForCausalLM.from_pretrained("tuned").state_dict()
    before = AutoModelForCausalLM.from_pretrained("model").state_dict()
    assert tuned.keys() == before.keys()
    for name, weight in before.items():
        assert not torch.equal(tuned[name], weight)
