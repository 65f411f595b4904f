"""Record a training run: losses, seconds, router statistics, checkpoints to resume from, weights of
the best evaluation.
"""

import csv
import json
import math
import re
import time
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from torch import nn
from transformers import TrainerCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from transformers.utils import logging

from moe_runtime.config import check_number, check_numbers, one_line, shown
from moe_runtime.hf.dropin.layers import plain_name
from moe_runtime.hf.dropin.stats import FIELDS, LOW_ENTROPY, RouterCounter, layer_names
from moe_runtime.hf.training.ranks import state, whole
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

    def __init__(self, model: nn.Module, folder: str | Path):
        self.model = model
        self.loss = math.inf
        self.rows = None
        self.path = Path(folder, f"best-{state().process_index}.pt")

    def begin(self, is_resumed: bool) -> None:
        """Load what an earlier run of the same training stored, or discard it."""
        if not is_resumed:
            self.path.unlink(missing_ok=True)
        elif self.path.is_file():
            kept = self._kept()
            self.loss, self.rows = kept["loss"], (kept["losses"], kept["tokens"], kept.get("exact"))

    def see(self, loss: float, rows: tuple[list, list, list | None]) -> None:
        """Keep the weights if `loss`, the mean over `rows`, is the lowest so far."""
        if not loss < self.loss:
            return
        self.loss = loss
        self.rows = rows
        values = {"loss": loss, "weights": self._weights()} | dict(
            zip(("losses", "tokens", "exact"), rows, strict=True)
        )
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_file(self.path) as beside:
            torch.save(values, beside)

    @torch.no_grad()
    def put_back(self) -> tuple[list, list, list | None] | None:
        """Restore the kept weights, and return their `row_losses`; None if every loss was NaN."""
        if self.rows is None:
            return None
        kept = self._kept()["weights"]
        for name, weight in self._weights().items():
            weight.copy_(kept[name])
        return self.rows

    def _kept(self) -> dict:
        """Return the contents of the file; raises ValueError unless `see` wrote it for this model's
        parameters.
        """
        try:
            kept = torch.load(self.path, map_location="cpu", weights_only=True, mmap=True)
            reason = None
        except Exception as error:  # torch.load may raise anything for a file of another kind
            kept = {}
            reason = one_line(str(error).strip().partition("\n")[0], 200) or type(error).__name__
        for name, weight in self._weights().items() if reason is None else ():
            if isinstance(kept, dict) and isinstance(kept.get("weights"), dict):
                found = kept["weights"].get(name)
            else:
                found = None
            if (
                not torch.is_tensor(found)
                or found.shape != weight.shape
                or found.dtype != weight.dtype
            ):
                reason = f"{name} is not {list(weight.shape)}, {weight.dtype}"
        if reason is not None:
            raise ValueError(
                f"Cannot read {self.path} of this training ({reason}). Remove its folder to start "
                "again"
            )
        for name in ("losses", "tokens", *(["exact"] if kept.get("exact") is not None else [])):
            check_numbers(f"{name} of {self.path}", kept.get(name), None, finite=False)
        check_numbers(f"loss of {self.path}", kept.get("loss"))
        return kept

    def _weights(self) -> dict[str, torch.Tensor]:
        """Return the local part of each trained parameter."""
        trained = {name: p.detach() for name, p in self.model.named_parameters() if p.requires_grad}
        return {name: p.to_local() if hasattr(p, "to_local") else p for name, p in trained.items()}


class Recorder(TrainerCallback):
    """Fills a History, reports each step, and continues the history of a checkpoint.

    `take` returns the held-out loss and the `row_losses` behind it. It is called every `every`
    steps, or after the steps of a list, and at the end; its time is not counted. With `best`,
    training ends with the weights of the lowest held-out loss, and `last` belongs to these.
    """

    NAME = "history.json"

    def __init__(
        self,
        history: History,
        take: Callable[[], tuple[float, tuple]],
        every: int | Collection[int],
        on_step: Callable[[int, int, float | None], None] | None,
        best: Best | None = None,
    ):
        self.history = history
        self.take = take
        self.every = every
        self.on_step = on_step
        self.best = best
        self.loss = None
        self.last = ([], [], None)
        self.start = self.paused = self.before = 0.0

    def on_train_begin(self, args, state, control, **kwargs):
        self.start = time.perf_counter()
        self.paused = 0.0
        if self.best is not None:
            self.best.begin(is_resumed=state.global_step > 0)

    def on_log(self, args, state, control, logs=None, **kwargs):
        if logs and "loss" in logs:
            self.loss = logs["loss"]
            self.history.train.append((state.global_step, self.loss))

    def on_step_end(self, args, state, control, **kwargs):
        if self.on_step is not None:
            self.on_step(state.global_step, state.max_steps, self.loss)
        step = state.global_step
        every = self.every
        is_done = state.global_step >= state.max_steps
        if is_done or (step % every == 0 if isinstance(every, int) else step in every):
            start = time.perf_counter()
            loss, self.last = self.take()
            if self.best is not None:
                self.best.see(loss, self.last)
            self.history.held_out.append((step, loss))
            self.history.rows.append((step, list(self.last[0])))
            self.paused += time.perf_counter() - start
        if is_done:
            control.should_save = False  # a run resumed from there would train one step too many

    def on_train_end(self, args, state, control, **kwargs):
        self.history.seconds = self._seconds()
        if self.best is not None:
            self.last = self.best.put_back() or self.last

    def on_save(self, args, state, control, **kwargs):
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
        values = read_json(checkpoint / self.NAME)
        place = f"of {checkpoint / self.NAME}"
        points = {name: values.get(name, []) for name in ("train", "held_out", "rows")}
        pairs = [
            values.get("last"),
            *(points["rows"] if isinstance(points["rows"], list) else [None]),
        ]
        if not all(isinstance(pair, list) and len(pair) == 2 for pair in pairs):
            raise ValueError(
                f"last and rows {place} must be pairs of lists, but got {shown(pairs)}. Remove the "
                "checkpoint"
            )
        (losses, tokens), exact = values["last"], values.get("exact")
        for what, part in (
            ("losses", losses),
            ("tokens", tokens),
            *([("exact", exact)] if exact is not None else []),
        ):
            check_numbers(
                f"{what} {place}",
                part,
                len(losses) if isinstance(losses, list) else None,
                finite=False,
            )
        check_number(f"seconds {place}", values.get("seconds"))
        for name in ("train", "held_out"):  # a loss may be NaN
            check_numbers(f"{name} {place}", points[name], None, 2, finite=False)
        check_numbers(f"steps {place}", [step for step, _ in points["rows"]], None)
        for _, row in points["rows"]:
            check_numbers(f"rows {place}", row, None, finite=False)
        self.last, self.before = (losses, tokens, exact), values["seconds"]
        for name, found in points.items():
            getattr(self.history, name)[:] = map(tuple, found)

    def _seconds(self) -> float:
        return self.before + time.perf_counter() - self.start - self.paused


def last_checkpoint(folder: str | Path) -> Path | None:
    """Return the newest complete checkpoint that `train` wrote to a folder, or None."""
    found = [
        path.parent for path in Path(folder).glob(f"{PREFIX_CHECKPOINT_DIR}-*/{Recorder.NAME}")
    ]
    folders = [path for path in found if path.name.rpartition("-")[2].isdecimal()]
    return max(folders, key=lambda path: int(path.name.rpartition("-")[2]), default=None)


def _whole_lines(path: Path) -> list[list[str]]:
    """Read the lines of router_stats.csv, except an incomplete last one and damaged ones."""
    with open(path, newline="", encoding="utf-8", errors="replace") as file:
        text = file.read()
    lines = csv.reader(text[: text.rfind("\n") + 1].replace("\0", "").splitlines())
    return [
        one for one in lines if len(one) == len(FIELDS) + 1 and re.fullmatch("[0-9]{1,18}", one[0])
    ]


class RouterStatsCallback(TrainerCallback):
    """Adds router statistics to the training logs and appends each expert's load, per layer, to a
    CSV file.

    The logs get `RouterStats.summary`, with `per_layer` also each layer's numbers; the file is
    `path` or router_stats.csv in the output folder. Between two logs it only counts, on the device.
    It warns once of a collapse. MoETrainer and MoESFTTrainer put it first; in a plain Trainer,
    reporting callbacks before it do not see its numbers.
    """

    def __init__(
        self,
        path: str | Path | None = None,
        per_layer: bool = False,
        min_entropy: float = LOW_ENTROPY,
    ):
        self.path = path
        self.per_layer = per_layer
        self.min_entropy = min_entropy
        self._counter: RouterCounter | None = None
        self._file: Path | None = None
        self._warned = False

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        """Hook the routers and open the file; a resumed run keeps the lines up to its
        checkpoint.
        """
        self.on_train_end(args, state, control)
        self._counter = RouterCounter(model, only_training=True)
        self._file = Path(self.path or Path(args.output_dir) / "router_stats.csv")
        if not state.is_world_process_zero:
            return
        kept = []
        if state.global_step and self._file.exists():
            kept = [line for line in _whole_lines(self._file) if int(line[0]) <= state.global_step]
        self._file.parent.mkdir(parents=True, exist_ok=True)
        with atomic_file(self._file) as beside:
            self._write([("step", *FIELDS), *kept], beside, "w")

    def on_log(self, args, state, control, logs=None, **kwargs):
        """Read the counts since the last training log."""
        if self._counter is None or logs is None or "loss" not in logs:
            return
        stats = self._counter.read(reset=True, reduce=True)
        if not stats.counts.any():
            return
        values = stats.summary() | (stats.per_layer() if self.per_layer else {})
        logs.update(values)  # for the reporting callbacks that come after this one
        state.log_history[-1].update(values)
        if state.is_world_process_zero:
            self._write([(state.global_step, *row) for row in stats.rows()], self._file, "a")
            warning = None if self._warned else stats.warning(self.min_entropy)
            if warning:
                self._warned = True
                logger.warning(f"step {state.global_step}: {warning}")

    def on_train_end(self, args, state, control, **kwargs):
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

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        """Find the layers and store their initial coefficients."""
        layers = {
            plain_name(name): module
            for name, module in model.named_modules()
            if isinstance(module, MergedMLP)
        }
        if not layers:
            raise ValueError(
                f"{type(model).__name__} has no mergeable layers. Call xft.to_mergeable first"
            )
        self._layers = dict(zip(layer_names(list(layers)), layers.values(), strict=True))
        self._first = self._alphas()

    def _alphas(self) -> torch.Tensor | None:
        """Return the coefficients [L, E]; None while ZeRO-3 has partitioned the logits."""
        layers = [
            (whole(one.mixing_logits), None if one.soup else one.shared_rate)
            for one in self._layers.values()
        ]
        if all(len(logits) for logits, _ in layers):
            return torch.stack([mixing(*layer) for layer in layers])
        return None

    def on_log(self, args, state, control, logs=None, **kwargs):
        """Add the coefficients to a training log."""
        if logs is None or "loss" not in logs or (alphas := self._alphas()) is None:
            return
        self._first = alphas if self._first is None else self._first
        values = {f"mixing/alpha/{e}": alpha for e, alpha in enumerate(alphas.mean(0).tolist())}
        values["mixing/max_change"] = (alphas - self._first).abs().max().item()
        if self.per_layer:
            for layer, row in zip(self._layers, alphas.tolist(), strict=True):
                values |= {f"mixing/{layer}/alpha/{e}": alpha for e, alpha in enumerate(row)}
        logs.update(values)
        state.log_history[-1].update(values)
