"""Random load on one engine for a long time: memory must not grow, no block may be lost, no request forgotten.

    python -m benchmarks.soak --minutes 20

Requests arrive at random, share prefixes, sample in every way, and one in ten is cancelled; the pool is small, so that
sequences are preempted and cached blocks evicted. Once a minute the engine is checked and the process' memory noted.
Every 200th request is repeated alone at the end, and must come out the same. Writes benchmarks/results/soak-*.json.
"""

import argparse
import gc
import json
import os
import platform
import random
import time
from pathlib import Path

import torch

import detcompile
from detcompile.runtime.engine import Engine
from detcompile.runtime.engine_config import EngineConfig
from detcompile.runtime.requests.outputs import RequestOutput
from detcompile.runtime.requests.sampling_params import SamplingParams

CONFIG = EngineConfig(num_blocks=160, block_size=16, max_num_batched_tokens=256, max_num_seqs=32, overlap=True)
MOST_OPEN = 48  # requests at a time
SAMPLED_EVERY = 200
KINDS = (
    {"temperature": 0.0},
    {"temperature": 0.8, "top_p": 0.9},
    {"temperature": 1.0, "top_k": 20, "min_p": 0.01},
    {"temperature": 0.7, "repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.2},
    {"temperature": 1.0, "n": 3},
    {"temperature": 0.0, "logprobs": 2, "prompt_logprobs": 1},
    {"temperature": 0.9, "stop": ["return", "\n\n"], "logit_bias": {5: 2.0}},
)


def resident_megabytes() -> float:
    """Memory of this process that is in RAM."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


class Load:
    """Keeps an engine busy with random requests."""

    def __init__(self, engine: Engine, vocab_size: int, seed: int) -> None:
        self.engine = engine
        self.rng = random.Random(seed)
        self.stems = [[self.rng.randrange(vocab_size) for _ in range(200)] for _ in range(6)]
        self.vocab_size = vocab_size
        self.open: set[str] = set()
        self.counts = dict.fromkeys(("requests", "finished", "cancelled", "failed"), 0)
        self.kept: list[tuple[list[int], SamplingParams, RequestOutput | None]] = []
        self._watched: dict[str, int] = {}

    def step(self) -> None:
        """Perhaps add or cancel a request, then run a step."""
        while len(self.open) < MOST_OPEN and self.rng.random() < 0.3:
            self._add()
        if self.open and self.rng.random() < 0.02:
            self.engine.cancel(self.rng.choice(sorted(self.open)))
        self.drain_once()

    def drain_once(self) -> None:
        """A step, and the books about what finished in it."""
        for output in self.engine.step():
            if not output.finished:
                continue
            self.open.remove(output.request_id)
            self.counts["finished"] += 1
            self.counts["failed"] += output.error is not None
            cancelled = any(sample.finish_reason == "abort" for sample in output.outputs)
            self.counts["cancelled"] += cancelled
            place = self._watched.pop(output.request_id, None)
            if place is not None and not cancelled:
                self.kept[place] = (*self.kept[place][:2], output)

    def _add(self) -> None:
        stem = self.rng.choice(self.stems)
        prompt = stem[: self.rng.randint(1, 200)] + [self.rng.randrange(self.vocab_size)]
        kind = self.rng.choice(KINDS)
        params = SamplingParams(max_tokens=self.rng.randint(1, 80), seed=self.rng.getrandbits(60), **kind)
        name = self.engine.add_request(prompt, params)
        if self.counts["requests"] % SAMPLED_EVERY == 0:
            self._watched[name] = len(self.kept)
            self.kept.append((prompt, params, None))
        self.open.add(name)
        self.counts["requests"] += 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    arguments = parser.parse_args()
    model = detcompile.compile(detcompile.load_model("tiny", device="cpu"))
    engine = model.engine(CONFIG)
    load = Load(engine, model.vocab_size, arguments.seed)
    started, memory = time.monotonic(), []
    while time.monotonic() - started < 60 * arguments.minutes:
        load.step()
        if time.monotonic() - started >= 60 * len(memory):
            engine.check()
            gc.collect()
            memory.append(round(resident_megabytes(), 1))
            print(f"{len(memory) - 1} min: {memory[-1]} MB, {load.counts}", flush=True)
    while load.open:
        load.drain_once()
    engine.check()
    stats = engine.stats
    assert stats.num_free_blocks == stats.num_blocks, "blocks are lost"
    alone = model.engine(EngineConfig(num_blocks=400, block_size=64, prefix_caching=False, overlap=False))
    different = 0
    for prompt, params, output in load.kept:
        if output is not None:
            again = alone.generate(prompt, params, progress=False)[0]
            different += again.outputs != output.outputs or again.prompt_logprobs != output.prompt_logprobs
    result = {
        "commit": arguments.commit,
        "hardware": f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads",
        "minutes": arguments.minutes,
        "MB each minute": memory,
        **load.counts,
        "repeated alone": sum(output is not None for _, _, output in load.kept),
        "different alone": different,
        "steps": stats.num_steps,
        "preemptions": stats.num_preemptions,
        "cached tokens": stats.num_cached_tokens,
        "evicted blocks": stats.num_evicted_blocks,
    }
    arguments.out.mkdir(parents=True, exist_ok=True)
    path = arguments.out / f"soak-{arguments.commit}.json"
    path.write_text(json.dumps(result, indent=1))
    print(json.dumps(result, indent=1), path, sep="\n")


if __name__ == "__main__":
    main()
