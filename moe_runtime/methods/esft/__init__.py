"""ESFT, expert-specialized fine-tuning (arXiv 2407.01906): tune only the experts that a task uses,
and save only those.

    score_experts   how much a task uses each expert, from the router's weights   Eq. (6), (7)
    select_experts  the smallest set of each layer whose scores reach p           Eq. (8)
    train_only      make the selected experts parameters of their own             Sec. 3.3, Table 3
    train_lora      or train PEFT's LoRA on the selected experts; save_lora writes it
    (tune)          with any trainer
    save_adapter    the selected experts in a folder, at any time while they train
    apply, remove   apply an adapter to a base and remove it; `merge` writes base and adapter as one
                    folder

    selection = esft.select_experts(esft.score_experts(model, dataloader), p=0.1, score="gate")
    esft.train_only(model, selection)
    trainer.train()
    esft.save_adapter(model, "law")

The same from disk to disk, as the command line does it: `moe_runtime.methods.esft.runs` and
`folders`. The released code's files: `official`. The steps: `recorder` -> `scores` -> `selection`
-> `adapters`, with `base` to recognize a model.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from moe_runtime.hf.dropin.layers import plain_name
from moe_runtime.hf.models.families import check_module
from moe_runtime.hf.training import trainable, trained_files
from moe_runtime.hf.training.trainable import TrainableReceipt, layers_of
from moe_runtime.io.files import check_out_dir
from moe_runtime.methods.esft.adapters import (
    Adapter,
    check_is_base,
    load_adapter,
    remove,
    to_config,
)
from moe_runtime.methods.esft.base import check_base, check_model
from moe_runtime.methods.esft.folders import MergeReceipt
from moe_runtime.methods.esft.folders import merge_folder as merge
from moe_runtime.methods.esft.freezing import freeze_for_esft
from moe_runtime.methods.esft.lora import apply, save_lora, train_lora
from moe_runtime.methods.esft.recorder import GateSums
from moe_runtime.methods.esft.scores import ExpertScores, score_experts
from moe_runtime.methods.esft.selection import (
    ExpertSelection,
    check_is_selection,
    check_selection,
    random_experts,
    select_experts,
)

__all__ = [
    "Adapter",
    "ExpertScores",
    "ExpertSelection",
    "GateSums",
    "MergeReceipt",
    "TrainableReceipt",
    "adapter_of",
    "apply",
    "drop",
    "fold",
    "load_adapter",
    "load_trained",
    "merge",
    "random_experts",
    "remove",
    "save_adapter",
    "save_lora",
    "score_experts",
    "select_experts",
    "train_lora",
    "train_only",
]


def train_only(
    model: nn.Module,
    selection: ExpertSelection,
    shared_experts: bool | None = None,
    non_expert_modules: bool | None = None,
    dtype: torch.dtype | None = None,
    check_weights: bool = True,
) -> TrainableReceipt:
    """Make only the selected experts trainable, in place, and freeze everything else.

    The trained experts become separate parameters, so that only they have gradients and optimizer
    state. Until `fold` or `drop`, `save_pretrained` writes the adapter, also in a Trainer's
    checkpoints.

    Call this after `shard_experts` and before the model reaches DDP, FSDP2 or an optimizer.

    Args:
        model: A stock MoE model, or one of ours.
        selection: The experts, of `select_experts` or `ExpertSelection.load(path)`.
        shared_experts: Whether the MLPs that every token passes through train too (Table 3); None
            is the selection's.
        non_expert_modules: Whether everything that is not an expert trains too (Table 3); None is
            the selection's.
        dtype: Of the trained parameters, such as float32 in a bfloat16 model; None keeps theirs. If
            not only experts train, the model then runs only under autocast (bf16=True in a
            trainer).
        check_weights: Whether the model must have the weights that were scored. False accepts
            others of the same architecture.

    Returns:
        What trains, with numbers of parameters.

    Raises:
        ValueError: Before anything changes, if the selection is empty or of another model's scores.
    """
    check_module(model)
    check_is_selection(selection)
    check_is_base(model)
    selection = with_flags(selection, shared_experts, non_expert_modules)
    layers = layers_of(model)
    base = check_model(selection.base, model, layers, selection.experts, check_weights)
    check_selection(layers, selection)
    if not (selection.num_experts or selection.shared_experts or selection.non_expert_modules):
        raise ValueError(
            "The selection is empty. Select experts, shared_experts or non_expert_modules to train"
        )
    for name, _ in model.named_parameters():
        if selection.non_expert_modules and ("lora_" in name or "modules_to_save" in name):
            raise ValueError(
                f"non_expert_modules is True, but the model has the PEFT adapter {name}. Remove "
                "the adapter, or turn it off"
            )
    receipt = freeze_for_esft(
        model,
        selection.experts,
        selection.shared_experts,
        selection.non_expert_modules,
        dtype=dtype,
        layers=layers,
    )
    rows = set()
    for layer in layers.values():
        rows.update(layer.module.parameters(recurse=False))
    others = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter not in rows:
            others.append(plain_name(name))
    trained_files.mark(model, to_config(selection, base), tuple(others), dtype, _check_folder)
    return receipt


def with_flags(
    selection: ExpertSelection, shared_experts: bool | None, non_expert_modules: bool | None
) -> ExpertSelection:
    """Return the selection with the flags that are given."""
    flags = {"shared_experts": shared_experts, "non_expert_modules": non_expert_modules}
    given = {name: value for name, value in flags.items() if value is not None}
    return replace(selection, **given)


def _check_folder(config: dict, folder: str | Path) -> None:
    """Raise ValueError if `folder` has an adapter of a base other than that in `config`; also
    called on a Trainer's resume.
    """
    path = Path(folder) / trained_files.CONFIG
    if path.is_file():
        theirs = ExpertSelection.load(path).base
        ours = ExpertSelection.from_dict(config, str(path)).base
        if theirs is not None and ours is not None:
            check_base(theirs, ours, str(folder))


def load_trained(model: nn.Module, folder: str | Path) -> None:
    """Read trained weights into a model that trains the same experts, to resume training.

    Args:
        model: A model after `train_only`.
        folder: A folder of `save_adapter`, or a Trainer's checkpoint.

    Raises:
        ValueError: If the folder holds other experts than those that train.
    """
    training = trained_files.training_of(model)
    if training is not None:  # before shapes are compared, for a clearer error
        _check_folder(training.config, folder)
    trained_files.load_trained(model, folder)


def adapter_of(model: nn.Module) -> Adapter:
    """Return a copy of the weights trained since `train_only`.

    Args:
        model: A model after `train_only`. If it is split over processes, every process must call
            this.

    Returns:
        The adapter, on the CPU.

    Raises:
        ValueError: If the model has not been through `train_only`.
    """
    training = _training(model)
    tensors = trained_files.trained_tensors(model)
    return _adapter(training, {name: tensor.clone() for name, tensor in tensors.items()})


def save_adapter(model: nn.Module, folder: str | Path, *, overwrite: bool = False) -> Path:
    """Write the trained weights to a folder, atomically; training may continue.

    The folder holds the selected experts and all other trained parameters.

    Args:
        model: A model after `train_only`. If it is split over processes, every process must call
            this; rank 0 writes.
        folder: The folder to write.
        overwrite: Whether to replace an existing adapter; a whole model is never replaced.

    Returns:
        The folder.

    Raises:
        ValueError: If the model has not been through `train_only`, or the folder exists.
    """
    training = _training(model)
    trained_files.check_trains(model)
    is_main = not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0
    # elsewhere only before a gathering: rank 0 may have written it already
    if is_main or any(hasattr(parameter, "placements") for parameter in model.parameters()):
        check_out_dir(folder, overwrite)
        trained_files.check_place(folder)
    if is_main:
        tensors = trained_files.trained_tensors(model)
        _adapter(training, tensors).save(folder, overwrite=overwrite)
    else:
        trained_files.gathered(model, keep=False)  # its part of split tensors
    return Path(folder)


def _training(model: nn.Module) -> trained_files.TrainedParameters:
    training = trained_files.training_of(model)
    if training is None:
        raise ValueError(
            f"{type(model).__name__} trains no selected experts. Call esft.train_only first"
        )
    return training


def _adapter(
    training: trained_files.TrainedParameters, tensors: dict[str, torch.Tensor]
) -> Adapter:
    selection = ExpertSelection.from_dict(training.config, "model")
    return Adapter(selection=selection, tensors=tensors, base=selection.base, source="model")


def fold(model: nn.Module) -> None:
    """End training and keep the trained experts: they are copied back to their stacks.

    Afterwards `save_pretrained` writes the whole model again.

    Args:
        model: A model after `train_only`.

    Raises:
        ValueError: If the model has not been through `train_only`.
    """
    _end(model, trainable.fold_rows)


def drop(model: nn.Module) -> None:
    """End training and discard the experts' changes, which are then bit-identical to the base's.

    Other parameters, trained with shared_experts or non_expert_modules, keep their trained values.

    Args:
        model: A model after `train_only`.

    Raises:
        ValueError: If the model has not been through `train_only`.
    """
    _end(model, trainable.drop_rows)


def _end(model: nn.Module, how: Callable[[nn.Module], None]) -> None:
    _training(model)
    how(model)
    trained_files.unmark(model)
