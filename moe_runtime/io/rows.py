"""Training examples: reading them, and encoding them as ids and labels, the same for every method.

.jsonl files are read here line by line, other formats by `datasets` (an extra, imported where it is
used). `read_rows` converts every format to one of three: messages; prompt and completion; text.
`encode` converts these to ids and labels:

    prompt, completion   BOS prompt completion EOS
                         labels -100 on BOS and prompt, as in the official XFT code (Sec. 4.1)
    text                 BOS text EOS
                         labels are the ids
    messages             the chat template's ids
                         labels -100 except on the assistant's turns (prompts.encode_chat)
"""

import contextlib
import gzip
import importlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, TypeAlias

from moe_runtime.config import one_line, shown
from moe_runtime.io.console import bar
from moe_runtime.io.files import parse_object
from moe_runtime.io.prompts import PROMPTS, chat_of, encode_chat, put_prompt

Dataset: TypeAlias = Any  # datasets.Dataset: an extra, imported where it is used

# the first layout whose columns are all present is used, and only its columns are kept
LAYOUTS = (
    ("messages",),
    ("prompt", "completion"),
    ("text",),
    ("instruction", "response"),
    ("instruction", "output"),
    ("query", "response"),
    ("problem", "solution"),
    ("question", "answer"),
    ("conversations",),
    ("prompt", "raw_answers"),
)
PAIR = ("prompt", "completion")
EVALUATION = ("prompt", "raw_answers")
OSS_INSTRUCT = ("problem", "solution")
# distinguish OSS-Instruct's examples from other problems with solutions
OSS_COLUMNS = ("lang", "seed")
KEPT_WITH = {
    "messages": ("tools", "chat_template_kwargs"),
    "conversations": ("tools",),
    "instruction": ("input",),
}
# role names of ShareGPT
ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "system": "system",
    "tool": "tool",
}
FORMS = LAYOUTS[:3]  # the layouts that all others are converted to
BUILDERS = {".jsonl": "json", ".json": "json", ".parquet": "parquet"}
# the name by which a recipe refers to pairs made of Python's standard library
BUILT_IN = "standard-library"
_SOURCES = (
    "Pass a .jsonl, .json or .parquet file, a folder of them, or the id of a dataset on the Hub"
)


def require(module: str, extra: str = "train") -> ModuleType:
    """Import and return a module of an optional extra.

    Raises ImportError with the command that installs it.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(
            f"{module} cannot be imported ({error}). Run pip install 'moe-runtime[{extra}]'"
        ) from error


def read_rows(path_or_id: str | Path, split: str = "train", answers: bool = True) -> Dataset:
    """Read a .jsonl, .json or .parquet file, a folder of them or a dataset of the Hub.

    .jsonl has one object per line, .json either that or an array. The columns must be those of one
    of LAYOUTS.

    Args:
        path_or_id: A file, a folder, or the id of a dataset.
        split: The split to read of a folder or a dataset.
        answers: Whether a chat without an answer is refused.

    Returns:
        A Dataset with the columns messages | prompt, completion | text.

    Raises:
        ValueError: The source does not exist, is empty, cannot be read or has other columns, or an
            example, which the message names, does not match the layout.
    """
    datasets = require("datasets")
    path = Path(path_or_id)
    name = str(path_or_id)
    problem = None
    if not path.exists():
        if path.suffix in BUILDERS or path.is_absolute() or name.startswith("."):
            problem = "does not exist"
    elif path.is_file() and path.stat().st_size == 0:
        problem = "is empty"
    elif path.is_file() and path.suffix not in BUILDERS:
        problem = f"ends in {path.suffix!r}"
    if problem:
        raise ValueError(f"Data {name!r} {problem}. {_SOURCES}")
    with _reading(name):
        if path.is_file() and path.suffix == ".jsonl":
            return _read_lines(datasets, path, name, answers)
        if path.is_file():
            rows = datasets.load_dataset(
                BUILDERS[path.suffix],
                data_files={split: str(path)},
                split=split,
            )
        else:
            rows = datasets.load_dataset(name, split=split)
        return _converted(rows, name, answers)


def _read_lines(datasets: Any, path: Path, name: str, answers: bool) -> Dataset:
    """Read a .jsonl file."""
    lines = list(_lines(path))
    columns = list(dict.fromkeys(key for _, row in lines for key in row))
    layout = _layout(columns, name)
    forms = []
    for number, row in lines:
        row = dict.fromkeys(columns) | row
        forms.append(in_form(row, layout, f"line {number} of {path}", answers))
    features = None
    if "messages" in forms[0]:
        # `datasets` infers the types from the first examples, and drops or rejects keys that only
        # later turns have
        types = dict.fromkeys(forms[0], datasets.Json())
        features = datasets.Features(types | {"messages": datasets.List(datasets.Json())})
    return datasets.Dataset.from_list(forms, features=features)


def _converted(rows: Dataset, name: str, answers: bool) -> Dataset:
    """Check every example of a Dataset and convert it as `in_form` does."""
    columns = rows.column_names
    layout = _layout(columns if len(rows) else (), name)

    def form(row: Mapping, i: int) -> dict[str, Any]:
        return in_form(row, layout, f"example {i + 1} of {name}", answers)

    return rows.map(form, with_indices=True, remove_columns=columns)


def raw_rows(path: str | Path) -> Iterator[dict[str, Any]]:
    """Yield the examples of a .jsonl, .jsonl.gz, .json or .parquet file with all their columns.

    Raises:
        ValueError: The file does not exist, is of another kind or cannot be read.
    """
    datasets = require("datasets")
    path = Path(path)
    is_lines = path.name.endswith((".jsonl", ".jsonl.gz"))
    if not path.is_file() or not (is_lines or path.suffix in BUILDERS):
        what = f"ends in {path.suffix!r}" if path.is_file() else "does not exist"
        raise ValueError(f"File {path} {what}. Pass a .jsonl, .jsonl.gz, .json or .parquet file")
    with _reading(str(path)):
        if is_lines:
            for _, row in _lines(path):
                yield row
        else:
            builder = BUILDERS[path.suffix]
            yield from datasets.load_dataset(builder, data_files=str(path), split="train")


class BadRow(ValueError):
    """An example that does not match its layout; the message names it."""


@contextlib.contextmanager
def _reading(name: str) -> Iterator[None]:
    """Convert what `datasets` raises into one ValueError."""
    try:
        yield
    except BadRow:
        raise
    except Exception as error:  # every underlying reader raises different exceptions
        cause = error
        if isinstance(error.__cause__, Exception) and type(error) is not ValueError:
            cause = error.__cause__
        if isinstance(cause, BadRow):
            raise cause from None
        reason = one_line(str(cause).strip().partition("\n")[0]) or type(cause).__name__
        raise ValueError(f"Data {name!r} cannot be read: {reason}. {_SOURCES}") from error


def _lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the number and the object of each line that is not blank.

    Raises a ValueError that names an invalid line.
    """
    size = path.stat().st_size
    with bar(f"reading {path.name}", "B") as update, open(path, "rb") as file:
        lines: Iterable[bytes] = file
        if path.suffix == ".gz":
            lines = gzip.GzipFile(fileobj=file)
        for number, line in enumerate(lines, 1):
            if number == 1:
                line = line.removeprefix(b"\xef\xbb\xbf")
            if line.strip():
                yield number, parse_object(line, f"line {number} of {path}")
            if number % 1024 == 0:
                update(file.tell(), size)


def layout_of(columns: Iterable[str]) -> tuple[str, ...]:
    """Return the first of LAYOUTS whose columns are all present, or () if there is none."""
    present = set(columns)
    for layout in LAYOUTS:
        if present.issuperset(layout):
            return layout
    return ()


def _layout(columns: Sequence[str], name: str) -> tuple[str, ...]:
    layout = layout_of(columns)
    if layout:
        return layout
    problem = "has no examples"
    if columns:
        problem = f"has the columns {one_line(', '.join(columns))}. {_rename()}"
    raise BadRow(f"Data {name!r} {problem}")


def _rename() -> str:
    """Return what to do about unknown columns, as a sentence."""
    return "Rename them to " + " | ".join(" + ".join(layout) for layout in LAYOUTS)


def in_form(
    row: Mapping, layout: tuple[str, ...], where: str, answers: bool = True
) -> dict[str, Any]:
    """Convert an example of one of LAYOUTS to messages, prompt and completion, or text.

    Args:
        row: The example.
        layout: Its entry of LAYOUTS.
        where: What a message calls it.
        answers: Whether a chat without an answer is refused.

    Raises:
        BadRow: A value does not fit the layout.
    """
    columns = (*layout, *KEPT_WITH.get(layout[0], ()))
    form = {name: row[name] for name in columns if name in row}
    if layout == ("conversations",):  # ShareGPT's, or messages under another name
        turns = form.pop("conversations")
        if isinstance(turns, list | tuple):
            turns = [_turn(turn) for turn in turns]
        form["messages"] = turns
    elif len(layout) == 2:
        prompt, answer = (form[name] for name in layout)
        more = form.get("input")
        if isinstance(prompt, str):
            if layout == EVALUATION and isinstance(answer, list | tuple) and answer:
                # in DeepSeek's format, with a list of accepted answers
                prompt = prompt.removeprefix("User: ").removesuffix("\n\nAssistant:")
                answer = answer[0]
            if layout == OSS_INSTRUCT and row.keys() >= set(OSS_COLUMNS):
                # as in Magicoder's preprocessing
                prompt = f"Write a solution to the following coding problem:\n{prompt}"
            if isinstance(more, str) and more:
                prompt = f"{prompt}\n\n{more}"
            elif more:
                prompt = more
        form = {"prompt": prompt, "completion": answer}
    check_row(form, where, answers)
    return form


def _turn(turn: Any) -> Any:
    """Convert a turn of ShareGPT."""
    if isinstance(turn, Mapping) and (role := ROLES.get(str(turn.get("from")))):
        return {"role": role, "content": turn.get("value")}
    return turn


def check_row(row: Mapping, where: str, answers: bool = False) -> None:
    """Raise BadRow unless an example is text, prompt and completion, or a valid chat.

    Args:
        row: The example.
        where: What a message calls it.
        answers: Whether a chat without an answer is refused.
    """

    def require_that(is_valid: object, name: str, value: Any, expected: str) -> None:
        if not is_valid:
            raise BadRow(f"{where}: {name} {shown(value)}, but expected {expected}")

    columns = layout_of(row)
    expected = "messages, prompt and completion, or text"
    require_that(columns in FORMS, "the columns are", list(row), expected)
    is_chat = "messages" in columns or isinstance(row.get("prompt"), list | tuple)
    for name in columns:
        if is_chat:
            is_list = isinstance(row[name], list | tuple)
            require_that(is_list, f"{name} is", row[name], "a list of messages")
        else:
            require_that(isinstance(row[name], str), f"{name} is", row[name], "a string")
    if not is_chat:
        return
    turns, prompt = chat_of(row) or ([], 0)
    for number, turn in enumerate(turns, 1):
        has_role = isinstance(turn, Mapping) and isinstance(turn.get("role"), str)
        expected = "role and content, or from (human, gpt or system) and value"
        require_that(has_role, f"turn {number} is", turn, expected)
        content = turn.get("content")  # text, parts of text, or nothing beside a tool call
        is_content = isinstance(content, str | list) or turn.get("tool_calls")
        require_that(is_content, f"the content of turn {number} is", content, "a string")
    roles = [turn["role"] for turn in turns]
    has_answer = not answers or "assistant" in roles[prompt:]
    expected = "at least one assistant turn, as only these are trained"
    require_that(has_answer, "the roles are", roles, expected)


def hold_out(
    rows: Dataset, count: int, seed: int = 0, name: str = "held_out_rows"
) -> tuple[Dataset, Dataset]:
    """Shuffle a Dataset and split off `count` examples, without any example in both parts.

    Args:
        rows: The examples.
        count: How many are held out.
        seed: Seed of the order.
        name: What an error calls the setting.

    Returns:
        The rest without duplicates of the held-out examples, and these.

    Raises:
        ValueError: Nothing is left to train on.
    """
    rows = rows.shuffle(seed=seed)
    held_out = rows.select(range(min(count, len(rows))))
    known = {str(row) for row in held_out}
    rest = [i for i in range(count, len(rows)) if str(rows[i]) not in known]
    if not rest:
        raise ValueError(
            f"{name} ({count}) leaves no training examples: the data has {len(rows)}, or the "
            "others are all duplicates of the held-out ones. Choose fewer"
        )
    return rows.select(rest), held_out


def mix(
    parts: Sequence,
    weights: Sequence[float] | None,
    limits: Sequence[int | None],
    repeat: bool = False,
    seed: int = 0,
) -> Dataset:
    """Join parts in an order drawn by `seed`; `one_form` removes the other parts' columns of a row.

    Part i contributes its N_i rows, at most limits[i], or with `weights` max(floor(t weight_i), 1)
    rows drawn by `seed`, where t = min_i N_i / weight_i.

    Args:
        parts: Datasets, or lists of rows in any form.
        weights: The share of each part; None for all rows.
        limits: The most rows of each part; None for no limit.
        repeat: Whether t = max_i N_i / weight_i, and parts that run out start again; otherwise no
            row repeats.
        seed: Seed of the order.
    """
    datasets = require("datasets")
    datasets.disable_progress_bars()
    sets = list(parts)
    for i, part in enumerate(parts):
        if isinstance(part, list):
            sets[i] = datasets.Dataset.from_list(part)
    sets = _same_types(datasets, sets)
    sizes = [min(len(part), limit or len(part)) for part, limit in zip(sets, limits, strict=True)]
    counts = sizes
    if weights is not None:
        ratios = [size / weight for size, weight in zip(sizes, weights, strict=True)]
        times = max(ratios) if repeat else min(ratios)
        counts = [max(int(times * weight + 1e-6), 1) for weight in weights]
    drawn = []
    for part, size, count in zip(sets, sizes, counts, strict=True):
        drawn.append(part.shuffle(seed=seed).select([i % size for i in range(count)]))
    return datasets.concatenate_datasets(drawn).shuffle(seed=seed)


def _same_types(datasets: Any, parts: list) -> list:
    """Convert columns of one name to one type: uneven turns of chats, text of different widths."""
    for name in dict.fromkeys(name for part in parts for name in part.column_names):
        having = [i for i, part in enumerate(parts) if name in part.column_names]
        kinds = [parts[i].features[name] for i in having]
        if all(kind == kinds[0] for kind in kinds):
            continue
        is_text = {isinstance(kind, datasets.Value) for kind in kinds}
        if len(is_text) == 2:
            raise ValueError(
                f"Column {name} is text in one source and turns in another. Use the same form in "
                "all of them"
            )
        kind = datasets.Value("string") if is_text == {True} else datasets.List(datasets.Json())
        for i in having:
            parts[i] = parts[i].cast_column(name, kind)
    return parts


def one_form(row: Mapping) -> Mapping:
    """Return a row without the columns that are null because other rows of its Dataset have them.

    A row that is in no form without them is returned unchanged.
    """
    present = {name: value for name, value in row.items() if value is not None}
    return present if layout_of(present) in FORMS else row


def save_rows(rows: Dataset, folder: Path) -> None:
    """Save a datasets.Dataset to a folder."""
    require("datasets").disable_progress_bars()
    rows.save_to_disk(str(folder))


def load_rows(folder: Path) -> Dataset:
    """Load what `save_rows` saved, memory-mapped."""
    return require("datasets").load_from_disk(str(folder))


def pack(tokenizer: Any, documents: Iterable[str], length: int) -> Dataset:
    """Split the documents' tokens, with EOS after each, into blocks of `length` ids and labels."""
    ids = []
    for document in tokenizer(list(documents), add_special_tokens=False).input_ids:
        ids += [*document, tokenizer.eos_token_id]
    blocks = [ids[i : i + length] for i in range(0, len(ids) - length + 1, length)]
    return require("datasets").Dataset.from_dict({"input_ids": blocks, "labels": blocks})


def encode(
    tokenizer: Any, row: Mapping, prompt: str = "plain", train_on: str = "assistant"
) -> tuple[list[int], list[int]]:
    """Return the ids and labels of an example, without truncation.

    BOS and EOS are added if the tokenizer has them and the text does not.

    Args:
        tokenizer: A transformers tokenizer.
        row: An example in one of LAYOUTS, as in a file or from `read_rows`.
        prompt: One of prompts.PROMPTS.
        train_on: One of prompts.TRAIN_ON.

    Returns:
        The ids, and labels that are -100 where nothing is trained.

    Raises:
        ValueError: The example has other columns, or values that do not fit them.
    """
    layout = layout_of(row)
    if not layout:
        columns = one_line(", ".join(map(str, row)))
        raise BadRow(f"The example has the columns {columns}. {_rename()}")
    if layout in FORMS:
        check_row(row, "The example")
    else:
        row = in_form(row, layout, "The example", answers=False)
    row = put_prompt(row, prompt)
    chat = chat_of(row)
    encode_turns = PROMPTS[prompt].encode_turns
    if chat and encode_turns:
        ids, labels = encode_turns(tokenizer, chat[0])
        return ids, ids if train_on == "all" else labels
    if chat:
        ids, mask = encode_chat(tokenizer, row, train_on, prompt)
        return ids, [i if trained else -100 for i, trained in zip(ids, mask, strict=True)]

    def encoded(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False) if text else []

    # encoded separately, so that the tokenizer cannot merge across the boundary
    is_pair = layout_of(row) == PAIR
    start: list[int] = encoded(row["prompt"]) if is_pair else []
    rest = encoded(row["completion"] if is_pair else row["text"])
    bos = tokenizer.bos_token_id
    eos = tokenizer.eos_token_id
    if bos is not None and (start + rest)[:1] != [bos]:
        start = [bos, *start]
    if eos is not None and rest[-1:] != [eos]:
        rest = [*rest, eos]
    if is_pair and train_on == "assistant":
        return start + rest, [-100] * len(start) + rest
    return start + rest, start + rest


def tokenize_pairs(
    tokenizer: Any,
    rows: Iterable[Mapping],
    max_length: int,
    row_ids: bool = False,
    limit: int | None = None,
    *,
    prompt: str = "plain",
    train_on: str = "assistant",
) -> Dataset:
    """Encode examples into a Dataset of input_ids and labels; long ones are cut at the end.

    Examples without any label left are dropped.

    Args:
        tokenizer: A transformers tokenizer.
        rows: Examples in the forms of `read_rows`.
        max_length: The most ids of an example.
        row_ids: Whether to add the column `row_id`, the index in `rows`, with which MoETrainer
            names a bad batch.
        limit: How many examples are returned, at most.
        prompt: One of prompts.PROMPTS.
        train_on: One of prompts.TRAIN_ON.

    Raises:
        ValueError: An example is not valid, or none remains.
    """
    datasets = require("datasets")
    columns: dict[str, list] = {"input_ids": [], "labels": []}
    if row_ids:
        columns["row_id"] = []
    for i, row in enumerate(rows):
        if len(columns["labels"]) == limit:
            break
        ids, labels = _encoded(tokenizer, row, i, prompt, train_on)
        labels = labels[:max_length]
        if any(label != -100 for label in labels[1:]):
            columns["input_ids"].append(ids[:max_length])
            columns["labels"].append(labels)
            if row_ids:
                columns["row_id"].append(i)
    if not columns["labels"]:
        raise ValueError(
            f"No example has a token to train on within max_length ({max_length}). Choose a "
            "larger one"
        )
    return datasets.Dataset.from_dict(columns)


def _encoded(
    tokenizer: Any, row: Mapping, i: int, prompt: str, train_on: str
) -> tuple[list[int], list[int]]:
    """Return the ids and labels of example i of a Dataset; errors name it."""
    row = one_form(row)
    check_row(row, f"example {i + 1}")
    return encode(tokenizer, row, prompt, train_on)


def token_ids(
    tokenizer: Any, rows: Iterable[Mapping], max_length: int, prompt: str = "plain"
) -> Iterator[list[int]]:
    """Yield the ids of each example as `tokenize_pairs` computes them, also without labels.

    Args:
        tokenizer: A transformers tokenizer.
        rows: Examples in the forms of `read_rows`.
        max_length: The most ids of an example.
        prompt: One of prompts.PROMPTS.

    Raises:
        ValueError: An example is not valid.
    """
    for i, row in enumerate(rows):
        ids, _ = _encoded(tokenizer, row, i, prompt, "all")
        if ids:
            yield ids[:max_length]
