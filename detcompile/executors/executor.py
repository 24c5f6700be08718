"""Executor: the interface that runs a compiled model. LocalExecutor and RemoteExecutor implement it."""

from collections.abc import Mapping
from typing import Any, Protocol

from torch import Tensor

from detcompile.executors.description import ModelDescription
from detcompile.executors.local import LocalExecutor
from detcompile.parallel import TensorParallel
from detcompile.runtime.adapters import AdapterSlots
from detcompile.runtime.engine import Engine
from detcompile.runtime.engine_config import EngineConfig
from detcompile.runtime.speculation.speculator import SpeculationConfig
from detcompile.runtime.step.interfaces import StepRunner


class Weights(Protocol):
    """The weights of an executor's model."""

    def digests(self) -> dict[str, str]:
        """Return the current digest of every whole weight."""

    def version(self, *, look: bool = False) -> int:
        """Return a counter that rises when weights change; ``look`` also detects untracked changes."""

    def update(self, source: Mapping[str, Tensor]) -> int:
        """Copy new contents into the weights; return the new version."""


class Executor(Protocol):
    """Runs a compiled model's steps and holds its weights.

    Attributes:
        description: the model's certificate, orders and sizes.
        ranks: the tensor-parallel group of this process; None if the model is not sharded here.
        adapters: the adapters of a model with slots for them.
    """

    description: ModelDescription
    ranks: TensorParallel | None
    adapters: AdapterSlots | None

    @property
    def weights(self) -> Weights:
        """The model's weights."""

    def fingerprint_parts(self) -> dict[str, str]:
        """Return the parts of the fingerprint by name. Reads every weight."""

    def new_engine(self, config: EngineConfig, tokenizer: Any | None, speculation: SpeculationConfig | None) -> Engine:
        """Create a serving engine."""

    def new_runner(self, num_blocks: int, block_size: int, cuda_graphs: bool, num_states: int) -> StepRunner:
        """Create a KV cache and a runner over it."""

    def drafting(self, layers: tuple[int, ...] | None) -> LocalExecutor:
        """Return an executor in this process that drafts with these layers; None uses all layers."""

    def head_weight(self) -> Tensor:
        """Return the whole weight [V, H] of the language-model head."""
