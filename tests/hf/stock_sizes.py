"""Sizes of the tiny models in `tests.hf.stock`, from stock_sizes.yaml."""

from pathlib import Path

import yaml

_SIZES = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())
SMALL = _SIZES["small"]
MOE = _SIZES["moe"]
CHANGES = _SIZES["changes"]
CLASSES = _SIZES["classes"]
VOCAB = SMALL["vocab_size"]
