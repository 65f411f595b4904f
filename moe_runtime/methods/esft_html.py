"""Text whose tokens are the deeper in colour the more of their experts are trained: ESFT's Figure 9 as a page.

The page needs nothing beside itself, follows the reader's light or dark setting, and says each token's share when
pointed at.
"""

import html
import os
from collections.abc import Mapping, Sequence

from moe_runtime.files import atomic_write_text
from moe_runtime.methods.esft_analyses import TokenShares

# the tint's opacity leaves the text legible on a token whose experts are all trained
_STYLE = """\
:root { color-scheme: light dark; --page: #ffffff; --text: #1b1b1b; --soft: #5a5a5a; --line: #d8d8d8; --tint: 0, 114, 178; }
@media (prefers-color-scheme: dark) {
  :root { --page: #16181b; --text: #f0f0f0; --soft: #a8a8a8; --line: #3a3d42; --tint: 58, 150, 210; }
}
body { margin: 2rem auto; max-width: 60rem; padding: 0 1rem; background: var(--page); color: var(--text);
  font: 1rem/1.7 system-ui, sans-serif; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
p.note, p.mean { color: var(--soft); font-size: 0.875rem; }
pre { border: 1px solid var(--line); border-radius: 0.4rem; padding: 0.8rem 1rem; white-space: pre-wrap;
  overflow-wrap: anywhere; font: 0.95rem/1.8 ui-monospace, monospace; }
span[style] { background: rgba(var(--tint), calc(0.6 * var(--s))); border-radius: 0.15rem;
  print-color-adjust: exact; }
"""
_PAGE = """\
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
{style}</style>
</head>
<body>
<h1>{title}</h1>
<p class="note">{note}</p>
<p class="note">Share of a token's experts that are trained: {scale}</p>
{sections}
</body>
</html>
"""
_NOTE = "Each token's experts over all layers: the deeper the colour, the more of them are trained."


def page(texts: Mapping[str, Sequence[TokenShares]], title: str = "Where trained experts work", note: str = "") -> str:
    """Return the page of some texts by task, in HTML."""
    scale = " ".join(_token(f" {step / 4:.0%} ", step / 4, "") for step in range(5))
    sections = "\n".join(_section(task, shares) for task, shares in texts.items())
    note = f"{_NOTE} {note}".strip()
    return _PAGE.format(title=html.escape(title), style=_STYLE, note=html.escape(note), scale=scale, sections=sections)


def write_page(path: str | os.PathLike, texts: Mapping[str, Sequence[TokenShares]], **options) -> None:
    """Write `page`, whole or not at all."""
    atomic_write_text(path, page(texts, **options))


def _section(task: str, texts: Sequence[TokenShares]) -> str:
    blocks = []
    for text in texts:
        pairs = zip(text.pieces, text.shares, strict=True)
        tokens = "".join(_token(piece, share, f"{share:.0%} of {text.slots}") for piece, share in pairs if piece)
        blocks.append(
            f'<pre>\n{tokens}</pre>\n<p class="mean">{text.mean:.1%} of {len(text.shares)} tokens\' experts</p>'
        )
    return f"<section>\n<h2>{html.escape(task)}</h2>\n" + "\n".join(blocks) + "\n</section>"


def _token(piece: str, share: float, said: str) -> str:
    title = f' title="{said}"' if said else ""
    # a browser takes a lone carriage return and control characters for errors
    clean = "".join(c if c in "\n\t" or c.isprintable() or c.isspace() else "\N{REPLACEMENT CHARACTER}" for c in piece)
    return f'<span style="--s:{share:.3f}"{title}>{html.escape(clean)}</span>'
