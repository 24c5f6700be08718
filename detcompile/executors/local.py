"""LocalExecutor: runs a model in this process, compiled here or loaded from an archive."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from detcompile.digests import fingerprint, weights_digest
from detcompile.errors import InvalidInput
from detcompile.executors.description import ModelDescription
from detcompile.executors.fingerprints import end_tokens
from detcompile.executors.live_weights import LiveWeights
from detcompile.parallel import TensorParallel
from detcompile.runtime.adapters import AdapterSlots
from detcompile.runtime.engine import Engine
from detcompile.runtime.engine_config import EngineConfig
from detcompile.runtime.engine_setup import EngineModel, Forwards, new_engine
from detcompile.runtime.kv.kv_cache import new_cache
from detcompile.runtime.requests.plain_values import stop_tokens
from detcompile.runtime.speculation.speculator import SpeculationConfig
from detcompile.runtime.step.runner import Runner
from detcompile.templates.device.launcher import on_device


class Origin(Protocol):
    """The source of a forward: a module lowered in this process, or an archive."""

    @property
    def fixed_parts(self) -> Mapping[str, str]:
        """The parts of the fingerprint, without weights."""

    def head_weight(self) -> Tensor:
        """Return the whole weight [V, H] of the language-model head. Collective: every rank must call it."""

    def with_layers(self, layers: tuple[int, ...]) -> "LocalExecutor":
        """Return an executor of some of the layers that shares the weights."""


@dataclass(eq=False, repr=False)
class LocalExecutor:
    """An Executor in this process, which may be one of the ranks that share a model.

    Args:
        forwards: run a step.
        weights: the tensors that ``forwards`` read.
        origin: a LoweredModule or an ArchivedProgram.
        adapters: the adapters of a model with slots for them.
    """

    description: ModelDescription
    forwards: Forwards
    weights: LiveWeights
    origin: Origin
    ranks: TensorParallel | None = None
    adapters: AdapterSlots | None = None

    def fingerprint_parts(self) -> dict[str, str]:
        """Return the parts of the fingerprint by name. Reads every weight."""
        weights = weights_digest(self.weights.digests())
        return {"weights": weights, **self.origin.fixed_parts, "end_tokens": end_tokens(self.description.module)}

    def new_engine(self, config: EngineConfig, tokenizer: Any | None, speculation: SpeculationConfig | None) -> Engine:
        """Create a serving engine with its KV cache in this process."""
        if self.ranks is not None and speculation is not None and speculation.switch == "automatic":
            raise InvalidInput(
                "ranks that share a model must run the same steps, but each would switch speculation by its own"
                " clock: pass SpeculationConfig(switch='always')"
            )
        model = EngineModel(
            facts=self.description.facts,
            end_tokens=lambda: stop_tokens(self.description.module),
            weights_version=self.weights.version,
            fingerprint=lambda: fingerprint(self.fingerprint_parts()),
            adapters=self.adapters,
        )
        with on_device(model.facts.device):
            return new_engine(model, self.forwards, config, tokenizer, speculation, self.ranks)

    def new_runner(self, num_blocks: int, block_size: int, cuda_graphs: bool, num_states: int = 0) -> Runner:
        """Create a KV cache and a runner over it."""
        cache = new_cache(self.description.facts, num_blocks, block_size, num_states)
        return Runner(self.forwards.plain, cache, cuda_graphs)

    def drafting(self, layers: tuple[int, ...] | None) -> "LocalExecutor":
        """Return an executor that drafts with these layers; None uses all layers."""
        if layers is None:
            return self
        if self.ranks is not None:
            raise InvalidInput("drafting with some layers needs a model that is not sharded: compile with tp=1")
        return self.origin.with_layers(layers)

    def head_weight(self) -> Tensor:
        """Return the whole weight [V, H] of the language-model head. Collective: every rank must call it."""
        return self.origin.head_weight()
