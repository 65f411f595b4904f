"""Trained experts of a layer, whose weights are stored separately from the stacks of the frozen
ones.

    W_e = trained_<stack>[trained_row[e]]  where trained_row[e] >= 0,   <stack>[e]  elsewhere

ESFT (arXiv 2407.01906, Sec. 3.3) trains the experts that a task selects. The stacks [E, ...] of an
experts module (ours or transformers') are frozen, and each gets a separate parameter [n, ...] of
the n trained experts in the same layout: gradients and optimizer states have the size of n experts,
and weight decay does not affect the others. The same holds for biases.

A state_dict has the rows in the order of the ids, and the ids in its metadata, which torch.save
stores, so that rows of other experts cannot be loaded. Safetensors files have no such metadata, and
their rows are loaded in order.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from moe_runtime.ops.all_to_all import is_distributed
from moe_runtime.ops.expert_rows import ExpertStacks

PREFIX = "trained_"
# buffers: an expert's row [E] int32, or -1; a row's expert [n] int64
ROW = "trained_row"
EXPERT = "trained_expert"
SPLIT = "moe_runtime_split"  # attribute of an experts module with separate rows


@dataclass(frozen=True)
class Split:
    """The trained experts of a module, and the state to restore afterwards."""

    ids: tuple[int, ...]  # in the requested order
    # their rows in the whole parameters: 0 .. n - 1 unless experts are sharded over ranks
    places: tuple[int, ...]
    requires_grad: dict[str, bool]  # of the stacks, to be restored
    hooks: tuple = field(default=(), compare=False, repr=False)  # of state_dict and load_state_dict


def split_of(module: nn.Module) -> Split | None:
    """Return the separately stored experts of `module`, or None if there are none."""
    return module.__dict__.get(SPLIT)


@torch.no_grad()
def split_rows(
    module: nn.Module,
    names: Iterable[str],
    ids: Sequence[int],
    dtype: torch.dtype | None = None,
) -> None:
    """Copy rows `ids` of the stacks `names` to parameters in `dtype`; freeze the stacks."""
    stacks = {name: getattr(module, name) for name in names}
    first = next(iter(stacks.values()))
    index = torch.tensor(ids, dtype=torch.int64, device=first.device)
    rows = {
        name: stack.detach().index_select(0, index).to(dtype or stack.dtype)
        for name, stack in stacks.items()
    }
    if first.is_meta:  # another rank will send the weights, but not the maps
        index = torch.tensor(ids, dtype=torch.int64)
    register_maps(module, first.shape[0], index)  # the last step that can run out of memory
    for name, part in rows.items():
        module.register_parameter(PREFIX + name, nn.Parameter(part))
    remember(module, stacks, Split(tuple(ids), tuple(range(len(ids))), {}))


def register_maps(module: nn.Module, num_experts: int, index: Tensor) -> None:
    """Register the row numbers of the experts `index` [n] int64 as non-persistent buffers."""
    row = torch.full(
        (num_experts,),
        -1,
        dtype=torch.int32,
        device=index.device,
    )
    row[index] = torch.arange(index.numel(), dtype=torch.int32, device=index.device)
    module.register_buffer(ROW, row, persistent=False)
    module.register_buffer(EXPERT, index, persistent=False)


def remember(module: nn.Module, stacks: dict[str, nn.Parameter], split: Split) -> None:
    """Freeze `stacks` and record the changes in `module`."""
    before = {name: stack.requires_grad for name, stack in stacks.items()}
    for stack in stacks.values():
        stack.requires_grad_(False)
    hooks = (
        module.register_state_dict_post_hook(_note_ids),
        module.register_load_state_dict_pre_hook(_check_ids),
    )
    setattr(module, SPLIT, Split(split.ids, split.places, before, hooks))


def _note_ids(
    module: nn.Module,
    state_dict: dict,
    prefix: str,
    metadata: dict,
) -> None:
    split = module.__dict__[SPLIT]
    metadata[SPLIT] = {"ids": split.ids, "places": split.places}


def _check_ids(
    module: nn.Module,
    state_dict: dict,
    prefix: str,
    metadata: dict,
    strict: bool,
    missing: list,
    unexpected: list,
    errors: list,
) -> None:
    split = module.__dict__[SPLIT]
    saved = metadata.get(SPLIT)
    if saved is not None and saved != {"ids": split.ids, "places": split.places}:
        errors.append(
            f"{prefix[:-1]}: state_dict must have the experts {list(split.ids)}, in this order, "
            f"but has {list(saved['ids'])}. Call train_rows with the same experts"
        )


def trained_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters of the trained experts by the names of their stacks, if any."""
    split = split_of(module)
    if split is None:
        return {}
    return {name: getattr(module, PREFIX + name) for name in split.requires_grad}


@torch.no_grad()
def drop_rows(module: nn.Module) -> None:
    """Remove the separate rows, so that the stacks are bit-identical to before."""
    split = module.__dict__.pop(SPLIT)
    for hook in split.hooks:
        hook.remove()
    for name, required in split.requires_grad.items():
        delattr(module, PREFIX + name)
        getattr(module, name).requires_grad_(required)
    delattr(module, ROW)
    delattr(module, EXPERT)


@torch.no_grad()
def fold_rows(module: nn.Module) -> None:
    """Write the separate rows into their stacks, rounded to the stacks' dtype, and remove them."""
    index = getattr(module, EXPERT)
    for name, rows in trained_parameters(module).items():
        stack = _local(getattr(module, name))
        stack.index_copy_(0, index, _local(rows)[: index.numel()].to(stack.dtype))
    drop_rows(module)


def _local(tensor: Any) -> Tensor:
    if is_distributed(tensor):
        return tensor.to_local()
    return tensor


def experts_of(
    module: nn.Module,
    stacks: Sequence,
    trained: Sequence,
    activation: Any,
) -> ExpertStacks:
    """Return the experts for `moe_mlp` from the frozen `stacks` [E, ...] and the trained rows.

    The stacks are up, down and any biases. `trained` [n, ...] or longer are in the order of
    `stacks`. Each pair of biases becomes one [E, ...], differentiable in the trained rows.
    """
    index = getattr(module, EXPERT)
    n = index.numel()
    # on a rank with fewer trained experts than others, the last rows belong to no expert
    up, down, *rows = (part if part.shape[0] == n else part[:n] for part in trained)
    up_bias = None
    down_bias = None
    if rows:
        up_bias = stacks[2].index_copy(0, index, rows[0])
        down_bias = stacks[3].index_copy(0, index, rows[1])
    return ExpertStacks(
        stacks[0],
        stacks[1],
        up_bias,
        down_bias,
        getattr(module, ROW),
        up,
        down,
        activation,
    )
