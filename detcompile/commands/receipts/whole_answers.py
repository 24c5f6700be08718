"""Compares all fields of a saved answer, not only its receipt, with a replay.

The serving code renders the replayed tokens again, and the result is compared field by field.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from detcompile.errors import InvalidInput
from detcompile.reasoning.formats import PARSERS, Thinking
from detcompile.serving.anthropic.messages import MessageReply
from detcompile.serving.engines.answers import Answer, AnswerSignal
from detcompile.serving.engines.protocol import Delta, SampleDelta, Token, Weights, WeightSpan
from detcompile.serving.journal.job import Ask, Job, ServedModel
from detcompile.serving.openai.chat import ChatReply
from detcompile.serving.openai.completions import CompletionReply
from detcompile.serving.openai.recording import Recording
from detcompile.serving.openai.responses import DRAWN_WITH, REPEATED
from detcompile.serving.openai.tools import ToolUse
from detcompile.serving.receipts.decoding import Redrawn
from detcompile.serving.receipts.envelope import Envelope, payload_digest
from detcompile.serving.receipts.issuer import Issued
from detcompile.serving.receipts.receipt import Receipt, params_of
from detcompile.serving.receipts.verdict import Verdict, differs
from detcompile.serving.tokenizer_pool import TokenizerPool
from detcompile.serving.tokens.generate import GenerateReply
from detcompile.serving.tools.reader import FAMILIES

Fields = Mapping[str, Any]  # an answer's JSON object
# A receipt does not record how reasoning and calls were parsed: an answer is right if one of these ways produces it.
THINKINGS = [None, *sorted({(parser.opens, begun): Thinking(parser.name, begun) for parser in PARSERS.values()
                            for begun in (False, True)}.values())]  # fmt: skip
USES = [None, *(ToolUse(family, (), None, named) for family in FAMILIES.values() for named in (False, True))]
CACHED = {  # path of the number of cached prompt tokens
    "text_completion": ("usage", "prompt_tokens_details", "cached_tokens"),
    "chat.completion": ("usage", "prompt_tokens_details", "cached_tokens"),
    "chat.completion.chunk": ("usage", "prompt_tokens_details", "cached_tokens"),
    "inference.generate": ("usage", "prompt_tokens_details", "cached_tokens"),
    "response": ("usage", "input_tokens_details", "cached_tokens"),
    "message": ("usage", "cache_read_input_tokens"),
}

STREAMED = ("text_completion", "chat.completion.chunk", "inference.generate")  # a stream's last event has no choices


def require_known(fields: Fields) -> None:
    """Raise InvalidInput unless the fields are an answer of a known route."""
    if _kind(fields) not in CACHED:
        raise InvalidInput(
            f"beside the receipt are {', '.join(fields)[:200]}, which is not an answer of /v1/completions,"
            " /v1/chat/completions, /v1/responses, /v1/messages or /inference/v1/generate: give the answer as it came,"
            " or the receipt alone"
        )


def uncovered(fields: Fields) -> list[str]:
    """Return the paths of an answer's fields that its receipt does not cover."""
    paths = [".".join(CACHED[_kind(fields)])] if _at(fields, CACHED[_kind(fields)]) is not None else []
    if _kind(fields) == "inference.generate":
        paths.append("request_id")
    return paths + [name for name in ("completed_at", *REPEATED) if name in fields and _kind(fields) == "response"]


def answer_difference(
    fields: Fields,
    envelope: Envelope,
    receipt: Receipt,
    redrawn: Sequence[Redrawn],
    texts: TokenizerPool,
    grammar: str | None = None,
) -> Verdict | None:
    """Return the first field of an answer that differs from the replay; None if all fields agree.

    Args:
        fields: the answer without its receipt.
        redrawn: the replayed samples, equal to the receipt's.
        texts: the model's tokenizer.
        grammar: source of the grammar if the receipt has only its hash.
    """
    return asyncio.run(_difference(fields, _job(fields, envelope, receipt, redrawn, grammar), _Context(texts)))


class _Context:
    """A ReplyContext without engines, for jobs that already have receipts."""

    def __init__(self, texts: TokenizerPool) -> None:
        self.texts = texts

    async def issue(self, job: Job) -> Issued | None:
        return job.issued

    def release(self, answers: Sequence[Answer]) -> None:
        assert all(answer.finished for answer in answers)


def _kind(fields: Fields) -> str:
    return str(fields.get("object", fields.get("type")))


def _at(fields: Any, path: Sequence[str]) -> Any:
    for name in path:
        fields = fields.get(name) if isinstance(fields, dict) else None
    return fields


def _job(fields: Fields, envelope: Envelope, receipt: Receipt, redrawn: Sequence[Redrawn], grammar: str | None) -> Job:
    """Rebuild the receipt's request with its answers."""
    params = params_of(receipt, grammar)
    answers = [Answer("", prompt.token_ids, params, AnswerSignal()) for prompt in redrawn]
    for answer, prompt in zip(answers, redrawn):
        samples = [
            SampleDelta(index, sample.token_ids, _tokens(sample.logprobs), sample.finish_reason, sample.stop_reason)
            for index, sample in enumerate(prompt.samples)
        ]
        answer.extend(Delta("", samples, True, _tokens(prompt.logprobs), None, 0, None))
    version = receipt.weight_version or None
    if version is not None:
        _add_spans(answers, receipt, version)
    cached = _at(fields, CACHED[_kind(fields)])
    if isinstance(cached, int) and 0 <= cached <= sum(len(answer.prompt_ids) for answer in answers):
        answers[0].num_cached_tokens = cached
    ask = Ask([answer.prompt_ids for answer in answers], params, 0, "")
    model = ServedModel(receipt.model, receipt.fingerprint, receipt.fingerprint_parts, version)
    job = Job(ask, answers, None, model, name=receipt.id, created=receipt.created, restored=True)
    job.issued = Issued(envelope, payload_digest(envelope))
    return job


def _add_spans(answers: Sequence[Answer], receipt: Receipt, version: str) -> None:
    """Give the samples the versions of the weights that drew them."""
    newest = Weights(version, 1, receipt.fingerprint, receipt.fingerprint_parts.get("weights", ""))
    for answer, prompt in zip(answers, receipt.prompts):
        for sample, recorded in zip(answer.samples, prompt.samples):
            sample.spans = [
                WeightSpan(s.start, newest if s.version == version else Weights(s.version, 0, "", s.weights))
                for s in recorded.drawn_by or ()
            ] or [WeightSpan(0, newest)]


def _tokens(logprobs: Sequence[Any] | None) -> list[Any] | None:
    return None if logprobs is None else [None if entry is None else Token(*entry) for entry in logprobs]


async def _difference(fields: Fields, job: Job, context: _Context) -> Verdict | None:
    """Return the first difference, using the way of parsing tool calls with the fewest differences."""
    closest: list[tuple[str, Any, Any]] | None = None
    async for rendered in RENDERINGS[_kind(fields)](fields, job, context):
        plain = msgspec.json.decode(msgspec.json.encode(rendered))
        plain.pop("receipt")
        if fields.get("choices") == [] and _kind(fields) in STREAMED:  # a last event: usage only if requested
            plain = {name: value for name, value in plain.items() if name in fields}
            plain |= {"object": _kind(fields), "choices": []}
        differences = list(_differences(fields, plain))
        if not differences:
            return None
        closest = differences if closest is None or len(differences) < len(closest) else closest
    assert closest is not None
    path, given, expected = closest[0]
    message = f"{path} of the answer is {_short(given)}, but by its receipt it is {_short(expected)}"
    return differs(f"answer.{path}", message, expected=expected, found=given)


def _differences(given: Any, expected: Any, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield path and values of each difference. A null field equals a missing one."""
    if isinstance(given, dict) and isinstance(expected, dict):
        for name in [*expected, *(name for name in given if name not in expected)]:
            yield from _differences(given.get(name), expected.get(name), f"{path}.{name}" if path else name)
    elif isinstance(given, list) and isinstance(expected, list) and len(given) == len(expected):
        for index, pair in enumerate(zip(given, expected)):
            yield from _differences(*pair, f"{path}[{index}]")
    elif isinstance(given, bool) != isinstance(expected, bool) or given != expected:
        yield path, given, expected


def _short(value: Any) -> str:
    return f"{value!r:.100}"


async def _completions(fields: Fields, job: Job, context: _Context) -> AsyncIterator[dict[str, Any]]:
    params = job.ask.params
    hidden = params.max_tokens == 1 and _at(fields, ("usage", "completion_tokens")) == 0  # scores the prompt only
    options = {"with_ids": _shows(fields, "token_ids"), "with_receipt": True, "hidden": hidden}
    options["with_prompt_logprobs"] = _shows(fields, "prompt_logprobs")
    rendered = await CompletionReply(context, job, **options).whole()
    echo = await _echo(fields, msgspec.json.decode(msgspec.json.encode(rendered["choices"])), job, context.texts)
    if echo is None:
        yield rendered
    else:
        reply = CompletionReply(context, job, **options)
        reply.echo = echo
        yield await reply.whole()


async def _echo(fields: Fields, choices: Sequence[Fields], job: Job, texts: TokenizerPool) -> list[str] | None:
    """Return the echo that each prompt's first choice should begin with; None for answers without echo."""
    params, shown = job.ask.params, fields.get("choices")
    beginnings: list[str] = []
    longer = False  # by the logprobs of an echo without text
    for place in range(0, len(choices), params.n):
        text = _at(shown[place], ("text",)) if isinstance(shown, list) and place < len(shown) else None
        drawn = choices[place]["text"]
        beginnings.append(text.removesuffix(drawn) if isinstance(text, str) and text.endswith(drawn) else "")
        tokens = _at(shown[place], ("logprobs", "tokens")) if isinstance(shown, list) and place < len(shown) else None
        drawn_tokens = _at(choices[place], ("logprobs", "tokens")) or ()
        longer = longer or (isinstance(tokens, list) and len(tokens) > len(drawn_tokens))
    if not longer and not any(beginnings):
        return None
    return [await _prompt_text(*pair, texts) for pair in zip(beginnings, job.ask.prompts)]


async def _prompt_text(text: str, token_ids: list[int], texts: TokenizerPool) -> str:
    """Return ``text`` if it encodes to the prompt's tokens, else the decoded tokens."""
    if not texts.present:
        return ""
    read = [await texts.encode(text, add_special_tokens=special) for special in (True, False)]
    return text if token_ids in read else await texts.text_of(token_ids)


async def _chats(fields: Fields, job: Job, context: _Context) -> AsyncIterator[dict[str, Any]]:
    for each, use in _ways(job):
        for shows in (True, False)[: 1 if each.ask.thinking is None else 2]:
            reply = ChatReply(
                context,
                each,
                with_ids=_shows(fields, "token_ids"),
                with_prompt_logprobs="prompt_logprobs" in fields,
                with_receipt=True,
            )
            reply.use, reply.shows_reasoning = use, shows
            yield await reply.whole()


async def _generated(fields: Fields, job: Job, context: _Context) -> AsyncIterator[dict[str, Any]]:
    with_prompt_logprobs = "prompt_logprobs" in fields
    reply = GenerateReply(context, job, with_ids=True, with_prompt_logprobs=with_prompt_logprobs, with_receipt=True)
    reply.name(fields.get("request_id", job.name))
    reply.with_prompt_ids = "prompt_token_ids" in fields
    yield await reply.whole()


async def _messages(fields: Fields, job: Job, context: _Context) -> AsyncIterator[dict[str, Any]]:
    for each, use in _ways(job):
        yield await MessageReply(context, each, use, with_receipt=True).whole()


async def _responses(fields: Fields, job: Job, context: _Context) -> AsyncIterator[dict[str, Any]]:
    params = job.ask.params
    repeated = {name: fields[name] for name in REPEATED if name in fields}
    repeated |= {name: getattr(params, name) for name in DRAWN_WITH}
    job.ended = fields.get("completed_at")
    for each, use in _ways(job):
        recording = Recording(context, each, repeated, None if use is None else use.family, [], with_receipt=True)
        await recording.settled()
        yield recording.response()


def _ways(job: Job) -> Iterator[tuple[Job, ToolUse | None]]:
    """Yield the job with each way to read reasoning, and each way to read calls."""
    for thinking in THINKINGS:
        for use in USES:
            yield replace(job, ask=replace(job.ask, thinking=thinking)), use


def _shows(fields: Fields, name: str) -> bool:
    """Return True if a choice has a field."""
    choices = fields.get("choices")
    return isinstance(choices, list) and any(isinstance(choice, dict) and name in choice for choice in choices)


RENDERINGS: dict[str, Callable[[Fields, Job, _Context], AsyncIterator[dict[str, Any]]]] = {
    "text_completion": _completions,
    "chat.completion": _chats,
    "chat.completion.chunk": _chats,
    "response": _responses,
    "message": _messages,
    "inference.generate": _generated,
}
