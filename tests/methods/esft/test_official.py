"""methods/esft/official.py: the official logs and summaries, written and read, and what is wrong
with bad ones.
"""

import json
from pathlib import Path

import pytest
import torch

from moe_runtime.methods.esft.official import read_logs
from moe_runtime.methods.esft.scores import ExpertScores, score_experts
from moe_runtime.methods.esft.selection import select_experts
from tests.hf import tiny
from tests.hf.dropin.test_layers import ids, stock

# two samples of 2 tokens and 1, top 2
LOG = "0\t2\t2\t1\t\t0.5\t0.25\t0.5\t0.125\n1\t0\t\t0.25\t0.5\n"


def write(folder: Path, **logs: str) -> Path:
    """Logs by layer, as `layer1`, in a folder; returned."""
    folder.mkdir(parents=True, exist_ok=True)
    for layer, text in logs.items():
        (folder / f"expert_weights_{layer.removeprefix('layer')}.txt").write_text(text)
    return folder


def test_a_log_is_read_as_the_official_script_does(tmp_path):
    sums = read_logs(
        write(tmp_path, layer1=LOG, layer2=LOG),
        pairs=True,
    )
    assert (sums.layers, sums.n_tokens, sums.n_samples, sums.top_k) == ((1, 2), 3, 2, 2)
    assert sums.count[0].tolist() == [2, 2, 2]
    assert sums.gate[1].tolist() == [1.0, 0.375, 0.75]
    assert sums.sample_gate[0].tolist() == [0.75, 0.3125, 0.375]
    assert sums.sample_count[0].tolist() == [1.5, 1.5, 1.0]
    assert sums.pairs[0].tolist() == [
        [2, 1, 1],
        [1, 2, 1],
        [1, 1, 2],
    ]
    assert read_logs(tmp_path, num_experts=5).count.tolist() == [[2, 2, 2, 0, 0]] * 2
    assert read_logs(tmp_path, top_k=1).n_tokens == 6
    many = write(tmp_path / "many", layer1="4095\t5000\t\t0.5\t0.25\n")
    gate = read_logs(many, num_experts=5001).gate[0]
    assert gate[[4095, 5000]].tolist() == [0.5, 0.25]


def test_ranks_add_up(tmp_path):
    """In the order of their numbers, which shows where one number is large."""
    large = "0\t2\t\t1e16\t0.25\n"
    small = "0\t2\t\t0.5\t0.25\n"
    lines = [small, small, large, *[small] * 8]
    for rank, line in enumerate(lines):
        write(
            tmp_path / "ranks" / f"rank_{rank}",
            layer1=line,
            layer2=line,
        )
    whole = "".join(lines)
    one = read_logs(write(tmp_path / "one", layer1=whole, layer2=whole))
    ranks = read_logs(tmp_path / "ranks")
    assert (ranks.n_tokens, ranks.n_samples) == (11, 11)
    assert torch.equal(ranks.gate, one.gate)
    assert torch.equal(ranks.sample_gate, one.sample_gate)


@pytest.mark.parametrize("kind", ["qwen3_moe", "ours"])
@pytest.mark.parametrize("padding", [False, True])
def test_logs_that_were_written_give_the_scores(kind, padding, tmp_path):
    if kind == "ours":
        model = tiny.upcycled()
        batch = {"input_ids": tiny.batch(4)}
    else:
        model = stock(kind)
        batch = {"input_ids": ids(4)}
    n_tokens = 40
    if padding:
        n_tokens = 36
        lengths = torch.tensor([12, 10, 8, 6])
        batch["attention_mask"] = (torch.arange(12) < lengths[:, None]).long()
    scores = score_experts(
        model,
        [batch],
        40,
        log_dir=tmp_path,
        pairs=True,
    )
    sums = scores.sums
    logs = read_logs(tmp_path, num_experts=scores.num_experts, pairs=True)
    assert (logs.n_tokens, logs.n_samples, logs.top_k) == (n_tokens, 4, scores.top_k)
    assert torch.equal(logs.count, sums.count)
    assert torch.equal(logs.pairs, sums.pairs)
    bound = 5e-5 * n_tokens  # 4 digits a token
    torch.testing.assert_close(
        logs.gate,
        sums.gate,
        rtol=0,
        atol=bound,
    )
    torch.testing.assert_close(
        logs.sample_gate,
        sums.sample_gate,
        rtol=0,
        atol=bound,
    )
    gate = ExpertScores.from_logs(tmp_path, "paper").gate
    expected = scores.scores("gate", "paper")[:, : gate.shape[1]]
    torch.testing.assert_close(
        gate,
        expected,
        rtol=0,
        atol=5e-5,
    )
    lines = (tmp_path / "expert_weights_1.txt").read_text().splitlines()
    assert [line.count("\t\t") for line in lines] == [1] * 4


@pytest.mark.parametrize(
    ("logs", "options", "error"),
    [
        ({}, {}, "has no logs. Expected expert_weights_{layer}.txt"),
        ({"layer1": LOG, "layer2": LOG, "layer4": LOG}, {}, "has no log expert_weights_3.txt in"),
        (
            {"layer1": LOG, "layer2": "", "layer1000000000000": LOG},
            {},
            "has no log expert_weights_2.txt in",
        ),
        ({"layer1": LOG}, {"layers": (1, 5)}, "has no log expert_weights_5.txt in"),
        (
            {"layer1": LOG, "layer2": LOG.splitlines()[0]},
            {},
            "has 2 tokens in 1 lines, but the log of the first layer has 3 in 2",
        ),
        ({"layer1": "0\t1\t0.5\t0.5\n"}, {}, "_1.txt, line 1, is .*expected ids .* two tabs"),
        ({"layer1": LOG + "0\t1\t\t0.5\n"}, {}, "expert_weights_1.txt, line 3, is"),
        ({"layer1": LOG + "\n"}, {}, "line 3, is"),
        ({"layer1": "0\t-1\t\t0.5\t0.5\n"}, {}, "line 1, is"),
        ({"layer1": "0\t1\t\t0.5\tnan\n"}, {}, "line 1, is"),
        ({"layer1": LOG}, {"top_k": 4}, "Line 1 of .* does not fit top_k 4"),
        ({"layer1": LOG}, {"num_experts": 2}, r"line 1, is .* ids below num_experts \(2\)"),
    ],
)
def test_bad_logs_are_named(logs, options, error, tmp_path):
    with pytest.raises(ValueError, match=error):
        read_logs(write(tmp_path, **logs), **options)


# summaries
def summary(**changes) -> dict:
    """An official summary of two layers and three experts, v1."""
    token = {"1": {"0": 0.5, "1": 0.3, "2": 0.2}, "10": {"0": 0.1, "1": 0.2, "2": 0.7}}
    gate = {
        layer: {e: round(value / 2, 4) for e, value in row.items()} for layer, row in token.items()
    }
    return {"token_scores": token, "gate_scores": gate} | changes


def save(folder: Path, values: dict) -> Path:
    (folder / "summary.json").write_text(json.dumps(values))
    return folder / "summary.json"


def test_a_summary_alone_is_enough_to_select(tmp_path):
    scores = ExpertScores.load(save(tmp_path, summary()))
    assert (scores.layers, scores.num_experts) == ((1, 10), 3)
    assert (scores.variant, scores.n_tokens) == ("v1", None)
    for p, options, first, second in (
        (0.3, ("gate",), (0, 1), (2,)),
        (0.3, ("gate", "normalized"), (0,), (2,)),
        (0.75, ("token",), (0, 1), (2, 1)),
    ):
        assert select_experts(scores, p, *options).experts == {1: first, 10: second}


def test_a_summary_of_the_current_script_is_known_by_its_columns(tmp_path):
    scores = ExpertScores.load(save(tmp_path, summary()))
    columns = {}
    for name in ("token", "gate"):
        table = scores.scores(name, "head", round=4).tolist()
        rows = [{str(e): value for e, value in enumerate(row)} for row in table]
        columns[f"{name}_scores"] = {"1": rows[0], "10": rows[1]}
    head = ExpertScores.load(save(tmp_path, columns))
    assert head.variant == "head"
    assert select_experts(head, 0.5, "token", "head").experts == {1: (0,), 10: (2,)}
    with pytest.raises(ValueError, match="'v1' cannot be computed from 'head' scores without"):
        select_experts(head, 0.5, variant="v1")
    assert ExpertScores.load(save(tmp_path, summary()), "paper").variant == "paper"
    derived = ExpertScores.load(
        save(tmp_path, summary(variant="v1")),
        "normalized",
    )
    assert derived.variant == "normalized"
    torch.testing.assert_close(
        derived.gate.sum(1),
        torch.ones(2).double(),
    )


ROW = {"0": 0.5, "1": 0.3, "2": 0.2}


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"gate_scores": None}, "must have token_scores and gate_scores"),
        ({"gate_scores": {"1": ROW}}, "for the same layers and experts"),
        ({"gate_scores": {"1": ROW, "ten": ROW}}, "layer 'ten' of gate_scores"),
        ({"gate_scores": {"1": ROW, "10": []}}, "layer '10' of gate_scores is"),
        ({"gate_scores": {"1": ROW, "10": ROW | {"2": -1}}}, "layer '10' of gate_scores is .*-1"),
        ({"gate_scores": {"1": ROW, "10": ROW | {"2": "x"}}}, "expected a number of at least 0"),
        ({"gate_scores": {"1": ROW, "10": {"0": 0.5, "2": 0.5}}}, "layer '10' of gate_scores is"),
        ({"token_scores": {"1": {f"{10**12}": 1.0}}}, "layer '1' of token_scores is"),
        ({"variant": "v3"}, "variant must be one of"),
    ],
)
def test_a_bad_summary_is_named(changes, error, tmp_path):
    with pytest.raises(ValueError, match=error) as raised:
        ExpertScores.load(save(tmp_path, summary(**changes)))
    assert "summary.json" in str(raised.value)
