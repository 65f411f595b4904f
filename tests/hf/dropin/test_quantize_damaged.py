"""Quantized folders with one tensor or field changed: a ValueError that names it, or the numbers
that the file means.
"""

import copy
import json

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
    params=[pytest.param(n, marks=[] if n in FAST else pytest.mark.slow) for n in FOLDERS],
)
def folder(request, tmp_path_factory):
    make, form = FOLDERS[request.param]
    model = make(hidden_size=128)
    moe_runtime.quantize_experts(model, form)
    path = tmp_path_factory.mktemp("quantized")
    moe_runtime.save_quantized(model, path / "whole")
    return path / "whole", path / "changed"


def tensors_of(path) -> list[str]:
    """One of each kind of tensor of the experts, the second of two matrices or scales among
    them.
    """
    keys = []
    for key in load_file(path / "model.safetensors"):
        if "experts" in key and not key.endswith("_bias"):
            keys.append(key)
    kinds = {
        "".join(part for part in key.split(".") if not part.isdigit()): key for key in sorted(keys)
    }
    return [key for key in kinds.values() if "gate_proj" not in key]


def changes_of(tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    flat = tensor.reshape(-1)
    bytes_of = flat.view(torch.uint8)
    changed = {
        "emptied": tensor[:0],
        "shorter": flat[:-1],
        "longer": torch.cat([bytes_of, bytes_of[:1]]).view(torch.uint8),
        "a scalar": flat[0],
        "bytes": bytes_of,
        "half of the rows": tensor[: len(tensor) // 2],
        "columns cut": tensor[..., : tensor.shape[-1] // 2],
    }
    for dtype in (
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
        torch.int8,
        torch.int32,
        torch.uint8,
    ):
        changed[f"as {dtype}"] = tensor.to(dtype)
    if tensor.is_floating_point() and tensor.dtype != torch.float8_e4m3fn:
        changed |= {
            "doubled": tensor * 2,
            "NaN": tensor * float("nan"),
            "infinite": tensor + float("inf"),
        }
    else:
        changed |= {"other bytes": (bytes_of + 1).view(tensor.dtype).view_as(tensor)}
    return changed


def write(path, changed, tensors: dict, config: dict) -> None:
    changed.mkdir(exist_ok=True)
    save_file(
        {key: tensor.contiguous() for key, tensor in tensors.items()}, changed / "model.safetensors"
    )
    (changed / "config.json").write_text(json.dumps(config))


def meaning(tensors: dict, name: str, shape: torch.Size) -> torch.Tensor:
    """The stack [E, P, Q] in float64 from a folder's tensors, by a way of our own."""
    path, _, stack = name.rpartition(".")
    parts = {}
    for key, tensor in tensors.items():
        if key.startswith(name):
            parts[key.removeprefix(name)] = tensor
    E, P, Q = shape
    if f"{path}.0.down_proj.weight" in tensors:
        projections = ("gate_proj", "up_proj") if stack == "gate_up_proj" else ("down_proj",)
        weights, scales = (
            torch.stack(
                [
                    torch.cat([tensors[f"{path}.{e}.{p}.{kind}"].double() for p in projections])
                    for e in range(E)
                ]
            )
            for kind in ("weight", "weight_scale_inv")
        )
        return weights * scales.repeat_interleave(128, 1).repeat_interleave(128, 2)
    codes = parts.get("", parts.get("_blocks")).reshape(E, P, -1)
    if "_scale_inv" in parts:
        return codes.view(torch.float8_e4m3fn).double() * parts[
            "_scale_inv"
        ].double().repeat_interleave(128, 1).repeat_interleave(128, 2)
    if ".SCB" in parts:
        return codes.double() * (parts[".SCB"] / 127).double()[:, :, None]
    nibbles = [codes >> 4, codes & 15] if ".absmax" in parts else [codes & 15, codes >> 4]
    codes = torch.stack(nibbles, -1).reshape(E, P, Q).long()
    if "_scales" in parts:
        values = torch.tensor([*packed.E2M1, *(-value for value in packed.E2M1)]).double()
        return values[codes] * torch.exp2(parts["_scales"].double() - 127).repeat_interleave(32, 2)
    state = json.loads(bytes(parts[f".{STATE}"].tolist()))
    absmax = parts[".nested_quant_map"][parts[".absmax"].long()]
    absmax = (
        absmax * parts[".nested_absmax"].repeat_interleave(256)[: absmax.numel()]
        + state["nested_offset"]
    )
    return (torch.tensor(packed.NF4).double()[codes].view(-1, 64) * absmax.double()[:, None]).view(
        E, P, Q
    )


def check(changed, key: str, case: str) -> None:
    """Load a changed folder: a ValueError must name `key`, and a model must have the numbers that
    its tensors mean.
    """
    try:
        model = moe_runtime.load_quantized(changed)
    except ValueError as error:
        assert key in str(error), (key, case, str(error))
        return
    tensors = load_file(changed / "model.safetensors")
    (experts,) = experts_in(model)
    for name in modules.layouts(experts):
        stack = modules.get(experts, name)
        shape = packed.shape_of(stack.data, stack.format.removesuffix(packed.TRANSPOSED))
        weight = packed.reference(
            *stack._replace(format=stack.format.removesuffix(packed.TRANSPOSED))
        )
        expected = meaning(tensors, f"model.layers.0.mlp.experts.{name}", shape)
        torch.testing.assert_close(
            weight, expected, rtol=1e-6, atol=1e-9, equal_nan=True, msg=f"{key} {case}"
        )


def test_each_tensor(folder):
    whole, changed = folder
    tensors = load_file(whole / "model.safetensors")
    config = json.loads((whole / "config.json").read_text())
    write(whole, changed, tensors, config)
    check(changed, "nothing", "as it is")
    for key in tensors_of(whole):
        write(
            whole,
            changed,
            {name: tensor for name, tensor in tensors.items() if name != key},
            config,
        )
        if not key.endswith(".quant_map"):  # which says nothing that the format does not
            with pytest.raises(ValueError, match="experts"):
                moe_runtime.load_quantized(changed)
        for case, tensor in changes_of(tensors[key]).items():
            write(whole, changed, tensors | {key: tensor}, config)
            check(changed, key, case)


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
    whole, changed = folder
    tensors = load_file(whole / "model.safetensors")
    config = json.loads((whole / "config.json").read_text())
    keys = [key for key in tensors if key.endswith(f"down_proj.{STATE}")]
    for key in keys:
        state = json.loads(bytes(tensors[key].tolist()))
        for field in state:
            for value in WRONG:
                text = json.dumps(state | {field: value}).encode()
                write(
                    whole,
                    changed,
                    tensors | {key: torch.tensor(list(text), dtype=torch.uint8)},
                    config,
                )
                check(changed, f"{field} in {key}", f"{field} {value!r}")
        for text in (b"", b"[]", b"3", b"{}", b"{", b"\xff", b"[" * 100_000):
            write(
                whole, changed, tensors | {key: torch.tensor(list(text), dtype=torch.uint8)}, config
            )
            with pytest.raises(ValueError, match="bitsandbytes__nf4"):
                moe_runtime.load_quantized(changed)


def test_each_field_of_the_config(folder):
    whole, changed = folder
    tensors = load_file(whole / "model.safetensors")
    config = json.loads((whole / "config.json").read_text())
    fields = config["quantization_config"]
    write(whole, changed, tensors, config)
    for field in fields.keys() & {"quant_method", "format", "weight_block_size"}:
        for value in [*WRONG, "nf5", [64, 64], [128], [128, "128"], [128.5, 128], [0, 0]]:
            altered = copy.deepcopy(config)
            altered["quantization_config"][field] = value
            write(whole, changed, tensors, altered)
            with pytest.raises(ValueError, match="quantiz|format|experts"):
                moe_runtime.load_quantized(changed)
