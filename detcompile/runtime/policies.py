"""Policies: how a step is composed. No choice made here can change a bit.

A policy is a function that composes a step from three moves: decode, prefill, admit. If the budget is smaller than the
number of decoding sequences, the least recently served go first, so each moves at least once in ceil(running / budget)
steps that decode.

Source: stall-free batching and chunked prefills: Agrawal et al., "Taming Throughput-Latency Tradeoff in LLM Inference
with Sarathi-Serve", OSDI 2024.
"""

from collections.abc import Callable, Iterable

from detcompile.runtime.adapters import Adapter
from detcompile.runtime.engine_config import EngineConfig, SchedulerName
from detcompile.runtime.kv.kv_blocks import KVBlocks
from detcompile.runtime.pacing.cost_model import StepShape
from detcompile.runtime.pacing.pace import LEAST_CHUNK, Pace
from detcompile.runtime.requests.queues import Queues
from detcompile.runtime.requests.sequence import Sequence
from detcompile.runtime.step.builder import StepEntry

PROMPT_LOGPROBS_CHUNK = 512  # most prompt tokens per step with logits of all: bounds the memory of prompt logprobs

# Prompt tokens of a pipeline step are a share of all waiting ones, so that consecutive steps take about as long.
ROUNDS = 6  # rounds of lanes over which the waiting prompt tokens are spread
FEWEST = 64  # tokens; smaller chunks are not faster


class NextStep:
    """A step being composed: its entries, the sequences preempted for it, and the remaining budget.

    A sequence's ``num_computed`` advances when it enters.

    Args:
        cut: reduced token budget while memory is short, which splits prompts under every policy; None uses the
            config's budget.
        pace: limits the prompt tokens of a step that decodes; None leaves only the budget.
        adapters: one element, the adapter whose sequences may enter (None: the plain model); empty if no sequence has
            an adapter, so that all may enter.
        num_lanes: steps in flight. This step takes its share of the work, and no sequence whose newest token another
            step is about to draw.

    Attributes:
        budget: tokens that may still enter.
        entries: the step's entries by sequence: decodes first, then in order of entering.
    """

    def __init__(
        self,
        queues: Queues,
        blocks: KVBlocks,
        config: EngineConfig,
        cut: int | None,
        num_lanes: int,
        pace: Pace | None = None,
        adapters: tuple[Adapter | None, ...] = (),
    ) -> None:
        self._adapters = adapters
        self.budget = config.max_num_batched_tokens if cut is None else cut
        self._num_lanes = num_lanes
        self.entries: dict[Sequence, StepEntry] = {}
        self.preempted: list[Sequence] = []
        self.admitted: list[Sequence] = []
        self._queues = queues
        self._blocks = blocks
        self._config = config
        self._parts_prompts = cut is not None or config.scheduler != "prefill_first"
        self._prompt_logits = PROMPT_LOGPROBS_CHUNK  # prompt tokens with wanted logits that may still enter
        self._pace = pace
        self._shape = StepShape()  # of the entries, for the pace
        self._lost: set[Sequence] = set()  # same as ``preempted``, for lookups
        if num_lanes > 1 and self._parts_prompts:
            self.budget = min(self.budget, self._share())

    def ready(self) -> tuple[list[Sequence], list[Sequence]]:
        """Return running sequences that decode, and running sequences with an unfinished prompt."""
        decodes: list[Sequence] = []
        prefills: list[Sequence] = []
        elsewhere = 0  # total length of the sequences that other steps are decoding
        for sequence in self._queues.running:
            if self._adapters and sequence.adapter not in self._adapters:
                continue
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
        """Add one token of each sequence, least recently served first, within the budget."""
        for sequence in sorted(ready, key=lambda s: s.last_step):
            if self.budget == 0:
                return
            if sequence not in self._lost:
                self._extend(sequence, 1)

    def prefill(self, ready: Iterable[Sequence]) -> None:
        """Add the next prompt chunks of these sequences, most urgent first."""
        for sequence in sorted(ready, key=self._queues.urgency):
            if self.budget > 0 and sequence not in self._lost and self.chunk(sequence):
                self._extend(sequence, self.chunk(sequence))

    def admit(self) -> None:
        """Start waiting sequences in order of urgency, until max_num_seqs, the budget or the blocks run out.

        No sequence overtakes a more urgent one, and none starts in a step that preempted another. If prompts are
        computed whole, a prompt longer than the budget gets a step of its own.
        """
        running, waiting = self._queues.running, self._queues.waiting
        if self.preempted or not waiting or len(running) >= self._config.max_num_seqs:
            return
        if self._pace is not None and self._pace.full(self._shape):
            return
        started: list[Sequence] = []
        waiting.sort(key=self._queues.urgency)
        for sequence in waiting:
            if self._adapters and sequence.adapter not in self._adapters:
                continue
            too_long = self._config.whole_prompts and self.entries and sequence.num_tokens > self.budget
            if len(running) >= self._config.max_num_seqs or too_long:
                break
            if self.budget == 0 or self.chunk(sequence) == 0:
                break
            if sequence.num_pending or not self._start(sequence):
                break
            started.append(sequence)
            running[sequence] = None
            self.admitted.append(sequence)
            room = len(sequence.block_tables[0]) * self._blocks.pool.block_size - sequence.num_computed
            self._enter(sequence, min(room, self._first_chunk(sequence)))
        if not self._adapters:
            del waiting[: len(started)]
        elif started:
            waiting[:] = [sequence for sequence in waiting if sequence not in running]

    def chunk(self, sequence: Sequence) -> int:
        """Return how many prompt tokens still fit in the step; 0 if its quota of prompt logits is used up."""
        wanted = sequence.num_uncomputed
        if sequence.gives_prompt_logits(sequence.num_computed):
            wanted = min(wanted, self._prompt_logits)
        wanted = min(wanted, self.budget) if self._parts_prompts else wanted
        return wanted if self._pace is None else self._pace.chunk(self._shape, sequence.num_computed, wanted)

    def _first_chunk(self, sequence: Sequence) -> int:
        """Return the first chunk of a sequence that has blocks: not 0 even if the pace is used up."""
        return self.chunk(sequence) or min(sequence.num_uncomputed, self.budget, LEAST_CHUNK)

    def _part(self, decodes: list[Sequence], elsewhere: int) -> list[Sequence]:
        """Return this lane's share of the decodes, by keys read, least recently served first."""
        left = (elsewhere + sum(sequence.num_tokens for sequence in decodes)) / self._num_lanes
        part: list[Sequence] = []
        for sequence in sorted(decodes, key=lambda s: s.last_step):
            left -= sequence.num_tokens
            if part and 2 * left < -sequence.num_tokens:  # stop here if that is closer to the share
                break
            part.append(sequence)
        return part

    def _share(self) -> int:
        """Return this step's token budget: a share of the decodes and of all waiting prompt tokens."""
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

        Without sliding windows it gets the blocks of its whole prompt. With them it gets the blocks of one chunk,
        because it frees blocks on the way, provided that the pool has room for its peak.
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
        """Add a running sequence, preempting less urgent ones if blocks run out."""
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
        """Preempt a sequence: free its blocks. It restarts from its tokens and produces the same bits."""
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
    """Return the policy of that name; it may keep state between steps."""
    policies: dict[SchedulerName, Policy] = {
        "stall_free": _stall_free,
        "prefill_first": _prefill_first,
        "simple_chunking": _SimpleChunking(),
    }
    return policies[name]


def _stall_free(step: NextStep) -> None:
    """Add every decode, then prefill chunks in the rest of the budget."""
    decodes, prefills = step.ready()
    if len(decodes) >= step.budget and prefills:  # share a small budget in turn
        step.decode(decodes + prefills)
        return
    step.decode(decodes)
    step.prefill(prefills)
    step.admit()


def _prefill_first(step: NextStep) -> None:
    """Add whole prompts if any can start, otherwise every decode."""
    step.prefill(step.ready()[1])
    step.admit()
    if not step.entries:
        step.decode(step.ready()[0])


class _SimpleChunking:
    """Alternate steps of prefill chunks and of decodes; skip a turn without work."""

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
