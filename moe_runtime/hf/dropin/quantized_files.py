"""Write a model with quantized experts: MXFP4 as in GPT-OSS and FP8 as in DeepSeek-V3, other tensors unchanged.

save_quantized(model, folder)       from one or several ranks to one folder, which hf.dropin.quantize.load_quantized reads
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from moe_runtime.hf.dropin.quantize import METHOD, experts_of, is_transposed
from moe_runtime.io.checkpoint import CheckpointWriter
from moe_runtime.io.files import check_out_dir
from moe_runtime.modules import packed as modules
from moe_runtime.modules.moe import Experts
from moe_runtime.ops import packed
from moe_runtime.ops.all_to_all import is_distributed


def save_quantized(model: nn.Module, folder: str | Path, *, overwrite: bool = False) -> Path:
    """Write a model with packed experts: config.json and safetensors.

    MXFP4 and FP8 are written in the form that transformers loads (GPT-OSS's names; a matrix per expert with its
    weight_scale_inv), NF4 and int8 in the form that `load_quantized` reads. If experts are on several ranks, every rank must
    call this, and rank 0 writes. Raises ValueError for a model without packed experts or with PEFT's wrappers.
    """
    found = {path: module for path, module in experts_of(model).items() if modules.layouts(module)}
    if not found or not hasattr(model, "config") or any("base_layer" in path for path in found):
        what = "has experts in a PEFT adapter. Unload it" if found else "has no quantized experts. Use save_pretrained"
        raise ValueError(f"{type(model).__name__} {what}")
    first = next(iter(found.values()))
    form = next(iter(modules.layouts(first).values())).format.removesuffix(packed.TRANSPOSED)
    experts = {f"{path}." for path in found}
    linear = [name for name, module in model.named_modules() if isinstance(module, (nn.Linear, nn.Embedding))]
    config = json.loads(model.config.to_json_string(use_diff=True))
    config["architectures"] = [type(model).__name__.removeprefix("FSDP")]
    config["dtype"] = str(model.dtype).removeprefix("torch.")
    readable = {
        "mxfp4": {"quant_method": "mxfp4", "modules_to_not_convert": linear},
        "fp8_block": {"quant_method": "fp8", "weight_block_size": [128, 128], "modules_to_not_convert": linear},
    }
    # transformers assumes transposed stacks for GPT-OSS's MXFP4, and for FP8 a matrix per expert without biases
    known = {"mxfp4": is_transposed(first), "fp8_block": not (is_transposed(first) or getattr(first, "has_bias", False))}
    known = known.get(form, False) and not isinstance(first, Experts)
    config["quantization_config"] = readable[form] if known else {"quant_method": METHOD, "format": form}
    tied, on_ranks = set(getattr(model, "all_tied_weights_keys", None) or ()), any(map(is_distributed, model.parameters()))
    check_out_dir(folder, overwrite)
    if on_ranks and dist.get_rank():
        for _ in _gathered(model, found):
            pass
        dist.barrier()
        return Path(folder)
    with CheckpointWriter(folder, overwrite=overwrite) as writer:
        for key, tensor in _gathered(model, found):
            if key in tied:
                continue
            path = next((path for path in experts if key.startswith(path)), None)
            if form == "fp8_block" and known and path:
                for name, part in _per_expert(path, key.removeprefix(path), tensor):
                    writer.add(name, part)
            elif path and not known and key.removeprefix(path).removesuffix("_blocks") in modules.layouts(found[path[:-1]]):
                writer.add(key.removesuffix("_blocks"), tensor.reshape(-1, 1))  # no other reader mistakes this for a stack
            else:
                writer.add(key, tensor)
        writer.write_text("config.json", json.dumps(config, indent=2, sort_keys=True) + "\n")
        if getattr(model, "generation_config", None) is not None:
            writer.write_text("generation_config.json", model.generation_config.to_json_string())
    if on_ranks:
        dist.barrier()
    return Path(folder)


def _gathered(model: nn.Module, found: dict[str, nn.Module]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a model by their saved names; tensors on several ranks are gathered on each."""
    stacks = {f"{path}.{name}": (module, name) for path, module in found.items() for name in modules.layouts(module)}
    for key, tensor in model.state_dict().items():
        if key in stacks and is_distributed(tensor):
            module, name = stacks[key]
            saved = modules.to_saved(modules.whole(module, name), name, modules.layouts(module)[name])
            yield from ((key.removesuffix(name) + part, whole) for part, whole in saved.items())
        elif re.sub(r"_packed\d$", "", key) == key or re.sub(r"_packed\d$", "", key) not in stacks:
            yield key, tensor.full_tensor() if is_distributed(tensor) else tensor


def _per_expert(path: str, name: str, stack: torch.Tensor):
    """Yield the matrices of an FP8 stack, or of its scales, by their names in DeepSeek-V3's files."""
    base = name.removesuffix("_scale_inv")
    names = ("gate_proj", "up_proj") if base == "gate_up_proj" else (base,)
    suffix = "weight_scale_inv" if name != base else "weight"
    for e in range(stack.shape[0]):
        for part, rows in zip(names, stack[e].chunk(len(names))):
            yield f"{path}{e}.{part}.{suffix}", rows.contiguous()
