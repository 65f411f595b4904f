"""A study that runs in seconds: a random DeepSeek-V2 with three layers, two tasks of sums and
words, and text of both.
"""

from pathlib import Path

from papers.engine.tiny import small_deepseek
from tests.support import studies

STEPS = {"steps": 4, "learning_rate": 1e-2, "batch_size": 8}
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_layers": 3,
    "num_experts": 8,
    "top_k": 2,
    "expert_size": 8,
    "shared_experts": 1,
    "dense_layers": 1,
    "max_length": 32,
}


def task_rows() -> dict[str, list[dict]]:
    """Return distinct examples of the two tasks and of general text."""
    words = []
    for row in studies.words(6, "turn {} {}"):
        turns = zip(("user", "assistant"), row.values(), strict=True)
        words.append({"messages": [{"role": role, "content": text} for role, text in turns]})
    general = [
        {"text": f"{word} of {i} is not {word} of {i + 1}."}
        for word in studies.WORDS
        for i in range(6)
    ]
    return {"sums": studies.sums(8, 6), "words": words, "general": general}


def write_study(folder: Path, **changes) -> Path:
    """Write the base, the examples and the recipe; return the recipe's file."""
    parts = {}
    for name in ("sums", "words", "general"):
        file = str(folder / f"{name}.jsonl")
        parts[name] = {"train": file, "held_out_rows": 12, "validation_rows": 6}
    values = {
        "method": "esft",
        "pack": False,
        "general": parts.pop("general"),
        "tasks": parts,
        "scores": {"n_tokens": 2048},
        "fft": STEPS,
        "lora": {"rank": 2, "training": STEPS},
        "esft": STEPS,
        "evaluations": 2,
    }
    return studies.write(folder, task_rows(), small_deepseek, 300, SIZES, values | changes)
