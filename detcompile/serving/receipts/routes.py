"""GET /v1/receipts/{id} and POST /v1/verify: receipts that were made here, and verdicts on any."""

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

__all__ = ["found_receipt", "verify"]


async def found_receipt(service: Service, owner: str, name: str) -> Response:
    """The receipt of an answer, by the answer's id, for the owner of the API key that the answer was made for.

    Raises:
        HTTPError: 404, or 503 where the journal cannot be read.
    """
    found = service.receipts.find(owner, name)
    if found is None:
        issued = await service.jobs.receipt(owner, name)
        if issued is None:
            said = "there is no receipt of this id: none was made, or it is kept no longer"
            raise HTTPError(404, said, code="receipt_not_found")
        found = msgspec.json.encode(issued.envelope)
    return Response(found, media_type=JSON)


async def verify(service: Service, asked: Envelope, call: Call) -> Response:
    """A verdict, which waits and is bounded as an answer of the receipt's tokens is. Signatures are checked by the key
    of this server, where it has one.

    Raises:
        HTTPError: no room, or no engine. InvalidInput: no receipt, or one of hashes, which only its owner can open, or
            whose grammar is refused.
    """
    service.require_ready()
    service.require_causal()
    payload = payload_of(asked)
    receipt = decode_receipt(payload)
    key = service.receipts.key
    fault = None if key is None else unsealed(asked, key.public)
    if fault is not None:
        return _told(differs("signatures", fault, signature="invalid"))
    apart = fingerprint_verdict(receipt, service.hello.fingerprint_parts, tokenizer_digest(service.hello.tokenizer))
    if apart is not None:
        return _told(apart)
    lengths, params = _lengths(receipt), params_of(receipt)
    if len(params.stop) > MAX_STOPS:
        raise InvalidInput(f"the receipt has over {MAX_STOPS} stop strings, which no server takes")
    verification = await service.verify(payload, lengths, params.grammar, call.owner, call.reservation)
    signature = "unchecked" if key is None else "valid"
    return Whole([verification], call.reservation, {}, functools.partial(_signed, verification, signature))


def _lengths(receipt: Receipt) -> list[int]:
    lengths = []
    for prompt in receipt.prompts:
        for sample in prompt.samples:
            if isinstance(prompt.token_ids, str) or isinstance(sample.token_ids, str):
                said = "the receipt holds hashes: replay it with its salt and prompts (detcompile replay --opening)"
                raise InvalidInput(said)
            lengths.append(len(prompt.token_ids) + len(sample.token_ids))
    if not lengths:
        raise InvalidInput("the receipt holds no sample")
    return lengths


async def _signed(verification: Verification, signature: str) -> Verdict:
    verdict = verification.verdict
    assert verdict is not None
    verdict.signature = signature  # type: ignore[assignment]
    return verdict


def _told(verdict: Verdict) -> Response:
    return Response(msgspec.json.encode(verdict), media_type=JSON)
