"""Draw curves over steps as SVG, in panels: each is the mean of several runs, in a band from least to greatest."""

import math
from collections.abc import Sequence
from typing import NamedTuple
from xml.sax.saxutils import escape

__all__ = ["CurvePanel", "curve_chart"]

WIDTH, HEIGHT, LEFT, BOTTOM, TOP = 820, 340, 8, 62, 84  # units of the drawing
AXIS = 50  # left of a panel: the values of its lines, and its title
COLORS = ("#2a6f97", "#e07a5f", "#3d8b61")

Runs = Sequence[Sequence[float]]  # values by run and step


class CurvePanel(NamedTuple):
    """One pair of axes.

    Args:
        y: title of the axis of values, with the unit.
        curves: runs by legend; every panel has the same legends.
    """

    y: str
    curves: dict[str, Runs]


def curve_chart(title: str, note: str, x: str, panels: Sequence[CurvePanel]) -> str:
    """Return the SVG; ``x`` is the title of the axis of steps, and ``note`` stands below."""
    parts = [f'<text x="{LEFT}" y="20" font-size="15">{escape(title)}</text>']
    for place, legend in enumerate(panels[0].curves):
        across = LEFT + 270 * place
        parts.append(f'<rect x="{across}" y="32" width="10" height="10" fill="{COLORS[place]}"/>')
        parts.append(f'<text x="{across + 14}" y="41" font-size="11">{escape(legend)}</text>')
    wide = (WIDTH - LEFT) / len(panels)
    for place, panel in enumerate(panels):
        parts += _panel(panel, x, LEFT + place * wide + AXIS, LEFT + (place + 1) * wide - 12)
    parts.append(f'<text x="{LEFT}" y="{HEIGHT - 8}" font-size="11" fill="#666">{escape(note)}</text>')
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif">'
    return "\n".join([head, '<rect width="100%" height="100%" fill="white"/>', *parts, "</svg>"]) + "\n"


def _panel(panel: CurvePanel, x: str, left: float, right: float) -> list[str]:
    values = [value for runs in panel.curves.values() for run in runs for value in run]
    tick = _tick(max(values))
    lines, num_steps = math.ceil(max(values) / tick), max(len(run) for runs in panel.curves.values() for run in runs)

    def at(step: int, value: float) -> str:
        across = left + step / max(1, num_steps - 1) * (right - left)
        return f"{across:.1f},{HEIGHT - BOTTOM - value / (lines * tick) * (HEIGHT - BOTTOM - TOP):.1f}"

    parts = []
    for number in range(lines + 1):
        y = at(0, number * tick).split(",")[1]
        parts.append(f'<line x1="{left:.1f}" x2="{right:.1f}" y1="{y}" y2="{y}" stroke="#e4e4e4"/>')
        text = f"{number * tick:.3g}"
        parts.append(f'<text x="{left - 5:.1f}" y="{float(y) + 3.5:.1f}" {_END}>{text}</text>')
    for step in sorted({0, (num_steps - 1) // 2, num_steps - 1}):
        across = at(step, 0).split(",")[0]
        parts.append(f'<text x="{across}" y="{HEIGHT - BOTTOM + 14}" font-size="10" {_MIDDLE}>{step}</text>')
    parts.append(f'<text x="{(left + right) / 2:.1f}" y="{HEIGHT - BOTTOM + 30}" font-size="11" {_MIDDLE}>{x}</text>')
    parts.append(f'<text x="{left - AXIS + 8:.1f}" y="{TOP - 14}" font-size="11">{escape(panel.y)}</text>')
    for color, runs in zip(COLORS, panel.curves.values()):
        columns = list(zip(*runs))
        low = [at(step, min(column)) for step, column in enumerate(columns)]
        high = [at(step, max(column)) for step, column in enumerate(columns)]
        mean = [at(step, sum(column) / len(column)) for step, column in enumerate(columns)]
        parts.append(f'<polygon points="{" ".join(low + high[::-1])}" fill="{color}" fill-opacity="0.15"/>')
        parts.append(f'<polyline points="{" ".join(mean)}" fill="none" stroke="{color}" stroke-width="2"/>')
    return parts


_MIDDLE = 'text-anchor="middle"'
_END = 'font-size="10" text-anchor="end"'


def _tick(highest: float) -> float:
    """Return the distance between lines, 1, 2 or 5 times a power of ten, so that there are at most six."""
    highest = highest or 1.0
    power = 10.0 ** math.floor(math.log10(highest / 6))
    return next(times * power for times in (1.0, 2.0, 5.0, 10.0) if highest <= 6 * times * power)
