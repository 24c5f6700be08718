"""Exponentials divided by their sum on the GPU, with one reciprocal per row.

The result equals tl.div_rn bit for bit or, in fewer instructions (FAST), is within three units in the last place.
"""

import triton
import triton.language as tl

_PACK = 8  # elements that a thread checks together
_LEAST = "0f0D800000"  # 2^-100: below it an FMA of `normalized` could lose bits


def _divide_tiny(pack: int) -> str:
    """Return PTX that redoes divisions with tiny numerators in fp64: quotients in place, then numerators, then weights.

    A quotient of two fp32 numbers, rounded to fp64 and then to fp32, is the correctly rounded fp32 quotient, subnormals
    included: unless it is a midpoint of two fp32 numbers, it is further from one than the fp64 rounding error.
    """
    quotients, numerators, weights = ([f"${group * pack + i}" for i in range(pack)] for group in (0, 2, 3))
    lines = ["{ .reg .pred some, tiny; .reg .f32 low; .reg .f64 e, w, near, wrong, q;"]
    lines += [f"mov.f32 low, {numerators[0]};", *(f"min.f32 low, low, {e};" for e in numerators[1:])]
    lines += [f"setp.lt.f32 some, low, {_LEAST};", "@!some bra DONE;", "setp.ne.u32 some, 0, 0;"]
    for e in numerators:  # zeros are common and already correct
        lines += [f"setp.gt.f32 tiny, {e}, 0f00000000;", f"setp.lt.and.f32 tiny, {e}, {_LEAST}, tiny;"]
        lines += ["or.pred some, some, tiny;"]
    lines += ["@!some bra DONE;"]
    for quotient, e, weight in zip(quotients, numerators, weights, strict=True):
        lines += [f"cvt.f64.f32 e, {e};", f"cvt.f64.f32 w, {weight};", "rcp.approx.ftz.f64 near, w;", "neg.f64 w, w;"]
        lines += ["fma.rn.f64 wrong, w, near, 0d3FF0000000000000;", "fma.rn.f64 near, near, wrong, near;"] * 2
        lines += ["mul.f64 q, e, near;", "fma.rn.f64 wrong, w, q, e;", "fma.rn.f64 q, wrong, near, q;"]
        lines += [f"cvt.rn.f32.f64 {quotient}, q;"]
    return "\n".join([*lines, "DONE: }"])


_DIVIDE_TINY = tl.constexpr(_divide_tiny(_PACK))
_REGISTERS = tl.constexpr(",".join(["=&f"] * _PACK + [str(i) for i in range(_PACK)] + ["f"] * (2 * _PACK)))
_ELEMENTS = tl.constexpr(_PACK)


@triton.jit
def _near_reciprocal(x):
    """1 / x within one unit in the last place; GPU only."""
    return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def normalized(e_RFC, weight_R, ONCE: tl.constexpr, FAST: tl.constexpr):
    """e / weight for exponentials e in [0, 1] (or NaN) and their sum, 1 <= weight < 2^20 (or NaN).

    ONCE uses one reciprocal per row. tl.div_rn uses one per element and then these three operations, unless they could
    lose bits for its operands; here one check per thread, not per element, covers that. FAST multiplies by the
    hardware's approximate reciprocal of a row.
    """
    tl.static_assert(not (ONCE and FAST))
    weight = tl.broadcast_to(weight_R[:, None, None], e_RFC.shape)
    if FAST:
        quotient = e_RFC * _near_reciprocal(weight_R)[:, None, None]
    elif ONCE:
        near = _near_reciprocal(weight_R)
        near = tl.fma(near, tl.fma(-weight_R, near, 1.0), near)
        reciprocal = tl.broadcast_to(near[:, None, None], e_RFC.shape)
        quotient = e_RFC * reciprocal
        quotient = tl.fma(reciprocal, tl.fma(-weight, quotient, e_RFC), quotient)
        quotient = tl.inline_asm_elementwise(
            _DIVIDE_TINY, _REGISTERS, [quotient, e_RFC, weight], dtype=tl.float32, is_pure=True, pack=_ELEMENTS
        )
    else:
        quotient = tl.div_rn(e_RFC, weight)
    return quotient
