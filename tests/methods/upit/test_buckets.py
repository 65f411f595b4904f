"""moe_runtime.methods.upit.buckets: perplexities of each kind equal those of the model alone;
buckets follow Algorithm 3.
"""

import math

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from moe_runtime.methods.upit.buckets import fill_buckets, perplexities, seed_set
from tests.support import upit


@pytest.fixture(scope="module")
def tokenizer():
    return upit.make_tokenizer()


@pytest.fixture(scope="module")
def rows():
    return upit.make_rows(7)


@pytest.fixture(scope="module")
def experts(tmp_path_factory, tokenizer):
    return upit.save_experts(tmp_path_factory.mktemp("experts"), tokenizer)


@torch.no_grad()
def alone(model, row, tokens: str = "response") -> float:
    """Compute exp of the mean of -log p of one example in float64."""
    ids = row["input_ids"]
    labels = row["labels" if tokens == "response" else "input_ids"]
    log_p = model.double()(torch.tensor([ids])).logits[0].log_softmax(-1)
    losses = [-log_p[i - 1, ids[i]].item() for i in range(1, len(ids)) if labels[i] != -100]
    return math.exp(sum(losses) / len(losses))


def assert_near(result, models, rows, tokens: str = "response") -> None:
    expected = [[alone(model, row, tokens) for row in rows] for model in models]
    assert result.dtype == torch.float64
    torch.testing.assert_close(
        result,
        torch.tensor(expected).double(),
        rtol=2e-5,
        atol=0,
    )


@pytest.mark.parametrize("tokens", ["response", "all"])
def test_perplexity_is_that_of_each_row_alone(experts, rows, tokenizer, tokens):
    result = perplexities(experts, rows, tokenizer, tokens=tokens, batch_size=3)
    models = [AutoModelForCausalLM.from_pretrained(path) for path in experts]
    assert_near(result, models, rows, tokens)


def test_kinds_may_be_mixed_and_keep_their_places(tmp_path, experts, rows, tokenizer):
    base = experts[0].parent / "base"
    first = upit.save_adapters(tmp_path / "mlp", base, 1)[0]
    second = upit.save_adapters(tmp_path / "more", base, 1, (*upit.ADAPTED, "q_proj"), 3)[0]
    upit.change(second, lambda tensors: {name: 2 * t for name, t in tensors.items()})
    paths = [experts[1], first, second, experts[0]]
    result = perplexities(paths, rows, tokenizer, base=base, batch_size=3)
    models = [AutoModelForCausalLM.from_pretrained(experts[1])]
    for adapter in (first, second):
        model = AutoModelForCausalLM.from_pretrained(base)
        models.append(PeftModel.from_pretrained(model, adapter))
    models.append(AutoModelForCausalLM.from_pretrained(experts[0]))
    assert_near(result, models, rows)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("capacity", [None, 1, 3, 20])
def test_buckets_are_the_algorithm(seed, capacity):
    # few distinct values, so that ties are common
    values = torch.randint(
        1,
        4,
        (3, 10),
        generator=torch.Generator().manual_seed(seed),
    ).double()
    C = capacity or 4
    expected = [[], [], []]
    for row in range(10):
        for expert in values[:, row].argsort(stable=True).tolist():
            if len(expected[expert]) < C:
                expected[expert].append(row)
                break
    assert fill_buckets(values, capacity) == expected


def test_bad_numbers_are_refused():
    nan = math.nan
    for values, capacity, message in (
        ([[1.0, 2.0], [nan, 1.0]], None, "expert 1 is NaN on row 0"),
        ([[1.0, 1.0]], 0, "capacity must be an integer of at least 1"),
    ):
        with pytest.raises(ValueError, match=message):
            fill_buckets(torch.tensor(values), capacity)


def test_seed_set_is_a_share_drawn_at_random():
    rows = upit.make_rows(200)
    drawn = list(seed_set(rows, 0.05, seed=1))
    assert len(drawn) == 10
    assert len(seed_set(rows, 0.01, at_least=8)) == 8
    everything = list(rows)
    for row in drawn:
        assert row in everything
    assert drawn != everything[:10]
    with pytest.raises(ValueError, match=r"share \(1.5\) and at_least .* at most the 200"):
        seed_set(rows, 1.5)
