"""Quantized folders with one tensor or field changed raise a ValueError that names it, or load the
values in the file.
"""

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import moe_runtime
from moe_runtime.io.files import read_json
from tests.hf.dropin.test_quantize import gpt_oss, qwen

# the folder's format and layout: as stacks, which only load_quantized reads, or as transformers
# saves them
FOLDERS = {
    "nf4": (qwen, "nf4"),
    "nf4 [in, out]": (gpt_oss, "nf4"),
    "mxfp4": (qwen, "mxfp4"),
    "mxfp4 of GPT-OSS": (gpt_oss, "mxfp4"),
    "fp8_block": (gpt_oss, "fp8_block"),
    "fp8_block, a matrix per expert": (qwen, "fp8_block"),
    "int8": (qwen, "int8"),
}


FAST = ("fp8_block, a matrix per expert",)


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(
            n,
            marks=[] if n in FAST else pytest.mark.slow,
        )
        for n in FOLDERS
    ],
)
def folder(request, tmp_path_factory):
    make, form = FOLDERS[request.param]
    model = make(hidden_size=128)
    moe_runtime.quantize_experts(model, form)
    path = tmp_path_factory.mktemp("quantized")
    moe_runtime.save_quantized(model, path / "whole")
    return Folder(path / "whole", path / "changed")


def tensors_of(path) -> list[str]:
    """Return one tensor of each kind in the experts; of two matrices or scales, the second."""
    kinds = {}
    for key in sorted(load_file(path / "model.safetensors")):
        if "experts" in key and not key.endswith("_bias") and "gate_proj" not in key:
            kinds[re.sub(r"\.\d+\.", ".", key)] = key
    return list(kinds.values())


DTYPES = (
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.int8,
    torch.int32,
    torch.uint8,
)


def changes_of(tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    flat = tensor.reshape(-1)
    bytes_of = flat.view(torch.uint8)
    changed = {
        "emptied": tensor[:0],
        "shorter": flat[:-1],
        "longer": torch.cat([bytes_of, bytes_of[:1]]),
        "a scalar": flat[0],
        "bytes": bytes_of,
        "half of the rows": tensor[: len(tensor) // 2],
        "columns cut": tensor[..., : tensor.shape[-1] // 2],
    }
    for dtype in DTYPES:
        changed[f"as {dtype}"] = tensor.to(dtype)
    if tensor.is_floating_point() and tensor.dtype != torch.float8_e4m3fn:
        changed["doubled"] = tensor * 2
        changed["NaN"] = tensor * float("nan")
        changed["infinite"] = tensor + float("inf")
    else:
        changed["other bytes"] = (bytes_of + 1).view(tensor.dtype).view_as(tensor)
    return changed


class Folder:
    """A quantized folder, and a copy of it to modify."""

    def __init__(self, whole: Path, changed: Path):
        self.whole = whole
        self.changed = changed
        self.tensors = load_file(whole / "model.safetensors")
        self.config = read_json(whole / "config.json")
        changed.mkdir()

    def write(self, tensors: dict | None = None, config: dict | None = None) -> None:
        """Write the copy with some tensors or the config replaced; a tensor that is None is
        dropped.
        """
        held = {}
        for key, tensor in (self.tensors | (tensors or {})).items():
            if tensor is not None:
                held[key] = tensor.contiguous()
        save_file(held, self.changed / "model.safetensors")
        (self.changed / "config.json").write_text(json.dumps(config or self.config))

    def load(self):
        return moe_runtime.load_quantized(self.changed)


def test_each_tensor(folder):
    """A folder with one changed tensor loads, or is refused with a ValueError that names the
    tensor.
    """
    for key in tensors_of(folder.whole):
        folder.write({key: None})
        if not key.endswith(".quant_map"):  # the format already implies it
            with pytest.raises(ValueError, match="experts"):
                folder.load()
        refused = []
        for case, tensor in changes_of(folder.tensors[key]).items():
            folder.write({key: tensor})
            try:
                folder.load()
            except ValueError as error:
                assert key in str(error), (key, case)
                refused.append(case)
        assert {"emptied", "shorter", "a scalar"} <= {*refused} or key.endswith(".quant_map")


@pytest.mark.parametrize("value", [None, "fp4", 10**400, [], [64], {"a": 1}])
def test_fields_of_the_config_and_of_the_state_of_nf4(folder, value):
    fields = folder.config["quantization_config"]
    for field in fields.keys() & {"quant_method", "format", "weight_block_size"}:
        altered = {"quantization_config": fields | {field: value}}
        folder.write(config=folder.config | altered)
        with pytest.raises(ValueError, match="quantiz|format|experts"):
            folder.load()
    for key in folder.tensors:
        if key.endswith("down_proj.quant_state.bitsandbytes__nf4"):
            state = json.loads(bytes(folder.tensors[key].tolist())) | {"blocksize": value}
            text = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
            folder.write({key: text})
            with pytest.raises(ValueError, match="bitsandbytes__nf4"):
                folder.load()
