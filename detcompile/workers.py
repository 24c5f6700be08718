"""The worker process: holds one rank's compiled model, and runs the steps that the parent plans.

``executors.ranks`` names this module, and ``runtime.processes.group`` calls it; nothing else imports it.
"""

import contextlib
import pickle
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from transformers import PreTrainedModel
from transformers.utils import logging as transformers_logging

from detcompile.api import compile_here
from detcompile.config import gpus_shared, place_of_torchrun, settle_symmetric_memory
from detcompile.digests import fingerprint, weights_digest
from detcompile.errors import InvalidInput
from detcompile.executors.description import ModelDescription
from detcompile.executors.local import LocalExecutor
from detcompile.executors.ranks import RankPlan
from detcompile.models.compiled import CompiledModel, require_causal
from detcompile.models.exported import load
from detcompile.parallel import PipelineStage, backend_of_ranks, rank_device
from detcompile.passes.sharding.shard import moves_after_sharding
from detcompile.progress import listening, stage
from detcompile.runtime.engine_config import EngineConfig
from detcompile.runtime.engine_setup import Forwards, affordable_blocks, new_worker, rehearse_steps, room_for_cache
from detcompile.runtime.memory_probe import Room
from detcompile.runtime.processes.remote_worker import (
    PackedTensor,
    PackedWork,
    RankStep,
    WorkReader,
    pack_tensor,
    unpack_tensor,
)
from detcompile.runtime.processes.start_progress import StageNotes, reading
from detcompile.runtime.step.builder import StepArrays
from detcompile.runtime.step.runner import Runner
from detcompile.runtime.step.stage_forward import StageForward
from detcompile.runtime.step.worker import LaunchedStep, Worker


class _Served(NamedTuple):
    """The worker of one of the parent's engines."""

    worker: Worker
    reader: WorkReader
    launched: deque[tuple[LaunchedStep, Callable[[], float]]]  # and its seconds in this stage


class RankServer:
    """The commands of one rank. Only the first rank of the last stage returns the results of a step.

    Args:
        note: sends a progress text to the parent.
    """

    def __init__(self, rank: int, plan: RankPlan, note: Callable[[str], None]) -> None:
        self.rank = rank
        self.plan = plan
        self._stage = PipelineStage(size=plan.pp, index=rank // plan.tp)
        self._is_last = self._stage.index == plan.pp - 1
        self._answers = rank == plan.num_ranks - plan.tp
        self.note = note
        self._host = plan.host or "127.0.0.1"
        self._store: dist.TCPStore | None = None
        self._made: dict[int, _Served | Runner] = {}
        self._room = Room(0)  # for the next engine

    def open_store(self) -> int:
        """Open the rendezvous store on rank 0, on a free port; return the port."""
        if self.rank:
            return 0
        self._store = dist.TCPStore(self._host, 0, is_master=True, wait_for_workers=False)
        return self._store.port

    def start(self, port: int) -> ModelDescription | None:
        """Join the other ranks, then load and compile the model, or load an archive; return its description."""
        plan = self.plan
        transformers_logging.disable_progress_bar()  # the parent shows one for all ranks
        torch.set_num_threads(plan.num_threads)
        device = rank_device(plan.device_type, self.rank if plan.host is None else place_of_torchrun().local_rank)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        with listening(StageNotes(self.note) if self.rank == 0 else None):
            tp_group = None
            if plan.num_ranks > 1:
                with stage("join the other ranks"):
                    tp_group = self._join(device, port)
            self.model = self._compiled(device, tp_group) if plan.archive is None else load(plan.archive)
        return self.model.executor.description.elsewhere() if self.rank % plan.tp == 0 else None

    def _compiled(self, device: torch.device, tp_group: dist.ProcessGroup | None) -> CompiledModel:
        plan = self.plan
        with stage("load the model"):
            model = load_for_rank(plan, device)
        part = replace(self._stage, device=device) if plan.pp > 1 else None
        arguments = plan.tp, plan.numerics, plan.max_context, tp_group
        compiled = compile_here(model, *arguments, on_read=self._tell_read, stage=part, **plan.options)
        causal = require_causal(compiled, "a worker process")
        if part is not None:
            torch.compiler.reset()  # it keeps traced modules, with the weights of other stages
            self._connect(causal)
        return causal

    def _connect(self, model: CompiledModel) -> None:
        """Make the stage's forward receive rows from the previous stage and send them to the next one."""
        executor, part = model.executor, model.executor.description.stage
        assert isinstance(executor, LocalExecutor) and part is not None
        before = self.rank - self.plan.tp if self._stage.index else None
        after = None if self._is_last else self.rank + self.plan.tp
        shared = self.plan.device_type == "cuda" and gpus_shared()
        hosts = dist.new_group(backend="gloo") if shared else None
        executor.forwards = Forwards(StageForward(executor.forwards.plain, part.rows, before, after, hosts))

    def _tell_read(self, done: int, total: int) -> None:
        self.note(reading(done, total))

    def fingerprint_parts(self) -> dict[str, str] | None:
        """Return the parts of the model's fingerprint on rank 0. Collective: every rank must call it."""
        parts = self.model.fingerprint_parts
        return parts if self.rank == 0 else None

    def identity(self) -> str | None:
        """Return a fingerprint of program and weights on rank 0, ignoring in-place changes of weights."""
        if self.rank:
            return None
        weights = weights_digest(self._executor.weights.given())
        return fingerprint({"weights": weights, **self._executor.origin.fixed_parts})

    def weights_version(self) -> int:
        """Return the version of the local weights."""
        return self.model.executor.weights.version(look=True)

    def update_weights(self, path: str) -> int:
        """Update this rank's shard from a file of new weights; return the new version."""
        return self.model.executor.weights.update(torch.load(path, map_location="cpu", mmap=True))

    def weight_digests(self) -> dict[str, str] | None:
        """Return digests of the whole weights on rank 0. Collective: every rank must call it."""
        digests = self.model.weight_digests()
        return digests if self.rank == 0 else None

    def affordable_blocks(self, config: EngineConfig, num_sharers: int, drafts: bool) -> int:
        """Return how many KV blocks fit on this rank's device if ``num_sharers`` ranks share it."""
        facts, forward = self.model.facts, self._executor.forwards.plain
        rehearse_steps(facts, forward, config, self.plan.num_ranks)
        self._room = room_for_cache(facts, forward, config, drafts=drafts, num_sharers=num_sharers)
        return affordable_blocks(facts, config, self._room, num_sharers)

    def new_worker(self, name: int, config: EngineConfig, num_blocks: int, with_states: bool) -> None:
        """Create an engine's worker; its steps return hidden states if ``with_states``."""
        forwards = self._executor.forwards
        forward = forwards.plain
        if with_states:
            assert forwards.with_states is not None
            forward = forwards.with_states()
        step = self._room.step if config.num_blocks is None else None
        if config.num_blocks is not None or with_states:
            rehearse_steps(self.model.facts, forward, config, self.plan.num_ranks)
        worker = new_worker(self.model.facts, forward, config, num_blocks, step=step)
        self._made[name] = _Served(worker, WorkReader(), deque())

    def launch(self, name: int, packed: PackedWork) -> None:
        """Launch a step of an engine."""
        served = self._served(name)
        for number in packed.forgotten:
            served.worker.sampler.forget(number)
        with self._connected() as forward:
            launched = served.worker.launch(served.reader.read(packed))
            served.launched.append((launched, float if forward is None else forward.timed()))

    def collect(self, name: int) -> RankStep | None:
        """Wait for the oldest launched step; return its result, with hidden states packed separately."""
        served = self._served(name)
        launched, seconds = served.launched.popleft()
        result = served.worker.collect(launched)
        if self.rank % self.plan.tp:
            return None
        if not self._answers:
            return RankStep(None, None, seconds())
        hidden = None if result.hidden is None else pack_tensor(result.hidden)
        return RankStep(result._replace(hidden=None), hidden, seconds())

    def read_blocks(self, name: int, tables: Sequence[Sequence[int]]) -> list[tuple[PackedTensor, PackedTensor]]:
        """Read blocks of an engine's KV cache: this rank's heads."""
        layers = self._served(name).worker.read_blocks(tables)
        return [(pack_tensor(keys), pack_tensor(values)) for keys, values in layers]

    def write_blocks(
        self, name: int, tables: Sequence[Sequence[int]], packed: Sequence[tuple[PackedTensor, PackedTensor]]
    ) -> None:
        """Write blocks of an engine's KV cache: this rank's heads, cut out of all heads."""
        whole = [[unpack_tensor(part).chunk(self.plan.tp, 2)[self.rank] for part in parts] for parts in packed]
        self._served(name).worker.write_blocks(tables, [(keys, values) for keys, values in whole])

    def new_runner(self, name: int, num_blocks: int, block_size: int, cuda_graphs: bool) -> None:
        """Create a KV cache and a runner over it."""
        self._made[name] = self._executor.new_runner(num_blocks, block_size, cuda_graphs)

    def run(self, name: int, arrays: StepArrays) -> PackedTensor | None:
        """Run a step; return its logits."""
        with self._connected():
            logits = self._runner(name).run(arrays)
        return pack_tensor(logits) if self._answers else None

    def fill_caches(self, name: int, value: float) -> None:
        """Fill a runner's cache with a value."""
        self._runner(name).fill_caches(value)

    def apply(self, packed: bytes) -> Any:
        """Call a pickled function of the caller with this rank's model and the pickled arguments.

        Raises:
            InvalidInput: this process cannot import the function, or a class of its arguments.
        """
        try:
            function, args = pickle.loads(packed)
        except (ImportError, AttributeError) as error:
            raise InvalidInput(
                f"apply: the workers cannot import the function ({error}): move it to a module that they can import"
            ) from error
        return function(self.model, *args)

    def free(self, name: int) -> None:
        """Drop a worker or a runner with its cache, or the rest of one whose creation failed."""
        self._made.pop(name, None)

    def kept(self) -> list[int]:
        """Return the names of the workers and runners in this process."""
        return list(self._made)

    def _join(self, device: torch.device, port: int) -> dist.ProcessGroup | None:
        """Join the other ranks; return the group of this stage's ranks, or None if no subgroup is needed."""
        plan = self.plan
        settle_symmetric_memory()
        store = self._store or dist.TCPStore(self._host, port, is_master=False)
        backend = backend_of_ranks(device.type)
        dist.init_process_group(backend, store=store, rank=self.rank, world_size=plan.num_ranks)
        if plan.pp == 1 or plan.tp == 1:
            return None
        stages = [list(range(first, first + plan.tp)) for first in range(0, plan.num_ranks, plan.tp)]
        return [dist.new_group(stage) for stage in stages][self._stage.index]

    @contextlib.contextmanager
    def _connected(self) -> Iterator[StageForward | None]:
        """Connect steps inside the block to the other pipeline stages, if there are any."""
        forward = self._executor.forwards.plain
        if isinstance(forward, StageForward):
            with forward.connected():
                yield forward
        else:
            yield None

    @property
    def _executor(self) -> LocalExecutor:
        executor = self.model.executor
        assert isinstance(executor, LocalExecutor), "a rank starts no workers of its own"
        return executor

    def _served(self, name: int) -> _Served:
        served = self._made[name]
        assert isinstance(served, _Served)
        return served

    def _runner(self, name: int) -> Runner:
        runner: Any = self._made[name]
        assert isinstance(runner, Runner)
        return runner


def load_for_rank(plan: RankPlan, device: torch.device) -> PreTrainedModel:
    """Load the module: on the rank's device if it may be needed whole there, otherwise mapped on the CPU.

    compile() then shards each weight of the stage's layers and moves the shard to the device. So a rank reads only its
    shard and what the fingerprint hashes, ranks share the file's pages, and no device holds the whole model.
    """
    if plan.load is not None:
        module = plan.load(torch.device("cpu"))
    elif plan.file is not None:
        module = torch.load(f"/dev/fd/{plan.file}", map_location="cpu", mmap=True, weights_only=False)
    else:
        assert plan.build is not None
        return plan.build()
    return module if plan.num_ranks > 1 and moves_after_sharding(module) else module.to(device)
