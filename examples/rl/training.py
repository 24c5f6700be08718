"""Steps of reinforcement learning: draw completions, score them, take one step of REINFORCE, serve the new weights."""

import random
import statistics
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from detcompile import CompiledModel, EngineConfig, SamplingParams
from examples.rl.policies import Policy, digest
from examples.rl.task import PROMPTS, reward

__all__ = ["COMPARED_STEPS", "GROUP_SIZE", "MAX_TOKENS", "Arm", "Step", "train"]

GROUP_SIZE = 8  # completions a prompt; each one's advantage is over their mean reward
MAX_TOKENS = 16  # of a completion
COMPARED_STEPS = 20  # first steps, whose weights are compared over micro-batches, padding and ranks
LARGEST_WEIGHT = 2.0  # of a token's importance


class Arm(NamedTuple):
    """How a run trains.

    Args:
        name: legend of its curves.
        trainer: class of the policy that computes log-probabilities and gradients, "plain" or "detcompile".
        importance: weigh each token by the ratio of its probabilities under trainer and sampler, at most 2.
        micro_batches: parts of a step's batch that go through the trainer one after another, shuffled if several.
        left_padding: pad the rows of a micro-batch on the left.
        ranks: processes that share the trainer and each batch.
    """

    name: str
    trainer: str
    importance: bool = False
    micro_batches: int = 1
    left_padding: bool = False
    ranks: int = 1


class Row(NamedTuple):
    """One completion behind its prompt; log-probabilities are the sampler's, of the completion's tokens."""

    token_ids: list[int]
    logprobs: list[float]
    advantage: float


class Step(NamedTuple):
    """The measurements of one step.

    Args:
        reward: mean over the completions.
        kl: estimate of KL(sampler, trainer), the mean over tokens of e^d - 1 - d (Schulman's k3); d is the trainer's
            log-probability minus the sampler's.
        largest: the largest absolute d.
        equal: no token's log-probability differs in a bit.
        weights: digest of the trained weights after the step; None after the first COMPARED_STEPS.
        draw_s: seconds to draw the completions.
        step_s: seconds of the whole step, without the digest.
    """

    reward: float
    kl: float
    largest: float
    equal: bool
    weights: str | None
    draw_s: float
    step_s: float


def train(arm: Arm, policy: Policy, model: CompiledModel, seed: int, num_steps: int) -> Iterator[Step]:
    """Train from the initial weights; each step draws completions with the weights of the step before."""
    policy.reset()
    model.update_weights(policy.weights())
    engine = model.engine(EngineConfig(num_blocks=256))
    shuffled = random.Random(seed)
    for step in range(num_steps):
        params = SamplingParams(
            n=GROUP_SIZE, temperature=1.0, max_tokens=MAX_TOKENS, stop="\n", include_stop_str_in_output=True,
            logprobs=0, seed=num_steps * seed + step,
        )  # fmt: skip
        rewards, rows = [], []
        started = time.perf_counter()
        outputs = engine.generate(PROMPTS, params, progress=False)
        drawn_at = time.perf_counter()
        for output in outputs:
            scores = [reward(output.prompt, sample.text) for sample in output.outputs]
            rewards += scores
            for sample, score in zip(output.outputs, scores):
                drawn = [entry.logprob for entry in sample.logprobs]
                rows.append(Row(output.prompt_token_ids + sample.token_ids, drawn, score - statistics.mean(scores)))
        if arm.micro_batches > 1:  # each rank shuffles alike
            shuffled.shuffle(rows)
        differences = learn(arm, policy, rows)
        policy.step()
        model.update_weights(policy.weights())
        kl, largest = float((differences.exp() - 1 - differences).mean()), float(differences.abs().max())
        equal = not differences.count_nonzero()
        seconds = drawn_at - started, time.perf_counter() - started
        weights = digest(policy) if step < COMPARED_STEPS else None
        yield Step(statistics.mean(rewards), kl, largest, equal, weights, *seconds)


def learn(arm: Arm, policy: Policy, rows: list[Row]) -> Tensor:
    """Add the gradients of this rank's rows; return all ranks' log-probability differences, float64 [tokens]."""
    num_tokens = sum(len(row.logprobs) for row in rows)  # of the whole step, not of a micro-batch or a rank
    if dist.is_initialized():
        rows = rows[dist.get_rank() :: dist.get_world_size()]
    differences = []
    for part in (rows[start :: arm.micro_batches] for start in range(arm.micro_batches)):
        device = next(iter(policy.trained.values())).device
        input_ids, mask, drawn, advantages = (tensor.to(device) for tensor in padded(part, arm.left_padding))
        logprobs = policy.logprobs(input_ids, mask)
        sampled = ~drawn.isnan()
        difference = torch.where(sampled, logprobs.detach() - drawn, 0.0)
        importance = difference.exp().clamp(max=LARGEST_WEIGHT) if arm.importance else 1.0
        policy.loss(logprobs, advantages * importance, num_tokens).backward()
        differences.append((logprobs.detach()[sampled].double() - drawn[sampled].double()).cpu())
    if dist.is_initialized():
        of_ranks: list[list[Tensor]] = [[]] * dist.get_world_size()
        dist.all_gather_object(of_ranks, differences)
        differences = [part for parts in of_ranks for part in parts]
    return torch.cat(differences)


def padded(rows: Sequence[Row], on_the_left: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return token ids and mask [B, C], the sampler's log-probabilities (or NaN) and advantages [B, C - 1]."""
    columns = max(len(row.token_ids) for row in rows)
    input_ids, mask = (torch.zeros(len(rows), columns, dtype=torch.int64) for _ in range(2))
    drawn, advantages = torch.full((len(rows), columns - 1), torch.nan), torch.zeros(len(rows), columns - 1)
    for place, row in enumerate(rows):
        end = columns if on_the_left else len(row.token_ids)
        tokens, completion = slice(end - len(row.token_ids), end), slice(end - 1 - len(row.logprobs), end - 1)
        input_ids[place, tokens], mask[place, tokens] = torch.tensor(row.token_ids), 1
        drawn[place, completion], advantages[place, completion] = torch.tensor(row.logprobs), row.advantage
    return input_ids, mask, drawn, advantages
