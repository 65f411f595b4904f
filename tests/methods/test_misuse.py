"""Common mistakes in calls of the methods, such as a path for a model or a list for a dataset,
raise a ValueError that names the argument.
"""

import datasets
import pytest
from transformers import AutoModel

from moe_runtime.methods import esft, upit, xft
from tests.hf import tiny
from tests.support.stock_moe import stock

ROWS = [{"prompt": "two", "completion": "2"}] * 200
SELECTION = esft.ExpertSelection(experts={0: (1,)})
CASES = {
    "upcycle a path": (
        lambda: xft.upcycle("base", num_experts=4, top_k=2),
        "Expected a model, but got 'base'",
    ),
    "config_for a path": (
        lambda: xft.config_for("base", num_experts=4),
        "Expected a model, but got 'base'",
    ),
    "upcycle AutoModel": (
        lambda: xft.upcycle(
            AutoModel.from_config(tiny.dense_config("llama")), num_experts=4, top_k=2
        ),
        (
            "Expected a LlamaForCausalLM, but got LlamaModel.*load the folder with "
            "AutoModelForCausalLM"
        ),
    ),
    "save_dense": (
        lambda: xft.save_dense(tiny.upcycled(), "out"),
        "has experts .stage 'moe'.. Merge it first",
    ),
    "merge a path": (lambda: xft.merge("moe"), "Expected a model, but got 'moe'"),
    "seed_set of a list": (
        lambda: upit.seed_set(ROWS),
        "rows must be a datasets.Dataset, but is a list",
    ),
    "perplexities of a list": (
        lambda: upit.perplexities(["a"], ROWS, None),
        "rows must be .* but is a list with no columns",
    ),
    "perplexities of text": (
        lambda: upit.perplexities(
            ["a"],
            datasets.Dataset.from_list(ROWS),
            None,
        ),
        "with prompt, completion. Tokenize it",
    ),
    "assemble None": (
        lambda: upit.assemble(None, None, "out"),
        "experts must be a list of folders, but got None",
    ),
    "assemble one": (
        lambda: upit.assemble("a", None, "out"),
        "experts must be a list of folders, but got 'a'",
    ),
    "expand one": (
        lambda: upit.expand_experts(["a"], 3, "out", base="b"),
        "Expected at least 2 experts.* but got 1 experts",
    ),
    "expand None": (
        lambda: upit.expand_experts(None, 3, "out", base="b"),
        "experts must be a list of folders, but got None",
    ),
    "choose of none": (
        lambda: upit.choose_checkpoints(None, 2),
        "folders must be a list of folders, but got None",
    ),
    "score strings": (
        lambda: esft.score_experts(stock("mixtral"), ["two"]),
        "A batch must be input_ids .* 'two'.. Tokenize",
    ),
    "score a path": (lambda: esft.score_experts("base", []), "Expected a model, but got 'base'"),
    "select from a path": (
        lambda: esft.select_experts("summary.json", 0.1),
        "Expected ExpertScores, but got 'summary.json'",
    ),
    "train a path": (
        lambda: esft.train_only("base", SELECTION),
        "Expected a model, but got 'base'",
    ),
    "train a path's": (
        lambda: esft.train_only(stock("mixtral"), "c.json"),
        "Expected an ExpertSelection, but got 'c.json'",
    ),
    "LoRA of a path's": (
        lambda: esft.train_lora(stock("mixtral"), "c.json"),
        "Expected an ExpertSelection, but got 'c.json'",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_misuse_is_named(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    call, says = CASES[name]
    with pytest.raises(ValueError, match=says):
        call()
    assert not any(tmp_path.iterdir())
