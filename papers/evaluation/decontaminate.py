"""Remove benchmark problems from training data: examples that contain one of their texts are
dropped and listed.

substring   drops an example that contains any text of a benchmark, in lower case, as XFT's data
            were filtered (the Magicoder
            code's find_substrings.py); texts shorter than `min_chars`, such as `return a + b`, are
            ignored
ngram       drops an example that shares `n` consecutive words with a benchmark, in lower case and
            without punctuation.
            UltraFuser filters by 13-grams (arXiv 2403.08281, App. A) of unspecified units
"""

import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from moe_runtime.config import check_choice, check_positive
from moe_runtime.io.files import atomic_file, check_out_file
from moe_runtime.io.rows import raw_rows

METHODS = ("substring", "ngram")
SHINGLE = 16  # characters used to find candidates
WORD = re.compile(r"\w+")


class DecontaminationReport(NamedTuple):
    """Result of `decontaminate`."""

    path: Path
    rows: int
    kept: int
    by_benchmark: dict[str, int]  # number of dropped examples
    dropped: list[dict]  # index of the example, from 0, the benchmark, and the common text
    texts: dict[str, int]  # in each benchmark
    searched: dict[str, int]  # of them, those that are long enough to be searched for


def decontaminate(
    rows: str | Path,
    against: Sequence[str],
    out: str | Path,
    *,
    method: str = "substring",
    n: int = 13,
    min_chars: int = 20,
    columns: Sequence[str] = (),
    overwrite: bool = False,
) -> DecontaminationReport:
    """Write the examples of a .jsonl, .json or .parquet file without texts of the files `against`
    to the .jsonl file `out`.

    `against` are benchmarks, FILE or FILE:column,column; without columns all texts of a problem
    count. `columns` of the examples are searched, by default all texts, including chats. The
    dropped examples are listed in OUT.dropped.json. Raises ValueError for a benchmark whose texts
    are all too short to be searched for.
    """
    check_choice("method", method, METHODS)
    for name, value in (("n", n), ("min_chars", min_chars)):
        check_positive(name, value)
    listing = Path(f"{out}.dropped.json")
    reads = [rows, *(_file_of(one)[0] for one in against)]
    check_out_file(out, overwrite, reads)
    check_out_file(listing, True, reads)
    benchmarks = {one: _texts(one) for one in against}
    if not benchmarks:
        raise ValueError("No benchmark is given. Pass --against FILE at least once")
    search = Substrings(benchmarks, min_chars) if method == "substring" else NGrams(benchmarks, n)
    for name, searched in search.searched.items():
        if searched == 0:
            if method == "substring":
                reason = f"{min_chars} characters (--min-chars)"
            else:
                reason = f"{n} words (--n)"
            raise ValueError(
                f"None of the {len(benchmarks[name])} texts of {name} has {reason}, so none would "
                "be searched for. Pass a smaller number, or the columns with the problems as "
                "FILE:column"
            )
    count = 0
    counts = Counter()
    dropped = []
    # both are written before either is moved to its name, so that a full disk leaves neither
    with atomic_file(out) as beside, atomic_file(listing) as listing_beside:
        with open(beside, "w", encoding="utf-8") as file:
            for count, row in enumerate(raw_rows(rows), 1):
                hit = search.first(texts_of(row, columns))
                if hit is None:
                    file.write(json.dumps(row, ensure_ascii=False) + "\n")
                    continue
                counts[hit[0]] += 1
                dropped.append(
                    {
                        "row": count - 1,
                        "benchmark": hit[0],
                        "text": hit[1],
                    }
                )
            file.flush()
            os.fsync(file.fileno())
        if count == len(dropped):
            raise ValueError(
                f"All {count} examples of {rows} contain benchmark texts. Check for texts that are "
                f"too common: {hit[1]!r}"
            )
        texts = {name: len(given) for name, given in benchmarks.items()}
        by_benchmark = {name: counts[name] for name in benchmarks}
        report = DecontaminationReport(
            Path(out),
            count,
            count - len(dropped),
            by_benchmark,
            dropped,
            texts,
            search.searched,
        )
        settings = {"against": list(against), "method": method}
        settings |= {"n": n} if method == "ngram" else {"min_chars": min_chars}
        values = settings | report._asdict() | {"path": str(out)}
        listing_beside.write_text(
            json.dumps(values, indent=2, allow_nan=False) + "\n", encoding="utf-8"
        )
    return report


def texts_of(value: Any, columns: Sequence[str] = ()) -> list[str]:
    """Return the texts in an example, including those in lists and mappings; only those of
    `columns` if given.
    """
    if isinstance(value, str):
        return [value]
    if isinstance(value, Mapping):
        missing = [name for name in columns if name not in value]
        if missing:
            raise ValueError(
                f"Column {missing[0]!r} does not exist. The columns are {', '.join(value)}"
            )
        result = []
        for name in columns or value:
            result.extend(texts_of(value[name]))
        return result
    return [text for one in value for text in texts_of(one)] if isinstance(value, Iterable) else []


def _file_of(source: str) -> tuple[str, list[str]]:
    """Return the file of a benchmark, FILE or FILE:column,column, and its columns."""
    if Path(source).exists():
        return source, []
    path, _, columns = source.rpartition(":")
    return path or source, [name for name in columns.split(",") if name and path]


def _texts(source: str) -> list[str]:
    """Return the texts of a benchmark."""
    path, columns = _file_of(source)
    texts = []
    for row in raw_rows(path):
        for text in texts_of(row, columns):
            texts.append(text)
    return texts


class Substrings:
    """Search for texts of benchmarks within other texts."""

    def __init__(self, benchmarks: Mapping[str, Iterable[str]], min_chars: int):
        self.short = {}
        self.long = {}
        self.searched = {}
        for name, texts in benchmarks.items():
            texts = [text.strip().lower() for text in texts]
            texts = [text for text in texts if len(text) >= max(min_chars, 1)]
            self.searched[name] = len(texts)
            for text in set(texts):
                if len(text) < SHINGLE:
                    self.short[text] = name
                else:
                    self.long.setdefault(text[:SHINGLE], []).append((text, name))

    def first(self, texts: Sequence[str]) -> tuple[str, str] | None:
        """Return a benchmark and its text that `texts`, joined by blank lines, contain; None if
        there is none.
        """
        text = "\n\n".join(texts).lower()
        for passage, name in self.short.items():
            if passage in text:
                return name, passage
        for start in range(len(text) - SHINGLE + 1):
            for passage, name in self.long.get(text[start : start + SHINGLE], ()):
                if text.startswith(passage, start):
                    return name, passage
        return None


class NGrams:
    """Search for `n` consecutive words that also occur in a benchmark."""

    def __init__(self, benchmarks: Mapping[str, Iterable[str]], n: int):
        self.n = n
        self.known = {}
        self.searched = {}
        for name, texts in benchmarks.items():
            grams = [dict.fromkeys(self._of(text), name) for text in texts]
            self.searched[name] = sum(map(bool, grams))
            for of_text in grams:
                self.known |= of_text

    def _of(self, text: str) -> Iterator[tuple[str, ...]]:
        words = WORD.findall(text.lower())
        return zip(*(words[i:] for i in range(self.n)), strict=False)

    def first(self, texts: Sequence[str]) -> tuple[str, str] | None:
        """Return a benchmark and the words that one of `texts` has in common with it; None if there
        are none.
        """
        return next(
            (
                (self.known[gram], " ".join(gram))
                for text in texts
                for gram in self._of(text)
                if gram in self.known
            ),
            None,
        )
