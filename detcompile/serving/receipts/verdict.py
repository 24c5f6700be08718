"""Verdict: what came of checking a receipt, and the first thing that does not hold, by its name."""

from collections.abc import Iterable, Mapping
from typing import Any, Literal

import msgspec

from detcompile.digests import fingerprint
from detcompile.runtime.grammars.compiler import masks_version
from detcompile.serving.receipts.receipt import Receipt

__all__ = ["Verdict", "differs", "fingerprint_verdict"]


class Verdict(msgspec.Struct, kw_only=True):
    """What came of it.

    Attributes:
        outcome: "equal": every token, reason, text and logprob came out again; "differs": something of it did not;
            "incomparable": this model, machine or tokenizer is not the one that the receipt is of.
        field: what does not hold, by its name in the receipt: the first thing that was found.
        message: the same as a sentence.
        prompt: index of the prompt, and below it of the sample, and the position in its answer, where it is about one.
        expected: what the receipt has there. found: what is there.
        parts: each part of the fingerprint that differs, with the receipt's value and the one here, where the outcome
            is "incomparable".
        num_tokens: drawn tokens that were compared and equal.
        uncovered: fields of a whole answer that its receipt says nothing of, where one was compared.
        signature: "valid", "invalid" with what is wrong in ``message``, or "unchecked" without a key to check by.
    """

    outcome: Literal["equal", "differs", "incomparable"]
    field: str | None = None
    message: str = ""
    prompt: int | None = None
    sample: int | None = None
    position: int | None = None
    expected: Any = None
    found: Any = None
    parts: list[tuple[str, str | None, str | None]] = []
    num_tokens: int = 0
    uncovered: list[str] = []
    signature: Literal["valid", "invalid", "unchecked"] = "unchecked"

    @property
    def exit_code(self) -> int:
        """What `detcompile replay` exits with: 0 equal, 1 differs, 2 incomparable."""
        return ("equal", "differs", "incomparable").index(self.outcome)


def differs(field: str, message: str, **where: Any) -> Verdict:
    """The verdict on what does not hold."""
    return Verdict(outcome="differs", field=field, message=message, **where)


def fingerprint_verdict(receipt: Receipt, parts: Mapping[str, str], tokenizer: str | None) -> Verdict | None:
    """What keeps a receipt from being compared here; None where nothing does.

    Args:
        parts: fingerprint_parts of the model here.
        tokenizer: sha256 of its tokenizer.
    """
    if fingerprint(receipt.fingerprint_parts) != receipt.fingerprint:
        said = "its fingerprint_parts do not make the fingerprint that it says it has"
        return differs("fingerprint", said, expected=receipt.fingerprint, found=fingerprint(receipt.fingerprint_parts))
    own: dict[str, str | None] = {**parts, "tokenizer": tokenizer}
    theirs: dict[str, str | None] = {**receipt.fingerprint_parts, "tokenizer": receipt.served.tokenizer}
    if receipt.grammar is not None:
        own["llguidance"], theirs["llguidance"] = masks_version(), receipt.grammar.llguidance
    found = [(name, theirs.get(name), own.get(name)) for name in _all(own, theirs) if theirs.get(name) != own.get(name)]
    if not found:
        return None
    names = ", ".join(name for name, _, _ in found)
    field = found[0][0] if found[0][0] in ("tokenizer", "llguidance") else f"fingerprint_parts.{found[0][0]}"
    said = f"the receipt is of another {names}"
    return Verdict(outcome="incomparable", field=field, message=said, parts=found)


def _all(*mappings: Iterable[str]) -> Iterable[str]:
    return dict.fromkeys(name for mapping in mappings for name in mapping)
