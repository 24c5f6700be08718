"""What an engine takes of a GPU beside its weights and its KV cache, measured: the worst step, and the CUDA graphs.

Steps run over a cache of a few blocks: what they allocate does not hang on its size. Every kernel that they launch has
been gated and loaded before the measurement.
"""

from collections.abc import Callable

import numpy as np
import torch

from detcompile.runtime.device_memory import gpu_memory
from detcompile.runtime.runner import Runner
from detcompile.runtime.sampling import Sampler, SampleRow
from detcompile.runtime.sampling_params import SamplingParams
from detcompile.runtime.step_layout import StepBuffers, StepLayout
from detcompile.runtime.worker import PromptRows, StepWork, Worker, idle_arrays

__all__ = ["graph_bytes", "worst_step_bytes"]

PARTS = (1.0, 0.75, 0.5)  # of the token budget: the allocator keeps blocks that fit one size of step and not another
NUM_LOGPROBS = 20  # of each token
NUM_SAMPLED_GRAPHS = 12
FILTERED = SamplingParams(temperature=1.0, top_p=0.9, top_k=50, logprobs=NUM_LOGPROBS, logit_bias={0: 1.0}, seed=0)
PENALISED = SamplingParams(
    temperature=1.0,
    top_p=0.9,
    top_k=50,
    presence_penalty=0.5,
    repetition_penalty=1.1,
    logprobs=NUM_LOGPROBS,
    logit_bias={0: 1.0},
    seed=0,
)


def worst_step_bytes(
    runner: Runner,
    new_sampler: Callable[[], Sampler],
    *,
    num_tokens: int,
    num_sequences: int,
    num_drafts: int,
    num_prompt_tokens: int,
    width: int,
) -> int:
    """Bytes by which the allocator's memory grows over the largest step with all that a sampler can be asked for.

    Args:
        runner: without CUDA graphs.
        num_drafts: rows of draft trees, at most, beside one of each sequence.
        num_prompt_tokens: rows of prompt tokens, at most, whose logprobs are wanted.
        width: blocks of the widest table.
    """
    device = runner.kv_cache.device
    steps = [
        _busiest(max(1, int(part * num_tokens)), num_sequences, num_drafts, num_prompt_tokens, runner, width)
        for part in PARTS
    ]
    for _ in range(2):  # the first time kernels are gated and loaded, which is not the step's
        before = gpu_memory(device).reserved
        torch.cuda.reset_peak_memory_stats(device)
        worker = Worker(runner, new_sampler())
        for work in steps:
            worker.collect(worker.launch(work))
            for row in work.rows:
                worker.sampler.forget(row.key)
        peak = torch.cuda.max_memory_reserved(device)
        del worker
    return peak - before


def graph_bytes(worker: Worker, layouts: list[tuple[int, int, int]]) -> int:
    """Bytes that the CUDA graphs of ``layouts`` will take: their pool, their inputs, and what the driver keeps of each.

    Some are captured: all of the largest bucket, which come first and make the pool as large as it has to be, and some
    of every size.

    Args:
        worker: whose runner has captured nothing yet.
        layouts: as of ``graph_layouts``.
    """
    if not layouts:
        return 0
    runner = worker.runner
    device, num_groups = runner.kv_cache.device, len(runner.kv_cache.groups)
    largest = [layout for layout in layouts if layout[:2] == layouts[0][:2]]
    others = layouts[len(largest) :]
    sampled = largest + others[:: max(1, len(others) // NUM_SAMPLED_GRAPHS)]
    before = gpu_memory(device)
    for layout in sampled:
        worker.capture(*layout)
    after = gpu_memory(device)
    each = max(0, after.outside - before.outside) / len(sampled)
    inputs = sum(
        len(StepBuffers((StepLayout(tokens, sequences, sequences, width, num_groups),), torch.device("meta")).bytes)
        for tokens, sequences, width in layouts
    )
    return max(0, after.reserved - before.reserved) + int(each * len(layouts)) + inputs


def _busiest(
    num_tokens: int, num_sequences: int, num_drafts: int, num_prompt_tokens: int, runner: Runner, width: int
) -> StepWork:
    """A step whose rows ask for everything; as many rows of each kind as its tokens allow."""
    own = min(num_sequences, num_tokens)
    drafts = min(num_drafts, num_tokens - own)
    prompt = min(num_prompt_tokens, num_tokens - own - drafts)
    arrays = idle_arrays(num_tokens, own, len(runner.kv_cache.groups), width)
    rows = [SampleRow(PENALISED, 1, key=index, token_ids=(0,)) for index in range(own)]
    rows += [SampleRow(FILTERED, 1, key=own + index) for index in range(drafts)]
    prompts = (PromptRows(len(rows), (0,) * prompt, NUM_LOGPROBS),) if prompt else ()
    return StepWork(arrays._replace(logits_to_keep=np.arange(len(rows) + prompt)), tuple(rows), prompts)
