"""Map a model's parameters to the tensors of its folder: which tensors hold which rows of an expert
stack.

Most folders have a matrix per expert and projection, some have the stack of the model; `saved_rows`
determines this from names and shapes, so that a folder can be changed tensor by tensor.
"""

import re
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import nn

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

    def row(self, model: nn.Module, row: torch.Tensor) -> torch.Tensor:
        """Return a row of the stack in the layout of the folder."""
        row = row[None]
        saved = row if self.saved is None else to_saved(model, {self.name: row})[self.saved]
        return saved[0] if self.stacked else saved


def saved_rows(
    model: nn.Module, name: str, stack: torch.Tensor, ids: tuple[int, ...], checkpoint: Checkpoint
) -> dict[str, SavedRows]:
    """Return which tensors of a folder, by name, hold the rows `ids` of the stack `name` of
    `model`.
    """
    found = {}
    shapes = {}
    one = torch.empty(1, *stack.shape[1:], device="meta")
    for saved, tensor in to_saved(model, {name: one}).items():
        stacked = _FIRST.search(saved) is None
        if stacked:
            keys = {saved: ids}
        else:
            keys = {_FIRST.sub(rf"\g<1>{e}\g<2>", saved): (e,) for e in ids}
        found |= {key: SavedRows(name, own, saved, stacked) for key, own in keys.items()}
        shapes |= dict.fromkeys(
            keys, (stack.shape[0], *tensor.shape[1:]) if stacked else tuple(tensor.shape)
        )
    whole = {name: tuple(stack.shape)}
    if _choose(shapes, whole, checkpoint) is whole:
        return {name: SavedRows(name, ids, None, True)}
    return found


def saved_tensors(
    model: nn.Module, own: Mapping[str, torch.Tensor], checkpoint: Checkpoint
) -> dict[str, torch.Tensor]:
    """Return `own`, tensors for parameters of `model` other than stacks, with the names and layouts
    of a folder.
    """
    if not own:
        return {}
    saved = to_saved(model, own)
    shapes, whole = (
        {name: tuple(t.shape) for name, t in tensors.items()} for tensors in (saved, own)
    )
    found = dict(own if _choose(shapes, whole, checkpoint) is whole else saved)
    # a folder may hold both names of one weight
    for pair in getattr(model, "all_tied_weights_keys", {}).items():
        for name, twin in (pair, pair[::-1]):
            if name in found and twin in checkpoint:
                found.setdefault(twin, found[name])
    return found


def _choose(
    saved: dict[str, tuple], whole: dict[str, tuple], checkpoint: Checkpoint
) -> dict[str, tuple]:
    """Return the set of names and shapes that the folder has: `saved`, as transformers writes, or
    `whole`, the model's own.
    """
    specs = checkpoint.specs()
    for shapes in (saved, whole):
        if all(key in specs and specs[key].shape == shape for key, shape in shapes.items()):
            return shapes
    key = next(key for key, shape in saved.items() if key not in specs or specs[key].shape != shape)
    there = f"has it as {list(specs[key].shape)}" if key in specs else "lacks it"
    raise ValueError(
        f"{checkpoint.path} should have {key} {list(saved[key])}, but {there}. Pass a folder "
        "written by transformers' save_pretrained, or the model from the Hub"
    )
