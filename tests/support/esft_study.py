"""A study that runs in seconds: a random DeepSeek-V2 with three layers, two tasks of sums and
words, and text of both.
"""

import json
from pathlib import Path

import yaml

from papers.engine.tiny import small_deepseek, train_tokenizer

WORDS = ["add", "mul", "sub", "neg", "pow", "div", "mod", "inv"]
STEPS = {"steps": 4, "learning_rate": 1e-2, "batch_size": 8}


def task_rows() -> dict[str, list[dict]]:
    """Return distinct examples of the two tasks and of general text."""
    sums = []
    for i in range(8):
        for j in range(6):
            sums.append(
                {
                    "prompt": f"{i} and {j} make ",
                    "completion": str(i + j),
                }
            )
    words = [
        {
            "messages": [
                {"role": "user", "content": f"turn {word} {i}"},
                {"role": "assistant", "content": word[::-1] * 2},
            ]
        }
        for word in WORDS
        for i in range(6)
    ]
    general = [
        {"text": f"{word} of {i} is not {word} of {i + 1}."} for word in WORDS for i in range(6)
    ]
    return {"sums": sums, "words": words, "general": general}


def write_study(folder: Path, **changes) -> Path:
    """Write the base, the examples and the recipe; return the recipe's file."""
    rows = task_rows()
    for name, of_task in rows.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in of_task))
    texts = [json.dumps(row) for of_task in rows.values() for row in of_task]
    tokenizer = train_tokenizer(texts, 300)
    small_deepseek(
        tokenizer,
        hidden_size=32,
        intermediate_size=48,
        num_layers=3,
        num_experts=8,
        top_k=2,
        expert_size=8,
        shared_experts=1,
        dense_layers=1,
        max_length=32,
        seed=0,
    ).save_pretrained(folder / "base")
    tokenizer.save_pretrained(folder / "base")
    counts = {"held_out_rows": 12, "validation_rows": 6}
    values = {
        "method": "esft",
        "base_model": str(folder / "base"),
        "max_length": 32,
        "pack": False,
        "tasks": {
            name: {
                "train": str(folder / f"{name}.jsonl"),
                **counts,
            }
            for name in ("sums", "words")
        },
        "general": {"train": str(folder / "general.jsonl"), **counts},
        "scores": {"n_tokens": 2048},
        "fft": STEPS,
        "lora": {"rank": 2, "training": STEPS},
        "esft": STEPS,
        "evaluations": 2,
    }
    (folder / "study.yaml").write_text(yaml.safe_dump(values | changes))
    return folder / "study.yaml"
