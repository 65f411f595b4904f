"""Word problems with every step of the answer: `sums_of` yields an endless stream of distinct ones
of a kind.
"""

import random
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import yaml

TEXTS = yaml.safe_load(Path(__file__).with_name("words.yaml").read_text(encoding="utf-8"))


class ProblemKind(NamedTuple):
    """The numbers and steps that problems of a kind may have."""

    largest: int  # of the first number and of added ones
    steps: int  # maximum number
    factors: int  # only smaller numbers are multiplied; 0: no multiplication or division
    taken: int  # largest subtracted number


KINDS = {
    "arithmetic": ProblemKind(60, 3, 40, 999),
    "sums": ProblemKind(9, 1, 0, 9),
    "steps": ProblemKind(9, 3, 5, 9),
}


def sums_of(seed: int | str, is_held_out: bool, name: str) -> Iterator[tuple[str, str]]:
    """Yield an endless stream of distinct problems; one question in ten is held out, independently
    of the seed.
    """
    generator = random.Random(f"sums {seed}")
    known = set()
    while True:
        question, answer = _sum(generator, KINDS[name])
        if question not in known and (zlib.crc32(question.encode()) % 10 == 0) == is_held_out:
            known.add(question)
            yield question, answer


def _sum(generator: random.Random, kind: ProblemKind) -> tuple[str, str]:
    """Make one problem: a first number, one or more changes of it, and a question."""
    name, other = generator.sample(TEXTS["name"], 2)
    thing = generator.choice(TEXTS["thing"])
    case = generator.choice(TEXTS["case"])
    count = generator.randint(2, kind.largest)
    steps = []
    story = []
    for _ in range(1 if kind.steps == 1 else generator.randint(1, kind.steps)):
        event, sign, number, count_then = _change(generator, count, kind)
        story.append(
            event.format(
                name=name,
                other=other,
                thing=thing,
                case=case,
                a_case=case[:-1],
                number=number,
            )
        )
        steps.append(f"{count} {sign} {number} = {count_then}.")
        count = count_then
    first = steps[0].partition(" ")[0]
    question = (
        f"{name} has {first} {thing}. {' '.join(story)} How many {thing} does {name} have now?\n"
    )
    return (
        question,
        f"{' '.join(steps)} {name} has {count} {thing if count != 1 else thing[:-1]} now.",
    )


def _change(generator: random.Random, count: int, of: ProblemKind) -> tuple[str, str, int, int]:
    """Return an event, its sign and number, and the new count; all numbers are above 0."""
    parts = [d for d in range(2, 10) if count % d == 0]
    more = ["times"] * (1 < count < of.factors) + ["share"] * bool(parts and of.factors)
    kind = generator.choice(["more"] + ["less"] * (count > 1) + more)
    if kind == "share":
        number = generator.choice(parts)
        event = "{name} puts them into {number} {case}, the same in each, and keeps one {a_case}."
        return (
            event if of.largest > 9 else "{name} keeps one of {number} equal {case}.",
            "/",
            number,
            count // number,
        )
    if kind == "times":
        number = generator.randint(2, 5)
        event = "{other} brings so many that {name} has {number} times as many."
        return (
            event if of.largest > 9 else "{other} makes it {number} times as many.",
            "*",
            number,
            count * number,
        )
    if kind == "less":
        number = generator.randint(1, min(count - 1, of.taken))
        event = generator.choice(
            ("{name} gives {number} to {other}.", "{name} loses {number} of them.")
        )
        return event, "-", number, count - number
    number = generator.randint(1, of.largest)
    event = generator.choice(("{name} buys {number} more.", "{other} gives {number} to {name}."))
    return event, "+", number, count + number
