"""The C++ kernels of exact-1 built for aarch64 and run under qemu-user: the bytes of the reference.

Budget: 40 CPU seconds, of which 20 build the kernels. Needs aarch64-linux-gnu-g++ and qemu-aarch64 (Debian, Ubuntu:
apt-get install g++-aarch64-linux-gnu qemu-user).
"""

import shutil
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from torch import Tensor

from detcompile.templates.exact.attention import ExactRule
from detcompile.templates.exact.rows import FUNCTIONS
from tests.exact import definition as exact
from tests.exact import driver, golden
from tests.exact.definition import Array, F
from tests.exhaustive import EXHAUSTIVE
from tests.templates.exact.cases import RULE_NAMES, RULES, ruled_case

COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
MISSING = [tool for tool in (COMPILER, EMULATOR) if shutil.which(tool) is None]
BUILDS = {"portable": "-march=armv8-a", "dotprod": "-march=armv8.2-a+dotprod"}  # the second: sdot of NEON
pytestmark = [
    EXHAUSTIVE,
    pytest.mark.skipif(bool(MISSING), reason=f"{' and '.join(MISSING)} not installed (see the file's docstring)"),
]


@pytest.fixture(scope="module", params=BUILDS)
def machine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[driver.Emulated]:
    program = driver.build(tmp_path_factory.mktemp(request.param), COMPILER, BUILDS[request.param])
    machine = driver.Emulated([EMULATOR, "-cpu", "max", str(program)])
    yield machine
    assert machine.close() == 0


@pytest.mark.parametrize("name", FUNCTIONS)
def test_function_equals_the_reference(name: str, machine: driver.Machine) -> None:
    x = golden.function_sample()
    x = np.where(x == x, x, F(0)) if name == "exp2_short" else x
    assert exact.digest(machine.function(name, x)) == golden.kept()["functions"][name]


def test_rows_equal_the_reference(machine: driver.Machine) -> None:
    kept, x, weight, bias = golden.kept()["rows"], golden.rows(), golden.values((200,), 2), golden.values((200,), 4)
    assert exact.digest(machine.rms_norm(x, weight, 1e-6)) == kept["rms_norm"]
    assert exact.digest(machine.layer_norm(x, weight, bias, 1e-5)) == kept["layer_norm"]
    assert exact.digest(machine.row_sum(x)) == exact.digest(exact.row_sum(x))
    assert exact.digest(machine.divide(x, x[::-1].copy())) == exact.digest(x / x[::-1])
    for digits in (1, 2):
        for side in ("left", "right"):
            planes, scale = machine.quantize(x, digits, side == "right")
            assert exact.digest(planes) + exact.digest(scale) == kept[f"quantize {digits} {side}"]


@pytest.mark.parametrize("name", golden.DIGITS)
@pytest.mark.parametrize(("M", "N", "K"), [(1, 1, 1), (5, 7, 333), (3, 2, 65536 + 70)])
def test_linear_equals_the_reference(name: str, M: int, N: int, K: int, machine: driver.Machine) -> None:
    left, right = golden.DIGITS[name]
    x, bias, w_scale = golden.values((M, K), 5), golden.values((N,), 6), np.abs(golden.values((N,), 7))
    w = golden.planes((right, N, K), 8)
    if K > exact.LONGEST:  # every product of the largest magnitude, and of one sign
        x[:], w[0], w[1:] = 1, -127, -128
    actual = machine.linear(x, left, w, w_scale, bias)
    assert exact.digest(actual) == exact.digest(exact.linear(x, left, w, w_scale, bias))


@pytest.mark.parametrize("name", golden.attention_cases())
def test_attention_equals_the_reference(name: str, machine: driver.Machine) -> None:
    q, k, v, digits = golden.attention_cases()[name]
    assert exact.digest(attended(machine, q, k, v, digits)) == golden.kept()["attention"][name]


@pytest.mark.parametrize(("rule", "width"), RULES, ids=RULE_NAMES)
def test_rules_equal_the_reference(rule: ExactRule, width: int, machine: driver.Machine) -> None:
    case, expected = ruled_case(rule, width)
    plain = [field.numpy() if isinstance(field, Tensor) else field for field in rule]
    assert exact.digest(attended(machine, *case, *plain)) == exact.digest(expected)


@pytest.mark.parametrize("variant", exact.VARIANTS)
def test_tiny_gives_its_golden_logits(variant: str, machine: driver.Machine) -> None:
    decoder = exact.Decoder(golden.TINY, exact.VARIANTS[variant], machine, 64)
    logits, _ = decoder.forward(exact.fixed_tokens(64))
    assert exact.digest(logits) == golden.kept()["logits"][variant]["64"]


def attended(machine: driver.Machine, q: Array, k: Array, v: Array, digits: int, *rule: Any) -> Array:
    keys, its_values = machine.quantize(k, digits, True), machine.quantize(v, digits, True)
    queries = machine.quantize(q, exact.QUERY_DIGITS, False)
    return machine.attention(*queries, *keys, *its_values, np.arange(len(k) - len(q), len(k)), *rule)
