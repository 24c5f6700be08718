"""Job: a request that is answered, under one name however often its client comes back for the answer."""

import asyncio
import secrets
import time
from dataclasses import dataclass, field

import msgspec

from detcompile.runtime.requests.sampling_params import SamplingParams
from detcompile.serving.engines.answers import Answer
from detcompile.serving.receipts.issuer import Issued

__all__ = ["Ask", "Job", "ServedModel"]


class ServedModel(msgspec.Struct, frozen=True):
    """The model that draws an answer, as replies name it.

    Attributes:
        name: what clients call it.
        fingerprint: the model's fingerprint.
        parts: the fingerprint's parts, and what text of tokens depends on: "tokenizer" and "special_tokens".
    """

    name: str
    fingerprint: str
    parts: dict[str, str]


@dataclass(frozen=True)
class Ask:
    """What a request asks of the engines.

    Args:
        prompts: token ids, one list for each answer.
        params: how to draw, with the seed.
        prefix: how the ids of its answers begin.
        template: sha256 of the chat template that made the prompts.
        before: JSON of the messages that a response goes on with; empty for other requests.
        family: name of the family as which calls of functions are read; None where there are none.
        cache_salt: requests of another salt share no cached prefix with it.
    """

    prompts: list[list[int]]
    params: SamplingParams
    priority: int
    prefix: str
    template: str | None = None
    before: bytes = b""
    family: str | None = None
    cache_salt: str = ""


@dataclass(eq=False)
class Job:
    """A request and its answers.

    Args:
        answers: one for each prompt.
        salt: salt of a receipt that holds hashes; None for another.
        model: the model that draws the answers, or drew them.
        kept: whether its client may come back for it.

    Attributes:
        name: the id that clients are told.
        created: when it was first asked for, in seconds since 1970.
        issued: the receipt, once there is one.
        issuing: held by who makes it, as it is made once.
        cancelled: whether its client has ended it, so that what was drawn by then is all of it.
        begun_before: whether it is drawn again, so that clients may have been sent more of it than there is by now.
        ended: when all of it had been drawn, in seconds since 1970; None before.
        restored: whether the answers and the receipt are those of a record. No receipt is made for it, then.
        owner: sha256 of the API key that it came with, in hex; empty where the server has none. Nobody else finds it.
    """

    ask: Ask
    answers: list[Answer]
    salt: bytes | None
    model: ServedModel
    kept: bool = False
    name: str = ""
    created: int = field(default_factory=lambda: int(time.time()))
    issued: Issued | None = None
    ended: int | None = None
    cancelled: bool = False
    owner: str = ""
    begun_before: bool = False
    restored: bool = False
    issuing: asyncio.Lock = field(default_factory=asyncio.Lock)

    def __post_init__(self) -> None:
        self.name = self.name or self.ask.prefix + secrets.token_hex(12)
        for answer in self.answers:
            answer.name = self.name

    def end(self) -> int:
        """Return when it ended, in seconds since 1970: now, unless that is known."""
        self.ended = int(time.time()) if self.ended is None else self.ended
        return self.ended
