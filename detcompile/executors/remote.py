"""RemoteExecutor: runs a model in worker processes, one for each rank.

This process holds requests, scheduler, prefix cache and block tables. The workers hold weights, KV caches and samplers.
A step sends its arrays to the workers, and gets its tokens back.
"""

import pickle
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn

from torch import Tensor

from detcompile.digests import fingerprint
from detcompile.errors import InvalidInput
from detcompile.executors.fingerprints import end_tokens
from detcompile.executors.remote_weights import START_SECONDS
from detcompile.executors.started_ranks import StartedRanks
from detcompile.parallel import TensorParallel, rank_device
from detcompile.runtime.adapters import AdapterSlots
from detcompile.runtime.engine import Engine
from detcompile.runtime.engine_config import EngineConfig
from detcompile.runtime.engine_setup import EngineModel, engine_over, require_block_tables
from detcompile.runtime.processes.group import WorkerGroup
from detcompile.runtime.processes.remote_worker import (
    PackedTensor,
    RemoteRunner,
    RemoteWorker,
    answer,
    free_abandoned,
    pack_tensor,
    unpack_tensor,
)
from detcompile.runtime.requests.plain_values import number, or_none, shown, stop_tokens
from detcompile.runtime.speculation.drafter import require_fitting
from detcompile.runtime.speculation.speculator import SpeculationConfig


class RemoteExecutor:
    """An Executor whose steps run in worker processes. If one worker fails, all of them are ended.

    Args:
        ranks: the processes.
        pp: number of pipeline stages; ranks of one stage are consecutive.
    """

    def __init__(self, ranks: StartedRanks, pp: int = 1) -> None:
        self.pp = pp
        self.description = ranks.description
        self.ranks: TensorParallel | None = None  # this process is not a rank
        self.adapters: AdapterSlots | None = None  # they need one process
        self.weights = ranks.weights
        self._started = ranks
        self._abandoned: deque[int] = deque()

    @property
    def group(self) -> WorkerGroup:
        """The current processes. They change when lost ones are replaced."""
        return self._started.group

    def revive(self) -> None:
        """Replace the processes if they are lost.

        Raises:
            WorkerError: a rank could not start, or the workers were closed.
            EngineError: the weights cannot be restored.
        """
        if self.group.failure is not None:
            self._started.renewed(self.group)

    def close(self) -> None:
        """End the processes."""
        self._started.close()

    def fingerprint_parts(self) -> dict[str, str]:
        """Return the parts of the fingerprint by name; equal to those of the model in one process."""
        parts: dict[str, str] = self.group.call("fingerprint_parts", seconds=START_SECONDS)[0]
        return parts | {"end_tokens": end_tokens(self.description.module)}

    def new_engine(self, config: EngineConfig, tokenizer: Any | None, speculation: SpeculationConfig | None) -> Engine:
        """Create a serving engine with its KV cache in the workers.

        ``memory_fraction`` applies to each rank's GPU. Ranks on one GPU or on a CPU divide the memory that is left.
        """
        facts = self.description.facts
        require_block_tables(facts, config)
        if self.pp > 1:
            if speculation is not None and speculation.reads_states:
                raise InvalidInput(
                    f"pp={self.pp}: this drafter reads hidden states, which stages do not return: use another drafter,"
                    " or compile with pp=1"
                )
            config = replace(config, overlap=False)
        if config.restarts:
            self.revive()
        num_blocks, drafts = config.num_blocks, speculation is not None
        if num_blocks is None:
            num_blocks = self._affordable_blocks(self.group, config, drafts)
        with_states = speculation is not None and speculation.reads_states
        if speculation is not None and with_states:
            require_fitting(speculation.drafter, facts.num_logits, facts.hidden_size, None)
        make = partial(self._make_worker, self.group, config, num_blocks, with_states, drafts)
        given = (self._abandoned, make, self._started.renewed, facts.device)
        worker = RemoteWorker(self.group, *given, num_stages=self.pp)
        model = EngineModel(
            facts=facts,
            end_tokens=lambda: stop_tokens(self.description.module),
            weights_version=self.weights.version,
            fingerprint=lambda: fingerprint(self.fingerprint_parts()),
        )
        return engine_over(worker, num_blocks, model, config, tokenizer, speculation)

    def new_runner(self, num_blocks: int, block_size: int, cuda_graphs: bool, num_states: int = 0) -> RemoteRunner:
        """Create a KV cache in the workers and a runner over it. Models with states are never sharded."""
        given = (num_blocks, block_size, cuda_graphs)
        return RemoteRunner(self.group, self._abandoned, given, self.description.facts.device)

    def drafting(self, layers: tuple[int, ...] | None) -> NoReturn:
        """Raise InvalidInput: a draft model is small, and its logits are read at every token."""
        raise InvalidInput("a drafter runs in the caller's process: compile the draft model with tp=1")

    def head_weight(self) -> Tensor:
        """Return the whole weight [V, H] of the language-model head, on the model's device."""
        weight = answer(self.apply(_head_of_first_rank, seconds=START_SECONDS))
        return unpack_tensor(weight).to(self.description.facts.device)

    def apply(self, function: Callable[..., Any], *args: Any, seconds: float | None = None) -> list[Any]:
        """Call ``function(model, *args)`` in every worker, with its CompiledModel; return the results in rank order.

        Raises:
            InvalidInput: ``function`` or ``seconds`` is invalid, or an argument cannot be sent to the workers.
        """
        seconds = or_none(number)(seconds, "seconds")
        if not callable(function) or (seconds is not None and seconds <= 0):
            raise InvalidInput(f"apply({shown(function)}, seconds={seconds}): give a function, and more than 0 seconds")
        if getattr(function, "__module__", None) == "__main__":
            raise InvalidInput(f"{function} is in the main script, which workers do not import: move it to a module")
        try:
            packed = pickle.dumps((function, args))
        except (AttributeError, TypeError, ValueError, RuntimeError, pickle.PicklingError) as error:
            raise InvalidInput(
                f"{shown(function)} and its arguments cannot be sent to the workers ({error}): give a function of a"
                " module, by its name there, and arguments that can be pickled"
            ) from error
        free_abandoned(self.group, self._abandoned)
        results = self.group.call("apply", packed, seconds=seconds)
        self.weights.refresh()  # the function may have changed them
        return results

    def _make_worker(
        self,
        first: WorkerGroup,
        config: EngineConfig,
        num_blocks: int,
        with_states: bool,
        drafts: bool,
        group: WorkerGroup,
        name: int,
    ) -> None:
        """Create an engine's worker in the processes; replacements of ``first`` measure their memory again."""
        if group is not first and config.num_blocks is None:
            self._affordable_blocks(group, config, drafts)
        group.call("new_worker", name, config, num_blocks, with_states, seconds=START_SECONDS)

    def _affordable_blocks(self, group: WorkerGroup, config: EngineConfig, drafts: bool) -> int:
        devices = {rank_device(self.description.facts.device.type, rank) for rank in range(group.num_ranks)}
        sharers = -(-group.num_ranks // len(devices))
        num_blocks: list[int] = group.call("affordable_blocks", config, sharers, drafts, seconds=START_SECONDS)
        return min(num_blocks)


def _head_of_first_rank(model: Any) -> PackedTensor | None:
    if model.executor.description.stage is not None and model.model.get_output_embeddings().weight is None:
        return None  # the last stage has it
    weight = model.head_weight()
    return pack_tensor(weight) if model.ranks is None or model.ranks.rank == 0 else None
