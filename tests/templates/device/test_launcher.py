"""Launching Triton's compiled kernel directly gives what a launch by Triton gives."""

import importlib
import logging
import pickle
import pkgutil
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonDescriptor
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from detcompile import templates
from detcompile.templates.device import launcher as launching
from detcompile.templates.device.cuda_graphs import warmup
from detcompile.templates.device.launcher import launcher
from detcompile.templates.matmul.gate_gpu import _silu_mul_kernel
from tests.bits import assert_bitwise_equal
from tests.templates.offline_compiler import OfflineCompiler
from tests.templates.triton_interpreter import INTERPRETED, NEEDS_COMPILER, NEEDS_GPU


@triton.jit
def _shifted_kernel(x_ptr, y_ptr, n, step, shift, BLOCK: tl.constexpr, WHOLE: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = (place < n) | WHOLE
    x = tl.load(x_ptr + place.to(tl.int64) * step, mask=mask).to(tl.float32)  # or a sum with an integer is of 16 bits
    tl.store(y_ptr + place, x + shift, mask=mask)


class _Compiled:
    """Stands for what Triton compiled: notes its launches."""

    def __init__(self) -> None:
        self.launches: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *args: self.launches.append((grid, *args))


@pytest.mark.skipif(INTERPRETED, reason="the interpreter's kernels are launched by Triton alone")
def test_launches_share_kernels_of_one_specialization() -> None:
    kernel = triton.jit(_shifted_kernel.fn)
    made: list[_Compiled] = []

    def run(*_: object, **__: object) -> _Compiled:
        made.append(_Compiled())
        return made[-1]

    device = SimpleNamespace(active=SimpleNamespace(get_current_device=lambda: device.now), now=0)
    memory = torch.zeros(64)
    x, y, odd, half = memory, memory[16:], memory[1:], memory.half()
    flags = {"BLOCK": 32, "WHOLE": True}
    bf16, rows = torch.bfloat16, torch.zeros(64, 64, dtype=torch.bfloat16)
    layouts = [NVMMASharedLayout(swizzle_byte_width=bytes, element_bitwidth=16, rank=2) for bytes in (128, 64)]

    def described(block: int, dtype: torch.dtype, other: bool = False) -> GluonDescriptor:
        return GluonDescriptor(rows.to(dtype), [64, 64], [64, 1], [block, 64], layouts[other])

    others: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
        ((odd, y, 24, 2, 0.5), flags),
        ((half, y, 24, 2, 0.5), flags),
        ((x, y, 1, 2, 0.5), flags),
        ((x, y, 32, 2, 0.5), flags),
        ((x, y, 24, 16, 0.5), flags),
        ((x, y, 2**31 + 8, 2, 0.5), flags),
        ((x, y, 2**31, 2, 0.5), flags),
        ((x, y, 24, 2, 1), flags),
        ((x, y, 24, 2, 0.5), flags | {"BLOCK": 64}),
        ((x, y, 24, 2, 0.5), flags | {"WHOLE": 1}),
        ((x, y, 24, 2, 0.5), flags | {"num_warps": 8}),
        ((x, y, 24, 2), {"shift": 0.5, **flags}),
        ((x, y, 24), {"shift": 2, "step": 0.5, **flags}),  # the same values under other names
        ((x, y, 24, 2, None), flags),
        ((x, y, 24, 2, True), flags),
        ((x, y, 2**63, 2, 0.5), flags),
        ((x, described(64, bf16), 24, 2, 0.5), flags),
        ((x, described(32, bf16), 24, 2, 0.5), flags),
        ((x, described(64, torch.float16), 24, 2, 0.5), flags),
        ((x, described(64, bf16, other=True), 24, 2, 0.5), flags),
        ((x, TensorDescriptor(rows, [64, 64], [64, 1], [64, 64]), 24, 2, 0.5), flags),
        ((x, (y, x), 24, 2, 0.5), flags),
        ((x, (y, odd), 24, 2, 0.5), flags),
        ((x, (y, half), 24, 2, 0.5), flags),
        ((x, (y, x, x), 24, 2, 0.5), flags),
        ((x, (y, 16), 24, 2, 0.5), flags),
        ((x, (y, 16.0), 24, 2, 0.5), flags),
    ]
    with mock.patch.object(kernel, "run", run), mock.patch.object(launching, "driver", device):
        launch = launcher(kernel)
        assert launcher(kernel) is launch
        launch[(3,)](x, y, 24, 2, 0.5, **flags)
        launch[(7, 2)](x[32:], x, 40, 10, -3.0, **flags)
        launch[(1,)](y, x, 7, 3, 2.5, WHOLE=True, BLOCK=32)  # another order of names is another call
        assert len(made) == 2
        assert made[0].launches == [((7, 2, 1, 1), mock.ANY, mock.ANY, 40, 10, -3.0, 32, True)]
        for count, (args, named) in enumerate(others, start=3):
            launch[(1,)](*args, **named)
            assert len(made) == count, (args, named)
            launch[(1,)](*args, **named)
            assert len(made) == count and len(made[-1].launches) == 1, (args, named)
        device.now = 1
        launch[(3,)](x, y, 24, 2, 0.5, **flags)
        assert len(made) == 3 + len(others)
        kernel.pre_run_hooks.append(print)  # which Triton runs, where it launches
        launch[(3,)](x, y, 24, 2, 0.5, **flags)
        assert len(made) == 4 + len(others)
        with pytest.raises(AssertionError, match="WHOLE"):
            launch[(3,)](x, y, 24, 2, 0.5, BLOCK=32)
        with pytest.raises(AssertionError, match="list"):
            launch[(3,)]([x, y], y, 24, 2, 0.5, **flags)


@pytest.mark.skipif(INTERPRETED, reason="the interpreter's kernels are launched by Triton alone")
def test_other_callables_are_launched_as_they_are() -> None:
    stub = mock.MagicMock()
    assert launcher(stub) is stub


class TestOnTheGpu:
    pytestmark = NEEDS_GPU

    def test_relaunched_kernels_use_new_arguments(self) -> None:
        generator = torch.Generator().manual_seed(1)
        memory = torch.randn(1 << 14, generator=generator).cuda()
        for _ in range(300):
            start, step, n, shift = (int(torch.randint(0, most, (), generator=generator)) for most in (9, 5, 1500, 4))
            x, step, n = memory[start * 4 // 3 :], max(1, 4 * step // 3), max(1, n // 16 * 16 if n % 3 else n)
            if start % 2:
                x = x.half()
            y = torch.full((n + 40,), torch.nan, device="cuda")[start % 3 :]
            launcher(_shifted_kernel)[(triton.cdiv(n, 128),)](
                x, y, n, step, shift if start < 4 else float(shift), BLOCK=128, WHOLE=False
            )
            assert_bitwise_equal(y[:n], x[: n * step : step].float() + shift, f"{start} {step} {n} {shift}")
            assert y[n:].isnan().all()


def _kernels() -> list[JITFunction]:
    """All of the templates, each once."""
    actual = {}
    for module in pkgutil.walk_packages(templates.__path__, f"{templates.__name__}."):
        members = vars(importlib.import_module(module.name)).values()
        actual |= {id(member): member for member in members if isinstance(member, JITFunction)}
    return list(actual.values())


@NEEDS_COMPILER
def test_keys_of_compiled_kernels_do_not_depend_on_which_is_launched_first() -> None:
    """Another process, whose threads hash kernels in another order, finds them."""
    kernels = _kernels()
    assert len(kernels) > 100

    def keys(order: Iterable[JITFunction]) -> list[str]:
        for kernel in kernels:
            kernel.hash, kernel.used_global_vals = None, {}
        for kernel in order:
            kernel.cache_key  # noqa: B018
        return [kernel.cache_key for kernel in kernels]

    assert keys(kernels) == keys(reversed(kernels))


@NEEDS_COMPILER
def test_constants_of_one_name_are_equal_in_all_that_a_kernel_calls() -> None:
    """Triton sorts those of one name by addresses, which are others in each process."""
    for kernel in _kernels():
        kernel.cache_key  # noqa: B018
        values: dict[str, set[str]] = {}
        for (name, _), (value, _) in kernel.used_global_vals.items():
            values.setdefault(name, set()).add(str(value))
        assert all(len(actual) == 1 for actual in values.values()), (kernel, values)


IN_WORKERS = """
import time
import triton
from torch._inductor import config
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from detcompile.templates.device import launcher
from detcompile.templates.device.cuda_graphs import warmup
from detcompile.templates.matmul.gate_gpu import _silu_mul_kernel as kernel
from detcompile.torch_internals.compile_workers import maybe_warm_pool, ready_workers

config.compile_threads = 2
hits = []
triton.knobs.compilation.listener = lambda *, cache_hit, **_: hits.append(cache_hit)

def compile(block):
    constants = {"F": 512, "BLOCK": block, "ON_GPU": True, "PDL": False}
    types = {"gate_ptr": "*bf16", "up_ptr": "*bf16", "out_ptr": "*bf16"}
    signature = {name: types.get(name, "constexpr" if name in constants else "i32") for name in kernel.arg_names}
    source = ASTSource(kernel, signature, constexprs=constants)
    return launcher._compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})

with warmup(alone=True):
    compile(128)  # no pool was started
    maybe_warm_pool()
    deadline = time.monotonic() + 120
    while ready_workers() is None and time.monotonic() < deadline:
        time.sleep(0.1)
    compile(256)
compile(512)  # what is served is compiled here
print(hits)
"""


@NEEDS_COMPILER
def test_a_worker_compiles_for_a_warmup(offline_compiler: OfflineCompiler) -> None:
    assert offline_compiler.run(IN_WORKERS) == "[False, True, False]\n"


def _crashing() -> Future[None]:
    future: Future[None] = Future()
    future.set_exception(BrokenProcessPool("a worker ended"))
    return future


@NEEDS_COMPILER
@pytest.mark.parametrize("answer", [_crashing, Future], ids=["crashes", "hangs"])
def test_a_kernel_is_compiled_here_if_its_worker(
    answer: Callable[[], Future[None]], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    submitted: list[tuple[Any, ...]] = []

    def submit(*job: Any) -> Future[None]:
        submitted.append(pickle.loads(pickle.dumps(job)))
        return answer()

    workers = [SimpleNamespace(submit=submit)]
    monkeypatch.setattr(launching, "ready_workers", lambda: workers[0] if workers else None)
    monkeypatch.setattr(launching, "dismiss_workers", workers.clear)
    monkeypatch.setattr(launching, "_WORKER_SECONDS", 0.01)
    monkeypatch.setattr(triton, "compile", lambda source, **named: (source, named))
    source, target = ASTSource(_silu_mul_kernel, {"T": "i32"}, {("F",): 512}, {}), GPUTarget("cuda", 90, 32)
    with warmup(alone=True), caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert launching._compile(source, target, {}) == (source, {"target": target, "options": {}})
    assert len(submitted) == 1, "the second kernel was sent to a worker, too"
    (message,) = caplog.messages
    assert "no worker process compiled _silu_mul_kernel" in message


@NEEDS_COMPILER
def test_a_worker_leaves_errors_to_the_launching_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(source: ASTSource, **_: object) -> None:
        raise RuntimeError(f"{source.fn.__name__} needs too many registers")

    monkeypatch.setattr(triton, "compile", fails)
    module, folder = _silu_mul_kernel.__module__, triton.knobs.cache.dir
    values: tuple[dict[Any, Any], ...] = {"T": "i32"}, {("F",): 512}, {}
    launching._fill_cache(module, "_silu_mul_kernel", "elsewhere", ASTSource, values, GPUTarget("cuda", 90, 32), {})
    assert triton.knobs.cache.dir == folder
    with warmup(alone=True), pytest.raises(RuntimeError, match="_silu_mul_kernel needs"):
        launching._compile(ASTSource(_silu_mul_kernel, *values), GPUTarget("cuda", 90, 32), {})
