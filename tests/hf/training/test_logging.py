"""The values that TensorBoard, Weights & Biases and trackio get from training: losses, router
statistics, mixing coefficients.
"""

import math

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
    """A reporting callback that records values under the names that transformers' own callbacks
    write.
    """

    def __init__(self):
        self.values = {}

    def on_log(self, args, state, control, logs=None, **kwargs):
        for name, value in rewrite_logs(logs).items():
            self.values.setdefault(name, {})[state.global_step] = value


def trained(stage: str, folder, seen, **settings):
    model = mergeable() if stage == "mergeable" else upcycled()
    settings = {
        "eval_strategy": "steps",
        "eval_steps": 1,
        "max_steps": 2,
    } | settings
    return run(
        "trainer",
        model,
        folder,
        eval_set=rows([1, 9]),
        callbacks=[seen],
        **settings,
    )


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


def test_each_layer_has_its_coefficients_and_another_model_has_none(tmp_path):
    seen = Recording()
    callback = MixingCallback(per_layer=True)
    trainer = run(
        "trainer",
        mergeable(),
        tmp_path,
        max_steps=1,
        callbacks=[seen, callback],
    )
    alphas = xft.mixing_coefficients(trainer.model)
    for layer in range(2):
        for e in range(4):
            logged = seen.values[f"train/mixing/{layer}/alpha/{e}"][1]
            assert logged == pytest.approx(alphas[layer, e].item())
    callbacks = trainer.callback_handler.callbacks

    assert [one for one in callbacks if isinstance(one, MixingCallback)] == [callback]
    for layer in callback._layers.values():
        layer.mixing_logits.data = torch.empty(0)  # as under ZeRO-3
    logs = {"loss": 1.0}
    callback.on_log(None, trainer.state, None, logs=logs)
    assert logs == {"loss": 1.0}
    with pytest.raises(
        ValueError,
        match="LlamaForCausalLM has no mergeable layers. Call xft.to",
    ):
        MixingCallback().on_train_begin(
            None,
            None,
            None,
            model=tiny.dense("llama"),
        )
