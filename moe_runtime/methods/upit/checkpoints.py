"""Expert preparation: a Trainer callback that saves the model at fixed intervals during tuning.

UpIT (arXiv 2410.01610), Algorithm 1, lines 2 and 3: the checkpoints C become the experts E_1, ...,
E_m. Each is a folder FOLDER/step-<n>/ of one of two kinds; its expert.json records the kind, the
step and the base:

    ffn    the whole model, as its `save_pretrained` would write it
    lora   a PEFT model's adapter

`moe_runtime.methods.upit.experts` reads both alike.
"""

import copy
import hashlib
import json
import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerBase,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from moe_runtime.config import check_number, check_positive
from moe_runtime.hf.common.sources import local_folder
from moe_runtime.hf.dropin.layers import plain_name
from moe_runtime.hf.models.configuration import write_legacy_rope
from moe_runtime.hf.models.folders import to_saved
from moe_runtime.hf.training import ranks, trained_files
from moe_runtime.io.checkpoint import Checkpoint, CheckpointWriter, parse_size
from moe_runtime.io.files import atomic_folder, read_json

RECORD = "expert.json"
FORMAT = 1
KINDS = ("ffn", "lora")
STEP = "step-"


class ExpertCheckpoints(TrainerCallback):
    """Callback of any Trainer that saves experts at fixed intervals, and after the last step.

    Writes FOLDER/step-<n>/, for a PEFT model the adapter. Works under DDP and FSDP2 too, where
    every process needs the callback. A resumed run keeps the experts saved so far.

    Args:
        folder: Where the experts are written.
        every_epochs: Epochs between experts; 0.25 if neither interval is given.
        every_steps: Optimizer steps between experts.
        base: The model's folder before training, which the experts record.
        dtype: Of the written weights; None keeps the model's.
        max_shard_size: Bytes of a weights file at most, or a text; memory holds one shard in
            addition to the model.
        overwrite: Whether to replace experts of an earlier run.

    Raises:
        ValueError: If an interval is invalid, or, when training begins, if the model cannot be
            saved as an expert.

    Example:
        >>> callback = ExpertCheckpoints("experts", every_epochs=0.25, base="base")
        >>> Trainer(model=model, args=args, train_dataset=rows, callbacks=[callback]).train()
    """

    def __init__(
        self,
        folder: str | Path,
        every_epochs: float | None = None,
        every_steps: int | None = None,
        *,
        base: str | Path | None = None,
        dtype: str | torch.dtype | None = None,
        max_shard_size: int | str = "1GB",
        overwrite: bool = False,
    ):
        self.folder = Path(folder)
        self.overwrite = overwrite
        self.base = base
        self.every_steps = every_steps
        self.every_epochs = 0.25 if every_epochs is None else every_epochs
        check_number("every_epochs", self.every_epochs, positive=True)
        if every_steps is not None:
            check_positive("every_steps", every_steps)
        self.dtype = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
        is_dtype = isinstance(self.dtype, torch.dtype) and self.dtype.is_floating_point
        if None not in (every_epochs, every_steps) or not (is_dtype or dtype is None):
            raise ValueError(
                "Expected at most one of the intervals and a floating dtype such as 'bfloat16', "
                f"but every_epochs is {every_epochs}, every_steps is {every_steps} and dtype is "
                f"{dtype!r}"
            )
        self.max_shard_size = parse_size(max_shard_size)
        self._epoch = 0.0
        self._base_hash = None

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: nn.Module | None = None,
        **kwargs: Any,
    ) -> None:
        """Check model and folder, and record the step that training resumes from."""
        _check_model(model)
        self._epoch = state.epoch or 0.0
        if self.base is not None and not _is_peft(model):
            with Checkpoint(local_folder(self.base, name="base")) as base:
                self._base_hash = fingerprint(base)
        names = ranks.agree([path.name for path in saved_steps(self.folder)])
        if names and not state.global_step and not self.overwrite:
            raise ValueError(
                f"Folder {self.folder} has {names[0]} of an earlier training. Use an empty folder "
                "or pass overwrite=True"
            )
        with ranks.leading() as main:
            for name in names if main else ():
                if not state.global_step or not _is_due(self.folder / name):
                    shutil.rmtree(self.folder / name)

    def on_step_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: nn.Module | None = None,
        processing_class: PreTrainedTokenizerBase | None = None,
        **kwargs: Any,
    ) -> None:
        """Save after each interval and at the end of training."""
        before = self._epoch
        self._epoch = state.epoch or 0.0
        if self.every_steps is not None:
            due = state.global_step % self.every_steps == 0
        else:
            # completed intervals; the epoch is a sum of fractions, hence inexact
            passed = math.floor(before / self.every_epochs + 1e-6)
            due = passed != math.floor(self._epoch / self.every_epochs + 1e-6)
        due = due or state.global_step >= state.max_steps
        if due or control.should_training_stop:
            self._save(state, model, processing_class, due)

    def on_epoch_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: nn.Module | None = None,
        processing_class: PreTrainedTokenizerBase | None = None,
        **kwargs: Any,
    ) -> None:
        """Save if a callback has stopped training, before the Trainer loads its best weights."""
        if control.should_training_stop:
            self._save(state, model, processing_class)

    on_evaluate = on_epoch_end

    def on_train_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: nn.Module | None = None,
        processing_class: PreTrainedTokenizerBase | None = None,
        **kwargs: Any,
    ) -> None:
        """Save the last step of a run that was stopped in another way."""
        if state.global_step and not args.load_best_model_at_end:
            self._save(state, model, processing_class)

    def _save(self, state, model, tokenizer, due: bool = False) -> None:
        target = self.folder / f"{STEP}{state.global_step}"
        if ranks.agree((target / RECORD).is_file()):
            return
        record = {
            "step": state.global_step,
            "max_steps": state.max_steps,
            "epoch": state.epoch,
            "due": due,
            "base": None if self.base is None else str(self.base),
            "base_hash": self._base_hash,
        }
        with ranks.leading():  # no process reads before rank 0 has moved the folder into place
            save_expert(
                model,
                target,
                tokenizer=tokenizer,
                dtype=self.dtype,
                max_shard_size=self.max_shard_size,
                is_main=state.is_world_process_zero,
                record=record,
            )


def _is_due(folder: Path) -> bool:
    """Return whether an expert was saved at an interval, rather than because training stopped
    early.
    """
    return not (folder / RECORD).is_file() or read_json(folder / RECORD).get("due", True)


@torch.no_grad()
def save_expert(
    model: nn.Module,
    target: Path,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    dtype: torch.dtype | None = None,
    max_shard_size: int = 10**9,
    is_main: bool = True,
    record: dict | None = None,
) -> None:
    """Write a model to the folder `target`, tensor by tensor; of a PEFT model the adapter.

    Every process that holds a part must call this; the one with `is_main` writes. `record` goes to
    expert.json with the kind.
    """
    model = _unwrap(model)
    if _is_peft(model):
        record = {"format": FORMAT, "kind": "lora"} | (record or {})
        _save_adapter(model, target, tokenizer, dtype, is_main, record)
        return
    record = {"format": FORMAT, "kind": "ffn"} | (record or {})
    if not is_main:
        for _, tensor in _parameters(model):
            if hasattr(tensor, "full_tensor"):
                tensor.full_tensor()
        return
    with CheckpointWriter(target, max_shard_size) as writer:
        folder = writer.place("config.json").parent
        config = copy.deepcopy(model.config)
        config.architectures = [type(model).__name__.removeprefix("FSDP")]
        config.dtype = str(dtype or model.dtype).removeprefix("torch.")
        config.save_pretrained(folder)
        write_legacy_rope(folder)
        if model.can_generate():
            model.generation_config.save_pretrained(folder)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
        for key, tensor in _tensors(model, dtype):
            writer.add(key, tensor)
        writer.write_text(RECORD, json.dumps(record, indent=2) + "\n")


def saved_steps(folder: str | Path, prefixes: tuple[str, ...] = (STEP,)) -> list[Path]:
    """Return the folders <prefix><n> in a folder, by n; an empty list if it does not exist."""
    numbered = {}
    for path in Path(folder).glob("*-*"):
        number = path.name.rpartition("-")[2]
        if path.is_dir() and path.name.startswith(prefixes) and number.isdigit():
            numbered[path] = int(number)
    return sorted(numbered, key=numbered.get)


def fingerprint(checkpoint: Checkpoint) -> str:
    """Return a 16-digit hash of every tensor's name, shape, dtype and middle row: a cheap way to
    tell models apart.
    """
    digest = hashlib.sha256()
    for key, spec in sorted(checkpoint.specs().items()):
        digest.update(f"{key} {list(spec.shape)} {spec.dtype}\n".encode())
        if spec.shape and spec.nbytes:
            row = checkpoint.get_rows(key, spec.shape[0] // 2)
            digest.update(row.reshape(-1)[:1024].view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def _unwrap(model: nn.Module) -> nn.Module:
    from accelerate.utils import extract_model_from_parallel

    return extract_model_from_parallel(model, keep_torch_compile=False)


def _is_peft(model: nn.Module) -> bool:
    # FSDP2 replaces the class by a subclass
    return any(cls.__module__.startswith("peft.") for cls in type(_unwrap(model)).__mro__)


def _check_model(model: nn.Module) -> None:
    """Raise ValueError for a model whose tensors cannot be read one by one in the form that
    transformers saves.
    """
    inner = _unwrap(model)
    reason = None
    if any(hasattr(parameter, "ds_id") for parameter in inner.parameters()):
        reason = "is sharded by DeepSpeed. Use DDP or FSDP2"
    elif any(type(module).__name__ == "FullyShardedDataParallel" for module in model.modules()):
        reason = "is sharded by FSDP 1. Use FSDP2 (fsdp_version: 2)"
    elif trained_files.training_of(inner) is not None:
        reason = "trains ESFT experts. Use a dense model, or esft.save_adapter"
    elif _is_peft(inner):
        if "default" not in inner.peft_config:
            reason = "has no adapter 'default', the name used by get_peft_model"
    elif not isinstance(inner, PreTrainedModel):
        reason = "not a model of transformers or PEFT"
    elif getattr(inner, "_hf_peft_config_loaded", False):
        reason = "has adapters added by transformers. Use peft.get_peft_model"
    elif getattr(inner, "hf_quantizer", None) is not None:
        reason = "is quantized. Load it without quantization, or train PEFT adapters"
    if reason is not None:
        raise ValueError(f"{type(inner).__name__} {reason}")


def _parameters(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors that `save_pretrained` would save, under the model's own names; of tied
    weights the first.
    """
    seen = set()
    ignored = set(getattr(model, "_keys_to_ignore_on_save", None) or ())
    tied = set(getattr(model, "all_tied_weights_keys", None) or ())
    named = {plain_name(name): tensor for name, tensor in model.state_dict(keep_vars=True).items()}
    # of tied names, the one that loading restores by tying comes last
    for name in sorted(named, key=lambda name: name in tied):
        tensor = named[name]
        if name in ignored or not isinstance(tensor, torch.Tensor) or id(tensor) in seen:
            continue
        seen.add(id(tensor))
        yield name, tensor


def _tensors(model: nn.Module, dtype: torch.dtype | None) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the gathered tensors on the CPU, one at a time; if they are sharded, every process must
    iterate.
    """
    for name, tensor in _parameters(model):
        tensor = ranks.whole(tensor)
        if dtype is not None and tensor.is_floating_point():
            tensor = tensor.to(dtype)
        yield from to_saved(model, {name: tensor}).items()


def _save_adapter(model, target: Path, tokenizer, dtype, is_main: bool, record: dict) -> None:
    weights = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        # the weights that PEFT saves: its own matrices and modules_to_save
        if "lora_" in name or "modules_to_save" in name or getattr(tensor, "requires_grad", False):
            weights[name] = ranks.whole(tensor)
            if dtype is not None:
                weights[name] = weights[name].to(dtype)
    if not is_main:
        return
    record["base"] = record.get("base") or model.peft_config["default"].base_model_name_or_path
    with atomic_folder(target) as folder:
        model.save_pretrained(folder, state_dict=weights, selected_adapters=["default"])
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
        (folder / RECORD).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
