"""Receipt: all that an answer's bits depend on, and the answer. A strict schema: what it does not know it refuses."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from detcompile.errors import InvalidInput
from detcompile.runtime.grammars.compiler import masks_version
from detcompile.runtime.requests.sampling_params import SamplingParams

__all__ = [
    "Digest",
    "Level",
    "LogPlace",
    "MAX_STOPS",
    "Prompt",
    "Receipt",
    "Sample",
    "Served",
    "WrittenGrammar",
    "commitment",
    "decode_receipt",
    "encode_receipt",
    "params_of",
    "recorded",
    "recorded_sample",
    "written_grammar",
    "written_params",
]

Digest = Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]  # sha256 in hex
Level = Literal["hashes", "tokens"]
TokenId = Annotated[int, Meta(ge=0, lt=1 << 31)]
Count = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]  # integers of 64 bits: a verdict carries them in MessagePack
Seed = Annotated[str, Meta(pattern="^(0|[1-9][0-9]{0,19})$")]  # of 64 bits, as text: JavaScript rounds numbers
DEFAULTS = {own.name: getattr(SamplingParams(), own.name) for own in fields(SamplingParams)}
MAX_STOPS = 64  # of a request: each is looked for at every token
APART = ("seed", "grammar")  # parameters that a receipt has fields of their own for


class _Strict(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Refuses what it does not know: a verifier that ignored a field would vouch for what it says."""


class Served(_Strict):
    """What made token ids of a request and text of tokens.

    Attributes:
        detcompile: version of the server.
        tokenizer: sha256 of the tokenizer as JSON; None for a model without one.
        chat_template: sha256 of the template that made the prompt; None where none did.
    """

    detcompile: str
    tokenizer: Digest | None
    chat_template: Digest | None


class WrittenGrammar(_Strict):
    """What every sample had to match.

    Attributes:
        source: the grammar; at level "hashes" a commitment to it.
        hashed: whether it is one.
        llguidance: versions of the library that made the masks, and of what was given to it.
    """

    kind: str
    source: str
    hashed: bool
    llguidance: str | None


class Sample(_Strict):
    """One sample of a prompt.

    Attributes:
        token_ids: the tokens drawn; at level "hashes" a commitment to them.
        text: commitment to the text that the client was given; None for a model without a tokenizer.
        logprobs: commitment to ``[token, logprob, [[token, logprob] of the likeliest]]`` of each token drawn; None
            where none were asked for.
    """

    index: Count
    token_ids: list[TokenId] | Digest
    finish_reason: Literal["stop", "length"]
    stop_reason: TokenId | str | None
    text: Digest | None
    logprobs: Digest | None


class Prompt(_Strict):
    """One prompt of a request, and the n samples drawn for it.

    Attributes:
        token_ids: the prompt; at level "hashes" a commitment to it.
        logprobs: commitment to the logprobs of the prompt's tokens; None where none were asked for.
    """

    token_ids: list[TokenId] | Digest
    logprobs: Digest | None
    samples: list[Sample]


class LogPlace(_Strict):
    """Where a receipt stands in its server's log: the line's number, from 0, and sha256 of the line before it."""

    index: Count
    previous: Digest | None


class Receipt(_Strict, kw_only=True):
    """The payload of an envelope.

    Attributes:
        version: the schema's.
        id: the answer's.
        created: seconds since 1970, of the answer.
        model: what clients call it.
        level: whether prompts and answers stand in it, or commitments to them.
        params: SamplingParams of every prompt that are not their default, without seed.
        grammar: what every sample had to match; None for no grammar.
        log: None without a log.
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


def commitment(value: Any, salt: bytes = b"") -> str:
    """sha256, in hex, of a salt and a value in MessagePack. Without the salt nobody can try out values."""
    return hashlib.sha256(salt + msgspec.msgpack.encode(value)).hexdigest()


def recorded(token_ids: Sequence[int], salt: bytes | None) -> list[int] | str:
    """Token ids as a receipt has them: a commitment where there is a salt, else themselves."""
    return list(token_ids) if salt is None else commitment(list(token_ids), salt)


def recorded_sample(
    index: int,
    token_ids: Sequence[int],
    reasons: tuple[str | None, int | str | None],
    text: str | None,
    logprobs: Sequence[Any] | None,
    salt: bytes | None,
) -> Sample:
    """A sample as a receipt has it.

    Args:
        reasons: finish_reason and stop_reason.
        text: the text shown; None without a tokenizer.
        logprobs: one entry a token; None where none were asked for.
        salt: hides what it is of; None at level "tokens".
    """
    own = salt or b""
    return Sample(
        index=index,
        token_ids=recorded(token_ids, salt),
        finish_reason=reasons[0],  # type: ignore[arg-type]
        stop_reason=reasons[1],
        text=None if text is None else commitment(text, own),
        logprobs=None if logprobs is None else commitment(logprobs, own),
    )


def written_params(params: SamplingParams) -> dict[str, Any]:
    """Parameters as a receipt has them."""
    own = {name: getattr(params, name) for name in DEFAULTS if name not in APART}
    return {name: value for name, value in own.items() if value != DEFAULTS[name]}


def written_grammar(params: SamplingParams, salt: bytes | None) -> WrittenGrammar | None:
    """The grammar as a receipt has it: a commitment where there is a salt, else itself."""
    own = params.grammar
    if own is None:
        return None
    source = own.source if salt is None else commitment(own.source, salt)
    return WrittenGrammar(kind=own.kind, source=source, hashed=salt is not None, llguidance=masks_version())


def params_of(receipt: Receipt, grammar: str | None = None) -> SamplingParams:
    """The parameters of a receipt's prompts.

    Args:
        grammar: the grammar's source, where the receipt has a commitment to it, which is checked before.

    Raises:
        InvalidInput: one that there is not, or out of range; a grammar of which there are only hashes.
    """
    unknown = sorted(receipt.params.keys() - (DEFAULTS.keys() - set(APART)))
    if unknown:
        raise InvalidInput(f"the receipt has the parameter {unknown[0][:40]!r}, which this version does not know")
    given: Mapping[str, Any] = receipt.params
    own = receipt.grammar
    if own is not None and own.hashed and grammar is None:
        raise InvalidInput("the receipt holds a hash of its grammar: give its source in the opening")
    source = None if own is None else {"kind": own.kind, "source": grammar if own.hashed else own.source}
    return SamplingParams(**given, seed=int(receipt.seed), grammar=source)  # type: ignore[arg-type]


def encode_receipt(receipt: Receipt) -> bytes:
    """A receipt as JSON; what is signed are these bytes."""
    return msgspec.json.encode(receipt)


def decode_receipt(payload: bytes) -> Receipt:
    """The receipt in a payload.

    Raises:
        InvalidInput: no JSON, or none of this schema.
    """
    try:
        return msgspec.json.decode(payload, type=Receipt)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:  # a ValidationError among them
        raise InvalidInput(f"this is no receipt of a version that is known here: {error}") from error
