"""Packed stacks of an experts module: their parameter and buffers, and their saved form.

`ops.packed` has the formats.

A packed stack keeps its name. Its bytes are a parameter that cannot be trained, its scales are
buffers of bytes, which casts of the module do not change. `ds_shape` of the parameter is the shape
of the stack that it replaces, from which PEFT creates adapters, as for a partitioned parameter. A
state_dict has the names of the library that defines the format:

    nf4        bitsandbytes: <name>, .absmax, .nested_absmax, .nested_quant_map, .quant_map,
               .quant_state.bitsandbytes__nf4
    mxfp4      GPT-OSS: <name>_blocks, <name>_scales
    fp8_block  FP8Experts: <name>, <name>_scale_inv
    int8       <name>, and <name>.SCB, bitsandbytes' name of the largest values

If experts are sharded over ranks (hf.dropin.parallel), the bytes are a DTensor, and each rank has
only its experts' scales. A state_dict holds the parameter and buffers of such a stack, or of one
sharded by FSDP2, unchanged, for torch.distributed.checkpoint; `whole` gathers it.
"""

import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from moe_runtime.config import shown
from moe_runtime.ops import packed
from moe_runtime.ops.all_to_all import is_distributed
from moe_runtime.ops.frozen_rows import Stack
from moe_runtime.ops.packed import Packed

PACKED = "moe_runtime_packed"  # attribute of an experts module: name of a stack -> Layout
STATE = ".quant_state.bitsandbytes__nf4"
KEYS = {
    "nf4": ("", ".absmax", ".nested_absmax", ".nested_quant_map"),
    "mxfp4": ("_blocks", "_scales"),
    "fp8_block": ("", "_scale_inv"),
    "int8": ("", ".SCB"),
}


class Layout(NamedTuple):
    """The format of a packed stack and the parameter that it replaces."""

    format: str  # the ops' name of it
    shape: tuple[int, int, int]  # of the stack's parameter
    dtype: torch.dtype
    scales: tuple[torch.dtype, ...]
    spread: tuple | None = None  # mesh and placements, if experts are sharded over ranks


class PackedParameter(nn.Parameter):
    """The bytes of a packed stack, permanently frozen; `packed_parameter` creates one."""

    # of the stack; an attribute of a class per shape, which copies by other packages keep
    ds_shape: torch.Size

    def __new__(cls, data: Tensor, requires_grad: bool = False) -> Any:
        """Create the parameter; integers that require a gradient raise torch's RuntimeError."""
        return super().__new__(cls, data, requires_grad)

    def __deepcopy__(self, memo: dict) -> Tensor:
        """Copy the shape too."""
        return memo.setdefault(id(self), type(self)(self.data.clone()))

    def __reduce_ex__(self, protocol: Any) -> tuple:
        """Keep the shape in pickles."""
        return packed_parameter, (self.data, self.ds_shape)


@functools.cache
def _class_of(shape: torch.Size) -> type[PackedParameter]:
    return type("PackedParameter", (PackedParameter,), {"ds_shape": shape, "__module__": __name__})


def packed_parameter(data: Tensor, shape: Sequence[int]) -> nn.Parameter:
    """Return the parameter of the bytes `data` for one of this shape; a DTensor stays one."""
    size = torch.Size(shape)
    parameter = _class_of(size)(data)
    if not isinstance(parameter, PackedParameter):
        parameter.ds_shape = size
    return parameter


def layouts(module: nn.Module) -> dict[str, Layout]:
    """Return the packed stacks of a module by name."""
    return module.__dict__.get(PACKED, {})


def is_packed(module: nn.Module, name: str) -> bool:
    """Return whether the stack `name` is packed, by us or by transformers' FP8Experts."""
    if name in layouts(module):
        return True
    return getattr(getattr(module, name, None), "dtype", None) == torch.float8_e4m3fn


def put(
    module: nn.Module,
    name: str,
    stack: Packed,
    shape: Sequence[int],
    dtype: torch.dtype,
    spread: tuple | None = None,
) -> None:
    """Replace the parameter `name` of this shape and dtype by a packed stack.

    With `spread`, a mesh and placements, `stack` holds only this rank's experts; the shape is that
    of all.
    """
    E, P, Q = shape
    dtypes = tuple(scale.dtype for scale in stack.scales)
    layout = Layout(
        stack.format,
        (E, P, Q),
        dtype,
        dtypes,
        spread,
    )
    module._parameters.pop(name, None)
    data = stack.data.view(torch.uint8)
    if spread is not None:
        data = _spread(data, spread)
    module.register_parameter(name, packed_parameter(data, shape))
    for i, scale in enumerate(stack.scales):
        codes = scale.contiguous().view(torch.uint8)
        # NF4's fifth tensor differs between ranks, so checkpoints omit it
        module.register_buffer(f"{name}_packed{i}", codes, persistent=i < 4)
    if not layouts(module):
        module.__dict__[PACKED] = {}
        module.register_state_dict_post_hook(_save)
        module.register_load_state_dict_pre_hook(_load)
    module.__dict__[PACKED][name] = layout


def _spread(local: Tensor, spread: tuple) -> Any:
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(local, *spread, run_check=False)


def pack(stack: Tensor, format: str, spread: tuple | None = None) -> Packed:
    """Pack a stack as `ops.packed.pack` does; with `spread`, this rank's experts, as if of all."""
    if spread is None:
        return packed.pack(stack, format)
    mesh = spread[0]
    count = stack.shape[0]
    n = mesh.size(-1)
    rank = mesh.get_local_rank(mesh.ndim - 1)
    group = mesh.get_group(mesh.ndim - 1)

    # every rank computes the second-level scales of all experts
    def double(largest: Tensor) -> list[Tensor]:
        part = largest.to(mesh.device_type)
        everyone = [torch.empty_like(part) for _ in range(n)]
        dist.all_gather(everyone, part, group=group)
        scales = packed.nest(torch.cat(everyone).to(largest.device))
        return packed.part_of_scales(
            scales,
            n * count,
            rank * count,
            (rank + 1) * count,
        )

    return packed.pack(stack, format, double)


def get(module: nn.Module, name: str) -> Packed:
    """Return views of the packed stack `name` for the ops, with this rank's experts."""
    layout = layouts(module)[name]
    data = getattr(module, name)
    data = data.to_local() if is_distributed(data) else data.data
    scales = []
    for i, dtype in enumerate(layout.scales):
        scales.append(getattr(module, f"{name}_packed{i}").view(dtype))
    return Packed(data.view(packed.of_name(layout.format).dtype), scales, layout.format)


def whole(module: nn.Module, name: str) -> Packed:
    """Return the packed stack `name` with all experts; all ranks call this if it is sharded."""
    layout = layouts(module)[name]
    parameter = getattr(module, name)
    data, (head, *rest), form = get(module, name)
    if layout.spread is not None:
        head = _spread(head.view(torch.uint8), layout.spread).full_tensor().view(head.dtype)
    if is_distributed(parameter):
        data = parameter.full_tensor().view(data.dtype)
    return Packed(data, [head, *rest[:3]], form)


def stack_of(module: nn.Module, name: str, transposed: bool) -> Stack:
    """Return the packed stack `name` [E, out, in] for `frozen_mlp`, ours or that of FP8Experts.

    With sharded experts it holds this rank's. Raises ValueError for a stack that is distributed in
    another way.
    """
    layout = layouts(module).get(name)
    if is_distributed(getattr(module, name)) and (layout is None or layout.spread is None):
        raise ValueError(
            f"{name} is quantized and distributed over ranks, but every rank needs every expert, "
            "or experts distributed by parallel.shard_experts (FSDP2: shard the layer)"
        )
    if layout is not None:
        codes, scales, form = get(module, name)
        _, out, size = layout.shape
        if transposed:
            out, size = size, out
        return Stack(codes, scales, form, (codes.shape[0], out, size))
    data = getattr(module, name).detach()
    # transformers' scales may be powers of two in 8 bits, or in 16 bits after a cast of the model;
    # the kernels read float32
    scale = getattr(module, f"{name}_scale_inv").detach().float().contiguous()
    return Stack(data, [scale], "fp8_block", tuple(data.shape))


def _save(
    module: nn.Module,
    state_dict: dict,
    prefix: str,
    metadata: dict,
) -> None:
    for name, layout in layouts(module).items():
        scales = _buffers(layout, name)
        if not is_distributed(getattr(module, name)):
            for key in (name, *scales):
                del state_dict[prefix + key]
            for key, tensor in to_saved(get(module, name), name, layout).items():
                state_dict[prefix + key] = tensor
        elif layout.spread is not None:
            state_dict[prefix + scales[0]] = _spread(getattr(module, scales[0]), layout.spread)


def _buffers(layout: Layout, name: str) -> list[str]:
    return [f"{name}_packed{i}" for i in range(min(len(layout.scales), 4))]


def to_saved(stack: Packed, name: str, layout: Layout) -> dict[str, Tensor]:
    """Return the tensors of a whole packed stack by their saved names, in their saved shapes."""
    data, scales, form = stack
    form = form.removesuffix(packed.TRANSPOSED)
    if form == "mxfp4":
        data = data.view(*scales[0].shape, 16)
    if form == "nf4":
        data = data.view(-1, 1)
    saved = {name + suffix: tensor for suffix, tensor in zip(KEYS[form], (data, *scales))}
    if form != "nf4":
        return saved
    state = {
        "quant_type": "nf4",
        "blocksize": 64,
        "dtype": str(layout.dtype).removeprefix("torch."),
        "shape": list(layout.shape),
        "nested_blocksize": packed.NESTED,
        "nested_dtype": "float32",
        "nested_offset": float(scales[3]),
    }
    saved[f"{name}.quant_map"] = torch.tensor(packed.NF4, device=data.device)
    saved[name + STATE] = torch.frombuffer(bytearray(json.dumps(state).encode()), dtype=torch.uint8)
    return saved


def bytes_of_saved(
    saved: Mapping[str, Tensor],
    name: str,
    form: str,
    shape: torch.Size,
) -> Tensor:
    """Return the stack `name` of a state_dict as the bytes of its parameter of this shape."""
    key = name + KEYS[form.removesuffix(packed.TRANSPOSED)][0]
    return saved[key].contiguous().view(torch.uint8).view(shape)


def from_saved(
    name: str,
    form: str,
    shape: Sequence[int],
    tensors: dict[str, Tensor],
    experts: int | None = None,
) -> Packed:
    """Return the packed stack [E, P, Q] from the tensors of `to_saved`.

    `experts` is the number of experts in the tensors, by default all; NF4's second-level scales are
    always those of all. Raises ValueError, with the name of the tensor, if one is missing or does
    not fit format and shape.
    """
    base = form.removesuffix(packed.TRANSPOSED)
    all_experts, P, Q = shape
    E = experts or all_experts
    keys = [name + suffix for suffix in KEYS[base]]
    if base == "nf4":
        keys.append(name + STATE)
    if name in tensors and tensors[name].dtype in (*packed.FLOATS, torch.float64):
        raise ValueError(
            f"{name} must be packed as {base}, but is {list(tensors[name].shape)} "
            f"{tensors[name].dtype}, which is not quantized. Load such weights into the model "
            "before quantize_experts"
        )
    if missing := [key for key in keys if key not in tensors]:
        raise ValueError(
            f"{name} is packed as {base}, but {missing[0]} is missing from {', '.join(keys)}"
        )
    data, *scales = (tensors[key] for key in keys)
    if base == "nf4":
        offset = _offset_of(keys[-1], scales.pop(), shape)
        scales.append(torch.tensor([offset], device=data.device))
        _check_map(keys[3], scales[2], packed.dynamic_map())
        if f"{name}.quant_map" in tensors:
            _check_map(f"{name}.quant_map", tensors[f"{name}.quant_map"], torch.tensor(packed.NF4))
    fmt = packed.of_name(base)
    width = Q * fmt.data_bits // 8
    if data.numel() != E * P * width or data.dtype != fmt.dtype:
        raise ValueError(
            f"{keys[0]} must have {E * P * width} elements of {fmt.dtype} for {[E, P, Q]}, but is "
            f"{list(data.shape)} {data.dtype}"
        )
    stack = Packed(data.reshape(E, P, width), [scale.contiguous() for scale in scales], form)
    checked = stack.scales
    if all_experts > E and base == "nf4":
        nested = stack.scales[1].numel()
        if nested != -(-all_experts * P * Q // 64 // packed.NESTED):
            raise ValueError(
                f"{keys[2]} must be that of {all_experts} experts, but has {nested} elements"
            )
        checked = [*checked, torch.zeros(1, dtype=torch.int64)]
    wrong = packed.wrong_tensor(stack.data, checked, form)
    if wrong is not None:
        at, problem = wrong
        raise ValueError(f"{keys[at]} {problem}")
    scales = [as_read(key, scale) for key, scale in zip(keys[1:], stack.scales)]
    return stack._replace(scales=scales)


def as_read(key: str, scale: Tensor) -> Tensor:
    """Return scales as the kernels read them, float32 or bytes; ValueError for NaN and infinity."""
    if scale.dtype != torch.uint8:
        scale = scale.float()
    if scale.is_floating_point() and not scale.isfinite().all():
        raise ValueError(
            f"{key} has elements that are NaN or infinite. Download or quantize the model again"
        )
    return scale


def _offset_of(key: str, tensor: Tensor, shape: Sequence[int]) -> float:
    """Return the offset in the JSON of NF4's state; raises ValueError for other formats' fields."""
    expected = {
        "quant_type": "nf4",
        "blocksize": 64,
        "nested_blocksize": packed.NESTED,
        "nested_dtype": "float32",
        "shape": list(shape),
    }
    try:
        state = json.loads(bytes(tensor.flatten().tolist()))
        fields = {field: state[field] for field in (*expected, "nested_offset", "dtype")}
    except (TypeError, ValueError, KeyError, RecursionError) as error:
        raise ValueError(
            f"{key} must be the bytes of an NF4 state in JSON, but cannot be read: {error}"
        ) from error
    offset = fields["nested_offset"]
    known = sorted(str(dtype).removeprefix("torch.") for dtype in packed.FLOATS)
    problem = None
    for field, value in expected.items():
        if json.dumps(fields[field]) != json.dumps(value):
            problem = (field, value)
            break
    largest = torch.finfo(torch.float32).max
    if problem is None and (type(offset) not in (int, float) or not abs(offset) <= largest):
        problem = ("nested_offset", "a finite number")
    if problem is None and fields["dtype"] not in known:
        problem = ("dtype", f"one of {known}")
    if problem is not None:
        field, valid = problem
        raise ValueError(f"{field} in {key} must be {valid}, but is {shown(fields[field])}")
    return float(offset)


def _check_map(key: str, table: Tensor, expected: Tensor) -> None:
    same = table.shape == expected.shape and table.dtype == expected.dtype
    if not same or not torch.allclose(
        table.cpu(),
        expected.cpu(),
        rtol=1e-5,
        atol=0,
    ):
        raise ValueError(
            f"{key} must be bitsandbytes' {list(expected.shape)} {expected.dtype} values, but is "
            f"{list(table.shape)} {table.dtype} with other values"
        )


def _load(
    module: nn.Module,
    state_dict: dict,
    prefix: str,
    metadata: dict,
    strict: bool,
    missing: list,
    unexpected: list,
    errors: list,
) -> None:
    for name, layout in layouts(module).items():
        given = {}
        for key in list(state_dict):
            if key.startswith(prefix + name) and not key.startswith(prefix + name + "_bias"):
                given[key.removeprefix(prefix)] = state_dict.pop(key)
        tensors = {name: getattr(module, name).data}
        for key in _buffers(layout, name):
            tensors[key] = getattr(module, key)
        try:
            # DTensors with a stack's bytes are loaded like any others
            if is_distributed(tensors[name]):
                if given:
                    tensors = {key: _local_unless(key == name, given[key]) for key in tensors}
            elif given:
                base = layout.format.removesuffix(packed.TRANSPOSED)
                shape = packed.shape_of(get(module, name).data, base)
                stack = from_saved(name, layout.format, shape, given)
                tensors[name] = stack.data.view(torch.uint8)
                for key, scale in zip(_buffers(layout, name), stack.scales):
                    tensors[key] = scale.view(torch.uint8)
            else:  # left to strict=True to report
                continue
        except KeyError as error:
            errors.append(
                f"{prefix}{name} is quantized and distributed, but {error} is missing. Pass the "
                "state_dict of such a model"
            )
        except ValueError as error:
            errors.append(f"{prefix}{error}")
        state_dict.update({prefix + key: tensor for key, tensor in tensors.items()})


def _local_unless(is_stack: bool, tensor: Any) -> Tensor:
    """Return this rank's part of the scales, or a whole stack, as it is saved."""
    if is_distributed(tensor) and not is_stack:
        return tensor.to_local()
    return tensor
