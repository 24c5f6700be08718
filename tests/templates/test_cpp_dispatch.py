"""Operations called without Python: the bits and refusals of their namesakes, and no frame of Python in plain calls."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from detcompile.errors import DetcompileError
from detcompile.templates.cpp_dispatch import OPS, direct_library, direct_ops
from tests.bits import assert_bitwise_equal
from tests.python_frames import functions_entered
from tests.templates.cases import DTYPES, PagedCache, normal, sample


def both(name: str) -> tuple[torch._ops.OpOverload, torch._ops.OpOverload]:
    """An operation, and what does the same directly."""
    op = getattr(torch.ops.detcompile, name).default
    return op, direct_ops()[op]


def laid_out(x: torch.Tensor, layout: str) -> torch.Tensor:
    """The same values: contiguous, columns side by side, apart in every dim, or rows that are a slice of wider ones."""
    if layout == "turned":
        return x.transpose(-1, -2).contiguous().transpose(-1, -2)
    if layout == "apart":
        return torch.stack([x, x + 1], -1)[..., 0]
    return torch.cat([x, x + 1], -1)[..., : x.shape[-1]] if layout == "sliced" else x


LAYOUTS = st.sampled_from(["plain", "turned", "apart", "sliced"])


@given(
    dtype=st.sampled_from(DTYPES),
    m=st.integers(0, 20),
    n=st.integers(1, 40),
    k=st.sampled_from([0, 1, 8, 72, 144]),
    radices=st.sampled_from([[], [2, 2, 2], [1, 4]]),
    layouts=st.tuples(LAYOUTS, LAYOUTS, LAYOUTS),
    bias=st.sampled_from([None, *DTYPES]),
    residual=st.sampled_from([None, *DTYPES]),
    out_dtype=st.sampled_from([None, *DTYPES]),
)
def test_products_have_the_same_bits(dtype, m, n, k, radices, layouts, bias, residual, out_dtype):
    x, w = (laid_out(sample("heavy", (rows, k), dtype, rows), layout) for rows, layout in zip((m, n), layouts))
    given_bias = None if bias is None else laid_out(normal((n, 1), bias, 3), layouts[2])[:, 0]
    given_residual = None if residual is None else laid_out(normal((m, n), residual, 4), layouts[2])
    op, same = both("matmul")
    arguments = (x, w, given_bias, given_residual, radices if k % 8 == 0 else [], out_dtype)
    assert_bitwise_equal(same(*arguments), op(*arguments))


@given(
    dtype=st.sampled_from(DTYPES),
    shape=st.lists(st.integers(0, 5), max_size=3),
    length=st.sampled_from([1, 15, 32, 100, 700]),
    order=st.permutations(range(4)),
    layout=LAYOUTS,
    weight=st.sampled_from([None, *DTYPES]),
)
def test_norms_have_the_same_bits(dtype, shape, length, order, layout, weight):
    values = sample("heavy", (*shape, length), dtype, 1)
    places = [place for place in order if place < values.dim()]  # of the dims in memory
    x = values.permute(places).contiguous().permute(*(places.index(dim) for dim in range(values.dim())))
    x = x if layout == "turned" else laid_out(x, layout)
    scale = None if weight is None else normal((2 * length,), weight, 2)[::2]
    for name, parameters in (
        ("rms_norm", (scale, 1e-6, True)),
        ("rms_norm", (scale, 1e-6, False)),
        ("layer_norm", (scale, scale, 1e-6)),
        ("layer_norm", (scale, None, 1e-6)),
    ):
        op, same = both(name)
        actual = same(x, *parameters)
        assert_bitwise_equal(actual, op(values, *parameters))
        assert actual.is_contiguous()


@pytest.mark.parametrize("x", [normal((4, 1, 32), torch.float32).expand(4, 3, 32), normal((1, 5), torch.float32).t()])
def test_rows_with_odd_strides_give_equal_bits(x):
    """Some share memory, or have one element and no unit stride."""
    op, same = both("rms_norm")
    assert_bitwise_equal(same(x, None, 1e-6, True), op(x.clone(), None, 1e-6, True))


SCORES: list[dict[str, Any]] = [
    {},
    {"attention_chunk": 64},
    {"sliding_window": 5},
    {"softcap": 2.0},
    {"sinks": normal((4,), torch.float32)},
    {"alibi_slopes": normal((4,), torch.float32)},
]


@dataclass(frozen=True)
class Step:
    """Tokens of several sequences, padding behind them, and the caches that they are written to."""

    dtype: torch.dtype
    cache_dtype: torch.dtype
    lengths: list[tuple[int, int]]  # keys of the cache, and new tokens, of each sequence
    padding: int
    copies: int  # slots a token
    heads_first: bool  # in the caches

    def caches(self) -> tuple[torch.Tensor, torch.Tensor]:
        blocks = sum(-(-(cached + new) // 16) for cached, new in self.lengths) * self.copies
        shapes = [(2, blocks, 16, dim) if self.heads_first else (blocks, 16, 2, dim) for dim in (32, 16)]
        caches = [normal(shape, self.cache_dtype, shape[-1]) for shape in shapes]
        return tuple(cache.permute(1, 2, 0, 3) for cache in caches) if self.heads_first else tuple(caches)

    def arguments(self) -> dict[str, Any]:
        T = sum(new for _, new in self.lengths) + self.padding
        q, k, v = (normal((T, heads, dim), self.dtype, heads) for heads, dim in ((4, 32), (2, 32), (2, 16)))
        widths = [-(-(cached + new) // 16) for cached, new in self.lengths]
        table = torch.zeros(len(widths), max(widths), dtype=torch.int32)
        slots = torch.full((self.copies, T), -1)
        first = at = 0
        for row, ((cached, new), width) in enumerate(zip(self.lengths, widths)):
            table[row, :width] = torch.arange(first, first + width)
            for copy in range(self.copies):
                slots[copy, at : at + new] = (first + copy * sum(widths)) * 16 + torch.arange(cached, cached + new)
            first, at = first + width, at + new
        starts = torch.tensor([0, *(new for _, new in self.lengths)]).cumsum(0).int()
        lens = torch.tensor([cached + new for cached, new in self.lengths], dtype=torch.int32)
        metadata = {"slot_mapping": slots.flatten(), "cu_seqlens": starts, "seq_lens": lens, "block_table": table}
        return {"q": q, "k": k, "v": v} | metadata | {"scale": 0.25, "sliding_window": 0, "kv_chunk": 64}


@given(
    step=st.builds(
        Step,
        dtype=st.sampled_from(DTYPES),
        cache_dtype=st.sampled_from(DTYPES),
        lengths=st.lists(st.tuples(st.integers(0, 80), st.integers(1, 7)), min_size=1, max_size=3),
        padding=st.integers(0, 3),
        copies=st.integers(1, 2),
        heads_first=st.booleans(),
    ),
    scores=st.sampled_from(SCORES),
    scale=st.sampled_from([0.25, -0.25, 0.0]),
    layout=LAYOUTS,
    shared=st.booleans(),
)
def test_attention_has_the_same_bits_and_writes_the_same_keys(step, scores, scale, layout, shared):
    arguments = step.arguments() | scores | {"scale": scale}
    arguments["q"] = laid_out(arguments["q"], layout)
    if shared:  # one head of values for all
        arguments["v"] = arguments["v"][:, :1].expand_as(arguments["v"])
    results = []
    for call in both("paged_attention"):
        k_cache, v_cache = step.caches()
        results.append((call(**arguments, k_cache=k_cache, v_cache=v_cache), k_cache, v_cache))
    for actual, expected in zip(*results):
        assert_bitwise_equal(actual, expected)


def attention_arguments() -> dict[str, Any]:
    cache = PagedCache.poisoned(40, 16, 2, 32, 32, torch.float32)
    q, k, v = (normal((5, heads, 32), torch.float32, heads) for heads in (4, 2, 2))
    tensors = {"q": q, "k": k, "v": v, "k_cache": cache.k_cache, "v_cache": cache.v_cache}
    step = dict(zip(("slot_mapping", "cu_seqlens", "seq_lens", "block_table"), cache.step(5)))
    return tensors | step | {"scale": 0.25, "sliding_window": 0, "kv_chunk": 64}


def arguments_of(name: str) -> dict[str, Any]:
    if name == "paged_attention":
        return attention_arguments()
    x, vector = normal((6, 32), torch.float32), normal((32,), torch.float32)
    if name == "matmul":
        return {"x": x, "w": normal((8, 32), torch.float32), "bias": None, "residual": None, "radices": [2, 2]}
    norm: dict[str, Any] = {"x": x, "weight": vector, "eps": 1e-6}
    return norm | ({"round_before_weight": True} if name == "rms_norm" else {"bias": vector})


@pytest.mark.parametrize("name", OPS)
def test_a_plain_call_enters_no_python(name):
    op, same = both(name)
    arguments = arguments_of(name)
    assert f"{name}_cpu" in functions_entered(lambda: op(**arguments))
    assert functions_entered(lambda: same(**arguments)) == set()


REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("matmul", {"w": normal((8, 31), torch.float32)}),
    ("matmul", {"w": normal((8, 32), torch.bfloat16)}),
    ("matmul", {"x": normal((6, 32), torch.float64), "w": normal((8, 32), torch.float64)}),
    ("matmul", {"x": normal((32,), torch.float32)}),
    ("matmul", {"radices": [3]}),
    ("matmul", {"radices": [0]}),
    ("matmul", {"radices": [-2, -2]}),
    ("matmul", {"radices": [1] * 17}),
    ("matmul", {"bias": normal((7,), torch.float32)}),
    ("matmul", {"bias": normal((8,), torch.float64)}),
    ("matmul", {"residual": normal((6, 7), torch.float32)}),
    ("matmul", {"out_dtype": torch.float64}),
    ("rms_norm", {"x": normal((3, 0), torch.float32)}),
    ("rms_norm", {"x": torch.tensor(1.0)}),
    ("rms_norm", {"x": normal((3, 32), torch.float64)}),
    ("rms_norm", {"weight": normal((31,), torch.float32)}),
    ("layer_norm", {"bias": normal((31,), torch.float32)}),
    ("layer_norm", {"weight": normal((32,), torch.float64)}),
    ("paged_attention", {"kv_chunk": 65}),
    ("paged_attention", {"kv_chunk": 0}),
    ("paged_attention", {"sliding_window": -1}),
    ("paged_attention", {"sliding_window": 4, "attention_chunk": 64}),
    ("paged_attention", {"scale": float("nan")}),
    ("paged_attention", {"softcap": -1.0}),
    ("paged_attention", {"q": normal((5, 3, 32), torch.float32)}),
    ("paged_attention", {"k": normal((4, 2, 32), torch.float32)}),
    ("paged_attention", {"v": normal((5, 2, 32), torch.bfloat16)}),
    ("paged_attention", {"k_cache": normal((6, 16, 2, 31), torch.float32)}),
    ("paged_attention", {"v_cache": normal((9, 16, 2, 32), torch.float32)}),
    ("paged_attention", {"slot_mapping": torch.tensor([0, 1, 2, 3, 1 << 40])}),
    ("paged_attention", {"slot_mapping": torch.arange(4)}),
    ("paged_attention", {"cu_seqlens": torch.tensor([1, 5], dtype=torch.int32)}),
    ("paged_attention", {"cu_seqlens": torch.tensor([0, 5])}),
    ("paged_attention", {"seq_lens": torch.tensor([4], dtype=torch.int32)}),
    ("paged_attention", {"block_table": torch.full((1, 3), 99, dtype=torch.int32)}),
]


@pytest.mark.parametrize(("name", "change"), REFUSED, ids=["-".join((name, *change)) for name, change in REFUSED])
def test_what_does_not_fit_is_refused_in_the_same_words(name, change):
    arguments, errors = arguments_of(name) | change, []
    before = {key: value.clone() for key, value in arguments.items() if isinstance(value, torch.Tensor)}
    for call in both(name):
        with pytest.raises(DetcompileError) as error:
            call(**arguments)
        errors.append((error.type, str(error.value)))
    assert errors[0] == errors[1]
    for key, value in before.items():
        assert_bitwise_equal(arguments[key], value, f"{key} was written")


def test_without_a_compiler_operations_are_called_through_python(tmp_path, monkeypatch):
    monkeypatch.setenv("DETCOMPILE_CACHE", str(tmp_path))
    monkeypatch.setenv("CXX", "false")
    with pytest.warns(UserWarning, match=r"through Python, which is slower: .*C\+\+"):
        assert direct_library.__wrapped__() is None
