"""Reads and checks a fingerprint or a run.

Sources: a model by its name, JSON of `detcompile check --json` or `detcompile verify --json`, a saved
``model.fingerprint_parts``, an exported archive, or the JSON lines of `detcompile generate --json`.
"""

import importlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from detcompile.commands.text_files import read_text_file
from detcompile.digests import fingerprint, weights_digest
from detcompile.errors import InvalidInput

ARCHIVE_MARK = b"PK\x03\x04"
PARTS = ("weights", "program")  # every fingerprint has these: a mapping that holds them is one of parts
WANTED = "give JSON of `detcompile check --json` or `detcompile generate --json`, an exported .pt2, or a model's name"
FILES = (".json", ".jsonl", ".pt2", ".txt")  # not names of models


@dataclass(frozen=True)
class Recording:
    """A fingerprint, and a run if the file has one.

    Attributes:
        path: the file, or the model's name.
        parts: parts of the fingerprint, by name.
        weight_digests: digest of each weight by name; None if the file has no digests.
        requests: the run's requests, as `detcompile generate --json` writes them; None if the file has no run.
    """

    path: Path
    parts: Mapping[str, str]
    weight_digests: Mapping[str, str] | None = None
    requests: tuple[dict[str, Any], ...] | None = None

    @property
    def fingerprint(self) -> str:
        """The fingerprint of the parts."""
        return fingerprint(self.parts)


def read_recording(path: Path) -> Recording:
    """Read a file, or compile a model: a folder, an embedded model, or an id on the Hub.

    Raises:
        InvalidInput: the file cannot be read, has another format, or is inconsistent.
        ArchiveError: the archive is damaged.
        Also what ``compile`` raises.
    """
    if not path.is_file():
        if path.suffix in FILES or (not path.is_dir() and str(path).startswith((".", "/", "~"))):
            raise InvalidInput(f"{path}: no such file; {WANTED}")
        return _of_model(str(path))
    try:
        with path.open("rb") as file:
            is_archive = file.read(len(ARCHIVE_MARK)) == ARCHIVE_MARK
    except OSError as error:
        raise InvalidInput(f"{path} cannot be read: {error.strerror}") from error
    if is_archive:
        return _of_archive(path)
    objects = _objects(read_text_file(path), path)
    if "outputs" in objects[0]:
        return _run(objects, path)
    if len(objects) > 1:
        raise InvalidInput(f"{path} holds {len(objects)} JSON objects, and the first is not a request: {WANTED}")
    return _print(objects[0], path)


def _of_model(name: str) -> Recording:
    """Compile a model, as `detcompile check` does; only this needs all of torch."""
    options = importlib.import_module("detcompile.commands.options")
    verification = importlib.import_module("detcompile.commands.verification")
    compiled = options.compile_model(verification.ModelSpec(name))
    return Recording(Path(name), compiled.fingerprint_parts, compiled.weight_digests())


def _of_archive(path: Path) -> Recording:
    """Read an archive's manifest. Only this needs torch."""
    archives = importlib.import_module("detcompile.archives.archive")
    manifest = importlib.import_module("detcompile.archives.manifest")
    facts = archives.Archive(path, rank=None).facts
    manifest.require_model(path, facts)
    return _print(facts, path)


def _objects(text: str, path: Path) -> list[dict[str, Any]]:
    """Parse one JSON object, or one per line."""
    try:
        whole = json.loads(text)
        objects, where = [whole], [f"{path}"]
    except ValueError:
        lines = [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
        where = [f"{path}, line {number}" for number, _ in lines]
        objects = [_parsed(line, place) for (_, line), place in zip(lines, where, strict=True)]
    except RecursionError as error:
        raise InvalidInput(f"{path} is nested too deeply: {WANTED}") from error
    if not objects:
        raise InvalidInput(f"{path} is empty: {WANTED}")
    for one, place in zip(objects, where, strict=True):
        if not isinstance(one, dict):
            raise InvalidInput(f"{place} is not a JSON object: {WANTED}")
    return objects


def _parsed(line: str, where: str) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InvalidInput(f"{where} is not valid JSON ({error}): {WANTED}") from error


def _print(record: dict[str, Any], path: Path) -> Recording:
    """Read the fingerprint_parts of an object, or an object that is the parts."""
    bare = all(name in record for name in PARTS) and "fingerprint_parts" not in record
    parts = record if bare else record.get("fingerprint_parts")
    digests = None if bare else record.get("weight_digests")
    if parts is None:
        raise InvalidInput(f"{path} has no fingerprint_parts: {WANTED}")
    if not _named(parts) or not (digests is None or _named(digests)):
        raise InvalidInput(f"{path}: fingerprint_parts and weight_digests are mappings of text to text")
    recorded = record.get("fingerprint", fingerprint(parts))
    if recorded != fingerprint(parts):
        raise InvalidInput(f"{path} was changed: its parts make fingerprint {fingerprint(parts)}, not {recorded}")
    if digests is not None and weights_digest(digests) != parts.get("weights"):
        raise InvalidInput(f"{path} was changed: its weight_digests do not make the part `weights`")
    return Recording(path, parts, digests)


def _run(requests: list[dict[str, Any]], path: Path) -> Recording:
    for number, request in enumerate(requests, 1):
        for name, check in REQUEST.items():
            if name not in request or not check(request[name]):
                shown = repr(request.get(name, "missing"))[:60]
                raise InvalidInput(f"{path}, request {number}: {name} is {shown}, not as `generate --json` writes it")
    first = _print(requests[0], path)
    other = next((number for number, one in enumerate(requests, 1) if one["fingerprint_parts"] != first.parts), None)
    if other is not None:
        raise InvalidInput(f"{path}, request {other} has another fingerprint than the first: put one run in each file")
    return Recording(path, first.parts, None, tuple(requests))


def _named(value: object) -> bool:
    return isinstance(value, dict) and all(isinstance(item, str) for item in value.values())


def _tokens(value: object) -> bool:
    return isinstance(value, list) and all(type(token) is int for token in value)


def _sample(value: object) -> bool:
    if not isinstance(value, dict) or not _tokens(value.get("token_ids")):
        return False
    logprobs = value.get("logprobs")
    listed = logprobs is None or (isinstance(logprobs, list) and all(map(_logprob, logprobs)))
    return listed and {"index", "text", "finish_reason", "stop_reason", "logprobs"} <= value.keys()


def _logprob(value: object) -> bool:
    return isinstance(value, dict) and "logprob" in value and isinstance(value.get("top"), list)


REQUEST: dict[str, Callable[[Any], bool]] = {
    "prompt_token_ids": _tokens,
    "seed": lambda value: value is None or type(value) is int,
    "params": lambda value: isinstance(value, dict),
    "fingerprint_parts": _named,
    "outputs": lambda value: isinstance(value, list) and all(map(_sample, value)),
    "error": lambda value: value is None or isinstance(value, str),
}
