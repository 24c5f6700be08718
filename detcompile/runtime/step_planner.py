"""StepPlanner: plan, draft and build the next step.

A request that raises on the way ends alone, and the step is planned anew without it. A step that finds no memory is
taken back: its sequences stand where they stood, run in smaller steps, and come to the same bits.
"""

import logging
from collections.abc import Mapping
from typing import NamedTuple

from detcompile.errors import EngineError
from detcompile.runtime.metrics import Tally
from detcompile.runtime.request_book import RequestBook
from detcompile.runtime.requests.bad_words import NO_WORDS
from detcompile.runtime.requests.sequence import Sequence
from detcompile.runtime.scheduler import Scheduler, StepPlan
from detcompile.runtime.speculation.speculator import DRAFT_ROWS, Speculator
from detcompile.runtime.speculation.switch import Load
from detcompile.runtime.speculation.tree_verification import Verification
from detcompile.runtime.step.block_tables import BlockTables
from detcompile.runtime.step.builder import StepEntry
from detcompile.runtime.step.interfaces import StepWorker
from detcompile.runtime.step.runner import MOST_SEQUENCES
from detcompile.runtime.step.worker import StepWork
from detcompile.runtime.step_work import Draw, build_work, lay_out

__all__ = ["PlannedStep", "StepPlanner"]

logger = logging.getLogger(__name__)


class PlannedStep(NamedTuple):
    """A step that can be launched, and whose its rows of logits are."""

    plan: StepPlan
    work: StepWork
    draws: list[Draw]
    prompts: tuple[StepEntry, ...]  # parts whose prompt logprobs are wanted
    load: Load
    drafting: bool  # it may hold drafts, so that where it ends is known once it is read back
    awaited: bool = False  # bad words or masks of what follows hang on its tokens, which the host has to know


class _Faulty(Exception):
    """Sequences raise where a step with them is planned."""

    def __init__(self, found: dict[Sequence, Exception]) -> None:
        super().__init__()
        self.found = found


class StepPlanner:
    """Makes steps that a worker can launch, one after another.

    Args:
        tables: block tables of the running sequences, as the steps read them.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        speculator: Speculator | None,
        book: RequestBook,
        worker: StepWorker,
        tables: BlockTables,
        tally: Tally,
    ) -> None:
        self._scheduler = scheduler
        self._speculator = speculator
        self._book = book
        self._worker = worker
        self._tables = tables
        self._tally = tally
        self._load = Load(0)  # of the last step planned: the next one will be like it

    def wants_drafts(self) -> bool:
        """Whether the next step should draft, for which every token before it has to be known."""
        return self._speculator is not None and self._speculator.wants(self._load)

    def next_step(self, pending: dict[Sequence, int], drafting: bool) -> PlannedStep | None:
        """Plan, draft and build; None where nothing can run before pending tokens are read back.

        Args:
            pending: rows of the step ahead whose tokens are the newest of their sequences, and not read back yet.
            drafting: whether to draft; nothing may be pending then.
        """
        while True:
            self._book.update()
            try:
                plan = self._plan()
                if not plan.entries:
                    return None
                drafted = self._draft(plan) if drafting else {}
                return self._build(plan, drafted, pending, drafting)
            except _Faulty as error:
                for sequence, own in error.found.items():
                    self._book.on_error(sequence, own)

    def take_back(self, step: PlannedStep, error: Exception) -> None:
        """A step found no memory: plan smaller from here on. A sequence for whose one token there is none ends.

        What the step wrote to the cache is written again, with the same bits, before anyone reads it.
        """
        for draw in step.draws:
            self._worker.sampler.forget(draw.sequence)
            if self._speculator is not None and draw.verification is not None:
                self._speculator.discard(draw.verification)
        num_tokens = len(step.work.arrays.input_ids)
        for sequence in self._scheduler.take_back(step.plan, max(1, num_tokens // 2)):
            self.lost_seat(sequence)
        logger.warning("a step of %d tokens ran out of memory and is tried in parts: %s", num_tokens, error)
        if num_tokens == 1:
            self._book.on_error(step.plan.entries[0].sequence, error)

    def lost_seat(self, sequence: Sequence) -> None:
        """A preempted sequence starts over from its tokens, also in the sampler."""
        self._tables.leave(sequence)
        self._worker.sampler.forget(sequence)
        self._tally.num_preemptions += 1
        self._book.on_preemption(sequence)

    def _plan(self) -> StepPlan:
        try:
            plan = self._scheduler.plan()
        except Exception as error:
            raise self._faulty(self._scheduler.faulty()) from error
        for sequence in plan.preempted:
            self.lost_seat(sequence)
        for entry in plan.entries[len(plan.entries) - len(plan.admitted) :]:  # what was admitted stands last
            self._book.on_admission(entry)
        if plan.entries:
            num_tokens = sum(entry.num_tokens for entry in plan.entries)
            num_decodes = sum(entry.start >= entry.sequence.num_prompt_tokens for entry in plan.entries)
            self._load = Load(num_decodes, num_tokens - num_decodes)
        return plan

    def _draft(self, plan: StepPlan) -> dict[Sequence, Verification]:
        """Trees for the decodes, within what the plan leaves of the token budget and of a step's rows."""
        if self._speculator is None:
            return {}
        rows_left = min(self._scheduler.config.max_num_seqs + DRAFT_ROWS, MOST_SEQUENCES) - len(plan.entries)
        tokens_left = self._scheduler.budget - self._load.num_decodes - self._load.num_prefill_tokens
        return self._speculator.draft(plan.entries, min(tokens_left, rows_left))

    def _build(
        self, plan: StepPlan, drafted: Mapping[Sequence, Verification], pending: dict[Sequence, int], drafting: bool
    ) -> PlannedStep:
        try:
            return self._built(plan, drafted, pending, drafting)
        except Exception as error:
            self._scheduler.undo(plan)
            for verification in drafted.values():
                self._scheduler.blocks.discard(verification.forked.reshape(-1).tolist())
            raise self._faulty(self._unbuildable(plan, drafted, pending)) from error

    def _built(
        self, plan: StepPlan, drafted: Mapping[Sequence, Verification], pending: dict[Sequence, int], drafting: bool
    ) -> PlannedStep:
        entries, draws = lay_out(plan.entries, drafted)
        prompts = tuple(entry for entry in plan.entries if entry.sequence.gives_prompt_logits(entry.start))
        size = self._scheduler.blocks.pool.block_size
        work = build_work(entries, draws, prompts, self._tables, size, pending)
        sequences = [draw.sequence for draw in draws]
        awaited = any(own.bad_words is not NO_WORDS or own.matcher is not None for own in sequences)
        return PlannedStep(plan, work, draws, prompts, self._load, drafting, awaited)

    def _unbuildable(
        self, plan: StepPlan, drafted: Mapping[Sequence, Verification], pending: dict[Sequence, int]
    ) -> dict[Sequence, Exception]:
        """Sequences whose part in a step cannot be built even alone."""
        found: dict[Sequence, Exception] = {}
        for entry in plan.entries:
            own = {entry.sequence: drafted[entry.sequence]} if entry.sequence in drafted else {}
            try:
                self._built(plan._replace(entries=(entry,)), own, pending, drafting=False)
            except Exception as error:
                found[entry.sequence] = error
        return found

    def _faulty(self, found: dict[Sequence, Exception]) -> Exception:
        """What to raise for a step that could not be planned: of nobody's fault, it is everybody's."""
        if any(self._book.is_open(sequence) for sequence in found):
            return _Faulty(found)
        return EngineError("a step could not be planned, and no request is to blame")
