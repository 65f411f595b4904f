"""papers.esft.recipe: the standard library's tasks, rows told apart, joined and mixed,
DeepSeek's prompt.
"""

import json

import pytest
from datasets import Dataset

from moe_runtime.io import rows as data
from moe_runtime.io.prompts import DEEPSEEK_CHAT, put_prompt
from moe_runtime.methods.esft.packing import join
from papers.engine.corpora import standard_library_text
from papers.engine.tiny import train_tokenizer
from papers.esft.recipe import BUILT_IN, EsftRecipe, mixed, task_rows
from tests.papers.esft.test_recipe import SMALL

COUNTS = {"held_out_rows": 5, "validation_rows": 4}


@pytest.fixture(scope="module")
def tokenizer():
    found = train_tokenizer(["User: 1 and 2 Assistant: 3"] * 9, 300)
    found.chat_template = DEEPSEEK_CHAT
    return found


def recipe_of(**task) -> EsftRecipe:
    return EsftRecipe.from_dict(
        SMALL | {"tasks": {"sums": COUNTS | task}, "max_length": 64, "pack": False}
    )


def write_sums(path, count=30):
    rows = [{"prompt": f"{i} and {i}", "completion": str(2 * i)} for i in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def ids_of(rows) -> set:
    return {tuple(row["input_ids"]) for row in rows}


@pytest.fixture(scope="module")
def library():
    return {name: make() for name, make in BUILT_IN.items()}


def test_held_out_text_is_of_files_that_nothing_trains_on(library):
    train, held_out = ({row["text"] for row in part} for part in library["standard-library"])
    assert train == set(standard_library_text())
    assert held_out == set(standard_library_text(held_out=True))
    assert not train & held_out


@pytest.mark.parametrize("held_out", [False, True], ids=["of-train", "of-its-own"])
def test_no_row_is_in_two_parts(tokenizer, tmp_path, held_out):
    source = write_sums(tmp_path / "sums.jsonl")
    if held_out:
        own = {"held_out": write_sums(tmp_path / "test.jsonl", 5), "held_out_split": "train"}
    else:
        own = {}
    recipe = recipe_of(train=source, **own)
    parts = task_rows(tokenizer, recipe.tasks["sums"], recipe)
    assert {name: len(rows) for name, rows in parts.items()} == {
        "train": 21,
        "validation": 4,
        "held_out": 5,
    }
    kinds = [ids_of(rows) for rows in parts.values()]
    assert len(set.union(*kinds)) == 30
    assert (
        len(
            task_rows(tokenizer, recipe.change(tasks__sums__limit=3).tasks["sums"], recipe)["train"]
        )
        == 3
    )


# SPEC 3.6: "User: {x}\n\nAssistant: {y}" and EOS, the user's part masked
@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "1 and 2", "completion": "3"},
        {
            "messages": [
                {"role": "user", "content": "1 and 2"},
                {"role": "assistant", "content": "3"},
            ]
        },
    ],
    ids=["pair", "messages"],
)
def test_deepseeks_prompt(tokenizer, row):
    (made,) = data.tokenize_pairs(tokenizer, [put_prompt(row, "deepseek")], 64)
    assert tokenizer.decode(made["input_ids"]) == "<s>User: 1 and 2\n\nAssistant: 3</s>"
    assert tokenizer.decode([label for label in made["labels"] if label != -100]) == " 3</s>"
    asked = tokenizer.apply_chat_template(
        [{"role": "user", "content": "1 and 2"}], add_generation_prompt=True
    )
    learned = sum(label == -100 for label in made["labels"])
    # a model is asked as it was trained
    assert list(asked["input_ids"]) == made["input_ids"][:learned]


def test_plain_text_needs_no_prompt(tokenizer):
    (made,) = data.tokenize_pairs(tokenizer, [put_prompt({"text": "so"}, "deepseek")], 64)
    assert made["labels"] == made["input_ids"]


def samples(*lengths, bos=1):
    """Samples of BOS, a masked prompt id and answer ids that tell sample and place."""
    rows = []
    for number, length in enumerate(lengths):
        answer = [100 * (number + 1) + place for place in range(length - 2)]
        rows.append({"input_ids": [bos, 50, *answer], "labels": [-100, -100, *answer]})
    return rows


def test_samples_are_joined_to_full_rows_and_lose_their_start():
    rows = samples(5, 6, 4, 7, 3)
    whole = 10
    joined = join(rows, whole, bos=1, seed=3)
    assert [len(row["input_ids"]) for row in joined] == [whole] * (len(joined) - 1) + [
        len(joined[-1]["input_ids"])
    ]
    for row in joined:
        assert len(row["input_ids"]) == len(row["labels"])
        for i, label in zip(row["input_ids"], row["labels"]):
            assert label in (-100, i)
        # what a row ends with is the end of a sample, so its answer
        assert row["input_ids"][-1] in {sample["input_ids"][-1] for sample in rows}
    learned = [label for row in joined for label in row["labels"] if label != -100]
    assert len(learned) == len(set(learned))  # no sample twice
    assert sorted(join(rows, whole, 1, seed=3)["input_ids"]) == sorted(joined["input_ids"])
    assert join(rows, whole, 1, seed=4)["input_ids"] != joined["input_ids"]


@pytest.mark.parametrize("ratio, count", [(0, 4), (0.5, 6), (1, 8), (2, 12)])
def test_general_rows_are_mixed_in_and_repeated(ratio, count):
    own, general = (
        Dataset.from_dict({"input_ids": [[i] for i in part]}) for part in ((1, 2, 3, 4), (8, 9))
    )
    ids = [row["input_ids"][0] for row in mixed(own, general, ratio)]
    assert len(ids) == count
    assert ids[:4] == [1, 2, 3, 4]
    assert ids[4:] == ([8, 9] * 4)[: count - 4]
