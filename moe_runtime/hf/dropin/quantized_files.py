"""Write a model with quantized experts: MXFP4 as in GPT-OSS and FP8 as in DeepSeek-V3, under the
family's published names.

save_quantized(model, folder)       from one or several ranks to one folder, which
                                    hf.dropin.quantize.load_quantized reads
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import torch.distributed as dist
from torch import Tensor, nn

from moe_runtime.hf.common.sharded import gathered
from moe_runtime.hf.dropin.expert_names import Places, matrices_of, published
from moe_runtime.hf.dropin.quantize import METHOD, experts_of, is_transposed
from moe_runtime.hf.models.prediction import without
from moe_runtime.io.checkpoint import CheckpointWriter
from moe_runtime.io.files import check_out_dir
from moe_runtime.modules import packed as packing
from moe_runtime.modules.moe import Experts
from moe_runtime.ops import packed
from moe_runtime.ops.all_to_all import is_distributed

Names = dict[str, Places]  # by stack


def save_quantized(model: nn.Module, folder: str | Path, *, overwrite: bool = False) -> Path:
    """Write a model with packed experts: config.json and safetensors.

    MXFP4 of GPT-OSS, and FP8 of families that publish a matrix per expert, are written in the form
    that transformers loads; everything else in one that only `load_quantized` reads.

    Args:
        model: A model after `quantize_experts` or `load_quantized`. If its experts are on several
            ranks, every rank must call this, and rank 0 writes.
        folder: The folder to write.
        overwrite: Whether to replace an existing folder.

    Returns:
        The folder.

    Raises:
        ValueError: If the model has no packed experts, or PEFT's wrappers.
    """
    experts = _packed_experts(model)
    names, quantization = _published_form(model, experts)
    config = json.loads(model.config.to_json_string(use_diff=True))
    config["architectures"] = [type(model).__name__.removeprefix("FSDP")]
    config["dtype"] = str(model.dtype).removeprefix("torch.")
    config["quantization_config"] = quantization
    on_ranks = any(map(is_distributed, model.parameters()))
    check_out_dir(folder, overwrite)
    if on_ranks and dist.get_rank():
        for _ in _gathered(model, experts):
            pass
        dist.barrier()
        return Path(folder)
    with CheckpointWriter(folder, overwrite=overwrite) as writer:
        others = _write_stacks(writer, model, experts, names, quantization["quant_method"])
        for key, tensor in published(model, others).items():
            writer.add(key, tensor.contiguous())
        # transformers has dropped the tensors of multi-token prediction
        config = without(config)
        writer.write_text("config.json", json.dumps(config, indent=2, sort_keys=True) + "\n")
        if getattr(model, "generation_config", None) is not None:
            writer.write_text("generation_config.json", model.generation_config.to_json_string())
    if on_ranks:
        dist.barrier()
    return Path(folder)


def _packed_experts(model: nn.Module) -> dict[str, nn.Module]:
    """Return the packed experts of a model by path; raises ValueError if it cannot be saved."""
    experts = {
        path: module for path, module in experts_of(model).items() if packing.layouts(module)
    }
    reason = None
    if not experts or not hasattr(model, "config"):
        reason = "has no quantized experts. Use save_pretrained"
    elif any("base_layer" in path for path in experts):
        reason = "has experts in a PEFT adapter. Unload it"
    elif any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
        reason = "is offloaded. Call save_quantized before offloading it"
    if reason is not None:
        raise ValueError(f"{type(model).__name__} {reason}")
    return experts


def _published_form(model: nn.Module, experts: dict[str, nn.Module]) -> tuple[Names | None, dict]:
    """Return the names of FP8 matrices if transformers loads them, else None, and the config's
    quantization.
    """
    first = next(iter(experts.values()))
    layout = next(iter(packing.layouts(first).values()))
    form = layout.format.removesuffix(packed.TRANSPOSED)
    linear = []
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            linear.append(name)
    if form == "fp8_block" and (names := _names_in_files(model, experts)) is not None:
        return names, {
            "quant_method": "fp8",
            "weight_block_size": [packed.BLOCK] * 2,
            "modules_to_not_convert": linear,
        }
    if form == "mxfp4" and is_transposed(first) and not isinstance(first, Experts):
        return None, {"quant_method": "mxfp4", "modules_to_not_convert": linear}
    return None, {"quant_method": METHOD, "format": form}


def _write_stacks(
    writer: CheckpointWriter,
    model: nn.Module,
    experts: dict[str, nn.Module],
    names: Names | None,
    method: str,
) -> dict[str, Tensor]:
    """Write the packed stacks, and return the model's other tensors without copies of tied ones."""
    tied = set(getattr(model, "all_tied_weights_keys", None) or ())
    stacks = []
    for path, module in experts.items():
        stacks += [f"{path}.{name}" for name in packing.layouts(module)]
    others = {}
    for key, tensor in _gathered(model, experts):
        stack = _stack_of(key, stacks)
        if stack is None:
            if key not in tied:
                others[key] = tensor.cpu()
        elif names is not None:
            for e, parts in names[stack].items():
                for (name, _), rows in zip(parts, tensor[e].chunk(len(parts))):
                    writer.add(name + key.removeprefix(stack), rows.contiguous())
        elif method == METHOD and key in (stack, f"{stack}_blocks"):
            # no other reader mistakes this for a stack
            writer.add(stack, tensor.reshape(-1, 1))
        else:
            writer.add(key, tensor)
    return others


def _stack_of(key: str, stacks: list[str]) -> str | None:
    """Return the stack that a saved tensor belongs to."""
    for stack in stacks:
        if key.startswith(stack) and not key.startswith(f"{stack}_bias"):
            return stack
    return None


def _gathered(model: nn.Module, experts: dict[str, nn.Module]) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a model by their saved names; tensors on several ranks are gathered on
    each.
    """
    stacks = {}
    for path, module in experts.items():
        for name, layout in packing.layouts(module).items():
            stacks[f"{path}.{name}"] = (module, name, layout)
    for key, tensor in model.state_dict().items():
        owner = re.sub(r"_packed\d$", "", key)
        if key in stacks and is_distributed(tensor):
            module, name, layout = stacks[key]
            saved = packing.to_saved(packing.whole(module, name), name, layout)
            for part, whole in saved.items():
                yield key.removesuffix(name) + part, whole
        elif owner == key or owner not in stacks:
            yield key, gathered(tensor)


def _names_in_files(model: nn.Module, experts: dict[str, nn.Module]) -> Names | None:
    """Return the places of each stack's matrices, if transformers loads them in FP8; otherwise
    None.

    It knows FP8 for a matrix per expert, without biases. Where it has no GPU it takes a block's
    size from the number of blocks, which is right for whole blocks and for a single one.
    """
    names = {}
    for path, module in experts.items():
        is_plain = not isinstance(module, Experts) and path.endswith(".experts")
        if not is_plain or is_transposed(module) or module.has_bias:
            return None
        for name, layout in packing.layouts(module).items():
            if any(size > packed.BLOCK and size % packed.BLOCK for size in layout.shape[1:]):
                return None
            stack = f"{path}.{name}"
            try:  # one stack alone, as transformers has the scales of one alone
                pairs = matrices_of(model, {stack: layout.shape}).get(stack)
            except ValueError:
                return None
            if pairs is None:
                return None
            for key, row in pairs[0]:
                if row is not None or not key.endswith(".weight"):
                    return None
            names[stack] = pairs
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
