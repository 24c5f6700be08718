"""Rejection sampling gives the target's distribution: chi-square and total variation over 10^5 draws and more.

Each chi-square test fails by chance with probability FALSE_ALARM, under another seed; with these seeds they pass.
"""

import math

import pytest
import torch

from detcompile.errors import InvalidInput
from detcompile.runtime.engine_config import EngineConfig
from detcompile.runtime.requests.sampling_params import SamplingParams
from detcompile.runtime.requests.sequence import Sequence
from detcompile.runtime.sampling import rejection as acceptance
from detcompile.runtime.sampling.philox import noise_keys
from detcompile.runtime.sampling.rejection import (
    ACCEPTANCE_STREAM,
    CERTAIN,
    NO_GUESS,
    RESIDUAL_STREAM,
    Proposals,
    resolve,
)
from detcompile.runtime.sampling.sampler import Sampler, SampleRow
from detcompile.runtime.sampling.sampling_tensors import drawing_tensors, proposal_tensors
from detcompile.runtime.speculation.draft_tree import DraftTree
from detcompile.runtime.speculation.speculator import SpeculationConfig
from detcompile.runtime.step.builder import build_step
from tests.model_cases import VOCAB_SIZE, compiled
from tests.runtime.speculation.test_speculator import drafting_model

FALSE_ALARM = 1e-6
NUM_DRAWS = 100_000
V = 11


def excess(counts: torch.Tensor, probabilities: torch.Tensor) -> float:
    """How far the chi-square of ``counts`` is above its limit at FALSE_ALARM (Wilson and Hilferty); negative passes."""
    expected = probabilities.double() * counts.sum()
    assert (counts[expected == 0] == 0).all(), "a token that the target never draws"
    kept = expected > 0
    assert expected[kept].min() > 5
    statistic = float(((counts - expected)[kept] ** 2 / expected[kept]).sum())
    degrees = int(kept.sum()) - 1
    z = 4.7534  # of the normal distribution, at FALSE_ALARM
    return statistic - degrees * (1 - 2 / (9 * degrees) + z * math.sqrt(2 / (9 * degrees))) ** 3


def total_variation(counts: torch.Tensor, probabilities: torch.Tensor) -> float:
    return float((counts / counts.sum() - probabilities).abs().sum() / 2)


def keys(positions: torch.Tensor, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    places, seeds = positions.tolist(), [seed] * len(positions)
    return tuple(noise_keys(seeds, places, [stream] * len(places)) for stream in (ACCEPTANCE_STREAM, RESIDUAL_STREAM))


def random_distribution(generator: torch.Generator, zeros: int = 0) -> torch.Tensor:
    weights = torch.rand(V, generator=generator) ** 3 + 0.01
    weights[torch.randperm(V, generator=generator)[:zeros]] = 0.0  # as filters leave them
    return weights / weights.sum()


def without_replacement(q: torch.Tensor, count: int, num_draws: int, generator: torch.Generator):
    """Guesses [N, count], and the distribution [N, count, V] that each was drawn from given the earlier ones."""
    left, guesses, given = q.expand(num_draws, V).clone(), [], []
    for _ in range(count):
        left = left / left.sum(1, keepdim=True)
        given.append(left)
        guesses.append(torch.multinomial(left, 1, generator=generator))
        left = left.scatter(1, guesses[-1], 0.0)
    return torch.cat(guesses, 1), torch.stack(given, 1)


def draw(p: torch.Tensor, q: torch.Tensor, kinds: str, seed: int, device: str = "cpu") -> torch.Tensor:
    """Tokens of NUM_DRAWS rows whose guesses are (d)rawn and known, drawn and (u)nknown, or the likelies(t) left."""
    generator = torch.Generator().manual_seed(seed)
    guesses, given = without_replacement(q, len(kinds), NUM_DRAWS, generator)
    known = torch.tensor([kind == "d" for kind in kinds]).expand(NUM_DRAWS, -1).clone()
    if kinds.endswith("t"):  # the likeliest token of q that was not guessed before, as siblings are
        free = q.expand(NUM_DRAWS, V).scatter(1, guesses[:, :-1], -1.0)
        guesses[:, -1] = free.argmax(1)
    sources = torch.arange(NUM_DRAWS * len(kinds)).view(NUM_DRAWS, -1)
    sources = torch.where(known, sources, CERTAIN)
    guesses[::7, len(kinds) // 2 :] = NO_GUESS  # rows with fewer guesses stand between the others
    args = p.expand(NUM_DRAWS, V), guesses, sources, given.reshape(-1, V)
    noise = tuple(key.to(device) for key in keys(torch.arange(NUM_DRAWS), seed))
    return resolve(*(argument.to(device) for argument in args), noise).cpu()


@pytest.mark.parametrize("kinds", ["d", "u", "t", "dd", "ddd", "dt", "ut", "dud"])
@pytest.mark.parametrize("zeros", [0, 4])
def test_the_outcome_has_the_targets_distribution(kinds, zeros, device):
    """One guess (chains) and several (trees), drawn from the draft or chosen, with filters on both sides or on none."""
    generator = torch.Generator().manual_seed(len(kinds) + zeros)
    p, q = random_distribution(generator, zeros), random_distribution(generator, zeros)
    counts = torch.bincount(draw(p, q, kinds, seed=3, device=device), minlength=V)
    assert excess(counts, p) < 0
    assert total_variation(counts, p) < 0.01


def test_equal_distributions_accept_every_draw():
    p = random_distribution(torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(1)
    guesses, given = without_replacement(p, 1, 1000, generator)
    sources = torch.arange(1000)[:, None]
    assert resolve(p.expand(1000, V), guesses, sources, given[:, 0], keys(torch.arange(1000), 5)).equal(guesses[:, 0])


def test_known_distributions_accept_more():
    generator = torch.Generator().manual_seed(2)
    p, q = random_distribution(generator), random_distribution(generator)
    rates = []
    for known in (True, False):
        guesses, given = without_replacement(q, 1, NUM_DRAWS, torch.Generator().manual_seed(4))
        sources = torch.arange(NUM_DRAWS)[:, None] if known else torch.full((NUM_DRAWS, 1), CERTAIN)
        actual = resolve(p.expand(NUM_DRAWS, V), guesses, sources, given[:, 0], keys(torch.arange(NUM_DRAWS), 6))
        rates.append(float((actual == guesses[:, 0]).double().mean()))
    assert rates[0] == pytest.approx(float(torch.minimum(p, q).sum()), abs=0.01)
    assert rates[1] == pytest.approx(float((p * q).sum()), abs=0.01)


def test_guesses_are_judged_with_numbers_of_their_own():
    """No drafter draws with them, and no plain draw, of whichever sample."""
    params, guess = SamplingParams(seed=5), Proposals((1,), (None,))
    rows = [SampleRow(params, 9, sample_index=index, proposals=guess) for index in (0, 1, 99)]
    columns = {**drawing_tensors(rows), **proposal_tensors(rows, [])}
    keys = torch.cat([columns[name] for name in ("keys", "acceptance_keys", "residual_keys")])
    assert len(keys.unique(dim=0)) == len(keys)


@pytest.mark.parametrize("bug", ["no residual", "shared noise", "forgotten sibling"])
def test_planted_bugs_are_caught(bug, monkeypatch):
    generator = torch.Generator().manual_seed(7)
    p, q = random_distribution(generator), random_distribution(generator)
    if bug == "no residual":  # a rejected row draws from p itself
        true_draw = acceptance._draw
        monkeypatch.setattr(acceptance, "_draw", lambda left, noise: true_draw(p.double().expand_as(left), noise))
        counts = torch.bincount(draw(p, q, "d", seed=3), minlength=V)
    elif bug == "shared noise":  # the guess is drawn with the numbers that the residual is drawn with
        noise = keys(torch.arange(NUM_DRAWS), 3)
        guesses = acceptance._draw(q.expand(NUM_DRAWS, V).double(), noise[1])[:, None]
        actual = resolve(p.expand(NUM_DRAWS, V), guesses, torch.zeros_like(guesses), q[None], noise)
        counts = torch.bincount(actual, minlength=V)
    else:  # the second guess is said to come from q, and not from q without the first
        guesses, _ = without_replacement(q, 2, NUM_DRAWS, torch.Generator().manual_seed(4))
        sources = torch.zeros_like(guesses)
        actual = resolve(p.expand(NUM_DRAWS, V), guesses, sources, q[None], keys(torch.arange(NUM_DRAWS), 3))
        counts = torch.bincount(actual, minlength=V)
    assert excess(counts, p) > 0


def first_tokens(model, prompt: list[int], params: SamplingParams) -> torch.Tensor:
    """[V]: what the model's own sampler draws the next token from."""
    runner, blocks = model.new_runner(256)
    logits = runner.run(build_step([(Sequence(prompt), len(prompt))], blocks))
    sampler = Sampler(logits.shape[1], logits.device)
    return sampler.probabilities(logits, sampler.prepare([SampleRow(params, len(prompt))]))[0].cpu()


@pytest.mark.parametrize("siblings", [0, 2])
def test_an_engine_that_rejects_draws_from_the_targets_distribution(siblings, device):
    """The joint distribution of three tokens, whose second and third went through speculation."""
    model = compiled("qwen3", torch.float32, device)
    drafter = drafting_model(device).drafter(2, siblings=siblings, num_sequences=256)
    forbidden = dict.fromkeys(range(3, VOCAB_SIZE), -math.inf)  # so that the two models have tokens in common
    prompt, filters = [5, 9, 31], {"temperature": 3.0, "top_p": 0.98, "seed": 0, "logit_bias": forbidden}
    expected: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(3):
        longer = {}
        for tokens, chance in expected.items():
            actual = first_tokens(model, prompt + list(tokens), SamplingParams(**filters))
            longer |= {(*tokens, int(t)): chance * float(actual[t]) for t in actual.nonzero()}
        expected = longer
    speculation = SpeculationConfig(drafter=drafter, acceptance="rejection", switch="always", max_sequences=256)
    config = EngineConfig(num_blocks=1500, block_size=16, max_num_seqs=256)
    engine = model.engine(config, speculation=speculation)
    num_requests = 1000
    params = [SamplingParams(**filters | {"seed": seed}, max_tokens=4) for seed in range(num_requests)]
    outputs = engine.generate([prompt] * num_requests, params, progress=False)
    assert engine.speculator.error is None and 0 < engine.speculator.num_accepted < engine.speculator.num_drafted
    drawn = [tuple(output.outputs[0].token_ids[:3]) for output in outputs]
    assert set(drawn) <= expected.keys()
    counts = torch.tensor([drawn.count(tokens) for tokens in expected])
    assert excess(counts, torch.tensor(list(expected.values()))) < 0


def test_greedy_requests_are_accepted_exactly():
    class Repeat:
        def propose(self, sequences, max_depth):
            return [DraftTree.chain([1, 2, 3][:depth]) for depth in max_depth]

        def forget(self, sequence):
            pass

    model, config = compiled("qwen3", torch.float32), EngineConfig(num_blocks=100, block_size=16)
    params = SamplingParams(temperature=0, max_tokens=20, logprobs=1)
    expected = model.engine(config).generate([4, 5], params, progress=False)
    speculation = SpeculationConfig(drafter=Repeat(), acceptance="rejection", switch="always")
    actual = model.engine(config, speculation=speculation).generate([4, 5], params, progress=False)
    assert actual[0].outputs == expected[0].outputs


def test_unknown_acceptance_mode_is_rejected():
    with pytest.raises(InvalidInput, match="one of exact, rejection"):
        SpeculationConfig(acceptance="typical")
    assert VOCAB_SIZE > V
