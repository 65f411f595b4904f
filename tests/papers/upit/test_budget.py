"""Equal optimizer steps: what is averaged, which data an expert per domain has seen, and what the
table counts.
"""

import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from moe_runtime.io.files import read_json
from moe_runtime.methods.upit.experts import saved_experts
from papers.engine.domains import by_domain
from papers.upit import budget, tables
from papers.upit.recipe import load_recipe
from tests.support.upit_study import write_study

pytestmark = pytest.mark.usefixtures("quick")


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    recipe = load_recipe(write_study(tmp_path_factory.mktemp("study")))
    return recipe.change(
        experts__num_experts=2,
        domains__sums__validation_rows=3,
    )


@pytest.fixture(scope="module")
def stages(recipe, tmp_path_factory):
    return budget.BudgetStages(
        recipe,
        tmp_path_factory.mktemp("runs"),
        say=lambda text: None,
    )


def test_swa_is_the_mean_of_the_second_half(stages):
    tuned = stages.prepared("ffn")
    averaged = stages.averaged(tuned)
    late = [load_file(path / "model.safetensors") for path in saved_experts(tuned.folder)[2:]]
    for name, weight in load_file(averaged.folder / "model.safetensors").items():
        mean = torch.stack([one[name] for one in late]).mean(0)
        torch.testing.assert_close(weight, mean, msg=name)
    assert averaged.loss != tuned.loss
    assert averaged.steps == 0
    # evaluated again, and evaluated as trained
    assert len(averaged.exact) == len(tuned.exact) == 16


def test_an_expert_per_domain_has_seen_no_other(stages, recipe):
    pool = stages.branches()
    assert pool.parents == []
    assert stages.only is None
    losses = []
    for path, domain in zip(pool.experts, recipe.domains, strict=True):
        stored = read_json(Path(path).parents[1] / "result.json")
        assert stored["made_of"]["settings"]["only"] == domain
        assert stored["steps"] == 4
        losses.append(
            by_domain(
                stored["losses"],
                stored["tokens"],
                stored["rows"],
            )
        )
    # each is better on its own examples
    sums, words = losses
    assert sums["sums"] < words["sums"]
    assert words["words"] < sums["words"]


@pytest.mark.slow
def test_all_have_the_same_steps(recipe, tmp_path):
    twice = recipe.change(ffn__post__epochs=2)
    report = tables.run(
        "budget",
        twice,
        tmp_path,
        seeds=1,
        say=lambda text: None,
    )
    assert report.reference == budget.SFT
    for entry in report.entries:
        (result,) = entry.results
        if result.history:
            assert result.steps == result.history[-1][0] == 24
    assert report.entry(budget.SWA).loss != report.entry(budget.SFT).loss
    assert report.entry(budget.BRANCHES).loss != report.entry(budget.UPIT).loss
    assert re.search(r"held-out loss at step .* 24(\n|$)", "\n".join(report.summary))
    assert (tmp_path / "budget.png").read_bytes().startswith(b"\x89PNG")


def test_a_recipe_without_whole_experts_is_refused(recipe, tmp_path):
    with pytest.raises(ValueError, match="form must be .*lora"):
        tables.run(
            "budget",
            recipe.change(ffn=None),
            tmp_path / "out",
        )
    assert not (tmp_path / "out").exists()
