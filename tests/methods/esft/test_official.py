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
    sums = read_logs(write(tmp_path, layer1=LOG, layer2=LOG), pairs=True)
    assert (sums.layers, sums.n_tokens, sums.n_samples, sums.top_k) == ((1, 2), 3, 2, 2)
    assert sums.count[0].tolist() == [2, 2, 2] and sums.gate[1].tolist() == [1.0, 0.375, 0.75]
    assert sums.sample_gate[0].tolist() == [0.25 + 0.5, 0.0625 + 0.25, 0.375]
    assert sums.sample_count[0].tolist() == [0.5 + 1, 0.5 + 1, 1.0]
    assert sums.pairs[0].tolist() == [[2, 1, 1], [1, 2, 1], [1, 1, 2]]
    assert read_logs(tmp_path, num_experts=5).count.tolist() == [[2, 2, 2, 0, 0]] * 2
    assert read_logs(tmp_path, top_k=1).n_tokens == 6
    write(tmp_path / "many", layer1="4095\t5000\t\t0.5\t0.25\n")
    assert read_logs(tmp_path / "many", num_experts=5001).gate[0, [4095, 5000]].tolist() == [
        0.5,
        0.25,
    ]


def test_ranks_add_up(tmp_path):
    lines = LOG.splitlines(keepends=True)
    for rank, text in ((0, lines[0]), (1, lines[1])):
        write(tmp_path / "ranks" / f"rank_{rank}", layer1=text, layer2=text)
    want = read_logs(write(tmp_path / "one", layer1=LOG, layer2=LOG))
    got = read_logs(tmp_path / "ranks")
    assert (got.n_tokens, got.n_samples) == (3, 2) and torch.equal(got.gate, want.gate)
    assert torch.equal(got.sample_gate, want.sample_gate)


@pytest.mark.parametrize("kind", ["qwen3_moe", "ours"])
@pytest.mark.parametrize("padding", [False, True])
def test_logs_that_were_written_give_the_scores(kind, padding, tmp_path):
    model, rows = (tiny.upcycled(), tiny.batch(4)) if kind == "ours" else (stock(kind), ids(4))
    batch = {"input_ids": rows}
    if padding:
        batch["attention_mask"] = torch.tensor(
            [[1] * (12 - 2 * i) + [0] * (2 * i) for i in range(4)]
        )
    scores = score_experts(model, [batch], 40, log_dir=tmp_path / "logs", pairs=True)
    assert scores.n_tokens == (36 if padding else 40)
    logs = read_logs(tmp_path / "logs", num_experts=scores.num_experts, pairs=True)
    assert (logs.n_tokens, logs.n_samples, logs.top_k) == (scores.n_tokens, 4, scores.top_k)
    assert torch.equal(logs.count, scores.sums.count) and torch.equal(logs.pairs, scores.sums.pairs)
    # 4 digits a token
    for name in ("gate", "sample_gate"):
        off = (getattr(logs, name) - getattr(scores.sums, name)).abs().max()
        assert off <= 5e-5 * scores.n_tokens, name
    again = ExpertScores.from_logs(tmp_path / "logs", "paper")
    torch.testing.assert_close(
        again.gate, scores.scores("gate", "paper")[:, : again.num_experts], rtol=0, atol=5e-5
    )
    lines = (tmp_path / "logs" / "expert_weights_1.txt").read_text().splitlines()
    assert len(lines) == 4 and all(len(line.split("\t\t")) == 2 for line in lines)


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
        (
            {"layer1": "0\t1\t0.5\t0.5\n"},
            {},
            "expert_weights_1.txt, line 1, is .*expected ids .* two tabs",
        ),
        ({"layer1": LOG + "0\t1\t\t0.5\n"}, {}, "expert_weights_1.txt, line 3, is"),
        ({"layer1": LOG + "\n"}, {}, "line 3, is"),
        ({"layer1": "0\t-1\t\t0.5\t0.5\n"}, {}, "line 1, is"),
        ({"layer1": "0\t1\t\t0.5\tnan\n"}, {}, "line 1, is"),
        ({"layer1": LOG}, {"top_k": 3}, "Line 1 of .*expert_weights_1.txt does not fit top_k 3"),
        ({"layer1": LOG}, {"top_k": 4}, "Line 1 of .* does not fit top_k 4"),
        ({"layer1": LOG}, {"num_experts": 2}, r"line 1, is .* ids below num_experts \(2\)"),
        (
            {"layer1": LOG + f"0\t{2**62}\t\t0.5\t0.5\n"},
            {},
            r"_1.txt, line 3, is .* ids below num_experts \(4096\)",
        ),
        ({"layer1": LOG}, {"top_k": 0}, "top_k must be an integer of at least 1"),
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
    assert (scores.layers, scores.num_experts, scores.variant, scores.n_tokens) == (
        (1, 10),
        3,
        "v1",
        None,
    )
    assert select_experts(scores, 0.3, "gate").experts == {1: (0, 1), 10: (2,)}
    assert select_experts(scores, 0.3, "gate", "normalized").experts == {1: (0,), 10: (2,)}
    assert select_experts(scores, 0.75, "token").experts == {1: (0, 1), 10: (2, 1)}


def test_a_summary_of_the_current_script_is_known_by_its_columns(tmp_path):
    scores = ExpertScores.load(save(tmp_path, summary()))
    columns = {
        f"{name}_scores": {
            str(layer): {str(e): round(value, 4) for e, value in enumerate(row)}
            for layer, row in zip(scores.layers, scores.scores(name, "head").tolist(), strict=True)
        }
        for name in ("token", "gate")
    }
    head = ExpertScores.load(save(tmp_path, columns))
    assert head.variant == "head" and select_experts(head, 0.5, "token", "head").experts == {
        1: (0,),
        10: (2,),
    }
    with pytest.raises(
        ValueError, match="Variant 'v1' cannot be computed from 'head' scores without their sums"
    ):
        select_experts(head, 0.5, variant="v1")
    assert ExpertScores.load(save(tmp_path, summary()), "paper").variant == "paper"
    derived = ExpertScores.load(save(tmp_path, summary(variant="v1")), "normalized")
    assert derived.variant == "normalized" and (derived.gate.sum(1) - 1).abs().max() < 1e-12


ROW = {"0": 0.5, "1": 0.3, "2": 0.2}


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"gate_scores": None}, "must have token_scores and gate_scores"),
        ({"token_scores": {}}, "must have token_scores and gate_scores"),
        ({"gate_scores": {"1": ROW}}, "for the same layers and experts"),
        ({"gate_scores": {"1": ROW, "ten": ROW}}, "layer 'ten' of gate_scores"),
        ({"gate_scores": {"1": ROW, "10": []}}, "layer '10' of gate_scores is"),
        ({"gate_scores": {"1": ROW, "10": ROW | {"2": -1}}}, "layer '10' of gate_scores is .*-1"),
        (
            {"gate_scores": {"1": ROW, "10": ROW | {"2": "x"}}},
            "expected a number of at least 0 for each expert",
        ),
        ({"gate_scores": {"1": ROW, "10": {"0": 0.5, "2": 0.5}}}, "layer '10' of gate_scores is"),
        ({"token_scores": {"1": {f"{10**12}": 1.0}}}, "layer '1' of token_scores is"),
        ({"gate_scores": {"1": ROW, "10": ROW | {"e": 1}}}, "layer '10' of gate_scores is"),
        ({"variant": "v3"}, "variant must be one of"),
    ],
)
def test_a_bad_summary_is_named(changes, error, tmp_path):
    with pytest.raises(ValueError, match=error) as raised:
        ExpertScores.load(save(tmp_path, summary(**changes)))
    assert "summary.json" in str(raised.value)
