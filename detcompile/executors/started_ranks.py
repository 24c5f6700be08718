"""StartedRanks: the worker processes that share a model, and others in their place where they are lost."""

import threading
import weakref
from collections.abc import Callable, Sequence
from typing import IO

from detcompile.errors import WorkerError
from detcompile.executors.description import ModelDescription
from detcompile.executors.remote_weights import START_SECONDS, RemoteWeights
from detcompile.executors.stages import joined_description
from detcompile.progress import aside, stage
from detcompile.runtime.processes.group import WorkerGroup
from detcompile.runtime.processes.start_progress import StartProgress

__all__ = ["StartedRanks"]


class StartedRanks:
    """Processes of workers.RankServer, from their start to ``close`` or to this object's end. Any thread may call.

    Args:
        begin: starts processes, which inherit these descriptors.
        saved: the file that they read the model from, where it is one without a name.
        again: whether others may be started in the place of lost ones.

    Attributes:
        group: the processes.
        description: what they say of the model.
        weights: the weights that they share.

    Raises:
        WorkerError: a rank could not start.
    """

    def __init__(
        self, begin: Callable[[Sequence[int]], WorkerGroup], saved: IO[bytes] | None = None, *, again: bool = True
    ) -> None:
        self._begin = begin
        self._again = again
        self._saved = saved
        if saved is not None:
            weakref.finalize(self, saved.close).atexit = False
        self._renewing = threading.Lock()
        self._closed = False
        self.group = begin(self._files([]))
        self.description = _served(self.group)
        self.weights = RemoteWeights(self.group)

    def renewed(self, lost: WorkerGroup) -> WorkerGroup:
        """The processes in the place of ``lost``, with the weights that those had; started now, if they were not yet.

        Raises:
            WorkerError: a rank could not start, the workers were closed, or no others may be started.
            EngineError: the weights are not to be had again.
        """
        with self._renewing:
            failure = self.group.failure
            if failure is not None and (self._closed or failure.rank is None or not self._again):
                raise failure
            if self.group is lost:
                self.weights.require_known()
                self.group = self._started_again()
            return self.group

    def close(self) -> None:
        """End the processes; others that are being started end when they have."""
        self._closed = True
        with self._renewing:
            self.group.close()
            self.weights.close()
            if self._saved is not None:
                self._saved.close()

    def _started_again(self) -> WorkerGroup:
        group = self._begin(self._files(self.weights.files))
        try:
            _served(group)
            self.weights.restore(group)
            if self._closed:
                raise WorkerError("the workers were closed: compile the model again to use it")
        except BaseException:
            group.close()
            raise
        group.step_seconds = self.group.step_seconds
        return group

    def _files(self, others: Sequence[int]) -> list[int]:
        return [*([] if self._saved is None else [self._saved.fileno()]), *others]


def _served(group: WorkerGroup) -> ModelDescription:
    """Wait until every rank has its share of the model; what they say of it."""
    with aside(), StartProgress(group.num_ranks) as progress:
        group.on_note = progress.on_note
        try:
            with stage(f"start {group.num_ranks} worker processes"):
                group.result(group.started)
            port = group.call("open_store")[0]
            told = group.call("start", port, seconds=START_SECONDS)
            description = joined_description([part for part in told if part is not None])
        except BaseException:
            group.close()
            raise
    group.on_note = lambda rank, text: None
    return description
