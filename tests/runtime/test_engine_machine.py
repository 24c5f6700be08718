"""The engine under any order of calls and any settings: every request gets what it gets alone, bit for bit."""

import itertools
import random
from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from detcompile.models.compiled import CompiledModel
from detcompile.runtime.engine_config import EngineConfig
from tests.runtime.engine_cases import assert_as_alone, engine_of, sampling_params, tiny_model

__all__ = ["run_machine"]

MOST_PROMPT, MOST_NEW = 90, 36  # tokens; windows are 70
MOST_TOKENS = MOST_PROMPT + MOST_NEW
ACTIONS = ["add_some", "go_on", "cancel", "add_some", "go_on", "add_some", "cancel", "go_on", "drain"]
BUDGETS = (1, 2, 7, 16, 40, 100, 4096)
CONFIGS = st.fixed_dictionaries(
    {
        "scheduler": st.sampled_from(["stall_free", "prefill_first", "simple_chunking"]),
        "max_num_seqs": st.sampled_from([32, 5, 32, 2, 1]),
        "block_size": st.sampled_from([16, 16, 16, 16, 16, 32, 64, 256]),
        "allocation": st.sampled_from(["lazy", "lazy", "lazy", "reserve"]),
        "prefix_caching": st.sampled_from([True, True, True, False]),
        "aging": st.sampled_from([1, 5, 1000]),
    }
)


class EngineMachine(RuleBasedStateMachine):
    """Requests of any kind come and are canceled at any moment, over a pool that holds few of them."""

    model: CompiledModel
    overlap: bool
    budgets: tuple[int, ...]  # max_num_batched_tokens
    crowd: int  # requests that come together, where one does elsewhere
    tally: Counter[str]  # of requests compared, and preemptions

    @initialize(
        config=CONFIGS,
        budget=st.integers(0, 99),
        one_group=st.booleans(),
        spare=st.sampled_from([0, 0, 1, 3, 40]),
        graphs=st.booleans(),
        data=st.data(),
    )
    def build(self, config, budget, one_group, spare, graphs, data):
        num_groups = 1 if one_group else len(self.model.facts.kv_groups)
        least = -(-MOST_TOKENS // config["block_size"]) * num_groups  # for one request
        config = EngineConfig(
            **config,
            max_num_batched_tokens=self.budgets[budget % len(self.budgets)],
            overlap=self.overlap,
            num_blocks=1 + least + spare,
            cuda_graphs=graphs if self.model.device.type == "cuda" else None,
        )
        self.engine = engine_of(self.model, config, one_group=one_group)
        self.names, self.counted = itertools.count(), 0
        self.asked = {}  # request_id -> (prompt, params)
        self.finished = {}
        self.cancelled = set()
        self.prompts = []  # and answers, to share prefixes with
        self.act("add_some", data)

    @rule(action=st.sampled_from(ACTIONS), data=st.data())
    def act(self, action, data):
        """One rule, as hypothesis switches single rules off for whole runs: without requests nothing would happen."""
        self.sound = False  # until it is over: a failed action is not followed by others
        getattr(self, action)(data)
        self.engine.check()
        self.sound = True

    def add(self, data):
        prompt, params = data.draw(self.some_prompt()), data.draw(sampling_params(MOST_NEW, self.model.vocab_size))
        priority = data.draw(st.sampled_from([0, 0, 0, -1, 2]))
        name = str(next(self.names))
        self.asked[name] = prompt, params
        self.prompts.append(prompt)
        assert self.engine.add_request(list(prompt), params, request_id=name, priority=priority) == name

    def add_some(self, data):
        few = self.engine.config.max_num_batched_tokens <= 2  # they would take long
        for _ in range(1 if few else self.crowd * data.draw(st.sampled_from([5, 3, 1]))):
            self.add(data)

    @st.composite
    def some_prompt(draw, self):
        """The beginning of something earlier, often at a block border, and tokens of its own."""
        old = draw(st.sampled_from([*self.prompts[:-6:-1], []]))
        size = self.engine.config.block_size
        kept = draw(st.sampled_from([len(old), len(old) // size * size]) | st.integers(0, len(old)))
        least = 0 if kept else 1
        num_fresh = draw(st.sampled_from([least, 1]) | st.integers(least, 40) | st.just(MOST_PROMPT))
        fresh = random.Random(draw(st.integers(0, 1 << 32))).choices(range(self.model.vocab_size), k=num_fresh)
        return (old[:kept] + fresh)[:MOST_PROMPT]

    def go_on(self, data):
        for _ in range(data.draw(st.sampled_from([1, 2, 1, 10, 30]))):
            self.step()

    def step(self):
        for output in self.engine.step():
            assert output.request_id in self.asked and output.request_id not in self.finished, "it had ended"
            if output.finished:
                self.finish(output)
        self.engine.check()

    def finish(self, output):
        prompt, params = self.asked[output.request_id]
        self.finished[output.request_id] = output
        assert output.prompt_token_ids == prompt and output.seed == params.seed
        aborted = [sample.finish_reason == "abort" for sample in output.outputs]
        assert output.request_id in self.cancelled or not any(aborted)
        assert_as_alone(self.model, output, params)
        self.tally["requests"] += 1
        self.prompts += [prompt + sample.token_ids for sample in output.outputs]

    def cancel(self, data):
        names = sorted(self.asked.keys() - self.finished.keys(), key=int)
        if names:
            name = data.draw(st.sampled_from(names))
            self.cancelled.add(name)
            self.engine.cancel(name)

    def drain(self, _data):
        while self.engine.has_unfinished_requests:
            self.step()
        assert self.finished.keys() == self.asked.keys()
        stats = self.engine.stats
        assert stats.num_running == stats.num_waiting == 0
        assert stats.num_free_blocks == stats.num_blocks
        self.tally["preemptions"] += stats.num_preemptions - self.counted
        self.counted = stats.num_preemptions

    def teardown(self):
        if getattr(self, "sound", False):
            self.drain(None)


def run_machine(
    model: CompiledModel, *, overlap: bool, max_examples: int, budgets: tuple[int, ...] = BUDGETS, crowd: int = 1
) -> Counter[str]:
    """Play so many games; what was compared in them."""
    tally: Counter[str] = Counter()
    given = {"model": model, "overlap": overlap, "budgets": budgets, "crowd": crowd, "tally": tally}
    machine = type("Machine", (EngineMachine,), given)
    run_state_machine_as_test(machine, settings=settings(max_examples=max_examples, stateful_step_count=8))
    return tally


@pytest.mark.parametrize("overlap", [False, True])
def test_any_order_of_calls_gives_the_bits_of_each_request_alone(overlap: bool, device: str) -> None:
    tally = run_machine(tiny_model(device), overlap=overlap, max_examples=max(1, settings().max_examples // 2))
    assert tally["requests"]
