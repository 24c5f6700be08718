"""GET /v1/receipts/{id} and POST /v1/verify: this server's receipts, and verdicts on any receipt."""

import functools

import msgspec
from starlette.responses import Response

from detcompile.errors import InvalidInput
from detcompile.serving.engines.answers import Verification
from detcompile.serving.http_errors import HTTPError
from detcompile.serving.journal.jobs import Call
from detcompile.serving.plain_tokenizer import tokenizer_digest
from detcompile.serving.receipts.envelope import Envelope, payload_of, unsealed
from detcompile.serving.receipts.receipt import MAX_STOPS, Receipt, decode_receipt, params_of
from detcompile.serving.receipts.verdict import Verdict, differs, fingerprint_verdict
from detcompile.serving.responses import JSON, Whole
from detcompile.serving.service import Service


async def stored_receipt(service: Service, owner: str, name: str) -> Response:
    """Return the receipt of an answer by the answer's id, for the owner of the answer's API key.

    Raises:
        HTTPError: 404, or 503 if the journal cannot be read.
    """
    data = service.receipts.find(owner, name)
    if data is None:
        issued = await service.jobs.receipt(owner, name)
        if issued is None:
            message = "unknown receipt id: it never existed, or it is no longer stored"
            raise HTTPError(404, message, code="receipt_not_found")
        data = msgspec.json.encode(issued.envelope)
    return Response(data, media_type=JSON)


async def verify(service: Service, envelope: Envelope, call: Call) -> Response:
    """Return a verdict.

    The replay is queued and bounded like an answer with the receipt's tokens. Signatures are checked with this server's
    key, if it has one.

    Raises:
        HTTPError: over a limit, or no engine serves.
        InvalidInput: not a receipt, one of hashes (only its owner can open it), or one whose grammar is rejected.
    """
    service.require_ready()
    service.require_causal()
    payload = payload_of(envelope)
    receipt = decode_receipt(payload)
    key = service.receipts.key
    fault = None if key is None else unsealed(envelope, key.public)
    if fault is not None:
        return _json(differs("signatures", fault, signature="invalid"))
    parts, adapter = service.hello.fingerprint_parts, receipt.fingerprint_parts.get("adapter", "")
    if any(file.digest == adapter for file in service.adapters.values()):
        parts = parts | {"adapter": adapter}
    mismatch = fingerprint_verdict(receipt, parts, tokenizer_digest(service.hello.tokenizer))
    if mismatch is not None:
        return _json(mismatch)
    lengths, params = _lengths(receipt), params_of(receipt)
    if len(params.stop) > MAX_STOPS:
        raise InvalidInput(f"the receipt has more than {MAX_STOPS} stop strings, which no server accepts")
    verification = await service.verify(payload, lengths, params.grammar, call.owner, call.reservation)
    signature = "unchecked" if key is None else "valid"
    return Whole([verification], call.reservation, {}, functools.partial(_signed, verification, signature))


def _lengths(receipt: Receipt) -> list[int]:
    lengths = []
    for prompt in receipt.prompts:
        for sample in prompt.samples:
            if isinstance(prompt.token_ids, str) or isinstance(sample.token_ids, str):
                message = "the receipt holds hashes: replay it with its salt and prompts (detcompile replay --opening)"
                raise InvalidInput(message)
            lengths.append(len(prompt.token_ids) + len(sample.token_ids))
    if not lengths:
        raise InvalidInput("the receipt has no samples")
    return lengths


async def _signed(verification: Verification, signature: str) -> Verdict:
    verdict = verification.verdict
    assert verdict is not None
    verdict.signature = signature  # type: ignore[assignment]
    return verdict


def _json(verdict: Verdict) -> Response:
    return Response(msgspec.json.encode(verdict), media_type=JSON)
