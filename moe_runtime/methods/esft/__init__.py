"""ESFT, expert-specialized fine-tuning (arXiv 2407.01906): tune only the experts that a task uses, and ship those alone.

    score_experts   how much each expert does for a task, from its router's weights        Sec. 3.2, Eq. (6) and (7)
    select_experts  the smallest set of each layer whose scores reach p                    Sec. 3.2, Eq. (8)
    train_only      the selected experts become parameters of their own, all else is frozen  Sec. 3.3, Table 3
    (tune)          by any trainer
    save_adapter    the selected experts alone, in a folder; at any time while they train
    apply, remove   the folder into a base, and out of it; `merge` into the base's folder

    selection = esft.select_experts(esft.score_experts(model, dataloader), p=0.1, score="gate")
    esft.train_only(model, selection)
    trainer.train()
    esft.save_adapter(model, "law")

From folders and files of rows, as the command line does it: `moe_runtime.methods.esft.runs`.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from moe_runtime.hf.dropin.layers import plain_name
from moe_runtime.hf.training import trainable, trained_files
from moe_runtime.hf.training.trainable import TrainableReceipt
from moe_runtime.hf.training.trainable_layers import check_unwrapped
from moe_runtime.io.files import check_out_dir, read_json
from moe_runtime.methods.esft.adapters import APPLIED, Adapter, apply, from_config, load_adapter, remove, to_config
from moe_runtime.methods.esft.base import base_of, check_base
from moe_runtime.methods.esft.folders import MergeReceipt
from moe_runtime.methods.esft.folders import merge_folder as merge
from moe_runtime.methods.esft.recorder import GateSums
from moe_runtime.methods.esft.scores import ExpertScores, score_experts
from moe_runtime.methods.esft.selection import ExpertSelection, check_selection, random_experts, select_experts

__all__ = [
    "Adapter", "ExpertScores", "ExpertSelection", "GateSums", "MergeReceipt", "TrainableReceipt", "adapter_of", "apply",
    "drop", "fold", "load_adapter", "load_trained", "merge", "random_experts", "remove", "save_adapter", "score_experts",
    "select_experts", "train_only",
]  # fmt: skip


def train_only(
    model: nn.Module,
    selection: ExpertSelection,
    shared_experts: bool | None = None,
    non_expert_modules: bool | None = None,
    dtype: torch.dtype | None = None,
) -> TrainableReceipt:
    """Make `model` train the experts of `selection` alone, in place: they lie apart from the stacks, all else is frozen.

    The two flags, the selection's unless given, add the paper's other settings (Table 3): the MLPs that all tokens go
    through, and all that is no expert. `dtype` is that of all that trains, its own unless given: float32 beside a
    bfloat16 model. Experts are cast where they are used; with what trains beside them such a model runs under autocast
    only (bf16=True in a trainer) until `fold` or `drop`. Call it after `shard_experts`, and before DDP, FSDP2 or the
    optimizer see the model. Until the end save_pretrained writes the adapter, in a Trainer's checkpoints too. Raises
    ValueError, with the model untouched, for unknown layers or ids, PEFT's adapters among what is to train, and for a
    model that trains experts already, has an adapter in it or is wrapped.
    """
    check_unwrapped(model)
    if not isinstance(selection, ExpertSelection):
        raise ValueError(f"selection is {selection!r}; want an ExpertSelection; esft.select_experts makes one")
    flags = {"shared_experts": shared_experts, "non_expert_modules": non_expert_modules}
    selection = replace(selection, **{name: flag for name, flag in flags.items() if flag is not None})
    if (there := trained_files.holder(model, APPLIED)) is not None:
        raise ValueError(
            f"model has the adapter {getattr(there, APPLIED).source} in it; want the base; esft.remove it, or merge"
        )
    if trained_files.training_of(model) is not None:
        raise ValueError("model trains experts apart already; want esft.fold or esft.drop before")
    check_selection(model, selection)
    if not (selection.num_experts or selection.shared_experts or selection.non_expert_modules):
        raise ValueError(
            "selection has no experts, shared_experts and non_expert_modules are False; want something to train"
        )
    if selection.non_expert_modules and (adapted := next(filter(_is_peft, dict(model.named_parameters())), None)):
        raise ValueError(
            f"model has PEFT's {adapted}, non_expert_modules is True; want a model without adapters, or that flag off"
        )
    base = base_of(model, selection.experts)
    receipt = trainable.freeze_for_esft(
        model, selection.experts, selection.shared_experts, selection.non_expert_modules, dtype=dtype
    )
    rows = {id(p) for module in trained_files.split_modules(model).values() for p in module.parameters(recurse=False)}
    others = [plain_name(name) for name, p in model.named_parameters() if p.requires_grad and id(p) not in rows]
    trained_files.mark(model, to_config(selection, base), tuple(others), dtype, _check_folder)
    return receipt


def _is_peft(name: str) -> bool:
    return "lora_" in name or "modules_to_save" in name


def _check_folder(config: dict, folder: str | Path) -> None:
    """Raise ValueError if `folder` holds an adapter of another base than `config` names; a Trainer's resume asks too."""
    path = Path(folder) / trained_files.CONFIG
    if path.is_file():
        theirs, own = (from_config(values, str(path))[1] for values in (read_json(path), config))
        if theirs is not None and own is not None:
            check_base(theirs, own, str(folder))


def load_trained(model: nn.Module, folder: str | Path) -> None:
    """Read back what `save_adapter` or a checkpoint wrote, to go on training; `model` trains the same.

    Raises ValueError, with the model untouched, for a model that trains no rows, for tensors that are not those which it
    trains, by name and shape, and for an adapter of another base.
    """
    training = trained_files.training_of(model)
    if training is not None:  # before shapes are compared, which tell less
        _check_folder(training.config, folder)
    trained_files.load_trained(model, folder)


def adapter_of(model: nn.Module) -> Adapter:
    """Return a copy of what a model that `train_only` made ready has learned so far.

    Of a model that is split over processes, every process must call. Raises ValueError for any other model.
    """
    _check_training(model)
    return _adapter(model, {name: tensor.clone() for name, tensor in trained_files.trained_tensors(model).items()})


def save_adapter(model: nn.Module, folder: str | Path, *, overwrite: bool = False) -> Path:
    """Write what `model` has learned so far to a folder, whole or not at all; training may go on.

    Its size is that of the selected experts and of what trains beside them. In a run of several processes rank 0
    writes, and where the model is split every one must call. Raises ValueError for a model that `train_only` has not
    made ready, for a folder that exists, and always for one that holds a whole model.
    """
    _check_training(model)
    trained_files.check_trains(model)
    is_main = not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0
    # elsewhere only before a gathering: rank 0 may have written it already
    if is_main or any(hasattr(parameter, "placements") for parameter in model.parameters()):
        check_out_dir(folder, overwrite)
        trained_files.check_place(folder)
    found = trained_files.gathered(model, keep=is_main)
    if is_main:
        _adapter(model, trained_files.trained_tensors(model, found)).save(folder, overwrite=overwrite)
    return Path(folder)


def _check_training(model: nn.Module) -> None:
    if trained_files.training_of(model) is None:
        raise ValueError(
            f"model is {type(model).__name__}, which trains no experts apart; want one after esft.train_only"
        )


def _adapter(model: nn.Module, tensors: dict[str, torch.Tensor]) -> Adapter:
    selection, base = from_config(trained_files.training_of(model).config, "model")
    return Adapter(selection=selection, tensors=tensors, base=base, source="model")


def fold(model: nn.Module) -> None:
    """End the training: the experts go into their stacks, and save_pretrained writes `model` whole again.

    Raises ValueError for a model that `train_only` has not made ready, and for one that FSDP2 or DDP hold.
    """
    _end(model, trainable.fold_rows)


def drop(model: nn.Module) -> None:
    """End the training and forget it: the experts are the base's, bit by bit.

    What trained beside experts, by the two flags, stays as it is. Raises ValueError as `fold`.
    """
    _end(model, trainable.drop_rows)


def _end(model: nn.Module, how: Callable[[nn.Module], None]) -> None:
    _check_training(model)
    how(model)
    trained_files.unmark(model)
