"""papers.engine.corpora: three kinds of examples, the same on every call, and no held-out example
in the training data.
"""

import re

import pytest

from papers.engine import corpora
from papers.engine.corpora import DOMAINS, domain_rows, domain_text


def texts_of(rows) -> set[str]:
    """Return each example as one text."""
    return {row["prompt"] + row["completion"] for row in rows}


@pytest.mark.parametrize("name", DOMAINS)
def test_the_seed_orders_the_rows_and_holds_out_the_same(name):
    one = domain_rows(name, limit=200)
    assert domain_rows(name, limit=200, seed=0) == one
    other = domain_rows(name, limit=200, seed=1)
    assert one != other
    held_out = texts_of([*one.held_out, *other.held_out])
    assert held_out.isdisjoint(texts_of([*one.train, *other.train]))


VALUE = {
    "+": int.__add__,
    "-": int.__sub__,
    "*": int.__mul__,
    "/": int.__floordiv__,
}


def checked_steps(steps: list[str], question: str, result: int) -> int:
    """Compute the steps of an answer one after another, starting from the first number of the
    question.
    """
    for step in steps:
        left, sign, right, after = re.fullmatch(r"(\d+) ([-+*/]) (\d+) = (\d+)", step).groups()
        assert int(left) == result
        assert right in question
        assert sign != "/" or int(left) % int(right) == 0
        result = VALUE[sign](int(left), int(right))
        assert int(after) == result > 0
    return result


@pytest.mark.parametrize("name, largest", [("arithmetic", 60), ("steps", 9), ("sums", 9)])
def test_every_step_of_a_sum_is_right(name, largest):
    counts = set()
    for row in domain_rows(name, limit=500, seed=3).train:
        steps = row["completion"].removesuffix(".").split(". ")
        answer = steps.pop() if name == "arithmetic" else ""
        counts.add(len(steps))
        first = int(re.search(r"\d+", row["prompt"])[0])
        assert 1 <= first <= largest
        result = checked_steps(steps, row["prompt"], first)
        if name == "arithmetic":
            assert f" has {result} " in answer
            assert answer.split()[0] == row["prompt"].split()[0]
    assert counts == ({1} if name == "sums" else {1, 2, 3})


def test_prose_is_whole_paragraphs_of_sentences():
    train, held_out = corpora._prose()
    low, high = corpora.PARAGRAPH
    for text in train + held_out:
        assert low <= len(text) <= high
        assert text[0].isupper()
        assert text[-1] in ".!?"
        assert "\n" not in text
        assert ">>>" not in text
    row = domain_rows("prose", limit=1).train[0]
    beginning = row["prompt"].removeprefix("Continue this text.\n").removesuffix("\n")
    assert f"{beginning} {row['completion']}" in train


def test_text_to_pre_train_on_has_nothing_held_out():
    for name in DOMAINS:
        documents = domain_text(name, limit=40)
        assert len(documents) == 40
        assert min(map(len, documents)) > 1
        whole = "\n".join(domain_text(name))
        for row in domain_rows(name, limit=60).held_out:
            assert row["completion"] not in whole or row["prompt"] not in whole
