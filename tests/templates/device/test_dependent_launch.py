"""Kernels that start while the one before still ends give the bytes of kernels that follow each other."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from detcompile.templates.attention.gpu import cached_attention_cuda
from detcompile.templates.attention.operands import Caches, StepMetadata
from detcompile.templates.attention.schedules import AttentionSchedule
from detcompile.templates.attention.scores import AttentionRule
from detcompile.templates.device import dependent_launch
from detcompile.templates.device.cuda_graphs import constants, for_graph
from detcompile.templates.device.dependent_launch import launch_options, let_next_start, wait_for_earlier
from detcompile.templates.matmul.gate_gpu import silu_mul_cuda
from detcompile.templates.matmul.gpu import matmul_cuda, run_gated
from detcompile.templates.matmul.launch import run_schedule
from detcompile.templates.matmul.schedules import HopperTiles, PointerTiles, RingTiles
from detcompile.templates.rows.softmax_gpu import softmax_cuda
from detcompile.templates.rows.sums_and_norms_gpu import rms_norm_cuda
from detcompile.templates.tokens.next_tokens_gpu import fill_pending_cuda, likeliest_cuda
from tests.bits import assert_bitwise_equal
from tests.gpus import is_hopper_here
from tests.templates.triton_interpreter import NEEDS_GPU

pytestmark = NEEDS_GPU
HOPPER = is_hopper_here()
WIDTH, INNER, DEPTH = 1024, 4096, 12


@pytest.fixture(scope="module")
def weights() -> list[tuple[Tensor, ...]]:
    generator = torch.Generator("cuda").manual_seed(3)

    def draw(*shape: int) -> Tensor:
        return (torch.randn(*shape, generator=generator, device="cuda") * shape[-1] ** -0.5).bfloat16()

    return [(draw(2 * INNER, WIDTH), draw(WIDTH, INNER), 1 + draw(WIDTH)) for _ in range(DEPTH)]


@contextmanager
def apart() -> Iterator[None]:
    """Kernels that follow each other."""
    with mock.patch.object(dependent_launch, "overlaps", lambda device: False):
        yield


def chain(x: Tensor, weights: list[tuple[Tensor, ...]], radices: tuple[int, ...]) -> Tensor:
    """Each kernel reads what the one before wrote, and the allocator hands the same memory out again and again."""
    for w_in, w_out, scale in weights:
        both = matmul_cuda(rms_norm_cuda(x, scale, 1e-6, True), w_in, None, None, ())
        x = matmul_cuda(silu_mul_cuda(both[:, :INNER], both[:, INNER:]), w_out, None, x, radices)
    return x


@pytest.mark.parametrize("radices", [(), (2, 2)], ids=str)
@pytest.mark.parametrize("tokens", [1, 16, 40, 200, 1100])
def test_a_chain_has_the_bytes_of_kernels_apart(
    tokens: int, radices: tuple[int, ...], weights: list[tuple[Tensor, ...]]
) -> None:
    xs = [torch.randn(tokens, WIDTH, device="cuda").bfloat16() for _ in range(4)]
    with apart():
        expected = [chain(x, weights, radices) for x in xs]
    for _ in range(5):
        for x, wanted in zip(xs, expected):
            assert_bitwise_equal(chain(x, weights, radices), wanted, "eager")
    static = xs[0].clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = chain(static, weights, radices)
    for x, wanted in zip(xs * 5, expected * 5):
        static.copy_(x)
        graph.replay()
        assert_bitwise_equal(out, wanted, "replayed")


def test_softmax_reads_results_of_previous_kernel() -> None:
    xs = [torch.randn(rows, length, device="cuda").bfloat16() for rows, length in ((9000, 128), (70, 4096)) * 2]

    def chain_of_rows(x: Tensor) -> Tensor:
        return softmax_cuda(rms_norm_cuda(softmax_cuda(x, None, ()), None, 1e-6, True), None, ())

    with apart():
        expected = [chain_of_rows(x) for x in xs]
    for _ in range(20):
        for x, wanted in zip(xs, expected):
            assert_bitwise_equal(chain_of_rows(x), wanted)


def test_tokens_are_read_from_previous_kernel(weights: list[tuple[Tensor, ...]]) -> None:
    """As in a chain of greedy steps, of which each finds its tokens on the device."""
    head = weights[0][0]
    table = torch.randn(len(head), WIDTH, device="cuda").bfloat16()
    rows = torch.arange(8, device="cuda").flip(0)

    def last_tokens(ids: Tensor) -> Tensor:
        sampled = torch.zeros(8, dtype=torch.int64, device="cuda")
        for _ in range(DEPTH):
            likeliest_cuda(matmul_cuda(table[ids], head, None, None, ()), sampled)
            ids = fill_pending_cuda(ids, rows, sampled)
        return ids

    starts = [torch.randint(0, len(head), (8,), device="cuda") for _ in range(4)]
    with apart():
        expected = [last_tokens(ids) for ids in starts]
    for _ in range(5):
        for ids, wanted in zip(starts, expected):
            assert_bitwise_equal(last_tokens(ids), wanted)


def test_weights_that_the_kernel_before_wrote_are_read_as_they_are() -> None:
    """Prefetching goes to the L2 cache, which gets the new values, too."""
    x = torch.randn(1, WIDTH, device="cuda").bfloat16()
    wanted, sources = [], [torch.randn(2 * INNER, WIDTH, device="cuda").bfloat16() for _ in range(3)]
    for source in sources:
        wanted.append(matmul_cuda(x, source, None, None, ()))
        torch.cuda.synchronize()
    w = torch.empty_like(sources[0])
    for _ in range(20):
        for source, expected in zip(sources, wanted):
            w.copy_(source)
            assert_bitwise_equal(matmul_cuda(x, w, None, None, ()), expected, "after a copy")
            rms_norm_cuda(x, None, 1e-6, True)
    made = [rms_norm_cuda(source, None, 1e-6, True) for source in sources]
    torch.cuda.synchronize()
    expected = [matmul_cuda(x, w, None, None, ()) for w in made]
    for _ in range(20):
        for source, value in zip(sources, expected):  # our own kernel writes them, and lets the next start early
            out = matmul_cuda(x, rms_norm_cuda(source, None, 1e-6, True), None, None, ())
            assert_bitwise_equal(out, value, "after a kernel of ours")


@pytest.mark.skipif(not HOPPER, reason="the kernel is made of a Hopper GPU's instructions")
@pytest.mark.parametrize("stages", [3, 5])  # with 3, the next kernel's ring fits beside this one's
def test_prefetching_weights_does_not_read_x_early(stages: int, weights: list[tuple[Tensor, ...]]) -> None:
    schedule = RingTiles(8, 64, 256, stages)

    def ring_chain(x: Tensor) -> Tensor:
        for w_in, w_out, scale in weights:
            inner = run_gated(RingTiles(8, 64, 256, stages, gated=True), rms_norm_cuda(x, scale, 1e-6, True), w_in)
            x = run_schedule(schedule, inner, w_out, None, x)
        return x

    xs = [torch.randn(tokens, WIDTH, device="cuda").bfloat16() for tokens in (1, 8)]
    with apart():
        expected = [chain(x, weights, ()) for x in xs]
    for x, wanted in zip(xs, expected):
        static, graph = torch.zeros_like(x), torch.cuda.CUDAGraph()
        with for_graph(), constants([w for layer in weights for w in layer]):
            ring_chain(static)
            with torch.cuda.graph(graph):
                out = ring_chain(static)
        for _ in range(20):
            static.copy_(x)
            graph.replay()
            assert_bitwise_equal(out, wanted)


@triton.jit
def _late_copy_kernel(source_ptr, target_ptr, N: tl.constexpr, PDL: tl.constexpr):
    """Copies N numbers of 32 bits long after the next kernel may start."""
    let_next_start(PDL)
    wait_for_earlier(PDL)
    place = tl.arange(0, N)
    place = tl.inline_asm_elementwise(
        "nanosleep.u32 20000; mov.u32 $0, $1;", "=r,r", [place], dtype=tl.int32, is_pure=False, pack=1
    )
    tl.store(target_ptr + place, tl.load(source_ptr + place))


@pytest.mark.skipif(not HOPPER, reason="the kernel is made of a Hopper GPU's instructions")
@pytest.mark.parametrize("page", [16, 64])
@pytest.mark.parametrize("window", [0, 300])
@pytest.mark.parametrize("split", [False, True])
def test_metadata_that_the_kernel_before_wrote_are_read_as_they_are(split: bool, window: int, page: int) -> None:
    """Until that kernel ends they may be anything."""
    tokens, sequences, keys, pages = 6, 4, 1280, 200
    width = keys // page
    generator = torch.Generator("cuda").manual_seed(5)
    q, k_cache, v_cache = (
        torch.randn(*shape, 128, generator=generator, device="cuda").bfloat16()
        for shape in ((tokens, 8), (pages, page, 2), (pages, page, 2))
    )
    both = torch.empty(512, dtype=torch.int32, device="cuda")  # all metadata, so that one kernel writes them
    cu, lens, table = both[:5], both[5:9], both[16 : 16 + sequences * width].view(sequences, width)

    def metadata(bounds: list[int], lengths: list[int], seed: int) -> Tensor:
        drawn = torch.randint(0, pages, (512,), generator=torch.Generator().manual_seed(seed), dtype=torch.int32)
        drawn[:9] = torch.tensor(bounds + lengths)
        return drawn.cuda()

    def attend() -> Tensor:
        schedule, rule = AttentionSchedule("hopper_decode", 8, 4, 3, split), AttentionRule(0.1, window, 512)
        return cached_attention_cuda(
            q, Caches(k_cache, v_cache), StepMetadata(cu, lens, table), rule, schedule=schedule
        )

    cases = [
        metadata([0, 1, 2, 3, 4], [keys, 1, 700, 64], 1),
        metadata([0, 1, 2, 3, 4], [keys, 1, 700, 64], 2),  # other pages
        metadata([0, 1, 2, 3, 4], [65, 1000, 513, 900], 2),  # other lengths
        metadata([0, 1, 1, 4, 6], [65, 1000, 513, 900], 2),  # other tokens
    ]
    expected = []
    for case in cases:
        both.copy_(case)
        with apart():
            expected.append(attend())
        torch.cuda.synchronize()
    nonsense = torch.full_like(both, 2**30)
    nonsense[:5] = torch.arange(5)  # as if every token were alone
    for _ in range(5):
        for before in (*cases, nonsense):
            for case, wanted in zip(cases, expected):
                both.copy_(before)
                _late_copy_kernel[(1,)](case, both, N=512, **launch_options(both.device))
                assert_bitwise_equal(attend(), wanted)


@pytest.mark.skipif(not HOPPER, reason="the kernel is made of a Hopper GPU's instructions")
@pytest.mark.parametrize("k", [40, 4100])
def test_rows_of_any_length_are_fetched_ahead(k: int) -> None:
    """What is fetched comes in pieces of 16 bytes; a row may end inside one, or hold less than is worth it."""
    x, w = (torch.randn(rows, 4104, device="cuda").bfloat16()[:, :k] for rows in (3, 200))
    expected = run_schedule(PointerTiles(32, 64, 32, 4, 2), x, w)
    out = run_schedule(HopperTiles(16, 64, 256, 5, swapped=True), x, w)
    assert_bitwise_equal(out, expected)
