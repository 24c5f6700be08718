"""RemoteWeights: the weights that worker processes share, and what others in their place would have to be given."""

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

__all__ = ["RemoteWeights", "START_SECONDS"]

START_SECONDS = 3600.0  # loading, compiling, and capturing CUDA graphs
RELOAD = "compile the model again"


class _Update(NamedTuple):
    """New contents that the workers took."""

    names: frozenset[str]
    file: IO[bytes]  # without a name, so that it ends with this process


class RemoteWeights:
    """The weights that the workers share.

    The files of ``update`` are kept as far as no later one gave the same names, so that processes in the place of lost
    ones can be given what those had.

    Args:
        group: processes whose target serves ``identity``, ``weight_digests``, ``weights_version`` and
            ``update_weights``.
    """

    def __init__(self, group: WorkerGroup) -> None:
        self._group = group
        self._updates: list[_Update] = []  # oldest first
        weakref.finalize(self, _drop, self._updates).atexit = False
        self._identity = _identity(group)  # program and weights, as they were given
        self._version = self._known = 0  # of the contents now, and of those that start and updates make
        self._before = 0  # versions counted before the processes began

    @property
    def files(self) -> list[int]:
        """Descriptors that processes in the place of lost ones have to inherit."""
        return [update.file.fileno() for update in self._updates]

    def digests(self) -> dict[str, str]:
        """The digest of every weight as it is now, whole; every worker looks at its share."""
        digests: dict[str, str] = self._group.call("weight_digests", seconds=START_SECONDS)[0]
        return digests

    def version(self, *, look: bool = False) -> int:
        """Counts the contents that the weights have had, as far as ``ask`` has heard of them."""
        return self._version

    def ask(self) -> None:
        """Have the workers look whether their weights were changed."""
        self._version = self._before + max(self._group.call("weights_version"))

    def update(self, source: Mapping[str, Tensor]) -> int:
        """Have every worker take its share of new weights, which travel in a temporary file that all of them map.

        Raises:
            InvalidInput: they are not all of the model's parameters, or do not fit; or the model takes no new ones.
            StorageError: there is no room for the file; nothing has changed then.
        """
        with contextlib.ExitStack() as files:
            with in_temporary_folder():
                named = files.enter_context(tempfile.NamedTemporaryFile())
                torch.save({name: tensor.detach().cpu() for name, tensor in source.items()}, named)
                named.flush()
                new = _Update(frozenset(source), open(named.name, "rb"))  # noqa: SIM115 - kept without its name
            try:
                told = self._group.call("update_weights", named.name, seconds=START_SECONDS)
            except BaseException:
                new.file.close()
                raise
        _drop(self._updates, new.names)
        self._updates.append(new)
        self._version = self._known = self._before + max(told)
        self._identity = _identity(self._group)
        return self._version

    def require_known(self) -> None:
        """Fail where other processes cannot be given the weights as they are.

        Raises:
            EngineError: something else than ``update`` has changed them.
        """
        if self._version != self._known:
            raise EngineError(
                "the workers are lost, and with them weights that were changed in place (apply): others would have"
                f" those of before. {RELOAD}, and change weights by update_weights()"
            )

    def restore(self, group: WorkerGroup) -> None:
        """Give processes that have just started what the lost ones had.

        Raises:
            EngineError: they hold another model.
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
        """Keep nothing for other processes."""
        _drop(self._updates)


def _drop(updates: list[_Update], names: frozenset[str] | None = None) -> None:
    """Close and forget the updates of which all is in ``names``; None: all."""
    for update in [each for each in updates if names is None or each.names <= names]:
        update.file.close()
        updates.remove(update)


def _identity(group: WorkerGroup) -> str:
    identity: str = group.call("identity", seconds=START_SECONDS)[0]
    return identity
