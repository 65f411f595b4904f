"""Adapters with random weights for any model, without training it."""

import torch

from moe_runtime.hf.dropin.layers import plain_name
from moe_runtime.hf.training.trainable import layers_of
from moe_runtime.hf.training.trained_files import layout_of, split_row, stack_parts
from moe_runtime.methods.esft.adapters import Adapter, base_of
from moe_runtime.methods.esft.selection import ExpertSelection


def random_adapter(model, others: bool = False, dtype: torch.dtype | None = None) -> Adapter:
    """Use the last and the second expert of every layer, and with `others` everything that is not a
    routed expert.
    """
    layers = layers_of(model, fresh=False)
    generator = torch.Generator().manual_seed(5)
    experts = {number: (layer.num_experts - 1, 1) for number, layer in layers.items()}
    selection = ExpertSelection(
        experts=experts,
        shared_experts=others,
        non_expert_modules=others,
    )
    tensors = {}
    stacks = set()

    def draw(like: torch.Tensor) -> torch.Tensor:
        return torch.randn(like.shape, generator=generator).to(dtype or like.dtype)

    for number, layer in layers.items():
        module = layer.module
        path = plain_name(layer.name)
        for stack in stack_parts(layout_of(module)):
            stacks.add(id(getattr(module, stack)))
            for e in experts[number]:
                row = draw(getattr(module, stack)[e])
                tensors |= {
                    f"{path}.{e}.{p}": t
                    for p, t in split_row(layout_of(module), stack, row).items()
                }
    if others:
        tensors |= {name: draw(p) for name, p in model.named_parameters() if id(p) not in stacks}
    return Adapter(
        selection=selection,
        tensors=tensors,
        base=base_of(model, layers, experts),
    )


def weights(model) -> dict[str, torch.Tensor]:
    """Copy all tensors of a model."""
    values = {}
    for name, tensor in model.state_dict().items():
        values[name] = tensor.detach().clone()
    return values


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    """Whether both have the same names and bits."""
    return a.keys() == b.keys() and all(
        a[n].dtype == b[n].dtype and torch.equal(a[n], b[n]) for n in a
    )
