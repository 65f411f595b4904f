"""Record a training run: losses, seconds, router statistics, checkpoints to resume from, weights of
the best evaluation.
"""

import csv
import json
import math
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from pydantic import ConfigDict
from torch import Tensor, nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from transformers.utils import logging

from moe_runtime.config import one_line
from moe_runtime.hf.common.sharded import local_part
from moe_runtime.hf.common.sources import StrPath
from moe_runtime.hf.dropin.layers import plain_name
from moe_runtime.hf.dropin.stats import FIELDS, RouterCounter, layer_names
from moe_runtime.hf.training.checkpoint_files import checkpoints, step_of
from moe_runtime.hf.training.ranks import state, whole
from moe_runtime.hf.training.settings import Node, Number
from moe_runtime.io.files import atomic_file, atomic_write_text, read_json
from moe_runtime.modules.merged import MergedMLP
from moe_runtime.ops.merging import mixing

logger = logging.get_logger(__name__)


@dataclass
class History:
    """History of a training: (step, loss) of training batches and of held-out examples, and the
    seconds of training only.

    `rows` has, for each point of `held_out`, the step and the loss of every held-out row.
    """

    train: list[tuple[int, float]] = field(default_factory=list)
    held_out: list[tuple[int, float]] = field(default_factory=list)
    rows: list[tuple[int, list[float]]] = field(default_factory=list)
    seconds: float = 0.0


class Best:
    """The trained weights at the lowest held-out loss.

    Each process stores its part in a file in `folder`, where a resumed training finds them, until
    the folder is removed after the trained model is saved.
    """

    def __init__(self, model: nn.Module, folder: StrPath):
        self.model = model
        self.loss = math.inf
        self.rows = None
        self.path = Path(folder, f"best-{state().process_index}.pt")

    def begin(self, is_resumed: bool) -> None:
        """Load what an earlier run of the same training stored, or discard it."""
        if not is_resumed:
            self.path.unlink(missing_ok=True)
        elif self.path.is_file():
            saved = self._read()
            self.loss = saved["loss"]
            self.rows = (saved["losses"], saved["tokens"], saved.get("exact"))

    def see(self, loss: float, rows: tuple[list, list, list | None]) -> None:
        """Keep the weights if `loss`, the mean over `rows`, is the lowest so far."""
        if not loss < self.loss:
            return
        self.loss = loss
        self.rows = rows
        losses, tokens, exact = rows
        values = {"loss": loss, "losses": losses, "tokens": tokens, "exact": exact}
        values["weights"] = self._weights()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_file(self.path) as beside:
            torch.save(values, beside)

    @torch.no_grad()
    def put_back(self) -> tuple[list, list, list | None] | None:
        """Restore the kept weights, and return their `row_losses`; None if every loss was NaN."""
        if self.rows is None:
            return None
        saved = self._read()["weights"]
        for name, weight in self._weights().items():
            weight.copy_(saved[name])
        return self.rows

    def _read(self) -> dict:
        """Return the contents of the file; raises ValueError unless `see` wrote it for this model's
        parameters.
        """
        try:
            saved = torch.load(self.path, map_location="cpu", weights_only=True, mmap=True)
            weights = saved["weights"]
            for name, weight in self._weights().items():
                same = weights[name].shape == weight.shape and weights[name].dtype == weight.dtype
                if not same:
                    raise ValueError(f"{name} is not {list(weight.shape)}, {weight.dtype}")
        except Exception as error:  # torch.load may raise anything for a file of another kind
            raise ValueError(
                f"Cannot read {self.path} of this training ({one_line(error, 200)}). Remove its "
                "folder to start again"
            ) from error
        return saved

    def _weights(self) -> dict[str, Tensor]:
        """Return the local part of each trained parameter."""
        return {
            name: local_part(parameter.detach())
            for name, parameter in self.model.named_parameters()
            if parameter.requires_grad
        }


class _SavedHistory(Node):
    """The history of a checkpoint; a loss may be NaN."""

    model_config = ConfigDict(strict=False, allow_inf_nan=True)

    train: list[tuple[int, float]]
    held_out: list[tuple[int, float]]
    rows: list[tuple[int, list[float]]]
    seconds: Number
    last: tuple[list[float], list[int]]
    exact: list[int] | None


@dataclass(eq=False)
class Recorder(TrainerCallback):
    """Fills a History, reports each step, and continues the history of a checkpoint.

    `take` returns the held-out loss and the `row_losses` behind it. It is called every `every`
    steps, or after the steps of a list, and at the end; its time is not counted. With `best`,
    training ends with the weights of the lowest held-out loss, and `last` belongs to these.
    """

    NAME = "history.json"

    history: History
    take: Callable[[], tuple[float, tuple]]
    every: int | Collection[int]
    on_step: Callable[[int, int, float | None], None] | None
    best: Best | None = None
    loss = None
    last = ([], [], None)
    start = 0.0
    paused = 0.0
    before = 0.0

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.start = time.perf_counter()
        self.paused = 0.0
        if self.best is not None:
            self.best.begin(is_resumed=state.global_step > 0)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        if logs and "loss" in logs:
            self.loss = logs["loss"]
            self.history.train.append((state.global_step, self.loss))

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self.on_step is not None:
            self.on_step(state.global_step, state.max_steps, self.loss)
        step = state.global_step
        is_done = step >= state.max_steps
        if isinstance(self.every, int):
            is_due = step % self.every == 0
        else:
            is_due = step in self.every
        if is_done or is_due:
            start = time.perf_counter()
            loss, self.last = self.take()
            if self.best is not None:
                self.best.see(loss, self.last)
            self.history.held_out.append((step, loss))
            self.history.rows.append((step, list(self.last[0])))
            self.paused += time.perf_counter() - start
        if is_done:
            control.should_save = False  # a run resumed from there would train one step too many

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.history.seconds = self._seconds()
        if self.best is not None:
            self.last = self.best.put_back() or self.last

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        # written last: a checkpoint without this file is incomplete and is not resumed from
        if torch.distributed.is_initialized():
            torch.distributed.barrier()
        if state.is_world_process_zero:
            folder = Path(args.output_dir, f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}")
            values = asdict(self.history) | {
                "seconds": self._seconds(),
                "last": self.last[:2],
                "exact": self.last[2],
            }
            # a held-out loss may be NaN
            atomic_write_text(folder / self.NAME, json.dumps(values) + "\n")

    def restore(self, checkpoint: Path) -> None:
        """Load the history of a checkpoint; raises ValueError for a file not written by
        `on_save`.
        """
        path = checkpoint / self.NAME
        try:
            saved = _SavedHistory.from_dict(read_json(path))
        except ValueError as error:
            raise ValueError(f"{path} is damaged: {error}. Remove the checkpoint") from error
        self.last = (*saved.last, saved.exact)
        self.before = saved.seconds
        self.history.train[:] = saved.train
        self.history.held_out[:] = saved.held_out
        self.history.rows[:] = saved.rows

    def _seconds(self) -> float:
        return self.before + time.perf_counter() - self.start - self.paused


def last_checkpoint(folder: StrPath) -> Path | None:
    """Return the newest complete checkpoint that `train` wrote to a folder, or None."""
    return max(checkpoints(folder, Recorder.NAME), key=step_of, default=None)


class RouterStatsCallback(TrainerCallback):
    """Adds router statistics to the training logs and appends each expert's load, per layer, to a
    CSV file.

    The logs get `RouterStats.summary`, with `per_layer` also each layer's numbers; the file is
    router_stats.csv in the output folder. Between two logs it only counts, on the device.
    It warns once of a collapse. MoETrainer and MoESFTTrainer put it first; in a plain Trainer,
    reporting callbacks before it do not see its numbers.
    """

    def __init__(self, per_layer: bool = False):
        self.per_layer = per_layer
        self._counter: RouterCounter | None = None
        self._file: Path | None = None
        self._warned = False

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: nn.Module | None = None,
        **kwargs: Any,
    ) -> None:
        """Hook the routers and open the file; a resumed run keeps the lines up to its
        checkpoint.
        """
        self.on_train_end(args, state, control)
        self._counter = RouterCounter(model, only_training=True)
        self._file = Path(args.output_dir) / "router_stats.csv"
        if not state.is_world_process_zero:
            return
        lines = [("step", *FIELDS)]
        if state.global_step and self._file.exists():
            with open(self._file, newline="", encoding="utf-8", errors="replace") as file:
                for line in csv.reader(file):
                    is_whole = len(line) == len(FIELDS) + 1 and line[0].isdecimal()
                    if is_whole and int(line[0]) <= state.global_step:
                        lines.append(line)
        self._file.parent.mkdir(parents=True, exist_ok=True)
        with atomic_file(self._file) as beside:
            self._write(lines, beside, "w")

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Read the counts since the last training log."""
        if self._counter is None or logs is None or "loss" not in logs:
            return
        stats = self._counter.read(reset=True, reduce=True)
        if not stats.counts.any():
            return
        values = stats.summary()
        if self.per_layer:
            values |= stats.per_layer()
        logs.update(values)  # for the reporting callbacks that come after this one
        state.log_history[-1].update(values)
        if state.is_world_process_zero:
            self._write([(state.global_step, *row) for row in stats.rows()], self._file, "a")
            if self._warned:
                return
            warning = stats.warning()
            if warning:
                self._warned = True
                logger.warning(f"step {state.global_step}: {warning}")

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Remove the hooks."""
        if self._counter is not None:
            self._counter.close()
            self._counter = None

    @staticmethod
    def _write(rows: list, path: Path, mode: str) -> None:
        with open(path, mode, newline="", encoding="utf-8") as file:
            csv.writer(file).writerows(rows)


class MixingCallback(TrainerCallback):
    """Adds the mixing coefficients of a mergeable model to the training logs; MoETrainer and
    MoESFTTrainer put it first.

    `mixing/alpha/E` is the coefficient of expert E, averaged over the layers, `mixing/max_change`
    the largest change of a coefficient since training began; `per_layer` adds each layer's, as
    `mixing/LAYER/alpha/E`.
    """

    def __init__(self, per_layer: bool = False):
        self.per_layer = per_layer

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: nn.Module | None = None,
        **kwargs: Any,
    ) -> None:
        """Find the layers and store their initial coefficients."""
        layers = {}
        for name, module in model.named_modules():
            if isinstance(module, MergedMLP):
                layers[plain_name(name)] = module
        if not layers:
            raise ValueError(
                f"{type(model).__name__} has no mergeable layers. Call xft.to_mergeable first"
            )
        self._layers = dict(zip(layer_names(list(layers)), layers.values(), strict=True))
        self._first = self._alphas()

    def _alphas(self) -> Tensor | None:
        """Return the coefficients [L, E]; None while ZeRO-3 has partitioned the logits."""
        alphas = []
        for layer in self._layers.values():
            logits = whole(layer.mixing_logits)
            if not len(logits):
                return None
            alphas.append(mixing(logits, None if layer.soup else layer.shared_rate))
        return torch.stack(alphas)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Add the coefficients to a training log."""
        if logs is None or "loss" not in logs or (alphas := self._alphas()) is None:
            return
        if self._first is None:
            self._first = alphas
        values = {f"mixing/alpha/{e}": alpha for e, alpha in enumerate(alphas.mean(0).tolist())}
        values["mixing/max_change"] = (alphas - self._first).abs().max().item()
        if self.per_layer:
            for layer, row in zip(self._layers, alphas.tolist(), strict=True):
                values |= {f"mixing/{layer}/alpha/{e}": alpha for e, alpha in enumerate(row)}
        logs.update(values)
        state.log_history[-1].update(values)
