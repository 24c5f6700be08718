"""Soft caps, sinks, ALiBi and biases on their way from a model to the template: what is understood, what is refused."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from detcompile import Backend, Numerics, UncertifiedOp, UnsupportedModel
from detcompile.passes.lowering import lower
from detcompile.passes.modules.attention import STEP_KWARG, check_call
from detcompile.passes.proof.context import Role
from detcompile.passes.tracing import cause
from tests.model_cases import random_model


class Layer(nn.Module):
    layer_idx = 3


def call(mask: Tensor | None = None, *, key_heads: int = 2, **kwargs: object) -> None:
    """Call check_call for four query heads."""
    query, key = torch.zeros(1, 4, 5, 16), torch.zeros(1, key_heads, 5, 16)
    check_call(Layer(), query, key, key, mask, {STEP_KWARG: object()} | kwargs, both_ways=False)


def test_known_arguments_are_understood() -> None:
    call(attention_chunk=7, relative_bias=torch.zeros(1, 4, 5, 9))
    call(scaling=0.3, sliding_window=7, softcap=30.0, s_aux=torch.zeros(4), alibi_slopes=torch.ones(4), dropout=0.0)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"s_aux": torch.zeros(2)}, r"layer 3\) passes s_aux \(2,\), .* 4 query heads"),
        ({"s_aux": torch.zeros(1, 4, 1, 1)}, "which is not one value for each"),
        ({"alibi_slopes": torch.zeros(1)}, "which is not one value for each"),
        ({"sliding_window": 7, "attention_chunk": 9}, "only one of them is known"),
        ({"relative_bias": torch.zeros(1, 4, 1, 9)}, "which is not one row of biases for each of its queries"),
        ({"indices": torch.zeros(3)}, "passes indices=Tensor, which the attention template does not know"),
        ({"mask": torch.zeros(1, 1, 5, 5)}, "passes an attention mask of its own"),
        ({"mask": torch.ones(1, 1, 5, 5, dtype=torch.bool)}, "passes an attention mask of its own"),
        ({"is_causal": False}, "is not causal"),
        ({"dropout": 0.1}, "asks for dropout 0.1"),
        ({STEP_KWARG: None}, "drops the model's keyword arguments"),
        ({"key_heads": 3}, "4 query heads over 3 key heads"),
    ],
)
def test_other_arguments_are_refused(kwargs: dict, message: str) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        call(**kwargs)


class Attends(nn.Module):
    """Dense attention over [B, T, 4 * 16], with sinks or slopes that ``make`` takes from x or from a parameter."""

    def __init__(self, place: int, of_rows: bool) -> None:
        super().__init__()
        self.place, self.of_rows = place, of_rows
        self.values = nn.Parameter(torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        q = x.unflatten(-1, (4, 16)).transpose(1, 2)
        extra: list[Tensor | None] = [None, None]
        extra[self.place] = x[0, 0, :4] * self.values if self.of_rows else self.values * 2
        return torch.ops.detcompile.dense_attention(q, q, q, 0.25, 0, 512, 5.0, *extra)


def certify(module: nn.Module) -> None:
    def role(name: str, value: object) -> Role:
        return Role("rows", {0: "batch", 1: "tokens"}) if name == "L_x_" else Role("weight")

    x = torch.randn(3, 5, 64)
    torch._dynamo.mark_dynamic(x, [0, 1])
    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(module, backend=Backend(Numerics(), role, certify_only=True), fullgraph=True)(x)


@pytest.mark.parametrize("place", [0, 1], ids=["sinks", "slopes"])
def test_sinks_and_slopes_are_weights(place: int) -> None:
    certify(Attends(place, of_rows=False))
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed) as refused:
        certify(Attends(place, of_rows=True))
    assert isinstance(cause(refused.value), UncertifiedOp)


class Biased(nn.Module):
    """Dense attention over [B, T, 4 * 16] with the biases that ``make`` takes from the queries [B, 4, T, 16]."""

    def __init__(self, make: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.make = make

    def forward(self, x: Tensor) -> Tensor:
        q = x.unflatten(-1, (4, 16)).transpose(1, 2)
        rest = (0.25, 0, 512, 0.0, None, None, 0, self.make(q))
        return torch.ops.detcompile.dense_attention(q, q, q, *rest)


def test_biases_are_of_their_own_query() -> None:
    certify(Biased(lambda q: q * 2))
    for others in (
        lambda q: q.flip(2),
        lambda q: q.flip(0),
        lambda q: q[..., :1].transpose(2, 3).expand(-1, -1, q.shape[2], -1),
    ):
        with pytest.raises(torch._dynamo.exc.BackendCompilerFailed) as refused:
            certify(Biased(others))
        assert isinstance(cause(refused.value), UncertifiedOp)


def test_an_adapter_caches_shared_heads_once() -> None:
    """Hugging Face copies falcon's key heads to its query heads; the cache holds them as they are."""
    assert lower(random_model("falcon", torch.float32), Numerics(), 512).facts.kv_shapes == ((2, 20, 20), (2, 20, 20))
