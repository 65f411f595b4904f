"""Atomic saving of models and checkpoints in a Trainer, and an orderly stop on signals.

`WholeSaves` never resumes from an incomplete checkpoint. On Ctrl-C or SIGTERM the current step
finishes, a checkpoint is written, and the same command can resume. The processes of a run agree
after each step, so that a signal to one of them, or to all in different steps, stops all in the
same step.

If trainable experts are sharded over ranks (`hf.dropin.parallel.shard_experts`), every rank writes
its part of the weights and of the optimizer's state to the checkpoint by
torch.distributed.checkpoint; the number of ranks may differ on resuming.
"""

import functools
import json
import os
import re
import shutil
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from transformers import (
    PreTrainedModel,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME, TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from moe_runtime.hf.common.sources import StrPath
from moe_runtime.hf.dropin.loading import LOADED, LoadedNames, loading_whole
from moe_runtime.hf.dropin.parallel import gathered
from moe_runtime.hf.training import ranks, trained_files
from moe_runtime.hf.training.checkpoint_files import check_checkpoint, checkpoints, refusal, step_of
from moe_runtime.io import signals
from moe_runtime.io.files import atomic_model, naming, read_json
from moe_runtime.ops.all_to_all import is_distributed

# folders of torch.distributed.checkpoint in a checkpoint
SPREAD = {"model": "experts", "optimizer": "experts-optimizer"}


def last_whole_checkpoint(folder: StrPath) -> Path | None:
    """Return the newest complete checkpoint of transformers' Trainer in `folder`, or None."""
    return max(filter(_is_whole, checkpoints(folder)), key=step_of, default=None)


def _remove_halves(folder: StrPath, last: Path) -> None:
    """Remove incomplete checkpoints newer than `last` in `folder`, which transformers would count
    among the kept ones.
    """
    for path in checkpoints(folder):
        if step_of(path) > step_of(last) and not _is_whole(path):
            shutil.rmtree(path, ignore_errors=True)


def _clear(checkpoint: Path) -> None:
    """Remove the completion mark and a killed writer's temporary files from a checkpoint that is
    written again.
    """
    (checkpoint / TRAINER_STATE_NAME).unlink(missing_ok=True)
    for path in checkpoint.iterdir() if checkpoint.is_dir() else ():
        # temporary name of a safetensors file; other ranks use no such names
        if re.fullmatch(r"\.tmp\w{6}", path.name):
            path.unlink(missing_ok=True)


def _is_whole(checkpoint: Path) -> bool:
    """Return whether a checkpoint has the trainer's state, the last file that transformers
    writes.
    """
    if not (checkpoint / TRAINER_STATE_NAME).is_file():  # a pipe would wait
        return False
    try:
        state = json.loads((checkpoint / TRAINER_STATE_NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(state, dict)


def _spread_state(trainer, kind: str) -> tuple[dict, Callable[[dict], object]]:
    """Return the state of the trainable "model" or of the "optimizer" (sharded experts as
    DTensors), and its setter.
    """
    from torch.distributed.checkpoint import state_dict as states

    model = trainer.model
    if kind == "model":
        options = states.StateDictOptions(ignore_frozen_params=True, strict=False)
        state = states.get_model_state_dict(model, options=options)
        return state, lambda read: states.set_model_state_dict(model, read, options=options)
    optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)  # accelerate wraps it
    state = states.get_optimizer_state_dict(model, optimizer)
    return state, lambda read: states.set_optimizer_state_dict(model, optimizer, read)


@contextmanager
def _naming_state(checkpoint: StrPath | None, names: str) -> Iterator[None]:
    """Convert the error of a state that does not fit this training into a ValueError that names the
    checkpoint's files.
    """
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise refusal(Path(str(checkpoint), names), error) from error


class WholeSaves:
    """Mixin of trainers, placed before transformers' class."""

    def _trains_spread(self) -> bool:
        """Return whether trainable experts are sharded over ranks; FSDP writes its own files."""
        return not self.is_fsdp_enabled and any(
            is_distributed(p) for p in self.model.parameters() if p.requires_grad
        )

    def _write_spread(self, kind: str, folder: StrPath) -> None:
        from torch.distributed import checkpoint

        checkpoint.save(
            {kind: _spread_state(self, kind)[0]}, checkpoint_id=Path(folder, SPREAD[kind])
        )

    def _read_spread(self, kind: str, folder: StrPath) -> None:
        from torch.distributed import checkpoint

        if not Path(folder, SPREAD[kind]).is_dir():
            raise ValueError(
                f"{folder} has no {SPREAD[kind]}: it is not a checkpoint of a model with sharded "
                "experts. Resume it without expert parallelism"
            )
        state, put = _spread_state(self, kind)
        checkpoint.load({kind: state}, checkpoint_id=Path(folder, SPREAD[kind]))
        put(state)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save as transformers does, with sharded experts gathered; in a checkpoint every rank
        writes its own.
        """
        if not self._trains_spread():
            super().save_model(output_dir, _internal_call)
        elif _internal_call:
            self._write_spread("model", output_dir)
        else:
            weights = gathered(self.model)
            with ranks.leading() as main:
                if main:
                    self._save(output_dir, state_dict=weights)

    def _load_from_checkpoint(self, resume_from_checkpoint, model=None):
        load = functools.partial(super()._load_from_checkpoint, resume_from_checkpoint, model)
        self._load_weights(resume_from_checkpoint, load)

    def _load_best_model(self):
        # a resumed checkpoint may name any folder
        check_checkpoint(self.state.best_model_checkpoint)
        self._load_weights(self.state.best_model_checkpoint, super()._load_best_model)

    def _load_weights(self, checkpoint: StrPath, load: Callable[[], None]) -> None:
        """Load a checkpoint's separately trained experts, each rank's part, or all by `load`."""
        if self._load_adapter(checkpoint):
            return
        if self._trains_spread():
            self._read_spread("model", checkpoint)
        else:
            with self._loading():
                load()

    def _load_adapter(self, folder: StrPath) -> bool:
        """Load a checkpoint of separately trained experts, or raise ValueError; False, without
        effect, for other models.
        """
        training = trained_files.training_of(self.model)
        reason = None
        is_adapter = training is not None
        is_sharded = self.is_fsdp_enabled or self._trains_spread()
        if is_adapter != (Path(folder) / trained_files.CONFIG).is_file():
            kinds = ("experts separately, as prepared by esft.train_only", "all of its parameters")
            reason = (
                f"Checkpoint {folder} is of a model that trains {kinds[is_adapter]}, but this "
                f"model trains {kinds[not is_adapter]}"
            )
        elif is_adapter and is_sharded:  # sharded files hold rows without their expert ids
            reason = _other_experts(training.config, folder)
        if reason is not None:
            raise ValueError(reason)
        if is_adapter and not is_sharded:
            trained_files.load_trained(self.model, folder)
        elif is_adapter and training.check is not None:
            training.check(training.config, folder)
        return is_adapter and not is_sharded

    def _loading(self) -> AbstractContextManager:
        """Return a context for loading a whole model's checkpoint; FSDP, DeepSpeed and PEFT have
        their own files.
        """
        is_whole = isinstance(self.model, PreTrainedModel) and not (
            self.is_fsdp_enabled or self.is_deepspeed_enabled
        )
        return loading_whole(self.model) if is_whole else nullcontext()

    def _issue_warnings_after_load(self, load_result):
        """Warn as transformers does, but not of saved names, with which it compares a sharded
        checkpoint.
        """
        loaded = self.model.__dict__.get(LOADED, LoadedNames())
        missing = [name for name in load_result.missing_keys if name not in loaded.names]
        unexpected = [name for name in load_result.unexpected_keys if name not in loaded.saved]
        super()._issue_warnings_after_load(type(load_result)(missing, unexpected))

    def _save_optimizer_and_scheduler(self, output_dir):
        if not self._trains_spread():
            super()._save_optimizer_and_scheduler(output_dir)
            return
        self._write_spread("optimizer", output_dir)
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir, SCHEDULER_NAME))

    def _load_optimizer_and_scheduler(self, checkpoint):
        if checkpoint is None:
            return
        with _naming_state(checkpoint, f"{OPTIMIZER_NAME} or {SCHEDULER_NAME}"):
            if self._trains_spread():
                self._read_spread("optimizer", checkpoint)
                self.lr_scheduler.load_state_dict(
                    torch.load(Path(checkpoint, SCHEDULER_NAME), weights_only=True)
                )
            else:
                super()._load_optimizer_and_scheduler(checkpoint)

    def _load_rng_state(self, checkpoint):
        with _naming_state(checkpoint, "rng_state.pth"):
            super()._load_rng_state(checkpoint)

    def train(
        self, resume_from_checkpoint: bool | str | None = None, *args: Any, **kwargs: Any
    ) -> Any:
        """Train as transformers does; True resumes from the newest complete checkpoint (ValueError
        if there is none).

        Raises ValueError for a checkpoint with a damaged file, or one that could run code
        (`check_checkpoint`).
        """
        if resume_from_checkpoint is True:
            resume_from_checkpoint = last_whole_checkpoint(self.args.output_dir)
            if resume_from_checkpoint is None:
                raise ValueError(
                    f"output_dir {self.args.output_dir} has no complete checkpoint to resume from. "
                    "Start without resume_from_checkpoint"
                )
            if self.args.should_save:
                _remove_halves(self.args.output_dir, resume_from_checkpoint)
            resume_from_checkpoint = str(resume_from_checkpoint)
        if isinstance(resume_from_checkpoint, str | os.PathLike):
            check_checkpoint(resume_from_checkpoint)
        return super().train(resume_from_checkpoint, *args, **kwargs)

    def _save(self, output_dir=None, state_dict=None):
        """Save as transformers does, into a hidden folder first; a checkpoint's mark is written
        after it.
        """
        folder = Path(self.args.output_dir if output_dir is None else output_dir)
        if not self.args.should_save or folder.name.startswith(f"{PREFIX_CHECKPOINT_DIR}-"):
            super()._save(output_dir, state_dict)
            return
        with atomic_model(folder) as tmp:
            super()._save(str(tmp), state_dict)

    def _save_checkpoint(self, model, trial):
        """Save as transformers does; first clear an older checkpoint of this step, and remove an
        incomplete one on failure.
        """
        folder = Path(
            self._get_output_dir(trial=trial), f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        )
        if self.args.should_save:
            _clear(folder)
        try:
            with naming(folder, folder):
                super()._save_checkpoint(model, trial)
        finally:
            if self.args.should_save and not _is_whole(folder):
                shutil.rmtree(folder, ignore_errors=True)


def _other_experts(config: Mapping[str, Any], folder: StrPath) -> str | None:
    """Describe how a checkpoint's experts differ from `config`'s, in ids or order; None if they are
    the same.
    """
    saved = read_json(Path(folder) / trained_files.CONFIG)
    prepared = json.loads(json.dumps(config))
    for name in ("experts", "shared_experts", "non_expert_modules"):
        if saved.get(name) != prepared.get(name):
            return (
                f"{name} is {prepared.get(name)}, but {saved.get(name)} in checkpoint {folder}. "
                "Prepare the model with the selection in expert_cfg.json there"
            )
    return None


class StopCallback(TrainerCallback):
    """Stop the training after the step in which a stop is requested, with a checkpoint unless it
    was the last step.
    """

    def __init__(self, stopping: signals.Stopping):
        self.stopping = stopping
        self.agreed: KeyboardInterrupt | None = None
        self.saved: int | None = None  # the step of the newest checkpoint

    def agree(self) -> None:
        """Agree on a stop that was requested of any process; every process must call this."""
        request = self.stopping.asked
        # costs one more number per step, when the loss is read on the host anyway
        code = ranks.largest(signals.code_of(request) if request is not None else 0)
        if code and self.agreed is None:
            self.agreed = signals.of(code)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.agree()
        if self._stops(state):
            control.should_save = control.should_training_stop = True
            # a stop should not wait for it, and with "best" it would affect saving
            control.should_evaluate = False

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.saved = state.global_step

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Undo requests for the end of an epoch, which transformers also makes when stopped within
        one.
        """
        if self._stops(state):
            control.should_evaluate = False
            control.should_save = self.saved != state.global_step

    def _stops(self, state) -> bool:
        return self.agreed is not None and state.global_step < state.max_steps


@contextmanager
def stopping_with_a_checkpoint(trainer: Trainer) -> Iterator[None]:
    """Run training in the block; raise an interruption at its end, or once the next run begins if
    training had finished.
    """
    with signals.after_the_step() as stopping:
        callback = StopCallback(stopping)
        trainer.add_callback(callback)
        yield
        trainer.remove_callback(callback)
        callback.agree()  # on a stop requested after the last step
    # a later request concerns only this process, which stops immediately, as between training runs
    ended = trainer.state.global_step >= trainer.state.max_steps
    request = callback.agreed or stopping.asked
    if callback.agreed is not None and ended:
        signals.raise_later(callback.agreed)
    elif request is not None:
        raise request


def hold_workers(loader: Any) -> Any:
    """Make a data loader's workers ignore signals to the whole group, so that the step can finish;
    return the loader.
    """
    inner = getattr(loader, "base_dataloader", loader)  # accelerate's wrapper has one
    begin = getattr(inner, "worker_init_fn", None)
    if getattr(inner, "num_workers", 0) and getattr(begin, "func", None) is not _begin_worker:
        inner.worker_init_fn = functools.partial(_begin_worker, begin)
    return loader


def _begin_worker(begin: Callable[[int], None] | None, number: int) -> None:
    # both signals go to whole process groups; a worker ends with its parent
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    if begin is not None:
        begin(number)
