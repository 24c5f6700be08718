"""RemoteExecutor: runs a model's steps in worker processes, one a rank.

This process keeps what decides: requests, scheduler, prefix cache, block tables. The workers hold what computes:
weights, KV caches, samplers. So a step sends its arrays, and gets its tokens back.
"""

import tempfile
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NoReturn

import torch
from torch import Tensor

from detcompile.digests import fingerprint
from detcompile.errors import InvalidInput
from detcompile.executors.description import ModelDescription
from detcompile.parallel import TensorParallel, rank_device
from detcompile.runtime.dense.end_tokens import stop_tokens
from detcompile.runtime.engine import Engine
from detcompile.runtime.engine_config import EngineConfig
from detcompile.runtime.engine_setup import EngineModel, engine_over
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
from detcompile.runtime.speculation.drafter import require_fitting
from detcompile.runtime.speculation.speculator import SpeculationConfig

__all__ = ["RemoteExecutor", "RemoteWeights", "START_SECONDS"]

START_SECONDS = 3600.0  # loading, compiling, and capturing CUDA graphs


class RemoteWeights:
    """The weights that the workers share.

    Args:
        group: processes whose target serves ``weight_digests``, ``weights_version`` and ``update_weights``.
    """

    def __init__(self, group: WorkerGroup) -> None:
        self._group = group
        self._version = 0

    def digests(self) -> dict[str, str]:
        """The digest of every weight as it is now, whole; every worker looks at its share."""
        digests: dict[str, str] = self._group.call("weight_digests", seconds=START_SECONDS)[0]
        return digests

    def version(self, *, look: bool = False) -> int:
        """Counts the contents that the weights have had, as far as ``ask`` has heard of them."""
        return self._version

    def ask(self) -> None:
        """Have the workers look whether their weights were changed."""
        self._version = max(self._group.call("weights_version"))

    def update(self, source: Mapping[str, Tensor]) -> int:
        """Have every worker take its share of new weights, which travel in a temporary file that all of them map.

        Raises:
            InvalidInput: they are not all of the model's parameters, or do not fit; or the model takes no new ones.
        """
        with tempfile.NamedTemporaryFile() as file:
            torch.save({name: tensor.detach().cpu() for name, tensor in source.items()}, file)
            file.flush()
            self._version = max(self._group.call("update_weights", file.name, seconds=START_SECONDS))
        return self._version


class RemoteExecutor:
    """An Executor whose steps run in worker processes. A worker that fails ends all of them.

    Args:
        group: processes of workers.RankServer, started.
        description: what the ranks say of the model.
        pp: stages that they are; the ranks of a stage stand together.
    """

    def __init__(self, group: WorkerGroup, description: ModelDescription, pp: int = 1) -> None:
        self.group = group
        self.pp = pp
        self.description = description
        self.ranks: TensorParallel | None = None  # this process is none of them
        self.weights = RemoteWeights(group)
        self._abandoned: deque[int] = deque()

    def fingerprint_parts(self) -> dict[str, str]:
        """What the contract holds fixed, by name; the same as of a model in this process."""
        parts: dict[str, str] = self.group.call("fingerprint_parts", seconds=START_SECONDS)[0]
        return parts

    def new_engine(self, config: EngineConfig, tokenizer: Any | None, speculation: SpeculationConfig | None) -> Engine:
        """A serving engine, its KV cache in the workers.

        ``memory_fraction`` is of each rank's GPU; ranks on one GPU or on a CPU share what it leaves.
        """
        facts = self.description.facts
        if self.pp > 1:
            config = self._of_stages(config, speculation)
        num_blocks = config.num_blocks
        if num_blocks is None:
            num_blocks = self._affordable_blocks(config, drafts=speculation is not None)
        with_states = speculation is not None and speculation.reads_states
        if speculation is not None and with_states:
            require_fitting(speculation.drafter, facts.num_logits, facts.hidden_size, None)
        given = (config, num_blocks, with_states)
        worker = RemoteWorker(self.group, self._abandoned, given, START_SECONDS, facts.device, num_stages=self.pp)
        model = EngineModel(
            facts=facts,
            eos_token_ids=stop_tokens(self.description.module),
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
        """``function(model, *args)`` in every worker, with that rank's CompiledModel; the results, in rank order."""
        if getattr(function, "__module__", None) == "__main__":
            raise InvalidInput(f"{function} is of the main script, which workers do not have: import it from a module")
        free_abandoned(self.group, self._abandoned)
        results = self.group.call("apply", function, args, seconds=seconds)
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

    def _affordable_blocks(self, config: EngineConfig, *, drafts: bool) -> int:
        ranks = self.group.num_ranks
        devices = {rank_device(self.description.facts.device.type, rank) for rank in range(ranks)}
        sharers = -(-ranks // len(devices))
        found: list[int] = self.group.call("affordable_blocks", config, sharers, drafts, seconds=START_SECONDS)
        return min(found)


def _head_of_first_rank(model: Any) -> PackedTensor | None:
    if model.executor.description.stage is not None and model.model.get_output_embeddings().weight is None:
        return None  # the last stage has it
    weight = model.head_weight()
    return pack_tensor(weight) if model.ranks is None or model.ranks.rank == 0 else None
