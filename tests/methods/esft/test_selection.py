"""methods/esft/selection.py: Eq. (8), the published selections of four tasks, the controls, the
configuration file.
"""

import copy
import json
from pathlib import Path

import numpy
import pytest
import torch

from moe_runtime.hf.dropin.layers import numbered_layers
from moe_runtime.io.files import read_json
from moe_runtime.methods import esft
from moe_runtime.methods.esft.recorder import GateSums
from moe_runtime.methods.esft.scores import ExpertScores, score_experts
from moe_runtime.methods.esft.selection import (
    ExpertSelection,
    check_selection,
    random_experts,
    select_experts,
)
from tests.hf import tiny
from tests.hf.dropin.test_layers import stock
from tests.support.stock_moe import batch

PUBLISHED = numpy.load(Path(__file__).parents[2] / "data" / "esft_routing_4_tasks.npz")
TASKS = ("intent", "law", "summary", "translation")
LAYERS = tuple(range(1, 27))


def published(task: str, name: str) -> torch.Tensor:
    return torch.tensor(PUBLISHED[f"shipped/{task}/{name}"])


def sums_of(task: str) -> GateSums:
    """Return the sums of the task's published logs; they do not contain sample means."""
    count = published(task, "count").long()
    gate = published(task, "gate_sum")
    n_tokens = int(published(task, "n_tokens"))
    nothing = torch.zeros(26, 64, dtype=torch.float64)
    return GateSums(
        layers=LAYERS,
        count=count,
        gate=gate,
        sample_count=nothing,
        sample_gate=nothing,
        n_tokens=n_tokens,
        n_samples=1,
        top_k=6,
    )


def scores_of(*rows: list[float], **options) -> ExpertScores:
    table = torch.tensor(rows, dtype=torch.float64)
    return ExpertScores(
        layers=tuple(range(1, len(rows) + 1)),
        gate=table,
        token=table,
        **options,
    )


@pytest.mark.parametrize("score", ["gate", "token"])
@pytest.mark.parametrize("task", TASKS)
def test_published_scores_are_reproduced(task, score):
    scores = ExpertScores.from_sums(sums_of(task))
    want = published(task, f"{score}_scores")
    assert (scores.scores(score) - want).abs().max() <= 5e-5
    # including rounding, to the last digit
    assert torch.equal(
        scores.scores(score, round=4),
        want,
    )


@pytest.mark.parametrize("source", ["sums", "summary"])
@pytest.mark.parametrize("task", TASKS)
def test_published_selections_are_reproduced(task, source, tmp_path):
    scores = ExpertScores.from_sums(sums_of(task))
    digits = 4
    if source == "summary":
        scores.save(tmp_path / "summary.json", round=4)
        scores = ExpertScores.load(tmp_path / "summary.json")
        digits = None
    selection = select_experts(scores, 0.2, "token", round=digits)
    # the rank of each published expert in the order of selection, from 1; 0 for the others
    places = published(task, "config_token_p0.2")
    for layer, row in zip(LAYERS, places, strict=True):
        order = row.argsort()[64 - row.count_nonzero() :]
        assert selection.experts[layer] == tuple(order.tolist())
    assert selection.num_experts == places.count_nonzero() > 26 * 3


@pytest.mark.parametrize(
    ("row", "p", "want"),
    [
        pytest.param(
            [0.1, 0.4, 0.3, 0.2],
            0.4,
            (1,),
            id="reached exactly",
        ),
        pytest.param(
            [0.1, 0.4, 0.3, 0.2],
            0.41,
            (1, 2),
            id="one more",
        ),
        pytest.param(
            [0.25, 0.25, 0.25, 0.25],
            0.5,
            (0, 1),
            id="ties to the lower id",
        ),
        pytest.param(
            [0.1, 0.4, 0.3, 0.2],
            1e-9,
            (1,),
            id="at least one",
        ),
        pytest.param([0.5, 0.0, 0.5, 0.0], 1.0, (0, 2), id="none without a token"),
        pytest.param([0.05, 0.02, 0.0, 0.01], 0.2, (0, 1, 3, 2), id="never reached"),
    ],
)
def test_the_smallest_set_that_reaches_p(row, p, want):
    assert select_experts(scores_of(row), p).experts == {1: want}


@pytest.mark.parametrize(
    "options",
    [{"round": 4}, {"round": 2}, {}],
    ids=str,
)
def test_where_p_is_not_reached_all_experts_are_selected_as_the_official_code_does(options):
    """Rounded scores sum to less than 1 in some layers; an option leaves out unused experts."""
    scores = ExpertScores.from_sums(sums_of("translation"))
    unused = 0
    for p in (0.1, 0.9, 1.0):
        selected = select_experts(scores, p, **options)
        used = select_experts(scores, p, skip_unused=True, **options)
        for layer, row in zip(
            LAYERS,
            scores.scores("gate", **options).tolist(),
            strict=True,
        ):
            expected = []
            total = 0.0
            for e in sorted(
                range(64),
                key=lambda e: -row[e],
            ):
                if total < p:
                    expected.append(e)
                    total += row[e]
            assert selected.experts[layer] == tuple(expected)
            assert used.experts[layer] == tuple(e for e in expected if row[e])
        unused += selected.num_experts - used.num_experts
    assert unused or not options


def test_a_shared_expert_is_never_selected():
    scores = score_experts(
        tiny.upcycled(),
        [tiny.batch()],
    )
    for experts in select_experts(scores, 1.0).experts.values():
        assert sorted(experts) == [1, 2, 3]


@pytest.mark.parametrize(
    "p",
    [0, 1.01, float("nan"), True],
)
def test_p_is_above_0_and_at_most_1(p):
    with pytest.raises(ValueError, match="p must be above 0 and at most 1"):
        select_experts(scores_of([0.5, 0.5]), p)
    with pytest.raises(ValueError, match="p must be"):
        ExpertSelection(experts={}, p=p)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"score": "both"}, "score must be one of gate, token"),
        ({"variant": "paper"}, "'paper' cannot be computed from 'v1' scores without their sums"),
    ],
)
def test_bad_options_are_named(options, error):
    with pytest.raises(ValueError, match=error):
        select_experts(scores_of([0.5, 0.5]), 0.1, **options)


def test_random_experts_are_as_many_per_layer():
    scores = ExpertScores.from_sums(sums_of("law"))
    selection = select_experts(scores, 0.2, "token", shared_experts=True)
    drawn = random_experts(selection, 64, seed=0)
    assert drawn.experts.keys() == selection.experts.keys()
    for layer, experts in drawn.experts.items():
        assert len(set(experts)) == len(selection.experts[layer])
    assert drawn.experts != selection.experts
    assert drawn.score == "random"
    assert drawn.shared_experts
    assert random_experts(selection, 64, seed=0) == drawn
    assert random_experts(selection, 64, seed=1) != drawn
    times = torch.zeros(5)
    two = ExpertSelection(experts={0: (1, 2)})
    for seed in range(600):
        times[list(random_experts(two, 5, seed, num_shared=1).experts[0])] += 1
    assert times[0] == 0
    assert (times[1:] - 300).abs().max() < 60


def test_the_configuration_is_the_official_one(tmp_path):
    file = tmp_path / "config.json"
    selection = ExpertSelection(
        experts={10: [5, 0], 2: ()},
        shared_experts=True,
    )
    selection.save(file)
    assert read_json(file) == {
        "experts": {"2": [], "10": [5, 0]},
        "shared_experts": True,
        "non_expert_modules": False,
    }
    assert ExpertSelection.load(file) == selection
    assert selection.num_experts == 2
    assert selection.experts == {2: (), 10: (5, 0)}
    made = ExpertSelection(
        experts={1: (0,)},
        score="gate",
        p=0.1,
        variant="v1",
    )
    assert ExpertSelection.from_dict(made.to_dict()) == made
    assert made.to_dict().items() >= {"score": "gate", "p": 0.1, "variant": "v1"}.items()


@pytest.mark.parametrize(
    ("values", "error"),
    [
        ({}, "'experts'. Expected experts, and some of shared_experts"),
        ({"experts": {}, "expert": {}}, "'expert'. Expected experts, and some of"),
        ({"experts": [1]}, r"experts must be unique ids by layer, .*\[1\]"),
        ({"experts": {"01": [3], "1": [4]}}, "experts must be .*{'01':"),
        ({"experts": {"1": [3, 3]}}, r"experts must be .*{1: \[3, 3\]}"),
        ({"experts": {"1": [True]}}, r"experts must be"),
    ],
)
def test_a_bad_configuration_is_named_with_its_file(values, error, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(ValueError, match=f"config.json: .*{error}"):
        ExpertSelection.load(tmp_path / "config.json")


def test_the_scored_model_is_recorded_and_checked(tmp_path):
    model = stock("mixtral")
    scores = score_experts(model, [batch()["input_ids"]], 16)
    scores.save(tmp_path / "summary.json")
    made = select_experts(
        ExpertScores.load(tmp_path / "summary.json"),
        0.3,
        "token",
        "normalized",
    )
    made.save(tmp_path / "config.json")
    selection = ExpertSelection.load(tmp_path / "config.json")
    assert selection == select_experts(scores, 0.3, "token", "normalized")
    assert (selection.score, selection.p, selection.variant) == ("token", 0.3, "normalized")
    assert selection.base == scores.base
    esft.train_only(
        copy.deepcopy(model).bfloat16(),
        selection,
    )
    tuned = copy.deepcopy(model)
    for parameter in tuned.parameters():
        parameter.data.mul_(1.1)
    for train in (esft.train_only, esft.train_lora):
        with pytest.raises(ValueError, match="with other weights: .* sampled weights differ"):
            train(tuned, selection)
        with pytest.raises(ValueError, match="num_hidden_layers is 2, but the model's is 3"):
            train(stock("mixtral", num_hidden_layers=3), selection)
    esft.train_only(tuned, selection, check_weights=False)


def test_a_number_of_experts_per_layer():
    scores = scores_of(
        [0.1, 0.4, 0.2, 0.3],
        [0.25, 0.25, 0.25, 0.25],
    )
    assert select_experts(scores, experts_per_layer=3).experts == {1: (1, 3, 2), 2: (0, 1, 2)}
    for options in (
        {},
        {"p": 0.1, "experts_per_layer": 1},
        {"experts_per_layer": 5},
        {"experts_per_layer": True},
    ):
        with pytest.raises(ValueError, match="experts_per_layer"):
            select_experts(scores, **options)
    with pytest.warns(UserWarning, match=r"to only 0.600 to 0.600 in 1 of 2 layers \(1\)"):
        select_experts(
            scores_of([0.2, 0.4], [0.5, 0.5]),
            0.9,
        )


@pytest.mark.parametrize("kind", ["stock", "ours"])
def test_a_selection_of_another_model_is_named(kind):
    if kind == "stock":
        model = stock("mixtral")
    else:
        model = tiny.upcycled()
    layers = numbered_layers(model)
    check_selection(
        layers,
        ExpertSelection(experts={0: (3, 1), 1: ()}),
    )
    wrong = [
        (7, (1,), r"selection has experts \[1\] of layer 7, but the model routes to layers 0, 1"),
        (1, (1, 4), r"selection has experts \[4\] of layer 1, .* to 3"),
    ]
    for number, experts, match in wrong:
        with pytest.raises(ValueError, match=match):
            check_selection(layers, ExpertSelection(experts={number: experts}))
    if kind == "ours":
        match = r"selection has experts \[0\] of layer 1, .* 1 to 3. Pass shared_experts=True"
        with pytest.raises(ValueError, match=match):
            check_selection(layers, ExpertSelection(experts={1: (0,)}))
