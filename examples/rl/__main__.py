"""Reinforcement learning whose trainer and sampler have the same bits, beside plain torch: `make rl`, or

    python -m examples.rl [--seeds 3 --steps 30 --model tiny --device cpu --out build/rl]

Arms: plain torch, which treats its samples as on-policy; the same with importance weights; detcompile's trainer,
where the difference is zero. A run of detcompile's trainer and one of the plain one are then repeated with shuffled
micro-batches and other padding; on a CPU, detcompile's on two ranks of FSDP2 as well. The weights are compared after
each of the first 20 steps. Writes rl.json and rl.svg. Exits with 1 if an on-policy step is not exactly on policy, or
micro-batches or ranks change detcompile's weights.

Needs no GPU and no download: the model comes with the package.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import detcompile
from benchmarks.cpu import cpu_name
from benchmarks.rl_plots import rl_plot
from examples.rl.policies import DetcompilePolicy, PlainPolicy
from examples.rl.task import PROMPTS
from examples.rl.training import COMPARED_STEPS, GROUP_SIZE, MAX_TOKENS, Arm, Step, train

LR = 5e-5
ARMS = [
    Arm("plain trainer, no correction", "plain"),
    Arm("plain trainer, importance weights", "plain", importance=True),
    Arm("on policy: detcompile's trainer", "detcompile"),
]
SPLIT = {"micro_batches": 3, "left_padding": True}
SHARED = ARMS[2]._replace(**SPLIT, ranks=2)


def run(arm: Arm, seed: int, num_steps: int, model: detcompile.CompiledModel, policy: Any) -> dict:
    """Run and print all steps of one arm and seed; with micro-batches only those that are compared."""
    steps = []
    num_steps = num_steps if arm.micro_batches == 1 else min(num_steps, COMPARED_STEPS)
    for number, step in enumerate(train(arm, policy, model, seed, num_steps)):
        steps.append(step)
        how = f"{arm.micro_batches} micro-batches, {arm.ranks} ranks"
        summary_line = f"reward {step.reward:.3f}  KL {step.kl:.1e}  weights {step.weights}"
        if not dist.is_initialized() or dist.get_rank() == 0:
            print(f"{arm.name}, seed {seed}, {how}, step {number:2}: {summary_line}", flush=True)
    columns = {name: [getattr(step, name) for step in steps] for name in Step._fields}
    return {**arm._asdict(), "arm": arm.name, "seed": seed, **columns}


def on_ranks(arguments: argparse.Namespace) -> dict:
    """Run seed 0 with a trainer that is sharded over processes, which torchrun starts."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "run.json"
        command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={SHARED.ranks}", "--standalone"]
        options = ["--steps", str(arguments.steps), "--model", arguments.model, "--rank-of", str(file)]
        subprocess.run([*command, "-m", "examples.rl", *options], check=True)
        return json.loads(file.read_text())


def as_rank(arguments: argparse.Namespace) -> None:
    """Run as one of the processes that share a trainer; the first writes the steps."""
    dist.init_process_group("gloo")
    model = detcompile.compile(arguments.model)  # every rank draws all completions: they have the same bits
    steps = run(SHARED, 0, arguments.steps, model, DetcompilePolicy(arguments.model, LR))
    if dist.get_rank() == 0:
        arguments.rank_of.write_text(json.dumps(steps))
    dist.destroy_process_group()


def failures(runs: list[dict]) -> list[str]:
    """Return one line for each claim that does not hold."""
    broken = [
        f"{one['arm']}, seed {one['seed']}, step {number}: log-probabilities differ by {one['largest'][number]}"
        for one in runs
        for number, equal in enumerate(one["equal"])
        if one["trainer"] == "detcompile" and not (equal and one["kl"][number] == 0.0)
    ]
    digests = {
        tuple(one["weights"][:COMPARED_STEPS]) for one in runs if one["trainer"] == "detcompile" and one["seed"] == 0
    }
    if len(digests) != 1:
        broken.append("micro-batches or ranks moved the weights of detcompile's trainer")
    return broken


def report(arguments: argparse.Namespace) -> dict:
    """Return all runs, and the time that they took."""
    started = time.perf_counter()
    name, device = arguments.model, arguments.device
    model = detcompile.compile(name, device=device)
    policies = {"plain": PlainPolicy(name, LR, device), "detcompile": DetcompilePolicy(name, LR, device)}
    made = time.perf_counter()
    cases = [(arm, seed) for seed in range(arguments.seeds) for arm in ARMS]
    cases += [(arm._replace(**SPLIT), 0) for arm in (ARMS[0], ARMS[2])]
    runs = [run(arm, seed, arguments.steps, model, policies[arm.trainer]) for arm, seed in cases]
    if device == "cpu":
        runs.append(on_ranks(arguments))
    times = os.times()
    machine = f"{cpu_name()}, {os.cpu_count()} cores" if device == "cpu" else torch.cuda.get_device_name()
    return {
        "machine": machine, "model": name, "lr": LR,
        "transformers_draw_s": plain_draw_seconds(model, policies["plain"]),
        "steps": arguments.steps, "seeds": arguments.seeds,
        "setup_s": round(made - started, 1), "wall_s": round(time.perf_counter() - started, 1),
        "cpu_s": round(times.user + times.system + times.children_user + times.children_system, 1), "runs": runs,
    }  # fmt: skip


def plain_draw_seconds(model: detcompile.CompiledModel, policy: PlainPolicy) -> float:
    """Return the seconds in which transformers' generate draws a step's completions, the best of three."""
    policy.reset()
    tokenizer, device = model.tokenizer, policy.model.device
    prompts = [tokenizer(prompt)["input_ids"] for prompt in PROMPTS]
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts], device=device)
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=device)
    newline = tokenizer("\n")["input_ids"][-1]
    options = {"do_sample": True, "max_new_tokens": MAX_TOKENS, "num_return_sequences": GROUP_SIZE, "top_k": 0}
    taken = []
    for _ in range(3):
        started = time.perf_counter()
        policy.model.generate(ids, attention_mask=mask, eos_token_id=newline, pad_token_id=newline, **options)
        taken.append(time.perf_counter() - started)
    return min(taken)


def summary(report: dict) -> str:
    """Return a line for each arm (rewards, differences, seconds), and how many steps have equal weights."""
    lines = []
    for arm in ARMS:
        runs = [one for one in report["runs"] if one["arm"] == arm.name and one["micro_batches"] == 1]
        first, last = ([sum(one["reward"][part]) / 5 for one in runs] for part in (slice(5), slice(-5, None)))
        kls = [kl for one in runs for kl in one["kl"]]
        equal = sum(sum(one["equal"]) for one in runs)
        lines.append(
            f"--- {arm.name}: reward {min(first):.2f}..{max(first):.2f} to {min(last):.2f}..{max(last):.2f}, KL mean "
            f"{sum(kls) / len(kls):.1e}, largest {max(kls):.1e}; {equal} of {len(kls)} steps with equal bits; a step"
            f" {middle(runs, 'step_s'):.2f} s, of it {middle(runs, 'draw_s'):.2f} s to draw"
        )
    for split in (one for one in report["runs"] if one["micro_batches"] > 1):
        whole = next(one for one in report["runs"] if one["arm"] == split["arm"] and one["seed"] == split["seed"])
        same = sum(a == b for a, b in zip(whole["weights"], split["weights"]))
        how = f"1 and 3 micro-batches, 1 and {split['ranks']} ranks"
        lines.append(f"--- {split['arm']}, {how}: equal weights after {same} of {len(split['weights'])} steps")
    lines.append(f"--- transformers' generate draws a step's completions in {report['transformers_draw_s']:.2f} s")
    return "\n".join(lines)


def middle(runs: list[dict], field: str) -> float:
    """Return the median over all steps of some runs."""
    return statistics.median(value for one in runs for value in one[field])


def main() -> None:
    parser = argparse.ArgumentParser(description="Reinforcement learning with and without equal bits.")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--model", default="tiny", help="a name as for detcompile.compile")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--out", type=Path, default=Path("build/rl"))
    parser.add_argument("--rank-of", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank_of is not None:
        return as_rank(arguments)
    results = report(arguments)
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "rl.json").write_text(json.dumps(results, indent=1))
    (arguments.out / "rl.svg").write_text(rl_plot(results))
    print(summary(results))
    print(f"--- {results['wall_s']} s, {results['cpu_s']} s of CPU time; {arguments.out}/rl.svg")
    if broken := failures(results["runs"]):
        sys.exit("\n".join(broken))


if __name__ == "__main__":
    main()
