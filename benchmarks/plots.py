"""The plots of docs, as SVG files made from benchmarks/results: python -m benchmarks.plots.

Bars are ratios, the peer's time over ours: above the line at 1 we are faster.
"""

import json
import statistics
from pathlib import Path
from xml.sax.saxutils import escape

from benchmarks.scheduler_plots import scheduler_plots

RESULTS = Path(__file__).parent / "results"
PLOTS = Path(__file__).parents[1] / "docs" / "plots"
GEMM = "templates-nvidia-h200-9d88df9.json"
ATTENTION = "templates-nvidia-h200-e06d99a.json"
MODEL = "model-nvidia-h200-5db1a3a.json"

WIDTH, HEIGHT, LEFT, BOTTOM, TOP = 760, 300, 44, 46, 56
COLORS = ("#2a6f97", "#e07a5f", "#81b29a")

Series = dict[str, dict[str, float]]  # legend -> group -> value


def bars(title: str, note: str, series: Series, line: float = 1.0) -> str:
    """Grouped bars, with a line at one value."""
    groups = list(dict.fromkeys(group for values in series.values() for group in values))
    top = 1.1 * max(max(values.values()) for values in series.values())
    step = (WIDTH - LEFT - 8) / len(groups)
    bar = 0.8 * step / len(series)

    def y(value: float) -> float:
        return HEIGHT - BOTTOM - value / top * (HEIGHT - BOTTOM - TOP)

    parts = [f'<text x="{LEFT}" y="20" font-size="15">{escape(title)}</text>']
    parts.append(f'<text x="{LEFT}" y="{HEIGHT - 8}" font-size="11" fill="#666">{escape(note)}</text>')
    for i, (legend, values) in enumerate(series.items()):
        color, x0 = COLORS[i % len(COLORS)], LEFT + 190 * i
        parts.append(f'<rect x="{x0}" y="30" width="10" height="10" fill="{color}"/>')
        parts.append(f'<text x="{x0 + 14}" y="39" font-size="11">{escape(legend)}</text>')
        for j, group in enumerate(groups):
            if group in values:
                x, value = LEFT + j * step + 0.1 * step + i * bar, values[group]
                parts.append(
                    f'<rect x="{x:.1f}" y="{y(value):.1f}" width="{bar:.1f}" '
                    f'height="{y(0) - y(value):.1f}" fill="{color}"/>'
                )
                parts.append(f'<text x="{x + bar / 2:.1f}" y="{y(value) - 3:.1f}" {_SMALL}>{value:.2f}</text>')
    for j, group in enumerate(groups):
        parts.append(f'<text x="{LEFT + (j + 0.5) * step:.1f}" y="{y(0) + 15:.1f}" {_SMALL}>{escape(group)}</text>')
    parts.append(f'<line x1="{LEFT}" x2="{WIDTH - 8}" y1="{y(line):.1f}" y2="{y(line):.1f}" stroke="#333"/>')
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif">'
    return "\n".join([head, '<rect width="100%" height="100%" fill="white"/>', *parts, "</svg>"]) + "\n"


_SMALL = 'font-size="10" text-anchor="middle"'


def gemm(rows: list[dict]) -> str:
    """Geometric means over the shapes, by token count, tuned."""
    series: Series = {}
    for order in ("Sequential", "Tree(1,2,4,8)"):
        found = [row for row in rows if row["kernel"] == "matmul" and row["order"] == order]
        series[f"{order}"] = {
            f"M={m}": statistics.geometric_mean(row["ratio"] for row in found if row["M"] == m)
            for m in sorted({row["M"] for row in found})
        }
    return bars("GEMM against cuBLAS, bf16, H200", "geometric mean of the shapes measured at each M", series)


def attention(rows: list[dict]) -> str:
    """Prefill against cuDNN, decode against a copy of the cache: the best schedule of each case."""
    prefill: dict[str, float] = {}
    decode: dict[str, float] = {}
    for row in rows:
        if row["kernel"] == "attention prefill":
            key = f"{row['keys'] // 1024}k"
            prefill[key] = max(prefill.get(key, 0), row["ratio to cuDNN"])
        elif row["kernel"] == "attention decode":
            key = f"{row['batch']}x{row['keys']}"
            decode[key] = max(decode.get(key, 0), row["of_copy"])
    order = sorted(decode, key=lambda key: [int(part) for part in key.split("x")])
    series = {"prefill / SDPA cuDNN": prefill, "decode / device copy": {key: decode[key] for key in order}}
    return bars("Attention, bf16, GQA 32/8, D=128, H200", "keys of a prefill; sequences x keys of a decode", series)


def model(report: dict) -> str:
    """Steps of the whole model against torch.compile default."""
    peers = report["ms, peers"]
    series: Series = {}
    for numerics in ("tp_sizes=(1,)", "tp_sizes=(1, 2, 4, 8)"):
        ours = report[f"ms, {numerics}"]
        series[numerics] = {
            step: peers[f"torch.compile {step}"] / ours[step] for step in ours if f"torch.compile {step}" in peers
        }
    return bars("Qwen3-8B shape against torch.compile default, bf16, H200", f"commit {report['commit']}", series)


def plots() -> dict[str, str]:
    """File name -> SVG."""
    products, attended = (json.loads((RESULTS / name).read_text())["rows"] for name in (GEMM, ATTENTION))
    report = json.loads((RESULTS / MODEL).read_text())
    drawn = {"gemm.svg": gemm(products), "attention.svg": attention(attended), "model.svg": model(report)}
    return drawn | scheduler_plots(RESULTS)


if __name__ == "__main__":
    PLOTS.mkdir(exist_ok=True)
    for name, svg in plots().items():
        (PLOTS / name).write_text(svg)
