"""POST /inference/v1/generate: vLLM's route for token ids in and token ids out."""

import functools
import inspect
from typing import Annotated, Any

from msgspec import Meta
from starlette.responses import Response

from detcompile.serving.engines.answers import Answer
from detcompile.serving.engines.protocol import Token
from detcompile.serving.journal.jobs import Call
from detcompile.serving.openai.completions import ask_completion
from detcompile.serving.openai.fields import GenerateFields, GenerateSamplingFields, require_served
from detcompile.serving.openai.reply import Reply, finite
from detcompile.serving.openai.schema import (
    CacheSalt,
    CompletionRequest,
    NumLogprobs,
    Priority,
    RequestId,
    StreamOptions,
    StructuredOutputs,
    TokenId,
)
from detcompile.serving.responses import Events, Whole
from detcompile.serving.service import Service


class GenerateSampling(GenerateSamplingFields, kw_only=True):
    """vLLM's SamplingParams; omitted fields have vLLM's defaults, and max_tokens the rest of the context."""

    n: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[TokenId] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    min_tokens: int | None = None
    logprobs: NumLogprobs | None = None
    prompt_logprobs: NumLogprobs | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[TokenId] | None = None
    structured_outputs: StructuredOutputs | None = None


class GenerateRequest(GenerateFields, kw_only=True):
    """Body of POST /inference/v1/generate."""

    token_ids: Annotated[list[TokenId], Meta(min_length=1)]
    sampling_params: GenerateSampling
    request_id: RequestId | None = None
    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    cache_salt: CacheSalt | None = None
    priority: Priority | None = None
    return_token_ids: bool | None = None
    return_sampling_logprobs: bool | None = None
    return_sampling_mask: bool | None = None
    receipt: bool | None = None


SAMPLING = tuple(inspect.get_annotations(GenerateSampling))  # without the rejected fields of the base
SHARED = (  # fields of the request itself with the same name and meaning in a completion's
    "model", "stream", "stream_options", "cache_salt", "priority", "return_sampling_logprobs", "return_sampling_mask",
)  # fmt: skip


async def generate(service: Service, request: GenerateRequest, call: Call) -> Response:
    """Answer a request.

    Raises:
        HTTPError: the request cannot be served.
    """
    service.require_generation(request.receipt)
    require_served(request)
    require_served(request.sampling_params, inside="sampling_params.")
    sampling = request.sampling_params
    drawn = {name: getattr(sampling, name) for name in SAMPLING}
    rest = {name: getattr(request, name) for name in SHARED}
    completion = CompletionRequest(prompt=[*request.token_ids], **drawn, **rest)
    defaults = {name: most for name, most in service.hello.default_params.items() if name == "max_tokens"}
    ask = functools.partial(
        ask_completion,
        service,
        completion,
        [request.token_ids],
        call.owner,
        prefix="generate-tokens-",
        param="token_ids",
        defaults=defaults,
    )
    job = await service.jobs.job(call, ask)
    reply = GenerateReply(
        service,
        job,
        stream_options=request.stream_options,
        with_ids=True,
        with_prompt_logprobs=sampling.prompt_logprobs is not None,
        with_receipt=bool(request.receipt),
        last_event=call.last_event,
    )
    reply.name(request.request_id or job.name)
    reply.with_prompt_ids = bool(request.return_token_ids)
    if request.stream:
        return Events(job.answers, call.reservation, reply.headers, reply.events())
    return Whole(job.answers, call.reservation, reply.headers, reply.whole)


class GenerateReply(Reply):
    """Choices of token ids.

    Attributes:
        with_prompt_ids: include the prompt's token ids.
    """

    kind = chunk_kind = "inference.generate"
    one_prompt = True
    with_prompt_ids = False

    def name(self, request_id: str) -> None:
        """Set the id that the client gave the request."""
        self._more_head["request_id"] = request_id

    def _content(
        self, index: int, answer: Answer, text: str, logprobs: list[Token] | None, *, first: bool, last: bool
    ) -> dict[str, Any]:
        content = None if logprobs is None else [_entry(token) for token in logprobs]
        return {"logprobs": None if content is None else {"content": content}}

    def _of_prompt(self, answer: Answer) -> dict[str, Any]:
        fields = super()._of_prompt(answer)
        if not self.with_prompt_ids:
            del fields["prompt_token_ids"]
        return fields


def _entry(token: Token) -> dict[str, Any]:
    return _named(token.token_id, token.logprob) | {"top_logprobs": [_named(*other) for other in token.top]}


def _named(token_id: int, logprob: float) -> dict[str, Any]:
    """Return a token by its id, without text, as vLLM does on this route."""
    return {"token": f"token_id:{token_id}", "token_id": token_id, "logprob": finite(logprob), "bytes": None}
