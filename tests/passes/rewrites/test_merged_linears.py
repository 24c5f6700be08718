"""Linears with one input share a GEMM, with the same bytes and the same memory."""

from collections.abc import Callable
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import detcompile
from detcompile import Backend, CompiledModel, Numerics
from detcompile.passes import tracing
from detcompile.passes.proof.context import Role
from tests.bits import assert_bitwise_equal
from tests.conftest import NEEDS_CUDA
from tests.exhaustive import EXHAUSTIVE, exhaustive_unless
from tests.model_cases import certified, random_model

BF16 = torch.bfloat16
PRODUCTS = ("detcompile.matmul.default", "detcompile.gated_matmul.default")  # the second on GPUs


def apart(*args: object, **kwargs: object) -> Backend:
    """The backend of compile() without shared products."""
    return Backend(*args, **{**kwargs, "join_weights": False})


def storages(module: nn.Module) -> dict[int, int]:
    """Bytes of each storage that holds a parameter, by its address."""
    kept = [parameter.untyped_storage() for parameter in module.parameters()]
    return {storage.data_ptr(): storage.nbytes() for storage in kept}


def products(certificate: detcompile.Certificate) -> int:
    return sum(entry.op in PRODUCTS for entry in certificate.entries)


FOUR = ["llama", "qwen3", "gemma3_text", "granite"]


@pytest.mark.parametrize("name", exhaustive_unless(lambda name: name == "gemma3_text", FOUR))
def test_a_layer_has_four_products(name: str) -> None:
    """qkv, o, gate_up and down; and the head."""
    assert products(certified(random_model(name, BF16, num_hidden_layers=1)).certificate) == 4 + 1


def test_a_layer_of_exact_arithmetic_has_four_products_if_weights_have_one_digit() -> None:
    for arithmetic, count in (("exact8x16", 4 + 1), ("exact16", 7 + 1)):
        model = random_model("qwen3", torch.float32, num_hidden_layers=1)
        certificate = certified(model, numerics=Numerics(arithmetic=arithmetic)).certificate
        assert sum(entry.op == "detcompile.exact_linear.default" for entry in certificate.entries) == count


def with_biases(dtype: torch.dtype) -> nn.Module:
    """A Llama whose linears all have biases that are not zero."""
    model = random_model("llama", dtype, num_hidden_layers=1, attention_bias=True, mlp_bias=True)
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return model


def compiled_qwen3() -> CompiledModel:
    return detcompile.compile(random_model("qwen3", torch.float32, num_hidden_layers=1))


@pytest.fixture(scope="module")
def qwen3() -> CompiledModel:
    """With Inductor, shared by the tests: none of them changes a bit of it."""
    return compiled_qwen3()


def test_shared_products_have_the_bytes_of_separate_ones(qwen3: CompiledModel) -> None:
    with mock.patch.object(tracing, "Backend", apart):
        separate = compiled_qwen3()
    assert_same_bytes(qwen3, separate)


@EXHAUSTIVE
def test_shared_products_with_biases_have_the_bytes_of_separate_ones() -> None:
    with mock.patch.object(tracing, "Backend", apart):
        separate = certified(with_biases(BF16))
    assert_same_bytes(certified(with_biases(BF16)), separate)


def assert_same_bytes(shared: CompiledModel, separate: CompiledModel) -> None:
    assert products(separate.certificate) == 7 + 1 and products(shared.certificate) == 4 + 1
    tokens = torch.randint(0, 160, (3, 90), generator=torch.Generator().manual_seed(1)).to(shared.device)
    assert_bitwise_equal(shared(tokens).logits, separate(tokens).logits)


@pytest.mark.gpu
@NEEDS_CUDA
def test_shared_products_on_a_gpu_have_the_bytes_of_separate_ones() -> None:
    def compiled() -> CompiledModel:
        return detcompile.compile(random_model("qwen3", BF16, "cuda", num_hidden_layers=1))

    with mock.patch.object(tracing, "Backend", apart):
        separate = compiled()
    assert_same_bytes(compiled(), separate)


def test_memory_is_not_held_twice_and_parameters_keep_their_values() -> None:
    model, untouched = (random_model("qwen3", BF16, num_hidden_layers=1) for _ in range(2))
    before = sum(storages(model).values())
    certified(model)
    assert sum(storages(model).values()) == before
    attention = model.model.layers[0].self_attn
    assert len({p.weight.untyped_storage().data_ptr() for p in (attention.q_proj, attention.k_proj)}) == 1
    for (name, given), kept in zip(model.named_parameters(), untouched.parameters(), strict=True):
        assert_bitwise_equal(given, kept, name)


def test_the_model_keeps_its_eager_meaning() -> None:
    model, untouched = (random_model("llama", torch.float32, num_hidden_layers=1) for _ in range(2))
    compiled = certified(model)
    tokens = torch.arange(2, 60)[None]
    expected = untouched(tokens).logits
    assert torch.allclose(compiled(tokens).logits, expected, atol=1e-3)


class Projections(nn.Module):
    """Four linears of one input: two plain, one whose weight is read again, one with a bias."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.a, self.b, self.tied = (nn.Linear(48, width, bias=False, dtype=dtype) for width in (7, 20, 48))
        self.biased = nn.Linear(48, 5, dtype=dtype)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        b = self.b(x.view(-1, 48)).view(*x.shape[:2], 20)
        return self.a(x), b, self.tied(x), self.biased(x), x + self.tied.weight[0]


@pytest.mark.parametrize("dtype", [torch.float32, BF16], ids=["float32", "bfloat16"])
def test_what_is_read_elsewhere_or_has_another_epilogue_stays_apart(dtype: torch.dtype) -> None:
    outputs, counts = [], []
    for join in (False, True):
        torch._dynamo.reset()
        backend, module = Backend(Numerics(), join_weights=join), Projections(dtype)
        x = torch.randn(2, 9, 48, generator=torch.Generator().manual_seed(3)).to(dtype)
        torch._dynamo.mark_dynamic(x, [0, 1])
        with torch.no_grad():
            outputs.append(torch.compile(module, backend=backend, fullgraph=True)(x))
        counts.append(products(backend.certificates[0]))
    for separate, shared in zip(*outputs, strict=True):
        assert_bitwise_equal(shared, separate)
    assert counts == [4, 3]


def test_a_weight_changed_in_place_is_seen(qwen3: CompiledModel) -> None:
    tokens = torch.arange(2, 40)[None]
    weight = qwen3.model.get_submodule("model.layers.0.self_attn.k_proj").weight
    before, kept = qwen3(tokens).logits, weight.detach().clone()
    with torch.no_grad():
        weight[:5] = 0.0
        changed = qwen3(tokens).logits
        weight.copy_(kept)
    assert not torch.equal(changed, before)
    assert_bitwise_equal(qwen3(tokens).logits, before)


def test_inputs_that_are_no_weights_stay_inputs() -> None:
    """A model may concatenate what it is called with: only weights are the same at the next call."""

    def stacked(x: Tensor, y: Tensor) -> Tensor:
        return torch.cat([x, y])

    def role(name: str, value: Tensor) -> Role:
        return Role("rows", {1: "tokens"})

    run = torch.compile(stacked, backend=Backend(Numerics(), role, join_weights=True), fullgraph=True)
    x, y = torch.randn(3, 5), torch.randn(4, 5)
    for scale in (1.0, 2.0):
        assert_bitwise_equal(run(x * scale, y * scale), torch.cat([x, y]) * scale)


def test_weight_with_two_readers_is_not_merged() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.other = (nn.Parameter(torch.ones(rows, 5)) for rows in (3, 2))

        def forward(self, x: Tensor) -> Tensor:
            return x + torch.cat([self.weight, self.other, self.weight])

    module = Twice()
    run = torch.compile(module, backend=Backend(Numerics(), join_weights=True), fullgraph=True)
    x = torch.zeros(4, 8, 5)
    with torch.no_grad():
        for _ in range(2):
            assert_bitwise_equal(run(x), module(x))
            module.weight.mul_(2.0)


class Pair(nn.Module):
    """Two linears of one input."""

    def __init__(self, second: Tensor) -> None:
        super().__init__()
        self.first, self.second = nn.Parameter(torch.linspace(-1, 1, 80).view(5, 16)), nn.Parameter(second)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return nn.functional.linear(x, self.first), nn.functional.linear(x, self.second)


@pytest.mark.parametrize("lie", [lambda w: w.t().contiguous().t(), lambda w: w[:1].expand_as(w)], ids=["turned", "one"])
def test_non_contiguous_weights_are_not_merged(lie: Callable[[Tensor], Tensor]) -> None:
    """As views of one tensor they would have other strides than in the trace."""
    x, weight = torch.linspace(-3, 3, 48).view(3, 16), lie(torch.linspace(1, 2, 112).view(7, 16))
    actual = []
    for second in (weight, weight.contiguous()):
        backend = Backend(Numerics(), certify_only=True, join_weights=True)
        with torch.no_grad():
            actual.append(torch.compile(Pair(second), backend=backend)(x))
        assert products(backend.certificates[0]) == (2 if second is weight else 1)
    for one, other in zip(*actual, strict=True):
        assert_bitwise_equal(one, other)


class Flattened(nn.Module):
    """Two linears of one input, the rows of the first in one with its features."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (nn.Linear(16, width, bias=False) for width in (5, 7))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return (self.a(x).view(-1) * 2).view(x.shape[0], 5), self.b(x)


def test_view_over_rows_and_features_gets_contiguous_rows() -> None:
    module, x = Flattened(), torch.linspace(-3, 3, 48).view(3, 16)
    actual = []
    for join in (False, True):
        torch._dynamo.reset()
        backend = Backend(Numerics(), certify_only=True, join_weights=join)
        with torch.no_grad():
            actual.append(torch.compile(module, backend=backend, fullgraph=True)(x))
        assert products(backend.certificates[0]) == (1 if join else 2)
    for separate, shared in zip(*actual, strict=True):
        assert_bitwise_equal(shared, separate)
