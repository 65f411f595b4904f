"""Rows to train on: reading them, packing, and label masks.

`datasets` reads (an extra, loaded where it is used). Packing, chat templates and the masks of SFT are TRL's own;
`tokenize_pairs` serves transformers' plain Trainer, as the official XFT code does (its Sec. 4.1):

    input_ids = BOS prompt response EOS        labels = -100 on BOS and prompt, the ids on response and EOS
"""

import contextlib
import importlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from moe_runtime.row_files import check_lines, check_row, has_lines, holds_dates, line_source, render, uncounted

# the first layout whose columns are all there counts, and only its columns are kept
LAYOUTS = (
    ("messages",), ("prompt", "completion"), ("text",), ("instruction", "response"), ("instruction", "output"),
    ("query", "response"),
)  # fmt: skip
TRL_NAMES = {"instruction": "prompt", "query": "prompt", "response": "completion", "output": "completion"}
KEPT_WITH = {"messages": ("tools", "chat_template_kwargs")}
COLUMNS = {name for names in (*LAYOUTS, *KEPT_WITH.values()) for name in names}
BUILDERS = {".jsonl": "json", ".json": "json", ".parquet": "parquet"}

BUILT_IN = "standard-library"  # the name of moe_runtime.standard_library where a recipe names its data


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
