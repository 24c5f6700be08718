"""The certificate refuses what could make a row's bits depend on its batch, and names it."""

import json
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import detcompile
from detcompile import Backend, Numerics, UncertifiedOp, UnsupportedModel
from detcompile.orders.numerics import matmul_order
from detcompile.passes.backend import Expected
from detcompile.passes.proof.context import Role
from detcompile.passes.tracing import cause
from detcompile.templates.cpu.library import isa_of
from tests.exhaustive import exhaustive_unless
from tests.model_cases import certified, compiled, random_model

BF16 = torch.bfloat16


class Planted(nn.Module):
    """A layer's MLP followed by a violation."""

    def __init__(self, mlp: nn.Module, violation: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.mlp, self.violation = mlp, violation

    def forward(self, x: Tensor) -> Tensor:
        return self.violation(self.mlp(x))


def with_violation(violation: Callable[[Tensor], Tensor]):
    """A GPT-2 of a layer whose hidden states [1, T, H] pass through ``violation``."""
    model = random_model("gpt2", BF16, n_layer=1)
    (layer,) = model.transformer.h
    layer.mlp = Planted(layer.mlp, violation)
    return model


VIOLATIONS = {
    "a mean over the batch, which packing would hide": lambda x: x - x.mean(0, keepdim=True),
    "a norm over the batch, which packing would hide": lambda x: x / (x.float().pow(2).sum(0, keepdim=True) + 1).to(x),
    "the first row of the batch": lambda x: x + x[:1],
    "a flip of the batch": lambda x: x.flip(0),
    "a roll over tokens": lambda x: x.roll(1, 1),
    "a roll over a flattened batch": lambda x: x.roll(1, 0) if x.dim() == 2 else x.flatten(0, 1).roll(1, 0).view_as(x),
    "a flip of tokens": lambda x: x.flip(1),
    "a running sum over tokens": lambda x: x.cumsum(1),
    "a global mean": lambda x: x - x.mean(),
    "a mean over tokens": lambda x: x - x.mean(1, keepdim=True),
    "a maximum over tokens": lambda x: x - x.amax(1, keepdim=True),
    "a softmax over tokens": lambda x: x.softmax(1),
    "a token that reads the one before": lambda x: torch.cat([x[:, :1], x[:, :-1]], 1),
    "the last token": lambda x: x + x[:, -1:],
    "tokens sorted": lambda x: x.sort(1).values,
    "tokens meeting tokens": lambda x: x + (x @ x.transpose(1, 2)) @ x,
    "tokens compared with tokens": lambda x: x + (x[:, :, None, 0] - x[:, None, :, 0]).amax(-1, keepdim=True),
    "a token count": lambda x: x * x.shape[1],
    "a token count through a float": lambda x: x / (x.shape[1] ** 0.5),
    "a tensor made of a token count": lambda x: x + torch.full((1,), x.shape[1], dtype=x.dtype),
    "the number of the row": lambda x: x + torch.arange(x.shape[1], dtype=x.dtype)[:, None],
    "a batch count": lambda x: x * x.shape[0],
    "random numbers": lambda x: x + torch.rand_like(x),
    "dropout": lambda x: nn.functional.dropout(x, 0.5, training=True),
}


WHOLE = ("a mean over the batch, which packing would hide", "a roll over tokens", "a batch count", "dropout")


@pytest.mark.parametrize("name", exhaustive_unless(lambda name: name in WHOLE, VIOLATIONS))
def test_a_planted_violation_is_refused_by_name(name: str) -> None:
    """By its line of the source; tests/passes/test_batches.py has all of them without a compilation."""
    with pytest.raises((UncertifiedOp, UnsupportedModel)) as refused:
        detcompile.compile(with_violation(VIOLATIONS[name]))
    if isinstance(refused.value, UncertifiedOp):
        assert all(" at " in offender and ": " in offender for offender in refused.value.offenders)
        assert refused.value.offenders[0] in str(refused.value)


HARMLESS = {
    "a flip of features": lambda x: x.flip(2),
    "a roll over features": lambda x: x.roll(3, 2),
    "values stacked": lambda x: torch.stack([x, 2 * x, x + 1], 0).amax(0),
    "a running sum over features": lambda x: x.cumsum(2),
    "a softmax over features": lambda x: x.softmax(-1),
    "heads split and joined": lambda x: x.unflatten(-1, (4, -1)).transpose(1, 2).transpose(1, 2).flatten(2),
    "a mean over features": lambda x: x - x.mean(-1, keepdim=True),
    "a variance": lambda x: x / (1 + x.float().var(-1, keepdim=True)).to(x),
    "the likeliest feature": lambda x: x + x.argmax(-1, keepdim=True).to(x),
    "a table read by feature": lambda x: x.gather(-1, x.argmax(-1, keepdim=True)) + x,
    "the largest features": lambda x: x + x.topk(2, -1).values.amax(-1, keepdim=True),
    "a constant a row": lambda x: x + torch.ones_like(x),
}


@pytest.mark.parametrize("change", HARMLESS.values(), ids=HARMLESS.keys())
def test_what_keeps_rows_apart_is_certified(change: Callable[[Tensor], Tensor]) -> None:
    role = lambda name, value: Role("rows", {0: "batch", 1: "tokens"})  # noqa: E731
    backend = Backend(Numerics(), role, certify_only=True)
    x = torch.randn(3, 5, 16, dtype=BF16)
    torch._dynamo.mark_dynamic(x, [0, 1])
    torch._dynamo.reset()
    torch.compile(change, backend=backend, fullgraph=True)(x)
    assert len(backend.certificates) == 1


def test_attention_outside_the_interface_is_refused() -> None:
    class OwnAttention(nn.Module):
        def forward(self, hidden_states: Tensor, **_: object) -> tuple[Tensor, None]:
            scores = hidden_states @ hidden_states.transpose(1, 2)
            return scores.softmax(-1) @ hidden_states, None

    model = random_model("qwen3", BF16)
    model.model.layers[1].self_attn = OwnAttention()
    with pytest.raises(UnsupportedModel, match="attention interface for layers \\[0\\]"):
        detcompile.compile(model)


def test_a_mask_the_template_does_not_have_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import masking_utils
    from transformers.models.qwen3 import modeling_qwen3

    monkeypatch.setattr(modeling_qwen3, "create_causal_mask", masking_utils.create_chunked_causal_mask)
    with pytest.raises(UnsupportedModel, match="create_chunked_causal_mask"):
        detcompile.compile(random_model("qwen3", BF16))


def test_a_model_in_training_mode_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match=r"model\.eval\(\)"):
        detcompile.compile(random_model("qwen3", BF16).train())


class OtherTree(nn.Module):
    def forward(self, x: Tensor, w: Tensor) -> Tensor:
        return torch.ops.detcompile.matmul(x, w, None, None, [4, 2])


class OtherChunk(nn.Module):
    def forward(self, x: Tensor, w: Tensor) -> Tensor:
        q = x.view(1, 1, -1, 16)
        return torch.ops.detcompile.dense_attention(q, q, q, 1.0, 0, 256).flatten(0, 2) @ w.t()


@pytest.mark.parametrize(("module", "message"), [(OtherTree(), "tree"), (OtherChunk(), "chunks of 256")])
def test_a_template_forced_to_another_order_is_refused(module: nn.Module, message: str) -> None:
    def role(name: str, value: object) -> Role:
        return Role("rows", {0: "tokens"}) if "x" in name else Role("weight")

    x = torch.randn(5, 16, dtype=BF16)
    torch._dynamo.mark_dynamic(x, 0)
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed) as refused:
        torch.compile(module, backend=Backend(Numerics(), role), fullgraph=True)(x, torch.randn(16, 16, dtype=BF16))
    assert isinstance(cause(refused.value), UncertifiedOp)
    assert message in str(refused.value)


def test_a_missing_attention_node_is_refused() -> None:
    message = "calls attention 1 times, the graph holds 0"
    with torch.no_grad(), pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match=message):
        torch.compile(nn.Linear(8, 8), backend=Backend(Numerics(), expects=Expected(attention=1)))(torch.randn(3, 8))


def test_the_certificate_prints_and_gives_json() -> None:
    certificate = compiled("qwen3", BF16).certificate
    text = str(certificate)
    assert text.splitlines()[0].split() == ["op", "layer", "place", "class", "order", "proof", "layers"]
    assert str(matmul_order(176, BF16, (2, 2, 2), isa_of(torch.device("cpu")))) in text
    assert "KV(chunk=512, block=64)" in text
    assert "modeling_qwen3.py" in text
    actual = json.loads(certificate.to_json())
    assert actual["counts"] == certificate.counts
    assert actual["counts"]["attention"] == 2
    assert len(actual["entries"]) == len(certificate.entries)
    assert all(entry["proof"] for entry in actual["entries"])
    (norm,) = (entry for entry in actual["entries"] if entry["layer"] == "model.layers.0.self_attn.q_norm")
    assert norm["holds_for"] == [0, 1]


def test_every_sum_of_a_model_is_pinned() -> None:
    certificate = certified(random_model("llama", torch.float32, num_hidden_layers=1)).certificate
    orders = certificate.orders
    assert any(entry.place.endswith(" in forward") for entry in certificate.entries)
    assert not any("forward_" in entry.place for entry in certificate.entries), "a name that only Dynamo needs"
    assert "Blocked(80, 128)" in " ".join(orders) or any(order.startswith("Blocked(80") for order in orders)
    assert any(order.startswith("Tree(176") for order in orders)
    assert any(order.startswith("Row(80") for order in orders)
