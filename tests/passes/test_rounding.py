"""Pointwise operations left to Inductor round an element the same way wherever it stands."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._inductor.utils import run_and_get_code
from torch.nn import functional as F

from detcompile import Backend, Numerics
from detcompile.passes import pipeline
from detcompile.passes.pipeline import GraphPass, rewrite
from detcompile.templates.cpu.shared_objects import compiler_version
from tests.bits import assert_bitwise_equal
from tests.exhaustive import exhaustive_unless

FEATURES = 37  # no multiple of a vector
POINTWISE: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu tanh": lambda x: F.gelu(x, approximate="tanh"),
    "softplus": F.softplus,
    "mish": F.mish,
    "exp, sin and cos": lambda x: torch.exp(-x.abs()) + torch.sin(x) * torch.cos(x),
    "power": lambda x: x.abs() ** 1.5,
    "log and error function": lambda x: torch.log1p(x.abs()) + torch.erf(x),
    "division": lambda x: 1.7 / (x.abs() + 0.3),
    "cast in the middle": lambda x: (x.float() * 1.1).to(x.dtype) * 1.3,
    "half rotated": lambda x: torch.cat([-x[..., 18:], x[..., :18]], -1) * torch.cos(x) + x,
    "masked": lambda x: torch.where(x > 0, x, torch.expm1(x)),
}


@pytest.mark.parametrize(
    ("name", "dtype"),
    exhaustive_unless(
        lambda case: case[1] is torch.float32 or case[0] in ("silu", "softplus", "cast in the middle"),
        [(name, dtype) for name in POINTWISE for dtype in (torch.float32, torch.bfloat16)],
    ),
)
def test_an_element_ignores_its_place(name: str, dtype: torch.dtype, device: str) -> None:
    """Traced once, at two rows: in the vector body, in the tail, and alone, a row has the same bytes."""
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: POINTWISE[name](x), backend="detcompile", fullgraph=True)
    rows = (torch.randn(70, FEATURES, generator=torch.Generator().manual_seed(3)) * 3).to(device, dtype)
    traced = rows[:2].clone()
    torch._dynamo.decorators.mark_unbacked(traced, 0)
    compiled(traced)
    full = compiled(rows)
    for count in (1, 2, 3, 7, 15, 16, 17, 33, 69):
        assert_bitwise_equal(compiled(rows[:count].clone()), full[:count], f"{count} rows")
        assert_bitwise_equal(compiled(rows[-count:].clone()), full[-count:], f"the last {count} rows")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("function", [torch.cos, torch.sin, torch.tan])
def test_angle_ignores_large_neighbors(function: Callable[[Tensor], Tensor], dtype: torch.dtype) -> None:
    """Rotary positions of several tokens lie in one vector, and each may be any number of turns."""
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: function(x), backend="detcompile", fullgraph=True)
    small = torch.rand(4096, dtype=dtype, generator=torch.Generator().manual_seed(3)) * 120
    beside = small.clone()
    beside[::16] = 50_000.0
    kept = torch.arange(4096) % 16 != 0
    assert_bitwise_equal(compiled(beside)[kept], compiled(small)[kept])


def test_a_rotary_table_is_computed_once() -> None:
    """However many heads and layers read it. Scalar functions are slow: a prompt took a third longer."""

    def rotated(angles: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        first = x * cos + x.flip(-1) * sin
        return first, first.flip(-1) * cos - first * sin

    torch._dynamo.reset()
    compiled = torch.compile(rotated, backend="detcompile", fullgraph=True)
    _, codes = run_and_get_code(compiled, torch.randn(8, 32), torch.randn(8, 4, 32))
    code = "".join(codes)
    assert code.count("std::cos(lane0)") == code.count("std::sin(lane0)") == 1
    assert f"// {compiler_version()}\n" in code


def test_code_of_another_compiler_is_not_taken_from_inductors_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its key is the code, which names the compiler, and the command that runs it, which stays the same."""
    before = GraphPass(rewrite, "key").uuid()
    assert GraphPass(rewrite, "key").uuid() == before
    monkeypatch.setattr(pipeline, "compiler_if_any", lambda: "g++ 99")
    assert GraphPass(rewrite, "key").uuid() != before


def test_a_cast_is_kept_whatever_is_fused() -> None:
    """Four bf16 operations round four times, though one kernel holds them all."""
    torch._dynamo.reset()
    x = torch.randn(64, FEATURES, dtype=torch.bfloat16) * 3

    def chain(x: Tensor) -> Tensor:
        return (x * 1.1 + 0.3) * x - 0.7

    def rounded(value: Tensor) -> Tensor:
        return value.bfloat16().float()

    wide = x.float()
    expected = rounded(rounded(rounded(wide * torch.tensor(1.1)) + torch.tensor(0.3)) * wide) - torch.tensor(0.7)
    assert_bitwise_equal(torch.compile(chain, backend="detcompile")(x), expected.bfloat16())


def test_a_mean_is_rounded_once() -> None:
    """Terms are multiples of a power of two, whose float32 sum no order changes."""
    torch._dynamo.reset()
    rows = torch.randint(-255, 256, (300, FEATURES), generator=torch.Generator().manual_seed(3)) / 64
    run = torch.compile(lambda x: x.mean(-1), backend=Backend(Numerics(), certify_only=True))
    assert_bitwise_equal(run(rows.bfloat16()), (rows.sum(-1) / FEATURES).bfloat16())
