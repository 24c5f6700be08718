"""Issues the receipts of a server's answers, and keeps the most recent ones."""

import secrets
from collections.abc import Sequence
from typing import Literal, NamedTuple

import msgspec
from msgspec import UNSET

from detcompile.errors import InvalidInput
from detcompile.serving.engines.answers import Answer
from detcompile.serving.engines.protocol import Hello, Token
from detcompile.serving.owned_cache import OwnedCache
from detcompile.serving.plain_tokenizer import tokenizer_digest
from detcompile.serving.receipts.envelope import Envelope, payload_digest, seal
from detcompile.serving.receipts.keys import SigningKey
from detcompile.serving.receipts.log import ReceiptLog
from detcompile.serving.receipts.receipt import (
    DrawnBy,
    PlainLogprobs,
    Prompt,
    Receipt,
    Served,
    encode_receipt,
    recorded,
    recorded_logprobs,
    recorded_sample,
    written_grammar,
    written_params,
)
from detcompile.serving.tokenizer_pool import SampleText, TokenizerPool

ReceiptLevel = Literal["off", "hashes", "tokens"]
KEPT_BYTES = 64 << 20  # of receipts in memory
SALT_BYTES = 16


class Issued(NamedTuple):
    """A receipt, and the sha256 of its payload in hex."""

    envelope: Envelope
    digest: str


class Issuer:
    """Issues receipts.

    Args:
        level: "tokens" includes prompts and answers, "hashes" salted hashes of them, "off" issues none.
        key: signing key.
        log: log for all receipts.
        version: the server's version, recorded in receipts.

    Raises:
        InvalidInput: a key or a log with level "off".
    """

    def __init__(
        self,
        level: ReceiptLevel = "tokens",
        key: SigningKey | None = None,
        log: ReceiptLog | None = None,
        version: str = "unknown",
    ) -> None:
        if level == "off" and (key is not None or log is not None):
            raise InvalidInput("--receipts off issues no receipts to sign or log: omit --sign and --receipt-log")
        self.level = level
        self.key = key
        self._log = log
        self._version = version
        self._kept: OwnedCache[bytes] = OwnedCache(KEPT_BYTES)  # by owner and answer id

    def salt(self) -> bytes | None:
        """Return a fresh salt; None at levels without hashes."""
        return secrets.token_bytes(SALT_BYTES) if self.level == "hashes" else None

    async def issue(
        self,
        name: tuple[str, int, str],
        answers: Sequence[Answer],
        hello: Hello,
        texts: TokenizerPool,
        *,
        template: str | None,
        salt: bytes | None,
        owner: str,
        version: str | None = None,
    ) -> Issued | None:
        """Issue the receipt of a request's finished answers; return None at level "off".

        Yields to the event loop between samples; the receipt is then built and logged without interruption.

        Args:
            name: the answer's id, its creation time, and the model's name.
            template: sha256 of the prompts' chat template.
            salt: result of ``salt`` for these answers.
            owner: sha256 in hex of the request's API key; empty if the server has none.
            version: name of the weights; None if they cannot change.

        Raises:
            StorageError: the log cannot be written.
        """
        if self.level == "off":
            return None
        params, newest = answers[0].params, (version, hello.fingerprint_parts.get("weights", ""))
        prompts = [await _prompt(answer, texts, salt, newest) for answer in answers]
        receipt = Receipt(
            id=name[0],
            created=name[1],
            model=name[2],
            level=self.level,
            fingerprint=hello.fingerprint,
            fingerprint_parts=hello.fingerprint_parts,
            served=Served(
                detcompile=self._version, tokenizer=tokenizer_digest(hello.tokenizer), chat_template=template
            ),
            params=written_params(params),
            seed=str(params.seed),
            grammar=written_grammar(params, salt),
            prompts=prompts,
            log=None if self._log is None else self._log.place,
            weight_version=UNSET if version is None else version,
        )
        envelope = seal(encode_receipt(receipt), self.key)
        if self._log is not None:
            self._log.append(envelope)
        data = msgspec.json.encode(envelope)
        self._kept.add(owner, receipt.id, data, len(data))
        return Issued(envelope, payload_digest(envelope))

    @property
    def num_bytes(self) -> int:
        """Return the bytes of the receipts in memory."""
        return self._kept.num_bytes

    def require_writable(self) -> None:
        """Raise StorageError if the log still cannot be written after a failure."""
        if self._log is not None:
            self._log.require_writable()

    def find(self, owner: str, name: str) -> bytes | None:
        """Return the JSON of an owner's receipt by the answer's id; None if it is not in memory."""
        return self._kept.find(owner, name)


async def _prompt(answer: Answer, texts: TokenizerPool, salt: bytes | None, newest: tuple[str | None, str]) -> Prompt:
    """Return a prompt in the receipt's form; ``newest`` is the version of the receipt's weights, and their digest."""
    of_prompt = [None if entry is None else _plain(entry) for entry in answer.prompt_logprobs]
    known = None if answer.params.prompt_logprobs is None else recorded_logprobs(of_prompt, salt)
    samples = []
    for index, sample in enumerate(answer.samples):
        text = (await SampleText(texts, answer.params, sample).rest())[0] if texts.present else None
        reasons = (sample.finish_reason, sample.stop_reason)
        logprobs = None if sample.logprobs is None else [_plain(entry) for entry in sample.logprobs]
        receipt_sample = recorded_sample(index, sample.token_ids, reasons, text, logprobs, salt)
        if any((span.weights.version, span.weights.digest) != newest for span in sample.spans):
            spans = [DrawnBy(start=s.start, version=s.weights.version, weights=s.weights.digest) for s in sample.spans]
            receipt_sample.drawn_by = spans
        samples.append(receipt_sample)
    return Prompt(token_ids=recorded(answer.prompt_ids, salt), logprobs=known, samples=samples)


def _plain(entry: Token) -> PlainLogprobs:
    return entry.token_id, entry.logprob, entry.top, entry.rank, entry.sampling
