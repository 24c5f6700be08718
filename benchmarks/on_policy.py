"""Log-probabilities of sampled answers, by an engine and by a trainer: how many tokens differ in a byte.

    python -m benchmarks.on_policy --json OUT [--models llama,qwen3 --dtypes bfloat16 --tp 1,2 --answers 16]

Small models with random weights, one for each architecture that is trained (tests/training/cases.py). Prompts of 1 to
1100 tokens, over chunks of keys and leaves of tokens, are answered at temperature 1 by an engine whose steps hold at
most 200 tokens; the trainer reads prompts and answers together, shuffled, 1, 8 or 3 at a time, each behind a drawn
number of columns of padding.

Writes its JSON after each row, and goes on where the file that it finds ends.
"""

import argparse
import itertools
import json
import random
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import detcompile
from benchmarks.cpu import cpu_name
from detcompile import CompiledModel, EngineConfig, SamplingParams, Trainer
from detcompile.models.remote import RemoteModel
from tests.model_cases import MAX_CONTEXT, VOCAB_SIZE, random_model
from tests.training.cases import ARCHITECTURES, padded

__all__ = ["answers", "differing"]

MOST_PROMPT, ANSWER, MOST_PADDING = 1100, 120, 70
PACKED = (1, 8, 3)  # sequences that the trainer reads together, by turns
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def answers(model: CompiledModel, count: int, seed: int) -> list[tuple[list[int], list[int], list[float]]]:
    """Prompts, sampled tokens, and their log-probabilities."""
    drawn = random.Random(seed)
    lengths = [drawn.choice((drawn.randint(1, 80), drawn.randint(1, MOST_PROMPT))) for _ in range(count)]
    prompts = [[drawn.randrange(2, VOCAB_SIZE) for _ in range(length)] for length in lengths]
    engine = model.engine(EngineConfig(num_blocks=1500, max_num_batched_tokens=200, max_num_seqs=32))
    asked = SamplingParams(max_tokens=ANSWER, temperature=1.0, seed=seed, logprobs=0, ignore_eos=True)
    found = []
    for prompt, output in zip(prompts, engine.generate(prompts, asked, progress=False)):
        if output.error is not None:
            raise output.error
        entries = output.outputs[0].logprobs
        assert entries is not None
        found.append((prompt, [entry.token_id for entry in entries], [entry.logprob for entry in entries]))
    return found


def differing(trainer: Trainer, sampled: list[tuple[list[int], list[int], list[float]]], seed: int) -> tuple[int, int]:
    """Sampled tokens, and how many of them have other bytes in the trainer."""
    drawn = random.Random(seed)
    waiting, counts = drawn.sample(sampled, len(sampled)), itertools.cycle(PACKED)
    tokens = differ = 0
    while waiting:
        count = next(counts)
        rows, waiting = waiting[:count], waiting[count:]
        left = [drawn.randint(0, MOST_PADDING) for _ in rows]
        ids, mask = padded([torch.tensor(prompt + answer) for prompt, answer, _ in rows], left)
        with torch.no_grad():
            logprobs = trainer.logprobs(ids, mask)
        for place, (prompt, answer, served) in enumerate(rows):
            first = left[place] + len(prompt) - 1
            own: Tensor = logprobs[place, first : first + len(answer)]
            differ += int((own.view(torch.int32) != torch.tensor(served).view(torch.int32)).sum())
            tokens += len(answer)
    return tokens, differ


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--commit", default="")
    parser.add_argument("--models", default=",".join(ARCHITECTURES))
    parser.add_argument("--dtypes", default=",".join(DTYPES))
    parser.add_argument("--tp", default="1,2,4")
    parser.add_argument("--answers", type=int, default=16, help="answers of each row")
    arguments = parser.parse_args()
    report: dict[str, Any] = {"commit": arguments.commit, "hardware": cpu_name(), "torch": torch.__version__}
    report["rows"] = []
    if arguments.json.exists():
        report = json.loads(arguments.json.read_text())
    done = {(row["model"], row["dtype"], row["tp"]) for row in report["rows"]}
    for name, dtype in itertools.product(arguments.models.split(","), arguments.dtypes.split(",")):
        sizes = [tp for tp in map(int, arguments.tp.split(",")) if (name, dtype, tp) not in done]
        if not sizes:
            continue
        trainer = detcompile.trainer(random_model(name, DTYPES[dtype]), max_context=MAX_CONTEXT)
        for tp in sizes:
            model = detcompile.compile(random_model(name, DTYPES[dtype]), tp=tp, max_context=MAX_CONTEXT)
            tokens, differ = differing(trainer, answers(model, arguments.answers, seed=tp), seed=tp)
            report["rows"].append({"model": name, "dtype": dtype, "tp": tp, "tokens": tokens, "differ": differ})
            report |= {key: sum(row[key] for row in report["rows"]) for key in ("tokens", "differ")}
            print(report["rows"][-1], report["tokens"], report["differ"], flush=True)
            arguments.json.write_text(json.dumps(report, indent=1))
            if isinstance(model, RemoteModel):
                model.close()


if __name__ == "__main__":
    main()
