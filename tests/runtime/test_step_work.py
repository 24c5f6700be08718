"""Rows of logits in a step of plain sequences, draft trees and prompts with logprobs."""

import torch

from detcompile.runtime.requests.sampling_params import SamplingParams
from detcompile.runtime.requests.sequence import Sequence
from detcompile.runtime.speculation.draft_tree import DraftTree
from detcompile.runtime.speculation.speculator import SpeculationConfig, Speculator
from detcompile.runtime.step.block_tables import BlockTables
from detcompile.runtime.step.builder import StepEntry, build_step
from detcompile.runtime.step.runner import Runner
from detcompile.runtime.step_work import build_work, lay_out
from tests.bits import assert_bitwise_equal
from tests.runtime.step.runner_cases import BLOCK_SIZE, VOCAB_SIZE, forward, make_blocks, make_cache

BRANCHED = DraftTree({(0,): 5, (0, 0): 6, (0, 1): 7, (1,): 8, (0, 0, 0): 9})
CHAIN = DraftTree.chain([3, 4])


class Planned:
    """A tree for each of some sequences."""

    def __init__(self, trees):
        self.trees = {tuple(sequence.token_ids): tree for sequence, tree in trees.items()}

    def propose(self, sequences, max_depth):
        return [self.trees.get(tuple(sequence.token_ids), DraftTree({})) for sequence in sequences]

    def forget(self, sequence):
        pass


def alone(tokens):
    """The logits behind these tokens, from a cache of their own."""
    return Runner(forward, make_cache(0.0), False).run(build_step([(Sequence(tokens), len(tokens))], make_blocks()))[0]


def test_logits_row_equals_its_sequence_alone():
    runner, blocks = Runner(forward, make_cache(0.0), False), make_blocks(order=torch.Generator().manual_seed(0))
    asking = SamplingParams(prompt_logprobs=2)
    plain, branched, prompt, chained, other = sequences = [
        Sequence([(3 * start + t) % VOCAB_SIZE for t in range(length)], params, max_length=60)
        for start, (length, params) in enumerate([(20, None), (17, None), (30, asking), (5, None), (33, None)])
        for params in [params or SamplingParams()]
    ]
    for sequence, computed in zip(sequences, (19, 16, 10, 4, 32)):
        runner.run(build_step([(sequence, computed)], blocks))
        sequence.num_computed = computed
    entries = [StepEntry(sequence, sequence.num_computed, 8 if sequence is prompt else 1) for sequence in sequences]
    for sequence, start, count, _ in entries:
        assert blocks.grow(sequence, start + count)
    trees = {branched: BRANCHED, chained: CHAIN, other: BRANCHED}
    drafted = Speculator(SpeculationConfig(drafter=Planned(trees)), blocks, VOCAB_SIZE).draft(entries, 100)
    assert drafted.keys() == trees.keys()
    rest, draws = lay_out(entries, drafted)
    assert [draw.sequence for draw in draws] == [plain, branched, chained, other], "the prompt is not at its end"
    work = build_work(rest, draws, [entries[2]], BlockTables(1, 5, 8), BLOCK_SIZE, {})
    logits = runner.run(work.arrays)
    assert len(logits) == len(work.rows) + 8

    taken = []
    for sequence, row, verification in draws:
        nodes = {(): 0} if verification is None else verification.layout.rows
        for path, behind in nodes.items():
            guessed = [] if verification is None else verification.tree.along(path)
            assert_bitwise_equal(logits[row + behind], alone(sequence.token_ids + guessed), f"{path} of a tree")
            assert work.rows[row + behind].position == sequence.num_tokens + len(path)
            taken.append(row + behind)
    assert sorted(taken) == list(range(len(work.rows)))
    (wanted,) = work.prompts
    assert wanted.start == len(work.rows) and wanted.targets == tuple(prompt.token_ids[11:19]) and wanted.num_top == 2
    for i in range(8):
        assert_bitwise_equal(logits[wanted.start + i], alone(prompt.token_ids[: 11 + i]), f"prompt token {10 + i}")
