"""Inductor's C++ for a CPU: its vector instructions, what is compiled ahead, and equal bits in every lane.

A vector function of SLEEF may look at all lanes before it chooses an algorithm: tan reduces all angles differently as
soon as one lane is large. A vector function also rounds differently from the C library's scalar function, which
computes what Inductor leaves scalar. So each operation of Inductor is EXACT, of SAME_LANES, or computed by
the scalar function lane by lane.
"""

import contextlib
import functools
import logging
import operator
import threading
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch

from detcompile.config import inductor_folder
from detcompile.storage import INDUCTOR_ADVICE, naming
from detcompile.templates.cpp_dispatch import build_direct_ops
from detcompile.templates.cpu.library import library
from detcompile.torch_internals.inductor import lowerings
from detcompile.torch_internals.inductor_cpp import (
    CppOverrides,
    CppVecOverrides,
    OpOverrides,
    VecISA,
    each_lane,
    list_vector_isas,
    pick_vec_isa,
    precompile_cpp_header,
)
from detcompile.torch_internals.kept_code import triton_key

# One IEEE operation, a comparison, a choice, bits or a cast: vectors and scalars give the same result. `masked`,
# `index_expr` and `value_expr` hold other operations. The certificate refuses `load_seed`, `rand`, `randn` and
# `randint64`: it has no rule for them.
EXACT = frozenset(
    (
        *("add", "sub", "mul", "truediv", "fma", "square", "reciprocal", "sqrt", "rsqrt", "abs", "neg", "sign", "relu"),
        *("copysign", "minimum", "maximum", "where", "floor", "ceil", "round", "trunc", "floordiv", "truncdiv"),
        *("eq", "ne", "lt", "gt", "le", "ge", "and_", "logical_and", "logical_not", "logical_or", "logical_xor"),
        *("bitwise_and", "bitwise_not", "bitwise_or", "bitwise_xor", "bitwise_left_shift", "bitwise_right_shift"),
        *("frexp", "to_dtype", "round_to_int", "masked", "index_expr", "value_expr"),
        *("load_seed", "rand", "randn", "randint64"),
    )
)
# Models compute these for every feature, so vectors pay off. Their float32 code has no branch: a lane's instructions do
# not depend on the other lanes. Scalar code takes one lane of a vector of equal values.
SAME_LANES = frozenset(["exp", "expm1", "erf", "log", "sigmoid", "tanh"])


@contextlib.contextmanager
def lane_by_lane() -> Iterator[None]:
    """Make generated C++ compute equal bits in every lane while entered.

    Functions outside EXACT and SAME_LANES are computed by the scalar function of each lane. Those of SAME_LANES are
    computed by one function in vectors, their tails and scalars. Sines and cosines get a buffer, as Inductor does for
    an exp with several readers: otherwise every head of every layer would recompute its rotary table.
    """
    with contextlib.ExitStack() as stack:
        for name, vector in _functions(CppVecOverrides).items():
            if name in EXACT:
                continue
            scalar = _functions(CppOverrides).get(name)
            if name in SAME_LANES:
                assert scalar is not None, f"Inductor has no scalar {name}"
                narrow: Callable[..., Any] = functools.partial(_float32_in_vectors, vector, _each_lane(scalar))
                _patch(stack, CppOverrides, name, functools.partial(_of_equal_lanes, vector, scalar))
            elif name == "remainder":
                narrow = functools.partial(_remainder, vector)
            else:
                assert scalar is not None, f"Inductor has no scalar {name}"
                narrow = _each_lane(scalar)
            _patch(stack, CppVecOverrides, name, narrow)
        for op in (torch.ops.aten.cos.default, torch.ops.aten.sin.default):
            stack.callback(operator.setitem, lowerings, op, lowerings[op])
            lowerings[op] = _once_on_cpu(lowerings[op])
        yield


def _functions(overrides: type) -> dict[str, Callable[..., Any]]:
    """Return the operations that a class of Inductor's overrides defines."""
    functions = {name: method.__func__ for name, method in vars(overrides).items() if isinstance(method, staticmethod)}
    return {name: function for name, function in functions.items() if name != "__new__"}


def _patch(stack: contextlib.ExitStack, overrides: type, name: str, function: Callable[..., Any]) -> None:
    function.__name__ = name
    stack.enter_context(mock.patch.object(overrides, name, staticmethod(function)))


def _each_lane(scalar: Callable[..., Any]) -> Callable[..., Any]:
    """Return vector C++ that calls a scalar function for each lane."""

    def of_lane(*operands: Any) -> str:
        lanes = [f"lane{i}" for i in range(len(operands))]
        taken = ", ".join(f"auto {lane}" for lane in lanes)
        return f"[]({taken}) {{ return {scalar(*lanes)}; }}({', '.join(map(str, operands))})"

    of_lane.__name__ = scalar.__name__  # Inductor decides by it whether the result is a mask
    return each_lane(of_lane)


def _float32_in_vectors(vector: Callable[..., Any], lanes: Callable[..., Any], x: Any) -> Any:
    return vector(x) if x.dtype is torch.float32 else lanes(x)


def _of_equal_lanes(vector: Callable[..., Any], scalar: Callable[..., Any], x: Any) -> str:
    """Return scalar C++ that, for float32, gives what the vector function gives in each lane."""
    if not vector_isa():
        return scalar(x)  # there are no vectors, and no header for them
    return (
        "[](auto lane) { if constexpr (std::is_same_v<decltype(lane), float>) {"
        " using Lanes = at::vec::Vectorized<float>; __at_align__ float lanes[Lanes::size()]; const Lanes x(lane);"
        f" ({vector('x')}).store(lanes); return lanes[0]; }} else return {scalar('lane')}; }}({x})"
    )


def _remainder(vector: Callable[..., Any], a: Any, b: Any) -> Any:
    """Compute float remainders with the C library's fmod, as scalar code does. SLEEF's depends on all lanes."""
    return OpOverrides.remainder(a, b) if a.dtype.is_floating_point else vector(a, b)


def _once_on_cpu(lower: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a lowering whose result gets its own buffer on a CPU."""

    def realized(x: Any) -> Any:
        result = lower(x)
        if result.get_device().type == "cpu":
            result.realize()
        return result

    return realized


logger = logging.getLogger(__name__)
THREAD = "detcompile compiling ahead"


def vector_isa() -> VecISA:
    """Return the vector instructions of Inductor's C++ here. The first call in a process may compile a test program.

    Raises:
        StorageError: Inductor's cache cannot be written.
    """
    with naming(inductor_folder(), INDUCTOR_ADVICE):
        list_vector_isas()
    return pick_vec_isa()


@functools.cache
def prepare_compiler() -> None:
    """Start in threads, once per process, what every program needs: vector instructions and our libraries.

    Inductor would compile a test program for every instruction set; here only the widest is compiled. The header of
    Inductor's kernels is precompiled, or hashed if it is cached. Code that needs a result makes it if the thread
    failed, and raises the error.
    """
    _start(list_vector_isas, precompile_cpp_header)
    _start(library, build_direct_ops)


@functools.cache
def prepare_triton() -> None:
    """Start in a thread, once per process, to hash Triton, whose cache needs it to find the first kernel."""
    _start(triton_key)


def _start(*tasks: Callable[[], object]) -> None:
    def run() -> None:
        for task in tasks:
            try:
                task()
            except Exception as error:  # its user tries again, and raises
                logger.debug("%s: %s", task, error)

    threading.Thread(target=run, name=THREAD, daemon=True).start()
