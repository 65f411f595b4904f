"""methods/esft/scores.py: gate and token scores by hand, their variants, budgets and samples,
files, two processes.
"""

import json

import pytest
import torch

from moe_runtime.methods.esft.recorder import GateSums
from moe_runtime.methods.esft.runs import score_folder
from moe_runtime.methods.esft.scores import ExpertScores, sample_batches, score_experts
from papers.engine.tiny import train_tokenizer
from tests.hf import tiny
from tests.hf.dropin.test_layers import ids, stock
from tests.support import dist_scores
from tests.support.dist_launch import launch

# two samples, of 2 tokens and of 1; K = 2 of 3 experts; one layer
TOKENS = [[{0: 0.5, 1: 0.25}, {0: 0.5, 2: 0.125}], [{1: 0.25, 2: 0.5}]]


def by_hand(layers: int = 1) -> GateSums:
    """The sums of TOKENS, without the code under test; layer l has l + 1 times the gate values."""
    count, gate, s_count, s_gate = (torch.zeros(3, dtype=torch.float64) for _ in range(4))
    for sample in TOKENS:
        for token in sample:
            for e, g in token.items():
                count[e] += 1
                gate[e] += g
                s_count[e] += 1 / len(sample)
                s_gate[e] += g / len(sample)
    more = torch.arange(1, layers + 1).double()[:, None]
    return GateSums(
        layers=tuple(range(1, layers + 1)),
        count=count.long().repeat(layers, 1),
        gate=gate * more,
        sample_count=s_count.repeat(layers, 1),
        sample_gate=s_gate * more,
        n_tokens=3,
        n_samples=2,
        top_k=2,
    )


WANT = {
    # sum over 3 tokens; the paper's mean over 2 samples of (1.0, .25, .125) / 2 and (0, .25, .5)
    ("gate", "v1"): [1 / 3, 0.5 / 3, 0.625 / 3],
    ("gate", "paper"): [0.25, (0.125 + 0.25) / 2, (0.0625 + 0.5) / 2],
    ("gate", "normalized"): [1 / 2.125, 0.5 / 2.125, 0.625 / 2.125],
    ("gate", "head"): [1.0, 1.0, 1.0],
    ("token", "v1"): [2 / 6, 2 / 6, 2 / 6],
    ("token", "paper"): [(1 + 0) / 4, (0.5 + 1) / 4, (0.5 + 1) / 4],
    ("token", "normalized"): [2 / 6, 2 / 6, 2 / 6],
    ("token", "head"): [1.0, 1.0, 1.0],
}


@pytest.mark.parametrize(("score", "variant"), WANT)
def test_variants_are_those_of_the_definitions(score, variant):
    want = torch.tensor([WANT[score, variant]], dtype=torch.float64)
    torch.testing.assert_close(ExpertScores.from_sums(by_hand()).scores(score, variant), want)
    torch.testing.assert_close(getattr(ExpertScores.from_sums(by_hand(), variant), score), want)


def test_sums_of_rows_and_columns():
    scores = ExpertScores.from_sums(by_hand(layers=4))
    ones = torch.ones(4, dtype=torch.float64)
    for variant in ("v1", "paper", "normalized"):
        torch.testing.assert_close(scores.scores("token", variant).sum(1), ones)
    torch.testing.assert_close(scores.scores("gate", "normalized").sum(1), ones)
    for score in ("gate", "token"):
        torch.testing.assert_close(scores.scores(score, "head").sum(0), ones[:3])
    # to the mean gate mass of a token's top K
    torch.testing.assert_close(scores.gate.sum(1), by_hand(4).gate.sum(1) / 3)


def test_rounding_is_that_of_decimal_numbers():
    scores = ExpertScores.from_sums(by_hand())
    assert scores.scores("gate", round=4).tolist() == [[0.3333, 0.1667, 0.2083]]
    assert scores.scores("gate", round=None).tolist() == scores.gate.tolist()


# of models
@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe", "gpt_oss", "ours"])
def test_token_scores_sum_to_one_and_the_model_is_left_as_it_was(kind):
    model = tiny.upcycled() if kind == "ours" else stock(kind)
    model.train()
    model.model.layers[0].eval()
    modes = [module.training for module in model.modules()]
    scores = score_experts(model, [tiny.batch()])
    assert [module.training for module in model.modules()] == modes
    assert all(p.grad is None for p in model.parameters()) and not any(
        m._forward_pre_hooks for m in model.modules()
    )
    torch.testing.assert_close(scores.token.sum(1), torch.ones(2).double())
    assert (scores.layers, scores.n_tokens) == ((0, 1), 24) and scores.token.dtype == torch.float64
    if kind == "ours":
        assert (
            scores.num_shared == 1 and not scores.gate[:, 0].any() and not scores.token[:, 0].any()
        )
        assert scores.top_k == model.config.num_experts_per_tok


def test_dropout_is_off():
    model = stock("mixtral", attention_dropout=0.5)
    a, b = (score_experts(model, [ids()]) for _ in range(2))
    assert torch.equal(a.gate, b.gate)


def test_stops_at_the_budget_and_counts_the_first_tokens():
    model = stock("mixtral")
    samples = ids(rows=4)
    seen = []

    def batches():
        for rows in samples.split(2):
            seen.append(len(rows))
            yield {"input_ids": rows, "labels": rows}

    scores = score_experts(model, batches(), n_tokens=17)
    assert scores.n_tokens == 17 and seen == [2]
    mask = torch.tensor([[1] * 12, [1] * 5 + [0] * 7])
    want = score_experts(model, [{"input_ids": samples[:2], "attention_mask": mask}])
    assert torch.equal(scores.sums.count, want.sums.count) and scores.sums.n_samples == 2
    # to the token: no further batch
    assert score_experts(model, batches(), n_tokens=24).sums.n_samples == 2
    assert score_experts(model, batches(), n_tokens=1000).n_tokens == 48


@pytest.mark.parametrize(
    ("batches", "options", "error"),
    [
        ([], {}, "routed no tokens"),
        ([ids()], {"n_tokens": 0}, "n_tokens must be an integer of at least 1"),
        ([ids()], {"variant": "v2"}, "variant must be one of v1, paper"),
    ],
)
def test_bad_input_is_named_and_nothing_written(batches, options, error, tmp_path):
    model = stock("mixtral")
    with pytest.raises(ValueError, match=error):
        score_experts(model, batches, log_dir=tmp_path / "logs", **options)
    assert not list(tmp_path.iterdir()) and model.training
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in model.modules())


# samples
def test_packed_samples_are_the_rows_in_a_drawn_order():
    rows = [list(range(10 * i, 10 * i + 1 + i % 5)) for i in range(40)]
    got = [batch["input_ids"] for batch in sample_batches(rows, 64, length=16)]
    assert [tuple(one.shape) for one in got] == [(1, 16)] * 4
    flat = torch.cat(got, 1)[0].tolist()
    # whole rows but for the last one, and not in their order
    starts = [row for row in rows if row[0] in flat]
    assert sorted(flat) == sorted(
        token for row in starts for token in row if token in flat
    ) and flat != sorted(flat)
    again = [batch["input_ids"] for batch in sample_batches(rows, 64, length=16)]
    other = [batch["input_ids"] for batch in sample_batches(rows, 64, length=16, seed=1)]
    assert all(map(torch.equal, got, again)) and not torch.equal(
        torch.cat(other, 1), torch.cat(got, 1)
    )


def test_single_samples_are_cut_and_padded():
    rows = [{"input_ids": [i + 1] * (1 + i % 7)} for i in range(20)]
    batches = list(sample_batches(rows, 30, length=4, packed=False, batch_size=3))
    masks = [batch.get("attention_mask", torch.ones_like(batch["input_ids"])) for batch in batches]
    assert (
        sum(int(mask.sum()) for mask in masks) == 30 and max(mask.shape[1] for mask in masks) == 4
    )
    for batch, mask in zip(batches, masks, strict=True):
        for row, live in zip(batch["input_ids"], mask, strict=True):
            assert len(set(row.tolist())) == 1 and int(live.sum()) <= min(
                4, 1 + (int(row[0]) - 1) % 7
            )


# files
@pytest.mark.parametrize("variant", ["v1", "paper", "head"])
def test_a_summary_comes_back_as_it_was(variant, tmp_path):
    scores = score_experts(tiny.upcycled(), [tiny.batch()], variant=variant, pairs=True)
    scores.save(tmp_path / "summary.json")
    loaded = ExpertScores.load(tmp_path / "summary.json")
    assert (loaded.variant, loaded.layers, loaded.num_shared) == (variant, (0, 1), 1)
    assert (loaded.n_tokens, loaded.top_k, loaded.num_experts) == (24, 2, 4)
    for other in ("v1", "paper", "normalized", "head"):
        for score in ("gate", "token"):
            assert torch.equal(loaded.scores(score, other), scores.scores(score, other))
    assert torch.equal(loaded.sums.pairs, scores.sums.pairs)
    assert ExpertScores.load(tmp_path / "summary.json", "normalized").variant == "normalized"
    values = json.loads((tmp_path / "summary.json").read_text())
    # the official script reads these, by layer and expert; the shared expert is no choice
    assert list(values)[:2] == ["token_scores", "gate_scores"] and list(
        values["gate_scores"]["1"]
    ) == ["1", "2", "3"]


def test_a_rounded_summary_is_the_official_one(tmp_path):
    scores = score_experts(stock("qwen3_moe"), [ids()])
    scores.save(tmp_path / "summary.json", round=4)
    loaded = ExpertScores.load(tmp_path / "summary.json")
    assert loaded.sums is None and loaded.n_tokens is None
    assert torch.equal(loaded.gate, scores.scores("gate", round=4))
    with pytest.raises(
        ValueError, match="Variant 'paper' cannot be computed from 'v1' scores without their sums"
    ):
        loaded.scores("gate", "paper")
    torch.testing.assert_close(
        loaded.scores("gate", "normalized"), scores.scores("gate", "normalized"), atol=2e-4, rtol=0
    )


# over processes
def test_two_processes_score_as_one(tmp_path):
    tokenizer = train_tokenizer(["Write 1: x = 1"] * 9, 300)
    stock("mixtral", vocab_size=len(tokenizer)).save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    rows = [{"text": f"x = {i} " * (1 + i % 5)} for i in range(40)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    one = score_folder(
        tmp_path / "base", tmp_path / "rows.jsonl", tmp_path / "one.json", **dist_scores.FOLDER
    )
    launch(dist_scores.__file__, 2, tmp_path, str(tmp_path))
    ranks = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    assert ranks[0] == ranks[1]
    found = {
        name: ExpertScores.from_dict(ranks[0][name]) for name in ("whole", "cut", "alone", "split")
    }
    model = dist_scores.make()
    want = score_experts(model, dist_scores.SAMPLES.split(1), pairs=True)
    for name in ("whole", "split"):
        got = found[name]
        assert (got.n_tokens, got.sums.n_samples) == (84, 7) and torch.equal(
            got.sums.count, want.sums.count
        )
        torch.testing.assert_close(got.gate, want.gate, rtol=1e-5, atol=1e-7)
    assert torch.equal(found["whole"].sums.pairs, want.sums.pairs)
    assert found["cut"].n_tokens == 25 and found["alone"].n_tokens == 36
    errors = ranks[0]["errors"]
    assert (
        "logs already exists" in errors[0]
        and "A process has no batch" in errors[1]
        and len(errors) == 2
    )
    logs = ExpertScores.from_logs(tmp_path / "logs", top_k=2)
    assert sorted(path.name for path in (tmp_path / "logs").iterdir()) == ["rank_0", "rank_1"]
    assert (
        torch.equal(logs.sums.count, want.sums.count)
        and logs.n_tokens == 84
        and logs.sums.n_samples == 7
    )
    torch.testing.assert_close(
        logs.scores("gate", "paper"), want.scores("gate", "paper"), rtol=0, atol=5e-5
    )
    # the samples of a folder's rows, dealt out before batches are made
    two = ExpertScores.load(tmp_path / "folder.json")
    assert (two.n_tokens, two.sums.n_samples) == (
        one.n_tokens,
        one.sums.n_samples,
    ) and two.n_tokens == 250
    assert torch.equal(two.sums.count, one.sums.count)
    torch.testing.assert_close(two.gate, one.gate, rtol=1e-5, atol=1e-7)
