"""What `detcompile generate` does with an engine: prompts in, answers out, as text or as JSON lines."""

import json
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from detcompile.commands.text_input import read_input, read_text_file
from detcompile.errors import InvalidInput
from detcompile.runtime.engine import Engine
from detcompile.runtime.requests.outputs import CompletionOutput, Logprobs, RequestOutput
from detcompile.runtime.requests.sampling_params import SamplingParams

__all__ = ["answer", "as_json", "read_prompts", "show", "summary", "with_own_seeds"]

NUM_SEEDS = 1 << 64


def read_prompts(given: Sequence[str], file: Path | None) -> list[str]:
    """The prompts given, or those in a file, or on standard input: one a line, blank lines skipped.

    Raises:
        InvalidInput: no prompt, two sources of them, or a file that cannot be read or is no text.
    """
    if given and file is not None:
        raise InvalidInput(f"prompts as arguments and in {file}: give one or the other")
    if given:
        return list(given)
    if file is None and sys.stdin.isatty():
        print("reading prompts, one a line; end with Ctrl-D", file=sys.stderr)
    text = read_input() if file is None else read_text_file(file)
    prompts = [line for line in text.split("\n") if line.strip()]
    if not prompts:
        raise InvalidInput(f"no prompt in {file or 'the arguments or on standard input'}: give one a line")
    return prompts


def with_own_seeds(params: SamplingParams, count: int) -> list[SamplingParams]:
    """One a prompt: seed, seed + 1, …, so that no two prompts share their random numbers; fresh seeds for None."""
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
    """Serve prompts to their ends; one output each, in their order. One that cannot be served has its ``error`` set.

    Args:
        tick: called with an output whenever it got longer or ended.
    """
    outputs: dict[int, RequestOutput] = {}
    places: dict[str, int] = {}
    for place, (prompt, own) in enumerate(zip(prompts, params, strict=True)):
        try:
            places[engine.add_request(prompt, own, stream_text=stream_text)] = place
        except InvalidInput as error:
            outputs[place] = RequestOutput("", prompt, [], own.seed, [], finished=True, error=error)
            tick(outputs[place])
    while engine.has_unfinished_requests:
        for output in engine.step():
            outputs[places[output.request_id]] = output
            tick(output)
    return [outputs[place] for place in range(len(prompts))]


def as_json(output: RequestOutput, fingerprint: str) -> dict[str, Any]:
    """One request as a JSON object. Floats keep every bit: Python writes the shortest text that reads back equal."""
    return {
        "prompt": output.prompt,
        "prompt_token_ids": output.prompt_token_ids,
        "seed": output.seed,
        "fingerprint": fingerprint,
        "outputs": [_completion(completion) for completion in output.outputs],
        "error": None if output.error is None else str(output.error),
    }


def show(outputs: Sequence[RequestOutput], fingerprint: str, *, json_output: bool) -> None:
    """Print answers to standard output: a JSON line a request, or texts, with a heading each if there are several."""
    if json_output:
        for output in outputs:
            print(json.dumps(as_json(output, fingerprint)))
        return
    texts = [(number, output, part) for number, output in enumerate(outputs, 1) for part in output.outputs]
    for number, output, part in texts:
        if len(outputs) > 1 or len(texts) > 1:
            sample = f", sample {part.index}" if len(output.outputs) > 1 else ""
            print(f"== {number}{sample}: {output.prompt!r}")
        print(part.text)


def summary(number: int, output: RequestOutput) -> str:
    """A line that says how a request ended, and with which seed it can be repeated."""
    if output.error is not None:
        return f"prompt {number}: {type(output.error).__name__}: {output.error}"
    ends = ", ".join(f"{len(part.token_ids)} tokens ({part.finish_reason})" for part in output.outputs)
    return f"prompt {number}: {ends}; seed {output.seed}"


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
