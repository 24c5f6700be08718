"""DSSE envelopes (Dead Simple Signing Envelope, v1): a payload, byte for byte as signed, and its signatures."""

import base64
import binascii
import hashlib
from typing import Any

import msgspec

from detcompile.errors import InvalidInput
from detcompile.serving.receipts.keys import SigningKey, VerifyKey

PAYLOAD_TYPE = "application/vnd.detcompile.receipt+json"
WANTED = "give an envelope: `payloadType`, `payload` and `signatures`, or an answer that has one as `receipt`"


class Signature(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A signature in base64, and the id of its key."""

    keyid: str
    sig: str


class Envelope(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A payload in base64, its type, and signatures of both. Field names are DSSE's."""

    payloadType: str
    payload: str
    signatures: list[Signature]


def seal(payload: bytes, key: SigningKey | None) -> Envelope:
    """Return an envelope of a payload, signed if there is a key."""
    signatures = []
    if key is not None:
        signatures.append(Signature(keyid=key.key_id, sig=_base64(key.sign(_signed(PAYLOAD_TYPE, payload)))))
    return Envelope(payloadType=PAYLOAD_TYPE, payload=_base64(payload), signatures=signatures)


def payload_of(envelope: Envelope) -> bytes:
    """Return the payload.

    Raises:
        InvalidInput: another payload type or invalid base64.
    """
    if envelope.payloadType != PAYLOAD_TYPE:
        raise InvalidInput(f"the envelope holds {envelope.payloadType[:80]!r}, not {PAYLOAD_TYPE}")
    return _bytes(envelope.payload, "payload")


def payload_digest(envelope: Envelope) -> str:
    """Return the sha256 of the payload in hex, which identifies a receipt whoever signed it."""
    return hashlib.sha256(payload_of(envelope)).hexdigest()


def unsealed(envelope: Envelope, key: VerifyKey) -> str | None:
    """Return None if the key signed the envelope as it is, otherwise the problem.

    Raises:
        InvalidInput: the payload cannot be read.
    """
    signed = _signed(envelope.payloadType, payload_of(envelope))
    if not envelope.signatures:
        return "it is not signed"
    signatures = [each for each in envelope.signatures if each.keyid == key.key_id]
    if not signatures:
        return f"key {envelope.signatures[0].keyid[:16]}… signed it, not key {key.key_id[:16]}…"
    if any(key.verifies(_bytes(each.sig, "signature"), signed) for each in signatures):
        return None
    return f"it was changed after key {key.key_id[:16]}… signed it"


def read_envelope(data: bytes) -> Envelope:
    """Return the envelope in JSON, either alone or as the receipt of an answer.

    Raises:
        InvalidInput: the JSON contains no envelope.
    """
    return read_answer(data)[0]


def read_answer(data: bytes) -> tuple[Envelope, dict[str, Any]]:
    """Return the envelope in JSON, and the other fields of the answer that contains it, if any.

    Raises:
        InvalidInput: the JSON contains no envelope.
    """
    try:
        content: Any = msgspec.json.decode(data)
        if isinstance(content, dict) and "receipt" in content:
            receipt = msgspec.convert(content.pop("receipt"), Envelope)
            return receipt, content
        return msgspec.convert(content, Envelope), {}
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidInput(f"not a receipt: {error}; {WANTED}") from error


def _signed(kind: str, payload: bytes) -> bytes:
    """Return DSSE's pre-authentication encoding, the bytes that are signed."""
    name = kind.encode()
    return b"DSSEv1 %d %s %d %s" % (len(name), name, len(payload), payload)


def _base64(data: bytes) -> str:
    return base64.standard_b64encode(data).decode()


def _bytes(text: str, what: str) -> bytes:
    try:
        return base64.b64decode(text.encode(), validate=True)
    except (binascii.Error, UnicodeEncodeError) as error:
        raise InvalidInput(f"the {what} of the envelope is not valid base64: {error}") from error
