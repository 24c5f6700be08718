"""Draw the plots of docs/engine.md from benchmarks/results/schedulers-simulated-*.json, for benchmarks/plots.py."""

import json
import math
from pathlib import Path
from xml.sax.saxutils import escape

__all__ = ["SIMULATED", "scheduler_plots"]

SIMULATED = "schedulers-simulated-d93cac2.json"

WIDTH, HEIGHT, LEFT, BOTTOM, TOP = 780, 340, 64, 66, 64
COLORS = ("#2a6f97", "#81b29a", "#e07a5f", "#9a6fb0")

Lines = dict[str, list[tuple[float, float]]]  # legend -> points, x ascending


def scheduler_plots(results: Path) -> dict[str, str]:
    """Return SVGs by file name."""
    report = json.loads((results / SIMULATED).read_text())
    rows = report["schedulers"]
    panels = {
        title: _lines(rows, field)
        for title, field in (
            ("longest wait between two tokens", "tbt_max_ms"),
            ("P99 between two tokens", "tbt_p99_ms"),
            ("median to the first token", "ttft_p50_ms"),
        )
    }
    title = "Schedulers on one trace, by load"
    note = f"simulated: real scheduler, cost model of an H200 with an 8B model; commit {report['commit']}"
    return {"schedulers.svg": log_lines(title, note, panels)}


def log_lines(title: str, note: str, panels: dict[str, Lines]) -> str:
    """Draw panels side by side, with the same legends and one logarithmic scale between powers of ten."""
    points = [point for lines in panels.values() for line in lines.values() for point in line]
    low, high = (round_(math.log10(f(y for _, y in points))) for f, round_ in ((min, math.floor), (max, math.ceil)))
    first, last = min(x for x, _ in points), max(x for x, _ in points)
    wide = (WIDTH - LEFT - 8) / len(panels)

    def at(panel: int, x: float, y: float) -> tuple[float, float]:
        across = LEFT + panel * wide + 8 + (x - first) / (last - first) * (wide - 26)
        return across, HEIGHT - BOTTOM - (math.log10(y) - low) / (high - low) * (HEIGHT - BOTTOM - TOP)

    parts = [f'<text x="{LEFT}" y="20" font-size="15">{escape(title)}</text>']
    parts.append(f'<text x="{LEFT}" y="{HEIGHT - 8}" font-size="11" fill="#666">{escape(note)}</text>')
    for power in range(low, high + 1):
        _, y = at(0, first, 10.0**power)
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - 8}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{LEFT - 4}" y="{y + 4:.1f}" font-size="10" text-anchor="end">{10**power}</text>')
    middle = (TOP + HEIGHT - BOTTOM) / 2
    parts.append(
        f'<g transform="translate(14 {middle:.1f}) rotate(-90)"><text {_TITLE}>milliseconds, log scale</text></g>'
    )
    for place, legend in enumerate(next(iter(panels.values()))):
        x = LEFT + 170 * place
        parts.append(f'<rect x="{x}" y="30" width="10" height="10" fill="{COLORS[place]}"/>')
        parts.append(f'<text x="{x + 14}" y="39" font-size="11">{escape(legend)}</text>')
    for panel, (name, lines) in enumerate(panels.items()):
        middle = LEFT + (panel + 0.5) * wide
        parts.append(f'<text x="{middle:.1f}" y="56" font-size="11" text-anchor="middle">{escape(name)}</text>')
        below = HEIGHT - BOTTOM + 32
        parts.append(f'<text x="{middle:.1f}" y="{below}" {_TITLE}>requests a second</text>')
        for color, line in zip(COLORS, lines.values()):
            path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (at(panel, *point) for point in line))
            parts.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="2"/>')
        for x in sorted({x for line in lines.values() for x, _ in line}):
            across, _ = at(panel, x, 10.0**low)
            parts.append(f'<text x="{across:.1f}" y="{HEIGHT - BOTTOM + 15}" {_SMALL}>{x:g}</text>')
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif">'
    return "\n".join([head, '<rect width="100%" height="100%" fill="white"/>', *parts, "</svg>"]) + "\n"


_TITLE = 'font-size="11" text-anchor="middle"'
_SMALL = 'font-size="10" text-anchor="middle"'


def _lines(rows: list[dict], field: str) -> Lines:
    lines: Lines = {}
    for row in sorted(rows, key=lambda row: row["rate"]):
        lines.setdefault(row["policy"], []).append((row["rate"], row[field]))
    return lines
