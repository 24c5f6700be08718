"""A self-contained HTML page: light and dark style, tables, and scrolling boxes."""

from collections.abc import Iterable, Mapping
from html import escape

STYLE = """
:root { color-scheme: light dark; --text: #222; --muted: #666; --line: #ddd; --page: #fff; --code: #f5f6f8;
  --box: #eef3fa; --edge: #7a94b8; --wire: #999; --bad: #a00; --good: #06702a; }
@media (prefers-color-scheme: dark) { :root { --text: #dfe3e8; --muted: #9aa4af; --line: #3a4148; --page: #14171a;
  --code: #1e2328; --box: #1f2c3d; --edge: #6f8fbd; --wire: #77818b; --bad: #ff8a80; --good: #7fd49a; } }
* { box-sizing: border-box; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 76em; margin: 0 auto; padding: 1.5em 1em 4em;
  color: var(--text); background: var(--page); }
h1 { font-size: 1.5em; line-height: 1.25; } h2 { margin: 2em 0 .5em; font-size: 1.2em; } h3 { margin: 1.5em 0 .3em; }
h1, h2, h3, figcaption, summary, p, dd, pre { overflow-wrap: anywhere; }
dl { display: grid; grid-template-columns: max-content minmax(0, 1fr); gap: .1em 1em; margin: 1em 0; }
dt { color: var(--muted); } dd { margin: 0; }
.scroll { overflow-x: auto; max-width: 100%; }
table { border-collapse: collapse; min-width: 100%; font-size: 13px; }
th, td { text-align: left; padding: 3px 12px 3px 0; vertical-align: top; border-bottom: 1px solid var(--line); }
th { color: var(--muted); font-weight: 600; } td { min-width: 4em; max-width: 34em; }
td:last-child { min-width: 10em; } td.bad { min-width: 18em; }
code, pre, td.op { font-family: ui-monospace, monospace; font-size: 12px; }
pre { white-space: pre-wrap; background: var(--code); padding: .8em; }
details { border-bottom: 1px solid var(--line); } summary { cursor: pointer; padding: 5px 0; }
figure { margin: 1.2em 0; } figcaption { margin-bottom: .4em; }
.bad { color: var(--bad); } .good { color: var(--good); } .muted { color: var(--muted); }
svg { display: block; max-width: 100%; height: auto; }
svg text { font: 11px ui-monospace, monospace; fill: var(--text); } svg line { stroke: var(--wire); }
svg rect { fill: var(--box); stroke: var(--edge); }
"""


def page(title: str, *parts: str) -> str:
    """Render a page.

    Args:
        title: plain text. parts: HTML.
    """
    return (
        f"<!doctype html><html lang='en'><head><meta charset='utf-8'>"
        "<meta name='viewport' content='width=device-width, initial-scale=1'>"
        f"<title>{escape(title)}</title><style>{STYLE}</style></head>"
        f"<body><h1>{escape(title)}</h1>{''.join(parts)}</body></html>\n"
    )


def scrolled(content: str, label: str) -> str:
    """Return HTML in a box as wide as the page, which scrolls wider content, by the keyboard too."""
    return f"<div class='scroll' tabindex='0' role='region' aria-label='{escape(label, quote=True)}'>{content}</div>"


def table(label: str, columns: Iterable[str], rows: Iterable[Iterable[str]], classes: Mapping[int, str] = {}) -> str:
    """Return a table of plain texts in a box.

    Args:
        classes: names of CSS classes by the number of the column.
    """
    head = "".join(f"<th>{escape(column)}</th>" for column in columns)
    body = "".join(f"<tr>{''.join(_cell(cell, classes.get(at)) for at, cell in enumerate(row))}</tr>" for row in rows)
    return scrolled(f"<table><tr>{head}</tr>{body}</table>", label)


def fact_table(facts: Mapping[str, str]) -> str:
    """Render names and plain texts, one line each."""
    return f"<dl>{''.join(f'<dt>{escape(name)}</dt><dd>{escape(text)}</dd>' for name, text in facts.items())}</dl>"


def _cell(text: str, kind: str | None) -> str:
    return f"<td class='{kind}'>{escape(text)}</td>" if kind else f"<td>{escape(text)}</td>"
