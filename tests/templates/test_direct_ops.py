"""Operations called without Python: the bits and refusals of their namesakes, and no frame of Python in plain calls."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from detcompile.errors import DetcompileError
from detcompile.templates import direct_ops as module
from tests.bits import assert_bitwise_equal
from tests.python_frames import functions_entered
from tests.templates.cases import DTYPES, PagedCache, normal, sample

DIRECT = {op.__name__.removesuffix(".default"): (op, same) for op, same in module.direct_ops().items()}


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
    op, same = DIRECT["matmul"]
    arguments = (x, w, given_bias, given_residual, radices if k % 8 == 0 else [], out_dtype)
    assert_bitwise_equal(same(*arguments), op(*arguments))


@given(
    dtype=st.sampled_from(DTYPES),
    shape=st.lists(st.integers(0, 5), max_size=3),
    length=st.sampled_from([1, 15, 32, 100, 700]),
    dims=st.permutations(range(3)),
    layout=LAYOUTS,
    weight=st.sampled_from([None, *DTYPES]),
)
def test_norms_have_the_same_bits(dtype, shape, length, dims, layout, weight):
    x = sample("heavy", (*shape, length), dtype, 1)
    if layout == "turned" and x.dim() == 4:
        x = x.permute(*dims, 3).contiguous().permute(*(dims.index(i) for i in range(3)), 3)
    elif layout != "turned":
        x = laid_out(x, layout)
    scale = None if weight is None else normal((2 * length,), weight, 2)[::2]
    for name, parameters in (
        ("rms_norm", (scale, 1e-6, True)),
        ("rms_norm", (scale, 1e-6, False)),
        ("layer_norm", (scale, scale, 1e-6)),
        ("layer_norm", (scale, None, 1e-6)),
    ):
        op, same = DIRECT[name]
        found = same(x, *parameters)
        assert_bitwise_equal(found, op(x, *parameters))
        assert found.is_contiguous()


def test_rows_that_share_memory_are_told_apart():
    x = normal((4, 1, 32), torch.float32).expand(4, 3, 32)
    op, same = DIRECT["rms_norm"]
    assert_bitwise_equal(same(x, None, 1e-6, True), op(x.contiguous(), None, 1e-6, True))


SCORES: list[dict[str, Any]] = [
    {},
    {"softcap": 2.0},
    {"sinks": normal((4,), torch.float32)},
    {"alibi_slopes": normal((4,), torch.float32)},
    {"relative_bias": normal((7, 4, 5), torch.float32)},
]


@pytest.mark.parametrize("dtype", DTYPES)
@given(
    scores=st.sampled_from(SCORES),
    window=st.sampled_from([0, 5]),
    apart=st.booleans(),
    cached=st.integers(0, 80),
    scale=st.sampled_from([0.25, -0.25, 0.0]),
)
def test_attention_has_the_same_bits_and_writes_the_same_keys(dtype, scores, window, apart, cached, scale):
    (op, same), count = DIRECT["paged_attention"], 7
    caches = [PagedCache.poisoned(cached + count, 16, 2, 32, 16, dtype) for _ in range(2)]
    results = []
    for call, cache in zip((op, same), caches):
        for step in (cached, count) if cached else (count,):
            q, k, v = (normal((step, heads, dim), dtype, heads) for heads, dim in ((4, 32), (2, 32), (2, 16)))
            q = laid_out(q, "apart") if apart else q
            given_scores = scores if step == count else {}
            out = call(q, k, v, cache.k_cache, cache.v_cache, *cache.step(step), scale, window, 64, **given_scores)
        results.append(out)
    assert_bitwise_equal(*results)
    for name in ("k_cache", "v_cache"):
        assert_bitwise_equal(*(getattr(cache, name) for cache in caches))


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


@pytest.mark.parametrize("name", module.OPS)
def test_a_plain_call_enters_no_python(name):
    op, same = DIRECT[name]
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
    for call in DIRECT[name]:
        with pytest.raises(DetcompileError) as error:
            call(**arguments)
        errors.append((error.type, str(error.value)))
    assert errors[0] == errors[1]
    for key, value in before.items():
        assert_bitwise_equal(arguments[key], value, f"{key} was written")


def test_without_a_compiler_operations_are_called_through_python(tmp_path, monkeypatch):
    monkeypatch.setenv("DETCOMPILE_CACHE", str(tmp_path))
    monkeypatch.setenv("CXX", "false")
    with pytest.warns(UserWarning, match="through Python, which is slower: .*could not be compiled"):
        assert module.direct_ops.__wrapped__() == {}
