"""A fuser study that runs in seconds: a random Llama with one layer, sums and words in files, a
template for each.
"""

import functools
import json
import tempfile
from pathlib import Path

import yaml

from papers.engine.tiny import small_llama, train_tokenizer

WORDS = ["add", "mul", "sub", "neg", "pow", "div", "mod", "inv"]
STEPS = {"steps": 4, "learning_rate": 1e-2, "batch_size": 4}


@functools.cache
def folder() -> tempfile.TemporaryDirectory:
    """Return a folder with a study, whose stages all tests of a process share; it is deleted at
    exit.
    """
    made = tempfile.TemporaryDirectory(prefix="fuser-study-")
    # enough steps for four checkpoints in the last seven ninths
    write_study(Path(made.name), stage2=STEPS | {"steps": 6})
    return made


def domain_rows() -> dict[str, list[dict]]:
    """Return distinct examples of the two domains; one domain has three times as many."""
    sums = []
    for i in range(12):
        for j in range(4):
            sums.append({"prompt": f"{i} and {j}", "completion": str(i + j)})
    words = [
        {"prompt": f"turn {word} {i}", "completion": word[::-1] * 2}
        for word in WORDS
        for i in range(2)
    ]
    return {"sums": sums, "words": words}


def write_study(to: Path, **changes) -> Path:
    """Write the base, the examples and the recipe; return the recipe's file."""
    to.mkdir(parents=True, exist_ok=True)
    rows = domain_rows()
    for name, own in rows.items():
        (to / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in own))
    tokenizer = train_tokenizer(
        [json.dumps(row) for own in rows.values() for row in own],
        290,
    )
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_layers": 1,
        "max_length": 48,
    }
    small_llama(tokenizer, seed=0, **sizes).save_pretrained(to / "base")
    tokenizer.save_pretrained(to / "base")
    values = {
        "method": "ultrafuser",
        "base_model": str(to / "base"),
        "max_length": 48,
        "domains": {
            name: {
                "train": str(to / f"{name}.jsonl"),
                "held_out_rows": 6,
            }
            for name in rows
        },
        "specialists": {
            "sums": {"template": "ultralm"},
            "words": {"template": "# {prompt}\n"},
        },
        "specialist": STEPS | {"optimizer": "adamw_torch"},
        "stage1": STEPS,
        "stage2": STEPS,
        "evaluations": 2,
    }
    (to / "study.yaml").write_text(yaml.safe_dump(values | changes))
    return to / "study.yaml"
