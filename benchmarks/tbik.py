"""Make the table of the TBIK paper: how batch size and tensor-parallel size change answers and probabilities.

    python -m benchmarks.tbik --commit $(git rev-parse --short HEAD) [--prompts FILE --tokens 512 --sizes 1,2,4,8]

After Zhang et al., "Deterministic Inference across Tensor Parallel Sizes That Eliminates Training-Inference Mismatch"
(2025), Tables 2 and 3: greedy answers to each prompt under batch sizes 8, 16 and 32 and every tensor-parallel size, in
bf16. Unique outputs are the different answers that a prompt got, averaged over prompts. Divergence is between the five
largest probabilities of a position, rank by rank, the largest over all pairs of configurations: averaged over the
positions that all answers have (the paper's), and the maximum of all.

The peer is plain torch under the same configurations: Hugging Face's generate over left-padded batches, sharded by
torch.distributed.tensor.parallel along the model's own plan. A size that it cannot shard is reported as such.

FILE: prompts with lines of "---" between them, or JSON lines with a "prompt" or "problem". Default: the prompts that
come with the embedded model, also cut in two places. Writes benchmarks/results/tbik-<hardware>-<commit>.json.
"""

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import AutoModelForCausalLM, AutoTokenizer

import detcompile
from benchmarks.cpu import cpu_name
from benchmarks.repeat import left_padded
from detcompile import SamplingParams
from detcompile.models.hub import TINY_FOLDER
from detcompile.parallel import backend_of_ranks, rank_device
from detcompile.runtime.engine_config import EngineConfig

__all__ = ["Answer", "answer_of", "compare", "plain_answers", "read_prompts"]

BATCHES = (8, 16, 32)
TOP = 5
PARTS_OF_A_PROMPT = (1.0, 0.6, 0.35)  # of the prompts that come with the embedded model: 33 of 11
STYLES = {"colwise": ColwiseParallel, "rowwise": RowwiseParallel}


class Answer(NamedTuple):
    """Answer to one prompt under one configuration."""

    tokens: list[int]
    top: list[list[float]]  # of each token, the largest probabilities in falling order


Answers = dict[tuple[int, int], list[Answer]]  # by tensor-parallel size and batch size; one a prompt


def read_prompts(path: Path | None, most: int) -> list[str]:
    """Return the prompts of a file, or the default ones.

    Raises:
        InvalidInput: a JSON line without a prompt, or a file without any.
    """
    if path is not None and path.suffix == ".jsonl":
        rows = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
        prompts = [row.get("prompt") or row.get("problem") for row in rows]
    else:
        prompts = (path or TINY_FOLDER / "prompts.txt").read_text().split("\n---\n")
    if path is None:
        prompts = [text[: int(part * len(text))] for part in PARTS_OF_A_PROMPT for text in prompts]
    if not prompts or not all(prompts):
        raise detcompile.InvalidInput(f'{path}: every line needs a "prompt" or a "problem", and there must be one')
    return prompts[:most]


def ours(path: str, tp: int, prompts: list[list[int]], tokens: int) -> dict[int, list[Answer]]:
    """Return the engine's answers on ``tp`` ranks, by batch size."""
    model = detcompile.compile(path, tp=tp)
    params = SamplingParams(temperature=0, max_tokens=tokens, logprobs=TOP, ignore_eos=True)
    answers = {}
    for batch in BATCHES:
        engine = model.engine(EngineConfig(max_num_seqs=batch))
        outputs = engine.generate(prompts, params, progress=False)
        answers[batch] = [answer_of(output.outputs[0]) for output in outputs]
        del engine
    if tp > 1:
        model.close()
    return answers


def answer_of(completion: detcompile.CompletionOutput) -> Answer:
    """Return an answer drawn with ``logprobs=TOP``."""
    assert completion.logprobs is not None
    tops = [sorted(entry.top.values(), reverse=True)[:TOP] for entry in completion.logprobs]
    return Answer(list(completion.token_ids), torch.tensor(tops, dtype=torch.float64).exp().tolist())


def plain(path: str, tp: int, prompts: list[list[int]], tokens: int) -> dict[int, list[Answer]]:
    """Return answers of plain torch on ``tp`` ranks, each a process.

    Raises:
        mp.ProcessRaisedException: the model cannot be sharded over so many ranks.
    """
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_plain_rank, (tp, path, prompts, tokens, folder), nprocs=tp)
        answers: dict[int, list[Answer]] = torch.load(Path(folder) / "answers.pt", weights_only=False)
    return answers


@torch.no_grad()
def _plain_rank(rank: int, tp: int, path: str, prompts: list[list[int]], tokens: int, folder: str) -> None:
    torch.set_num_threads(1)
    device = rank_device("cuda" if torch.cuda.is_available() else "cpu", rank)
    dist.init_process_group(
        backend_of_ranks(device.type), init_method=f"file://{folder}/rendezvous", rank=rank, world_size=tp
    )
    if device.type == "cuda":
        torch.cuda.set_device(device)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16, local_files_only=True).eval().to(device)
    if tp > 1:
        styles = model.config.base_model_tp_plan.items()
        plan = {f"model.{name}": STYLES[style]() for name, style in styles if style in STYLES}
        parallelize_module(model, init_device_mesh(device.type, (tp,)), plan)
    answers = {}
    for batch in BATCHES:
        parts = [prompts[first : first + batch] for first in range(0, len(prompts), batch)]
        answers[batch] = [answer for part in parts for answer in plain_answers(model, part, tokens)]
    if rank == 0:
        torch.save(answers, Path(folder) / "answers.pt")
    dist.barrier()
    dist.destroy_process_group()


@torch.no_grad()
def plain_answers(model: Any, rows: list[list[int]], tokens: int, **options: object) -> list[Answer]:
    """Return transformers' answers to one batch of prompts; ``options`` are keywords of its generate."""
    ids, mask = left_padded(rows, model.device)
    made = model.generate(
        ids, attention_mask=mask, max_new_tokens=tokens, do_sample=False, eos_token_id=None, output_logits=True,
        return_dict_in_generate=True, **options,
    )  # fmt: skip
    top = torch.stack([step.double().softmax(-1).topk(TOP).values for step in made.logits], 1).tolist()
    return [Answer(row, top_probs) for row, top_probs in zip(made.sequences[:, ids.shape[1] :].tolist(), top)]


def compare(answers: Mapping[Any, list[Answer]]) -> dict[str, float]:
    """Return unique outputs and divergence over all configurations, as the paper defines them."""
    settings = list(answers.values())
    unique, averages, largest = [], [], 0.0
    for of_prompt in zip(*settings, strict=True):
        unique.append(len({tuple(answer.tokens) for answer in of_prompt}))
        shortest = min(len(answer.top) for answer in of_prompt)
        tops = torch.tensor([answer.top[:shortest] for answer in of_prompt])
        spread = (tops.amax(0) - tops.amin(0)).amax(-1)  # of each position
        averages.append(spread.mean().item())
        largest = max(largest, spread.max().item())
    return {
        "configurations": len(settings),
        "prompts": len(unique),
        "unique outputs": sum(unique) / len(unique),
        "average divergence": sum(averages) / len(averages),
        "maximum divergence": largest,
    }


def _measured(kind: Callable[..., dict[int, list[Answer]]], sizes: list[int], *given: object) -> dict[str, object]:
    answers: Answers = {}
    seconds, refused = {}, {}
    for tp in sizes:
        started = time.perf_counter()
        try:
            by_batch = kind(given[0], tp, *given[1:])
        except mp.ProcessRaisedException as error:  # of plain torch: its own limits are part of the table
            refused[tp] = str(error).strip().splitlines()[-1]
            continue
        answers |= {(tp, batch): rows for batch, rows in by_batch.items()}
        seconds[tp] = time.perf_counter() - started
        print(f"{kind.__name__}, tp={tp}: {seconds[tp]:.0f} s", flush=True)
    return {"sizes": sorted(seconds), "cannot": refused, "seconds": seconds} | (compare(answers) if answers else {})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--commit", required=True)
    parser.add_argument("--model", default=str(TINY_FOLDER), help="a folder")
    parser.add_argument("--prompts", type=Path)
    parser.add_argument("--num-prompts", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--sizes", default="1,2,4,8")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    arguments = parser.parse_args()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    tokenizer = AutoTokenizer.from_pretrained(arguments.model, local_files_only=True)
    texts = read_prompts(arguments.prompts, arguments.num_prompts)
    prompts = [tokenizer(text)["input_ids"] for text in texts]
    sizes = [int(size) for size in arguments.sizes.split(",")]
    hardware = torch.cuda.get_device_name() if torch.cuda.is_available() else cpu_name()
    report: dict[str, object] = {
        "commit": arguments.commit,
        "hardware": hardware,
        "torch": torch.__version__,
        "model": "embedded" if arguments.model == str(TINY_FOLDER) else arguments.model,
        "batch sizes": BATCHES,
        "tokens": arguments.tokens,
    }
    arguments.out.mkdir(parents=True, exist_ok=True)
    path = arguments.out / f"tbik-{hardware.replace(' ', '-').lower()}-{arguments.commit}.json"
    for name, kind in (("detcompile", ours), ("plain torch", plain)):
        report[name] = _measured(kind, sizes, arguments.model, prompts, arguments.tokens)
        print(name, report[name], flush=True)
        path.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
