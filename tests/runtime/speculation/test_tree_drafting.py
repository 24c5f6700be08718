"""Trees drafted by a model: no bit moves, the right path is found, and blocks come back."""

import pytest
import torch

from detcompile.errors import InvalidInput
from detcompile.runtime.engine_config import EngineConfig
from detcompile.runtime.requests.sampling_params import SamplingParams
from detcompile.runtime.speculation.growing_tree import FixedTree
from detcompile.runtime.speculation.speculator import SpeculationConfig
from tests.model_cases import compiled
from tests.runtime.speculation.test_speculator import assert_unmoved, drafting_model

SHAPE = [(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 1, 1)]


@pytest.mark.parametrize(("tree", "num_sequences"), [("grown", 2), (SHAPE, 8)])
def test_a_model_that_drafts_trees_moves_no_bit(tree, num_sequences, device):
    drafter = drafting_model(device).drafter(4, tree=tree, max_nodes=9, num_sequences=num_sequences)
    config = EngineConfig(num_blocks=200, block_size=16, max_num_batched_tokens=200)
    engine, _ = assert_unmoved("qwen3", device, config, SpeculationConfig(drafter=drafter, switch="always"))
    assert engine.speculator.error is None and engine.speculator.num_drafted > 0
    drafter._blocks.check([])


@pytest.mark.parametrize("tree", ["grown", SHAPE])
def test_the_first_path_of_a_model_of_equal_weights_is_right(tree, device):
    """It holds the draws of the target itself, behind keys computed in blocks of their own, at block borders too."""
    model = compiled("qwen3", torch.float32, device)
    drafter = model.drafter(3, tree=tree, max_nodes=8)
    engine = model.engine(
        EngineConfig(num_blocks=200, block_size=16), speculation=SpeculationConfig(drafter=drafter, switch="always")
    )
    params = [SamplingParams(max_tokens=90, seed=3, temperature=t, ignore_eos=True) for t in (0.0, 0.7)]
    engine.generate([[5, 6, 7], [8] * 60], params, progress=False)
    statistics = engine.speculator.statistics
    if tree == "grown":  # it may hold no path of three nodes
        assert statistics.num_rejected == 0
    else:
        assert statistics.tokens_per_step > 3.8


def test_a_fixed_tree_takes_the_candidates_of_its_shape():
    tree = FixedTree([(0,), (2,), (2, 0)])
    assert tree.frontier() == [()]
    tree.expand([((), [(7, 0.5), (8, 0.3), (9, 0.2)])])
    assert tree.frontier() == [(2,)] and tree.along((2,)) == [9]
    tree.expand([((2,), [(4, 1.0), (5, 0.0)])])
    assert tree.frontier() == [] and tree.tree().tokens == {(0,): 7, (2,): 9, (2, 0): 4}


@pytest.mark.parametrize(
    "bad", [{"tree": "oak"}, {"tree": [(1, 0)]}, {"tree": "grown", "max_nodes": 0}, {"tree": "grown", "siblings": 1}]
)
def test_trees_that_cannot_be_are_refused(bad):
    with pytest.raises(InvalidInput, match=r"tree|draft|siblings|GrowingTree"):
        compiled("qwen3", torch.float32).drafter(2, num_sequences=1, **bad)
