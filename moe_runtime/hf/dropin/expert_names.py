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
        count = shape[0] * ROWS
        stand_ins[stack] = torch.arange(start, start + count, device="cpu").view(shape[0], ROWS, 1)
        start += count
    matrices = {stack: {e: {} for e in range(shape[0])} for stack, shape in stacks.items()}
    owners = [
        (stack, e, row)
        for stack, shape in stacks.items()
        for e in range(shape[0])
        for row in range(ROWS)
    ]
    for name, tensor in published(model, stand_ins).items():
        rows_of = tensor if tensor.dim() == 3 else tensor[None]
        for i, matrix in enumerate(rows_of):
            stack, e, first = owners[int(matrix[0, 0])]
            rows = [owners[int(value)] for value in matrix.flatten()]
            if (
                rows == [(stack, e, first + row) for row in range(len(rows))]
                and matrix.shape[1] == 1
            ):
                matrices[stack][e][first] = (len(rows), name, i if tensor.dim() == 3 else None)
    names = {}
    for stack, experts in matrices.items():
        pairs = {e: [parts[first] for first in sorted(parts)] for e, parts in experts.items()}
        if all(sum(rows for rows, *_ in parts) == ROWS for parts in pairs.values()):
            names[stack] = {
                e: [(name, row) for _, name, row in parts] for e, parts in pairs.items()
            }
    return names
