"""Records: what a journal holds of a request, so that its answer can be made again, or told again."""

from array import array
from collections.abc import Sequence
from typing import Any

import msgspec

from detcompile.runtime.requests.sampling_params import SamplingParams
from detcompile.serving.engines.answers import Answer, given_params
from detcompile.serving.engines.protocol import Token
from detcompile.serving.journal.job import Ask, Job, ServedModel
from detcompile.serving.receipts.issuer import Issued

__all__ = ["Outcome", "Record", "Work", "ask_of", "differing", "outcome_of", "record_of", "restore"]

SHOWN_BY = ("max_context", "special_tokens", "tokenizer")  # parts of a model that a reply to drawn tokens depends on


class Work(msgspec.Struct):
    """All that an answer's bits depend on but the weights, and what is served beside them."""

    prompts: list[list[int]]
    params: dict[str, Any]  # of SamplingParams, where they are not the defaults; the seed is among them
    priority: int
    prefix: str
    template: str | None
    salt: bytes | None
    model: ServedModel
    before: bytes = b""
    family: str | None = None
    cache_salt: str = ""


class KeptSample(msgspec.Struct, array_like=True):
    """A sample that has ended."""

    token_ids: list[int]
    logprobs: list[Token] | None
    finish_reason: str | None
    stop_reason: int | str | None


class KeptAnswer(msgspec.Struct, array_like=True):
    """An answer that has ended."""

    samples: list[KeptSample]
    prompt_logprobs: list[Token | None]
    num_cached_tokens: int


class Outcome(msgspec.Struct):
    """The answers of a request that has ended, and its receipt, where one was made."""

    answers: list[KeptAnswer]
    receipt: Issued | None
    cancelled: bool = False
    ended: int | None = None  # seconds since 1970


class Record(msgspec.Struct):
    """A request.

    Attributes:
        name: the id of its answer.
        owner: sha256 of the API key that it came with, in hex; empty where the server has none.
        key: the Idempotency-Key.
        endpoint: the path that it was sent to.
        body: what was sent.
        created: when, in seconds since 1970.
        outcome: None as long as it is open.
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
    """The record of a request that has begun.

    Args:
        place: owner and key.
        request: path and body.
    """
    ask = job.ask
    params = given_params(ask.params)
    asked = (ask.prompts, params, ask.priority, ask.prefix, ask.template, job.salt)
    work = Work(*asked, job.model, ask.before, ask.family, ask.cache_salt)
    return Record(job.name, *place, *request, job.created, work)


def ask_of(work: Work) -> Ask:
    """What is asked of the engines once more."""
    params = SamplingParams(**work.params)
    known = (work.template, work.before, work.family, work.cache_salt)
    return Ask(work.prompts, params, work.priority, work.prefix, *known)


def outcome_of(job: Job) -> Outcome:
    """What came of a request whose answers have ended."""
    return Outcome([_kept(answer) for answer in job.answers], job.issued, job.cancelled, job.end())


def restore(answers: Sequence[Answer], outcome: Outcome) -> None:
    """Give new answers what those of before came to."""
    for answer, kept in zip(answers, outcome.answers, strict=True):
        for sample, own in zip(answer.samples, kept.samples, strict=True):
            sample.token_ids, sample.logprobs = array("i", own.token_ids), own.logprobs
            sample.finish_reason, sample.stop_reason = own.finish_reason, own.stop_reason
        answer.prompt_logprobs = kept.prompt_logprobs
        answer.num_cached_tokens = kept.num_cached_tokens
        answer.finished = True


def differing(record: Record, model: ServedModel) -> list[str]:
    """Return the parts of a model that keep it from answering a record as its own model would.

    An open record needs the same model. One that has ended is only shown, under the name and fingerprint that it has.
    """
    ours, theirs = model.parts, record.work.model.parts
    needed = ours.keys() | theirs.keys() if record.outcome is None else SHOWN_BY
    return sorted(name for name in needed if ours.get(name) != theirs.get(name))


def _kept(answer: Answer) -> KeptAnswer:
    samples = [
        KeptSample(own.token_ids.tolist(), own.logprobs, own.finish_reason, own.stop_reason) for own in answer.samples
    ]
    return KeptAnswer(samples, answer.prompt_logprobs, answer.num_cached_tokens)
