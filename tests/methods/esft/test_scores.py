"""methods/esft/scores.py: gate and token scores by hand, their variants, budgets and samples,
files, two processes.
"""

import json

import pytest
import torch

from moe_runtime.hf.training.calibration import sample_batches
from moe_runtime.io.files import read_json
from moe_runtime.methods.esft.recorder import GateSums
from moe_runtime.methods.esft.runs import score_folder
from moe_runtime.methods.esft.scores import ExpertScores, score_experts
from papers.engine.tiny import train_tokenizer
from tests.hf import tiny
from tests.hf.dropin.test_layers import ids, stock
from tests.support import dist_scores
from tests.support.dist_launch import launch

# two samples of 2 tokens and 1 token; K = 2 of 3 experts; one layer: {0: 0.5, 1: 0.25}, {0: 0.5, 2:
# 0.125} and {1: 0.25, 2: 0.5}


def by_hand(layers: int = 1) -> GateSums:
    """Return the sums of these tokens, computed by hand; layer l has l + 1 times the gate
    values.
    """
    count = torch.tensor([2, 2, 2])
    gate = torch.tensor(
        [1.0, 0.5, 0.625],
        dtype=torch.float64,
    )
    # each of the first sample's 2 tokens has half the weight of the second sample's token
    sample_count = torch.tensor(
        [1.0, 1.5, 1.5],
        dtype=torch.float64,
    )
    sample_gate = torch.tensor(
        [0.5, 0.375, 0.5625],
        dtype=torch.float64,
    )
    more = torch.arange(1, layers + 1).double()[:, None]
    return GateSums(
        layers=tuple(range(1, layers + 1)),
        count=count.repeat(layers, 1),
        gate=gate * more,
        sample_count=sample_count.repeat(layers, 1),
        sample_gate=sample_gate * more,
        n_tokens=3,
        n_samples=2,
        top_k=2,
    )


WANT = {
    # sum over 3 tokens; the paper's mean over 2 samples of (1.0, .25, .125) / 2 and (0, .25, .5)
    ("gate", "v1"): [1 / 3, 0.5 / 3, 0.625 / 3],
    ("gate", "paper"): [
        0.25,
        (0.125 + 0.25) / 2,
        (0.0625 + 0.5) / 2,
    ],
    ("gate", "normalized"): [1 / 2.125, 0.5 / 2.125, 0.625 / 2.125],
    ("gate", "head"): [1.0, 1.0, 1.0],
    ("token", "v1"): [2 / 6, 2 / 6, 2 / 6],
    ("token", "paper"): [
        (1 + 0) / 4,
        (0.5 + 1) / 4,
        (0.5 + 1) / 4,
    ],
    ("token", "normalized"): [2 / 6, 2 / 6, 2 / 6],
    ("token", "head"): [1.0, 1.0, 1.0],
}


@pytest.mark.parametrize(("score", "variant"), WANT)
def test_variants_are_those_of_the_definitions(score, variant):
    want = torch.tensor(
        [WANT[score, variant]],
        dtype=torch.float64,
    )
    torch.testing.assert_close(
        ExpertScores.from_sums(by_hand()).scores(
            score,
            variant,
        ),
        want,
    )
    torch.testing.assert_close(
        getattr(
            ExpertScores.from_sums(by_hand(), variant),
            score,
        ),
        want,
    )


def test_sums_of_rows_and_columns():
    scores = ExpertScores.from_sums(by_hand(layers=4))
    for score, variant, dim in (
        ("token", "v1", 1),
        ("gate", "normalized", 1),
        ("gate", "head", 0),
        ("token", "head", 0),
    ):
        sums = scores.scores(score, variant).sum(dim)
        torch.testing.assert_close(
            sums,
            torch.ones_like(sums),
        )
    # gate scores sum to the mean gate mass of a token's top K
    torch.testing.assert_close(
        scores.gate.sum(1),
        by_hand(4).gate.sum(1) / 3,
    )


@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe", "gpt_oss", "ours"])
def test_token_scores_sum_to_one_and_the_model_is_left_as_it_was(kind):
    if kind == "ours":
        model = tiny.upcycled()
    else:
        model = stock(kind)
    model.train()
    model.model.layers[0].eval()
    modes = [module.training for module in model.modules()]
    scores = score_experts(model, [tiny.batch()])
    assert [module.training for module in model.modules()] == modes
    assert [p.grad for p in model.parameters() if p.grad is not None] == []
    assert_no_hooks(model)
    torch.testing.assert_close(
        scores.token.sum(1),
        torch.ones(2).double(),
    )
    assert scores.layers == (0, 1)
    assert scores.n_tokens == 24
    if kind == "ours":
        assert scores.num_shared == 1
        assert not scores.gate[:, 0].any()
        assert not scores.token[:, 0].any()
        assert scores.top_k == model.config.num_experts_per_tok


def assert_no_hooks(model) -> None:
    for module in model.modules():
        assert not module._forward_pre_hooks
        assert not module._forward_hooks


def test_dropout_is_off():
    model = stock("mixtral", attention_dropout=0.5)
    assert torch.equal(
        score_experts(model, [ids()]).gate,
        score_experts(model, [ids()]).gate,
    )


def test_stops_at_the_budget_and_counts_the_first_tokens():
    model = stock("mixtral")
    samples = ids(rows=4)
    batches = iter(samples.split(2))
    scores = score_experts(model, batches, n_tokens=17)
    assert scores.n_tokens == 17
    assert len(list(batches)) == 1  # not read
    mask = torch.tensor([[1] * 12, [1] * 5 + [0] * 7])
    expected = score_experts(
        model,
        [{"input_ids": samples[:2], "attention_mask": mask}],
    )
    assert torch.equal(
        scores.sums.count,
        expected.sums.count,
    )
    assert scores.sums.n_samples == 2
    # exactly at the budget: no further batch is read
    assert score_experts(model, samples.split(2), n_tokens=24).sums.n_samples == 2
    assert score_experts(model, samples.split(2), n_tokens=1000).n_tokens == 48


@pytest.mark.parametrize(
    ("batches", "options", "error"),
    [
        ([], {}, "routed no tokens"),
        ([ids()], {"n_tokens": 0}, "n_tokens must be an integer of at least 1"),
        ([ids()], {"variant": "v2"}, "variant must be one of v1, paper"),
    ],
)
def test_bad_input_is_named(batches, options, error):
    model = stock("mixtral")
    with pytest.raises(ValueError, match=error):
        score_experts(model, batches, **options)
    assert model.training
    assert_no_hooks(model)


def test_packed_samples_are_the_rows_in_a_drawn_order():
    rows = [
        list(
            range(
                10 * i,
                10 * i + 1 + i % 5,
            )
        )
        for i in range(40)
    ]

    def tokens(seed: int = 0) -> list[int]:
        samples = [batch["input_ids"] for batch in sample_batches(rows, 64, length=16, seed=seed)]
        assert [tuple(sample.shape) for sample in samples] == [(1, 16)] * 4
        return torch.cat(samples, 1)[0].tolist()

    packed = tokens()
    read = []
    while len(read) < 64:  # whole rows except the last one
        read += rows[packed[len(read)] // 10]
    assert packed == read[:64]
    assert len(set(packed)) == 64
    assert packed != sorted(packed)
    assert tokens() == packed
    assert tokens(seed=1) != packed


def test_single_samples_are_cut_and_padded():
    rows = [{"input_ids": [i + 1] * (1 + i % 7)} for i in range(20)]
    lengths = []
    for batch in sample_batches(rows, 30, length=4, packed=False, batch_size=3):
        ids = batch["input_ids"]
        mask = batch.get("attention_mask", torch.ones_like(ids))
        for row, live in zip(
            ids.tolist(),
            mask.sum(1).tolist(),
            strict=True,
        ):
            assert set(row) == {row[0]}
            assert live <= min(4, 1 + (row[0] - 1) % 7)
            lengths.append(live)
    assert sum(lengths) == 30
    assert max(lengths) == 4


@pytest.mark.parametrize("variant", ["v1", "paper", "head"])
def test_a_summary_comes_back_as_it_was(variant, tmp_path):
    file = tmp_path / "summary.json"
    scores = score_experts(
        tiny.upcycled(),
        [tiny.batch()],
        variant=variant,
    )
    scores.save(file)
    loaded = ExpertScores.load(file)
    for name in ("variant", "layers", "num_shared", "n_tokens", "top_k", "num_experts"):
        assert getattr(loaded, name) == getattr(scores, name)
    for other in ("v1", "paper", "normalized", "head"):
        for score in ("gate", "token"):
            assert torch.equal(
                loaded.scores(score, other),
                scores.scores(score, other),
            )
    assert ExpertScores.load(file, "normalized").variant == "normalized"
    values = read_json(file)
    # the official script reads these, by layer and expert; the shared expert is not listed
    assert list(values)[:2] == ["token_scores", "gate_scores"]
    assert list(values["gate_scores"]["1"]) == ["1", "2", "3"]


def test_a_rounded_summary_is_the_official_one(tmp_path):
    scores = score_experts(stock("qwen3_moe"), [ids()])
    scores.save(tmp_path / "summary.json", round=4)
    loaded = ExpertScores.load(tmp_path / "summary.json")
    assert loaded.sums is None
    assert loaded.n_tokens is None
    assert torch.equal(
        loaded.gate,
        scores.scores("gate", round=4),
    )
    with pytest.raises(ValueError, match="'paper' cannot be computed from 'v1' scores without"):
        loaded.scores("gate", "paper")
    expected = scores.scores("gate", "normalized")
    torch.testing.assert_close(
        loaded.scores("gate", "normalized"),
        expected,
        atol=2e-4,
        rtol=0,
    )


@pytest.mark.slow
def test_two_processes_score_as_one(tmp_path):
    base = tmp_path / "base"
    tokenizer = train_tokenizer(["Write 1: x = 1"] * 9, 300)
    stock("mixtral", vocab_size=len(tokenizer)).save_pretrained(base)
    tokenizer.save_pretrained(base)
    rows = [{"text": f"x = {i} " * (1 + i % 5)} for i in range(40)]
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    launch(
        dist_scores.__file__,
        2,
        tmp_path,
        str(tmp_path),
    )
    ranks = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    halves = [dist_scores.SAMPLES[:4], dist_scores.SAMPLES[3:]]
    expected = dist_scores.statistics(halves)
    for rank in ranks:
        torch.testing.assert_close(rank.pop("shrink"), expected, rtol=1e-5, atol=1e-7)
    assert ranks[0] == ranks[1]
    assert "A process has no batch" in ranks[0].pop("error")
    scores = {}
    for name in ("whole", "cut", "alone", "split"):
        scores[name] = ExpertScores.from_dict(ranks[0][name])
    assert scores["cut"].n_tokens == 25
    assert scores["alone"].n_tokens == 36
    expected = score_experts(
        dist_scores.make(),
        dist_scores.SAMPLES.split(1),
    )
    for one in (scores["whole"], scores["split"]):
        assert one.n_tokens == 84
        assert one.sums.n_samples == 7
        assert torch.equal(
            one.sums.count,
            expected.sums.count,
        )
        for variant in ("v1", "paper"):
            result = one.scores("gate", variant)
            whole = expected.scores("gate", variant)
            torch.testing.assert_close(
                result,
                whole,
                rtol=1e-5,
                atol=1e-7,
            )
    # the samples of a folder are distributed before batches are formed
    one = score_folder(
        base,
        data,
        tmp_path / "one.json",
        **dist_scores.FOLDER,
    )
    two = ExpertScores.load(tmp_path / "folder.json")
    assert two.n_tokens == one.n_tokens == 250
    assert two.sums.n_samples == one.sums.n_samples
    assert torch.equal(two.sums.count, one.sums.count)
    torch.testing.assert_close(
        two.gate,
        one.gate,
        rtol=1e-5,
        atol=1e-7,
    )
