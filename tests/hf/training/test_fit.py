"""moe_runtime.hf.training.fit.train: what a recipe's training asks for, and the losses of single
rows.
"""

import math

import pytest
import torch
from transformers import TrainerCallback

from moe_runtime.hf.training import fit
from moe_runtime.io.rows import tokenize_pairs
from papers.engine.tiny import small_llama, train_tokenizer
from tests.hf import tiny
from tests.hf.tiny import distance

PAIRS = [
    {"prompt": f"Write {i}:\n", "completion": "x" * (1 + i % 7) + f" = {i}"} for i in range(22)
]
SETTINGS = {"learning_rate": 1e-2, "batch_size": 4, "evaluations": 2, "optimizer": "adamw_torch"}


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
        model = model_of(tokenizer)
        watch = Watch()
        settings = SETTINGS | {"steps": 4} | settings
        held_out = rows.select(range(16, 22))
        done = fit.train(
            model,
            rows.select(range(16)),
            tokenizer,
            folder=tmp_path,
            held_out=held_out,
            callbacks=[watch],
            **settings,
        )
        return model, done, watch

    return run


def test_before_a_loss_is_logged_there_is_none_to_show(train):
    seen = []
    train(steps=12, on_step=lambda step, steps, loss: seen.append(loss))
    assert seen[0] is None
    assert isinstance(seen[-1], float)
    assert all(loss is None or math.isfinite(loss) for loss in seen)


def test_one_batch_or_many_small_ones(train):
    (one, first, _), (many, second, _) = train(), train(per_device_batch_size=1)
    assert first.history.held_out[-1][1] == pytest.approx(second.history.held_out[-1][1], rel=1e-4)
    tiny.assert_close(many.state_dict(), one.state_dict(), 0.001)


def test_recomputed_activations_change_nothing(train):
    (one, *_), (other, *_) = train(), train(gradient_checkpointing=True)
    tiny.assert_equal(other.state_dict(), one.state_dict())


@pytest.mark.parametrize("epochs, steps", [(1, 4), (2.5, 10), (0.1, 1)])
def test_epochs_are_counted_in_steps(train, epochs, steps):
    _, done, watch = train(steps=None, epochs=epochs)
    assert done.steps == len(watch.rates) == steps == done.history.held_out[-1][0]


def test_the_last_step_of_an_epoch_may_be_smaller():
    assert fit.count_steps(17, 2, 4, 1) == 10
    assert fit.count_steps(17, 1, 2, 2) == 5


def test_warmup_then_a_line_to_zero(train):
    _, _, watch = train(steps=10, warmup_steps=4, learning_rate=1.0)
    assert watch.rates == pytest.approx([0, 0.25, 0.5, 0.75, 1, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6])
    assert train(steps=40, learning_rate=1.0)[2].rates[:3] == pytest.approx([0, 0.5, 1])


def test_adafactor_runs_without_its_relative_step(train):
    _, _, watch = train(optimizer="adafactor", schedule="constant")
    group = watch.optimizer.param_groups[0]
    assert "Adafactor" in type(getattr(watch.optimizer, "optimizer", watch.optimizer)).__name__
    assert not group["relative_step"]
    assert not group["scale_parameter"]
    assert watch.rates == [1e-2] * 4


def test_clipping_is_off_at_minus_one(train):
    free, clipped, tight = (
        train(optimizer="sgd", steps=1, warmup_steps=0, max_grad_norm=n)[0]
        for n in (-1.0, 1e9, 1e-3)
    )
    tiny.assert_equal(clipped.state_dict(), free.state_dict())
    assert any(
        not torch.equal(tight.state_dict()[name], weight)
        for name, weight in free.state_dict().items()
    )


def test_bf16_computes_in_bfloat16_and_keeps_float32_weights(train):
    (_, first, _), (other, second, _) = train(), train(bf16=True)
    for p in other.parameters():
        assert p.dtype == torch.float32
    assert first.losses != second.losses == pytest.approx(first.losses, rel=0.05)


@pytest.mark.parametrize("batch_size", [1, 4, 32])
def test_row_losses_are_the_models_own(tokenizer, rows, batch_size):
    model = model_of(tokenizer)
    # a right answer is what the model itself says, a wrong one has another token at the end
    own = [
        model.eval()(input_ids=torch.tensor([row["input_ids"]])).logits[0].argmax(-1).tolist()
        for row in rows
    ]
    answers = [[-100, *said[:-2], said[-2] ^ place % 2] for place, said in enumerate(own)]
    answered = rows.map(lambda row, place: {"labels": answers[place]}, with_indices=True)
    assert fit.row_losses(model, answered, tokenizer, batch_size=batch_size)[2] == [
        1 - place % 2 for place in range(len(rows))
    ]
    losses, tokens, exact = fit.row_losses(model.train(), rows, tokenizer, batch_size=batch_size)
    assert model.training
    assert len(losses) == len(rows)
    assert set(exact) == {0}
    for place in (0, 5, 21):
        ids, labels = (torch.tensor([rows[place][name]]) for name in ("input_ids", "labels"))
        assert losses[place] == pytest.approx(
            model(input_ids=ids, labels=labels).loss.item(), rel=1e-5
        )
        assert tokens[place] == int((labels[:, 1:] != -100).sum())
    assert fit.mean_loss(losses, tokens) == pytest.approx(
        fit.mean_loss(*fit.row_losses(model, rows, tokenizer)), rel=1e-6
    )


class Weights(TrainerCallback):
    """Keeps what the head is at every evaluation, which comes after it; put before
    `train`'s own.
    """

    def __init__(self, model):
        self.model = model
        self.seen = []

    def on_step_end(self, args, state, control, **kwargs):
        self.seen.append(self.model.model.norm.weight.detach().clone())


def test_the_best_evaluations_weights_are_put_back(tokenizer, rows, tmp_path):
    model = model_of(tokenizer)
    watch = Weights(model)
    held_out = rows.select(range(16, 22))
    done = fit.train(
        model,
        rows.select(range(16)),
        tokenizer,
        folder=tmp_path,
        held_out=held_out,
        callbacks=[watch],
        keep_best=True,
        **SETTINGS | {"steps": 8, "evaluations": 8, "learning_rate": 1.0},
    )
    losses = [loss for _, loss in done.history.held_out]
    best = losses.index(min(losses))
    assert best < 7 and len(losses) == 8  # at such a rate the last is not the best
    assert torch.equal(model.model.norm.weight, watch.seen[best])
    assert fit.mean_loss(done.losses, done.tokens) == pytest.approx(min(losses))
    found = fit.row_losses(model, held_out, tokenizer)
    assert fit.mean_loss(*found) == pytest.approx(min(losses), rel=1e-4)
    assert done.exact == found[2]
    assert list(tmp_path.glob("best-*"))  # until what was trained is saved, and the folder goes


class Stop(TrainerCallback):
    """Breaks a training off."""

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 5:
            raise KeyboardInterrupt


def test_a_training_that_goes_on_remembers_its_best(tokenizer, rows, tmp_path):
    settings = SETTINGS | {"steps": 8, "evaluations": 8, "learning_rate": 1.0, "keep_best": True}
    settings |= {"held_out": rows.select(range(16, 22))}
    straight = model_of(tokenizer)
    broken = model_of(tokenizer)
    want = fit.train(straight, rows, tokenizer, folder=tmp_path / "a", **settings)
    with pytest.raises(KeyboardInterrupt):
        fit.train(
            broken,
            rows,
            tokenizer,
            folder=tmp_path / "b",
            save_steps=2,
            callbacks=[Stop()],
            **settings,
        )
    broken = model_of(tokenizer)
    got = fit.train(broken, rows, tokenizer, folder=tmp_path / "b", save_steps=2, **settings)
    assert got.history.held_out == want.history.held_out
    assert got.losses == want.losses
    assert torch.equal(broken.lm_head.weight, straight.lm_head.weight)


def test_the_optimizers_bytes_and_what_trains_are_counted(train):
    model, done, _ = train()
    params = sum(p.numel() for p in model.parameters())
    tensors = len(list(model.parameters()))
    assert done.trained_parameters == params
    assert done.optimizer_bytes == 8 * params + 4 * tensors


def test_adams_betas_reach_the_optimizer(train):
    _, _, watch = train(adam_beta1=0.8, adam_beta2=0.95)
    group = getattr(watch.optimizer, "optimizer", watch.optimizer).param_groups[0]
    assert group["betas"] == (0.8, 0.95)


def test_a_balance_loss_lasts_as_long_as_the_training(tokenizer, rows, tmp_path):
    from papers.engine.tiny import small_deepseek

    sizes = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_layers": 2,
        "num_experts": 8,
        "top_k": 2,
        "expert_size": 8,
    }
    weights = []
    for coef in (1e-9, 1.0):
        model = small_deepseek(
            tokenizer, **sizes, shared_experts=1, dense_layers=1, max_length=48, seed=0
        )
        before = model.config.to_dict()
        settings = (
            SETTINGS | {"balance_loss": "per_layer", "balance_loss_coef": coef} | {"steps": 2}
        )
        fit.train(
            model, rows, tokenizer, folder=tmp_path, held_out=rows.select(range(2)), **settings
        )
        assert model.config.to_dict() | {"use_cache": True} == before
        weights.append(model.model.layers[1].mlp.gate.weight)
    assert distance(*weights) > 1e-4
