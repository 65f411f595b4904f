"""papers.upit.recipe: the shipped studies, the paper's numbers as defaults, and one error per
mistake.
"""

import pytest

from papers.upit.recipe import UpitRecipe, load_recipe

TUNING = {"epochs": 2, "learning_rate": 1e-3}
FORM = {
    "sft": TUNING,
    "init": TUNING,
    "post": TUNING,
}
SMALL = {
    "base_model": "folder",
    "domains": {"code": {"train": "code"}},
    "ffn": FORM,
}


@pytest.mark.parametrize(
    "name, form, rate, experts, chosen",
    [("sheared-llama-2.7b", "ffn", 2e-5, 8, 4), ("llama-2-7b-lora", "lora", 2e-4, 16, 8)],
)
def test_the_papers_numbers(name, form, rate, experts, chosen):
    recipe = load_recipe(name)
    assert recipe.forms == (form,)
    assert recipe.max_length == 2048
    one = getattr(recipe, form)
    for training in (one.sft, one.init, one.post):
        assert training.learning_rate == rate
        assert training.batch_size == 128
        assert training.schedule == "constant"
    assert (one.sft.epochs, one.init.epochs, one.post.epochs, one.whole.epochs) == (2, 4, 2, 4)
    assert (recipe.experts.num_experts, recipe.experts.top_k) == (experts, 2)
    # half of the experts are chosen from the checkpoints between epochs 1 and 2
    assert recipe.checkpoints.count == chosen
    assert recipe.checkpoints.which == "back"
    assert chosen * recipe.checkpoints.every_epochs <= 1
    limits = [domain.limit for domain in recipe.domains.values()]
    assert sum(limits) == 500_000
    assert limits[0] == limits[1] == limits[2] / 3
    assert (recipe.router.alpha, recipe.seed_data.share) == (0.5, 0.01)


@pytest.mark.parametrize(
    "change, says",
    [
        ({"colour": 1}, "colour is not a valid key. Use any of method"),
        ({"ffn": None}, "ffn and lora are null, but at least one"),
        (
            {"ffn": FORM | {"sft": {"steps": 3, "learning_rate": 1}}},
            "ffn.sft.steps is 3. Set epochs",
        ),
        ({"experts": {"gate": "xft"}}, "experts.gate must be one without a shared expert"),
        ({"checkpoints": {"count": 9}}, "checkpoints.count must be at most the 8 checkpoints"),
        ({"lora": FORM | {"loramoe": "all"}}, "lora.loramoe must be 'top_k' or 'dense'"),
        ({"base_model": None}, "pretrain or base_model must be given, but got neither"),
    ],
)
def test_a_mistake_is_one_error_with_the_key(change, says):
    with pytest.raises(ValueError, match=says):
        UpitRecipe.from_dict(SMALL | change)
