"""Load configs, tokenizers and models of folders and Hub ids with transformers' classes, without
running code from either.
"""

import contextlib
import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from moe_runtime.config import one_line, shown
from moe_runtime.hf.common.sources import check_source, hub_problem, without_retries
from moe_runtime.io import files
from moe_runtime.io.checkpoint import INDEX, SINGLE, Checkpoint

MAX_SIZE = 2**31 - 1
# keys of a config.json, or of parts of it (text_config), for which transformers or this package
# allocates something
_LIMITS = {r"\w*layers|n_layer": 10_000, r"\w*experts(_per_tok)?": 2**16, "num_labels": 2**20}
_SIZES = (
    r"num_hidden_layers|n_layer|vocab_size|(\w+_)?hidden_size|(\w+_)?intermediate_size|head_dim"
    r"|num_\w+_heads"
)


def check_counts(values: Mapping[str, Any], source: str | os.PathLike) -> None:
    """Raise ValueError for invalid sizes in a config.json: text, NaN, negative, or larger than any
    memory.
    """
    parts = [values]
    while parts:
        for key, value in parts.pop().items():
            if isinstance(value, Mapping):
                parts.append(value)
            is_size = re.fullmatch(_SIZES, key) and not isinstance(value, list | None)
            most = MAX_SIZE if is_size else math.inf
            for keys, limit in _LIMITS.items():
                if re.fullmatch(keys, key):
                    most = limit
            if is_size:
                fits = isinstance(value, int) and 0 <= value <= most
            else:
                fits = value == value and not (isinstance(value, int) and value > most)
            if not fits:
                kind = "an integer from 0" if is_size else "a number up"
                raise ValueError(
                    f"{shown(key)[1:-1]} in {source} must be {kind} to {most}, but is "
                    f"{shown(value)}"
                )


def check_folder(source: str | os.PathLike) -> None:
    """Call `check_counts` for a folder's config.json; do nothing for a Hub id. Raises ValueError if
    it is not JSON.
    """
    path = Path(source, "config.json")
    if os.path.isfile(path):
        values = files.read_json(path)
        check_counts(values, path)
        # transformers would read it in place of these
        if values.get("transformers_weights") not in (None, SINGLE, INDEX):
            raise ValueError(
                f"transformers_weights in {path} must be {SINGLE}, but is "
                f"{shown(values['transformers_weights'])}"
            )


def load(kind: type, source: str | os.PathLike, name: str = "model", **settings):
    """Return kind.from_pretrained(source) without ever running code from a folder or a Hub id.

    A folder's weights must be those that `Checkpoint` opens: no pickles, and no files outside it.
    Raises a ValueError with the `name` of the source if it cannot be loaded. Only TRL's `train
    --trust_remote_code` runs a folder's code.
    """
    client = contextlib.nullcontext()
    if not os.path.exists(source):
        check_source(source, name)
        client = without_retries(source)
    check_folder(source)
    if kind is AutoModelForCausalLM and os.path.isdir(source):
        settings["use_safetensors"] = True
        Checkpoint(source)
    try:
        with client:
            return kind.from_pretrained(source, trust_remote_code=False, **settings)
    except (MemoryError, torch.OutOfMemoryError):
        raise
    # config classes raise various errors, and the Rust code of tokenizers raises Exception itself
    except Exception as error:
        if "trust_remote_code" in str(error):
            reason = (
                "requires custom code (auto_map), which is never run. Use a model whose classes "
                "are in transformers"
            )
        elif os.path.exists(source):
            reason = f"cannot be loaded by transformers: {reason_of(error)}"
        else:
            problem = hub_problem(source, error).rstrip(".")
            reason = (
                f"is no folder, and cannot be loaded from the Hub: {problem}. Pass a folder or a "
                "Hub id"
            )
        raise ValueError(f"{name} {str(source)!r} {reason}") from error


def reason_of(error: Exception) -> str:
    """Return the message of another package's error as one short line, to be included in another
    message.
    """
    return one_line(error).rstrip(".:") or type(error).__name__
