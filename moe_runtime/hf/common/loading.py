"""Load configs, tokenizers and models of folders and Hub ids with transformers' classes, without
running code from either.
"""

import os
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from moe_runtime.config import one_line, shown
from moe_runtime.hf.common.sources import check_source
from moe_runtime.io import files
from moe_runtime.io.checkpoint import INDEX, SINGLE, Checkpoint


def check_folder(source: str | os.PathLike) -> None:
    """Raise ValueError for a folder whose config.json is not JSON or names other weights than
    `Checkpoint` opens; do nothing for a Hub id.
    """
    path = Path(source, "config.json")
    if os.path.isfile(path):
        weights = files.read_json(path).get("transformers_weights")
        if weights not in (None, SINGLE, INDEX):
            raise ValueError(
                f"transformers_weights in {path} must be {SINGLE}, but is {shown(weights)}"
            )


def load(kind: type, source: str | os.PathLike, name: str = "model", **settings: Any) -> Any:
    """Return kind.from_pretrained(source) without ever running code from a folder or a Hub id.

    A folder's weights must be those that `Checkpoint` opens: no pickles, and no files outside it.
    Raises a ValueError with the `name` of the source if it cannot be loaded. Only TRL's `train
    --trust_remote_code` runs a folder's code.
    """
    if not os.path.exists(source):
        check_source(source, name)
    check_folder(source)
    if kind is AutoModelForCausalLM and os.path.isdir(source):
        settings["use_safetensors"] = True
        Checkpoint(source)
    try:
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
            reason = (
                f"is no folder, and cannot be loaded from the Hub: {reason_of(error)}. Pass a "
                "folder or a Hub id"
            )
        raise ValueError(f"{name} {str(source)!r} {reason}") from error


def reason_of(error: Exception) -> str:
    """Return the message of another package's error as one short line, to be included in another
    message.
    """
    return one_line(error).rstrip(".:") or type(error).__name__
