"""The start of worker processes that share a model: what each rank is told, and the processes that were told."""

from collections.abc import Callable, Mapping, Sequence
from typing import IO, Any, NamedTuple

import torch
from transformers import PreTrainedModel

from detcompile.config import gpus_shared
from detcompile.errors import InvalidInput
from detcompile.executors.remote import RemoteExecutor
from detcompile.executors.started_ranks import StartedRanks
from detcompile.orders.numerics import Numerics
from detcompile.runtime.processes.dialled_rank import DialledRank
from detcompile.runtime.processes.group import WorkerGroup

__all__ = ["Nodes", "RankPlan", "start_ranks"]

STEP_SECONDS = {"cuda": 300.0, "cpu": 3600.0}  # a step may compile GPU kernels on its way; CPUs take their time


class Nodes(NamedTuple):
    """Ranks that torchrun has started, on one machine or several; those of a machine stand together.

    Attributes:
        host: address at which the ranks reach rank 0's machine, which is this one.
        num_here: how many are on this machine.
        dialled: all but rank 0, which is started here.
    """

    host: str
    num_here: int
    dialled: Sequence[DialledRank]

    @property
    def num_ranks(self) -> int:
        """Ranks on all machines."""
        return 1 + len(self.dialled)


class RankPlan(NamedTuple):
    """What every rank is told at its start."""

    tp: int
    numerics: Numerics
    device_type: str
    num_threads: int
    options: Mapping[str, Any]  # of compile(), handed on
    load: Callable[[torch.device], PreTrainedModel] | None = None  # what loads a model that was given by its name
    file: int | None = None  # descriptor of a saved module
    build: Callable[[], PreTrainedModel] | None = None  # what else makes the module, on the rank's device
    archive: str | None = None  # that export wrote, which each rank loads instead
    max_context: int | None = None
    pp: int = 1
    host: str | None = None  # address of rank 0's machine, where torchrun has started the ranks; None: all are on it

    @property
    def num_ranks(self) -> int:
        """Processes: those of the first stage, then those of the next."""
        return self.pp * self.tp


def start_ranks(
    plan: RankPlan, step_seconds: float | None = None, saved: IO[bytes] | None = None, nodes: Nodes | None = None
) -> RemoteExecutor:
    """Start the plan's processes, and wait until each of them has its share of the model.

    Args:
        step_seconds: time after which a step counts as hung; None takes STEP_SECONDS.
        saved: the open file of ``plan.file``, which belongs to the result.
        nodes: processes that were started, and that no others take the place of; None starts all of them here.

    Raises:
        WorkerError: a rank could not start.
        InvalidInput: too few GPUs.
        Also what compile() and load() raise in the ranks.
    """
    _require_gpus(plan, plan.num_ranks if nodes is None else nodes.num_here)
    seconds = STEP_SECONDS[plan.device_type] if step_seconds is None else step_seconds
    dialled = () if nodes is None else nodes.dialled

    def begin(files: Sequence[int]) -> WorkerGroup:
        server = "detcompile.workers:RankServer"
        return WorkerGroup(plan.num_ranks, server, (plan,), step_seconds=seconds, files=files, dialled=dialled)

    return RemoteExecutor(StartedRanks(begin, saved, again=nodes is None), plan.pp)


def _require_gpus(plan: RankPlan, num_here: int) -> None:
    found, needed = torch.cuda.device_count(), 1 if gpus_shared() else num_here
    if plan.device_type == "cuda" and found < needed:
        instead = "take fewer ranks, or a module on the CPU" if plan.archive is None else "export it with a smaller tp"
        shared = "; DETCOMPILE_SHARED_GPUS=1 lets ranks share GPUs, to compare bits and not for speed" if found else ""
        sizes = f"tp={plan.tp}" if plan.pp == 1 else f"pp={plan.pp}, tp={plan.tp}"
        raise InvalidInput(f"{sizes} needs {needed} GPUs, this machine has {found}: {instead}{shared}")
