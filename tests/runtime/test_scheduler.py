"""Schedulers without a model: properties of every plan, and every sequence ends."""

import random
from collections import deque
from dataclasses import dataclass, field
from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from detcompile.runtime.engine_config import EngineConfig
from detcompile.runtime.kv.block_pool import BlockPool
from detcompile.runtime.kv.kv_blocks import KVBlocks
from detcompile.runtime.pacing.pace import most_lanes
from detcompile.runtime.policies import PROMPT_LOGPROBS_CHUNK
from detcompile.runtime.requests.sampling_params import SamplingParams
from detcompile.runtime.requests.sequence import Sequence
from detcompile.runtime.scheduler import Scheduler, StepPlan
from detcompile.step import KVGroup

SCHEDULERS = ["stall_free", "prefill_first", "simple_chunking"]
MOST_STEPS = 3000  # of a whole drive; the largest that is drawn takes half of it


@dataclass(eq=False)
class Drive:
    """Plays the engine: plans, draws a token where a sequence is computed to its end, settles, removes what ended.

    With ``overlap`` a step is planned before the tokens of the one before are known, and with stages before those of as
    many, or of one more. Every plan is checked.
    """

    scheduler: Scheduler
    overlap: bool = False
    num_stages: int = 1
    plans: list[StepPlan] = field(default_factory=list)
    finished: list[Sequence] = field(default_factory=list)
    tokens: random.Random = field(default_factory=lambda: random.Random(0))
    in_flight: deque[tuple[StepPlan, list[Sequence]]] = field(default_factory=deque)

    def step(self) -> StepPlan:
        before = Before(self.scheduler)
        if self.num_stages > 1:
            self.scheduler.num_lanes = self.tokens.randint(self.num_stages, most_lanes(self.num_stages))
            if len(self.in_flight) >= self.scheduler.num_lanes:  # there were more
                self.finish(*self.in_flight.popleft())
                return StepPlan((), (), ())
        plan = self.scheduler.plan()
        self.plans.append(plan)
        samples = [e.sequence for e in plan.entries if e.start + e.num_tokens == e.sequence.num_tokens]
        self.check(plan, before)
        for sequence in samples:
            sequence.num_pending += 1
        if plan.entries:
            self.in_flight.append((plan, samples))
        assert self.in_flight or not self.scheduler.num_unfinished, "nothing runs and nothing will"
        most = self.scheduler.num_lanes - 1 if self.num_stages > 1 else int(self.overlap)
        if self.in_flight and (len(self.in_flight) > most or not plan.entries):
            self.finish(*self.in_flight.popleft())
        self.scheduler.blocks.check(self.scheduler.running)
        return plan

    def finish(self, plan, samples):
        for sequence in samples:
            sequence.num_pending -= 1
            sequence.append(self.tokens.randrange(50))
        for sequence, _, _, _ in plan.entries:
            if sequence in self.scheduler.running:
                self.scheduler.blocks.commit(sequence)
        for sequence in samples:
            if sequence.finish_reason is not None:
                self.scheduler.remove(sequence)
                self.finished.append(sequence)

    def run(self, most_steps=MOST_STEPS):
        for _ in range(most_steps):
            if not self.scheduler.num_unfinished and not self.in_flight:
                return
            self.step()
        raise AssertionError(f"sequences are left after {most_steps} steps")

    def check(self, plan, before):
        scheduler, config = self.scheduler, self.scheduler.config
        sequences = [entry.sequence for entry in plan.entries]
        assert len(set(sequences)) == len(sequences) and set(sequences) <= scheduler.running.keys()
        assert len(scheduler.running) <= config.max_num_seqs
        assert set(plan.admitted) <= set(sequences), "started without a part in the step"
        for sequence, start, num_tokens, _ in plan.entries:
            assert num_tokens >= 1 and start + num_tokens == sequence.num_computed <= sequence.num_tokens
            assert start == before.num_computed.get(sequence, start)
            assert start + num_tokens <= sequence.most_tokens - 1, "a row whose token nobody may have"
            if start + num_tokens > len(sequence.token_ids):
                assert self.num_stages == 1, "its input is in another stage"
                assert self.in_flight and sequence in self.in_flight[-1][1], "its input is not on the device"
        self.check_preemptions(plan, before)
        if self.num_stages == 1:  # otherwise each step is a part of what the policy would do
            CHECKS[config.scheduler](plan, before, config)

    def check_preemptions(self, plan, before):
        assert self.scheduler.config.allocation == "lazy" or not plan.preempted, "reserved blocks were taken away"
        stayed = [before.urgency[sequence] for sequence in before.running if sequence in self.scheduler.running]
        for sequence in plan.preempted:
            assert sequence in self.scheduler.waiting and not sequence.block_tables and sequence.num_computed == 0
            assert stayed and before.urgency[sequence] > max(stayed), "a less urgent one kept its blocks"
        assert not (plan.preempted and plan.admitted), "one started where another had just lost its blocks"
        waiting = [self.urgency(sequence) for sequence in before.waiting if sequence not in self.scheduler.running]
        started = [self.urgency(sequence) for sequence in plan.admitted]
        assert not (waiting and started) or max(started) < min(waiting), "the most urgent one was passed"

    def urgency(self, sequence):
        return before_urgency(self.scheduler, sequence, self.scheduler._queues.step - 1)


class Before:
    """What the scheduler held before a plan."""

    def __init__(self, scheduler):
        self.running, self.waiting = list(scheduler.running), list(scheduler.waiting)
        self.num_computed = {sequence: sequence.num_computed for sequence in self.running}
        self.urgency = {s: before_urgency(scheduler, s, scheduler._queues.step) for s in self.running}
        self.decodes = [s for s in self.running if is_decode(s, s.num_computed) and s.num_tokens < s.most_tokens]
        self.prefills = [s for s in self.running if s.num_uncomputed and not is_decode(s, s.num_computed)]


def before_urgency(scheduler, sequence, step):
    """As the scheduler's docstring states it."""
    waited = step - scheduler._queues._waiting_since[sequence]
    return sequence.priority - waited // scheduler.config.aging, sequence.arrival, sequence.sample_index


def is_decode(sequence, start):
    return start >= sequence.num_prompt_tokens and sequence.num_tokens - start == 1


def split(plan):
    """Sequences that decode, and the entries of the others.

    One that starts again, having lost its blocks, is among the others, also where the cache has all but its last token.
    """
    decodes = [e.sequence for e in plan.entries if is_decode(e.sequence, e.start) and e.sequence not in plan.admitted]
    return decodes, [e for e in plan.entries if e.sequence not in decodes]


def within_budget(plan, config):
    return sum(entry.num_tokens for entry in plan.entries) <= config.max_num_batched_tokens


def num_prompt_logits(plan):
    """Tokens of the step whose logits are all wanted, as the pipeline counts them."""
    return sum(
        entry.num_tokens
        for entry in plan.entries
        if entry.sequence.sampling.prompt_logprobs is not None and entry.start < entry.sequence.num_prompt_tokens - 1
    )


def check_stall_free(plan, before, config):
    assert within_budget(plan, config)
    decodes, prefills = split(plan)
    budget = config.max_num_batched_tokens
    if len(before.decodes) < budget or not before.prefills:
        served = set(decodes) | set(plan.preempted)
        assert len(set(before.decodes) & served) >= min(budget, len(before.decodes)), "a decode was left out"
    if not before.prefills and len(before.decodes) >= budget:
        assert not prefills


def check_prefill_first(plan, before, config):
    decodes, prefills = split(plan)
    assert not (decodes and prefills)
    for entry in prefills:
        whole = entry.start + entry.num_tokens == entry.sequence.num_tokens
        full = num_prompt_logits(plan) == PROMPT_LOGPROBS_CHUNK
        assert whole or (entry.sequence.sampling.prompt_logprobs is not None and full), "part of a prompt"
    over = [entry for entry in prefills if entry.num_tokens > config.max_num_batched_tokens]
    assert within_budget(plan, config) or len(prefills) == 1 or (over and prefills[-1] not in over)


def check_simple_chunking(plan, before, config):
    assert within_budget(plan, config)
    decodes, prefills = split(plan)
    assert not (decodes and prefills), "both kinds in one step"


CHECKS = {
    "stall_free": check_stall_free,
    "prefill_first": check_prefill_first,
    "simple_chunking": check_simple_chunking,
}


def new_scheduler(num_usable, windows=(0,), num_stages=1, **config):
    config = EngineConfig(**({"block_size": 16} | config))
    groups = [KVGroup((index,), window) for index, window in enumerate(windows)]
    pool = BlockPool(num_usable + 1, config.block_size)
    return Scheduler(config, KVBlocks(pool, groups, prefix_caching=config.prefix_caching), num_stages)


def new_sequence(prompt, max_tokens, arrival, priority=0, **sampling):
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, **sampling)
    tokens = random.Random(arrival).choices(range(50), k=prompt) if isinstance(prompt, int) else list(prompt)
    return Sequence(tokens, params, arrival=arrival, priority=priority)


@given(
    data=st.data(),
    scheduler=st.sampled_from(SCHEDULERS),
    overlap=st.booleans(),
    windows=st.sampled_from([(0,), (0, 20), (40,), (0, 33, 33)]),
    budget=st.sampled_from([1, 2, 5, 16, 50, 4096]),
    seats=st.sampled_from([1, 3, 50]),
    lazy=st.sampled_from([True, True, False]),
    caching=st.booleans(),
    aging=st.sampled_from([1, 7, 1000]),
    spare=st.sampled_from([0, 1, 2, 5, 30]),
    num_stages=st.sampled_from([1, 1, 2, 4]),
)
def test_every_sequence_finishes(
    data, scheduler, overlap, windows, budget, seats, lazy, caching, aging, spare, num_stages
) -> None:
    """Arrivals and cancellations at any moment; each plan keeps to its policy (``Drive.check``)."""
    made = count()
    longest = st.integers(1, 60)
    sequences = [
        new_sequence(
            data.draw(st.sampled_from([40, 33]) | longest),
            data.draw(longest),
            next(made),
            data.draw(st.sampled_from([0, 0, -1, 3])),
            prompt_logprobs=data.draw(st.sampled_from([None, None, None, 0])),
        )
        for _ in range(data.draw(st.integers(1, 10)))
    ]
    sequences += [new_sequence(list(s.token_ids), 20, next(made)) for s in sequences[:3]]  # prefixes that are shared
    config = {"scheduler": scheduler, "max_num_batched_tokens": budget, "max_num_seqs": seats, "aging": aging}
    config |= {"allocation": "lazy" if lazy else "reserve", "prefix_caching": caching}
    least = max(new_scheduler(1, windows, num_stages, **config).most_blocks(s) for s in sequences)
    drive = Drive(new_scheduler(least + spare, windows, num_stages, **config), overlap, num_stages)
    cancelled = 0
    for sequence in sequences:
        drive.scheduler.add(sequence)
        for _ in range(data.draw(st.sampled_from([0, 0, 0, 1, 5]))):
            drive.step()
        if data.draw(st.sampled_from([False] * 5 + [True])) and drive.scheduler.running and not drive.in_flight:
            drive.scheduler.remove(data.draw(st.sampled_from(list(drive.scheduler.running))))
            cancelled += 1
    drive.run()
    assert len(drive.finished) == len(sequences) - cancelled
    assert all(len(s.token_ids) == s.most_tokens for s in drive.finished)
    assert drive.scheduler.blocks.pool.num_free == drive.scheduler.blocks.pool.num_usable


@pytest.mark.parametrize("scheduler", SCHEDULERS)
@given(num_sequences=st.integers(2, 9), overlap=st.booleans(), spare=st.integers(0, 3), windowed=st.booleans())
def test_preempted_sequences_come_back(scheduler, num_sequences, overlap, spare, windowed) -> None:
    """All start at once in a pool that holds one of them to its end."""
    windows = (0, 40) if windowed else (0,)
    config = {"scheduler": scheduler, "max_num_batched_tokens": 64, "prefix_caching": False}
    sequences = [new_sequence(16, 60, arrival) for arrival in range(num_sequences)]
    least = new_scheduler(1, windows, **config).most_blocks(sequences[0])
    drive = Drive(new_scheduler(least + spare, windows, **config), overlap)
    for sequence in sequences:
        drive.scheduler.add(sequence)
    drive.run()
    assert sum(len(plan.preempted) for plan in drive.plans) > 0
    assert drive.finished[0] is sequences[0], "the most urgent one did not come first"
    assert len(drive.finished) == num_sequences


@pytest.mark.parametrize("scheduler", SCHEDULERS)
@given(num_sequences=st.integers(1, 40), budget=st.integers(1, 12))
def test_a_small_budget_goes_round(scheduler, num_sequences, budget) -> None:
    """Each running sequence moves at least once in ceil(running / budget) steps."""
    drive = Drive(new_scheduler(400, scheduler=scheduler, max_num_batched_tokens=budget))
    for arrival in range(num_sequences):
        drive.scheduler.add(new_sequence(1, 60, arrival))
    while drive.scheduler.waiting and not drive.finished:
        drive.step()
    running = list(drive.scheduler.running)
    bound = -(-len(running) // budget)
    last = dict.fromkeys(running, len(drive.plans))
    while not drive.finished:
        plan = drive.step()
        last |= dict.fromkeys((entry.sequence for entry in plan.entries), len(drive.plans))
        assert all(len(drive.plans) - seen < bound for s, seen in last.items() if s.finish_reason is None)


@given(num_decodes=st.integers(1, 8), prefills=st.lists(st.integers(2, 40), min_size=1, max_size=4))
def test_prefills_and_decodes_share_a_budget_that_the_decodes_fill(num_decodes, prefills) -> None:
    """stall_free: a prefill that runs already is not starved by as many decodes as the budget has tokens."""
    drive = Drive(new_scheduler(400, max_num_batched_tokens=50))
    for arrival in range(num_decodes):
        drive.scheduler.add(new_sequence(1, 60, arrival))
    drive.step()
    started = [new_sequence(100, 5, 100 + index) for index in range(len(prefills))]
    for sequence, chunk in zip(started, prefills):  # as if it had run within a larger budget
        drive.scheduler.blocks.admit(sequence, 100)
        drive.scheduler._queues._waiting_since[sequence] = 0
        drive.scheduler.running[sequence] = None
        sequence.num_computed = chunk
    drive.scheduler.config = EngineConfig(block_size=16, max_num_batched_tokens=num_decodes)
    bound = -(-(num_decodes + len(started)) // num_decodes)
    waited = dict.fromkeys(drive.scheduler.running, 0)
    for _ in range(30):
        moved = {entry.sequence for entry in drive.step().entries}
        waited = {sequence: 0 if sequence in moved else steps + 1 for sequence, steps in waited.items()}
        assert max(waited.values()) < bound


@pytest.mark.parametrize("scheduler", SCHEDULERS)
@given(aging=st.integers(1, 12), distance=st.integers(1, 4), overlap=st.booleans())
def test_age_ends_a_wait_that_urgent_requests_would_make_endless(scheduler, aging, distance, overlap) -> None:
    """A seat for one, and always an urgent request that waits for it."""

    def starts_after(aging: int, most_steps: int) -> int | None:
        drive = Drive(new_scheduler(40, scheduler=scheduler, max_num_seqs=1, aging=aging), overlap)
        patient, arrival = new_sequence(5, 3, 0, priority=distance), count(1)
        drive.scheduler.add(new_sequence(3, 2, next(arrival)))
        drive.scheduler.add(patient)
        while drive.scheduler._queues.step < most_steps and patient not in drive.scheduler.running:
            if not any(sequence is not patient for sequence in drive.scheduler.waiting):
                drive.scheduler.add(new_sequence(3, 2, next(arrival)))
            drive.step()
        return drive.scheduler._queues.step if patient in drive.scheduler.running else None

    assert starts_after(1_000_000, 20 * distance * aging) is None
    bound = aging * distance + aging + 2 * 2 + 2  # then those that came before it is old enough: one runs, one waits
    started = starts_after(aging, 2 * bound)
    assert started is not None and started <= bound


def test_the_budget_left_by_decodes_goes_to_prefill_chunks() -> None:
    drive = Drive(new_scheduler(100, scheduler="stall_free", max_num_batched_tokens=10, prefix_caching=False))
    drive.scheduler.add(new_sequence(3, 50, 0))
    drive.step()
    drive.scheduler.add(new_sequence(25, 5, 1))
    drive.scheduler.add(new_sequence(4, 5, 2))
    shapes = [[(e.sequence.arrival, e.start, e.num_tokens) for e in drive.step().entries] for _ in range(4)]
    assert shapes == [
        [(0, 3, 1), (1, 0, 9)],
        [(0, 4, 1), (1, 9, 9)],
        [(0, 5, 1), (1, 18, 7), (2, 0, 2)],
        [(0, 6, 1), (1, 25, 1), (2, 2, 2)],
    ]


def test_prefill_first_takes_a_long_prompt_alone_and_lets_decodes_wait() -> None:
    drive = Drive(new_scheduler(100, scheduler="prefill_first", max_num_batched_tokens=10, prefix_caching=False))
    for arrival, prompt in enumerate([4, 5, 30, 3]):
        drive.scheduler.add(new_sequence(prompt, 5, arrival))
    shapes = [[(e.sequence.arrival, e.start, e.num_tokens) for e in drive.step().entries] for _ in range(4)]
    assert shapes == [[(0, 0, 4), (1, 0, 5)], [(2, 0, 30)], [(3, 0, 3)], [(0, 4, 1), (1, 5, 1), (2, 30, 1), (3, 3, 1)]]


@pytest.mark.parametrize("scheduler", ["stall_free", "prefill_first", "simple_chunking"])
def test_a_step_gives_no_more_prompt_logits_than_fit(scheduler) -> None:
    """However many sequences want theirs."""
    drive = Drive(new_scheduler(1000, scheduler=scheduler, max_num_batched_tokens=4096, prefix_caching=False))
    for arrival, length in enumerate([300, 300, 40, 700, 513, 1]):
        drive.scheduler.add(new_sequence(length, 3, arrival, prompt_logprobs=0))
    counts = []
    while drive.scheduler.num_unfinished:
        counts.append(num_prompt_logits(drive.step()))
    assert max(counts) == PROMPT_LOGPROBS_CHUNK
    assert sum(counts) >= 300 + 300 + 40 + 700 + 513 - 5 and sum(count > 0 for count in counts) == 4


def test_simple_chunking_alternates() -> None:
    drive = Drive(new_scheduler(100, scheduler="simple_chunking", max_num_batched_tokens=10, prefix_caching=False))
    drive.scheduler.add(new_sequence(4, 50, 0))
    drive.scheduler.add(new_sequence(30, 5, 1))
    shapes = [[(e.sequence.arrival, e.start, e.num_tokens) for e in drive.step().entries] for _ in range(8)]
    assert shapes == [
        [(0, 0, 4), (1, 0, 6)],
        [(0, 4, 1)],
        [(1, 6, 10)],
        [(0, 5, 1)],
        [(1, 16, 10)],
        [(0, 6, 1)],
        [(1, 26, 4)],
        [(0, 7, 1), (1, 30, 1)],
    ]


def test_reserved_blocks_are_there_from_the_start() -> None:
    drive = Drive(new_scheduler(9, allocation="reserve", prefix_caching=False))
    for arrival in range(3):
        drive.scheduler.add(new_sequence(10, 50, arrival))  # 4 blocks each
    plan = drive.step()
    assert [sequence.arrival for sequence in plan.admitted] == [0, 1]
    assert [len(sequence.block_tables[0]) for sequence in plan.admitted] == [4, 4]
    drive.run()
    assert len(drive.finished) == 3


def test_a_sequence_too_large_for_the_pool_is_told_by_most_blocks() -> None:
    scheduler = new_scheduler(100, (0, 40), max_num_batched_tokens=16)
    sequence = new_sequence(100, 100, 0)
    assert scheduler.most_blocks(sequence) == 13 + (-(-(40 + 2 * 16 - 2) // 16) + 1)
    assert new_scheduler(100, (0, 40), allocation="reserve").most_blocks(sequence) == 2 * 13


def test_a_sequence_that_waited_finds_no_prefix_of_before():
    """It was looked for once, where there was no room for the rest of the prompt."""
    prompt = list(range(40))
    scheduler = new_scheduler(4, prefix_caching=True)
    scheduler.add(new_sequence(prompt, 1, 0))
    drive = Drive(scheduler)
    drive.run()
    running, waiting = new_sequence(20, 20, 1), new_sequence(prompt, 1, 2)
    scheduler.add(running)
    scheduler.add(waiting)
    drive.step()
    assert running in scheduler.running and waiting in scheduler.waiting and waiting.block_digests
    scheduler.remove(running)
    scheduler.forget_prefixes(1)
    drive.in_flight.clear()
    (entry,) = scheduler.plan().entries
    assert entry.sequence is waiting and entry.start == 0
