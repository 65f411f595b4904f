"""Rows to train on: reading them, the text that every Python brings along, and label masks.

`datasets` reads (an extra, loaded where it is used). Packing, chat templates and the masks of SFT are TRL's own;
`tokenize_pairs` serves transformers' plain Trainer, as the official XFT code does (its Sec. 4.1):

    input_ids = BOS prompt response EOS        labels = -100 on BOS and prompt, the ids on response and EOS
"""

import ast
import contextlib
import functools
import importlib
import random
import sysconfig
import textwrap
import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

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

BUILT_IN = "standard-library"  # the name of the text below where a recipe names its data
# how a row's prompt is put to the model; "chat" is the tokenizer's own template
PROMPTS = {
    "plain": "{instruction}",
    # Magicoder's, of the XFT paper's models: text before the instruction, and none behind "@@ Response" but a line feed
    "magicoder": (
        "You are an exceptionally intelligent coding assistant that consistently delivers accurate and reliable "
        "responses to user instructions.\n\n@@ Instruction\n{instruction}\n\n@@ Response\n"
    ),
    "chat": None,
    "deepseek": None,  # DEEPSEEK_CHAT
}
# the same as a chat template, for whoever asks a tuned model by its tokenizer's: evaluations, servers
MAGICODER_CHAT = (
    "{{ bos_token or '' }}" + PROMPTS["magicoder"].partition("@@")[0] + "{% for message in messages %}"
    "{% if message['role'] == 'user' %}{{ '@@ Instruction\\n' + message['content'] + '\\n\\n' }}"
    "{% elif message['role'] == 'assistant' %}{{ '@@ Response\\n' }}"
    "{% generation %}{{ message['content'] + (eos_token or '') }}{% endgeneration %}"
    "{% if not loop.last %}{{ '\\n\\n' }}{% endif %}"
    "{% else %}{{ raise_exception('the roles are user and assistant') }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '@@ Response\\n' }}{% endif %}"
)

# what ESFT's tasks were trained in: the prompt of DeepSeek's chat models, whose answers begin with a blank
DEEPSEEK_CHAT = (
    "{{ bos_token or '' }}{% for message in messages %}"
    "{% if message['role'] == 'user' %}{{ 'User: ' + message['content'] + '\\n\\n' }}"
    "{% elif message['role'] == 'assistant' %}{{ 'Assistant:' }}"
    "{% generation %}{{ ' ' + message['content'] + (eos_token or '') }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '\\n\\n' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)

PIECE = 2000  # characters of a document of `standard_library_text`
SIZE = (40, 1200)  # characters of a completion of `standard_library_pairs`; the upper bound holds for prompts too
# no prose and code, but tests, tables and copies of other packages
SKIPPED = {
    "__pycache__", "dist-packages", "encodings", "ensurepip", "idle_test", "idlelib", "lib2to3", "pydoc_data",
    "site-packages", "test", "tests", "turtledemo",
}  # fmt: skip


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


def put_prompt(row: Mapping, prompt: str) -> Mapping:
    """Return a row whose prompt is put as PROMPTS says; raises ValueError for a layout which that does not go with.

    "plain" takes every layout, "magicoder" rows with prompt and completion, "chat" those and messages, "deepseek" plain text
    too; the last two need a tokenizer with that chat template.
    """
    if prompt not in PROMPTS:
        raise ValueError(f"prompt is {prompt!r}; want one of {', '.join(PROMPTS)}")
    if prompt == "plain" or (prompt != "magicoder" and "messages" in row) or (prompt == "deepseek" and "text" in row):
        return row
    if "prompt" not in row or "completion" not in row:
        raise ValueError(f"prompt is {prompt!r}, a row has the columns {', '.join(row)}; want prompt and completion")
    if PROMPTS[prompt] is None:
        answer = {"role": "assistant", "content": row["completion"]}
        return {"messages": [{"role": "user", "content": row["prompt"]}, answer]}
    if not isinstance(row["prompt"], str):
        raise ValueError(f"prompt of a row is {row['prompt']!r}; want text")
    # replace, not format: code has braces
    return {"prompt": PROMPTS[prompt].replace("{instruction}", row["prompt"]), "completion": row["completion"]}


class Pairs(NamedTuple):
    """What `standard_library_pairs` returns; no held-out completion stands in a file that is not held out."""

    train: list[dict[str, str]]
    held_out: list[dict[str, str]]


def standard_library_pairs(limit: int | None = None, seed: int = 0) -> Pairs:
    """Return instruction-answer pairs from the documented functions of the running Python's standard library.

    Rows have `prompt` (kind, signature, docstring), `completion` (the source without docstring), `module` (its file).
    One file in ten is held out. At most `limit` rows of each, in an order that depends on `seed` and on the version.
    """
    if limit is not None and limit < 1:
        raise ValueError(f"limit is {limit}; want at least 1, or None for all rows")
    pairs = Pairs(*([dict(row) for row in rows] for rows in _library_rows()))
    for rows in pairs:
        random.Random(seed).shuffle(rows)
    return Pairs(pairs.train[:limit], pairs.held_out[:limit])


def standard_library_text(piece: int = PIECE, held_out: bool = False) -> list[str]:
    """Return the standard library's source as documents of about `piece` characters, the held-out files excepted, or alone."""
    documents = []
    for module, text in standard_library_files():
        if is_held_out(module) != held_out:
            continue
        document, size = [], 0
        for line in text.splitlines(keepends=True):
            if size and size + len(line) > piece:
                documents.append("".join(document))
                document, size = [], 0
            document.append(line)
            size += len(line)
        documents.append("".join(document))
    return [document for document in documents if document.strip()]


def is_held_out(module: str) -> bool:
    """Whether a file of the standard library, given as its path below it, is held out; the same in each process."""
    return zlib.crc32(module.encode()) % 10 == 0


@functools.cache
def standard_library_files() -> tuple[tuple[str, str], ...]:
    """Return the standard library's files: pairs of a file's path below it and its text, sorted."""
    root = Path(sysconfig.get_path("stdlib"))
    files = []
    for path in root.rglob("*.py"):
        module = path.relative_to(root)
        if not SKIPPED & set(module.parts) and not module.parts[0].startswith("config-"):
            files.append((module.as_posix(), path.read_text(encoding="utf-8", errors="ignore")))
    return tuple(sorted(files))


@functools.cache
def _library_rows() -> tuple[tuple[dict[str, str], ...], tuple[dict[str, str], ...]]:
    """Return the rows of the train files and those of the held-out files, without doubles, in the files' order."""
    train: dict[str, dict[str, str]] = {}
    held_out: dict[str, dict[str, str]] = {}
    known = set()  # all that the train files define, documented or not, however deep
    for module, text in standard_library_files():
        lines, is_test = text.splitlines(), is_held_out(module)
        for node, owner in _functions(ast.parse(text)):
            completion = _cut(lines, node)
            if not is_test:
                known.add(_flat(completion))
            row = _row(module, node, owner, completion)
            if row is not None:
                (held_out if is_test else train).setdefault(completion, row)
    fresh = (row for completion, row in held_out.items() if _flat(completion) not in known)
    return tuple(train.values()), tuple(fresh)


def _flat(text: str) -> str:
    """The text without its indentation."""
    return "\n".join(line.strip() for line in text.splitlines())


Function = ast.FunctionDef | ast.AsyncFunctionDef


def _functions(node: ast.AST, owner: str | None = None) -> Iterator[tuple[Function, str | None]]:
    """Walk the functions of a module and the methods of its classes, not what is nested inside functions."""
    for child in getattr(node, "body", []):
        if isinstance(child, ast.ClassDef):
            yield from _functions(child, child.name)
        elif isinstance(child, Function):
            yield child, owner


def _cut(lines: list[str], node: Function) -> str:
    """The source of a function, with its decorators, without the lines of its docstring, indentation removed."""
    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    source = lines[first - 1 : node.end_lineno]
    if ast.get_docstring(node, clean=False) is not None:
        del source[node.body[0].lineno - first : node.body[0].end_lineno - first + 1]
    return textwrap.dedent("\n".join(source)).strip("\n")


def _row(module: str, node: Function, owner: str | None, completion: str) -> dict[str, str] | None:
    """Make the pair of one function; None where there is no docstring, no body beside it or no clean cut."""
    doc, rest = ast.get_docstring(node), node.body[1:]
    if not doc or not rest or _is_stub(rest):
        return None
    prompt = _prompt(node, owner, doc.strip())
    if not (SIZE[0] <= len(completion) <= SIZE[1] >= len(prompt)) or not _is_body(completion, rest):
        return None
    return {"prompt": prompt, "completion": completion, "module": module}


def _is_stub(body: list[ast.stmt]) -> bool:
    """Whether nothing happens in the body: pass, ... or an exception that says so."""
    return len(body) == 1 and (
        isinstance(body[0], (ast.Pass, ast.Raise))
        or (isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant))
    )


def _is_body(completion: str, body: list[ast.stmt]) -> bool:
    """Whether the text is one function with just that body: no statement and no string's blanks went with the cut."""
    try:
        function, *others = ast.parse(completion).body
    except SyntaxError:
        return False
    # a form feed ends a line to splitlines, not to the parser: then what was cut lies lines beside the function
    if others or not isinstance(function, Function) or len(function.body) != len(body):
        return False
    # only a string over several lines can have changed; comparing all bodies would take seconds
    strings = '"""' in completion or "'''" in completion
    return not strings or [*map(ast.dump, function.body)] == [*map(ast.dump, body)]


def _prompt(node: Function, owner: str | None, doc: str) -> str:
    """The instruction. It ends in one line feed, where byte-level tokenizers break in any case."""
    kind = "method" if owner else "function"
    kind = f"async {kind}" if isinstance(node, ast.AsyncFunctionDef) else kind
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    where = f" of the class {owner}" if owner else ""
    article = "an" if kind.startswith("a") else "a"
    return f"Write {article} Python {kind} {node.name}({ast.unparse(node.args)}){returns}{where}.\n{doc}\n"


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
