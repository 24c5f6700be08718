"""At the sizes of an 8B model, with many tiles and rows per launch, bytes do not depend on the number of tokens."""

import pytest
import torch
from torch import Tensor

import detcompile.templates.ops  # noqa: F401 (registers torch.ops.detcompile)
from tests.bits import assert_bitwise_equal
from tests.conftest import NEEDS_CUDA

pytestmark = [pytest.mark.gpu, NEEDS_CUDA]
ops = torch.ops.detcompile

TOKENS = (1, 2, 12, 17, 40, 65, 100, 129, 200, 257, 515, 1030, 2060, 4100, 8755)
LINEARS = [  # N, K, radices, residual: Qwen3-8B
    (6144, 4096, [], False),
    (4096, 4096, [2, 2, 2], True),
    (12288, 4096, [], False),
    (4096, 12288, [2, 2, 2], True),
    (151936, 4096, [], False),
]


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda", generator=torch.Generator("cuda").manual_seed(0)).bfloat16()


@pytest.mark.parametrize(("n", "k", "radices", "residual"), LINEARS)
def test_a_token_of_a_linear_ignores_the_others(n: int, k: int, radices: list[int], residual: bool) -> None:
    counts = [m for m in TOKENS if m * n < 2**29]
    x, w = draw(counts[-1], k), draw(n, k)
    r = draw(counts[-1], n) if residual else None
    full = ops.matmul(x, w, None, r, radices)
    for m in counts:
        part = ops.matmul(x[:m], w, None, None if r is None else r[:m], radices)
        assert_bitwise_equal(part, full[:m], f"{m} tokens")


@pytest.mark.parametrize("length", [32, 64, 128, 256, 300, 4096])
def test_a_row_ignores_how_many_there_are(length: int) -> None:
    """From 8192 rows on a tile once took sixteen rows of 128 instead of four, and summed them in another order."""
    x, weight = draw(300_000 * 128 // max(length, 128), length), draw(length)
    kernels = {
        "rms_norm": lambda rows: ops.rms_norm(rows, weight, 1e-6, True),
        "layer_norm": lambda rows: ops.layer_norm(rows, weight, weight, 1e-5),
        "row_sum": lambda rows: ops.row_sum(rows, torch.float32),
        "softmax": lambda rows: ops.softmax(rows, torch.float32, []),
        "softmax of 16 bits": lambda rows: ops.softmax(rows, None, []),
    }
    for name, kernel in kernels.items():
        full = kernel(x)
        for m in (1, 3, 515, 8191, 8193):
            assert_bitwise_equal(kernel(x[:m]), full[:m], f"{name}, {m} rows")
        shifted = torch.empty(x.numel() + 1, dtype=x.dtype, device="cuda")[1:].view(x.shape)
        shifted.copy_(x)
        assert_bitwise_equal(kernel(shifted), full, f"{name}, rows that start two bytes late")
        strange = x[:1].as_strided((1, length), (1, 1))
        assert_bitwise_equal(kernel(strange), full[:1], f"{name}, one row with another stride")


@pytest.mark.parametrize(
    ("sequences", "steps"),
    [(2, [515]), (17, [515]), (1, [514, 1]), (4, [500] + [1] * 15), (1, [64] * 8 + [3]), (17, [511, 1, 1, 1, 1])],
)
def test_attention_ignores_sequences_and_chunks(sequences: int, steps: list[int]) -> None:
    length, heads, kv_heads, dim = sum(steps), 32, 8, 128
    q, k, v = draw(length, heads, dim), draw(length, kv_heads, dim), draw(length, kv_heads, dim)
    assert_bitwise_equal(attend(q, k, v, sequences, steps), attend(q, k, v, 1, [length]))


def attend(q: Tensor, k: Tensor, v: Tensor, sequences: int, steps: list[int]) -> Tensor:
    """Rows of the last of several equal sequences, computed step by step over a poisoned cache."""
    length, blocks = q.shape[0], -(-q.shape[0] // 64)
    caches = [torch.full((blocks * sequences, 64, *t.shape[1:]), torch.nan, device="cuda").bfloat16() for t in (k, v)]
    table = torch.randperm(blocks * sequences, device="cuda").int().view(sequences, blocks)
    done, out = 0, []
    for n in steps:
        here = torch.arange(done, done + n, device="cuda")
        rows, owner = here.repeat(sequences), torch.arange(sequences, device="cuda").repeat_interleave(n)
        slots = table[owner, rows // 64].long() * 64 + rows % 64
        cu_seqlens = torch.arange(sequences + 1, device="cuda", dtype=torch.int32) * n
        seq_lens = torch.full((sequences,), done + n, device="cuda", dtype=torch.int32)
        metadata = (slots, cu_seqlens, seq_lens, table, 128**-0.5, 0, 512)
        out.append(ops.paged_attention(q[rows], k[rows], v[rows], *caches, *metadata)[-n:])
        done += n
    assert done == length
    return torch.cat(out)
