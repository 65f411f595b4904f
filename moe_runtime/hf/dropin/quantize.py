"""Quantize a model's experts, and load or save models whose experts are quantized, without the stacks in 16 bits.

    quantize_experts(model, "nf4")      the stacks of a model in memory, one at a time
    load_quantized(folder, "nf4")       a folder or a Hub id's local copy: every expert is packed as it is read
    save_quantized(model, folder)       MXFP4 as GPT-OSS and FP8 as DeepSeek-V3 for transformers, the rest for load_quantized

A packed stack cannot train; adapters on it can (PEFT's `target_parameters`). Attention, router and embeddings stay as they are.
"""

import json
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.utils import parametrize

from moe_runtime.hf.dropin.gates import gate_of, is_experts, stack_names
from moe_runtime.io.checkpoint import Checkpoint, CheckpointWriter
from moe_runtime.modules import packed as modules
from moe_runtime.modules import trainable
from moe_runtime.modules.moe import Experts
from moe_runtime.ops import all_to_all, packed

METHOD = "moe_runtime"  # quant_method of a config.json whose stacks only load_quantized reads


class Quantized(NamedTuple):
    """What was quantized, in bytes of the experts' stacks."""

    format: str
    layers: int
    before: int
    after: int

    def __str__(self) -> str:
        """Say it in a line."""
        return f"{self.layers} layers of experts in {self.format}: {self.before:,} bytes before, {self.after:,} after"


def quantize_experts(model: nn.Module, format: str) -> Quantized:
    """Pack the expert stacks of `model`, stock or ours, in place: format "nf4", "mxfp4", "fp8_block" or "int8".

    One stack at a time is held twice. The model then runs on moe_runtime alone (`patch`), its stacks stay frozen, and
    `save_pretrained` refuses it (`save_quantized`). Raises ValueError, before anything changes, for stacks that are packed
    already, that a format cannot hold, that are spread over ranks or trained separately, and for a model without experts.
    """
    packed.of_name(format)
    found = experts_of(model)
    for name, module in found.items():
        _check(name, module, format)
    before = after = 0
    for module in found.values():
        for name in _names(module):
            stack = getattr(module, name)
            before += stack.numel() * stack.element_size()
            stored, kind = stored_as(module, stack.detach(), format)
            modules.put(module, name, packed.pack(stored, format)._replace(format=kind), stack.shape, stack.dtype)
            after += bytes_of(module, name)
            del stack, stored
    _refuse_to_save(model)
    _run_here(model)
    receipt = Quantized(format, len(found), before, after)
    print(receipt)
    return receipt


def experts_of(model: nn.Module) -> dict[str, nn.Module]:
    """Return the experts modules of a model, stock or ours, by path; ValueError if there is none."""
    found = {name: module for name, module in model.named_modules() if isinstance(module, Experts) or is_experts(module)}
    if not found:
        raise ValueError(f"{type(model).__name__} has no experts that moe_runtime supports (see docs/families.md)")
    return found


def _names(module: nn.Module) -> tuple[str, ...]:
    return (module.stacks() if isinstance(module, Experts) else stack_names(module))[:2]


def _transposed(module: nn.Module) -> bool:
    return bool(getattr(module, "is_transposed", False))


def stored_as(module: nn.Module, stack: torch.Tensor, format: str) -> tuple[torch.Tensor, str]:
    """Return a stack in the order in which it is packed, and that format's name for the ops.

    bitsandbytes packs a parameter as it lies; the other formats go along `in`.
    """
    if not _transposed(module):
        return stack, format
    return (stack, format + packed.TRANSPOSED) if format == "nf4" else (stack.transpose(1, 2), format)


def bytes_of(module: nn.Module, name: str) -> int:
    """Return the bytes of a packed stack."""
    data, scales, _ = modules.get(module, name)
    return sum(tensor.numel() * tensor.element_size() for tensor in (data, *scales))


def _check(path: str, module: nn.Module, format: str) -> None:
    """Raise ValueError unless the experts `module` can be packed."""
    activation = module.activation() if isinstance(module, Experts) else gate_of(module)
    for name in _names(module):
        stack, reason = getattr(module, name), None
        if modules.is_packed(module, name):
            reason = "it is already quantized. Load the model in 16 bits"
        elif all_to_all.is_distributed(stack):
            reason = "it is distributed over ranks. Quantize before parallelizing"
        elif trainable.split_of(module) is not None or parametrize.is_parametrized(module, name):
            reason = "some of its experts train, or it has a parametrization. Undo that first"
        elif activation is None:
            reason = f"{type(module).__name__} computes what no kernel does between its products"
        elif stack.dtype not in packed.FLOATS or type(stack.detach()) is not torch.Tensor:
            reason = f"it must be float16, bfloat16 or float32, but is a {type(stack.detach()).__name__} of {stack.dtype}"
        else:
            halves = name == "gate_up_proj" and not activation.interleaved
            stored, kind = stored_as(module, stack, format)
            reason = packed.why_not(stored.shape, kind, halves)
        if reason:
            raise ValueError(f"{path}.{name} {list(stack.shape)} cannot be quantized to {format}: {reason}")


def _refuse_to_save(model: nn.Module) -> None:
    """Let save_pretrained raise: it would take packed bytes for weights."""
    from transformers import PreTrainedModel

    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            module.save_pretrained = _save_pretrained


def _save_pretrained(*args, **kwargs):
    raise ValueError(
        "The experts are quantized, which save_pretrained does not support. Save the model with "
        "moe_runtime.save_quantized(model, folder), or only its adapter with the PEFT model's save_pretrained"
    )


def _run_here(model: nn.Module) -> None:
    """Let stock experts run on moe_runtime, which alone reads packed stacks."""
    from moe_runtime.hf.dropin.experts import patch

    patch(model)


class _File:
    """A stack of a folder's tensors, read one expert at a time; what `packed.pack` takes in place of a tensor."""

    def __init__(self, checkpoint: Checkpoint, parts: dict[int, list[tuple[str, int | None]]], shape, dtype, read):
        self.checkpoint, self.parts, self.shape, self.dtype, self.read = checkpoint, parts, torch.Size(shape), dtype, read
        self.device = torch.device("cpu")

    def dim(self) -> int:
        """Return the number of dimensions."""
        return len(self.shape)

    def __getitem__(self, e: int) -> torch.Tensor:
        """Return expert e's weight [P, Q]: of one tensor, or of gate and up."""
        pieces = [self.read(self.checkpoint, key, row).to(self.dtype) for key, row in self.parts[e]]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def _dense(checkpoint: Checkpoint, key: str, row: int | None) -> torch.Tensor:
    """Read a matrix, or one of a stack; out of FP8 in blocks if its scales are beside it."""
    weight = checkpoint.get(key) if row is None else checkpoint.get_rows(key, row)
    scale = f"{key}_scale_inv"
    if weight.dtype != torch.float8_e4m3fn or scale not in checkpoint:
        return weight
    inverse = checkpoint.get(scale) if row is None else checkpoint.get_rows(scale, row)
    return packed.unpack(weight[None], [inverse.float()[None]], "fp8_block", 0, torch.float32)


def load_quantized(source: str | Path, format: str | None = None, **settings: Any) -> nn.Module:
    """Load the model of a folder with its experts packed; the stacks never exist in 16 bits, one expert at a time does.

    `format` as of `quantize_experts`; by default what the folder's experts are in: MXFP4 (GPT-OSS), FP8 in blocks
    (DeepSeek-V3), or what `save_quantized` wrote. Packed bytes of the same format are kept as they are.
    `settings` go to from_pretrained.
    Raises ValueError, before the weights are read, where `quantize_experts` would.
    """
    from transformers import AutoConfig

    from moe_runtime.hf.models.folders import load

    source = Path(source)
    config = load(AutoConfig, source)
    quantization = getattr(config, "quantization_config", None) or {}
    quantization = quantization if isinstance(quantization, dict) else quantization.to_dict()
    method = str(quantization.get("quant_method", ""))
    held = {"mxfp4": "mxfp4", "fp8": "fp8_block", METHOD: quantization.get("format")}.get(method)
    format = format or held
    if format is None or (method and held is None):
        raise ValueError(
            f"format must be one of {list(packed.FORMATS)}, but got {format!r} for {source}, quantized by {method or 'nothing'}"
        )
    packed.of_name(format)
    checkpoint = Checkpoint(source)
    if method in ("mxfp4", METHOD):  # of the experts alone, which are read here
        del config.quantization_config
    model, shapes = _without_stacks(config, source, format, settings)
    for path, module in experts_of(model).items():
        for name in _names(module):
            if (path, name) not in shapes or name in module._parameters:  # transformers has kept it packed
                continue
            shape, dtype = shapes[path, name]
            stack = _read_stack(checkpoint, module, path, name, shape, dtype, held, format)
            stack = stack._replace(data=stack.data.to(model.device), scales=[scale.to(model.device) for scale in stack.scales])
            modules.put(module, name, stack, shape, dtype)
    _refuse_to_save(model)
    _run_here(model)
    return model


def _without_stacks(config, source: Path, format: str, settings: dict):
    """Load the model without its stacks, which its class leaves out; return it, and the stacks' shapes and dtypes."""
    import transformers

    from moe_runtime.hf.models.folders import load

    shapes, base = {}, getattr(transformers, (config.architectures or [""])[0], None)
    if base is None:
        raise ValueError(f"{source} is a {(config.architectures or ['model'])[0]}, which is not a class of transformers")

    def __init__(self, *args, **kwargs):
        base.__init__(self, *args, **kwargs)
        for path, module in experts_of(self).items():
            _check(path, module, format)
            for name in _names(module):
                shapes[path, name] = tuple(getattr(module, name).shape), getattr(module, name).dtype
                module._parameters.pop(name)
            module._is_hf_initialized = True  # nothing of it is to be drawn

    passed_over = [*(base._keys_to_ignore_on_load_unexpected or ()), r"\.experts\."]
    attributes = {"__init__": __init__, "__module__": base.__module__, "_keys_to_ignore_on_load_unexpected": passed_over}
    model = load(type(base.__name__, (base,), attributes), source, config=config, **settings)
    model.__class__ = base
    return model, shapes


def _read_stack(checkpoint, module, path: str, name: str, shape, dtype, held: str | None, format: str) -> packed.Packed:
    """Return the stack `name` of a folder packed to `format`."""
    key, order = f"{path}.{name}", torch.empty(shape, device="meta")
    stored, kind = stored_as(module, order, format)
    if held is not None and (key in checkpoint or f"{key}_blocks" in checkpoint):
        names = [entry for entry in checkpoint if entry.startswith(key) and not entry.startswith(f"{key}_bias")]
        tensors = {entry.removeprefix(f"{path}."): checkpoint.get(entry) for entry in names}
        if held == "mxfp4":
            tensors = {f"{name}_blocks" if entry == name else entry: tensor for entry, tensor in tensors.items()}
        before, found = stored_as(module, order, held)
        own = modules.from_saved(name, found, before.shape, tensors)
        if held == format:  # as it is
            return own
        return packed.pack(_Unpacked(own, stored.shape, dtype, kind), format)._replace(format=kind)
    parts = _parts(checkpoint, path, name, shape)
    if held == format == "fp8_block":
        return _fp8_as_it_is(checkpoint, parts, shape)
    read = (lambda *where: _dense(*where).t()) if _transposed(module) and kind == format else _dense
    return packed.pack(_File(checkpoint, parts, stored.shape, dtype, read), format)._replace(format=kind)


class _Unpacked:
    """A packed stack, unpacked one expert at a time; what `packed.pack` takes in place of a tensor."""

    def __init__(self, own: packed.Packed, shape, dtype: torch.dtype, kind: str):
        self.own, self.shape, self.dtype, self.device = own, torch.Size(shape), dtype, own.data.device
        self.turn = kind.endswith(packed.TRANSPOSED)

    def dim(self) -> int:
        """Return the number of dimensions."""
        return 3

    def __getitem__(self, e: int) -> torch.Tensor:
        """Return expert e's weight in the order in which it is packed anew."""
        weight = packed.unpack(*self.own, e, self.dtype)
        return weight.t() if self.turn else weight


def _fp8_as_it_is(checkpoint, parts, shape) -> packed.Packed:
    """Return a stack of per-expert FP8 matrices; their blocks of scales one above the other."""
    data = torch.empty(shape, dtype=torch.float8_e4m3fn)
    scales = torch.empty(shape[0], -(-shape[1] // packed.BLOCK), -(-shape[2] // packed.BLOCK))
    for e, keys in parts.items():
        torch.cat([checkpoint.get(key).view(torch.uint8) for key, _ in keys], out=data[e].view(torch.uint8))
        scales[e] = torch.cat([checkpoint.get(f"{key}_scale_inv").float() for key, _ in keys])
    return packed.Packed(data, [scales], "fp8_block")


# how files name the projections of an expert
_PROJECTIONS = {
    "gate_up_proj": (("gate_proj", "up_proj"), ("w1", "w3"), ("gate_up_proj",), ("gate", "up")),
    "down_proj": (("down_proj",), ("w2",), ("down",)), "up_proj": (("up_proj",), ("w1",), ("up",)),
}  # fmt: skip


def _parts(checkpoint, path: str, name: str, shape) -> dict[int, list]:
    """Return where a file has each expert's matrix, as (key, row) or two of them."""
    key = f"{path}.{name}"
    if key in checkpoint and checkpoint.specs()[key].shape == tuple(shape):
        return {e: [(key, e)] for e in range(shape[0])}
    for layer in (path, *(path.replace(".mlp.", f".{other}.") for other in ("block_sparse_moe", "feed_forward", "moe"))):
        for names in _PROJECTIONS[name]:
            parts = {e: [(f"{layer}.{e}.{part}.weight", None) for part in names] for e in range(shape[0])}
            if all(entry in checkpoint for keys in parts.values() for entry, _ in keys):
                sizes = [checkpoint.specs()[entry].shape for entry, _ in parts[0]]
                if (sum(size[0] for size in sizes), sizes[0][1]) == tuple(shape[1:]):
                    return parts
    raise ValueError(
        f"{checkpoint.path} has neither {key} {list(shape)} nor its matrices {path}.0.*.weight. Load it with from_pretrained "
        "and call quantize_experts"
    )


def save_quantized(model: nn.Module, folder: str | Path, *, overwrite: bool = False) -> Path:
    """Write a model with packed experts: config.json and safetensors, by the names that read them.

    MXFP4 and FP8 become what transformers loads (GPT-OSS's names; a matrix for each expert and its weight_scale_inv); NF4 and
    int8 what `load_quantized` does. Raises ValueError for a model without packed experts or with PEFT's wrappers.
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
    config["architectures"] = [type(model).__name__]
    config["dtype"] = str(model.dtype).removeprefix("torch.")
    readable = {
        "mxfp4": {"quant_method": "mxfp4", "modules_to_not_convert": linear},
        "fp8_block": {"quant_method": "fp8", "weight_block_size": [128, 128], "modules_to_not_convert": linear},
    }
    # transformers takes GPT-OSS's MXFP4 for transposed, and splits experts of FP8 into matrices without biases
    known = {"mxfp4": _transposed(first), "fp8_block": not (_transposed(first) or getattr(first, "has_bias", False))}
    known = known.get(form, False) and not isinstance(first, Experts)
    config["quantization_config"] = readable[form] if known else {"quant_method": METHOD, "format": form}
    tied = set(getattr(model, "all_tied_weights_keys", None) or ())
    with CheckpointWriter(folder, overwrite=overwrite) as writer:
        for key, tensor in model.state_dict().items():
            if key in tied:
                continue
            path = next((path for path in experts if key.startswith(path)), None)
            if form == "fp8_block" and known and path:
                for name, part in _per_expert(path, key.removeprefix(path), tensor):
                    writer.add(name, part)
            elif path and not known and key.removeprefix(path).removesuffix("_blocks") in modules.layouts(found[path[:-1]]):
                writer.add(key.removesuffix("_blocks"), tensor.reshape(-1, 1))  # no other reader takes this for a stack
            else:
                writer.add(key, tensor)
        writer.write_text("config.json", json.dumps(config, indent=2, sort_keys=True) + "\n")
        if getattr(model, "generation_config", None) is not None:
            writer.write_text("generation_config.json", model.generation_config.to_json_string())
    return Path(folder)


def _per_expert(path: str, name: str, stack: torch.Tensor):
    """Yield the matrices of an FP8 stack, or of its scales, as DeepSeek-V3's files name them."""
    base = name.removesuffix("_scale_inv")
    names = ("gate_proj", "up_proj") if base == "gate_up_proj" else (base,)
    suffix = "weight_scale_inv" if name != base else "weight"
    for e in range(stack.shape[0]):
        for part, rows in zip(names, stack[e].chunk(len(names))):
            yield f"{path}{e}.{part}.{suffix}", rows.contiguous()
