"""The examples of docs/expert-parallel.md run unchanged with torchrun on two processes."""

import json
import os
import re
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.hf.dropin.test_layers import TOKENIZER, stock
from tests.support.dist_launch import torchrun

ROOT = Path(__file__).resolve().parents[3]
TEXT = (ROOT / "docs" / "expert-parallel.md").read_text()
RUN = str(ROOT / "tests" / "support" / "run_example.py")
EXAMPLES = dict(
    re.findall(
        r"```python file=(\S+)\n(.*?)```",
        TEXT,
        re.DOTALL,
    )
)


@pytest.mark.slow
@pytest.mark.parametrize("file", EXAMPLES)
def test_example(file, tmp_path):
    stock().save_pretrained(tmp_path / "model")
    TOKENIZER.save_pretrained(tmp_path / "model")
    rows = []
    for i in range(4):
        for j in range(4):
            rows.append({"text": f"{i} and {j} make {i + j}"})
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / file).write_text(EXAMPLES[file])
    paths = os.pathsep.join(
        [
            str(ROOT),
            *filter(None, [os.environ.get("PYTHONPATH")]),
        ]
    )
    env = os.environ | {
        "PYTHONPATH": paths,
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    env |= {"GLOO_SOCKET_IFNAME": "lo"}
    torchrun(RUN, file, cwd=tmp_path, env=env)
    before = stock()
    tuned = AutoModelForCausalLM.from_pretrained(tmp_path / "tuned")
    weights = tuned.state_dict()

    assert weights.keys() == before.state_dict().keys()
    for name, parameter in before.named_parameters():
        assert not torch.equal(weights[name], parameter)


def test_both_engines_have_one():
    assert set(EXAMPLES) == {"train.py", "fsdp2.py"}
