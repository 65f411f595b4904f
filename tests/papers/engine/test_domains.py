"""papers.engine.corpora: three kinds of rows, the same on every call, and nothing held
out in what is trained on.
"""

import re
from types import SimpleNamespace

import pytest

from papers.engine import corpora
from papers.engine.corpora import DOMAINS, domain_rows, domain_text, domains_key
from papers.engine.stages import domain_documents


@pytest.mark.slow
@pytest.mark.parametrize("name", DOMAINS)
def test_rows_are_prompts_and_completions(name):
    pairs = domain_rows(name, limit=50)
    for rows in pairs:
        assert len(rows) == 50
        for row in rows:
            assert row.keys() == {"prompt", "completion"}
            assert row["prompt"].endswith("\n")
        for row in rows:
            assert row["completion"].strip()
        assert len({row["prompt"] + row["completion"] for row in rows}) == 50


@pytest.mark.parametrize("name", DOMAINS)
def test_the_seed_orders_the_rows_and_holds_out_the_same(name):
    one, again, other = (domain_rows(name, limit=200, seed=seed) for seed in (0, 0, 1))
    assert one == again
    assert one != other
    held_out = {
        row["prompt"] + row["completion"] for pairs in (one, other) for row in pairs.held_out
    }
    assert held_out.isdisjoint(
        row["prompt"] + row["completion"] for pairs in (one, other) for row in pairs.train
    )


def test_without_a_limit_all_rows_come():
    code, prose, arithmetic = (domain_rows(name) for name in DOMAINS)
    assert len(code.train) > 1000
    assert len(prose.train) > 1000
    assert len(code.held_out) > 100
    assert len(prose.held_out) > 100
    assert len(arithmetic.train) == len(arithmetic.held_out) == corpora.SUMS
    ends = {row["completion"] for row in prose.train} | {row["prompt"] for row in prose.train}
    assert ends.isdisjoint(
        {row["completion"] for row in prose.held_out} | {row["prompt"] for row in prose.held_out}
    )


def test_a_short_sum_is_one_step_of_digits():
    for row in domain_rows("sums", limit=300).train:
        left, sign, right, found = re.fullmatch(
            r"(\d) ([-+]) (\d) = (\d+)\.", row["completion"]
        ).groups()
        assert re.findall(r"\d+", row["prompt"]) == [left, right]
        assert int(found) == int(left) + (int(right) if sign == "+" else -int(right)) > 0


@pytest.mark.parametrize("name, largest", [("arithmetic", 60), ("steps", 9)])
def test_every_step_of_a_sum_is_right(name, largest):
    rows = domain_rows(name, limit=500, seed=3).train
    counts = set()
    for row in rows:
        *steps, said = row["completion"].removesuffix(".").split(". ")
        result = re.match(r"\w+ has (\d+) ", row["prompt"])[1]
        if name == "steps":
            steps = [*steps, said]
            said = f"{row['prompt'].split()[0]} has {said.split()[-1]} "
        counts.add(len(steps))
        assert 2 <= int(result) <= largest
        for step in steps:
            left, sign, right, found = re.fullmatch(r"(\d+) ([-+*/]) (\d+) = (\d+)", step).groups()
            assert left == result
            assert right in row["prompt"]
            a = int(left)
            b = int(right)
            result = str({"+": a + b, "-": a - b, "*": a * b, "/": a // b}[sign])
            assert found == result
            assert sign != "/" or a % b == 0
        assert f" has {result} " in said
        assert said.split()[0] == row["prompt"].split()[0]
    assert counts == {1, 2, 3}


def test_told_sums_answer_no_held_out_question():
    told = "\n".join(domain_text("sums"))
    assert re.search(r"\d \w+\. \w+ gives \d+ to \w+\. \d+ [-+] \d+ = \d+\. \w+ has \d+ ", told)
    assert told.count("How many") == corpora.SUMS
    rows = domain_rows("sums", limit=200)
    stories = [row["prompt"].partition(" How many")[0] for row in rows.held_out]
    assert not [story for story in stories if story in told]


def test_joined_rows_take_turns(monkeypatch):
    rows = {
        "a": corpora.Pairs(["a1", "a2"], ["a3"]),
        "b": corpora.Pairs(["b1", "b2", "b3"], ["b4"]),
    }
    monkeypatch.setattr(corpora, "domain_rows", rows.get)
    assert corpora.joined_rows("ab") == (["a1", "b1", "a2", "b2"], ["a3", "b4"])


def test_prose_is_whole_paragraphs_of_sentences():
    train, held_out = corpora._prose()
    low, high = corpora.PARAGRAPH
    for text in train + held_out:
        assert low <= len(text) <= high
        assert text[0].isupper()
        assert text[-1] in ".!?"
    for text in train + held_out:
        assert not ("\n" in text or ">>>" in text)
    row = domain_rows("prose", limit=1).train[0]
    beginning = row["prompt"].removeprefix("Continue this text.\n").removesuffix("\n")
    assert f"{beginning} {row['completion']}" in train


def test_a_lone_sentence_is_cut_between_words():
    text = "The quick brown fox jumps over the lazy dog and runs"
    prompt, rest = corpora._begun(text)
    assert prompt == "Continue this text.\nThe quick brown\n"
    assert rest == "fox jumps over the lazy dog and runs"


def test_text_to_pre_train_on_has_nothing_held_out():
    for name in DOMAINS:
        documents = domain_text(name, limit=40)
        assert len(documents) == 40
        for text in documents:
            assert text.strip()
        whole = "\n".join(domain_text(name))
        held_out = domain_rows(name, limit=60).held_out
        found = [row for row in held_out if row["completion"] in whole and row["prompt"] in whole]
        assert found == []


def test_paragraphs_of_two_sources_count_once(monkeypatch):
    text = "One paragraph of plain prose that is long enough. " * 3
    sources = [
        ("a.py", text),
        ("b.py", text.upper().capitalize()),
        ("held", text),
        ("held", text.replace("One", "Two")),
    ]
    monkeypatch.setattr(corpora, "_sources", lambda: iter(sources))
    monkeypatch.setattr(corpora, "is_held_out", lambda name: name == "held")
    train, held_out = corpora._prose.__wrapped__()
    assert train == (text.strip(),)
    assert held_out == (text.strip().replace("One", "Two"),)


def test_a_distribution_that_is_missing_has_no_version(monkeypatch):
    monkeypatch.setattr(corpora, "DISTRIBUTIONS", ("torch", "none-of-that-name"))
    assert dict(domains_key()[2])["none-of-that-name"] is None
    assert dict(domains_key()[2])["torch"]


@pytest.mark.parametrize("call", [domain_rows, domain_text])
def test_bad_input_is_one_error(call):
    with pytest.raises(ValueError, match="domain must be one of code, prose, arithmetic, sums"):
        call("law")
    with pytest.raises(ValueError, match="limit must be an integer of at least 1"):
        call("code", limit=0)


@pytest.mark.parametrize("kind", [list, iter])
def test_a_base_is_made_of_every_built_in_source_that_is_named(kind):
    documents = domain_documents(
        SimpleNamespace(documents=4, domains=None), kind(["mine.jsonl", "steps", "sums"])
    )
    assert documents == [text for name in ("sums", "steps") for text in domain_text(name, limit=2)]


def test_a_base_is_made_of_as_many_documents_of_each_domain_as_the_recipe_says():
    documents = domain_documents(
        SimpleNamespace(documents=4, domains={"sums": 3, "arithmetic": 1}), ["code"]
    )
    assert documents == domain_text("sums", limit=3) + domain_text("arithmetic", limit=1)
