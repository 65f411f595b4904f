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
from moe_runtime.hf.models.saved_rows import numbered
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
    stand_ins = {}  # an expert of each stack, with its rows' numbers
    for i, stack in enumerate(stacks):
        rows = torch.arange(i * ROWS, (i + 1) * ROWS, device="cpu")
        stand_ins[stack] = rows.view(1, ROWS, 1)
    published_rows = {}
    for saved, tensor in published(model, stand_ins).items():
        if tensor.shape[-1] == 1:
            published_rows[saved] = tensor.flatten().tolist()
    names = {}
    for stack, stand_in in stand_ins.items():
        expected = stand_in.flatten().tolist()
        parts = [saved for saved, rows in published_rows.items() if rows[0] in expected]
        parts.sort(key=published_rows.get)
        if [row for saved in parts for row in published_rows[saved]] == expected:
            experts = range(stacks[stack][0])
            names[stack] = {e: [_place(saved, e) for saved in parts] for e in experts}
    return names


def _place(saved: str, e: int) -> tuple[str, int | None]:
    """Return where expert `e` is if the first one is at `saved`, a matrix or a stack of all."""
    name = numbered(saved, e)
    return (saved, e) if name is None else (name, None)


def parts_in_file(
    checkpoint: Checkpoint, path: str, name: str, shape: Sequence[int], published: Places | None
) -> Places:
    """Return the place of each expert's matrix in a file, as one or two pairs (key, row).

    It has the model's own name, the one that transformers publishes, or DeepSeek's.
    """
    experts = range(shape[0])
    key = f"{path}.{name}"
    projections = ("gate_proj", "up_proj") if name == "gate_up_proj" else (name,)
    deepseek = {e: [(f"{path}.{e}.{part}.weight", None) for part in projections] for e in experts}
    wrong = [f"{key} {list(shape)}", f"matrices {path}.0.*.weight"]
    for parts in ({e: [(key, e)] for e in experts}, published or {}, deepseek):
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
