"""Quantize a model's experts, and load models with quantized experts without ever holding 16-bit
stacks.

    quantize_experts(model, "nf4")      the stacks of a model in memory, one at a time
    load_quantized(folder, "nf4")       a folder or a Hub id's local copy: every expert is packed as
                                        it is read

`hf.dropin.quantized_files` writes such models. Packed stacks cannot be trained, but adapters on
them can (PEFT's `target_parameters`). Attention, routers and embeddings are not quantized.
"""

import functools
import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.utils import parametrize

from moe_runtime.config import shown
from moe_runtime.hf.common.sharded import local_part
from moe_runtime.hf.dropin import offload
from moe_runtime.hf.dropin.expert_names import Places, matrices_of, parts_in_file
from moe_runtime.hf.dropin.gates import NAME, gate_of, has_stacks, is_experts, stack_names
from moe_runtime.io.checkpoint import Checkpoint
from moe_runtime.modules import packed as modules
from moe_runtime.modules import trainable
from moe_runtime.modules.moe import is_quantized, named
from moe_runtime.ops import all_to_all, packed

BLOCKS = [packed.BLOCK] * 2  # weight_block_size of a config.json in FP8
METHOD = "moe_runtime"  # quant_method of a config.json whose stacks only load_quantized reads


class Quantized(NamedTuple):
    """What `quantize_experts` did.

    Attributes:
        format: The format, such as "nf4".
        layers: Number of layers whose experts are packed.
        before: Bytes of the expert stacks before.
        after: Bytes after, scales included.
    """

    format: str
    layers: int
    before: int
    after: int

    def __str__(self) -> str:
        """Return a one-line summary."""
        return (
            f"{self.layers} layers of experts in {self.format}: {self.before:,} bytes before, "
            f"{self.after:,} after"
        )


def quantize_experts(model: nn.Module, format: str) -> Quantized:
    """Pack the expert stacks of a model in place.

    The model then runs only on moe_runtime (`patch`), its stacks stay frozen, and `save_pretrained`
    raises an error (use `save_quantized`). Memory holds one stack at a time twice.

    Args:
        model: A stock MoE model, or one of ours. With `shard_experts`, every rank must call this,
            and packs its own experts.
        format: "nf4", "mxfp4", "fp8_block" or "int8".

    Returns:
        The number of layers, and the bytes before and after.

    Raises:
        ValueError: Before anything changes, if the stacks are packed already, do not fit the
            format, are sharded by FSDP2 or train separately, or if the model has no experts.

    Example:
        >>> print(moe_runtime.quantize_experts(model, "nf4"))
    """
    packed.of_name(format)
    experts = experts_of(model)
    for name, module in experts.items():
        _check(name, module, format)
    for name, module in experts.items():
        _check_finite(name, module)
    before = after = 0
    for module in experts.values():
        for name in stack_names(module)[:2]:
            before += _pack(module, name, format)
            after += bytes_of(module, name)
    _run_here(model)
    receipt = Quantized(format, len(experts), before, after)
    print(receipt)
    return receipt


def _pack(module: nn.Module, name: str, format: str) -> int:
    """Pack a stack of an experts module, on each rank its part; return its bytes before."""
    stack = getattr(module, name).detach()
    spread = _spread_of(module, stack)
    local = local_part(stack)
    stored, kind = stored_as(module, local, format)
    result = modules.pack(stored, format, spread)._replace(format=kind)
    modules.put(module, name, result, stack.shape, stack.dtype, spread)
    return local.nbytes


def experts_of(model: nn.Module) -> dict[str, nn.Module]:
    """Return the experts modules of a model, stock or ours, by path; raises ValueError if it has
    none.
    """
    experts = {name: module for name, module in model.named_modules() if has_stacks(module)}
    if not experts:
        raise ValueError(
            "The model has no experts that moe_runtime supports (see docs/families.md)"
        )
    return experts


def is_transposed(module: nn.Module) -> bool:
    """Return whether an experts module stores its stacks as [E, in, out]."""
    return bool(getattr(module, "is_transposed", False))


def stored_as(module: nn.Module, stack: Tensor, format: str) -> tuple[Tensor, str]:
    """Return a stack in packing order, and its format's name in the ops.

    bitsandbytes packs a parameter in memory order; the other formats pack along `in`.
    """
    if is_transposed(module) and format == "nf4":
        return stack, format + packed.TRANSPOSED
    if is_transposed(module):
        stack = stack.transpose(1, 2)
    return stack, format


def bytes_of(module: nn.Module, name: str) -> int:
    """Return the bytes of a packed stack."""
    data, scales, _ = modules.get(module, name)
    return sum(tensor.nbytes for tensor in (data, *scales))


def _spread_of(module: nn.Module, stack: Tensor) -> tuple | None:
    """Return mesh and placements of a stack that `shard_experts`, but not FSDP2, has sharded;
    otherwise None.
    """
    if all_to_all.GRADIENTS_OF not in module.__dict__ or not hasattr(stack, "placements"):
        return None
    *others, last = stack.placements
    if last.is_shard(0) and all(placement.is_replicate() for placement in others):
        return stack.device_mesh, tuple(stack.placements)
    return None


def _check(path: str, module: nn.Module, format: str, ranks: int = 1) -> None:
    """Raise ValueError unless the experts `module` can be packed on this number of ranks."""
    activation = gate_of(module)
    for name in stack_names(module)[:2]:
        stack = getattr(module, name)
        reason = None
        if modules.is_packed(module, name):
            reason = "it is already quantized. Load the model in 16 bits"
        elif all_to_all.is_distributed(stack) and _spread_of(module, stack) is None:
            reason = "it is already split by FSDP or tensor parallelism. Quantize it first"
        elif stack.shape[0] % ranks:
            reason = f"its number of experts is not divisible by {ranks} ranks"
        elif trainable.split_of(module) is not None or parametrize.is_parametrized(module, name):
            reason = (
                "some of its experts are trained separately, or it has a parametrization. Remove "
                "that first"
            )
        elif activation is None:
            reason = (
                f"no kernel supports the code that {type(module).__name__} runs between its "
                "products"
            )
        elif stack.dtype not in packed.FLOATS or is_quantized(stack):
            if stack.dtype == torch.float64:
                remedy = "Convert the model first, with model.float()"
            else:
                remedy = "Load it in 16 bits"
            reason = f"it must be float16, bfloat16 or float32, but is {named(stack)}. {remedy}"
        else:
            halves = name == "gate_up_proj" and not activation.interleaved
            stored, kind = stored_as(module, stack, format)
            reason = packed.why_not(stored.shape, kind, halves)
        if reason:
            raise ValueError(
                f"{path}.{name} {list(stack.shape)} cannot be quantized to {format}: {reason}"
            )


def _check_finite(path: str, module: nn.Module) -> None:
    """Raise ValueError for weights that are NaN, infinite or not in memory."""
    for name in stack_names(module)[:2]:
        stack = getattr(module, name).detach()
        if stack.is_meta:
            raise ValueError(
                f"{path}.{name} is offloaded or has no weights. Quantize the model first, then "
                "offload it"
            )
        for e, weight in enumerate(local_part(stack)):
            if not weight.isfinite().all():
                raise ValueError(
                    f"{path}.{name} of expert {e} has weights that are NaN or infinite. Repair the "
                    "model first"
                )


def _run_here(model: nn.Module) -> None:
    """Run stock experts on moe_runtime, as transformers cannot read packed stacks, and make methods
    raise that would save packed bytes as weights or run code that takes them for weights.
    """
    from transformers import PreTrainedModel

    from moe_runtime.hf.dropin.experts import patch

    patch(model)
    offload.install()
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            module.save_pretrained = _save_pretrained
            module.set_experts_implementation = functools.partial(
                _set_experts_implementation, module
            )


def _set_experts_implementation(model: nn.Module, experts_implementation: str | dict) -> None:
    from moe_runtime.hf.dropin.experts import check_runnable

    implementations = [experts_implementation]
    if isinstance(experts_implementation, dict):
        implementations = list(experts_implementation.values())
    for path, module in model.named_modules():  # of which a vision encoder has no experts
        if is_experts(module):
            for implementation in implementations:
                check_runnable(module, implementation, path)
    type(model).set_experts_implementation(model, experts_implementation)


def _save_pretrained(*args, **kwargs):
    raise ValueError(
        "The experts are quantized, which save_pretrained does not support. Save the model with "
        "moe_runtime.save_quantized(model, folder), or only its adapter with the PEFT model's "
        "save_pretrained"
    )


def _read(checkpoint: Checkpoint, key: str, row: int | None) -> Tensor:
    """Read a matrix, or a row of a stack."""
    return checkpoint.get(key) if row is None else checkpoint.get_rows(key, row)


def _dense(checkpoint: Checkpoint, key: str, row: int | None) -> Tensor:
    """Read a matrix as floats, dequantized if it is in FP8; raises ValueError for other dtypes."""
    dtype = checkpoint.specs()[key].dtype
    if dtype == torch.float8_e4m3fn:
        weight, scale = _fp8(checkpoint, key, row)
        return packed.unpack(weight[None], [scale[None]], "fp8_block", 0, torch.float32)
    if dtype not in (*packed.FLOATS, torch.float64):
        raise ValueError(
            f"{key} of {checkpoint.path} is {dtype}, but must be in 16 bits, 32 bits or FP8. Pass "
            "such a folder"
        )
    return _read(checkpoint, key, row)


def _fp8(checkpoint: Checkpoint, key: str, row: int | None) -> tuple[Tensor, Tensor]:
    """Read a matrix in FP8 and its scales in float32; raises ValueError unless they fit
    each other.
    """
    name = f"{key}_scale_inv"
    if name not in checkpoint:
        raise ValueError(
            f"{key} of {checkpoint.path} is in FP8, but its scales {name} are missing. Download "
            "the folder again"
        )
    weight = _read(checkpoint, key, row)
    scale = _read(checkpoint, name, row)
    wrong = packed.wrong_tensor(weight[None], [scale[None]], "fp8_block")
    if wrong is not None:
        is_scale, problem = wrong
        raise ValueError(f"{name if is_scale else key} of {checkpoint.path} {problem}")
    return weight, modules.as_read(name, scale)


def load_quantized(
    source: str | Path,
    format: str | None = None,
    *,
    mesh: DeviceMesh | None = None,
    **settings: Any,
) -> nn.Module:
    """Load a model with its experts packed, of which at most one at a time is held in 16 bits.

    Args:
        source: A folder or a Hub id.
        format: As in `quantize_experts`; by default that of the folder's experts: MXFP4 (GPT-OSS),
            FP8 in blocks (DeepSeek-V3), or the format of `save_quantized`. Bytes that are packed in
            this format already are copied unchanged; another format rounds the weights a second
            time, with a warning.
        mesh: With a mesh every rank must call this, and reads and packs its own experts, as with
            `shard_experts`.
        settings: Passed to `from_pretrained`. A `device_map` of several devices, the CPU or a disk
            is applied once the packed model is in the CPU's memory.

    Returns:
        The model, running on moe_runtime.

    Raises:
        ValueError: Before the weights are read, as in `quantize_experts`, and for tensors that do
            not fit the format.
    """
    from torch.distributed.tensor import Replicate, Shard
    from transformers import AutoConfig

    from moe_runtime.hf.common.loading import load

    source = Path(source)
    implementation = settings.get("experts_implementation", NAME)
    if implementation != NAME:
        raise ValueError(
            f"Packed experts run on {NAME} only, but experts_implementation is {implementation!r}. "
            "Leave it out"
        )
    config = load(AutoConfig, source)
    held, format = _formats(config, source, format)
    placement = {}
    if offload.is_several(settings.get("device_map")):  # placed once the stacks are there
        placement = {name: settings.pop(name) for name in offload.SETTINGS if name in settings}
    checkpoint = Checkpoint(source)
    if held is not None and held != format:
        warnings.warn(
            f"The experts in {source} are quantized to {held}, and {format} rounds them a second "
            "time. Quantize the model in 16 bits where you have it",
            stacklevel=2,
        )
    spread = None
    rank = 0
    ranks = 1
    if mesh is not None:
        copies = [Replicate()] * (mesh.ndim - 1)
        spread = (mesh, (*copies, Shard(0)))
        rank = mesh.get_local_rank(mesh.ndim - 1)
        ranks = mesh.size(-1)
    model, shapes, names = _without_stacks(config, source, format, settings, ranks)
    files = _ExpertsFolder(checkpoint, held, format, spread, rank, ranks, names)
    for path, module in experts_of(model).items():
        for name in stack_names(module)[:2]:
            # transformers has kept it packed, as on a GPU
            if (path, name) not in shapes or name in module._parameters:
                if format != held:
                    raise ValueError(
                        f"With a GPU, transformers loads {path} of {source} as "
                        f"{type(module).__name__}, not in {format}. Set CUDA_VISIBLE_DEVICES='' "
                        "and write the folder in that format with save_quantized"
                    )
                continue
            shape, dtype = shapes[path, name]
            stack = _read_stack(files, module, path, name, shape, dtype)
            modules.put(module, name, stack.to(model.device), shape, dtype, spread)
    if mesh is not None:
        from moe_runtime.hf.dropin.parallel import shard_experts

        shard_experts(model, mesh)
    _run_here(model)
    return offload.dispatch(model, **placement) if placement else model


def _formats(config, source: Path, format: str | None) -> tuple[str | None, str]:
    """Return the format of the folder's experts (None: 16 bits) and the one to load them in.

    Removes the config's quantization if only experts have it. Raises ValueError for unknown ones.
    """
    quantization = getattr(config, "quantization_config", None) or {}
    if not isinstance(quantization, dict):
        quantization = quantization.to_dict()
    if format is not None:
        packed.of_name(format)
    method = quantization.get("quant_method")
    if method is None:
        if format is None:
            raise ValueError(
                f"The experts in {source} are not quantized. Pass a format to quantize them to, "
                f"one of {', '.join(packed.FORMATS)}"
            )
        return None, format
    held = None
    if method == METHOD:
        held = quantization.get("format")
    elif method == "mxfp4":
        held = "mxfp4"
    elif method == "fp8" and quantization.get("weight_block_size", BLOCKS) == BLOCKS:
        held = "fp8_block"
    if not isinstance(held, str) or held not in packed.FORMATS:
        raise ValueError(
            f"The experts in {source} are quantized by {shown(quantization)}, which load_quantized "
            f"cannot read. Pass a folder in 16 bits, in MXFP4, in FP8 with weight_block_size "
            f"{BLOCKS}, or written by save_quantized"
        )
    # only experts are quantized, and load_quantized reads those itself
    if method != "fp8":
        del config.quantization_config
    return held, format or held


def _without_stacks(config, source: Path, format: str, settings: dict, ranks: int):
    """Load the model without its expert stacks; return it with their shapes and dtypes, and the
    names of `matrices_of`.
    """
    import transformers

    from moe_runtime.hf.common.loading import load

    shapes = {}
    names = {}
    architecture = (config.architectures or ["model"])[0]
    base = getattr(transformers, architecture, None)
    if base is None:
        raise ValueError(f"{source} is a {architecture}, which is not a class of transformers")

    def __init__(self, *args, **kwargs):
        base.__init__(self, *args, **kwargs)
        layers = experts_of(self)
        stacks = {}
        for path, module in layers.items():
            _check(path, module, format, ranks)
            for name in stack_names(module)[:2]:
                stack = getattr(module, name)
                shapes[path, name] = (tuple(stack.shape), stack.dtype)
                stacks[f"{path}.{name}"] = tuple(stack.shape)
        names.update(matrices_of(self, stacks))
        for path, module in layers.items():
            for name in stack_names(module)[:2]:
                # of two tied stacks a file has only one
                tied = self.all_tied_weights_keys.pop(f"{path}.{name}", None)
                if tied in names:
                    names[f"{path}.{name}"] = names[tied]
                module._parameters.pop(name)
            layer = self.get_submodule(path.rpartition(".")[0])
            # no random initialization; some families initialize the stacks with their layer
            for one in (module, layer):
                one._is_hf_initialized = one is module or not (one._parameters or one._buffers)

    passed_over = [*(base._keys_to_ignore_on_load_unexpected or ()), r"\.experts\."]
    attributes = {
        "__init__": __init__,
        "__module__": base.__module__,
        "_keys_to_ignore_on_load_unexpected": passed_over,
    }
    without_stacks = type(base.__name__, (base,), attributes)
    model = load(without_stacks, source, config=config, **settings)
    model.__class__ = base
    return model, shapes, names


class _ExpertsFolder(NamedTuple):
    """A folder with experts, and how they are loaded."""

    checkpoint: Checkpoint
    held: str | None  # the format of its experts; None: 16 bits
    format: str  # to load them in
    spread: tuple | None  # mesh and placements, if each rank loads its own experts
    rank: int  # among those that share the experts
    ranks: int
    names: dict[str, Places]  # of `matrices_of`


@dataclass
class _LazyStack:
    """A stack that `read` computes one expert at a time; `packed.pack` accepts it like a tensor."""

    shape: torch.Size
    dtype: torch.dtype
    read: Callable[[int], Tensor]
    device = torch.device("cpu")

    def dim(self) -> int:
        """Return the number of dimensions."""
        return len(self.shape)

    def __getitem__(self, e: int) -> Tensor:
        """Return expert e's weight [P, Q] in the packing order."""
        return self.read(e).to(self.dtype)


def _read_stack(
    source: _ExpertsFolder, module: nn.Module, path: str, name: str, shape, dtype: torch.dtype
) -> packed.Packed:
    """Return the stack `name` of a folder packed to the source's format; with sharded experts, only
    this rank's.
    """
    checkpoint = source.checkpoint
    key = f"{path}.{name}"
    count = shape[0] // source.ranks
    local = torch.empty(count, *shape[1:], device="meta")
    stored, kind = stored_as(module, local, source.format)
    is_packed = key in checkpoint or f"{key}_blocks" in checkpoint
    if source.held is not None and is_packed:
        share = _packed_share(source, module, key, shape)
        if source.held == source.format:  # copy the packed bytes
            return share

        def read(e: int) -> Tensor:
            weight = packed.unpack(*share, e, dtype)
            return weight.t() if kind.endswith(packed.TRANSPOSED) else weight
    else:
        parts = parts_in_file(checkpoint, path, name, shape, source.names.get(key))
        parts = [parts[source.rank * count + e] for e in range(count)]
        if source.held == source.format == "fp8_block":
            return _fp8_as_it_is(checkpoint, parts, (count, *shape[1:]))
        turns = is_transposed(module) and kind == source.format

        def read(e: int) -> Tensor:
            pieces = [_dense(checkpoint, key, row) for key, row in parts[e]]
            return torch.cat([piece.t() if turns else piece for piece in pieces])

    lazy = _LazyStack(stored.shape, dtype, read)
    stack = modules.pack(lazy, source.format, source.spread)
    return stack._replace(format=kind)


def _packed_share(source: _ExpertsFolder, module: nn.Module, key: str, shape) -> packed.Packed:
    """Return this rank's experts of a stack that the folder holds packed; NF4's second-level scales
    are read for all experts.
    """
    checkpoint = source.checkpoint
    rank = source.rank
    ranks = source.ranks
    count = shape[0] // ranks
    tensors = {}
    for entry in checkpoint:
        if not entry.startswith(key) or entry.startswith(f"{key}_bias"):
            continue
        if ranks == 1 or ".nested_" in entry or ".quant_" in entry:
            tensors[entry] = checkpoint.get(entry)
        else:
            size = math.prod(checkpoint.specs()[entry].shape[:1]) // ranks
            tensors[entry] = checkpoint.get_rows(entry, slice(rank * size, (rank + 1) * size))
    if source.held == "mxfp4" and key in tensors:
        tensors[f"{key}_blocks"] = tensors.pop(key)
    stored, kind = stored_as(module, torch.empty(shape, device="meta"), source.held)
    share = modules.from_saved(key, kind, stored.shape, tensors, count)
    if ranks > 1 and source.held == "nf4":
        share.scales.append(torch.tensor([rank * count]))
    return share


def _fp8_as_it_is(checkpoint, parts, shape) -> packed.Packed:
    """Return FP8 matrices as one stack, with their scale blocks concatenated."""
    data = torch.empty(shape, dtype=torch.float8_e4m3fn)
    E, P, Q = shape
    scales = torch.empty(E, math.ceil(P / packed.BLOCK), math.ceil(Q / packed.BLOCK))
    for e, keys in enumerate(parts):
        start = 0
        block = 0
        for key, row in keys:
            weight, scale = _fp8(checkpoint, key, row)
            data[e, start : start + len(weight)] = weight
            scales[e, block : block + len(scale)] = scale
            start += len(weight)
            block += len(scale)
    return packed.Packed(data, [scales], "fp8_block")
