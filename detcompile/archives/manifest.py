"""Validation of an archive's manifest: a type and range check for each field.

Digests detect damage, not forgery: a forged manifest has a matching digest. So every field is checked before use.
"""

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from detcompile.errors import ArchiveError

Check = Callable[[Any], bool]
MOST = 1 << 40  # the largest count
MOST_FEATURES = 1 << 24  # elements of a KV slot or a state in one layer
HEX = re.compile(r"[0-9a-f]{64}")
DTYPES = ("float32", "bfloat16", "float16")


def plain_name(name: object) -> bool:
    """Return whether a relative path with / separators stays inside its folder on any operating system."""
    if not isinstance(name, str) or not name.isprintable() or any(mark in name for mark in '\\:*?"<>|'):
        return False
    return all(part not in ("", ".", "..") and len(part.encode(errors="replace")) < 256 for part in name.split("/"))


def parsed(path: Path, name: str, content: bytes) -> Any:
    """Parse a JSON member.

    Raises:
        ArchiveError: the member is not valid JSON.
    """
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        raise _forged(path, f"{name} is not valid JSON ({error})") from error


def require_shares(path: Path, facts: Any) -> None:
    """Raise ArchiveError, naming the field, unless the manifest lists its members, and weights for every rank."""
    _require(path, facts, {"members": _named(_record(sha256=_digest, bytes=_count), plain_name), "ranks": _some(_dict)})
    for rank, share in enumerate(facts["ranks"]):
        where = f"manifest, ranks[{rank}]"
        _require(path, share, {"weights": _record(file=_optional(_file_name), strides=_named(_list(_count)))}, where)
        if share["weights"]["file"] is not None:
            _require(path, share["weights"], {"bytes": _count, "sha256": _digest}, f"{where}.weights")


def require_model(path: Path, facts: Mapping[str, Any]) -> None:
    """Raise ArchiveError, naming the field, unless the manifest describes a model."""
    _require(path, facts, MODEL)
    machine = facts["machine"]
    _require(path, machine, ON[machine["device"]], "manifest, machine")
    for rank, share in enumerate(facts["ranks"]):
        _require(path, share, SHARE, f"manifest, ranks[{rank}]")
        layers = range(len(share["kv_shapes"]))
        if not sorted(layer for layers, _ in facts["kv_groups"] for layer in layers) == list(layers):
            raise _forged(path, f"manifest: kv_groups do not name each layer of the kv_shapes of ranks[{rank}] once")


def _require(path: Path, record: Any, checks: Mapping[str, Check], where: str = "manifest") -> None:
    if not isinstance(record, dict):
        raise _forged(path, f"{where} is not an object")
    for name, check in checks.items():
        if name not in record:
            raise _forged(path, f"{where} has no {name}")
        if not check(record[name]):
            raise _forged(path, f"{where}: {name} is {repr(record[name])[:60]}")


def _forged(path: Path, reason: str) -> ArchiveError:
    return ArchiveError(f"{path} is not what export wrote: {reason}. Copy the file again, or export again.")


def _count(value: object) -> bool:
    return type(value) is int and 0 <= value < MOST


def _positive(value: object) -> bool:
    return _count(value) and value != 0


def _text(value: object) -> bool:
    return isinstance(value, str)


def _dict(value: object) -> bool:
    return isinstance(value, dict)


def _digest(value: object) -> bool:
    return isinstance(value, str) and HEX.fullmatch(value) is not None


def _file_name(value: object) -> bool:
    return plain_name(value) and "/" not in str(value)


def _features(value: object) -> bool:
    """Check the shape of a tensor of at most MOST_FEATURES elements."""
    if not isinstance(value, list) or not all(_count(extent) for extent in value):
        return False
    size = 1
    for extent in value:
        size = min(size * extent, MOST)
    return size <= MOST_FEATURES


def _optional(check: Check) -> Check:
    return lambda value: value is None or check(value)


def _list(check: Check) -> Check:
    return lambda value: isinstance(value, list) and all(map(check, value))


def _some(check: Check) -> Check:
    return lambda value: bool(value) and _list(check)(value)


def _pairs(first: Check, second: Check) -> Check:
    return _list(lambda pair: isinstance(pair, list) and len(pair) == 2 and first(pair[0]) and second(pair[1]))


def _named(check: Check, name: Check = _text) -> Check:
    return lambda value: isinstance(value, dict) and all(name(key) and check(item) for key, item in value.items())


def _record(**checks: Check) -> Check:
    return lambda value: (
        isinstance(value, dict) and all(name in value and check(value[name]) for name, check in checks.items())
    )


ON = {
    "cpu": {"isa": _text, "vectors": _text},
    "cuda": {"gpu": _text, "capability": _text, "triton": _text},
}
MODEL: dict[str, Check] = {
    "fingerprint": _digest,
    "fingerprint_parts": lambda value: _named(_text)(value) and "source" in value,
    "weight_digests": _named(_text),
    "machine": lambda value: (
        _named(_text)(value) and {"platform", "torch", "device"} <= value.keys() and value["device"] in ON
    ),
    "numerics": _dict,  # checked by Numerics
    "max_context": _positive,
    "dtype": lambda value: value in DTYPES,
    "num_token_ids": _positive,
    "num_logits": _positive,
    "name_or_path": _text,
    "num_parameters": lambda value: _list(_count)(value) and len(value) == 2,
    "config": _dict,  # checked by transformers
    "generation_config": lambda value: (
        _dict(value)
        and _optional(_list(_count))(value.get("eos_token_id"))
        and _optional(lambda token: type(token) is int and -MOST < token < MOST)(value.get("pad_token_id"))
    ),
    "state_shapes": _pairs(_features, lambda value: type(value) is bool),
    "kv_groups": _pairs(_some(_count), _optional(_count)),
}
SHARE: dict[str, Check] = {
    "arguments": _some(lambda value: _text(value) or _count(value)),
    "kv_shapes": _list(lambda value: _features(value) and len(value) == 3),
    "num_threads": lambda value: _positive(value) and value <= 1 << 16,
}
