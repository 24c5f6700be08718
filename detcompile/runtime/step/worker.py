"""Worker: one rank of the model. It launches steps and reads their tokens back; it makes no scheduling decisions.

Its input (StepWork) and output (StepResult) are plain data, so a worker may live in another process.

Legend: R rows of logits.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from detcompile.progress import stage
from detcompile.runtime.adapters import Adapter
from detcompile.runtime.device_memory import StepMemory, ran_out_of_memory
from detcompile.runtime.kv.prefixes import LayerBlocks
from detcompile.runtime.requests.outputs import Logprobs, SamplingLogprobs
from detcompile.runtime.sampling.sampler import Sampled, Sampler, SampleRow, TokenLogprobs
from detcompile.runtime.step.builder import NOT_PENDING, StepArrays
from detcompile.runtime.step.layout import TOKEN_BUCKETS, first_layouts, graph_layouts
from detcompile.runtime.step.runner import Runner
from detcompile.step import NO_SLOT, PADDING_SLOT
from detcompile.templates.cpu.fp_mode import float_mode
from detcompile.templates.device.launcher import on_device

Result = TypeVar("Result")


class PromptRows(NamedTuple):
    """Rows of logits from which prompt logprobs are taken."""

    start: int  # the first row
    targets: tuple[int, ...]  # the prompt token after each row's token
    num_top: int


class StepWork(NamedTuple):
    """Input of one step."""

    arrays: StepArrays
    rows: tuple[SampleRow, ...]  # one per token to draw, in the order of the first rows of the logits
    prompts: tuple[PromptRows, ...]
    adapter: Adapter | None = None  # of all rows


class StepResult(NamedTuple):
    """Output of one step, one entry per SampleRow."""

    tokens: list[int]
    invalid: list[bool]  # the row's logits were NaN or infinite
    logprobs: list[Logprobs | None]
    prompt_logprobs: list[list[Logprobs] | str]  # one entry per PromptRows; a string says why there are none
    refused: dict[int, str]  # rows that could not be planned or read, and why; their tokens are meaningless
    hidden: Tensor | None = None  # [R, H] on the device: hidden states of the rows, valid until the next launch


class LaunchedStep(NamedTuple):
    """A step running on the device."""

    host: Any  # tensors on the host, valid after ``done``
    done: torch.cuda.Event | None
    work: StepWork
    refused: dict[int, str]  # rows that could not be planned, and why
    hidden: Tensor | None = None


class Worker:
    """Runs steps and draws tokens on one device.

    Args:
        runner: runs this rank's share of the model.
        sampler: draws tokens.

    Attributes:
        accepts_rejection: True if the sampler supports rejection sampling of guesses.
        is_alone: True if no other rank takes part in its steps, so that a step that could not be launched can be
            dropped.
        num_stages: number of pipeline stages.
        head_shares: 1 if its KV cache has all heads; 0 if other ranks have some.
        idle_share: fraction of the stages' time without a step while there was work.
        shortest_step: seconds of a pipeline's slowest stage for the shortest step; infinity without a pipeline.
        memory: the GPU memory reserved for its steps; None leaves it to the allocator.
    """

    accepts_rejection = True
    num_stages = 1
    head_shares = 1
    idle_share = 0.0
    shortest_step = math.inf

    def __init__(self, runner: Runner, sampler: Sampler) -> None:
        self.runner = runner
        self.sampler = sampler
        self.is_alone = True
        self.memory: StepMemory | None = None
        self._allocates = False  # the last step allocated more than its results
        self.device = runner.kv_cache.device
        self._float_mode = float_mode(self.device)

    def launch(self, work: StepWork) -> LaunchedStep:
        """Start a step without waiting for the device. Pending tokens are read on the device from the previous step."""
        num_graphs = self.runner.num_graphs
        with self._float_mode, on_device(self.device):
            launched = self._launch(work)
        if self.memory is not None and self.runner.num_graphs > num_graphs:
            self.memory.refill()  # the capture has released the block
        elif self.memory is not None and self._allocates:
            self.memory.tidy()
        return launched

    def read_blocks(self, tables: Sequence[Sequence[int]]) -> list[LayerBlocks]:
        """Return blocks of the KV cache, given one table per KV group."""
        return self.runner.kv_cache.read_blocks(tables)

    def write_blocks(self, tables: Sequence[Sequence[int]], layers: Sequence[LayerBlocks]) -> None:
        """Write blocks of the KV cache."""
        self.runner.kv_cache.write_blocks(tables, layers)

    def restart(self) -> None:
        """Fail: this worker runs in the caller's process."""
        raise AssertionError("this worker has no process to restart")

    def recover(self) -> None:
        """Clean up after a launch that ran out of memory: wait for it, and empty the allocator's cache."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # its copies may still be running
            torch.cuda.empty_cache()

    def _launch(self, work: StepWork) -> LaunchedStep:
        self.runner.adapter = work.adapter
        logits = self.runner.launch(work.arrays)
        if not self.runner.gives_logits:
            work = work._replace(rows=(), prompts=())
        sampled = None
        self._allocates = not self.runner.replayed or bool(work.prompts)
        refused: dict[int, Exception] = {}
        if work.rows:
            plan, drawn = self.sampler.prepare(work.rows, refused), self.runner.drawn  # overlaps with the forward
            sampled = self.sampler(logits, plan, drawn)
            self._allocates |= plan.tensors is not None
            if drawn is None or plan.tensors is not None:
                self.runner.keep(sampled.drawn)
        prompts = [_result_or_reason(functools.partial(self._prompt_logprobs, logits, item)) for item in work.prompts]
        host, done = to_host((sampled, prompts), self.device)
        states = self.runner.states
        hidden = None if states is None or not work.rows else states[: len(work.rows)]
        return LaunchedStep(host, done, work, {index: repr(error) for index, error in refused.items()}, hidden)

    def _prompt_logprobs(self, logits: Tensor, prompt: PromptRows) -> TokenLogprobs:
        rows = logits[prompt.start : prompt.start + len(prompt.targets)]
        return self.sampler.logprobs(rows, self._to_device(np.array(prompt.targets)), prompt.num_top)

    def collect(self, launched: LaunchedStep) -> StepResult:
        """Wait for a step and read the tokens it drew."""
        if launched.done is not None:
            launched.done.synchronize()
        sampled, prompts = launched.host
        prompt_logprobs = [
            entry
            if isinstance(entry, str)
            else _result_or_reason(functools.partial(logprob_entries, [*item.targets], entry))
            for item, entry in zip(launched.work.prompts, prompts, strict=True)
        ]
        if sampled is None:
            return StepResult([], [], [], prompt_logprobs, {})
        drawn = sampled.drawn.tolist()
        tokens, invalid = [token for _, token in drawn], [bool(bad) for bad, _ in drawn]
        logprobs, unread = row_logprobs(launched.work.rows, tokens, sampled, launched.refused)
        return StepResult(tokens, invalid, logprobs, prompt_logprobs, launched.refused | unread, launched.hidden)

    def warm_up(self, most_sequences: int, most_tokens: int, most_blocks: int) -> None:
        """Capture a graph for every bucket of steps up to these sizes, with tables of ``most_blocks``.

        A capture takes as long as several steps. Graphs with narrower tables are captured on demand (see Runner).
        """
        every = graph_layouts(most_sequences, most_tokens, most_blocks, self.runner.kv_cache.block_size)
        layouts = first_layouts(every)
        with stage("capture graphs") as under_way:
            for count, layout in enumerate(layouts, 1):
                self.capture(*layout)
                under_way.becomes(f"capture graphs {count}/{len(layouts)}")
        torch.cuda.empty_cache()

    def capture(self, tokens: int, sequences: int, width: int) -> None:
        """Capture the graph of a step with these sizes."""
        self.runner.capture(idle_arrays(tokens, sequences, len(self.runner.kv_cache.groups), width))

    def warm_up_chains(self, most_sequences: int, num_steps: int) -> None:
        """Capture chains of greedy decode steps; the first step has one or two tokens per sequence."""
        num_groups = len(self.runner.kv_cache.groups)
        for size in TOKEN_BUCKETS:
            if size <= most_sequences:
                later = [idle_arrays(size, size, num_groups)] * (num_steps - 1)
                for tokens in (size, 2 * size):
                    self.runner.launch_chain([idle_arrays(tokens, size, num_groups), *later])

    def _to_device(self, values: np.ndarray) -> Tensor:
        tensor = torch.from_numpy(values)
        if self.device.type == "cpu":
            return tensor
        return tensor.pin_memory().to(self.device, non_blocking=True)


def idle_arrays(num_tokens: int, num_sequences: int, num_groups: int, width: int = 1) -> StepArrays:
    """Return a dummy step: it writes nothing and reads block 0, but costs as much as a real step."""
    counts = np.full(num_sequences, num_tokens // num_sequences)
    counts[: num_tokens % num_sequences] += 1
    cu_seqlens = np.concatenate([[0], np.cumsum(counts)])
    zeros = np.zeros(num_tokens, np.int64)
    return StepArrays(
        input_ids=zeros,
        position_ids=zeros,
        pending=np.full(num_tokens, NOT_PENDING),
        logits_to_keep=cu_seqlens[1:] - 1,
        slot_mappings=np.full((num_groups, 1, num_tokens), PADDING_SLOT),
        cu_seqlens=cu_seqlens.astype(np.int32),
        seq_lens=counts.astype(np.int32),
        block_tables=np.zeros((num_groups, num_sequences, max(width, -(-int(counts.max()) // 16))), np.int32),
        state_slots=np.full(num_sequences, NO_SLOT, np.int32),
    )


def to_host(value: Any, device: torch.device) -> tuple[Any, torch.cuda.Event | None]:
    """Copy every tensor in nested tuples and lists to the host, valid after the event if there is one."""
    host = _to_host(value)
    if device.type != "cuda":
        return host, None
    done = torch.cuda.Event()
    done.record()
    return host, done


def _to_host(value: Any) -> Any:
    """Copy every tensor in nested tuples and lists into pinned memory, without waiting."""
    if isinstance(value, Tensor):
        if value.device.type == "cpu":
            return value
        pinned = torch.empty(value.shape, dtype=value.dtype, device="cpu", pin_memory=True)
        return pinned.copy_(value, non_blocking=True)
    if isinstance(value, (list, tuple)):
        parts = [_to_host(part) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    return value


def logprob_entries(tokens: list[int], entries: TokenLogprobs) -> list[Logprobs]:
    """Return the logprobs of ``tokens``, one entry each, from tensors on the host."""
    top = [dict(zip(ids, values)) for ids, values in zip(entries.top_ids.tolist(), entries.top.tolist())]
    return list(map(Logprobs, tokens, entries.chosen.tolist(), top, entries.rank.tolist()))


def row_logprobs(
    rows: tuple[SampleRow, ...], tokens: list[int], sampled: Sampled, refused: dict[int, str]
) -> tuple[list[Logprobs | None], dict[int, str]]:
    """Return the logprobs of the rows that requested them, each cut to its own number of tokens, and the failures."""
    out: list[Logprobs | None] = [None] * len(rows)
    unread: dict[int, str] = {}
    if sampled.logprobs is None:
        return out, unread
    wanted = [index for index, row in enumerate(rows) if index not in refused and row.params.logprobs is not None]
    entries = logprob_entries([tokens[i] for i in wanted], sampled.logprobs)
    reported = [i for i in wanted if rows[i].params.sampling_logprobs is not None and not rows[i].params.greedy]
    drawn_from = [] if sampled.sampling is None else _sampling_logprobs(sampled.sampling)
    sampling = dict(zip(reported, drawn_from, strict=True))
    for index, entry in zip(wanted, entries, strict=True):
        result = _result_or_reason(functools.partial(_cut, entry, rows[index], sampling.get(index)))
        if isinstance(result, str):
            unread[index] = result
        else:
            out[index] = result
    return out, unread


def _sampling_logprobs(entries: TokenLogprobs) -> list[SamplingLogprobs]:
    """Return the logprobs of rows in the distributions they were drawn from, without excluded tokens."""
    lists = (entries.chosen.tolist(), entries.top_ids.tolist(), entries.top.tolist(), entries.rank.tolist())
    return [
        SamplingLogprobs(chosen, {token: value for token, value in zip(ids, values) if value > -math.inf}, rank)
        for chosen, ids, values, rank in zip(*lists)
    ]


def _cut(entry: Logprobs, row: SampleRow, sampling: SamplingLogprobs | None) -> Logprobs:
    """Return a row's logprobs with as many alternatives as it wants."""
    params, most = row.params, row.params.sampling_logprobs
    if most is not None:
        sampling = SamplingLogprobs(0.0, {entry.token_id: 0.0}, 1) if sampling is None else sampling  # greedy
        sampling = sampling._replace(top=dict(list(sampling.top.items())[:most]))
    return entry._replace(top=dict(list(entry.top.items())[: params.logprobs or 0]), sampling=sampling)


def _result_or_reason(work: Callable[[], Result]) -> Result | str:
    """Return the result of ``work``, or the repr of its exception, so that other requests go on; re-raise OOM."""
    try:
        return work()
    except Exception as error:
        if ran_out_of_memory(error):
            raise
        return repr(error)
