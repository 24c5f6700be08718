"""Every drafter moves no bit, drafts what it says, and is refused or switched off where it does not fit."""

import functools
import itertools
import math
import random
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from detcompile import Drafter, MedusaHeads, MirrorDrafter, NGramDrafter, SamplingParams, SpeculationConfig
from detcompile.errors import EngineError, InvalidInput
from detcompile.runtime.engine_config import EngineConfig
from detcompile.runtime.requests.sequence import Sequence
from detcompile.runtime.speculation.draft_tree import DraftTree
from detcompile.runtime.speculation.drafter import NO_DRAFT, as_drafter, require_fitting
from detcompile.runtime.speculation.medusa_drafter import MedusaDrafter, likeliest_paths
from detcompile.runtime.step.builder import build_step
from detcompile.runtime.step.runner import Runner
from tests.conftest import NEEDS_CUDA
from tests.model_cases import VOCAB_SIZE, compiled
from tests.runtime.engine_cases import engine_configs
from tests.runtime.speculation.test_speculator import drafting_model

HIDDEN = 80
ROOMY = EngineConfig(num_blocks=300, block_size=16)


@functools.cache
def workload(device: str):
    """Prompts around block borders, parameters of every kind, and what an engine without speculation gives."""
    rng = random.Random(2)
    prompts = [[rng.randrange(VOCAB_SIZE) for _ in range(length)] for length in (1, 15, 16, 33, 70, 100)]
    kinds = [{"temperature": 0.0}, {"temperature": 1.0}, {"temperature": 0.8, "top_p": 0.9}, {"presence_penalty": 0.5}]
    lengths = [24, 9, 24, 9, 24, 2]
    params = [
        SamplingParams(max_tokens=length, seed=index, logprobs=1, n=1 + (index == 4), **kinds[index % 4])
        for index, length in enumerate(lengths)
    ]
    return prompts, params, target(device).engine(ROOMY).generate(prompts, params, progress=False)


def target(device: str):
    return compiled("qwen3", torch.float32, device)


def random_heads(seed: int, num_heads: int, item: bool = False, num_layers: int = 1) -> MedusaHeads:
    torch.manual_seed(seed)
    heads = MedusaHeads(HIDDEN, num_heads, num_layers=num_layers, vocab_size=VOCAB_SIZE if item else None)
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.normal_()
    return heads.requires_grad_(False)


def assert_unmoved(device: str, config: EngineConfig, drafter, max_nodes: int = 16):
    prompts, params, expected = workload(device)
    speculation = SpeculationConfig(drafter=drafter, max_nodes=max_nodes, switch="always")
    engine = target(device).engine(config, speculation=speculation)
    actual = engine.generate(prompts, params, progress=False)
    engine.check()
    assert [output.outputs for output in actual] == [output.outputs for output in expected]
    assert engine.stats.num_free_blocks == engine.stats.num_blocks
    return engine


def make_drafter(kind: str, device: str, num_tokens: int, siblings: int, num_sequences: int, seed: int):
    chain = {"siblings": siblings, "num_sequences": num_sequences}
    if kind == "n-gram":
        return NGramDrafter(num_tokens)
    if kind == "draft model":
        return drafting_model(device).drafter(num_tokens, **chain)
    if kind == "early exit":
        return target(device).drafter(num_tokens, layers=1, **chain)
    if kind == "layer skip":
        return target(device).drafter(num_tokens, layers=(1,), **chain)
    assert kind == "medusa", f"{kind}: no such drafter"
    heads = random_heads(seed, 1 + num_tokens % 4, item=seed % 2 == 0, num_layers=1 + seed % 2)
    paths = [(0,), (1,), (1, 0), (1, 2)] if siblings and heads.num_heads > 1 else None
    return target(device).medusa_drafter(heads, num_nodes=num_tokens, num_candidates=siblings + 1, paths=paths)


CONFIGS = engine_configs(30, 50, 300)


@pytest.mark.parametrize("kind", ["n-gram", "draft model", "early exit", "layer skip", "medusa"])
@settings(max_examples=5)
@given(
    config=CONFIGS,
    max_nodes=st.integers(1, 16),
    num_tokens=st.integers(1, 6),
    siblings=st.integers(0, 2),
    num_sequences=st.integers(1, 3),
    mirrored=st.booleans(),
    seed=st.integers(0, 9),
)
def test_no_drafter_moves_a_bit(kind, config, max_nodes, num_tokens, siblings, num_sequences, mirrored, seed, device):
    drafter = make_drafter(kind, device, num_tokens, siblings, num_sequences, seed)
    drafter = MirrorDrafter(drafter) if mirrored and kind != "medusa" else drafter
    engine = assert_unmoved(device, config, drafter, max_nodes)
    assert engine.speculator.error is None


@pytest.mark.parametrize("count", [1, 3])
def test_greedy_chain_in_one_launch_equals_level_by_level(count, device):
    """Over several rounds in which some guesses are right: keys of the wrong ones are overwritten."""
    rounds = [[] for _ in range(2)]
    for actual, greedy in zip(rounds, (True, False)):
        drafter = drafting_model(device).drafter(4, num_sequences=count)
        if not greedy:
            drafter._is_greedy = lambda depths: False
        sequences = [Sequence([7 + index] * (5 + index), SamplingParams(temperature=0)) for index in range(count)]
        with mock.patch.object(Runner, "launch_chain", autospec=True, side_effect=Runner.launch_chain) as launch:
            for number in range(5):
                trees = drafter.propose(sequences, [4] * count)
                actual.append([tree.tokens for tree in trees])
                for sequence, tree in zip(sequences, trees):
                    sequence.token_ids += [*tree.along((0,) * ((number + 1) % 5)), 3]
        assert launch.call_count == (4 if greedy else 0)  # the first round reads whole prompts
        assert all(len(tokens) == 4 for trees in actual for tokens in trees)
    assert rounds[0] == rounds[1]


@pytest.mark.gpu
@NEEDS_CUDA
def test_drafting_after_a_pause_waits_for_no_capture():
    """Many tokens were decoded without drafts, and the draft model reads them first."""
    drafter = drafting_model("cuda").drafter(4, num_sequences=2)
    sequences = [Sequence([7 + index] * 5, SamplingParams(temperature=0)) for index in range(2)]
    with mock.patch.object(Runner, "_capture", side_effect=AssertionError("captured")):
        for pause in (0, 0, 3, 3, 20, 20, 20):
            for sequence in sequences:
                sequence.token_ids += [3] * pause
            assert all(len(tree) == 4 for tree in drafter.propose(sequences, [4, 4]))


def test_reading_states_and_sharing_layers_keeps_target_bits(device):
    model = target(device)
    parts = dict(model.fingerprint_parts)
    runner, blocks = model.new_runner(128)
    arrays = build_step([(sequence, 40) for sequence in (Sequence(list(range(40))), Sequence([7] * 40))], blocks)
    logits = runner.run(arrays)
    drafter = model.drafter(2, layers=1)
    reading = Runner(model.executor.forwards.with_states(), runner.kv_cache, False)
    assert reading.run(arrays).numpy(force=True).tobytes() == logits.numpy(force=True).tobytes()
    head = model.model.get_output_embeddings()
    assert torch.allclose(head(reading.states), logits, atol=1e-4)  # they are the states that these logits are made of
    assert runner.run(arrays).numpy(force=True).tobytes() == logits.numpy(force=True).tobytes()
    assert model.fingerprint_parts == parts
    addresses = {parameter.data_ptr() for parameter in model.model.parameters()}
    part = model.executor.drafting((0,)).description.module
    assert {parameter.data_ptr() for parameter in part.parameters()} < addresses
    assert len(drafter._runner.kv_cache.k_caches) == 1


def test_drafting_with_all_layers_is_always_accepted(device):
    drafter = target(device).drafter(4, layers=2)
    engine = assert_unmoved(device, ROOMY, drafter)
    assert 0 < engine.speculator.num_accepted == engine.speculator.num_drafted
    mirror = MirrorDrafter(drafter)
    engine = assert_unmoved(device, ROOMY, mirror)
    assert 0 < engine.speculator.num_accepted == engine.speculator.num_drafted
    assert 0 < mirror.num_used <= mirror.num_ahead
    drafter._blocks.check([])


class Counting(Drafter):
    """Drafts tokens that count up, with another guess beside the first; records its arguments."""

    def __init__(self) -> None:
        self.asked: list[list[int]] = []

    def propose(self, sequences, max_depth):
        self.asked += [list(sequence.token_ids) for sequence in sequences]
        return [
            DraftTree({(0,) * k: s.token_ids[-1] + k for k in range(1, min(3, most) + 1)} | {(1,): 0})
            for s, most in zip(sequences, max_depth)
        ]

    def forget(self, sequence):
        self.asked.append([])


@pytest.mark.parametrize(
    ("drawn", "expected", "requested"),
    [
        ([4, 5, 6, 7], {(0,): 8, (0, 0): 9}, 2),  # the first branch, and the token after it that was guessed
        ([4, 5, 6, 0], {(0,): 1, (0, 0): 2, (0, 0, 0): 3, (1,): 0}, 3),  # the other guess: nothing was drafted below
        ([4, 9], {(0,): 10, (0, 0): 11, (0, 0, 0): 12, (1,): 0}, 3),
    ],
)
def test_a_mirror_asks_again_only_where_its_bet_is_lost(drawn, expected, requested):
    inner, sequence = Counting(), Sequence([1, 2, 3])
    mirror = MirrorDrafter(inner)
    mirror.propose([sequence], [8])
    mirror.draft_ahead()
    mirror.draft_ahead()  # nothing new was proposed
    assert inner.asked == [[1, 2, 3], [1, 2, 3, 4, 5, 6]]
    for token in drawn:
        sequence.append(token)
    (tree,) = mirror.propose([sequence], [8])
    assert (tree.tokens, len(inner.asked), mirror.num_used) == (expected, requested, 3 - requested)
    mirror.forget(sequence)
    mirror.forget(sequence)
    assert inner.asked[requested:] == [[]]


@given(
    chances=st.lists(st.lists(st.floats(0.01, 1.0), min_size=1, max_size=3), min_size=1, max_size=3),
    num_nodes=st.integers(1, 12),
)
def test_a_tree_takes_the_paths_with_the_largest_products(chances, num_nodes):
    chances = [sorted(level, reverse=True) for level in chances]
    every = [
        path
        for depth in range(1, len(chances) + 1)
        for path in itertools.product(*(range(len(level)) for level in chances[:depth]))
    ]
    weight = {path: math.prod(level[i] for level, i in zip(chances, path)) for path in every}
    actual = likeliest_paths(chances, num_nodes)
    assert len(actual) == len(set(actual)) == min(num_nodes, len(every))
    DraftTree({path: index for index, path in enumerate(actual)})  # parents are there
    best = sorted(weight.values(), reverse=True)[: len(actual)]
    assert sorted((weight[path] for path in actual), reverse=True) == pytest.approx(best)


def test_heads_draft_their_likeliest_tokens():
    heads, lm_head = random_heads(0, 2), torch.randn(VOCAB_SIZE, HIDDEN)
    drafter = MedusaDrafter(heads, lm_head, paths=[(0,), (1,), (0, 0), (1, 2)])
    sequences, hidden = [Sequence([1], SamplingParams(temperature=0.0)) for _ in range(3)], torch.randn(5, HIDDEN)
    drafter.observe({sequences[0]: 4, sequences[1]: 1, sequences[2]: 0}, hidden)
    sequences[2].append(3)  # its state is of the token before
    trees = drafter.propose(sequences, [5, 1, 5])
    likeliest = heads(hidden, lm_head).topk(3).indices.tolist()
    first, second = likeliest[0][4], likeliest[1][4]
    assert trees[0].tokens == {(0,): first[0], (1,): first[1], (0, 0): second[0], (1, 2): second[2]}
    assert trees[1].tokens == {(0,): likeliest[0][1][0], (1,): likeliest[0][1][1]}
    assert trees[2] is NO_DRAFT
    drafter.forget(sequences[0])
    assert drafter.propose(sequences[:1], [5]) == [NO_DRAFT]


@pytest.mark.parametrize("item", [False, True])
def test_heads_are_read_as_they_were_written(item, tmp_path):
    heads = random_heads(3, 2, item=item, num_layers=2).to(torch.bfloat16)
    heads.save(tmp_path)
    again = MedusaHeads.load(tmp_path)
    assert {name: t.tolist() for name, t in again.state_dict().items()} == {
        name: t.tolist() for name, t in heads.state_dict().items()
    }
    with pytest.raises(InvalidInput, match="holds no Medusa heads"):
        MedusaHeads.load(tmp_path / "nowhere")
    for config in ("{}", "[]", "no JSON"):
        (tmp_path / "config.json").write_text(config)
        with pytest.raises(InvalidInput, match="holds no Medusa heads"):
            MedusaHeads.load(tmp_path)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda model: model.medusa_drafter(MedusaHeads(64, 2)), "read states of 64 values, the model's have 80"),
        (lambda model: model.medusa_drafter(MedusaHeads(80, 2, vocab_size=96)), "has 96 tokens, the model's 160"),
        (lambda model: model.medusa_drafter(MedusaHeads(80, 2), paths=[(0, 0)]), "no parent there"),
        (lambda model: model.medusa_drafter(MedusaHeads(80, 1), paths=[(0,), (0, 0)]), "not be deeper than"),
        (lambda model: model.medusa_drafter(MedusaHeads(80, 1), num_candidates=0), "1 to 159 candidates"),
        (lambda model: MedusaHeads(80, 0), "positive integers"),
        (lambda model: MirrorDrafter(model.medusa_drafter(MedusaHeads(80, 1))), "cannot draft ahead"),
        (lambda model: model.drafter(layers=3), "give some of 0 to 1"),
        (lambda model: model.drafter(layers=(1, 0)), "give some of 0 to 1"),
        (lambda model: model.drafter(layers=0), "give some of 0 to 1"),
        (lambda model: model.drafter(num_sequences=0), "num_sequences=0"),
        (lambda model: model.drafter(cache_tokens=0), "cache_tokens=0"),
        (lambda model: model.drafter(num_tokens=1.5), "drafter: num_tokens 1.5 is a float"),
        (lambda model: model.drafter(siblings="2"), "drafter: siblings '2' is a str"),
        (lambda model: model.drafter(max_nodes=0), "max_nodes=0"),
        (lambda model: model.drafter(max_nodes=None), "drafter: max_nodes None is None"),
        (lambda model: model.drafter(num_sequences="2"), "drafter: num_sequences '2' is a str"),
        (lambda model: model.drafter(cache_tokens=6.4), "drafter: cache_tokens 6.4 is a float"),
        (lambda model: model.drafter(cuda_graphs="no"), "drafter: cuda_graphs 'no' is a str"),
        (lambda model: model.drafter(layers="2"), "drafter: layers: '2' is a str"),
        (lambda model: model.drafter(layers=True), "drafter: layers True is a bool"),
        (lambda model: model.drafter(layers=[0.5]), "drafter: layers: entry 0, 0.5 is a float"),
        (lambda model: model.drafter(tree=5), "tree=5 must be 'chain', 'grown', or a list of paths"),
        (lambda model: model.drafter(tree=[5]), r"tree=\[5\] must be 'chain', 'grown', or a list of paths"),
    ],
)
def test_what_does_not_fit_is_refused(make, message):
    with pytest.raises(InvalidInput, match=message):
        make(target("cpu"))


class Both:
    """Has a drafter's two methods and nothing else."""

    def propose(self, sequences, max_depth):
        return [DraftTree.chain([1])] * len(sequences)

    def forget(self, sequence):
        self.forgotten = sequence


class More(Both):
    """Has all that a drafter may have."""

    vocab_size, reads_states, hidden_size = VOCAB_SIZE, True, HIDDEN

    def __init__(self) -> None:
        self.tokenizer, self.device, self.told = Tokenizer(0), torch.device("cpu"), []

    def draft_ahead(self):
        self.told.append("draft_ahead")

    def observe(self, rows, hidden):
        self.told.append(("observe", len(rows), hidden.shape[1]))

    def give_distributions(self):
        self.told.append("give_distributions")


def test_an_object_with_both_methods_is_a_drafter():
    given, sequence = Both(), Sequence([1])
    drafter = SpeculationConfig(drafter=given).drafter
    assert isinstance(drafter, Drafter) and as_drafter(drafter) is drafter
    assert drafter.propose([sequence], [3])[0].tokens == {(0,): 1}
    drafter.forget(sequence)
    assert given.forgotten is sequence
    assert not SpeculationConfig(drafter=given).reads_states and not SpeculationConfig().reads_states
    assert_unmoved("cpu", ROOMY, MirrorDrafter(given))


def test_what_an_object_has_beside_both_methods_is_asked_for():
    given = More()
    config = SpeculationConfig(drafter=given, switch="always", acceptance="rejection")
    optional = {name for name in vars(Drafter) if not name.startswith("_")} - {"propose", "forget"}
    assert optional == vars(config.drafter).keys() - {"_given"} and config.reads_states
    with pytest.raises(InvalidInput, match="tokenizer gives other ids"):
        target("cpu").engine(ROOMY, tokenizer=Tokenizer(1), speculation=config)
    params = SamplingParams(max_tokens=4, temperature=0)
    target("cpu").engine(ROOMY, speculation=config).generate([[5, 6]], params, progress=False)
    assert given.told[0] == "give_distributions" and {"draft_ahead", ("observe", 1, HIDDEN)} <= set(given.told)


@pytest.mark.parametrize(("drafter", "missing"), [(object(), "forget"), (mock.Mock(spec=["forget"]), "propose")])
@pytest.mark.parametrize("take", [lambda drafter: SpeculationConfig(drafter=drafter), MirrorDrafter])
def test_object_without_drafter_methods_is_rejected(take, drafter, missing):
    with pytest.raises(InvalidInput, match=f"has no method {missing}: give an instance of detcompile.Drafter"):
        take(drafter)


class Tokenizer:
    def __init__(self, shift: int) -> None:
        self.shift = shift

    def get_vocab(self) -> dict[str, int]:
        return {str(index + self.shift): index for index in range(VOCAB_SIZE)}


def test_a_drafter_of_another_model_is_refused_when_the_engine_is_made():
    model, drafter = target("cpu"), NGramDrafter()
    drafter.tokenizer = Tokenizer(1)
    with pytest.raises(InvalidInput, match="tokenizer gives other ids"):
        model.engine(ROOMY, tokenizer=Tokenizer(0), speculation=SpeculationConfig(drafter=drafter))
    model.engine(ROOMY, tokenizer=Tokenizer(1), speculation=SpeculationConfig(drafter=drafter))
    foreign = MedusaDrafter(MedusaHeads(64, 1), torch.zeros(VOCAB_SIZE, 64))
    with pytest.raises(InvalidInput, match="states of 64 values, the model's have 80"):
        model.engine(ROOMY, speculation=SpeculationConfig(drafter=foreign))
    with pytest.raises(InvalidInput, match="does not return"):
        require_fitting(foreign, VOCAB_SIZE, 0, None)


OVERFLOWS = SamplingParams(temperature=1e-5, seed=1, max_tokens=2, top_k=5, logit_bias={5: 3e38})


@pytest.mark.parametrize(
    "kind", ["draft model", "rejection", "siblings", "grown", "paths", "early exit", "layer skip", "mirror"]
)
def test_a_request_that_overflows_goes_alone_without_drafts(kind):
    """Its biased logits are infinite, and the model's are not: the seven beside it keep their drafts and their bits."""
    makes = {
        "siblings": lambda: drafting_model("cpu").drafter(3, siblings=2),
        "grown": lambda: drafting_model("cpu").drafter(3, tree="grown"),
        "paths": lambda: drafting_model("cpu").drafter(2, tree=[(0,), (1,), (0, 0)]),
        "mirror": lambda: MirrorDrafter(drafting_model("cpu").drafter(3)),
        "rejection": lambda: drafting_model("cpu").drafter(3),
    }
    drafter = makes[kind]() if kind in makes else make_drafter(kind, "cpu", 3, 0, 8, 1)
    prompts, params = [[7 + index] * 9 for index in range(7)], SamplingParams(temperature=0, max_tokens=12)
    expected = target("cpu").engine(ROOMY).generate(prompts, params, progress=False)
    acceptance = "rejection" if kind == "rejection" else "exact"
    config = SpeculationConfig(drafter=drafter, switch="always", acceptance=acceptance)
    engine = target("cpu").engine(ROOMY, speculation=config)
    good = [engine.add_request(prompt, params) for prompt in prompts]
    actual = {}
    engine.step()
    engine.step()  # the others have drafts by then, and this one is asked about with its first token
    bad = engine.add_request([30], OVERFLOWS)
    while engine.has_unfinished_requests:
        actual |= {output.request_id: output for output in engine.step() if output.finished}
    assert [actual[name].outputs for name in good] == [output.outputs for output in expected]
    assert "no token left to draw" in str(actual[bad].error)
    assert engine.speculator.error is None and engine.speculator.num_drafted > 7
    engine.check()


def test_heads_draft_nothing_for_a_request_that_overflows():
    """An engine ends it at its first token, before they have a state of it."""
    drafter, hidden = target("cpu").medusa_drafter(random_heads(0, 2)), torch.randn(8, HIDDEN)
    sequences = [Sequence([7 + index] * 9, SamplingParams(temperature=0)) for index in range(7)]
    rows = {sequence: row for row, sequence in enumerate(sequences)}
    drafter.observe(rows, hidden)
    expected = [tree.tokens for tree in drafter.propose(sequences, [2] * 7)]
    bad = Sequence([30] * 9, OVERFLOWS)
    drafter.observe(rows | {bad: 7}, hidden)
    *trees, none = drafter.propose([*sequences, bad], [2] * 8)
    assert [tree.tokens for tree in trees] == expected and all(expected) and none is NO_DRAFT


class FailsAhead(Counting):
    def propose(self, sequences, max_depth):
        if len(self.asked) > 3:
            raise EngineError("no draft today")
        return [DraftTree.chain([1])] * len(super().propose(sequences, max_depth))


@pytest.mark.parametrize("kind", ["mirror", "heads with NaN", "layers with NaN"])
def test_failing_drafter_is_disabled_without_changing_bits(kind, caplog):
    heads, drafter = random_heads(0, 2), None
    if kind == "mirror":
        drafter = MirrorDrafter(FailsAhead())
    elif kind == "heads with NaN":
        heads.blocks[1][0].weight.fill_(float("nan"))
        drafter = target("cpu").medusa_drafter(heads)
    else:
        drafter = target("cpu").drafter(2, layers=1)
        forward = drafter._runner.forward
        drafter._runner.forward = lambda *step: forward(*step) * float("nan")
    engine = assert_unmoved("cpu", ROOMY, drafter)
    assert ("no draft today" if kind == "mirror" else "NaN or infinite") in str(engine.speculator.error)
    assert "the drafter failed" in caplog.text
