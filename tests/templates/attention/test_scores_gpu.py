"""Soft cap, sinks, ALiBi, any scale and any head dim in the attention kernels: one set of bytes, the right value."""

import itertools
import math

import pytest
import torch
import triton
import triton.language as tl

from detcompile.errors import InvalidInput
from detcompile.templates.attention.gpu import ATTENTION, probe_bits
from detcompile.templates.attention.schedules import (
    AttentionProblem,
    attention_candidates,
    reference_attention_schedule,
)
from detcompile.templates.attention.scores import tanh
from detcompile.templates.device.gate import Tuner
from tests.bits import assert_bitwise_equal
from tests.exhaustive import exhaustive_unless
from tests.templates.attention.cases import (
    CHUNK,
    FEATURES,
    PLAIN,
    SCHEDULES,
    Sequence,
    dense,
    exact_attention,
    features,
    paged,
    sequence,
)
from tests.templates.triton_interpreter import (
    DEVICE,
    DOT_DTYPES,
    INTERPRETED,
    NEEDS_GPU,
    NEEDS_TRITON,
)

pytestmark = NEEDS_TRITON

SHAPE = (3, 1, 16, 24) if INTERPRETED else (6, 2, 16, 24)
FEW = ("softcap", "sinks", "alibi", "negative scale", "all")  # of 16 bits; the interpreter, of float32, is slow
FLAGS = [("needs_scores", "capped"), ("sinks",), ("needs_scores", "alibi"), ("needs_scores",)]
HEAD_DIMS = [(80, 80), (96, 96), (192, 128), (256, 256)]
QUICK_DIMS = {*itertools.product([torch.bfloat16], HEAD_DIMS)}
QUICK_DIMS |= {*itertools.product([torch.float32], HEAD_DIMS if INTERPRETED else HEAD_DIMS[::2])}  # slow to compile


@pytest.mark.parametrize(
    ("dtype", "name"),
    exhaustive_unless(
        lambda case: case[1] == "all" if case[0] is torch.float32 else case[0] is torch.bfloat16 and case[1] in FEW,
        itertools.product(DOT_DTYPES, FEATURES),
    ),
)
def test_every_way_to_compute_a_token_gives_its_bytes(dtype: torch.dtype, name: str) -> None:
    n, given = CHUNK + 9, features(name, SHAPE[0], DEVICE)
    windows = (0, CHUNK // 2 + 5)
    if INTERPRETED:
        windows = windows[1:] if name == "all" else windows[:1]
    a, b = sequence(n, *SHAPE, dtype), sequence(CHUNK // 2, *SHAPE, dtype, seed=1)
    for window in windows:
        whole = dense(a, window, **given)
        assert whole.isfinite().all()
        assert not torch.equal(whole, dense(a, window)), "the feature does nothing"
        assert_bitwise_equal(dense(a, window, SCHEDULES[1], **given), whole, f"{SCHEDULES[1]}")
        for schedule in SCHEDULES if not INTERPRETED else (SCHEDULES[0], SCHEDULES[2]):
            cut = CHUNK - 1
            first, _ = paged([(a, 0, cut), (b, 3, 5)], 48, window, schedule, padding=3, **given)
            assert_bitwise_equal(first, whole[:cut], f"{schedule} prefill to {cut}")
            parts = [(b, 9, 10), (a, cut, n - 1), (a, n - 1, n)]
            _, second, last = paged(parts, 16, window, schedule, seed=1, **given)
            assert_bitwise_equal(second, whole[cut : n - 1], f"{schedule} prefill from {cut}")
            assert_bitwise_equal(last, whole[n - 1 :], f"{schedule} decode")


@pytest.mark.parametrize("name", FEATURES)
def test_the_value_is_the_references(name: str) -> None:
    s, given = sequence(CHUNK + 67, *SHAPE, torch.float32), features(name, SHAPE[0], DEVICE)
    q, k, v = (t[None].transpose(1, 2) for t in (s.q, s.k, s.v))
    for window in (70,) if INTERPRETED else (0, 70):
        scale = given.get("scale", SHAPE[2] ** -0.5)
        rest = {key: value for key, value in given.items() if key != "scale"}
        expected = exact_attention(q, k, v, scale, window, **rest)[0].transpose(0, 1)
        assert (dense(s, window, **given) - expected).norm() < 6e-7 * expected.norm()  # 5.3e-7 on an H200


def test_absent_features_leave_the_bytes_alone() -> None:
    """No sink is a sink of -inf; no ALiBi is a slope of 0, but for a scale that is applied earlier."""
    s = sequence(CHUNK + 9, *SHAPE, torch.float32)
    plain = dense(s, scale=0.25)
    heads = torch.zeros(SHAPE[0], device=DEVICE)
    assert_bitwise_equal(dense(s, scale=0.25, sinks=heads - math.inf), plain)
    assert_bitwise_equal(dense(s, scale=0.25, alibi_slopes=heads), plain)  # 0.25: scaling is exact


@pytest.mark.parametrize("name", ["softcap", "all"])
def test_a_poisoned_token_is_invisible_to_earlier_ones(name: str) -> None:
    n, at = CHUNK + 9, CHUNK - 3
    s, given = sequence(n, 6, 2, 16, 24, DOT_DTYPES[0]), features(name, 6, DEVICE)
    clean = dense(s, **given)
    k, v = s.k.clone(), s.v.clone()
    k[at, 0], v[at, 1, 3] = math.nan, math.inf
    poisoned = Sequence(s.q, k, v)
    whole = dense(poisoned, **given)
    assert_bitwise_equal(whole[:at], clean[:at])
    assert whole[at:, :3].isnan().all() and whole[at:, 3:, 3].isnan().all()
    for schedule in SCHEDULES:
        decoded = paged([(poisoned, at - 1, at), (poisoned, at + 1, at + 2)], 16, 0, schedule, **given)
        assert_bitwise_equal(torch.cat(decoded), torch.cat([whole[at - 1 : at], whole[at + 1 : at + 2]]))


@pytest.mark.parametrize(
    ("dtype", "dims"),
    exhaustive_unless(QUICK_DIMS.__contains__, itertools.product(DOT_DTYPES, HEAD_DIMS)),
)
def test_head_dims(dtype: torch.dtype, dims: tuple[int, int]) -> None:
    """Bytes over cuts, and float64's value: other dims than powers of two are padded inside."""
    n = CHUNK + 3 if INTERPRETED else CHUNK + 130
    s = sequence(n, 2, 1, *dims, dtype)
    whole = dense(s)
    q, k, v = (t[None].transpose(1, 2) for t in (s.q, s.k, s.v))
    expected = exact_attention(q, k, v, dims[0] ** -0.5)[0].transpose(0, 1)
    assert (whole.double() - expected).norm() < {torch.float32: 1e-6}.get(dtype, 6e-3) * expected.norm()
    cut = CHUNK - 1
    assert_bitwise_equal(paged([(s, 0, cut)], 16)[0], whole[:cut])
    for schedule in (PLAIN, SCHEDULES[2]):
        assert_bitwise_equal(torch.cat(paged([(s, cut, n - 1), (s, n - 1, n)], 16, 0, schedule)), whole[cut:])


@triton.jit
def _tanh_kernel(x_ptr, y_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(y_ptr + i, tanh(tl.load(x_ptr + i)))


def test_tanh_is_tanh() -> None:
    magnitudes = torch.logspace(-30, 3, 2041, base=10)
    x = torch.cat([magnitudes, torch.linspace(0.5, 0.75, 2040), torch.tensor([0.0, math.inf, math.nan, 1e38, 0.625])])
    x = torch.cat([x, -x, torch.zeros(8192 - 2 * len(x))]).float().to(DEVICE)
    y = torch.empty_like(x)
    _tanh_kernel[(1,)](x, y, N=8192, enable_fp_fusion=False)
    exact = torch.tanh(x.double())
    known = ~exact.isnan()
    assert (y[known].double() - exact[known]).abs().le(2.5e-7 * exact[known].abs()).all()
    assert torch.equal(y.isnan(), exact.isnan())


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"softcap": -1.0}, "softcap=-1.0"),
        ({"softcap": math.nan}, "softcap=nan"),
        ({"scale": math.inf}, "scale=inf"),
    ],
)
def test_what_has_no_meaning_is_refused(given: dict, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        dense(sequence(3, *SHAPE, torch.float32), **given)


class TestOnTheGpu:
    pytestmark = NEEDS_GPU

    @pytest.mark.parametrize(
        ("dtype", "block_size", "flags"),
        exhaustive_unless(
            {
                (torch.bfloat16, 16, FLAGS[0]),
                (torch.bfloat16, 0, FLAGS[1]),
                (torch.bfloat16, 16, FLAGS[2]),
                (torch.float32, 16, FLAGS[0]),
            }.__contains__,
            itertools.product(DOT_DTYPES, (0, 16), FLAGS),
        ),
    )
    def test_every_schedule_has_one_class_of_bits(
        self, dtype: torch.dtype, block_size: int, flags: tuple[str, ...]
    ) -> None:
        fields = {"dtype": str(dtype).removeprefix("torch."), "block_size": block_size, "chunk": 512}
        gate = Tuner("test", {}, ATTENTION.tuner(torch.device(DEVICE)).path.parent / "test")
        gate._decisions.clear()
        problems = [
            AttentionProblem(
                **fields,
                heads=8,
                kv_heads=2,
                d=128,
                dv=128,
                windowed=True,
                decode=decode,
                split=split,
                **dict.fromkeys(flags, True),
            )
            for decode in (False, True)
            for split in ((False, True) if block_size else (False,))
        ]
        every = dict.fromkeys(s for p in problems for s in attention_candidates(p))
        problem = problems[0]
        reference = reference_attention_schedule(problem)
        admitted = gate.admitted(str(problem), reference, list(every), probe_bits(problem, torch.device(DEVICE)))
        refused = gate.refusals().get(str(problem), {})
        print(f"{problem}: {len(admitted)} admitted, {len(refused)} refused {refused}")
        assert not [reason for reason in refused.values() if "bits differ" in reason]
