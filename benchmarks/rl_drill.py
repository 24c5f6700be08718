"""Kill the server, engines and trainer of a training run: its last weights must equal an undisturbed run's.

    python -m benchmarks.rl_drill [--steps 20] [--kills 6] [--runs 1] [--parallel 1] [--seed 0]

A trainer in a separate process draws rollouts from a server of the embedded model, updates the weights from them and
sends the weights to the server as a folder. It saves weights and momentum of each step by one rename. The drill kills
one process after another by SIGKILL at random moments and restarts it. The last weights must have the sha256 of an
undisturbed run's: a token or a log-probability of other weights would change them. ``--parallel`` runs that many at a
time. Prints a line of JSON per run, and one of all.
"""

import argparse
import hashlib
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import torch
from safetensors.torch import load_file, save_file

from detcompile.models.hub import TINY_FOLDER

PROMPTS = ("def mean(values):\n", "import json\n", "class Queue:\n")
ROLLOUT = {"n": 2, "max_tokens": 24, "temperature": 1.0, "logprobs": 0, "return_token_ids": True, "ignore_eos": True}
WEIGHTS, MOMENTUM = "model.safetensors", "momentum.safetensors"
SCALE, DECAY = 2e-3, 0.9
PAUSE_SECONDS = 0.3
KILLED = ("server", "engine", "trainer")


def train(url: str, folder: Path, steps: int) -> None:
    """Run the steps that are not done yet."""
    client = httpx.Client(base_url=url, timeout=120)
    first = folder / "step-0"
    if not first.exists():
        first_weights = load_file(TINY_FOLDER / WEIGHTS)
        keep(first, first_weights, {name: torch.zeros_like(tensor) for name, tensor in first_weights.items()})
    done = max(int(path.name.removeprefix("step-")) for path in folder.glob("step-*"))
    for step in range(done, steps):
        path = folder / f"step-{step}"
        digest = hashlib.sha256()
        for number, prompt in enumerate(PROMPTS):
            digest.update(rollout(client, path, {"prompt": prompt, "seed": 1000 * step + number, **ROLLOUT}))
        weights, momentum = load_file(path / WEIGHTS), load_file(path / MOMENTUM)
        draw = torch.Generator().manual_seed(int.from_bytes(digest.digest()[:7], "big"))
        for name, tensor in weights.items():
            noise = torch.randn(tensor.shape, generator=draw)
            momentum[name] = (DECAY * momentum[name].float() + noise).to(tensor.dtype)
            weights[name] = (tensor.float() * (1 + SCALE * momentum[name].float())).to(tensor.dtype)
        keep(folder / f"step-{step + 1}", weights, momentum)
        shutil.rmtree(folder / f"step-{step - 1}", ignore_errors=True)


def keep(path: Path, weights: dict[str, torch.Tensor], momentum: dict[str, torch.Tensor]) -> None:
    """Write a step's state atomically."""
    new = path.with_name("new")
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir(parents=True)
    save_file(weights, new / WEIGHTS)
    save_file(momentum, new / MOMENTUM)
    new.rename(path)


def rollout(client: httpx.Client, path: Path, request: dict[str, Any]) -> bytes:
    """Return an answer by the weights of a folder; wait for a server that is starting."""
    while True:
        try:
            if client.get("/weight_info").raise_for_status().json()["weight_version"] != path.name:
                body = {"weight_dir": str(path), "weight_version": path.name}
                client.post("/update_weights", json=body).raise_for_status()
            choices = client.post("/v1/completions", json=request).raise_for_status().json()["choices"]
            drawn = [[each["token_ids"], each["logprobs"]["token_logprobs"]] for each in choices]
            assert {version for each in choices for version in each["weight_versions"]} == {path.name}
            return json.dumps(drawn).encode()
        except httpx.HTTPError:
            time.sleep(PAUSE_SECONDS)


class Run:
    """A server and a trainer, and their folders."""

    def __init__(self, folder: Path, steps: int) -> None:
        self.folder, self.steps = folder, steps
        self.reserved = socket.socket()  # bound while the run lasts, so that nobody else gets the port
        self.reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.reserved.bind(("127.0.0.1", 0))
        self.port = self.reserved.getsockname()[1]
        self.server, self.trainer = self.start_server(), self.start_trainer()

    def start_server(self) -> "subprocess.Popen[bytes]":
        options = ["--port", str(self.port), "--admin-key", "none", "--weights", str(self.folder / "weights")]
        command = [sys.executable, "-m", "detcompile", "serve", "tiny", "--max-restarts", "50", *options]
        return subprocess.Popen(command, stderr=subprocess.DEVNULL)

    def start_trainer(self) -> "subprocess.Popen[bytes]":
        options = ["--train", str(self.folder / "steps"), "--steps", str(self.steps)]
        return subprocess.Popen([sys.executable, "-m", "benchmarks.rl_drill", "--url", self.url, *options])

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def done(self) -> bool:
        return (self.folder / "steps" / f"step-{self.steps}").exists()

    def num_steps(self) -> int:
        return max((int(path.name.removeprefix("step-")) for path in self.folder.glob("steps/step-*")), default=0)

    def kill(self, target: str, draw: random.Random) -> None:
        """Kill a process and restart it; engines are restarted by the server."""
        if target == "engine":
            children = Path(f"/proc/{self.server.pid}/task/{self.server.pid}/children").read_text().split()
            if children:
                os.kill(int(draw.choice(children)), signal.SIGKILL)
            return
        process = self.server if target == "server" else self.trainer
        process.kill()
        process.wait()
        if target == "server":
            self.server = self.start_server()
        else:
            self.trainer = self.start_trainer()

    def watch(self, kills: int, draw: random.Random, killed: list[str]) -> None:
        """Wait for the last step; kill processes at random moments before it, and add them to ``killed``.

        Raises:
            RuntimeError: the server or the trainer ended by itself.
        """
        at = sorted(draw.uniform(0, self.steps) for _ in range(kills))
        try:
            while not self.done:
                time.sleep(draw.uniform(0, PAUSE_SECONDS))
                if self.trainer.poll() not in (None, 0) or self.server.poll() is not None:
                    raise RuntimeError("the server or the trainer ended by itself")
                if at and self.num_steps() >= at[0]:
                    at.pop(0)
                    time.sleep(draw.uniform(0, 4 * PAUSE_SECONDS))  # anywhere in a step
                    killed.append(draw.choice(KILLED))
                    self.kill(killed[-1], draw)
        finally:
            self.trainer.kill()
            self.trainer.wait()
            self.server.terminate()
            self.server.wait()
            self.reserved.close()

    def digest(self) -> str:
        return hashlib.sha256((self.folder / "steps" / f"step-{self.steps}" / WEIGHTS).read_bytes()).hexdigest()


def run(number: int, given: argparse.Namespace) -> dict[str, Any]:
    """Do a run and print its result; run 0 is undisturbed."""
    start, draw = time.monotonic(), random.Random(given.seed + number)
    result: dict[str, Any] = {"run": number, "killed": []}
    with tempfile.TemporaryDirectory() as folder:
        current = Run(Path(folder), given.steps)
        try:
            current.watch(given.kills if number else 0, draw, result["killed"])
            result["sha256"] = current.digest()
        except RuntimeError as error:
            result["error"] = str(error)
    result["seconds"] = round(time.monotonic() - start, 1)
    print(json.dumps(result), flush=True)
    return result


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--kills", type=int, default=6)
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--parallel", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--url", help=argparse.SUPPRESS)
    parser.add_argument("--train", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.train is not None:
        train(given.url, given.train, given.steps)
        return
    expected = run(0, given).get("sha256")
    with ThreadPoolExecutor(given.parallel) as pool:
        results = list(pool.map(lambda number: run(number, given), range(1, given.runs + 1)))
    kills = Counter(target for result in results for target in result["killed"])
    num_equal = sum(result.get("sha256", "") == expected for result in results)
    summary = {"runs": given.runs, "equal": num_equal, "steps": given.steps, "kills": kills, "sha256": expected}
    print(json.dumps(summary))
    if num_equal < given.runs:
        raise SystemExit("the weights differ from those of the undisturbed run")


if __name__ == "__main__":
    main()
