"""Envelopes of DSSE (Dead Simple Signing Envelope, v1): payloads byte for byte as they were signed, and signatures."""

import base64
import binascii
import hashlib
from typing import Any

import msgspec

from detcompile.errors import InvalidInput
from detcompile.serving.receipts.keys import SigningKey, VerifyKey

__all__ = [
    "Envelope",
    "PAYLOAD_TYPE",
    "Signature",
    "payload_digest",
    "payload_of",
    "read_answer",
    "read_envelope",
    "seal",
    "unsealed",
]

PAYLOAD_TYPE = "application/vnd.detcompile.receipt+json"
WANTED = "give an envelope: `payloadType`, `payload` and `signatures`, or an answer that has one as `receipt`"


class Signature(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A signature in base64, and which key made it."""

    keyid: str
    sig: str


class Envelope(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A payload in base64, its type, and signatures of both; the names are DSSE's."""

    payloadType: str
    payload: str
    signatures: list[Signature]


def seal(payload: bytes, key: SigningKey | None) -> Envelope:
    """An envelope around a payload; without a key nobody signs it."""
    signatures = []
    if key is not None:
        signatures.append(Signature(keyid=key.key_id, sig=_base64(key.sign(_signed(PAYLOAD_TYPE, payload)))))
    return Envelope(payloadType=PAYLOAD_TYPE, payload=_base64(payload), signatures=signatures)


def payload_of(envelope: Envelope) -> bytes:
    """The payload.

    Raises:
        InvalidInput: one of another type, or no base64.
    """
    if envelope.payloadType != PAYLOAD_TYPE:
        raise InvalidInput(f"the envelope holds {envelope.payloadType[:80]!r}, not {PAYLOAD_TYPE}")
    return _bytes(envelope.payload, "payload")


def payload_digest(envelope: Envelope) -> str:
    """sha256, in hex, of the payload: the name of a receipt, whoever signed it."""
    return hashlib.sha256(payload_of(envelope)).hexdigest()


def unsealed(envelope: Envelope, key: VerifyKey) -> str | None:
    """None where this key signed the envelope as it is; otherwise what is wrong.

    Raises:
        InvalidInput: the payload cannot be read.
    """
    signed = _signed(envelope.payloadType, payload_of(envelope))
    if not envelope.signatures:
        return "nobody signed it"
    own = [one for one in envelope.signatures if one.keyid == key.key_id]
    if not own:
        return f"key {envelope.signatures[0].keyid[:16]}… signed it, not key {key.key_id[:16]}…"
    if any(key.verifies(_bytes(one.sig, "signature"), signed) for one in own):
        return None
    return f"it was changed after key {key.key_id[:16]}… signed it"


def read_envelope(data: bytes) -> Envelope:
    """An envelope from JSON, or of the answer that it came with.

    Raises:
        InvalidInput: neither.
    """
    return read_answer(data)[0]


def read_answer(data: bytes) -> tuple[Envelope, dict[str, Any]]:
    """Return an envelope from JSON, and the other fields of the answer that it came with, if it came with one.

    Raises:
        InvalidInput: neither an envelope nor an answer with one.
    """
    try:
        head: Any = msgspec.json.decode(data)
        if isinstance(head, dict) and "receipt" in head:
            receipt = msgspec.convert(head.pop("receipt"), Envelope)
            return receipt, head
        return msgspec.convert(head, Envelope), {}
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidInput(f"this is no receipt: {error}; {WANTED}") from error


def _signed(kind: str, payload: bytes) -> bytes:
    """DSSE's pre-authentication encoding: what a signature is of."""
    name = kind.encode()
    return b"DSSEv1 %d %s %d %s" % (len(name), name, len(payload), payload)


def _base64(data: bytes) -> str:
    return base64.standard_b64encode(data).decode()


def _bytes(text: str, what: str) -> bytes:
    try:
        return base64.b64decode(text.encode(), validate=True)
    except (binascii.Error, UnicodeEncodeError) as error:
        raise InvalidInput(f"the {what} of the envelope is no base64: {error}") from error
