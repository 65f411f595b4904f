"""moe_runtime.methods.ultrafuser.training: encoded rows, losses of single rows, and both stages
through fit.train.
"""

import functools

import pytest
import torch

from moe_runtime.hf.training import fit
from moe_runtime.methods.ultrafuser.inputs import Encoder
from moe_runtime.methods.ultrafuser.training import (
    encode_rows,
    fuser_losses,
    gate_weights,
    sampler_for,
    training_of,
)
from tests.methods.ultrafuser import fusers
from tests.support.dist_launch import Launches

TEMPLATES = ("Q: {prompt}\nA: ", "### {prompt}\n")
SETTINGS = {
    "learning_rate": 0.2,
    "optimizer": "sgd",
    "schedule": "constant",
    "warmup_steps": 0,
    "evaluations": 1,
}


def make(**settings):
    return fusers.fuser(
        fusers.specialists(2), templates=TEMPLATES, tokenizer=fusers.tokenizer(), **settings
    )


@functools.cache
def encoder() -> Encoder:
    return make().encoder


@functools.cache
def rows():
    """Rows of two domains, their answers of several lengths."""
    texts = [{"prompt": f"add {i} and 1", "completion": f"{i + 1}" * (1 + i % 3)} for i in range(8)]
    texts += [{"prompt": f"say fox {i}", "completion": "the fox " * (1 + i % 2)} for i in range(4)]
    return encode_rows(encoder(), texts, 64).add_column("domain", ["sums"] * 8 + ["words"] * 4)


def train(model, folder, *, steps=3, batch_size=6, balanced=True, seed=0, **more):
    drawn = sampler_for(
        rows()["domain"], steps=steps, batch_size=batch_size, balanced=balanced, seed=seed
    )
    settings = SETTINGS | {"steps": steps, "batch_size": batch_size, "seed": seed} | more
    how = training_of(encoder(), drawn)
    return fit.train(
        model, rows(), fusers.tokenizer(), folder=folder, held_out=rows(), **how, **settings
    )


def weights(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def test_rows_hold_a_prompt_for_each_and_one_answer():
    turns = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "yes"},
        {"role": "user", "content": "?"},
    ]
    found = encode_rows(encoder(), [{"prompt": "hi", "completion": "yes"}, {"messages": turns}], 64)
    assert found[0] == found[1]
    decode = fusers.tokenizer().decode
    assert [decode(ids, skip_special_tokens=True) for ids in found[0]["prompt_ids"]] == [
        "Q: hi\nA: ",
        "### hi\n",
    ]
    assert decode(found[0]["response_ids"]) == "yes</s>"


def test_answers_are_cut_and_long_prompts_dropped():
    texts = [
        {"prompt": "x" * 9, "completion": "y" * 50},
        {"prompt": "z" * 60, "completion": "y"},
    ] * 2
    found = encode_rows(encoder(), texts, 40, limit=1)
    assert (
        len(found) == 1
        and max(map(len, found[0]["prompt_ids"])) + len(found[0]["response_ids"]) <= 40
    )
    assert len(encode_rows(encoder(), texts, 40)) == 2
    with pytest.raises(ValueError, match="No examples are left: 0 have .* within max_length .12"):
        encode_rows(encoder(), texts, 12)


def test_rows_with_prompts_that_are_held_out_are_left_out():
    texts = [{"prompt": f"say {i % 3}", "completion": "y" * (i + 1)} for i in range(9)]
    held_out = encode_rows(encoder(), texts[:1], 64)
    found = encode_rows(encoder(), texts, 64, limit=4, without=held_out["prompt_ids"])
    assert len(found) == 4 and not any(
        row["prompt_ids"] == held_out[0]["prompt_ids"] for row in found
    )
    with pytest.raises(ValueError, match="No examples are left: 3 have a held-out prompt"):
        encode_rows(encoder(), texts[::3], 64, without=held_out["prompt_ids"])


def test_losses_are_taken_after_the_steps_that_are_asked_for(tmp_path):
    done = train(make().freeze_specialists(), tmp_path, steps=5, evaluations=(1, 4))
    assert [step for step, _ in done.history.rows] == [1, 4, 5]


def test_losses_and_weights_of_rows_are_the_formula_s():
    model = make()
    losses, tokens, _ = fuser_losses(model, rows(), collator=encoder().collate, batch_size=5)
    found = gate_weights(model, rows(), collator=encoder().collate, batch_size=5)
    assert tokens == [len(row["response_ids"]) for row in rows()] == [*map(len, found)]
    for row, loss, weight in zip(rows(), losses, found, strict=True):
        inputs = encoder().collate([row])
        with torch.no_grad():
            assert loss == pytest.approx(fusers.naive_loss(model, inputs).item(), rel=1e-5)
            torch.testing.assert_close(
                torch.tensor(weight), fusers.naive(model, inputs)[1][0], rtol=1e-5, atol=1e-6
            )


def test_stage_one_leaves_the_specialists_as_they_are(tmp_path):
    model = make()
    before = weights(model)
    model.freeze_specialists()
    done = train(model, tmp_path, optimizer="adamw_torch", weight_decay=0.1, learning_rate=1e-2)
    after = weights(model)
    gate = sum(p.numel() for p in model.gate.parameters())
    assert done.trained_parameters == gate
    assert all(
        torch.equal(after[name], before[name]) for name in before if not name.startswith("gate.")
    )
    # the last bias moves all scores alike, and only weight decay moves it
    assert all(
        not torch.equal(after[name], before[name]) for name in before if name.startswith("gate.")
    )
    assert all(p.grad is None for p in model.specialists.parameters())
    steps = len(list(model.gate.parameters()))
    # two moments, and a count of steps for each
    assert done.optimizer_bytes == 2 * 4 * gate + 4 * steps
    model.train_all()
    train(model, tmp_path / "2")
    moved = weights(model)
    assert not any(
        torch.equal(moved[name], after[name]) for name in before if name != "gate.score.bias"
    )


@pytest.mark.parametrize("reduction", ["mean", "sample"])
def test_micro_batches_make_the_same_step(tmp_path, reduction):
    found = []
    for number, at_once in enumerate((6, 2, 1)):
        model = make(loss_reduction=reduction).train_all()
        train(model, tmp_path / str(number), per_device_batch_size=at_once, learning_rate=0.02)
        found.append(weights(model))
    for other in found[1:]:
        for name, weight in found[0].items():
            torch.testing.assert_close(other[name], weight, rtol=1e-4, atol=1e-6)


def test_the_first_step_is_the_paper_s(tmp_path):
    """One step of SGD is the gradient of the loss of n rows of each domain, as Eq. (2) has it."""
    model = make(loss_reduction="sample").train_all()
    ours = make(loss_reduction="sample").train_all()
    places = list(sampler_for(rows()["domain"], steps=1, batch_size=6))
    assert sorted(rows()[place]["domain"] for place in places) == ["sums"] * 3 + ["words"] * 3
    loss = (
        sum(fusers.naive_loss(ours, encoder().collate([rows()[place]]), "sum") for place in places)
        / 6
    )
    loss.backward()
    train(model, tmp_path, steps=1)
    for (name, trained), other in zip(model.named_parameters(), ours.parameters(), strict=True):
        torch.testing.assert_close(
            trained, other - 0.2 * other.grad, rtol=1e-4, atol=2e-6, msg=name
        )


def test_without_balance_all_rows_are_alike():
    drawn = list(sampler_for(rows()["domain"], steps=4, batch_size=6, balanced=False))
    assert sorted(drawn) == sorted([*range(12)] * 2)


@pytest.fixture(scope="module")
def launches(tmp_path_factory):
    return Launches("tests/support/dist_fuser.py", tmp_path_factory)


@pytest.mark.slow
def test_two_processes_train_as_one_does(launches, tmp_path):
    folder = launches(2)
    for stage in ("freeze_specialists", "train_all"):
        model = getattr(make(), stage)()
        done = train(model, tmp_path / stage)
        for rank in range(2):
            found = torch.load(folder / f"{stage}-{rank}.pt", weights_only=True)
            assert found["losses"] == pytest.approx(done.losses, rel=1e-4)
            for name, weight in weights(model).items():
                torch.testing.assert_close(
                    found["weights"][name], weight, rtol=1e-4, atol=1e-6, msg=name
                )
