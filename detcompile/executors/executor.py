"""Executor: what a compiled model asks of that which runs it. LocalExecutor and RemoteExecutor answer."""

from collections.abc import Mapping
from typing import Any, Protocol

from torch import Tensor

from detcompile.executors.description import ModelDescription
from detcompile.executors.local import LocalExecutor
from detcompile.parallel import TensorParallel
from detcompile.runtime.engine import Engine
from detcompile.runtime.engine_config import EngineConfig
from detcompile.runtime.speculation.speculator import SpeculationConfig
from detcompile.runtime.step.interfaces import StepRunner

__all__ = ["Executor", "Weights"]


class Weights(Protocol):
    """The weights that an executor's steps read."""

    def digests(self) -> dict[str, str]:
        """The digest of every weight as it is now, whole."""

    def version(self, *, look: bool = False) -> int:
        """Counts the contents that the weights have had; ``look`` also finds changes that nothing else shows."""

    def update(self, source: Mapping[str, Tensor]) -> int:
        """Copy new contents into the weights; returns their version."""


class Executor(Protocol):
    """Runs a compiled model's steps and holds its weights.

    Attributes:
        description: what is known of the model.
        ranks: the ranks with which this process shares the model; None if with none.
    """

    description: ModelDescription
    ranks: TensorParallel | None

    @property
    def weights(self) -> Weights:
        """The weights that its steps read."""

    def fingerprint_parts(self) -> dict[str, str]:
        """What the contract holds fixed, by name. Reads every weight."""

    def new_engine(self, config: EngineConfig, tokenizer: Any | None, speculation: SpeculationConfig | None) -> Engine:
        """A serving engine, ready to serve."""

    def new_runner(self, num_blocks: int, block_size: int, cuda_graphs: bool, num_states: int) -> StepRunner:
        """A KV cache of so many blocks and states, and what runs steps over it."""

    def drafting(self, layers: tuple[int, ...] | None) -> LocalExecutor:
        """What runs these layers for drafts in this process; None for all."""

    def head_weight(self) -> Tensor:
        """[V, H] of the language-model head, whole."""
