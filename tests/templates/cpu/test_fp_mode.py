"""Subnormals and rounding inside float_mode are the same in every thread, whatever the caller set before."""

import ctypes
import platform
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from detcompile.runtime.requests.sampling_params import SamplingParams
from detcompile.runtime.sampling.sampler import Sampler, SampleRow
from detcompile.templates.cpu import fp_mode as module
from detcompile.templates.cpu.fp_mode import float_mode, in_float_mode
from tests.bits import assert_bitwise_equal

CPU = torch.device("cpu")
LEAST = 2.0**-149
UPWARD = {"x86_64": 0x800, "aarch64": 0x400000}.get(platform.machine())  # FE_UPWARD of fenv.h


def subnormals(rows: int = 4096, columns: int = 64) -> torch.Tensor:
    bits = torch.arange(rows * columns, dtype=torch.int32) + 3
    return bits.view(torch.float32).reshape(rows, columns)


def halved(x: torch.Tensor) -> torch.Tensor:
    """By torch, in its threads."""
    return x * 0.5


def summed(x: torch.Tensor) -> torch.Tensor:
    """By a kernel of ours, in its threads."""
    return torch.ops.detcompile.row_sum(x)


def flushed(x: torch.Tensor) -> bool:
    """Whether there are zeros, read from the bits: a thread that flushes would take subnormals for zeros."""
    return bool((x.view(torch.int32) == 0).any())


def elsewhere(run: Callable[[], None]) -> None:
    """Run in a new thread, which has the mode that it sets and no OpenMP workers yet."""
    failed: list[BaseException] = []

    def guarded() -> None:
        try:
            run()
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=guarded)
    thread.start()
    thread.join()
    if failed:
        raise failed[0]


@pytest.fixture(autouse=True)
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("operation", [halved, summed])
@pytest.mark.parametrize("workers_flush", [False, True])
@pytest.mark.parametrize("caller_flushes", [False, True])
def test_every_thread_keeps_subnormals_inside_and_has_its_own_mode_after(
    operation: Callable[[torch.Tensor], torch.Tensor], workers_flush: bool, caller_flushes: bool
) -> None:
    x = subnormals()
    expected = operation(x)

    def run() -> None:
        torch.set_num_threads(2)
        torch.set_flush_denormal(workers_flush)
        operation(x)  # starts the workers
        torch.set_flush_denormal(caller_flushes)
        before = operation(x)
        with float_mode(CPU), float_mode(CPU, 3):
            inside = operation(x)
        after = operation(x)
        torch.set_flush_denormal(False)
        assert_bitwise_equal(inside, expected)
        assert_bitwise_equal(after, before)
        assert flushed(before) == (caller_flushes or workers_flush)

    elsewhere(run)


@pytest.mark.skipif(UPWARD is None, reason="the number of FE_UPWARD is not known for this processor")
def test_rounding_is_to_nearest_inside() -> None:
    libm = ctypes.CDLL("libm.so.6")
    x = torch.linspace(1.0, 2.0, 1 << 18)
    nearest = torch.from_numpy(x.numpy() / np.float32(3))

    def run() -> None:
        libm.fesetround(UPWARD)
        upward = x / 3
        with float_mode(CPU):
            inside = x / 3
        assert_bitwise_equal(inside, nearest)
        assert_bitwise_equal(x / 3, upward)
        assert not torch.equal(upward, nearest)

    elsewhere(run)


def test_workers_of_another_openmp_are_reached_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where torch brings one of its own: a copy of the library has workers of its own."""
    actual = [line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "libgomp" in line]
    copy = ctypes.CDLL(shutil.copy(actual[0], tmp_path / "other.so"))
    seen: dict[int, bool] = {}

    @ctypes.CFUNCTYPE(None, ctypes.c_void_p)
    def look(_: object) -> None:
        seen[threading.get_ident()] = flushed(torch.tensor([LEAST]) * 1.0)

    def modes() -> list[bool]:
        seen.clear()
        copy.GOMP_parallel(look, None, 2, 0)
        return sorted(seen.values())

    monkeypatch.setattr(module, "_parallel_of_torch", lambda: ctypes.cast(copy.GOMP_parallel, ctypes.c_void_p).value)

    def run() -> None:
        torch.set_num_threads(2)
        torch.set_flush_denormal(True)
        modes()  # starts the worker
        torch.set_flush_denormal(False)
        assert modes() == [False, True]
        with float_mode(CPU):
            assert modes() == [False, False]
        assert modes() == [False, True]

    elsewhere(run)


def test_mode_is_restored_after_an_error() -> None:
    least = torch.tensor([LEAST])

    def fail() -> None:
        assert not flushed(least * 1.0)
        raise KeyError

    def run() -> None:
        torch.set_flush_denormal(True)
        for _ in range(2):
            with pytest.raises(KeyError):
                in_float_mode(fail, CPU)()
            assert flushed(least * 1.0)

    elsewhere(run)


def test_chances_may_be_subnormal() -> None:
    logits = torch.linspace(0.0, -103.0, 64)[None]
    sampler = Sampler(64, CPU)
    rows = [SampleRow(SamplingParams(seed=3), 5)]
    expected = sampler.probabilities(logits, sampler.prepare(rows))
    assert 0 < expected.min() < 2.0**-126

    def run() -> None:
        torch.set_flush_denormal(True)
        assert_bitwise_equal(sampler.probabilities(logits, sampler.prepare(rows)), expected)

    elsewhere(run)


def test_torch_without_openmp_is_rejected_with_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TORCH", "nowhere/libtorch_cpu.so")
    module._parallel_of_torch.cache_clear()
    with pytest.raises(module.InvalidInput, match=r"set_num_threads\(1\)"), float_mode(CPU):
        pass
    torch.set_num_threads(1)
    with float_mode(CPU):
        pass
    module._parallel_of_torch.cache_clear()


def test_other_devices_are_left_alone() -> None:
    assert in_float_mode(halved, torch.device("cuda")) is halved
    with float_mode(torch.device("cuda")):
        pass
