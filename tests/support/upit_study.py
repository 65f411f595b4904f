"""A study that runs in seconds: a random Llama with two layers, examples of sums and words, experts
of both kinds.
"""

import json
from pathlib import Path

import yaml

from papers.engine.tiny import small_llama, train_tokenizer

WORDS = ["add", "mul", "sub", "neg", "pow", "div", "mod", "inv"]
TRAINING = {"epochs": 1, "learning_rate": 1e-2, "batch_size": 8}


def domain_rows() -> dict[str, list[dict]]:
    """Return distinct examples of two domains."""
    sums = []
    for i in range(8):
        for j in range(5):
            sums.append(
                {
                    "prompt": f"{i} and {j} make ",
                    "completion": str(i + j),
                }
            )
    words = [
        {"prompt": f"turn {word} {i}: ", "completion": word[::-1] * 2}
        for word in WORDS
        for i in range(5)
    ]
    return {"sums": sums, "words": words}


def write_study(folder: Path, **changes) -> Path:
    """Write the base, the examples and the recipe; return the recipe's file."""
    rows = domain_rows()
    for name, of_domain in rows.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in of_domain))
    tokenizer = train_tokenizer(
        [json.dumps(row) for of_domain in rows.values() for row in of_domain], 290
    )
    small_llama(
        tokenizer, hidden_size=16, intermediate_size=24, num_layers=2, max_length=32, seed=0
    ).save_pretrained(folder / "base")
    tokenizer.save_pretrained(folder / "base")
    form = {"sft": TRAINING, "init": TRAINING, "post": TRAINING}
    values = {
        "method": "upit",
        "base_model": str(folder / "base"),
        "max_length": 32,
        "domains": {
            name: {
                "train": str(folder / f"{name}.jsonl"),
                "held_out_rows": 8,
            }
            for name in rows
        },
        "experts": {"num_experts": 3, "top_k": 2},
        "checkpoints": {"every_epochs": 0.25, "count": 2},
        "seed_data": {"share": 0.2, "at_least": 6},
        "ffn": form,
        "lora": form | {"rank": 2, "alpha": 4},
        "evaluations": 1,
    }
    (folder / "study.yaml").write_text(yaml.safe_dump(values | changes))
    return folder / "study.yaml"
