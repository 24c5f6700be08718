"""The origin of a config."""

from typing import Any


def commit_of(config: Any) -> str | None:
    """Return the commit on the Hub that a config was loaded from, or None.

    Without it: worker processes and records of requests name a revision that may have moved.

    transformers 5.24 does not write it: only models loaded by this package have it.
    """
    commit: str | None = getattr(config, "_commit_hash", None)
    return commit


def set_commit(config: Any, commit: str) -> None:
    """Record the commit on the Hub that a config was loaded from.

    Without it: see ``commit_of``, if files were read from the cache by their paths.
    """
    config._commit_hash = commit
