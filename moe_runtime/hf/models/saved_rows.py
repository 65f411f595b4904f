"""Map a model's parameters to the tensors of its folder: which tensors hold which rows of an expert
stack.

Most folders have a matrix per expert and projection, some have the stack of the model; `saved_rows`
determines this from names and shapes, so that a folder can be changed tensor by tensor.
"""

import re
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from moe_runtime.hf.models.folders import to_saved
from moe_runtime.io.checkpoint import Checkpoint

_FIRST = re.compile(r"(\bexperts\.)0(\.)")  # expert 0 in a saved name


class SavedRows(NamedTuple):
    """The rows of a model's stack that a tensor of a folder holds."""

    name: str  # of the stack
    ids: tuple[int, ...]
    # the tensor's name if it holds one row; None if it has the model's own layout
    saved: str | None
    stacked: bool  # whether the tensor is a stack of all experts instead of one expert's

    def row(self, model: nn.Module, row: Tensor) -> Tensor:
        """Return a row of the stack in the layout of the folder."""
        row = row[None]
        if self.saved is not None:
            row = to_saved(model, {self.name: row})[self.saved]
        return row[0] if self.stacked else row


def saved_rows(
    model: nn.Module, name: str, stack: Tensor, ids: tuple[int, ...], checkpoint: Checkpoint
) -> dict[str, SavedRows]:
    """Return which tensors of a folder, by name, hold the rows `ids` of the stack `name` of
    `model`.
    """
    rows = {}
    shapes = {}
    one = torch.empty(1, *stack.shape[1:], device="meta")
    for saved, tensor in to_saved(model, {name: one}).items():
        if _FIRST.search(saved) is None:
            rows[saved] = SavedRows(name, ids, saved, stacked=True)
            shapes[saved] = (stack.shape[0], *tensor.shape[1:])
            continue
        for e in ids:
            key = _FIRST.sub(rf"\g<1>{e}\g<2>", saved)
            rows[key] = SavedRows(name, (e,), saved, stacked=False)
            shapes[key] = tuple(tensor.shape)
    whole = {name: tuple(stack.shape)}
    if _choose(shapes, whole, checkpoint) is whole:
        return {name: SavedRows(name, ids, None, stacked=True)}
    return rows


def saved_tensors(
    model: nn.Module, parameters: Mapping[str, Tensor], checkpoint: Checkpoint
) -> dict[str, Tensor]:
    """Return tensors for `parameters` of `model` other than stacks, with the names and layouts of
    a folder.
    """
    if not parameters:
        return {}
    tensors = to_saved(model, parameters)
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    whole = {name: tuple(tensor.shape) for name, tensor in parameters.items()}
    if _choose(shapes, whole, checkpoint) is whole:
        tensors = dict(parameters)
    # a folder may hold both names of one weight
    for pair in getattr(model, "all_tied_weights_keys", {}).items():
        for name, twin in (pair, pair[::-1]):
            if name in tensors and twin in checkpoint:
                tensors.setdefault(twin, tensors[name])
    return tensors


def _choose(
    saved: dict[str, tuple], whole: dict[str, tuple], checkpoint: Checkpoint
) -> dict[str, tuple]:
    """Return the set of names and shapes that the folder has: `saved`, as transformers writes, or
    `whole`, the model's own.
    """
    there = {key: spec.shape for key, spec in checkpoint.specs().items()}
    for shapes in (saved, whole):
        if shapes.items() <= there.items():
            return shapes
    key = next(key for key, shape in saved.items() if there.get(key) != shape)
    problem = f"has it as {list(there[key])}" if key in there else "lacks it"
    raise ValueError(
        f"{checkpoint.path} should have {key} {list(saved[key])}, but {problem}. Pass a folder "
        "written by transformers' save_pretrained, or the model from the Hub"
    )
