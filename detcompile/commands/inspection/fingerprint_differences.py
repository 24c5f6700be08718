"""Compares two fingerprints part by part."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from detcompile.commands.inspection.recordings import Recording
from detcompile.digests import differing_parts

# What a different value of each part means.
MEANINGS = {
    "weights": "other weights: a checkpoint, an update or a change in place",
    "adapter": "another LoRA adapter, or none: the model of a request, --adapter",
    "program": "a different certified graph: code, attributes or hooks of the model, a dtype, or other passes",
    "config": "another model config",
    "end_tokens": "different end tokens: eos_token_id of generation_config",
    "numerics": "different declared orders or arithmetic: --tp-sizes, --numerics, or Numerics(...)",
    "orders": "sums in other orders",
    "max_context": "a different maximum length, at which rotary tables are frozen",
    "kv_dtype": "a different dtype of the model and its KV cache: --dtype",
    "bits_version": "a release of detcompile that changed bits: CHANGELOG.md names the operations",
    "source": "a different version of detcompile's sources",
    "torch": "a different torch, which compiles the pointwise operations",
    "triton": "a different Triton, which compiles GPU kernels",
    "transformers": "a different transformers, which has the model's code",
    "device": "a different device: GPU, CUDA and assembler, or instruction set, vectors and C++ compiler",
}
OTHER = "a part that this version of detcompile does not know"
NO_DIGESTS = "which weights: save `detcompile check --json` of both models and compare these"


@dataclass(frozen=True)
class PartDifference:
    """A part that differs.

    Attributes:
        part: name of the part.
        a, b: its values; None if a file lacks the part.
        meaning: what a different value means.
        details: weights or orders that differ; empty for other parts.
    """

    part: str
    a: str | None
    b: str | None
    meaning: str
    details: tuple[str, ...] = ()


def part_differences(a: Recording, b: Recording) -> list[PartDifference]:
    """Return every part that differs, in the order of the contract. Sources may differ under one bits version."""
    differences = []
    for part in sorted(differing_parts(a.parts, b.parts), key=[*MEANINGS, *a.parts, *b.parts].index):
        one, other = a.parts.get(part), b.parts.get(part)
        details: Iterator[str] = iter(())
        if part == "weights":
            details = _weights(a.weight_digests, b.weight_digests)
        elif part == "orders" and one is not None and other is not None:
            details = _only(one.split("; "), other.split("; "))
        differences.append(PartDifference(part, one, other, MEANINGS.get(part, OTHER), tuple(details)))
    return differences


def _weights(a: Mapping[str, str] | None, b: Mapping[str, str] | None) -> Iterator[str]:
    if a is None or b is None:
        yield NO_DIGESTS
        return
    for name in dict.fromkeys((*a, *b)):
        if name not in a or name not in b:
            yield f"{name}: only in {'A' if name in a else 'B'}"
        elif a[name] != b[name]:
            form, other_form = (digest.rpartition(" ")[0] for digest in (a[name], b[name]))
            yield f"{name}: {form} in A, {other_form} in B" if form != other_form else f"{name}: other contents, {form}"


def _only(a: list[str], b: list[str]) -> Iterator[str]:
    yield from (f"only in A: {order}" for order in a if order not in b)
    yield from (f"only in B: {order}" for order in b if order not in a)
