"""Records: what a journal holds of a request, so that its answer can be made again, or told again."""

from array import array
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from detcompile.runtime.requests.sampling_params import SamplingParams
from detcompile.serving.engines.answers import Answer, given_params
from detcompile.serving.engines.protocol import Token
from detcompile.serving.journal.job import Ask, Job
from detcompile.serving.receipts.issuer import Issued

__all__ = ["Outcome", "Record", "Work", "ask_of", "differing", "outcome_of", "record_of", "restore"]


class Work(msgspec.Struct):
    """All that an answer's bits depend on but the model, and what its receipt says beside."""

    prompts: list[list[int]]
    params: dict[str, Any]  # of SamplingParams, where they are not the defaults; the seed is among them
    priority: int
    prefix: str
    template: str | None
    salt: bytes | None
    before: bytes = b""


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


class Record(msgspec.Struct):
    """A request.

    Attributes:
        name: the id of its answer.
        owner: sha256 of the API key that it came with, in hex; empty where the server has none.
        key: the Idempotency-Key.
        endpoint: the path that it was sent to.
        body: what was sent.
        created: when, in seconds since 1970.
        fingerprint: fingerprint of the model that answers it.
        outcome: None as long as it is open.
    """

    name: str
    owner: str
    key: str
    endpoint: str
    body: bytes
    created: int
    fingerprint: str
    work: Work
    outcome: Outcome | None = None


def record_of(job: Job, place: tuple[str, str], request: tuple[str, bytes], fingerprint: str) -> Record:
    """The record of a request that has begun.

    Args:
        place: owner and key.
        request: path and body.
    """
    ask = job.ask
    work = Work(ask.prompts, given_params(ask.params), ask.priority, ask.prefix, ask.template, job.salt, ask.before)
    return Record(job.name, *place, *request, job.created, fingerprint, work)


def ask_of(work: Work) -> Ask:
    """What is asked of the engines once more."""
    return Ask(work.prompts, SamplingParams(**work.params), work.priority, work.prefix, work.template, work.before)


def outcome_of(job: Job) -> Outcome:
    """What came of a request whose answers have ended."""
    return Outcome([_kept(answer) for answer in job.answers], job.issued, job.cancelled)


def restore(answers: Sequence[Answer], outcome: Outcome) -> None:
    """Give new answers what those of before came to."""
    for answer, kept in zip(answers, outcome.answers, strict=True):
        for sample, own in zip(answer.samples, kept.samples, strict=True):
            sample.token_ids, sample.logprobs = array("i", own.token_ids), own.logprobs
            sample.finish_reason, sample.stop_reason = own.finish_reason, own.stop_reason
        answer.prompt_logprobs = kept.prompt_logprobs
        answer.num_cached_tokens = kept.num_cached_tokens
        answer.finished = True


def differing(ours: Mapping[str, str], theirs: Mapping[str, str]) -> list[str]:
    """The parts in which two fingerprints differ."""
    return sorted(name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name))


def _kept(answer: Answer) -> KeptAnswer:
    samples = [
        KeptSample(own.token_ids.tolist(), own.logprobs, own.finish_reason, own.stop_reason) for own in answer.samples
    ]
    return KeptAnswer(samples, answer.prompt_logprobs, answer.num_cached_tokens)
