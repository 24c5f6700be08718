"""AttentionRule: how attention computes scores, and which keys a query sees; one definition for all kernels.

On a GPU, plain rows keep raw products with the keys as scores, and scale * log2(e) is applied inside exp2.
NEEDS_SCORES: rows with a soft cap, ALiBi, biases, or a nonpositive scale have scores in natural units, and log2(e) is
applied inside exp2. ``pre_scale`` is the first factor of a product: scale / cap with a cap, else scale.

The GPU functions are elementwise and use only IEEE operations and exp2: no schedule can change a bit, if the kernel is
compiled with enable_fp_fusion=False.
"""

import math
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from detcompile.errors import InvalidInput
from detcompile.orders.numerics import KV_BLOCK
from detcompile.templates.device.primitives import LOG2_E

# AttentionRule's fields, as the last arguments in the operations' schemas.
RULE = (
    "float scale, int sliding_window, int kv_chunk, float softcap=0.0, Tensor? sinks=None, "
    "Tensor? alibi_slopes=None, int attention_chunk=0, Tensor? relative_bias=None"
)


def rule_operands(rows: str) -> dict[str, str | range]:
    """Return declarations of RULE's tensors and integers, for q with rows of these sizes, heads `Hq` among them."""
    tokens = range(2**63)
    return {
        "sliding_window": tokens,
        "kv_chunk": range(KV_BLOCK, 2**31, KV_BLOCK),
        "sinks": "floating Hq",
        "alibi_slopes": "floating Hq",
        "attention_chunk": tokens,
        "relative_bias": f"floating {rows} E>0",
    }


class AttentionRule(NamedTuple):
    """score = scale * q.k, then softcap * tanh(score / softcap) if softcap > 0, then + alibi_slopes[h] * (key - pos),
    then + relative_bias[..., pos - key] for distances below its last extent.

    Attributes:
        scale: factor of the products.
        sliding_window: number of tokens that a query sees, itself included; 0 for no window.
        kv_chunk: keys of a chunk of the KV order, a multiple of 64.
        softcap: bound of the scores; 0 for none.
        sinks: logits [H] in the units of a score, added to the softmax's denominator.
        alibi_slopes: slopes [H].
        attention_chunk: tokens of a chunk; a query sees nothing before its chunk; 0 for no chunks.
        relative_bias: a row of biases [..., E] for each row of q.
    """

    scale: float
    sliding_window: int
    kv_chunk: int
    softcap: float = 0.0
    sinks: Tensor | None = None
    alibi_slopes: Tensor | None = None
    attention_chunk: int = 0
    relative_bias: Tensor | None = None

    def check(self, where: str, heads: int, kv_heads: int) -> None:
        """Raise InvalidInput if the fields are inconsistent, or for head counts that do not match."""
        if heads % kv_heads:
            raise InvalidInput(f"{where}: {heads} query heads cannot share {kv_heads} key heads evenly.")
        if self.sliding_window and self.attention_chunk:
            raise InvalidInput(
                f"{where}: sliding_window={self.sliding_window}, attention_chunk={self.attention_chunk}: at most one of"
                " them may be a positive number of tokens; set the other to 0."
            )
        if not math.isfinite(self.scale) or not math.isfinite(self.softcap) or self.softcap < 0:
            raise InvalidInput(
                f"{where}: scale={self.scale}, softcap={self.softcap}: both must be finite, and softcap positive, or 0 "
                "for none."
            )

    @property
    def window(self) -> int:
        """Size of the window or chunk that holds a query's keys; 0 for no limit."""
        return self.sliding_window or self.attention_chunk

    @property
    def needs_scores(self) -> bool:
        """True if scores are in natural units before the maximum (a scale <= 0 would turn it into a minimum)."""
        biased = self.alibi_slopes is not None or self.relative_bias is not None
        return self.softcap > 0 or biased or self.scale <= 0

    @property
    def pre_scale(self) -> float:
        """The first factor of a product."""
        return self.scale / self.softcap if self.softcap else self.scale

    @property
    def log2e_scale(self) -> float:
        """The factor of a score inside exp2."""
        return (1.0 if self.needs_scores else self.scale) * LOG2_E.value


@triton.jit
def first_seen(pos, window, CHUNKED: tl.constexpr):
    """First key that a query at pos sees: the start of its chunk of `window` tokens, or of its window (may be < 0)."""
    if CHUNKED:
        first = pos // window * window
    else:
        first = pos - window + 1
    return first


@triton.jit
def sequence_of(index, cu_ptr, S, BQ: tl.constexpr, PER_SEQUENCE: tl.constexpr):
    """Largest s in 0..S with cu[s] // BQ + s * PER_SEQUENCE <= index. Sequence S is the padding past cu[S].

    With PER_SEQUENCE = 1 index counts tiles (each sequence may end inside one); with BQ = 1 and 0 it is a token.
    """
    low = 0
    high = S + 1
    while high - low > 1:  # probes 32 places at once, because dependent loads dominate the time
        step = (high - low + 31) // 32
        place = low + (1 + tl.arange(0, 32)) * step
        before = tl.load(cu_ptr + place, mask=place < high, other=0) // BQ + place * PER_SEQUENCE <= index
        low += tl.sum(((place < high) & before).to(tl.int32), 0) * step
        high = tl.minimum(low + step, high)
    return low


@triton.jit
def tanh(x):
    """tanh within 2 ulp, from IEEE operations and exp2: a polynomial (Cephes, tanhf) for |x| < 0.625."""
    z = x * x
    p = z * -5.70498872745e-3 + 2.06390887954e-2
    p = p * z - 5.37397155531e-2
    p = p * z + 1.33314422036e-1
    p = p * z - 3.33332819422e-1
    near = p * z * x + x
    size = tl.abs(x)
    e = tl.exp2(size * (-2.0 * LOG2_E))
    far = 1.0 - tl.div_rn(e + e, 1.0 + e)
    return tl.where(size < 0.625, near, tl.where(x < 0.0, -far, far))


@triton.jit
def shaped(s, key_K, pos_R, pre_scale, cap, slope_R, CAPPED: tl.constexpr, ALIBI: tl.constexpr):
    """Turn products [R, K] into scores: cap * tanh(s / cap) if CAPPED, then + slope * (key - pos) if ALIBI."""
    s = s * pre_scale
    if CAPPED:
        s = cap * tanh(s)
    if ALIBI:
        s = s + slope_R[:, None] * (key_K[None, :] - pos_R[:, None]).to(tl.float32)
    return s


@triton.jit
def related(s, key_K, pos_R, bias_ptr_R, extent):
    """Add to scores [R, K] each row's bias for the distance of each key; 0 past the extent."""
    distance = pos_R[:, None] - key_K[None, :]
    near = (distance >= 0) & (distance < extent)
    return s + tl.load(bias_ptr_R[:, None] + distance, mask=near, other=0.0).to(tl.float32)


@triton.jit
def join_sink(M_R, L_R, sink_R, pre_scale, NEEDS_SCORES: tl.constexpr):
    """L + e^sink: the softmax's sum with one more key, added last, without a value.

    If the sink dwarfs all keys, L becomes infinite and the row zeros, which is its value in float32.
    """
    if not NEEDS_SCORES:
        M_R = M_R * pre_scale
    return L_R + tl.exp2((sink_R - M_R) * LOG2_E)
