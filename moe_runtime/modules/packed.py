"""Packed stacks of an experts module: what takes a stack's place, and how it is saved (`ops.packed` has the formats).

A packed stack keeps its name. Its bytes are a parameter that nothing can train, its scales are buffers of bytes, which no cast
of the module reaches. `ds_shape` of the parameter is the shape of the stack that it replaces: PEFT makes adapters by it, as
for a partitioned parameter. A state_dict has the names of the library whose format it is:

    nf4        bitsandbytes: <name>, .absmax, .nested_absmax, .nested_quant_map, .quant_map, .quant_state.bitsandbytes__nf4
    mxfp4      GPT-OSS: <name>_blocks, <name>_scales          fp8_block   FP8Experts: <name>, <name>_scale_inv
    int8       <name>, and <name>.SCB as bitsandbytes calls the largest values
"""

import json
from typing import NamedTuple

import torch
from torch import nn

from moe_runtime.ops import packed
from moe_runtime.ops.all_to_all import is_distributed
from moe_runtime.ops.frozen_rows import Stack
from moe_runtime.ops.packed import Packed

PACKED = "moe_runtime_packed"  # attribute of an experts module: name of a stack -> Layout
STATE = ".quant_state.bitsandbytes__nf4"
KEYS = {
    "nf4": ("", ".absmax", ".nested_absmax", ".nested_quant_map"),
    "mxfp4": ("_blocks", "_scales"), "fp8_block": ("", "_scale_inv"), "int8": ("", ".SCB"),
}  # fmt: skip


class Layout(NamedTuple):
    """What a packed stack replaces."""

    format: str  # as the ops take it
    shape: tuple[int, ...]  # of the stack's parameter
    dtype: torch.dtype
    scales: tuple[torch.dtype, ...]

    def logical(self, transposed: bool) -> tuple[int, int, int]:
        """Return E, out, in."""
        E, a, b = self.shape
        return (E, b, a) if transposed else (E, a, b)


class PackedParameter(nn.Parameter):
    """The bytes of a packed stack, frozen for good."""

    def __new__(cls, data: torch.Tensor, shape):
        """Make the parameter that takes the place of one of this shape."""
        self = super().__new__(cls, data, False)
        self.ds_shape = torch.Size(shape)
        return self

    def __deepcopy__(self, memo):
        """Copy the shape too."""
        return memo.setdefault(id(self), type(self)(self.data.clone(), self.ds_shape))

    def __reduce_ex__(self, protocol):
        """Keep the shape in pickles."""
        return type(self), (self.data, self.ds_shape)

    __torch_function__ = torch._C._disabled_torch_function_impl


def layouts(module: nn.Module) -> dict[str, Layout]:
    """Return the packed stacks of a module by name."""
    return module.__dict__.get(PACKED, {})


def is_packed(module: nn.Module, name: str) -> bool:
    """Whether the stack `name` is packed, by us or as transformers' FP8Experts has it."""
    return name in layouts(module) or getattr(getattr(module, name, None), "dtype", None) == torch.float8_e4m3fn


def put(module: nn.Module, name: str, stack: Packed, shape, dtype: torch.dtype) -> None:
    """Let a packed stack take the place of the parameter `name` of this shape and dtype."""
    layout = Layout(stack.format, tuple(shape), dtype, tuple(scale.dtype for scale in stack.scales))
    module._parameters.pop(name, None)
    module.register_parameter(name, PackedParameter(stack.data.view(torch.uint8), shape))
    for i, scale in enumerate(stack.scales):
        module.register_buffer(f"{name}_packed{i}", scale.contiguous().view(torch.uint8), persistent=False)
    if not layouts(module):
        module.__dict__[PACKED] = {}
        module.register_state_dict_post_hook(_save)
        module.register_load_state_dict_pre_hook(_load)
    module.__dict__[PACKED][name] = layout


def get(module: nn.Module, name: str) -> Packed:
    """Return the packed stack `name` as the ops take it; views."""
    layout = layouts(module)[name]
    data = getattr(module, name).data.view(packed.of_name(layout.format).dtype)
    scales = [getattr(module, f"{name}_packed{i}").view(dtype) for i, dtype in enumerate(layout.scales)]
    return Packed(data, scales, layout.format)


def stack_of(module: nn.Module, name: str, transposed: bool) -> Stack:
    """Return the packed stack `name` [E, out, in] for `frozen_mlp`: one of ours, or FP8Experts' own parameters.

    Raises ValueError for one that is spread over ranks, whose scales are not.
    """
    if is_distributed(getattr(module, name)):
        raise ValueError(
            f"{name} is quantized and distributed over ranks, but every rank needs every expert (FSDP2: shard the layer)"
        )
    if name in layouts(module):
        return Stack(*get(module, name), layouts(module)[name].logical(transposed))
    data = getattr(module, name).detach()
    return Stack(data, [getattr(module, f"{name}_scale_inv").detach()], "fp8_block", tuple(data.shape))


def _save(module: nn.Module, state_dict, prefix: str, metadata) -> None:
    for name in layouts(module):
        del state_dict[prefix + name]
        state_dict.update({prefix + key: tensor for key, tensor in to_saved(module, name).items()})


def to_saved(module: nn.Module, name: str) -> dict[str, torch.Tensor]:
    """Return the tensors of a packed stack by the names and in the shapes in which they are saved."""
    (data, scales, form), layout = get(module, name), layouts(module)[name]
    form = form.removesuffix(packed.TRANSPOSED)
    if form == "mxfp4":
        data = data.view(*scales[0].shape, 16)
    if form != "nf4":
        return {f"{name}{suffix}": tensor for suffix, tensor in zip(KEYS[form], (data, *scales))}
    saved = {f"{name}{suffix}": tensor for suffix, tensor in zip(KEYS[form], (data.view(-1, 1), *scales))}
    state = {
        "quant_type": "nf4", "blocksize": 64, "dtype": str(layout.dtype).removeprefix("torch."), "shape": list(layout.shape),
        "nested_blocksize": packed.NESTED, "nested_dtype": "float32", "nested_offset": float(scales[3]),
    }  # fmt: skip
    saved[f"{name}.quant_map"] = torch.tensor(packed.NF4, device=data.device)
    saved[name + STATE] = torch.frombuffer(bytearray(json.dumps(state).encode()), dtype=torch.uint8)
    return saved


def from_saved(name: str, form: str, shape, tensors: dict[str, torch.Tensor]) -> Packed:
    """Return the packed stack that `to_saved` gave, of a format and a shape [E, P, Q]; ValueError if it does not fit."""
    base, (E, P, Q) = form.removesuffix(packed.TRANSPOSED), shape
    keys = [name + suffix for suffix in KEYS[base]] + ([name + STATE] if base == "nf4" else [])
    if missing := [key for key in keys if key not in tensors]:
        raise ValueError(f"{name} is packed as {base}, but {missing[0]} is missing from {', '.join(keys)}")
    data, *scales = (tensors[key] for key in keys)
    if base == "nf4":
        state = json.loads(bytes(scales.pop().tolist()))
        scales.append(torch.tensor([state.get("nested_offset", 0.0)], device=data.device))
        found = state.get("blocksize"), state.get("nested_blocksize"), state.get("shape")
        if found != (64, packed.NESTED, list(shape)):
            raise ValueError(
                f"{name} must have NF4 blocks, blocks of scales and a shape of 64, {packed.NESTED}, {list(shape)}, but has "
                f"{found}"
            )
    width = Q * packed.of_name(base).data_bits // 8
    if data.numel() * data.element_size() != E * P * width:
        raise ValueError(f"{name} must have {E * P * width} bytes for {list(shape)}, but is {list(data.shape)} {data.dtype}")
    return Packed(data.view(torch.uint8).view(E, P, width).view(packed.of_name(base).dtype), scales, form)


def _load(module: nn.Module, state_dict, prefix: str, metadata, strict, missing, unexpected, errors) -> None:
    for name, layout in layouts(module).items():
        names = [key for key in state_dict if key.startswith(prefix + name) and not key.startswith(prefix + name + "_bias")]
        given = {key.removeprefix(prefix): state_dict.pop(key) for key in names}
        own = get(module, name)
        try:
            found = from_saved(name, layout.format, _stored(layout, own), given) if given else None
        except ValueError as error:
            errors.append(f"{prefix}{error}")
            found = None
        if found is None:
            state_dict[prefix + name] = getattr(module, name).data  # as it is
            continue
        state_dict[prefix + name] = found.data.view(torch.uint8)
        for mine, theirs in zip(own.scales, found.scales, strict=True):
            mine.copy_(theirs)


def _stored(layout: Layout, own: Packed) -> tuple[int, int, int]:
    return packed.shape_of(own.data, layout.format.removesuffix(packed.TRANSPOSED))
