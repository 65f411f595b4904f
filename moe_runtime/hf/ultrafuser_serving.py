"""The gate and the heads of an UltraFuser without its specialists: for engines that run these elsewhere.

UltraFuser, App. B: each specialist runs in an engine of its own with its own prompt; per token the engines' last hidden
states are mixed to logits, one token is drawn, and all engines go on from it.
"""

import os
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import nn

from moe_runtime.checkpoint import Checkpoint
from moe_runtime.hf import ranks
from moe_runtime.hf import ultrafuser_folders as folders
from moe_runtime.hf.saved_form import skeleton, to_saved
from moe_runtime.hf.ultrafuser_heads import Head, gate_weight, head_of, logits_of
from moe_runtime.hf.ultrafuser_inputs import Encoder
from moe_runtime.hf.ultrafuser_specialists import encoder_of
from moe_runtime.modules.fuser import FuserGate


class Mixed(NamedTuple):
    """What the next token is drawn from."""

    logits: torch.Tensor  # [..., V] float32
    weight: torch.Tensor  # [..., S] float32


class FusedHead(nn.Module):
    """Last hidden states to mixed logits; `encoder`, if the folder has tokenizers, makes each engine's prompt."""

    def __init__(self, gate: FuserGate, heads: Sequence[Head], encoder: Encoder | None):
        super().__init__()
        self.gate, self.linears, self.encoder = gate, nn.ModuleList(head.linear for head in heads), encoder
        self._heads = list(heads)

    @torch.no_grad()
    def forward(self, hidden: Sequence[torch.Tensor]) -> Mixed:
        """Mix the logits of states S of [..., H_s], each after its model's final norm; on the gate's device."""
        dtypes = [linear.weight.dtype for linear in self.linears]
        hidden = [h.to(dtype) for h, dtype in zip(hidden, dtypes, strict=True)]
        weight = gate_weight(self.gate, hidden)
        return Mixed(logits_of(self._heads, hidden, weight), weight)


def load_head(
    folder: str | os.PathLike,
    *,
    specialists: Mapping[str, str | os.PathLike] | None = None,
    device: torch.device | str | None = None,
) -> FusedHead:
    """Load from a folder that `ultrafuser.save` wrote what is behind the specialists' last states; nothing else is read.

    `specialists` is `load`'s. Raises ValueError for what load refuses, but for changed specialists, which this cannot see.
    """
    values = folders.read(folder)
    parts = folders.locate(folder, values, specialists or {})
    tokenizers = [folders.saved_tokenizer(part) for part in parts]
    heads = [_open(part) for part in parts]
    vocab_size = min(head.linear.out_features for head in heads)
    encoder = encoder_of(tokenizers, [part.template for part in parts], [part.name for part in parts], vocab_size)
    sizes = [head.linear.in_features for head in heads]
    gate = FuserGate(sizes, kind=values["gate"]["kind"], joint=values["gate"]["joint"])
    fused = FusedHead(gate, heads, encoder)
    folders.load_gate(fused, folder)
    return fused.to(device).eval() if device is not None else fused.eval()


@torch.no_grad()
def _open(part: folders.Part) -> Head:
    """Return a specialist's head with its weights, its model being an empty shell."""
    if not os.path.isdir(part.path):
        raise ValueError(f"specialist {part.name!r} is {part.path}; want a folder here; hf download makes it")
    model = skeleton(ranks.load_config(part.path, f"specialist {part.name!r}"))
    head = head_of(model, part.name)
    prefix = next(name for name, module in model.named_modules() if module is head.linear)
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    with Checkpoint(part.path) as checkpoint:
        for name, parameter in list(head.linear.named_parameters()):
            key = f"{prefix}.{name}"
            saved = next(iter(to_saved(model, {key: parameter})))
            if saved not in checkpoint:
                key = tied.get(key, key)
                saved = next(iter(to_saved(model, {key: parameter})))
            tensor = checkpoint.get(saved).to(getattr(torch, part.dtype))
            setattr(head.linear, name, nn.Parameter(tensor, requires_grad=False))
    return head
