"""Rows to train on: reading them, packing, and label masks.

.jsonl files are read here, line by line; what else there is by `datasets` (an extra, imported where it is used). Packing, chat
templates and the masks of SFT are TRL's own; `tokenize_pairs` serves transformers' plain Trainer, as the official XFT code does
(its Sec. 4.1):

    input_ids = BOS prompt response EOS        labels = -100 on BOS and prompt, the ids on response and EOS
"""

import contextlib
import datetime
import importlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from moe_runtime.config import one_line, shown
from moe_runtime.io.console import bar
from moe_runtime.io.files import parse_object

# the first layout whose columns are all there counts, and only its columns are kept
LAYOUTS = (
    ("messages",), ("prompt", "completion"), ("text",), ("instruction", "response"), ("instruction", "output"),
    ("query", "response"),
)  # fmt: skip
TRL_NAMES = {"instruction": "prompt", "query": "prompt", "response": "completion", "output": "completion"}
KEPT_WITH = {"messages": ("tools", "chat_template_kwargs")}
COLUMNS = {name for names in (*LAYOUTS, *KEPT_WITH.values()) for name in names} | {"input"}
BUILDERS = {".jsonl": "json", ".json": "json", ".parquet": "parquet"}
BUILT_IN = "standard-library"  # the name of moe_runtime.experiments.corpora where a recipe names its data
_WANTED_SOURCE = "a .jsonl, .json or .parquet file, a folder of them, or the id of a data set on the Hub"


def require(module: str, extra: str = "train"):
    """Import and return a module that an extra brings; raises ImportError with the command that installs it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(f"{module} cannot be imported ({error}); pip install 'moe-runtime[{extra}]'") from error


def read_rows(path_or_id: str | Path, split: str = "train"):
    """Read a .jsonl, .json or .parquet file, a folder of them or a data set of the Hub; return a datasets.Dataset.

    .jsonl has one object per line, .json that or an array. The columns are those of one layout: messages | prompt, completion
    | text; instruction (or query) and response (or output) become prompt and completion. Raises ValueError if the source does
    not exist, is empty, cannot be read or has other columns.
    """
    datasets, path, name = require("datasets"), Path(path_or_id), str(path_or_id)
    local = path.suffix in BUILDERS or path.is_absolute() or name.startswith(".")
    is_empty = path.is_file() and path.stat().st_size == 0
    if is_empty or (path.is_file() and path.suffix not in BUILDERS) or (local and not path.exists()):
        problem = "does not exist" if not path.exists() else "is empty" if is_empty else f"ends in {path.suffix!r}"
        raise ValueError(f"data is {name!r}, which {problem}; want {_WANTED_SOURCE}")
    with _reading(datasets, path, name):
        if path.is_file() and path.suffix == ".jsonl":
            # a tuple: `datasets` treats lists as shards; the file's state makes its cache notice a change
            found, stat = dict.fromkeys(name for row in _lines(path) for name in row), path.stat()
            known = any(found.keys() >= set(layout) for layout in LAYOUTS)
            columns = tuple(column for column in found if column in COLUMNS or not known)
            state = {"path": str(path), "columns": columns, "state": (stat.st_size, stat.st_mtime_ns)}
            rows = datasets.Dataset.from_generator(_rows, gen_kwargs=state)
        elif path.is_file():
            rows = datasets.load_dataset(BUILDERS[path.suffix], data_files={split: str(path)}, split=split)
        else:
            rows = datasets.load_dataset(name, split=split)
    return _known_columns(rows, name)


@contextlib.contextmanager
def _reading(datasets, path: Path, name: str) -> Iterator[None]:
    """Turn what `datasets` raises into one ValueError, and keep it from counting a local file as a download, on the Hub."""
    before = datasets.config.HF_UPDATE_DOWNLOAD_COUNTS
    datasets.config.HF_UPDATE_DOWNLOAD_COUNTS = before and not path.exists()
    try:
        yield
    except Exception as error:  # every reader behind it has exceptions of its own
        # ours names the line; the others' own text describes what they wrap
        cause = error if type(error) is ValueError else error.__cause__ or error
        reason = one_line(str(cause).strip().partition("\n")[0]) or type(cause).__name__
        raise ValueError(f"data is {name!r}, which cannot be read: {reason}; want {_WANTED_SOURCE}") from error
    finally:
        datasets.config.HF_UPDATE_DOWNLOAD_COUNTS = before


def _rows(path: str, columns: tuple[str, ...], state: tuple[int, int]) -> Iterator[dict[str, Any]]:
    for row in _lines(Path(path)):
        yield {name: row.get(name) for name in columns}


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the object of each line that is not blank; ValueError names the line that is none."""
    size = path.stat().st_size
    with bar(f"reading {path.name}", "B") as update, open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            line = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
            if line.strip():
                yield parse_object(line, f"line {number} of {path}")
            if number % 1024 == 0:
                update(file.tell(), size)


def _known_columns(rows, name: str):
    """Keep the columns of the first known layout, under TRL's names."""
    wanted = " | ".join(" + ".join(layout) for layout in LAYOUTS)
    columns = rows.column_names
    layout = next((layout for layout in LAYOUTS if set(layout) <= set(columns)), ())
    kept = [*layout, *(column for column in KEPT_WITH.get("".join(layout), ()) if column in columns)]
    problem, first = None, rows[0] if len(rows) else {}
    texts = {column: [first[column]] for column in layout if first}
    if layout == ("messages",):
        texts["messages"] = [turn.get("content") for turn in first["messages"] or () if isinstance(turn, Mapping)]
    dates = [column for column, values in texts.items() if any(isinstance(value, datetime.date) for value in values)]
    if len(rows) == 0:
        problem = ", which has no rows; want at least one"
    elif not layout:
        problem = f" with the columns {one_line(', '.join(columns))}; want {wanted}; rename them"
    elif layout[0] == "instruction" and "input" in columns and any(rows["input"]):
        problem = ", whose column input has text; want it in the column instruction"
    elif dates:  # `datasets` turns a column of dates into timestamps: its texts are lost
        problem = f", whose {dates[0]} was read as dates; want texts; a .jsonl file keeps them"
    if problem:
        raise ValueError(f"data is {name!r}{problem}")
    rows = rows.select_columns(kept)
    return rows.rename_columns({old: TRL_NAMES[old] for old in layout if old in TRL_NAMES})


def _check_row(row: Mapping, place: int) -> None:
    """Raise ValueError, with the row's place, unless it has a known layout of texts, or a chat of role and content."""
    want = "text"
    bad = [name for name in ("prompt", "completion", "text") if not isinstance(row.get(name, ""), str)]
    messages = row.get("messages", ())
    # a turn has a role and a text, parts of one, or none beside a tool call
    turns = messages if isinstance(messages, list | tuple) else [None]
    fits = (isinstance(turn, Mapping) and isinstance(turn.get("content"), str | list | None) for turn in turns)
    if not all(fits) or not all(isinstance(turn.get("role"), str) for turn in turns):
        bad, want = ["messages"], "a list of role and content, both text"
    if not ("messages" in row or "text" in row or ("prompt" in row and "completion" in row)):
        bad, want = list(row), "prompt and completion, text or messages"
    if bad:
        raise ValueError(f"row {place} has {one_line(bad[0], 100)} {shown(row[bad[0]])}; want {want}")


def _render(tokenizer, messages, want_labels: bool):
    """Apply the tokenizer's chat template, with the mask of what is generated; ValueError if it cannot be applied."""
    try:
        out = tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
        why = "marks nothing as generated; want {% generation %} in it, and an answer"
    except Exception as error:  # a template is a program, and raises what it likes
        out, why = None, f"makes no prompt ({one_line(error, 300) or type(error).__name__})"
    if out is None or (want_labels and not any(out["assistant_masks"])):
        raise ValueError(f"messages are {shown(messages)}, of which the chat template {why}; want roles and texts it takes")
    return out


def hold_out(rows, count: int, seed: int = 0):
    """Shuffle a datasets.Dataset and return (the rest, `count` rows), no row of the one equal to a row of the other."""
    rows = rows.shuffle(seed=seed)
    held_out = rows.select(range(min(count, len(rows))))
    known = {str(row) for row in held_out}
    rest = [place for place in range(count, len(rows)) if str(rows[place]) not in known]
    if not rest:
        raise ValueError(
            f"held_out_rows is {count}, the data has {len(rows)} rows; want fewer, and others that equal none of them"
        )
    return rows.select(rest), held_out


def save_rows(rows, folder: Path) -> None:
    """Write a datasets.Dataset to a folder."""
    require("datasets").disable_progress_bars()
    rows.save_to_disk(str(folder))


def load_rows(folder: Path):
    """Read what `save_rows` wrote, mapped from the disk."""
    return require("datasets").load_from_disk(str(folder))


def pack(tokenizer, documents: Iterable[str], length: int):
    """Join the documents' tokens, EOS after each, and cut them into a Dataset of rows of `length` ids, which are the labels."""
    encoded = tokenizer(list(documents), add_special_tokens=False).input_ids
    ids = [i for document in encoded for i in [*document, tokenizer.eos_token_id]]
    blocks = [ids[i : i + length] for i in range(0, len(ids) - length + 1, length)]
    return require("datasets").Dataset.from_dict({"input_ids": blocks, "labels": blocks})


def tokenize_pairs(tokenizer, rows: Iterable[Mapping], max_length: int, row_ids: bool = False, limit: int | None = None):
    """Tokenize rows with `prompt` and `completion`, `text` or `messages` to a datasets.Dataset of input_ids and labels.

    BOS and EOS are added where the tokenizer has them; truncation cuts the end. Labels are -100 on the prompt, on what the chat
    template does not mark as generated, and nowhere in plain text. Rows without a label left are dropped; the first `limit` of
    the others are returned. `row_ids` adds the column `row_id`, a row's place in `rows`, by which MoETrainer names a bad batch.
    Raises ValueError if no row remains.
    """
    datasets = require("datasets")
    columns: dict[str, list] = {"input_ids": [], "labels": []} | ({"row_id": []} if row_ids else {})
    for place, row in enumerate(rows):
        if len(columns["labels"]) == limit:
            break
        _check_row(row, place)
        ids, labels = (values[:max_length] for values in _tokenize(tokenizer, row))
        if any(label != -100 for label in labels[1:]):
            columns["input_ids"].append(ids)
            columns["labels"].append(labels)
            if row_ids:
                columns["row_id"].append(place)
    if not columns["labels"]:
        raise ValueError(f"max_length is {max_length}, within which no row has a token to learn; want a larger one")
    return datasets.Dataset.from_dict(columns)


def token_ids(tokenizer, rows: Iterable[Mapping], max_length: int) -> Iterator[list[int]]:
    """Yield the ids of each row that has any, as `tokenize_pairs` makes them, those without a label too."""
    for place, row in enumerate(rows):
        _check_row(row, place)
        ids = _tokenize(tokenizer, row, want_labels=False)[0][:max_length]
        if ids:
            yield ids


def _tokenize(tokenizer, row: Mapping, want_labels: bool = True) -> tuple[list[int], list[int]]:
    """Return the ids and labels of one row, not truncated; raise ValueError for a chat without a label if they are wanted."""
    if "messages" in row:
        out = _render(tokenizer, row["messages"], want_labels)
        ids = out["input_ids"]
        return ids, [i if generated else -100 for i, generated in zip(ids, out["assistant_masks"])]
    bos, eos = ([i] if i is not None else [] for i in (tokenizer.bos_token_id, tokenizer.eos_token_id))
    if "prompt" in row and "completion" in row:
        # separately: the boundary is exact, whatever the tokenizer would merge across it
        prompt = bos + tokenizer.encode(row["prompt"], add_special_tokens=False)
        answer = tokenizer.encode(row["completion"], add_special_tokens=False) + eos
        return prompt + answer, [-100] * len(prompt) + answer
    ids = bos + tokenizer.encode(row["text"], add_special_tokens=False) + eos
    return ids, list(ids)
