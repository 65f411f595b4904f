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
    ids, labels = data.encode(tokenizer, {"messages": CHATS[name]}, "esft")
    parts = [[tokenizer.bos_token_id]]
    known = [True]  # BOS is its own label
    for one in CHATS[name]:
        is_user = one["role"] == "user"
        if is_user:
            text = f"User: {one['content'].strip()}\n\nAssistant:"
        else:
            text = f" {one['content'].strip()}"
        parts.append(
            tokenizer.encode(text, add_special_tokens=False)
            + ([] if is_user else [tokenizer.eos_token_id])
        )
        known.append(not is_user and not one.get("mask"))
    assert ids == [i for part in parts for i in part]
    assert labels == [
        i if keep else -100 for part, keep in zip(parts, known, strict=True) for i in part
    ]
    assert data.encode(tokenizer, {"messages": CHATS[name]}, "esft", "all") == (ids, ids)
    pair = {"prompt": " 1 and 2\n", "completion": "3\n\n"}
    assert name != "one answer" or data.encode(tokenizer, pair, "esft") == (ids, labels)


@pytest.mark.parametrize(
    "chat",
    [
        [turn("system", "s"), turn("user", "1"), turn("assistant", "2")],
        [turn("user", ["1"]), turn("assistant", "2")],
    ],
    ids=["system", "parts"],
)
def test_other_turns_are_refused(tokenizer, chat):
    with pytest.raises(
        ValueError, match=r"requires text by the user or the assistant, but turn 1 is"
    ):
        data.encode(tokenizer, {"messages": chat}, "esft")


def test_keys_of_later_turns_are_read(tmp_path):
    """`datasets` takes its types from the first thousand examples."""
    rows = [
        {
            "messages": [
                turn("user", "1"),
                turn("assistant", "2", **({"mask": 1} if i == 1500 else {})),
            ]
        }
        for i in range(1501)
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    read = data.read_rows(tmp_path / "rows.jsonl")
    assert [read[0], read[1500]] == [rows[0], rows[1500]]


@pytest.mark.parametrize("kind", ["jsonl", "json"])
def test_evaluation_files(tmp_path, kind):
    rows = [
        {
            "idx": i,
            "prompt": f"User: {i}?\n\nAssistant:",
            "raw_answers": [str(i), "x"],
            "answers": [[1]],
        }
        for i in range(2)
    ]
    text = json.dumps(rows) if kind == "json" else "\n".join(map(json.dumps, rows))
    path = tmp_path / f"intent.{kind}"
    path.write_text(text)
    assert list(data.read_rows(path)) == [
        {"prompt": f"{i}?", "completion": str(i)} for i in range(2)
    ]


@pytest.mark.parametrize("kind", ["jsonl", "json"])
@pytest.mark.parametrize("is_oss", [True, False])
def test_oss_instruct_asks_for_a_solution(tmp_path, kind, is_oss):
    rows = [
        {"problem": "Add.", "solution": "+"} | ({"lang": "python", "seed": "x"} if is_oss else {})
    ]
    path = tmp_path / f"oss.{kind}"
    path.write_text(json.dumps(rows[0] if kind == "jsonl" else rows))
    asked = "Write a solution to the following coding problem:\nAdd." if is_oss else "Add."
    assert list(data.read_rows(path)) == [{"prompt": asked, "completion": "+"}]


def row(number, length):
    return [100 * number + i for i in range(length)], [
        100 * number + i if i else -100 for i in range(length)
    ]


def test_rows_are_packed_in_their_order():
    rows = [row(1, 4), row(2, 3), row(3, 9), row(4, 2), row(5, 12), row(6, 3)]
    lines = packed_in_order(rows, 8, 0.0, pad=0)
    assert [ids for ids, _ in lines] == [
        [100, 101, 102, 103, 200, 201, 202, 308],  # of row 3 the last id fits
        [400, 401, 506, 507, 508, 509, 510, 511],
        [600, 601, 602, 0, 0, 0, 0, 0],
    ]
    assert lines[2][1] == [-100, 601, 602, -100, -100, -100, -100, -100]
    # a line of padding, as released
    assert packed_in_order(rows[:1], 4, 0.0, pad=0) == [row(1, 4), ([0] * 4, [-100] * 4)]


def test_the_first_id_behind_a_row_is_dropped_now_and_then():
    rows = [row(n, 3) for n in range(1, 60)]
    drawn = random.Random(SEED)
    (line, *_), starts = packed_in_order(rows, 1000, 0.2, pad=0), []
    for number in range(1, 60):  # no draw for the first row of a line
        starts += [] if number > 1 and drawn.random() < 0.2 else [100 * number]
    assert [i for i in line[0] if i and i % 100 == 0] == starts and 40 < len(starts) < 59


def test_lines_that_validate_are_those_of_random_split():
    lines = [row(n, 4) for n in range(1, 101)] + [([0] * 4, [-100] * 4)]
    train, validation = split_lines(lines)
    split = torch.utils.data.random_split(lines, [98, 3], torch.Generator().manual_seed(SEED))
    for part, want in zip((train, validation), split, strict=True):
        assert part["input_ids"] == [
            ids for ids, labels in want if any(label != -100 for label in labels)
        ]
    with pytest.raises(ValueError, match="fill only 1 lines"):
        split_lines(lines[:1])


@pytest.mark.parametrize("ranks", [1, 4])
def test_scored_rows_are_whole_and_in_the_drawn_order(ranks):
    lengths = [5 + i % 7 for i in range(50)]
    order = list(range(50))
    random.Random(SEED).shuffle(order)
    for rank in range(ranks):
        taken = released_sample(50, lengths.__getitem__, 80, (rank, ranks))
        assert taken == order[rank::ranks][: len(taken)]
        assert (
            sum(map(lengths.__getitem__, taken[:-1]))
            < 80 // ranks
            <= sum(map(lengths.__getitem__, taken))
        )


def test_a_recipe_and_the_verbs_take_it(tokenizer, tmp_path):
    chats = [
        {"messages": [turn("user", f"{i} and {i} "), turn("assistant", f"{2 * i}\n\n")]}
        for i in range(90)
    ]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in chats))
    task = {"train": str(tmp_path / "train.jsonl"), "held_out_rows": 5, "prompt": "esft"}
    recipe = EsftRecipe.from_dict(
        SMALL
        | {
            "tasks": {"sums": task},
            "general": {"prompt": "esft"},
            "max_length": 16,
            "pack": True,
            "drop_bos": 0.2,
        }
    )
    parts = task_rows(tokenizer, recipe.tasks["sums"], recipe)
    assert {len(ids) for name in ("train", "validation") for ids in parts[name]["input_ids"]} == {
        16
    }
    assert len(parts["held_out"]) == 5 and len(parts["validation"]) >= 1
    encoded = [
        data.encode(tokenizer, row, "esft") for row in data.read_rows(tmp_path / "train.jsonl")
    ]
    lines = packed_in_order(encoded, 16, 0.2, tokenizer.pad_token_id)
    train, validation = runs._split_rows(
        tokenizer, tmp_path / "train.jsonl", None, 16, True, "esft", "assistant"
    )
    assert [train["input_ids"], validation["input_ids"]] == [
        part["input_ids"] for part in split_lines(lines)
    ]
    ids = runs._released(tokenizer, data.read_rows(tmp_path / "train.jsonl"), 60, (0, 1))
    assert [ids[0], len(ids[-1])] == [
        encoded[released_sample(90, lambda i: len(encoded[i][0]), 60)[0]][0],
        len(ids[-1]),
    ]
    assert sum(map(len, ids[:-1])) < 60 <= sum(map(len, ids))
