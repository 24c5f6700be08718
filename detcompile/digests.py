"""What a fingerprint is, and the digest of weights in it, over names and text: plain JSON, without torch."""

import hashlib
import json
from collections.abc import Mapping

__all__ = ["fingerprint", "weights_digest"]


def fingerprint(parts: Mapping[str, str]) -> str:
    """sha256, in hex, of the parts."""
    return _digest(parts)


def weights_digest(digests: Mapping[str, str]) -> str:
    """sha256 over the names of weights and the digest of each."""
    return _digest(digests)


def _digest(named: Mapping[str, str]) -> str:
    return hashlib.sha256(json.dumps(named, sort_keys=True).encode()).hexdigest()
