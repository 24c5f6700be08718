"""Calls with operands that are wrong in every way: each is refused by an exception of ours, or answered.

Each operation is called with each tensor in turn freed, cut, on another device, of other dtypes, sizes and layouts,
each integer far out of range, and sizes from 0 on. A call that reads or writes what is not its own ends this process.
"""

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from detcompile.errors import DetcompileError
from detcompile.templates.cpp_dispatch import direct_ops
from detcompile.templates.exact.attention import row_words
from detcompile.templates.ops import ours
from tests.bits import assert_bitwise_equal

i32, i64, f32 = torch.int32, torch.int64, torch.float32
Arguments = dict[str, Any]


def rows(*shape: int) -> torch.Tensor:
    return torch.sin(torch.arange(1, 1 + torch.Size(shape).numel(), dtype=f32)).view(shape)


def ints(*values: int, dtype: torch.dtype = i32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype)


def matmul(M=3, N=5, K=8) -> Arguments:
    return {"x": rows(M, K), "w": rows(N, K), "bias": rows(N), "residual": rows(M, N), "radices": [2], "out_dtype": f32}


def batched_matmul(B=2, M=3, N=5, K=8) -> Arguments:
    return {"x": rows(B, M, K), "w": rows(B, N, K), "out_dtype": f32}


def gated_matmul(M=3, N=6, K=8) -> Arguments:
    return {"x": rows(M, K), "w": rows(N, K)}


def silu_mul(M=3, F=5) -> Arguments:
    return {"gate": rows(M, F), "up": rows(M, F)}


def rms_norm(M=3, R=8) -> Arguments:
    return {"x": rows(M, R), "weight": rows(R), "eps": 1e-6, "round_before_weight": True}


def layer_norm(M=3, R=8) -> Arguments:
    return {"x": rows(M, R), "weight": rows(R), "bias": rows(R), "eps": 1e-6}


def row_sum(M=3, R=8) -> Arguments:
    return {"x": rows(M, R), "out_dtype": f32}


def row_var_mean(M=3, R=8) -> Arguments:
    return {"x": rows(M, R), "correction": 1.0}


def softmax(M=3, R=40) -> Arguments:
    return {"x": rows(M, R), "out_dtype": f32, "radices": [2, 2]}


def logsumexp(M=3, R=40) -> Arguments:
    return {"x": rows(M, R), "radices": [2, 2]}


def embedding(V=5, D=4, T=3) -> Arguments:
    return {"weight": rows(V, D), "ids": torch.arange(T) % max(1, V)}


def expert_matmul(T=3, C=2, E=4, N=5, K=8) -> Arguments:
    ids = torch.arange(T * C).view(T, C) % max(1, E)
    return {"x": rows(T, K), "ids": ids, "w": rows(E, N, K), "bias": rows(E, N), "radices": [2]}


def expert_matmul_partial(T=3, C=2, E=4, N=5, K=8) -> Arguments:
    return {name: value for name, value in expert_matmul(T, C, E, N, K).items() if name != "bias"} | {"tp": 1}


def dequant_matmul(M=3, N=4, K=128) -> Arguments:
    w, scales = torch.arange(N * (K // 2), dtype=torch.uint8).view(N, K // 2), rows(-(-K // 64), -(-N // 2))
    zeros = torch.ones(scales.shape, dtype=torch.int16)
    fused = {"bias": rows(N), "residual": rows(M, N), "group": 64, "rows": 2, "radices": [2], "out_dtype": f32}
    return {"x": rows(M, K), "w": w, "scales": scales, "zeros": zeros, "mins": None} | fused


def dequant_matmul_with_mins(M=3, N=4, K=128) -> Arguments:
    arguments = dequant_matmul(M, N, K)
    return arguments | {"zeros": None, "mins": -3 * arguments["scales"]}


def dequant_matmul_partial(M=3, N=4, K=128) -> Arguments:
    fused = ("bias", "residual", "out_dtype")
    return {name: value for name, value in dequant_matmul(M, N, K).items() if name not in fused} | {"tp": 1}


def dequant_expert_matmul(T=3, C=2, E=4, N=4, K=128) -> Arguments:
    quantized = dequant_matmul(T, E * N, K)
    weight = {name: quantized[name] for name in ("w", "scales", "zeros", "mins")}
    given = {"x": rows(T, K), "ids": torch.arange(T * C).view(T, C) % max(1, E), **weight, "bias": rows(E, N)}
    return given | {"group": 64, "rows": 2, "radices": [2], "num_experts": E}


def dequant_expert_matmul_partial(T=3, C=2, E=4, N=4, K=128) -> Arguments:
    given = dequant_expert_matmul(T, C, E, N, K)
    return {name: value for name, value in given.items() if name != "bias"} | {"tp": 1}


def exact_function(M=3, R=8) -> Arguments:
    return {"x": rows(M, R), "name": "silu"}


def exact_divide(M=3, R=8) -> Arguments:
    return {"x": rows(M, R), "y": rows(M, R)}


def exact_sum(M=3, R=8) -> Arguments:
    return {"x": rows(M, R)}


def exact_softmax(M=3, V=8) -> Arguments:
    return {"x": rows(M, V)}


def exact_expert_linear(T=3, C=2, E=4, N=5, K=70, D=2) -> Arguments:
    w = (torch.arange(D * E * N * K) % 255 - 127).to(torch.int8).view(D, E, N, K)
    ids = torch.arange(T * C).view(T, C) % max(1, E)
    return {"x": rows(T, K), "ids": ids, "w": w, "w_scale": rows(E, N), "bias": rows(E, N), "x_digits": 2}


def exact_rms_norm(M=3, R=8) -> Arguments:
    return {"x": rows(M, R), "weight": rows(R), "eps": 1e-6}


def exact_layer_norm(M=3, R=8) -> Arguments:
    return {"x": rows(M, R), "weight": rows(R), "bias": rows(R), "eps": 1e-6}


def exact_quantize(M=3, R=8) -> Arguments:
    return {"x": rows(M, R), "num_digits": 2, "right": False}


def exact_linear(M=3, N=5, K=70, D=2) -> Arguments:
    w = (torch.arange(D * N * K) % 255 - 127).to(torch.int8).view(D, N, K)
    return {"x": rows(M, K), "w": w, "w_scale": rows(N), "bias": rows(N), "x_digits": 2}


def exact_fused_linear(M=3, N=5, K=70, D=2) -> Arguments:
    given = exact_linear(M, N, K, D)
    before = {"x": given.pop("x"), "up": rows(M, K), "function": "silu", "norm": rows(K), "eps": 1e-6}
    digits = given.pop("x_digits")
    return before | given | {"residual": rows(M, N), "rounded": True, "x_digits": digits}


def rule(Hq: int, *q: int) -> Arguments:
    window = {"scale": 0.3, "sliding_window": 0, "kv_chunk": 64, "softcap": 2.0}
    return window | {"sinks": rows(Hq), "alibi_slopes": rows(Hq), "attention_chunk": 0, "relative_bias": rows(*q, 2)}


def paged_attention(T=5, Hq=4, Hkv=2, D=8, Dv=4, blocks=6, size=4) -> Arguments:
    """Two sequences, of 3 tokens after 2 older ones and of T - 3 tokens."""
    new = max(0, T - 3)
    tensors = {"q": rows(T, Hq, D), "k": rows(T, Hkv, D), "v": rows(T, Hkv, Dv)}
    caches = {"k_cache": rows(blocks, size, Hkv, D), "v_cache": rows(blocks, size, Hkv, Dv)}
    metadata = {"slot_mapping": (2 + torch.arange(T)) % max(1, blocks * size), "cu_seqlens": ints(0, min(3, T), T)}
    table = torch.arange(4, dtype=i32).view(2, 2)
    return tensors | caches | metadata | {"seq_lens": ints(5, new), "block_table": table} | rule(Hq, T, Hq)


def plain_paged_attention(T=5, Hq=4, Hkv=2, D=8, Dv=4, blocks=6, size=4) -> Arguments:
    """Without what the direct operation leaves to Python."""
    arguments = paged_attention(T, Hq, Hkv, D, Dv, blocks, size)
    return {name: arguments[name] for name in (*list(arguments)[:9], "scale", "sliding_window", "kv_chunk")}


def cached_attention(T=5, Hq=4, Hkv=2, D=8, Dv=4, blocks=6, size=4) -> Arguments:
    arguments = paged_attention(T, Hq, Hkv, D, Dv, blocks, size)
    return {name: value for name, value in arguments.items() if name not in ("k", "v", "slot_mapping")}


def dense_attention(B=2, T=5, Hq=4, Hkv=2, D=8, Dv=4) -> Arguments:
    return {"q": rows(B, Hq, T, D), "k": rows(B, Hkv, T, D), "v": rows(B, Hkv, T, Dv)} | rule(Hq, B, Hq, T)


def exact_paged_attention(T=5, Hq=4, Hkv=2, D=8, blocks=6, size=4) -> Arguments:
    arguments = paged_attention(T, Hq, Hkv, D, D, blocks, size)
    caches = {name: torch.zeros(blocks, size, Hkv, row_words(D, 2)) for name in ("k_cache", "v_cache")}
    return {name: arguments[name] for name in list(arguments)[:9]} | caches


def exact_rotated_attention(T=5, Hq=4, Hkv=2, D=8, E=4, blocks=6, size=4) -> Arguments:
    tables = {"cos": rows(T, E), "sin": rows(T, E), "q_weight": rows(D), "k_weight": rows(D), "eps": 1e-6}
    return exact_paged_attention(T, Hq, Hkv, D, blocks, size) | tables


def exact_dense_attention(B=2, T=5, Hq=4, Hkv=2, D=8) -> Arguments:
    return {"q": rows(B, Hq, T, D), "k": rows(B, Hkv, T, D), "v": rows(B, Hkv, T, D), "kv_digits": 1}


def rope_cache(T=5, Hq=4, Hkv=2, D=8, Dv=4, E=4, blocks=6, size=4) -> Arguments:
    arguments = paged_attention(T, Hq, Hkv, D, Dv, blocks, size)
    norm = {"q_weight": rows(D), "k_weight": rows(D), "eps": 1e-6, "round_before_weight": True}
    kept = {name: arguments[name] for name in ("q", "k", "v", "k_cache", "v_cache", "slot_mapping")}
    return kept | {"cos": rows(T, E), "sin": rows(T, E)} | norm


def packed_attention(T=5, Hq=4, Hkv=2, D=8, Dv=4) -> Arguments:
    tensors = {"q": rows(T, Hq, D), "k": rows(T, Hkv, D), "v": rows(T, Hkv, Dv)}
    return tensors | {"cu_seqlens": ints(0, min(3, T), T)} | rule(Hq, T, Hq)


def packed_attention_backward(T=5, Hq=4, Hkv=2, D=8, Dv=4) -> Arguments:
    given = packed_attention(T, Hq, Hkv, D, Dv) | {"relative_bias": None}
    return {"g": rows(T, Hq, Dv), "out": rows(T, Hq, Dv), "lse": rows(T, Hq)} | given


def steps(T: int) -> Arguments:
    return {"state_slots": ints(0, 2), "cu_seqlens": ints(0, min(3, T), T), "seq_lens": ints(5, max(0, T - 3))}


def causal_conv(T=5, C=6, W=3) -> Arguments:
    return {"x": rows(T, C), "weight": rows(C, W), "bias": rows(C), "state": rows(3, max(0, W - 1), C)} | steps(T)


def dense_causal_conv(B=2, T=5, C=6, W=3) -> Arguments:
    return {"x": rows(B, T, C), "weight": rows(C, W), "bias": rows(C)}


def wkv(T=5, C=6) -> Arguments:
    return {"k": rows(T, C), "v": rows(T, C), "decay": rows(C), "bonus": rows(C), "state": rows(3, 3, C)} | steps(T)


def dense_wkv(B=2, T=5, C=6) -> Arguments:
    return {"k": rows(B, T, C), "v": rows(B, T, C), "decay": rows(C), "bonus": rows(C)}


def running_max(T=5, C=6) -> Arguments:
    return {"x": rows(T, C), "decay": rows(T, C), "state": rows(3, 1, C)} | steps(T)


def dense_running_max(B=2, T=5, C=6) -> Arguments:
    return {"x": rows(B, T, C), "decay": rows(B, T, C)}


def linear_recurrence(T=5, G=2, H=4, K=3, V=6) -> Arguments:
    tokens = {"q": rows(T, G, K), "k": rows(T, G, K), "v": rows(T, H, V), "decay": rows(T, H, V), "beta": rows(T, H)}
    return tokens | {"rates": rows(H, K, V), "state": rows(3, H, K, V)} | steps(T)


def dense_linear_recurrence(B=2, T=5, G=2, H=4, K=3, V=6) -> Arguments:
    tokens = {"q": rows(B, T, G, K), "k": rows(B, T, G, K), "v": rows(B, T, H, V)}
    return tokens | {"decay": rows(B, T, H, V), "beta": rows(B, T, H), "rates": rows(H, K, V)}


def token_logprobs(M=3, V=40) -> Arguments:
    given = {"logits": rows(M, V), "targets": torch.arange(M), "temperature": 1.0, "radices": [2, 2]}
    return given | {"normalizers": torch.zeros(M, 2, dtype=f32)}


def token_logprobs_backward(M=3, V=40) -> Arguments:
    return token_logprobs(M, V) | {"g": rows(M), "g_entropy": rows(M)}


def rms_norm_backward(M=3, R=8) -> Arguments:
    return {"g": rows(M, R)} | rms_norm(M, R)


def layer_norm_backward(M=3, R=8) -> Arguments:
    return {"g": rows(M, R), "x": rows(M, R), "weight": rows(R), "eps": 1e-6}


def softmax_backward(M=3, R=8) -> Arguments:
    return {"g": rows(M, R), "y": rows(M, R), "dtype": f32}


def token_matmul(T=8, N=3, K=4) -> Arguments:
    return {"g": rows(T, N), "x": rows(T, K), "leaves": ints(0, T // 4, T // 2), "rows_a_token": 2, "grid": -44}


def token_sum(T=8, N=3) -> Arguments:
    return {"g": rows(T, N), "grid": -44}


def token_scatter(T=8, D=3) -> Arguments:
    return {"g": rows(T, D), "ids": torch.arange(T) % 5, "num_rows": 5, "grid": -44}


def matmul_all_reduce(M=3, N=5, K=8) -> Arguments:
    return matmul(M, N, K) | {"radices_above": [2], "group": "nobody's"}


def tree_all_reduce(M=3, N=5) -> Arguments:
    given = {"partial": rows(M, N), "bias": rows(N), "residual": rows(M, N), "out_dtype": f32}
    return given | {"radices": [2], "group": "nobody's"}


def all_gather_columns(M=3, N=5) -> Arguments:
    return {"x": rows(M, N), "columns": 5, "group": "nobody's"}


def sharded_embedding(V=5, D=4, T=3) -> Arguments:
    return {"weight": rows(V, D), "ids": torch.arange(T), "first": 0, "group": "nobody's"}


def exact_linear_all_reduce(M=3, N=5, K=70, D=2) -> Arguments:
    return exact_linear(M, N, K, D) | {"group": "nobody's"}


def exact_expert_linear_all_reduce() -> Arguments:
    return exact_expert_linear() | {"group": "nobody's"}


COLLECTIVES = (
    matmul_all_reduce, tree_all_reduce, all_gather_columns, sharded_embedding, exact_linear_all_reduce,
    exact_expert_linear_all_reduce,
)  # fmt: skip
OPERATIONS = (
    matmul, batched_matmul, gated_matmul, silu_mul, rms_norm, layer_norm, row_sum, row_var_mean, softmax, logsumexp,
    embedding, expert_matmul, expert_matmul_partial, dequant_matmul, dequant_matmul_partial,
    dequant_expert_matmul, dequant_expert_matmul_partial, paged_attention,
    cached_attention, dense_attention, rope_cache, packed_attention, packed_attention_backward, causal_conv,
    dense_causal_conv, wkv, dense_wkv,
    running_max, dense_running_max, linear_recurrence, dense_linear_recurrence, token_logprobs, token_logprobs_backward,
    rms_norm_backward, layer_norm_backward, softmax_backward, token_matmul, token_sum, token_scatter,
    exact_function, exact_divide, exact_sum, exact_softmax, exact_rms_norm, exact_layer_norm, exact_quantize,
    exact_linear, exact_fused_linear, exact_expert_linear,
    exact_paged_attention, exact_rotated_attention, exact_dense_attention,
)  # fmt: skip
CALLS: dict[str, tuple[Callable[..., Arguments], Callable[..., Any]]] = {
    **{make.__name__: (make, getattr(ours, make.__name__)) for make in OPERATIONS},
    "log_softmax": (softmax, ours.log_softmax),
    "dequant_matmul_with_mins": (dequant_matmul_with_mins, ours.dequant_matmul),
    **{f"{make.__name__}_directly": (make, make.__name__) for make in (matmul, rms_norm, layer_norm)},
    "paged_attention_directly": (plain_paged_attention, "paged_attention"),
}
NUMBERS = (0, -1, 2**31 - 1, -(2**31), 2**40, 2**62, 2**63 - 1, -(2**63))
RADICES = ([0], [-1], [3], [2**32, 2**32], [2**40], [2**62, 3], [1] * 17, [2] * 16, [2**63 - 1], [1])
DTYPES = (torch.float64, torch.bfloat16, torch.int8, torch.int64, torch.int32, torch.bool, torch.complex64)


def resized(tensor: torch.Tensor, share: float) -> torch.Tensor:
    copy = tensor.clone()
    copy.untyped_storage().resize_(int(copy.nbytes * share))
    return copy


def without_meaning(tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors that no operation can accept in place of another."""
    yield "freed", resized(tensor, 0)
    yield "cut", resized(tensor, 0.5)
    behind = torch.cat([tensor.flatten(), tensor.flatten()])[1 : 1 + tensor.numel()].view_as(tensor)
    behind.untyped_storage().resize_(0)
    yield "freed, behind its first element", behind


def of_other_kinds(tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Other dtypes, and sizes that do not fit."""
    yield from ((str(dtype), tensor.to(dtype)) for dtype in DTYPES if dtype != tensor.dtype)
    yield from (("a dim more", tensor[None]), ("flat", tensor.flatten()), ("a dim less", tensor.flatten()[0]))
    for dim, size in enumerate(tensor.shape):
        yield f"one more of dim {dim}", torch.cat([tensor, tensor.narrow(dim, 0, 1)], dim)
        yield f"one less of dim {dim}", tensor.narrow(dim, 0, size - 1)
        yield f"none of dim {dim}", tensor.narrow(dim, 0, 0)


def laid_out(tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """The same shape and dtype, elsewhere in memory."""
    yield "expanded", tensor.flatten()[:1].expand(tensor.shape)
    yield "apart", torch.stack([tensor, tensor], -1)[..., 0]
    if tensor.dim() > 1:
        yield "turned", tensor.transpose(-1, -2).contiguous().transpose(-1, -2)
        yield "rows shared", tensor[:1].expand(tensor.shape)
        yield "sliced", torch.cat([tensor, tensor], -1)[..., : tensor.shape[-1]]


def outcome(call: Callable[..., Any], arguments: Arguments, what: str) -> Any:
    """The results of a call as a tuple; None if it was refused in words of ours."""
    try:
        results = call(**arguments)
    except DetcompileError as error:
        assert "detcompile::" in str(error) or "radices" in str(error) or "leaves" in str(error), f"{what}: {error}"
        return None
    except BaseException as error:
        pytest.fail(f"{what}: {type(error).__name__}: {error}")
    return results if isinstance(results, tuple) else (results,)


def tensors_of(arguments: Arguments) -> dict[str, torch.Tensor]:
    return {name: value for name, value in arguments.items() if isinstance(value, torch.Tensor)}


def called(name: str) -> tuple[Callable[..., Arguments], Callable[..., Any]]:
    make, call = CALLS[name]
    return make, direct_ops()[getattr(ours, call).default] if isinstance(call, str) else call


@pytest.mark.parametrize("name", CALLS)
def test_odd_operands_are_refused_or_answered(name):
    make, call = called(name)
    assert outcome(call, make(), "the call that the others are made of") is not None
    for operand, tensor in tensors_of(make()).items():
        for fault, other in without_meaning(tensor):
            assert outcome(call, make() | {operand: other}, f"{operand} {fault}") is None, f"{operand} {fault}"
        if len(tensors_of(make())) > 1:
            assert outcome(call, make() | {operand: tensor.to("meta")}, operand) is None, f"{operand} on meta"
        for fault, other in of_other_kinds(tensor):
            outcome(call, make() | {operand: other}, f"{operand} {fault}")
        for layout, other in laid_out(tensor):
            copy = other.clone(memory_format=torch.contiguous_format)
            pair = (outcome(call, make() | {operand: each}, f"{operand} {layout}") or () for each in (other, copy))
            for result, expected in zip(*pair):
                assert_bitwise_equal(result, expected, f"{operand} {layout}")


@pytest.mark.parametrize("name", CALLS)
def test_numbers_out_of_range_and_other_sizes_are_refused_or_answered(name):
    make, call = called(name)
    for argument, value in make().items():
        odd: Any = RADICES if isinstance(value, list) else NUMBERS if type(value) is int else ()
        odd = DTYPES if isinstance(value, torch.dtype) else odd
        for number in odd:
            if argument != "num_rows" or abs(number) <= 2**30:  # a table of so many rows is a matter of memory
                outcome(call, make() | {argument: number}, f"{argument} = {number}")
    sizes = inspect.signature(make).parameters
    for size in sizes:
        for value in (0, 1, 33, 130):
            outcome(call, make(**{size: value}), f"{size} = {value}")
    tiles = {"M": 33, "N": 32}
    outcome(call, make(**{size: tiles[size] for size in sizes.keys() & tiles.keys()}), f"{tiles}")


@pytest.mark.parametrize("make", COLLECTIVES)
def test_collectives_refuse_odd_operands_before_they_meet(make):
    call = getattr(ours, make.__name__)
    for operand, tensor in tensors_of(make()).items():
        for fault, other in without_meaning(tensor):
            assert outcome(call, make() | {operand: other}, f"{operand} {fault}") is None


ATTENTION = (
    "paged_attention", "paged_attention_directly", "cached_attention", "dense_attention", "packed_attention",
    "packed_attention_backward",
)  # fmt: skip
RECURRENCES = ("causal_conv", "wkv", "running_max", "linear_recurrence")
WRITING = ("paged_attention", "paged_attention_directly", "rope_cache")
FALLING = {"cu_seqlens": ints(0, 5, -(2**31)), "seq_lens": ints(5, 2**31 - 1)}
REFUSED: list[tuple[str, Arguments]] = [
    ("softmax", {"radices": [2**32, 2**32]}),
    ("softmax", {"radices": [2**40]}),
    ("log_softmax", {"radices": [2**62, 3]}),
    ("logsumexp", {"radices": [2**21]}),
    ("matmul", matmul(K=0) | {"radices": [2**32, 2**32]}),
    ("matmul_directly", matmul(K=0) | {"radices": [2**32, 2**32]}),
    *(("packed_attention_backward", {"lse": rows(5, 4).to(dtype)}) for dtype in DTYPES),
    *((name, CALLS[name][0](**{heads: 0})) for name in ATTENTION for heads in ("Hq", "Hkv")),
    ("linear_recurrence", linear_recurrence(G=0)),
    *((name, FALLING) for name in (*RECURRENCES, "paged_attention", "paged_attention_directly", "cached_attention")),
    *(("token_matmul", {"rows_a_token": number}) for number in (0, -1, 2**61 + 1, 2**62)),
    *((name, {"slot_mapping": torch.tensor([2, 3, 4, 5, 4])}) for name in WRITING),
    *((name, {"state_slots": ints(1, 1)}) for name in RECURRENCES),
    *((name, {"k_cache": rows(1, 1, 2, 8).expand(6, 4, 2, 8)}) for name in WRITING),
    ("dequant_matmul", {"bias": rows(9)}),
    ("dequant_matmul", {"residual": rows(3, 9)}),
    ("paged_attention", {"block_table": ints(0, 1)}),
    ("paged_attention", {"block_table": torch.zeros(1, 1, 2, dtype=i32)}),
    ("dense_causal_conv", {"weight": rows(6, 0)}),
    ("token_matmul", {"grid": 2000}),
    ("token_scatter", {"ids": torch.zeros(8, dtype=torch.complex64)}),
    ("token_logprobs", {"targets": torch.zeros(3, dtype=torch.complex64)}),
]


@pytest.mark.parametrize(("name", "change"), REFUSED, ids=[f"{name}-{'-'.join(c)[:30]}" for name, c in REFUSED])
def test_calls_without_a_right_answer_are_refused_unwritten(name, change):
    make, call = called(name)
    arguments = make() | change
    before = {name: value.clone() for name, value in tensors_of(arguments).items()}
    assert outcome(call, arguments, name) is None
    for operand, value in before.items():
        assert_bitwise_equal(arguments[operand], value, f"{operand} was written")


def test_one_cache_for_keys_and_values_is_refused():
    for name in ("paged_attention", "paged_attention_directly"):
        make, call = called(name)
        arguments = make(Dv=8)
        assert outcome(call, arguments | {"v_cache": arguments["k_cache"]}, name) is None
