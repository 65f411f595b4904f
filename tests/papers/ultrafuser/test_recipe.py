"""papers.ultrafuser.recipe: the shipped studies, the paper's numbers, one clear error for each
mistake.
"""

import pytest

from papers.engine.corpora import DOMAINS
from papers.ultrafuser.recipe import FuserRecipe, load_recipe

STEPS = {
    "steps": 4,
    "learning_rate": 1e-3,
    "batch_size": 6,
}
VALUES = {
    "base_model": "base",
    "domains": {
        "a": {"train": "a.jsonl"},
        "b": {"train": "b.jsonl"},
    },
    "specialists": {
        "a": {"template": "ultralm"},
        "b": {"template": "{prompt}"},
    },
    "specialist": {"steps": 4, "learning_rate": 1e-3},
    "stage1": STEPS,
    "stage2": STEPS,
}


def test_the_paper_s_settings_are_shipped():
    recipe = load_recipe("ultrafuser-13b")
    assert recipe.stage1.steps == 400
    assert (recipe.stage1.batch_size, recipe.stage2.batch_size) == (3 * 64, 3 * 32)
    for stage in (recipe.stage1, recipe.stage2):
        assert stage.learning_rate == 2e-5
        assert stage.schedule == "cosine"
        assert stage.optimizer == "adamw_torch"
    assert recipe.templates == ["ultralm", "codellama", "wizardmath"]
    assert recipe.balanced
    assert (recipe.gate, recipe.reduction) == ("mlp", "sample")
    assert recipe.pretrain is recipe.base_model is recipe.specialist is None


def test_the_tiny_study():
    recipe = load_recipe("tiny")
    assert {domain.train for domain in recipe.domains.values()} == set(DOMAINS)
    assert len(set(recipe.templates)) == 3
    assert [recipe.domain_of(name) for name in recipe.specialists] == list(recipe.domains)
    # otherwise `balance` would change nothing
    assert len({domain.limit for domain in recipe.domains.values()}) == 3
    values = recipe.to_dict()
    values["specialists"]["code"]["steps"] = 7
    changed = FuserRecipe.from_dict(values)
    assert changed.training_of("code") == recipe.specialist.change(epochs=None, steps=7)
    assert changed.training_of("prose") == recipe.specialist


A, B = VALUES["specialists"].values()


@pytest.mark.parametrize(
    "changes, match",
    [
        ({"domains": {"a": {"train": "x"}}}, "domains must have at least 2, but got a"),
        ({"specialists": {"a": A, "c": B}}, "specialists.c.domain must be one of a, b"),
        ({"base_model": None}, "a model are a, b and given is specialist. Set one of"),
        (
            {"stage1": STEPS | {"batch_size": 5}},
            "stage1.batch_size must be a multiple of the 2 domains",
        ),
        ({"stage2": {"epochs": 1, "learning_rate": 1}}, "stage2.epochs is 1.0. Set steps"),
    ],
)
def test_mistakes_are_named(changes, match):
    with pytest.raises(ValueError, match=match):
        FuserRecipe.from_dict(VALUES | changes)
