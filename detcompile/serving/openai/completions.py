"""POST /v1/completions: prompts as text or token ids, and OpenAI's older shape of logprobs."""

import asyncio
import functools
from itertools import accumulate
from typing import Any

from starlette.responses import Response

from detcompile.errors import InvalidInput
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
        self._ends: dict[int, int] = {}  # letters of a choice's tokens so far, by its index

    def _content(
        self, index: int, answer: Answer, text: str, logprobs: list[Token] | None, *, first: bool, last: bool
    ) -> dict[str, Any]:
        known: list[Token | None] = list(logprobs or ())
        tokens = [entry.token_id for entry in known if entry is not None]
        if self.echo is not None and first:
            text = self.echo[index // answer.params.n] + text
            known, tokens = [*answer.prompt_logprobs, *known], [*answer.prompt_ids, *tokens]
        return {"text": text, "logprobs": None if logprobs is None else self._logprobs(index, tokens, known)}

    def _logprobs(self, index: int, tokens: list[int], known: list[Token | None]) -> dict[str, Any]:
        names = [self.texts.name_of(token) for token in tokens]
        *offsets, self._ends[index] = accumulate(map(len, names), initial=self._ends.get(index, 0))
        return {
            "tokens": names,
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
