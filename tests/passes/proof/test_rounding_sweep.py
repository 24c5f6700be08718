"""Every pointwise operation that the certificate admits, beside elements of every other magnitude.

A run takes float32 in the widest vectors and one more dtype and instruction set that the run's seed draws, as far as
compilers' time allows; `DETCOMPILE_SWEEP=all` takes all of them. On a GPU two dtypes are taken, and all by
`make gpu-test PYTEST_ARGS="-m gpu"`.
"""

import math
import os
import random
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._inductor import config as inductor_config
from torch._inductor.cpu_vec_isa import pick_vec_isa

from detcompile.orders.numerics import Numerics
from detcompile.passes.backend import Backend
from detcompile.passes.pipeline import decompositions
from detcompile.passes.programs import lanes
from detcompile.passes.proof.pointwise import ADMITTED
from tests.conftest import NEEDS_CUDA
from tests.draws import seed_of_run
from tests.exhaustive import EXHAUSTIVE

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
# By the setting of Inductor that has it: its own choice (the machine's widest vectors), 256 bits, and no vectors.
VECTORS = {"widest": None, "256 bits": 256, "none": 1}
ALL = [("cpu", vectors, dtype) for vectors in VECTORS for dtype in DTYPES]
SWEPT = ALL if os.environ.get("DETCOMPILE_SWEEP") == "all" else [random.Random(seed_of_run()).choice(ALL)]
ON_GPU = [
    pytest.param(
        "cuda",
        "widest",
        dtype,
        marks=[pytest.mark.gpu, NEEDS_CUDA, *[EXHAUSTIVE] * (dtype in (torch.float64, torch.float16))],
    )
    for dtype in DTYPES
]
INTEGERS = ("bitwise", "shift__", "ldexp")
COUNT = 1 << 15
LENGTHS = (1, 2, 3, 5, 8, 13, 17, 31)  # of vectors' tails
# Angles at which SLEEF's tan of float32 rounds otherwise as soon as one lane is large: ten or so of all.
TANGENTS = torch.tensor([16.493362426757812, 35.342918395996094, 54.192474365234375, 82.46681213378906])


def overload(name: str) -> torch._ops.OpOverload | None:
    """An operation by its full name; None where this torch has none."""
    namespace, packet, item = name.split(".")
    return getattr(getattr(getattr(torch.ops, namespace), packet, None), item, None)


def arguments(op: torch._ops.OpOverload, dtype: torch.dtype) -> tuple[list[Any], dict[str, Any]]:
    """What the operation wants: the place of a tensor among the operands as text, a number for every number."""
    positional: list[Any] = []
    named: dict[str, Any] = {}
    of_integers = is_of_integers(str(op))
    order = iter("mxy" if "where" in str(op) else "xj" if "ldexp" in str(op) else "ij" if of_integers else "xyz")
    for argument in op._schema.arguments:
        if str(argument.type) == "Tensor":
            positional.append(next(order))
        elif argument.name == "rounding_mode":
            named[argument.name] = "floor"
        elif argument.name == "dtype":
            positional.append(torch.float64 if dtype is torch.float32 else torch.float32)
        elif not argument.has_default_value() or argument.name == "min":
            positional.append(3 if of_integers else 1.75)
    return positional, named


def operations(names: Iterable[str], dtype: torch.dtype) -> dict[str, torch._ops.OpOverload]:
    """Those that this torch has; of integers once, beside float32. A copy is left out: torch writes it as a cast."""
    results = {name: overload(name) for name in sorted(names) if name != "aten.copy.default"}
    return {name: op for name, op in results.items() if op and (dtype is torch.float32 or not is_of_integers(name))}


def is_of_integers(name: str) -> bool:
    return any(part in name for part in INTEGERS)


def probes(dtype: torch.dtype, draws: torch.Generator) -> Tensor:
    """Both signs of magnitudes of every octave, angles and other small numbers, and special values."""
    limits = torch.finfo(dtype)
    lowest = math.log2(limits.smallest_normal) + math.log2(limits.eps)  # of the smallest subnormal
    octaves = torch.rand(COUNT, dtype=torch.float64, generator=draws) * (math.log2(limits.max) - lowest) + lowest
    some = torch.cat([octaves.exp2(), torch.rand(COUNT, dtype=torch.float64, generator=draws) * 125, TANGENTS.double()])
    special = torch.tensor([0.0, 0.5, 1, limits.max, limits.smallest_normal, math.inf, math.nan], dtype=torch.float64)
    return torch.cat([some, -some, special, -special]).to(dtype)


def operands(dtype: torch.dtype, device: str) -> list[Tensor]:
    """x, y and z of the dtype; i of any bits and j of a few. Each x meets a y of another magnitude."""
    draws = torch.Generator().manual_seed(34)
    x = probes(dtype, draws)
    y, z = (x[torch.randperm(len(x), generator=draws)] for _ in range(2))
    i = torch.randint(-(2**31), 2**31, x.shape, generator=draws, dtype=torch.int64).int()
    j = torch.randint(0, 31, x.shape, generator=draws, dtype=torch.int32)
    return [value.to(device) for value in (x, y, z, i, j)]


def differing(actual: Tensor, expected: Tensor) -> int:
    """Elements whose bytes differ, unless both are NaN."""
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[actual.element_size()]
    return int(((actual.view(bits) != expected.view(bits)) & ~(actual.isnan() & expected.isnan())).sum())


def sweep(names: Iterable[str], device: str, vectors: str, dtype: torch.dtype) -> tuple[set[str], set[str], int]:
    """Names of operations that the certificate saw, of those whose elements differ, and how many elements there were.

    All operations are one graph of an unknown count of elements. First the elements stand in the order of magnitude of
    one operand, then of the other, then at places that are drawn, in vectors and in tails.
    """
    calls = [(op, *arguments(op, dtype)) for op in operations(names, dtype).values()]

    def every_operation(x: Tensor, y: Tensor, z: Tensor, i: Tensor, j: Tensor) -> list[Tensor]:
        named = {"x": x, "y": y, "z": z, "i": i, "j": j, "m": x > y}
        return [op(*[named[a] if isinstance(a, str) else a for a in given], **kwargs) for op, given, kwargs in calls]

    torch._dynamo.reset()
    backend = Backend(Numerics())
    compiled = torch.compile(every_operation, backend=backend, fullgraph=True)
    given = operands(dtype, device)
    tried, wrong = 0, set()
    settings = {"cpp.simdlen": VECTORS[vectors], "cpp.max_horizontal_fusion_size": 4096}  # one C++ file
    with inductor_config.patch(settings), torch.no_grad():
        ordered = [value[given[0].abs().argsort()] for value in given]
        for value in ordered:
            torch._dynamo.decorators.mark_unbacked(value, 0)
        expected = compiled(*ordered)
        draws = torch.Generator().manual_seed(11)
        drawn = [torch.randint(len(given[0]), (n,), generator=draws).to(device) for n in (len(given[0]) + 7, *LENGTHS)]
        for places in (ordered[1].abs().argsort(), *drawn):
            results = compiled(*(value[places] for value in ordered))
            tried += len(places) * len(results)
            pairs = zip(operations(names, dtype), results, expected, strict=True)
            wrong |= {name for name, result, before in pairs if differing(result, before[places])}
    assert len(backend.certificates) <= 2, "one graph, certified before and after Inductor's rewrites"
    return {entry.op for entry in backend.certificates[0].entries if entry.kind == "pointwise"}, wrong, tried


@pytest.mark.parametrize(("device", "vectors", "dtype"), [*SWEPT, *ON_GPU], ids=str)
def test_element_ignores_neighbors_of_any_magnitude(device: str, vectors: str, dtype: torch.dtype) -> None:
    """Of each operation that the certificate admits an element has the same bytes among elements of its magnitude, and
    among all others, infinite ones and NaNs, in vectors and in tails. That a result is a NaN is compared; which one, is
    not (docs/limits.md).
    """
    seen, wrong, tried = sweep(ADMITTED, device, vectors, dtype)
    wanted = operations(ADMITTED, dtype)
    print(f"{len(wanted)} operations, {tried} elements: {len(wrong)} differ ({device}, {vectors}, {dtype})")
    assert not wrong, sorted(wrong)
    unseen = {name for name, op in wanted.items() if name not in seen and op not in decompositions()}
    assert not unseen, f"of these nothing was proven: {sorted(unseen)}"


@pytest.mark.skipif(not pick_vec_isa(), reason="Inductor has no vectors for this machine")
def test_the_sweep_sees_a_tangent_of_whole_vectors(monkeypatch: pytest.MonkeyPatch) -> None:
    """SLEEF's, as Inductor writes it by itself."""
    monkeypatch.setattr(lanes, "EXACT", lanes.EXACT | {"tan"})
    with inductor_config.patch({"fx_graph_cache": False}):
        _, wrong, _ = sweep({"aten.tan.default", "aten.exp.default"}, "cpu", "widest", torch.float32)
    assert wrong == {"aten.tan.default"}
