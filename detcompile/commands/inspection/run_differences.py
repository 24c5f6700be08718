"""Compares two runs request by request: where answers first differ, and whether the inputs explain it.

Requests with equal inputs (prompt tokens, parameters and seed) are paired, wherever they stand in the runs. The others
are paired in order, and their different inputs are reported. If one run reports more logprobs, only those that both
report are compared.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

REPORTING = ("logprobs", "prompt_logprobs")  # parameters that change reports, not bits
ENDS = ("finish_reason", "stop_reason")  # compared after tokens and logprobs


@dataclass(frozen=True)
class Parting:
    """First difference of two answers to a request.

    Attributes:
        what: "tokens", "logprobs", "tokens and logprobs" at one position, "samples", "ends", "text" or "error".
        sample: index of the sample; None if the whole request differs.
        position: index of the token in the answer, from 0; None if no token differs.
        a, b: the two values; None if absent.
    """

    what: str
    sample: int | None
    position: int | None
    a: Any
    b: Any


@dataclass(frozen=True)
class RequestDifference:
    """A pair of requests that differs.

    Attributes:
        a, b: their numbers in the runs, from 1.
        inputs: inputs that differ, by name, as (in A, in B).
        parting: where the answers first differ; None if they are equal.
    """

    a: int
    b: int
    inputs: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    parting: Parting | None = None


@dataclass(frozen=True)
class RunComparison:
    """Two runs compared.

    Attributes:
        num_pairs: pairs of requests.
        differences: pairs that differ, in the order of A.
        only_in_a, only_in_b: numbers of requests without a partner.
    """

    num_pairs: int
    differences: tuple[RequestDifference, ...]
    only_in_a: tuple[int, ...]
    only_in_b: tuple[int, ...]

    @property
    def equal(self) -> bool:
        """True if both runs hold the same requests with the same answers."""
        return not (self.differences or self.only_in_a or self.only_in_b)

    @property
    def first(self) -> RequestDifference | None:
        """The first pair whose answers differ."""
        return next((one for one in self.differences if one.parting is not None), None)


def compare_runs(a: Sequence[Mapping[str, Any]], b: Sequence[Mapping[str, Any]]) -> RunComparison:
    """Compare the requests of two runs, each as `detcompile generate --json` writes it."""
    pairs, only_in_a, only_in_b = _paired(a, b)
    differences = []
    for one, other in pairs:
        changed = _changed_inputs(a[one], b[other])
        parting = _parting(a[one], b[other])
        if changed or parting:
            differences.append(RequestDifference(one + 1, other + 1, changed, parting))
    numbers = [tuple(place + 1 for place in places) for places in (only_in_a, only_in_b)]
    return RunComparison(len(pairs), tuple(differences), *numbers)


def _paired(
    a: Sequence[Mapping[str, Any]], b: Sequence[Mapping[str, Any]]
) -> tuple[list[tuple[int, int]], list[int], list[int]]:
    """Return paired indices in the order of A, then the unpaired indices of A and of B."""
    free: dict[str, list[int]] = {}
    for place, request in enumerate(b):
        free.setdefault(_bits(_inputs(request)), []).append(place)
    partners = [places.pop(0) if (places := free.get(_bits(_inputs(request)))) else None for request in a]
    left_a = [place for place, partner in enumerate(partners) if partner is None]
    left_b = sorted(place for places in free.values() for place in places)
    for one, other in zip(left_a, left_b):
        partners[one] = other
    pairs = [(place, partner) for place, partner in enumerate(partners) if partner is not None]
    return pairs, left_a[len(left_b) :], left_b[len(left_a) :]


def _inputs(request: Mapping[str, Any]) -> dict[str, Any]:
    """Return the inputs that determine an answer besides the fingerprint, by name."""
    inputs = {name: value for name, value in request["params"].items() if name not in REPORTING}
    if inputs.get("temperature") != 0:  # a greedy answer uses no random numbers
        inputs["seed"] = request["seed"]
    tokens = request["prompt_token_ids"]
    return {"prompt_token_ids": tokens, **inputs} if tokens else {"prompt": request.get("prompt"), **inputs}


def _changed_inputs(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    one, other = _inputs(a), _inputs(b)
    names = dict.fromkeys((*one, *other))
    both = {name: (one.get(name), other.get(name)) for name in names}
    return {name: values for name, values in both.items() if _bits(values[0]) != _bits(values[1])}


def _parting(a: Mapping[str, Any], b: Mapping[str, Any]) -> Parting | None:
    if a["error"] != b["error"]:
        return Parting("error", None, None, a["error"], b["error"])
    if len(a["outputs"]) != len(b["outputs"]):
        return Parting("samples", None, None, len(a["outputs"]), len(b["outputs"]))
    partings = (_of_sample(one, other) for one, other in zip(a["outputs"], b["outputs"]))
    return next((parting for parting in partings if parting is not None), None)


def _of_sample(a: Mapping[str, Any], b: Mapping[str, Any]) -> Parting | None:
    """Compare tokens and logprobs by position, then how the sample ended, then its text."""
    tokens = list(zip_longest(a["token_ids"], b["token_ids"]))
    reported = a["logprobs"] is not None and b["logprobs"] is not None
    logprobs = list(zip_longest(a["logprobs"], b["logprobs"])) if reported else []
    by_token = next((place for place, (one, other) in enumerate(tokens) if one != other), None)
    by_logprob = next((place for place, pair in enumerate(logprobs) if not _same_logprobs(*pair)), None)
    places = [place for place in (by_token, by_logprob) if place is not None]
    if not places:
        ends = [{name: sample[name] for name in ENDS} for sample in (a, b)]
        if ends[0] != ends[1]:
            return Parting("ends", a["index"], None, *ends)
        return Parting("text", a["index"], None, a["text"], b["text"]) if a["text"] != b["text"] else None
    place = min(places)
    kinds = {"tokens": by_token, "logprobs": by_logprob}
    what = " and ".join(kind for kind, at in kinds.items() if at == place)
    shown = [_at(tokens, place, side) | _logprob_at(logprobs, place, side) for side in (0, 1)]
    return Parting(what, a["index"], place, *(one or None for one in shown))


def _same_logprobs(a: Mapping[str, Any] | None, b: Mapping[str, Any] | None) -> bool:
    if a is None or b is None:
        return a is b
    shown = min(len(a.get("top", ())), len(b.get("top", ())))
    one, other = ([entry.get("logprob"), entry.get("top", [])[:shown]] for entry in (a, b))
    return _bits(one) == _bits(other)


def _at(tokens: list[tuple[Any, Any]], place: int, side: int) -> dict[str, Any]:
    there = place < len(tokens) and tokens[place][side] is not None
    return {"token_id": tokens[place][side]} if there else {}


def _logprob_at(logprobs: list[tuple[Any, Any]], place: int, side: int) -> dict[str, Any]:
    entry = logprobs[place][side] if place < len(logprobs) else None
    return {} if entry is None else {name: entry[name] for name in ("logprob", "top") if name in entry}


def _bits(value: Any) -> str:
    """Serialize a value so that equal text means equal bits: Python's float repr round-trips."""
    return json.dumps(value, sort_keys=True)
