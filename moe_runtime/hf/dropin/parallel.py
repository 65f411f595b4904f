"""Experts spread over ranks, in the process groups and DTensors that the engines have; `ops.all_to_all` moves the tokens.

    mesh = init_device_mesh("cuda", (dp, ep), mesh_dim_names=("dp", "ep"))
    shard_experts(model, mesh["ep"])        # with FSDP2: fully_shard the experts over mesh["dp"], all else over the mesh
    shard_experts(model, mesh)              # with DDP: the copies of an expert are averaged here, all else by DDP
    save_pretrained(model, folder)          # one checkpoint, as of a model that was never spread

Expert parallelism lies inside data parallelism: every rank has tokens of its own. Auxiliary and balance losses are those of
a rank's own tokens, as under data parallelism. Nothing here starts processes.
"""

import os
import types

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from transformers import PreTrainedModel

from moe_runtime.config import check_choice
from moe_runtime.hf.dropin.adapters import expert_adapters
from moe_runtime.hf.dropin.experts import ADAPTED, is_experts, patch
from moe_runtime.modules import packed, trainable
from moe_runtime.modules.lora import LoRAMoE
from moe_runtime.modules.lora_linear import LoRALinear
from moe_runtime.modules.moe import Experts, is_quantized
from moe_runtime.ops.all_to_all import GRADIENTS, GRADIENTS_OF
from moe_runtime.ops.packed import part_of


def shard_experts(model: nn.Module, mesh: DeviceMesh, gradients: str = "mean") -> int:
    """Keep E / n experts of every MoE layer on each of the n ranks of `mesh`'s last dimension; return how many layers that are.

    Stacks and biases become DTensors under their names, Shard(0) over the last dimension and replicated over a first one, if
    there is one; what is left of them moves to the mesh's device. Every rank must hold the same weights, as from_pretrained
    gives them; nothing is sent. Their gradients are averaged over the mesh's ranks as DDP and FSDP do with all others, or
    summed with gradients="sum", for engines that sum. Call it before DDP, FSDP or the optimizer see the model; DDP then
    leaves the experts alone. PEFT's adapters come before it as well. Those of the experts' stacks stay whole on every rank,
    which uses the share of its experts: they are those of the first of all ranks from here on, and DDP or FSDP average their
    gradients with all others. Adapters of packed stacks may come later: a second call then does that. A Trainer's checkpoints would be written on one rank alone: MoETrainer refuses a save_strategy, transformers'
    Trainer raises at the first. A second call with the same mesh changes nothing else.

    Raises ValueError, before anything is changed, for a mesh of more than two dimensions, a model without MoE layers or with
    LoRA experts, experts that the ranks do not divide or that PEFT trains a copy of, or parameters that are distributed in
    another way.
    """
    check_choice("gradients", gradients, GRADIENTS)
    modules = dict(model.named_modules())
    layers = {name: part for name, part in modules.items() if is_experts(part) or isinstance(part, Experts)}
    lora = [name for name, part in modules.items() if isinstance(part, LoRAMoE | LoRALinear)]
    problem = None
    if mesh.ndim > 2:
        problem = f"mesh has {mesh.ndim} dimensions; want the experts' alone, or replicas and the experts'"
    elif isinstance(model, nn.parallel.DistributedDataParallel):
        problem = "model is wrapped in DistributedDataParallel; want it before that: DDP holds its parameters"
    elif lora:
        problem = f"{lora[0]} is of LoRA experts, without stacks; want whole ones; lora_moe.to_moe makes them"
    if problem is not None:
        raise ValueError(problem)
    placements = [Replicate()] * (mesh.ndim - 1) + [Shard(0)]
    for name, module in layers.items():
        _check(name, module, mesh, placements)
    patch(model)
    ignored = _ignored(model)
    for name, module in layers.items():
        setattr(module, GRADIENTS_OF, gradients)
        for parameter_name, parameter in list(
            module.named_parameters(recurse=False)
        ):  # a norm that experts share is a module of its own
            if parameter_name in packed.layouts(module):
                _shard_packed(module, parameter_name, mesh, placements)
            elif not isinstance(parameter, DTensor):
                setattr(module, parameter_name, _shard(parameter, mesh, placements))
            ignored.add(f"{name}.{parameter_name}")
        ignored |= {f"{name}.{buffer}" for buffer in module._buffers if packed.layouts(module)}  # scales of the rank's experts
    model._ddp_params_and_buffers_to_ignore = sorted(ignored)
    for parameter in expert_adapters(model):  # drawn on every rank by its own generator
        dist.broadcast(parameter.data, 0)
    checked = model.register_forward_pre_hook(lambda model, _: (checked.remove(), _check_adapters(model, mesh))[0])
    for module in model.modules():
        # a PeftModel is none: adapters are whole on every rank, and PEFT may save them
        if isinstance(module, PreTrainedModel) and any(part in layers.values() for part in module.modules()):
            module.save_pretrained = types.MethodType(_save_whole_only, module)
    return len(layers)


def is_spread(model: nn.Module) -> bool:
    """Return whether `model` refuses transformers' save_pretrained, because `shard_experts` has spread its experts."""
    return getattr(getattr(model, "save_pretrained", None), "__func__", None) is _save_whole_only


def _save_whole_only(self, save_directory, *args, state_dict=None, **options) -> None:
    """transformers' save_pretrained, for weights that were gathered: alone, one rank would wait for the others for ever."""
    if state_dict is None:
        raise ValueError(
            f"model is {type(self).__name__} with its experts on several ranks; want "
            "moe_runtime.hf.dropin.parallel.save_pretrained(model, folder) on every rank, and save_strategy='no' in Trainer"
        )
    type(self).save_pretrained(self, save_directory, *args, state_dict=state_dict, **options)


def _check(name: str, module: nn.Module, mesh: DeviceMesh, placements: list) -> None:
    stacks, n, problem = list(module.named_parameters(recurse=False)), mesh.size(-1), None
    if trainable.split_of(module) is not None:
        problem = "has rows that train outside of its stacks; want shard_experts before train_rows"
    elif ADAPTED.intersection(name.split(".")) and not name.endswith(".base_layer"):
        problem = "is a copy that PEFT trains; want LoRA on the experts' stacks (target_parameters), or on other modules"
    elif getattr(module, "_is_expert_parallel", False):
        problem = "holds a part of its experts already; want shard_experts or transformers' expert-parallel plan, not both"
    for part, stack in stacks if problem is None else ():
        spread = isinstance(stack, DTensor)
        if stack.shape[0] % n:
            problem = f"has num_experts {stack.shape[0]}, the mesh has {n} ranks; want a multiple of them"
        elif spread and not (stack.device_mesh == mesh and list(stack.placements) == placements):
            got = f"a DTensor {tuple(stack.placements)} on {stack.device_mesh}"
            problem = f"has {part} as {got}; want it whole; shard the experts before fully_shard"
        elif part not in packed.layouts(module) and is_quantized(stack):
            problem = f"has {part} in {stack.dtype} ({type(stack).__name__}); want floats, or moe_runtime.quantize_experts"
    if problem is not None:
        raise ValueError(f"{name} {problem}")


def _check_adapters(model: nn.Module, mesh: DeviceMesh) -> None:
    """Raise ValueError for adapters that FSDP2 reduces over other ranks than those which hold the experts.

    Called before the first forward pass, when FSDP2 has its parameters and gathers none of them yet.
    """
    owners = set(mesh.mesh.flatten().tolist())
    for parameter in expert_adapters(model):
        ranks = parameter.device_mesh.mesh.flatten().tolist() if isinstance(parameter, DTensor) else owners
        if not owners.issubset(ranks):
            raise ValueError(
                f"the experts' adapters are split by FSDP2 over ranks {ranks}, the experts are on {sorted(owners)}; want "
                "fully_shard(experts.get_base_layer(), mesh=replicas), then fully_shard(decoder_layer) over all ranks"
            )


def _shard(parameter: nn.Parameter, mesh: DeviceMesh, placements: list) -> nn.Parameter:
    """Keep this rank's experts of a whole stack, in memory of their own."""
    rank, size = mesh.get_local_rank(mesh.ndim - 1), parameter.shape[0] // mesh.size(-1)
    part = parameter.detach()[rank * size : (rank + 1) * size].clone(memory_format=torch.contiguous_format)
    part = part if part.is_meta else part.to(mesh.device_type)
    whole = DTensor.from_local(part, mesh, placements, run_check=False)
    return nn.Parameter(whole, requires_grad=parameter.requires_grad)


def _shard_packed(module: nn.Module, name: str, mesh: DeviceMesh, placements: list) -> None:
    """Keep the bytes and scales of this rank's experts of a packed stack."""
    layout, stack = packed.layouts(module)[name], packed.get(module, name)
    if layout.spread is None:
        rank, size = mesh.get_local_rank(mesh.ndim - 1), layout.shape[0] // mesh.size(-1)
        part = part_of(stack, rank * size, (rank + 1) * size)
        packed.put(module, name, part.to(mesh.device_type), layout.shape, layout.dtype, (mesh, placements))


@torch.no_grad()
def split_spread_rows(model: nn.Module, path: str, names: tuple[str, ...], ids: tuple[int, ...], dtype) -> None:
    """As modules.trainable.split_rows, of experts that `shard_experts` has spread: each rank holds the rows of its own.

    The parameters are spread as the stacks are, so every rank has as many rows as the one with the most experts that train;
    those that no expert has stay zero. DDP leaves all of it alone.
    """
    module = model.get_submodule(path)
    stacks = {name: getattr(module, name) for name in names}
    first = stacks[names[0]]
    mesh, placements = first.device_mesh, first.placements
    n, rank, size = mesh.size(-1), mesh.get_local_rank(mesh.ndim - 1), first.shape[0] // mesh.size(-1)
    owned = [[e for e in ids if e // size == r] for r in range(n)]
    most = max(map(len, owned))
    index = torch.tensor([e - rank * size for e in owned[rank]], dtype=torch.int64, device=first.to_local().device)
    rows = {}
    for name, stack in stacks.items():
        part = stack.detach().to_local()
        rows[name] = part.new_zeros(most, *part.shape[1:], dtype=dtype or part.dtype)
        rows[name][: index.numel()] = part.index_select(0, index)
    spread = {name: DTensor.from_local(part, mesh, placements, run_check=False) for name, part in rows.items()}
    trainable.register_maps(module, size, index)  # the last that may find no memory
    for name, part in spread.items():
        module.register_parameter(trainable.PREFIX + name, nn.Parameter(part))
    places = tuple(e // size * most + owned[e // size].index(e) for e in ids)
    trainable.remember(module, stacks, trainable.Split(ids, places, {}))
    model._ddp_params_and_buffers_to_ignore = sorted({*_ignored(model), *_rows_in(module, path)})


def forget_rows(model: nn.Module, path: str) -> None:
    """Let DDP no longer know of the rows of the experts at `path`, which are about to go."""
    gone = _rows_in(model.get_submodule(path), path)
    model._ddp_params_and_buffers_to_ignore = sorted(_ignored(model) - gone)


def _ignored(model: nn.Module) -> set[str]:
    return set(getattr(model, "_ddp_params_and_buffers_to_ignore", ()))


def _rows_in(module: nn.Module, path: str) -> set[str]:
    names = [trainable.PREFIX + name for name in trainable.trained_parameters(module)]
    return {f"{path}.{name}" for name in (*names, trainable.ROW, trainable.EXPERT)}


@torch.no_grad()
def clip_grad_norm(model: nn.Module, max_norm: float) -> torch.Tensor:
    """Scale all gradients so that their norm, over all ranks' experts, is at most `max_norm`; return the norm before that, [].

    torch's own function raises where some gradients are spread and others are not, as under DDP, or over several meshes.
    Trainer and accelerate's clip_grad_norm_ need nothing.
    """
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    norms = [torch.linalg.vector_norm(gradient, dtype=torch.float32) for gradient in gradients]
    norms = [norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms]
    norm = torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.zeros(())
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for gradient in gradients:
        (gradient.to_local() if isinstance(gradient, DTensor) else gradient).mul_(scale)
    return norm


def parameter_groups(model: nn.Module) -> list[dict[str, list[nn.Parameter]]]:
    """Return the parameters that train as an optimizer's groups, one for each mesh and one for those on none.

    With fused=True or foreach=True an optimizer's group cannot hold spread parameters beside whole ones; a GradScaler wants an
    optimizer for each group.
    """
    groups = {}
    for parameter in model.parameters():
        if parameter.requires_grad:
            mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
            groups.setdefault(mesh, []).append(parameter)
    return [{"params": parameters} for parameters in groups.values()]


def save_pretrained(model: nn.Module, folder: str | os.PathLike, **options) -> None:
    """Write `model` as one checkpoint that plain from_pretrained reads; every rank must call it, rank 0 writes.

    Tensors that are spread, by `shard_experts` or FSDP2, are gathered one at a time and lie whole in rank 0's CPU memory
    alone. `options` go to transformers' save_pretrained.
    """
    model = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
    if any(trainable.split_of(module) is not None for module in model.modules()):
        raise ValueError("the model trains rows apart from its stacks; want fold_rows(model) first, or an adapter saved")
    if any(packed.layouts(module) for module in model.modules()):
        raise ValueError("the experts are quantized; want moe_runtime.save_quantized(model, folder) on every rank")
    writes, gathered = dist.get_rank() == 0, {}
    # the parameters themselves: of tied ones one copy, which transformers then recognises
    tensors = model.state_dict(keep_vars=True)
    for tensor in tensors.values():
        if id(tensor) not in gathered:
            whole = tensor.detach()
            whole = whole.full_tensor() if isinstance(whole, DTensor) else whole
            gathered[id(tensor)] = whole.cpu() if writes else None
    if writes:
        whole = {name: gathered[id(tensor)] for name, tensor in tensors.items()}
        model.save_pretrained(folder, state_dict=whole, **options)
    dist.barrier()
