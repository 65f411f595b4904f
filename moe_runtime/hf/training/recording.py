"""What a training leaves on the way: losses, seconds, checkpoints to go on from, and the weights of its best evaluation."""

import json
import math
import time
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from torch import nn
from transformers import TrainerCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from moe_runtime.config import check_number, check_numbers, shown
from moe_runtime.hf.training.ranks import state
from moe_runtime.io.files import atomic_file, atomic_write_text, read_json


@dataclass
class History:
    """What a training saw: (step, loss) of the training batches and of the held-out rows, and the seconds of training alone.

    `rows` has, for each point of `held_out`, the step and the loss of every held-out row.
    """

    train: list[tuple[int, float]] = field(default_factory=list)
    held_out: list[tuple[int, float]] = field(default_factory=list)
    rows: list[tuple[int, list[float]]] = field(default_factory=list)
    seconds: float = 0.0


class Watcher(TrainerCallback):
    """Fills a History and reports each step; evaluates after `every` so many, or after those of a list, and at the end."""

    def __init__(self, history: History, evaluate: Callable[[], float] | None, every: int | Collection[int], on_step):
        self.history, self.evaluate, self.every, self.on_step = history, evaluate, every, on_step
        self.loss = math.nan
        self.paused = 0.0

    def on_log(self, args, state, control, logs=None, **kwargs):
        if logs and "loss" in logs:
            self.loss = logs["loss"]
            self.history.train.append((state.global_step, self.loss))

    def on_step_end(self, args, state, control, **kwargs):
        if self.on_step is not None:
            self.on_step(state.global_step, state.max_steps, self.loss)
        step, every = state.global_step, self.every
        is_due = step % every == 0 if isinstance(every, int) else step in every
        if self.evaluate is not None and (is_due or step == state.max_steps):
            start = time.perf_counter()
            self.history.held_out.append((step, self.evaluate()))
            self.paused += time.perf_counter() - start


class Best:
    """The weights that train, as they were at the lowest held-out loss.

    Each process keeps its own part of them in a file of `folder`, where a training that was killed finds them again, until
    whoever saves what was trained removes the folder.
    """

    def __init__(self, model: nn.Module, folder: str | Path):
        self.model, self.loss, self.rows = model, math.inf, None
        self.path = Path(folder, f"best-{state().process_index}.pt")

    def begin(self, is_resumed: bool) -> None:
        """Take what an earlier run of the same training kept, or forget it."""
        if not is_resumed:
            self.path.unlink(missing_ok=True)
        elif self.path.is_file():
            kept = self._kept()
            self.loss, self.rows = kept["loss"], (kept["losses"], kept["tokens"])

    def see(self, loss: float, rows: tuple[list, list]) -> None:
        """Keep the weights if `loss`, that of `rows`, is the lowest so far."""
        if not loss < self.loss:
            return
        self.loss, self.rows = loss, rows
        values = {"loss": loss, "losses": list(rows[0]), "tokens": list(rows[1]), "weights": self._weights()}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_file(self.path) as beside:
            torch.save(values, beside)

    @torch.no_grad()
    def put_back(self) -> tuple[list, list] | None:
        """Give the model the weights that were kept, and return their rows' losses; None if no loss was a number."""
        if self.rows is None:
            return None
        kept = self._kept()["weights"]
        for name, weight in self._weights().items():
            weight.copy_(kept[name])
        return self.rows

    def _kept(self) -> dict:
        """Return what the file holds; raises ValueError for one that `see` has not written of this model's parameters."""
        try:
            kept, reason = torch.load(self.path, map_location="cpu", weights_only=True, mmap=True), None
        except Exception as error:  # torch.load raises anything for a file that is none of its own
            kept, reason = {}, str(error).strip().partition("\n")[0][:200] or type(error).__name__
        for name, weight in self._weights().items() if reason is None else ():
            found = (
                kept["weights"].get(name) if isinstance(kept, dict) and isinstance(kept.get("weights"), dict) else None
            )
            if not torch.is_tensor(found) or found.shape != weight.shape or found.dtype != weight.dtype:
                reason = f"{name} is not {list(weight.shape)}, {weight.dtype}"
        if reason is not None:
            raise ValueError(
                f"path is {self.path}, which cannot be read ({reason}); want what this training kept; remove the file's "
                "folder, and it begins anew"
            )
        for name in ("losses", "tokens"):
            check_numbers(f"{name} of {self.path}", kept.get(name), None, finite=False)
        check_numbers(f"loss of {self.path}", kept.get("loss"))
        return kept

    def _weights(self) -> dict[str, torch.Tensor]:
        """What of each parameter that trains this process holds."""
        trained = {name: p.detach() for name, p in self.model.named_parameters() if p.requires_grad}
        return {name: p.to_local() if hasattr(p, "to_local") else p for name, p in trained.items()}


class Recorder(Watcher):
    """A watcher that times itself, keeps the last rows' losses, and goes on where a checkpoint was written.

    `take` returns the held-out loss, and the losses and label tokens of the rows that it is the mean of. With `best` the
    training ends with the weights of its lowest held-out loss, and `last` is of those.
    """

    NAME = "history.json"

    def __init__(
        self,
        history: History,
        take: Callable[[], tuple[float, tuple]],
        every: int | Collection[int],
        on_step,
        best: Best | None = None,
    ):
        super().__init__(history, self._take, every, on_step)
        self.take, self.last, self.start, self.before, self.best = take, ([], []), 0.0, 0.0, best

    def _take(self) -> float:
        loss, self.last = self.take()
        if self.best is not None:
            self.best.see(loss, self.last)
        return loss

    def on_train_begin(self, args, state, control, **kwargs):
        self.start, self.paused = time.perf_counter(), 0.0
        if self.best is not None:
            self.best.begin(is_resumed=state.global_step > 0)

    def on_step_end(self, args, state, control, **kwargs):
        before = len(self.history.held_out)
        super().on_step_end(args, state, control, **kwargs)
        if len(self.history.held_out) > before:
            self.history.rows.append((state.global_step, list(self.last[0])))
        if state.global_step >= state.max_steps:
            control.should_save = False  # going on from there would train a step too many

    def on_train_end(self, args, state, control, **kwargs):
        self.history.seconds = self._seconds()
        if self.best is not None:
            self.last = self.best.put_back() or self.last

    def on_save(self, args, state, control, **kwargs):
        # the last file of a checkpoint: one without it was cut off, and is not gone on from
        if torch.distributed.is_initialized():
            torch.distributed.barrier()
        if state.is_world_process_zero:
            folder = Path(args.output_dir, f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}")
            values = asdict(self.history) | {"seconds": self._seconds(), "last": self.last}
            atomic_write_text(folder / self.NAME, json.dumps(values) + "\n")  # a held-out loss may be NaN

    def restore(self, checkpoint: Path) -> None:
        """Take what the history of a checkpoint says; raises ValueError for a file that `on_save` has not written."""
        values, place = read_json(checkpoint / self.NAME), f"of {checkpoint / self.NAME}"
        points = {name: values.get(name, []) for name in ("train", "held_out", "rows")}
        pairs = [values.get("last"), *(points["rows"] if isinstance(points["rows"], list) else [None])]
        if not all(isinstance(pair, list) and len(pair) == 2 for pair in pairs):
            raise ValueError(f"last and rows {place} are {shown(pairs)}; want pairs of lists; remove the checkpoint")
        losses, tokens = values["last"]
        for what, part in (("losses", losses), ("tokens", tokens)):
            check_numbers(f"{what} {place}", part, len(losses) if isinstance(losses, list) else None, finite=False)
        check_number(f"seconds {place}", values.get("seconds"))
        for name in ("train", "held_out"):  # a loss may be NaN
            check_numbers(f"{name} {place}", points[name], None, 2, finite=False)
        check_numbers(f"steps {place}", [step for step, _ in points["rows"]], None)
        for _, row in points["rows"]:
            check_numbers(f"rows {place}", row, None, finite=False)
        self.last, self.before = (losses, tokens), values["seconds"]
        for name, found in points.items():
            getattr(self.history, name)[:] = map(tuple, found)

    def _seconds(self) -> float:
        return self.before + time.perf_counter() - self.start - self.paused


def last_checkpoint(folder: str | Path) -> Path | None:
    """Return the newest whole checkpoint that `train` wrote to a folder; None where there is none."""
    found = [path.parent for path in Path(folder).glob(f"{PREFIX_CHECKPOINT_DIR}-*/{Recorder.NAME}")]
    folders = [path for path in found if path.name.rpartition("-")[2].isdecimal()]
    return max(folders, key=lambda path: int(path.name.rpartition("-")[2]), default=None)
