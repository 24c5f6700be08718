"""Digests: fingerprints, weights by name, and the sources of this package. Needs no torch."""

import functools
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

# Raise it with a change of the sources that moves a bit of any model, and name the operation in CHANGELOG.md.
# tests/test_bits_version.py fails if golden digests change under the same version.
BITS_VERSION = "1"


def fingerprint(parts: Mapping[str, str]) -> str:
    """Return the sha256, in hex, of the parts. "bits_version" replaces "source" if both are given."""
    return _digest({name: part for name, part in parts.items() if name != "source" or "bits_version" not in parts})


def differing_parts(a: Mapping[str, str | None], b: Mapping[str, str | None]) -> list[str]:
    """Return the names of parts whose values differ. Sources may differ under one bits version."""
    names = [name for name in dict.fromkeys([*a, *b]) if a.get(name) != b.get(name)]
    same_bits = a.get("bits_version") is not None and a.get("bits_version") == b.get("bits_version")
    return [name for name in names if name != "source" or not same_bits]


def weights_digest(digests: Mapping[str, str]) -> str:
    """Return the sha256 over the names of weights and the digest of each."""
    return _digest(digests)


@functools.cache
def source_digest() -> str:
    """Return the sha256 over the sources of this package that decide bits, read at the first call in a process."""
    digest = hashlib.sha256()
    package = Path(__file__).parent
    outside = {package / name for name in ("commands", "experimental", "serving")}
    for path in sorted(package.rglob("*")):
        if path.suffix in (".py", ".cpp", ".h") and not outside & set(path.parents):
            digest.update(str(path.relative_to(package)).encode() + path.read_bytes())
    return digest.hexdigest()


def _digest(named: Mapping[str, str]) -> str:
    return hashlib.sha256(json.dumps(named, sort_keys=True).encode()).hexdigest()
