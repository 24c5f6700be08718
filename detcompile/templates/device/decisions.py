"""Decisions of the gate, kept on disk in ``<cache>/schedules/<template>-<digest>.json``.

The digest covers the environment: the device, the versions and the template's source. Writers merge under a file lock
and replace the file atomically. A file that does not parse or has another environment is rebuilt. A file that other
users could have written is ignored: it could name schedules that the gate never admitted.
"""

import fcntl
import hashlib
import json
import os
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

from detcompile.storage import CACHE_ADVICE, distrust


@dataclass(slots=True)
class Decision:
    """The gate's result for one problem: admitted schedules, refused ones with reasons, and the choice."""

    admitted: list[str] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)
    chosen: str | None = None
    tuned: bool = False

    def absorb(self, other: "Decision") -> None:
        """Merge another process's decision. A timed choice outranks an untimed one."""
        self.admitted = list(dict.fromkeys([*self.admitted, *other.admitted]))
        self.refused |= other.refused
        if other.chosen is not None and (other.tuned or not self.tuned):
            self.chosen, self.tuned = other.chosen, other.tuned


class DecisionFile:
    """The decisions of one template in one environment, shared by all processes."""

    def __init__(self, template: str, environment: Mapping[str, str], directory: Path) -> None:
        self._environment = dict(environment)
        digest = hashlib.sha256(json.dumps(self._environment, sort_keys=True).encode()).hexdigest()[:16]
        self.path = directory / f"{template}-{digest}.json"
        self._distrust = _distrust_of(self.path)

    def read(self) -> dict[str, Decision]:
        """Return all decisions; none if the file is missing, corrupt or of another environment."""
        if self._distrust:
            return {}
        try:
            content = json.loads(self.path.read_text())
            if content["environment"] != self._environment:
                return {}
            return {problem: _decision(fields) for problem, fields in content["decisions"].items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return {}  # the gate runs again

    def merge(self, problem: str, decision: Decision) -> None:
        """Add a decision to the file. Warn if the file cannot be written."""
        if self._distrust:
            return
        try:
            self.path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
            with _locked(self.path.with_suffix(".lock")):
                merged = self.read()
                merged.setdefault(problem, Decision()).absorb(decision)
                content = {"environment": self._environment, "decisions": {p: asdict(d) for p, d in merged.items()}}
                _replace(self.path, json.dumps(content, indent=1, sort_keys=True))
        except OSError as error:
            reason = error.strerror or error
            warnings.warn(f"schedule decisions are not kept: {self.path}: {reason}. {CACHE_ADVICE}", stacklevel=4)


def _distrust_of(path: Path) -> str:
    """Warn if other users could have written this file, and return the reason; empty if it can be trusted."""
    try:
        folder = path.parent
        reason = distrust(folder) if folder.exists() else ""
        reason = reason or (distrust(path) if path.exists() else "")
    except OSError as error:
        reason = f"{path}: {error.strerror}"
    if reason:
        warnings.warn(f"schedule decisions are neither read nor kept: {reason}. {CACHE_ADVICE}", stacklevel=5)
    return reason


def _decision(fields: Mapping[str, object]) -> Decision:
    decision = Decision(**fields)  # type: ignore[arg-type]
    sane = (
        isinstance(decision.admitted, list)
        and isinstance(decision.refused, dict)
        and isinstance(decision.chosen, str | None)
        and isinstance(decision.tuned, bool)
    )
    if not sane:
        raise ValueError("not a decision")
    return decision


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _replace(path: Path, text: str) -> None:
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name)
    try:
        with os.fdopen(descriptor, "w") as handle:
            handle.write(text)
        os.replace(temporary, path)
    except OSError:
        os.unlink(temporary)
        raise
