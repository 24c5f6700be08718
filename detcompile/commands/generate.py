"""`detcompile generate`: answers prompts, as text or as JSON lines."""

import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from detcompile.commands.options import (
    Loading,
    Model,
    Random,
    compile_model,
    logs,
    progress_bar,
)
from detcompile.commands.text_files import read_input, read_text_file
from detcompile.digests import fingerprint
from detcompile.errors import InvalidInput
from detcompile.progress import is_terminal
from detcompile.runtime.engine import Engine
from detcompile.runtime.engine_config import AllocationName, EngineConfig, SchedulerName
from detcompile.runtime.requests.outputs import CompletionOutput, Logprobs, RequestOutput
from detcompile.runtime.requests.sampling_params import SamplingParams

NUM_SEEDS = 1 << 64


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Options of a request, named as in SamplingParams."""

    max_tokens: Annotated[int, typer.Option(help="Maximum number of generated tokens.")] = 128
    min_tokens: Annotated[int, typer.Option(help="Minimum number of generated tokens.")] = 0
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 1.0
    top_p: Annotated[float, typer.Option(help="Keep the fewest tokens that reach this probability.")] = 1.0
    top_k: Annotated[int, typer.Option(help="Keep the k most likely tokens; 0 keeps all.")] = 0
    min_p: Annotated[float, typer.Option(help="Keep tokens of at least this share of the top probability.")] = 0.0
    seed: Annotated[int | None, typer.Option(help="Of the first prompt; the next ones take seed + 1, ….")] = None
    stop: Annotated[list[str] | None, typer.Option(help="A string that ends the answer; may be repeated.")] = None
    n: Annotated[int, typer.Option(help="Answers per prompt.")] = 1
    logprobs: Annotated[int | None, typer.Option(help="Most likely tokens to report per token; with --json.")] = None
    repetition_penalty: Annotated[float, typer.Option(help="Above 1: tokens seen become less likely.")] = 1.0
    presence_penalty: Annotated[float, typer.Option(help="In [-2, 2].")] = 0.0
    frequency_penalty: Annotated[float, typer.Option(help="In [-2, 2].")] = 0.0
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on after the end-of-sequence token.")] = False

    def params(self) -> SamplingParams:
        """Return the checked SamplingParams."""
        return SamplingParams(**asdict(self) | {"stop": tuple(self.stop or ())})


@dataclass(frozen=True, kw_only=True)
class Serving:
    """Options of the engine, named as in EngineConfig."""

    scheduler: Annotated[SchedulerName, typer.Option(help="Policy that fills steps; changes no bit.")] = "stall_free"
    allocation: Annotated[AllocationName, typer.Option(help="When KV blocks are allocated.")] = "lazy"
    max_num_batched_tokens: Annotated[int, typer.Option(help="Token budget of a step.")] = 8192
    max_num_seqs: Annotated[int | None, typer.Option(help="Sequences at a time; default: all, up to 1024.")] = None
    block_size: Annotated[int, typer.Option(help="Tokens per KV block.")] = 64
    num_blocks: Annotated[int | None, typer.Option(help="Of the KV cache; default: as memory allows.")] = None

    def config(self, num_sequences: int) -> EngineConfig:
        """Return the checked EngineConfig for this number of sequences."""
        slots = min(num_sequences, 1024) if self.max_num_seqs is None else self.max_num_seqs
        return EngineConfig(**asdict(self) | {"max_num_seqs": slots})


def command(
    model: Model,
    prompts: Annotated[list[str] | None, typer.Argument(help="Text as it is, without a chat template.")] = None,
    file: Annotated[Path | None, typer.Option(help="Prompts, one per line; default: standard input.")] = None,
    *,
    sampling: Sampling,
    json_output: Annotated[bool, typer.Option("--json", help="Print one line of JSON per prompt.")] = False,
    serving: Serving,
    random: Random = False,
    loading: Loading,
) -> None:
    """Answer prompts; the seed printed repeats an answer bit for bit. Exit 2 if a prompt could not be answered."""
    if sampling.logprobs is not None and not json_output:
        raise typer.BadParameter("log-probabilities are printed as JSON only: add --json", param_hint="--logprobs")
    texts = read_prompts(prompts or [], file)
    params = sampling.params()
    config = serving.config(params.n * len(texts))
    compiled = compile_model(loading.spec(model, random))
    engine = compiled.engine(config)
    stream = len(texts) == 1 and params.n == 1 and not json_output and is_terminal(sys.stdout)
    each = with_successive_seeds(params, len(texts))
    outputs = _stream(engine, texts, each) if stream else _answer(engine, texts, each)
    if not stream:
        print_json(outputs, each, compiled.fingerprint_parts) if json_output else show(outputs)
    for number, output in enumerate(outputs, 1):
        logs.print(summary(number, output), markup=False, highlight=False, soft_wrap=True)
    if any(output.error is not None for output in outputs):
        raise typer.Exit(2)


def read_prompts(given: Sequence[str], file: Path | None) -> list[str]:
    """Return the given prompts, or those of a file or standard input: one per line, blank lines skipped.

    Raises:
        InvalidInput: there is no prompt, both sources are given, or the file is not readable text.
    """
    if given and file is not None:
        raise InvalidInput(f"prompts as arguments and in {file}: give one or the other")
    if given:
        return list(given)
    if file is None and is_terminal(sys.stdin):
        print("reading prompts, one a line; end with Ctrl-D", file=sys.stderr)
    text = read_input() if file is None else read_text_file(file)
    prompts = [line for line in text.split("\n") if line.strip()]
    if not prompts:
        raise InvalidInput(f"no prompt in {file or 'the arguments or on standard input'}: give one a line")
    return prompts


def with_successive_seeds(params: SamplingParams, count: int) -> list[SamplingParams]:
    """Return the parameters of each prompt, with seeds seed, seed + 1, …; None leaves seeds to the engine."""
    if params.seed is None:
        return [params] * count
    return [replace(params, seed=(params.seed + index) % NUM_SEEDS) for index in range(count)]


def answer(
    engine: Engine,
    prompts: Sequence[str],
    params: Sequence[SamplingParams],
    *,
    stream_text: bool = False,
    tick: Callable[[RequestOutput], None] = lambda output: None,
) -> list[RequestOutput]:
    """Run prompts to completion; return one output each, in order. A rejected prompt has its ``error`` set.

    Args:
        tick: called with each output that grew or finished.
    """
    outputs: dict[int, RequestOutput] = {}
    places: dict[str, int] = {}
    for place, (prompt, sampling) in enumerate(zip(prompts, params, strict=True)):
        try:
            places[engine.add_request(prompt, sampling, stream_text=stream_text)] = place
        except InvalidInput as error:
            outputs[place] = RequestOutput("", prompt, [], sampling.seed, [], finished=True, error=error)
            tick(outputs[place])
    while engine.has_unfinished_requests:
        for output in engine.step():
            outputs[places[output.request_id]] = output
            tick(output)
    return [outputs[place] for place in range(len(prompts))]


def as_json(output: RequestOutput, params: SamplingParams, parts: Mapping[str, str]) -> dict[str, Any]:
    """Return a request as a JSON object for `detcompile diff`, with everything that determines its bits.

    Floats keep every bit: Python's float repr round-trips.

    Args:
        params: the request's parameters.
        parts: the parts of the model's fingerprint.
    """
    settings = asdict(params)
    del settings["seed"]  # the output has the seed that was used
    return {
        "prompt": output.prompt,
        "prompt_token_ids": output.prompt_token_ids,
        "seed": output.seed,
        "params": settings,
        "fingerprint": fingerprint(parts),
        "fingerprint_parts": dict(parts),
        "outputs": [_completion(completion) for completion in output.outputs],
        "error": None if output.error is None else str(output.error),
    }


def print_json(outputs: Sequence[RequestOutput], params: Sequence[SamplingParams], parts: Mapping[str, str]) -> None:
    """Print one JSON line for each request to standard output."""
    for output, sampling in zip(outputs, params, strict=True):
        print(json.dumps(as_json(output, sampling, parts)))


def show(outputs: Sequence[RequestOutput]) -> None:
    """Print texts to standard output, with headings if there are several."""
    texts = [(number, output, part) for number, output in enumerate(outputs, 1) for part in output.outputs]
    for number, output, part in texts:
        if len(outputs) > 1 or len(texts) > 1:
            sample = f", sample {part.index}" if len(output.outputs) > 1 else ""
            print(f"== {number}{sample}: {output.prompt!r}")
        print(part.text)


def summary(number: int, output: RequestOutput) -> str:
    """Return a line with how a request ended, and the seed that repeats it."""
    if output.error is not None:
        return f"prompt {number}: {type(output.error).__name__}: {output.error}"
    ends = ", ".join(f"{len(part.token_ids)} tokens ({part.finish_reason})" for part in output.outputs)
    return f"prompt {number}: {ends}; seed {output.seed}"


def _answer(engine: Engine, prompts: list[str], params: list[SamplingParams]) -> list[RequestOutput]:
    with progress_bar(total=True) as progress:
        task = progress.add_task("generating", total=len(prompts))
        return answer(engine, prompts, params, tick=lambda output: progress.advance(task, int(output.finished)))


def _stream(engine: Engine, prompts: list[str], params: list[SamplingParams]) -> list[RequestOutput]:
    """Answer one prompt, printing text as it is generated."""
    console, shown = Console(), 0
    console.print(prompts[0], style="dim", end="", markup=False, highlight=False, soft_wrap=True)

    def write(output: RequestOutput) -> None:
        nonlocal shown
        text = output.outputs[0].text if output.outputs else ""
        print(text[shown:], end="", flush=True)
        shown = len(text)

    outputs = answer(engine, prompts, params, stream_text=True, tick=write)
    print()
    return outputs


def _completion(completion: CompletionOutput) -> dict[str, Any]:
    logprobs = completion.logprobs
    return {
        "index": completion.index,
        "text": completion.text,
        "token_ids": completion.token_ids,
        "finish_reason": completion.finish_reason,
        "stop_reason": completion.stop_reason,
        "logprobs": None if logprobs is None else list(_logprobs(logprobs)),
    }


def _logprobs(entries: Iterable[Logprobs]) -> Iterable[dict[str, Any]]:
    for entry in entries:
        top = [{"token_id": token, "logprob": logprob} for token, logprob in entry.top.items()]
        yield {"token_id": entry.token_id, "logprob": entry.logprob, "top": top}
