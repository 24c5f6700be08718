"""StartedRanks: the worker processes that share a model, and their replacement when they are lost."""

import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import IO

from detcompile.errors import InvalidInput, WorkerError
from detcompile.executors.description import ModelDescription
from detcompile.executors.remote_weights import START_SECONDS, RemoteWeights
from detcompile.passes.layers.compilation import require_whole
from detcompile.progress import aside, stage
from detcompile.runtime.processes.group import WorkerGroup
from detcompile.runtime.processes.start_progress import StartProgress
from detcompile.step import KVGroup


class StartedRanks:
    """Processes of workers.RankServer. They end at ``close`` or with this object. Thread-safe.

    Args:
        begin: starts processes that inherit these file descriptors.
        saved: the unlinked file that processes load the model from, if any.
        again: whether lost processes may be replaced.

    Attributes:
        group: the current processes.
        description: the model's description.
        weights: the weights in the processes.

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
        self.description = _loaded(self.group)
        self.weights = RemoteWeights(self.group)

    def renewed(self, lost: WorkerGroup) -> WorkerGroup:
        """Return the replacement of ``lost`` with the same weights; start it if no other thread has.

        Raises:
            WorkerError: a rank could not start, the workers were closed, or replacement is not allowed.
            EngineError: the weights cannot be restored.
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
        """End the processes. Replacements that are starting end as soon as they have started."""
        self._closed = True
        with self._renewing:
            self.group.close()
            self.weights.close()
            if self._saved is not None:
                self._saved.close()

    def _started_again(self) -> WorkerGroup:
        group = self._begin(self._files(self.weights.files))
        try:
            _loaded(group)
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


def _loaded(group: WorkerGroup) -> ModelDescription:
    """Wait until every rank has loaded its shard; return the model's description."""
    with aside(), StartProgress(group.num_ranks) as progress:
        group.on_note = progress.on_note
        try:
            with stage(f"start {group.num_ranks} worker processes"):
                group.result(group.started)
            port = group.call("open_store")[0]
            parts = group.call("start", port, seconds=START_SECONDS)
            description = joined_description([part for part in parts if part is not None])
        except BaseException:
            group.close()
            raise
    group.on_note = lambda rank, text: None
    return description


def joined_description(stages: Sequence[ModelDescription]) -> ModelDescription:
    """Join the descriptions of all stages, in order. A model without stages has one description, returned as is.

    Raises:
        UnsupportedModel: the stages' certificates do not add up to the whole model's.
        InvalidInput: the stages hold different models.
    """
    first = stages[0]
    if first.stage is None:
        return first
    differing = [index for index, stage in enumerate(stages) if stage.program != first.program]
    if differing:
        raise InvalidInput(f"stages 0 and {differing[0]} do not hold the same model: give all of them one checkpoint")
    require_whole([stage.stage.certificate for stage in stages if stage.stage is not None], first.certificate)
    starts = [0, *accumulate(len(stage.facts.kv_shapes) for stage in stages)]
    groups = tuple(
        KVGroup(
            tuple(
                start + layer for stage, start in zip(stages, starts) for layer in stage.facts.kv_groups[index].layers
            ),
            group.window,
        )
        for index, group in enumerate(first.facts.kv_groups)
    )
    shapes = tuple(shape for stage in stages for shape in stage.facts.kv_shapes)
    return replace(first, facts=replace(first.facts, kv_shapes=shapes, kv_groups=groups), stage=None)
