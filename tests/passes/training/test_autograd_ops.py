"""Gradients of every trainable operation against finite differences in float64."""

import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from detcompile.passes.training import autograd_ops
from detcompile.templates.attention.scores import AttentionRule
from detcompile.templates.rows.norms import reference_layer_norm, reference_rms_norm
from detcompile.templates.training.attention import reference_packed_attention
from tests.templates.training.cases import cu_seqlens_of

T, K, N, V = 5, 4, 3, 7
LEAVES = torch.tensor([0, 3, 5], dtype=torch.int32)
CU_SEQLENS = cu_seqlens_of([3, 2])


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def zeros(*shape: int) -> Tensor:
    """A handle."""
    return torch.zeros(shape, dtype=torch.float64)


def gradients_of(function: Callable[..., Tensor], g: Tensor, *leaves: Tensor) -> tuple[Tensor, ...]:
    with torch.enable_grad():
        item = [leaf.detach().requires_grad_() for leaf in leaves]
        return torch.autograd.grad(function(*item), item, g)


def matmul(x: Tensor, w: Tensor, bias: Any, residual: Any, radices: Any, dtype: Any = None) -> Tensor:
    return x @ w.t() + (0 if bias is None else bias) + (0 if residual is None else residual)


def rms_norm_backward(g: Tensor, x: Tensor, weight: Any, eps: float, early: bool) -> tuple[Tensor, Tensor]:
    (dx,) = gradients_of(lambda x: reference_rms_norm(x, weight, eps), g, x)
    return dx, g * reference_rms_norm(x, None, eps)


def layer_norm_backward(g: Tensor, x: Tensor, weight: Any, eps: float) -> tuple[Tensor, Tensor]:
    (dx,) = gradients_of(lambda x: reference_layer_norm(x, weight, None, eps), g, x)
    return dx, g * reference_layer_norm(x, None, None, eps)


def packed_attention_backward(g: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Any, lse: Any, cu: Tensor, *rule: Any):
    given = AttentionRule(*rule)
    if given.sinks is None:
        return *gradients_of(lambda *rows: reference_packed_attention(*rows, cu, given), g, q, k, v), zeros(0, 4)

    def attend(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
        rows = [reference_packed_attention(q, k, v, cu, given._replace(sinks=item)) for item in sinks]
        return torch.stack([row[token] for token, row in enumerate(rows)])

    return gradients_of(attend, g, q, k, v, given.sinks.expand(T, -1))  # a sink for each token: its gradients are rows


FLOAT64 = types.SimpleNamespace(
    matmul=matmul,
    token_matmul=lambda g, x, leaves, rows_a_token, grid: g.t() @ x,
    token_sum=lambda rows, grid: rows.sum(0),
    token_scatter=lambda g, ids, count, grid: g.new_zeros(count, g.shape[1]).index_add_(0, ids, g),
    rms_norm_backward=rms_norm_backward,
    layer_norm_backward=layer_norm_backward,
    packed_attention_backward=packed_attention_backward,
)
# The forward of each twin in float64: its template's, of weights that the handles are added to.
FORWARDS: dict[str, Callable[..., Any]] = {
    "matmul": lambda x, w, bias, residual, radices, dtype, leaves, rows, grid, w_port, bias_handle: matmul(
        x, w + w_port, None if bias is None else bias + bias_handle, residual, radices
    ),
    "rms_norm": lambda x, weight, eps, early, grid, handle: reference_rms_norm(x, weight + handle, eps),
    "layer_norm": lambda x, weight, bias, eps, grid, handle, bias_handle: reference_layer_norm(
        x, weight + handle, bias + bias_handle, eps
    ),
    "embedding": lambda weight, ids, padding_id, grid, handle: (weight + handle)[ids],
    "packed_attention": lambda q, k, v, cu, *given: (
        reference_packed_attention(q, k, v, cu, rule_of(given[:-2], given[-1])),
        zeros(*q.shape[:2]),
    ),
    "row_sum": lambda x, dtype=None: x.sum(-1),
    "silu": torch.nn.functional.silu,
    "silu_mul": lambda gate, up: torch.nn.functional.silu(gate) * up,
}
RULES = {
    "a window, a cap and sinks": AttentionRule(0.7, 2, 64, 3.0, drawn(4, seed=9), None, 0, None),
    "chunks and slopes": AttentionRule(0.7, 0, 64, 0.0, None, drawn(4, seed=9).abs(), 2, None),
}
QKV = drawn(T, 4, K), drawn(T, 2, K, seed=1), drawn(T, 2, N, seed=2)
X, W, BIAS = drawn(T, K), drawn(N, K, seed=1), drawn(N, seed=2)
CASES: dict[str, tuple[Any, ...]] = {
    "matmul": (X, W, None, None, [], None, LEAVES, 1, -44, zeros(N, K), None),
    "matmul with bias and residual": (X, W, BIAS, drawn(T, N, seed=3), [], None, LEAVES, 1, -44, zeros(N, K), zeros(N)),
    "rms_norm": (drawn(2, T, K), drawn(K, seed=1), 1e-3, False, -44, zeros(K)),
    "layer_norm": (drawn(2, T, K), drawn(K, seed=1), drawn(K, seed=2), 1e-3, -44, zeros(K), zeros(K)),
    "embedding": (drawn(V, K), torch.tensor([[1, 0, 6, 1, 2]]), -1, -44, zeros(V, K)),
    "packed_attention with a window, a cap and sinks": (
        *QKV, CU_SEQLENS, *RULES["a window, a cap and sinks"], -44, zeros(4)),
    "packed_attention with chunks and slopes": (*QKV, CU_SEQLENS, *RULES["chunks and slopes"], -44, None),
    "row_sum": (drawn(2, T, K), None),
    "silu": (drawn(T, K) * 3,),
    "silu_mul": (drawn(T, K) * 3, drawn(T, K, seed=1)),
}  # fmt: skip
OF_WEIGHTS = {"matmul": (1, 2), "rms_norm": (1,), "layer_norm": (1, 2), "embedding": (0,)}  # which go through handles


def rule_of(given: tuple[Any, ...], handle: Tensor | None) -> AttentionRule:
    rule = AttentionRule(*given)
    return rule if handle is None else rule._replace(sinks=rule.sinks + handle)


@pytest.fixture
def in_float64(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Twins run, in float64."""
    monkeypatch.setattr(autograd_ops, "ours", FLOAT64)
    with torch.library._scoped_library("detcompile_autograd", "IMPL") as library:
        for name, forward in FORWARDS.items():
            library.impl(name, forward, "CPU")
        yield


def checked(case: str) -> bool:
    """Whether finite differences give the gradients of a twin's rows and handles."""
    name = case.split()[0]
    given, weights = CASES[case], OF_WEIGHTS.get(name, ())
    attends = name == "packed_attention"
    rows = [place for place, value in enumerate(given) if isinstance(value, Tensor) and value.is_floating_point()]
    of_rule = range(4, 4 + len(AttentionRule._fields)) if attends else ()
    places = [place for place in rows if place not in (*weights, *of_rule)]

    def call(*leaves: Tensor) -> Tensor:
        arguments = list(given)
        for place, leaf in zip(places, leaves, strict=True):
            arguments[place] = leaf
        actual = getattr(autograd_ops.autograd_ops, name)(*arguments)
        return actual[0] if attends else actual

    leaves = [given[place].clone().requires_grad_() for place in places]
    return torch.autograd.gradcheck(call, leaves, atol=1e-6, check_undefined_grad=False)


@pytest.mark.parametrize("case", CASES)
def test_gradients_are_finite_differences(case: str, in_float64: None):
    assert checked(case)


def test_every_twin_has_a_case():
    names = {str(twin).split(".")[1] for twin in autograd_ops.AUTOGRAD_OPS} | {"silu"}
    assert names == {case.split()[0] for case in CASES} == FORWARDS.keys()


@pytest.mark.parametrize(
    ("template", "cases"),
    [
        ("token_matmul", ["matmul", "matmul with bias and residual"]),
        ("token_sum", ["matmul with bias and residual", "rms_norm", "packed_attention with a window, a cap and sinks"]),
        ("token_scatter", ["embedding"]),
        ("matmul", ["matmul"]),
    ],
)
def test_a_wrong_gradient_is_seen(template: str, cases: list[str], in_float64: None, monkeypatch: pytest.MonkeyPatch):
    right = getattr(FLOAT64, template)
    monkeypatch.setattr(FLOAT64, template, lambda *given: right(*given) * 1.1)
    for case in cases:
        with pytest.raises(RuntimeError, match="Jacobian mismatch"):
            checked(case)


@pytest.mark.parametrize("padding", [0, 1])
def test_the_row_of_padding_gets_no_gradient(in_float64: None, padding: int):
    weight, ids, *_ = CASES["embedding"]
    handle = zeros(V, K).requires_grad_()
    g = drawn(1, T, K)
    (actual,) = torch.autograd.grad(autograd_ops.autograd_ops.embedding(weight, ids, padding, -44, handle), handle, g)
    leaf = weight.clone().requires_grad_()
    (torchs,) = torch.autograd.grad(torch.nn.functional.embedding(ids, leaf, padding_idx=padding), leaf, g)
    assert torch.equal(actual, torchs) and not actual[padding].any() and bool((ids == padding).any())


@pytest.mark.parametrize("case", ["rms_norm", "layer_norm", "packed_attention with chunks and slopes"])
def test_a_template_gets_contiguous_gradients(case: str, in_float64: None, monkeypatch: pytest.MonkeyPatch):
    """Inductor then writes contiguous gradients; a GPU's template would copy others."""
    seen: list[bool] = []
    name = case.split()[0]
    template = getattr(FLOAT64, f"{name}_backward")

    def recorded(g: Tensor, *rest: Any) -> Any:
        seen.append(g.is_contiguous())
        return template(g, *rest)

    monkeypatch.setattr(FLOAT64, f"{name}_backward", recorded)
    rows, *given = CASES[case]
    leaf = rows.clone().requires_grad_()
    actual = getattr(autograd_ops.autograd_ops, name)(leaf, *given)
    out = actual[0] if isinstance(actual, tuple) else actual
    out.backward(drawn(*reversed(out.shape)).permute(*reversed(range(out.dim()))))
    assert seen == [True]
