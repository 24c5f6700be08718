"""Send one greedy prompt many times among other requests, and count the different answers.

    python -m benchmarks.repeat --commit $(git rev-parse --short HEAD) [--completions 1000 --tokens 1000 --model tiny]
    python -m benchmarks.repeat --commit ... --shape 8b --max-num-seqs 256     # on a GPU, random weights

After "Defeating Nondeterminism in LLM Inference" (Thinking Machines Lab, 2025), where 1000 completions of 1000 tokens
at temperature 0 gave 80 different answers. Requests arrive at random steps, mixed with other prompts of random lengths,
so that the number of tokens in a step keeps changing. Prefix caching is off; else the prompt would be computed once and
its keys shared by all.

The peer is the same transformers model without detcompile, batched as an engine without the contract would: answers
come from batches of the smallest and the largest size that our engine ran, then of others of its sizes at random. Once
all rows of a batch are the prompt itself, so that the batch size alone changes; once each batch has a longer neighbor,
to which the others are padded.

Writes benchmarks/results/repeat[-random]-<hardware>-<commit>.json.
"""

import argparse
import json
import random
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import torch
from transformers import AutoTokenizer, PreTrainedModel

import detcompile
from benchmarks.cpu import cpu_name
from benchmarks.model import build
from detcompile import CompiledModel, SamplingParams
from detcompile.models.hub import TINY_FOLDER
from detcompile.runtime.engine_config import EngineConfig

__all__ = ["Workload", "agreement", "left_padded", "repeat_ours", "repeat_plain"]

PROMPT = 'def mean(values: list[float]) -> float:\n    """Return the arithmetic mean of a list of numbers."""\n'
PROMPT_LENGTH = 32  # of the random tokens that are the prompt of the 8B shape
LONGEST_NEIGHBOR = 256  # tokens of a prompt
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


class Workload(NamedTuple):
    """Requests to send."""

    prompt: list[int]
    completions: int
    tokens: int
    max_num_seqs: int
    seed: int = 0

    @property
    def neighbors(self) -> int:
        """Return the number of other requests that are mixed in."""
        return self.completions // 4


Answer = tuple[int, ...]


def repeat_ours(model: CompiledModel, work: Workload) -> tuple[list[Answer], list[int]]:
    """Return the engine's answers under random arrivals, and the batch size (sequences running) of each step."""
    rng = random.Random(work.seed)
    longest = min(LONGEST_NEIGHBOR, model.max_context - work.tokens)
    arrivals = [(0, True)]  # one at once, so that some steps hold it alone
    last = max(1, work.tokens * work.completions // (2 * work.max_num_seqs))
    arrivals += [(rng.randrange(last), True) for _ in range(work.completions - 1)]
    arrivals += [(rng.randrange(last), False) for _ in range(work.neighbors)]
    arrivals.sort()
    engine = model.engine(
        EngineConfig(max_num_seqs=work.max_num_seqs, max_num_batched_tokens=2048, prefix_caching=False)
    )
    wanted: set[str] = set()
    answers, sizes, step = [], [], 0
    while arrivals or engine.has_unfinished_requests:
        while arrivals and (arrivals[0][0] <= step or not engine.has_unfinished_requests):
            _, ours = arrivals.pop(0)
            request = _prompt_and_params(work) if ours else _other(rng, model.vocab_size, longest, work.tokens)
            name = engine.add_request(*request)
            wanted |= {name} if ours else set()
        for output in engine.step():
            if output.finished and output.request_id in wanted:
                if output.error is not None:
                    raise output.error
                answers.append(tuple(output.outputs[0].token_ids))
        sizes.append(engine.stats.num_running)
        step += 1
    assert len(answers) == work.completions
    return answers, [size for size in sizes if size]


@torch.no_grad()
def repeat_plain(
    model: PreTrainedModel, work: Workload, sizes: list[int], *, padded: bool = False
) -> tuple[list[Answer], list[int]]:
    """Return answers of Hugging Face's greedy generate, in batches of sizes drawn from ``sizes``, and those sizes.

    Args:
        padded: each batch has one more row, a random prompt that is longer, so that the others are padded on the left.
    """
    rng = random.Random(work.seed + 1)
    model.generation_config.eos_token_id = None  # every answer has all its tokens, as in the engine
    distinct = sorted(set(sizes))
    answers: list[Answer] = []
    taken: list[int] = []
    while len(answers) < work.completions:
        size = {0: distinct[0], 1: distinct[-1]}.get(len(taken), rng.choice(distinct))
        taken.append(min(size, work.completions - len(answers)))
        rows = [work.prompt] * taken[-1]
        if padded:
            more = len(work.prompt) + rng.randint(1, LONGEST_NEIGHBOR)
            rows.append([rng.randrange(model.config.vocab_size) for _ in range(more)])
        ids, mask = left_padded(rows, model.device)
        out = model.generate(ids, attention_mask=mask, max_new_tokens=work.tokens, do_sample=False)
        answers += [tuple(row) for row in out[: taken[-1], ids.shape[1] :].tolist()]
    return answers, taken


def left_padded(rows: list[list[int]], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return input_ids and attention_mask [rows, the longest], int64."""
    width = max(map(len, rows))
    ids = torch.tensor([[0] * (width - len(row)) + row for row in rows], device=device)
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows], device=device)
    return ids, mask


def agreement(answers: list[Answer], sizes: list[int]) -> dict[str, object]:
    """Count different answers and the commonest one; find the first difference and the range of batch sizes."""
    counts = Counter(answers)
    return {
        "completions": len(answers),
        "tokens": len(answers[0]),
        "unique": len(counts),
        "most_common": counts.most_common(1)[0][1],
        "first_difference": _first_difference(counts),
        "batch_sizes": {"distinct": len(set(sizes)), "least": min(sizes), "most": max(sizes)},
    }


def _first_difference(answers: Iterable[Answer]) -> int | None:
    """Return the index of the first token on which not all answers agree."""
    columns = zip(*answers)
    return next((index for index, column in enumerate(columns) if len(set(column)) > 1), None)


def _prompt_and_params(work: Workload) -> tuple[list[int], SamplingParams]:
    return work.prompt, SamplingParams(max_tokens=work.tokens, temperature=0, ignore_eos=True)


def _other(rng: random.Random, vocab_size: int, longest: int, tokens: int) -> tuple[list[int], SamplingParams]:
    prompt = [rng.randrange(vocab_size) for _ in range(rng.randint(1, longest))]
    return prompt, SamplingParams(max_tokens=rng.randint(1, tokens), temperature=1.0, seed=rng.getrandbits(64))


def _models(name: str, dtype: torch.dtype, device: str, random_weights: bool) -> tuple[PreTrainedModel, list[int]]:
    """Return a fresh model and the prompt."""
    if name == "8b":
        rng = random.Random(0)
        model = build(36).to(dtype)
        return model, [rng.randrange(model.config.vocab_size) for _ in range(PROMPT_LENGTH)]
    model = detcompile.load_model(name, random=random_weights, dtype=dtype, device=device)
    folder = TINY_FOLDER if name == "tiny" else name
    return model, AutoTokenizer.from_pretrained(folder, local_files_only=True)(PROMPT)["input_ids"]


def measure(arguments: argparse.Namespace, dtype: torch.dtype) -> dict[str, object]:
    """Measure both sides in one dtype."""
    name = arguments.shape or arguments.model
    model, prompt = _models(name, dtype, arguments.device, arguments.random)
    work = Workload(prompt, arguments.completions, arguments.tokens, arguments.max_num_seqs)
    report: dict[str, object] = {"dtype": str(dtype).removeprefix("torch."), "neighbors": work.neighbors}
    compiled = detcompile.compile(model)
    started = time.perf_counter()
    answers, sizes = repeat_ours(compiled, work)
    report["detcompile"] = agreement(answers, sizes) | {"seconds": time.perf_counter() - started}
    print(report, flush=True)
    del compiled, model
    plain, _ = _models(name, dtype, arguments.device, arguments.random)
    if arguments.compile_plain:
        plain.forward = torch.compile(plain.forward, dynamic=True)
    few = work._replace(completions=arguments.plain_completions or work.completions)
    kind = "torch.compile" if arguments.compile_plain else "torch eager"
    for padded in (False, True):
        started = time.perf_counter()
        answers, taken = repeat_plain(plain, few, sizes, padded=padded)
        key = f"{kind}, padded to a neighbor" if padded else f"{kind}, the prompt alone"
        report[key] = agreement(answers, taken) | {"seconds": time.perf_counter() - started}
        print(key, report[key], flush=True)
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--commit", required=True)
    parser.add_argument("--completions", type=int, default=1000)
    parser.add_argument("--tokens", type=int, default=1000)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--shape", choices=["8b"], help="random weights on a GPU, instead of --model")
    parser.add_argument("--random", action="store_true", help="random weights: likeliest tokens are often nearly tied")
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--dtypes", help="default: bfloat16,float32; with --shape: bfloat16")
    parser.add_argument("--plain-completions", type=int, help="fewer for plain torch, which may be slow")
    parser.add_argument("--compile-plain", action="store_true", help="the plain model under torch.compile")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results")
    arguments = parser.parse_args()
    dtypes = arguments.dtypes or ("bfloat16" if arguments.shape else "bfloat16,float32")
    hardware = torch.cuda.get_device_name() if arguments.device == "cuda" else cpu_name()
    report = {
        "commit": arguments.commit,
        "hardware": hardware,
        "torch": torch.__version__,
        "model": (arguments.shape or arguments.model) + (", random weights" if arguments.random else ""),
        "max_num_seqs": arguments.max_num_seqs,
        "rows": [measure(arguments, DTYPES[name]) for name in dtypes.split(",")],
    }
    arguments.output.mkdir(parents=True, exist_ok=True)
    kind = "-random" if arguments.random else ""
    path = arguments.output / f"repeat{kind}-{hardware.replace(' ', '-').lower()}-{arguments.commit}.json"
    path.write_text(json.dumps(report, indent=1))
    print(path)


if __name__ == "__main__":
    main()
