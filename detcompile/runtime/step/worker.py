"""Worker: one rank of the model. It launches steps and reads their tokens back; it decides nothing.

What goes in (StepWork) and what comes out (StepResult) are plain data, so that a worker may live in another process.

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
from detcompile.runtime.device_memory import StepMemory, ran_out_of_memory
from detcompile.runtime.kv.prefixes import LayerBlocks
from detcompile.runtime.requests.outputs import Logprobs
from detcompile.runtime.sampling.sampler import Sampled, Sampler, SampleRow, TokenLogprobs, token_logprobs
from detcompile.runtime.step.builder import NOT_PENDING, StepArrays
from detcompile.runtime.step.layout import TOKEN_BUCKETS, first_layouts, graph_layouts
from detcompile.runtime.step.runner import Runner
from detcompile.step import NO_SLOT, PADDING_SLOT
from detcompile.templates.cpu.fp_mode import float_mode

__all__ = ["LaunchedStep", "PromptRows", "StepResult", "StepWork", "Worker", "idle_arrays"]


Found = TypeVar("Found")


class PromptRows(NamedTuple):
    """Rows of logits that are wanted for the logprobs of prompt tokens."""

    start: int  # the first row
    targets: tuple[int, ...]  # the token that follows each row's own
    num_top: int


class StepWork(NamedTuple):
    """All that a worker needs to run a step."""

    arrays: StepArrays
    rows: tuple[SampleRow, ...]  # one a token to draw: the first rows of the logits
    prompts: tuple[PromptRows, ...]


class StepResult(NamedTuple):
    """What a step drew, one entry a SampleRow."""

    tokens: list[int]
    invalid: list[bool]  # the row's logits were no numbers
    logprobs: list[Logprobs | None]
    prompt_logprobs: list[list[Logprobs] | str]  # one entry a PromptRows; where there are none, why
    refused: dict[int, str]  # rows that could not be planned or read, and why: their tokens mean nothing
    hidden: Tensor | None = None  # [R, H] on the device: what the rows were drawn from, good until the next launch


class LaunchedStep(NamedTuple):
    """A step that runs on the device."""

    host: Any  # tensors on the host, good once ``done`` has happened
    done: torch.cuda.Event | None
    work: StepWork
    refused: dict[int, str]  # rows that could not be planned, and why
    hidden: Tensor | None = None


class Worker:
    """Runs steps and draws tokens on one device.

    Args:
        runner: runs this rank's share of the model.
        sampler: draws from the vocabulary.

    Attributes:
        accepts_rejection: whether the sampler can accept guesses by rejection.
        is_alone: no other rank takes part in its steps, so that it may go on without one that could not be launched.
        num_stages: stages of the pipeline that it is.
        head_shares: 1, as its KV cache has all heads; 0 where other ranks have some.
        idle_share: share of the stages' time in which they had no step, while there were any.
        shortest_step: infinity, as this is no pipeline, whose slowest stage took so many seconds for the shortest step.
        memory: the part of a GPU's memory that its steps use; None leaves that to the allocator.
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
        self._allocates = False  # the last step did, for more than its results
        self.device = runner.kv_cache.device
        self._float_mode = float_mode(self.device)

    def launch(self, work: StepWork) -> LaunchedStep:
        """Start a step; nothing waits for the device. Tokens pending from the step before are read there."""
        num_graphs = self.runner.num_graphs
        with self._float_mode:
            launched = self._launch(work)
        if self.memory is not None and self.runner.num_graphs > num_graphs:
            self.memory.refill()  # the capture has given the block back
        elif self.memory is not None and self._allocates:
            self.memory.tidy()
        return launched

    def read_blocks(self, tables: Sequence[Sequence[int]]) -> list[LayerBlocks]:
        """Blocks of the KV cache, one table a KV group."""
        return self.runner.kv_cache.read_blocks(tables)

    def write_blocks(self, tables: Sequence[Sequence[int]], layers: Sequence[LayerBlocks]) -> None:
        """Write blocks of the KV cache."""
        self.runner.kv_cache.write_blocks(tables, layers)

    def restart(self) -> None:
        """Never asked for: this runs in the caller's process."""
        raise AssertionError("no process of its own")

    def recover(self) -> None:
        """Settle what a launch that ran out of memory has left: wait for it, and give back what is kept for later."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # its arrays may still be on their way
            torch.cuda.empty_cache()

    def _launch(self, work: StepWork) -> LaunchedStep:
        logits = self.runner.launch(work.arrays)
        if not self.runner.gives_logits:
            work = work._replace(rows=(), prompts=())
        sampled = None
        self._allocates = not self.runner.replayed or bool(work.prompts)
        refused: dict[int, Exception] = {}
        if work.rows:
            plan, drawn = self.sampler.prepare(work.rows, refused), self.runner.drawn  # while the forward runs
            sampled = self.sampler(logits, plan, drawn)
            self._allocates |= plan.columns is not None
            if drawn is None or plan.columns is not None:
                self.runner.keep(sampled.drawn)
        prompts = [_or_why(functools.partial(self._prompt_logprobs, logits, prompt)) for prompt in work.prompts]
        host = _to_host((sampled, prompts))
        done = None
        if self.device.type == "cuda":
            done = torch.cuda.Event()
            done.record()
        states = self.runner.states
        hidden = None if states is None or not work.rows else states[: len(work.rows)]
        return LaunchedStep(host, done, work, {index: repr(error) for index, error in refused.items()}, hidden)

    def _prompt_logprobs(self, logits: Tensor, prompt: PromptRows) -> TokenLogprobs:
        rows = logits[prompt.start : prompt.start + len(prompt.targets)]
        return token_logprobs(rows, self._to_device(np.array(prompt.targets)), prompt.num_top)

    def collect(self, launched: LaunchedStep) -> StepResult:
        """Wait for a step and read what it drew."""
        if launched.done is not None:
            launched.done.synchronize()
        sampled, prompts = launched.host
        prompt_logprobs = [
            found if isinstance(found, str) else _or_why(functools.partial(_logprobs, list(prompt.targets), found))
            for prompt, found in zip(launched.work.prompts, prompts, strict=True)
        ]
        if sampled is None:
            return StepResult([], [], [], prompt_logprobs, {})
        drawn = sampled.drawn.tolist()
        tokens, invalid = [token for _, token in drawn], [bool(bad) for bad, _ in drawn]
        logprobs, unread = _row_logprobs(launched.work.rows, tokens, sampled, launched.refused)
        return StepResult(tokens, invalid, logprobs, prompt_logprobs, launched.refused | unread, launched.hidden)

    def warm_up(self, most_sequences: int, most_tokens: int, most_blocks: int) -> None:
        """Capture a graph of every bucket of steps up to these sizes, with tables of ``most_blocks``.

        A capture takes as long as several steps. Those of shorter tables come as steps ask for them (Runner).
        """
        every = graph_layouts(most_sequences, most_tokens, most_blocks, self.runner.kv_cache.block_size)
        layouts = first_layouts(every)
        with stage("capture graphs") as under_way:
            for count, layout in enumerate(layouts, 1):
                self.capture(*layout)
                under_way.becomes(f"capture graphs {count}/{len(layouts)}")
        torch.cuda.empty_cache()

    def capture(self, tokens: int, sequences: int, width: int) -> None:
        """Capture the graph of a step of so many tokens and sequences, with tables of so many blocks."""
        arrays = idle_arrays(tokens, sequences, len(self.runner.kv_cache.groups), width)
        for _ in range(1 if tokens == sequences else 2):  # a mixed step is captured at second sight
            self.runner.launch(arrays)

    def warm_up_chains(self, most_sequences: int, num_steps: int) -> None:
        """Capture chains of greedy decode steps of up to so many sequences, the first of one or two tokens each."""
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
    """A step whose tokens write nothing and see whatever stands in block 0; only its cost is real."""
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


def _to_host(value: Any) -> Any:
    """Every tensor in a nest of tuples and lists, copied into pinned memory without waiting."""
    if isinstance(value, Tensor):
        if value.device.type == "cpu":
            return value
        pinned = torch.empty(value.shape, dtype=value.dtype, device="cpu", pin_memory=True)
        return pinned.copy_(value, non_blocking=True)
    if isinstance(value, (list, tuple)):
        parts = [_to_host(part) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    return value


def _logprobs(tokens: list[int], found: TokenLogprobs) -> list[Logprobs]:
    top = [dict(zip(ids, values)) for ids, values in zip(found.top_ids.tolist(), found.top.tolist())]
    return list(map(Logprobs, tokens, found.chosen.tolist(), top, found.rank.tolist()))


def _row_logprobs(
    rows: tuple[SampleRow, ...], tokens: list[int], sampled: Sampled, refused: dict[int, str]
) -> tuple[list[Logprobs | None], dict[int, str]]:
    """Those of the rows that asked, cut to the number of likeliest tokens that each asked for; and what went wrong."""
    out: list[Logprobs | None] = [None] * len(rows)
    unread: dict[int, str] = {}
    if sampled.logprobs is None:
        return out, unread
    wanted = [index for index, row in enumerate(rows) if index not in refused and row.params.logprobs is not None]
    entries = _logprobs([tokens[i] for i in wanted], sampled.logprobs)
    for index, entry in zip(wanted, entries, strict=True):
        found = _or_why(functools.partial(_cut, entry, rows[index]))
        if isinstance(found, str):
            unread[index] = found
        else:
            out[index] = found
    return out, unread


def _cut(entry: Logprobs, row: SampleRow) -> Logprobs:
    return entry._replace(top=dict(list(entry.top.items())[: row.params.logprobs or 0]))


def _or_why(work: Callable[[], Found]) -> Found | str:
    """What one request asked for, or what it raised: its neighbours go on. Memory that ran out is nobody's fault."""
    try:
        return work()
    except Exception as error:
        if ran_out_of_memory(error):
            raise
        return repr(error)
