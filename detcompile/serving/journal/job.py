"""Job: a request and its answers, under one name however often its client reconnects."""

import asyncio
import secrets
import time
from dataclasses import dataclass, field

import msgspec

from detcompile.reasoning.formats import Thinking
from detcompile.runtime.requests.sampling_params import SamplingParams
from detcompile.serving.engines.answers import Answer
from detcompile.serving.engines.protocol import Weights
from detcompile.serving.receipts.issuer import Issued


class ServedModel(msgspec.Struct, frozen=True):
    """The model of an answer, as replies name it.

    Attributes:
        name: the name for clients.
        fingerprint: the model's fingerprint.
        parts: the fingerprint's parts, plus "tokenizer" and "special_tokens", on which text depends.
        weight_version: the version of the weights; None if they cannot change.
    """

    name: str
    fingerprint: str
    parts: dict[str, str]
    weight_version: str | None = None

    def with_weights(self, weights: Weights) -> "ServedModel":
        """Return the same model with other weights."""
        parts = self.parts | {"weights": weights.digest}
        return ServedModel(self.name, weights.fingerprint, parts, weights.version)


@dataclass(frozen=True)
class Ask:
    """A request's work for the engines.

    Args:
        prompts: token ids, one list per answer.
        params: sampling parameters, including the seed.
        prefix: prefix of the answers' ids.
        template: sha256 of the prompts' chat template.
        before: JSON of the earlier messages of a response's conversation; empty for other requests.
        family: name of the tool-call format; None without tools.
        cache_salt: requests with different salts share no cached prefix.
        thinking: how the answers' reasoning is read; None for none.
        adapter: name of the adapter that draws them; empty for the plain model.
    """

    prompts: list[list[int]]
    params: SamplingParams
    priority: int
    prefix: str
    template: str | None = None
    before: bytes = b""
    family: str | None = None
    cache_salt: str = ""
    thinking: Thinking | None = None
    adapter: str = ""


@dataclass(eq=False)
class Job:
    """A request and its answers.

    Args:
        answers: one per prompt.
        salt: salt of a receipt that holds hashes; None otherwise.
        model: the model that admitted the request.
        kept: its client can reconnect.

    Attributes:
        name: the id for clients.
        created: first arrival, in Unix seconds.
        issued: the receipt, once issued.
        issuing: lock, so that the receipt is issued once.
        cancelled: canceled by its client; what was drawn by then is the whole answer.
        begun_before: drawn again after a restart, so clients may already have received more than exists now.
        ended: end of drawing, in Unix seconds; None before.
        restored: answers and receipt come from a record; no receipt is issued.
        owner: sha256 in hex of its API key, empty if the server has none. Only this owner can find it.
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

    @property
    def weights(self) -> Weights | None:
        """The newest weights that drew a token; None before any, and if the weights cannot change."""
        spans = [sample.spans[-1] for answer in self.answers for sample in answer.samples if sample.spans]
        return max(spans, key=lambda span: span.weights.number).weights if spans else None

    @property
    def drawn_by(self) -> ServedModel:
        """The model with these weights."""
        weights = self.weights
        if weights is None or self.ask.adapter:  # a model with adapters takes no new weights
            return self.model
        return self.model.with_weights(weights)

    def end(self) -> int:
        """Return the end in Unix seconds; set it to now if unknown."""
        self.ended = int(time.time()) if self.ended is None else self.ended
        return self.ended
