"""papers/esft/esft_counts.py and counts.py: the figures, on published routing data and on tiny
models.
"""

import pytest

from moe_runtime.methods.esft.scores import ExpertScores
from moe_runtime.methods.esft.selection import ExpertSelection, select_experts
from papers.esft import counts as esft_counts
from tests.methods.esft.test_selection import LAYERS, TASKS, published, scores_of, sums_of


@pytest.fixture(scope="module")
def real() -> dict[str, ExpertScores]:
    return {task: ExpertScores.from_sums(sums_of(task)) for task in TASKS}


# Fig. 2
def test_gate_mass_by_hand():
    scores = scores_of([0.1, 0.3, 0.0, 0.0], [0.0, 0.1, 0.1, 0.2])
    mass = esft_counts.gate_mass({"a": scores})
    assert mass.cumulative == [pytest.approx([0.625, 0.875, 1, 1])]
    assert mass.cumulative_sd == [pytest.approx([0.125, 0.125, 0, 0])]
    for share, experts in ((0.5, 1), (0.63, 2), (1.0, 3)):
        assert mass.experts_for(share) == [experts]


# Fig. 4
def test_counts_are_those_of_the_selections(real):
    selections = {task: select_experts(scores, 0.2, "token") for task, scores in real.items()}
    counted = esft_counts.expert_counts(selections, 64, LAYERS)
    assert list(counted.layers) == list(LAYERS)
    for task, row, share in zip(
        TASKS,
        counted.counts,
        counted.shares,
        strict=True,
    ):
        expected = (published(task, "config_token_p0.2") > 0).sum()
        assert sum(row) == pytest.approx(int(expected), abs=1)
        assert share == pytest.approx(sum(row) / 26 / 64)
    some = esft_counts.expert_counts(
        {"a": ExpertSelection(experts={2: (0, 1)})},
        4,
        layers=[2, 3],
    )
    assert some.layers == [2, 3]
    assert some.counts == [[2, 0]]
