"""POST /v1/completions: prompts as text or token ids, with OpenAI's older form of logprobs."""

import asyncio
import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from msgspec import structs
from starlette.responses import Response

from detcompile.errors import InvalidInput
from detcompile.runtime.requests.detokenizer import Detokenizer
from detcompile.runtime.requests.sampling_params import SamplingParams
from detcompile.serving.engines.answers import Answer
from detcompile.serving.engines.protocol import Token
from detcompile.serving.journal.job import Ask
from detcompile.serving.journal.jobs import Call
from detcompile.serving.openai.fields import require_served
from detcompile.serving.openai.parameters import completion_params, prompts_of
from detcompile.serving.openai.reply import Reply, finite
from detcompile.serving.openai.schema import CompletionRequest
from detcompile.serving.responses import Events, Whole
from detcompile.serving.service import Service
from detcompile.serving.tokenizer_pool import TokenizerPool


async def complete(service: Service, request: CompletionRequest, call: Call) -> Response:
    """Answer a request.

    Raises:
        HTTPError: the request cannot be served.
        InvalidInput: the tokenizer cannot read the text.
    """
    service.require_generation(request.receipt)
    require_served(request)
    prompts = prompts_of(request.prompt, "prompt")
    echo = [await _echoed(service, prompt, call.owner) for prompt in prompts] if request.echo else None
    job = await service.jobs.job(call, functools.partial(ask_completion, service, request, prompts, call.owner))
    reply = CompletionReply(
        service,
        job,
        stream_options=request.stream_options,
        with_ids=bool(request.return_token_ids),
        with_prompt_logprobs=request.prompt_logprobs is not None,
        with_receipt=bool(request.receipt),
        hidden=request.max_tokens == 0,
        last_event=call.last_event,
    )
    reply.echo = echo
    if request.stream:
        return Events(job.answers, call.reservation, reply.headers, reply.events())
    return Whole(job.answers, call.reservation, reply.headers, reply.whole)


async def ask_completion(
    service: Service,
    request: CompletionRequest,
    prompts: list[str | list[int]],
    owner: str,
    *,
    prefix: str = "cmpl-",
    param: str = "prompt",
    defaults: Mapping[str, Any] | None = None,
) -> Ask:
    """Return a request's work for the engines.

    Args:
        owner: sha256 of the request's API key.
        prefix: prefix of the answer's id.
        param: the field with the prompts, for errors.
        defaults: values of omitted fields; None takes the model's.

    Raises:
        HTTPError: the request cannot be served.
        InvalidInput: the tokenizer cannot read the text.
    """
    adapter = service.adapter_of(request.model)
    params = completion_params(request, service.hello.default_params if defaults is None else defaults)
    service.limiter.require(owner, len(prompts) * params.n)  # before the prompts are tokenized
    special = request.add_special_tokens is not False
    ids = await service.texts.ids_of(prompts, special, param=param, owner=owner)
    for prompt in ids:
        service.texts.require_answer(prompt, param)
    return Ask(
        ids,
        params,
        request.priority or 0,
        prefix,
        cache_salt=request.cache_salt or "",
        adapter=adapter,
    )


async def _echoed(service: Service, prompt: str | list[int], owner: str) -> str:
    if isinstance(prompt, str):
        return prompt
    if not service.texts.present or len(prompt) > service.hello.max_context:  # the engine rejects it
        return ""
    await asyncio.sleep(0)  # there may be many
    try:
        return await service.texts.text_of(prompt, owner=owner)
    except OverflowError as error:
        raise InvalidInput(f"prompt contains an invalid token id: {error}") from error


class CompletionReply(Reply):
    """Choices with text.

    Attributes:
        echo: text of the prompts to repeat before the answers; None for no echo.
    """

    kind = chunk_kind = "text_completion"
    echo: list[str] | None = None

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._offsets: dict[int, _Offsets] = {}  # by index of the choice

    def _content(
        self, index: int, answer: Answer, text: str, logprobs: list[Token] | None, *, first: bool, last: bool
    ) -> dict[str, Any]:
        known: list[Token | None] = list(logprobs or ())
        tokens = [entry.token_id for entry in known if entry is not None]
        prompt = self.echo[index // answer.params.n] if self.echo is not None and first else None
        if logprobs is None:
            return {"text": (prompt or "") + text, "logprobs": None}
        reader = self._offsets.setdefault(index, _Offsets(self.texts, answer.params))
        offsets: list[int] = []
        if prompt is not None:
            offsets = reader.of_prompt(answer.prompt_ids, prompt)
            known = [*map(functools.partial(_cut, most=answer.params.logprobs or 0), answer.prompt_logprobs), *known]
        offsets += reader.of_drawn(tokens)
        tokens = tokens if prompt is None else [*answer.prompt_ids, *tokens]
        return {"text": (prompt or "") + text, "logprobs": self._logprobs(tokens, known, offsets)}

    def _logprobs(self, tokens: list[int], known: list[Token | None], offsets: list[int]) -> dict[str, Any]:
        return {
            "tokens": [self.texts.name_of(token) for token in tokens],
            "token_logprobs": [None if entry is None else finite(entry.logprob) for entry in known],
            "top_logprobs": [None if entry is None else self._top(entry) for entry in known],
            "text_offset": offsets,
        }

    def _top(self, entry: Token) -> dict[str, float]:
        """Return the likeliest tokens by name, likeliest first, and the token itself.

        Of equal names the likeliest is kept.
        """
        top: dict[str, float] = {}
        for token, logprob in (*entry.top, (entry.token_id, entry.logprob)):
            top.setdefault(self.texts.name_of(token), finite(logprob))
        return top


def _cut(entry: Token | None, most: int) -> Token | None:
    """Return a prompt token's logprobs with ``most`` alternatives; prompt_logprobs may have asked for more."""
    return entry if entry is None or len(entry.top) <= most else structs.replace(entry, top=entry.top[:most])


class _Offsets:
    """Character offsets of one choice's tokens in its text.

    A token's offset is where its text starts. A token inside a character has the character's offset, and a hidden token
    the next token's. Text cut by a stop string still counts, because tokens are sent before it is known.
    """

    def __init__(self, texts: TokenizerPool, params: SamplingParams) -> None:
        self._texts = texts
        self._params = replace(params, stop=())
        self._detokenizer = Detokenizer(texts, self._params) if texts.present else None
        self._end = 0  # of the text so far

    def of_prompt(self, token_ids: Sequence[int], text: str) -> list[int]:
        """Return the offsets of a prompt's tokens. The text may lack some of the tokens, such as BOS."""
        params = replace(self._params, skip_special_tokens=False)
        detokenizer = Detokenizer(self._texts, params) if self._texts.present else None
        offsets = []
        for start, new in self._pieces(detokenizer, token_ids):
            is_shown = text.startswith(new, self._end)
            offsets.append(self._end + start * is_shown)
            self._end += len(new) * is_shown
        self._end = len(text)
        return offsets

    def of_drawn(self, token_ids: Sequence[int]) -> list[int]:
        """Return the offsets of the next drawn tokens."""
        offsets = []
        for start, new in self._pieces(self._detokenizer, token_ids):
            offsets.append(self._end + start)
            self._end += len(new)
        return offsets

    def _pieces(self, detokenizer: Detokenizer | None, token_ids: Sequence[int]) -> Iterator[tuple[int, str]]:
        """Yield the text that each token completes, and where in it the token's text starts."""
        for token in token_ids:
            new, name = "" if detokenizer is None else detokenizer.append([token]), self._texts.name_of(token)
            yield len(new) - len(name) if new.endswith(name) else 0, new
