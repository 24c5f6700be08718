"""Export each architecture, load it in a fresh process, compare bytes with the JIT, and report sizes and times.

    python -m benchmarks.export --commit $(git rev-parse --short HEAD) [--device cuda] [--architectures llama] [--tp 2]

Tiny models with random weights (tests/model_cases.py). The script compares the logits of a prompt of T tokens, the
logits of a step in which T sequences decode one token each, and an engine's answers with logprobs. The loading process
cannot import transformers' modeling code. With --tp above 1, ranks share the model; bytes must equal those of one rank.

Writes benchmarks/results/export-<hardware>-<commit>.json (export-tp2-… with --tp 2); exits with 1 if any bytes differ.
"""

import argparse
import importlib.abc
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import detcompile
from benchmarks.cpu import cpu_name
from detcompile import CompiledModel, EngineConfig, SamplingParams
from detcompile.models.remote import RemoteModel
from detcompile.runtime.requests.sequence import Sequence
from detcompile.runtime.step.builder import build_step
from tests.model_cases import MAX_CONTEXT, random_model

__all__ = ["TOKEN_COUNTS", "compare", "loaded_elsewhere", "observe"]

ARCHITECTURES = "llama,qwen3,mistral,gemma2,gemma3_text,phi3,gpt2,gpt_neox,opt,falcon,bloom,mixtral,mamba2,qwen3_next"
TOKEN_COUNTS = (1, 2, 7, 64, 2048)
CONTEXT = 5  # tokens of a sequence before it decodes


@torch.no_grad()
def observe(model: CompiledModel, token_counts: tuple[int, ...] = TOKEN_COUNTS) -> dict[str, Tensor]:
    """Return all compared tensors by name. Models with the same vocabulary get the same draws."""
    observed = {"fingerprint": torch.tensor(list(model.fingerprint.encode()))}
    for count in token_counts:
        rng = random.Random(count)
        prompt = [rng.randrange(model.vocab_size) for _ in range(count)]
        observed[f"prefill {count}"] = model(torch.tensor([prompt], device=model.device)).logits.cpu()
        observed[f"decode {count}"] = _decode(model, count, rng).cpu()
    return observed | _serve(model)


def _decode(model: CompiledModel, count: int, rng: random.Random) -> Tensor:
    """Return logits [count, V] of the step in which every sequence takes its last token."""
    rows = [Sequence([rng.randrange(model.vocab_size) for _ in range(CONTEXT + 1)]) for _ in range(count)]
    runner, blocks = model.new_runner(count * 16, block_size=16)
    for num_tokens in (CONTEXT, 1):
        logits = runner.run(build_step([(row, num_tokens) for row in rows], blocks, all_logits=True))
        for row in rows:
            row.num_computed += num_tokens
    return logits


def _serve(model: CompiledModel) -> dict[str, Tensor]:
    """Return tokens and logprobs of requests that an engine cuts into chunks and samples."""
    rng = random.Random(0)
    prompts = [[rng.randrange(model.vocab_size) for _ in range(length)] for length in (3, 40, 130)]
    params = [SamplingParams(temperature=t, max_tokens=24, seed=7, logprobs=2, ignore_eos=True) for t in (0, 0.8, 1.2)]
    engine = model.engine(EngineConfig(num_blocks=64, max_num_batched_tokens=48))
    answers = [output.outputs[0] for output in engine.generate(prompts, params, progress=False)]
    return {
        "engine tokens": torch.tensor([answer.token_ids for answer in answers]),
        "engine logprobs": torch.tensor([answer.cumulative_logprob for answer in answers], dtype=torch.float64),
    }


def compare(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, bool]:
    """Return by name whether the bytes are equal."""
    assert actual.keys() == expected.keys()
    return {
        name: actual[name].dtype == tensor.dtype
        and actual[name].shape == tensor.shape
        and torch.equal(actual[name].contiguous().view(torch.uint8), tensor.contiguous().view(torch.uint8))
        for name, tensor in expected.items()
    }


class _NoModelCode(importlib.abc.MetaPathFinder):
    def find_spec(self, name: str, path: Any, target: Any = None) -> None:
        if name.startswith("transformers.models.") and ".modeling_" in name and ".auto." not in name:
            raise ImportError(f"{name} must not be imported here")


def _forbid_model_code() -> None:
    """Prevent imports of model code from transformers; none was imported so far."""
    sys.meta_path.insert(0, _NoModelCode())
    loaded = [name for name in sys.modules if name.startswith("transformers.models.") and ".modeling_" in name]
    assert all(".auto." in name for name in loaded), loaded


def loaded_elsewhere(paths: list[Path], token_counts: tuple[int, ...] = TOKEN_COUNTS) -> list[dict[str, Any]]:
    """Return what a fresh process observes of each archive, and how many seconds each load took.

    Without a GPU, the process has no C++ compiler and nothing that one made before.

    Raises:
        RuntimeError: the process failed; the message has its output.
    """
    counts = ",".join(map(str, token_counts))
    command = [sys.executable, "-m", "benchmarks.export", "--token-counts", counts, "--load", *map(str, paths)]
    with tempfile.TemporaryDirectory() as cache:
        bare = {} if torch.cuda.is_available() else {"CXX": "no-compiler", "DETCOMPILE_CACHE": cache}
        child = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, **bare})
    if child.returncode:
        raise RuntimeError(f"the process that loads ended with {child.returncode}:\n{child.stderr[-4000:]}")
    seconds = json.loads(child.stdout)
    return [{"load_s": s, "seen": torch.load(path.with_suffix(".seen"))} for s, path in zip(seconds, paths)]


def _load_and_observe(paths: list[Path], token_counts: tuple[int, ...]) -> None:
    """In the fresh process, write observations beside each archive, and print how long loading took."""
    _forbid_model_code()
    seconds = []
    for path in paths:
        start = time.perf_counter()
        model = detcompile.load(path)
        seconds.append(time.perf_counter() - start)
        torch.save(observe(model, token_counts), path.with_suffix(".seen"))
    print(json.dumps(seconds))


def measure(name: str, dtype: torch.dtype, device: str, folder: Path, weights: str, tp: int = 1) -> dict[str, Any]:
    """Export one architecture, load it in another process, and compare it with one rank in this process."""
    seconds = {}
    start = time.perf_counter()
    model = detcompile.compile(random_model(name, dtype, device), tp=tp, max_context=MAX_CONTEXT)
    seconds["compile_s"] = time.perf_counter() - start
    start = time.perf_counter()
    path = detcompile.export(model, folder / f"{name}.pt2", weights=weights)
    seconds["export_s"] = time.perf_counter() - start
    if isinstance(model, RemoteModel):
        model.close()
        model = detcompile.compile(random_model(name, dtype, device), max_context=MAX_CONTEXT)
    row: dict[str, Any] = {"architecture": name, "dtype": str(dtype).removeprefix("torch."), "weights": weights}
    row["tp"] = tp
    sizes = {"archive_bytes": path.stat().st_size}
    if weights == "beside":
        sizes["weights_bytes"] = sum(file.stat().st_size for file in folder.glob(f"{name}*.safetensors"))
    try:
        (loaded,) = loaded_elsewhere([path])
    except RuntimeError as error:
        return row | sizes | {"equal": False, "error": str(error).strip().splitlines()[-1]}
    seconds["load_s"] = loaded["load_s"]
    equal = compare(loaded["seen"], observe(model))
    differing = [what for what, same in equal.items() if not same]
    rounded = {what: round(value, 3) for what, value in seconds.items()}
    return row | sizes | rounded | {"compared": list(equal), "differing": differing, "equal": not differing}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--commit")
    parser.add_argument("--architectures", default=ARCHITECTURES)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--weights", default="inside", choices=["inside", "beside"])
    parser.add_argument("--tp", type=int, default=1, help="ranks that share the model")
    parser.add_argument("--load", type=Path, nargs="+", help="load these archives in this process")
    parser.add_argument("--token-counts", default=",".join(map(str, TOKEN_COUNTS)))
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results")
    arguments = parser.parse_args()
    if arguments.load is not None:
        _load_and_observe(arguments.load, tuple(map(int, arguments.token_counts.split(","))))
        return 0
    if arguments.commit is None:
        parser.error("name the --commit")
    hardware = torch.cuda.get_device_name() if arguments.device == "cuda" else cpu_name()
    rows = []
    for name in arguments.architectures.split(","):
        with tempfile.TemporaryDirectory() as folder:
            dtype = getattr(torch, arguments.dtype)
            rows.append(measure(name, dtype, arguments.device, Path(folder), arguments.weights, arguments.tp))
        print(rows[-1], flush=True)
    report = {"commit": arguments.commit, "hardware": hardware, "torch": torch.__version__, "rows": rows}
    arguments.output.mkdir(parents=True, exist_ok=True)
    ranks = f"tp{arguments.tp}-" if arguments.tp > 1 else ""
    path = arguments.output / f"export-{ranks}{hardware.replace(' ', '-').lower()}-{arguments.commit}.json"
    path.write_text(json.dumps(report, indent=1) + "\n")
    print(path)
    return 0 if all(row["equal"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
