"""Speculation moves no bit: whatever is drafted, tokens and logprobs are those of plain decoding."""

import functools
import itertools
import random
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import detcompile
from detcompile import CompiledModel
from detcompile.errors import InvalidInput
from detcompile.runtime.engine_config import EngineConfig
from detcompile.runtime.requests.outputs import RequestOutput
from detcompile.runtime.requests.sampling_params import SamplingParams
from detcompile.runtime.requests.sequence import Sequence
from detcompile.runtime.speculation.draft_tree import DraftTree
from detcompile.runtime.speculation.drafter import NO_DRAFT
from detcompile.runtime.speculation.model_drafter import _common
from detcompile.runtime.speculation.ngram_drafter import NUM_KEPT, NGramDrafter
from detcompile.runtime.speculation.speculator import SpeculationConfig
from tests.model_cases import VOCAB_SIZE, certified, compiled, random_model
from tests.runtime.engine_cases import LetterTokenizer, engine_configs, run

MODELS = ("qwen3", "granite_swa")  # one KV group, and several with windows


class Oracle:
    """Random trees whose nodes are right with probability ``accuracy``, as it knows what will be drawn."""

    def __init__(self, outputs: list[RequestOutput], accuracy: float, seed: int, most_nodes: int = 12) -> None:
        self.truth = {(tuple(o.prompt_token_ids), o.seed, s.index): s.token_ids for o in outputs for s in o.outputs}
        self.accuracy = accuracy
        self.random = random.Random(seed)
        self.most_nodes = most_nodes

    def propose(self, sequences, max_depth):
        return [DraftTree(self._tree(sequence, depth)) for sequence, depth in zip(sequences, max_depth)]

    def forget(self, sequence):
        pass

    def _tree(self, sequence, depth):
        prompt = tuple(sequence.token_ids[: sequence.num_prompt_tokens])
        rest = self.truth[prompt, sequence.seed, sequence.sample_index][sequence.num_generated :]
        tree: dict[tuple[int, ...], int] = {}

        def grow(path: tuple[int, ...], right_so_far: bool) -> None:
            level = len(path)
            for child in range(self.random.randint(0 if path else 1, 3)):
                if level >= depth or len(tree) >= self.most_nodes:
                    return
                right = right_so_far and level < len(rest) and self.random.random() < self.accuracy
                token = rest[level] if right else self.random.randrange(VOCAB_SIZE)
                if all(tree.get((*path, other)) != token for other in range(child)):
                    tree[*path, child] = token
                    grow((*path, child), right_so_far and level < len(rest) and token == rest[level])

        grow((), True)
        return {path: token for path, token in tree.items() if path[:-1] == () or path[:-1] in tree}


Workload = tuple[list[list[int]], list[SamplingParams], list[RequestOutput]]


@functools.cache
def workload(name: str, device: str) -> Workload:
    return workload_of(compiled(name, torch.float32, device))


def workload_of(model: CompiledModel) -> Workload:
    """Prompts around block borders, parameters of every kind, and what an engine without speculation gives."""
    rng = random.Random(1)
    prompts = [[rng.randrange(VOCAB_SIZE) for _ in range(length)] for length in (1, 15, 16, 17, 63, 100, 140, 31)]
    kinds = [{"temperature": 0.0}, {"temperature": 1.0}, {"temperature": 0.8, "top_p": 0.9}, {"presence_penalty": 0.5}]
    params = [
        SamplingParams(
            max_tokens=rng.choice([1, 2, 5, 30, 40]), seed=index, logprobs=1, n=1 + (index == 5), **kinds[index % 4]
        )
        for index in range(len(prompts))
    ]
    plain = model.engine(EngineConfig(num_blocks=400, block_size=16))
    return prompts, params, plain.generate(prompts, params, progress=False)


@functools.cache
def drafting_model(device: str):
    """Another model of the same vocabulary; on CPUs without Inductor: drafts move no bit, however computed."""
    compile_model = certified if device == "cpu" else detcompile.compile
    return compile_model(random_model("llama", torch.float32, device, num_hidden_layers=1), max_context=120)


def assert_unmoved(name: str, device: str, config: EngineConfig, speculation: SpeculationConfig, switch=None):
    prompts, params, expected = workload(name, device)
    engine = compiled(name, torch.float32, device).engine(config, speculation=speculation)
    if switch is not None:
        engine.speculator.switch = switch
    actual = engine.generate(prompts, params, progress=False)
    engine.check()
    assert [output.outputs for output in actual] == [output.outputs for output in expected]
    assert engine.stats.num_free_blocks == engine.stats.num_blocks
    return engine, actual


CONFIGS = engine_configs(60, 90, 400)


@settings(max_examples=15)
@given(
    name=st.sampled_from(MODELS),
    config=CONFIGS,
    accuracy=st.sampled_from([0.0, 0.5, 0.8, 1.0]),
    seed=st.integers(0, 99),
    max_nodes=st.integers(1, 16),
)
def test_no_tree_moves_a_bit(name, config, accuracy, seed, max_nodes, device):
    if name == "granite_swa" and config.num_blocks == 60:
        config = EngineConfig(num_blocks=120, block_size=16)  # each of its groups needs blocks
    drafter = Oracle(workload(name, device)[2], accuracy, seed)
    assert_unmoved(name, device, config, SpeculationConfig(drafter=drafter, max_nodes=max_nodes, switch="always"))


@pytest.mark.parametrize("siblings", [0, 2])
def test_a_draft_model_moves_no_bit(siblings, device):
    drafter = drafting_model(device).drafter(4, siblings=siblings, num_sequences=2)
    config = EngineConfig(num_blocks=90, block_size=16, max_num_batched_tokens=64)
    engine, _ = assert_unmoved("qwen3", device, config, SpeculationConfig(drafter=drafter, switch="always"))
    assert engine.speculator.num_drafted > 0
    drafter._blocks.check([])


def test_a_draft_model_of_equal_weights_is_always_right(device):
    """The drafter draws with the target's noise: also where tokens are sampled, each draft is what the target draws."""
    twin = detcompile.compile(random_model("qwen3", torch.float32, device), max_context=2048)
    config = EngineConfig(num_blocks=400, block_size=16)
    engine, actual = assert_unmoved(
        "qwen3", device, config, SpeculationConfig(drafter=twin.drafter(4), switch="always")
    )
    assert 0 < engine.speculator.num_accepted == engine.speculator.num_drafted
    assert sum(output.metrics.num_accepted_tokens for output in actual) == engine.speculator.num_accepted


def test_right_drafts_save_steps(device):
    model, params = compiled("qwen3", torch.float32, device), SamplingParams(max_tokens=40, seed=3)
    config = EngineConfig(num_blocks=100, block_size=16)
    expected = model.engine(config).generate([5, 6, 7], params, progress=False)
    for accuracy, most in ((1.0, 20), (0.0, 40)):
        speculation = SpeculationConfig(drafter=Oracle(expected, accuracy, 0), switch="always")
        engine = model.engine(config, speculation=speculation)
        actual = engine.generate([5, 6, 7], params, progress=False)
        assert actual[0].outputs == expected[0].outputs
        assert most // 4 < engine.stats.num_steps <= most


@pytest.mark.parametrize("accuracy", [0.0, 0.7])
def test_requests_come_and_go_while_trees_are_in_flight(accuracy, device):
    """The tokens of a step are given out once the next one runs; no block is lost, whoever leaves."""
    prompts, params, expected = workload("qwen3", device)
    model = compiled("qwen3", torch.float32, device)
    drafter = Oracle(expected, accuracy, 1)
    config = EngineConfig(num_blocks=100, block_size=16, max_num_seqs=5, overlap=True)
    engine = model.engine(config, speculation=SpeculationConfig(drafter=drafter, switch="always"))
    rng, waiting, left, actual, in_flight = random.Random(0), list(range(len(prompts))), set(), {}, 0
    while waiting or engine.has_unfinished_requests:
        if waiting:
            name = waiting.pop()
            engine.add_request(prompts[name], params[name], request_id=str(name))
        if rng.random() < 0.1:
            left.add(cancelled := str(rng.randrange(len(prompts))))
            engine.cancel(cancelled)
        actual |= {output.request_id: output for output in engine.step() if output.finished}
        in_flight += bool(engine._pipeline.forked)
        engine.check()
    assert len(actual) == len(prompts) and in_flight > 5 and len(left) < len(prompts)
    for name, output in actual.items():
        for sample, whole in zip(output.outputs, expected[int(name)].outputs):
            assert sample.token_ids == whole.token_ids[: len(sample.token_ids)]
            assert sample.finish_reason == whole.finish_reason or name in left
    assert engine.stats.num_free_blocks == engine.stats.num_blocks


def test_a_request_that_comes_while_a_tree_runs_is_in_the_next_step():
    model, params = compiled("qwen3", torch.float32), SamplingParams(max_tokens=20, seed=3)
    config = EngineConfig(num_blocks=100, block_size=16, overlap=True)
    speculation = SpeculationConfig(drafter=Oracle(model.engine().generate([5, 6], params), 0.5, 0), switch="always")
    engine = model.engine(config, speculation=speculation)
    worker = engine._pipeline._worker
    engine.add_request([5, 6], params)
    for _ in range(3):
        engine.step()
    collect, launch, started = worker.collect, worker.launch, []

    def collect_slowly(launched):
        engine.add_request([7, 8, 9], SamplingParams(max_tokens=1))
        return collect(launched)

    patched = mock.patch.multiple(worker, collect=collect_slowly, launch=lambda w: started.append(w) or launch(w))
    with patched:
        engine.step()
    (work,) = started
    assert work.arrays.input_ids[:3].tolist() == [7, 8, 9], "beside the tree, which stands behind it"


def test_a_text_that_cannot_be_read_ends_its_request_while_its_tree_runs():
    prompts, _, _ = workload("qwen3", "cpu")
    model, params = compiled("qwen3", torch.float32), SamplingParams(max_tokens=30, temperature=0.0)
    expected = model.engine(EngineConfig(num_blocks=100, block_size=16)).generate(prompts[:2], params)
    unknown = next(t for t in expected[0].outputs[0].token_ids[4:] if t not in expected[1].outputs[0].token_ids)

    class Knows(LetterTokenizer):
        def decode(self, token_ids, **options):
            if unknown in token_ids:
                raise IndexError("piece id is out of range")
            return super().decode(token_ids, **options)

    config = EngineConfig(num_blocks=100, block_size=16, overlap=True)
    speculation = SpeculationConfig(drafter=Oracle(expected, 0.5, 0), switch="always")
    engine = model.engine(config, tokenizer=Knows(), speculation=speculation)
    for name, prompt in enumerate(prompts[:2]):
        engine.add_request(prompt, params, request_id=str(name), stream_text=True)
    finished = {output.request_id: output for output in run(engine)}
    assert "out of range" in str(finished["0"].error) and finished["0"].outputs[0].finish_reason == "error"
    assert finished["1"].outputs[0].token_ids == expected[1].outputs[0].token_ids
    assert engine.stats.num_free_blocks == engine.stats.num_blocks


class Broken:
    """A drafter that fails in one of several ways."""

    def __init__(self, how: str) -> None:
        self.how = how

    def propose(self, sequences, max_depth):
        if self.how == "raises":
            raise RuntimeError("no draft today")
        if self.how == "too few":
            return []
        if self.how == "foreign tokens":
            return [DraftTree.chain([VOCAB_SIZE + 5])] * len(sequences)
        if self.how == "no trees":
            return [SimpleNamespace(tokens={(0,): 5})] * len(sequences)
        return [DraftTree.chain([1] * 1000)] * len(sequences)

    def forget(self, sequence):
        pass


@pytest.mark.parametrize(
    ("how", "goes_on"),
    [("raises", False), ("too few", False), ("foreign tokens", False), ("no trees", False), ("too deep", True)],
)
def test_a_broken_drafter_is_switched_off_and_moves_no_bit(how, goes_on, caplog):
    config = EngineConfig(num_blocks=400, block_size=16)
    engine, _ = assert_unmoved("qwen3", "cpu", config, SpeculationConfig(drafter=Broken(how), switch="always"))
    assert (engine.speculator.error is None) == goes_on
    assert goes_on or "the drafter failed" in caplog.text


class Writes(NGramDrafter):
    """Does something to all that it is given, and then drafts."""

    def __init__(self, write) -> None:
        super().__init__()
        self.write = write

    def propose(self, sequences, max_depth):
        trees = super().propose(sequences, max_depth)
        self.write(sequences, max_depth)
        return trees


def to_each(write):
    return lambda sequences, max_depth: [write(sequence) for sequence in sequences]


WRITES = {
    "appends tokens": to_each(lambda sequence: sequence.token_ids.append(5)),
    "adds tokens in place": to_each(lambda sequence: sequence.token_ids.__iadd__([5])),
    "writes a token": to_each(lambda sequence: sequence.token_ids.__setitem__(-1, 5)),
    "clears tokens": to_each(lambda sequence: sequence.token_ids.clear()),
    "writes generated tokens": to_each(lambda sequence: sequence.generated_ids.clear()),
    "ends sequences": to_each(lambda sequence: setattr(sequence, "finish_reason", "stop")),
    "appends by a method": to_each(lambda sequence: sequence.append(5)),
    "writes a bias": to_each(lambda sequence: sequence.sampling.logit_bias.__setitem__(5, 1e4)),
    "clears sequences": lambda sequences, max_depth: sequences.clear(),
    "deepens": lambda sequences, max_depth: max_depth.__setitem__(slice(None), [1000] * len(max_depth)),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_drafter_writes_change_no_bit(write):
    model, config = compiled("qwen3", torch.float32), EngineConfig(num_blocks=400, block_size=16)
    prompts, params = (
        [[1, 2, 3] * 8, [4, 5, 6] * 8],
        SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logit_bias={7: 0.5}),
    )
    expected = model.engine(config).generate(prompts, params, progress=False)
    engine = model.engine(config, speculation=SpeculationConfig(drafter=Writes(write), switch="always"))
    actual = engine.generate(prompts, params, progress=False)
    assert [output.outputs for output in actual] == [output.outputs for output in expected]
    assert not engine.speculator._views
    engine.check()


@pytest.mark.parametrize("generates", [False, True])
def test_drafter_cannot_step_its_own_engine(generates):
    model, config = compiled("qwen3", torch.float32), EngineConfig(num_blocks=400, block_size=16)
    prompts, params = [[1, 2, 3] * 8, [4, 5, 6] * 8], SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    expected = model.engine(config).generate(prompts, params, progress=False)
    drafter = Writes(lambda *_: engine.generate([[1]], params, progress=False) if generates else engine.step())
    engine = model.engine(config, speculation=SpeculationConfig(drafter=drafter, switch="always"))
    actual = engine.generate(prompts, params, progress=False)
    assert [output.outputs for output in actual] == [output.outputs for output in expected]
    assert "within a step" in str(engine.speculator.error)
    assert not engine.has_unfinished_requests
    engine.check()


class AfraidOf(NGramDrafter):
    """Fails with one token; records how many sequences each call had."""

    def __init__(self, token: int) -> None:
        super().__init__()
        self.token, self.served = token, []

    def propose(self, sequences, max_depth):
        if any(self.token in sequence.token_ids for sequence in sequences):
            raise RuntimeError("no draft for this one")
        self.served.append(len(sequences))
        return super().propose(sequences, max_depth)


def test_drafter_failure_with_one_request_keeps_drafts_for_others():
    model = compiled("qwen3", torch.float32)
    drafter = AfraidOf(VOCAB_SIZE - 1)
    config = EngineConfig(num_blocks=400, block_size=16)
    prompts = [[1, 2, 3] * 8, [VOCAB_SIZE - 1, *[1, 2, 3] * 8], [4, 5, 6] * 8]
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    expected = model.engine(config).generate(prompts, params, progress=False)
    engine = model.engine(config, speculation=SpeculationConfig(drafter=drafter, switch="always"))
    for _ in range(2):
        drafter.served.clear()
        actual = engine.generate(prompts, params, progress=False)
        assert [output.outputs for output in actual] == [output.outputs for output in expected]
        assert drafter.served.count(2) > 2 and max(drafter.served) == 2
    assert "no draft for this one" in str(engine.speculator.error) and not engine.speculator._disabled
    drafter.served.clear()
    engine.generate(prompts[:1], params, progress=False)
    assert drafter.served
    engine.check()


def test_a_draft_model_with_nan_is_switched_off():
    model = random_model("llama", torch.float32, num_hidden_layers=1)
    with torch.no_grad():
        model.lm_head.weight.fill_(float("nan"))
    drafter = certified(model, max_context=120).drafter(3)
    config = EngineConfig(num_blocks=400, block_size=16)
    engine, _ = assert_unmoved("qwen3", "cpu", config, SpeculationConfig(drafter=drafter, switch="always"))
    assert "NaN or infinite" in str(engine.speculator.error)


def test_a_drafter_of_another_vocabulary_is_refused():
    other = certified(random_model("gpt2", torch.float32, n_layer=1, vocab_size=96), max_context=64)
    with pytest.raises(InvalidInput, match="vocabulary has 96 tokens, the model's 160"):
        compiled("qwen3", torch.float32).engine(speculation=SpeculationConfig(drafter=other.drafter()))


@given(tokens=st.lists(st.integers(0, 2), min_size=1, max_size=40), longest=st.integers(1, 4), depth=st.integers(1, 6))
def test_n_gram_drafter_copies_after_longest_latest_match(tokens, longest, depth):
    drafter, sequence = NGramDrafter(5, longest=longest), Sequence(tokens[:1])
    for end in range(1, len(tokens) + 1):  # asked at some lengths only, as tokens come several at a time
        sequence.token_ids = tokens[:end]
        if end % 3 == 0 or end == len(tokens):
            (tree,) = drafter.propose([sequence], [depth])
    expected = []
    for size in range(min(longest, len(tokens) - 1), 0, -1):
        places = [i for i in range(size, len(tokens)) if tokens[i - size : i] == tokens[-size:]]
        if places:
            expected = tokens[places[-1] : places[-1] + min(5, depth)]
            break
    assert tree.along((0,) * len(tree)) == expected


@given(
    turns=st.lists(st.tuples(st.integers(0, 90), st.lists(st.integers(0, 2), min_size=1, max_size=30)), max_size=8),
    longest=st.integers(1, 4),
)
def test_n_gram_drafter_notices_removed_tokens(turns, longest):
    drafter, sequence = NGramDrafter(5, longest=longest), Sequence([0] * 70)
    drafter.propose([sequence], [5])
    known = NUM_KEPT  # how many of the last tokens can be taken back: fewer once some were
    for count, more in turns:
        taken = min(count, known - 1)
        kept = len(sequence.token_ids) - taken
        known = min(NUM_KEPT, known - taken + len(more))
        sequence.token_ids = sequence.token_ids[:kept] + more
        (fresh,) = NGramDrafter(5, longest=longest).propose([sequence], [5])
        (tree,) = drafter.propose([sequence], [5])
        assert tree.tokens == fresh.tokens


def test_n_gram_drafter_rereads_changed_history():
    drafter, sequence = NGramDrafter(2), Sequence(list(range(3 * NUM_KEPT)))
    drafter.propose([sequence], [2])
    sequence.token_ids = [7, 8, 9, 8]
    (tree,) = drafter.propose([sequence], [2])
    assert tree.along((0, 0)) == [9, 8]


def test_the_n_gram_drafter_reads_a_long_text_once():
    class Text(list):
        num_read = 0

        def __getitem__(self, index):
            actual = super().__getitem__(index)
            Text.num_read += len(actual) if isinstance(index, slice) else 1
            return actual

        def __iter__(self):
            Text.num_read += len(self)
            return super().__iter__()

    drafter, sequence = NGramDrafter(5), Sequence([0])
    sequence.token_ids = Text(range(10_000))
    drafter.propose([sequence], [5])
    sequence.token_ids.append(17)
    Text.num_read = 0
    (tree,) = drafter.propose([sequence], [5])
    assert tree.along((0,) * 5) == [18, 19, 20, 21, 22]
    assert Text.num_read < 200


@given(
    length=st.integers(0, 200), changed=st.sets(st.integers(0, 199)), most=st.integers(0, 220), cut=st.integers(0, 9)
)
def test_a_draft_is_kept_up_to_the_first_token_that_differs(length, changed, most, cut):
    left = list(range(length))
    right = [-1 if token in changed else token for token in left][: max(0, length - cut)]
    agreed = len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], zip(left, right))))
    assert _common(left, right, most) == min(agreed, most)


def test_a_tree_knows_its_branches():
    tree = DraftTree({(1,): 7, (0, 1): 6, (0,): 5, (0, 0): 4, (0, 0, 0): 3})
    assert tree.branches() == [(0, 0, 0), (0, 1), (1,)]
    assert tree.along((0, 0, 0)) == [5, 4, 3]
    assert tree.child((0,), 6) == (0, 1) and tree.child((), 6) is None
    assert (len(tree), tree.depth) == (5, 3)
    assert list(tree.pruned(4, 2).tokens) == [(0,), (1,), (0, 0), (0, 1)]
    assert NO_DRAFT.branches() == [] and len(NO_DRAFT) == 0


@pytest.mark.parametrize(
    "tokens", [{(0, 0): 1}, {(): 1}, {(0,): 1, (1,): 1}, {"0": 1}, {0: 1}, {("0",): 1}, {(0,): 1.5}, {(0,): "1"}]
)
def test_invalid_draft_tree_is_rejected(tokens):
    with pytest.raises(InvalidInput, match=r"draft (node|token)"):
        DraftTree(tokens)


@pytest.mark.parametrize("given", [np.array([5, 6]), torch.tensor([5, 6])])
def test_draft_tree_accepts_numbers_of_numpy_and_torch(given):
    assert DraftTree.chain(given).child((0,), 6) == (0, 0)


@pytest.mark.parametrize("bad", [{"max_nodes": 0}, {"max_sequences": 0}, {"switch": "never"}, {"max_nodes": "5"}])
def test_settings_that_cannot_be_are_refused(bad):
    with pytest.raises(InvalidInput, match=r"must be at least 1|one of automatic, always|give an integer"):
        SpeculationConfig(**bad)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_chain_is_read_back_once(temperature, monkeypatch):
    """The levels read each other's tokens on the device."""
    drafter, reads = drafting_model("cpu").drafter(5, siblings=1, num_sequences=2), []
    sequences = [Sequence([1, 2, 3], SamplingParams(temperature=temperature, seed=n), max_length=50) for n in (1, 2)]
    read = torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda tensor: reads.append(tensor.shape) or read(tensor))
    trees = drafter.propose(sequences, [5, 3])
    assert len(reads) == 1 and [tree.depth for tree in trees] == [5, 3]
