"""What runs steps, as an engine and a call see it: in this process, or in others."""

from collections.abc import Hashable
from typing import Any, Protocol

from torch import Tensor

from detcompile.runtime.kv.prefixes import BlockReader
from detcompile.runtime.step.builder import StepArrays
from detcompile.runtime.step.worker import StepResult, StepWork

__all__ = ["Forgetful", "StepRunner", "StepWorker"]


class Forgetful(Protocol):
    """Keeps something of every sequence that has had a row."""

    def forget(self, key: Hashable) -> None:
        """A sequence will have no more rows."""


class StepWorker(BlockReader, Protocol):
    """Runs steps and draws their tokens. Worker and RemoteWorker do.

    Attributes:
        accepts_rejection: whether the sampler can accept guesses by rejection.
        is_alone: no other rank takes part in its steps, so that it may go on without one that could not be launched.
        num_stages: stages of the pipeline that it is, each of which runs a step while the others run others.
        idle_share: share of the stages' time in which they had no step, while there were any; 0 before the first.
        shortest_step: seconds that the slowest stage took for the shortest step; infinity where there is one stage.
    """

    accepts_rejection: bool
    is_alone: bool
    num_stages: int

    @property
    def idle_share(self) -> float:
        """See above."""

    @property
    def shortest_step(self) -> float:
        """See above."""

    @property
    def sampler(self) -> Forgetful:
        """What keeps the sequences' draws."""

    def launch(self, work: StepWork) -> Any:
        """Start a step; nothing waits for it. What comes back is for ``collect``."""

    def collect(self, launched: Any) -> StepResult:
        """Wait for the oldest step that was not collected, and read what it drew."""

    def restart(self) -> None:
        """Have other processes in the place of those that were lost, with nothing in the KV cache; asked only then.

        Raises:
            WorkerError: these are lost, too.
            EngineError: they would have other weights.
        """

    def recover(self) -> None:
        """Settle what a launch that ran out of memory has left; asked only of a worker that is alone."""


class StepRunner(Protocol):
    """Runs steps over a KV cache of its own. Runner and RemoteRunner do."""

    @property
    def is_lost(self) -> bool:
        """Whether what runs the steps has ended, so that every call raises."""

    def run(self, arrays: StepArrays) -> Tensor:
        """The logits [R, V] of a step."""

    def fill_caches(self, value: float) -> None:
        """Write ``value`` into every slot of the KV cache and into every state."""
