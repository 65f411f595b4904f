"""Text whose tokens are the deeper in colour the more of their experts are trained: ESFT's Figure 9 as a page.

The page needs nothing beside itself, follows the reader's light or dark setting, and says each token's share when
pointed at.
"""

import os
from collections.abc import Mapping, Sequence

from moe_runtime.files import atomic_write_text
from moe_runtime.studies import html_pages
from moe_runtime.studies.esft_analyses import TokenShares

_NOTE = "Each token's experts over all layers: the deeper the colour, the more of them are trained."


def page(texts: Mapping[str, Sequence[TokenShares]], title: str = "Where trained experts work", note: str = "") -> str:
    """Return the page of some texts by task, in HTML."""
    scale = " ".join(_token(f" {step / 4:.0%} ", step / 4, "") for step in range(5))
    sections = "\n".join(_section(task, shares) for task, shares in texts.items())
    return html_pages.page(
        title, f"{_NOTE} {note}".strip(), f"Share of a token's experts that are trained: {scale}", sections,
        light="--tint: 0, 114, 178;", dark="--tint: 58, 150, 210;",
        # legible on a token whose experts are all trained too
        background="rgba(var(--tint), calc(0.6 * var(--s)))",
    )  # fmt: skip


def write_page(path: str | os.PathLike, texts: Mapping[str, Sequence[TokenShares]], **options) -> None:
    """Write `page`, whole or not at all."""
    atomic_write_text(path, page(texts, **options))


def _section(task: str, texts: Sequence[TokenShares]) -> str:
    blocks = []
    for text in texts:
        pairs = zip(text.pieces, text.shares, strict=True)
        tokens = "".join(_token(piece, share, f"{share:.0%} of {text.slots}") for piece, share in pairs if piece)
        blocks.append(html_pages.block(tokens, f"{text.mean:.1%} of {len(text.shares)} tokens' experts"))
    return html_pages.section(task, blocks)


def _token(piece: str, share: float, said: str) -> str:
    return html_pages.token(piece, f"--s:{share:.3f}", said)
