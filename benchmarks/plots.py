"""Draw the plots of the docs as SVG from benchmarks/results: python -m benchmarks.plots.

Ratios are the peer's time over ours: above the line at 1 we are faster.
"""

import json
import statistics
from pathlib import Path

from benchmarks.answer_plots import answer_plots
from benchmarks.bar_charts import Panel, Series, bar_chart
from benchmarks.rl_plots import rl_plots
from benchmarks.scheduler_plots import scheduler_plots

RESULTS = Path(__file__).parent / "results"
PLOTS = Path(__file__).parents[1] / "docs" / "plots"
GEMM = "templates-nvidia-h200-9d88df9.json"
ATTENTION = "templates-nvidia-h200-e06d99a.json"
MODEL = "model-nvidia-h200-e06d99a.json"


def gemm(report: dict) -> str:
    """Draw geometric means over the shapes, by token count, tuned."""
    series: Series = {}
    for order in ("Sequential", "Tree(1,2,4,8)"):
        rows = [row for row in report["rows"] if row["kernel"] == "matmul" and row["order"] == order]
        series[order] = {
            str(m): statistics.geometric_mean(row["ratio"] for row in rows if row["M"] == m)
            for m in sorted({row["M"] for row in rows})
        }
    note = f"geometric mean of the shapes measured at each M, fastest admitted schedule; commit {report['commit']}"
    return bar_chart(
        "GEMM beside cuBLAS, bf16, H200", note, [Panel("M, tokens of a product", "cuBLAS's time / ours, ratio", series)]
    )


def attention(report: dict) -> str:
    """Draw prefill beside SDPA, and decode beside a copy of as many bytes and beside SDPA."""
    rows = {kind: [r for r in report["rows"] if r["kernel"] == f"attention {kind}"] for kind in ("prefill", "decode")}
    prefill = {
        f"SDPA, {peer}": {_thousands(row["keys"]): row[f"ratio to {peer}"] for row in rows["prefill"]}
        for peer in ("cuDNN", "flash")
    }
    decode = {
        f"{row['batch']}×{_thousands(row['keys'])}": row
        for row in sorted(rows["decode"], key=lambda row: (row["batch"], row["keys"]))
    }
    copied = {"a copy of as many bytes": {case: row["of_copy"] for case, row in decode.items()}}
    peer = {"SDPA over contiguous keys": {case: row["ratio"] for case, row in decode.items()}}
    ratio, cases = "peer's time / ours, ratio", "decode of one token a sequence: sequences × keys"
    return bar_chart(
        "Attention, bf16, causal, GQA 32/8, D = 128, H200",
        f"a copy of a gigabyte reaches only 2.8 TB/s: ratios to it above 1 are its weakness; commit {report['commit']}",
        [Panel("prefill: keys", ratio, prefill), Panel(cases, ratio, copied), Panel(cases, ratio, peer)],
    )


def model(report: dict) -> str:
    """Draw steps of the whole model beside torch.compile default."""
    numerics = "tp_sizes=(1,)"
    ours, peers = report[f"ms, {numerics}"], report["ms, peers"]
    ratios = {step: peers[f"torch.compile {step}"] / ours[step] for step in ours if f"torch.compile {step}" in peers}
    axis = "step: decode of so many sequences of 512 keys, prefill of so many tokens"
    return bar_chart(
        "Qwen3-8B's shape beside torch.compile default, bf16, H200",
        f"both in one run; commit {report['commit']}",
        [Panel(axis, "torch.compile's time / ours, ratio", {numerics: ratios})],
    )


def plots() -> dict[str, str]:
    """Return SVGs by file name."""
    drawn = {
        "gemm.svg": gemm(_report(GEMM)),
        "attention.svg": attention(_report(ATTENTION)),
        "model.svg": model(_report(MODEL)),
    }
    return drawn | scheduler_plots(RESULTS) | rl_plots(RESULTS) | answer_plots(RESULTS)


def _report(name: str) -> dict:
    return json.loads((RESULTS / name).read_text())


def _thousands(keys: int) -> str:
    return f"{keys // 1024}k" if keys >= 1024 else str(keys)


if __name__ == "__main__":
    PLOTS.mkdir(exist_ok=True)
    for name, svg in plots().items():
        (PLOTS / name).write_text(svg)
