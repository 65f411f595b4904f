"""papers.esft.recipe: the standard library's tasks, examples that are kept apart, joined and mixed,
DeepSeek's prompt.
"""

import json

import pytest
from datasets import Dataset

from moe_runtime.io.prompts import DEEPSEEK_CHAT
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
        SMALL
        | {
            "tasks": {"sums": COUNTS | task},
            "max_length": 64,
            "pack": False,
        }
    )


def write_sums(path, count=30):
    rows = [
        {
            "prompt": f"{i} and {i}",
            "completion": str(2 * i),
        }
        for i in range(count)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture(scope="module")
def library():
    return BUILT_IN["standard-library"]()


def test_held_out_text_is_of_files_that_nothing_trains_on(library):
    train, held_out = ({row["text"] for row in part} for part in library)
    assert train == set(standard_library_text())
    assert held_out == set(standard_library_text(held_out=True))
    assert not train & held_out


@pytest.mark.parametrize("held_out", [False, True], ids=["of-train", "of-its-own"])
def test_no_row_is_in_two_parts(tokenizer, tmp_path, held_out):
    source = write_sums(tmp_path / "sums.jsonl")
    more = {}
    if held_out:
        more = {
            "held_out": write_sums(tmp_path / "test.jsonl", 5),
            "held_out_split": "train",
        }
    recipe = recipe_of(train=source, **more)
    parts = task_rows(tokenizer, recipe.tasks["sums"], recipe)
    assert len(parts["train"]) == 21
    assert len(parts["validation"]) == 4
    assert len(parts["held_out"]) == 5
    ids = set()
    for rows in parts.values():
        ids |= {tuple(row) for row in rows["input_ids"]}
    assert len(ids) == 30
    few = recipe.change(tasks__sums__limit=3)
    assert len(task_rows(tokenizer, few.tasks["sums"], recipe)["train"]) == 3


# the prompt: "User: {x}\n\nAssistant: {y}" and EOS, with the user's part masked


def samples(*lengths, bos=1):
    """Return samples of BOS, a masked prompt id and answer ids that identify sample and
    position.
    """
    rows = []
    for number, length in enumerate(lengths):
        answer = [100 * (number + 1) + place for place in range(length - 2)]
        rows.append(
            {
                "input_ids": [bos, 50, *answer],
                "labels": [-100, -100, *answer],
            }
        )
    return rows


def test_samples_are_joined_to_full_rows_and_lose_their_start():
    rows = samples(5, 6, 4, 7, 3)
    ends = {row["input_ids"][-1] for row in rows}
    joined = join(rows, 10, bos=1, seed=3)
    learned = []
    for row in joined:
        assert len(row["input_ids"]) == len(row["labels"])
        for i, label in zip(row["input_ids"], row["labels"]):
            assert label in (-100, i)
            if label != -100:
                learned.append(label)
        # a row ends with the end of a sample, which is part of its answer
        assert row["input_ids"][-1] in ends
    for row in [*joined][:-1]:
        assert len(row["input_ids"]) == 10
    assert len(learned) == len(set(learned))  # no sample appears twice
    assert sorted(join(rows, 10, 1, seed=3)["input_ids"]) == sorted(joined["input_ids"])
    assert join(rows, 10, 1, seed=4)["input_ids"] != joined["input_ids"]


@pytest.mark.parametrize(
    "ratio, mixed_in",
    [
        (0, []),
        (0.5, [8, 9]),
        (1, [8, 9] * 2),
        (2, [8, 9] * 4),
    ],
)
def test_general_rows_are_mixed_in_and_repeated(ratio, mixed_in):
    rows = Dataset.from_dict({"input_ids": [[1], [2], [3], [4]]})
    general = Dataset.from_dict({"input_ids": [[8], [9]]})
    ids = [row["input_ids"][0] for row in mixed(rows, general, ratio)]
    assert ids == [1, 2, 3, 4, *mixed_in]
