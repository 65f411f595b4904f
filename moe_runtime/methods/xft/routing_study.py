"""Which experts the tokens of different texts go to (XFT, Figure 4), on text that comes with
Python.

    share_e(text)  = slots of expert e / slots of all routed experts       per layer; 1 / R without a preference
    distance(a, b) = 1/2 sum_e |share_e(a) - share_e(b)|                   total variation, mean over the layers, 0 to 1

The distance between two halves of one text shows the effect of chance; a text has its own routing
if its distance to the others is larger. A shared expert sees every token and is left out.
"""

import random
import statistics
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from moe_runtime.config import check_positive
from moe_runtime.experiments.corpora import PIECE, standard_library_pairs, standard_library_text
from moe_runtime.experiments.tables import Finding, finite, spread
from moe_runtime.hf.dropin.stats import collect_router_stats, load_entropy
from moe_runtime.hf.training import ranks
from moe_runtime.io import rows as data
from moe_runtime.io.files import files_print, read_json
from moe_runtime.methods.xft.recipe import Recipe

TOKENS = 16384
BATCH = 8


@dataclass(kw_only=True)
class Routing(Finding):
    """Slots per expert, [L][R], for every seed, text and half."""

    tokens: dict[str, int]  # text -> routed tokens
    folders: list[str]  # of the MoE models, one per seed
    counts: list  # [seeds][texts][2][L][R]
    layers: list[str]

    def share(self, seed: int = 0) -> torch.Tensor:
        """Return the shares [texts, L, R] float64 of one seed, by index."""
        return _share(torch.tensor(self.counts[seed]).sum(1))

    def distances(self) -> list[tuple[list[float], list[float]]]:
        """Return, for every text, its mean distance to the others and that between its halves, one
        per seed.
        """
        found = [([], []) for _ in self.tokens]
        for seed in range(len(self.seeds)):
            whole = self.share(seed)
            halves = _share(torch.tensor(self.counts[seed]))
            for i, (others, own) in enumerate(found):
                to_others = [_distance(whole[i], whole[j]) for j in range(len(whole)) if j != i]
                others.append(statistics.fmean(to_others))
                own.append(_distance(halves[i, 0], halves[i, 1]))
        return found

    def columns(self) -> list[tuple[str, str]]:
        """Return the table's columns and how they are aligned."""
        names = (
            "tokens",
            "smallest share",
            "largest share",
            "entropy",
            "to other texts",
            "between its halves",
        )
        return [("text", "left"), *((name, "right") for name in names)]

    def rows(self) -> list[tuple[str, ...]]:
        """Return the table's rows as text, in the order of `columns`."""
        # [seeds, texts, L, R]
        shares = torch.stack([self.share(seed) for seed in range(len(self.seeds))])
        entropy = torch.stack(
            [load_entropy(torch.tensor(one).sum(1)).amin(-1) for one in self.counts]
        )
        rows = []
        for i, ((name, tokens), (others, own)) in enumerate(
            zip(self.tokens.items(), self.distances(), strict=True)
        ):
            numbers = (
                f"{shares[:, i].min():.3f}",
                f"{shares[:, i].max():.3f}",
                f"{entropy[:, i].min():.3f}",
            )
            rows.append((name, f"{tokens:,}", *numbers, spread(others), spread(own)))
        return rows

    def legend(self) -> str:
        """Return what the table's numbers are, in two lines."""
        R = len(self.counts[0][0][0][0])
        return (
            f"shares of the {R} routed "
            "experts, "
            "over "
            f"{len(self.layers)} "
            "layers "
            "and "
            f"{len(self.seeds)} seeds; {1 / R:.3f} where "
            "nothing is preferred;\nentropy: the lowest layer's, 1 "
            "when "
            "balanced; "
            "the "
            "last "
            "two: "
            "total variation distance."
        )

    def to_dict(self) -> dict:
        """Return all of the report as JSON-ready values."""
        distances = zip(self.tokens, self.distances(), strict=True)
        distances = {
            name: {"to_other_texts": others, "between_halves": own}
            for name, (others, own) in distances
        }
        return super().to_dict() | {"distances": finite(distances)}


def check(recipe: Recipe, texts: Sequence[str] = (), tokens: int = TOKENS) -> dict:
    """Return the options of `measure`, JSON-ready; raises ValueError for a missing file or an
    invalid number of tokens.
    """
    check_positive("tokens", tokens)
    for path in map(Path, texts):
        if not path.is_file():
            raise ValueError(f"Data {str(path)!r} is not a file. Pass {', '.join(data.BUILDERS)}")
    if len({Path(path).stem for path in texts}) < len(texts):
        raise ValueError(
            f"Data files must have different names, but got {', '.join(map(str, texts))}"
        )
    names = [str(path) for path in texts]
    return {"texts": names, "tokens": tokens, "files": [files_print(name) for name in names]}


def measure(process, texts: Sequence[str], tokens: int) -> dict:
    """Route up to `tokens` tokens of each text through each seed's MoE, unless already done; return
    Routing's fields.
    """
    moes = [stages.moe() for stages in process.all]
    folders = ["/".join(Path(moe.folder).parts[-2:]) for moe in moes]
    made = {"folders": folders, "summary": _summary}
    known = _known(process.out / "routing-stats.json", folders, process.settings)
    if known is not None:
        return known | made
    rows = _tokenized(process.all[0], texts, tokens)
    counts = []
    layers = []
    for seed, moe in zip(process.seeds, moes, strict=True):
        process.say(
            f"seed {seed}: "
            "routing "
            f"{sum(len(ids) for text in rows.values() for ids in text):,} "
            "tokens"
        )
        with ranks.leading() as main:
            found = _count(process.all[0], moe, rows) if main else None
        by_text, layers = ranks.agree(found)
        counts.append(by_text)
    sizes = {name: sum(map(len, text)) for name, text in rows.items()}
    return {"tokens": sizes, "counts": counts, "layers": layers} | made


def read_texts() -> dict[str, list[str]]:
    """Return documents by kind: the library's source, its docstrings, Python's documentation,
    tables of characters.
    """
    root = Path(sysconfig.get_path("stdlib"))
    pairs = standard_library_pairs()
    docs = [row["prompt"].partition("\n")[2] for row in pairs.held_out]
    kinds = {"library source": standard_library_text(), "docstrings": docs}
    tables = sorted((root / "encodings").glob("*.py"))
    kinds["character tables"] = [
        path.read_text(encoding="utf-8", errors="ignore") for path in tables
    ]
    try:
        from pydoc_data.topics import topics
    except ImportError:  # some distributions omit it
        return kinds
    return kinds | {"documentation": [topics[name] for name in sorted(topics)]}


def _tokenized(stages, texts: Sequence[str], tokens: int) -> dict[str, list[list[int]]]:
    """Return rows of ids, `tokens` in all, per text: the recipe's held-out rows, `read_texts`, and
    the files given.
    """
    tokenizer = stages.tokenizer
    length = stages.recipe.data.max_length
    bos = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    found = {"held-out rows": list(_first((row["input_ids"] for row in stages.held_out), tokens))}
    documents = read_texts()
    own = {Path(path).stem: map(_text, data.read_rows(path, answers=False)) for path in texts}
    if taken := sorted({*own} & {*documents, *found}):
        raise ValueError(f"Data file {taken[0]!r} has the name of a built-in text. Rename the file")
    documents |= own
    for name, kind in documents.items():
        pieces = [text[i : i + PIECE] for text in kind for i in range(0, len(text), PIECE)]
        # shuffled, since neighbouring pieces are alike and the halves must not differ
        random.Random(0).shuffle(pieces)
        ids = (
            tokenizer.encode(piece, add_special_tokens=False) for piece in pieces if piece.strip()
        )
        found[name] = list(_first(((bos + row)[:length] for row in ids), tokens))
    for name, pieces in found.items():
        if len(pieces) < 2:  # one for each half
            raise ValueError(
                f"{name!r} has {len(pieces)} piece within {tokens} "
                "tokens, "
                "but "
                "two "
                "are "
                "required. "
                "Raise tokens or add text"
            )
    return found


def _text(row: dict) -> str:
    """Return all text of a row, in the order of its columns."""
    if "messages" in row:
        return "\n".join(_content_text(message["content"]) for message in row["messages"])
    return "".join(row[name] for name in ("prompt", "completion", "text") if name in row)


def _content_text(content: str | list | None) -> str:
    """Return the text of a chat's turn, whose content is text, a list of parts, or None with a tool
    call.
    """
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(part.get("text") or "" for part in content if isinstance(part, dict))


def _first(rows, tokens: int):
    """Yield rows up to `tokens` tokens in total; the last row is cut."""
    for ids in rows:
        if tokens <= 0:
            return
        yield ids[:tokens]
        tokens -= len(ids)


def _count(stages, moe, texts: dict[str, list[list[int]]]) -> tuple[list, list[str]]:
    """Return [texts][2][L][R] slots of the routed experts, and the layers' names."""
    model = ranks.load_model(moe.folder, stages.recipe.dtype, ranks.state().device)
    counts = []
    layers = []
    for pieces in texts.values():
        halves = []
        for half in (pieces[::2], pieces[1::2]):
            stats = collect_router_stats(model, _batches(stages.tokenizer, half, model.device))
            halves.append([row.tolist() for row in stats.routed])
            layers = list(stats.layers)
        counts.append(halves)
    return counts, layers


def _batches(tokenizer, pieces: list[list[int]], device):
    for i in range(0, len(pieces), BATCH):
        batch = tokenizer.pad({"input_ids": pieces[i : i + BATCH]}, return_tensors="pt")
        yield {
            "input_ids": batch["input_ids"].to(device),
            "attention_mask": batch["attention_mask"].to(device),
        }


def _known(path: Path, folders: list[str], settings: dict) -> dict | None:
    """Return the counts of a report on the same models and settings, or None."""
    report = read_json(path) if path.is_file() else {}
    if report.get("folders") != folders or report.get("settings") != settings:
        return None
    return {name: report[name] for name in ("tokens", "counts", "layers")}


def _share(counts: torch.Tensor) -> torch.Tensor:
    return counts.double() / counts.sum(-1, keepdim=True).clamp(min=1)


def _distance(a: torch.Tensor, b: torch.Tensor) -> float:
    """Return the total variation between shares [L, R], mean over the layers."""
    return (a - b).abs().sum(-1).mean().item() / 2


def _summary(report: Routing) -> list[str]:
    lines = []
    for name, (others, own) in zip(report.tokens, report.distances(), strict=True):
        more = sum(a > b for a, b in zip(others, own, strict=True))
        lines.append(
            f"{name}: "
            f"{statistics.fmean(others) / max(statistics.fmean(own), 1e-12):.1f} "
            "times "
            "as "
            "far from the other texts as "
            f"its halves from each other; farther with {more} of {len(report.seeds)} seeds."
        )
    return lines
