"""Training examples: reading them, and encoding them as ids and labels, the same for every method.

.jsonl files are read here line by line, other formats by `datasets` (an extra, imported where it is
used). `read_rows` converts every format to one of three: messages; prompt and completion; text.
`encode` converts these to ids and labels:

    prompt, completion   BOS prompt completion EOS     labels -100 on BOS and prompt, as in the official XFT code (Sec. 4.1)
    text                 BOS text EOS                  labels are the ids
    messages             the chat template's ids       labels -100 except on the assistant's turns (prompts.encode_chat)
"""

import contextlib
import datetime
import gzip
import importlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from moe_runtime.config import one_line, shown
from moe_runtime.io.console import bar
from moe_runtime.io.files import parse_object
from moe_runtime.io.prompts import PROMPTS, chat_of, encode_chat, put_prompt

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
BUILDERS = {".jsonl": "json", ".json": "json", ".parquet": "parquet"}
# the name by which a recipe refers to the data of moe_runtime.experiments.corpora
BUILT_IN = "standard-library"
_SOURCES = (
    "Pass a .jsonl, .json or .parquet file, a folder of them, or the id of a dataset on the Hub"
)


def require(module: str, extra: str = "train"):
    """Import and return a module of an optional extra; raises ImportError with the command that
    installs it.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(
            f"{module} cannot be imported ({error}). Run pip install 'moe-runtime[{extra}]'"
        ) from error


def read_rows(path_or_id: str | Path, split: str = "train", answers: bool = True):
    """Read a .jsonl, .json or .parquet file, a folder of them or a dataset of the Hub into a
    datasets.Dataset.

    .jsonl has one object per line, .json either that or an array. The columns must be those of one
    layout, and become messages | prompt, completion | text. Raises ValueError if the source does
    not exist, is empty, cannot be read or has other columns, and, with the line, for an example
    that does not match the layout or, with `answers`, a chat without an answer.
    """
    datasets = require("datasets")
    path = Path(path_or_id)
    name = str(path_or_id)
    local = path.suffix in BUILDERS or path.is_absolute() or name.startswith(".")
    is_empty = path.is_file() and path.stat().st_size == 0
    if (
        is_empty
        or (path.is_file() and path.suffix not in BUILDERS)
        or (local and not path.exists())
    ):
        if not path.exists():
            problem = "does not exist"
        elif is_empty:
            problem = "is empty"
        else:
            problem = f"ends in {path.suffix!r}"
        raise ValueError(f"Data {name!r} {problem}. {_SOURCES}")
    with _reading(datasets, path, name):
        if path.is_file() and path.suffix == ".jsonl":
            # tuples, as `datasets` treats lists as shards; the file's state lets its cache notice a
            # change
            (columns, uneven), stat = _names_in(path), path.stat()
            state = {
                "path": str(path),
                "columns": columns,
                "state": (stat.st_size, stat.st_mtime_ns),
                "answers": answers,
            }
            layout = _layout(columns, name)
            features = None
            if uneven and layout[0] in ("messages", "conversations"):
                # `datasets` infers the types from the first examples, and drops or rejects keys
                # that only later turns have
                kept = {"messages": datasets.List(datasets.Json())} | dict.fromkeys(
                    _kept(layout, columns)[1:], datasets.Json()
                )
                features = datasets.Features(kept)
            return datasets.Dataset.from_generator(_rows, features=features, gen_kwargs=state)
        if path.is_file():
            rows = datasets.load_dataset(
                BUILDERS[path.suffix], data_files={split: str(path)}, split=split
            )
        else:
            rows = datasets.load_dataset(name, split=split)
        layout = _layout(rows.column_names if len(rows) else (), name)

        def form(row: Mapping, place: int) -> dict[str, Any]:
            return in_form(row, layout, f"example {place + 1} of {name}", answers)

        columns = set(rows.column_names)
        rewritten = {
            ("conversations",): True,
            EVALUATION: True,
            OSS_INSTRUCT: set(OSS_COLUMNS) <= columns,
        }
        if rewritten.get(layout) or (layout[0] == "instruction" and "input" in columns):
            return rows.map(form, with_indices=True, remove_columns=rows.column_names)
        for place, row in enumerate(rows):
            form(row, place)
        rows = rows.select_columns(_kept(layout, rows.column_names))
        names = zip(layout, ("prompt", "completion"), strict=False) if len(layout) == 2 else ()
        return rows.rename_columns({old: new for old, new in names if old != new})


def raw_rows(path: str | Path) -> Iterator[dict[str, Any]]:
    """Yield the examples of a .jsonl (or .jsonl.gz), .json or .parquet file with all their columns,
    unchanged.
    """
    datasets = require("datasets")
    path = Path(path)
    is_lines = path.name.endswith((".jsonl", ".jsonl.gz"))
    if not (is_lines or path.suffix in BUILDERS) or not path.is_file():
        what = f"ends in {path.suffix!r}" if path.is_file() else "does not exist"
        raise ValueError(f"File {path} {what}. Pass a .jsonl, .jsonl.gz, .json or .parquet file")
    with _reading(datasets, path, str(path)):
        if is_lines:
            yield from (row for _, row in _lines(path))
        else:
            yield from datasets.load_dataset(
                BUILDERS[path.suffix], data_files=str(path), split="train"
            )


class BadRow(ValueError):
    """An example that does not match its layout; the message names it."""


@contextlib.contextmanager
def _reading(datasets, path: Path, name: str) -> Iterator[None]:
    """Convert what `datasets` raises into one ValueError, and keep it from reporting a local file
    to the Hub as a download.
    """
    before = datasets.config.HF_UPDATE_DOWNLOAD_COUNTS
    datasets.config.HF_UPDATE_DOWNLOAD_COUNTS = before and not path.exists()
    try:
        yield
    except Exception as error:  # every underlying reader raises different exceptions
        # ours name the line; those of `datasets` wrap the actual cause
        cause = error if type(error) in (ValueError, BadRow) else error.__cause__ or error
        if isinstance(cause, BadRow):
            raise ValueError(str(cause)) from error
        reason = one_line(str(cause).strip().partition("\n")[0]) or type(cause).__name__
        raise ValueError(f"Data {name!r} cannot be read: {reason}. {_SOURCES}") from error
    finally:
        datasets.config.HF_UPDATE_DOWNLOAD_COUNTS = before


def _names_in(path: Path) -> tuple[tuple[str, ...], bool]:
    """Return the columns of a .jsonl file, and whether the turns of its chats have
    different keys.
    """
    columns = {}
    keys = set()
    for _, row in _lines(path):
        columns |= dict.fromkeys(row)
        chat = row.get("messages", row.get("conversations"))
        if isinstance(chat, list):
            keys |= {frozenset(turn) for turn in chat if isinstance(turn, dict)}
        else:
            keys |= set()
    return tuple(columns), len(keys) > 1


def _rows(
    path: str, columns: tuple[str, ...], state: tuple[int, int], answers: bool
) -> Iterator[dict[str, Any]]:
    layout = _layout(columns, path)
    for number, row in _lines(Path(path)):
        yield in_form(dict.fromkeys(columns) | row, layout, f"line {number} of {path}", answers)


def _lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the number and the object of each line that is not blank; raises a ValueError that
    names an invalid line.
    """
    size = path.stat().st_size
    with bar(f"reading {path.name}", "B") as update, open(path, "rb") as file:
        for number, line in enumerate(
            gzip.GzipFile(fileobj=file) if path.suffix == ".gz" else file, 1
        ):
            line = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
            if line.strip():
                yield number, parse_object(line, f"line {number} of {path}")
            if number % 1024 == 0:
                update(file.tell(), size)


def layout_of(columns: Iterable[str]) -> tuple[str, ...]:
    """Return the first of LAYOUTS whose columns are all present, or () if there is none."""
    return next((layout for layout in LAYOUTS if set(layout) <= set(columns)), ())


def _kept(layout: tuple[str, ...], columns: Iterable[str]) -> list[str]:
    return [*layout, *(name for name in columns if name in KEPT_WITH.get(layout[0], ()))]


def _layout(columns: Iterable[str], name: str) -> tuple[str, ...]:
    layout = layout_of(columns)
    if not layout:
        problem = "has no examples"
        if columns:
            problem = f"has the columns {one_line(', '.join(columns))}. {_rename()}"
        raise BadRow(f"Data {name!r} {problem}")
    return layout


def _rename() -> str:
    """Return what to do about unknown columns, as a sentence."""
    return "Rename them to " + " | ".join(" + ".join(layout) for layout in LAYOUTS)


def in_form(
    row: Mapping, layout: tuple[str, ...], where: str, answers: bool = True
) -> dict[str, Any]:
    """Convert an example of one of LAYOUTS to messages, prompt and completion, or text; raises
    BadRow with `where`.
    """
    found = {name: row[name] for name in _kept(layout, row)}
    if layout == ("conversations",):  # ShareGPT's, or messages under another name
        turns = found.pop("conversations")
        if isinstance(turns, list | tuple):
            found["messages"] = [_turn(turn) for turn in turns]
        else:
            found["messages"] = turns
    elif len(layout) == 2:
        prompt = found[layout[0]]
        answer = found[layout[1]]
        more = found.get("input")
        if (
            layout == EVALUATION
            and isinstance(prompt, str)
            and isinstance(answer, list | tuple)
            and answer
        ):
            # evaluation data: the prompt is in DeepSeek's format, and the accepted answers are a
            # list
            prompt = prompt.removeprefix("User: ").removesuffix("\n\nAssistant:")
            answer = answer[0]
        if layout == OSS_INSTRUCT and set(OSS_COLUMNS) <= set(row) and isinstance(prompt, str):
            # as in Magicoder's preprocessing
            prompt = f"Write a solution to the following coding problem:\n{prompt}"
        if more and isinstance(prompt, str):
            prompt = f"{prompt}\n\n{more}" if isinstance(more, str) else more
        found = {"prompt": prompt, "completion": answer}
    check_row(found, where, answers)
    return found


def _turn(turn: Any) -> Any:
    role = ROLES.get(str(turn.get("from"))) if isinstance(turn, Mapping) else None
    return {"role": role, "content": turn.get("value")} if role else turn


def check_row(row: Mapping, where: str, answers: bool = False) -> None:
    """Raise BadRow, which names the value, unless an example is text, prompt and completion, or a
    valid chat.
    """
    columns = next((layout for layout in LAYOUTS[:3] if row.keys() >= set(layout)), ())
    is_chat = "messages" in columns or isinstance(row.get("prompt"), list | tuple)
    bad = [name for name in columns if not isinstance(row[name], list | tuple if is_chat else str)]
    if not columns:
        wrong = ("the columns are", list(row), "messages, prompt and completion, or text")
    elif bad:
        wrong = (f"{bad[0]} is", row[bad[0]], "a list of messages" if is_chat else "a string")
    else:
        wrong = _wrong_turn(*chat_of(row), answers) if is_chat else None
    if wrong:
        value = "null" if wrong[1] is None else shown(wrong[1])
        if isinstance(wrong[1], datetime.date):
            dated = ". Use a .jsonl file, which keeps strings that look like dates"
        else:
            dated = ""
        raise BadRow(f"{where}: {wrong[0]} {value}, but expected {wrong[2]}{dated}")


def _wrong_turn(turns: list, prompt: int, answers: bool) -> tuple[str, Any, str] | None:
    """Return name, value and expectation of what is wrong with a chat whose first `prompt` turns
    are not trained.
    """
    for number, turn in enumerate(turns, 1):
        if not isinstance(turn, Mapping) or not isinstance(turn.get("role"), str):
            return (
                f"turn {number} is",
                turn,
                "role and content, or from (human, gpt or system) and value",
            )
        content = turn.get("content")  # text, parts of text, or nothing beside a tool call
        if not isinstance(content, str | list) and (
            content is not None or not turn.get("tool_calls")
        ):
            return f"the content of turn {number} is", content, "a string"
    if answers and not any(turn["role"] == "assistant" for turn in turns[prompt:]):
        return (
            "the roles are",
            [turn["role"] for turn in turns],
            "at least one assistant turn, as only these are trained",
        )
    return None


def hold_out(rows, count: int, seed: int = 0, name: str = "held_out_rows"):
    """Shuffle a datasets.Dataset and return (the rest, `count` examples), without any example in
    both.
    """
    rows = rows.shuffle(seed=seed)
    held_out = rows.select(range(min(count, len(rows))))
    known = {str(row) for row in held_out}
    rest = [place for place in range(count, len(rows)) if str(rows[place]) not in known]
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
):
    """Join parts, datasets.Datasets or lists of rows in any form, into one Dataset in an order
    drawn by `seed`.

    Part i contributes its N_i rows, at most limits[i], or with `weights` max(floor(t weight_i), 1)
    rows drawn by `seed`, where t = min_i N_i / weight_i, so that no row repeats; with `repeat` t =
    max_i, and parts that run out start again. `one_form` removes the other parts' columns from a
    row.
    """
    datasets = require("datasets")
    datasets.disable_progress_bars()
    parts = [datasets.Dataset.from_list(part) if isinstance(part, list) else part for part in parts]
    parts = [part.shuffle(seed=seed) for part in _same_types(datasets, parts)]
    sizes = [min(len(part), limit or len(part)) for part, limit in zip(parts, limits, strict=True)]
    counts = sizes
    if weights is not None:
        times = (max if repeat else min)(
            size / weight for size, weight in zip(sizes, weights, strict=True)
        )
        counts = [max(int(times * weight + 1e-6), 1) for weight in weights]
    drawn = [
        part.select([i % size for i in range(count)])
        for part, size, count in zip(parts, sizes, counts, strict=True)
    ]
    return datasets.concatenate_datasets(drawn).shuffle(seed=seed)


def _same_types(datasets, parts: list) -> list:
    """Convert columns of the same name to one type: chats whose turns have different keys, text of
    different widths.
    """
    for name in dict.fromkeys(name for part in parts for name in part.column_names):
        kinds = [part.features[name] for part in parts if name in part.column_names]
        is_text = {isinstance(kind, datasets.Value) for kind in kinds}
        if len(is_text) == 2:
            raise ValueError(
                f"Column {name} is text in one source and turns in another. Use the same form in "
                "all of them"
            )
        if any(kind != kinds[0] for kind in kinds):
            kind = datasets.Value("string") if is_text == {True} else datasets.List(datasets.Json())
            parts = [
                part.cast_column(name, kind) if name in part.column_names else part
                for part in parts
            ]
    return parts


def one_form(row: Mapping) -> Mapping:
    """Return a row without the columns that are null because other rows of its Dataset have
    them.
    """
    own = {name: value for name, value in row.items() if value is not None}
    return own if layout_of(own) in LAYOUTS[:3] else row


def save_rows(rows, folder: Path) -> None:
    """Save a datasets.Dataset to a folder."""
    require("datasets").disable_progress_bars()
    rows.save_to_disk(str(folder))


def load_rows(folder: Path):
    """Load what `save_rows` saved, memory-mapped."""
    return require("datasets").load_from_disk(str(folder))


def pack(tokenizer, documents: Iterable[str], length: int):
    """Concatenate the documents' tokens with EOS after each, and split them into blocks of `length`
    ids, also the labels.
    """
    encoded = tokenizer(list(documents), add_special_tokens=False).input_ids
    ids = [i for document in encoded for i in [*document, tokenizer.eos_token_id]]
    blocks = [ids[i : i + length] for i in range(0, len(ids) - length + 1, length)]
    return require("datasets").Dataset.from_dict({"input_ids": blocks, "labels": blocks})


def encode(
    tokenizer, row: Mapping, prompt: str = "plain", train_on: str = "assistant"
) -> tuple[list[int], list[int]]:
    """Return the ids and labels of an example, -100 on tokens that are not trained, without
    truncation.

    `row` is in one of LAYOUTS, as in a file or from `read_rows`. BOS and EOS are added if the
    tokenizer has them and the text does not. `prompt` is one of prompts.PROMPTS, `train_on` is one
    of prompts.TRAIN_ON. Raises ValueError for other columns and for values that do not fit them.
    """
    layout = layout_of(row)
    if not layout:
        raise BadRow(
            f"The example has the columns {one_line(', '.join(map(str, row)))}. {_rename()}"
        )
    if layout in LAYOUTS[:3]:
        check_row(row, "The example")
    else:
        row = in_form(row, layout, "The example", answers=False)
    row = put_prompt(row, prompt)
    encode_turns = PROMPTS[prompt].encode_turns
    chat = chat_of(row)
    if chat and encode_turns:
        ids, labels = encode_turns(tokenizer, chat[0])
        return ids, ids if train_on == "all" else labels
    if chat:
        ids, mask = encode_chat(tokenizer, row, train_on, prompt)
        return ids, [i if trained else -100 for i, trained in zip(ids, mask, strict=True)]
    # encoded separately, so that the tokenizer cannot merge across the boundary
    is_pair = "completion" in row
    bos = tokenizer.bos_token_id
    eos = tokenizer.eos_token_id
    given, answer = (
        tokenizer.encode(part, add_special_tokens=False) if part else []
        for part in ((row["prompt"], row["completion"]) if is_pair else ("", row["text"]))
    )
    given = given if bos is None or (given + answer)[:1] == [bos] else [bos, *given]
    ids = given + answer + ([] if eos is None or answer[-1:] == [eos] else [eos])
    skip = len(given) if is_pair and train_on == "assistant" else 0
    return ids, [-100] * skip + ids[skip:]


def tokenize_pairs(
    tokenizer,
    rows: Iterable[Mapping],
    max_length: int,
    row_ids: bool = False,
    limit: int | None = None,
    *,
    prompt: str = "plain",
    train_on: str = "assistant",
):
    """Encode examples into a datasets.Dataset of input_ids and labels; long ones are truncated at
    the end.

    Examples without any label left are dropped, and the first `limit` of the others are returned.
    `row_ids` adds the column `row_id`, the index in `rows`, with which MoETrainer names a bad
    batch. Raises ValueError if no example remains.
    """
    datasets = require("datasets")
    columns: dict[str, list] = {"input_ids": [], "labels": []} | ({"row_id": []} if row_ids else {})
    for place, row in enumerate(rows):
        if len(columns["labels"]) == limit:
            break
        row = one_form(row)
        check_row(row, f"example {place + 1}")
        ids, labels = (values[:max_length] for values in encode(tokenizer, row, prompt, train_on))
        if any(label != -100 for label in labels[1:]):
            columns["input_ids"].append(ids)
            columns["labels"].append(labels)
            if row_ids:
                columns["row_id"].append(place)
    if not columns["labels"]:
        raise ValueError(
            f"No example has a token to train on within max_length ({max_length}). Choose a larger "
            "one"
        )
    return datasets.Dataset.from_dict(columns)


def token_ids(
    tokenizer, rows: Iterable[Mapping], max_length: int, prompt: str = "plain"
) -> Iterator[list[int]]:
    """Yield the ids of each example, as `tokenize_pairs` computes them, including those without
    labels.
    """
    for place, row in enumerate(rows):
        row = one_form(row)
        check_row(row, f"example {place + 1}")
        ids = encode(tokenizer, row, prompt, "all")[0][:max_length]
        if ids:
            yield ids
