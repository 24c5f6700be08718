"""torch.compile(module, backend="detcompile") for modules that are not causal LMs."""

import pytest
import torch
from torch import nn

from detcompile import Backend, Numerics
from tests.bits import assert_bitwise_equal
from tests.torch_versions import needs_torch_2_13


class Encoder(nn.Module):
    """Linear, norm, causal attention through torch's own function, and a softmax."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.qkv, self.out = nn.Linear(48, 144, dtype=dtype), nn.Linear(48, 24, dtype=dtype)
        self.norm = nn.LayerNorm(48, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.unflatten(-1, (3, 16)).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, -1))
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2)).softmax(-1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_batch_row_ignores_the_others(dtype: torch.dtype) -> None:
    torch._dynamo.reset()
    module = Encoder(dtype).eval()
    x = torch.randn(9, 70, 48, dtype=dtype)
    with torch.no_grad():
        compiled = torch.compile(module, backend="detcompile")
        torch._dynamo.mark_dynamic(x, 0)
        full = compiled(x)
        for rows in (2, 3, 8):
            assert_bitwise_equal(compiled(x[:rows].clone()), full[:rows])
        error = (full.double() - module.double()(x.double())).abs().max()
    assert error < (1e-2 if dtype is torch.bfloat16 else 1e-5)


def test_gradients_are_refused() -> None:
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="no gradient"):
        torch.compile(nn.Linear(8, 8), backend="detcompile")(torch.randn(3, 8))


@pytest.mark.parametrize("reduce", [torch.sum, torch.mean])
def test_a_float64_reduction_is_refused(reduce) -> None:
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match=r"not pinned|no rule"):
        torch.compile(lambda x: reduce(x, -1, dtype=torch.float64), backend="detcompile")(torch.randn(4, 8))


@pytest.mark.parametrize("shape", [(5, 8, 16), (5, 2, 8, 16)])
@pytest.mark.parametrize("causal", [False, True])
def test_attention_of_any_rank_sees_its_own_sequence(shape: tuple[int, ...], causal: bool) -> None:
    def attend(x: torch.Tensor) -> torch.Tensor:
        return nn.functional.scaled_dot_product_attention(x, x, x, is_causal=causal)

    torch._dynamo.reset()
    x = torch.randn(shape)
    run = torch.compile(attend, backend=Backend(Numerics(), certify_only=True))
    whole = run(x)
    assert (whole - attend(x)).abs().max() < 1e-5
    assert_bitwise_equal(run(x[1:3].clone()), whole[1:3])


@needs_torch_2_13("guards on one row in scaled_dot_product_attention with a mask, which is refused")
def test_a_query_that_sees_no_key_gets_zeros() -> None:
    def attend(x: torch.Tensor) -> torch.Tensor:
        return nn.functional.scaled_dot_product_attention(x, x, x, attn_mask=x[..., :1] > 0)

    torch._dynamo.reset()
    x = torch.ones(3, 2, 8, 8)
    x[1, 0, 3] = -1
    with torch.no_grad():
        actual = torch.compile(attend, backend=Backend(Numerics(), certify_only=True))(x)
    assert bool((actual[1, 0, 3] == 0).all()) and bool((actual[1, 0, 2] != 0).all())


@pytest.mark.parametrize("rows", [4, 1])
def test_a_mean_over_a_batch_is_refused(rows: int) -> None:
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="depend on other rows"):
        torch.compile(lambda x: x - x.mean(0), backend="detcompile")(torch.randn(rows, 8))


def test_subnormals_are_kept_whatever_the_caller_set() -> None:
    """By generated code and by a kernel of ours; the caller flushes before it compiles, and before it calls."""
    torch._dynamo.reset()
    x = torch.randn(70, 48)
    with torch.no_grad():
        try:
            torch.set_flush_denormal(True)
            compiled = torch.compile(lambda x: (x * 2.0**-128 + 2.0**-140).sum(-1), backend="detcompile")
            torch._dynamo.mark_dynamic(x, 0)
            flushing = compiled(x)
            again = compiled(x)
        finally:
            torch.set_flush_denormal(False)
        plain = compiled(x)
    assert_bitwise_equal(flushing, plain)
    assert_bitwise_equal(again, plain)
    assert bool((plain.abs() < 2.0**-126).any()) and bool((plain != 0).all())
