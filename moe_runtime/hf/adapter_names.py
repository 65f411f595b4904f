"""How ESFT's files name and lay out the experts of a model, whatever its stacks are.

A row e of a layer's stacks is

    <path of the experts>.{e}.gate_proj.weight [I, H],  .up_proj.weight [I, H],  .down_proj.weight [H, I]

which in a DeepSeek model are the official names, model.layers.{l}.mlp.experts.{e}.*; where experts have biases, *.bias
[I], [I] and [H] too.
"""

import re
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import nn

from moe_runtime.hf.layers import RoutedLayer, plain_name

_EXPERT = re.compile(r"(?P<path>(?:.*\.)?experts)\.(?P<expert>\d+)\.(?P<part>(?:gate|up|down)_proj\.(?:weight|bias))")


class Layout(NamedTuple):
    """How an experts module lays out its stacks."""

    gated: bool
    transposed: bool = False  # [E, in, out]
    interleaved: bool = False  # gate and up by turns, not gate first
    bias: bool = False


class ExpertName(NamedTuple):
    """The parts of an expert's tensor's name."""

    path: str  # of the experts module
    layer: int
    expert: int
    part: str  # such as gate_proj.weight


def parse_name(name: str) -> ExpertName | None:
    """Take the name of an expert's tensor apart; None for any other name. The layer is the first number in the path."""
    match = _EXPERT.fullmatch(name)
    digits = re.search(r"\d+", match["path"]) if match else None
    return ExpertName(match["path"], int(digits[0]), int(match["expert"]), match["part"]) if digits else None


def layout_of(module: nn.Module) -> Layout:
    """Return the layout of an experts module, ours or transformers'."""
    if hasattr(module, "up_name"):
        return Layout(module.config.gated, bias=module.config.bias)
    interleaved = module.has_gate and not getattr(module, "is_concatenated", True)
    return Layout(module.has_gate, module.is_transposed, interleaved, module.has_bias)


def stack_parts(layout: Layout) -> dict[str, tuple[str, ...]]:
    """Return the parts of an expert that each stack holds, by the stack's name."""
    up, parts = ("gate_up_proj", ("gate_proj", "up_proj")) if layout.gated else ("up_proj", ("up_proj",))
    stacks = {up: tuple(f"{part}.weight" for part in parts), "down_proj": ("down_proj.weight",)}
    if layout.bias:
        stacks |= {f"{up}_bias": tuple(f"{part}.bias" for part in parts), "down_proj_bias": ("down_proj.bias",)}
    return stacks


def split_row(layout: Layout, stack: str, row: torch.Tensor) -> dict[str, torch.Tensor]:
    """Cut a row of the stack of this name into an expert's tensors, by part: [out, in] or, of biases, [out]; views."""
    names = stack_parts(layout)[stack]
    row = row.t() if layout.transposed else row  # of a bias, the bias
    if len(names) == 1:
        return {names[0]: row}
    halves = (row[0::2], row[1::2]) if layout.interleaved else row.chunk(2)
    return dict(zip(names, halves, strict=True))


def join_row(layout: Layout, stack: str, parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Put a row of the stack of this name together from an expert's tensors, [out, in] each: what `split_row` undoes."""
    halves = [parts[name] for name in stack_parts(layout)[stack]]
    if len(halves) == 1:
        row = halves[0]
    else:
        row = torch.stack(halves, dim=1).flatten(0, 1) if layout.interleaved else torch.cat(halves)
    return row.t() if layout.transposed else row


def experts_path(layer: RoutedLayer) -> str:
    """Return the path of a layer's experts module, without what wrappers put into it."""
    name = plain_name(layer.name)
    return name if layer.is_stock else f"{name.rpartition('.')[0]}.experts"
