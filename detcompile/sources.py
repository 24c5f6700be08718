"""A digest of this package's sources."""

import functools
import hashlib
from pathlib import Path

__all__ = ["source_digest"]


@functools.cache
def source_digest() -> str:
    """sha256 over the sources of this package that decide bits, as they are when a process first asks."""
    digest = hashlib.sha256()
    package = Path(__file__).parent
    outside = {package / name for name in ("commands", "experimental", "serving")}
    for path in sorted(package.rglob("*")):
        if path.suffix in (".py", ".cpp", ".h") and not outside & set(path.parents):
            digest.update(str(path.relative_to(package)).encode() + path.read_bytes())
    return digest.hexdigest()
