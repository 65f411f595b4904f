"""methods.xft.recipe and experiments.recipe: what a recipe may say, what the shipped ones say, and
clear errors.
"""

import re

import pytest
import yaml
from transformers import LlamaConfig, StableLmConfig

from moe_runtime.config import MoEConfig
from moe_runtime.hf.models.families import FAMILIES, family_of, moe_shape
from moe_runtime.hf.training.settings import Training
from moe_runtime.methods.xft.presets import PRESETS
from papers.engine.recipe import METHODS, shipped_recipes
from papers.xft.recipe import Data, Recipe, load_recipe

TRAINING = {"steps": 3, "learning_rate": 1e-3}
SMALL = {"base_model": "folder", "sft": TRAINING, "tune": TRAINING, "mix": TRAINING}
REAL = ("deepseek-coder-1.3b", "stablecode-3b", "tinyllama-1.1b")


def test_eight_recipes_are_shipped():
    assert shipped_recipes("xft") == sorted(
        [*REAL, "demo", "demo-tiny", "overfit", "smollm2", "tiny"]
    )


@pytest.mark.parametrize("name", [*REAL, "demo", "demo-tiny", "overfit", "smollm2", "tiny"])
def test_a_shipped_recipe_survives_its_dict(name):
    recipe = load_recipe(name)
    assert recipe.name == name
    assert recipe.method == "xft"
    assert (
        Recipe.from_dict(recipe.to_dict())
        == recipe
        == load_recipe(METHODS / "xft" / "recipes" / f"{name}.yaml")
    )
    assert Recipe.from_dict(yaml.safe_load(yaml.safe_dump(recipe.to_dict()))) == recipe


# XFT, App. A.1 and A.5, and the released code's arguments
@pytest.mark.parametrize("name", REAL)
def test_the_trainings_are_the_papers(name):
    recipe = load_recipe(name)
    plan = {"sft": (5, 625, 5e-5), "tune": (4, 500, 5e-5), "mix": (1, 125, 1e-5)}
    for stage, (epochs, warmup, rate) in plan.items():
        training = getattr(recipe, stage)
        assert (training.epochs, training.warmup_steps, training.learning_rate) == (
            epochs,
            warmup,
            rate,
        ), stage
        assert training.steps is None
        assert training.batch_size == 64
        assert training.schedule == "linear"
        assert training.optimizer == "adafactor"
        assert training.max_grad_norm == -1
        assert training.bf16
    assert recipe.ewa_training == recipe.sft
    assert recipe.ewa.share == 0.3
    assert recipe.ewa.schedule == "constant"
    assert recipe.dtype == "bfloat16"
    assert recipe.data.prompt == "magicoder"
    assert recipe.data.max_length == 1024


@pytest.mark.parametrize(
    "name, experts, top_k, rate, rows",
    [
        ("deepseek-coder-1.3b", 8, 6, 0.75, "ise-uiuc/Magicoder-Evol-Instruct-110K"),
        ("stablecode-3b", 4, 2, 0.85, "ise-uiuc/Magicoder-Evol-Instruct-110K"),
        ("tinyllama-1.1b", 8, 6, 0.75, "WizardLMTeam/WizardLM_evol_instruct_70k"),
    ],
)
def test_the_experts_are_the_papers(name, experts, top_k, rate, rows):
    recipe = load_recipe(name)
    assert recipe.experts == PRESETS["xft-official"] | {"num_experts": experts, "top_k": top_k}
    assert recipe.shared_rate == rate
    assert recipe.data.train == rows


# sizes as their model cards give them
BASES = {
    "deepseek-coder-1.3b": LlamaConfig(
        vocab_size=32256,
        hidden_size=2048,
        intermediate_size=5504,
        num_hidden_layers=24,
        num_attention_heads=16,
        max_position_embeddings=16384,
        rope_parameters={"rope_type": "linear", "factor": 4.0, "rope_theta": 1e5},
    ),
    "stablecode-3b": StableLmConfig(
        vocab_size=50304,
        hidden_size=2560,
        intermediate_size=6912,
        num_hidden_layers=32,
        num_attention_heads=32,
        max_position_embeddings=16384,
    ),
    "tinyllama-1.1b": LlamaConfig(
        vocab_size=32000,
        hidden_size=2048,
        intermediate_size=5632,
        num_hidden_layers=22,
        num_attention_heads=32,
        num_key_value_heads=4,
        max_position_embeddings=2048,
    ),
}


@pytest.mark.parametrize("name", REAL)
def test_the_experts_fit_the_base(name):
    base = BASES[name]
    recipe = load_recipe(name)
    config = MoEConfig(**moe_shape(family_of(base), base), **recipe.experts)
    assert (config.hidden_size, config.intermediate_size) == (
        base.hidden_size,
        base.intermediate_size,
    )
    assert config.hidden_act == "silu"
    assert config.gated
    assert not config.bias
    assert base.model_type in FAMILIES
    assert recipe.data.max_length <= base.max_position_embeddings


def test_the_tiny_recipe_needs_no_download():
    recipe = load_recipe("tiny")
    assert recipe.base_model is None
    assert recipe.pretrain is not None
    assert recipe.data.train == "standard-library"
    assert recipe.data.held_out_rows >= 250
    assert recipe.sft.steps == recipe.tune.steps + recipe.mix.steps  # the same budget in steps


@pytest.mark.parametrize(
    "change, says",
    [
        ({"colour": 1}, "colour is not a valid key. Use any of method"),
        ({"tune": TRAINING | {"lr": 1}}, "tune.lr is not a valid key. Use any of epochs"),
        ({"tune": TRAINING | {"learning_rate": "fast"}}, "tune.learning_rate must be a valid"),
        ({"tune": TRAINING | {"learning_rate": -1}}, "tune.learning_rate must be greater than 0"),
        ({"tune": TRAINING | {"steps": 2.5}}, "tune.steps must be a valid integer"),
        ({"tune": TRAINING | {"bf16": 1}}, "tune.bf16 must be a valid boolean"),
        ({"tune": TRAINING | {"batch_size": True}}, "tune.batch_size must be a valid"),
        ({"tune": TRAINING | {"epochs": 1}}, "tune.epochs is 1.0 and steps is 3. Set exactly one"),
        ({"tune": {"steps": 3}}, "tune.learning_rate is missing from the recipe"),
        ({"tune": TRAINING | {"schedule": "cosinus"}}, "tune.schedule must be 'linear'"),
        ({"tune": TRAINING | {"max_grad_norm": 0}}, "tune.max_grad_norm must be"),
        ({"tune": TRAINING | {"warmup_steps": -1}}, "tune.warmup_steps must be"),
        ({"tune": None}, "tune must be"),
        ({"data": []}, r"data must be a valid dictionary"),
        ({"data": {"prompt": "alpaca"}}, "data.prompt must be 'plain'"),
        ({"data": {"limit": 0}}, "data.limit must be greater than or equal to 1"),
        ({"experts": {"top_k": 9}}, "experts.top_k must be at most num_experts .8., but got 9"),
        ({"experts": {"hidden_size": 8}}, "experts.hidden_size is not a valid key"),
        ({"experts": {"preset": "mixtral"}}, "experts.preset must be one of xft-paper"),
        ({"experts": {"noisy_gate": "yes"}}, "experts.noisy_gate must be a valid boolean"),
        (
            {"experts": {"balance_loss_coef": 0.1}},
            "experts.balance_loss_coef is 0.1, but balance_loss is",
        ),
        ({"shared_rate": 1.5}, "shared_rate must be less than or equal to 1"),
        ({"ewa": {"share": 2}}, "ewa.share must be less than or equal to 1"),
        ({"base_model": None}, "pretrain or base_model must be given, but got neither"),
        ({"method": "upit"}, "method must be 'xft'"),
        ({"dtype": "fp8"}, "dtype must be 'float32'"),
    ],
)
def test_a_mistake_is_one_error_with_file_and_key(tmp_path, change, says):
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(SMALL | change))
    with pytest.raises(ValueError, match=f"mine.yaml: {says}") as error:
        load_recipe(path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "text, says",
    [
        ("a: [1", "is not valid YAML"),
        ("", "recipe must be a valid dictionary"),
        ("- 1", "recipe must be a valid dictionary"),
        ("base_model: x\nsft: {steps: 1, learning_rate: 1}\n", "tune is missing from the recipe"),
    ],
)
def test_a_file_that_is_no_recipe(tmp_path, text, says):
    (tmp_path / "mine.yaml").write_text(text)
    with pytest.raises(ValueError, match=says):
        load_recipe(tmp_path / "mine.yaml")


def blocks(name: str, language: str) -> list[str]:
    """The code blocks of a file in docs/."""
    text = (METHODS.parent / "docs" / name).read_text()
    return re.findall(rf"^```{language}\b.*?\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def test_the_recipe_of_the_docs_is_one(tmp_path):
    (text,) = blocks("recipes.md", "yaml")
    (tmp_path / "mine.yaml").write_text(text)
    recipe = load_recipe(tmp_path / "mine.yaml")
    assert set(yaml.safe_load(text)) >= set(Recipe.model_fields) - {"name", "pretrain"}
    assert recipe.experts["router"] == "mlp"
    assert recipe.sft.optimizer == "adafactor"
    assert recipe.sft.max_grad_norm == -1


def test_the_table_of_the_docs_is_that_of_the_recipes():
    text = (METHODS.parent / "docs" / "recipes.md").read_text()
    rows = re.findall(
        r"^\| `([\w.-]+)` \|.*\| (\d), (\d) per token \| ([\d.]+) \|", text, re.MULTILINE
    )
    assert sorted(row[0] for row in rows) == shipped_recipes("xft")
    for name, experts, top_k, rate in rows:
        recipe = load_recipe(name)
        assert (recipe.experts["num_experts"], recipe.experts["top_k"]) == (
            int(experts),
            int(top_k),
        ), name
        assert recipe.shared_rate == float(rate)


def test_the_task_of_the_docs_is_yaml():
    (text,) = blocks("evaluation.md", "yaml")
    task = yaml.safe_load(text)
    assert task["output_type"] == "multiple_choice"
    assert task["doc_to_choice"] == ["yes", "no"]


def test_an_unknown_name_lists_the_shipped_ones():
    with pytest.raises(
        ValueError,
        match=(
            "Recipe 'huge' does not exist. Pass a YAML file or one of deepseek-coder-1.3b, .*tiny"
        ),
    ):
        load_recipe("huge")


def test_yaml_reads_5e_5_as_text_which_is_a_number_here(tmp_path):
    text = yaml.safe_dump(SMALL).replace("learning_rate: 0.001", "learning_rate: 5e-5")
    assert yaml.safe_load(text)["tune"]["learning_rate"] == "5e-5"
    (tmp_path / "mine.yaml").write_text(text)
    assert load_recipe(tmp_path / "mine.yaml").tune.learning_rate == 5e-5


def test_a_preset_gives_what_is_not_given():
    recipe = Recipe.from_dict(
        SMALL | {"experts": {"preset": "xft-official", "noisy_gate": False, "top_k": 2}}
    )
    assert recipe.experts == PRESETS["xft-official"] | {"noisy_gate": False, "top_k": 2}


def test_change_takes_dotted_keys_and_checks_them():
    recipe = Recipe.from_dict(SMALL)
    new = recipe.change(
        data__limit=8, tune__steps=5, seed=1, mix=Training(epochs=1, learning_rate=1.0)
    )
    assert (new.data.limit, new.tune.steps, new.seed, new.mix.epochs) == (8, 5, 1, 1.0)
    assert new.change(data__limit=None, tune__steps=3, seed=0, mix=TRAINING) == recipe
    assert recipe.data == Data()
    with pytest.raises(ValueError, match="tune.steps must be greater than or equal to 1"):
        recipe.change(tune__steps=0)
    with pytest.raises(ValueError, match="tune.speed is not a valid key"):
        recipe.change(tune__speed=0)
