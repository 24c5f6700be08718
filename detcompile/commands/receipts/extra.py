"""Packages of the extra `serve` that commands over receipts need; to import this says which are missing."""

import importlib.util

from detcompile.errors import InvalidInput

NEEDED = ("cryptography", "fastapi", "msgspec")
missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
if missing:
    raise InvalidInput(f"{', '.join(missing)} is not installed: pip install '.[serve]' in a checkout of detcompile")
