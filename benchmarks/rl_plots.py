"""Draw the plots of reinforcement learning from the results of examples/rl."""

import json
from pathlib import Path

from benchmarks.curves import CurvePanel, curve_chart

__all__ = ["rl_plot", "rl_plots"]

RESULTS = {"rl.svg": "rl-amd-epyc-0dd4679.json", "rl-smollm2.svg": "rl-nvidia-h200-5e1a20ba.json"}


def rl_plots(results: Path) -> dict[str, str]:
    """Return SVGs by file name."""
    return {name: rl_plot(json.loads((results / file).read_text())) for name, file in RESULTS.items()}


def rl_plot(report: dict) -> str:
    """Draw reward, and KL between sampler and trainer, by arm, for the runs without micro-batches."""
    runs = [run for run in report["runs"] if run["micro_batches"] == 1]
    arms = list(dict.fromkeys(run["arm"] for run in runs))
    panels = [
        CurvePanel(title, {arm: [run[field] for run in runs if run["arm"] == arm] for arm in arms})
        for title, field in (("reward, mean of a step's completions", "reward"), ("KL(sampler, trainer), nats", "kl"))
    ]
    seeds = f"mean and range of {report['seeds']} seeds" if report["seeds"] > 1 else "one seed"
    note = f"{seeds}; {report['machine']}"
    model = {"tiny": "the embedded model", "smollm2": "SmolLM2-135M-Instruct"}.get(report["model"], report["model"])
    return curve_chart(f"Reinforcement learning of {model}", note, "step", panels)
