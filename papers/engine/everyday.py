"""Four tasks without downloads that a small pretrained model learns in minutes.

intent      a request in a user's words -> one of ten labels
json        a sentence about an order, a trip or a meeting -> its named parts as a JSON object
arithmetic  the domain of `papers.engine.corpora`: word problems -> every step and the
            answer
function    signature and docstring of a function in Python's standard library -> its single return
            statement

Held-out requests and sentences have wordings that no training example has, held-out functions come
from other files, and held-out problems have other questions. The examples depend on `seed` and, for
functions, on the version of Python; which ones are held out does not depend on the seed.
"""

import ast
import itertools
import json
import random
import string
from collections.abc import Iterator
from pathlib import Path

from moe_runtime.config import check_choice, check_positive
from moe_runtime.io.files import atomic_folder
from papers.engine.corpora import SplitRows, domain_rows, standard_library_pairs
from papers.engine.sums import TEXTS

INTENTS = TEXTS["intents"]
SENTENCES = TEXTS["sentences"]
WORDS = {name: TEXTS[name] for name in ("name", "thing", "city", "day")}
PARTS = ("train", "held_out")
LONGEST = 160  # characters of a function's prompt
FUNCTIONS = 80  # that are held out, of this length


def _intents(generator: random.Random, is_held_out: bool) -> Iterator[tuple[str, str]]:
    while True:
        label = generator.choice(list(INTENTS))
        wording = generator.choice(INTENTS[label][PARTS[is_held_out]])
        yield f"What is the intent of this request?\n{_filled(wording, generator)[0]}", label


def _objects(generator: random.Random, is_held_out: bool) -> Iterator[tuple[str, str]]:
    while True:
        wording = generator.choice(SENTENCES[PARTS[is_held_out]])
        text, values = _filled(wording, generator)
        yield f"Write {', '.join(values)} of this text as JSON.\n{text}", json.dumps(values)


def _filled(wording: str, generator: random.Random) -> tuple[str, dict]:
    """Return a wording with its placeholders filled, and the values."""
    values = {name: generator.choice(words) for name, words in WORDS.items()}
    values |= {
        "number": generator.randint(2, 60),
        "time": f"{generator.randint(1, 12)}:{generator.randrange(0, 60, 5):02}",
    }
    used = [name for _, name, _, _ in string.Formatter().parse(wording) if name]
    return wording.format(**values), {name: values[name] for name in used}


def _functions(generator: random.Random, is_held_out: bool) -> Iterator[tuple[str, str]]:
    rows = standard_library_pairs()[is_held_out]
    generator.shuffle(rows)
    for row in rows:
        function = ast.parse(row["completion"]).body[0]
        if (
            len(row["prompt"]) <= LONGEST
            and not function.decorator_list
            and isinstance(function.body[0], ast.Return)
        ):
            yield (
                f"Answer with the return statement alone.\n{row['prompt']}".rstrip(),
                ast.unparse(function.body[0]),
            )


def _sums(generator: random.Random, is_held_out: bool) -> Iterator[tuple[str, str]]:
    for row in domain_rows("arithmetic", seed=generator.randrange(2**32))[is_held_out]:
        yield row["prompt"].rstrip(), row["completion"]


_MAKERS = {"intent": _intents, "json": _objects, "arithmetic": _sums, "function": _functions}
TASKS = tuple(_MAKERS)


def task_rows(name: str, *, train: int, held_out: int, seed: int = 0) -> SplitRows:
    """Return distinct training and held-out examples of a task, with prompt and completion.

    Raises ValueError if there are fewer: the standard library has only a few hundred functions.
    """
    check_choice("task", name, TASKS)
    parts = []
    for is_held_out, count in ((False, train), (True, held_out)):
        check_positive(PARTS[is_held_out], count)
        examples: dict[str, str] = {}
        tries = _MAKERS[name](random.Random(f"{name} {seed} {is_held_out}"), is_held_out)
        for _, (prompt, completion) in zip(range(100 * count), tries, strict=False):
            examples.setdefault(prompt, completion)
            if len(examples) == count:
                break
        if len(examples) < count:
            where = "held out" if is_held_out else "to train on"
            raise ValueError(
                f"There are only {len(examples)} examples of {name} {where}, but {count} are "
                "requested"
            )
        parts.append(
            [
                {"prompt": prompt, "completion": completion}
                for prompt, completion in examples.items()
            ]
        )
    return SplitRows(*parts)


def joined_tasks() -> SplitRows:
    """Return FUNCTIONS training and held-out examples of each task, one of each in turn."""
    tasks = [task_rows(name, train=FUNCTIONS, held_out=FUNCTIONS) for name in TASKS]
    parts = [[*itertools.chain(*zip(*part, strict=True))] for part in zip(*tasks, strict=True)]
    return SplitRows(*parts)


def write_tasks(
    folder: str | Path,
    *,
    train: int = 80,
    held_out: int = 40,
    seed: int = 0,
    more: dict[str, SplitRows] | None = None,
    overwrite: bool = False,
) -> dict[str, int]:
    """Write train.jsonl and held_out.jsonl with all tasks, shuffled, and TASK-train.jsonl and
    TASK-held_out.jsonl for each.

    `more` holds additional tasks by name. Returns the number of lines of each file.
    """
    tasks = {name: task_rows(name, train=train, held_out=held_out, seed=seed) for name in TASKS} | (
        more or {}
    )
    files = {}
    generator = random.Random(f"order {seed}")
    for index, part in enumerate(SplitRows._fields):
        files[part] = [row for rows in tasks.values() for row in rows[index]]
        generator.shuffle(files[part])
        for name, rows in tasks.items():
            files[f"{name}-{part}"] = rows[index]
    with atomic_folder(folder, overwrite) as tmp:
        for name, rows in files.items():
            (tmp / f"{name}.jsonl").write_text(
                "".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8"
            )
    return {f"{name}.jsonl": len(rows) for name, rows in files.items()}
