"""Shared parts of the tests of exact-1's templates: tensors, comparisons, and attention in steps over pages."""

from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from detcompile.step import PADDING_SLOT
from detcompile.templates.attention.operands import Caches, StepMetadata
from detcompile.templates.exact.attention import ExactRule, row_words
from tests.exact import definition as exact
from tests.exact import golden
from tests.exact.definition import Array, F, U

__all__ = [
    "DIVIDED",
    "QUOTIENTS",
    "RULES",
    "RULE_NAMES",
    "assert_same",
    "function_inputs",
    "paged",
    "ruled_case",
    "tensor",
]


def tensor(array: Array) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array))


def function_inputs(name: str, step: int = 1) -> Array:
    """Return every step-th input of golden's sample and the ends of all ranges; their number is a multiple of 16."""
    ends = np.array([0, 1, 0x7FFFFF, 0x800000, 0x7F7FFFFF, 0x7F800000, 0x7FC00000, 0x3F800000], U)  # +: zero to NaN, 1
    x = np.concatenate([golden.function_sample()[::step], ends.view(F), -ends.view(F)])
    return np.where(x == x, x, F(0)) if name == "exp2_short" else x


def assert_same(actual: Tensor, expected: Array) -> None:
    """Fail unless the bytes are equal; every NaN counts as one value."""
    assert actual.shape == expected.shape
    assert exact.digest(actual.cpu().numpy()) == exact.digest(expected)


ENDS = np.array([0.0, 1e-45, 1.1754942e-38, 1.0, 3.0, 3.4028235e38, np.inf, np.nan], F)
DIVIDED = np.repeat([*ENDS, *-ENDS], 16).astype(F), np.tile([*ENDS, *-ENDS], 16).astype(F)  # every pair
with np.errstate(all="ignore"):
    QUOTIENTS = DIVIDED[0] / DIVIDED[1]
SINKS, SLOPES = (torch.tensor(given) for given in ([-3.0, 0.25, 4.0, 11.5], [0.5, 0.0625, 1.25, 0.01]))
# Rules for 4 heads with keys of 32 features; the last field is the width of values.
RULES: list[tuple[ExactRule, int]] = [
    (ExactRule(0.25), 32),
    (ExactRule(window=1), 32),
    (ExactRule(0.3, 140), 32),
    (ExactRule(window=257), 32),
    (ExactRule(window=1100), 32),
    (ExactRule(softcap=2.5), 32),
    (ExactRule(0.25, 40, softcap=30.0), 20),
    (ExactRule(sinks=SINKS), 32),
    (ExactRule(slopes=SLOPES), 32),
    (ExactRule(chunk=100), 32),
    (ExactRule(), 60),
    (ExactRule(0.4, 200, 3.0, SINKS, SLOPES, 150), 12),
]
RULE_NAMES = ["scale", "one key", "scale and window", "two blocks", "past a group", "cap", "cap and narrow values"]
RULE_NAMES += ["sinks", "ALiBi", "chunks", "wide values", "all of them"]


def ruled_case(rule: ExactRule, width: int) -> tuple[tuple[Array, Array, Array, int], Array]:
    """Return operands of attention by a rule, and the reference's result."""
    q, k, v, digits = golden.attention_cases()["kv 2, 1200" if rule.window == 1100 else "poisoned"]
    v = np.concatenate([v, v[..., ::-1]], -1)[..., :width]
    plain = [field.numpy() if isinstance(field, Tensor) else field for field in rule]
    return (q, k, v, digits), golden.attended(q, k, v, digits, *plain)


def paged(
    attend: Callable[..., Tensor],
    case: tuple[Array, Array, Array, int],
    cuts: Sequence[int],
    block_size: int,
    device: str = "cpu",
    write: Callable[..., Tensor] | None = None,
) -> Tensor:
    """Run two copies of a sequence in steps that end at `cuts`, over shuffled pages; return the rows of its queries.

    Each step ends with a row of padding. Words of unused slots are NaN or 3e38, which are also scales.

    Args:
        write: runs the steps before those of the queries, if given.
    """
    q, k, v, digits = case
    S, G, dim = k.shape
    width = v.shape[2]
    queries = np.zeros((S, q.shape[1], dim), F)
    queries[S - len(q) :] = q
    pages = -(-S // block_size)
    table = torch.randperm(2 * pages + 1, generator=torch.Generator().manual_seed(S))[: 2 * pages].view(2, pages).int()
    shapes = [(2 * pages + 1, block_size, G, row_words(size, digits)) for size in (dim, width)]
    caches = Caches(*(torch.full(shape, float("nan"), device=device) for shape in shapes))
    for cache in caches:
        cache[:, 1::2] = 3e38
    edges = [0, *(cut for cut in cuts if cut < S), S]
    if write is not None:
        edges = [0, *(S - len(q) + cut for cut in (0, *cuts) if cut < len(q)), S]
    parts = []
    for start, stop in pairwise(edges):
        n, position = stop - start, torch.arange(start, stop)
        slots = [table[s, position // block_size].long() * block_size + position % block_size for s in range(2)]
        slot_mapping = torch.cat([*slots, torch.tensor([PADDING_SLOT])]).to(device)
        tokens = [tensor(np.concatenate([x[start:stop]] * 2 + [x[:1]])).to(device) for x in (queries, k, v)]
        step = StepMetadata(
            *(m.int().to(device) for m in (torch.tensor([0, n, 2 * n]), torch.tensor([stop, stop]), table))
        )
        run = attend if write is None or start >= S - len(q) else write
        out = run(*tokens, caches, slot_mapping, step)
        assert not out[2 * n :].any()
        assert exact.digest(out[:n].cpu().numpy()) == exact.digest(out[n : 2 * n].cpu().numpy())
        parts.append(out[:n])
    return torch.cat(parts)[S - len(q) :]
