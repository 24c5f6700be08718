"""Verdict: the result of checking a receipt, with the first difference."""

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from detcompile.digests import differing_parts, fingerprint
from detcompile.runtime.grammars.compiler import masks_version
from detcompile.serving.receipts.receipt import Receipt


class Verdict(msgspec.Struct, kw_only=True):
    """The result of a check.

    Attributes:
        outcome: "equal": all tokens, reasons, texts and logprobs were reproduced; "differs": something was not;
            "incomparable": this model, machine or tokenizer is not the receipt's.
        field: the first differing field, by its name in the receipt.
        message: the difference as a sentence.
        prompt: index of the prompt, if one differs.
        sample: index of the sample, if one differs.
        position: position in the answer, if a token differs.
        expected: value in the receipt.
        found: value here.
        parts: differing fingerprint parts, with the receipt's and this machine's value, if "incomparable".
        num_tokens: drawn tokens that were compared and equal.
        uncovered: fields of a whole answer that its receipt does not cover.
        signature: "valid", "invalid" (``message`` explains), or "unchecked" without a key.
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
        """Return the exit code of `detcompile replay`: 0 equal, 1 differs, 2 incomparable."""
        return ("equal", "differs", "incomparable").index(self.outcome)


def differs(field: str, message: str, **where: Any) -> Verdict:
    """Return the verdict on a difference."""
    return Verdict(outcome="differs", field=field, message=message, **where)


def fingerprint_verdict(receipt: Receipt, parts: Mapping[str, str], tokenizer: str | None) -> Verdict | None:
    """Return a verdict if a receipt cannot be compared here; None if it can.

    Args:
        parts: fingerprint_parts of this model.
        tokenizer: sha256 of its tokenizer.
    """
    of_parts = fingerprint(receipt.fingerprint_parts)
    if of_parts != receipt.fingerprint:
        message = "its fingerprint does not match its fingerprint_parts"
        return differs("fingerprint", message, expected=receipt.fingerprint, found=of_parts)
    theirs = receipt.fingerprint_parts
    differing = [(name, theirs.get(name), parts.get(name)) for name in differing_parts(parts, theirs)]
    if receipt.served.tokenizer != tokenizer:
        differing.append(("tokenizer", receipt.served.tokenizer, tokenizer))
    if receipt.grammar is not None and receipt.grammar.llguidance != masks_version():
        differing.append(("llguidance", receipt.grammar.llguidance, masks_version()))
    if not differing:
        return None
    first = differing[0][0]
    field = first if first in ("tokenizer", "llguidance") else f"fingerprint_parts.{first}"
    message = f"the receipt differs in {', '.join(name for name, _, _ in differing)}"
    if "adapter" in receipt.fingerprint_parts:
        missing = any(name == "adapter" for name, _, _ in differing)
        advice = "which is not here: give its folder with --adapter" if missing else "with another --max-lora-rank"
        message = f"LoRA adapter {receipt.model!r} drew this answer, {advice}; {message}"
    return Verdict(outcome="incomparable", field=field, message=message, parts=differing)
