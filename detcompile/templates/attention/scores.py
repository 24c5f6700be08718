"""What attention does to its scores besides scaling, and which keys a query sees: one definition for all kernels.

On a GPU plain rows have scores that are the products with the keys, and c = scale * log2(e) is applied inside exp2.
SCALED rows (those with a soft cap, ALiBi, biases, or a scale that is not positive) have scores in natural units, and
c = log2(e). ``inner`` is what a product is multiplied by first: scale / cap where there is a cap, else scale.

Each function of the GPU is of IEEE operations and exp2 alone, element by element: no schedule can change a bit of it,
as long as the kernel is compiled with enable_fp_fusion=False.
"""

import math
from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from detcompile.errors import InvalidInput
from detcompile.templates.device.exponential import LOG2_E

__all__ = ["Scores", "Visible", "join_sink", "related", "shaped", "tanh"]


@dataclass(frozen=True, slots=True)
class Scores:
    """score = scale * q.k, then softcap * tanh(score / softcap) if softcap > 0, then + alibi_slopes[h] * (key - pos),
    then + relative_bias[..., pos - key] for distances below its last extent.

    sinks [H], logits in the units of a score, join the softmax's denominator. alibi_slopes [H]. relative_bias: a row of
    biases for each row of q, [..., E].
    """

    scale: float
    softcap: float = 0.0
    sinks: Tensor | None = None
    alibi_slopes: Tensor | None = None
    relative_bias: Tensor | None = None

    def check(self, where: str, q: Tensor, heads: int) -> None:
        """Raises InvalidInput for what has no meaning."""
        if not math.isfinite(self.scale) or not math.isfinite(self.softcap) or self.softcap < 0:
            raise InvalidInput(
                f"{where}: scale={self.scale}, softcap={self.softcap}: both must be finite, and softcap positive, or 0 "
                "for none."
            )
        for name, values in (("sinks", self.sinks), ("alibi_slopes", self.alibi_slopes)):
            if values is not None and (tuple(values.shape) != (heads,) or not values.is_floating_point()):
                raise InvalidInput(
                    f"{where}: {name} must be floating point [{heads}], one a query head, not {values.dtype} "
                    f"{tuple(values.shape)}."
                )
        bias = self.relative_bias
        if bias is not None and (bias.shape[:-1] != q.shape[:-1] or not bias.shape[-1] or not bias.is_floating_point()):
            raise InvalidInput(
                f"{where}: relative_bias must be floating point {[*q.shape[:-1], 'E']}, E > 0, biases for each row of "
                f"q, not {bias.dtype} {tuple(bias.shape)}."
            )

    @property
    def scaled(self) -> bool:
        """Whether scores are in natural units before the maximum is taken (a scale <= 0 would make it a minimum)."""
        biased = self.alibi_slopes is not None or self.relative_bias is not None
        return self.softcap > 0 or biased or self.scale <= 0

    @property
    def inner(self) -> float:
        """What a product is multiplied by first."""
        return self.scale / self.softcap if self.softcap else self.scale

    @property
    def c(self) -> float:
        """What a score is multiplied by inside exp2."""
        return (1.0 if self.scaled else self.scale) * math.log2(math.e)


@dataclass(frozen=True, slots=True)
class Visible:
    """Which of the keys up to its own a query sees: those of the last sliding_window tokens, or of its own chunk of
    attention_chunk tokens; all where both are 0."""

    sliding_window: int
    attention_chunk: int = 0

    def check(self, where: str) -> None:
        """Raises InvalidInput for what has no meaning."""
        if min(self.sliding_window, self.attention_chunk) < 0 or (self.sliding_window and self.attention_chunk):
            raise InvalidInput(
                f"{where}: sliding_window={self.sliding_window}, attention_chunk={self.attention_chunk}: one of them "
                "may be a positive number of tokens, and the other is 0, for none."
            )

    @property
    def tokens(self) -> int:
        """The last tokens that hold all that a query sees; 0 for no limit."""
        return self.sliding_window or self.attention_chunk


@triton.jit
def tanh(x):
    """tanh within 2 ulp, out of IEEE operations and exp2: a polynomial (Cephes, tanhf) for |x| < 0.625."""
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
def shaped(s, key_K, pos_R, inner, cap, slope_R, CAPPED: tl.constexpr, ALIBI: tl.constexpr):
    """Products [R, K] of SCALED rows to scores: cap * tanh(s / cap), then slope * (key - pos), as far as asked for."""
    s = s * inner
    if CAPPED:
        s = cap * tanh(s)
    if ALIBI:
        s = s + slope_R[:, None] * (key_K[None, :] - pos_R[:, None]).to(tl.float32)
    return s


@triton.jit
def related(s, key_K, pos_R, bias_ptr_R, extent):
    """Scores [R, K] and, behind each row's pointer, its bias for the distance of each key; 0 past the extent."""
    distance = pos_R[:, None] - key_K[None, :]
    near = (distance >= 0) & (distance < extent)
    return s + tl.load(bias_ptr_R[:, None] + distance, mask=near, other=0.0).to(tl.float32)


@triton.jit
def join_sink(M_R, L_R, sink_R, inner, SCALED: tl.constexpr):
    """L + e^sink, for a softmax over one more key, taken last, without a value.

    Where the sink dwarfs all keys L becomes infinite, and the row zeros: its value to float32.
    """
    if not SCALED:
        M_R = M_R * inner
    return L_R + tl.exp2((sink_R - M_R) * LOG2_E)
