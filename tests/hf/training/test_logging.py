"""What TensorBoard, Weights & Biases and trackio get of a training: losses, router statistics,
mixing coefficients.
"""

import json
import math
import sqlite3
import struct

import pytest
import torch
from transformers import TrainerCallback
from transformers.integrations.integration_utils import rewrite_logs

from moe_runtime.hf import MixingCallback
from moe_runtime.methods import xft
from tests.hf import tiny
from tests.hf.training.test_trainer import mergeable, rows, run, upcycled

LOSSES = {
    "train/loss",
    "train/lm_loss",
    "train/balance_loss",
    "eval/loss",
    "eval/lm_loss",
    "eval/balance_loss",
}
NAMES = {
    "moe": LOSSES
    | {f"train/router/{name}" for name in ("max_violation", "min_entropy", "dead_experts")},
    "mergeable": {
        "train/loss",
        "eval/loss",
        "train/mixing/max_change",
        *(f"train/mixing/alpha/{e}" for e in range(4)),
    },
}


class Recording(TrainerCallback):
    """A reporting callback that keeps what it gets under the names that transformers' own ones
    write.
    """

    def __init__(self):
        self.values = {}

    def on_log(self, args, state, control, logs=None, **kwargs):
        for name, value in rewrite_logs(logs).items():
            self.values.setdefault(name, {})[state.global_step] = value


def from_tensorboard(folder, stage) -> dict[str, dict[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (path,) = (folder / stage).rglob("events.out.tfevents.*")
    found = EventAccumulator(str(path)).Reload()
    return {
        name: {one.step: one.value for one in found.Scalars(name)}
        for name in found.Tags()["scalars"]
    }


def from_wandb(folder, stage) -> dict[str, dict[int, float]]:
    from wandb.proto import wandb_internal_pb2

    paths = sorted(
        folder.glob("wandb/offline-run-*/*.wandb"), key=lambda path: path.stat().st_mtime_ns
    )
    path = dict(zip(NAMES, paths, strict=True))[stage]
    data = path.read_bytes()
    place = 7
    whole = b""
    values = {}
    # LevelDB's log format behind a header: parts of records, none across two blocks of 32 KiB
    while place + 7 <= len(data):
        if (room := 32768 - place % 32768) < 7:
            place += room
            continue
        size, kind = struct.unpack_from("<HB", data, place + 4)
        whole = whole + data[place + 7 : place + 7 + size]
        place = place + 7 + size
        if kind in (1, 4):  # the record, or its last part
            record = wandb_internal_pb2.Record.FromString(whole)
            whole = b""
            items = {}
            for item in record.history.item:
                items[item.key or "/".join(item.nested_key)] = json.loads(item.value_json)
            for name, value in items.items():
                values.setdefault(name, {})[items["train/global_step"]] = value
    return values


def from_trackio(folder, stage) -> dict[str, dict[int, float]]:
    (path,) = folder.rglob(f"{stage}*.db")
    values = {}
    with sqlite3.connect(path) as database:
        for (text,) in database.execute("SELECT metrics FROM metrics"):
            metrics = json.loads(text)
            for name, value in metrics.items():
                values.setdefault(name, {})[metrics["train/global_step"]] = value
    return values


READ = {"tensorboard": from_tensorboard, "wandb": from_wandb, "trackio": from_trackio}


def trained(stage: str, folder, seen, **settings):
    model = mergeable() if stage == "mergeable" else upcycled()
    settings = {"eval_strategy": "steps", "eval_steps": 1, "max_steps": 2} | settings
    return run("trainer", model, folder, eval_set=rows([1, 9]), callbacks=[seen], **settings)


@pytest.mark.parametrize("stage", NAMES)
def test_a_reporting_callback_gets_every_name(stage, tmp_path):
    seen = Recording()
    trainer = trained(stage, tmp_path, seen)
    assert NAMES[stage] <= set(seen.values)
    for name in NAMES[stage]:
        assert set(seen.values[name]) == {1, 2}
        assert all(map(math.isfinite, seen.values[name].values()))
    if stage == "mergeable":
        alphas = xft.mixing_coefficients(trainer.model).mean(0)
        last = [seen.values[f"train/mixing/alpha/{e}"][2] for e in range(4)]
        assert last == pytest.approx(alphas.tolist(), abs=1e-6)
        assert sum(last) == pytest.approx(1)
        assert (
            0
            < seen.values["train/mixing/max_change"][1]
            < seen.values["train/mixing/max_change"][2]
        )


@pytest.mark.slow
@pytest.mark.parametrize("writer", READ)
def test_offline_writers_get_every_name(writer, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "offline")
    for name in ("WANDB_DIR", "TRACKIO_DIR"):
        monkeypatch.setenv(name, str(tmp_path))
    module = pytest.importorskip(writer)  # trackio reads its folder now
    seen = {stage: Recording() for stage in NAMES}
    for stage, one in seen.items():
        trained(stage, tmp_path / stage, one, report_to=[writer], project=stage)
        if writer == "wandb":
            module.finish()
    if writer == "wandb":
        module.teardown()  # its process has written everything when it has ended
    for stage, names in NAMES.items():
        values = READ[writer](tmp_path, stage)
        for name in names:
            assert values[name] == pytest.approx(seen[stage].values[name], rel=1e-6), name


def test_each_layer_has_its_coefficients_and_another_model_has_none(tmp_path):
    seen = Recording()
    model = mergeable()
    trainer = run(
        "trainer", model, tmp_path, max_steps=1, callbacks=[seen, MixingCallback(per_layer=True)]
    )
    alphas = xft.mixing_coefficients(trainer.model)
    assert torch.tensor(
        [[seen.values[f"train/mixing/{layer}/alpha/{e}"][1] for e in range(4)] for layer in "01"]
    ).allclose(alphas)
    assert (
        sum(isinstance(callback, MixingCallback) for callback in trainer.callback_handler.callbacks)
        == 1
    )
    callback = next(
        one for one in trainer.callback_handler.callbacks if isinstance(one, MixingCallback)
    )
    for layer in callback._layers.values():
        layer.mixing_logits.data = torch.empty(0)  # as under ZeRO-3
    callback.on_log(None, trainer.state, None, logs=(logs := {"loss": 1.0}))
    assert logs == {"loss": 1.0}
    with pytest.raises(
        ValueError, match="LlamaForCausalLM has no mergeable layers. Call xft.to_mergeable first"
    ):
        MixingCallback().on_train_begin(None, None, None, model=tiny.dense("llama"))
