"""StepPlanner: plan, draft and build the next step.

If a request raises on the way, only that request ends, and the step is planned again without it. A step that runs out
of memory is rolled back: its sequences run again in smaller steps and produce the same bits.
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

logger = logging.getLogger(__name__)


class PlannedStep(NamedTuple):
    """A step ready to launch, and the owners of its rows of logits."""

    plan: StepPlan
    work: StepWork
    draws: list[Draw]
    prompts: tuple[StepEntry, ...]  # entries whose prompt logprobs are wanted
    load: Load
    drafting: bool  # it may hold drafts, so its end is known only when it is read back
    awaited: bool = False  # the next step's bad words or grammar masks need its tokens on the host


class _Faulty(Exception):
    """Some sequences raise while a step with them is planned."""

    def __init__(self, errors: dict[Sequence, Exception]) -> None:
        super().__init__()
        self.errors = errors


class StepPlanner:
    """Prepares steps for a worker, one after another.

    Args:
        tables: block tables of the running sequences.
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
        self._load = Load(0)  # of the last planned step; the next one will be similar

    def wants_drafts(self) -> bool:
        """Return True if the next step should draft; every earlier token must then be known."""
        return self._speculator is not None and self._speculator.wants(self._load)

    def next_step(self, pending: dict[Sequence, int], drafting: bool) -> PlannedStep | None:
        """Plan, draft and build a step; None if nothing can run before pending tokens are read back.

        Args:
            pending: for each sequence whose newest token is not read back yet, its row in the step ahead.
            drafting: draft tokens; nothing may be pending then.
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
                for sequence, fault in error.errors.items():
                    self._book.on_error(sequence, fault)

    def roll_back(self, step: PlannedStep, error: Exception) -> None:
        """Undo a step that ran out of memory, and plan smaller steps. A sequence whose single token does not fit ends.

        The cache entries that the step wrote are written again, with the same bits, before they are read.
        """
        for draw in step.draws:
            self._worker.sampler.forget(draw.sequence)
            if self._speculator is not None and draw.verification is not None:
                self._speculator.discard(draw.verification)
        num_tokens = len(step.work.arrays.input_ids)
        for sequence in self._scheduler.roll_back(step.plan, max(1, num_tokens // 2)):
            self.reset(sequence)
        logger.warning("a step of %d tokens ran out of memory and is split into smaller steps: %s", num_tokens, error)
        if num_tokens == 1:
            self._book.on_error(step.plan.entries[0].sequence, error)

    def reset(self, sequence: Sequence) -> None:
        """Reset a preempted sequence, which restarts from its tokens."""
        self._tables.remove(sequence)
        self._worker.sampler.forget(sequence)
        self._tally.num_preemptions += 1
        self._book.on_preemption(sequence)

    def _plan(self) -> StepPlan:
        try:
            plan = self._scheduler.plan()
        except Exception as error:
            raise self._faulty(self._scheduler.faulty()) from error
        for sequence in plan.preempted:
            self.reset(sequence)
        for entry in plan.entries[len(plan.entries) - len(plan.admitted) :]:  # admitted sequences come last
            self._book.on_admission(entry)
        if plan.entries:
            num_tokens = sum(entry.num_tokens for entry in plan.entries)
            num_decodes = sum(entry.start >= entry.sequence.num_prompt_tokens for entry in plan.entries)
            self._load = Load(num_decodes, num_tokens - num_decodes)
        return plan

    def _draft(self, plan: StepPlan) -> dict[Sequence, Verification]:
        """Draft trees for the decodes, within the plan's remaining token budget and rows."""
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
        work = work._replace(adapter=plan.entries[0].sequence.adapter)
        sequences = [draw.sequence for draw in draws]
        awaited = any(sequence.bad_words is not NO_WORDS or sequence.matcher is not None for sequence in sequences)
        return PlannedStep(plan, work, draws, prompts, self._load, drafting, awaited)

    def _unbuildable(
        self, plan: StepPlan, drafted: Mapping[Sequence, Verification], pending: dict[Sequence, int]
    ) -> dict[Sequence, Exception]:
        """Return the sequences whose part of a step cannot be built even alone, with their errors."""
        errors: dict[Sequence, Exception] = {}
        for entry in plan.entries:
            tree = {entry.sequence: drafted[entry.sequence]} if entry.sequence in drafted else {}
            try:
                self._built(plan._replace(entries=(entry,)), tree, pending, drafting=False)
            except Exception as error:
                errors[entry.sequence] = error
        return errors

    def _faulty(self, errors: dict[Sequence, Exception]) -> Exception:
        """Return the exception for a failed plan: it blames the faulty requests, or else the engine."""
        if any(self._book.is_open(sequence) for sequence in errors):
            return _Faulty(errors)
        return EngineError("a step could not be planned, and no single request caused it")
