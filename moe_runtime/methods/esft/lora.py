"""ESFT's selection as a mask on LoRA: low-rank matrices for the selected experts of frozen stacks,
in PEFT's own files.

    train_lora   LoRA on the stacks of the selection's layers; only the selected experts' matrices
                 train
    save_lora    PEFT's adapter_model.safetensors and adapter_config.json, and expert_cfg.json: the
                 selection and the base
    read_ranks   each expert's rank from a file
    read_lora    reads that selection and base; `apply` applies such an adapter, or ESFT's own, to a
                 model

PEFT's files have A [r, in] and B [out, r] for every expert of a stack, and so do ours, with zeros
for the other experts. Only the selected experts' matrices are parameters (`SelectedHalf`): the
others cost no gradients or optimizer state. PEFT gets whole matrices wherever it reads a weight, so
its own forward pass, merging and files work unchanged.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from moe_runtime.config import check_number, check_positive
from moe_runtime.hf.dropin import experts
from moe_runtime.hf.dropin.layers import plain_name
from moe_runtime.hf.models.families import check_module
from moe_runtime.hf.training import trained_files
from moe_runtime.hf.training.trainable import TrainableReceipt, check_unwrapped, layers_of
from moe_runtime.hf.training.trained_files import layout_of, split_row, stack_parts
from moe_runtime.io.files import atomic_folder, atomic_write_json, check_out_dir, read_json
from moe_runtime.methods.esft import adapters
from moe_runtime.methods.esft.adapters import Adapter, check_is_base, to_config
from moe_runtime.methods.esft.base import Layers, check_model
from moe_runtime.methods.esft.selection import (
    FLAGS,
    ExpertSelection,
    check_is_selection,
    check_selection,
)
from moe_runtime.methods.lora.adapters import HALVES, read_tensors
from moe_runtime.methods.lora.baseline import add_parameter_lora
from moe_runtime.methods.lora.baseline import save_lora as save_peft_files
from moe_runtime.methods.lora.stacks import PeftAdapter, is_peft, read_peft
from moe_runtime.ops.all_to_all import is_distributed

# the paper has no LoRA on selected experts; these are methods.lora's
RANK = 8
ALPHA = 16.0
TRAINING = "moe_runtime_esft_lora"  # attribute of a model: expert_cfg.json


def train_lora(
    model: nn.Module,
    selection: ExpertSelection,
    rank: int | Callable[[int, int], int] = RANK,
    alpha: float = ALPHA,
    dtype: torch.dtype | None = None,
    seed: int = 0,
    check_weights: bool = True,
) -> tuple[nn.Module, TrainableReceipt]:
    """Wrap a model in PEFT's LoRA, of which only the selected experts' matrices train.

    Args:
        model: A stock MoE model.
        selection: Experts, without shared_experts and non_expert_modules.
        rank: Of each expert's matrices, or a function of layer and expert. PEFT's file has the
            largest rank, with zeros beyond that of each expert.
        alpha: The scaling is alpha / rank, the largest one.
        dtype: Of the matrices; None is the model's, or float32 for half precision.
        seed: Initializes the matrices.
        check_weights: Whether the model must have the weights that were scored.

    Returns:
        The PEFT model, and what trains.

    Raises:
        ValueError: If the model lacks an expert, the selection trains more than routed experts, or
            it is of another model's scores.
    """
    check_module(model)
    check_is_selection(selection)
    check_unwrapped(model)
    check_is_base(model)
    layers = layers_of(model)
    base = check_model(selection.base, model, layers, selection.experts, check_weights)
    check_selection(layers, selection)
    ranks = check_lora(selection, rank, alpha)
    largest = max(rank for of_experts in ranks.values() for rank in of_experts.values())
    total = sum(p.numel() for p in model.parameters())
    config = to_config(selection, base)
    parameters = []
    for number, ids in selection.experts.items():
        if ids:
            layer = layers[number]
            for name, parameter in layer.module.named_parameters(recurse=False):
                if parameter.dim() == 3:
                    parameters.append(f"{layer.name}.{name}")
    adapted = add_parameter_lora(model, parameters, largest, alpha, seed)
    experts.patch(adapted)
    rows = 0
    for name, halves in list(adapted.named_modules()):
        if name.endswith((".lora_A", ".lora_B")) and isinstance(halves, nn.ModuleDict) and halves:
            number = int(re.search(r"\.(\d+)\.", plain_name(name))[1])
            weight = halves["default"].weight.detach()
            weight = weight.to(dtype or torch.promote_types(weight.dtype, torch.float32))
            num_experts = layers[number].num_experts
            half = SelectedHalf(weight, ranks[number], num_experts, name[-1] == "A")
            halves["default"] = half
            rows += half.selected.numel()
    setattr(adapted, TRAINING, config)
    return adapted, TrainableReceipt(
        experts=selection.experts,
        shared_experts=(),
        trainable_parameters=rows,
        total_parameters=total,
    )


class SelectedHalf(nn.Module):
    """A [E r, in] or B [out, r E] of PEFT's LoRA of a stack; only the matrices of selected experts
    are parameters, `ranks` {expert: rank} of them.

    `weight` and the state_dict have zeros for the others; under FSDP2 the state_dict holds
    `selected`, sharded.
    """

    def __init__(
        self, weight: torch.Tensor, ranks: Mapping[int, int], num_experts: int, is_a: bool
    ):
        super().__init__()
        self.shape = weight.shape
        self.dim = 0 if is_a else 1
        self.out_features, self.in_features = weight.shape  # as in nn.Linear, which it replaces
        positions = torch.arange(weight.shape[self.dim], device=weight.device)
        table = positions.view(num_experts, -1) if is_a else positions.view(-1, num_experts).t()
        index = torch.cat([table[e, :rank] for e, rank in ranks.items()])
        self.register_buffer("index", index, persistent=False)
        self.selected = nn.Parameter(weight.index_select(self.dim, self.index))

    @property
    def weight(self) -> torch.Tensor:
        """The matrix of all experts, as in PEFT."""
        return self.whole(self.selected)

    def whole(self, selected: torch.Tensor) -> torch.Tensor:
        """Return the matrix of all experts for the given part of selected experts."""
        return selected.new_zeros(self.shape).index_copy(
            self.dim, self.index.to(selected.device), selected
        )

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        if is_distributed(self.selected):
            super()._save_to_state_dict(destination, prefix, keep_vars)
        else:
            destination[f"{prefix}weight"] = self.weight if keep_vars else self.weight.detach()

    def _load_from_state_dict(
        self, state_dict, prefix, metadata, strict, missing, unexpected, errors
    ):
        weight = state_dict.pop(f"{prefix}weight", None)
        if weight is not None:
            if weight.shape != self.shape:
                errors.append(
                    f"Expected {prefix}weight of shape {list(self.shape)}, but got "
                    f"{list(weight.shape)}"
                )
                return
            index = self.index.to(weight.device)
            state_dict[f"{prefix}selected"] = weight.index_select(self.dim, index)
        super()._load_from_state_dict(
            state_dict, prefix, metadata, strict, missing, unexpected, errors
        )


def check_lora(
    selection: ExpertSelection, rank: int | Callable[[int, int], int], alpha: float
) -> dict[int, dict[int, int]]:
    """Return the rank of each selected expert, by layer.

    Raises ValueError for an invalid rank or alpha, and for a selection without experts or with more
    than routed experts.
    """
    ranks = {}
    for number, ids in selection.experts.items():
        ranks[number] = {e: rank(number, e) if callable(rank) else rank for e in ids}
        for value in ranks[number].values():
            check_positive("rank", value)
    check_number("alpha", alpha, positive=True)
    problem = None if selection.num_experts else "selection has no experts"
    for name in FLAGS:
        if getattr(selection, name):
            problem = f"{name} is True"
    if problem is not None:
        raise ValueError(
            f"{problem}, but LoRA supports routed experts only. Select some, and turn "
            f"{' and '.join(FLAGS)} off"
        )
    return ranks


def read_ranks(
    path: str | Path, selection: ExpertSelection, rank: int
) -> Callable[[int, int], int]:
    """Return the ranks of a JSON file {"layer.expert": rank}, for `train_lora`; selected experts
    that it does not name have `rank`.

    Raises ValueError if it names an expert that is not selected.
    """
    ranks = {}
    for number, ids in selection.experts.items():
        ranks |= {f"{number}.{e}": rank for e in ids}
    for name, value in read_json(path).items():
        if name not in ranks:
            raise ValueError(f"{path} has a rank for {name}, which is not a selected layer.expert")
        ranks[name] = value
    return lambda number, e: ranks[f"{number}.{e}"]


def save_lora(
    model: nn.Module, folder: str | Path, *, state_dict: dict | None = None, overwrite: bool = False
) -> Path:
    """Write the trained matrices as a PEFT adapter, atomically, with expert_cfg.json beside it.

    Args:
        model: A model after `train_lora`.
        folder: The folder to write.
        state_dict: Replaces the weights of a sharded model.
        overwrite: Whether to replace an existing folder.

    Returns:
        The folder.
    """
    config = getattr(model, TRAINING, None)
    if config is None:
        raise ValueError(
            f"{type(model).__name__} does not train LoRA of selected experts. Call esft.train_lora "
            "first"
        )
    check_out_dir(folder, overwrite)
    selection = ExpertSelection.from_dict(config, "model")
    for name, half in model.named_modules() if state_dict else ():
        if isinstance(half, SelectedHalf) and f"{name}.selected" in state_dict:  # FSDP2's
            state_dict[f"{name}.weight"] = half.whole(state_dict.pop(f"{name}.selected"))
    with atomic_folder(folder, overwrite) as tmp:
        save_peft_files(model, tmp, state_dict)
        atomic_write_json(tmp / trained_files.CONFIG, to_config(selection, selection.base))
    return Path(folder)


@dataclass(frozen=True, kw_only=True, eq=False)
class LoraAdapter:
    """The selection and base of a `save_lora` folder, and the size of the selected experts'
    matrices.
    """

    selection: ExpertSelection
    base: Mapping[str, Any] | None
    source: str
    num_parameters: int
    nbytes: int


def read_lora(folder: str | Path) -> LoraAdapter:
    """Read the selection and the base of a folder; raises ValueError for an adapter that
    `save_lora` has not written.
    """
    selection = ExpertSelection.load(Path(folder) / trained_files.CONFIG)
    tensors = read_tensors(folder)
    count = 0
    size = 0
    for key, a in tensors.items():
        if key.endswith(HALVES[0]):
            b = tensors.get(key.replace(*HALVES), a)
            # A is zero for the other experts, and beyond an expert's rank
            numbers = int(a.any(-1).sum()) * (a.shape[-1] + b.shape[0])
            count += numbers
            size += numbers * a.element_size()
    return LoraAdapter(
        selection=selection,
        base=selection.base,
        source=str(folder),
        num_parameters=count,
        nbytes=size,
    )


def check_mask(layers: Layers, adapter: PeftAdapter, selection: ExpertSelection) -> None:
    """Raise ValueError if a PEFT adapter changes more than the experts of `selection`, or the model
    with these `layers` lacks those.
    """
    check_selection(layers, selection)
    changed = sorted(adapter.whole)
    selected = {}
    for number, layer in layers.items():
        selected[plain_name(layer.name)] = selection.experts.get(number, ())
    for name, pair in adapter.pairs.items():
        others = pair.b
        if pair.is_stack:
            others = others.clone()
            others[list(selected.get(name.rpartition(".")[0], ()))] = 0
        if others.any():
            changed.append(name)
    if changed:
        raise ValueError(
            f"{adapter.folder} changes {changed[0]} beyond the experts selected in its "
            f"{trained_files.CONFIG}. Use `moe-runtime lora export --to merged` to merge the whole "
            "adapter"
        )


@torch.no_grad()
def whole_experts(model: nn.Module, folder: str | Path) -> Adapter:
    """Return the selected experts with their LoRA merged, W_e + s B_e A_e, as ESFT's own adapter of
    `model`.
    """
    selection = ExpertSelection.load(Path(folder) / trained_files.CONFIG)
    adapter = read_peft(folder, model)
    layers = layers_of(model, fresh=False)
    check_mask(layers, adapter, selection)
    tensors = {}
    for number, ids in selection.experts.items():
        module = layers[number].module
        path = plain_name(layers[number].name)
        layout = layout_of(module)
        for stack in stack_parts(layout):
            pair = adapter.pairs.get(f"{path}.{stack}")
            for e in ids:
                row = getattr(module, stack)[e]
                if pair is not None:
                    wide = torch.promote_types(row.dtype, torch.float32)
                    row = row.to(wide) + pair.delta(e).to(row.device)
                for part, view in split_row(layout, stack, row).items():
                    tensors[f"{path}.{e}.{part}"] = view
    return Adapter(selection=selection, tensors=tensors, base=selection.base, source=str(folder))


def apply(
    model: nn.Module, adapter: Adapter | str | Path, *, check_weights: bool = True
) -> Adapter:
    """Apply an adapter to a model in place; `remove` reverts it.

    The adapter's weights are rounded to the model's dtype, and the weights that they replace are
    kept on the CPU. Any experts implementation runs the result, and `save_pretrained` writes it as
    a whole model.

    Args:
        model: The base of the adapter.
        adapter: An adapter, its folder, or a folder of `save_lora`, whose matrices are merged.
        check_weights: Whether the model must have the weights that were tuned. False accepts others
            of the same architecture.

    Returns:
        The adapter.

    Raises:
        ValueError: If the model is another one than the adapter's, or has an adapter already.
    """
    model = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
    if is_peft(adapter):
        check_is_base(model)
        adapter = whole_experts(model, adapter)
    return adapters.apply(model, adapter, check_weights=check_weights)
