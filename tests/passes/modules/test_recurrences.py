"""Layers with a state: what the certificate requires of them, and views that Inductor once compiled wrongly."""

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.decorators import mark_unbacked

from detcompile import Numerics, UncertifiedOp
from detcompile.passes.backend import Backend, Expected
from detcompile.passes.proof.context import Role
from detcompile.passes.proof.provenance import Layout
from detcompile.passes.tracing import cause
from tests.templates.recurrences.cases import step_of

ops = torch.ops.detcompile
PARTS = ("state", "other_state", "state_slots", "cu_seqlens", "seq_lens")
LAYOUTS = {"state": Layout("states", 0, 0), "other_state": Layout("states", 1, 1)}


def role(name: str, value: Tensor) -> Role:
    part = next((part for part in sorted(PARTS, key=len, reverse=True) if name.startswith(f"L_{part}")), None)
    if part is not None:
        return Role("layout", layout=LAYOUTS.get(part, Layout(part)))
    return Role("rows", {0: "tokens"}) if name.startswith("L_x") else Role("weight")


def certified(function, **changes: Tensor) -> Backend:
    """``function`` of a step of five tokens of 8 features, compiled and certified."""
    slots, ends, lengths = step_of([(3, 0), (2, 4)], [1, 0])
    given = {"x": torch.randn(5, 8), "weight": torch.randn(8, 3), "state": torch.zeros(2, 2, 8)}
    given |= {"other_state": torch.zeros(2, 2, 8), "state_slots": slots, "cu_seqlens": ends, "seq_lens": lengths}
    mark_unbacked(given["x"], 0)
    backend = Backend(Numerics(), role, expects=Expected(0, recurrences=1), certify_only=True)
    with torch.no_grad():
        torch.compile(function, backend=backend, fullgraph=True)(**(given | changes))
    return backend


def convolved(x, weight, state, other_state, state_slots, cu_seqlens, seq_lens):
    return ops.causal_conv(x, weight, None, state, state_slots, cu_seqlens, seq_lens)


def test_a_recurrence_is_certified_with_its_order() -> None:
    (certificate,) = certified(convolved).certificates
    (entry,) = [entry for entry in certificate.entries if entry.kind == "recurrence"]
    assert (entry.op, entry.order) == ("detcompile.causal_conv.default", "Sequential(3)")
    assert "its own prefix" in entry.proof


def averaged(x, weight, state, other_state, state_slots, cu_seqlens, seq_lens):
    return ops.wkv(x, x, weight[:, 0], weight[:, 1], state, state_slots, cu_seqlens, seq_lens)


def greatest(x, weight, state, other_state, state_slots, cu_seqlens, seq_lens):
    return ops.running_max(x, -x.abs(), state, state_slots, cu_seqlens, seq_lens)


def averaged_by_rows(x, weight, state, other_state, state_slots, cu_seqlens, seq_lens):
    return ops.wkv(x, x, weight[:, 0], x[0], state, state_slots, cu_seqlens, seq_lens)


def greatest_of_other_rows(x, weight, state, other_state, state_slots, cu_seqlens, seq_lens):
    return ops.running_max(x, x.flip(0), state, state_slots, cu_seqlens, seq_lens)


def averaged_out_of_order(x, weight, state, other_state, state_slots, cu_seqlens, seq_lens):
    return ops.wkv(x.flip(0), x, weight[:, 0], weight[:, 1], state, state_slots, cu_seqlens, seq_lens)


@pytest.mark.parametrize(("function", "op", "kept"), [(averaged, "wkv", 3), (greatest, "running_max", 1)])
def test_averages_and_maxima_are_certified_without_an_order(function, op: str, kept: int) -> None:
    (certificate,) = certified(function, state=torch.zeros(2, kept, 8)).certificates
    (entry,) = [entry for entry in certificate.entries if entry.kind == "recurrence"]
    assert (entry.op, entry.order) == (f"detcompile.{op}.default", "") and "its own prefix" in entry.proof


@pytest.mark.parametrize(
    ("function", "kept"), [(averaged_by_rows, 3), (averaged_out_of_order, 3), (greatest_of_other_rows, 1)]
)
def test_averages_and_maxima_of_other_rows_are_refused(function, kept: int) -> None:
    with pytest.raises(Exception) as raised:
        certified(function, state=torch.zeros(2, kept, 8))
    assert isinstance(cause(raised.value), UncertifiedOp), raised.value


def swapped_lengths(x, weight, state, other_state, state_slots, cu_seqlens, seq_lens):
    return ops.causal_conv(x, weight, None, state, seq_lens, cu_seqlens, state_slots)


def rows_as_weights(x, weight, state, other_state, state_slots, cu_seqlens, seq_lens):
    return ops.causal_conv(x, weight * x.sum(), None, state, state_slots, cu_seqlens, seq_lens)


def a_part_of_a_state(x, weight, state, other_state, state_slots, cu_seqlens, seq_lens):
    return ops.causal_conv(x, weight, None, state[:1], state_slots.clamp(max=0), cu_seqlens, seq_lens)


def a_state_of_its_own(x, weight, state, other_state, state_slots, cu_seqlens, seq_lens):
    return ops.causal_conv(x, weight, None, torch.zeros(2, 2, 8), state_slots, cu_seqlens, seq_lens)


def one_state_for_two(x, weight, state, other_state, state_slots, cu_seqlens, seq_lens):
    once = ops.causal_conv(x, weight, None, state, state_slots, cu_seqlens, seq_lens)
    return ops.causal_conv(once, weight, None, state, state_slots, cu_seqlens, seq_lens)


def shifted_rows(x, weight, state, other_state, state_slots, cu_seqlens, seq_lens):
    return ops.causal_conv(x.flip(0), weight, None, state, state_slots, cu_seqlens, seq_lens)


def none_at_all(x, weight, state, other_state, state_slots, cu_seqlens, seq_lens):
    return x * 2


def two(x, weight, state, other_state, state_slots, cu_seqlens, seq_lens):
    once = ops.causal_conv(x, weight, None, state, state_slots, cu_seqlens, seq_lens)
    return ops.causal_conv(once, weight, None, other_state, state_slots, cu_seqlens, seq_lens)


def without_a_step(x, weight, state, other_state, state_slots, cu_seqlens, seq_lens):
    conv = ops.causal_conv(x, weight, None, state, state_slots, cu_seqlens, seq_lens)
    return ops.dense_causal_conv(conv[None], weight, None)


@pytest.mark.parametrize(
    ("function", "calls"),
    [
        (swapped_lengths, "state_slots is not the step's"),
        (rows_as_weights, ""),
        (a_part_of_a_state, ""),
        (a_state_of_its_own, ""),
        (one_state_for_two, "written twice"),
        (shifted_rows, ""),
        (none_at_all, "calls recurrence 1 times, the graph holds 0"),
        (two, "calls recurrence 1 times, the graph holds 2"),
        (without_a_step, "reads the step's tokens as one sequence"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_would_mix_sequences_is_refused(function, calls: str) -> None:
    with pytest.raises(Exception) as raised:
        certified(function)
    refusal = cause(raised.value)
    assert isinstance(refusal, UncertifiedOp) and calls in str(refusal), raised.value


class Mixing(nn.Module):
    """Rows and heads in one dimension and apart again, as gated norms of heads take them."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.value, self.out = (nn.Linear(32, 32, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.shape[1]
        torch._check(tokens > 0)
        gate, value = (project(x).reshape(-1, 8) for project in (self.gate, self.value))
        return self.out((torch.nn.functional.silu(gate) * value).reshape(1, tokens, 32))


@pytest.mark.parametrize("join", [False, True])
@pytest.mark.parametrize("tokens", [1, 7])
def test_views_that_mix_rows_and_heads_keep_their_values(tokens: int, join: bool) -> None:
    module = Mixing()

    def roles(name: str, _: Tensor) -> Role:
        return Role("rows", {1: "tokens"}) if name.startswith("L_x") else Role("weight")

    backend = Backend(Numerics(), roles, join_weights=join)
    x = torch.randn(1, tokens, 32)
    given = x.clone()
    mark_unbacked(given, 1)
    with torch.no_grad():
        actual = torch.compile(module, backend=backend, fullgraph=True)(given)
        assert torch.allclose(actual, module(x), atol=1e-6)
