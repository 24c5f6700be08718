"""Receipts: everything that an answer's bits depend on, and the answer.

The schema is strict: unknown fields are rejected.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from detcompile.errors import InvalidInput
from detcompile.runtime.grammars.compiler import masks_version
from detcompile.runtime.requests.outputs import Logprobs
from detcompile.runtime.requests.sampling_params import SamplingParams

Digest = Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]  # sha256 in hex
Level = Literal["hashes", "tokens"]
TokenId = Annotated[int, Meta(ge=0, lt=1 << 31)]
Count = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]  # 64-bit: verdicts are sent as MessagePack
Seed = Annotated[str, Meta(pattern="^(0|[1-9][0-9]{0,19})$")]  # 64-bit, as text: JavaScript rounds large numbers
DEFAULTS = {field.name: getattr(SamplingParams(), field.name) for field in fields(SamplingParams)}
MAX_STOPS = 64  # stop strings of a request; each is searched for at every token
SEPARATE = ("seed", "grammar")  # parameters with separate fields in a receipt
Top = list[tuple[int, float]]  # the likeliest tokens and their logprobs
# A token, its logprob, the likeliest ones, its rank, and the same in the distribution that it was drawn from.
PlainLogprobs = tuple[int, float, Top, int, tuple[float, Top] | None]


class _Strict(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Rejects unknown fields: a verifier that ignored one would vouch for it."""


class Served(_Strict):
    """What turned the request into token ids, and tokens into text.

    Attributes:
        detcompile: the server's version.
        tokenizer: sha256 of the tokenizer as JSON; None for a model without one.
        chat_template: sha256 of the prompt's template; None if none was used.
    """

    detcompile: str
    tokenizer: Digest | None
    chat_template: Digest | None


class WrittenGrammar(_Strict):
    """The grammar of all samples.

    Attributes:
        source: the grammar, or at level "hashes" its commitment.
        hashed: ``source`` is a commitment.
        llguidance: versions of the mask library and of its input.
    """

    kind: str
    source: str
    hashed: bool
    llguidance: str | None


class DrawnBy(_Strict):
    """Weights that drew the tokens of a sample from ``start`` to the next entry.

    Attributes:
        version: name of the weights.
        weights: the fingerprint's part for them.
    """

    start: Count
    version: str
    weights: str


class Sample(_Strict):
    """One sample of a prompt.

    Attributes:
        token_ids: drawn tokens, or at level "hashes" their commitment.
        text: commitment to the client's text; None for a model without tokenizer.
        logprobs: commitment to ``[token, logprob, [[token, logprob] of the likeliest]]`` per drawn token, followed by
            ``[logprob, [[token, logprob]]]`` in the distribution it was drawn from if requested; None if not requested.
        drawn_by: the weights by position, if not all tokens were drawn by the receipt's ``weight_version``.
    """

    index: Count
    token_ids: list[TokenId] | Digest
    finish_reason: Literal["stop", "length"]
    stop_reason: TokenId | str | None
    text: Digest | None
    logprobs: Digest | None
    drawn_by: Annotated[list[DrawnBy], Meta(min_length=1)] | UnsetType = UNSET


class Prompt(_Strict):
    """One prompt of a request, and its n samples.

    Attributes:
        token_ids: the prompt, or at level "hashes" its commitment.
        logprobs: commitment to the logprobs of the prompt's tokens; None if not requested.
    """

    token_ids: list[TokenId] | Digest
    logprobs: Digest | None
    samples: list[Sample]


class LogPlace(_Strict):
    """A receipt's position in the log: index of the line, and sha256 of the previous line."""

    index: Count
    previous: Digest | None


class Receipt(_Strict, kw_only=True):
    """The payload of an envelope.

    Attributes:
        version: version of the schema.
        id: id of the answer.
        created: creation of the answer in Unix seconds.
        model: model name for clients.
        level: whether prompts and answers are included or only commitments to them.
        params: non-default SamplingParams of all prompts, without seed.
        grammar: grammar of all samples; None without one.
        log: None without a log.
        weight_version: name of the fingerprint's weights, the newest that drew a token; absent if they cannot change.
    """

    version: Literal[1] = 1
    id: str
    created: Count
    model: str
    level: Level
    fingerprint: Digest
    fingerprint_parts: dict[str, str]
    served: Served
    params: dict[str, Any]
    seed: Seed
    grammar: WrittenGrammar | None = None
    prompts: Annotated[list[Prompt], Meta(min_length=1)]
    log: LogPlace | None = None
    weight_version: str | UnsetType = UNSET


def commitment(value: Any, salt: bytes = b"") -> str:
    """Return the sha256 in hex of a salt and a value in MessagePack. Without the salt, values cannot be guessed."""
    return hashlib.sha256(salt + msgspec.msgpack.encode(value)).hexdigest()


def plain_logprobs(entry: Logprobs) -> PlainLogprobs:
    """Return an engine's logprobs as plain values."""
    sampling = None if entry.sampling is None else (entry.sampling.logprob, list(entry.sampling.top.items()))
    return entry.token_id, entry.logprob, list(entry.top.items()), entry.rank, sampling


def recorded_logprobs(entries: Sequence[PlainLogprobs | None], salt: bytes | None) -> str:
    """Return the commitment to logprobs, without ranks."""
    plain = [entry and (*entry[:3], *(() if entry[4] is None else (entry[4],))) for entry in entries]
    return commitment(plain, salt or b"")


def recorded(token_ids: Sequence[int], salt: bytes | None) -> list[int] | str:
    """Return token ids in the receipt's form: a commitment if there is a salt."""
    return list(token_ids) if salt is None else commitment(list(token_ids), salt)


def recorded_sample(
    index: int,
    token_ids: Sequence[int],
    reasons: tuple[str | None, int | str | None],
    text: str | None,
    logprobs: Sequence[PlainLogprobs] | None,
    salt: bytes | None,
) -> Sample:
    """Return a sample in the receipt's form.

    Args:
        reasons: finish_reason and stop_reason.
        text: the text shown; None without a tokenizer.
        logprobs: one entry per token; None if not requested.
        salt: salt of commitments; None at level "tokens".
    """
    return Sample(
        index=index,
        token_ids=recorded(token_ids, salt),
        finish_reason=reasons[0],  # type: ignore[arg-type]
        stop_reason=reasons[1],
        text=None if text is None else commitment(text, salt or b""),
        logprobs=None if logprobs is None else recorded_logprobs(logprobs, salt),
    )


def written_params(params: SamplingParams) -> dict[str, Any]:
    """Return parameters in the receipt's form."""
    values = {name: getattr(params, name) for name in DEFAULTS if name not in SEPARATE}
    return {name: value for name, value in values.items() if value != DEFAULTS[name]}


def written_grammar(params: SamplingParams, salt: bytes | None) -> WrittenGrammar | None:
    """Return the grammar in the receipt's form: a commitment if there is a salt."""
    grammar = params.grammar
    if grammar is None:
        return None
    source = grammar.source if salt is None else commitment(grammar.source, salt)
    return WrittenGrammar(kind=grammar.kind, source=source, hashed=salt is not None, llguidance=masks_version())


def params_of(receipt: Receipt, grammar: str | None = None) -> SamplingParams:
    """Return the sampling parameters of a receipt.

    Args:
        grammar: the grammar's source, already checked, if the receipt has a commitment to it.

    Raises:
        InvalidInput: an unknown parameter, one out of range, or a grammar known only by its hash.
    """
    unknown = sorted(receipt.params.keys() - (DEFAULTS.keys() - set(SEPARATE)))
    if unknown:
        raise InvalidInput(f"the receipt has the parameter {unknown[0][:40]!r}, which this version does not know")
    params: Mapping[str, Any] = receipt.params
    written = receipt.grammar
    if written is not None and written.hashed and grammar is None:
        raise InvalidInput("the receipt holds a hash of its grammar: give its source in the opening")
    opened = None
    if written is not None:
        opened = {"kind": written.kind, "source": grammar if written.hashed else written.source}
    return SamplingParams(**params, seed=int(receipt.seed), grammar=opened)  # type: ignore[arg-type]


def encode_receipt(receipt: Receipt) -> bytes:
    """Return a receipt as JSON, the bytes that are signed."""
    return msgspec.json.encode(receipt)


def decode_receipt(payload: bytes) -> Receipt:
    """Decode a payload.

    Raises:
        InvalidInput: not JSON or not this schema.
    """
    try:
        return msgspec.json.decode(payload, type=Receipt)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:  # includes ValidationError
        raise InvalidInput(f"not a receipt of a known version: {error}") from error
