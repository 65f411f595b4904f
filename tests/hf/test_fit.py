"""moe_runtime.hf.fit.train: what a recipe's training asks for, and the losses of single rows."""

import pytest
import torch
from transformers import TrainerCallback

from moe_runtime.data import tokenize_pairs
from moe_runtime.hf import fit
from moe_runtime.hf.tokenizer import train_tokenizer
from tests.hf.tiny import distance

PAIRS = [{"prompt": f"Write {i}:\n", "completion": "x" * (1 + i % 7) + f" = {i}"} for i in range(22)]
SETTINGS = {"learning_rate": 1e-2, "batch_size": 4, "evaluations": 2, "optimizer": "adamw_torch"}


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(["Write 1: x = 1"] * 9, 270)


@pytest.fixture(scope="module")
def rows(tokenizer):
    return tokenize_pairs(tokenizer, PAIRS, 48)


def model_of(tokenizer):
    return fit.small_llama(tokenizer, hidden_size=32, intermediate_size=48, num_layers=2, max_length=48, seed=0)


class Watch(TrainerCallback):
    """Notes the learning rate of every step."""

    def __init__(self):
        self.rates = []

    def on_step_begin(self, args, state, control, optimizer=None, **kwargs):
        self.optimizer = optimizer
        self.rates.append(optimizer.param_groups[0]["lr"])


@pytest.fixture
def train(tokenizer, rows, tmp_path):
    """Train a new small model; return it, what `train` returned, and the Watch."""

    def run(**settings):
        model, watch = model_of(tokenizer), Watch()
        settings = SETTINGS | {"steps": 4} | settings
        held_out = rows.select(range(16, 22))
        done = fit.train(
            model, rows.select(range(16)), tokenizer, folder=tmp_path, held_out=held_out, callbacks=[watch], **settings
        )
        return model, done, watch

    return run


def test_one_batch_or_many_small_ones(train):
    (one, first, _), (many, second, _) = train(), train(per_device_batch_size=1)
    assert first.history.held_out[-1][1] == pytest.approx(second.history.held_out[-1][1], rel=1e-4)
    for name, weight in one.state_dict().items():
        assert distance(many.state_dict()[name], weight) < 1e-3, name


def test_recomputed_activations_change_nothing(train):
    (one, *_), (other, *_) = train(), train(gradient_checkpointing=True)
    assert all(torch.equal(other.state_dict()[name], weight) for name, weight in one.state_dict().items())


@pytest.mark.parametrize("epochs, steps", [(1, 4), (2.5, 10), (0.1, 1)])
def test_epochs_are_counted_in_steps(train, epochs, steps):
    _, done, watch = train(steps=None, epochs=epochs)
    assert done.steps == len(watch.rates) == steps == done.history.held_out[-1][0]


def test_the_last_step_of_an_epoch_may_be_smaller():
    assert fit.count_steps(17, 2, 4, 1) == 10 and fit.count_steps(17, 1, 2, 2) == 5


def test_warmup_then_a_line_to_zero(train):
    _, _, watch = train(steps=10, warmup_steps=4, learning_rate=1.0)
    assert watch.rates == pytest.approx([0, 0.25, 0.5, 0.75, 1, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6])
    assert train(steps=40, learning_rate=1.0)[2].rates[:3] == pytest.approx([0, 0.5, 1])


def test_adafactor_runs_without_its_relative_step(train):
    _, _, watch = train(optimizer="adafactor", schedule="constant")
    group = watch.optimizer.param_groups[0]
    assert "Adafactor" in type(getattr(watch.optimizer, "optimizer", watch.optimizer)).__name__
    assert not group["relative_step"] and not group["scale_parameter"] and watch.rates == [1e-2] * 4


def test_clipping_is_off_at_minus_one(train):
    free, clipped, tight = (
        train(optimizer="sgd", steps=1, warmup_steps=0, max_grad_norm=n)[0] for n in (-1.0, 1e9, 1e-3)
    )
    for name, weight in free.state_dict().items():
        assert torch.equal(clipped.state_dict()[name], weight)
    assert any(not torch.equal(tight.state_dict()[name], weight) for name, weight in free.state_dict().items())


def test_bf16_computes_in_bfloat16_and_keeps_float32_weights(train):
    (_, first, _), (other, second, _) = train(), train(bf16=True)
    assert all(p.dtype == torch.float32 for p in other.parameters())
    assert first.losses != second.losses == pytest.approx(first.losses, rel=0.05)


def test_history_is_even_and_ends_with_the_rows(train):
    _, done, _ = train(steps=9, evaluations=3)
    assert [step for step, _ in done.history.held_out] == [3, 6, 9] and done.history.seconds > 0
    assert done.history.held_out[-1][1] == fit.mean_loss(done.losses, done.tokens)
    assert [step for step, _ in train(steps=3, evaluations=9)[1].history.held_out] == [1, 2, 3]


@pytest.mark.parametrize(
    "settings, says",
    [
        pytest.param({"warmup_steps": 4}, "warmup_steps is 4, the training has 4 steps; want fewer", id="warmup"),
        pytest.param({"per_device_batch_size": 3}, "batch_size is 4, per_device_batch_size is 3, with 1", id="batch"),
    ],
)
def test_what_does_not_go_together(train, settings, says, tmp_path):
    with pytest.raises(ValueError, match=says):
        train(**settings)
    assert not list(tmp_path.iterdir())


def test_checkpoints_that_were_cut_off_are_passed_over(train, tmp_path):
    assert fit.last_checkpoint(tmp_path / "none") is None
    train(steps=5, save_steps=2)
    assert fit.last_checkpoint(tmp_path) == tmp_path / "checkpoint-4"
    (tmp_path / "checkpoint-10").mkdir()
    (tmp_path / "checkpoint-4" / "history.json").unlink()
    assert fit.last_checkpoint(tmp_path) == tmp_path / "checkpoint-2"


def test_a_training_that_ended_is_not_gone_on_from_its_end(train):
    """Killed before its stage was written: 6 steps of 4 an epoch end within one, where going on would train a step more."""
    settings = {"steps": 6, "schedule": "constant", "save_steps": 2}
    (one, first, _), (other, again, watch) = train(**settings), train(**settings)
    assert len(watch.rates) == 2 and again.losses == first.losses
    assert all(torch.equal(other.state_dict()[name], weight) for name, weight in one.state_dict().items())


@pytest.mark.parametrize("batch_size", [1, 4, 32])
def test_row_losses_are_the_models_own(tokenizer, rows, batch_size):
    model = model_of(tokenizer).train()
    losses, tokens = fit.row_losses(model, rows, tokenizer, batch_size=batch_size)
    assert model.training and len(losses) == len(rows)
    for place in (0, 5, 21):
        ids, labels = (torch.tensor([rows[place][name]]) for name in ("input_ids", "labels"))
        assert losses[place] == pytest.approx(model(input_ids=ids, labels=labels).loss.item(), rel=1e-5)
        assert tokens[place] == int((labels[:, 1:] != -100).sum())
    assert fit.mean_loss(losses, tokens) == pytest.approx(fit.held_out_loss(model, rows, tokenizer), rel=1e-6)
