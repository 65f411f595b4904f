"""moe_runtime.hf.training.fit.train: the training settings of a recipe, and the losses of single
examples.
"""

import pytest
import torch
from transformers import TrainerCallback

from moe_runtime.hf.training import fit
from moe_runtime.io.rows import tokenize_pairs
from papers.engine.tiny import small_deepseek, small_llama, train_tokenizer
from tests.hf import tiny
from tests.hf.tiny import distance
from tests.support.edited import edit_json

PAIRS = [
    {
        "prompt": f"Write {i}:\n",
        "completion": "x" * (1 + i % 7) + f" = {i}",
    }
    for i in range(22)
]
SETTINGS = {
    "learning_rate": 1e-2,
    "batch_size": 4,
    "evaluations": 2,
    "optimizer": "adamw_torch",
}


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(["Write 1: x = 1"] * 9, 270)


@pytest.fixture(scope="module")
def rows(tokenizer):
    return tokenize_pairs(tokenizer, PAIRS, 48)


def model_of(tokenizer):
    return small_llama(
        tokenizer, hidden_size=32, intermediate_size=48, num_layers=2, max_length=48, seed=0
    )


class Watch(TrainerCallback):
    """Record the learning rate of every step, and a weight after it."""

    def __init__(self):
        self.rates = []
        self.norms = []

    def on_step_begin(self, args, state, control, optimizer=None, **kwargs):
        self.optimizer = getattr(optimizer, "optimizer", optimizer)
        self.group = self.optimizer.param_groups[0]
        self.rates.append(self.group["lr"])

    def on_step_end(self, args, state, control, model=None, **kwargs):
        self.norms.append(model.model.norm.weight.detach().clone())


@pytest.fixture
def train(tokenizer, rows, tmp_path):
    """Train a new small model; return it, the result of `train`, and the Watch."""

    def run(**settings):
        model = model_of(tokenizer)
        watch = Watch()
        settings = (
            SETTINGS
            | {
                "steps": 4,
                "held_out": rows.select(range(16, 22)),
            }
            | settings
        )
        data = rows.select(range(16))
        done = fit.train(
            model,
            data,
            tokenizer,
            folder=tmp_path,
            callbacks=[watch],
            **settings,
        )
        return model, done, watch

    return run


def test_memory_options_do_not_change_the_result(train):
    (one, first, _) = train()
    (other, second, _) = train(per_device_batch_size=1, gradient_checkpointing=True)
    assert first.history.held_out[-1][1] == pytest.approx(
        second.history.held_out[-1][1],
        rel=1e-4,
    )
    tiny.assert_close(other.state_dict(), one.state_dict(), 1e-3)


@pytest.mark.parametrize("epochs, steps", [(1, 4), (2.5, 10), (0.1, 1)])
def test_epochs_are_counted_in_steps(train, epochs, steps):
    _, done, watch = train(steps=None, epochs=epochs)
    assert done.steps == len(watch.rates) == steps == done.history.held_out[-1][0]


def test_the_last_step_of_an_epoch_may_be_smaller():
    assert fit.count_steps(17, 2, 4, 1) == 10
    assert fit.count_steps(17, 1, 2, 2) == 5


def test_warmup_then_linear_decay(train):
    _, _, watch = train(steps=10, warmup_steps=4, learning_rate=1.0)
    assert watch.rates == pytest.approx(
        [
            0,
            0.25,
            0.5,
            0.75,
            1,
            5 / 6,
            4 / 6,
            3 / 6,
            2 / 6,
            1 / 6,
        ]
    )


@pytest.mark.parametrize("batch_size", [1, 4, 32])
def test_row_losses_are_the_models_own(tokenizer, rows, batch_size):
    model = model_of(tokenizer)
    losses, tokens, exact = fit.row_losses(
        model.train(),
        rows,
        tokenizer,
        batch_size=batch_size,
    )
    assert model.training

    assert len(losses) == len(rows)
    assert set(exact) == {0}
    for row in (0, 5, 21):
        ids, labels = (torch.tensor([rows[row][name]]) for name in ("input_ids", "labels"))
        loss = model(input_ids=ids, labels=labels).loss.item()
        assert losses[row] == pytest.approx(loss, rel=1e-5)
        assert tokens[row] == int((labels[:, 1:] != -100).sum())
    whole = sum(loss * count for loss, count in zip(losses, tokens)) / sum(tokens)
    assert fit.mean_loss(losses, tokens) == pytest.approx(whole, rel=1e-6)


@pytest.mark.parametrize("batch_size", [1, 4, 32])
def test_answers_that_the_model_gives_are_exact(tokenizer, rows, batch_size):
    """The right answer is the model's own output; every second one has another last token."""
    model = model_of(tokenizer).eval()

    def answer(row, number):
        logits = model(input_ids=torch.tensor([row["input_ids"]])).logits
        ids = logits[0].argmax(-1).tolist()
        return {"labels": [-100, *ids[:-2], ids[-2] ^ number % 2]}

    answered = rows.map(answer, with_indices=True)
    _, _, exact = fit.row_losses(
        model,
        answered,
        tokenizer,
        batch_size=batch_size,
    )

    assert exact == [1 - number % 2 for number in range(len(rows))]


def test_the_best_weights_are_restored(tokenizer, rows, train, tmp_path):
    model, done, watch = train(
        steps=8,
        evaluations=8,
        learning_rate=1.0,
        keep_best=True,
    )
    losses = [loss for _, loss in done.history.held_out]
    best = losses.index(min(losses))

    assert len(losses) == 8
    assert best < 7  # at such a learning rate the last evaluation is not the best
    assert torch.equal(model.model.norm.weight, watch.norms[best])
    assert fit.mean_loss(done.losses, done.tokens) == pytest.approx(min(losses))
    again, tokens, exact = fit.row_losses(
        model,
        rows.select(range(16, 22)),
        tokenizer,
    )
    assert fit.mean_loss(again, tokens) == pytest.approx(min(losses), rel=1e-4)
    assert done.exact == exact
    assert list(tmp_path.glob("best-*"))  # kept until the result is saved and the folder is deleted


class Stop(TrainerCallback):
    """Interrupts training."""

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 5:
            raise KeyboardInterrupt


def test_a_resumed_training_remembers_its_best(tokenizer, rows, tmp_path):
    settings = SETTINGS | {
        "steps": 8,
        "evaluations": 8,
        "learning_rate": 1.0,
        "keep_best": True,
    }

    def run(name, **more):
        model = model_of(tokenizer)
        held_out = rows.select(range(16, 22))
        more |= {"folder": tmp_path / name, "held_out": held_out} | settings
        return model, fit.train(model, rows, tokenizer, **more)

    straight, expected = run("a")
    with pytest.raises(KeyboardInterrupt):
        run("b", save_steps=2, callbacks=[Stop()])
    history = tmp_path / "b" / "checkpoint-4" / "history.json"
    edit_json(history, seconds=1000.0)
    resumed, done = run("b", save_steps=2)

    assert done.history.seconds > 1000
    assert done.history.held_out == expected.history.held_out
    assert done.losses == expected.losses
    assert torch.equal(resumed.lm_head.weight, straight.lm_head.weight)


def test_a_balance_loss_is_removed_after_training(tokenizer, rows, tmp_path):
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_layers": 2,
        "num_experts": 8,
        "top_k": 2,
        "expert_size": 8,
        "shared_experts": 1,
        "dense_layers": 1,
        "max_length": 48,
        "seed": 0,
    }
    weights = []
    for coef in (1e-9, 1.0):
        model = small_deepseek(tokenizer, **sizes)
        before = model.config.to_dict()
        settings = SETTINGS | {"steps": 2, "held_out": rows.select(range(2))}
        settings |= {"balance_loss": "per_layer", "balance_loss_coef": coef}
        fit.train(model, rows, tokenizer, folder=tmp_path, **settings)
        assert model.config.to_dict() | {"use_cache": True} == before
        weights.append(model.model.layers[1].mlp.gate.weight)

    assert distance(*weights) > 1e-4
