"""papers.upit.recipe: the shipped studies, the paper's numbers as defaults, and one
error per mistake.
"""

import pytest

from papers.engine.recipe import shipped_recipes
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
PRETRAIN = {
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_layers": 2,
    "steps": 2,
    "batch_size": 2,
}


@pytest.mark.parametrize("name", ["budget", "llama-2-7b-lora", "sheared-llama-2.7b", "tiny"])
def test_a_shipped_recipe_loads_and_survives_a_round_trip(name):
    assert name in shipped_recipes("upit")
    recipe = load_recipe(name)
    assert recipe.name == name
    assert recipe.method == "upit"
    assert UpitRecipe.from_dict(recipe.to_dict()) == recipe


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


def test_a_recipe_of_few_words_has_defaults():
    recipe = UpitRecipe.from_dict(SMALL)
    assert recipe.forms == ("ffn",)
    assert recipe.lora is None
    assert recipe.experts.gate == "softmax_topk_renorm"
    assert (recipe.experts.balance_loss, recipe.experts.balance_loss_coef) == ("switch", 0.01)
    assert (recipe.expansion.drop, recipe.expansion.metric) == (0.5, "cosine")
    assert recipe.expansion.parents == "farthest"
    changed = recipe.change(
        experts__num_experts=4,
        ffn__post__epochs=6,
    )
    assert changed.experts.num_experts == 4
    assert changed.ffn.whole.epochs == 8


def test_a_model_of_copies_is_trained_as_long_as_both_and_as_many_rows_at_once_as_the_second():
    at_once = {
        "per_device_batch_size": 4,
        "gradient_checkpointing": True,
        "save_steps": 7,
    }
    post = TUNING | at_once | {"learning_rate": 9}
    form = UpitRecipe.from_dict(SMALL | {"ffn": FORM | {"post": post}}).ffn
    assert form.copied.to_dict() == form.whole.to_dict() | at_once
    assert form.copied.epochs == 4
    assert form.copied.learning_rate == form.sft.learning_rate
    assert form.whole.per_device_batch_size is None


@pytest.mark.parametrize(
    "change, says",
    [
        ({"colour": 1}, "colour is not a valid key. Use any of method"),
        ({"ffn": FORM | {"lr": 1}}, "ffn.lr is not a valid key. Use any of sft, init, post"),
        ({"ffn": None}, "ffn and lora are null, but at least one"),
        (
            {"ffn": FORM | {"sft": {"steps": 3, "learning_rate": 1}}},
            "ffn.sft.steps is 3. Set epochs",
        ),
        ({"ffn": {"sft": TUNING}}, "ffn.init is missing"),
        ({"domains": {"a/b": {"train": "a"}}}, "domains must be named with letters"),
        (
            {"domains": {"code": {"train": "code", "held_out": "a.jsonl"}}},
            "'code' has held-out data, but got 'a.jsonl'",
        ),
        ({"experts": {"top_k": 9}}, "experts.top_k must be at most num_experts .8., but got 9"),
        ({"experts": {"gate": "xft"}}, "experts.gate must be one without a shared expert"),
        ({"checkpoints": {"count": 9}}, "checkpoints.count must be at most the 8 checkpoints"),
        ({"checkpoints": {"count": 1}}, "checkpoints.count must be at least 2 to expand to 8"),
        ({"checkpoints": {"which": "last"}}, "checkpoints.which must be 'back'"),
        ({"expansion": {"drop": 1}}, "expansion.drop must be less than 1"),
        ({"seed_data": {"share": 0}}, "seed_data.share must be greater than 0"),
        ({"router": {"alpha": 2}}, "router.alpha must be less than or equal to 1"),
        ({"lora": FORM | {"rank": 0}}, "lora.rank must be greater"),
        ({"lora": FORM | {"loramoe": "all"}}, "lora.loramoe must be 'top_k' or 'dense'"),
        ({"pretrain": PRETRAIN}, "but got both .base_model is 'folder'"),
        ({"base_model": None}, "pretrain or base_model must be given, but got neither"),
    ],
)
def test_a_mistake_is_one_error_with_the_key(change, says):
    with pytest.raises(ValueError, match=says):
        UpitRecipe.from_dict(SMALL | change)
