"""The rows of ESFT's tasks: read, told apart from those held out, tokenized and joined; and tasks that come with Python.

Tasks of the standard library are made from its documented functions: `code` asks for one by its docstring, `docstring` for the
docstring of one, `names` for its name, and `case` for the docstring's first sentence, given in upper case. Held-out rows are
of files that nothing was trained on, for every task the same files.
"""

import random
from collections.abc import Callable, Iterable, Mapping, Sequence

from moe_runtime import data
from moe_runtime.prompts import put_prompt
from moe_runtime.standard_library import standard_library_pairs, standard_library_text

GENERAL = data.BUILT_IN  # the source text itself: what the small base was trained on
HIDDEN = "f"  # the name of a function whose name is asked for


def check_source(source: str) -> None:
    """Raise ValueError for a name of the standard library's tasks that is none of them."""
    if source.startswith(f"{GENERAL}/") and source not in BUILT_IN:
        raise ValueError(
            f"train is {source!r}; want one of {', '.join(BUILT_IN)}, a file, a folder or an id of the Hub"
        )


def task_rows(tokenizer, task, recipe) -> dict:
    """Return the rows of a task or of the general text, tokenized: train, validation and held_out, the first joined.

    No row is in two of them. `task` is a Task of `recipe`. Raises ValueError for data that cannot be read or have too
    few rows.
    """
    built_in = _built_in(task)
    if built_in is not None:
        train, held_out = built_in
    elif task.held_out is None:
        train, held_out = data.hold_out(data.read_rows(task.train, task.split), task.held_out_rows)
    else:
        train, held_out = data.read_rows(task.train, task.split), data.read_rows(task.held_out, task.held_out_split)
        known = {str(row) for row in held_out}
        left = [place for place, row in enumerate(train) if str(row) not in known]
        if not left:
            raise ValueError(f"held_out is {task.held_out!r}, which has every row of train; want other rows")
        train = train.select(left)
    train, validation = data.hold_out(train, task.validation_rows, seed=1)
    parts = {}
    for name, rows, count in (
        ("train", train, task.limit), ("validation", validation, task.validation_rows),
        ("held_out", held_out, task.held_out_rows),
    ):  # fmt: skip
        put = (put_prompt(row, task.prompt) for row in rows)
        parts[name] = data.tokenize_pairs(tokenizer, put, recipe.max_length, limit=count)
    if recipe.pack:
        parts["train"] = join(parts["train"], recipe.max_length, tokenizer.bos_token_id, recipe.drop_bos)
    return parts


def join(rows: Iterable[Mapping], length: int, bos: int | None, drop_bos: float = 0.0, seed: int = 0):
    """Join samples, in an order drawn by `seed`, to a datasets.Dataset of rows of `length` ids, as ESFT's code does.

    Of the sample that a row ends with, what does not fit is cut off at its start, so its answer stays. A sample within
    a row begins without BOS with the probability `drop_bos`. Samples of one row see each other. The last row may be
    shorter.
    """
    order, generator = [dict(row) for row in rows], random.Random(seed)
    generator.shuffle(order)
    joined: list[tuple[list[int], list[int]]] = []
    ids, labels = [], []
    for row in order:
        skip = int(bool(ids) and row["input_ids"][:1] == [bos] and generator.random() < drop_bos)
        room = length - len(ids)
        own, wanted = row["input_ids"][skip:][-room:], row["labels"][skip:][-room:]
        ids, labels = ids + own, labels + wanted
        if len(ids) == length:
            joined.append((ids, labels))
            ids, labels = [], []
    if any(label != -100 for label in labels[1:]):
        joined.append((ids, labels))
    return data.require("datasets").Dataset.from_dict(
        {"input_ids": [r[0] for r in joined], "labels": [r[1] for r in joined]}
    )


def mixed(rows, general, ratio: float):
    """Return `rows` and `ratio` times as many of `general`, which are repeated where there are too few."""
    count = round(ratio * len(rows))
    if not count:
        return rows
    return data.require("datasets").concatenate_datasets(
        [rows, general.select([i % len(general) for i in range(count)])]
    )


def _built_in(task) -> tuple | None:
    """Return train and held-out rows of a task of the standard library; None for other sources."""
    make = BUILT_IN.get(task.train)
    if make is None:
        return None
    of = data.require("datasets").Dataset.from_list
    return tuple(of(rows) for rows in make())


def _pairs(make: Callable[[str, str, str], tuple[str, str] | None]) -> Callable[[], tuple]:
    """Return what makes rows of (heading, docstring, source) of each documented function; without rows of None."""

    def rows() -> tuple:
        train, held_out = (_made(part, make) for part in standard_library_pairs())
        return _named(train), _named(pair for pair in held_out if pair not in train)

    return rows


def _made(rows: Sequence[Mapping[str, str]], make) -> dict[tuple[str, str], None]:
    """The pairs made from functions, in their order, none of them twice."""
    split = ((*row["prompt"].partition("\n")[::2], row["completion"]) for row in rows)
    made = (make(heading, doc.strip(), source) for heading, doc, source in split)
    return dict.fromkeys(pair for pair in made if pair is not None)


def _named(pairs: Iterable[tuple[str, str]]) -> list[dict[str, str]]:
    return [{"prompt": prompt, "completion": completion} for prompt, completion in pairs]


def _code(heading: str, doc: str, source: str) -> tuple[str, str]:
    return f"{heading}\n{doc}\n", source


def _docstring(heading: str, doc: str, source: str) -> tuple[str, str]:
    return f"Document this Python code.\n{source}\n", doc


def _names(heading: str, doc: str, source: str) -> tuple[str, str] | None:
    name = heading.partition("(")[0].rpartition(" ")[2]
    if name.startswith("__") or f"def {name}(" not in source:
        return None
    hidden = source.replace(f"def {name}(", f"def {HIDDEN}(", 1)
    return f"Name this Python function.\n{hidden}\n", name


def _case(heading: str, doc: str, source: str) -> tuple[str, str] | None:
    sentence = " ".join(doc.partition("\n\n")[0].split())
    if not 20 <= len(sentence) <= 120 or sentence == sentence.upper():
        return None
    return f"Write this in the usual case.\n{sentence.upper()}\n", sentence


def _text() -> tuple:
    """The source text, in an order that mixes the files; no piece is in both parts."""
    train = list(dict.fromkeys(standard_library_text()))
    known = set(train)
    held_out = [text for text in dict.fromkeys(standard_library_text(held_out=True)) if text not in known]
    for documents in (train, held_out):
        random.Random(0).shuffle(documents)
    return tuple([{"text": document} for document in documents] for documents in (train, held_out))


BUILT_IN = {
    GENERAL: _text,
    f"{GENERAL}/code": _pairs(_code),
    f"{GENERAL}/docstring": _pairs(_docstring),
    f"{GENERAL}/names": _pairs(_names),
    f"{GENERAL}/case": _pairs(_case),
}
