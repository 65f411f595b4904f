"""What the studies that run in seconds share: sums and words, and a folder of base, examples and
recipe.
"""

import itertools
import json
from collections.abc import Callable
from pathlib import Path

import yaml

from papers.engine.tiny import train_tokenizer

WORDS = ["add", "mul", "sub", "neg", "pow", "div", "mod", "inv"]


def sums(rows: int, columns: int, prompt: str = "{} and {} make ") -> list[dict]:
    """Return an example for each pair of numbers."""
    pairs = itertools.product(range(rows), range(columns))
    return [{"prompt": prompt.format(i, j), "completion": str(i + j)} for i, j in pairs]


def words(count: int, prompt: str) -> list[dict]:
    """Return `count` examples for each word, which is turned."""
    pairs = itertools.product(WORDS, range(count))
    return [{"prompt": prompt.format(*pair), "completion": pair[0][::-1] * 2} for pair in pairs]


def write(
    folder: Path,
    rows: dict[str, list[dict]],
    base: Callable,
    tokens: int,
    sizes: dict,
    recipe: dict,
) -> Path:
    """Write NAME.jsonl, the base that `base` makes of a tokenizer and `sizes`, and the recipe;
    return its file.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lines = {}
    for name, own in rows.items():
        lines[name] = [*map(json.dumps, own)]
        (folder / f"{name}.jsonl").write_text("\n".join(lines[name]) + "\n")
    tokenizer = train_tokenizer([*itertools.chain(*lines.values())], tokens)
    base(tokenizer, seed=0, **sizes).save_pretrained(folder / "base")
    tokenizer.save_pretrained(folder / "base")
    values = {"base_model": str(folder / "base"), "max_length": sizes["max_length"]}
    (folder / "study.yaml").write_text(yaml.safe_dump(values | recipe))
    return folder / "study.yaml"
