"""Pipeline: runs an engine's steps. Plan, draft, build, launch; collect and commit a step later with ``overlap``.

With ``overlap`` a step is launched before the previous one is read back. Input tokens that the host does not know yet
are taken from the device, where the previous step draws them. A sequence that turns out to have ended has run one extra
row, which nobody reads. A step that drafts needs to know every earlier token, and a step after it needs to know where
it ended; in these cases the previous step is read back first. The caller can process tokens while the next step runs.

A pipeline of stages has several steps in flight (``Lanes``), each over sequences whose tokens are all known, so no step
waits for tokens of another.
"""

import time
from collections import deque
from collections.abc import Mapping
from typing import NamedTuple

from detcompile.errors import EngineError, WorkerError
from detcompile.runtime.device_memory import ran_out_of_memory
from detcompile.runtime.metrics import EngineStats, StepRecord, Tally
from detcompile.runtime.pacing.cost_model import StepClock
from detcompile.runtime.pacing.pace import Lanes
from detcompile.runtime.processes.restarts import Restarts
from detcompile.runtime.request_book import RequestBook
from detcompile.runtime.requests.sequence import Sequence
from detcompile.runtime.scheduler import Scheduler
from detcompile.runtime.speculation.draft_tree import Path
from detcompile.runtime.speculation.speculator import Speculator
from detcompile.runtime.step.block_tables import BlockTables
from detcompile.runtime.step.interfaces import StepWorker
from detcompile.runtime.step.worker import LaunchedStep, StepResult, StepWork
from detcompile.runtime.step_planner import PlannedStep, StepPlanner
from detcompile.runtime.step_work import Draw


class _InFlight(NamedTuple):
    """A step that was launched and is not read back yet."""

    step: PlannedStep
    launched: LaunchedStep
    started: float
    host_seconds: float
    num_waiting: int


class _OutOfMemory(EngineError):
    """A step was not launched because memory ran out."""


class Pipeline:
    """Runs the steps that a scheduler plans.

    Args:
        book: keeps the requests, and is notified of what happens to their sequences.
        scheduler: plans the steps.
        worker: runs the steps.
        speculator: drafts tokens; None without speculation.
        width: blocks of the longest sequence.
        overlap: launch a step before the previous one's tokens are read back, unless it drafts.

    Attributes:
        mid_step: True between the beginning and the end of a step. If an exception leaves it True, the engine cannot
            continue.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        worker: StepWorker,
        book: RequestBook,
        *,
        width: int,
        overlap: bool,
        speculator: Speculator | None = None,
    ) -> None:
        self.tally = Tally()
        self.mid_step = False
        self._scheduler, self._worker, self._book = scheduler, worker, book
        self._overlap, self._speculator = overlap, speculator
        self._tables = BlockTables(len(scheduler.blocks.groups), scheduler.config.max_num_seqs, width)
        self._planner = StepPlanner(scheduler, speculator, book, worker, self._tables, self.tally)
        self._in_flight: deque[_InFlight] = deque()  # at most one, or one per lane
        self._lanes = Lanes(worker.num_stages)
        self._clock = StepClock(time.perf_counter)
        self._restarts = Restarts(scheduler.config.restarts)

    @property
    def busy(self) -> bool:
        """True if a step was launched and is not read back yet."""
        return bool(self._in_flight)

    @property
    def forked(self) -> list[int]:
        """Blocks of the steps in flight that belong to draft branches and not to a sequence."""
        draws = [draw for flying in self._in_flight for draw in flying.step.draws]
        branches = [draw.verification.forked for draw in draws if draw.verification is not None]
        return [block for forked in branches for block in forked.reshape(-1).tolist()]

    def step(self) -> None:
        """Plan, draft, build and launch a step; collect and commit it, or the one launched before it.

        Restarts worker processes that are lost.
        """
        self.mid_step = True
        self._clock.resume()
        try:
            moved = self._step_in_stages() if self._worker.num_stages > 1 else self._step_alone()
        except WorkerError as lost:
            self._start_over(lost)
            moved = True
        assert moved or not self._scheduler.num_unfinished, "sequences are left and none can run"
        self._clock.pause()
        self.mid_step = False

    def _step_in_stages(self) -> bool:
        """Launch a step if fewer steps than lanes are in flight; commit the oldest if all lanes are busy or idle."""
        self._scheduler.num_lanes = num_lanes = self._lanes.count
        if len(self._in_flight) < num_lanes:  # false if the number of lanes has just shrunk
            launched = self._launch({}, self._planner.wants_drafts())
            assert not isinstance(launched, _OutOfMemory), "a step of a stage cannot be dropped"
            if launched is not None:
                self._in_flight.append(launched)
                if len(self._in_flight) < num_lanes:
                    return True
        if not self._in_flight:
            return False
        self._commit(self._in_flight.popleft())
        return True

    def _step_alone(self) -> bool:
        """Run a step; with ``overlap``, commit the previous step instead of this one.

        The previous step is committed before the launch if this one or the previous one drafts, or if bad words or a
        grammar need its tokens; and before smaller steps that replace one that ran out of memory.
        """
        before = self._in_flight.popleft() if self._in_flight else None
        due = before
        if due is not None and (due.step.drafting or due.step.awaited or self._planner.wants_drafts()):
            self._commit(due)
            due = None
        pending = {} if due is None else {draw.sequence: draw.row for draw in due.step.draws}
        launched = self._launch(pending, self._planner.wants_drafts())
        while isinstance(launched, _OutOfMemory):
            if due is not None:
                self._commit(due)
                due = None
            launched = self._launch({}, drafting=False)
        if not self._overlap:
            due = launched
        elif launched is not None:
            self._in_flight.append(launched)
        if due is not None:
            self._commit(due)
        return before is not None or launched is not None

    def stats(self, num_held_blocks: Mapping[str, int]) -> EngineStats:
        """Return the statistics of the steps so far.

        Args:
            num_held_blocks: number of blocks per request id.
        """
        return self.tally.stats(self._scheduler, num_held_blocks, self._worker.idle_share, self._restarts.count)

    def forget(self, sequence: Sequence) -> None:
        """Drop all state of a sequence that has ended."""
        self._worker.sampler.forget(sequence)
        self._tables.remove(sequence)
        if self._speculator is not None:
            self._speculator.forget(sequence)
        self._scheduler.remove(sequence)

    def _launch(self, pending: dict[Sequence, int], drafting: bool) -> "_InFlight | _OutOfMemory | None":
        """Plan, draft, build and launch the next step; None if nothing can run.

        Args:
            pending: for each sequence whose newest token is in the step in flight, its row there.
        """
        started = time.perf_counter()
        step = self._planner.next_step(pending, drafting)
        if step is None:
            return None
        launched = self._try(step.work)
        if isinstance(launched, _OutOfMemory):
            self._planner.roll_back(step, launched)
            return launched
        for draw in step.draws:
            draw.sequence.num_pending += 1
        host_seconds = time.perf_counter() - started
        if self._speculator is not None and drafting and self._worker.num_stages == 1:
            self._speculator.draft_ahead()
        return _InFlight(step, launched, time.monotonic(), host_seconds, self._scheduler.num_waiting)

    def _try(self, work: StepWork) -> "LaunchedStep | _OutOfMemory":
        """Launch a step; return _OutOfMemory if memory ran out and the step can be dropped."""
        try:
            return self._worker.launch(work)
        except Exception as error:
            if not self._worker.is_alone or not ran_out_of_memory(error):
                raise
            message = str(error)
        self._worker.recover()  # outside the except clause, because the error keeps the step's tensors alive
        return _OutOfMemory(message)

    def _start_over(self, lost: WorkerError) -> None:
        """Restart lost workers. The KV cache is gone: every sequence restarts from its tokens."""
        self._in_flight.clear()
        ran = self._scheduler.start_over()
        for sequence in ran:
            self._planner.reset(sequence)
        self._book.on_loss(ran)
        self._restarts.restart(self._worker, lost)
        self._clock.start_over()

    def _commit(self, due: _InFlight) -> None:
        """Collect a step, pass its tokens to the requests, and forget sequences that have ended."""
        result, step = self._worker.collect(due.launched), due.step
        self._restarts.progressed()
        started = time.perf_counter()
        for entry, logprobs in zip(step.prompts, result.prompt_logprobs, strict=True):
            if self._book.is_open(entry.sequence):
                if isinstance(logprobs, str):
                    self._book.on_error(entry.sequence, f"its prompt's logprobs: {logprobs}")
                else:
                    self._book.on_prompt_logprobs(entry.sequence, entry.start + 1, logprobs)
        num_generated = 0
        ended: list[Sequence] = []
        newest: dict[Sequence, int] = {}
        for draw in step.draws:
            sequence = draw.sequence
            sequence.num_pending -= 1
            if self._book.is_open(sequence):  # not canceled or ended in the meantime
                goes_on, count, row = self._follow(draw, result)
                num_generated += count
                if goes_on:
                    newest[sequence] = row
                else:
                    ended.append(sequence)
            elif self._speculator is not None and draw.verification is not None:
                self._speculator.discard(draw.verification)
        if self._speculator is not None and result.hidden is not None and not self._in_flight:
            self._speculator.observe(newest, result.hidden)  # valid only if no later step has overwritten the states
        for entry in step.plan.entries:
            if entry.sequence in self._scheduler.running:
                self._scheduler.blocks.commit(entry.sequence)
        for sequence in ended:  # after their blocks were published
            self.forget(sequence)
        self._record(due, num_generated, time.perf_counter() - started)
        self._observe(step)

    def _follow(self, draw: Draw, result: StepResult) -> tuple[bool, int, int]:
        """Append the token drawn after a sequence's newest one, and the tokens after accepted drafts.

        Returns whether the sequence continues, how many tokens it got, and the row of the last one.
        """
        sequence, first, verification = draw
        running = sequence in self._scheduler.running  # false if a step of another stage took its blocks
        path: Path = ()
        count = 0
        while True:
            row = first if verification is None else first + verification.layout.rows[path]
            refused = result.refused.get(row)
            token = None if result.invalid[row] or refused is not None else result.tokens[row]
            if refused is None:
                goes_on = self._book.on_token(sequence, token, result.logprobs[row])
            else:
                self._book.on_error(sequence, f"its token could not be drawn: {refused}")
                goes_on = False
            count += token is not None
            child = verification.tree.child(path, token) if verification is not None and token is not None else None
            if not goes_on or child is None:
                break
            path = child
            sequence.num_computed += running
        if verification is not None and self._speculator is not None:
            if running:
                self._speculator.commit(verification, path, cut=child is not None)
                self._tables.changed(sequence, verification.start // self._scheduler.blocks.pool.block_size)
            else:
                self._speculator.discard(verification)
            self._book.on_draft(sequence, len(verification.tree), len(path))
        return goes_on, count, row

    def _observe(self, step: PlannedStep) -> None:
        """Report the step's duration, from the end of the previous step, to the scheduler and the speculator.

        The pace also counts the caller's time between steps, because clients wait for it too.
        """
        seconds, since = self._clock.lap(goes_on=bool(self._scheduler.running))
        self._scheduler.observe(step.plan, len(step.work.arrays.input_ids), since)
        if self._speculator is not None:
            self._speculator.timed(step.load, seconds, drafting=step.drafting)

    def _record(self, due: _InFlight, num_tokens: int, finish_seconds: float) -> None:
        load, host_seconds = due.step.load, due.host_seconds + finish_seconds
        counts = load.num_prefill_tokens, load.num_decodes, due.num_waiting
        self.tally.add(StepRecord(due.started, time.monotonic(), host_seconds, *counts), num_tokens)
        self._lanes.observe(host_seconds, self._worker.shortest_step)
