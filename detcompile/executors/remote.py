"""RemoteExecutor: runs a model's steps in worker processes, one a rank.

This process keeps what decides: requests, scheduler, prefix cache, block tables. The workers hold what computes:
weights, KV caches, samplers. So a step sends its arrays, and gets its tokens back.
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
from detcompile.runtime.dense.end_tokens import stop_tokens
from detcompile.runtime.engine import Engine
from detcompile.runtime.engine_config import EngineConfig
from detcompile.runtime.engine_setup import EngineModel, engine_over, require_block_tables
from detcompile.runtime.processes.group import WorkerGroup
from detcompile.runtime.processes.packed_tensors import PackedTensor, pack_tensor, unpack_tensor
from detcompile.runtime.processes.remote_worker import (
    RemoteRunner,
    RemoteWorker,
    answer,
    free_abandoned,
)
from detcompile.runtime.requests.plain_values import number, or_none, shown
from detcompile.runtime.speculation.drafter import require_fitting
from detcompile.runtime.speculation.speculator import SpeculationConfig

__all__ = ["RemoteExecutor"]


class RemoteExecutor:
    """An Executor whose steps run in worker processes. A worker that fails ends all of them.

    Args:
        ranks: the processes.
        pp: stages that they are; the ranks of a stage stand together.
    """

    def __init__(self, ranks: StartedRanks, pp: int = 1) -> None:
        self.pp = pp
        self.description = ranks.description
        self.ranks: TensorParallel | None = None  # this process is none of them
        self.weights = ranks.weights
        self._started = ranks
        self._abandoned: deque[int] = deque()

    @property
    def group(self) -> WorkerGroup:
        """The processes; others once an engine had them started in the place of lost ones."""
        return self._started.group

    def revive(self) -> None:
        """Have others in the place of processes that are found lost.

        Raises:
            WorkerError: a rank could not start, or the workers were closed.
            EngineError: the weights are not to be had again.
        """
        if self.group.failure is not None:
            self._started.renewed(self.group)

    def close(self) -> None:
        """End the processes."""
        self._started.close()

    def fingerprint_parts(self) -> dict[str, str]:
        """What the contract holds fixed, by name; the same as of a model in this process."""
        parts: dict[str, str] = self.group.call("fingerprint_parts", seconds=START_SECONDS)[0]
        return parts | {"end_tokens": end_tokens(self.description.module)}

    def new_engine(self, config: EngineConfig, tokenizer: Any | None, speculation: SpeculationConfig | None) -> Engine:
        """A serving engine, its KV cache in the workers.

        ``memory_fraction`` is of each rank's GPU; ranks on one GPU or on a CPU share what it leaves.
        """
        facts = self.description.facts
        require_block_tables(facts, config)
        if self.pp > 1:
            config = self._of_stages(config, speculation)
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
        """A KV cache in the workers, and what runs steps over it; ranks share no model that has states."""
        given = (num_blocks, block_size, cuda_graphs)
        return RemoteRunner(self.group, self._abandoned, given, self.description.facts.device)

    def drafting(self, layers: tuple[int, ...] | None) -> NoReturn:
        """A draft model is small, and its logits are read at every token.

        Raises:
            InvalidInput: always.
        """
        raise InvalidInput("a drafter runs in the caller's process: compile the draft model with tp=1")

    def head_weight(self) -> Tensor:
        """[V, H] of the language-model head, on the device of ``description``; it travels whole."""
        weight = answer(self.apply(_head_of_first_rank, seconds=START_SECONDS))
        return unpack_tensor(weight).to(self.description.facts.device)

    def apply(self, function: Callable[..., Any], *args: Any, seconds: float | None = None) -> list[Any]:
        """``function(model, *args)`` in every worker, with that rank's CompiledModel; the results, in rank order.

        Raises:
            InvalidInput: what is no function or no time, or what the workers cannot be given.
        """
        seconds = or_none(number)(seconds, "seconds")
        if not callable(function) or (seconds is not None and seconds <= 0):
            raise InvalidInput(f"apply({shown(function)}, seconds={seconds}): give a function, and more than 0 seconds")
        if getattr(function, "__module__", None) == "__main__":
            raise InvalidInput(f"{function} is of the main script, which workers do not have: import it from a module")
        try:
            packed = pickle.dumps((function, args))
        except (AttributeError, TypeError, ValueError, RuntimeError, pickle.PicklingError) as error:
            raise InvalidInput(
                f"{shown(function)} and its arguments cannot be sent to the workers ({error}): give a function of a"
                " module, by its name there, and arguments that can be pickled"
            ) from error
        free_abandoned(self.group, self._abandoned)
        results = self.group.call("apply", packed, seconds=seconds)
        self.weights.ask()  # it may have changed them
        return results

    def _of_stages(self, config: EngineConfig, speculation: SpeculationConfig | None) -> EngineConfig:
        """Settings of an engine over stages, of which the first reads tokens and the last draws them."""
        if speculation is not None and speculation.reads_states:
            raise InvalidInput(
                f"pp={self.pp}: this drafter reads hidden states, which stages do not hand out: take another drafter,"
                " or compile with pp=1"
            )
        return replace(config, overlap=False)

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
        """Have processes make an engine's worker; where they are not the ``first``, they measure their steps again."""
        if group is not first and config.num_blocks is None:
            self._affordable_blocks(group, config, drafts)
        group.call("new_worker", name, config, num_blocks, with_states, seconds=START_SECONDS)

    def _affordable_blocks(self, group: WorkerGroup, config: EngineConfig, drafts: bool) -> int:
        devices = {rank_device(self.description.facts.device.type, rank) for rank in range(group.num_ranks)}
        sharers = -(-group.num_ranks // len(devices))
        found: list[int] = group.call("affordable_blocks", config, sharers, drafts, seconds=START_SECONDS)
        return min(found)


def _head_of_first_rank(model: Any) -> PackedTensor | None:
    if model.executor.description.stage is not None and model.model.get_output_embeddings().weight is None:
        return None  # the last stage has it
    weight = model.head_weight()
    return pack_tensor(weight) if model.ranks is None or model.ranks.rank == 0 else None
