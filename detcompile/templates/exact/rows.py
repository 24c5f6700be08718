"""Functions and rows of docs/exact.md, in float32.

Legend: R row length, D digits.

    exact_function: a function in FUNCTIONS of each element
    exact_divide: x / y, with one rounding; x and y are broadcast
    exact_sum: the sum of each row, from its first element to its last
    exact_rms_norm: x / rms(x) * weight; the sum of squares is a sum of integers, so its order is free
    exact_layer_norm: (x - mean) / deviation * weight + bias, also with sums of integers
    exact_quantize: rows as integers of one or two int8 digits, and one scale per row
"""

import torch
from torch import Tensor

from detcompile.errors import InvalidInput
from detcompile.templates.cpu import library as cpu_library
from detcompile.templates.exact.gpu import (
    divide_cuda,
    function_cuda,
    layer_norm_cuda,
    quantize_cuda,
    rms_norm_cuda,
    sum_cuda,
)
from detcompile.templates.registration import define

# In the order of cpu/exact/rows.cpp.
FUNCTIONS = (
    *("exp2", "exp", "log", "rsqrt", "sigmoid", "silu", "gelu_tanh", "exp2_short", "bf16"),
    *("erf", "tanh", "log1p", "gelu", "sqrt", "floor"),
)
_LONGEST = 1 << 19  # elements of a row whose squares are summed
TOP = (0, 127, 32512)  # largest quantized magnitude, by digits; 32512 = 127 * 256


def function_cpu(x: Tensor, name: str, isa: str | None = None) -> Tensor:
    """Return the function of each element of x.

    Raises:
        InvalidInput: no function has this name.
    """
    x = x.contiguous()
    out = torch.empty_like(x)
    cpu_library.library(isa).detcompile_exact_function(
        x.data_ptr(), out.data_ptr(), x.numel(), require_function(name), cpu_library.thread_count()
    )
    return out


def divide_cpu(x: Tensor, y: Tensor, isa: str | None = None) -> Tensor:
    """Return x / y for broadcast x and y."""
    x, y = _broadcast(x, y)
    out = torch.empty_like(x)
    cpu_library.library(isa).detcompile_exact_divide(
        x.data_ptr(), y.data_ptr(), out.data_ptr(), x.numel(), cpu_library.thread_count()
    )
    return out


def rms_norm_cpu(x: Tensor, weight: Tensor, eps: float, isa: str | None = None) -> Tensor:
    """Run the op on the CPU, x [..., R], weight [R] -> [..., R].

    Raises:
        InvalidInput: a row's sum of squares may exceed int64.
    """
    require_length(x)
    x, weight = x.contiguous(), weight.contiguous()
    out, R = torch.empty_like(x), x.shape[-1]
    cpu_library.library(isa).detcompile_exact_rms_norm(
        x.data_ptr(), weight.data_ptr(), out.data_ptr(), eps, x.numel() // R, R, cpu_library.thread_count()
    )
    return out


def sum_cpu(x: Tensor, isa: str | None = None) -> Tensor:
    """Return the sums [...] of rows x [..., R], each from its first element to its last."""
    x, R = x.contiguous(), x.shape[-1]
    out = torch.empty(x.shape[:-1], dtype=torch.float32, device="cpu")
    cpu_library.library(isa).detcompile_exact_sum(
        x.data_ptr(), out.data_ptr(), x.numel() // R, R, cpu_library.thread_count()
    )
    return out


def layer_norm_cpu(x: Tensor, weight: Tensor, bias: Tensor, eps: float, isa: str | None = None) -> Tensor:
    """Run the op on the CPU, x [..., R], weight and bias [R] -> [..., R].

    Raises:
        InvalidInput: a row's sum of squares may exceed int64.
    """
    require_length(x)
    x, weight, bias = x.contiguous(), weight.contiguous(), bias.contiguous()
    out, R = torch.empty_like(x), x.shape[-1]
    cpu_library.library(isa).detcompile_exact_layer_norm(
        x.data_ptr(), weight.data_ptr(), bias.data_ptr(), out.data_ptr(), eps, x.numel() // R, R,
        cpu_library.thread_count(),
    )  # fmt: skip
    return out


def quantize_cpu(x: Tensor, num_digits: int, right: bool, isa: str | None = None) -> tuple[Tensor, Tensor]:
    """Return int8 digits [D, ..., R] and float32 scales [...] of rows x [..., R].

    Args:
        right: True for right operands (weights, keys, values): the scale is of high + low / 256, not 256 high + low.
    """
    x, R = x.contiguous(), x.shape[-1]
    digits = torch.empty((num_digits, *x.shape), dtype=torch.int8, device="cpu")
    scales = torch.empty(x.shape[:-1], dtype=torch.float32, device="cpu")
    unit = TOP[1] if right else TOP[num_digits]
    cpu_library.library(isa).detcompile_exact_quantize(
        x.data_ptr(), digits.data_ptr(), scales.data_ptr(), unit, num_digits, x.numel() // R, R,
        cpu_library.thread_count(),
    )  # fmt: skip
    return digits, scales


def _function_cuda(x: Tensor, name: str) -> Tensor:
    require_function(name)
    return function_cuda(x, name)


def _divide_cuda(x: Tensor, y: Tensor) -> Tensor:
    return divide_cuda(*_broadcast(x, y))


def _broadcast(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Return contiguous tensors of the common shape.

    Raises:
        InvalidInput: x and y do not broadcast.
    """
    try:
        x, y = torch.broadcast_tensors(x, y)
    except RuntimeError as error:
        raise InvalidInput(f"detcompile::exact_divide: {error}. Give tensors that broadcast") from error
    return x.contiguous(), y.contiguous()


def _rms_norm_cuda(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    require_length(x)
    return rms_norm_cuda(x, weight, eps)


def _layer_norm_cuda(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    require_length(x)
    return layer_norm_cuda(x, weight, bias, eps)


def require_length(x: Tensor) -> None:
    """Raise InvalidInput if a row's sum of squares may exceed int64."""
    if x.shape[-1] >= _LONGEST:
        raise InvalidInput(f"detcompile: an exact norm got rows of {x.shape[-1]} elements; the limit is {_LONGEST - 1}")


def require_function(name: str) -> int:
    """Return the index of a function.

    Raises:
        InvalidInput: no function has this name.
    """
    if name not in FUNCTIONS:
        raise InvalidInput(f"detcompile::exact_function: no function is named {name!r}; use one of {FUNCTIONS}")
    return FUNCTIONS.index(name)


define(
    "exact_function(Tensor x, str name) -> Tensor",
    {"x": "float32 ..."},
    cpu=function_cpu,
    cuda=_function_cuda,
    fake=lambda x, name: x.new_empty(x.shape),
)
define(
    "exact_divide(Tensor x, Tensor y) -> Tensor",
    {"x": "float32 *", "y": "float32 *"},
    cpu=divide_cpu,
    cuda=_divide_cuda,
    fake=lambda x, y: x + y,
)
define(
    "exact_rms_norm(Tensor x, Tensor weight, float eps) -> Tensor",
    {"x": "float32 ... R>0", "weight": "float32 R"},
    cpu=rms_norm_cpu,
    cuda=_rms_norm_cuda,
    fake=lambda x, weight, eps: x.new_empty(x.shape),
)
define(
    "exact_layer_norm(Tensor x, Tensor weight, Tensor bias, float eps) -> Tensor",
    {"x": "float32 ... R>0", "weight": "float32 R", "bias": "float32 R"},
    cpu=layer_norm_cpu,
    cuda=_layer_norm_cuda,
    fake=lambda x, weight, bias, eps: x.new_empty(x.shape),
)
define(
    "exact_sum(Tensor x) -> Tensor",
    {"x": "float32 ... R>0"},
    cpu=sum_cpu,
    cuda=sum_cuda,
    fake=lambda x: x.new_empty(x.shape[:-1]),
)
define(
    "exact_quantize(Tensor x, int num_digits, bool right) -> (Tensor, Tensor)",
    {"x": "float32 ... R>0", "num_digits": range(1, 3)},
    cpu=quantize_cpu,
    cuda=quantize_cuda,
    fake=lambda x, num_digits, right: (
        x.new_empty((num_digits, *x.shape), dtype=torch.int8),
        x.new_empty(x.shape[:-1]),
    ),
)
