"""Scheduler: which sequences run in the next step, how many tokens of each, and the blocks they take and give back.

No choice made here can change a bit. A policy makes up each step (runtime/policies.py) in the order of urgency
(runtime/requests/queues.py). What is planned can be undone: where a step could not be built or found no memory, its
sequences stand where they stood.
"""

from typing import NamedTuple

from detcompile.errors import InvalidInput
from detcompile.runtime.engine_config import EngineConfig
from detcompile.runtime.kv.kv_blocks import KVBlocks
from detcompile.runtime.pacing.cost_model import StepShape
from detcompile.runtime.pacing.lanes import most_lanes
from detcompile.runtime.pacing.pace import Pace
from detcompile.runtime.policies import NextStep, new_policy
from detcompile.runtime.requests.queues import Queues
from detcompile.runtime.requests.sequence import Sequence
from detcompile.runtime.step.builder import StepEntry
from detcompile.step import NO_SLOT

__all__ = ["Scheduler", "StepPlan"]

CALM_STEPS = 16  # after which a token budget that was cut for want of memory doubles


class StepPlan(NamedTuple):
    """One step: what runs, decodes first, and what had to give up its blocks for it."""

    entries: tuple[StepEntry, ...]
    preempted: tuple[Sequence, ...]
    admitted: tuple[Sequence, ...]  # the last of the entries


class Scheduler:
    """Sequences that wait or run, and the policy that picks from them.

    A planned sequence's ``num_computed`` advances at once, so that the next step can be planned while this one runs.

    Args:
        num_stages: stages of the pipeline that runs the steps.

    Attributes:
        num_lanes: steps that run at a time, each of other sequences; whoever runs them may change it between plans.
        running: sequences that run, in the order of their admission; never changed from outside.
        waiting: sequences that wait and may be planned, in any order; never changed from outside.
        pace: what bounds prompt tokens beside decodes, and learns from ``observe``; None without a tbt_slo.
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
        self._cut: int | None = None  # tokens of a step, for a while after memory ran out
        self._calm = 0  # steps planned since
        self._preempted: tuple[Sequence, ...] = ()  # by plans that failed, and for those that are served alone

    @property
    def budget(self) -> int:
        """Tokens of a step."""
        return self.config.max_num_batched_tokens if self._cut is None else self._cut

    @property
    def num_unfinished(self) -> int:
        """Sequences that run, or wait and may be planned."""
        return len(self.running) + len(self.waiting)

    @property
    def num_waiting(self) -> int:
        """Sequences that wait."""
        return len(self.waiting) + len(self._queues.aside)

    def most_blocks(self, sequence: Sequence) -> int:
        """Blocks that a sequence can come to hold: what the pool must have, or it could never finish."""
        most = sequence.most_tokens
        if self.config.allocation == "reserve":
            return self.blocks.needed(most)
        in_flight = (1 + self._most_in_flight) * self.config.max_num_batched_tokens  # and of the step that is planned
        return self.blocks.peak(most, most if self.config.whole_prompts else in_flight)

    def require_room(self, sequence: Sequence) -> None:
        """Fail unless the pool has the ``most_blocks`` of a sequence.

        Raises:
            InvalidInput: it could never finish.
        """
        needed, there = self.most_blocks(sequence), self.blocks.pool.num_usable
        if needed > there:
            raise InvalidInput(
                f"{len(sequence.token_ids)} prompt tokens and at most {sequence.most_tokens} in all need {needed} KV"
                f" blocks of {self.config.block_size} tokens, the engine has {there}: shorten it, lower max_tokens, or"
                " give the engine more memory"
            )

    def add(self, sequence: Sequence) -> None:
        """Let a sequence wait that the pool has room for."""
        self._queues.add(sequence)

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence in self._queues

    def remove(self, sequence: Sequence) -> None:
        """Forget a finished or cancelled sequence and give its blocks back."""
        if self._queues.remove(sequence):
            self.blocks.release(sequence)

    def forget_prefixes(self, version: int) -> None:
        """Let no prefix be found that was cached before; nothing runs."""
        for sequence in self._queues:
            sequence.block_digests = []
        self.blocks.forget_prefixes(b"weights %d" % version)

    def plan(self) -> StepPlan:
        """The next step; without entries if nothing can run before pending tokens are read back."""
        if self._cut is not None and self._calm >= CALM_STEPS:
            self._cut, self._calm = 2 * self._cut, 0
            if self._cut >= self.config.max_num_batched_tokens:
                self._cut = None
        step = self._next_step()
        try:
            self._policy(step)
        except Exception:
            self._drop(step)
            raise
        if step.entries:
            self._queues.step += 1
            self._calm += 1
        preempted, self._preempted = (*self._preempted, *step.preempted), ()
        return StepPlan(tuple(step.entries.values()), preempted, tuple(step.admitted))

    def faulty(self) -> dict[Sequence, Exception]:
        """Sequences that raise where they are asked what ``plan`` asks, and what they raise."""
        found: dict[Sequence, Exception] = {}
        step = self._next_step()
        for sequence in (*self.running, *self.waiting):
            try:
                self._queues.urgency(sequence)
                step.chunk(sequence)
                _ = sequence.num_pending, sequence.num_uncomputed, sequence.most_tokens, sequence.block_tables
                _ = sequence.wants_prompt_logits
            except Exception as error:
                found[sequence] = error
        return found

    def observe(self, plan: StepPlan, num_tokens: int, seconds: float) -> None:
        """A planned step of so many tokens, those of drafts among them, ended so long after the one before it."""
        if self.pace is not None:
            self.pace.observe(StepShape.of(plan.entries)._replace(num_tokens=num_tokens), seconds)

    def undo(self, plan: StepPlan) -> None:
        """A planned step was not launched: its sequences have computed what they had before, and keep their blocks."""
        for entry in plan.entries:
            entry.sequence.num_computed = entry.start

    def take_back(self, plan: StepPlan, budget: int) -> list[Sequence]:
        """A planned step found no memory: its sequences stand where they stood, and the next steps have ``budget``.

        Where layers carry a state, which the step may have moved on, its sequences are preempted, and returned.
        """
        stateful = [entry.sequence for entry in plan.entries if entry.sequence.state_slot != NO_SLOT]
        self.undo(plan)
        for sequence in stateful:
            self._queues.preempt(sequence)
            self.blocks.release(sequence)
        self._cut, self._calm = budget, 0
        return stateful

    def start_over(self) -> list[Sequence]:
        """Nothing is left of the KV cache: all sequences wait, with their tokens alone. Those that ran are returned."""
        ran = list(self.running)
        for sequence in ran:
            self._queues.preempt(sequence)
            self.blocks.release(sequence)
        self.blocks.pool.clear()
        for sequence in self._queues:
            sequence.num_pending = 0
        return ran

    def serve_alone(self, sequences: frozenset[Sequence] | None) -> None:
        """Plan these and no others, whose blocks are taken, until this is called again; None plans all."""
        others = () if sequences is None else tuple(own for own in self.running if own not in sequences)
        for sequence in others:
            self._queues.preempt(sequence)
            self.blocks.release(sequence)
        self._preempted = (*self._preempted, *others)
        self._queues.leave_alone(sequences)

    def _next_step(self) -> NextStep:
        if self.pace is not None:
            self.pace.num_lanes = self.num_lanes
        return NextStep(self._queues, self.blocks, self.config, self._cut, self.num_lanes, self.pace)

    def _drop(self, step: NextStep) -> None:
        """Nothing of a step that could not be planned was run; what lost its blocks on the way has lost them."""
        for entry in step.entries.values():
            entry.sequence.num_computed = entry.start
        self.waiting[:] = [sequence for sequence in self.waiting if sequence not in self.running]
        self._preempted = (*self._preempted, *step.preempted)
