"""POST /generate: SGLang's route for texts or token ids, with token ids and log-probabilities in ``meta_info``."""

import functools
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta
from starlette.responses import Response

from detcompile.serving.engines.answers import ABORT, Answer, AnswerSample
from detcompile.serving.engines.protocol import Token
from detcompile.serving.http_errors import HTTPError
from detcompile.serving.journal.job import Ask, Job
from detcompile.serving.journal.jobs import Call
from detcompile.serving.openai.completions import ask_completion
from detcompile.serving.openai.fields import SGLangFields, SGLangSamplingFields, require_served
from detcompile.serving.openai.parameters import prompts_of
from detcompile.serving.openai.reply import as_int64, finite, headers_of, num_logprobs, offload
from detcompile.serving.openai.schema import CacheSalt, CompletionRequest, NumLogprobs, RequestId, TokenId
from detcompile.serving.responses import Whole
from detcompile.serving.service import Service
from detcompile.serving.tokenizer_pool import SampleText

MAX_NEW_TOKENS = 128  # SGLang's default
Entry = tuple[float | None, int, str | None]  # logprob, token id, and its text if requested


class SGLangSampling(SGLangSamplingFields, kw_only=True):
    """SGLang's sampling parameters; omitted fields have the model's defaults."""

    max_new_tokens: Annotated[int, Meta(ge=0)] | None = MAX_NEW_TOKENS
    min_new_tokens: int | None = None
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[TokenId] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    sampling_seed: int | None = None
    logit_bias: dict[str, float] | None = None
    json_schema: dict[str, Any] | str | None = None
    regex: str | None = None
    ebnf: str | None = None


class SGLangRequest(SGLangFields, kw_only=True):
    """Body of POST /generate."""

    text: str | list[str] | None = None
    input_ids: list[TokenId | list[TokenId]] | None = None
    sampling_params: SGLangSampling | None = None
    rid: RequestId | None = None
    return_logprob: bool | None = None
    logprob_start_len: Annotated[int, Meta(ge=-1)] | None = None
    top_logprobs_num: NumLogprobs | None = None
    return_text_in_logprobs: bool | None = None
    return_sampling_mask: bool | None = None
    sampling_logprobs_mode: Literal["selected", "support"] | None = None
    extra_key: CacheSalt | None = None
    cache_salt: CacheSalt | None = None
    lora_path: str | None = None  # the name of a loaded adapter


SAME = (
    "n", "temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty",
    "stop", "stop_token_ids", "ignore_eos", "skip_special_tokens", "logit_bias", "json_schema", "regex", "ebnf",
)  # fmt: skip


async def sglang_generate(service: Service, request: SGLangRequest, call: Call) -> Response:
    """Answer a request.

    Raises:
        HTTPError: the request cannot be served.
        InvalidInput: the tokenizer cannot read the text.
    """
    service.require_ready()
    service.require_causal()
    require_served(request)
    sampling = request.sampling_params or SGLangSampling()
    require_served(sampling, inside="sampling_params.")
    if (request.text is None) == (request.input_ids is None):
        raise HTTPError(400, "give either text or input_ids", param="input_ids")
    prompt, param = (request.text, "text") if request.input_ids is None else (request.input_ids, "input_ids")
    assert prompt is not None
    prompts = prompts_of(prompt, param)
    wants_logprobs = bool(request.return_logprob)
    start = -1 if request.logprob_start_len is None or not wants_logprobs else request.logprob_start_len
    num_top = request.top_logprobs_num or 0
    completion = CompletionRequest(
        prompt=[],
        model=request.lora_path,
        max_tokens=sampling.max_new_tokens,
        min_tokens=sampling.min_new_tokens,
        seed=sampling.sampling_seed,
        logprobs=num_top if wants_logprobs else 0 if request.return_sampling_mask else None,
        prompt_logprobs=num_top if start >= 0 else None,
        return_sampling_mask=request.return_sampling_mask,
        cache_salt=request.cache_salt or request.extra_key,
        **{name: getattr(sampling, name) for name in SAME},
    )

    async def ask() -> Ask:
        if request.lora_path is not None and request.lora_path not in service.adapters:
            raise HTTPError(400, f"unknown adapter {request.lora_path[:200]!r}", param="lora_path")
        return await ask_completion(service, completion, prompts, call.owner, prefix="sglang-", param=param)

    job = await service.jobs.job(call, ask)
    headers = headers_of(job.name, job.ask.params.seed, job.salt)

    async def whole() -> Any:
        issued = await service.issue(job)
        if issued is not None:
            headers["X-Detcompile-Receipt"] = issued.digest
        results: list[msgspec.Raw] = []
        for answer in job.answers:
            for sample in answer.samples:
                text, read = await SampleText(service.texts, answer.params, sample).rest()
                result = functools.partial(_result, service, request, job, answer, sample, text)
                results.append(await offload(num_logprobs(answer, read), result))
        is_single = isinstance(prompt, str) or isinstance(prompt[0], int)
        return results[0] if is_single and job.ask.params.n == 1 else results

    return Whole(job.answers, call.reservation, headers, whole)


def _result(
    service: Service, request: SGLangRequest, job: Job, answer: Answer, sample: AnswerSample, text: str
) -> msgspec.Raw:
    """Return one sample in SGLang's form, as JSON."""
    hides = request.sampling_params is not None and request.sampling_params.max_new_tokens == 0
    tokens = [] if hides else list(sample.token_ids)
    logprobs = [] if hides else sample.logprobs or []
    reason: dict[str, Any] = {"type": "length", "length": len(tokens)}
    if sample.finish_reason == "stop" and not hides:
        reason = {"type": "stop", "matched": tokens[-1] if sample.stop_reason is None else sample.stop_reason}
    if sample.finish_reason == ABORT:
        reason = {"type": ABORT, "message": "aborted"}
    model = job.drawn_by
    information: dict[str, Any] = {
        "id": request.rid or job.name,
        "finish_reason": reason,
        "prompt_tokens": len(answer.prompt_ids),
        "completion_tokens": len(tokens),
        "cached_tokens": answer.num_cached_tokens,
        "output_ids": tokens,
        "system_fingerprint": model.fingerprint,
        **({} if model.weight_version is None else {"weight_version": model.weight_version}),
        "seed": as_int64(job.ask.params.seed or 0),
    }
    if request.return_logprob:
        information |= _logprobs(service, request, answer, logprobs)
    if request.return_sampling_mask:
        drawn = [entry.sampling for entry in logprobs if entry.sampling is not None]
        in_support = request.sampling_logprobs_mode == "support"
        information["output_token_sampling_mask"] = [[token for token, _ in top] for _, top in drawn]
        information["output_token_sampling_logprobs"] = [
            [value for _, value in top] if in_support else logprob for logprob, top in drawn
        ]
    result = {"text": "" if hides else text, "output_ids": tokens, "meta_info": information}
    return msgspec.Raw(msgspec.json.encode(result))


def _logprobs(service: Service, request: SGLangRequest, answer: Answer, drawn: list[Token]) -> dict[str, Any]:
    """Return log-probabilities of the tokens drawn, and of the prompt's from ``logprob_start_len`` on.

    The prompt's first token has none, as in SGLang.
    """

    def entry(logprob: float | None, token: int) -> Entry:
        text = service.texts.name_of(token) if request.return_text_in_logprobs and service.texts.present else None
        return (None if logprob is None else finite(logprob), token, text)

    def entries(known: list[Token]) -> list[Entry]:
        return [entry(token.logprob, token.token_id) for token in known]

    def tops(known: list[Token]) -> list[list[Entry]]:
        return [[entry(logprob, token) for token, logprob in one.top] for one in known]

    fields: dict[str, Any] = {"output_token_logprobs": entries(drawn)}
    start = -1 if request.logprob_start_len is None else request.logprob_start_len
    rest = [token for token in answer.prompt_logprobs[start + 1 :] if token is not None] if start >= 0 else []
    first = [entry(None, token) for token in answer.prompt_ids[start : start + 1]] if start >= 0 else []
    fields["input_token_logprobs"] = [*first, *entries(rest)]
    if request.top_logprobs_num:
        fields["output_top_logprobs"] = tops(drawn)
        fields["input_top_logprobs"] = [*(None for _ in first), *tops(rest)]
    return fields
