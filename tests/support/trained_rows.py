"""The rows that `train_rows` made trainable, in all layers of a model."""

from dataclasses import dataclass

import torch
from torch import nn

from moe_runtime.hf.training.ranks import whole
from moe_runtime.hf.training.trainable import layers_of
from moe_runtime.modules.trainable import Split, split_of, trained_parameters


@dataclass(frozen=True, eq=False)
class TrainedLayer:
    """The trained experts of a layer. Rows are in the order of `ids`, except when experts are
    distributed over ranks.
    """

    ids: tuple[int, ...]
    stacks: dict[str, torch.Tensor]  # by the stack's name, [n, ...] in its layout


def trained_rows(model: nn.Module) -> dict[int, TrainedLayer]:
    """Return the layers with trained experts, and their actual parameters: DTensors under FSDP2 and
    expert parallelism.
    """
    values = {}
    for number, (module, split) in _split_modules(model).items():
        values[number] = TrainedLayer(split.ids, trained_parameters(module))
    return values


def gathered_rows(model: nn.Module) -> dict[int, TrainedLayer]:
    """Return copies of `trained_rows` on the CPU, unsharded and in the order of their ids. Every
    rank must call it.
    """
    values = {}
    for number, (module, split) in _split_modules(model).items():
        values[number] = TrainedLayer(
            split.ids,
            {
                name: whole(rows)[list(split.places)]
                for name, rows in trained_parameters(module).items()
            },
        )
    return values


def _split_modules(model: nn.Module) -> dict[int, tuple[nn.Module, Split]]:
    found = {}
    for number, layer in layers_of(model, False).items():
        found[number] = (layer.module, split_of(layer.module))
    return {
        number: (module, split) for number, (module, split) in found.items() if split is not None
    }
