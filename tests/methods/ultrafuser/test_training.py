"""moe_runtime.methods.ultrafuser.training: encoded examples, losses of single examples, and both
stages through fit.train.
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
    single_rows,
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
    settings = {"templates": TEMPLATES, "tokenizer": fusers.tokenizer()} | settings
    return fusers.fuser(fusers.specialists(2), **settings)


@functools.cache
def encoder() -> Encoder:
    return make().encoder


@functools.cache
def rows():
    """Examples of two domains, with answers of several lengths."""
    texts = [{"prompt": f"add {i} and 1", "completion": f"{i + 1}" * (1 + i % 3)} for i in range(8)]
    texts += [{"prompt": f"say fox {i}", "completion": "the fox " * (1 + i % 2)} for i in range(4)]
    return encode_rows(encoder(), texts, 64).add_column(
        "domain",
        ["sums"] * 8 + ["words"] * 4,
    )


def train(model, folder, *, steps=3, batch_size=6, balanced=True, seed=0, **more):
    sizes = {"steps": steps, "batch_size": batch_size, "seed": seed}
    drawn = sampler_for(
        rows()["domain"],
        balanced=balanced,
        **sizes,
    )
    return fit.train(
        model,
        rows(),
        fusers.tokenizer(),
        folder=folder,
        held_out=rows(),
        **training_of(encoder(), drawn),
        **SETTINGS | sizes | more,
    )


def weights(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def test_rows_hold_a_prompt_for_each_and_one_answer():
    turns = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "yes"},
        {"role": "user", "content": "?"},
    ]
    texts = [{"prompt": "hi", "completion": "yes"}, {"messages": turns}]
    pair, chat = encode_rows(encoder(), texts, 64)
    assert pair == chat
    decode = fusers.tokenizer().decode
    prompts = [decode(ids, skip_special_tokens=True) for ids in pair["prompt_ids"]]
    assert prompts == ["Q: hi\nA: ", "### hi\n"]
    assert decode(pair["response_ids"]) == "yes</s>"


def test_answers_are_cut_and_long_prompts_dropped():
    long_answer = {"prompt": "x" * 9, "completion": "y" * 50}
    long_prompt = {"prompt": "z" * 60, "completion": "y"}
    texts = [long_answer, long_prompt] * 2
    (row,) = encode_rows(encoder(), texts, 40, limit=1)
    assert max(map(len, row["prompt_ids"])) + len(row["response_ids"]) <= 40
    assert len(encode_rows(encoder(), texts, 40)) == 2
    with pytest.raises(ValueError, match="No examples are left: 0 have .* within max_length .12"):
        encode_rows(encoder(), texts, 12)


def test_rows_with_prompts_that_are_held_out_are_left_out():
    texts = [{"prompt": f"say {i % 3}", "completion": "y" * (i + 1)} for i in range(9)]
    held_out = encode_rows(encoder(), texts[:1], 64)["prompt_ids"]
    left = encode_rows(encoder(), texts, 64, limit=4, without=held_out)["prompt_ids"]
    assert len(left) == 4
    assert held_out[0] not in list(left)
    with pytest.raises(ValueError, match="No examples are left: 3 have a held-out prompt"):
        encode_rows(
            encoder(),
            texts[::3],
            64,
            without=held_out,
        )


@torch.no_grad()
def test_losses_and_weights_of_rows_are_the_formula_s():
    model = make()
    options = {"collator": encoder().collate, "batch_size": 5}
    losses, tokens, _ = fuser_losses(model, rows(), **options)
    weights = gate_weights(model, rows(), **options)
    for row, loss, count, weight in zip(rows(), losses, tokens, weights, strict=True):
        inputs = encoder().collate([row])
        assert count == len(row["response_ids"])
        assert loss == pytest.approx(
            fusers.naive_loss(model, inputs).item(),
            rel=1e-5,
        )
        expected = fusers.naive(model, inputs)[1][0]
        torch.testing.assert_close(
            torch.tensor(weight),
            expected,
            rtol=1e-5,
            atol=1e-6,
        )


@pytest.mark.parametrize("reduction", ["mean", "sample"])
def test_micro_batches_make_the_same_step(tmp_path, reduction):
    def trained(at_once: int):
        model = make(loss_reduction=reduction).train_all()
        train(model, tmp_path / str(at_once), per_device_batch_size=at_once, learning_rate=0.02)
        return weights(model)

    whole = trained(6)
    for at_once in (2, 1):
        torch.testing.assert_close(
            trained(at_once),
            whole,
            rtol=1e-4,
            atol=1e-6,
        )


def test_the_first_step_is_the_paper_s(tmp_path):
    """One SGD step uses the gradient of the loss of n examples of each domain, as in Eq. (2)."""
    places = list(sampler_for(rows()["domain"], steps=1, batch_size=6))
    assert sorted(rows()[places]["domain"]) == ["sums"] * 3 + ["words"] * 3
    expected = make(loss_reduction="sample").train_all()
    losses = [
        fusers.naive_loss(
            expected,
            encoder().collate([rows()[i]]),
            "sum",
        )
        for i in places
    ]
    (sum(losses) / 6).backward()
    for parameter in expected.parameters():
        parameter.data -= 0.2 * parameter.grad
    model = make(loss_reduction="sample").train_all()
    train(model, tmp_path, steps=1)
    torch.testing.assert_close(
        weights(model),
        weights(expected),
        rtol=1e-4,
        atol=2e-6,
    )


def test_without_balance_all_rows_are_alike():
    drawn = list(
        sampler_for(
            rows()["domain"],
            steps=4,
            batch_size=6,
            balanced=False,
        )
    )
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
            result = torch.load(
                folder / f"{stage}-{rank}.pt",
                weights_only=True,
            )
            assert result["losses"] == pytest.approx(done.losses, rel=1e-4)
            torch.testing.assert_close(
                result["weights"],
                weights(model),
                rtol=1e-4,
                atol=1e-6,
            )


def test_a_single_specialists_row_is_trained_on_its_answer():
    for row, single in zip(
        rows(),
        single_rows(rows(), 1),
        strict=True,
    ):
        prompt = row["prompt_ids"][1]
        answer = row["response_ids"]
        assert single == {
            "input_ids": prompt + answer,
            "labels": [-100] * len(prompt) + answer,
        }
