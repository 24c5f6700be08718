"""Stepwise generation of a padded batch: the caller sees each column before the next is computed.

It is the loop of Hugging Face's ``GenerationMixin._sample`` over a runner, for features that engines lack: streamers,
stopping criteria over the whole batch, logits and scores. A row's tokens equal an engine's, because they depend only on
the row's tokens and seed.

Legend: B rows of the answer, C columns so far, V vocabulary size.
"""

import threading
from collections.abc import Sequence as SequenceOf
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import StoppingCriteriaList

from detcompile.errors import EngineError
from detcompile.executors.executor import Executor
from detcompile.runtime.dense.generation_arguments import GenerationArguments
from detcompile.runtime.kv.block_pool import BLOCK_SIZE, whole_blocks
from detcompile.runtime.kv.kv_blocks import plain_blocks
from detcompile.runtime.request_book import CHANGED
from detcompile.runtime.requests.admission import Admission
from detcompile.runtime.requests.request import undrawable
from detcompile.runtime.requests.sampling_params import SamplingParams
from detcompile.runtime.requests.sequence import Sequence
from detcompile.runtime.sampling.sampler import Sampler, SampleRow
from detcompile.runtime.step.builder import build_step
from detcompile.runtime.step.interfaces import StepRunner


class Columns(NamedTuple):
    """Result of stepwise generation."""

    sequences: Tensor  # [B, C] int64: the batch, then each row's tokens and padding
    logits: tuple[Tensor, ...] | None = None  # per new column [B, V] float32, zeros for finished rows
    scores: tuple[Tensor, ...] | None = None  # the processed logits that each token was drawn from


class _Kept(NamedTuple):
    runner: StepRunner
    num_blocks: int
    num_states: int
    cuda_graphs: bool


class Stepper:
    """Generates over a runner that it keeps, so that captured CUDA graphs are reused."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: _Kept | None = None

    def generate(
        self,
        executor: Executor,
        input_ids: Tensor,
        prompts: SequenceOf[list[int]],
        params: SequenceOf[SamplingParams],
        criteria: StoppingCriteriaList,
        arguments: GenerationArguments,
    ) -> Columns:
        """Continue the rows until the criteria have ended all of them.

        Args:
            input_ids: [B, C], the rows with their padding.
            prompts: tokens of each row.
            params: sampling parameters of each row.
            criteria: end rows; one of them ends all after ``max_new_tokens`` columns.

        Raises:
            EngineError: the weights changed during generation, or a row's logits are not finite; a GenerationError if
                the row's parameters are to blame.
            InvalidInput: a row cannot be served.
        """
        sequences = _sequences(executor, prompts, params)
        facts = executor.description.facts
        num_tokens = sum(whole_blocks(len(prompt) + arguments.max_new_tokens) for prompt in prompts)
        num_states = len(prompts) if facts.state_shapes else 0
        graphs = facts.device.type == "cuda" if arguments.cuda_graphs is None else arguments.cuda_graphs
        kept = self._take(executor, plain_blocks(facts, num_tokens).pool.num_blocks, num_states, graphs)
        rows = _Rows(executor, kept, sequences)
        columns = _columns(rows, input_ids, criteria, arguments)
        with self._lock:
            self._kept = kept  # not after an error: a step may still be running
        return columns

    def _take(self, executor: Executor, num_blocks: int, num_states: int, cuda_graphs: bool) -> _Kept:
        """Return the kept runner if it is free and large enough, else a new one."""
        with self._lock:
            kept, self._kept = self._kept, None
        if kept is not None and kept.cuda_graphs == cuda_graphs and not kept.runner.is_lost:
            if kept.num_blocks >= num_blocks and kept.num_states >= num_states:
                return kept
        kept = None  # frees the old cache first
        runner = executor.new_runner(num_blocks, BLOCK_SIZE, cuda_graphs, num_states)
        return _Kept(runner, num_blocks, num_states, cuda_graphs)


class _Rows:
    """Sequences over a KV cache, and the next token of each."""

    def __init__(self, executor: Executor, kept: _Kept, sequences: SequenceOf[Sequence]) -> None:
        facts = executor.description.facts
        self.sequences = sequences
        self.num_logits, self.num_ids = facts.num_logits, facts.num_token_ids
        groups = len(facts.kv_groups)
        tokens = (kept.num_blocks - 1) // groups * BLOCK_SIZE
        self._blocks = plain_blocks(facts, tokens, num_sequences=kept.num_states or None)
        self._runner = kept.runner
        self._sampler = Sampler(facts.num_logits, facts.device, is_exact=facts.is_exact)
        self._weights, self._version = executor.weights, executor.weights.version()

    def draw(self, live: SequenceOf[int], with_scores: bool) -> tuple[list[int], Tensor, Tensor | None]:
        """Draw and append the next token of the rows ``live``; return tokens, logits and the scores drawn from."""
        sequences = [self.sequences[row] for row in live]
        arrays = build_step([(sequence, sequence.num_uncomputed) for sequence in sequences], self._blocks)
        logits = self._runner.run(arrays)
        plan = self._sampler.prepare(
            [
                SampleRow(
                    sequence.sampling,
                    sequence.num_tokens,
                    sequence.num_generated,
                    key=sequence,
                    token_ids=sequence.token_ids,
                    forbidden=sequence.forbidden_after(),
                )
                for sequence in sequences
            ]
        )
        scores = torch.empty_like(logits, dtype=torch.float32) if with_scores else None
        drawn = self._sampler(logits, plan, scores=scores).drawn.tolist()
        if self._weights.version() != self._version:  # changed by a streamer, or by another thread
            raise EngineError(f"generate(): {CHANGED}")
        for row, sequence, (invalid, token) in zip(live, sequences, drawn):
            if invalid or token >= self.num_ids:
                where = f"row {row}, token {len(sequence.token_ids)}"
                raise undrawable(where, sequence.sampling, None if invalid else token)
            sequence.num_computed = len(sequence.token_ids)
            sequence.token_ids.append(token)
        return [token for _, token in drawn], logits, scores


def _sequences(
    executor: Executor, prompts: SequenceOf[list[int]], params: SequenceOf[SamplingParams]
) -> list[Sequence]:
    """Return the rows as an engine would admit them."""
    facts = executor.description.facts
    admission = Admission(
        None,
        max_context=facts.max_context,
        vocab_size=facts.num_token_ids,
        end_tokens=tuple,
        num_logits=facts.num_logits,
    )
    requests = (
        admission.request(f"row {row}", prompt, each, arrival=row, priority=0, stream_text=False)
        for row, (prompt, each) in enumerate(zip(prompts, params, strict=True))
    )
    return [request.sequences[0] for request in requests]


def _columns(rows: _Rows, input_ids: Tensor, criteria: StoppingCriteriaList, arguments: GenerationArguments) -> Columns:
    """Run the loop. A finished row is padded if any criterion has end tokens; otherwise it continues until all end."""
    streamer, device, size = arguments.streamer, input_ids.device, len(input_ids)
    pads = any(hasattr(criterion, "eos_token_id") for criterion in criteria)
    wants = arguments.return_dict_in_generate
    all_logits: list[Tensor] | None = [] if wants and arguments.output_logits else None
    all_scores: list[Tensor] | None = [] if wants and arguments.output_scores else None
    tokens, unfinished = input_ids.long(), torch.ones(size, dtype=torch.bool, device=device)
    if streamer is not None:
        streamer.put(tokens.cpu())
    while unfinished.any():
        live = unfinished.nonzero()[:, 0].tolist() if pads else list(range(size))
        drawn, logits, scores = rows.draw(live, all_scores is not None)
        for kept, new in ((all_logits, logits), (all_scores, scores)):
            if kept is not None and new is not None:
                kept.append(_scattered(new, live, size, device))
        column = torch.full((size,), arguments.padding or 0, dtype=torch.int64, device="cpu")
        column[live] = torch.tensor(drawn, device="cpu")
        tokens = torch.cat([tokens, column.to(device)[:, None]], dim=1)
        ended = criteria(tokens, None if all_scores is None else tuple(all_scores))
        unfinished = unfinished & ~ended
        if streamer is not None:
            streamer.put(column)
    if streamer is not None:
        streamer.end()
    return Columns(tokens, *(None if kept is None else tuple(kept) for kept in (all_logits, all_scores)))


def _scattered(computed: Tensor, live: SequenceOf[int], size: int, device: torch.device) -> Tensor:
    """Return [B, V] float32 with the computed rows in their places and zeros elsewhere."""
    rows = torch.zeros(size, computed.shape[1], dtype=torch.float32, device=device)
    rows[list(live)] = computed.to(device, torch.float32)
    return rows
