"""run_ranks: run a function in the processes of a torch.distributed group and return each result."""

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

# The fork server imports this once for all ranks of all groups. A process that forks must not have initialized CUDA,
# and an import may do that, so ranks on GPUs start without it.
START = {"cpu": "forkserver", "cuda": "spawn"}
PATIENCE = timedelta(seconds=150)  # limit for one rank to wait for another, including compilations
MOST_SECONDS = 400  # limit for a rank on a GPU


def run_ranks(num_ranks: int, function: Callable[..., Any], *args: Any, device_type: str = "cpu") -> list[Any]:
    """Run ``function(rank, *args)`` on every rank, over gloo or NCCL; return the results in rank order.

    Rank r has GPU r, or the ranks share GPUs if they may. A rank that raises ends all of them, and its traceback is
    raised here.
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
    gc.freeze()  # the garbage collector need not walk imported objects
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    if device_type == "cuda":
        faulthandler.dump_traceback_later(MOST_SECONDS, exit=True)  # nothing else ends a kernel that waits
        torch.cuda.set_device(rank_device(device_type, rank))
    backend = backend_of_ranks(device_type)
    dist.init_process_group(backend, rank=rank, world_size=num_ranks, timeout=PATIENCE)
    try:
        result = function(rank, *args)
    except BaseException:
        traceback.print_exc()  # spawn shows the traceback of one rank, maybe not the first to fail
        raise  # do not leave the group: NCCL would wait for ranks that wait for this one
    torch.save(result, Path(folder, f"{rank}.pt"))
    if device_type == "cuda":
        torch.cuda.synchronize()
        dist.barrier()
        sys.stdout.flush()
        os._exit(0)  # leaving the group hung on ranks with CUDA graphs
    dist.destroy_process_group()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
