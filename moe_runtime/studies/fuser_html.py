"""Responses whose tokens have the colour of the specialist that the gate weighs most: UltraFuser's Figures 7 and 8 as a page.

The farther its weight is above that of all alike, 1/S, the deeper the colour; a token says all weights when pointed at.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from moe_runtime.files import atomic_write_text
from moe_runtime.studies import html_pages

# Okabe and Ito, 2008, as pictures.COLOURS; lighter on a dark page
LIGHT = ("0, 114, 178", "213, 94, 0", "0, 158, 115", "230, 159, 0", "204, 121, 167", "86, 180, 233")
DARK = ("58, 150, 210", "240, 120, 40", "30, 185, 140", "235, 170, 30", "220, 140, 185", "110, 195, 240")
_NOTE = (
    "Each token has the colour of the specialist with the largest weight: the deeper, the farther above equal weights."
)


@dataclass(frozen=True, kw_only=True)
class TokenWeights:
    """A response in pieces, one per token, and the gate's weights [R][S] on each."""

    prompt: str
    pieces: Sequence[str]
    weights: Sequence[Sequence[float]]

    @property
    def mean(self) -> list[float]:
        """The mean weight of each specialist over the tokens."""
        return [sum(of) / len(self.weights) for of in zip(*self.weights, strict=True)]


def pieces_of(tokenizer, ids: Sequence[int]) -> list[str]:
    """Return the text that each id adds; of a character of several ids, the last one has it."""
    pieces, before = [], ""
    for count in range(1, len(ids) + 1):
        text = tokenizer.decode(ids[:count])
        whole = text if count == len(ids) else text.rstrip("\N{REPLACEMENT CHARACTER}")
        pieces.append(whole[len(before) :])
        before = whole if len(whole) > len(before) else before
    return pieces


def page(
    specialists: Sequence[str],
    texts: Mapping[str, Sequence[TokenWeights]],
    title: str = "Which specialist writes",
    note: str = "",
) -> str:
    """Return the page of some responses by domain, in HTML."""
    S = len(specialists)
    whole = [[float(s == own) for s in range(S)] for own in range(S)]
    scale = " ".join(_token(f" {name} ", weights, "") for name, weights in zip(specialists, whole, strict=True))
    sections = "\n".join(
        html_pages.section(domain, [_block(specialists, one) for one in found]) for domain, found in texts.items()
    )
    return html_pages.page(
        title, f"{_NOTE} {note}".strip(), f"Specialists: {scale}", sections, light=_variables(LIGHT, S),
        dark=_variables(DARK, S), background="rgba(var(--c), calc(0.6 * var(--s)))",
    )  # fmt: skip


def write_page(path: str | os.PathLike, specialists: Sequence[str], texts: Mapping, **options) -> None:
    """Write `page`, whole or not at all."""
    atomic_write_text(path, page(specialists, texts, **options))


def _variables(colours: Sequence[str], count: int) -> str:
    return " ".join(f"--c{s}: {colours[s % len(colours)]};" for s in range(count))


def _block(specialists: Sequence[str], text: TokenWeights) -> str:
    def said(weights: Sequence[float]) -> str:
        return ", ".join(f"{name} {weight:.2f}" for name, weight in zip(specialists, weights, strict=True))

    pairs = zip(text.pieces, text.weights, strict=True)
    tokens = "".join(_token(piece, weights, said(weights)) for piece, weights in pairs if piece)
    return html_pages.block(tokens, f"Prompt: {text.prompt} | mean weights: {said(text.mean)}")


def _token(piece: str, weights: Sequence[float], said: str) -> str:
    top, even = max(range(len(weights)), key=weights.__getitem__), 1 / len(weights)
    depth = max((weights[top] - even) / (1 - even), 0.0)
    return html_pages.token(piece, f"--c:var(--c{top});--s:{depth:.3f}", said)
