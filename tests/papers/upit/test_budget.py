"""Equal optimizer steps: what is averaged, what an expert per domain has seen, and what the table
counts.
"""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from moe_runtime.methods.upit.experts import saved_experts
from papers.engine.domains import by_domain
from papers.upit import budget, tables
from papers.upit.recipe import load_recipe
from tests.support.upit_study import write_study

pytestmark = pytest.mark.usefixtures("quick")


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    recipe = load_recipe(write_study(tmp_path_factory.mktemp("study")))
    return recipe.change(experts__num_experts=2, domains__sums__validation_rows=3)


@pytest.fixture(scope="module")
def stages(recipe, tmp_path_factory):
    return budget.Stages(recipe, tmp_path_factory.mktemp("runs"), say=lambda text: None)


def test_swa_is_the_mean_of_the_second_half(stages):
    tuned = stages.prepared("ffn")
    late = [load_file(path / "model.safetensors") for path in saved_experts(tuned.folder)][2:]
    found = stages.averaged(tuned)
    for name, weight in load_file(found.folder / "model.safetensors").items():
        torch.testing.assert_close(
            weight, torch.stack([one[name] for one in late]).mean(0), msg=name
        )
    assert found.loss != tuned.loss
    assert found.steps == 0
    assert len(found.exact) == len(tuned.exact) == 16  # judged anew, and judged as it was trained


def test_an_expert_per_domain_has_seen_no_other(stages, recipe):
    pool = stages.branches()
    assert len(pool.experts) == 2
    assert pool.parents == []
    assert stages.only is None
    kept = [
        json.loads((Path(path).parents[1] / "result.json").read_text()) for path in pool.experts
    ]
    assert [(one["made_of"]["settings"]["only"], one["steps"]) for one in kept] == [
        (domain, 4) for domain in recipe.domains
    ]
    # each is the better one on its own rows
    sums, words = (by_domain(one["losses"], one["tokens"], one["rows"]) for one in kept)
    assert sums["sums"] < words["sums"]
    assert words["words"] < sums["words"]


def test_validation_rows_are_set_aside(stages):
    parts = {
        name: [tuple(row) for row in stages.part(f"sums-{name}")["input_ids"]]
        for name in ("train", "validation", "held_out")
    }
    assert len(parts["validation"]) == 3
    assert stages.counts == {"sums": 8, "words": 8}
    rows = [row for part in parts.values() for row in part]
    assert len(set(rows)) == len(rows) == 40


@pytest.mark.slow
def test_all_have_the_same_steps(recipe, tmp_path):
    report = tables.run(
        "budget", recipe.change(ffn__post__epochs=2), tmp_path, seeds=1, say=lambda text: None
    )
    trained = [entry for entry in report.entries if entry.results[0].history]
    assert {entry.results[0].steps for entry in trained} == {24}
    assert report.reference == budget.SFT
    assert {entry.results[0].history[-1][0] for entry in trained} == {24}
    swa = report.entry(budget.SWA)
    branches = report.entry(budget.BRANCHES)
    assert swa.loss != report.entry(budget.SFT).loss
    assert branches.loss != report.entry(budget.UPIT).loss
    assert any(
        line.startswith("held-out loss at step") and line.split()[-1] == "24"
        for line in report.summary
    )
    assert (tmp_path / "budget.png").read_bytes().startswith(b"\x89PNG")


def test_a_recipe_without_whole_experts_is_refused(recipe, tmp_path):
    with pytest.raises(
        ValueError, match="form must be lora, but got 'ffn'|form must be one of lora"
    ):
        tables.run("budget", recipe.change(ffn=None), tmp_path / "out")
    assert not (tmp_path / "out").exists()
