"""Shared parts of the axis tests: models, draws, and the planted order swap that each axis must detect."""

import contextlib
import random
from collections.abc import Callable, Iterator
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from detcompile import CompiledModel
from detcompile.commands.axes import AXES, Configuration, Tokens, score
from detcompile.runtime.engine_setup import Forwards
from detcompile.step import StepInputs
from tests.bits import assert_bitwise_equal
from tests.model_cases import VOCAB_SIZE, compiled

__all__ = [
    "MODELS",
    "assert_axis_holds",
    "assert_axis_sees_a_swap",
    "assert_every_axis_holds",
    "configuration_for",
    "sabotaged",
]

MODELS = [
    pytest.param(name, dtype, id=f"{name}-{str(dtype).removeprefix('torch.')}")
    for name, dtype in [
        ("llama", torch.bfloat16),
        ("qwen3", torch.bfloat16),
        ("qwen3", torch.float32),
        ("gpt2", torch.float32),
        ("tiny", torch.bfloat16),
    ]
]

# One token around every block of 64 keys, chunk of 512, page, tile and leaf.
EDGES = (1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 96, 97, 127, 128, 129, 511, 512, 513, 577)


def tokens(length: int, seed: int) -> Tokens:
    rng = random.Random(seed)
    return tuple(rng.randrange(VOCAB_SIZE) for _ in range(length))


def configuration_for(axis: str, length: int, seed: int) -> Configuration:
    """Return a configuration of the axis for a target of ``length`` tokens, with neighbors of drawn lengths."""
    rng = random.Random(seed)
    prompts = [tokens(length, 1), *(tokens(rng.choice(EDGES), seed + i) for i in range(4))]
    return AXES[axis](prompts[0], prompts, rng)


def assert_axis_holds(axis: str, name: str, dtype: torch.dtype, device: str, max_examples: int = 6) -> None:
    """Fail unless every drawn configuration of the axis gives the target the logits that it has alone."""
    model = compiled(name, dtype, device)

    @settings(max_examples=max_examples)
    @given(length=st.sampled_from(EDGES), seed=st.integers(0, 10**6))
    def property_of_the_axis(length: int, seed: int) -> None:
        configuration = configuration_for(axis, length, seed)
        alone = score(model, Configuration((configuration.rows[configuration.target],)))
        assert bool(alone.isfinite().all())
        assert_bitwise_equal(score(model, configuration), alone, configuration.describe())

    property_of_the_axis()


def assert_every_axis_holds(model: CompiledModel, length: int, seed: int) -> None:
    """Fail unless one configuration of each axis gives a target of ``length`` tokens the logits that it has alone."""
    axes = [axis for axis in AXES if axis != "cuda_graphs" or model.device.type == "cuda"]
    configurations = {axis: configuration_for(axis, length, seed) for axis in axes}
    (target,) = {configuration.rows[configuration.target] for configuration in configurations.values()}
    alone = score(model, Configuration((target,)))
    assert bool(alone.isfinite().all())
    for axis, configuration in configurations.items():
        assert_bitwise_equal(score(model, configuration), alone, f"{axis}: {configuration.describe()}")


@contextlib.contextmanager
def sabotaged(model: CompiledModel, other: CompiledModel, differ: Callable[[StepInputs], bool]) -> Iterator[None]:
    """While entered, steps that ``differ`` accepts run under another tree over K: a planted order swap."""
    straight, swap = model.executor.forwards.plain, other.executor.forwards.plain

    def swapped(input_ids: Tensor, position_ids: Tensor, step: StepInputs, logits_to_keep: Tensor) -> Tensor:
        return (swap if differ(step) else straight)(input_ids, position_ids, step, logits_to_keep)

    with mock.patch.object(model.executor, "forwards", Forwards(swapped)):
        yield


def assert_axis_sees_a_swap(axis: str, device: str) -> None:
    """Fail unless the axis detects a model whose order depends on the step's token count or block size."""
    model = compiled("qwen3", torch.float32, device)
    other = compiled("qwen3", torch.float32, device, (1, 2))
    target = tokens(65, 1)

    def differ(step: StepInputs) -> bool:
        return step.slot_mappings[0].shape[0] != len(target) or step.k_caches[0].shape[1] != 64

    with sabotaged(model, other, differ):
        alone = score(model, Configuration((target,)))
        for seed in range(20):
            configuration = configuration_for(axis, len(target), seed)
            if not torch.equal(score(model, configuration), alone):
                return
    raise AssertionError(f"the {axis} axis did not notice that the order followed the batch")
