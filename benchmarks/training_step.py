"""Compare a training step on one GPU with torch.compile's: Qwen3-8B's shape, float32 masters, bfloat16 forward.

    python -m benchmarks.training_step --commit $(git rev-parse --short HEAD) [--layers 8] [--tokens 16384]

Both sides read the same sequences and take a step of AdamW after clipping. The peer is Hugging Face's model compiled by
torch.compile's default, under autocast to bfloat16, with SDPA and the fused AdamW; its loss and ours are the mean of
minus the log-probabilities. "Digests" are of all weights after one step from equal weights, over splits of the batch.
Also seconds of update_weights into a compiled model of ``--served-layers`` layers. Writes
benchmarks/results/training-step-<device>-<commit>.json after each part. A ratio is the peer's time over ours: above 1
we are faster.
"""

import argparse
import gc
import hashlib
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

import detcompile
from benchmarks.model import build
from detcompile import Numerics

REPEATS = 5


def seconds(step: Callable[[], object]) -> float:
    """Return the median seconds of steps, between synchronizations, after two to warm up."""
    times = []
    for _ in range(REPEATS + 2):
        torch.cuda.synchronize()
        start = time.perf_counter()
        step()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times[2:])


def digest(module: torch.nn.Module) -> str:
    """Return the sha256 over the bytes of all parameters."""
    hasher = hashlib.sha256()
    for parameter in module.parameters():
        hasher.update(parameter.detach().cpu().view(torch.uint8).numpy())
    return hasher.hexdigest()


def kernels(step: Callable[[], object]) -> dict[str, float]:
    """Return milliseconds of a step's longest kernels by name, and of all kernels together."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step()
        torch.cuda.synchronize()
    taken: dict[str, float] = defaultdict(float)
    for event in profile.key_averages():  # long names of several kernels may start alike
        taken[event.key[:100]] += event.self_device_time_total / 1e3
    longest = dict(sorted(taken.items(), key=lambda row: -row[1])[:40])
    return {name: round(ms, 2) for name, ms in longest.items()} | {"all": round(sum(taken.values()), 2)}


def ours(layers: int, ids: Tensor, splits: Sequence[int], keep: Callable[[str, object], None]) -> float:
    """Return the seconds of a step of detcompile.trainer; keep the other measurements."""
    start = time.perf_counter()
    trainer = detcompile.trainer(build(layers), numerics=Numerics(tp_sizes=(1,)))
    torch.cuda.synchronize()
    keep("trainer seconds", time.perf_counter() - start)
    optimizer = detcompile.AdamW(trainer.parameters(), lr=1e-5)
    mask = torch.ones_like(ids)
    targets = ids[:, 1:].numel()

    def step(parts: int = 1, rows: Tensor = ids) -> None:
        optimizer.zero_grad()
        for part in rows.chunk(parts):
            logprobs = trainer.logprobs(part, mask[: len(part)])
            (-logprobs.sum() / targets).backward()
        detcompile.clip_grad_norm_(trainer.parameters(), 1.0)
        optimizer.step()

    start = time.perf_counter()
    step()
    torch.cuda.synchronize()
    keep("first step seconds", time.perf_counter() - start)
    median = seconds(step)
    keep("ours", {"seconds": median, "peak GB": torch.cuda.max_memory_allocated() / 1e9})
    keep("kernels, ms", kernels(step))
    saved = [parameter.detach().cpu() for parameter in trainer.parameters()]
    digests = {}
    for parts in splits:
        for name, rows in (("in order", ids), ("backwards", ids.flip(0))):
            with torch.no_grad():
                for parameter, value in zip(trainer.parameters(), saved, strict=True):
                    parameter.copy_(value)
            optimizer.state.clear()
            step(parts, rows)
            digests[f"{parts} micro-batches, {name}"] = digest(trainer)[:16]
    keep("digests", digests)
    return median


def weights_of(layers: int, keep: Callable[[str, object], None]) -> None:
    """Measure the seconds of update_weights of a compiled model of that depth, and its gigabytes."""
    model = detcompile.compile(build(layers), numerics=Numerics(tp_sizes=(1,)))
    given = {name: torch.randn_like(p) for name, p in build(layers).named_parameters()}
    median = seconds(lambda: model.update_weights(given.items()))
    size = sum(tensor.nbytes for tensor in given.values()) / 1e9
    keep("update_weights", {"seconds": median, "GB": size, "GB a second": size / median})


def peer(layers: int, ids: Tensor) -> dict[str, float]:
    """Return the seconds of a step of torch.compile's model."""
    model = build(layers).float().train()
    compiled = torch.compile(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.bfloat16):
            loss = compiled(ids, labels=ids, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return {"seconds": seconds(step), "peak GB": torch.cuda.max_memory_allocated() / 1e9}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--commit", required=True)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument(
        "--served-layers", type=int, default=36, help="of the model that update_weights changes; 0: none"
    )
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--splits", default="1,2,4", help="micro-batches of the steps whose weights are compared")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    arguments = parser.parse_args()
    device = torch.cuda.get_device_name()
    path = arguments.out / f"training-step-{device.replace(' ', '-').lower()}-{arguments.commit}.json"
    report: dict[str, object] = {
        "commit": arguments.commit,
        "hardware": device,
        "torch": torch.__version__,
        "model": f"Qwen3-8B shape, {arguments.layers} layers, random weights, float32 masters, bfloat16 forward",
        "batch": f"{arguments.tokens // arguments.length} sequences of {arguments.length} tokens",
    }

    def keep(part: str, value: object) -> None:
        report[part] = value
        path.write_text(json.dumps(report, indent=1))
        print(part, value, flush=True)

    torch.manual_seed(1)
    ids = torch.randint(0, 151936, (arguments.tokens // arguments.length, arguments.length), device="cuda")
    our_seconds = ours(arguments.layers, ids, list(map(int, arguments.splits.split(","))), keep)
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    beside = peer(arguments.layers, ids)
    keep("torch.compile", beside)
    keep("ratio", beside["seconds"] / our_seconds)
    gc.collect()
    torch.cuda.empty_cache()
    if arguments.served_layers:
        weights_of(arguments.served_layers, keep)


if __name__ == "__main__":
    main()
