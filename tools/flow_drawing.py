"""Draw docs/images/flows.svg from docs/images/flows.txt: ``python -m tools.flow_drawing``.

``# title`` begins a column, ``name | file | text`` is a box, and ``name -> name | label`` an arrow beside the boxes.
"""

from pathlib import Path
from xml.sax.saxutils import escape

__all__ = ["SOURCE", "SVG", "draw", "files"]

IMAGES = Path(__file__).parents[1] / "docs" / "images"
SOURCE, SVG = IMAGES / "flows.txt", IMAGES / "flows.svg"
COLUMN, WIDTH, BOX, GAP, TOP = 430, 330, 58, 22, 52  # pixels
STYLE = """
.bg { fill: #ffffff } .ink { fill: #1a1a1a } .soft { fill: #595959 } .box { fill: #dbe8f7 } .tip { fill: #1f4e8c }
.edge { stroke: #1f4e8c; stroke-width: 1.6; fill: none }
@media (prefers-color-scheme: dark) {
.bg { fill: #15181c } .ink { fill: #ececec } .soft { fill: #b0b0b0 } .box { fill: #22344a } .tip { fill: #8fbcf0 }
.edge { stroke: #8fbcf0 }
}
"""


def files(source: str) -> list[str]:
    """Return the files that the boxes name, relative to the package."""
    return [line.split(" | ")[1] for line in source.splitlines() if line.count(" | ") == 2]


def draw(source: str) -> str:
    """Return the SVG of a source."""
    columns = [part.splitlines() for part in source.split("# ")[1:]]
    shapes: list[str] = []
    height = 0
    for place, (title, *lines) in enumerate(columns):
        left = 20 + place * COLUMN
        shapes.append(_text(left, 30, title, "ink", 18, bold=True))
        tops: dict[str, int] = {}
        for line in lines:
            name, _, rest = line.partition(" | ")
            if "->" in name:
                start, end = name.split(" -> ")
                shapes += _side_arrow(left + WIDTH, tops[start] + BOX // 2, tops[end] + BOX // 2, rest)
                continue
            top = TOP + len(tops) * (BOX + GAP)
            if tops:
                shapes += _arrow_down(left + WIDTH // 2, top - GAP, top)
            tops[name] = top
            file, text = rest.split(" | ")
            shapes.append(f'<rect class="box" x="{left}" y="{top}" width="{WIDTH}" height="{BOX}" rx="6"/>')
            shapes.append(_text(left + 12, top + 23, name, "ink", 14, bold=True))
            shapes.append(_text(left + WIDTH - 12, top + 23, file, "soft", 11, anchor="end"))
            shapes.append(_text(left + 12, top + 44, text, "ink", 13))
        height = max(height, TOP + len(tops) * (BOX + GAP))
    width = COLUMN * len(columns) + 10
    head = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'role="img" font-family="system-ui, sans-serif">',
        f"<title>{escape(' and '.join(column[0] for column in columns))}, step by step</title>",
        f"<style>{STYLE}</style>",
        f'<rect class="bg" width="{width}" height="{height}"/>',
    ]
    return "\n".join([*head, *shapes, "</svg>", ""])


def _text(x: int, y: int, text: str, kind: str, size: int, bold: bool = False, anchor: str = "start") -> str:
    weight = "bold" if bold else "normal"
    return (
        f'<text class="{kind}" x="{x}" y="{y}" font-size="{size}" font-weight="{weight}" text-anchor="{anchor}">'
        f"{escape(text)}</text>"
    )


def _arrow_down(x: int, top: int, bottom: int) -> list[str]:
    return [
        f'<line class="edge" x1="{x}" y1="{top}" x2="{x}" y2="{bottom - 6}"/>',
        f'<path class="tip" d="M{x - 5} {bottom - 8} L{x + 5} {bottom - 8} L{x} {bottom} Z"/>',
    ]


def _side_arrow(x: int, start: int, end: int, label: str) -> list[str]:
    return [
        f'<path class="edge" d="M{x} {start} H{x + 22} V{end} H{x + 6}"/>',
        f'<path class="tip" d="M{x + 8} {end - 5} L{x + 8} {end + 5} L{x} {end} Z"/>',
        _text(x + 28, (start + end) // 2, label, "soft", 12),
    ]


if __name__ == "__main__":
    SVG.write_text(draw(SOURCE.read_text(encoding="utf-8")), encoding="utf-8")
