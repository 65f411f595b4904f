"""papers/engine/everyday.py: the examples are what they say, are held out by wording, and stay the
same.
"""

import ast
import json
import re

import pytest

from papers.engine.everyday import INTENTS, SENTENCES, TASKS, task_rows, write_tasks
from papers.evaluation.evaluate_tasks import Choices, find_tasks


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
    for label, text in INTENTS.items():
        for line in text.splitlines():
            *train, held_out = (one.strip() for one in line.split(" | "))
            wordings |= dict.fromkeys(train, (label, False)) | {held_out: (label, True)}
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
    assert {one for found in known for one in found} <= set(SENTENCES[-4:]) and all(known)


def test_answers_hold_what_is_asked_for(rows):
    for row in (*rows["json"].train, *rows["json"].held_out):
        asked, text = re.fullmatch(
            r"Write (.+) of this text as JSON\.\n(.+)", row["prompt"]
        ).groups()
        values = json.loads(row["completion"])
        assert list(values) == asked.split(", ") and all(
            str(value) in text for value in values.values()
        )
    for row in rows["arithmetic"].held_out:
        for sum_, result in re.findall(r"([\d /*+-]+) = (\d+)\.", row["completion"]):
            assert eval(sum_) == int(result)
    for row in rows["function"].train:
        (statement,) = ast.parse(row["completion"]).body
        assert isinstance(statement, ast.Return) and row["prompt"].startswith(
            "Answer with the return statement alone.\nWrite a"
        )


def test_files_are_what_eval_takes(tmp_path):
    more = {"gsm8k": task_rows("arithmetic", train=2, held_out=1)}
    lines = write_tasks(tmp_path / "tasks", train=6, held_out=3, more=more)
    assert (
        lines["train.jsonl"] == 26
        and lines["held_out.jsonl"] == 13
        and lines["json-held_out.jsonl"] == 3
    )
    read = {path.name: path.read_text().splitlines() for path in (tmp_path / "tasks").iterdir()}
    assert {name: len(found) for name, found in read.items()} == lines
    assert sorted(read["train.jsonl"]) == sorted(
        line for name, found in read.items() if "-train" in name for line in found
    )
    asked = find_tasks(",".join(f"{name}={tmp_path}/tasks/{name}-held_out.jsonl" for name in TASKS))
    assert [next(iter(one.build(Choices(chat=True)))) for one in asked] == list(TASKS)


@pytest.mark.parametrize("name", ["json", "function"])
def test_the_tasks_of_eval_have_examples_of_their_own_and_judge_them(name):
    (asked,) = find_tasks(name)
    problems = [asked.task.problem(row, False) for row in asked.rows]
    golds = [problem["answer"] for problem in problems]
    assert all(one.passed for one in asked.task.judge(problems, golds, 1))
    assert not any(
        one.passed for one in asked.task.judge(problems, [gold + " x" for gold in golds], 1)
    )


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
