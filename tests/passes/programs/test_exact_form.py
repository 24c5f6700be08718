"""The normal form of exact programs: equal for equal steps, however written; different if any step changes."""

import inspect
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.functional import embedding

from detcompile.passes.pipeline import decompositions
from detcompile.passes.programs.exact_form import exact_program_digest
from detcompile.templates.ops import ours

Program = Callable[..., Tensor]
NAMES = ["x", "w", "scale", "norm", "ids", "table"]


def base(x: Tensor, w: Tensor, scale: Tensor, norm: Tensor, ids: Tensor, table: Tensor) -> Tensor:
    y = ours.exact_rms_norm(x, norm, 1e-6)
    y = ours.exact_linear(y.flatten(0, 1), w, scale, None, 2).view(*x.shape)
    first, second = y.chunk(2, -1)
    turned = torch.cat([-second, first], -1)
    y = y * embedding(ids, table)[:, 0] + turned * 0.5
    return (x + y).to(torch.bfloat16).float()


def reordered(x: Tensor, w: Tensor, scale: Tensor, norm: Tensor, ids: Tensor, table: Tensor) -> Tensor:
    dead = x * 3  # noqa: F841
    rows = embedding(ids, table).reshape(-1, table.shape[1])
    y = ours.exact_rms_norm(x.transpose(0, 1), norm, 1e-6).transpose(0, 1)
    y = ours.exact_linear(y.reshape(-1, x.shape[-1]), w, scale, None, 2).clone().unflatten(0, x.shape[:2])
    half = y.shape[-1] // 2
    turned = torch.cat([y[..., half:].neg(), y[..., :half].contiguous()], dim=2)
    y = 0.5 * turned + rows * y
    return torch.add(y, x).float().bfloat16().to(torch.float32)


def changed(old: str, new: str) -> Program:
    """Return the program after replacing a step in its source."""
    source = inspect.getsource(base)
    assert source.count(old) == 1
    names = dict(globals())
    exec(source.replace(old, new), names)
    return names["base"]


CHANGES = {
    "another epsilon": ("1e-6", "1e-5"),
    "other digits": ("None, 2", "None, 1"),
    "another constant": ("0.5", "0.50000001"),
    "a half negated": ("-second, first", "second, -first"),
    "halves swapped": ("[-second, first]", "[first, -second]"),
    "another operand": ("x + y)", "y + y)"),
    "a difference": ("x + y)", "x - y)"),
    "no rounding": (".to(torch.bfloat16).float()", ""),
    "another rounding": ("torch.bfloat16", "torch.float16"),
    "another association": ("+ turned * 0.5", "* (1 + turned * 0.5)"),
    "rows turned": ("(ids, table)", "(ids.flip(0), table)"),
    "another weight": ("y.flatten(0, 1), w, scale", "y.flatten(0, 1), w.flip(1), scale"),
    "a function": ("x + y)", "x + ours.exact_function(y, 'silu'))"),
    "another norm": ("x, norm", "x, norm * 1.5"),
}


def digest_of(program: Program, seed: int = 0, names: list[str] = NAMES) -> str:
    inputs = (torch.randn(3, 3, 8), torch.ones(2, 8, 8, dtype=torch.int8), torch.ones(8), torch.ones(8))
    inputs = (*inputs, torch.zeros(3, 1, dtype=torch.int64), torch.ones(5, 8))
    with torch.no_grad():
        gm = make_fx(program, decompositions(), tracing_mode="fake")(*inputs)
    return exact_program_digest(gm, names)


def test_equal_programs_have_one_digest() -> None:
    assert digest_of(base) == digest_of(reordered)


@pytest.mark.parametrize(("old", "new"), CHANGES.values(), ids=CHANGES)
def test_changed_step_changes_digest(old: str, new: str) -> None:
    assert digest_of(changed(old, new)) != digest_of(base)


def test_names_and_layers_change_digest() -> None:
    assert digest_of(base, names=[*NAMES[:-1], "other"]) != digest_of(base)
    gm = make_fx(lambda x: x + 1, tracing_mode="fake")(torch.ones(3))
    digests = {exact_program_digest(gm, ["x"], repeats) for repeats in (None, [(0, 0)], [(0, 0, 0)])}
    assert len(digests) == 3


def full(x: Tensor, extent: object) -> Tensor:
    return x + torch.full((1, 1), extent, dtype=torch.float32)  # type: ignore[arg-type]


LENGTHS: dict[str, Program] = {
    "three": lambda x: full(x, 3),
    "five": lambda x: full(x, 5),
    "a length": lambda x: full(x, x.shape[0]),
    "another length": lambda x: full(x, x.shape[1]),
    "a length and two": lambda x: full(x, x.shape[0] + 2),
    "twice a length": lambda x: full(x, 2 * x.shape[0]),
    "lengths added": lambda x: full(x, x.shape[0] + x.shape[1]),
    "a share": lambda x: x * (1 / x.shape[0]),
    "zero": lambda x: x * 0.0,
    "two rows": lambda x: x[:2].sum(0),
    "all rows but one": lambda x: x[: x.shape[0] - 1].sum(0),
    "all rows": lambda x: x.sum(0),
    "a hundred rows at most": lambda x: x[: torch.sym_min(x.shape[0], 100)].sum(0),
    "two hundred rows at most": lambda x: x[: torch.sym_min(x.shape[0], 200)].sum(0),
    "half the rows": lambda x: x[: x.shape[0] // 2].sum(0),
    "positions": lambda x: x[0, 0] + torch.arange(x.shape[0]),
    "three positions": lambda x: x[0, 0] + torch.arange(3),
}


def test_no_size_equals_a_constant_or_another_size() -> None:
    digests: dict[str, str] = {}
    for name, program in LENGTHS.items():
        gm = make_fx(program, decompositions(), tracing_mode="symbolic")(torch.ones(10, 12))
        _, *sizes = gm.graph.find_nodes(op="placeholder")
        digest = exact_program_digest(gm, ["x", *map(str, sizes)])
        assert digest not in digests, f"{name} has the digest of {digests[digest]}"
        digests[digest] = name
