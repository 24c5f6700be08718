"""POST /v1/completions: prompts as text or token ids, and OpenAI's older shape of logprobs."""

import asyncio
import functools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from starlette.responses import Response

from detcompile.errors import InvalidInput
from detcompile.runtime.requests.detokenizer import Detokenizer
from detcompile.runtime.requests.sampling_params import SamplingParams
from detcompile.serving.engines.answers import Answer
from detcompile.serving.engines.protocol import Token
from detcompile.serving.journal.job import Ask
from detcompile.serving.journal.jobs import Call
from detcompile.serving.openai.fields import require_served
from detcompile.serving.openai.logprobs import finite
from detcompile.serving.openai.parameters import completion_params, prompts_of
from detcompile.serving.openai.reply import Reply
from detcompile.serving.openai.schema import CompletionRequest
from detcompile.serving.responses import Events, Whole
from detcompile.serving.service import Service
from detcompile.serving.tokenizer_pool import TokenizerPool

__all__ = ["CompletionReply", "complete"]


async def complete(service: Service, asked: CompletionRequest, call: Call) -> Response:
    """Answer a request.

    Raises:
        HTTPError: it cannot be served. InvalidInput: nor can its text.
    """
    service.require_ready()
    service.require_model(asked.model)
    service.require_causal()
    require_served(asked)
    service.require_receipts(asked.receipt)
    written = prompts_of(asked.prompt, "prompt")
    echo = [await _echoed(service, prompt, call.owner) for prompt in written] if asked.echo else None
    job = await service.jobs.job(call, functools.partial(_ask, service, asked, written, call.owner))
    reply = CompletionReply(
        service,
        job,
        stream_options=asked.stream_options,
        with_ids=bool(asked.return_token_ids),
        with_receipt=bool(asked.receipt),
        hidden=asked.max_tokens == 0,
        last_event=call.last_event,
    )
    reply.echo = echo
    if asked.stream:
        return Events(job.answers, call.reservation, reply.headers, reply.events())
    return Whole(job.answers, call.reservation, reply.headers, reply.whole)


async def _ask(service: Service, asked: CompletionRequest, written: list[str | list[int]], owner: str) -> Ask:
    """What a request asks of the engines."""
    params = completion_params(asked, service.hello.default_params)
    service.limiter.require(owner, len(written) * params.n)  # before the prompts are tokenized
    special = asked.add_special_tokens is not False
    prompts = await service.texts.ids_of(written, special, param="prompt", owner=owner)
    for prompt in prompts:
        service.texts.require_answer(prompt, "prompt")
    return Ask(prompts, params, asked.priority or 0, "cmpl-", cache_salt=asked.cache_salt or "")


async def _echoed(service: Service, prompt: str | list[int], owner: str) -> str:
    if isinstance(prompt, str):
        return prompt
    if not service.texts.present or len(prompt) > service.hello.max_context:  # which the engine refuses
        return ""
    await asyncio.sleep(0)  # there may be many
    try:
        return await service.texts.text_of(prompt, owner=owner)
    except OverflowError as error:
        raise InvalidInput(f"prompt holds a token that is none: {error}") from error


class CompletionReply(Reply):
    """Choices with text.

    Attributes:
        echo: text of the prompts, where it is told before that of their answers.
    """

    kind = chunk_kind = "text_completion"
    echo: list[str] | None = None

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._offsets: dict[int, _Offsets] = {}  # by the index of the choice

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
            known = [*answer.prompt_logprobs, *known]
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
        """The likeliest tokens by name, likeliest first, and the token itself; of equal names the likeliest stays."""
        found: dict[str, float] = {}
        for token, logprob in (*entry.top, (entry.token_id, entry.logprob)):
            found.setdefault(self.texts.name_of(token), finite(logprob))
        return found


class _Offsets:
    """Where the tokens of one choice begin in its text, in letters.

    A token that is text of its own begins where that text stands. A part of a character begins where the character
    does, and a token that is not shown where the next one does. What a stop string cuts off counts as if it were there:
    tokens are sent before it is known whether one does.
    """

    def __init__(self, texts: TokenizerPool, params: SamplingParams) -> None:
        self._texts = texts
        self._params = replace(params, stop=())
        self._detokenizer = Detokenizer(texts, self._params) if texts.present else None
        self._end = 0  # of the text of the tokens that were read

    def of_prompt(self, token_ids: Sequence[int], text: str) -> list[int]:
        """Return the offsets of a prompt's tokens. Its text may lack that of some, as of a BOS token."""
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
        """Return the offsets of the tokens that were drawn next."""
        offsets = []
        for start, new in self._pieces(self._detokenizer, token_ids):
            offsets.append(self._end + start)
            self._end += len(new)
        return offsets

    def _pieces(self, detokenizer: Detokenizer | None, token_ids: Sequence[int]) -> Iterator[tuple[int, str]]:
        """Yield the text that each token completes, and where in it the token itself begins."""
        for token in token_ids:
            new, name = "" if detokenizer is None else detokenizer.append([token]), self._texts.name_of(token)
            yield len(new) - len(name) if new.endswith(name) else 0, new
