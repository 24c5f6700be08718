"""Operations that Inductor compiles wrongly or not at all for an unknown number of rows are rewritten."""

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.decorators import mark_unbacked

from detcompile import Numerics
from detcompile.passes.backend import Backend
from detcompile.passes.proof.context import Role
from tests.bits import assert_bitwise_equal
from tests.model_cases import VOCAB_SIZE, certified, random_model


class Predictions(nn.Module):
    """Several predictions of each row [4, 1, T, 16], of which some are corrected and one is read (gemma3n's AltUp)."""

    def __init__(self) -> None:
        super().__init__()
        self.project, self.out = nn.Linear(16, 16, bias=False), nn.Linear(16, 16, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        torch._check(x.shape[1] > 0)
        predictions = torch.stack([x, x * 2, x * 3, x * 4])
        predictions[1:] += self.project(x)
        return self.out(predictions[2])


@pytest.mark.parametrize("tokens", [1, 7])
def test_a_slice_of_four_dimensions_is_written_and_read(tokens: int) -> None:
    module = Predictions()

    def roles(name: str, _: Tensor) -> Role:
        return Role("rows", {1: "tokens"}) if name.startswith("L_x") else Role("weight")

    backend = Backend(Numerics(), roles)
    x = torch.randn(1, tokens, 16)
    given = x.clone()
    mark_unbacked(given, 1)
    with torch.no_grad():
        actual = torch.compile(module, backend=backend, fullgraph=True)(given)
        assert torch.allclose(actual, module(x), atol=1e-6)
    (certificate,) = backend.certificates
    assert sum(entry.op == "aten.slice_scatter.default" for entry in certificate.entries) == 2


class Corner(nn.Module):
    """x [1, T, 4] in a slice of a float32 constant [1, 2, T, 16], as in the gradient of a slice."""

    def forward(self, x: Tensor) -> Tensor:
        torch._check(x.shape[1] > 0)
        part = x[:, None].expand(-1, 2, -1, -1)
        return torch.slice_scatter(torch.full((1, 2, x.shape[1], 16), -1.5), part, 3, 8, 12) * 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1, 7])
def test_a_slice_of_a_constant_is_padding(tokens: int, dtype: torch.dtype) -> None:
    """Only a part of the constant's dtype: padding has the part's."""
    backend = Backend(Numerics(), lambda name, _: Role("rows", {1: "tokens"}))
    x = torch.randn(1, tokens, 4, dtype=dtype)
    given = x.clone()
    mark_unbacked(given, 1)
    with torch.no_grad():
        assert_bitwise_equal(torch.compile(Corner(), backend=backend, fullgraph=True)(given), Corner()(x))
    (certificate,) = backend.certificates
    ops = [entry.op for entry in certificate.entries]
    pads = dtype is torch.float32
    assert ("aten.constant_pad_nd.default" in ops) is pads and ("aten.slice_scatter.default" in ops) is not pads


def test_gemma3n_keeps_its_logits() -> None:
    """The certified graph as it is: what Inductor makes of it is measured for docs/models.json."""
    changes = {
        "num_hidden_layers": 1,
        "layer_types": ["full_attention"],
        "num_kv_shared_layers": 0,
        "head_dim": 20,
        "intermediate_size": [96],
        "activation_sparsity_pattern": [0.95],
        "vocab_size_per_layer_input": VOCAB_SIZE,
        "hidden_size_per_layer_input": 16,
        "laurel_rank": 8,
        "altup_num_inputs": 2,
    }
    ids = torch.randint(4, VOCAB_SIZE, (2, 90), generator=torch.Generator().manual_seed(5))
    plain = random_model("gemma3n_text", torch.float32, **changes)
    plain.set_attn_implementation("eager")
    with torch.no_grad():
        expected = plain(ids, use_cache=False).logits
    model = certified(random_model("gemma3n_text", torch.float32, **changes), max_context=128)
    assert float((model(ids).logits - expected).norm() / expected.norm()) < 1e-5
