"""Journal records: what is needed to draw a request's answer again, or to repeat it."""

from array import array
from collections.abc import Sequence
from typing import Any

import msgspec

from detcompile.digests import differing_parts
from detcompile.reasoning.formats import Thinking
from detcompile.runtime.requests.sampling_params import SamplingParams
from detcompile.serving.engines.answers import Answer, given_params
from detcompile.serving.engines.protocol import Token, WeightSpan
from detcompile.serving.journal.job import Ask, Job, ServedModel
from detcompile.serving.receipts.issuer import Issued

SHOWN_BY = ("max_context", "special_tokens", "tokenizer")  # model parts that affect replies made from recorded tokens


class Work(msgspec.Struct):
    """Everything that determines an answer's bits except the weights, and the fields that its reply needs."""

    prompts: list[list[int]]
    params: dict[str, Any]  # non-default SamplingParams, including the seed
    priority: int
    prefix: str
    template: str | None
    salt: bytes | None
    model: ServedModel
    before: bytes = b""
    family: str | None = None
    cache_salt: str = ""
    thinking: Thinking | None = None
    adapter: str = ""


class KeptSample(msgspec.Struct, array_like=True):
    """A finished sample."""

    token_ids: list[int]
    logprobs: list[Token] | None
    finish_reason: str | None
    stop_reason: int | str | None
    spans: list[WeightSpan] = []


class KeptAnswer(msgspec.Struct, array_like=True):
    """A finished answer."""

    samples: list[KeptSample]
    prompt_logprobs: list[Token | None]
    num_cached_tokens: int


class Outcome(msgspec.Struct):
    """The answers of a finished request, and its receipt if one was issued."""

    answers: list[KeptAnswer]
    receipt: Issued | None
    cancelled: bool = False
    ended: int | None = None  # seconds since 1970


class Record(msgspec.Struct):
    """A request.

    Attributes:
        name: id of its answer.
        owner: sha256 of its API key in hex; empty if the server has none.
        key: the Idempotency-Key.
        endpoint: the path.
        body: the request body.
        created: Unix seconds.
        outcome: None while it is unfinished.
    """

    name: str
    owner: str
    key: str
    endpoint: str
    body: bytes
    created: int
    work: Work
    outcome: Outcome | None = None


def record_of(job: Job, place: tuple[str, str], request: tuple[str, bytes]) -> Record:
    """Return the record of a new request.

    Args:
        place: owner and key.
        request: path and body.
    """
    ask = job.ask
    params = given_params(ask.params)
    fields = (ask.prompts, params, ask.priority, ask.prefix, ask.template, job.salt)
    work = Work(*fields, job.model, ask.before, ask.family, ask.cache_salt, ask.thinking, ask.adapter)
    return Record(job.name, *place, *request, job.created, work)


def ask_of(work: Work) -> Ask:
    """Return the work for the engines, to draw it again."""
    params = SamplingParams(**work.params)
    rest = (work.template, work.before, work.family, work.cache_salt, work.thinking, work.adapter)
    return Ask(work.prompts, params, work.priority, work.prefix, *rest)


def outcome_of(job: Job) -> Outcome:
    """Return the outcome of a finished job."""
    return Outcome([_kept(answer) for answer in job.answers], job.issued, job.cancelled, job.end())


def restore(answers: Sequence[Answer], outcome: Outcome) -> None:
    """Fill new answers with recorded ones."""
    for answer, kept in zip(answers, outcome.answers, strict=True):
        for sample, kept_sample in zip(answer.samples, kept.samples, strict=True):
            sample.token_ids, sample.logprobs = array("i", kept_sample.token_ids), kept_sample.logprobs
            sample.finish_reason, sample.stop_reason = kept_sample.finish_reason, kept_sample.stop_reason
            sample.spans = kept_sample.spans
        answer.prompt_logprobs = kept.prompt_logprobs
        answer.num_cached_tokens = kept.num_cached_tokens
        answer.finished = True


def differing(record: Record, model: ServedModel) -> list[str]:
    """Return the model parts that keep ``model`` from answering a record.

    An unfinished record needs the same model, of any sources with its bits version. A finished one is only shown, under
    its recorded name and fingerprint.
    """
    ours, theirs = model.parts, record.work.model.parts
    if record.outcome is None:
        return sorted(differing_parts(ours, theirs))
    return sorted(name for name in SHOWN_BY if ours.get(name) != theirs.get(name))


def _kept(answer: Answer) -> KeptAnswer:
    samples = [
        KeptSample(sample.token_ids.tolist(), sample.logprobs, sample.finish_reason, sample.stop_reason, sample.spans)
        for sample in answer.samples
    ]
    return KeptAnswer(samples, answer.prompt_logprobs, answer.num_cached_tokens)
