"""A fuser study that runs in seconds: a random Llama with one layer, sums and words in files, a
template for each.
"""

import functools
import tempfile
from pathlib import Path

from papers.engine.tiny import small_llama
from tests.support import studies

STEPS = {"steps": 4, "learning_rate": 1e-2, "batch_size": 4}
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_layers": 1, "max_length": 48}


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
    return {"sums": studies.sums(12, 4, "{} and {}"), "words": studies.words(2, "turn {} {}")}


def write_study(to: Path, **changes) -> Path:
    """Write the base, the examples and the recipe; return the recipe's file."""
    rows = domain_rows()
    domains = {}
    for name in rows:
        domains[name] = {"train": str(to / f"{name}.jsonl"), "held_out_rows": 6}
    values = {
        "method": "ultrafuser",
        "domains": domains,
        "specialists": {
            "sums": {"template": "ultralm"},
            "words": {"template": "# {prompt}\n"},
        },
        "specialist": STEPS | {"optimizer": "adamw_torch"},
        "stage1": STEPS,
        "stage2": STEPS,
        "evaluations": 2,
    }
    return studies.write(to, rows, small_llama, 290, SIZES, values | changes)
