"""papers.esft.recipe: valid values, shipped recipes that match the paper, clear errors."""

import pytest

from papers.engine.recipe import METHODS, method_of, recipe_path
from papers.esft.recipe import EsftRecipe, load_recipe

TUNING = {"steps": 3, "learning_rate": 1e-3}
SMALL = {
    "base_model": "folder",
    "tasks": {"law": {"train": "law.jsonl"}},
    "fft": TUNING,
    "lora": {"training": TUNING},
    "esft": TUNING,
}
PRETRAIN = {
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_layers": 2,
    "steps": 2,
    "batch_size": 4,
}


# Sec. 4.3, and the released code's arguments
def test_the_settings_are_the_papers():
    recipe = load_recipe("deepseek-v2-lite")
    assert recipe.base_model == "deepseek-ai/ESFT-vanilla-lite"
    assert {part.prompt for part in (*recipe.tasks.values(), recipe.general)} == {"esft"}
    rates = {
        recipe.fft: 3e-5,
        recipe.lora.training: 1e-4,
        recipe.esft: 1e-5,
    }
    for training, rate in rates.items():
        assert training.learning_rate == rate
        assert (training.steps, training.batch_size) == (500, 32)
        assert training.optimizer == "adamw_torch"
        assert (training.adam_beta1, training.adam_beta2) == (0.9, 0.95)
        assert training.weight_decay == 0.1
        assert (training.schedule, training.warmup_steps) == ("constant", 0)
        assert training.max_grad_norm == 1
        assert training.keep_best
        assert training.steps == 100 * recipe.evaluations
    assert (recipe.lora.rank, recipe.lora.scaling) == (8, 2)
    assert (recipe.p.gate, recipe.p.token) == (0.1, 0.2)
    assert (recipe.scores.n_tokens, recipe.scores.variant) == (32 * 4096, "v1")
    assert (recipe.max_length, recipe.pack) == (4096, True)
    assert (recipe.drop_bos, recipe.mix) == (0.2, 1)
    assert (recipe.dtype, recipe.trained_dtype) == ("bfloat16", "float32")


@pytest.mark.parametrize(
    "change, says",
    [
        ({"colour": 1}, "colour is not a valid key. Use any of method"),
        ({"esft": TUNING | {"adam_beta2": 1}}, "esft.adam_beta2 must be less than 1"),
        ({"tasks": {}}, "tasks must have at least 1, but got none"),
        ({"tasks": {"a/b": {"train": "a"}}}, "tasks must be named with letters"),
        ({"p": {"gate": 0}}, "p.gate must be greater than 0"),
        ({"base_model": None}, "pretrain or base_model must be given, but got neither"),
        (
            {"base_model": None, "pretrain": PRETRAIN | {"dense_layers": 2}},
            "dense_layers .2. below num_layers",
        ),
        ({"general": {"prompt": "chat"}}, "must use one chat template .*prompts chat, deepseek"),
    ],
)
def test_a_mistake_is_one_error_with_the_key(change, says):
    with pytest.raises(ValueError, match=says):
        EsftRecipe.from_dict(SMALL | change)


def test_recipes_are_found_by_name_with_and_without_their_method():
    ours = METHODS / "esft" / "recipes" / "tiny.yaml"
    theirs = METHODS / "xft" / "recipes" / "tiny.yaml"
    assert recipe_path("tiny", "xft", "esft") == theirs
    assert recipe_path("esft/tiny", "xft", "esft") == recipe_path("tiny", "esft") == ours
    assert recipe_path("deepseek-v2-lite", "xft", "esft").parents[1].name == "esft"
    assert method_of(ours) == "esft"
    assert method_of(theirs) == "xft"
    with pytest.raises(ValueError, match="Recipe 'none' does not exist. .*esft/tiny"):
        recipe_path("none", "xft", "esft")
