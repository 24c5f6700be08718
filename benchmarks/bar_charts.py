"""Draw bars over groups as SVG: panels below each other, each with titled axes and a line at one value."""

import math
from collections.abc import Sequence
from typing import NamedTuple
from xml.sax.saxutils import escape

__all__ = ["Panel", "Series", "bar_chart"]

WIDTH, PANEL, LEFT, RIGHT, HEAD, FOOT = 820, 236, 56, 10, 30, 24  # units of the drawing; PANEL is a panel's height
ABOVE, BELOW = 34, 46  # of a panel: the legend and the highest value; the groups and the axis' title
COLORS = ("#2a6f97", "#e07a5f", "#81b29a")
TICKS = (0.1, 0.2, 0.25, 0.5, 1.0, 2.0, 5.0, 10.0)
LABEL_WIDTH = 21  # narrower bars go without their value: labels would touch

Series = dict[str, dict[str, float]]  # legend -> group -> value


class Panel(NamedTuple):
    """One pair of axes.

    Args:
        x: title of the axis of groups.
        y: title of the axis of values, with the unit.
        series: values by legend and group.
        line: value at which a line is drawn.
    """

    x: str
    y: str
    series: Series
    line: float = 1.0


def bar_chart(title: str, note: str, panels: Sequence[Panel]) -> str:
    """Return the SVG; ``note`` stands below the last panel."""
    height = HEAD + PANEL * len(panels) + FOOT
    parts = [f'<text x="{LEFT}" y="20" font-size="15">{escape(title)}</text>']
    for place, panel in enumerate(panels):
        parts += _panel(panel, HEAD + PANEL * place)
    parts.append(f'<text x="{LEFT}" y="{height - 8}" font-size="11" fill="#666">{escape(note)}</text>')
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif">'
    return "\n".join([head, '<rect width="100%" height="100%" fill="white"/>', *parts, "</svg>"]) + "\n"


def _panel(panel: Panel, top: float) -> list[str]:
    groups = list(dict.fromkeys(group for values in panel.series.values() for group in values))
    highest = max(panel.line, *(value for values in panel.series.values() for value in values.values()))
    tick = next(tick for tick in TICKS if highest / tick <= 6)
    scale = (PANEL - ABOVE - BELOW) / (tick * math.ceil(1.05 * highest / tick))
    zero = top + PANEL - BELOW
    parts = []
    for number in range(math.ceil(1.05 * highest / tick) + 1):
        y = zero - number * tick * scale
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#e4e4e4"/>')
        parts.append(
            f'<text x="{LEFT - 5}" y="{y + 3.5:.1f}" font-size="10" text-anchor="end">{number * tick:g}</text>'
        )
    for place, legend in enumerate(panel.series):
        color, x = COLORS[place], LEFT + 250 * place
        parts.append(f'<rect x="{x}" y="{top + 2:.1f}" width="10" height="10" fill="{color}"/>')
        parts.append(f'<text x="{x + 14}" y="{top + 11:.1f}" font-size="11">{escape(legend)}</text>')
    y = zero - panel.line * scale
    columns = [[values.get(group) for group in groups] for values in panel.series.values()]
    bars, labels = _bars(columns, zero, scale)
    parts += [*bars, f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#333"/>', *labels]
    step = (WIDTH - LEFT - RIGHT) / len(groups)
    size = min(10.0, step / (0.68 * max(map(len, groups))))
    parts += [_centered(LEFT + (j + 0.5) * step, zero + 14, size, group) for j, group in enumerate(groups)]
    parts.append(_centered((LEFT + WIDTH - RIGHT) / 2, zero + 31, 11, panel.x))
    middle = (top + ABOVE + zero) / 2
    parts.append(f'<g transform="translate(14 {middle:.1f}) rotate(-90)">{_centered(0, 0, 11, panel.y)}</g>')
    parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{zero:.1f}" y2="{zero:.1f}" stroke="#333"/>')
    return parts


def _bars(columns: list[list[float | None]], zero: float, scale: float) -> tuple[list[str], list[str]]:
    """Return the bars, and value labels for bars that are wide enough; a column has the values of one legend."""
    step = (WIDTH - LEFT - RIGHT) / len(columns[0])
    width = min(0.8 * step / len(columns), 60)
    bars, labels = [], []
    for place, values in enumerate(columns):
        for j, value in enumerate(values):
            if value is None:
                continue
            x, height = LEFT + (j + 0.5) * step + (place - len(columns) / 2) * width, value * scale
            bars.append(
                f'<rect x="{x:.1f}" y="{zero - height:.1f}" width="{width - 1:.1f}" height="{height:.1f}" '
                f'fill="{COLORS[place]}"/>'
            )
            if width >= LABEL_WIDTH:
                labels.append(_centered(x + width / 2, zero - height - 3, 10, f"{value:.2f}", halo=True))
    return bars, labels


def _centered(x: float, y: float, size: float, text: str, halo: bool = False) -> str:
    """Return text centered at x; a halo keeps it legible over lines."""
    under = ' stroke="white" stroke-width="3" paint-order="stroke"' if halo else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size:.3g}" text-anchor="middle"{under}>{escape(text)}</text>'
