"""run_ranks: one function in so many processes of one torch.distributed group, and what each of them returned."""

import os
import socket
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import multiprocessing

__all__ = ["run_ranks"]

START = "forkserver"  # imports once for all ranks of all groups, and never touches a GPU



def run_ranks(num_ranks: int, function: Callable[..., Any], *args: Any, device_type: str = "cpu") -> list[Any]:
    """``function(rank, *args)`` on every rank, over gloo or NCCL; the results, in rank order.

    A rank that raises ends all of them, and its traceback is raised here.
    """
    multiprocessing.set_forkserver_preload([__name__, function.__module__])
    with tempfile.TemporaryDirectory() as folder:
        given = (num_ranks, _free_port(), device_type, folder, function, args)
        multiprocessing.start_processes(_rank_main, given, nprocs=num_ranks, start_method=START)
        return [torch.load(Path(folder, f"{rank}.pt"), weights_only=False) for rank in range(num_ranks)]


def _rank_main(
    rank: int, num_ranks: int, port: int, device_type: str, folder: str, function: Callable[..., Any], args: Any
) -> None:
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    if device_type == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group("nccl" if device_type == "cuda" else "gloo", rank=rank, world_size=num_ranks)
    try:
        torch.save(function(rank, *args), Path(folder, f"{rank}.pt"))
    except BaseException:
        traceback.print_exc()  # spawn shows one rank's, which need not be the one that broke first
        raise
    finally:
        dist.destroy_process_group()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
