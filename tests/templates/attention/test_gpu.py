"""Attention kernels: decode, any prefill, any block size, split or not, dense or paged have the same bytes."""

import functools
import itertools
import math
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor

from detcompile.errors import InvalidInput, ScheduleError
from detcompile.orders import KV
from detcompile.templates.attention import gpu, hopper_blocks, merge
from detcompile.templates.attention.gpu import ATTENTION, probe_bits, require_32_bits
from detcompile.templates.attention.schedules import (
    AttentionProblem,
    AttentionSchedule,
    attention_candidates,
    reference_attention_schedule,
)
from detcompile.templates.device.dependent_launch import launch_options
from detcompile.templates.device.gate import Tuner
from tests.bits import assert_bitwise_equal
from tests.exhaustive import exhaustive_unless
from tests.gpus import is_hopper_here
from tests.templates.attention.cases import (
    CHUNK,
    PLAIN,
    SCHEDULES,
    Sequence,
    assert_shared_tokens_are_those_of_each,
    dense,
    dense_gpu,
    paged,
    paged_gpu,
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
HOPPER = is_hopper_here()
HOPPER_SCHEDULES = [
    AttentionSchedule("hopper", 128, 8, 3),
    AttentionSchedule("hopper", 64, 4, 2),
    AttentionSchedule("hopper", 64, 4, 3, split=True),
    AttentionSchedule("hopper_decode", 8, 4, 2),
    AttentionSchedule("hopper_decode", 8, 4, 4, split=True),
    AttentionSchedule("hopper_decode", 8, 4, 3, split=True),
]

SHAPES = [(3, 1, 16, 24)] if INTERPRETED else [(8, 2, 128, 128), (6, 2, 80, 72), (20, 1, 64, 64)]


WINDOWS = [CHUNK // 2 + 5] if INTERPRETED else [0, CHUNK // 2 + 5]


def is_quick(case: tuple[torch.dtype, tuple[int, ...], int]) -> bool:
    """On a GPU, each shape has a window in either bfloat16 or float32, and none in the other."""
    dtype, shape, window = case
    chosen = (SHAPES.index(shape) % 2 == 0) == (bool(window) == (dtype is torch.float32))
    return dtype is not torch.float16 and (INTERPRETED or chosen)


@pytest.mark.parametrize(
    ("dtype", "shape", "window"), exhaustive_unless(is_quick, itertools.product(DOT_DTYPES, SHAPES, WINDOWS))
)
def test_every_way_to_compute_a_token_gives_its_bytes(
    dtype: torch.dtype, shape: tuple[int, int, int, int], window: int
) -> None:
    """Straddles each 64-key block and chunk by one: decode, prefill chunks, pages, neighbors, schedules."""
    n = CHUNK + 66
    a, b = sequence(n, *shape, dtype), sequence(CHUNK // 2, *shape, dtype, seed=1)
    whole = dense(a, window)
    assert whole.isfinite().all()
    assert_bitwise_equal(paged([(a, 0, n)], 16, window)[0], whole, "one paged prefill")
    for schedule in SCHEDULES:
        for page, cut in ((48, CHUNK + 1),) if INTERPRETED else ((16, 63), (48, 65), (256, CHUNK), (16, CHUNK + 1)):
            first, _ = paged([(a, 0, cut), (b, 3, 5)], page, window, schedule, padding=3, seed=page)
            assert_bitwise_equal(first, whole[:cut], f"{schedule} page={page} prefill to {cut}")
            _, second = paged([(b, 9, 10), (a, cut, n)], page, window, schedule, seed=page)
            assert_bitwise_equal(second, whole[cut:], f"{schedule} page={page} prefill from {cut}")
        edges = [0, CHUNK - 1, CHUNK, CHUNK + 1] if INTERPRETED else [0, 63, 64, CHUNK - 1, CHUNK, CHUNK + 1, n - 1]
        for edge, out in zip(edges, paged([(a, edge, edge + 1) for edge in edges], 32, window, schedule)):
            assert_bitwise_equal(out, whole[edge : edge + 1], f"{schedule} decode of token {edge}")


@pytest.mark.parametrize("ahead", [1, 2])
def test_merges_take_more_chunks_than_they_read_ahead(ahead: int) -> None:
    n = 4 * CHUNK + 1
    s = sequence(n, 3, 1, 16, 24, DOT_DTYPES[0])
    with mock.patch.object(merge, "_AHEAD", ahead):
        actual = paged([(s, n - 1, n)], 48, 0, AttentionSchedule("plain", 16, 4, 1, split=True))[0]
    assert_bitwise_equal(actual, dense(s)[n - 1 :], f"five chunks, {ahead} at a time")


@pytest.mark.parametrize(
    ("tokens", "keys", "split", "stages", "other"),
    [
        (1, 128, False, 4, {}),  # eight programs
        (1, 1024, True, 4, {}),
        (1, 8192, True, 3, {}),  # 128 programs
        (8, 512, False, 4, {}),
        (4, 512, False, 4, {"heads": 192}),  # 96 programs, of 8 heads each
        (16, 1024, False, 4, {}),
        (8, 1024, True, 3, {}),
        (32, 1024, False, 3, {}),  # 256 programs without a split
        (32, 1024, True, 2, {"block_size": 16}),  # whose blocks come in pieces
        (1, 32768, True, 2, {}),  # 512 programs
        (32, 8192, True, 2, {}),  # one sequence may be as long as its table
        (256, 512, False, 2, {}),
        (1000, 512, False, 2, {}),  # 8000 programs of eight blocks at most
        (1000, 1024, False, 3, {}),
    ],
)
def test_a_decode_step_is_spread_over_the_multiprocessors(
    tokens: int, keys: int, split: bool, stages: int, other: dict[str, int]
) -> None:
    kind = {"dtype": "bfloat16", "heads": 32, "kv_heads": 8, "d": 128, "dv": 128, "block_size": 64, "chunk": 512}
    problem = AttentionProblem(**kind | other, windowed=False, decode=True, split=False, descriptors=True)
    with mock.patch.object(gpu, "multiprocessors", lambda _: 132):
        actual = gpu._for_step(problem, torch.device("cuda"), tokens, tokens, keys)
        plain = gpu._for_step(replace(problem, sinks=True), torch.device("cuda"), tokens, tokens, keys)
    assert (actual.split, actual.stages) == (split, stages)
    assert attention_candidates(actual)[0] == AttentionSchedule("hopper_decode", 8, 4, stages, split)
    assert f"stages={stages}" in str(actual) and "stages" not in str(plain)


@pytest.mark.parametrize("dtype", DOT_DTYPES)
def test_a_token_may_be_written_for_several_sequences(dtype: torch.dtype) -> None:
    assert_shared_tokens_are_those_of_each(functools.partial(paged_gpu, schedule=PLAIN), dtype, DEVICE)


@pytest.mark.parametrize("window", [0, 70])
def test_float32_follows_the_reference_of_the_kv_order(window: int) -> None:
    s = sequence(CHUNK + 67, 4, 2, 16, 16, torch.float32)
    out, scale = dense(s, window), 16**-0.5
    for position in (0, 63, 64, CHUNK - 1, CHUNK, CHUNK + 66):
        k, v = (t[:, 1].cpu().numpy() for t in (s.k, s.v))
        expected = KV(CHUNK).evaluate(s.q[position, 3].cpu().numpy(), k, v, position, window, scale)
        assert np.abs(out[position, 3].cpu().numpy() - expected).max() < 2e-6 * np.abs(v).max()


def test_a_planted_order_swap_is_seen() -> None:
    """Keys one place later, or chunks of another size, give other bytes."""
    n = 2 * CHUNK + 3
    s = sequence(n, 4, 2, 16, 16, DOT_DTYPES[0])
    assert not torch.equal(dense(s, chunk=CHUNK), dense(s, chunk=2 * CHUNK))
    last = slice(n - 1, n)
    swapped = Sequence(s.q, s.k.roll(1, 0), s.v.roll(1, 0))
    assert not torch.equal(dense(swapped)[last], dense(s)[last])


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_a_poisoned_token_is_invisible_to_earlier_ones(poison: float, window: int) -> None:
    """Rows that do not see the token keep their bytes; those that do are alike in prefill and decode."""
    n, at = CHUNK + 40, CHUNK + 9
    s = sequence(n, 4, 2, 16, 16, DOT_DTYPES[0])
    clean = dense(s, window)
    k, v = s.k.clone(), s.v.clone()
    v[at, 0, 3], k[at, 1, 0] = poison, poison
    poisoned = Sequence(s.q, k, v)
    for schedule in SCHEDULES[:2]:
        whole = dense(poisoned, window, schedule)
        assert_bitwise_equal(whole[:at], clean[:at], f"{schedule} before the token")
        assert whole[at:, :2, 3].isnan().all()
        assert_bitwise_equal(whole[at:, :2, :3], clean[at:, :2, :3], f"{schedule} other columns")
    for schedule in SCHEDULES:
        for first in (at - 1, at, at + 20):
            decoded = paged([(poisoned, first, first + 1)], 16, window, schedule)[0]
            assert_bitwise_equal(decoded, whole[first : first + 1], f"{schedule} decode of token {first}")


def test_a_token_without_a_finite_score_is_not_taken_for_padding() -> None:
    n, lost = CHUNK + 3, CHUNK  # a whole chunk
    s = sequence(n, 4, 2, 16, 16, DOT_DTYPES[0])
    k, v = s.k.clone(), s.v.clone()
    k[:lost], v[2, 0, 3] = -math.inf, math.nan
    s = Sequence(s.q.abs(), k, v)
    whole = dense(s)
    assert whole[:lost].isnan().all() and whole[lost:, :2, 3].isnan().all()
    assert whole[lost:, 2:].isfinite().all() and whole[lost:, :, :3].isfinite().all()
    for schedule in SCHEDULES:
        for token in (0, lost - 1, lost, n - 1):
            actual = paged([(s, token, token + 1)], 16, 0, schedule)[0]
            assert_bitwise_equal(actual, whole[token : token + 1], f"{schedule} decode of token {token}")


def test_sequences_without_tokens_take_none_of_the_others() -> None:
    """Token t is not sequence t's then, though that begins no later."""
    d, n = (128, 2 * CHUNK) if HOPPER else (16, CHUNK + 20)
    s = sequence(n, 4, 2, d, d, DOT_DTYPES[0])
    whole = dense(s)
    parts = [(s, 40, 41), (s, 33, 33), (s, n - 5, n - 3), (s, 7, 7), (s, n - 1, n)]
    for schedule in (*SCHEDULES, *(HOPPER_SCHEDULES if HOPPER else ())):
        for page in (16, 64):
            for (_, first, last), actual in zip(parts, paged(parts, page, 0, schedule, padding=2)):
                assert_bitwise_equal(actual, whole[first:last], f"{schedule}, pages of {page}, {first} to {last}")


def test_heads_without_contiguous_rows_use_plain_kernel() -> None:
    cache = torch.empty(4, 64, 2, 136, dtype=torch.bfloat16)
    assert hopper_blocks.has_rows(cache[..., :128].contiguous())
    assert hopper_blocks.has_rows(cache[..., :128].transpose(1, 2).contiguous().transpose(1, 2))
    assert not hopper_blocks.has_rows(cache[..., :128])


def test_empty_and_refused_inputs() -> None:
    s = sequence(3, 4, 2, 16, 16, torch.float32)
    assert dense(Sequence(s.q[:0], s.k[:0], s.v[:0])).shape == (0, 4, 16)
    with pytest.raises(InvalidInput, match="one dtype"):
        dense(Sequence(s.q.half(), s.k, s.v))
    with pytest.raises(InvalidInput, match="evenly"):
        dense(Sequence(s.q[:, :3], s.k, s.v))


@pytest.mark.parametrize("spread", [0.2, 1.0])
def test_a_chunk_of_float32_loses_no_more_than_plain_attention(spread: float) -> None:
    """Flat scores and steep ones. A chain through all keys of a chunk loses 1.3 to 1.5 times as much as plain."""
    s = sequence(577, 2, 1, 20, 20, torch.float32)
    q, k, v = (t[None].transpose(1, 2) for t in (s.q * spread, s.k, s.v))
    later = torch.ones(577, 577, dtype=torch.bool, device=DEVICE).triu(1)

    def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = (q @ k.transpose(2, 3) * 20**-0.5).masked_fill(later, -torch.inf)
        return torch.softmax(scores, -1) @ v

    exact = plain(q.double(), k.double(), v.double())
    ours, torchs = dense_gpu(q, k, v, 20**-0.5, 0, 512), plain(q, k, v)
    errors = [((out.double() - exact).norm() / exact.norm()).item() for out in (ours, torchs)]
    assert errors[0] <= 1.05 * errors[1], f"{errors[0]:.3e}, plain {errors[1]:.3e}"


class TestOnTheGpu:
    pytestmark = NEEDS_GPU

    @pytest.mark.parametrize(
        ("dtype", "block_size", "windowed"),
        exhaustive_unless(
            {(torch.bfloat16, page, window) for page, window in ((0, False), (16, True), (48, True))}.union(
                {(torch.float32, 16, True)}
            ).__contains__,
            itertools.product(DOT_DTYPES, (0, 16, 48), (False, True)),
        ),
    )
    def test_every_schedule_has_one_class_of_bits(self, dtype: torch.dtype, block_size: int, windowed: bool) -> None:
        fields = {"dtype": str(dtype).removeprefix("torch."), "block_size": block_size, "chunk": 512}
        gate = Tuner("test", {}, ATTENTION.tuner(torch.device(DEVICE)).path.parent / "test")
        gate._decisions.clear()
        hopper = HOPPER and block_size != 48 and dtype is not torch.float32
        problems = [
            AttentionProblem(
                **fields,
                heads=8,
                kv_heads=2,
                d=128,
                dv=128,
                windowed=windowed,
                decode=decode,
                split=split,
                descriptors=hopper,
            )
            for decode in (False, True)
            for split in ((False, True) if block_size else (False,))
        ]
        every = dict.fromkeys(s for p in problems for s in attention_candidates(p))
        assert any(schedule.kernel == "hopper" for schedule in every) == hopper
        problem = problems[0]
        reference = reference_attention_schedule(problem)
        admitted = gate.admitted(str(problem), reference, list(every), probe_bits(problem, torch.device(DEVICE)))
        refused = gate.refusals().get(str(problem), {})
        print(f"{problem}: {len(admitted)} admitted, {len(refused)} refused {refused}")
        assert not refused

    @pytest.mark.skipif(not HOPPER, reason="the kernel is made of a Hopper GPU's instructions")
    @pytest.mark.parametrize("window", [0, CHUNK // 2 + 5])
    @pytest.mark.parametrize("d", [64, 128])
    @pytest.mark.parametrize("schedule", HOPPER_SCHEDULES, ids=str)
    def test_the_hopper_kernel_gives_the_bytes_of_the_plain_one(
        self, schedule: AttentionSchedule, d: int, window: int
    ) -> None:
        """Prefill, its continuation, decode and padding; then all of it with values that are not finite."""
        n, cut = 2 * CHUNK + 9, CHUNK - 1
        a, b = sequence(n, 8, 2, d, d, torch.bfloat16), sequence(CHUNK // 2, 8, 2, d, d, torch.bfloat16, seed=1)
        k, v = a.k.clone(), a.v.clone()
        v[cut - 3, 0, 5], v[n - 2, 1, 7] = torch.nan, torch.inf
        k[:CHUNK] = -torch.inf  # all that these tokens see, and a chunk without weight for the others
        for s in (a, Sequence(a.q, a.k, v), Sequence(a.q.abs(), k, a.v)):
            whole = dense(s, window)
            if schedule.kernel != "hopper_decode":  # which is for paged keys
                assert_bitwise_equal(dense(s, window, schedule), whole, "dense")
            for page in (16, 32, 64, 128):
                first, other = paged([(s, 0, cut), (b, 3, 5)], page, window, schedule, padding=3)
                assert_bitwise_equal(first, whole[:cut], f"prefill, pages of {page}")
                assert_bitwise_equal(other, dense(b, window)[3:5], f"beside a prefill, pages of {page}")
                parts = [(b, 9, 10), (s, cut, n - 1), (s, n - 1, n)]
                _, second, last = paged(parts, page, window, schedule, padding=70, seed=1)
                assert_bitwise_equal(second, whole[cut : n - 1], f"rest of the prefill, pages of {page}")
                assert_bitwise_equal(last, whole[n - 1 :], f"decode, pages of {page}")

    @pytest.mark.skipif(not HOPPER, reason="the kernel is made of a Hopper GPU's instructions")
    @pytest.mark.parametrize("heads, kv_heads", [(8, 2), (7, 1), (24, 1)])
    @pytest.mark.parametrize("chunks", [2, 4, 5, 7])
    def test_tokens_of_many_lengths_decode_by_keys_as_rows(self, chunks: int, heads: int, kv_heads: int) -> None:
        """Tables have room for so many chunks: the longest sequence sees them all, the others some, or one key."""
        n = chunks * CHUNK - 263  # `paged` adds a page
        s = sequence(n, heads, kv_heads, 128, 128, torch.bfloat16)
        whole = dense(s)
        lengths = [n, 1, 64, 65, CHUNK, CHUNK + 1, n - CHUNK, n - 64]
        for stages, split in itertools.product((2, 4), (False, True)):
            schedule = AttentionSchedule("hopper_decode", 8, 4, stages, split)
            for page in (16, 64, 256):
                actual = paged([(s, end - 1, end) for end in lengths], page, 0, schedule, padding=3)
                for end, out in zip(lengths, actual):
                    assert_bitwise_equal(out, whole[end - 1 : end], f"{schedule}, {end} keys, pages of {page}")

    @pytest.mark.skipif(not HOPPER, reason="the kernel follows one that is made of a Hopper GPU's instructions")
    @pytest.mark.parametrize("d", [64, 128])
    @pytest.mark.parametrize("heads", [3, 40])  # few programs, and many
    @pytest.mark.parametrize("eager", [False, True])
    @pytest.mark.parametrize("chunks", [3, 7, 16, 30, 33, 64, 65, 150])  # a batch of them, two and more
    def test_a_merge_by_marks_gives_the_bytes_of_a_merge_by_lengths(
        self, chunks: int, eager: bool, heads: int, d: int
    ) -> None:
        """Tokens that see one chunk and several, the first of them hidden by a window, and padding. A chunk that is
        seen may have no weight, or sums that are no numbers; what is not seen may hold anything."""
        generator = torch.Generator().manual_seed(3)
        part = torch.randn(6, heads, chunks, d, generator=generator)
        max_and_sum = torch.randn(6, heads, chunks, 2, generator=generator).abs()
        seen = torch.tensor([[0, 1], [0, 2], [1, chunks], [chunks // 2, chunks - 1], [0, chunks], [0, 0]])
        hidden = (torch.arange(chunks) < seen[:, :1]) | (torch.arange(chunks) >= seen[:, 1:])
        max_and_sum[0, 0, 0], max_and_sum[4, 1, 1], max_and_sum[2, 0, 1] = torch.tensor(
            [[-math.inf, 0.0]] * 3
        )  # alone, later, first
        max_and_sum[4, 0, 2], part[4, 1, 0, 3], part[4, 1, 1, 5] = math.nan, math.inf, math.nan
        max_and_sum[4, 2, 1, 1], part[1, 2, 1, 7] = math.inf, 3e5  # past float16
        tokens, places = hidden.nonzero(as_tuple=True)
        part[tokens, :, places] = math.nan
        max_and_sum[tokens, :, places] = torch.tensor([math.nan, -1.0])
        part, max_and_sum = part.to(DEVICE), max_and_sum.to(DEVICE)
        actual = torch.full((6, heads, d), math.nan, dtype=torch.float16, device=DEVICE)
        with mock.patch.object(merge, "_EAGER_BYTES", part.numel() * 4 if eager else 0):
            merge.merge_by_marks(part, max_and_sum, actual, 0.3)
        assert_bitwise_equal(actual[5], torch.zeros_like(actual[5]), "padding")
        shape = {"DV": d, "DVP": d, "CHUNK": 64, "AHEAD": 4, "num_warps": 1, "enable_fp_fusion": False}
        shape |= {"CHUNKED": False, "NEEDS_SCORES": False, "SINKS": False, **launch_options(part.device)}
        for token, (first, end) in enumerate(seen[:5].tolist()):
            cu, lens = (torch.tensor(t, dtype=torch.int32, device=DEVICE) for t in ([0, 1], [64 * end]))
            one, out = slice(token, token + 1), torch.empty_like(actual[:1])
            merge.merge_kernel[(1, heads)](
                part[one], max_and_sum[one], out, cu, lens, out, 0.3, 1.0, 64 * (end - first), 1, chunks,
                *out.stride()[:2], WINDOWED=first > 0, **shape,
            )  # fmt: skip
            assert_bitwise_equal(actual[one], out, f"chunks {first} to {end}")

    @pytest.mark.parametrize("n", [1024, 200])
    @pytest.mark.parametrize("dtype", DOT_DTYPES)
    def test_errors_stay_within_sdpas(self, dtype: torch.dtype, n: int) -> None:
        s = sequence(1100, 8, 2, 128, 128, dtype)
        q, k, v = (t[None].transpose(1, 2) for t in (s.q, s.k, s.v))
        sdpa = torch.nn.functional.scaled_dot_product_attention
        exact = sdpa(q.double(), k.double(), v.double(), is_causal=True, enable_gqa=True)
        ours = dense_gpu(q, k, v, 128**-0.5, 0, CHUNK)
        torchs = sdpa(q, k, v, is_causal=True, enable_gqa=True)
        errors = [((out.double() - exact)[:, :, -n:].norm() / exact[:, :, -n:].norm()).item() for out in (ours, torchs)]
        print(f"{dtype} last {n}: {errors[0]:.3e} / SDPA {errors[1]:.3e}")
        assert errors[0] <= 1.05 * errors[1]

    @pytest.mark.parametrize("dtype", DOT_DTYPES)
    def test_graphs_replay_the_same_bytes_for_other_metadata(self, dtype: torch.dtype) -> None:
        """Captured with one set of lengths, replayed with another: the grid knows T and S only."""
        a = sequence(1200, 8, 2, 64, 64, dtype)
        cache = [torch.full((100, 16, 2, 64), math.nan, dtype=dtype, device=DEVICE) for _ in range(2)]
        for target, values in zip(cache, (a.k, a.v)):
            target.flatten(0, 1)[:1200] = values
        q, k, v = a.q[:8].clone(), a.k[:8].clone(), a.v[:8].clone()
        slots = torch.full((8,), -1, device=DEVICE)
        table = torch.arange(80, dtype=torch.int32, device=DEVICE).repeat(4, 1)
        cu = torch.tensor([0, 2, 4, 6, 8], dtype=torch.int32, device=DEVICE)
        lens = torch.tensor([600, 700, 800, 900], dtype=torch.int32, device=DEVICE)

        def launch() -> Tensor:
            return paged_gpu(q, k, v, *cache, slots, cu, lens, table, 0.125, 0, 512)

        launch()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = launch()
        whole = dense(a)
        for ends, splits in (([600, 700, 800, 900], [0, 2, 4, 6, 8]), ([65, 1200, 513, 8], [0, 1, 4, 4, 7])):
            lens.copy_(torch.tensor(ends))
            cu.copy_(torch.tensor(splits))
            for i, end in enumerate(ends):
                q[splits[i] : splits[i + 1]] = a.q[end - (splits[i + 1] - splits[i]) : end]
            graph.replay()
            for i, end in enumerate(ends):
                new = splits[i + 1] - splits[i]
                assert_bitwise_equal(captured[splits[i] : splits[i + 1]], whole[end - new : end], f"{ends} {i}")
            assert not captured[splits[-1] :].any()

    def test_capture_never_gates(self) -> None:
        s = sequence(5, 4, 2, 16, 16, torch.float16)
        q, k, v = (t[None].transpose(1, 2) for t in (s.q, s.k, s.v))
        chunk = 64 * (2 + int(torch.rand(()).item() * 1e6) % 5000)  # a problem no earlier process has decided
        with pytest.raises(ScheduleError, match="before CUDA graph capture"), torch.cuda.graph(torch.cuda.CUDAGraph()):
            dense_gpu(q, k, v, 0.25, 0, chunk)


def test_dense_sequences_past_32_bits_are_refused():
    require_32_bits(2**13, 32, 128)
    with pytest.raises(InvalidInput, match="exceed 2\\^31 elements"):
        require_32_bits(2**19, 32, 128)
