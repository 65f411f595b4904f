"""methods/esft/official.py: the official summaries, and the errors of bad ones."""

import json
from pathlib import Path

import pytest

from moe_runtime.methods.esft.scores import ExpertScores
from moe_runtime.methods.esft.selection import select_experts


def summary(**changes) -> dict:
    """Return an official summary (v1) of two layers and three experts."""
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


ROW = {"0": 0.5, "1": 0.3, "2": 0.2}


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"gate_scores": None}, "must have token_scores and gate_scores"),
        ({"gate_scores": {"1": ROW}}, "for the same layers and experts"),
        ({"gate_scores": {"1": ROW, "ten": ROW}}, "layer 'ten' of gate_scores"),
        ({"gate_scores": {"1": ROW, "10": ROW | {"2": -1}}}, "layer '10' of gate_scores is .*-1"),
        ({"gate_scores": {"1": ROW, "10": {"0": 0.5, "2": 0.5}}}, "layer '10' of gate_scores is"),
        ({"token_scores": {"1": {f"{10**12}": 1.0}}}, "layer '1' of token_scores is"),
        ({"variant": "v3"}, "variant must be one of"),
    ],
)
def test_a_bad_summary_is_named(changes, error, tmp_path):
    with pytest.raises(ValueError, match=error) as raised:
        ExpertScores.load(save(tmp_path, summary(**changes)))
    assert "summary.json" in str(raised.value)
