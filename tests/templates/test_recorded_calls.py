"""Recorded calls: repeated on new contents they give the function's bytes; what cannot be repeated is not recorded."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch._C._dynamo.guards import _empty_strided_cpu, _reinterpret_tensor

from detcompile.templates import recorded_calls
from detcompile.templates.cpp_dispatch import direct_ops
from detcompile.templates.recorded_calls import record
from tests.bits import assert_bitwise_equal
from tests.templates.cases import DTYPES, normal, sample
from tests.templates.test_cpp_dispatch import Step

Layer = Callable[[], Tensor]


def layer(dtype: torch.dtype, tokens: int) -> tuple[Layer, list[Tensor], tuple[Tensor, Tensor]]:
    """Attention between norms and products, the tensors of a step that it reads, and its caches."""
    direct = torch.ops.detcompile_direct
    assert direct_ops()
    lengths = [(3 + 20 * i, 1) for i in range(tokens)]
    step = Step(dtype, dtype, lengths, padding=0, copies=1, heads_first=False)
    arguments, caches = step.arguments(), step.caches()
    x, scale, w_v = normal((tokens, 64), dtype, 1), normal((32,), dtype, 2), normal((32, 32), dtype, 3)
    columns = x[:, ::2]  # which the norm copies
    w_o, bias, residual = normal((24, 64), dtype, 4), normal((24,), dtype, 5), x[:, :24]

    def run() -> Tensor:
        rows = direct.rms_norm(columns, scale, 1e-6, True)
        values = _reinterpret_tensor(direct.matmul(rows, w_v, None, None, []), (tokens, 2, 16), (32, 16, 1), 0)
        heads = direct.paged_attention(**arguments | {"v": values}, k_cache=caches[0], v_cache=caches[1])
        rows = _reinterpret_tensor(heads, (tokens, 64), (64, 1), 0)
        out = direct.matmul(rows, w_o, bias, residual, [2, 2, 2], torch.float32)
        return direct.layer_norm(out, None, None, 1e-6)

    return run, [x, arguments["q"], arguments["k"], w_v], caches


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [1, 3])
def test_repeated_calls_give_new_contents_their_bytes(dtype: torch.dtype, tokens: int) -> None:
    run, tensors, caches = layer(dtype, tokens)
    expected = run()
    output, calls = record(run)
    assert calls is not None
    assert_bitwise_equal(output, expected)
    for seed in (7, 8):
        for tensor in tensors:
            tensor.copy_(sample("heavy", tuple(tensor.shape), dtype, seed))
        assert calls.repeat()
        repeated, written = calls.output.clone(), [cache.clone() for cache in caches]
        assert_bitwise_equal(repeated, run())
        for mine, theirs in zip(written, caches, strict=True):
            assert_bitwise_equal(mine, theirs)


def test_a_recording_holds_its_results() -> None:
    run, _, _ = layer(torch.float32, 2)
    _, calls = record(run)
    assert calls is not None
    held = [torch.full((2, size), torch.nan) for size in (24, 32, 64) for _ in range(20)]  # in memory that was freed
    assert calls.repeat()
    assert_bitwise_equal(calls.output, run())
    assert all(tensor.isnan().all() for tensor in held)


def test_a_moved_tensor_ends_the_repetition() -> None:
    run, (*_, weight), _ = layer(torch.float32, 1)
    _, calls = record(run)
    assert calls is not None and calls.repeat()
    weight.data = weight.data.clone()
    assert not calls.repeat()


def test_a_fault_ends_the_repetition() -> None:
    direct = torch.ops.detcompile_direct
    step = Step(torch.float32, torch.float32, [(3, 1)], padding=0, copies=1, heads_first=False)
    arguments, caches = step.arguments(), step.caches()
    _, calls = record(lambda: direct.paged_attention(**arguments, k_cache=caches[0], v_cache=caches[1]))
    assert calls is not None and calls.repeat()
    arguments["block_table"].fill_(99)
    assert not calls.repeat()


def unseen(x: Tensor) -> Tensor:
    """Twice x, which torch's dispatcher does not see."""
    twice: Tensor = _empty_strided_cpu(tuple(x.shape), tuple(x.stride()), x.dtype)
    twice.numpy()[...] = 2 * x.numpy()
    return twice


X, W = normal((2, 32), torch.float32, 1), normal((8, 32), torch.float32, 2)
NANS = torch.full((2, 32), torch.nan)
UNRECORDED: dict[str, Callable[[], Tensor]] = {
    "an operation of torch": lambda: torch.ops.detcompile_direct.matmul(X + 1, W, None, None, []),
    "an operation in Python": lambda: torch.ops.detcompile.matmul(X, W, None, None, []),
    "a call that is not plain": lambda: torch.ops.detcompile_direct.matmul(X.t().contiguous().t(), W, None, None, []),
    "unseen work before a call": lambda: torch.ops.detcompile_direct.matmul(unseen(X), W, None, None, []),
    "unseen work after a call": lambda: unseen(torch.ops.detcompile_direct.matmul(X, W, None, None, [])),
    "no call": lambda: unseen(X),
    "no call, and NaN": lambda: NANS,  # what results are overwritten with
}


@pytest.mark.parametrize("name", UNRECORDED)
def test_what_cannot_be_repeated_is_not_recorded(name: str) -> None:
    assert direct_ops()
    expected = UNRECORDED[name]()
    output, calls = record(UNRECORDED[name])
    assert calls is None
    assert_bitwise_equal(output, expected)


def test_another_cache_folder_loads_no_second_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second copy would replace the first's operations and crash, as its kernels' addresses are not set."""
    run, _, _ = layer(torch.float32, 1)
    expected = run()
    monkeypatch.setenv("DETCOMPILE_CACHE", str(tmp_path))
    recorded_calls._library.cache_clear()
    output, calls = record(run)
    assert calls is not None and list(tmp_path.iterdir()) == []
    assert_bitwise_equal(output, expected)


def test_an_exception_ends_the_recording() -> None:
    run, _, _ = layer(torch.float32, 1)

    def fail() -> Tensor:
        run()
        raise ValueError("stop")

    with pytest.raises(ValueError, match="stop"):
        record(fail)
    run()
    _, calls = record(run)
    assert calls is not None and calls.repeat()
