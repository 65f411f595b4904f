"""papers/engine/everyday.py: the examples are correct, held out by wording, and reproducible."""

import re

import pytest

from papers.engine.everyday import INTENTS, SENTENCES, TASKS, task_rows
from papers.evaluation.evaluate_tasks import find_tasks


@pytest.fixture(scope="module")
def rows():
    return {name: task_rows(name, train=48, held_out=16) for name in TASKS}


def worded(wording: str, text: str) -> bool:
    """Whether a text has this wording, with its placeholders filled."""
    return re.fullmatch(re.sub(r"\\\{\w+\\\}", r"[\\w:]+", re.escape(wording)), text) is not None


def test_parts_have_their_sizes_and_share_nothing(rows):
    for name, (train, held_out) in rows.items():
        assert (len(train), len(held_out)) == (48, 16), name
        assert len({row["prompt"] for row in (*train, *held_out)}) == 64, name
    assert task_rows("json", train=48, held_out=16) == rows["json"]
    assert task_rows("json", train=48, held_out=16, seed=1) != rows["json"]


def test_a_held_out_request_is_worded_like_none_to_train_on(rows):
    for part, other in (("train", "held_out"), ("held_out", "train")):
        for row in getattr(rows["intent"], part):
            text = row["prompt"].partition("\n")[2]
            wordings = INTENTS[row["completion"]]
            assert any(worded(one, text) for one in wordings[part]), text
            assert not any(worded(one, text) for one in wordings[other]), text
    for row in rows["json"].held_out:
        text = row["prompt"].partition("\n")[2]
        assert any(worded(one, text) for one in SENTENCES["held_out"]), text
        assert not any(worded(one, text) for one in SENTENCES["train"]), text


@pytest.mark.parametrize("name", ["json", "function"])
def test_the_tasks_of_eval_have_examples_of_their_own_and_judge_them(name):
    (asked,) = find_tasks(name)
    problems = [asked.task.problem(row, False) for row in asked.rows]
    golds = [problem["answer"] for problem in problems]
    for one in asked.task.judge(problems, golds, 1):
        assert one.passed
    for one in asked.task.judge(
        problems,
        [gold + " x" for gold in golds],
        1,
    ):
        assert not one.passed
