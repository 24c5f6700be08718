"""Warmup: compile and gate the kernels of all step sizes, in parallel, before an engine serves."""

import os
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import torch

from detcompile.progress import stage
from detcompile.runtime.device_memory import ran_out_of_memory
from detcompile.runtime.kv.kv_cache import KVCache
from detcompile.runtime.step.layout import MIXED_BUCKETS
from detcompile.runtime.step.runner import Forward, Runner
from detcompile.runtime.step.stage_forward import StageForward
from detcompile.runtime.step.worker import idle_arrays

MOST_THREADS = 16


class WarmupStep(NamedTuple):
    """A dummy step that is run only to build its kernels."""

    tokens: int
    sequences: int
    width: int  # blocks of its block tables
    as_graph: bool  # launch it as for a CUDA graph


def warmup_steps(
    graphs: list[tuple[int, int, int]], most_sequences: int, most_tokens: int, width: int
) -> list[WarmupStep]:
    """Return steps that launch nearly every kernel of an engine, the largest first because they take longest.

    One step of each number of tokens comes before all others: threads that compile the same kernel wait for each other.
    Kernels are chosen by sizes rounded to powers of two, so sizes in between need no other kernels.

    Args:
        graphs: tokens, sequences and table widths of the CUDA graphs.
        most_sequences: sequences of the largest step.
        most_tokens: tokens of the largest step.
        width: blocks of the widest table.
    """
    steps = [WarmupStep(*layout, True) for layout in graphs if all(size & (size - 1) == 0 for size in layout)]
    least = 2 * MIXED_BUCKETS[-1] if graphs else 1
    sizes = {most_tokens} | {1 << shift for shift in range(most_tokens.bit_length()) if 1 << shift >= least}
    steps += [
        WarmupStep(tokens, sequences, width, False)
        for tokens in sizes
        for sequences in {1, min(tokens, most_sequences)}
    ]
    steps.sort(reverse=True)
    largest = {step.tokens: step for step in reversed(steps)}
    return sorted(steps, key=lambda step: largest[step.tokens] != step)


def warm_up_kernels(forward: Forward, cache: KVCache, steps: list[WarmupStep], num_ranks: int = 1) -> None:
    """Run dummy steps in threads, each with its own runner. They share one cache and write nothing to it.

    A step that runs out of memory is skipped; its kernels are then compiled at their first launch.

    Args:
        num_ranks: number of processes that warm up at the same time on this machine's cores.
    """
    failed: list[Exception] = []

    def run(step: WarmupStep) -> None:
        try:
            with torch.cuda.device(cache.device):
                local = forward.unconnected() if isinstance(forward, StageForward) else forward
                arrays = idle_arrays(step.tokens, step.sequences, len(cache.groups), step.width)
                Runner(local, cache, False).warm_up(arrays, as_graph=step.as_graph)
        except Exception as error:
            if not ran_out_of_memory(error):
                failed.append(error)

    num_threads = max(1, min(MOST_THREADS, (os.cpu_count() or 1) // num_ranks))
    with stage("compile kernels") as under_way, ThreadPoolExecutor(num_threads) as threads:
        for count, _ in enumerate(threads.map(run, steps), 1):
            under_way.becomes(f"compile kernels of {count}/{len(steps)} sizes of steps")
    if failed:
        raise failed[0]
