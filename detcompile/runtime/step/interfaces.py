"""Interfaces of the objects that run steps, in this process or in others."""

from collections.abc import Hashable
from typing import Any, Protocol

from torch import Tensor

from detcompile.runtime.adapters import Adapter
from detcompile.runtime.kv.prefixes import BlockReader
from detcompile.runtime.step.builder import StepArrays
from detcompile.runtime.step.worker import StepResult, StepWork


class Forgetful(Protocol):
    """Keeps state of every sequence that has had a row."""

    def forget(self, key: Hashable) -> None:
        """Drop the state of a sequence that will have no more rows."""


class StepWorker(BlockReader, Protocol):
    """Runs steps and draws their tokens: Worker or RemoteWorker.

    Attributes:
        accepts_rejection: True if the sampler supports rejection sampling of guesses.
        is_alone: True if no other rank takes part in its steps, so that a step that could not be launched can be
            dropped.
        num_stages: number of pipeline stages, each of which can run a different step.
        idle_share: fraction of the stages' time without a step while there was work; 0 before the first step.
        shortest_step: the slowest stage's seconds for the shortest step; infinity with a single stage.
    """

    accepts_rejection: bool
    is_alone: bool
    num_stages: int

    @property
    def idle_share(self) -> float:
        """See the class."""

    @property
    def shortest_step(self) -> float:
        """See the class."""

    @property
    def sampler(self) -> Forgetful:
        """Keeps the sequences' sampling state."""

    def launch(self, work: StepWork) -> Any:
        """Start a step without waiting. Pass the result to ``collect``."""

    def collect(self, launched: Any) -> StepResult:
        """Wait for the oldest step not collected yet, and read the tokens it drew."""

    def restart(self) -> None:
        """Start new processes in place of lost ones, with an empty KV cache. Call it only after a loss.

        Raises:
            WorkerError: the new processes are lost, too.
            EngineError: the new processes would have different weights.
        """

    def recover(self) -> None:
        """Clean up after a launch that ran out of memory. Call it only if ``is_alone``."""


class StepRunner(Protocol):
    """Runs steps over its own KV cache: Runner or RemoteRunner.

    Attributes:
        adapter: the adapter of the next steps; None for the plain model.
    """

    adapter: Adapter | None

    @property
    def is_lost(self) -> bool:
        """True if the process that runs the steps has ended, so that every call raises."""

    def run(self, arrays: StepArrays) -> Tensor:
        """Run a step and return its logits [R, V]."""

    def fill_caches(self, value: float) -> None:
        """Fill every slot of the KV cache and every state with ``value``."""
