"""papers/engine/everyday.py: the examples are what they say, are held out by wording, and stay the
same.
"""

import re

import pytest

from papers.engine.everyday import INTENTS, SENTENCES, TASKS, task_rows
from papers.evaluation.evaluate_tasks import find_tasks


@pytest.fixture(scope="module")
def rows():
    return {name: task_rows(name, train=48, held_out=16) for name in TASKS}


def worded(wording: str, text: str) -> bool:
    """Whether a text is this wording with its places filled."""
    return re.fullmatch(re.sub(r"\\\{\w+\\\}", r"[\\w:]+", re.escape(wording)), text) is not None


def test_parts_have_their_sizes_and_share_nothing(rows):
    for name, (train, held_out) in rows.items():
        assert (len(train), len(held_out)) == (48, 16), name
        prompts = [row["prompt"] for row in (*train, *held_out)]
        assert len(set(prompts)) == 64, name
    assert (
        task_rows("json", train=48, held_out=16)
        == rows["json"]
        != task_rows("json", train=48, held_out=16, seed=1)
    )


def test_a_held_out_request_is_worded_like_none_to_train_on(rows):
    wordings = {}
    for label, (train, held_out) in INTENTS.items():
        wordings |= dict.fromkeys(train, (label, False)) | dict.fromkeys(held_out, (label, True))
    for place, part in enumerate(rows["intent"]):
        for row in part:
            text = row["prompt"].partition("\n")[2]
            assert {wordings[one] for one in wordings if worded(one, text)} == {
                (row["completion"], bool(place))
            }, text
    known = [
        [one for one in SENTENCES if worded(one, row["prompt"].partition("\n")[2])]
        for row in rows["json"].held_out
    ]
    assert {one for found in known for one in found} <= set(SENTENCES[-4:])
    assert all(known)


@pytest.mark.parametrize("name", ["json", "function"])
def test_the_tasks_of_eval_have_examples_of_their_own_and_judge_them(name):
    (asked,) = find_tasks(name)
    problems = [asked.task.problem(row, False) for row in asked.rows]
    golds = [problem["answer"] for problem in problems]
    for one in asked.task.judge(problems, golds, 1):
        assert one.passed
    for one in asked.task.judge(problems, [gold + " x" for gold in golds], 1):
        assert not one.passed


def test_reordered_json_is_right_and_another_value_is_not():
    (asked,) = find_tasks("json")
    problem = asked.task.problem({"prompt": "?", "completion": '{"a": 1, "b": "x"}'}, False)
    found = asked.task.judge(
        [problem] * 3, ['{"b":"x", "a":1}', '{"a": "1", "b": "x"}', '{"a": 1}'], 1
    )
    assert [one.passed for one in found] == [True, False, False]


@pytest.mark.parametrize(
    "name, sizes, message",
    [
        ("poetry", (1, 1), "task must be .*poetry"),
        ("json", (0, 1), "train must be"),
        ("json", (1, -1), "held_out must be"),
        (
            "function",
            (100_000, 1),
            r"There are only \d+ examples of function to train on, but 100000 are requested",
        ),
    ],
)
def test_bad_sizes_are_refused(name, sizes, message):
    with pytest.raises(ValueError, match=message):
        task_rows(name, train=sizes[0], held_out=sizes[1])
