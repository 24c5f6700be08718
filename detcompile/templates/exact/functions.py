"""Device functions of exact-1 (docs/exact.md) for Triton kernels.

Launch kernels that call them with ``enable_fp_fusion=False``. Divide by tl.div_rn and take roots by tl.sqrt_rn: `/` and
tl.sqrt are approximate. The constants are those of cpu/exact/steps.h, in decimal.
"""

import triton
import triton.language as tl

MAGIC = tl.constexpr(12582912.0)  # 1.5 * 2^23: adding it rounds |x| <= 2^22 to the nearest integer, ties to even
MAGIC_BITS = tl.constexpr(0x4B400000)
LOG2_E = tl.constexpr(1.4426950216293335)
POISON = tl.constexpr(0x53800000)  # 2^40: a row with such a magnitude, or NaN, is poisoned


@triton.jit
def bits(x):
    return x.to(tl.int32, bitcast=True)


@triton.jit
def from_bits(i):
    return i.to(tl.float32, bitcast=True)


@triton.jit
def near(x, y):
    """The integer nearest to x * y."""
    return bits(tl.fma(x, y, MAGIC)) - MAGIC_BITS


@triton.jit
def ceil(x):
    """The least integer not below x. tl.math.ceil flushes subnormals."""
    magnitude = tl.abs(x)
    n = (magnitude + 8388608.0) - 8388608.0
    n = tl.where(magnitude < 8388608.0, n, magnitude)
    n = tl.where(x < 0.0, -n, n)
    return tl.where(n < x, n + 1.0, n)


@triton.jit
def clip(x, low, high):
    x = tl.where(x < low, low, x)
    return tl.where(x > high, high, x)


@triton.jit
def power_of_two(k):
    """2^k for integers -126 <= k <= 127."""
    return from_bits((k + 127) << 23)


@triton.jit
def scaled(y, k):
    return y * power_of_two(k >> 1) * power_of_two(k - (k >> 1))


@triton.jit
def one_over(x):
    return tl.div_rn(1.0, x)


@triton.jit
def exp2(x):
    x = clip(x, -160.0, 136.0)
    t = x + MAGIC
    f = x - (t - MAGIC)
    y = tl.fma(tl.full(f.shape, 0.00015329310554079711, tl.float32), f, 0.0013390970416367054)
    y = tl.fma(y, f, 0.00961849931627512)
    y = tl.fma(y, f, 0.05550359562039375)
    y = tl.fma(y, f, 0.24022647738456726)
    y = tl.fma(y, f, 0.6931471824645996)
    return scaled(tl.fma(f, y, 1.0), bits(t) - MAGIC_BITS)


@triton.jit
def exp(x):
    x = clip(x, -110.0, 95.0)
    t = tl.fma(x, 1.4426950216293335, MAGIC)
    n = t - MAGIC
    f = tl.fma(n, 0.00021219444170128554, tl.fma(n, -0.693359375, x))
    y = tl.fma(tl.full(f.shape, 0.0013820743188261986, tl.float32), f, 0.008368675597012043)
    y = tl.fma(y, f, 0.04166826605796814)
    y = tl.fma(y, f, 0.1666652113199234)
    y = tl.fma(y, f, 0.4999999403953552)
    return scaled(tl.fma(f * f, y, f) + 1.0, bits(t) - MAGIC_BITS)


@triton.jit
def log(x):
    tiny = x < 1.1754943508222875e-38
    z = bits(tl.where(tiny, x * 16777216.0, x))
    e = (z - 0x3F3504F3) >> 23
    f = from_bits(z - (e << 23)) - 1.0
    n = tl.where(tiny, e - 24, e).to(tl.float32)
    y = tl.fma(tl.full(f.shape, -0.07622861862182617, tl.float32), f, 0.1290849894285202)
    y = tl.fma(y, f, -0.13244688510894775)
    y = tl.fma(y, f, 0.14181219041347504)
    y = tl.fma(y, f, -0.16608762741088867)
    y = tl.fma(y, f, 0.20002000033855438)
    y = tl.fma(y, f, -0.2500160038471222)
    y = tl.fma(y, f, 0.33333325386047363)
    y = tl.fma(y, f, -0.49999988079071045)
    y = tl.fma(n, 0.693359375, tl.fma(f * f, y, tl.fma(n, -0.00021219444170128554, f)))
    y = tl.where(x == float("inf"), x, tl.where(x == 0.0, float("-inf"), y))
    return tl.where(x >= 0.0, y, float("nan"))


@triton.jit
def floor(x):
    """The largest integer not above x, never -0."""
    magnitude = tl.abs(x)
    n = (magnitude + 8388608.0) - 8388608.0
    n = tl.where(magnitude < 8388608.0, n, magnitude)
    n = tl.where(x < 0.0, -n, n)
    return tl.where(n > x, n - 1.0, n)


@triton.jit
def erf(x):
    t, s = clip(tl.abs(x), 0.0, 4.0), x * x
    y = tl.fma(tl.full(s.shape, -0.0005967617034912109, tl.float32), s, 0.004991194233298302)
    y = tl.fma(y, s, -0.026768134906888008)
    y = tl.fma(y, s, 0.11281992495059967)
    y = tl.fma(y, s, -0.3761253356933594)
    y = tl.fma(y, s, 0.12837916612625122)
    z = tl.fma(tl.full(t.shape, -1.728534698486328e-05, tl.float32), t, 0.0003831971262115985)
    z = tl.fma(z, t, -0.003883964382112026)
    z = tl.fma(z, t, 0.02425462193787098)
    z = tl.fma(z, t, -0.10677787661552429)
    z = tl.fma(z, t, -0.6348466873168945)
    z = tl.fma(z, t, -0.12871751189231873)
    far = 1.0 - exp(tl.fma(z, t, -t))
    return tl.where(t > 0.927734375, tl.where(x < 0.0, -far, far), tl.fma(y, x, x))


@triton.jit
def tanh(x):
    t, s = tl.abs(x), x * x
    y = tl.fma(tl.full(s.shape, 0.01573944091796875, tl.float32), s, -0.05230255797505379)
    y = tl.fma(y, s, 0.13315246999263763)
    y = tl.fma(y, s, -0.33332768082618713)
    far = 1.0 - tl.div_rn(2.0, exp(t + t) + 1.0)
    return tl.where(t >= 0.550000011920929, tl.where(x < 0.0, -far, far), tl.fma(s * y, x, x))


@triton.jit
def log1p(x):
    u = 1.0 + x
    y = log(u) * tl.div_rn(x, u - 1.0)
    return tl.where(u == 1.0, x, tl.where(u == float("inf"), u, y))


@triton.jit
def exp2_short(e):
    """2^e for the weights of a softmax, e <= 0."""
    return exp2_clipped(clip(e, -100.0, 0.0))


@triton.jit
def exp2_clipped(e):
    """exp2_short(e) for -100 <= e <= 0."""
    t = e + MAGIC
    f = e - (t - MAGIC)
    y = tl.fma(f, 0.00957096554338932, 0.055917687714099884)
    y = tl.fma(y, f, 0.24024714529514313)
    y = tl.fma(y, f, 0.6931218504905701)
    y = tl.fma(y, f, 0.9999992847442627)
    return from_bits(bits(y) + (bits(t) << 23))


@triton.jit
def bf16(x):
    """x rounded to bfloat16, ties to even, and widened."""
    i = bits(x)
    return tl.where(x == x, from_bits((i + 0x7FFF + ((i >> 16) & 1)) & -65536), float("nan"))


@triton.jit
def function(x, NAME: tl.constexpr):
    """The function of this name in rows.FUNCTIONS."""
    if NAME == "exp2":
        return exp2(x)
    elif NAME == "exp":
        return exp(x)
    elif NAME == "log":
        return log(x)
    elif NAME == "rsqrt":
        return tl.div_rn(tl.full(x.shape, 1.0, tl.float32), tl.sqrt_rn(x))
    elif NAME == "sigmoid":
        return tl.div_rn(tl.full(x.shape, 1.0, tl.float32), 1.0 + exp(-x))
    elif NAME == "silu":
        return tl.div_rn(x, 1.0 + exp(-x))
    elif NAME == "gelu_tanh":
        cubic = tl.fma(x * x * 0.044714998453855515, x, x)
        return tl.div_rn(x, 1.0 + exp(cubic * -1.5957691669464111))
    elif NAME == "bf16":
        return bf16(x)
    elif NAME == "erf":
        return erf(x)
    elif NAME == "tanh":
        return tanh(x)
    elif NAME == "log1p":
        return log1p(x)
    elif NAME == "gelu":
        return (x * 0.5) * (1.0 + erf(x * 0.7071067690849304))
    elif NAME == "sqrt":
        return tl.sqrt_rn(x)
    elif NAME == "floor":
        return floor(x)
    else:
        return exp2_short(tl.where(x == x, x, 0.0))


@triton.jit
def dot(x, w, total, INT8: tl.constexpr):
    """`total` plus the integers x @ w of int8 tiles, by int8 tensor cores or by bfloat16's.

    A tile has at most 1024 terms. Their sum is below 2^24, so float32 holds it.
    """
    if INT8:
        total = tl.dot(x, w, total, out_dtype=tl.int32)
    else:  # by way of float32, because the interpreter takes the integer for bfloat16's bits
        left, right = x.to(tl.float32).to(tl.bfloat16), w.to(tl.float32).to(tl.bfloat16)
        total += tl.dot(left, right).to(tl.int32)
    return total


@triton.jit
def left_digits(x):
    """Rows x [rows, features] as left operands of two digits: integers of 16 bits, scales, and 1 for poisoned rows.

    A poisoned row has digits of 0 and the scale 1.
    """
    largest = tl.max(bits(x) & 0x7FFFFFFF, 1)
    whole = largest < POISON
    a = tl.where(whole, tl.maximum(from_bits(tl.where(whole, largest, 0)), 8.673617379884035e-19), 1.0)
    x = tl.where(whole[:, None], x, 0.0)
    return near(x, tl.div_rn(32512.0, a)[:, None]), tl.where(whole, tl.div_rn(a, 32512.0), 1.0), tl.where(whole, 0, 1)


@triton.jit
def shift(k):
    """2^k for integers k <= 0; 0 below -126."""
    return tl.where(k < -126.0, 0.0, power_of_two(tl.maximum(k, -126.0).to(tl.int32)))


@triton.jit
def sink_state(sinks_ptr, head, known):
    """The peak and total of a head's sink, before any key, and 1 if the sink is not finite."""
    sink = tl.load(sinks_ptr + head, mask=known, other=0.0) * LOG2_E
    finite = tl.abs(sink) < 1.329227995784916e36  # 2^120
    sink = tl.where(finite, sink, 0.0)
    peak = ceil(sink)
    return peak, near(exp2_short(sink - peak), 32512.0).to(tl.float32), tl.where(finite, 0, 1)


@triton.jit
def oldest_key(position, window, chunk):
    """The first key that a token sees."""
    oldest = tl.where(window > 0, tl.maximum(position + 1 - window, 0), 0)
    return tl.maximum(oldest, tl.where(chunk > 0, position // tl.maximum(chunk, 1) * chunk, 0))
