"""papers/esft/esft_counts.py and counts.py: what the figures show, on real routing
and on tiny models.
"""

import json

import pytest

from moe_runtime.methods.esft.scores import ExpertScores
from moe_runtime.methods.esft.selection import ExpertSelection, select_experts
from papers.esft import counts as esft_counts
from tests.methods.esft.test_selection import LAYERS, TASKS, published, scores_of, sums_of


@pytest.fixture(scope="module")
def real() -> dict[str, ExpertScores]:
    return {task: ExpertScores.from_sums(sums_of(task)) for task in TASKS}


def same_after_json(result) -> None:
    assert type(result)(**json.loads(json.dumps(result.to_dict()))).to_dict() == json.loads(
        json.dumps(result.to_dict())
    )


# Fig. 2
def test_gate_mass_by_hand():
    mass = esft_counts.gate_mass({"a": scores_of([0.1, 0.3, 0.0, 0.0], [0.0, 0.1, 0.1, 0.2])})
    assert mass.share == [pytest.approx([(0.75 + 0.5) / 2, (0.25 + 0.25) / 2, 0.125, 0])]
    assert mass.cumulative == [pytest.approx([0.625, 0.875, 1, 1])]
    assert mass.share_sd == [pytest.approx([0.125, 0, 0.125, 0])]
    assert mass.cumulative_sd == [pytest.approx([0.125, 0.125, 0, 0])]
    assert mass.experts_for(0.5) == [1]
    assert mass.experts_for(0.63) == [2]
    assert mass.experts_for(1.0) == [3]
    same_after_json(mass)


# Fig. 4
def test_counts_are_those_of_the_selections(real):
    selections = {task: select_experts(scores, 0.2, "token") for task, scores in real.items()}
    found = esft_counts.expert_counts(selections, 64)
    assert list(found.layers) == list(LAYERS)
    for task, row, share in zip(TASKS, found.counts, found.shares, strict=True):
        places = published(task, "config_token_p0.2") > 0
        assert sum(row) == pytest.approx(int(places.sum()), abs=1)
        assert share == pytest.approx(sum(row) / 26 / 64)
    same_after_json(found)
    some = esft_counts.expert_counts({"a": ExpertSelection(experts={2: (0, 1)})}, 4, layers=[3, 2])
    assert some.layers == [2, 3]
    assert some.counts == [[2, 0]]


# pictures
def drawn(figure, tmp_path) -> str:
    """All text of a figure that can be saved."""
    figure.savefig(tmp_path / "figure.png", dpi=40)
    assert (tmp_path / "figure.png").stat().st_size > 1000
    return " ".join(
        t.get_text() for t in figure.findobj(lambda artist: hasattr(artist, "get_text"))
    )


def test_pictures_show_their_numbers(real, tmp_path):
    text = drawn(esft_counts.draw_gate_mass(esft_counts.gate_mass(real)), tmp_path)
    for task in TASKS:
        assert task in text
    assert "balanced" in text
    counts = esft_counts.ExpertCounts(
        tasks=["law"], layers=[1, 2], counts=[[3, 17]], num_experts=64
    )
    text = drawn(esft_counts.draw_counts(counts), tmp_path)
    assert "17" in text
    assert "15.6% of all" in text
    many = esft_counts.gate_mass({str(i): scores_of([0.5, 0.5]) for i in range(12)})
    assert len(esft_counts.draw_gate_mass(many).axes[0].get_lines()) == 13
