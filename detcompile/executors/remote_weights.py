"""RemoteWeights: the weights in worker processes, and the updates that replacement processes need."""

import contextlib
import tempfile
import weakref
from collections.abc import Mapping
from typing import IO, NamedTuple

import torch
from torch import Tensor

from detcompile.errors import EngineError
from detcompile.runtime.processes.group import WorkerGroup
from detcompile.storage import in_temporary_folder

START_SECONDS = 3600.0  # loading, compiling, and capturing CUDA graphs
RELOAD = "compile the model again"


class _Update(NamedTuple):
    """An update that the workers have applied."""

    names: frozenset[str]
    file: IO[bytes]  # unlinked, so that it is deleted with this process


class RemoteWeights:
    """The weights in the worker processes.

    Files of updates are kept until a later update covers all of their names, so that replacement processes can be
    brought to the same state.

    Args:
        group: processes whose target serves ``identity``, ``weight_digests``, ``weights_version`` and
            ``update_weights``.
    """

    def __init__(self, group: WorkerGroup) -> None:
        self._group = group
        self._updates: list[_Update] = []  # oldest first
        weakref.finalize(self, _drop, self._updates).atexit = False
        self._identity = _identity(group)  # digest of program and weights
        self._version = self._known = 0  # the current version, and the one after the last update
        self._before = 0  # versions counted by earlier processes

    @property
    def files(self) -> list[int]:
        """File descriptors that replacement processes inherit."""
        return [update.file.fileno() for update in self._updates]

    def digests(self) -> dict[str, str]:
        """Return the current digest of every whole weight; every worker checks its shard."""
        digests: dict[str, str] = self._group.call("weight_digests", seconds=START_SECONDS)[0]
        return digests

    def version(self, *, look: bool = False) -> int:
        """Return the version as of the last ``refresh`` or ``update``."""
        return self._version

    def refresh(self) -> None:
        """Ask the workers whether their weights have changed."""
        self._version = self._before + max(self._group.call("weights_version"))

    def update(self, source: Mapping[str, Tensor]) -> int:
        """Update every worker's shard through a temporary file that all workers map.

        Raises:
            InvalidInput: parameters are missing or do not fit, or the model cannot be updated.
            StorageError: the file cannot be written; nothing has changed then.
        """
        with contextlib.ExitStack() as files:
            with in_temporary_folder():
                named = files.enter_context(tempfile.NamedTemporaryFile())
                torch.save({name: tensor.detach().cpu() for name, tensor in source.items()}, named)
                named.flush()
                new = _Update(frozenset(source), open(named.name, "rb"))  # noqa: SIM115 - kept open
            try:
                versions = self._group.call("update_weights", named.name, seconds=START_SECONDS)
            except BaseException:
                new.file.close()
                raise
        _drop(self._updates, new.names)
        self._updates.append(new)
        self._version = self._known = self._before + max(versions)
        self._identity = _identity(self._group)
        return self._version

    def require_known(self) -> None:
        """Raise EngineError if weights were changed in place: replacement processes could not restore them."""
        if self._version != self._known:
            raise EngineError(
                "the workers are lost, and with them weights that were changed in place (apply), which new workers"
                f" would not have. {RELOAD}, and change weights with update_weights()"
            )

    def restore(self, group: WorkerGroup) -> None:
        """Apply all updates to replacement processes.

        Raises:
            EngineError: they loaded another model.
        """
        for number in self.files:
            group.call("update_weights", f"/dev/fd/{number}", seconds=START_SECONDS)
        if _identity(group) != self._identity:
            raise EngineError(
                f"the workers are lost, and the model's files or this machine's packages have changed since: {RELOAD}"
            )
        self._before = self._version - max(group.call("weights_version"))
        self._group = group

    def close(self) -> None:
        """Close the files of all updates."""
        _drop(self._updates)


def _drop(updates: list[_Update], names: frozenset[str] | None = None) -> None:
    """Close and remove the updates that ``names`` covers; None removes all."""
    for update in [each for each in updates if names is None or each.names <= names]:
        update.file.close()
        updates.remove(update)


def _identity(group: WorkerGroup) -> str:
    identity: str = group.call("identity", seconds=START_SECONDS)[0]
    return identity
