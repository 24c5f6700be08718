"""Shared parts of the attention tests: sequences, ways to attend, and features of the scores."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from detcompile.templates.attention.gpu import dense_attention_cuda, paged_attention_cuda
from detcompile.templates.attention.op import dense_attention_cpu, paged_attention_cpu, reference_attention
from detcompile.templates.attention.operands import Caches, StepMetadata
from detcompile.templates.attention.schedules import AttentionSchedule
from detcompile.templates.attention.scores import AttentionRule
from tests.bits import assert_bitwise_equal
from tests.templates.triton_interpreter import DEVICE, INTERPRETED

__all__ = [
    "CHUNK",
    "FEATURES",
    "PLAIN",
    "SCHEDULES",
    "Sequence",
    "assert_shared_tokens_are_those_of_each",
    "dense",
    "dense_cpu",
    "dense_gpu",
    "exact_attention",
    "features",
    "paged",
    "paged_cpu",
    "paged_gpu",
    "sequence",
]

CHUNK = 64 if INTERPRETED else 512
PLAIN = AttentionSchedule("plain", 16, 4, 1)
SCHEDULES = [PLAIN, AttentionSchedule("plain", 32, 4, 2), AttentionSchedule("plain", 16, 4, 1, split=True)]


def _paged_by(attend: Callable[..., Tensor], option: str) -> Callable[..., Tensor]:
    """Wrap attend so that it takes the arguments of paged_attention one by one."""

    def flat(
        q: Tensor, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor, cu_seqlens: Tensor,
        seq_lens: Tensor, block_table: Tensor, *rule: Any, **named: Any,
    ) -> Tensor:  # fmt: skip
        options = {option: named.pop(option, None)}
        step = StepMetadata(cu_seqlens, seq_lens, block_table)
        return attend(q, k, v, Caches(k_cache, v_cache), slot_mapping, step, AttentionRule(*rule, **named), **options)

    return flat


def _dense_by(attend: Callable[..., Tensor], option: str) -> Callable[..., Tensor]:
    """Wrap attend so that it takes the arguments of dense_attention one by one."""

    def flat(q: Tensor, k: Tensor, v: Tensor, *rule: Any, **named: Any) -> Tensor:
        options = {option: named.pop(option, None)}
        return attend(q, k, v, AttentionRule(*rule, **named), **options)

    return flat


paged_cpu, dense_cpu = _paged_by(paged_attention_cpu, "isa"), _dense_by(dense_attention_cpu, "isa")
paged_gpu, dense_gpu = _paged_by(paged_attention_cuda, "schedule"), _dense_by(dense_attention_cuda, "schedule")


def exact_attention(
    q: Tensor, k: Tensor, v: Tensor, scale: float, sliding_window: int = 0, *rest: Any, **named: Any
) -> Tensor:
    """Call reference_attention with the arguments of dense_attention, except kv_chunk."""
    return reference_attention(q, k, v, AttentionRule(scale, sliding_window, CHUNK, *rest, **named))


@dataclass(frozen=True)
class Sequence:
    """One whole sequence: q [n, H, D], k [n, KV heads, D], v [n, KV heads, DV]."""

    q: Tensor
    k: Tensor
    v: Tensor


def sequence(n: int, heads: int, kv_heads: int, d: int, dv: int, dtype: torch.dtype, seed: int = 0) -> Sequence:
    generator = torch.Generator().manual_seed(seed)

    def draw(heads: int, width: int) -> Tensor:
        normal, spread = (torch.randn(n, heads, width, generator=generator) for _ in range(2))
        return (normal * torch.exp(0.5 * spread)).to(dtype).to(DEVICE)

    return Sequence(draw(heads, d), draw(kv_heads, d), draw(kv_heads, dv))


def paged(
    parts: list[tuple[Sequence, int, int]],
    page: int,
    window: int = 0,
    schedule: AttentionSchedule | None = PLAIN,
    padding: int = 0,
    seed: int = 0,
    **scores: Any,
) -> list[Tensor]:
    """Attend from tokens first..last of each sequence; earlier keys are in scattered pages among NaN."""
    s0 = parts[0][0]
    width = max(-(-last // page) for _, _, last in parts) + 1
    table = torch.randperm(width * len(parts), generator=torch.Generator().manual_seed(seed)).view(len(parts), width)
    caches = [
        torch.full((table.numel(), page, *t.shape[1:]), math.nan, dtype=t.dtype, device=DEVICE) for t in (s0.k, s0.v)
    ]
    slots, news = [], []
    for row, (s, first, last) in zip(table, parts):
        position = torch.arange(last)
        slot = (row[position // page] * page + position % page).to(DEVICE)
        for cache, values in zip(caches, (s.k, s.v)):
            cache.flatten(0, 1)[slot[:first]] = values[:first]
        slots.append(slot[first:])
        news.append(last - first)
    q, k, v = (
        torch.cat([getattr(s, name)[first:last] for s, first, last in parts] + [getattr(s0, name)[:1]] * padding)
        for name in ("q", "k", "v")
    )
    slot_mapping = torch.cat([*slots, torch.full((padding,), -1, device=DEVICE)])
    cu = torch.tensor([0, *np.cumsum(news)], dtype=torch.int32, device=DEVICE)
    lens = torch.tensor([last for _, _, last in parts], dtype=torch.int32, device=DEVICE)
    scale = scores.pop("scale", q.shape[-1] ** -0.5)
    metadata = (slot_mapping, cu, lens, table.int().to(DEVICE))
    out = paged_gpu(q, k, v, *caches, *metadata, scale, window, CHUNK, schedule=schedule, **scores)
    assert_bitwise_equal(out[sum(news) :], torch.zeros_like(out[sum(news) :]), "padding")
    return list(out[: sum(news)].split(news))


def dense(
    s: Sequence, window: int = 0, schedule: AttentionSchedule | None = PLAIN, chunk: int = CHUNK, **scores: Any
) -> Tensor:
    """Attend over the whole sequence with the dense op -> [n, H, DV]."""
    q, k, v = (t[None].transpose(1, 2) for t in (s.q, s.k, s.v))
    scale = scores.pop("scale", s.q.shape[-1] ** -0.5)
    return dense_gpu(q, k, v, scale, window, chunk, schedule=schedule, **scores)[0].transpose(0, 1)


# name -> arguments of the attention ops; "sinks" and "alibi" are made for the number of heads
FEATURES: dict[str, dict[str, Any]] = {
    "softcap": {"softcap": 1.5},
    "sinks": {"sinks": True},
    "alibi": {"alibi_slopes": True},
    "negative scale": {"scale": -0.3},
    "no scale": {"scale": 0.0},
    "negative scale and sinks": {"scale": -0.3, "sinks": True},
    "all": {"softcap": 2.0, "sinks": True, "alibi_slopes": True},
}


def assert_shared_tokens_are_those_of_each(attend: Callable[..., Tensor], dtype: torch.dtype, device: str) -> None:
    """Fail unless a token that is computed in one sequence, and also written into another's blocks, serves both.

    Sequences of 9 and 8 tokens, 5 of each in their caches; the next 2 they share.
    """
    page, cached, common, lengths = 16, 5, 2, (9, 8)
    generator = torch.Generator().manual_seed(1)
    drawn = [torch.randn(lengths[0] + 1, heads, 32, generator=generator).to(dtype) for heads in (4, 2, 2)]
    rows = [torch.arange(lengths[0]), torch.tensor([*range(cached + common), lengths[0]])]  # indices of the draw
    metadata = {"dtype": torch.int32, "device": device}
    order = (0.2, 0, CHUNK)

    def caches() -> list[Tensor]:
        pair = [torch.full((2, page, 2, 32), torch.nan, dtype=dtype, device=device) for _ in range(2)]
        for s in range(2):
            for cache, values in zip(pair, drawn[1:], strict=True):
                cache[s, :cached] = values[rows[s][:cached]].to(device)
        return pair

    def step(parts: list[tuple[int, int]], copies: list[list[int]], pair: list[Tensor]) -> Tensor:
        """Run tokens of sequence s from index ``start`` on, for each (s, start)."""
        chosen = torch.cat([rows[s][start:] for s, start in parts])
        q, k, v = (values[chosen].to(device) for values in drawn)
        places = [s * page + p for s, start in parts for p in range(start, lengths[s])]
        slots = torch.tensor([*places, *(slot for copy in copies for slot in copy)], device=device)
        ends = np.cumsum([0, *(lengths[s] - start for s, start in parts)]).tolist()
        cu, lens, table = ends, [lengths[s] for s, _ in parts], [[s] for s, _ in parts]
        return attend(q, k, v, *pair, slots, *(torch.tensor(x, **metadata) for x in (cu, lens, table)), *order)

    apart, shared = caches(), caches()
    expected = [step([(s, cached)], [], apart) for s in range(2)]
    further = [-1] * 5
    further[:common] = [page + cached, page + cached + 1]
    actual = step([(0, cached), (1, cached + common)], [further, [-1] * 5], shared)
    assert_bitwise_equal(actual[:4], expected[0], "the sequence that computes them")
    assert_bitwise_equal(actual[4:], expected[1][common:], "the one that they are written for")
    for ours, theirs in zip(shared, apart, strict=True):
        assert_bitwise_equal(ours, theirs, "caches")


def features(name: str, heads: int, device: str = "cpu") -> dict[str, Any]:
    """Return the arguments of FEATURES[name] for so many query heads: sinks from -1 to 3, slopes from 1/2 downward."""
    given = dict(FEATURES[name])
    if "sinks" in given:
        given["sinks"] = torch.linspace(-1, 3, heads, device=device)
    if "alibi_slopes" in given:
        given["alibi_slopes"] = 2.0 ** -torch.linspace(1, 8, heads, device=device)
    return given
