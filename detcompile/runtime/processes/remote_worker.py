"""RemoteWorker: a Worker whose steps run in the processes of a WorkerGroup, and its wire format.

A sequence's parameters and tokens are sent once, with its first row; later rows refer to it by a number.
"""

import math
import time
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from itertools import count
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from detcompile.errors import InvalidInput
from detcompile.runtime.adapters import Adapter
from detcompile.runtime.grammars.matcher import Mask
from detcompile.runtime.kv.prefixes import LayerBlocks
from detcompile.runtime.processes.group import WorkerGroup
from detcompile.runtime.requests.sampling_params import SamplingParams
from detcompile.runtime.sampling.sampler import SampleRow
from detcompile.runtime.step.builder import StepArrays
from detcompile.runtime.step.worker import StepResult, StepWork

NO_TOKENS: tuple[int, ...] = ()
NAMES = count(1)  # names of this process's objects in the workers


class PackedTensor(NamedTuple):
    """A tensor as bytes; works for dtypes that numpy does not have."""

    memory: NDArray[np.uint8]
    dtype: torch.dtype
    shape: tuple[int, ...]


class PackedWork(NamedTuple):
    """A StepWork with its rows encoded as numbers."""

    work: StepWork
    rows: NDArray[np.int64]  # [R, 4]: sequence number, position, num_generated, sample_index
    new: dict[int, tuple[SamplingParams, Sequence[int]]]  # sequences without earlier rows: parameters and tokens
    forgotten: tuple[int, ...]  # sequences that will have no more rows
    forbidden: dict[int, tuple[int, ...]]  # by row: tokens that would complete a bad word
    masks: dict[int, Mask]  # by row: tokens that a grammar allows


class RankStep(NamedTuple):
    """Answer of the first rank of a stage about a step."""

    result: StepResult | None  # from the last stage
    hidden: PackedTensor | None
    busy_seconds: float  # without waiting for another stage's rows


class WorkReader:
    """Decodes PackedWork in a worker; remembers the sequences' parameters."""

    def __init__(self) -> None:
        self._params: dict[int, SamplingParams] = {}

    def read(self, packed: PackedWork) -> StepWork:
        """Decode a step; its rows' keys are numbers."""
        for number in packed.forgotten:
            self._params.pop(number, None)
        self._params |= {number: params for number, (params, _) in packed.new.items()}
        rows = tuple(
            SampleRow(
                params=self._params[number],
                position=position,
                num_generated=num_generated,
                sample_index=sample_index,
                key=number,
                token_ids=packed.new[number][1] if number in packed.new else NO_TOKENS,
                forbidden=packed.forbidden.get(index, NO_TOKENS),
                mask=packed.masks.get(index),
            )
            for index, (number, position, num_generated, sample_index) in enumerate(packed.rows.tolist())
        )
        return packed.work._replace(rows=rows)


def answer(values: Sequence[Any]) -> Any:
    """Return the value of the one rank that answers a command; the others return None."""
    return next(value for value in values if value is not None)


def free_abandoned(group: WorkerGroup, abandoned: "deque[int]") -> None:
    """Make the workers free objects that nobody holds here any more."""
    while True:
        try:
            name = abandoned.popleft()
        except IndexError:  # other threads free too
            return
        group.post("free", name)


class _Remote:
    """An object that the workers keep under a name for as long as this proxy lives.

    Garbage collection may run at any point, so a dead proxy is only noted; the next command first tells the workers.
    """

    def __init__(self, group: WorkerGroup, abandoned: "deque[int]") -> None:
        self.name = next(NAMES)
        self._group = group
        self._abandoned = abandoned
        weakref.finalize(self, abandoned.append, self.name).atexit = False

    def _tell_abandoned(self) -> None:
        free_abandoned(self._group, self._abandoned)


class RemoteStep:
    """A step sent to the workers; ``ticket`` collects it once that was requested."""

    ticket: int | None = None


class RemoteWorker(_Remote):
    """Runs steps and draws tokens in the workers, in the order of the launches.

    Args:
        group: processes whose target serves ``launch``, ``collect``, ``read_blocks``, ``write_blocks`` and ``free``.
        abandoned: names to free, shared by all objects of the group.
        make: creates the worker of a name in the processes of a group.
        renewed: returns a new group in place of a lost one.
        device: device on which hidden states are returned.
        num_stages: number of pipeline stages.
    """

    accepts_rejection = False
    is_alone = False

    def __init__(
        self,
        group: WorkerGroup,
        abandoned: "deque[int]",
        make: Callable[[WorkerGroup, int], None],
        renewed: Callable[[WorkerGroup], WorkerGroup],
        device: torch.device,
        *,
        num_stages: int = 1,
    ) -> None:
        super().__init__(group, abandoned)
        self._make, self._renewed = make, renewed
        self._device = device
        self.num_stages = num_stages
        self.head_shares = group.num_ranks if num_stages == 1 else 0
        self._stages = StageClock(num_stages)
        self._next_number = count()
        self._begin()

    def _begin(self) -> None:
        self._newest: RemoteStep | None = None
        self._numbers: dict[Hashable, int] = {}
        self._forgotten: list[int] = []
        self._tell_abandoned()
        self._make(self._group, self.name)

    def restart(self) -> None:
        """Continue in new processes in place of the lost ones, with an empty KV cache."""
        self._group = self._renewed(self._group)
        self._stages.interrupted()
        self._begin()

    def launch(self, work: StepWork) -> RemoteStep:
        """Start a step without waiting.

        Stages report the result of a step as soon as they know it, while others run later steps. On a CPU, a launch
        runs the step, so its result is requested before the next launch; on a GPU it is requested after the next
        launch, because it blocks the host.
        """
        self._tell_abandoned()
        self._group.post("launch", self.name, self._pack(work))
        self._stages.started()
        before, launched = self._newest, RemoteStep()
        if self.num_stages > 1:
            if before is not None:
                self._request_result(before)
            if self._device.type == "cpu":
                self._request_result(launched)
        self._newest = launched
        return launched

    def collect(self, launched: RemoteStep) -> StepResult:
        """Wait for the oldest step not collected yet, and return its result."""
        answers = [step for step in self._group.result(self._request_result(launched)) if step is not None]
        self._stages.ended([step.busy_seconds for step in answers])
        result, hidden, _ = answers[-1]
        assert isinstance(result, StepResult)
        return result if hidden is None else result._replace(hidden=unpack_tensor(hidden).to(self._device))

    def _request_result(self, launched: RemoteStep) -> int:
        """Ask the workers to collect a step, once. Return the ticket."""
        if launched.ticket is None:
            launched.ticket = self._group.submit("collect", self.name)
        return launched.ticket

    def read_blocks(self, tables: Sequence[Sequence[int]]) -> list[LayerBlocks]:
        """Return blocks of the KV caches with the heads of all ranks, given one table per KV group.

        Raises:
            InvalidInput: ranks hold unequal numbers of heads.
        """
        ranks = self._group.call("read_blocks", self.name, tables)
        if len({str([[part.shape for part in parts] for parts in layers]) for layers in ranks}) > 1:
            raise InvalidInput(
                "KV blocks of ranks with unequal numbers of heads cannot be exported: choose a tp that divides them"
            )
        layers = [[[unpack_tensor(part) for part in shares] for shares in zip(*parts)] for parts in zip(*ranks)]
        return [(torch.cat(keys, 2), torch.cat(values, 2)) for keys, values in layers]

    def write_blocks(self, tables: Sequence[Sequence[int]], layers: Sequence[LayerBlocks]) -> None:
        """Write blocks of the KV caches; every rank takes its heads."""
        packed = [(pack_tensor(keys), pack_tensor(values)) for keys, values in layers]
        self._group.call("write_blocks", self.name, tables, packed)

    def recover(self) -> None:
        """Not supported: a rank that could not launch a step leaves the others waiting in it."""
        raise AssertionError("ranks share their steps: recover() is for a single worker")

    @property
    def idle_share(self) -> float:
        """Fraction of the stages' time without a step while there was work; 0 before the first step."""
        return self._stages.idle_share if self.num_stages > 1 else 0.0

    @property
    def shortest_step(self) -> float:
        """The slowest stage's seconds for the shortest step; infinity before the first step or with a single stage."""
        return self._stages.shortest if self.num_stages > 1 else math.inf

    @property
    def sampler(self) -> "RemoteWorker":
        """This object: an engine calls ``forget`` on its worker's sampler."""
        return self

    def forget(self, key: Hashable) -> None:
        """Note that a sequence will have no more rows."""
        number = self._numbers.pop(key, None)
        if number is not None:
            self._forgotten.append(number)

    def _pack(self, work: StepWork) -> PackedWork:
        new: dict[int, tuple[SamplingParams, Sequence[int]]] = {}
        rows = np.empty((len(work.rows), 4), np.int64)
        for index, row in enumerate(work.rows):
            number = self._numbers.get(row.key)
            if number is None:
                number = self._numbers[row.key] = next(self._next_number)
                new[number] = (row.params, row.token_ids if row.params.penalized else NO_TOKENS)
            rows[index] = number, row.position, row.num_generated, row.sample_index
        forgotten, self._forgotten = tuple(self._forgotten), []
        forbidden = {index: row.forbidden for index, row in enumerate(work.rows) if row.forbidden}
        masks = {index: row.mask for index, row in enumerate(work.rows) if row.mask is not None}
        return PackedWork(work._replace(rows=()), rows, new, forgotten, forbidden, masks)


class RemoteRunner(_Remote):
    """Runs steps over a KV cache in the workers.

    Args:
        group: processes whose target serves ``new_runner``, ``run``, ``fill_caches`` and ``free``.
        abandoned: names to free, shared by all objects of the group.
        args: arguments of ``new_runner`` after the name.
        device: device on which logits are returned.
    """

    def __init__(self, group: WorkerGroup, abandoned: "deque[int]", args: Sequence[Any], device: torch.device) -> None:
        super().__init__(group, abandoned)
        self.device = device
        self.adapter: Adapter | None = None  # adapters need one process
        self._tell_abandoned()
        group.call("new_runner", self.name, *args)

    @property
    def is_lost(self) -> bool:
        """True if its processes have ended."""
        return self._group.failure is not None

    def run(self, arrays: StepArrays) -> Tensor:
        """Run a step in the workers, like ``Runner.run``; return its logits [R, V] on ``device``."""
        return unpack_tensor(answer(self._group.call("run", self.name, arrays))).to(self.device)

    def fill_caches(self, value: float) -> None:
        """Fill every slot of the workers' KV caches and every state with ``value``."""
        self._group.post("fill_caches", self.name, value)


class StageClock:
    """Measures from the start of steps to their ends; time without any step in flight does not count.

    Args:
        num_stages: stages of the pipeline.
        clock: returns seconds.

    Attributes:
        shortest: the slowest stage's seconds for the shortest step; infinity before the first step.
    """

    def __init__(self, num_stages: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._num_stages = num_stages
        self._clock = clock
        self.shortest = math.inf
        self._num_steps = 0  # in flight
        self._since = self._seconds = self._busy_seconds = 0.0

    @property
    def idle_share(self) -> float:
        """Fraction of all stages' time, up to the last end of a step, without a step; 0 before the first."""
        return max(0.0, 1 - self._busy_seconds / (self._num_stages * self._seconds)) if self._seconds else 0.0

    def started(self) -> None:
        """Count a launched step."""
        if not self._num_steps:
            self._since = self._clock()
        self._num_steps += 1

    def interrupted(self) -> None:
        """Drop the steps in flight, which will never end."""
        self._num_steps = 0

    def ended(self, busy_seconds: Sequence[float]) -> None:
        """Count the end of a step, given the busy seconds of each stage."""
        now = self._clock()
        self._seconds, self._since = self._seconds + now - self._since, now
        self._busy_seconds += sum(busy_seconds)
        self.shortest = min(self.shortest, max(busy_seconds))
        self._num_steps -= 1


def pack_tensor(tensor: Tensor) -> PackedTensor:
    """Copy a tensor to the host as bytes."""
    flat = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
    return PackedTensor(flat.numpy(), tensor.dtype, tuple(tensor.shape))


def unpack_tensor(packed: PackedTensor) -> Tensor:
    """Return the tensor on the CPU, sharing the memory."""
    return torch.from_numpy(packed.memory).view(packed.dtype).view(packed.shape)
