"""Names under which transformers publishes the weights of a stock model, mostly a matrix for each
expert's projection.

published(model, tensors)           what save_pretrained would write of these tensors of the model
matrices_of(model, stacks)          each expert's matrices by their published names
parts_in_file(checkpoint, ...)      where a folder holds each expert's matrices

Many families rename: experts.0.w1.weight and experts.0.w3.weight (Mixtral) are gate and up of
`experts.gate_up_proj`[0], GraniteMoE's input_linear.weight is that stack.
"""

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from moe_runtime.hf.models.folders import family_conversions
from moe_runtime.io.checkpoint import Checkpoint

# of the stand-in for an expert's weight: enough to tell gate and up, stored one after the other or
# in turn
ROWS = 4
Places = dict[int, list[tuple[str, int | None]]]  # expert -> (name, row of a stack or None)


def published(model: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of `model` as save_pretrained names and splits them; unchanged if it is no
    model of transformers.
    """
    from transformers import PreTrainedModel
    from transformers.core_model_loading import revert_weight_conversion

    if not isinstance(model, PreTrainedModel):
        return dict(tensors)
    before = model.__dict__.get("_weight_conversions")
    # a quantized folder's, left on the model, would quantize again
    model._weight_conversions = family_conversions(model) or None
    try:
        return revert_weight_conversion(model, dict(tensors))
    finally:
        if before is None:
            del model._weight_conversions
        else:
            model._weight_conversions = before


def matrices_of(model: nn.Module, stacks: Mapping[str, Sequence[int]]) -> dict[str, Places]:
    """Return stack -> expert -> its weight's pairs (published name, row of a published stack or
    None), gate before up.

    `stacks` are the shapes of all expert stacks of the model by name. Stacks that are published in
    another order of their rows, or with dimensions exchanged, are left out.
    """
    stand_ins = {}  # each expert's rows, numbered over all stacks
    start = 0
    for stack, shape in stacks.items():
        stop = start + shape[0] * ROWS
        rows = torch.arange(start, stop, device="cpu")
        stand_ins[stack] = rows.view(shape[0], ROWS, 1)
        start = stop
    # an expert's number over all stacks -> rows and location of its published matrices
    matrices = {}
    for name, tensor in published(model, stand_ins).items():
        is_stack = tensor.dim() == 3
        for i, matrix in enumerate(tensor if is_stack else tensor[None]):
            rows = matrix.flatten().tolist()
            location = (name, i if is_stack else None)
            if matrix.shape[1] == 1:
                matrices.setdefault(rows[0] // ROWS, []).append((rows, location))
    names = {}
    for stack, stand_in in stand_ins.items():
        experts = {}
        for e, expected in enumerate(stand_in.flatten(1).tolist()):
            parts = sorted(matrices.get(expected[0] // ROWS, ()))
            if [row for rows, _ in parts for row in rows] == expected:
                experts[e] = [location for _, location in parts]
        if len(experts) == len(stand_in):
            names[stack] = experts
    return names


def parts_in_file(
    checkpoint: Checkpoint, path: str, name: str, shape: Sequence[int], published: Places | None
) -> Places:
    """Return the place of each expert's matrix in a file, as one or two pairs (key, row).

    It has the model's own name, or the one that transformers publishes.
    """
    key = f"{path}.{name}"
    wrong = [f"{key} {list(shape)}", f"matrices {path}.0.*.weight"]
    for parts in ({e: [(key, e)] for e in range(shape[0])}, published or {}):
        unfit = [e for e in parts if not _fits(checkpoint, parts[e], shape[1:])]
        if parts and not unfit:
            return parts
        if len(unfit) < len(parts):  # the right names, but for a few
            wrong = [f"{entry} that fits {list(shape[1:])}" for entry, _ in parts[unfit[0]]]
    raise ValueError(
        f"{checkpoint.path} has no {' and no '.join(wrong)}. Load it with from_pretrained and "
        "call quantize_experts"
    )


def _fits(checkpoint: Checkpoint, places: Iterable, shape: Sequence[int]) -> bool:
    """Return whether the file has an expert's matrices, one below the other as large as `shape`."""
    rows = 0
    specs = checkpoint.specs()
    for key, row in places:
        size = specs[key].shape if key in specs else ()
        if row is not None:
            size = size[1:] if size[:1] > (row,) else ()
        if size[1:] != shape[1:]:
            return False
        rows += size[0]
    return rows == shape[0]
