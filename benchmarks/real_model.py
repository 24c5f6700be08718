"""Compare a chat model with transformers: the tables of docs/real_model.md.

    detcompile fetch smollm2
    python -m benchmarks.real_model --commit $(git rev-parse --short HEAD) [--parts answers,items,...] [--device cuda]

answers   different answers to chat prompts over batch sizes, prompt chunks and ranks, greedy and sampled
items     200 arithmetic and cloze items scored by log-likelihood at six batch sizes
prefix    40 prompts with a common beginning, computed whole and behind a cached beginning
drafters  every drafter that needs no other checkpoint, beside plain decoding: acceptance length, equality by bytes
error     logits beside transformers' in float64
speed     tokens a second of 1 and of 16 requests
llama     the same for llama.cpp; --llama is a Python that has llama-cpp-python, --f16 a GGUF file of the same weights

Both sides have the same weights and the same tokens. Sampling uses each row's own noise on both sides, since
transformers draws for all rows from one generator. A part replaces its section of
benchmarks/results/real-model-<hardware>-<commit>.json. The script fails if an answer of ours moves.
"""

import argparse
import copy
import hashlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

import detcompile
from benchmarks.cpu import cpu_name
from benchmarks.items import Item, items
from benchmarks.repeat import left_padded
from benchmarks.tbik import TOP, Answer, answer_of, compare, plain_answers
from detcompile import CompiledModel, Engine, EngineConfig, MirrorDrafter, NGramDrafter, SamplingParams
from detcompile.commands.chat_demo import OTHERS, QUESTION, OwnNoise, first_difference
from detcompile.runtime.requests.outputs import RequestOutput
from detcompile.runtime.speculation.speculator import SpeculationConfig
from detcompile.transformers_internals.generation import cache_keyword

QUESTIONS = (QUESTION, *OTHERS)
NUM_PROMPTS, NUM_TOKENS = 8, 48  # of answers and drafters; the other questions fill up a batch of 16
BATCHES = (1, 2, 4, 8, 16)
CHUNKS = (16, 64)  # tokens of a step
HOW = {"greedy": 0.0, "temperature 0.8": 0.8}
SEED = 7
ITEM_BATCHES = (1, 2, 4, 8, 16, 32)
NUM_PREFIXED, PREFIXED_TOKENS = 40, 8
SYSTEM = (
    "You are the assistant of a travel agency. Answer in one short sentence. Name a place, a price or a date where you"
    " can. Never ask for the customer's name or address."
)
PLACES = ("Norway", "Japan", "Peru", "Kenya", "Italy", "Canada", "India", "Egypt", "Chile", "Greece")
TRAVEL_QUESTIONS = (
    "What should I pack for {}?",
    "When is the best time to see {}?",
    "Is {} expensive?",
    "What do people eat in {}?",
)
SPEED_REQUESTS, SPEED_TOKENS = (1, 16), 64
NUM_BLOCKS = 256


class Sides:
    """The compiled model and transformers' own, loaded when first used."""

    def __init__(self, name: str, device: str) -> None:
        self.name, self.device = name, device
        self._plain: PreTrainedModel | None = None
        self._ours: CompiledModel | None = None

    @property
    def ours(self) -> CompiledModel:
        """detcompile's model, in the checkpoint's dtype."""
        self._ours = self._ours or detcompile.compile(self.name, device=self.device)
        return self._ours

    @property
    def plain(self) -> PreTrainedModel:
        """transformers' model in the same dtype; it ignores end tokens, as the engine does with ``ignore_eos``."""
        self._plain = self._plain or detcompile.load_model(self.name, device=self.device)
        self._plain.generation_config.eos_token_id = None
        self._plain.generation_config.pad_token_id = 0
        return self._plain

    def chat(self, question: str, system: str | None = None) -> list[int]:
        """Return the tokens of a chat that asks the question."""
        messages = [{"role": "system", "content": system}] if system else []
        messages.append({"role": "user", "content": question})
        text = self.ours.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        tokens: list[int] = self.ours.tokenizer(text, add_special_tokens=False).input_ids
        return tokens


def batches_of(count: int, size: int) -> list[range]:
    """Cut the indices of ``count`` rows into batches."""
    return [range(start, min(start + size, count)) for start in range(0, count, size)]


# ---- answers


def answers(sides: Sides, _: argparse.Namespace) -> dict[str, object]:
    """Return unique answers and divergence, as in benchmarks/tbik.py, and where answers first differ."""
    prompts = [sides.chat(question) for question in QUESTIONS]
    report: dict[str, object] = {"prompts": NUM_PROMPTS, "tokens": NUM_TOKENS, "questions": QUESTIONS[:NUM_PROMPTS]}
    ours: dict[str, dict[str, list[Answer]]] = {how: {} for how in HOW}
    for way, config in _ways().items():
        for how, temperature in HOW.items():
            ours[how][way] = _our_answers(sides.ours.engine(config), prompts, temperature, config.max_num_seqs)
    if sides.device == "cpu" or torch.cuda.device_count() > 1:
        ranks = detcompile.compile(sides.name, tp=2, replicate_attention=True, device=sides.device)
        for how, temperature in HOW.items():
            engine = ranks.engine(EngineConfig(max_num_seqs=8, num_blocks=NUM_BLOCKS))
            ours[how]["two ranks, batch 8"] = _our_answers(engine, prompts, temperature, 8)
        ranks.close()
    for how, temperature in HOW.items():
        theirs = {f"batch {size}": _plain_answers(sides.plain, prompts, temperature, size) for size in BATCHES}
        for chunk in CHUNKS:
            theirs[f"batch 8, chunks of {chunk}"] = _plain_answers(sides.plain, prompts, temperature, 8, chunk)
        report[how] = {
            side: compare(by_way)
            | {"first other token": _partings(by_way), "ways": list(by_way)}
            | _texts(sides, by_way)
            for side, by_way in {"transformers": theirs, "detcompile": ours[how]}.items()
        }
        require(report[how]["detcompile"]["unique outputs"] == 1.0, f"{how}: answers of ours differ")
    return report


def _ways() -> dict[str, EngineConfig]:
    ways = {f"batch {size}": EngineConfig(max_num_seqs=size, num_blocks=NUM_BLOCKS) for size in BATCHES}
    for chunk in CHUNKS:
        ways[f"batch 8, chunks of {chunk}"] = EngineConfig(
            scheduler="simple_chunking", max_num_batched_tokens=chunk, max_num_seqs=8, num_blocks=NUM_BLOCKS
        )
    return ways


def _our_answers(engine: Engine, prompts: list[list[int]], temperature: float, batch: int) -> list[Answer]:
    params = [
        SamplingParams(temperature=temperature, max_tokens=NUM_TOKENS, logprobs=TOP, ignore_eos=True, seed=SEED + place)
        for place in range(len(prompts))
    ]
    count = max(NUM_PROMPTS, batch)
    outputs = engine.generate(prompts[:count], params[:count], progress=False, strict=True)[:NUM_PROMPTS]
    return [answer_of(output.outputs[0]) for output in outputs]


def _plain_answers(
    model: PreTrainedModel, prompts: list[list[int]], temperature: float, batch: int, chunk: int | None = None
) -> list[Answer]:
    results: list[Answer] = []
    for places in batches_of(max(NUM_PROMPTS, batch), batch):
        noise = [OwnNoise(temperature, [SEED + place for place in places])] if temperature else []
        rows = [prompts[place] for place in places]
        results += plain_answers(model, rows, NUM_TOKENS, logits_processor=noise, prefill_chunk_size=chunk)
    return results[:NUM_PROMPTS]


def _partings(by_way: dict[str, list[Answer]]) -> list[int | None]:
    """Return for each prompt the first token, counted from 1, on which not all ways agree."""
    partings = []
    for rows in zip(*by_way.values()):
        at = [first_difference(rows[0].tokens, row.tokens) for row in rows[1:]]
        partings.append(min((place + 1 for place in at if place is not None), default=None))
    return partings


def _texts(sides: Sides, by_way: dict[str, list[Answer]]) -> dict[str, object]:
    """Return the different answers to each prompt, and the ways that gave each."""
    texts = []
    for rows in zip(*by_way.values()):
        ways: dict[tuple[int, ...], list[str]] = {}
        for way, row in zip(by_way, rows):
            ways.setdefault(tuple(row.tokens), []).append(way)
        texts.append([{"text": sides.ours.tokenizer.decode(list(tokens)), "ways": by} for tokens, by in ways.items()])
    return {"answers": texts}


# ---- items


def items_scored(sides: Sides, _: argparse.Namespace) -> dict[str, object]:
    """Return right items, changed verdicts and log-likelihoods, and a digest of all of these, by batch size."""
    tested, tokenizer = items(), sides.ours.tokenizer
    rows: list[tuple[list[int], int]] = []
    for item in tested:
        start = tokenizer(item.stem, add_special_tokens=False).input_ids
        rows += [(start + tokenizer(c, add_special_tokens=False).input_ids, len(start)) for c in item.choices]
    report: dict[str, object] = {"items": len(tested), "choices": len(rows), "tokens": sum(len(row) for row, _ in rows)}
    scorers: dict[str, Callable[[list[tuple[list[int], int]], int], list[float]]] = {
        "transformers": lambda given, size: _plain_scores(sides.plain, given, size),
        "detcompile": lambda given, size: _our_scores(sides.ours, given, size),
    }
    for side, score in scorers.items():
        scores = {size: score(rows, size) for size in ITEM_BATCHES}
        report[side] = _score_rows(tested, scores)
    digests = {row["sha256"] for row in report["detcompile"].values()}
    require(len(digests) == 1, "log-likelihoods of ours differ")
    return report


@torch.no_grad()
def _plain_scores(model: PreTrainedModel, rows: list[tuple[list[int], int]], batch: int) -> list[float]:
    scores = []
    for places in batches_of(len(rows), batch):
        part = [rows[place] for place in places]
        width = max(len(tokens) for tokens, _ in part)
        ids = torch.tensor([tokens + [0] * (width - len(tokens)) for tokens, _ in part], device=model.device)
        mask = torch.tensor([[1] * len(tokens) + [0] * (width - len(tokens)) for tokens, _ in part]).to(model.device)
        logprobs = model(ids, attention_mask=mask).logits.float().log_softmax(-1).cpu()
        for row, (tokens, start) in zip(logprobs, part):
            scores.append(sum(row[at - 1, tokens[at]].item() for at in range(start, len(tokens))))
    return scores


def _our_scores(model: CompiledModel, rows: list[tuple[list[int], int]], batch: int) -> list[float]:
    engine = model.engine(EngineConfig(max_num_seqs=batch, num_blocks=NUM_BLOCKS, prefix_caching=False))
    params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0)
    outputs = engine.generate([tokens for tokens, _ in rows], params, progress=False, strict=True)
    return [sum(entry.logprob for entry in output.prompt_logprobs[start:]) for output, (_, start) in zip(outputs, rows)]


def _score_rows(tested: list[Item], scores: dict[int, list[float]]) -> dict[str, dict[str, object]]:
    report, alone = {}, scores[ITEM_BATCHES[0]]
    size = len(tested[0].choices)

    def verdicts(values: list[float]) -> list[int]:
        rows = [values[at : at + size] for at in range(0, len(values), size)]
        return [row.index(max(row)) for row in rows]

    for batch, values in scores.items():
        right = sum(choice == 0 for choice in verdicts(values))  # the first choice is the right one
        report[str(batch)] = {
            "right": right,
            "score": right / len(tested),
            "other verdicts than alone": sum(a != b for a, b in zip(verdicts(values), verdicts(alone))),
            "other log-likelihoods than alone": sum(a != b for a, b in zip(values, alone)),
            "largest difference": max(abs(a - b) for a, b in zip(values, alone)),
            "sha256": hashlib.sha256(torch.tensor(values, dtype=torch.float64).numpy().tobytes()).hexdigest(),
        }
    return report


# ---- prefix


@torch.no_grad()
def prefix(sides: Sides, _: argparse.Namespace) -> dict[str, object]:
    """Compare answers and log-probabilities after a cached beginning with those of the whole prompt."""
    prompts = [sides.chat(text.format(place), SYSTEM) for place in PLACES for text in TRAVEL_QUESTIONS][:NUM_PREFIXED]
    common = next(at for at, column in enumerate(zip(*prompts)) if len(set(column)) > 1)
    report: dict[str, object] = {"prompts": len(prompts), "tokens": PREFIXED_TOKENS, "common tokens": common}
    params = SamplingParams(temperature=0, max_tokens=PREFIXED_TOKENS, logprobs=0, ignore_eos=True)
    small = {"block_size": 16, "num_blocks": 4 * NUM_BLOCKS}  # blocks of 16: the common part fills several
    cold_engine = sides.ours.engine(EngineConfig(prefix_caching=False, **small))
    warm_engine = sides.ours.engine(EngineConfig(**small))
    warm_engine.generate(prompts[:1], params, progress=False, strict=True)
    ours = [_one_by_one(engine, prompts, params) for engine in (cold_engine, warm_engine)]
    cached = [output.num_cached_tokens for output in ours[1]]
    require(min(cached) > 0, "a prompt was not in the cache")
    pairs = [[_drawn(output) for output in outputs] for outputs in ours]
    report["detcompile"] = {"cached tokens": cached, **_moved(*pairs)}
    require(report["detcompile"]["largest difference"] == 0.0, "a cached prefix moved ours")
    cache = DynamicCache(config=sides.plain.config)
    ids = torch.tensor([prompts[0][:common]], device=sides.device)
    sides.plain(ids, **{cache_keyword(sides.plain): cache}, use_cache=True)
    cold = [_plain_drawn(sides.plain, prompt, None) for prompt in prompts]
    warm = [_plain_drawn(sides.plain, prompt, copy.deepcopy(cache)) for prompt in prompts]
    report["transformers"] = {"cached tokens": [common] * len(prompts), **_moved(cold, warm)}
    return report


Drawn = tuple[list[int], list[float]]  # tokens, and the log-probability of each


def _one_by_one(engine: Engine, prompts: list[list[int]], params: SamplingParams) -> list[RequestOutput]:
    return [engine.generate([prompt], params, progress=False, strict=True)[0] for prompt in prompts]


def _drawn(output: RequestOutput) -> Drawn:
    return output.outputs[0].token_ids, [entry.logprob for entry in output.outputs[0].logprobs]


def _plain_drawn(model: PreTrainedModel, prompt: list[int], cache: Any) -> Drawn:
    made = model.generate(
        torch.tensor([prompt], device=model.device),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64, device=model.device),
        max_new_tokens=PREFIXED_TOKENS, do_sample=False, output_logits=True, return_dict_in_generate=True,
        **({} if cache is None else {cache_keyword(model): cache}),
    )  # fmt: skip
    tokens = made.sequences[0, len(prompt) :].tolist()
    logprobs = [step.float().log_softmax(-1)[0, token].item() for step, token in zip(made.logits, tokens)]
    return tokens, logprobs


def _moved(cold: list[Drawn], warm: list[Drawn]) -> dict[str, object]:
    """Count answers that differ; log-probabilities are compared up to the first different token."""
    largest, moved = 0.0, 0
    for (one, ones), (other, others) in zip(cold, warm):
        at = first_difference(one, other)
        pairs = list(zip(ones, others))[:at]
        largest = max([largest, *(abs(a - b) for a, b in pairs)])
        moved += sum(a != b for a, b in pairs)
    flips = sum(one != other for (one, _), (other, _) in zip(cold, warm))
    return {"answers that flip": flips, "other log-probabilities": moved, "largest difference": largest}


# ---- drafters


def drafters(sides: Sides, _: argparse.Namespace) -> dict[str, object]:
    """Return each drafter's acceptance length over the prompts, and whether tokens and log-probabilities are equal."""
    model, prompts = sides.ours, [sides.chat(question) for question in QUESTIONS[:NUM_PROMPTS]]
    layers = model.config.num_hidden_layers
    half = [*range(layers // 2), layers - 1]
    makers: dict[str, Callable[[], detcompile.Drafter]] = {
        "n-grams, 5 tokens": lambda: NGramDrafter(5),
        "n-grams, 8 tokens, longest match 3": lambda: NGramDrafter(8, longest=3),
        f"early exit, {layers // 2} of {layers} layers, 3 tokens": lambda: model.drafter(3, layers=layers // 2),
        f"layer skip, {len(half)} of {layers} layers, 3 tokens": lambda: model.drafter(3, layers=half),
        "n-grams, mirrored, 3 tokens": lambda: MirrorDrafter(NGramDrafter(3)),
    }
    config = EngineConfig(num_blocks=NUM_BLOCKS, max_num_seqs=NUM_PROMPTS)
    expected = {how: _logged(model.engine(config), prompts, temperature) for how, temperature in HOW.items()}
    rows = []
    for name, make in makers.items():
        for how, temperature in HOW.items():
            engine = model.engine(config, speculation=SpeculationConfig(drafter=make(), switch="always"))
            equal = _logged(engine, prompts, temperature) == expected[how]
            counts = engine.speculator.statistics
            row = {"drafter": name, "how": how, "equal bytes": equal, "drafted": counts.num_drafted}
            row |= {"accepted": counts.num_accepted, "trees": counts.num_trees}
            row |= {"acceptance length": counts.tokens_per_step, "alpha": counts.acceptance_rate}
            rows.append(row)
            print(row, flush=True)
            require(equal and engine.speculator.error is None, f"{name} changed an answer, or failed")
    return {"prompts": NUM_PROMPTS, "tokens": NUM_TOKENS, "rows": rows}


def _logged(engine: Engine, prompts: list[list[int]], temperature: float) -> list[tuple[list[int], list[str]]]:
    """Return the tokens and the bytes of their log-probabilities."""
    params = [
        SamplingParams(temperature=temperature, max_tokens=NUM_TOKENS, logprobs=0, ignore_eos=True, seed=SEED + place)
        for place in range(len(prompts))
    ]
    outputs = engine.generate(prompts, params, progress=False, strict=True)
    return [(tokens, [value.hex() for value in logprobs]) for tokens, logprobs in map(_drawn, outputs)]


# ---- error


@torch.no_grad()
def error(sides: Sides, _: argparse.Namespace) -> dict[str, object]:
    """Return the relative error of logits, KL and top-1 of each side and dtype, beside transformers in float64."""
    prompts = [sides.chat(question) for question in QUESTIONS[:NUM_PROMPTS]]
    inputs = [torch.tensor([prompt], device=sides.device) for prompt in prompts]
    exact_model = detcompile.load_model(sides.name, device=sides.device).double()
    exact = [exact_model(prompt).logits[0] for prompt in inputs]
    del exact_model
    rows: dict[str, object] = {}
    for dtype in (torch.bfloat16, torch.float32):
        models: dict[str, Callable[[], Callable[..., Any]]] = {
            "transformers": lambda dtype=dtype: detcompile.load_model(sides.name, dtype=dtype, device=sides.device),
            "detcompile": lambda dtype=dtype: detcompile.compile(sides.name, dtype=dtype, device=sides.device),
        }
        for side, make in models.items():
            model = make()
            logits = [model(prompt).logits[0].double() for prompt in inputs]
            rows[f"{side}, {str(dtype)[6:]}"] = _beside_exact(logits, exact)
            print(side, dtype, rows[f"{side}, {str(dtype)[6:]}"], flush=True)
    return {"positions": sum(map(len, prompts)), "rows": rows}


def _beside_exact(logits: list[Tensor], exact: list[Tensor]) -> dict[str, float]:
    one, other = torch.cat(logits), torch.cat(exact)
    expected = other.log_softmax(-1)
    kl = (expected.exp() * (expected - one.log_softmax(-1))).sum(-1)
    return {
        "relative error": float((one - other).norm() / other.norm()),
        "mean KL, nats": float(kl.mean()),
        "largest KL, nats": float(kl.max()),
        "other top-1": int((one.argmax(-1) != other.argmax(-1)).sum()),
    }


# ---- speed


Seconds = tuple[float, float]  # of the clock, and of the CPU


@torch.no_grad()
def speed(sides: Sides, arguments: argparse.Namespace) -> dict[str, object]:
    """Return tokens a second of alternating greedy runs that ignore end tokens."""
    prompts = [sides.chat(question) for question in QUESTIONS]
    engine = sides.ours.engine(EngineConfig(num_blocks=NUM_BLOCKS, prefix_caching=False))
    params = SamplingParams(temperature=0, max_tokens=SPEED_TOKENS, ignore_eos=True)

    def ours(count: int) -> None:
        engine.generate(prompts[:count], params, progress=False, strict=True)

    def theirs(count: int) -> None:
        ids, mask = left_padded(prompts[:count], sides.plain.device)
        sides.plain.generate(ids, attention_mask=mask, max_new_tokens=SPEED_TOKENS, do_sample=False)

    runs: dict[str, Callable[[int], None]] = {"detcompile": ours, "transformers": theirs}
    taken: dict[str, dict[int, list[Seconds]]] = {side: {count: [] for count in SPEED_REQUESTS} for side in runs}
    for count in SPEED_REQUESTS:
        for run in runs.values():
            run(count)  # warm-up
        for _ in range(arguments.repeats):
            for side, run in runs.items():
                taken[side][count].append(_timed(run, count))
    return {"tokens": SPEED_TOKENS, "rows": {side: _speeds(by_count) for side, by_count in taken.items()}}


def _timed(run: Callable[[int], None], count: int) -> Seconds:
    clock, cpu = time.perf_counter(), time.process_time()
    run(count)
    return time.perf_counter() - clock, time.process_time() - cpu


def _speeds(taken: dict[int, list[Seconds]]) -> dict[str, dict[str, object]]:
    return {
        str(count): {
            "tokens a second, median": count * SPEED_TOKENS / statistics.median(clock for clock, _ in seconds),
            "tokens a CPU second, median": count * SPEED_TOKENS / statistics.median(cpu for _, cpu in seconds),
            "seconds of the clock and the CPU": seconds,
        }
        for count, seconds in taken.items()
    }


def llama(sides: Sides, arguments: argparse.Namespace) -> dict[str, object]:
    """Measure llama.cpp's speed; it runs in another Python."""
    prompts = [sides.chat(question) for question in QUESTIONS]
    given = {"model": arguments.f16, "prompts": prompts, "counts": SPEED_REQUESTS, "tokens": SPEED_TOKENS}
    given |= {"threads": arguments.threads, "repeats": arguments.repeats}
    command = [arguments.llama, str(Path(__file__).parent / "llama_seconds.py")]
    done = subprocess.run(command, input=json.dumps(given), capture_output=True, text=True, check=True)
    output = json.loads(done.stdout.splitlines()[-1])
    taken = {int(count): seconds for count, seconds in output["seconds"].items()}
    return {"version": output["version"], "tokens": SPEED_TOKENS, "rows": {"llama.cpp, F16": _speeds(taken)}}


# ---- all

PARTS: dict[str, Callable[[Sides, argparse.Namespace], dict[str, object]]] = {
    "answers": answers,
    "items": items_scored,
    "prefix": prefix,
    "drafters": drafters,
    "error": error,
    "speed": speed,
    "llama": llama,
}


def require(holds: bool, broken: str) -> None:
    """End the program if a claim about our side does not hold."""
    if not holds:
        sys.exit(broken)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--commit", required=True)
    parser.add_argument("--model", default="smollm2", help="a name as for detcompile.compile, of a chat model")
    parser.add_argument("--parts", default=",".join(part for part in PARTS if part != "llama"))
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=5, help="of each timed run")
    parser.add_argument("--llama", help="a Python that has llama-cpp-python")
    parser.add_argument("--f16", help="a GGUF file of the same weights, in F16")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    on_cpu = arguments.device == "cpu"
    hardware = cpu_name() if on_cpu else torch.cuda.get_device_name()
    cores = f", {os.cpu_count()} cores" if on_cpu else ""
    path = arguments.out / f"real-model-{hardware.replace(' ', '-').lower()}-{arguments.commit}.json"
    report = json.loads(path.read_text()) if path.exists() else {}
    arguments.out.mkdir(parents=True, exist_ok=True)
    sides = Sides(arguments.model, arguments.device)
    for part in arguments.parts.split(","):
        started, before, load = time.perf_counter(), os.times(), os.getloadavg()[0]
        section = PARTS[part](sides, arguments)
        after = os.times()
        section["cpu seconds"] = round(sum(after[:4]) - sum(before[:4]), 1)
        section |= {"wall seconds": round(time.perf_counter() - started, 1), "threads": arguments.threads}
        section["load average, start and end"] = [round(load, 1), round(os.getloadavg()[0], 1)]
        report |= {"commit": arguments.commit, "hardware": hardware + cores}
        report |= {"torch": torch.__version__, "transformers": transformers.__version__}
        report |= {"model": arguments.model, "dtype": str(sides.ours.dtype)[6:], "fingerprint": sides.ours.fingerprint}
        report[part] = section
        path.write_text(json.dumps(report, indent=1))
        print(part, json.dumps(section)[:2000], flush=True)
    print(path)


if __name__ == "__main__":
    main()
