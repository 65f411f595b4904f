"""Quantized folders with one tensor or field changed: a ValueError that names it, or the numbers
that the file means.
"""

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import moe_runtime
from moe_runtime.modules import packed as modules
from moe_runtime.ops import packed
from tests.hf.dropin.test_quantize import experts_in, gpt_oss, qwen

STATE = "quant_state.bitsandbytes__nf4"
# the folder's format and how it is saved: as stacks that load_quantized alone reads, or as
# transformers does
FOLDERS = {
    "nf4": (qwen, "nf4"),
    "nf4 [in, out]": (gpt_oss, "nf4"),
    "mxfp4": (qwen, "mxfp4"),
    "mxfp4 of GPT-OSS": (gpt_oss, "mxfp4"),
    "fp8_block": (gpt_oss, "fp8_block"),
    "fp8_block, a matrix per expert": (qwen, "fp8_block"),
    "int8": (qwen, "int8"),
}


FAST = ("nf4", "fp8_block, a matrix per expert")


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
    """One of each kind of tensor of the experts, the second of two matrices or scales among
    them.
    """
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
    """A quantized folder, and a copy of it in which things are changed."""

    def __init__(self, whole: Path, changed: Path):
        self.whole = whole
        self.changed = changed
        self.tensors = load_file(whole / "model.safetensors")
        self.config = json.loads((whole / "config.json").read_text())
        changed.mkdir()

    def write(self, tensors: dict | None = None, config: dict | None = None) -> None:
        """Write the copy with some tensors or the config exchanged; a tensor None goes."""
        held = {}
        for key, tensor in (self.tensors | (tensors or {})).items():
            if tensor is not None:
                held[key] = tensor.contiguous()
        save_file(held, self.changed / "model.safetensors")
        (self.changed / "config.json").write_text(json.dumps(config or self.config))

    def load(self):
        return moe_runtime.load_quantized(self.changed)


def blocks_of_128(scale: torch.Tensor) -> torch.Tensor:
    return scale.double().repeat_interleave(128, 1).repeat_interleave(128, 2)


def matrices(tensors: dict, path: str, projections: tuple, E: int) -> torch.Tensor:
    """The stack of FP8 matrices that are stored separately."""
    stacks = {"weight": [], "weight_scale_inv": []}
    for e in range(E):
        for kind, stack in stacks.items():
            parts = []
            for name in projections:
                parts.append(tensors[f"{path}.{e}.{name}.{kind}"].double())
            stack.append(torch.cat(parts))
    weights, scales = map(torch.stack, stacks.values())
    return weights * blocks_of_128(scales)


def meaning(tensors: dict, name: str, shape: torch.Size) -> torch.Tensor:
    """The stack [E, P, Q] in float64 from a folder's tensors, by a way of our own."""
    path, _, stack = name.rpartition(".")
    E, P, Q = shape
    if f"{path}.0.down_proj.weight" in tensors:
        projections = ("gate_proj", "up_proj") if stack == "gate_up_proj" else ("down_proj",)
        return matrices(tensors, path, projections, E)
    parts = {}
    for key, tensor in tensors.items():
        if key.startswith(name):
            parts[key.removeprefix(name)] = tensor
    codes = parts.get("", parts.get("_blocks")).reshape(E, P, -1)
    if "_scale_inv" in parts:
        values = codes.view(torch.float8_e4m3fn).double()
        return values * blocks_of_128(parts["_scale_inv"])
    if ".SCB" in parts:
        return codes.double() * (parts[".SCB"] / 127).double()[:, :, None]
    high = codes >> 4
    low = codes & 15
    is_nf4 = ".absmax" in parts
    pairs = [high, low] if is_nf4 else [low, high]
    codes = torch.stack(pairs, -1).reshape(E, P, Q).long()
    if not is_nf4:
        values = torch.tensor(
            [
                *packed.E2M1,
                *(-value for value in packed.E2M1),
            ]
        ).double()
        scales = torch.exp2(parts["_scales"].double() - 127)
        return values[codes] * scales.repeat_interleave(32, 2)
    state = json.loads(bytes(parts[f".{STATE}"].tolist()))
    absmax = parts[".nested_quant_map"][parts[".absmax"].long()]
    nested = parts[".nested_absmax"].repeat_interleave(256)[: absmax.numel()]
    absmax = absmax * nested + state["nested_offset"]
    values = torch.tensor(packed.NF4).double()[codes].view(-1, 64)
    return (values * absmax.double()[:, None]).view(E, P, Q)


def check(folder: Folder, key: str, case: str) -> None:
    """Load a changed folder: a ValueError must name `key`, and a model must have the numbers that
    its tensors mean.
    """
    try:
        model = folder.load()
    except ValueError as error:
        assert key in str(error), (key, case, str(error))
        return
    tensors = load_file(folder.changed / "model.safetensors")
    (experts,) = experts_in(model)
    for name in modules.layouts(experts):
        stack = modules.get(experts, name)
        form = stack.format.removesuffix(packed.TRANSPOSED)
        shape = packed.shape_of(stack.data, form)
        expected = meaning(
            tensors,
            f"model.layers.0.mlp.experts.{name}",
            shape,
        )
        weight = packed.reference(*stack._replace(format=form))
        torch.testing.assert_close(
            weight, expected, rtol=1e-6, atol=1e-9, equal_nan=True, msg=f"{key} {case}"
        )


def test_each_tensor(folder):
    folder.write()
    check(folder, "nothing", "as it is")
    for key in tensors_of(folder.whole):
        folder.write({key: None})
        if not key.endswith(".quant_map"):  # which says nothing that the format does not
            with pytest.raises(ValueError, match="experts"):
                folder.load()
        for case, tensor in changes_of(folder.tensors[key]).items():
            folder.write({key: tensor})
            check(folder, key, case)


WRONG = [
    None,
    "",
    "fp4",
    "NaN",
    65,
    64.5,
    -1,
    10**400,
    float("nan"),
    True,
    [],
    {},
    [64],
    [1.0, 2.0],
    {"a": 1},
]


def test_each_field_of_the_state_of_nf4(folder):
    def write(key: str, text: bytes) -> None:
        folder.write({key: torch.tensor(list(text), dtype=torch.uint8)})

    for key in folder.tensors:
        if not key.endswith(f"down_proj.{STATE}"):
            continue
        state = json.loads(bytes(folder.tensors[key].tolist()))
        for field in state:
            for value in WRONG:
                write(key, json.dumps(state | {field: value}).encode())
                check(folder, f"{field} in {key}", f"{field} {value!r}")
        for text in (b"", b"[]", b"3", b"{}", b"{", b"\xff", b"[" * 100_000):
            write(key, text)
            with pytest.raises(ValueError, match="bitsandbytes__nf4"):
                folder.load()


def test_each_field_of_the_config(folder):
    fields = folder.config["quantization_config"]
    for field in fields.keys() & {
        "quant_method",
        "format",
        "weight_block_size",
    }:
        for value in [
            *WRONG,
            "nf5",
            [64, 64],
            [128],
            [128, "128"],
            [128.5, 128],
            [0, 0],
        ]:
            altered = {"quantization_config": fields | {field: value}}
            folder.write(config=folder.config | altered)
            with pytest.raises(ValueError, match="quantiz|format|experts"):
                folder.load()
