"""Scheduler: which sequences run in the next step, how many tokens of each, and which blocks they take or free.

No choice made here can change a bit. A policy composes each step (runtime/policies.py) in order of urgency
(runtime/requests/queues.py). A plan can be undone: if a step cannot be built or runs out of memory, its sequences
return to their earlier state.
"""

from typing import NamedTuple

from detcompile.errors import InvalidInput
from detcompile.runtime.adapters import Adapter
from detcompile.runtime.engine_config import EngineConfig
from detcompile.runtime.kv.kv_blocks import KVBlocks
from detcompile.runtime.pacing.cost_model import StepShape
from detcompile.runtime.pacing.pace import Pace, most_lanes
from detcompile.runtime.policies import NextStep, new_policy
from detcompile.runtime.requests.queues import Queues
from detcompile.runtime.requests.sequence import Sequence
from detcompile.runtime.step.builder import StepEntry
from detcompile.step import NO_SLOT

CALM_STEPS = 16  # steps after which a token budget that was cut for lack of memory doubles


class StepPlan(NamedTuple):
    """One step: its entries, decodes first, and the sequences that were preempted for it."""

    entries: tuple[StepEntry, ...]
    preempted: tuple[Sequence, ...]
    admitted: tuple[Sequence, ...]  # newly admitted; the last of the entries


class Scheduler:
    """Waiting and running sequences, and the policy that picks from them.

    A planned sequence's ``num_computed`` advances at once, so that the next step can be planned while this one runs.

    Args:
        num_stages: stages of the pipeline that runs the steps.

    Attributes:
        num_lanes: steps in flight at a time, each with different sequences; the pipeline may change it between plans.
        running: running sequences in order of admission; read-only for callers.
        waiting: waiting sequences that may be planned, in any order; read-only for callers.
        pace: limits prompt tokens beside decodes, and learns from ``observe``; None without tbt_slo.
    """

    def __init__(self, config: EngineConfig, blocks: KVBlocks, num_stages: int = 1) -> None:
        self.config = config
        slo = config.tbt_slo
        self.pace = None if slo is None else Pace(slo / 1e3)
        self.num_lanes = num_stages
        self._most_in_flight = most_lanes(num_stages)
        self.blocks = blocks
        self._queues = Queues(config.aging)
        self.running, self.waiting = self._queues.running, self._queues.waiting
        self._policy = new_policy(config.scheduler)
        self._cut: int | None = None  # reduced token budget after memory ran out
        self._calm = 0  # steps planned since then
        self._num_adapted = 0  # sequences with an adapter
        self._served: dict[Adapter | None, int] = {}  # number of each adapter's last step
        self._preempted: tuple[Sequence, ...] = ()  # by failed plans, or to serve others alone

    @property
    def budget(self) -> int:
        """Token budget of a step."""
        return self.config.max_num_batched_tokens if self._cut is None else self._cut

    @property
    def num_unfinished(self) -> int:
        """Number of sequences that run, or wait and may be planned."""
        return len(self.running) + len(self.waiting)

    @property
    def num_waiting(self) -> int:
        """Number of waiting sequences."""
        return len(self.waiting) + len(self._queues.aside)

    def most_blocks(self, sequence: Sequence) -> int:
        """Return the most blocks that a sequence can need; with fewer in the pool, it could never finish."""
        most = sequence.most_tokens
        if self.config.allocation == "reserve":
            return self.blocks.needed(most)
        in_flight = (1 + self._most_in_flight) * self.config.max_num_batched_tokens  # plus 1 for the step being planned
        return self.blocks.peak(most, most if self.config.whole_prompts else in_flight)

    def require_room(self, sequence: Sequence) -> None:
        """Raise InvalidInput for a sequence that needs more blocks than the pool has."""
        needed, there = self.most_blocks(sequence), self.blocks.pool.num_usable
        if needed > there:
            raise InvalidInput(
                f"{len(sequence.token_ids)} prompt tokens and at most {sequence.most_tokens} in all need {needed} KV"
                f" blocks of {self.config.block_size} tokens, the engine has {there}: shorten it, lower max_tokens, or"
                " give the engine more memory"
            )

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence that has passed ``require_room``."""
        self._num_adapted += sequence.adapter is not None and sequence not in self._queues
        self._queues.add(sequence)

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence in self._queues

    def remove(self, sequence: Sequence) -> None:
        """Forget a finished or canceled sequence and free its blocks."""
        self._num_adapted -= sequence.adapter is not None
        if self._queues.remove(sequence):
            self.blocks.release(sequence)

    def forget_prefixes(self, version: int) -> None:
        """Forget all cached prefixes; nothing may be running."""
        for sequence in self._queues:
            sequence.block_digests = []
        self.blocks.forget_prefixes(b"weights %d" % version)

    def plan(self) -> StepPlan:
        """Plan the next step; it has no entries if nothing can run before pending tokens are read back."""
        if self._cut is not None and self._calm >= CALM_STEPS:
            self._cut, self._calm = 2 * self._cut, 0
            if self._cut >= self.config.max_num_batched_tokens:
                self._cut = None
        step = self._composed()
        if step.entries:
            self._queues.step += 1
            self._calm += 1
        preempted, self._preempted = (*self._preempted, *step.preempted), ()
        return StepPlan(tuple(step.entries.values()), preempted, tuple(step.admitted))

    def _composed(self) -> NextStep:
        """Return the next step, for the least recently served adapter whose sequences can run."""
        turns = sorted(self._adapters(), key=lambda adapter: self._served.get(adapter, -1))
        choices: list[tuple[Adapter | None, ...]] = [(adapter,) for adapter in turns] or [()]
        for adapters in choices:
            step = self._next_step(adapters)
            try:
                self._policy(step)
            except Exception:
                self._drop(step)
                raise
            if step.entries:
                self._served = {one: self._served[one] for one in turns if one in self._served}
                self._served |= dict.fromkeys(adapters, self._queues.step)
                break
            self._preempted = (*self._preempted, *step.preempted)
            step.preempted.clear()
        return step

    def _adapters(self) -> set[Adapter | None]:
        """Return the adapters of all sequences, None for the plain model; an empty set if no sequence has one."""
        if not self._num_adapted:
            return set()
        return {sequence.adapter for sequence in (*self.running, *self.waiting)}

    def faulty(self) -> dict[Sequence, Exception]:
        """Return sequences for which a call that ``plan`` makes raises an exception, with the exceptions."""
        errors: dict[Sequence, Exception] = {}
        step = self._next_step(())
        for sequence in (*self.running, *self.waiting):
            try:
                self._queues.urgency(sequence)
                step.chunk(sequence)
                _ = sequence.num_pending, sequence.num_uncomputed, sequence.most_tokens, sequence.block_tables
                _ = sequence.wants_prompt_logits
            except Exception as error:
                errors[sequence] = error
        return errors

    def observe(self, plan: StepPlan, num_tokens: int, seconds: float) -> None:
        """Report a step's tokens, drafts included, and its seconds since the end of the previous step."""
        if self.pace is not None:
            self.pace.observe(StepShape.of(plan.entries)._replace(num_tokens=num_tokens), seconds)

    def undo(self, plan: StepPlan) -> None:
        """Undo a plan that was not launched; its sequences keep their blocks."""
        for entry in plan.entries:
            entry.sequence.num_computed = entry.start

    def roll_back(self, plan: StepPlan, budget: int) -> list[Sequence]:
        """Undo a step that ran out of memory, and limit the next steps to ``budget`` tokens.

        Sequences with a recurrent state, which the step may have advanced, are preempted and returned.
        """
        stateful = [entry.sequence for entry in plan.entries if entry.sequence.state_slot != NO_SLOT]
        self.undo(plan)
        for sequence in stateful:
            self._queues.preempt(sequence)
            self.blocks.release(sequence)
        self._cut, self._calm = budget, 0
        return stateful

    def start_over(self) -> list[Sequence]:
        """Clear the KV cache: all sequences wait with only their tokens. Return those that were running."""
        ran = list(self.running)
        for sequence in ran:
            self._queues.preempt(sequence)
            self.blocks.release(sequence)
        self.blocks.pool.clear()
        for sequence in self._queues:
            sequence.num_pending = 0
        return ran

    def serve_alone(self, sequences: frozenset[Sequence] | None) -> None:
        """Plan only these sequences, and preempt the others, until the next call; None plans all."""
        others = () if sequences is None else tuple(s for s in self.running if s not in sequences)
        for sequence in others:
            self._queues.preempt(sequence)
            self.blocks.release(sequence)
        self._preempted = (*self._preempted, *others)
        self._queues.leave_alone(sequences)

    def _next_step(self, adapters: tuple[Adapter | None, ...]) -> NextStep:
        if self.pace is not None:
            self.pace.num_lanes = self.num_lanes
        return NextStep(self._queues, self.blocks, self.config, self._cut, self.num_lanes, self.pace, adapters)

    def _drop(self, step: NextStep) -> None:
        """Drop a step that could not be planned; sequences preempted on the way stay preempted."""
        for entry in step.entries.values():
            entry.sequence.num_computed = entry.start
        self.waiting[:] = [sequence for sequence in self.waiting if sequence not in self.running]
        self._preempted = (*self._preempted, *step.preempted)
