"""`detcompile generate`: answers prompts, as text or as JSON lines."""

import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from detcompile.commands.loading_options import Random
from detcompile.commands.options import Loading, Model, compile_model, logs, progress_bar
from detcompile.commands.text_files import read_input, read_text_file
from detcompile.digests import fingerprint
from detcompile.errors import InvalidInput
from detcompile.offline.chats import Chat, read_chats
from detcompile.progress import is_terminal
from detcompile.reasoning.formats import ParserName
from detcompile.runtime.engine import Engine
from detcompile.runtime.engine_config import AllocationName, EngineConfig, SchedulerName
from detcompile.runtime.requests.outputs import CompletionOutput, Logprobs, RequestOutput
from detcompile.runtime.requests.prompts import Prompt
from detcompile.runtime.requests.sampling_params import SamplingParams

NUM_SEEDS = 1 << 64
Split = Callable[[str], tuple[str | None, str]]  # text to reasoning and content


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


@dataclass(frozen=True, kw_only=True)
class Chatting:
    """Options of chats, named as in LLM."""

    chat: Annotated[bool, typer.Option("--chat", help="Each prompt is a user's message in the chat template.")] = False
    chat_template_kwargs: Annotated[
        str | None, typer.Option(help="JSON object of variables of the chat template; with --chat.")
    ] = None
    reasoning_parser: Annotated[
        ParserName | None,
        typer.Option(help="How the model marks its reasoning; default: as its chat template says. With --chat."),
    ] = None
    thinking_token_budget: Annotated[
        int | None, typer.Option(min=0, help="Tokens of reasoning at most; with --chat.")
    ] = None

    def variables(self) -> dict[str, Any]:
        """Return the variables of the chat template.

        Raises:
            InvalidInput: they are not a JSON object, or an option needs --chat.
        """
        given = [name for name, value in asdict(self).items() if name != "chat" and value is not None]
        if given and not self.chat:
            raise InvalidInput(f"--{given[0].replace('_', '-')} needs --chat")
        text = self.chat_template_kwargs or "{}"
        try:
            value = json.loads(text)
        except ValueError as error:
            raise InvalidInput(f"--chat-template-kwargs {text!r} is not JSON: {error}") from error
        if not isinstance(value, dict):
            raise InvalidInput(f"--chat-template-kwargs {text!r}: give a JSON object")
        return value

    def read(self, tokenizer: Any, texts: Sequence[str], params: Sequence[SamplingParams]) -> list[Chat]:
        """Return the prompts as chats; without --chat, as they are.

        Raises:
            InvalidInput: the model has no tokenizer or chat template, or the budget cannot be kept.
        """
        if not self.chat:
            return [Chat(text, each, None) for text, each in zip(texts, params, strict=True)]
        if tokenizer is None:
            raise InvalidInput("--chat needs the model's tokenizer, which it does not have")
        return read_chats(
            tokenizer,
            tokenizer,
            [[{"role": "user", "content": text}] for text in texts],
            params,
            {"add_generation_prompt": True, **self.variables()},
            parser_name=self.reasoning_parser,
            budget=self.thinking_token_budget,
        )


def command(
    model: Model,
    prompts: Annotated[list[str] | None, typer.Argument(help="Texts, or messages with --chat.")] = None,
    file: Annotated[Path | None, typer.Option(help="Prompts, one per line; default: standard input.")] = None,
    *,
    sampling: Sampling,
    chatting: Chatting,
    json_output: Annotated[bool, typer.Option("--json", help="Print one line of JSON per prompt.")] = False,
    serving: Serving,
    random: Random = False,
    loading: Loading,
) -> None:
    """Answer prompts; the seed printed repeats an answer bit for bit. Exit 2 if a prompt could not be answered."""
    if sampling.logprobs is not None and not json_output:
        raise typer.BadParameter("log-probabilities are printed as JSON only: add --json", param_hint="--logprobs")
    chatting.variables()  # reject them before the model compiles
    texts = read_prompts(prompts or [], file)
    params = sampling.params()
    config = serving.config(params.n * len(texts))
    compiled = compile_model(loading.spec(model, random))
    engine = compiled.engine(config)
    chats = chatting.read(compiled.tokenizer, texts, with_successive_seeds(params, len(texts)))
    given, each = [chat.prompt for chat in chats], [chat.params for chat in chats]
    stream = len(texts) == 1 and params.n == 1 and not json_output and is_terminal(sys.stdout) and not chatting.chat
    outputs = _stream(engine, texts, each) if stream else _answer(engine, given, each)
    if not stream:
        split = [chat.split if chatting.chat else None for chat in chats]
        print_json(outputs, each, compiled.fingerprint_parts, split) if json_output else show(outputs, split)
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
        print("reading prompts, one per line; end with Ctrl-D", file=sys.stderr)
    text = read_input() if file is None else read_text_file(file)
    prompts = [line for line in text.split("\n") if line.strip()]
    if not prompts:
        raise InvalidInput(f"no prompt in {file or 'the arguments or on standard input'}: give one per line")
    return prompts


def with_successive_seeds(params: SamplingParams, count: int) -> list[SamplingParams]:
    """Return the parameters of each prompt, with seeds seed, seed + 1, …; None leaves seeds to the engine."""
    if params.seed is None:
        return [params] * count
    return [replace(params, seed=(params.seed + index) % NUM_SEEDS) for index in range(count)]


def answer(
    engine: Engine,
    prompts: Sequence[Prompt],
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
            text = str(prompt["prompt"] if isinstance(prompt, Mapping) else prompt)
            outputs[place] = RequestOutput("", text, [], sampling.seed, [], finished=True, error=error)
            tick(outputs[place])
    while engine.has_unfinished_requests:
        for output in engine.step():
            outputs[places[output.request_id]] = output
            tick(output)
    return [outputs[place] for place in range(len(prompts))]


def as_json(
    output: RequestOutput, params: SamplingParams, parts: Mapping[str, str], split: Split | None = None
) -> dict[str, Any]:
    """Return a request as a JSON object for `detcompile diff`, with everything that determines its bits.

    Floats keep every bit: Python's float repr round-trips.

    Args:
        params: the request's parameters.
        parts: the parts of the model's fingerprint.
        split: returns the reasoning and the content of an answer; None for a prompt that is not a chat.
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
        "outputs": [_completion(completion, split) for completion in output.outputs],
        "error": None if output.error is None else str(output.error),
    }


def print_json(
    outputs: Sequence[RequestOutput],
    params: Sequence[SamplingParams],
    parts: Mapping[str, str],
    splits: Sequence[Split | None],
) -> None:
    """Print one JSON line for each request to standard output."""
    for output, sampling, split in zip(outputs, params, splits, strict=True):
        print(json.dumps(as_json(output, sampling, parts, split)))


def show(outputs: Sequence[RequestOutput], splits: Sequence[Split | None]) -> None:
    """Print texts to standard output, with headings if there are several; reasoning to standard error."""
    texts = [(number, output, part) for number, output in enumerate(outputs, 1) for part in output.outputs]
    for number, output, part in texts:
        if len(outputs) > 1 or len(texts) > 1:
            sample = f", sample {part.index}" if len(output.outputs) > 1 else ""
            print(f"== {number}{sample}: {output.prompt!r}")
        split = splits[number - 1]
        reasoning, content = (None, part.text) if split is None else split(part.text)
        if reasoning is not None:
            logs.print(reasoning, style="dim", markup=False, highlight=False, soft_wrap=True)
        print(content)


def summary(number: int, output: RequestOutput) -> str:
    """Return a line with how a request ended, and the seed that repeats it."""
    if output.error is not None:
        return f"prompt {number}: {type(output.error).__name__}: {output.error}"
    ends = ", ".join(f"{len(part.token_ids)} tokens ({part.finish_reason})" for part in output.outputs)
    return f"prompt {number}: {ends}; seed {output.seed}"


def _answer(engine: Engine, prompts: list[Prompt], params: list[SamplingParams]) -> list[RequestOutput]:
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


def _completion(completion: CompletionOutput, split: Split | None) -> dict[str, Any]:
    logprobs = completion.logprobs
    parts = {} if split is None else dict(zip(("reasoning", "content"), split(completion.text), strict=True))
    return {
        "index": completion.index,
        "text": completion.text,
        **parts,
        "token_ids": completion.token_ids,
        "finish_reason": completion.finish_reason,
        "stop_reason": completion.stop_reason,
        "logprobs": None if logprobs is None else list(_logprobs(logprobs)),
    }


def _logprobs(entries: Iterable[Logprobs]) -> Iterable[dict[str, Any]]:
    for entry in entries:
        top = [{"token_id": token, "logprob": logprob} for token, logprob in entry.top.items()]
        yield {"token_id": entry.token_id, "logprob": entry.logprob, "top": top}
