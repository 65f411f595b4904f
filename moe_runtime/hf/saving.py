"""What a Trainer writes, whole or not at all: the model at the end, and checkpoints; half a one is not gone on from."""

import json
import re
import shutil
from pathlib import Path

from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from moe_runtime.files import atomic_model, naming


def last_whole_checkpoint(folder: str | Path) -> Path | None:
    """Return the newest checkpoint of transformers' Trainer in `folder` that was written to its end; None without one."""
    found = [path.parent for path in Path(folder).glob(f"{PREFIX_CHECKPOINT_DIR}-*/{TRAINER_STATE_NAME}")]
    whole = [path for path in found if path.name.rpartition("-")[2].isdecimal() and _is_whole(path)]
    return max(whole, key=lambda path: int(path.name.rpartition("-")[2]), default=None)


def _remove_halves(folder: str | Path, last: Path) -> None:
    """Remove the checkpoints in `folder` newer than `last` and not whole: transformers would count them among the kept."""
    for path in Path(folder).glob(f"{PREFIX_CHECKPOINT_DIR}-*"):
        step = path.name.rpartition("-")[2]
        if step.isdecimal() and int(step) > int(last.name.rpartition("-")[2]) and not _is_whole(path):
            shutil.rmtree(path, ignore_errors=True)


def _clear(checkpoint: Path) -> None:
    """Take the mark, and what a killed writer of safetensors left, from a checkpoint that is written again."""
    (checkpoint / TRAINER_STATE_NAME).unlink(missing_ok=True)
    for path in checkpoint.iterdir() if checkpoint.is_dir() else ():
        if re.fullmatch(r"\.tmp\w{6}", path.name):  # its name until it is whole; another rank has none such
            path.unlink(missing_ok=True)


def _is_whole(checkpoint: Path) -> bool:
    """The trainer's state is the last file that transformers writes."""
    try:
        state = json.loads((checkpoint / TRAINER_STATE_NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(state, dict)


class WholeSaves:
    """A part of trainers, before transformers' class in the bases."""

    def train(self, resume_from_checkpoint=None, *args, **kwargs):
        """Train as transformers does; True goes on from the newest whole checkpoint, ValueError where there is none."""
        if resume_from_checkpoint is True:
            resume_from_checkpoint = last_whole_checkpoint(self.args.output_dir)
            if resume_from_checkpoint is None:
                raise ValueError(
                    f"resume_from_checkpoint is True, output_dir is {self.args.output_dir}; want a whole checkpoint in it; "
                    "begin without resume_from_checkpoint"
                )
            if self.args.should_save:
                _remove_halves(self.args.output_dir, resume_from_checkpoint)
            resume_from_checkpoint = str(resume_from_checkpoint)
        return super().train(resume_from_checkpoint, *args, **kwargs)

    def _save(self, output_dir=None, state_dict=None):
        """Save as transformers does, into a hidden folder first; a checkpoint's mark is written after it."""
        folder = Path(self.args.output_dir if output_dir is None else output_dir)
        if not self.args.should_save or folder.name.startswith(f"{PREFIX_CHECKPOINT_DIR}-"):
            super()._save(output_dir, state_dict)
            return
        with atomic_model(folder) as tmp:
            super()._save(str(tmp), state_dict)

    def _save_checkpoint(self, model, trial):
        """Save as transformers does; what fails half-way is removed, and an older checkpoint of the step is none first."""
        folder = Path(self._get_output_dir(trial=trial), f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}")
        if self.args.should_save:
            _clear(folder)
        try:
            with naming(folder, folder):
                super()._save_checkpoint(model, trial)
        except BaseException:
            if self.args.should_save and not _is_whole(folder):
                shutil.rmtree(folder, ignore_errors=True)
            raise
