"""Agreement: check that a trainer's log-probabilities equal, byte for byte, those of a compiled model's engine."""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from detcompile.errors import InvalidInput, TrainerMismatch
from detcompile.models.compiled import CompiledModel
from detcompile.orders.numerics import Numerics
from detcompile.runtime.engine_config import EngineConfig
from detcompile.runtime.requests.plain_values import shown
from detcompile.runtime.requests.sampling_params import SamplingParams
from detcompile.weights import weight_digests

MOST_TOKENS = 2048  # per sequence
SHORT = (2, 17, 65)


def require_same_orders(numerics: Numerics, max_context: int, model: CompiledModel) -> None:
    """Raise InvalidInput for a model that was compiled with other numerics or another context."""
    if not isinstance(getattr(model, "numerics", None), Numerics):
        raise InvalidInput(f"a trainer is checked against the result of compile(), not against {shown(model)}")
    if model.numerics != numerics:
        raise InvalidInput(
            f"the trainer has {numerics}, the engine's model {model.numerics}: pass numerics=model.numerics to"
            " trainer()"
        )
    if model.max_context != max_context:
        raise InvalidInput(
            f"the trainer has max_context={max_context}, the engine's model {model.max_context}: pass"
            " max_context=model.max_context to trainer(), because rotary tables may depend on it"
        )


def require_agreement(
    logprobs: Callable[[Tensor], Tensor],
    weights: Mapping[str, Tensor],
    vocab_size: int,
    model: CompiledModel,
    seed: int,
) -> None:
    """Compare the log-probabilities of sequences of random tokens.

    Args:
        logprobs: the trainer's function [1, C] ids -> [1, C - 1] float32.
        weights: the trainer's weights, as an engine takes them.

    Raises:
        TrainerMismatch: names the first token whose log-probability differs.
    """
    drawn = random.Random(seed)
    longest = min(MOST_TOKENS, model.max_context - 1)
    lengths = [*(length for length in SHORT if length < longest), drawn.randint(2, longest), longest]
    prompts = [[drawn.randrange(vocab_size) for _ in range(length)] for length in lengths]
    for prompt, served in zip(prompts, _served(model, prompts)):
        trained = logprobs(torch.tensor([prompt], dtype=torch.int64, device="cpu"))[0].cpu()
        expected = torch.tensor(served, dtype=torch.float32, device="cpu")
        different = (trained.view(torch.int32) != expected.view(torch.int32)).nonzero()
        if len(different):
            raise _mismatch(int(different[0]), prompt, trained, served, _differing(weights, model))


def _served(model: CompiledModel, prompts: Sequence[Sequence[int]]) -> Iterator[list[float]]:
    """Yield the log-probabilities of each prompt's tokens after the first, from a new engine."""
    engine = model.engine(EngineConfig(num_blocks=2 + sum(len(prompt) // 16 + 2 for prompt in prompts)))
    params = SamplingParams(max_tokens=1, prompt_logprobs=0, temperature=0, ignore_eos=True)
    for output in engine.generate([list(prompt) for prompt in prompts], params, progress=False):
        if output.error is not None:
            raise output.error
        assert output.prompt_logprobs is not None
        yield [entry.logprob for entry in output.prompt_logprobs[1:] if entry is not None]


def _differing(weights: Mapping[str, Tensor], model: CompiledModel) -> tuple[str, ...]:
    served = model.weight_digests()
    trained = weight_digests({name: tensor for name, tensor in weights.items() if name in served})
    return tuple(name for name, digest in trained.items() if served[name] != digest)


def _mismatch(
    place: int, prompt: Sequence[int], trained: Tensor, served: Sequence[float], weights: tuple[str, ...]
) -> TrainerMismatch:
    where = f"token {place + 1} of a sequence of {len(prompt)}, id {prompt[place + 1]}"
    values = f"has log-probability {float(trained[place])!r} in the trainer and {served[place]!r} in the engine"
    why = (
        f"{len(weights)} weights differ, {weights[0]} first: call model.update_weights(trainer)"
        if weights
        else "the weights are equal: compile both on one machine, with the same numerics and versions"
    )
    return TrainerMismatch(f"{where}, {values}; {why}", weights)
