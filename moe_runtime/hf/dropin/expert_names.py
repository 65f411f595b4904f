"""Names under which transformers publishes the weights of a stock model, mostly a matrix for each
expert's projection.

published(model, tensors)           what save_pretrained would write of these tensors of the model
matrices_of(model, stacks)          each expert's matrices by their published names

Many families rename: experts.0.w1.weight and experts.0.w3.weight (Mixtral) are gate and up of
`experts.gate_up_proj`[0], GraniteMoE's input_linear.weight is that stack.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import nn

# of the stand-in for an expert's weight: enough to tell gate and up, stored one after the other or
# in turn
ROWS = 4


def published(model: nn.Module, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors of `model` as save_pretrained names and splits them; unchanged if it is no
    model of transformers.
    """
    from transformers import PreTrainedModel
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import PrefixChange, revert_weight_conversion

    if not isinstance(model, PreTrainedModel):
        return dict(tensors)
    # those of the family alone: a quantized folder's, left on the model, would quantize again
    conversions = get_model_conversion_mapping(model, add_legacy=False)
    before = model.__dict__.get("_weight_conversions")
    model._weight_conversions = [
        one for one in conversions if not isinstance(one, PrefixChange)
    ] or None
    try:
        return revert_weight_conversion(model, dict(tensors))
    finally:
        if before is None:
            del model._weight_conversions
        else:
            model._weight_conversions = before


def matrices_of(
    model: nn.Module, stacks: Mapping[str, Sequence[int]]
) -> dict[str, dict[int, list[tuple[str, int | None]]]]:
    """Return stack -> expert -> its weight's pairs (published name, row of a published stack or
    None), gate before up.

    `stacks` are the shapes of all expert stacks of the model by name. Stacks that are published in
    another order of their rows, or with dimensions exchanged, are left out.
    """
    stand_ins = {}
    start = 0
    for stack, shape in stacks.items():
        stop = start + shape[0] * ROWS
        values = torch.arange(start, stop, device="cpu")
        stand_ins[stack] = values.view(shape[0], ROWS, 1)
        start = stop
    # first row of a published matrix -> its number of rows, its name, its row of a stack
    matrices = {}
    for name, tensor in published(model, stand_ins).items():
        is_stack = tensor.dim() == 3
        for i, matrix in enumerate(tensor if is_stack else tensor[None]):
            rows = matrix.flatten().tolist()
            first = rows[0]
            in_order = rows == list(range(first, first + len(rows)))
            if in_order and matrix.shape[1] == 1:
                matrices[first] = (len(rows), name, i if is_stack else None)
    names = {}
    start = 0
    for stack, shape in stacks.items():
        experts = {}
        for e in range(shape[0]):
            row = start
            start += ROWS
            experts[e] = []
            while row < start and row in matrices:
                count, name, i = matrices[row]
                experts[e].append((name, i))
                row += count
            if row != start:
                experts[e] = None
        if None not in experts.values():
            names[stack] = experts
    return names
