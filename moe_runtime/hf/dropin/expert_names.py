"""Names under which transformers publishes the weights of a stock model, mostly a matrix for each
expert's projection.

published(model, tensors)           what save_pretrained would write of these tensors of the model
matrices_of(model, stacks)          each expert's matrices by their published names
parts_in_file(checkpoint, ...)      where a folder holds each expert's matrices

Many families rename: experts.0.w1.weight and experts.0.w3.weight (Mixtral) are gate and up of
`experts.gate_up_proj`[0], GraniteMoE's input_linear.weight is that stack.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from moe_runtime.io.checkpoint import Checkpoint

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


# how files name the projections of an expert
_PROJECTIONS = {
    "gate_up_proj": (("gate_proj", "up_proj"), ("w1", "w3"), ("gate_up_proj",), ("gate", "up")),
    "down_proj": (("down_proj",), ("w2",), ("down",)),
    "up_proj": (("up_proj",), ("w1",), ("up",)),
}


def parts_in_file(
    checkpoint, path: str, name: str, shape, published: dict[int, list] | None
) -> dict[int, list]:
    """Return the place of each expert's matrix in a file, as one or two pairs (key, row).

    It has the model's own name, the one that transformers publishes, or one of DeepSeek's,
    Mixtral's or Phi-MoE's.
    """
    key = f"{path}.{name}"
    candidates = [{e: [(key, e)] for e in range(shape[0])}]
    if published:
        candidates.append(published)
    for block in ("mlp", "block_sparse_moe", "feed_forward", "moe"):
        layer = path.replace(".mlp.", f".{block}.")
        for names in _PROJECTIONS[name]:
            parts = {}
            for e in range(shape[0]):
                parts[e] = [(f"{layer}.{e}.{part}.weight", None) for part in names]
            candidates.append(parts)
    wrong = [f"{key} {list(shape)}", f"matrices {path}.0.*.weight"]
    for parts in candidates:
        unfit = []
        for pairs in parts.values():
            if _size(checkpoint, pairs) != tuple(shape[1:]):
                unfit += pairs
        if not unfit:
            return parts
        if len(unfit) < sum(map(len, parts.values())):  # the right names, but for a few
            wrong = [f"{entry} that fits {list(shape[1:])}" for entry, _ in unfit]
    raise ValueError(
        f"{checkpoint.path} has no {' and no '.join(wrong[:2])}. Load it with from_pretrained and "
        "call quantize_experts"
    )


def _size(checkpoint: Checkpoint, pairs: list[tuple[str, int | None]]) -> tuple[int, int] | None:
    """Return rows and columns of an expert's matrices, one below the other; None if the file lacks
    one or they do not fit.
    """
    rows = 0
    widths = set()
    for key, row in pairs:
        if key not in checkpoint:
            return None
        size = checkpoint.specs()[key].shape
        if row is not None:
            size = size[1:] if row < size[0] else ()
        if len(size) != 2:
            return None
        rows += size[0]
        widths.add(size[1])
    return (rows, widths.pop()) if len(widths) == 1 else None
