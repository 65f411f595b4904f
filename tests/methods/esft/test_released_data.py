"""ESFT's released data, id for id: the prompt "esft", packed lines, which of them validate, which
rows are scored.
"""

import json
import random

import pytest
import torch

from moe_runtime.io import rows as data
from moe_runtime.methods.esft import runs
from moe_runtime.methods.esft.packing import packed_in_order, split_lines
from moe_runtime.methods.esft.scores import SEED, released_sample
from papers.engine.tiny import train_tokenizer
from papers.esft.recipe import EsftRecipe, task_rows
from tests.papers.esft.test_recipe import SMALL


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(["User: 1 and 2\n\nAssistant: 3 \n"] * 9, 300)


def turn(role, content, **more):
    return {"role": role, "content": content, **more}


CHATS = {
    "one answer": [turn("user", " 1 and 2\n"), turn("assistant", "3\n\n")],
    "a masked answer": [
        turn("user", "1"),
        turn("assistant", "2", mask=1),
        turn("user", "2"),
        turn("assistant", " 3", mask=0),
    ],
}


@pytest.mark.parametrize("name", CHATS)
def test_turns_are_stripped_and_encoded_apart(tokenizer, name):
    expected = [tokenizer.bos_token_id]
    labels = [tokenizer.bos_token_id]  # BOS is its own label
    for one in CHATS[name]:
        is_user = one["role"] == "user"
        if is_user:
            text = f"User: {one['content'].strip()}\n\nAssistant:"
            ids = tokenizer.encode(text, add_special_tokens=False)
        else:
            ids = tokenizer.encode(
                f" {one['content'].strip()}",
                add_special_tokens=False,
            )
            ids.append(tokenizer.eos_token_id)
        expected += ids
        if is_user or one.get("mask"):
            labels += [-100] * len(ids)
        else:
            labels += ids
    chat = {"messages": CHATS[name]}
    assert data.encode(tokenizer, chat, "esft") == (expected, labels)
    assert data.encode(tokenizer, chat, "esft", "all") == (expected, expected)
    if name == "one answer":
        pair = {"prompt": " 1 and 2\n", "completion": "3\n\n"}
        assert data.encode(tokenizer, pair, "esft") == (expected, labels)


@pytest.mark.parametrize(
    "first", [turn("system", "s"), turn("user", ["1"])], ids=["system", "parts"]
)
def test_other_turns_are_refused(tokenizer, first):
    chat = [first, turn("user", "1"), turn("assistant", "2")]
    with pytest.raises(ValueError, match="requires text by the user or the assistant, but turn 1"):
        data.encode(tokenizer, {"messages": chat}, "esft")


def write_rows(path, rows):
    """JSON for a file of that name, JSONL for another."""
    if path.suffix == ".json":
        path.write_text(json.dumps(rows))
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_keys_of_later_turns_are_read(tmp_path):
    """`datasets` takes its types from the first thousand examples."""
    rows = []
    for _ in range(1501):
        rows.append({"messages": [turn("user", "1"), turn("assistant", "2")]})
    rows[1500]["messages"][1]["mask"] = 1
    read = data.read_rows(write_rows(tmp_path / "rows.jsonl", rows))
    assert [read[0], read[1500]] == [rows[0], rows[1500]]


@pytest.mark.parametrize("kind", ["jsonl", "json"])
def test_evaluation_files(tmp_path, kind):
    row = {
        "idx": 0,
        "prompt": "User: 7?\n\nAssistant:",
        "raw_answers": ["7", "x"],
        "answers": [[1]],
    }
    path = write_rows(tmp_path / f"intent.{kind}", [row])
    assert list(data.read_rows(path)) == [{"prompt": "7?", "completion": "7"}]


@pytest.mark.parametrize("kind", ["jsonl", "json"])
@pytest.mark.parametrize("is_oss", [True, False])
def test_oss_instruct_asks_for_a_solution(tmp_path, kind, is_oss):
    row = {"problem": "Add.", "solution": "+"}
    prompt = "Add."
    if is_oss:
        row |= {"lang": "python", "seed": "x"}
        prompt = "Write a solution to the following coding problem:\nAdd."
    path = write_rows(tmp_path / f"oss.{kind}", [row])
    assert list(data.read_rows(path)) == [{"prompt": prompt, "completion": "+"}]


def row(number, length):
    ids = [100 * number + i for i in range(length)]
    return ids, [-100, *ids[1:]]


def test_rows_are_packed_in_their_order():
    rows = [
        row(1, 4),
        row(2, 3),
        row(3, 9),
        row(4, 2),
        row(5, 12),
        row(6, 3),
    ]
    lines = packed_in_order(rows, 8, 0.0, pad=0)
    assert [ids for ids, _ in lines] == [
        [100, 101, 102, 103, 200, 201, 202, 308],  # of row 3 the last id fits
        [400, 401, 506, 507, 508, 509, 510, 511],
        [600, 601, 602, 0, 0, 0, 0, 0],
    ]
    assert lines[2][1] == [
        -100,
        601,
        602,
        -100,
        -100,
        -100,
        -100,
        -100,
    ]
    # a line of padding, as released
    assert packed_in_order(rows[:1], 4, 0.0, pad=0) == [row(1, 4), ([0] * 4, [-100] * 4)]


def test_the_first_id_behind_a_row_is_dropped_now_and_then():
    drawn = random.Random(SEED)
    starts = [100]  # no draw for the first row of a line
    for number in range(2, 60):
        if drawn.random() >= 0.2:
            starts.append(100 * number)
    (ids, _), *_ = packed_in_order(
        [row(n, 3) for n in range(1, 60)],
        1000,
        0.2,
        pad=0,
    )
    assert [i for i in ids if i and i % 100 == 0] == starts
    assert 40 < len(starts) < 59


def test_lines_that_validate_are_those_of_random_split():
    lines = [row(n, 4) for n in range(1, 101)]
    lines.append(([0] * 4, [-100] * 4))
    split = torch.utils.data.random_split(
        lines,
        [98, 3],
        torch.Generator().manual_seed(SEED),
    )
    for part, drawn in zip(split_lines(lines), split, strict=True):
        assert part["input_ids"] == [ids for ids, _ in drawn if any(ids)]
    with pytest.raises(ValueError, match="fill only 1 lines"):
        split_lines(lines[:1])


@pytest.mark.parametrize("ranks", [1, 4])
def test_scored_rows_are_whole_and_in_the_drawn_order(ranks):
    lengths = [5 + i % 7 for i in range(50)]
    order = list(range(50))
    random.Random(SEED).shuffle(order)
    for rank in range(ranks):
        taken = released_sample(
            50,
            lengths.__getitem__,
            80,
            (rank, ranks),
        )
        assert taken == order[rank::ranks][: len(taken)]
        tokens = sum(lengths[i] for i in taken)
        assert tokens - lengths[taken[-1]] < 80 // ranks <= tokens


def test_a_recipe_and_the_verbs_take_it(tokenizer, tmp_path):
    chats = []
    for i in range(90):
        turns = [turn("user", f"{i} and {i} "), turn("assistant", f"{2 * i}\n\n")]
        chats.append({"messages": turns})
    path = write_rows(tmp_path / "train.jsonl", chats)
    changes = {
        "tasks": {"sums": {"train": str(path), "held_out_rows": 5, "prompt": "esft"}},
        "general": {"prompt": "esft"},
        "max_length": 16,
        "pack": True,
        "drop_bos": 0.2,
    }
    recipe = EsftRecipe.from_dict(SMALL | changes)
    parts = task_rows(tokenizer, recipe.tasks["sums"], recipe)
    for name in ("train", "validation"):
        assert {len(ids) for ids in parts[name]["input_ids"]} == {16}
    assert len(parts["held_out"]) == 5
    rows = data.read_rows(path)
    encoded = [data.encode(tokenizer, row, "esft") for row in rows]
    lines = packed_in_order(encoded, 16, 0.2, tokenizer.pad_token_id)
    split = runs._split_rows(tokenizer, path, None, 16, True, "esft", "assistant")
    for part, expected in zip(split, split_lines(lines), strict=True):
        assert part["input_ids"] == expected["input_ids"]
    ids = runs._released(tokenizer, rows, 60, (0, 1))
    first = released_sample(
        90,
        lambda i: len(encoded[i][0]),
        60,
    )[0]
    assert ids[0] == encoded[first][0]
    assert sum(map(len, ids[:-1])) < 60 <= sum(map(len, ids))
