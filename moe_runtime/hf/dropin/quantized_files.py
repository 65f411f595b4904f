"""Write a model with quantized experts: MXFP4 as in GPT-OSS and FP8 as in DeepSeek-V3, under the
family's published names.

save_quantized(model, folder)       from one or several ranks to one folder, which
                                    hf.dropin.quantize.load_quantized reads
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from moe_runtime.hf.dropin.expert_names import matrices_of, published
from moe_runtime.hf.dropin.quantize import METHOD, experts_of, is_transposed
from moe_runtime.io.checkpoint import CheckpointWriter
from moe_runtime.io.files import check_out_dir
from moe_runtime.modules import packed as modules
from moe_runtime.modules.moe import Experts
from moe_runtime.ops import packed
from moe_runtime.ops.all_to_all import is_distributed


def save_quantized(model: nn.Module, folder: str | Path, *, overwrite: bool = False) -> Path:
    """Write a model with packed experts: config.json and safetensors.

    MXFP4 of GPT-OSS, and FP8 of families that publish a matrix per expert, are written in the form
    that transformers loads; everything else in one that `load_quantized` reads and transformers
    refuses. If experts are on several ranks, every rank must call this, and rank 0 writes. Raises
    ValueError for a model without packed experts or with PEFT's wrappers.
    """
    found = {path: module for path, module in experts_of(model).items() if modules.layouts(module)}
    if not found or not hasattr(model, "config") or any("base_layer" in path for path in found):
        if found:
            what = "has experts in a PEFT adapter. Unload it"
        else:
            what = "has no quantized experts. Use save_pretrained"
        raise ValueError(f"{type(model).__name__} {what}")
    if any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
        raise ValueError(
            f"{type(model).__name__} is offloaded. Call save_quantized before offloading it"
        )
    first = next(iter(found.values()))
    form = next(iter(modules.layouts(first).values())).format.removesuffix(packed.TRANSPOSED)
    names = _names_in_files(model, found) if form == "fp8_block" else None
    linear = [
        name
        for name, module in model.named_modules()
        if isinstance(module, (nn.Linear, nn.Embedding))
    ]
    config = json.loads(model.config.to_json_string(use_diff=True))
    config["architectures"] = [type(model).__name__.removeprefix("FSDP")]
    config["dtype"] = str(model.dtype).removeprefix("torch.")
    if names is not None:
        quantization = {
            "quant_method": "fp8",
            "weight_block_size": [128, 128],
            "modules_to_not_convert": linear,
        }
    elif form == "mxfp4" and is_transposed(first) and not isinstance(first, Experts):
        quantization = {"quant_method": "mxfp4", "modules_to_not_convert": linear}
    else:
        quantization = {"quant_method": METHOD, "format": form}
    config["quantization_config"] = quantization
    tied = set(getattr(model, "all_tied_weights_keys", None) or ())
    on_ranks = any(map(is_distributed, model.parameters()))
    check_out_dir(folder, overwrite)
    if on_ranks and dist.get_rank():
        for _ in _gathered(model, found):
            pass
        dist.barrier()
        return Path(folder)
    others = {}
    stacks = [
        f"{path}.{name}" for path, module in found.items() for name in modules.layouts(module)
    ]
    with CheckpointWriter(folder, overwrite=overwrite) as writer:
        for key, tensor in _gathered(model, found):
            stack = next(
                (
                    stack
                    for stack in stacks
                    if key.startswith(stack) and not key.startswith(f"{stack}_bias")
                ),
                None,
            )
            if stack is None and key in tied:
                continue
            if stack is None:
                others[key] = tensor.cpu() if on_ranks else tensor
            elif names is not None:
                for name, part in _per_expert(names[stack], tensor):
                    writer.add(name + key.removeprefix(stack), part)
            elif quantization["quant_method"] == METHOD and key in (stack, f"{stack}_blocks"):
                # no other reader mistakes this for a stack
                writer.add(stack, tensor.reshape(-1, 1))
            else:
                writer.add(key, tensor)
        for key, tensor in published(model, others).items():
            writer.add(key, tensor.contiguous())
        writer.write_text("config.json", json.dumps(config, indent=2, sort_keys=True) + "\n")
        if getattr(model, "generation_config", None) is not None:
            writer.write_text("generation_config.json", model.generation_config.to_json_string())
    if on_ranks:
        dist.barrier()
    return Path(folder)


def _gathered(model: nn.Module, found: dict[str, nn.Module]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a model by their saved names; tensors on several ranks are gathered on
    each.
    """
    stacks = {
        f"{path}.{name}": (module, name)
        for path, module in found.items()
        for name in modules.layouts(module)
    }
    for key, tensor in model.state_dict().items():
        if key in stacks and is_distributed(tensor):
            module, name = stacks[key]
            saved = modules.to_saved(
                modules.whole(module, name), name, modules.layouts(module)[name]
            )
            yield from ((key.removesuffix(name) + part, whole) for part, whole in saved.items())
        elif re.sub(r"_packed\d$", "", key) == key or re.sub(r"_packed\d$", "", key) not in stacks:
            yield key, tensor.full_tensor() if is_distributed(tensor) else tensor


def _names_in_files(
    model: nn.Module, found: dict[str, nn.Module]
) -> dict[str, dict[int, list[str]]] | None:
    """Return stack -> expert -> the published names of its matrices, if transformers loads them in
    FP8; otherwise None.

    It knows FP8 for a matrix per expert, without biases. Where it has no GPU it takes a block's
    size from the number of blocks, which is right for whole blocks and for a single one.
    """
    for path, module in found.items():
        if (
            isinstance(module, Experts)
            or is_transposed(module)
            or module.has_bias
            or not path.endswith(".experts")
        ):
            return None
    names = {}
    for path, module in found.items():
        for name, layout in modules.layouts(module).items():
            if any(size > packed.BLOCK and size % packed.BLOCK for size in layout.shape[1:]):
                return None
            stack = f"{path}.{name}"
            try:  # one stack alone, as transformers has the scales of one alone
                pairs = matrices_of(model, {stack: layout.shape}).get(stack)
            except ValueError:
                return None
            if pairs is None or not all(
                row is None and key.endswith(".weight")
                for parts in pairs.values()
                for key, row in parts
            ):
                return None
            names[stack] = {e: [key for key, _ in parts] for e, parts in pairs.items()}
    return names if _knows_fp8(model) else None


def _knows_fp8(model: nn.Module) -> bool:
    """Return whether transformers can read FP8 under the names of this family, some of whose
    conversions have no FP8 form.
    """
    from transformers import FineGrainedFP8Config
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer

    quantizer = FineGrainedFP8HfQuantizer(FineGrainedFP8Config(dequantize=True), pre_quantized=True)
    try:
        quantizer.update_weight_conversions(get_model_conversion_mapping(model), model)
    except ValueError:
        return False
    return True


def _per_expert(
    names: dict[int, list[str]], stack: torch.Tensor
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the matrices of a stack, or the scales of one, by the published names of the
    weights.
    """
    for e, parts in names.items():
        for name, rows in zip(parts, stack[e].chunk(len(parts))):
            yield name, rows.contiguous()
