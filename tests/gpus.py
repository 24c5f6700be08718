"""Facts of the first GPU, read in a process of their own: this one may still be forked (tests/forks.py)."""

import contextlib
import functools
import os
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import NamedTuple

import torch

BYTES_OF_A_WORKER = 3 << 30

__all__ = ["FirstGPU", "first_gpu", "is_hopper_here", "may_fork", "num_workers"]


class FirstGPU(NamedTuple):
    """Its memory in bytes, and the first number of its compute capability."""

    memory: int
    capability: int


@functools.cache
def first_gpu() -> FirstGPU | None:
    """Return facts of the first GPU; None without one."""
    if not torch.cuda.is_available():
        return None
    if not torch.cuda.is_initialized():
        ours, theirs = get_context("fork").Pipe()
        process = get_context("fork").Process(target=_send, args=(theirs,))
        process.start()
        theirs.close()
        with contextlib.suppress(EOFError):
            facts: FirstGPU = ours.recv()
            return facts
    return _facts()


def may_fork() -> bool:
    """Return whether processes forked from this one can use CUDA."""
    return first_gpu() is None or not torch.cuda.is_initialized()


def is_hopper_here() -> bool:
    """Return True if the first GPU has compute capability 9."""
    gpu = first_gpu()
    return gpu is not None and gpu.capability == 9


def num_workers() -> int:
    """Return one worker per core, but no more than the first GPU has memory for."""
    cores, gpu = len(os.sched_getaffinity(0)), first_gpu()
    return cores if gpu is None else max(1, min(cores, gpu.memory // BYTES_OF_A_WORKER))


def _facts() -> FirstGPU:
    properties = torch.cuda.get_device_properties(0)
    return FirstGPU(properties.total_memory, properties.major)


def _send(connection: Connection) -> None:
    with contextlib.suppress(RuntimeError):  # CUDA was used before the fork
        connection.send(_facts())
