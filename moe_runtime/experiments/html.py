"""A page of coloured tokens: its frame, which needs nothing beside itself and follows the reader's light or dark setting."""

import html
from collections.abc import Sequence

_STYLE = """\
:root {{ color-scheme: light dark; --page: #ffffff; --text: #1b1b1b; --soft: #5a5a5a; --line: #d8d8d8; {light} }}
@media (prefers-color-scheme: dark) {{
  :root {{ --page: #16181b; --text: #f0f0f0; --soft: #a8a8a8; --line: #3a3d42; {dark} }}
}}
body {{ margin: 2rem auto; max-width: 60rem; padding: 0 1rem; background: var(--page); color: var(--text);
  font: 1rem/1.7 system-ui, sans-serif; }}
h1 {{ font-size: 1.4rem; }} h2 {{ font-size: 1.1rem; margin-top: 2rem; }}
p.note, p.mean {{ color: var(--soft); font-size: 0.875rem; }}
pre {{ border: 1px solid var(--line); border-radius: 0.4rem; padding: 0.8rem 1rem; white-space: pre-wrap;
  overflow-wrap: anywhere; font: 0.95rem/1.8 ui-monospace, monospace; }}
span[style] {{ background: {background}; border-radius: 0.15rem;
  print-color-adjust: exact; }}
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
<p class="note">{scale}</p>
{sections}
</body>
</html>
"""


def page(title: str, note: str, scale: str, sections: str, *, light: str, dark: str, background: str) -> str:
    """Return a whole page in HTML; `title` and `note` are text, `scale` and `sections` HTML.

    `light` and `dark` are CSS variables of the two settings, `background` that of a token, by its own style's.
    """
    style = _STYLE.format(light=light, dark=dark, background=background)
    return _PAGE.format(title=html.escape(title), style=style, note=html.escape(note), scale=scale, sections=sections)


def section(name: str, blocks: Sequence[str]) -> str:
    """Return blocks, HTML, under a heading."""
    return f"<section>\n<h2>{html.escape(name)}</h2>\n" + "\n".join(blocks) + "\n</section>"


def block(tokens: str, said: str) -> str:
    """Return a text of tokens, HTML, and a line of text below it."""
    return f'<pre>\n{tokens}</pre>\n<p class="mean">{html.escape(said, quote=False)}</p>'


def token(piece: str, style: str, said: str = "") -> str:
    """Return a token, coloured by its own `style`, that says `said` when pointed at."""
    title = f' title="{html.escape(said)}"' if said else ""
    # a browser takes a lone carriage return and control characters for errors
    clean = "".join(c if c in "\n\t" or c.isprintable() or c.isspace() else "\N{REPLACEMENT CHARACTER}" for c in piece)
    return f'<span style="{style}"{title}>{html.escape(clean)}</span>'
