"""The demo on a chat model: transformers' generate beside detcompile, one question in batches with others.

Every number is measured in the run.
"""

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch import Tensor
from transformers import LogitsProcessor, PreTrainedModel

from detcompile import __version__
from detcompile.api import load_model
from detcompile.commands import receipts as _needs_the_extra  # noqa: F401 - raises if packages are missing
from detcompile.commands.options import compile_model, progress_bar
from detcompile.models.compiled import CompiledModel
from detcompile.models.spec import ModelSpec
from detcompile.runtime.engine import Engine
from detcompile.runtime.engine_config import EngineConfig
from detcompile.runtime.requests.outputs import RequestOutput
from detcompile.runtime.requests.sampling_params import SamplingParams
from detcompile.runtime.speculation.speculator import SpeculationConfig
from detcompile.serving.plain_tokenizer import plain_tokenizer, tokenizer_digest
from detcompile.serving.receipts.envelope import seal
from detcompile.serving.receipts.receipt import (
    Prompt,
    Receipt,
    Served,
    encode_receipt,
    recorded_sample,
    written_params,
)
from detcompile.serving.receipts.replay import replay

QUESTION = "What should I pack for a trip to Norway?"
OTHERS = (
    "What is the capital of France?", "How do I boil an egg?", "Write a haiku about autumn.",
    "What is machine learning?", "Explain photosynthesis to a child.", "Give me three tips for better sleep.",
    "Who wrote Romeo and Juliet?", "What is 12 times 12?", "How does a bicycle stay upright?",
    "Suggest a name for a black cat.", "What causes the seasons?", "Translate 'good morning' into French.",
    "Why is the sky blue?", "How do vaccines work?", "Tell me a fun fact about the ocean.",
)  # fmt: skip
BATCHES = (1, 4, 16)
MAX_TOKENS = 48
TEMPERATURES = {"greedy": 0.0, "temperature 0.8": 0.8}
SEED = 7
FORGED = 20  # position of the forged token
NUM_BLOCKS = 256
SMALL_STEPS = EngineConfig(scheduler="simple_chunking", max_num_batched_tokens=16, block_size=16, num_blocks=NUM_BLOCKS)


class Run(NamedTuple):
    """One run of a batch.

    Attributes:
        tokens: the first row's answer.
        num_tokens: tokens of all answers.
    """

    tokens: list[int]
    num_tokens: int
    seconds: float

    @property
    def speed(self) -> float:
        """Tokens a second."""
        return self.num_tokens / self.seconds


class OwnNoise(LogitsProcessor):
    """Adds Gumbel noise from a separate generator for each row, so argmax samples independently of the batch.

    transformers' sampling draws from one generator for all rows.
    """

    def __init__(self, temperature: float, seeds: Sequence[int]) -> None:
        self._temperature = temperature
        self._generators = [torch.Generator().manual_seed(seed) for seed in seeds]

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return scores whose argmax is a sample."""
        draws = [torch.rand(scores.shape[-1], generator=each) for each in self._generators]
        noise = -torch.log(-torch.log(torch.stack(draws)))
        return scores / self._temperature + noise.to(scores.device)


def show(name: str, device: str | None) -> bool:
    """Print the demo of a chat model; return False if detcompile broke its promise."""
    console = Console()
    compiled, plain = compile_model(ModelSpec(name, device=device)), load_model(name, device=device)
    tokenizer = compiled.tokenizer
    prompts = [_chat(tokenizer, text) for text in (QUESTION, *OTHERS)]
    theirs: dict[str, list[Run]] = {}
    ours: dict[str, list[Run]] = {}
    for how, temperature in TEMPERATURES.items():
        with progress_bar() as progress:
            task = progress.add_task(f"transformers, {how}, batches of {', '.join(map(str, BATCHES))}", total=None)
            theirs[how] = [run_plain(plain, tokenizer, prompts[:size], temperature) for size in BATCHES]
            progress.update(task, description=f"detcompile, {how}, the same batches")
            ours[how] = [
                _run(compiled.engine(EngineConfig(num_blocks=NUM_BLOCKS)), prompts[:size], temperature)[0]
                for size in BATCHES
            ]
        console.print(_texts(tokenizer, how, theirs[how], ours[how]))
    with progress_bar() as progress:
        progress.add_task("detcompile, other ways", total=None)
        others, output = _other_ways(compiled, prompts)
    console.print(_counts(theirs, ours, others))
    equal, lines = _receipt_lines(compiled, name, output)
    console.print(*lines, sep="\n", highlight=False, soft_wrap=True)
    console.print(_speeds(compiled, theirs["greedy"], ours["greedy"]))
    answers = {how: runs[0].tokens for how, runs in ours.items()}
    same = all(run.tokens == answers[how] for how, runs in ours.items() for run in runs)
    return equal and same and all(run.tokens == answers[how] for (how, _), run in others.items())


def _chat(tokenizer: Any, text: str) -> list[int]:
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": text}], add_generation_prompt=True, tokenize=False
    )
    tokens: list[int] = tokenizer(prompt, add_special_tokens=False).input_ids
    return tokens


@torch.no_grad()
def run_plain(model: PreTrainedModel, tokenizer: Any, prompts: Sequence[list[int]], temperature: float) -> Run:
    """Answer prompts, left-padded, by transformers' generate."""
    width = max(map(len, prompts))
    padded = [[0] * (width - len(prompt)) + prompt for prompt in prompts]
    mask = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    inputs = {"input_ids": torch.tensor(padded), "attention_mask": torch.tensor(mask)}
    processors = [OwnNoise(temperature, [SEED + row for row in range(len(prompts))])] if temperature else []
    start = time.perf_counter()
    rows = model.generate(
        **{name: tensor.to(model.device) for name, tensor in inputs.items()},
        logits_processor=processors,
        do_sample=False,
        max_new_tokens=MAX_TOKENS,
        pad_token_id=tokenizer.eos_token_id,
    )
    seconds = time.perf_counter() - start
    answers = [_answer(row, tokenizer.eos_token_id) for row in rows[:, width:].tolist()]
    return Run(answers[0], sum(map(len, answers)), seconds)


def _answer(tokens: list[int], end: int) -> list[int]:
    """Cut the padding behind the end token."""
    return tokens[: tokens.index(end) + 1] if end in tokens else tokens


def _run(engine: Engine, prompts: Sequence[list[int]], temperature: float) -> tuple[Run, RequestOutput]:
    params = [
        SamplingParams(temperature=temperature, max_tokens=MAX_TOKENS, seed=SEED + row) for row in range(len(prompts))
    ]
    start = time.perf_counter()
    outputs = engine.generate(list(prompts), params, progress=False, strict=True)
    seconds = time.perf_counter() - start
    answers = [output.outputs[0].token_ids for output in outputs]
    return Run(answers[0], sum(map(len, answers)), seconds), outputs[0]


def _other_ways(model: CompiledModel, prompts: Sequence[list[int]]) -> tuple[dict[tuple[str, str], Run], RequestOutput]:
    """Return runs by temperature and way, and the output of a sampled answer."""
    runs: dict[tuple[str, str], Run] = {}
    drafts = SpeculationConfig(switch="always")
    for how, temperature in TEMPERATURES.items():
        engines = {
            "prompt in chunks of 16": model.engine(SMALL_STEPS),
            "speculation": model.engine(EngineConfig(num_blocks=NUM_BLOCKS), speculation=drafts),
        }
        for way, engine in engines.items():
            runs[how, way], _ = _run(engine, prompts[:4], temperature)
        runs[how, "prefix cache"], output = _run(engines["prompt in chunks of 16"], prompts[:1], temperature)
        assert output.num_cached_tokens > 0, "the prompt is in the cache"
    return runs, output


def first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """Return the first position where two answers differ; None if they are equal."""
    at = next((at for at, pair in enumerate(zip(one, other)) if pair[0] != pair[1]), min(len(one), len(other)))
    return None if len(one) == len(other) == at else at


def _texts(tokenizer: Any, how: str, theirs: Sequence[Run], ours: Sequence[Run]) -> Table:
    """Show the answer of transformers alone, its first other answer, and ours."""
    alone = theirs[0].tokens
    runs = list(zip(BATCHES, theirs, strict=True))
    batch, other = next((pair for pair in runs if pair[1].tokens != alone), runs[-1])
    at = first_difference(alone, other.tokens)
    verdict = "equal this time" if at is None else f"different from token {at + 1} of {len(other.tokens)} on"
    table = Table(title=f"{QUESTION!r}, {how}. The answers of transformers are {verdict}.")
    columns = {
        "transformers, alone": _marked(tokenizer, alone, at),
        f"transformers, in a batch of {batch}": _marked(tokenizer, other.tokens, at),
        f"detcompile, in batches of {BATCHES[0]} to {BATCHES[-1]}": _marked(tokenizer, ours[0].tokens, None),
    }
    for title in columns:
        table.add_column(title, ratio=1)
    table.add_row(*columns.values())
    return table


def _marked(tokenizer: Any, tokens: list[int], at: int | None) -> Text:
    text = Text(tokenizer.decode(tokens, skip_special_tokens=True))
    if at is not None:
        start, end = (len(tokenizer.decode(tokens[:length], skip_special_tokens=True)) for length in (at, at + 1))
        text.stylize("bold reverse red", start, end)
    return text


def _counts(theirs: dict[str, list[Run]], ours: dict[str, list[Run]], others: dict[tuple[str, str], Run]) -> Table:
    table = Table(title="Different answers to this question", caption="Both sides sample with separate noise per row.")
    for column in ("", *TEMPERATURES):
        table.add_column(column, justify="right" if column else "left")
    batches = f"batches of {', '.join(map(str, BATCHES))}"
    for side, runs in {"transformers": theirs, "detcompile": ours}.items():
        table.add_row(f"{side}, {batches}", *(str(_distinct(runs[how])) for how in TEMPERATURES))
    for way in dict.fromkeys(way for _, way in others):
        counts = [_distinct([*ours[how], others[how, way]]) for how in TEMPERATURES]
        table.add_row(f"detcompile, these and {way}", *map(str, counts))
    return table


def _distinct(runs: Sequence[Run]) -> int:
    return len({tuple(run.tokens) for run in runs})


def _receipt_lines(model: CompiledModel, name: str, output: RequestOutput) -> tuple[bool, list[str]]:
    """Replay the receipt of an answer and of a forged one; return whether both verdicts are right, and lines."""
    receipt = receipt_of(model, name, output)
    start = time.perf_counter()
    honest = replay(model, seal(encode_receipt(receipt), None))
    seconds = time.perf_counter() - start
    tokens, forged = output.outputs[0].token_ids, min(FORGED, len(output.outputs[0].token_ids) - 1)
    other = [*tokens[:forged], tokens[forged] ^ 1, *tokens[forged + 1 :]]
    verdict = replay(model, seal(encode_receipt(receipt_of(model, name, output, other)), None))
    lines = [
        f"[bold]Receipt[/] of the sampled answer, replayed in one prefill of {seconds:.2f} s: {honest.message}",
        f"The same with token {forged} forged: {verdict.outcome}: {verdict.message}",
    ]
    named = verdict.outcome == "differs" and verdict.position == forged
    return honest.outcome == "equal" and named, lines


def receipt_of(model: CompiledModel, name: str, output: RequestOutput, tokens: Sequence[int] | None = None) -> Receipt:
    """Return the receipt of a sampled answer, as the server issues it, but with these tokens."""
    [sample] = output.outputs
    params = SamplingParams(temperature=TEMPERATURES["temperature 0.8"], max_tokens=MAX_TOKENS)
    reasons = (sample.finish_reason, sample.stop_reason)
    recorded = recorded_sample(0, sample.token_ids if tokens is None else tokens, reasons, sample.text, None, None)
    return Receipt(
        id="demo",
        created=int(time.time()),
        model=name,
        level="tokens",
        fingerprint=model.fingerprint,
        fingerprint_parts={part: str(value) for part, value in model.fingerprint_parts.items()},
        served=Served(
            detcompile=__version__, tokenizer=tokenizer_digest(plain_tokenizer(model.tokenizer)), chat_template=None
        ),
        params=written_params(params),
        seed=str(SEED),
        prompts=[Prompt(token_ids=output.prompt_token_ids, logprobs=None, samples=[recorded])],
    )


def _speeds(model: CompiledModel, theirs: list[Run], ours: list[Run]) -> Table:
    dtype = str(model.dtype).removeprefix("torch.")
    table = Table(title=f"Tokens a second here, greedy, {model.device}, {dtype}, {torch.get_num_threads()} threads")
    table.add_column("batch of")
    for size in BATCHES:
        table.add_column(str(size), justify="right")
    for side, runs in {"transformers": theirs, "detcompile": ours}.items():
        table.add_row(side, *(f"{run.speed:.1f}" for run in runs))
    return table
