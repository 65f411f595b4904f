"""An XFT study that runs in seconds: a random Llama with two layers, sums to learn, a few steps of
everything.
"""

import json
from pathlib import Path

import yaml

from papers.engine.tiny import train_tokenizer
from tests.hf.tiny import dense
from tests.support.studies import sums

TRAINING = {"steps": 4, "learning_rate": 1e-2, "batch_size": 8}


def write_study(folder: Path, **changes) -> Path:
    """Write the base, the examples and the recipe; return the recipe's file."""
    rows = sums(8, 8)
    (folder / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokenizer = train_tokenizer(
        [row["prompt"] + row["completion"] for row in rows],
        280,
    )
    dense(
        "llama",
        vocab_size=len(tokenizer),
        mlp_bias=False,
    ).save_pretrained(folder / "base")
    tokenizer.save_pretrained(folder / "base")
    values = {
        "base_model": str(folder / "base"),
        "data": {
            "train": str(folder / "sums.jsonl"),
            "held_out_rows": 20,
            "prompt": "plain",
            "max_length": 32,
        },
        "experts": {"num_experts": 4, "top_k": 3},
        "shared_rate": 0.5,
        "sft": TRAINING,
        "tune": TRAINING,
        # the first warmup step has a learning rate of 0
        "mix": TRAINING | {"steps": 2, "learning_rate": 0.1},
        "evaluations": 2,
    }
    (folder / "study.yaml").write_text(yaml.safe_dump(values | changes))
    return folder / "study.yaml"
