"""Pipeline: the steps of an engine. Plan, draft, build, launch; then read back, verify, settle.

With ``overlap`` a step is launched before the one ahead of it was read back: input tokens that the host does not know
yet are taken from the device, where that step will have drawn them. A sequence that turns out to have ended has run one
row too many, which nobody reads. A step that drafts needs to know every token before it, and what follows one needs
to know where it ended, so there the step ahead is read back first; what the caller does with its tokens has time while
the next one runs.

A step that finds no memory is taken back, and its sequences run in smaller ones: they stand where they stood, and come
to the same bits.
"""

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

from detcompile.errors import EngineError
from detcompile.runtime.device_memory import ran_out_of_memory
from detcompile.runtime.metrics import StepRecord, Tally
from detcompile.runtime.requests.outputs import Logprobs
from detcompile.runtime.requests.sequence import Sequence
from detcompile.runtime.scheduler import Scheduler, StepPlan
from detcompile.runtime.speculation.draft_tree import Path
from detcompile.runtime.speculation.speculator import DRAFT_ROWS, Speculator
from detcompile.runtime.speculation.switch import Load
from detcompile.runtime.speculation.tree_verification import Verification
from detcompile.runtime.step.builder import BlockTables, StepEntry
from detcompile.runtime.step.runner import MOST_SEQUENCES
from detcompile.runtime.step.worker import LaunchedStep, StepResult, StepWork, Worker
from detcompile.runtime.step_work import Draw, build_work, lay_out

__all__ = ["Ledger", "Pipeline"]

logger = logging.getLogger(__name__)


class Ledger(Protocol):
    """Who keeps the requests: hears what happened to their sequences."""

    def planning(self) -> None:
        """A step is about to be planned: whoever comes or goes, now is the time."""

    def is_open(self, sequence: Sequence) -> bool:
        """Whether anybody still waits for its tokens."""

    def admitted(self, entry: StepEntry) -> None:
        """A sequence got its first seat, or one again; ``entry.start`` tokens came from the cache."""

    def preempted(self, sequence: Sequence) -> None:
        """It lost its seat and waits again."""

    def drew(self, sequence: Sequence, token: int | None, logprobs: Logprobs | None) -> bool:
        """Its next token, or None where its logits are not numbers; whether it goes on."""

    def scored(self, sequence: Sequence, start: int, found: list[Logprobs]) -> None:
        """Logprobs of its prompt's tokens from ``start`` on."""

    def verified(self, sequence: Sequence, num_drafted: int, num_accepted: int) -> None:
        """So many drafts were tried, and so many were right."""

    def broke(self, sequence: Sequence, error: Exception | str) -> None:
        """What its request asks for raised, or finds no memory: it ends, and the others go on."""


class _InFlight(NamedTuple):
    """A launched step and whose rows are whose."""

    launched: LaunchedStep
    plan: StepPlan
    draws: list[Draw]
    drafting: bool
    prompts: tuple[StepEntry, ...]
    load: Load
    started: float
    host_seconds: float
    num_waiting: int


class _OutOfMemory(EngineError):
    """Why a step was not launched."""


class _Prepared(NamedTuple):
    """A step that was planned and built, and not launched."""

    plan: StepPlan
    work: Any  # StepWork; None of an empty plan
    draws: list[Draw]
    prompts: tuple[StepEntry, ...]


class _Faulty(Exception):
    """Sequences raise where a step with them is planned."""

    def __init__(self, found: dict[Sequence, Exception]) -> None:
        super().__init__()
        self.found = found


class Pipeline:
    """Runs the steps that a scheduler plans.

    Args:
        width: blocks of the longest sequence.
        overlap: launch a step before the last one's tokens are read back, if it does not draft.
        clock: seconds, for the speculator's switch.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        worker: Worker,
        ledger: Ledger,
        *,
        width: int,
        overlap: bool,
        speculator: Speculator | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.tally = Tally()
        self._scheduler = scheduler
        self._worker = worker
        self._ledger = ledger
        self._overlap = overlap
        self._speculator = speculator
        self._tables = BlockTables(len(scheduler.blocks.groups), scheduler.config.max_num_seqs, width)
        self._in_flight: _InFlight | None = None
        self._clock = clock
        self.mid_step = False  # where a step was left half done, it cannot be gone on with
        self._load = Load(0)  # of the last step launched: the next one will be like it
        self._resumed = self._seconds = 0.0  # since when the clock runs, and what it counted before; from step to step

    @property
    def busy(self) -> bool:
        """Whether a step was launched and not read back."""
        return self._in_flight is not None

    @property
    def forked(self) -> list[int]:
        """Blocks of the step in flight that belong to branches of drafts, and to no sequence."""
        draws = () if self._in_flight is None else self._in_flight.draws
        found = [draw.verification.forked for draw in draws if draw.verification is not None]
        return [block for forked in found for block in forked.reshape(-1).tolist()]

    def advance(self) -> None:
        """Launch a step and finish one, as far as there is anything to do."""
        self.mid_step = True
        self._resumed = self._clock()
        before, self._in_flight = self._in_flight, None
        in_order = before is not None and (before.drafting or self._wants_drafts())
        if before is not None and in_order:
            self._finish(before)
        launched = self._launch(None if in_order else before, self._wants_drafts())
        if isinstance(launched, _OutOfMemory):
            if before is not None and not in_order:
                self._finish(before)
                in_order = True
            launched = self._launch_smaller()
        if before is None and not self._overlap:
            before, launched = launched, None
        self._in_flight = launched
        if before is not None and not in_order:
            self._finish(before)
        assert before or launched or not self._scheduler.num_unfinished, "sequences are left and none can run"
        self._seconds += self._clock() - self._resumed
        self.mid_step = False

    def forget(self, sequence: Sequence) -> None:
        """A sequence has ended: nothing of it is kept."""
        self._worker.sampler.forget(sequence)
        self._tables.leave(sequence)
        if self._speculator is not None:
            self._speculator.forget(sequence)
        self._scheduler.remove(sequence)

    def _wants_drafts(self) -> bool:
        return self._speculator is not None and self._speculator.wants(self._load)

    def _launch_smaller(self) -> _InFlight | None:
        """The next step, after one that found no memory; all tokens before it are known."""
        launched = self._launch(None, drafting=False)
        while isinstance(launched, _OutOfMemory):
            launched = self._launch(None, drafting=False)
        return launched

    def _launch(self, before: _InFlight | None, drafting: bool) -> "_InFlight | _OutOfMemory | None":
        started = time.perf_counter()
        prepared = None
        while prepared is None:
            self._ledger.planning()
            try:
                prepared = self._prepared(before, drafting)
            except _Faulty as error:
                for sequence, own in error.found.items():
                    self._ledger.broke(sequence, own)
        if not prepared.plan.entries:
            return None
        launched = self._try(prepared.work)
        if isinstance(launched, _OutOfMemory):
            self._take_back(prepared.plan, prepared.draws, len(prepared.work.arrays.input_ids), launched)
            return launched
        for draw in prepared.draws:
            draw.sequence.num_pending += 1
        host_seconds = time.perf_counter() - started
        if self._speculator is not None and drafting:
            self._speculator.draft_ahead()
        return _InFlight(
            launched,
            prepared.plan,
            prepared.draws,
            drafting,
            prepared.prompts,
            self._load,
            time.monotonic(),
            host_seconds,
            len(self._scheduler.waiting),
        )

    def _prepared(self, before: _InFlight | None, drafting: bool) -> "_Prepared":
        """A step that can be launched, or an empty one.

        Raises:
            _Faulty: some sequences cannot be planned; the others can, once these are gone.
        """
        try:
            plan = self._scheduler.plan()
        except Exception as error:
            raise self._faulty(self._scheduler.faulty()) from error
        for sequence in plan.preempted:
            self._lost_seat(sequence)
        for entry in plan.entries[len(plan.entries) - len(plan.admitted) :]:  # what was admitted stands last
            self._ledger.admitted(entry)
        if not plan.entries:
            return _Prepared(plan, None, [], ())
        num_tokens = sum(entry.num_tokens for entry in plan.entries)
        num_decodes = sum(entry.start >= entry.sequence.num_prompt_tokens for entry in plan.entries)
        self._load = Load(num_decodes, num_tokens - num_decodes)
        drafted: dict[Sequence, Verification] = {}
        if self._speculator is not None and drafting:
            rows_left = min(self._scheduler.config.max_num_seqs + DRAFT_ROWS, MOST_SEQUENCES) - len(plan.entries)
            drafted = self._speculator.draft(plan.entries, min(self._scheduler.budget - num_tokens, rows_left))
        pending = {} if before is None else {draw.sequence: draw.row for draw in before.draws}
        try:
            return self._built(plan, drafted, pending)
        except Exception as error:
            self._scheduler.undo(plan)
            for verification in drafted.values():
                self._scheduler.blocks.discard(verification.forked.reshape(-1).tolist())
            raise self._faulty(self._unbuildable(plan, drafted, pending)) from error

    def _built(
        self, plan: StepPlan, drafted: Mapping[Sequence, Verification], pending: dict[Sequence, int]
    ) -> "_Prepared":
        entries, draws = lay_out(plan.entries, drafted)
        prompts = tuple(entry for entry in plan.entries if entry.sequence.gives_prompt_logits(entry.start))
        size = self._scheduler.blocks.pool.block_size
        work = build_work(entries, draws, prompts, self._tables, size, pending)
        return _Prepared(plan, work, draws, prompts)

    def _unbuildable(
        self, plan: StepPlan, drafted: Mapping[Sequence, Verification], pending: dict[Sequence, int]
    ) -> dict[Sequence, Exception]:
        """Sequences whose part in a step cannot be built even alone."""
        found: dict[Sequence, Exception] = {}
        for entry in plan.entries:
            own = {entry.sequence: drafted[entry.sequence]} if entry.sequence in drafted else {}
            try:
                self._built(plan._replace(entries=(entry,)), own, pending)
            except Exception as error:
                found[entry.sequence] = error
        return found

    def _faulty(self, found: dict[Sequence, Exception]) -> Exception:
        """What to raise for a step that could not be planned: of nobody's fault, it is everybody's."""
        if any(self._ledger.is_open(sequence) for sequence in found):
            return _Faulty(found)
        return EngineError("a step could not be planned, and no request is to blame")

    def _lost_seat(self, sequence: Sequence) -> None:
        """It starts over from its tokens, also in the sampler."""
        self._tables.leave(sequence)
        self._worker.sampler.forget(sequence)
        self.tally.num_preemptions += 1
        self._ledger.preempted(sequence)

    def _try(self, work: StepWork) -> "LaunchedStep | _OutOfMemory":
        """Launch it, or find that a worker which can do without the step had no memory for it."""
        try:
            return self._worker.launch(work)
        except Exception as error:
            if not getattr(self._worker, "is_alone", False) or not ran_out_of_memory(error):
                raise
            message = str(error)
        self._worker.recover()  # out of the except clause, as the error holds the step's tensors
        return _OutOfMemory(message)

    def _take_back(self, plan: StepPlan, draws: list[Draw], num_tokens: int, error: "_OutOfMemory") -> None:
        """Undo a plan whose step found no memory, and plan smaller; a sequence for whose one token there is none ends.

        What it wrote to the cache is written again, with the same bits, before anyone reads it.
        """
        for draw in draws:
            self._worker.sampler.forget(draw.sequence)
            if self._speculator is not None and draw.verification is not None:
                self._speculator.discard(draw.verification)
        for sequence in self._scheduler.take_back(plan, max(1, num_tokens // 2)):
            self._lost_seat(sequence)
        logger.warning("a step of %d tokens ran out of memory and is tried in parts: %s", num_tokens, error)
        if num_tokens == 1:
            self._ledger.broke(plan.entries[0].sequence, error)

    def _finish(self, step: _InFlight) -> None:
        result = self._worker.collect(step.launched)
        started = time.perf_counter()
        for entry, found in zip(step.prompts, result.prompt_logprobs, strict=True):
            if self._ledger.is_open(entry.sequence):
                if isinstance(found, str):
                    self._ledger.broke(entry.sequence, f"its prompt's logprobs: {found}")
                else:
                    self._ledger.scored(entry.sequence, entry.start + 1, found)
        num_generated = 0
        ended: list[Sequence] = []
        newest: dict[Sequence, int] = {}
        for draw in step.draws:
            sequence = draw.sequence
            sequence.num_pending -= 1
            if self._ledger.is_open(sequence):  # neither cancelled nor ended meanwhile
                goes_on, count, row = self._follow(draw, result)
                num_generated += count
                if goes_on:
                    newest[sequence] = row
                else:
                    ended.append(sequence)
            elif self._speculator is not None and draw.verification is not None:
                self._speculator.discard(draw.verification)
        if self._speculator is not None and result.hidden is not None and self._in_flight is None:
            self._speculator.observe(newest, result.hidden)  # a step launched meanwhile has overwritten the states
        for entry in step.plan.entries:
            if entry.sequence in self._scheduler.running:
                self._scheduler.blocks.settle(entry.sequence)
        for sequence in ended:  # now that its blocks can be found again
            self.forget(sequence)
        self._record(step, num_generated, time.perf_counter() - started)
        self._observe(step)

    def _follow(self, draw: Draw, result: StepResult) -> tuple[bool, int, int]:
        """Hand on the token drawn after a sequence's newest one, and those after drafts that were right.

        Returns whether the sequence goes on, how many tokens it got, and the row of the last of them.
        """
        sequence, first, verification = draw
        path: Path = ()
        count = 0
        while True:
            row = first if verification is None else first + verification.layout.rows[path]
            refused = result.refused.get(row)
            token = None if result.invalid[row] or refused is not None else result.tokens[row]
            if refused is None:
                goes_on = self._ledger.drew(sequence, token, result.logprobs[row])
            else:
                self._ledger.broke(sequence, f"its token could not be drawn: {refused}")
                goes_on = False
            count += token is not None
            child = verification.tree.child(path, token) if verification is not None and token is not None else None
            if not goes_on or child is None:
                break
            path = child
            sequence.num_computed += 1
        if verification is not None and self._speculator is not None:
            self._speculator.settle(verification, path, cut=child is not None)
            self._tables.changed(sequence, verification.start // self._scheduler.blocks.pool.block_size)
            self._ledger.verified(sequence, len(verification.tree), len(path))
        return goes_on, count, row

    def _observe(self, step: _InFlight) -> None:
        """Tell the switch what a step took, from the end of the one before, and gave."""
        now = self._clock()
        seconds = self._seconds + now - self._resumed
        self._resumed, self._seconds = now, 0.0
        if self._speculator is not None:
            self._speculator.timed(step.load, seconds, drafting=step.drafting)

    def _record(self, step: _InFlight, num_tokens: int, finish_seconds: float) -> None:
        record = StepRecord(
            launched=step.started,
            finished=time.monotonic(),
            host_seconds=step.host_seconds + finish_seconds,
            num_prefill_tokens=step.load.num_prefill_tokens,
            num_decodes=step.load.num_decodes,
            num_waiting=step.num_waiting,
        )
        self.tally.add(record, num_tokens)
