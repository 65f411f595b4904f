"""methods.xft.recipe and experiments.recipe: valid values, the shipped recipes, and clear
errors.
"""

import re

import pytest
import yaml
from transformers import LlamaConfig, StableLmConfig

from moe_runtime.config import MoEConfig
from moe_runtime.hf.models.families import family_of, moe_shape
from moe_runtime.hf.training.settings import Training
from moe_runtime.methods.xft.presets import PRESETS
from papers.engine.recipe import METHODS, shipped_recipes
from papers.xft.recipe import Recipe, load_recipe

TRAINING = {"steps": 3, "learning_rate": 1e-3}
SMALL = {
    "base_model": "folder",
    "sft": TRAINING,
    "tune": TRAINING,
    "mix": TRAINING,
}
REAL = ("deepseek-coder-1.3b", "stablecode-3b", "tinyllama-1.1b")
NAMES = [*REAL, "demo", "demo-tiny", "overfit", "smollm2", "smollm2-overfit", "tiny"]


@pytest.mark.parametrize("name", NAMES)
def test_a_shipped_recipe_survives_its_dict(name):
    assert shipped_recipes("xft") == sorted(NAMES)
    recipe = load_recipe(name)
    assert recipe.name == name
    assert recipe.method == "xft"
    assert Recipe.from_dict(yaml.safe_load(yaml.safe_dump(recipe.to_dict()))) == recipe


# XFT, App. A.1 and A.5, and the released code's arguments
@pytest.mark.parametrize("name", REAL)
def test_the_trainings_are_the_papers(name):
    recipe = load_recipe(name)
    plan = {
        "sft": (5, 625, 5e-5),
        "tune": (4, 500, 5e-5),
        "mix": (1, 125, 1e-5),
    }
    for stage, (epochs, warmup, rate) in plan.items():
        training = getattr(recipe, stage)
        assert training.epochs == epochs
        assert training.warmup_steps == warmup
        assert training.learning_rate == rate
        assert training.steps is None
        assert training.batch_size == 64
        assert training.schedule == "linear"
        assert training.optimizer == "adafactor"
        assert training.max_grad_norm == -1
        assert training.bf16
    assert recipe.ewa_training == recipe.sft
    assert (recipe.ewa.share, recipe.ewa.schedule) == (0.3, "constant")
    assert recipe.dtype == "bfloat16"
    assert (recipe.data.prompt, recipe.data.max_length) == ("magicoder", 1024)


@pytest.mark.parametrize("fast", (True, False))
def test_auto_bf16_follows_the_machine(monkeypatch, fast):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("torch.cpu.get_capabilities", lambda: {"avx512_bf16": fast})
    assert Training(**TRAINING, bf16="auto").bf16 is fast


@pytest.mark.parametrize(
    "name, experts, top_k, rate",
    [
        ("deepseek-coder-1.3b", 8, 6, 0.75),
        ("stablecode-3b", 4, 2, 0.85),
        ("tinyllama-1.1b", 8, 6, 0.75),
    ],
)
def test_the_experts_are_the_papers_and_fit_the_base(name, experts, top_k, rate):
    recipe = load_recipe(name)
    assert recipe.experts == PRESETS["xft-official"] | {"num_experts": experts, "top_k": top_k}
    assert recipe.shared_rate == rate
    base = BASES[name]
    config = MoEConfig(
        **moe_shape(family_of(base), base),
        **recipe.experts,
    )
    assert config.hidden_size == base.hidden_size
    assert config.intermediate_size == base.intermediate_size
    assert config.hidden_act == "silu"
    assert config.gated
    assert not config.bias
    assert recipe.data.max_length <= base.max_position_embeddings


# sizes from their model cards
BASES = {
    "deepseek-coder-1.3b": LlamaConfig(
        hidden_size=2048, intermediate_size=5504, max_position_embeddings=16384
    ),
    "stablecode-3b": StableLmConfig(
        hidden_size=2560, intermediate_size=6912, max_position_embeddings=16384
    ),
    "tinyllama-1.1b": LlamaConfig(
        hidden_size=2048, intermediate_size=5632, max_position_embeddings=2048
    ),
}


@pytest.mark.parametrize(
    "change, says",
    [
        ({"colour": 1}, "colour is not a valid key. Use any of method"),
        ({"tune": TRAINING | {"learning_rate": -1}}, "tune.learning_rate must be greater than 0"),
        ({"tune": {"steps": 3}}, "tune.learning_rate is missing from the recipe"),
        ({"experts": {"preset": "mixtral"}}, "experts.preset must be one of xft-paper"),
        (
            {"experts": {"balance_loss_coef": 0.1}},
            "experts.balance_loss_coef is 0.1, but balance_loss is",
        ),
        ({"base_model": None}, "pretrain or base_model must be given, but got neither"),
    ],
)
def test_a_mistake_is_one_error_with_file_and_key(tmp_path, change, says):
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(SMALL | change))
    with pytest.raises(ValueError, match=f"mine.yaml: {says}") as error:
        load_recipe(path)
    assert "\n" not in str(error.value)


def blocks(name: str, language: str) -> list[str]:
    """Return the code blocks of a file in docs/."""
    text = (METHODS.parent / "docs" / name).read_text()
    return re.findall(
        rf"^```{language}\b.*?\n(.*?)^```$",
        text,
        re.MULTILINE | re.DOTALL,
    )


def test_the_recipe_of_the_docs_is_one(tmp_path):
    (text,) = blocks("papers/recipes.md", "yaml")
    (tmp_path / "mine.yaml").write_text(text)
    load_recipe(tmp_path / "mine.yaml")
    assert set(yaml.safe_load(text)) >= set(Recipe.model_fields) - {"name", "pretrain"}


def test_change_takes_dotted_keys_and_checks_them():
    recipe = Recipe.from_dict(SMALL)
    mix = Training(epochs=1, learning_rate=1.0)
    new = recipe.change(
        data__limit=8,
        tune__steps=5,
        seed=1,
        mix=mix,
    )
    assert (new.data.limit, new.tune.steps, new.seed, new.mix) == (8, 5, 1, mix)
    assert new.change(data__limit=None, tune__steps=3, seed=0, mix=TRAINING) == recipe
    with pytest.raises(ValueError, match="tune.speed is not a valid key"):
        recipe.change(tune__speed=0)
