"""exact-1 in numpy, as docs/exact.md defines it: functions, products, norm, rope, attention, a decoder.

Nothing here is fast or shared with the product, so that the product can be compared with it.
"""

import hashlib
import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

F, D, I, U = np.float32, np.float64, np.int32, np.uint32
Array = np.ndarray[Any, Any]
np.seterr(all="ignore")  # overflow to inf is a defined result

# ---------------------------------------------------------------- float32 operations and functions


def bits(x: Any) -> Array:
    return np.asarray(x, F).view(I)


def from_bits(i: Any) -> Array:
    return np.asarray(i).astype(I).view(F)


def fma(a: Any, b: Any, c: Any) -> Array:
    """Return a * b + c with one rounding: a float64 sum rounded to odd, then float32."""
    p = np.asarray(a, F).astype(D) * np.asarray(b, F).astype(D)  # exact: 48 bits
    c = np.asarray(c, F).astype(D)
    s = p + c
    v = s - p
    error = (p - (s - v)) + (c - v)
    i = np.ascontiguousarray(s).view(np.int64)
    inexact = (error > 0) | (error < 0)
    i = i + np.where(inexact & ((i & 1) == 0), np.where((error > 0) == (s > 0), 1, -1), 0)
    return i.view(D).astype(F).reshape(np.shape(s))


def polynomial(f: Array, coefficients: Sequence[F]) -> Array:
    """Return c0 + c1 f + c2 f^2 + ... by Horner's rule, one fma per step."""
    y = np.full_like(f, coefficients[-1])
    for c in coefficients[-2::-1]:
        y = fma(y, f, c)
    return y


def constants(text: str) -> list[F]:
    return [F(float.fromhex(word)) for word in text.split()]


MAGIC = F(12582912.0)  # 1.5 * 2^23: adding it rounds |x| <= 2^22 to the nearest integer, ties to even
LOG2E, LN2_HIGH, LN2_LOW = constants("0x1.715476p+0 0x1.63p-1 -0x1.bd0106p-13")
EXP2 = constants("0x1.62e430p-1 0x1.ebfbdcp-3 0x1.c6af7ap-5 0x1.3b2dd2p-7 0x1.5f0948p-10 0x1.417a9cp-13")
EXP2_SHORT = constants("0x1.ffffe8p-1 0x1.62e0dep-1 0x1.ec06b2p-3 0x1.ca13e4p-5 0x1.399f14p-7")
EXP = constants("0x1.fffffcp-2 0x1.555492p-3 0x1.5558b0p-5 0x1.12398ap-7 0x1.6a4d70p-10")
LOG = constants(
    "-0x1.fffff8p-2 0x1.555550p-2 -0x1.000432p-2 0x1.99a416p-3 -0x1.5425c0p-3 0x1.226e6ep-3 "
    "-0x1.0f4050p-3 0x1.085db6p-3 -0x1.383b80p-4"
)
ERF = constants("0x1.06eba8p-3 -0x1.8127p-2 0x1.ce1c44p-4 -0x1.b691b2p-6 0x1.471a58p-8 -0x1.38ep-11")
ERF_FAR = constants(
    "-0x1.079d0cp-3 -0x1.450aap-1 -0x1.b55cb8p-4 0x1.8d6342p-6 -0x1.fd1438p-9 0x1.91cfb2p-12 -0x1.22p-16"
)
TANH = constants("-0x1.5553dap-2 0x1.10b23ep-3 -0x1.ac766ap-5 0x1.01ep-6")
(SQRT_HALF,) = constants("0x1.6a09e6p-1")
GELU_CUBE, GELU_SCALE = constants("0x1.6e4e26p-5 -0x1.988454p+0")  # 0.044715, -2 sqrt(2 / pi)


def near(x: Any, y: Any = F(1)) -> Array:
    """Return the integer nearest to x * y, |x * y| <= 2^22, ties to even: one rounding."""
    return bits(fma(x, y, MAGIC)) - bits(MAGIC)


def ceil(x: Array) -> Array:
    """Return the least integer that is not below x, as float32."""
    return np.ceil(x)


def power_of_two(k: Any) -> Array:
    """Return 2^k for integers -126 <= k <= 127."""
    return from_bits((np.asarray(k, I) + I(127)) << I(23))


def scaled(y: Array, k: Array) -> Array:
    """Return y * 2^k for -252 <= k <= 254; the first product is exact, the second rounds."""
    return y * power_of_two(k >> I(1)) * power_of_two(k - (k >> I(1)))


def clip(x: Array, low: float, high: float) -> Array:
    """Return x between the bounds; NaN stays."""
    x = np.where(x < F(low), F(low), x)
    return np.where(x > F(high), F(high), x)


def exp2(x: Array) -> Array:
    x = clip(x, -160, 136)
    t = x + MAGIC
    f = x - (t - MAGIC)
    return scaled(fma(f, polynomial(f, EXP2), F(1)), bits(t) - bits(MAGIC))


def exp(x: Array) -> Array:
    x = clip(x, -110, 95)
    t = fma(x, LOG2E, MAGIC)
    n = t - MAGIC
    f = fma(n, -LN2_LOW, fma(n, -LN2_HIGH, x))
    return scaled(fma(f * f, polynomial(f, EXP), f) + F(1), bits(t) - bits(MAGIC))


def log(x: Array) -> Array:
    tiny = x < F(2.0**-126)
    z = np.where(tiny, x * F(2.0**24), x)
    e = (bits(z) - I(0x3F3504F3)) >> I(23)
    f = from_bits(bits(z) - (e << I(23))) - F(1)
    n = np.where(tiny, e - I(24), e).astype(F)
    y = fma(n, LN2_HIGH, fma(f * f, polynomial(f, LOG), fma(n, LN2_LOW, f)))
    y = np.where(x == F(np.inf), x, np.where(x == F(0), F(-np.inf), y))
    return np.where(x >= F(0), y, F(np.nan)).astype(F)


def rsqrt(x: Array) -> Array:
    return F(1) / np.sqrt(x)


def sigmoid(x: Array) -> Array:
    return F(1) / (F(1) + exp(-x))


def silu(x: Array) -> Array:
    return x / (F(1) + exp(-x))


def gelu_tanh(x: Array) -> Array:
    return x / (F(1) + exp(fma(x * x * GELU_CUBE, x, x) * GELU_SCALE))


def erf(x: Array) -> Array:
    t = clip(np.abs(x), 0, 4)
    far = F(1) - exp(fma(polynomial(t, ERF_FAR), t, -t))
    return np.where(t > F(0.927734375), np.where(x < F(0), -far, far), fma(polynomial(x * x, ERF), x, x))


def tanh(x: Array) -> Array:
    t, s = np.abs(x), x * x
    far = F(1) - F(2) / (exp(t + t) + F(1))
    return np.where(t >= F(0.55), np.where(x < F(0), -far, far), fma(s * polynomial(s, TANH), x, x))


def log1p(x: Array) -> Array:
    u = F(1) + x
    y = log(u) * (x / (u - F(1)))
    return np.where(u == F(1), x, np.where(u == F(np.inf), u, y))


def gelu(x: Array) -> Array:
    return (x * F(0.5)) * (F(1) + erf(x * SQRT_HALF))


def sqrt(x: Array) -> Array:
    return np.sqrt(x)


def floor(x: Array) -> Array:
    """Return the largest integer that is not above x; never -0."""
    return np.floor(x) + F(0)


def exp2_short(e: Array) -> Array:
    """Return 2^e for the weights of a softmax, e clipped to [-100, 0], within 2.7e-6 of the value."""
    e = clip(e, -100, 0)
    t = e + MAGIC
    f = e - (t - MAGIC)
    return from_bits(bits(polynomial(f, EXP2_SHORT)) + (bits(t) << I(23)))


def bf16(x: Array) -> Array:
    """Round float32 to bfloat16, ties to even, and widen again."""
    i = bits(x).view(U)
    i = (i + U(0x7FFF) + ((i >> U(16)) & U(1))) & U(0xFFFF0000)
    return np.where(x != x, F(np.nan), i.view(F)).astype(F)


def add(x: Array, y: Array) -> Array:
    return x + y


def multiply(x: Array, y: Array) -> Array:
    return x * y


FUNCTIONS: Mapping[str, Callable[[Array], Array]] = {
    "exp2": exp2,
    "exp": exp,
    "log": log,
    "rsqrt": rsqrt,
    "sigmoid": sigmoid,
    "silu": silu,
    "gelu_tanh": gelu_tanh,
    "erf": erf,
    "tanh": tanh,
    "log1p": log1p,
    "gelu": gelu,
    "sqrt": sqrt,
    "floor": floor,
}


# ---------------------------------------------------------------- probabilities and sampling


def log_softmax(z: Array) -> Array:
    """Return the log-probabilities of logits [..., V]; the sum is an integer, so its order is free."""
    shifted, weights = softmax_integers(z)
    return shifted - log(weights.sum(-1, keepdims=True).astype(F) * F(2.0**-40))


def softmax(z: Array) -> Array:
    """Return the probabilities of logits [..., V]."""
    shifted, weights = softmax_integers(z)
    p = weights.astype(F) / weights.sum(-1, keepdims=True).astype(F)
    return np.where(shifted == shifted, p, F(np.nan)).astype(F)


def softmax_integers(z: Array) -> tuple[Array, Array]:
    """Return z - max and floor(exp(z - max) * 2^40) as int64, both [..., V]; NaN counts as 0."""
    shifted = z - (z.max(-1, keepdims=True) + F(0))
    weights = exp(shifted).astype(D) * 2.0**40  # exact
    return shifted, np.where(weights == weights, weights, 0).astype(np.int64)


def filtered(z: Array, top_k: int | None, top_p: float, min_p: float) -> Array:
    """Return z [V] with -inf at tokens that the filters exclude."""
    order = np.argsort(-z, kind="stable")  # descending, the lower id first
    among = np.full_like(z, F(-np.inf))
    among[order[:top_k]] = z[order[:top_k]]
    p = softmax(among)[order].astype(D)
    mass = (p * 2.0**56).astype(np.int64)
    limit = max(1, int(top_p * 2.0**56)) if top_p < 1 else 2**63 - 1
    kept = (mass.cumsum() - mass < limit) & (p >= p[0] * min_p)
    result = np.full_like(z, F(-np.inf))
    result[order[kept]] = among[order[kept]]
    return result


def draw(z: Array, seed: int, position: int, sample: int = 0) -> int:
    """Return the token with the largest log-probability plus noise, as float64; the lowest id among equal ones."""
    return int(np.argmax(log_softmax(z).astype(D) + gumbel(len(z), seed, position, sample)))


def gumbel(count: int, seed: int, position: int, sample: int) -> Array:
    """Return noise, float64 [count]: element v takes word v % 4 of Philox4x32-10's counter v // 4."""
    counter = np.arange(-(-count // 4), dtype=np.uint64)
    low = np.uint64(0xFFFFFFFF)
    c = [counter, *(np.full_like(counter, part) for part in (position & 0xFFFFFFFF, position >> 32, sample))]
    keys = [np.uint64(seed & 0xFFFFFFFF), np.uint64(seed >> 32)]
    for _ in range(10):
        one, other = c[0] * np.uint64(0xD2511F53), c[2] * np.uint64(0xCD9E8D57)
        c = [(other >> np.uint64(32)) ^ c[1] ^ keys[0], other & low, (one >> np.uint64(32)) ^ c[3] ^ keys[1], one & low]
        keys = [(key + np.uint64(step)) & low for key, step in zip(keys, (0x9E3779B9, 0xBB67AE85))]
    uniform = (np.stack(c, -1).reshape(-1)[:count].astype(D) + 0.5) * 2.0**-32
    return -log_wide(-log_wide(uniform))


LOG_WIDE = (0.6666666666666735, 0.3999999999940942, 0.2857142874366239, 0.22222198432149784, 0.1818357216161805)
LOG_WIDE += (0.15313837699209373, 0.14798198605116586)


def log_wide(x: Array) -> Array:
    """Return the logarithm of positive, normal float64 numbers, each step one float64 operation."""
    mantissa, e = np.frexp(x)
    small = mantissa < 0.7071067811865476
    f, e = np.where(small, mantissa * 2, mantissa) - 1, (e - small).astype(D)
    s = f / (f + 2)
    z = s * s
    series = z * LOG_WIDE[-1]
    for c in LOG_WIDE[-2::-1]:
        series = z * (series + c)
    half = f * f * 0.5
    return e * 6.931471803691238e-01 - ((half - (s * (half + series) + e * 1.9082149292705877e-10)) - f)


# ---------------------------------------------------------------- quantization and products

BLOCK, GROUP = 128, 8  # keys of a block of attention, by absolute position; blocks of a group
TOP = {1: F(127), 2: F(32512)}  # largest quantized magnitude, by digits; 32512 = 127 * 256
SMALLEST, LARGEST = F(2.0**-60), F(2.0**40)
LONGEST = 65536  # terms of an int32 sum


def quantize(x: Any, digits: int, right: bool) -> tuple[Array, Array]:
    """Return (digits int8 [digits, ..., K], scale float32 [...]) of rows x [..., K].

    Left (activations, queries): the scale of the integer 256 high + low. Right (weights, keys, values): of
    high + low / 256. A row with NaN or a magnitude of 2^40 or more is poisoned: scale NaN, digits 0.
    """
    x = np.asarray(x, F)
    peak = (bits(x) & I(0x7FFFFFFF)).max(-1).view(F)  # integer order = float order, NaN above all
    poisoned = ~(peak < LARGEST)
    a = np.where(poisoned, LARGEST, np.maximum(peak, SMALLEST))
    v = near(np.where(poisoned[..., None], F(0), x), (TOP[digits] / a)[..., None])
    scale = np.where(poisoned, F(np.nan), a / (TOP[1] if right else TOP[digits]))
    return split(v, digits), scale.astype(F)


def split(v: Array, digits: int) -> Array:
    if digits == 1:
        return v.astype(np.int8)[None]
    high = (v + I(128)) >> I(8)
    return np.stack([high, v - (high << I(8))]).astype(np.int8)


def product(x: Array, w: Array) -> Array:
    """Return the exact integers T [M, N] of digits x [dx, M, K] and w [dw, N, K].

    One digit each: sum x w. Left of two: 256 high + low. Both of two: 256 high high + (high low + low high); low low
    is left out by definition. Float64 is exact: every partial sum is an integer below 2^53.
    """

    def dot(a: Array, b: Array) -> Array:
        return (a.astype(D) @ b.astype(D).swapaxes(-1, -2)).astype(np.int64)

    if len(x) == 1:
        return dot(x[0], w[0])
    t = 256 * dot(x[0], w[0]) + dot(x[1], w[0])
    return t if len(w) == 1 else t + dot(x[0], w[1])


def epilogue(t: Array, x_scale: Array, w_scale: Array) -> Array:
    """Return (float32(T) * x_scale) * w_scale: three roundings."""
    return (t.astype(F) * x_scale[:, None]) * w_scale[None, :]


def linear(x: Array, digits: int, w: Array, w_scale: Array, bias: Array | None = None) -> Array:
    """Return x [M, K] in `digits` digits times the quantized weight w [dw, N, K], plus the bias."""
    x_digits, x_scale = quantize(x, digits, right=False)
    y = epilogue(product(x_digits, w), x_scale, w_scale)
    return y if bias is None else y + bias


def expert_linear(x: Array, ids: Array, digits: int, w: Array, w_scale: Array, bias: Array | None = None) -> Array:
    """Return each row of x [M, K] times the weights w [dw, E, N, K] of its experts ids [M, C]: [M, C, N]."""
    rows = [[linear(row[None], digits, w[:, e], w_scale[e], None if bias is None else bias[e])[0] for e in chosen]
            for row, chosen in zip(x, ids)]  # fmt: skip
    return np.array(rows, F)


def row_sum(x: Array) -> Array:
    """Return the sums of rows, each from its first element to its last."""
    total = x[..., 0]
    for i in range(1, x.shape[-1]):
        total = total + x[..., i]
    return total


# ---------------------------------------------------------------- norm, rope


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    """Return x / rms(x) * weight; the sum of squares is an integer, so its order is free.

    n = near(x * 2^(21 - e)) with 2^e <= max |x| < 2^(e + 1), so |n| <= 2^22 and rows of K < 2^19 fit int64.
    """
    peak = (bits(x) & I(0x7FFFFFFF)).max(-1)
    p = from_bits((I(275) - np.clip(peak >> I(23), 87, 254).astype(I)) << I(23))[..., None]  # 2^(21 - e)
    u = x * p
    n = near(np.where(peak[..., None] < bits(LARGEST), u, F(0))).astype(np.int64)
    mean = (n * n).sum(-1, keepdims=True).astype(F) / F(x.shape[-1])
    y = (u * rsqrt(mean + (F(eps) * p) * p)) * weight
    return np.where(peak[..., None] < bits(LARGEST), y, F(np.nan)).astype(F)


def layer_norm(x: Array, weight: Array, bias: Array, eps: float) -> Array:
    """Return (x - mean) / sqrt(variance) * weight + bias; both sums are of integers.

    As rms_norm, with p = 2^(20 - e), so that the deviations are below 2^22.
    """
    peak = (bits(x) & I(0x7FFFFFFF)).max(-1)
    p = from_bits((I(274) - np.clip(peak >> I(23), 87, 254).astype(I)) << I(23))[..., None]
    whole = peak[..., None] < bits(LARGEST)
    u, K = np.where(whole, x, F(0)) * p, F(x.shape[-1])
    d = u - near(u).astype(np.int64).sum(-1, keepdims=True).astype(F) / K
    n = near(d).astype(np.int64)
    variance = (n * n).sum(-1, keepdims=True).astype(F) / K
    y = (d * rsqrt(variance + (F(eps) * p) * p)) * weight + bias
    return np.where(whole, y, F(np.nan)).astype(F)


ONE = 1 << 120


def _arctan_of_reciprocal(n: int) -> int:
    return sum((-1) ** k * (ONE // n ** (2 * k + 1)) // (2 * k + 1) for k in range(60))


PI = 4 * (4 * _arctan_of_reciprocal(5) - _arctan_of_reciprocal(239))


def rope_tables(positions: Iterable[int], dim: int, theta: int) -> tuple[Array, Array]:
    """Return cos, sin float32 [positions, dim / 2]: from integers of 120 bits to float64, then to float32.

    The inverse frequencies are theta^(-2i / dim) rounded to float64, then float32; the angles position * frequency
    are rounded to float32.
    """
    frequencies = []
    for i in range(dim // 2):  # theta^(2i / dim) by bisection: r^dim <= theta^(2i) * ONE^dim
        low, high, goal = ONE, ONE * (theta + 1), theta ** (2 * i) * ONE**dim
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if middle**dim <= goal else (low, middle)
        frequencies.append(float(F((ONE * ONE // low) / ONE)))
    angles = np.asarray(list(positions), F)[:, None] * np.asarray(frequencies, F)[None, :]
    values = {angle: _cos_sin(float(angle)) for angle in np.unique(angles)}
    table = np.array([values[a] for a in angles.ravel()]).reshape(*angles.shape, 2).astype(F)
    return table[..., 0], table[..., 1]


def _cos_sin(angle: float) -> tuple[float, float]:
    numerator, denominator = angle.as_integer_ratio()
    x = numerator * ONE // denominator // 16 % (2 * PI // 16)  # a sixteenth of the angle, doubled below
    c = s = k = 0
    term = ONE
    while term:
        sign = (-1) ** (k // 2)
        c, s = (c, s + sign * term) if k & 1 else (c + sign * term, s)
        k += 1
        term = term * x // ONE // k
    for _ in range(4):
        c, s = (c * c - s * s) // ONE, 2 * c * s // ONE
    return c / ONE, s / ONE


def rope(x: Array, cos: Array, sin: Array) -> Array:
    """Rotate halves of x [T, H, dim] by cos, sin [T, dim / 2]; each product and sum is rounded."""
    a, b = np.split(x, 2, axis=-1)
    c, s = cos[:, None], sin[:, None]
    return np.concatenate([a * c - b * s, b * c + a * s], axis=-1)


# ---------------------------------------------------------------- attention


@dataclass
class State:
    """Sums of one head over some keys, for T rows: values acc [T, dim] and weights total [T], in units of 2^peak."""

    acc: Array
    total: Array
    peak: Array

    @classmethod
    def empty(cls, T: int, dim: int) -> "State":
        return cls(np.zeros((T, dim), F), np.zeros(T, F), np.full(T, F(-(2.0**127))))

    def merge(self, other: "State", seen: Array) -> None:
        """Add another state to the rows that have `seen` one of its keys."""
        peak = np.maximum(self.peak, other.peak)
        mine, its = shift(self.peak - peak), shift(other.peak - peak)
        acc = fma(other.acc, its[:, None], self.acc * mine[:, None])
        self.acc = np.where(seen[:, None], acc, self.acc)
        self.total = np.where(seen, fma(other.total, its, self.total * mine), self.total)
        self.peak = np.where(seen, peak, self.peak)


def shift(k: Array) -> Array:
    """Return 2^k for integers k <= 0 in float32, 0 below -126."""
    return np.where(k < F(-126), F(0), power_of_two(np.maximum(k, F(-126)).astype(I)))


def attention(
    q: Array,
    q_scale: Array,
    k: Array,
    k_scale: Array,
    v: Array,
    v_scale: Array,
    positions: Array,
    scale: float = 0.0,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Array | None = None,
    slopes: Array | None = None,
    chunk: int = 0,
) -> Array:
    """Return softmax(q k * scale) v, float32 [T, H, width of v], causal.

    q int8 [dq, T, H, dim], q_scale [T, H] (left); k, v int8 [d, S, G, dim], scales [S, G] (right); positions [T] of
    the queries. A query sees the `window` newest keys, or all with 0, and none before its `chunk`; a scale of 0 is
    1 / sqrt(dim). Sinks and slopes [H]. The weights of the softmax have as many digits as q.
    """
    _, T, H, dim = q.shape
    G, S = k.shape[2], int(positions.max()) + 1
    if softcap:
        factor = F(scale) if scale else F(1) / np.sqrt(F(dim))
    else:
        factor = LOG2E * F(scale) if scale else LOG2E / np.sqrt(F(dim))
    r = np.where(q_scale == q_scale, q_scale, F(1)) * factor
    oldest = positions - (window or S) + 1  # the first key that a query sees
    oldest = np.maximum(oldest, positions // chunk * chunk) if chunk else oldest
    k_unit, v_unit = (np.where(scale == scale, scale, F(1)) for scale in (k_scale, v_scale))
    width = v.shape[3]
    out = np.empty((T, H, width), F)
    for h in range(H):
        g = h * G // H
        whole = State.empty(T, width)
        if sinks is not None:
            z = F(sinks[h]) * LOG2E
            peak = ceil(z)
            count = near(exp2_short(z - peak), TOP[2]).astype(F)
            whole = State(whole.acc, np.full(T, count, F), np.full(T, peak, F))
            if not np.abs(z) < F(2.0**120):
                out[:, h] = F(np.nan)
                continue
        for start in range(0, S, GROUP * BLOCK):
            group, sees_group = State.empty(T, width), np.zeros(T, bool)
            for first in range(start, min(start + GROUP * BLOCK, S), BLOCK):
                keys = slice(first, min(first + BLOCK, S))
                here = np.arange(keys.start, keys.stop)[None, :]
                visible = (here <= positions[:, None]) & (here >= oldest[:, None])
                block = key_block(
                    q[:, :, h], r[:, h], k[:, keys, g], k_unit[keys, g], v[:, keys, g], v_unit[keys, g], visible,
                    softcap, None if slopes is None else (F(slopes[h]) * LOG2E) * (here - positions[:, None]).astype(F),
                )  # fmt: skip
                group.merge(block, visible.any(1))
                sees_group |= visible.any(1)
            whole.merge(group, sees_group)
        out[:, h] = whole.acc * (F(1) / whole.total)[:, None]
        poisoned = np.isnan(k_scale[:S, g]) | np.isnan(v_scale[:S, g])
        every = np.arange(S)[None, :]
        sees_poison = (poisoned[None, :] & (every <= positions[:, None]) & (every >= oldest[:, None])).any(1)
        out[np.isnan(q_scale[:, h]) | sees_poison, h] = F(np.nan)
    return out


def key_block(
    q: Array,
    r: Array,
    k: Array,
    k_scale: Array,
    v: Array,
    v_scale: Array,
    visible: Array,
    softcap: float = 0.0,
    bias: Array | None = None,
) -> State:
    """Return the state of rows q [dq, T, dim] over a block of keys k, v [d, n, dim]; rows that see none are unused."""
    top = TOP[len(q)]
    z = (product(q, k).astype(F) * k_scale) * r[:, None]
    z = F(softcap) * tanh(z / F(softcap)) * LOG2E if softcap else z
    z = z if bias is None else z + bias
    peak = ceil(np.where(visible, z, F(-np.inf)).max(1))
    peak = np.where(visible.any(1), peak, F(0))
    p = np.where(visible, exp2_short(z - peak[:, None]), F(0))
    count = near(p, top).sum(1)
    reach = np.where(visible, v_scale, F(0)).max(1)  # the largest value scale that the row sees
    reach = np.where(visible.any(1), reach, F(1))
    digits = split(near(p, np.where(visible, v_scale * (top / reach)[:, None], F(0))), len(q))
    o = product(digits, v.swapaxes(1, 2)).astype(F) * reach[:, None]
    return State(o, count.astype(F), peak)


# ---------------------------------------------------------------- a decoder


@dataclass(frozen=True, kw_only=True)
class Variant:
    """Digits of weights, activations (queries too), keys and values; whether residual sums are rounded to bfloat16."""

    weights: int
    activations: int
    kv: int
    bf16_residual: bool


VARIANTS = {
    "exact8": Variant(weights=1, activations=1, kv=1, bf16_residual=True),
    "exact8x16": Variant(weights=1, activations=2, kv=1, bf16_residual=True),
    "exact16": Variant(weights=2, activations=2, kv=2, bf16_residual=False),
}
QUERY_DIGITS = 2  # of queries and of the softmax's weights, in every variant


class Decoder:
    """A Qwen3 or Llama decoder over a folder with config.json and model.safetensors, one sequence at a time.

    Its operations are those of this module, or of an implementation with the same names.
    """

    def __init__(
        self, folder: Path, variant: Variant, operations: Any = sys.modules[__name__], length: int = 512
    ) -> None:
        self.c, self.n, self.do = json.loads((folder / "config.json").read_text()), variant, operations
        self.t = read_safetensors(folder / "model.safetensors")
        self.dim = self.c.get("head_dim") or self.c["hidden_size"] // self.c["num_attention_heads"]
        theta = self.c.get("rope_theta") or self.c["rope_parameters"]["rope_theta"]
        self.cos, self.sin = rope_tables(range(length), self.dim, int(theta))
        tied = "lm_head.weight" not in self.t
        self.head = self._quantized("model.embed_tokens.weight" if tied else "lm_head.weight")

    def _quantized(self, *names: str) -> tuple[Array, Array]:
        return self.do.quantize(np.concatenate([self.t[name] for name in names]), self.n.weights, right=True)

    def _linear(self, x: Array, *names: str) -> Array:
        return self.do.linear(x, self.n.activations, *self._quantized(*(f"{name}.weight" for name in names)))

    def _add(self, x: Array, y: Array) -> Array:
        total = self.do.add(x, y)
        return self.do.bf16(total) if self.n.bf16_residual else total

    def forward(self, tokens: Sequence[int], cache: list[Any] | None = None) -> tuple[Array, list[Any]]:
        """Return float32 logits [T, vocabulary] and the cache: (k, k_scale, v, v_scale) a layer."""
        c, do, eps, T = self.c, self.do, self.c["rms_norm_eps"], len(tokens)
        heads, groups = c["num_attention_heads"], c["num_key_value_heads"]
        past = cache[0][0].shape[1] if cache else 0
        positions = np.arange(past, past + T)
        cos, sin = self.cos[positions], self.sin[positions]
        x, new_cache = self.t["model.embed_tokens.weight"][np.asarray(tokens)], []
        for i in range(c["num_hidden_layers"]):
            name = f"model.layers.{i}."
            y = do.rms_norm(x, self.t[name + "input_layernorm.weight"], eps)
            q, k, v = (
                self._linear(y, f"{name}self_attn.{part}_proj").reshape(T, -1, self.dim) for part in ("q", "k", "v")
            )
            assert q.shape[1] == heads and k.shape[1] == groups
            if name + "self_attn.q_norm.weight" in self.t:
                q = do.rms_norm(q, self.t[name + "self_attn.q_norm.weight"], eps)
                k = do.rms_norm(k, self.t[name + "self_attn.k_norm.weight"], eps)
            entry = do.quantize(do.rope(k, cos, sin), self.n.kv, right=True) + do.quantize(v, self.n.kv, right=True)
            if cache:
                entry = tuple(np.concatenate(pair, axis=1 - j % 2) for j, pair in enumerate(zip(cache[i], entry)))
            new_cache.append(entry)
            a = do.attention(*do.quantize(do.rope(q, cos, sin), QUERY_DIGITS, right=False), *entry, positions)
            x = self._add(x, self._linear(a.reshape(T, -1), name + "self_attn.o_proj"))
            y = do.rms_norm(x, self.t[name + "post_attention_layernorm.weight"], eps)
            gated = do.silu(self._linear(y, name + "mlp.gate_proj"))
            gated = do.multiply(gated, self._linear(y, name + "mlp.up_proj"))
            x = self._add(x, self._linear(gated, name + "mlp.down_proj"))
        x = do.rms_norm(x, self.t["model.norm.weight"], eps)
        return self.do.linear(x, self.n.activations, *self.head), new_cache


def read_safetensors(path: Path) -> dict[str, Array]:
    """Return the bfloat16 tensors of a safetensors file, widened to float32."""
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    tensors = {}
    for name, entry in json.loads(data[8 : 8 + size]).items():
        if name != "__metadata__":
            assert entry["dtype"] == "BF16", (name, entry["dtype"])
            start, stop = (8 + size + offset for offset in entry["data_offsets"])
            words = np.frombuffer(data[start:stop], np.uint16).astype(U) << U(16)
            tensors[name] = words.view(F).reshape(entry["shape"])
    return tensors


def fixed_tokens(length: int, vocabulary: int = 4096) -> list[int]:
    """Return a fixed token sequence: x -> 1103515245 x + 12345 mod 2^31."""
    x, tokens = length, []
    for _ in range(length):
        x = (1103515245 * x + 12345) % 2**31
        tokens.append((x >> 12) % vocabulary)
    return tokens


def digest(array: Array) -> str:
    """Return the first 16 hex digits of the bytes' SHA-256; every NaN counts as one value."""
    array = np.ascontiguousarray(array)
    if array.dtype == F:
        array = np.where(array != array, F(np.nan), array)
    return hashlib.sha256(array.tobytes()).hexdigest()[:16]
