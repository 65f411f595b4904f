"""A study that runs in seconds: a random Llama with two layers, examples of sums and words, experts
of both kinds.
"""

from pathlib import Path

from papers.engine.tiny import small_llama
from tests.support import studies

TRAINING = {"epochs": 1, "learning_rate": 1e-2, "batch_size": 8}
SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_layers": 2, "max_length": 32}


def domain_rows() -> dict[str, list[dict]]:
    """Return distinct examples of two domains."""
    return {"sums": studies.sums(8, 5), "words": studies.words(5, "turn {} {}: ")}


def write_study(folder: Path, **changes) -> Path:
    """Write the base, the examples and the recipe; return the recipe's file."""
    rows = domain_rows()
    form = {"sft": TRAINING, "init": TRAINING, "post": TRAINING}
    domains = {}
    for name in rows:
        domains[name] = {"train": str(folder / f"{name}.jsonl"), "held_out_rows": 8}
    values = {
        "method": "upit",
        "domains": domains,
        "experts": {"num_experts": 3, "top_k": 2},
        "checkpoints": {"every_epochs": 0.25, "count": 2},
        "seed_data": {"share": 0.2, "at_least": 6},
        "ffn": form,
        "lora": form | {"rank": 2, "alpha": 4},
        "evaluations": 1,
    }
    return studies.write(folder, rows, small_llama, 290, SIZES, values | changes)
