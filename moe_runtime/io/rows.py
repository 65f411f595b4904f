"""Rows to train on: reading them, packing, and label masks.

`datasets` reads (an extra, loaded where it is used). Packing, chat templates and the masks of SFT are TRL's own;
`tokenize_pairs` serves transformers' plain Trainer, as the official XFT code does (its Sec. 4.1):

    input_ids = BOS prompt response EOS        labels = -100 on BOS and prompt, the ids on response and EOS

Rows checked as files hold them: `datasets` ends the process on some broken JSON lines, and takes texts for dates.
"""

import contextlib
import gzip
import importlib
import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from moe_runtime.config import shown
from moe_runtime.io.console import bar
from moe_runtime.io.files import parse_object

BOM = b"\xef\xbb\xbf"


@contextlib.contextmanager
def uncounted(datasets, is_local: bool) -> Iterator[None]:
    """Keep `datasets` from telling the Hub, over the network, that a local file is read."""
    before = datasets.config.HF_UPDATE_DOWNLOAD_COUNTS
    datasets.config.HF_UPDATE_DOWNLOAD_COUNTS = before and not is_local
    try:
        yield
    finally:
        datasets.config.HF_UPDATE_DOWNLOAD_COUNTS = before


def check_lines(source: Path, columns: Collection[str]) -> None:
    """Raise ValueError, with file and line, unless a .jsonl file, or .json of lines, is JSON objects, one a line.

    Of a folder, every such file that `datasets` would find. NaN is refused in `columns` alone, those that are used. Every
    process of a run looks for itself: `datasets` would end any of them.
    """
    for path in _files(source) if source.is_dir() else [source]:
        if not _is_jsonl(path) and path.suffix != ".json" and not path.name.endswith(".json.gz"):
            continue
        first = _first_line(path)
        if _is_jsonl(path) and first.startswith(b"["):
            raise ValueError(f"{path} begins with a JSON array; want one object a line, or a name that ends in .json")
        if has_lines(path):
            for _ in _lines(path, columns):
                pass
        elif first.startswith(b"{"):
            with _open(path) as file:
                parse_object(file.read().removeprefix(BOM), str(path))


def _files(folder: Path) -> Iterator[Path]:
    """Yield the files below a folder but for the hidden ones, which `datasets` passes over."""
    for path in sorted(folder.rglob("*")):
        hidden = any(part.startswith((".", "__")) for part in path.relative_to(folder).parts)
        if not hidden and path.is_file():
            yield path


def _is_jsonl(path: Path) -> bool:
    return path.name.endswith((".jsonl", ".jsonl.gz"))


def has_lines(path: Path) -> bool:
    """Whether a file is read line by line: .jsonl, and .json that is neither an array nor one object over several lines."""
    first = _first_line(path)
    return _is_jsonl(path) or (first.startswith(b"{") and first.endswith(b"}"))


def _first_line(path: Path) -> bytes:
    """Return the first line that is not blank, stripped; the beginning of an array, which may be one line of gigabytes."""
    with _open(path) as file:
        first = file.readline(4096).removeprefix(BOM)
        while first and not first.strip():
            first = file.readline(4096)
        if first.lstrip().startswith(b"{") and not first.endswith(b"\n"):
            first += file.readline()
        return first.strip()


@contextlib.contextmanager
def _open(path: Path, raw: IO[bytes] | None = None) -> Iterator[IO[bytes]]:
    """Open a file, packed by gzip or not; `raw` is the file as it lies on the disk, if it is open."""
    with open(path, "rb") if raw is None else contextlib.nullcontext(raw) as opened:
        if path.suffix == ".gz":
            with gzip.open(opened) as file:
                yield file
        else:
            yield opened


def line_source(path: Path, columns: Collection[str]) -> dict[str, Any]:
    """Return what Dataset.from_generator reads a file of lines by: those of `columns` that its first row has, as they stand."""
    stat = path.stat()
    # a tuple: `datasets` takes lists for shards, and wants all of one length
    names = tuple(name for name in next(_lines(path, columns)) if name in columns)
    # the file's state is part of what the cache is looked up by
    state = {"path": str(path), "names": names, "state": (stat.st_size, stat.st_mtime_ns)}
    return {"generator": _rows, "gen_kwargs": state}


def _rows(path: str, names: tuple[str, ...], state: tuple[int, int]) -> Iterator[dict[str, Any]]:
    for row in _lines(Path(path), names):
        yield {name: row.get(name) for name in names}


def _lines(path: Path, columns: Collection[str]) -> Iterator[dict[str, Any]]:
    """Yield the object of each line that is not blank, holding one at a time; ValueError for NaN in one of `columns`."""
    size = path.stat().st_size
    with bar(f"reading {path.name}", "B") as update, open(path, "rb") as raw, _open(path, raw) as file:
        for number, line in enumerate(file, 1):
            line = line.removeprefix(BOM) if number == 1 else line
            if line.strip():
                row = parse_object(line, place := f"line {number} of {path}")
                if b"NaN" in line or b"Infinity" in line:
                    _check_finite(row, columns, place)
                yield row
            if number % 1024 == 0:
                update(raw.tell(), size)


def _check_finite(row: Mapping, columns: Collection[str], place: str) -> None:
    for name in columns:
        try:
            json.dumps(row.get(name), allow_nan=False)
        except ValueError as error:
            raise ValueError(f"{place} is not valid JSON ({name} has NaN or Infinity); want one JSON object") from error


def holds_dates(kind: Any) -> bool:
    """Whether a column's texts were read as dates, by its feature; of chats, the roles' and the contents'."""
    if isinstance(kind, Mapping):
        return any(holds_dates(part) for name, part in kind.items() if name in ("role", "content", "type", "text"))
    if isinstance(kind, list | tuple):
        return any(map(holds_dates, kind))
    inner = getattr(kind, "feature", None)
    return holds_dates(inner) if inner is not None else str(getattr(kind, "dtype", "")).startswith("timestamp")


def check_row(row: Mapping, place: int) -> None:
    """Raise ValueError, with the row's place, for a text that is none and for a chat of other than roles and contents."""
    for name in ("prompt", "completion", "text"):
        if name in row and not isinstance(row[name], str):
            raise ValueError(f"row {place} has {name} {shown(row[name])}; want text")
    messages = row.get("messages", ())
    fine = isinstance(messages, list | tuple) and all(map(_is_message, messages))
    if not fine:
        raise ValueError(f"row {place} has messages {shown(messages)}; want a list of role and content, both text")


def _is_message(message) -> bool:
    """Whether a chat's turn has a role and a text, parts of one, or none beside a call of tools."""
    kinds = str | list | None
    return (
        isinstance(message, Mapping)
        and isinstance(message.get("role"), str)
        and isinstance(message.get("content"), kinds)
    )


def render(tokenizer, messages):
    """Put a chat as the tokenizer's template does, with the mask of what is generated; ValueError where it cannot."""
    try:
        return tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
    except Exception as error:  # a template is a program, and raises what it likes
        why = " ".join(str(error).split())[:300] or type(error).__name__
        raise ValueError(
            f"messages are {shown(messages)}, of which the chat template makes no prompt ({why}); want roles and texts it takes"
        ) from error


# the first layout whose columns are all there counts, and only its columns are kept
LAYOUTS = (
    ("messages",), ("prompt", "completion"), ("text",), ("instruction", "response"), ("instruction", "output"),
    ("query", "response"),
)  # fmt: skip
TRL_NAMES = {"instruction": "prompt", "query": "prompt", "response": "completion", "output": "completion"}
KEPT_WITH = {"messages": ("tools", "chat_template_kwargs")}
COLUMNS = {name for names in (*LAYOUTS, *KEPT_WITH.values()) for name in names}
BUILDERS = {".jsonl": "json", ".json": "json", ".parquet": "parquet"}

BUILT_IN = "standard-library"  # the name of moe_runtime.experiments.corpora where a recipe names its data


def require(module: str, extra: str = "train"):
    """Import and return a module that an extra brings; raises ImportError with the command that installs it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(f"{module} cannot be imported ({error}); pip install 'moe-runtime[{extra}]'") from error


def read_rows(path_or_id: str | Path, split: str = "train"):
    """Read a .jsonl, .json or .parquet file, a folder of them or a data set of the Hub; return a datasets.Dataset.

    .jsonl has one object a line, .json that or an array. The columns are those of one layout: messages | prompt, completion
    | text; instruction (or query) and response (or output) become prompt and completion. Raises ValueError for what is not
    there, is empty, cannot be read or has other columns.
    """
    datasets = require("datasets")
    path = Path(path_or_id)
    if not path.exists() and (path.suffix in BUILDERS or path.is_absolute() or str(path_or_id).startswith(".")):
        raise ValueError(f"data is {str(path_or_id)!r}, which does not exist; want {_WANTED_SOURCE}")
    if path.is_file() and (path.suffix not in BUILDERS or path.stat().st_size == 0):
        problem = "is empty" if path.suffix in BUILDERS else f"ends in {path.suffix!r}"
        raise ValueError(f"data is {str(path_or_id)!r}, which {problem}; want {_WANTED_SOURCE}, with rows")
    with _one_line(path_or_id), uncounted(datasets, path.exists()):
        check_lines(path, COLUMNS)
        if path.is_file():
            rows = datasets.load_dataset(BUILDERS[path.suffix], data_files={split: str(path)}, split=split)
        else:
            rows = datasets.load_dataset(str(path_or_id), split=split)
    rows = _known_columns(rows, str(path_or_id))
    dates = [name for name, kind in rows.features.items() if name not in KEPT_WITH["messages"] and holds_dates(kind)]
    if not dates:
        return rows
    # a column whose every text looks like a date: what it was is lost
    if not (path.is_file() and path.suffix in (".jsonl", ".json") and has_lines(path)):
        name = f"data is {str(path_or_id)!r}, whose {dates[0]} was read as dates"
        raise ValueError(f"{name}; want texts; a .jsonl file keeps them")
    with _one_line(path_or_id):
        rows = datasets.Dataset.from_generator(**line_source(path, COLUMNS))
    return _known_columns(rows, str(path_or_id))


@contextlib.contextmanager
def _one_line(path_or_id: str | Path) -> Iterator[None]:
    """Turn what `datasets` raises into one ValueError."""
    try:
        yield
    except Exception as error:  # every reader behind it has exceptions of its own
        # ours says the line; the others' own words are of what they wrap
        cause = error if type(error) is ValueError else error.__cause__ or error
        reason = str(cause).strip().partition("\n")[0][:500] or type(cause).__name__
        text = f"data is {str(path_or_id)!r}, which cannot be read: {reason}; want {_WANTED_SOURCE}"
        raise ValueError(text) from error


_WANTED_SOURCE = "a .jsonl, .json or .parquet file, a folder of them, or the id of a data set on the Hub"


def _known_columns(rows, name: str):
    """Keep the columns of the first known layout, under TRL's names."""
    if len(rows) == 0:
        raise ValueError(f"data is {name!r}, which has no rows; want at least one")
    for layout in LAYOUTS:
        if set(layout) <= set(rows.column_names):
            if layout[0] == "instruction" and "input" in rows.column_names and any(rows["input"]):
                raise ValueError(f"data is {name!r}, whose column input has text; want it in the column instruction")
            extra = [column for column in KEPT_WITH.get(layout[0], ()) if column in rows.column_names]
            rows = rows.select_columns([*layout, *extra])
            return rows.rename_columns({old: TRL_NAMES[old] for old in layout if old in TRL_NAMES})
    wanted = " | ".join(" + ".join(layout) for layout in LAYOUTS)
    raise ValueError(f"data is {name!r} with the columns {', '.join(rows.column_names)}; want {wanted}; rename them")


def hold_out(rows, count: int, seed: int = 0):
    """Shuffle a datasets.Dataset and return (the rest, `count` rows), no row of the one equal to a row of the other."""
    if count >= len(rows):
        raise ValueError(f"held_out_rows is {count}, the data has {len(rows)} rows; want fewer")
    rows = rows.shuffle(seed=seed)
    held_out = rows.select(range(count))
    known = {str(row) for row in held_out}
    rest = [place for place in range(count, len(rows)) if str(rows[place]) not in known]
    if not rest:
        raise ValueError(f"held_out_rows is {count}, and every other row equals one of them; want data with more rows")
    return rows.select(rest), held_out


def save_rows(rows, folder: Path) -> None:
    """Write a datasets.Dataset to a folder."""
    require("datasets").disable_progress_bars()
    rows.save_to_disk(str(folder))


def load_rows(folder: Path):
    """Read what `save_rows` wrote, mapped from the disk."""
    return require("datasets").load_from_disk(str(folder))


def pack(tokenizer, documents: Iterable[str], length: int):
    """Join the documents' tokens, EOS after each, and cut them into a datasets.Dataset of rows of `length` ids and labels.

    The labels are the ids; what is left at the end, less than a row, is dropped.
    """
    encoded = tokenizer(list(documents), add_special_tokens=False).input_ids
    ids = [i for document in encoded for i in [*document, tokenizer.eos_token_id]]
    blocks = [ids[i : i + length] for i in range(0, len(ids) - length + 1, length)]
    return require("datasets").Dataset.from_dict({"input_ids": blocks, "labels": blocks})


def tokenize_pairs(
    tokenizer, rows: Iterable[Mapping], max_length: int, row_ids: bool = False, limit: int | None = None
):
    """Tokenize rows with `prompt` and `completion`, `text` or `messages` to a datasets.Dataset of input_ids and labels.

    BOS and EOS are added where the tokenizer has them; truncation cuts the end. Labels are -100 on the prompt, on what
    the chat template does not mark as generated, and nowhere in plain text. Rows without a label left are dropped; the
    first `limit` of the others are returned.
    `row_ids` adds the column `row_id`, a row's place in `rows`, by which MoETrainer names a bad batch.
    Raises ValueError if no row remains.
    """
    datasets = require("datasets")
    columns: dict[str, list] = {"input_ids": [], "labels": []} | ({"row_id": []} if row_ids else {})
    for place, row in enumerate(rows):
        if len(columns["labels"]) == limit:
            break
        check_row(row, place)
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
        check_row(row, place)
        ids = _tokenize(tokenizer, row, want_labels=False)[0][:max_length]
        if ids:
            yield ids


def _tokenize(tokenizer, row: Mapping, want_labels: bool = True) -> tuple[list[int], list[int]]:
    """Return the ids and labels of one row, not truncated; raise ValueError for a chat without a label if they are wanted."""
    if "messages" in row:
        out = render(tokenizer, row["messages"])
        if want_labels and not any(out["assistant_masks"]):
            raise ValueError("the chat template marks nothing as generated; want {% generation %} in it, and an answer")
        ids = out["input_ids"]
        return ids, [i if generated else -100 for i, generated in zip(ids, out["assistant_masks"])]
    bos, eos = ([i] if i is not None else [] for i in (tokenizer.bos_token_id, tokenizer.eos_token_id))
    if "prompt" in row and "completion" in row:
        # apart, not joined: the boundary is exact, whatever the tokenizer would merge across it
        prompt = bos + tokenizer.encode(row["prompt"], add_special_tokens=False)
        answer = tokenizer.encode(row["completion"], add_special_tokens=False) + eos
        return prompt + answer, [-100] * len(prompt) + answer
    if "text" in row:
        ids = bos + tokenizer.encode(row["text"], add_special_tokens=False) + eos
        return ids, list(ids)
    raise ValueError(f"a row has the columns {', '.join(row)}; want prompt and completion, text or messages")
