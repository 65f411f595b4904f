"""moe_runtime.methods.upit.buckets: perplexities of each kind are those of the model alone; buckets
are Algorithm 3's.
"""

import itertools
import math

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from moe_runtime.methods.upit import buckets as upit_buckets
from moe_runtime.methods.upit.buckets import fill_buckets, perplexities, random_buckets, seed_set
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
    """exp of the mean of -log p of one row, in float64, by hand."""
    ids = row["input_ids"]
    labels = row["labels" if tokens == "response" else "input_ids"]
    log_p = model.double()(torch.tensor([ids])).logits[0].log_softmax(-1)
    losses = [-log_p[i - 1, ids[i]].item() for i in range(1, len(ids)) if labels[i] != -100]
    return math.exp(sum(losses) / len(losses))


@pytest.mark.parametrize("tokens", ["response", "all"])
def test_perplexity_is_that_of_each_row_alone(experts, rows, tokenizer, tokens):
    found = perplexities(experts, rows, tokenizer, tokens=tokens, batch_size=3)
    want = [
        [alone(AutoModelForCausalLM.from_pretrained(path), row, tokens) for row in rows]
        for path in experts
    ]
    assert found.dtype == torch.float64
    torch.testing.assert_close(found, torch.tensor(want, dtype=torch.float64), rtol=2e-5, atol=0)


@pytest.mark.parametrize(
    ("targets", "ranks"),
    [
        pytest.param(upit.ADAPTED, (2, 2, 2), id="mlp-alike"),
        pytest.param((*upit.ADAPTED, "q_proj"), (2, 2, 2), id="attention-too"),
        pytest.param(("up_proj",), (2, 3, 2), id="other-ranks"),
        pytest.param(("0.mlp.up_proj", "1.mlp.down_proj"), (2, 2, 2), id="others-in-each-layer"),
    ],
)
def test_adapters_run_over_one_base(
    tmp_path, experts, rows, tokenizer, monkeypatch, targets, ranks
):
    base = experts[0].parent / "base"
    paths = [
        upit.save_adapters(tmp_path / str(i), base, 1, targets, rank)[0]
        for i, rank in enumerate(ranks)
    ]
    upit.change(paths[1], lambda tensors: {name: 2 * tensor for name, tensor in tensors.items()})
    loads = []
    load = upit_buckets.models.ranks.load_model
    monkeypatch.setattr(
        upit_buckets.models.ranks, "load_model", lambda *a: loads.append(a) or load(*a)
    )
    # two rows of the data at once, three times each
    found = perplexities(paths, rows, tokenizer, base=base, batch_size=6)
    want = []
    for path in paths:
        model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), path)
        want.append([alone(model, row) for row in rows])
    assert len(loads) == 1
    torch.testing.assert_close(found, torch.tensor(want, dtype=torch.float64), rtol=2e-5, atol=0)


def test_kinds_may_be_mixed_and_keep_their_places(tmp_path, experts, rows, tokenizer):
    base = experts[0].parent / "base"
    adapter = upit.save_adapters(tmp_path, base, 1)[0]
    delta = upit.save_delta(tmp_path / "delta", experts[1], base)
    mixed = perplexities([delta, adapter, experts[0]], rows, tokenizer, base=base)
    torch.testing.assert_close(
        mixed[[2, 0]], perplexities(experts[:2], rows, tokenizer), rtol=1e-6, atol=0
    )
    torch.testing.assert_close(
        mixed[1:2], perplexities([adapter], rows, tokenizer), rtol=1e-6, atol=0
    )


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("capacity", [None, 1, 3, 20])
def test_buckets_are_the_algorithm(seed, capacity):
    # few values: ties are common
    values = torch.randint(1, 4, (3, 10), generator=torch.Generator().manual_seed(seed)).double()
    found = fill_buckets(values, capacity)
    C = capacity or 4
    want = [[], [], []]
    for row in range(10):
        for _, expert in sorted((values[j, row].item(), j) for j in range(3)):
            if len(want[expert]) < C:
                want[expert].append(row)
                break
    assert found == want
    placed = sorted(itertools.chain(*found))
    assert len(set(placed)) == len(placed)
    assert placed == list(range(10)) or 3 * C < 10


@pytest.mark.parametrize(
    ("perplexity", "capacity", "message"),
    [
        (torch.tensor([[1.0, 2.0], [math.nan, 1.0]]), None, r"experts \[1\] is NaN"),
        (
            torch.tensor([[1.0, math.nan], [math.nan, math.nan]]),
            None,
            r"rows \[1\] is NaN for every expert",
        ),
        (torch.ones(2, 2), 0, "capacity must be an integer of at least 1"),
    ],
)
def test_bad_numbers_are_refused(perplexity, capacity, message):
    with pytest.raises(ValueError, match=message):
        fill_buckets(perplexity, capacity)


def test_random_buckets_have_the_sizes_and_share_no_row():
    found = random_buckets([3, 0, 4], 8, seed=1)
    assert [len(bucket) for bucket in found] == [3, 0, 4]
    assert len(set(itertools.chain(*found))) == 7 and all(
        bucket == sorted(bucket) for bucket in found
    )
    assert found == random_buckets([3, 0, 4], 8, seed=1) != random_buckets([3, 0, 4], 8, seed=2)


def test_seed_set_is_a_share_drawn_at_random():
    rows = upit.make_rows(200)
    found = seed_set(rows, 0.05, seed=1)
    assert len(found) == 10 and len(seed_set(rows, 0.01, at_least=8)) == 8
    texts = [str(row) for row in rows]
    assert {str(row) for row in found} <= set(texts) and [str(row) for row in found] != texts[:10]
    with pytest.raises(
        ValueError, match=r"share \(1.5\) and at_least \(1\) must select at most the 200"
    ):
        seed_set(rows, 1.5)
