"""Starts the worker processes that share a model."""

from collections.abc import Callable, Mapping, Sequence
from typing import IO, Any, NamedTuple

import torch
from transformers import PreTrainedModel

from detcompile.config import gpus_shared
from detcompile.errors import InvalidInput
from detcompile.executors.remote import RemoteExecutor
from detcompile.executors.started_ranks import StartedRanks
from detcompile.orders.numerics import Numerics
from detcompile.runtime.processes.group import WorkerGroup
from detcompile.runtime.processes.rank_process import DialedRank

STEP_SECONDS = {"cuda": 300.0, "cpu": 3600.0}  # a step may compile GPU kernels; CPUs are slow


class Nodes(NamedTuple):
    """Ranks that torchrun started on one or more machines; ranks of one machine are consecutive.

    Attributes:
        host: address of rank 0's machine, which is this one.
        num_here: number of ranks on this machine.
        dialed: all ranks but rank 0, which this process starts.
    """

    host: str
    num_here: int
    dialed: Sequence[DialedRank]

    @property
    def num_ranks(self) -> int:
        """Number of ranks on all machines."""
        return 1 + len(self.dialed)


class RankPlan(NamedTuple):
    """The arguments with which every rank starts."""

    tp: int
    numerics: Numerics
    device_type: str
    num_threads: int
    options: Mapping[str, Any]  # passed on to compile()
    load: Callable[[torch.device], PreTrainedModel] | None = None  # loads a model given by name
    file: int | None = None  # file descriptor of a saved module
    build: Callable[[], PreTrainedModel] | None = None  # builds the module on the rank's device
    archive: str | None = None  # path of an exported archive, which each rank loads instead
    max_context: int | None = None
    pp: int = 1
    host: str | None = None  # address of rank 0's machine if torchrun started the ranks; None: one machine

    @property
    def num_ranks(self) -> int:
        """Number of processes, ordered by stage."""
        return self.pp * self.tp


def start_ranks(plan: RankPlan, saved: IO[bytes] | None = None, nodes: Nodes | None = None) -> RemoteExecutor:
    """Start the plan's processes, and wait until each has loaded its shard of the model.

    Args:
        saved: the open file of ``plan.file``; the result takes ownership.
        nodes: ranks that already run and are never replaced; None starts all ranks here.

    Raises:
        WorkerError: a rank could not start.
        InvalidInput: too few GPUs.
        Also what compile() and load() raise in the ranks.
    """
    _require_gpus(plan, plan.num_ranks if nodes is None else nodes.num_here)
    seconds = STEP_SECONDS[plan.device_type]
    dialed = () if nodes is None else nodes.dialed

    def begin(files: Sequence[int]) -> WorkerGroup:
        server = "detcompile.workers:RankServer"
        return WorkerGroup(plan.num_ranks, server, (plan,), step_seconds=seconds, files=files, dialed=dialed)

    return RemoteExecutor(StartedRanks(begin, saved, again=nodes is None), plan.pp)


def _require_gpus(plan: RankPlan, num_here: int) -> None:
    num_gpus, needed = torch.cuda.device_count(), 1 if gpus_shared() else num_here
    if plan.device_type == "cuda" and num_gpus < needed:
        instead = "take fewer ranks, or a module on the CPU" if plan.archive is None else "export it with a smaller tp"
        shared = "; DETCOMPILE_SHARED_GPUS=1 lets ranks share GPUs, slowly, to compare bits" if num_gpus else ""
        sizes = f"tp={plan.tp}" if plan.pp == 1 else f"pp={plan.pp}, tp={plan.tp}"
        raise InvalidInput(f"{sizes} needs {needed} GPUs, this machine has {num_gpus}: {instead}{shared}")
