"""`detcompile diff`: compares two fingerprints or two runs, and explains the difference."""

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from detcompile.commands.inspection.fingerprint_differences import PartDifference, part_differences
from detcompile.commands.inspection.recordings import Recording, read_recording
from detcompile.commands.inspection.run_differences import Parting, RequestDifference, RunComparison, compare_runs

MOST_SHOWN = 12  # details of a part, and numbers of requests; --json has all
MOST_LETTERS = 160  # characters of a value
FILE = (
    "A file of `check --json`, `verify --json` or `generate --json`, saved fingerprint_parts, an exported .pt2, or a"
    " model, which is compiled with the defaults of `check`."
)


def command(
    a: Annotated[Path, typer.Argument(help=FILE)],
    b: Annotated[Path, typer.Argument(help="The other one.")],
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of lines.")] = False,
) -> None:
    """Say what differs between two fingerprints or two runs, and why; exit 1 if anything does, 2: bad input.

    Runs (generate --json) are compared up to the first request, sample and token that differ. If only one file has a
    run, only the fingerprints are compared.
    """
    one, other = read_recording(a), read_recording(b)
    parts = part_differences(one, other)
    both_run = one.requests is not None and other.requests is not None
    runs = compare_runs(one.requests or (), other.requests or ()) if both_run else None
    equal = not parts and (runs is None or runs.equal)
    if json_output:
        print(json.dumps(_as_json(one, other, parts, runs)))
    else:
        print("\n".join(_lines(one, other, parts, runs)))
    if not equal:
        raise typer.Exit(1)


def _as_json(a: Recording, b: Recording, parts: list[PartDifference], runs: RunComparison | None) -> dict[str, object]:
    return {
        "equal": not parts and (runs is None or runs.equal),
        "fingerprints": [a.fingerprint, b.fingerprint],
        "parts": [asdict(part) for part in parts],
        "runs": None if runs is None else {"equal": runs.equal, **asdict(runs)},
        "explanation": _explanation(parts, runs),
    }


def _lines(a: Recording, b: Recording, parts: list[PartDifference], runs: RunComparison | None) -> Iterator[str]:
    for name, file in (("A", a), ("B", b)):
        held = "" if file.requests is None else f", requests: {len(file.requests)}"
        yield f"{name}: {file.path}: fingerprint {file.fingerprint}{held}"
    for part in parts:
        yield f"\n{part.part} differs: {part.meaning}"
        yield from (f"  {detail}" for detail in part.details[:MOST_SHOWN])
        if len(part.details) > MOST_SHOWN:
            yield f"  and {len(part.details) - MOST_SHOWN} more: --json has them"
        yield from (f"  {name}: {_short(value)}" for name, value in (("A", part.a), ("B", part.b)))
    if a.parts.get("source") != b.parts.get("source") and "source" not in {part.part for part in parts}:
        yield f"\nsources differ, bits version equal ({a.parts['bits_version']})"
    if runs is not None:
        yield from _run_lines(runs)
    yield f"\n{_explanation(parts, runs)}"


def _run_lines(runs: RunComparison) -> Iterator[str]:
    parted = [one for one in runs.differences if one.parting is not None]
    yield f"\npairs of requests: {runs.num_pairs}, with other answers: {len(parted)}"
    for name, numbers in (("A", runs.only_in_a), ("B", runs.only_in_b)):
        if numbers:
            more = " …" if len(numbers) > MOST_SHOWN else ""
            yield f"only in {name}: request {', '.join(map(str, numbers[:MOST_SHOWN]))}{more}"
    changed = next((one for one in runs.differences if one.inputs), None)
    if changed is not None:
        yield f"request {changed.a} of A and {changed.b} of B have different inputs:"
        yield from (f"  {name}: {_short(x)} in A, {_short(y)} in B" for name, (x, y) in changed.inputs.items())
    if runs.first is not None and runs.first.parting is not None:
        yield from _parting_lines(runs.first, runs.first.parting)


def _parting_lines(request: RequestDifference, parting: Parting) -> Iterator[str]:
    where = "" if parting.sample is None else f", sample {parting.sample}"
    place = "" if parting.position is None else f", token {parting.position} (from 0)"
    yield f"first difference: request {request.a} of A, {request.b} of B{where}{place}: {parting.what}"
    yield f"  A: {_short(parting.a)}"
    yield f"  B: {_short(parting.b)}"


def _explanation(parts: list[PartDifference], runs: RunComparison | None) -> str:
    """Return one sentence: equal, or what explains the difference."""
    names = ", ".join(part.part for part in parts)
    if runs is None:
        return f"Other fingerprints ({names}): bits may differ." if parts else "Equal fingerprints: equal bits."
    parted = [one for one in runs.differences if one.parting is not None]
    if not parted:
        if parts:
            return f"Equal answers from different fingerprints ({names}): observed here, not guaranteed."
        return "Equal in every bit." if runs.equal else "Equal answers, to requests that are not all the same."
    if parts:
        return f"The fingerprints differ ({names}): expect different answers."
    unexplained = [one for one in parted if not one.inputs and one.parting and one.parting.what not in OUTSIDE]
    if unexplained:
        return (
            "Nothing explains this: equal fingerprints and equal requests promise equal bits. Unless a file was edited,"
            f" or served with acceptance='rejection', it is a bug (request {unexplained[0].a}): `detcompile verify`"
            " measures the axes on this machine; please report what it says."
        )
    reasons = dict.fromkeys(_reason(one) for one in parted)
    return f"Explained: {'; '.join(reasons)}."


# What may differ despite equal fingerprints, and why.
OUTSIDE = {
    "text": "equal tokens decode to different text: the tokenizer is not part of the fingerprint",
    "error": "whether a request is refused depends on the engine's settings, which the fingerprint does not cover",
}


def _reason(request: RequestDifference) -> str:
    if request.inputs:
        return f"requests with different inputs ({', '.join(request.inputs)}) get different answers"
    return OUTSIDE[request.parting.what if request.parting else "text"]


def _short(value: object) -> str:
    text = "nothing" if value is None else value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= MOST_LETTERS else f"{text[:MOST_LETTERS]} … ({len(text)} characters)"
