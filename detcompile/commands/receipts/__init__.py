"""Commands over receipts: keygen, replay and audit. They need packages of the extra `serve`."""

import importlib.util

from detcompile.errors import InvalidInput

NEEDED = ("cryptography", "fastapi", "msgspec")
missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
if missing:
    raise InvalidInput(f"{', '.join(missing)} is not installed: pip install '.[serve]' in a checkout of detcompile")
