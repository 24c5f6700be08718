"""The plot of docs/training.md, drawn from what examples/rl writes."""

import json
from pathlib import Path

from benchmarks.curves import CurvePanel, curve_chart

__all__ = ["REINFORCEMENT", "rl_plot", "rl_plots"]

REINFORCEMENT = "rl-amd-epyc-0dd4679.json"


def rl_plots(results: Path) -> dict[str, str]:
    """File name -> SVG."""
    return {"rl.svg": rl_plot(json.loads((results / REINFORCEMENT).read_text()))}


def rl_plot(report: dict) -> str:
    """Reward, and KL between sampler and trainer, by arm: the runs that see each batch at once."""
    runs = [run for run in report["runs"] if run["micro_batches"] == 1]
    arms = list(dict.fromkeys(run["arm"] for run in runs))
    panels = [
        CurvePanel(title, {arm: [run[field] for run in runs if run["arm"] == arm] for arm in arms})
        for title, field in (("reward, mean of a step's completions", "reward"), ("KL(sampler, trainer), nats", "kl"))
    ]
    note = f"mean and range of {report['seeds']} seeds; {report['machine']}"
    return curve_chart("Reinforcement learning of the embedded model", note, "step", panels)
