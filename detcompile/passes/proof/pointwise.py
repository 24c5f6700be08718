"""The pointwise operations that the certificate admits: the bits of an element do not depend on its neighbors.

torch's tag only says that element i of a result depends on element i of each operand. The bits may depend on other
lanes of a vector, or differ between vectors and leftover elements. Inductor's C++ computes ADMITTED operations lane by
lane (passes.programs.lanes), and Triton uses one thread per element. A test compares these tables with torch's list: an
operation that is new in torch is refused until it is added to one of them.
"""

from typing import Any

import torch
from torch import fx

from detcompile.passes.graphs import shape_of
from detcompile.passes.proof.context import Context
from detcompile.passes.proof.provenance import Rows, join
from detcompile.torch_internals.inductor import fallbacks
from detcompile.torch_internals.operators import OpOverload, schema_of


def _named(namespace: str, names: str) -> frozenset[str]:
    """Return overloads by name. A name without an overload means `default`."""
    return frozenset(f"{namespace}.{name}" if "." in name else f"{namespace}.{name}.default" for name in names.split())


ADMITTED = _named(
    "aten",
    """
    __lshift__.Scalar __lshift__.Tensor __rshift__.Scalar __rshift__.Tensor abs acos acosh add.Scalar add.Tensor
    addcdiv addcmul asin asinh atan atan2 atanh bitwise_and.Scalar bitwise_and.Scalar_Tensor bitwise_and.Tensor
    bitwise_left_shift.Scalar_Tensor bitwise_left_shift.Tensor bitwise_left_shift.Tensor_Scalar bitwise_not
    bitwise_or.Scalar bitwise_or.Scalar_Tensor bitwise_or.Tensor bitwise_right_shift.Scalar_Tensor
    bitwise_right_shift.Tensor bitwise_right_shift.Tensor_Scalar bitwise_xor.Scalar bitwise_xor.Scalar_Tensor
    bitwise_xor.Tensor ceil clamp_max clamp_max.Tensor clamp_min clamp_min.Tensor clone copy copysign.Scalar
    copysign.Tensor cos cosh div.Scalar div.Scalar_mode div.Tensor div.Tensor_mode eq.Scalar eq.Tensor erf erfc
    erfinv exp exp2 expm1 floor fmod.Scalar fmod.Tensor ge.Scalar ge.Tensor gt.Scalar gt.Tensor hypot i0 isinf isnan
    ldexp.Tensor le.Scalar le.Tensor lgamma log log10 log1p log2 logical_and logical_not logical_or logical_xor
    lt.Scalar lt.Tensor maximum minimum mul.Scalar mul.Tensor ne.Scalar ne.Tensor neg nextafter pow.Scalar
    pow.Tensor_Scalar pow.Tensor_Tensor reciprocal relu remainder.Scalar remainder.Scalar_Tensor remainder.Tensor
    round rsqrt sigmoid sign signbit sin sinh special_bessel_j0 special_bessel_j1 special_bessel_y0
    special_bessel_y1 special_erfcx special_i1 special_modified_bessel_i0 special_modified_bessel_i1 sqrt sub.Scalar
    sub.Tensor tan tanh trunc where.self
    """,
) | _named(
    "prims",
    "abs bitwise_not convert_element_type exp2 fma hypot log2 maximum minimum nextafter reciprocal rsqrt sign",
)
# Inductor leaves these to torch's kernels: on a CPU, vectors and a scalar loop over the rest.
_POLYNOMIALS = (
    *("chebyshev_polynomial_t", "chebyshev_polynomial_u", "chebyshev_polynomial_v", "chebyshev_polynomial_w"),
    *("shifted_chebyshev_polynomial_t", "shifted_chebyshev_polynomial_u", "shifted_chebyshev_polynomial_v"),
    *("shifted_chebyshev_polynomial_w", "hermite_polynomial_h", "hermite_polynomial_he", "laguerre_polynomial_l"),
    "legendre_polynomial_p",
)
UNPROVEN = _named(
    "aten",
    """
    _conj_physical digamma equal frexp.Tensor gcd igamma igammac polygamma special_airy_ai special_i0e special_i1e
    special_modified_bessel_k0 special_modified_bessel_k1 special_ndtri special_scaled_modified_bessel_k0
    special_scaled_modified_bessel_k1 special_spherical_bessel_j0 special_zeta special_zeta.other_scalar
    special_zeta.self_scalar
    """
    + " ".join(f"special_{name}{overload}" for name in _POLYNOMIALS for overload in ("", ".n_scalar", ".x_scalar")),
) | _named("prims", "digamma igamma igammac")
# torch decomposes these before they reach the certificate. If a release stops doing so, review the operation.
OTHERWISE_SPELLED = _named(
    "aten",
    """
    __xor__.Scalar __xor__.Tensor angle celu clamp clamp.Tensor clip clip.Tensor conj_physical deg2rad elu
    float_power.Scalar float_power.Tensor_Scalar float_power.Tensor_Tensor fmax fmin frac gelu gelu_backward
    hardshrink hardsigmoid hardtanh heaviside isfinite isneginf isposinf lcm leaky_relu lerp.Scalar lerp.Tensor
    logaddexp logaddexp2 logit logit_backward masked_fill.Scalar max.other min.other mish mvlgamma nan_to_num
    native_dropout_backward positive rad2deg relu6 round.decimals rrelu rsub.Scalar selu sgn sigmoid_backward silu
    silu_backward sinc softplus softshrink special_entr special_log_ndtr special_xlog1py
    special_xlog1py.other_scalar special_xlog1py.self_scalar square tanh_backward threshold threshold_backward
    true_divide.Tensor xlogy.Scalar_Other xlogy.Scalar_Self xlogy.Tensor
    """,
) | _named("prims", "conj_physical fmax fmin signbit trunc")


def is_pointwise(target: Any) -> bool:
    """Return whether the bits of element i depend on element i of each operand only, in every vector."""
    return isinstance(target, OpOverload) and str(target) in ADMITTED and target not in fallbacks


def why_not_pointwise(target: Any) -> str | None:
    """Return why an operation with torch's pointwise tag is not admitted, and what to write; None for others."""
    if not isinstance(target, OpOverload) or torch.Tag.pointwise not in target.tags:
        return None
    if schema_of(target).is_mutable:
        return "writes into its operand: write it without an underscore or `out`"
    if str(target) in UNPROVEN or target in fallbacks:
        return (
            "torch's own kernel computes it, and an element's bits may depend on its place: write it in functions "
            "that have a rule (exp, log, lgamma, erf, ...), or compute it outside the model"
        )
    return "pointwise only according to torch: write it in operations that passes.proof.pointwise admits"


def pointwise(node: fx.Node, ctx: Context) -> Rows:
    """Return the rows of the operands, which must agree."""
    operands = [ctx.rows(arg, "arithmetic") for arg in node.all_input_nodes]
    return join(operands, len(shape_of(node)))
