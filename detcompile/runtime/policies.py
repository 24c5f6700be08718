"""Policies: how one step is made up. No choice made here can change a bit.

A policy is a function that makes up a step out of the same three moves: decode, prefill, admit. Where the budget is
smaller than the number of decoding sequences, those that had no part in a step for longest go first: each moves at
least once in ceil(running / budget) of the steps that decode.

Source: stall-free batching and chunked prefills: Agrawal et al., "Taming Throughput-Latency Tradeoff in LLM Inference
with Sarathi-Serve", OSDI 2024.
"""

from collections.abc import Callable, Iterable

from detcompile.runtime.engine_config import EngineConfig, SchedulerName
from detcompile.runtime.kv.kv_blocks import KVBlocks
from detcompile.runtime.pacing.cost_model import StepShape
from detcompile.runtime.pacing.pace import LEAST_CHUNK, Pace
from detcompile.runtime.requests.queues import Queues
from detcompile.runtime.requests.sequence import Sequence
from detcompile.runtime.step.builder import StepEntry

__all__ = ["NextStep", "PROMPT_LOGPROBS_CHUNK", "Policy", "new_policy"]

PROMPT_LOGPROBS_CHUNK = 512  # prompt tokens a step whose logits are all wanted: bounds the memory of their logprobs

# Of prompts in a step of a pipeline: a part of all that waits, so that steps behind each other take about as long.
ROUNDS = 6  # of steps that run at a time, which what waits is spread over
FEWEST = 64  # tokens: fewer take as long


class NextStep:
    """A step in the making: what has a part in it, what had to give up its blocks for it, and the budget that is left.

    A sequence's ``num_computed`` advances when it enters.

    Args:
        cut: token budget of a step while memory is short, which parts prompts under every policy; None where the
            config's budget holds.
        pace: bounds the prompt tokens of a step that decodes; None where only the budget does.
        num_lanes: steps that run at a time: this one takes its share of what there is to do, and no sequence whose
            newest token another is about to draw.

    Attributes:
        budget: tokens that may still enter.
        entries: parts of the step by sequence, decodes first, then in the order in which they entered.
    """

    def __init__(
        self,
        queues: Queues,
        blocks: KVBlocks,
        config: EngineConfig,
        cut: int | None,
        num_lanes: int,
        pace: Pace | None = None,
    ) -> None:
        self.budget = config.max_num_batched_tokens if cut is None else cut
        self._num_lanes = num_lanes
        self.entries: dict[Sequence, StepEntry] = {}
        self.preempted: list[Sequence] = []
        self.admitted: list[Sequence] = []
        self._queues = queues
        self._blocks = blocks
        self._config = config
        self._parts_prompts = cut is not None or config.scheduler != "prefill_first"
        self._prompt_logits = PROMPT_LOGPROBS_CHUNK  # rows of prompt tokens that may still be asked for
        self._pace = pace
        self._shape = StepShape()  # of the entries, for the pace
        self._lost: set[Sequence] = set()  # the preempted ones, to look up
        if num_lanes > 1 and self._parts_prompts:
            self.budget = min(self.budget, self._share())

    def ready(self) -> tuple[list[Sequence], list[Sequence]]:
        """Running sequences that decode, and those whose prompt is not computed yet."""
        decodes: list[Sequence] = []
        prefills: list[Sequence] = []
        elsewhere = 0  # keys of the sequences whose next token other steps are about to draw
        for sequence in self._queues.running:
            if self._num_lanes > 1 and sequence.num_pending:
                elsewhere += sequence.num_tokens
                continue
            num_tokens = sequence.num_tokens
            num_uncomputed = num_tokens - sequence.num_computed
            if num_uncomputed == 1 and num_tokens > sequence.num_prompt_tokens:
                if num_tokens < sequence.most_tokens:
                    decodes.append(sequence)
            elif num_uncomputed > 0:
                prefills.append(sequence)
        return self._part(decodes, elsewhere) if self._num_lanes > 1 else decodes, prefills

    def decode(self, ready: Iterable[Sequence]) -> None:
        """One token of each of these, least recently served first, as the budget allows."""
        for sequence in sorted(ready, key=lambda s: s.last_step):
            if self.budget == 0:
                return
            if sequence not in self._lost:
                self._extend(sequence, 1)

    def prefill(self, ready: Iterable[Sequence]) -> None:
        """The next chunks of these, whose prompt is not computed yet, the most urgent first."""
        for sequence in sorted(ready, key=self._queues.urgency):
            if self.budget > 0 and sequence not in self._lost and self.chunk(sequence):
                self._extend(sequence, self.chunk(sequence))

    def admit(self) -> None:
        """Start waiting sequences in the order of their urgency, until seats, budget or blocks run out.

        Nobody passes the most urgent one, and nobody starts in a step that took blocks away from another. Where prompts
        are computed whole, one that is longer than the budget takes a step of its own.
        """
        running, waiting = self._queues.running, self._queues.waiting
        if self.preempted or not waiting or len(running) >= self._config.max_num_seqs:
            return
        if self._pace is not None and self._pace.full(self._shape):
            return
        started = 0
        waiting.sort(key=self._queues.urgency)
        for sequence in waiting:
            too_long = self._config.whole_prompts and self.entries and sequence.num_tokens > self.budget
            if len(running) >= self._config.max_num_seqs or too_long:
                break
            if self.budget == 0 or self.chunk(sequence) == 0:
                break
            if sequence.num_pending or not self._start(sequence):
                break
            started += 1
            running[sequence] = None
            self.admitted.append(sequence)
            room = len(sequence.block_tables[0]) * self._blocks.pool.block_size - sequence.num_computed
            self._enter(sequence, min(room, self._first_chunk(sequence)))
        del waiting[:started]

    def chunk(self, sequence: Sequence) -> int:
        """Tokens of a prompt that the step still has room for; none where it has all the prompt logits it may have."""
        wanted = sequence.num_uncomputed
        if sequence.gives_prompt_logits(sequence.num_computed):
            wanted = min(wanted, self._prompt_logits)
        wanted = min(wanted, self.budget) if self._parts_prompts else wanted
        return wanted if self._pace is None else self._pace.chunk(self._shape, sequence.num_computed, wanted)

    def _first_chunk(self, sequence: Sequence) -> int:
        """The chunk of a sequence that has its blocks: some of it also where its cached beginning fills the pace."""
        return self.chunk(sequence) or min(sequence.num_uncomputed, self.budget, LEAST_CHUNK)

    def _part(self, decodes: list[Sequence], elsewhere: int) -> list[Sequence]:
        """Those of the sequences that decode, the least recently served first, which read their part of all keys."""
        left = (elsewhere + sum(sequence.num_tokens for sequence in decodes)) / self._num_lanes
        part: list[Sequence] = []
        for sequence in sorted(decodes, key=lambda s: s.last_step):
            left -= sequence.num_tokens
            if part and 2 * left < -sequence.num_tokens:  # the larger half of it would be too much
                break
            part.append(sequence)
        return part

    def _share(self) -> int:
        """Tokens of this step: a part of the decodes, and of all prompt tokens that wait."""
        num_decodes = waiting = 0
        rounds = ROUNDS * self._num_lanes
        for sequence in (*self._queues.running, *self._queues.waiting):
            if sequence.num_pending or sequence.num_computed >= sequence.num_prompt_tokens:
                num_decodes += 1
            else:
                waiting += sequence.num_uncomputed
            if waiting >= rounds * self.budget:
                break
        return -(-num_decodes // self._num_lanes) + max(FEWEST, -(-waiting // rounds))

    def _start(self, sequence: Sequence) -> bool:
        """Give a waiting sequence its cached prefix and blocks for its first chunk, or nothing.

        Without sliding windows it gets the blocks of its whole prompt; with them, those of a chunk, as it will free
        blocks on the way, once the pool has room for all that it will hold at a time.
        """
        blocks, reuse = self._blocks, not sequence.wants_prompt_logits
        windowed = any(group.window for group in blocks.groups)
        if self._config.allocation == "reserve":
            return blocks.admit(sequence, sequence.most_tokens, reuse=reuse) is not None
        if not windowed or self._config.whole_prompts:
            return blocks.admit(sequence, sequence.num_tokens, reuse=reuse) is not None
        chunk = self.chunk(sequence)
        if self._queues.running and blocks.peak(sequence.num_tokens, chunk) > blocks.pool.num_free:
            return False
        if blocks.admit(sequence, chunk, reuse=reuse) is None:
            return False
        grown = blocks.grow(sequence, sequence.num_computed + self._first_chunk(sequence))
        assert grown, "the peak counts these blocks"
        return True

    def _extend(self, sequence: Sequence, num_tokens: int) -> None:
        """Put a running sequence into the step, at the price of less urgent ones if its blocks run out."""
        while not self._blocks.grow(sequence, sequence.num_computed + num_tokens):
            victim = max(self._queues.running, key=self._queues.urgency)
            self._preempt(victim)
            if victim is sequence:
                return
        self._enter(sequence, num_tokens)

    def _enter(self, sequence: Sequence, num_tokens: int) -> None:
        self.entries[sequence] = entry = StepEntry(sequence, sequence.num_computed, num_tokens)
        if self._pace is not None:
            self._shape = self._shape.with_part(entry)
        self.budget = max(0, self.budget - num_tokens)
        if sequence.gives_prompt_logits(sequence.num_computed):
            self._prompt_logits -= num_tokens
        sequence.num_computed += num_tokens
        sequence.last_step = self._queues.step

    def _preempt(self, sequence: Sequence) -> None:
        """Give up a sequence's blocks; it starts over from its tokens, and comes to the same bits."""
        entry = self.entries.pop(sequence, None)
        if entry is not None:
            self.budget += entry.num_tokens
            if self._pace is not None:
                self._shape = StepShape.of(self.entries.values())
            if sequence.gives_prompt_logits(entry.start):
                self._prompt_logits += entry.num_tokens
        self._queues.preempt(sequence)
        self._blocks.release(sequence)
        self._lost.add(sequence)
        self.preempted.append(sequence)


Policy = Callable[[NextStep], None]


def new_policy(name: SchedulerName) -> Policy:
    """The policy of that name, which may remember the steps before."""
    policies: dict[SchedulerName, Policy] = {
        "stall_free": _stall_free,
        "prefill_first": _prefill_first,
        "simple_chunking": _SimpleChunking(),
    }
    return policies[name]


def _stall_free(step: NextStep) -> None:
    """Every decode, then prefill chunks in what is left of the budget."""
    decodes, prefills = step.ready()
    if len(decodes) >= step.budget and prefills:  # a small budget goes round
        step.decode(decodes + prefills)
        return
    step.decode(decodes)
    step.prefill(prefills)
    step.admit()


def _prefill_first(step: NextStep) -> None:
    """Whole prompts if one can start, otherwise every decode."""
    step.prefill(step.ready()[1])
    step.admit()
    if not step.entries:
        step.decode(step.ready()[0])


class _SimpleChunking:
    """A step of prefill chunks, then a step of decodes; what has nothing to do leaves its turn to the other."""

    def __init__(self) -> None:
        self._prefills = True  # whose turn it is

    def __call__(self, step: NextStep) -> None:
        for _ in range(2):
            if self._prefills:
                step.prefill(step.ready()[1])
                step.admit()
            else:
                step.decode(step.ready()[0])
            self._prefills = not self._prefills
            if step.entries:
                return
