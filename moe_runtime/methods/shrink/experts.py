"""Read, align, merge and write single experts of a model's folder, whatever its layout.

A stack's row is in the model's layout. Where its numbers are in the folder follows from sending a
row of their indices through transformers' own conversion.
"""

from collections.abc import Iterator, Mapping
from functools import cached_property

import torch
from torch import Tensor

from moe_runtime.hf.dropin.experts import stack_names
from moe_runtime.hf.models.saved_rows import SavedRows, saved_rows
from moe_runtime.hf.training.trained_files import join_row, layout_of, split_row
from moe_runtime.io.checkpoint import Checkpoint
from moe_runtime.io.rows import require
from moe_runtime.methods.shrink.cuts import Cuts
from moe_runtime.methods.shrink.groups import Group
from moe_runtime.modules.moe import FLOATS
from moe_runtime.ops.merging import merge_experts

Parts = dict[
    str, Tensor
]  # gate_proj.weight [I, H], up_proj.weight, down_proj.weight [H, I], biases


class LayerExperts:
    """The experts of one layer of a folder.

    Args:
        cuts: The model.
        checkpoint: Its folder's tensors.
        number: The layer.

    Raises:
        ValueError: The folder stores the stacks under other names or shapes than transformers, or
            not as floats.
    """

    def __init__(self, cuts: Cuts, checkpoint: Checkpoint, number: int):
        self.model = cuts.model
        self.checkpoint = checkpoint
        self.path = cuts.layers[number]
        self.module = cuts.model.get_submodule(self.path)
        self.layout = layout_of(self.module)
        self.stacks = {name: getattr(self.module, name) for name in stack_names(self.module)}
        self.saved: dict[str, dict[str, SavedRows]] = {}
        ids = tuple(range(cuts.num_experts))
        for name, stack in self.stacks.items():
            self.saved[name] = saved_rows(self.model, f"{self.path}.{name}", stack, ids, checkpoint)
            for key in self.saved[name]:
                dtype = checkpoint.specs()[key].dtype
                if dtype not in FLOATS:
                    raise ValueError(f"{key} of {checkpoint.path} must be a float, but is {dtype}")

    @cached_property
    def _numbers(self) -> dict[str, dict[str | None, Tensor]]:
        """By stack and saved name of expert 0: the indices of the row's numbers in it."""
        numbers = {}
        for name, stack in self.stacks.items():
            row = torch.arange(stack[0].numel(), dtype=torch.int32).view(stack.shape[1:])
            numbers[name] = {}
            for rows in self.saved[name].values():
                if rows.saved not in numbers[name]:
                    numbers[name][rows.saved] = rows.row(self.model, row).long()
        return numbers

    def row(self, name: str, expert: int) -> Tensor:
        """Read an expert's row of a stack in the model's layout."""
        shape = self.stacks[name].shape[1:]
        result = None
        for key, rows in self.saved[name].items():
            if expert not in rows.ids:
                continue
            if rows.stacked:
                value = self.checkpoint.get_rows(key, expert)
            else:
                value = self.checkpoint.get(key)
            if result is None:
                result = torch.empty(shape.numel(), dtype=value.dtype)
            result[self._numbers[name][rows.saved].flatten()] = value.flatten()
        assert result is not None
        return result.view(shape)

    def parts(self, expert: int) -> Parts:
        """Read an expert's matrices, [out, in] each, and biases."""
        parts = {}
        for name in self.stacks:
            parts |= split_row(self.layout, name, self.row(name, expert))
        return parts

    def merged(self, group: Group, align: bool) -> Parts:
        """Return the weighted sum of a group's experts.

        Args:
            group: Members and weights.
            align: Whether the other members' neurons are put in the order of the leader's most
                similar ones first.
        """
        leader, *others = map(self.parts, group.members)
        if align:
            others = [permuted(other, alignment(leader, other)) for other in others]
        alpha = torch.tensor(group.weights, dtype=torch.float32)
        result = {}
        for name in leader:
            stack = torch.stack([leader[name], *(other[name] for other in others)])
            result[name] = merge_experts(stack, alpha)
        return result

    def joined(self, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return an expert's rows of the stacks, by the stack's name."""
        return {name: join_row(self.layout, name, parts) for name in self.stacks}

    def converted(self, name: str, row: Tensor, expert: int) -> Iterator[tuple[str, Tensor, bool]]:
        """Yield the tensors that hold row `expert` of a stack in the layout of the folder: the
        name, the row's values, and whether they are a row of the tensor instead of all of it.
        """
        done = set()
        for key, rows in self.saved[name].items():
            if expert in rows.ids and rows.saved not in done:
                done.add(rows.saved)
                yield key, rows.row(self.model, row).contiguous(), rows.stacked


def neurons(parts: Mapping[str, Tensor]) -> Tensor:
    """Return an expert's neurons, [I, inputs and outputs], each of norm 1."""
    columns = []
    for name, value in parts.items():
        if name == "down_proj.weight":
            columns.append(value.t())
        elif name.endswith(".weight"):
            columns.append(value)
    rows = torch.cat(columns, 1).float()
    return rows / rows.norm(dim=1, keepdim=True).clamp(min=torch.finfo(rows.dtype).tiny)


def alignment(leader: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> Tensor:
    """Return the permutation [I] of another expert's neurons with the least sum of distances to the
    leader's.
    """
    optimize = require("scipy.optimize", "train")
    cost = torch.cdist(neurons(leader), neurons(other))
    _, columns = optimize.linear_sum_assignment(cost.numpy())
    return torch.from_numpy(columns)


def permuted(parts: Mapping[str, Tensor], order: Tensor) -> Parts:
    """Return an expert with its neurons in another order, which computes the same."""
    result = {}
    for name, value in parts.items():
        if name == "down_proj.weight":
            result[name] = value[:, order]
        elif name == "down_proj.bias":
            result[name] = value
        else:
            result[name] = value[order]
    return result
