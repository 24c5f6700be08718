"""Properties of the first GPU, read in a subprocess: tests/forks.py can only fork a process that has not used CUDA."""

import contextlib
import functools
import os
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import NamedTuple

import torch

BYTES_OF_A_WORKER = 3 << 30  # of GPU memory

__all__ = ["FirstGPU", "first_gpu", "is_hopper_here", "may_fork", "num_workers"]


class FirstGPU(NamedTuple):
    """Memory in bytes, and the major number of the compute capability."""

    memory: int
    capability: int


@functools.cache
def first_gpu() -> FirstGPU | None:
    """Return properties of the first GPU; None if there is no GPU."""
    if not torch.cuda.is_available():
        return None
    if not torch.cuda.is_initialized():
        ours, theirs = get_context("fork").Pipe()
        process = get_context("fork").Process(target=_send, args=(theirs,))
        process.start()
        theirs.close()
        with contextlib.suppress(EOFError):
            gpu: FirstGPU = ours.recv()
            return gpu
    return _read()


def may_fork() -> bool:
    """Return whether processes forked from this one can use CUDA."""
    return first_gpu() is None or not torch.cuda.is_initialized()


def is_hopper_here() -> bool:
    """Return True if the first GPU has compute capability 9."""
    gpu = first_gpu()
    return gpu is not None and gpu.capability == 9


def num_workers() -> int:
    """Return the number of cores, or fewer if the first GPU lacks memory for that many workers."""
    cores, gpu = len(os.sched_getaffinity(0)), first_gpu()
    return cores if gpu is None else max(1, min(cores, gpu.memory // BYTES_OF_A_WORKER))


def _read() -> FirstGPU:
    properties = torch.cuda.get_device_properties(0)
    return FirstGPU(properties.total_memory, properties.major)


def _send(connection: Connection) -> None:
    with contextlib.suppress(RuntimeError):  # CUDA was used before the fork
        connection.send(_read())
