"""Which sequences run in the next step, and how many tokens of each. No choice made here can change a bit.

Three policies over one state: running sequences, waiting sequences, and the blocks of both. A policy is a function that
makes up one step out of the same three moves: decode, continue prefills, admit.

Urgency: (priority - steps waited // aging, arrival). The most urgent sequence is never preempted and is admitted first;
every other one becomes the most urgent in time, since nothing that arrives later can pass it after ``aging`` steps for
each priority between them. Where the budget is smaller than the number of decoding sequences, those that had no part in
a step for longest go first: each moves at least once in ceil(running / budget) of the steps that decode.

Source: stall-free batching and chunked prefills: Agrawal et al., "Taming Throughput-Latency Tradeoff in LLM Inference
with Sarathi-Serve", OSDI 2024.
"""

from collections.abc import Callable
from typing import NamedTuple

from detcompile.runtime.engine_config import EngineConfig
from detcompile.runtime.kv.kv_blocks import KVBlocks
from detcompile.runtime.requests.sequence import Sequence
from detcompile.runtime.step.builder import StepEntry
from detcompile.step import NO_SLOT

__all__ = ["PROMPT_LOGPROBS_CHUNK", "Scheduler", "StepPlan"]

PROMPT_LOGPROBS_CHUNK = 512  # prompt tokens a step whose logits are all wanted: bounds the memory of their logprobs
CALM_STEPS = 16  # after which a token budget that was cut for want of memory doubles


class StepPlan(NamedTuple):
    """One step: what runs, decodes first, and what had to give up its blocks for it."""

    entries: tuple[StepEntry, ...]
    preempted: tuple[Sequence, ...]
    admitted: tuple[Sequence, ...]


class Scheduler:
    """Sequences that wait or run, and the policy that picks from them.

    A planned sequence's ``num_computed`` advances at once, so that the next step can be planned while this one runs.
    """

    def __init__(self, config: EngineConfig, blocks: KVBlocks) -> None:
        self.config = config
        self.blocks = blocks
        self.running: dict[Sequence, None] = {}  # in the order of their admission
        self.waiting: list[Sequence] = []
        self.step = 0
        self._cut: int | None = None  # tokens of a step, for a while after memory ran out
        self._calm = 0  # steps planned since
        self._policy = POLICIES[config.scheduler]
        self._prefill_turn = True  # simple_chunking
        self._waiting_since: dict[Sequence, int] = {}
        self._draft = _Draft(config.max_num_batched_tokens)
        self._preempted: tuple[Sequence, ...] = ()  # by plans that failed

    @property
    def budget(self) -> int:
        """Tokens of a step."""
        return self.config.max_num_batched_tokens if self._cut is None else self._cut

    @property
    def num_unfinished(self) -> int:
        """Sequences that run or wait."""
        return len(self.running) + len(self.waiting)

    @property
    def whole_prompts(self) -> bool:
        """Whether the policy computes every prompt in one step."""
        return self.config.scheduler == "prefill_first"

    def most_blocks(self, sequence: Sequence) -> int:
        """Blocks that a sequence can come to hold: what the pool must have, or it could never finish."""
        most = sequence.most_tokens
        if self.config.allocation == "reserve":
            return self.blocks.needed(most)
        in_flight = 2 * self.config.max_num_batched_tokens  # a step may run while the next is planned
        return self.blocks.peak(most, most if self.whole_prompts else in_flight)

    def add(self, sequence: Sequence) -> None:
        """Let a sequence wait. The pool must have its ``most_blocks``."""
        self._waiting_since.setdefault(sequence, self.step)
        self.waiting.append(sequence)

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence in self._waiting_since

    def remove(self, sequence: Sequence) -> None:
        """Forget a finished or cancelled sequence and give its blocks back."""
        self._waiting_since.pop(sequence)
        if sequence in self.running:
            del self.running[sequence]
            self.blocks.release(sequence)
        else:
            self.waiting.remove(sequence)

    def forget_prefixes(self, version: int) -> None:
        """Let no prefix be found that was cached before; nothing runs."""
        for sequence in self.waiting:
            sequence.block_digests = []
        self.blocks.forget_prefixes(b"weights %d" % version)

    def plan(self) -> StepPlan:
        """The next step; without entries if nothing can run before pending tokens are read back."""
        if self._cut is not None and self._calm >= CALM_STEPS:
            self._cut, self._calm = 2 * self._cut, 0
            if self._cut >= self.config.max_num_batched_tokens:
                self._cut = None
        draft = self._draft = _Draft(self.budget)
        try:
            self._policy(self)
        except Exception:
            self._undo(draft)
            raise
        if draft.entries:
            self.step += 1
            self._calm += 1
        preempted, self._preempted = (*self._preempted, *draft.preempted), ()
        return StepPlan(tuple(draft.entries.values()), preempted, tuple(draft.admitted))

    def faulty(self) -> dict[Sequence, Exception]:
        """Sequences that raise where they are asked what ``plan`` asks, and what they raise."""
        found: dict[Sequence, Exception] = {}
        for sequence in (*self.running, *self.waiting):
            try:
                self._urgency(sequence)
                self._chunk(sequence)
                _ = sequence.num_pending, sequence.num_uncomputed, sequence.most_tokens, sequence.block_tables
            except Exception as error:
                found[sequence] = error
        return found

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
            self._give_up(sequence)
        self._cut, self._calm = budget, 0
        return stateful

    def decode(self) -> None:
        """One token of each running sequence that decodes, least recently served first, as the budget allows."""
        self._serve(self._ready()[0])

    def continue_prefills(self) -> None:
        """The next chunks of running sequences whose prompt is not computed yet, the most urgent first."""
        self._prefill(self._ready()[1])

    def admit(self) -> None:
        """Start waiting sequences in the order of their urgency, until seats, budget or blocks run out.

        Nobody passes the most urgent one, and nobody starts in a step that took blocks away from another. Where prompts
        are computed whole, one that is longer than the budget takes a step of its own.
        """
        draft = self._draft
        if draft.preempted or not self.waiting or len(self.running) >= self.config.max_num_seqs:
            return
        started = 0
        self.waiting.sort(key=self._urgency)
        for sequence in self.waiting:
            too_long = self.whole_prompts and draft.entries and sequence.num_tokens > draft.budget
            if len(self.running) >= self.config.max_num_seqs or too_long:
                break
            if draft.budget == 0 or self._chunk(sequence) == 0:
                break
            if sequence.num_pending or not self._start(sequence):
                break
            started += 1
            self.running[sequence] = None
            draft.admitted.append(sequence)
            room = len(sequence.block_tables[0]) * self.blocks.pool.block_size - sequence.num_computed
            self._enter(sequence, min(room, self._chunk(sequence)))
        del self.waiting[:started]

    def stall_free(self) -> None:
        """Every decode, then prefill chunks in what is left of the budget."""
        decodes, prefills = self._ready()
        if len(decodes) >= self._draft.budget and prefills:  # a small budget goes round
            self._serve(decodes + prefills)
            return
        self._serve(decodes)
        self._prefill(prefills)
        self.admit()

    def prefill_first(self) -> None:
        """Whole prompts if one can start, otherwise every decode."""
        self.continue_prefills()
        self.admit()
        if not self._draft.entries:
            self.decode()

    def simple_chunking(self) -> None:
        """A step of prefill chunks, then a step of decodes; what has nothing to do leaves its turn to the other."""
        for _ in range(2):
            if self._prefill_turn:
                self.continue_prefills()
                self.admit()
            else:
                self.decode()
            self._prefill_turn = not self._prefill_turn
            if self._draft.entries:
                return

    def _ready(self) -> tuple[list[Sequence], list[Sequence]]:
        """Running sequences that decode, and those whose prompt is not computed yet."""
        decodes: list[Sequence] = []
        prefills: list[Sequence] = []
        for sequence in self.running:
            num_tokens = sequence.num_tokens
            num_uncomputed = num_tokens - sequence.num_computed
            if num_uncomputed == 1 and num_tokens > sequence.num_prompt_tokens:
                if num_tokens < sequence.most_tokens:
                    decodes.append(sequence)
            elif num_uncomputed > 0:
                prefills.append(sequence)
        return decodes, prefills

    def _serve(self, ready: list[Sequence]) -> None:
        for sequence in sorted(ready, key=lambda s: s.last_step):
            if self._draft.budget == 0:
                return
            if sequence not in self._draft.lost:
                self._extend(sequence, 1)

    def _prefill(self, ready: list[Sequence]) -> None:
        for sequence in sorted(ready, key=self._urgency):
            if self._draft.budget > 0 and sequence not in self._draft.lost and self._chunk(sequence):
                self._extend(sequence, self._chunk(sequence))

    def _chunk(self, sequence: Sequence) -> int:
        """Tokens of a prompt that the step still has room for; none where it has all the prompt logits it may have."""
        wanted = sequence.num_uncomputed
        if _gives_prompt_logits(sequence, sequence.num_computed):
            wanted = min(wanted, self._draft.prompt_logits)
        return wanted if self.whole_prompts and self._cut is None else min(wanted, self._draft.budget)

    def _start(self, sequence: Sequence) -> bool:
        """Give a waiting sequence its cached prefix and blocks for its first chunk, or nothing.

        Without sliding windows it gets the blocks of its whole prompt; with them, those of a chunk, as it will free
        blocks on the way, once the pool has room for all that it will hold at a time.
        """
        reuse = not _wants_prompt_logits(sequence)
        windowed = any(group.window for group in self.blocks.groups)
        if self.config.allocation == "reserve":
            return self.blocks.admit(sequence, sequence.most_tokens, reuse=reuse) is not None
        if not windowed or self.whole_prompts:
            return self.blocks.admit(sequence, sequence.num_tokens, reuse=reuse) is not None
        chunk = self._chunk(sequence)
        if self.running and self.blocks.peak(sequence.num_tokens, chunk) > self.blocks.pool.num_free:
            return False
        if self.blocks.admit(sequence, chunk, reuse=reuse) is None:
            return False
        grown = self.blocks.grow(sequence, sequence.num_computed + self._chunk(sequence))
        assert grown, "the peak counts these blocks"
        return True

    def _extend(self, sequence: Sequence, num_tokens: int) -> None:
        """Put a running sequence into the step, at the price of less urgent ones if its blocks run out."""
        while not self.blocks.grow(sequence, sequence.num_computed + num_tokens):
            victim = max(self.running, key=self._urgency)
            self._preempt(victim)
            if victim is sequence:
                return
        self._enter(sequence, num_tokens)

    def _enter(self, sequence: Sequence, num_tokens: int) -> None:
        self._draft.entries[sequence] = StepEntry(sequence, sequence.num_computed, num_tokens)
        self._draft.budget = max(0, self._draft.budget - num_tokens)
        if _gives_prompt_logits(sequence, sequence.num_computed):
            self._draft.prompt_logits -= num_tokens
        sequence.num_computed += num_tokens
        sequence.last_step = self.step

    def _preempt(self, sequence: Sequence) -> None:
        """Give up a sequence's blocks; it starts over from its tokens, and comes to the same bits."""
        entry = self._draft.entries.pop(sequence, None)
        if entry is not None:
            self._draft.budget += entry.num_tokens
            if _gives_prompt_logits(sequence, entry.start):
                self._draft.prompt_logits += entry.num_tokens
        self._give_up(sequence)
        self._draft.lost.add(sequence)
        self._draft.preempted.append(sequence)

    def _give_up(self, sequence: Sequence) -> None:
        del self.running[sequence]
        self.blocks.release(sequence)
        self.waiting.append(sequence)

    def _undo(self, draft: "_Draft") -> None:
        """Nothing of a step that could not be planned was run; what lost its blocks on the way has lost them."""
        for entry in draft.entries.values():
            entry.sequence.num_computed = entry.start
        self.waiting = [sequence for sequence in self.waiting if sequence not in self.running]
        self._preempted = (*self._preempted, *draft.preempted)

    def _urgency(self, sequence: Sequence) -> tuple[int, int, int]:
        waited = self.step - self._waiting_since[sequence]
        return sequence.priority - waited // self.config.aging, sequence.arrival, sequence.sample_index


def _wants_prompt_logits(sequence: Sequence) -> bool:
    """Prompt logprobs are asked for, and this is the sample that they are taken from."""
    return sequence.sampling.prompt_logprobs is not None and sequence.sample_index == 0


def _gives_prompt_logits(sequence: Sequence, start: int) -> bool:
    """Whether the logits of all its tokens from ``start`` on are wanted in a step."""
    return _wants_prompt_logits(sequence) and start < sequence.num_prompt_tokens - 1


class _Draft:
    """A step in the making."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.prompt_logits = PROMPT_LOGPROBS_CHUNK
        self.entries: dict[Sequence, StepEntry] = {}
        self.preempted: list[Sequence] = []
        self.admitted: list[Sequence] = []
        self.lost: set[Sequence] = set()


POLICIES: dict[str, Callable[[Scheduler], None]] = {
    "stall_free": Scheduler.stall_free,
    "prefill_first": Scheduler.prefill_first,
    "simple_chunking": Scheduler.simple_chunking,
}
