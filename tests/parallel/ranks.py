"""run_ranks: one function in so many processes of one torch.distributed group, and what each of them returned."""

import faulthandler
import gc
import os
import socket
import sys
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import multiprocessing

from detcompile.parallel import backend_of_ranks, rank_device

__all__ = ["run_ranks"]

# A fork server imports once for all ranks of all groups. A process that forks may not have asked for GPUs before, and
# some import may ask, so that ranks on GPUs start on their own.
START = {"cpu": "forkserver", "cuda": "spawn"}
PATIENCE = timedelta(seconds=150)  # for a rank that another one waits for; compilations are a part of it
MOST_SECONDS = 400  # of a rank on a GPU


def run_ranks(num_ranks: int, function: Callable[..., Any], *args: Any, device_type: str = "cpu") -> list[Any]:
    """``function(rank, *args)`` on every rank, over gloo or NCCL; the results, in rank order. Rank r has GPU r,
    or the ranks take those that they may share in turn.

    A rank that raises ends all of them, and its traceback is raised here.
    """
    multiprocessing.set_forkserver_preload([__name__, function.__module__])
    with tempfile.TemporaryDirectory() as folder:
        given = (num_ranks, _free_port(), device_type, folder, function, args)
        multiprocessing.start_processes(_rank_main, given, nprocs=num_ranks, start_method=START[device_type])
        return [torch.load(Path(folder, f"{rank}.pt"), weights_only=False) for rank in range(num_ranks)]


def _rank_main(
    rank: int, num_ranks: int, port: int, device_type: str, folder: str, function: Callable[..., Any], args: Any
) -> None:
    faulthandler.enable()
    gc.freeze()  # what was imported stays, and need not be walked
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    if device_type == "cuda":
        faulthandler.dump_traceback_later(MOST_SECONDS, exit=True)  # a kernel that waits has no other end
        torch.cuda.set_device(rank_device(device_type, rank))
    backend = backend_of_ranks(device_type)
    dist.init_process_group(backend, rank=rank, world_size=num_ranks, timeout=PATIENCE)
    try:
        result = function(rank, *args)
    except BaseException:
        traceback.print_exc()  # spawn shows one rank's, which need not be the one that broke first
        raise  # without leaving the group: NCCL would wait there for ranks that wait for this one
    torch.save(result, Path(folder, f"{rank}.pt"))
    if device_type == "cuda":
        torch.cuda.synchronize()
        dist.barrier()
        sys.stdout.flush()
        os._exit(0)  # ranks that had captured CUDA graphs did not come back from leaving the group
    dist.destroy_process_group()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
