"""Recurrences cut into steps: operands of every kind, and a driver that feeds an operation in packed steps."""

import random
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tests.templates.cases import normal

__all__ = ["KINDS", "Operands", "averaged", "falling", "in_steps", "operands", "random_plan", "step_of"]

KINDS = {  # decay per head, per key, or by rates of key and value; each with and without the delta rule
    f"{name}{', delta' if delta else ''}": (kind, delta)
    for kind, name in enumerate(("per head", "per key", "per value"))
    for delta in (False, True)
}


class Operands(NamedTuple):
    """Operands of dense_linear_recurrence, each [B, T, ...] except the rates."""

    q: Tensor
    k: Tensor
    v: Tensor
    decay: Tensor
    beta: Tensor | None
    rates: Tensor | None

    def rows(self, row: int, start: int, stop: int) -> tuple[Tensor | None, ...]:
        """Return the operands of some tokens of a row, without the rates."""
        return tuple(None if value is None else value[row, start:stop] for value in self[:5])


def operands(kind: str, B: int, T: int, G: int, H: int, K: int, V: int, seed: int = 0) -> Operands:
    """Draw operands. Keys are short, as after a norm, so that the delta rule does not grow the state."""
    which, delta = KINDS[kind]
    shape = [(B, T, H), (B, T, H, K), (B, T, H, V)][which]
    return Operands(
        normal((B, T, G, K), torch.float32, seed),
        normal((B, T, G, K), torch.float32, seed + 1) * K**-0.5,
        normal((B, T, H, V), torch.float32, seed + 2),
        -normal(shape, torch.float32, seed + 3).abs() / 4,
        normal((B, T, H), torch.float32, seed + 4).sigmoid() if delta else None,
        normal((H, K, V), torch.float32, seed + 5).abs() if which == 2 else None,
    )


def averaged(B: int, T: int, C: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return operands of dense_wkv: keys, values, decay and bonus."""
    k, v = (normal((B, T, C), torch.float32, seed + i) * 3 for i in range(2))
    return k, v, -normal((C,), torch.float32, seed + 2).exp(), normal((C,), torch.float32, seed + 3)


def falling(B: int, T: int, C: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return operands of dense_running_max: values, and the decay of their maximum."""
    return normal((B, T, C), torch.float32, seed) * 3, -normal((B, T, C), torch.float32, seed + 1).abs()


def random_plan(seed: int, tokens: int) -> tuple[list[list[tuple[int, int]]], list[int]]:
    """Return steps that advance three rows at random, and the slots of their states."""
    rng = random.Random(seed)
    left, plan = [tokens] * 3, []
    while any(left):
        counts = [(row, rng.randint(0, min(left[row], rng.choice([1, 4, tokens])))) for row in rng.sample(range(3), 3)]
        plan.append([(row, count) for row, count in counts if count])
        left = [left[row] - dict(counts)[row] for row in range(3)]
    return [step for step in plan if step], rng.sample(range(5), 3)


def step_of(parts: Sequence[tuple[int, int]], slots: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Return state_slots, cu_seqlens and seq_lens of a step of (tokens, tokens before) pairs."""
    ends = [0]
    for count, _ in parts:
        ends.append(ends[-1] + count)
    lengths = [count + before for count, before in parts]
    return tuple(torch.tensor(values, dtype=torch.int32) for values in (slots, ends, lengths))  # type: ignore[return-value]


def in_steps(
    run: Callable[[list[tuple[int, int, int]], tuple[Tensor, Tensor, Tensor]], Tensor],
    plan: Sequence[Sequence[tuple[int, int]]],
    slots: Sequence[int],
) -> dict[int, Tensor]:
    """Return each row's outputs, joined over its steps.

    Args:
        run: (pieces (row, start, stop) of the step, its metadata) -> the packed outputs.
        plan: (row, tokens) pairs of each step. slots: of each row.
    """
    done: dict[int, int] = {}
    pieces: dict[int, list[Tensor]] = {}
    for step in plan:
        parts = [(row, done.get(row, 0), done.get(row, 0) + count) for row, count in step]
        given = step_of([(stop - start, start) for _, start, stop in parts], [slots[row] for row, *_ in parts])
        out, at = run(parts, given), 0
        for row, start, stop in parts:
            pieces.setdefault(row, []).append(out[at : at + stop - start])
            at, done[row] = at + stop - start, stop
    return {row: torch.cat(actual) for row, actual in pieces.items()}
