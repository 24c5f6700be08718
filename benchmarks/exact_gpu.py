"""Time exact arithmetic's products and attention on one GPU against bfloat16 cuBLAS and SDPA (docs/exact.md).

    python -m benchmarks.exact_gpu --commit $(git rev-parse --short HEAD) [--tokens 1,64,512,4096] [--only products]

Sizes are Qwen3-8B's, data is random. Times are medians of CUDA graph replays, in microseconds. A product uses different
weights in each call. Times of products exclude the quantization of x; times of attention include that of q, k and v.
Results are compared with the plain Triton kernels': products of up to 512 tokens, and all attention.

Writes benchmarks/results/exact-<device>-<commit>.json.
"""

import argparse
import functools
import itertools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from unittest import mock

import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa

from benchmarks.prefill import PRODUCTS
from benchmarks.templates import L2_BYTES, measure
from detcompile.templates.attention.operands import Caches
from detcompile.templates.exact import attention_hopper, gpu, hopper
from detcompile.templates.exact.attention import row_words
from detcompile.templates.exact.cache_gpu import write_heads

VARIANTS = {"exact8": (1, 1), "exact8x16": (2, 1), "exact16": (2, 2)}
HEADS, KEY_HEADS, HEAD_DIM, BLOCK = 32, 8, 128, 64
ATTENTION = [(1, 8192, 0), (8, 2048, 0), (1, 2048, 6144), (64, 1, 2047), (1, 1, 8191), (1, 1, 511)]


def products(tokens: Sequence[int]) -> Iterator[dict[str, object]]:
    """Time each product with each number of tokens."""
    for M, (name, (N, K)) in itertools.product(tokens, PRODUCTS.items()):
        copies = -(-int(L2_BYTES) // (N * K))
        x = torch.randn(M, K, dtype=torch.bfloat16, device="cuda")
        weights = [(torch.randn(N, K, dtype=torch.bfloat16, device="cuda"),) for _ in range(copies)]
        row: dict[str, object] = {"tokens": M, "product": name}
        row["cuBLAS"] = measure(weights, lambda w: x @ w.T)  # noqa: B023
        del weights
        for variant, (left, right) in VARIANTS.items():
            digits = torch.randint(-127, 128, (left, M, K), dtype=torch.int8, device="cuda")
            many = [(torch.randint(-127, 128, (right, N, K), dtype=torch.int8, device="cuda"),) for _ in range(copies)]
            scales, out = (torch.rand(M, device="cuda"), torch.rand(N, device="cuda")), torch.empty(M, N, device="cuda")
            multiply = lambda w: gpu._multiply(digits, w, *scales, None, out)  # noqa: B023, E731
            row[variant] = measure(many, multiply)
            if M <= 512:
                multiply(*many[0])
                chosen = out.clone()
                with mock.patch.object(hopper, "supports", lambda *_: False):
                    multiply(*many[0])
                assert torch.equal(out, chosen), (variant, row)
        yield row


def attention(S: int, T: int, past: int, digits: int) -> dict[str, object]:
    """Time T tokens of each of S sequences over `past` earlier ones."""
    keys = past + T
    pages = -(-keys // BLOCK)
    words = row_words(HEAD_DIM, digits)
    caches = Caches(*(torch.zeros(S * pages, BLOCK, KEY_HEADS, words, device="cuda") for _ in range(2)))
    table = torch.randperm(S * pages, device="cuda").int().view(S, pages)
    place = torch.arange(keys, device="cuda")
    slots = table[:, place // BLOCK].long() * BLOCK + place % BLOCK
    k, v = (torch.randn(S, keys, KEY_HEADS, HEAD_DIM, device="cuda") for _ in range(2))
    write_heads(caches, slots.flatten(), k.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), digits)
    q = torch.randn(S, T, HEADS, HEAD_DIM, device="cuda")
    counts = torch.arange(S + 1, dtype=torch.int32, device="cuda") * T
    lengths = torch.full((S,), keys, dtype=torch.int32, device="cuda")
    rows = [x.flatten(0, 1).contiguous() for x in (q, k[:, past:], v[:, past:])]
    operands = (*rows, *caches, slots[:, past:].flatten().contiguous(), counts, lengths, table)
    attend = torch.ops.detcompile.exact_paged_attention
    peers = [x.transpose(1, 2).bfloat16() for x in (q, k, v)]
    causal = past == 0 and T > 1
    row = {"sequences": S, "tokens": T, "past": past, "KV digits": digits, "exact": measure([operands], attend)}
    row["SDPA"] = measure([tuple(peers)], functools.partial(sdpa, is_causal=causal, enable_gqa=True))
    chosen = attend(*operands)
    with mock.patch.object(attention_hopper, "supports", lambda *_: False):
        assert torch.equal(attend(*operands), chosen), row
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--commit", required=True)
    parser.add_argument("--tokens", default="1,8,64,512,4096")
    parser.add_argument("--only", default="products,attention")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    arguments = parser.parse_args()
    report: dict[str, object] = {"commit": arguments.commit, "hardware": torch.cuda.get_device_name()}
    if "products" in arguments.only:
        rows = []
        for row in products([int(count) for count in arguments.tokens.split(",")]):
            rows.append(row)
            print(row, flush=True)
        report["products"] = rows
    if "attention" in arguments.only:
        report["attention"] = []
        for case, digits in itertools.product(ATTENTION, (1, 2)):
            row = attention(*case, digits)
            report["attention"].append(row)
            print(row, flush=True)
    device = torch.cuda.get_device_name().replace(" ", "-").lower()
    (arguments.out / f"exact-{device}-{arguments.commit}.json").write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
