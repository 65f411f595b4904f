"""Expert parallelism: experts sharded over ranks as DTensors; `ops.all_to_all` sends the tokens to
their experts.

    mesh = init_device_mesh("cuda", (dp, ep), mesh_dim_names=("dp", "ep"))
    shard_experts(model, mesh["ep"])        # with FSDP2: fully_shard the experts over mesh["dp"],
                                            all else over the mesh
    shard_experts(model, mesh)              # with DDP: copies of an expert are averaged here, all
                                            else by DDP
    save_pretrained(model, folder)          # one checkpoint, like that of an unsharded model

Expert parallelism runs within data parallelism: every rank processes its own tokens. Auxiliary and
balance losses are computed over a rank's own tokens, as under data parallelism. Nothing here starts
processes.
"""

import os
import types
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn.utils import parametrize
from transformers import PreTrainedModel

from moe_runtime.config import check_choice
from moe_runtime.hf.common import sharded
from moe_runtime.hf.common.sharded import local_part
from moe_runtime.hf.dropin.adapters import expert_adapters
from moe_runtime.hf.dropin.experts import ADAPTED, patch
from moe_runtime.hf.dropin.gates import has_stacks
from moe_runtime.modules import packed, trainable
from moe_runtime.modules.lora import LoRAMoE
from moe_runtime.modules.lora_linear import LoRALinear
from moe_runtime.modules.moe import is_quantized, named
from moe_runtime.ops.all_to_all import GRADIENTS, GRADIENTS_OF
from moe_runtime.ops.packed import part_of


def shard_experts(model: nn.Module, mesh: DeviceMesh, gradients: str = "mean") -> int:
    """Keep E / n experts of every MoE layer on each of n ranks (expert parallelism).

    Stacks and biases become DTensors under the same names, Shard(0) over the last mesh dimension
    and replicated over a first one, if any; each rank's part moves to the mesh's device.

    Call this before the model reaches DDP, which then ignores the experts, FSDP or an optimizer,
    and after adding PEFT's adapters. Adapters of expert stacks stay whole on every rank, which uses
    its experts' part; rank 0's values are broadcast, and DDP or FSDP average their gradients.
    Packed stacks (`quantize_experts`) are sharded too; their adapters may be added later, and a
    second call with the same mesh only broadcasts them. MoETrainer's checkpoints hold every rank's
    experts; transformers' Trainer would save one rank's, so its first checkpoint raises an error.

    Args:
        model: A stock MoE model or one of ours, with the same weights on every rank, as after
            from_pretrained.
        mesh: One dimension of n ranks, or two: replicas and n ranks.
        gradients: "mean" averages the experts' gradients over the mesh's ranks, as DDP and FSDP do
            for all other parameters; "sum" is for engines that sum.

    Returns:
        The number of layers.

    Raises:
        ValueError: Before anything changes, for a mesh of more than two dimensions, a model without
            MoE layers or with LoRA experts, a number of experts that the ranks do not divide,
            experts that PEFT trains a copy of, and parameters that are already distributed in
            another way.
    """
    check_choice("gradients", gradients, GRADIENTS)
    layers = _layers_to_shard(model, mesh)
    placements = [Replicate()] * (mesh.ndim - 1) + [Shard(0)]
    for name, module in layers.items():
        _check(name, module, mesh, placements)
    patch(model)
    ignored = _ignored(model)
    for name, module in layers.items():
        setattr(module, GRADIENTS_OF, gradients)
        # not a norm that experts share, which is a submodule
        parameters = dict(module.named_parameters(recurse=False))
        for parameter_name, parameter in parameters.items():
            if parameter_name in packed.layouts(module):
                _shard_packed(module, parameter_name, mesh, placements)
            elif not isinstance(parameter, DTensor):
                setattr(module, parameter_name, _shard(parameter, mesh, placements))
        names = list(parameters)
        if packed.layouts(module):
            names += module._buffers  # scales of the rank's experts
        ignored.update(f"{name}.{part}" for part in names)
    model._ddp_params_and_buffers_to_ignore = sorted(ignored)
    # each rank has initialized them from its own generator
    for parameter in expert_adapters(model):
        dist.broadcast(parameter.data, 0)

    def check_once(model, _args) -> None:
        check.remove()
        _check_adapters(model, mesh)

    check = model.register_forward_pre_hook(check_once)
    for module in model.modules():
        # not a PeftModel: adapters are whole on every rank, so PEFT can save them
        if isinstance(module, PreTrainedModel) and any(
            part in layers.values() for part in module.modules()
        ):
            module.save_pretrained = types.MethodType(_save_whole_only, module)
    return len(layers)


def _layers_to_shard(model: nn.Module, mesh: DeviceMesh) -> dict[str, nn.Module]:
    """Return the experts modules by path; raises ValueError for an unfit mesh or model."""
    layers = {}
    lora = []
    for name, module in model.named_modules():
        if has_stacks(module):
            layers[name] = module
        elif isinstance(module, LoRAMoE | LoRALinear):
            lora.append(name)
    problem = None
    if mesh.ndim > 2:
        problem = (
            "The mesh must have one dimension for the experts, or two for replicas and experts, "
            f"but has {mesh.ndim}"
        )
    elif isinstance(model, nn.parallel.DistributedDataParallel):
        problem = (
            "The model is wrapped in DistributedDataParallel. Call shard_experts before wrapping it"
        )
    elif lora:
        problem = (
            f"{lora[0]} has LoRA experts, which have no stacks. Convert them to whole experts with "
            "moe_runtime.methods.lora.to_moe"
        )
    if problem is not None:
        raise ValueError(problem)
    return layers


def _save_whole_only(self, save_directory, *args, state_dict=None, **options) -> None:
    """Call transformers' save_pretrained with gathered weights; without them raise, as one rank
    alone would wait forever.
    """
    if state_dict is None:
        raise ValueError(
            f"The experts of {type(self).__name__} are distributed over several ranks. Call "
            "moe_runtime.hf.dropin.parallel.save_pretrained(model, folder) on every rank, and "
            "save_strategy='no' in Trainer"
        )
    type(self).save_pretrained(self, save_directory, *args, state_dict=state_dict, **options)


def _check(name: str, module: nn.Module, mesh: DeviceMesh, placements: list) -> None:
    stacks = list(module.named_parameters(recurse=False))
    n = mesh.size(-1)
    problem = None
    if trainable.split_of(module) is not None:
        problem = "already trains some experts separately. Call shard_experts before train_rows"
    elif ADAPTED.intersection(name.split(".")) and not name.endswith(".base_layer"):
        problem = (
            "is a copy that PEFT trains. Use LoRA on the experts' stacks (target_parameters), or "
            "on other modules"
        )
    elif parametrize.is_parametrized(module):  # for example by bitsandbytes' replace_parameter_4bit
        problem = (
            f"has parametrized {list(module.parametrizations)}. Use plain stacks, or "
            "moe_runtime.quantize_experts"
        )
    elif getattr(module, "_is_expert_parallel", False):
        problem = (
            "already holds only a part of its experts. Use either shard_experts or transformers' "
            "expert-parallel plan"
        )
    for part, stack in stacks if problem is None else ():
        spread = isinstance(stack, DTensor)
        if part not in packed.layouts(module) and is_quantized(stack):
            problem = (
                f"has {part} as {named(stack)}. Load it without that quantization, or use "
                "moe_runtime.quantize_experts"
            )
        elif stack.shape[0] % n:
            problem = (
                f"has {stack.shape[0]} experts, which must be divisible by the {n} ranks of the "
                "mesh"
            )
        elif spread and not (stack.device_mesh == mesh and list(stack.placements) == placements):
            problem = (
                f"has {part} as a DTensor {tuple(stack.placements)} on {stack.device_mesh}, but "
                "must be unsharded. Call shard_experts before fully_shard"
            )
    if problem is not None:
        raise ValueError(f"{name} {problem}")


def _check_adapters(model: nn.Module, mesh: DeviceMesh) -> None:
    """Raise ValueError for adapters whose gradients FSDP2 reduces over other ranks than those that
    hold the experts.

    Called before the first forward pass, when FSDP2 has sharded the parameters but gathered none.
    """
    owners = set(mesh.mesh.flatten().tolist())
    for parameter in expert_adapters(model):
        if not isinstance(parameter, DTensor):
            continue
        ranks = parameter.device_mesh.mesh.flatten().tolist()
        if not owners.issubset(ranks):
            raise ValueError(
                f"The experts' adapters are sharded by FSDP2 over ranks {ranks}, but the experts "
                f"are on {sorted(owners)}. Call fully_shard(experts.get_base_layer(), "
                "mesh=replicas), then fully_shard(decoder_layer) over all ranks"
            )


def _shard(parameter: nn.Parameter, mesh: DeviceMesh, placements: list) -> nn.Parameter:
    """Return this rank's experts of a whole stack, in separate memory."""
    rank = mesh.get_local_rank(mesh.ndim - 1)
    part = parameter.detach().chunk(mesh.size(-1))[rank]
    part = part.clone(memory_format=torch.contiguous_format)
    if not part.is_meta:
        part = part.to(mesh.device_type)
    whole = DTensor.from_local(part, mesh, placements, run_check=False)
    return nn.Parameter(whole, requires_grad=parameter.requires_grad)


def _shard_packed(module: nn.Module, name: str, mesh: DeviceMesh, placements: list) -> None:
    """Return the bytes and scales of this rank's experts of a packed stack."""
    layout = packed.layouts(module)[name]
    stack = packed.get(module, name)
    if layout.spread is None:
        rank = mesh.get_local_rank(mesh.ndim - 1)
        size = layout.shape[0] // mesh.size(-1)
        part = part_of(stack, rank * size, (rank + 1) * size)
        packed.put(
            module, name, part.to(mesh.device_type), layout.shape, layout.dtype, (mesh, placements)
        )


@torch.no_grad()
def split_spread_rows(
    model: nn.Module, path: str, names: tuple[str, ...], ids: tuple[int, ...], dtype: torch.dtype
) -> None:
    """Do modules.trainable.split_rows for experts sharded by `shard_experts`: each rank holds the
    rows of its own experts.

    The parameters are sharded like the stacks, so every rank has as many rows as the one with the
    most trained experts; unused rows stay zero. DDP ignores these parameters.
    """
    module = model.get_submodule(path)
    stacks = {name: getattr(module, name) for name in names}
    first = stacks[names[0]]
    mesh = first.device_mesh
    rank = mesh.get_local_rank(mesh.ndim - 1)
    size = first.shape[0] // mesh.size(-1)
    owned = [[e for e in ids if e // size == owner] for owner in range(mesh.size(-1))]
    most = max(map(len, owned))
    index = torch.tensor(owned[rank], dtype=torch.int64, device=first.device) - rank * size
    parameters = {}
    for name, stack in stacks.items():
        part = stack.detach().to_local()
        rows = part.new_zeros(most, *part.shape[1:], dtype=dtype or part.dtype)
        rows[: len(index)] = part[index]
        rows = DTensor.from_local(rows, mesh, first.placements, run_check=False)
        parameters[trainable.PREFIX + name] = nn.Parameter(rows)
    trainable.register_maps(module, size, index)  # the last step that can run out of memory
    for name, parameter in parameters.items():
        module.register_parameter(name, parameter)
    places = tuple(e // size * most + owned[e // size].index(e) for e in ids)
    trainable.remember(module, stacks, trainable.Split(ids, places, {}))
    model._ddp_params_and_buffers_to_ignore = sorted({*_ignored(model), *_rows_in(module, path)})


def forget_rows(model: nn.Module, path: str) -> None:
    """Remove the separate rows of the experts at `path` from DDP's ignored parameters, before they
    are deleted.
    """
    gone = _rows_in(model.get_submodule(path), path)
    model._ddp_params_and_buffers_to_ignore = sorted(_ignored(model) - gone)


def _ignored(model: nn.Module) -> set[str]:
    return set(getattr(model, "_ddp_params_and_buffers_to_ignore", ()))


def _rows_in(module: nn.Module, path: str) -> set[str]:
    names = [trainable.PREFIX + name for name in trainable.trained_parameters(module)]
    return {f"{path}.{name}" for name in (*names, trainable.ROW, trainable.EXPERT)}


@torch.no_grad()
def clip_grad_norm(model: nn.Module, max_norm: float) -> Tensor:
    """Clip gradients in place to a norm over all ranks' experts.

    torch's function raises an error if only some gradients are DTensors, as under DDP, or if they
    are on several meshes. Trainer and accelerate's clip_grad_norm_ handle this themselves.

    Args:
        model: A model after `shard_experts`.
        max_norm: The largest norm.

    Returns:
        The norm before clipping, [].
    """
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    norms = [torch.linalg.vector_norm(gradient, dtype=torch.float32) for gradient in gradients]
    if not norms:
        return torch.zeros(())
    norms = list(map(sharded.gathered, norms))
    norm = torch.linalg.vector_norm(torch.stack(norms))
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for gradient in gradients:
        local_part(gradient).mul_(scale)
    return norm


def parameter_groups(model: nn.Module) -> list[dict[str, list[nn.Parameter]]]:
    """Return the trainable parameters as optimizer groups, one per mesh and one without a mesh.

    With fused=True or foreach=True an optimizer group cannot mix DTensors and plain parameters, and
    a GradScaler requires one optimizer per group.

    Args:
        model: A model after `shard_experts`.

    Returns:
        Groups for a torch optimizer.
    """
    groups = {}
    for parameter in model.parameters():
        if parameter.requires_grad:
            mesh = getattr(parameter, "device_mesh", None)
            groups.setdefault(mesh, []).append(parameter)
    return [{"params": parameters} for parameters in groups.values()]


def gathered(model: nn.Module) -> dict[str, Tensor]:
    """Return a model's state_dict with gathered tensors on rank 0's CPU, and {} on other ranks.
    Every rank must call this.

    Raises ValueError for quantized experts, and for experts that are trained separately from their
    stacks.
    """
    if any(trainable.split_of(module) is not None for module in model.modules()):
        raise ValueError(
            "The model trains some experts separately. Call fold_rows(model) first, or save an "
            "adapter"
        )
    if any(packed.layouts(module) for module in model.modules()):
        raise ValueError(
            "The experts are quantized. Call moe_runtime.save_quantized(model, folder) on every "
            "rank instead"
        )
    writes = dist.get_rank() == 0
    tensors = {}
    by_id = {}
    # the parameters themselves, so that tied ones are one tensor, which transformers recognises
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in by_id:
            whole = sharded.gathered(tensor.detach())
            by_id[id(tensor)] = whole.cpu() if writes else None
        if writes:
            tensors[name] = by_id[id(tensor)]
    return tensors


def save_pretrained(model: nn.Module, folder: str | os.PathLike, **options: Any) -> None:
    """Write a sharded model as one checkpoint for plain from_pretrained.

    Every rank must call this, and rank 0 writes. Tensors that `shard_experts` or FSDP2 sharded are
    gathered one at a time, and only rank 0 holds all of them, in CPU memory.

    Args:
        model: A model after `shard_experts`.
        folder: The folder to write.
        options: Passed to transformers' save_pretrained.
    """
    if isinstance(model, nn.parallel.DistributedDataParallel):
        model = model.module
    whole = gathered(model)
    if dist.get_rank() == 0:
        model.save_pretrained(folder, state_dict=whole, **options)
    dist.barrier()
