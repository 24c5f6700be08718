"""The heads of an attention module that a rank holds, and the projection features that belong to them.

A rank has H / tp consecutive query heads, and the key heads that they read. If there are fewer key heads than ranks, or
the heads of one key head are cut between ranks, several ranks hold this key head. A rank may hold a key head several
times, so that each of its key heads serves the same number of query heads.

In exact arithmetic, ranks may hold different numbers of heads. A rank that would get no head computes another rank's
head, and its result is ignored.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from detcompile.errors import NumericsError, UnsupportedModel
from detcompile.parallel import TensorParallel
from detcompile.passes.adapters.attention_classes import CODEGEN_PARTS
from detcompile.passes.modules.attention import AttentionCall
from detcompile.passes.sharding.modules import Linear, num_features

QUERIES = {"q_proj", "q_b_proj", "query", "Wq", "q_lin"}
KEYS, VALUES = {"k_proj", "key", "Wk", "k_lin"}, {"v_proj", "value", "Wv", "v_lin"}
LATENTS = {"q_a_proj", "kv_a_proj_with_mqa"}  # read by every head
OUTPUTS = {"o_proj", "out_proj", "c_proj", "dense", "Wo", "out_lin"}
# (architecture, projection) with the features of the query heads: gates of the heads' outputs
GATES = {("afmoe", "gate_proj"), ("laguna", "g_proj")}
# ... with all queries, then all keys, then all values
PACKED = {
    ("gpt2", "c_attn"),
    ("mpt", "Wqkv"),
    ("openai-gpt", "c_attn"),
    ("phi3", "qkv_proj"),
    ("phi4_multimodal", "qkv_proj"),
}
# ... with, for each key head, its query heads, its key and its value
GROUPED = {
    ("bloom", "query_key_value"),
    ("falcon", "query_key_value"),
    ("gpt_bigcode", "c_attn"),
    ("gpt_neox", "query_key_value"),
    ("gpt_neox_japanese", "query_key_value"),
    ("persimmon", "query_key_value"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadShare:
    """One rank's heads of one attention module.

    Attributes:
        num_heads, num_kv_heads: heads of the whole module. q, kv: the heads that this rank holds, in order.
        head_dim, v_head_dim: features of a query or key, and of a value.
        is_even: every rank holds equally many query heads.
        counts: False if this rank's results are ignored, because another rank holds the same heads.
    """

    num_heads: int
    num_kv_heads: int
    q: tuple[int, ...]
    kv: tuple[int, ...]
    head_dim: int
    v_head_dim: int
    is_even: bool = True
    counts: bool = True

    @property
    def outputs(self) -> slice:
        """The range of this rank's features in the results of all heads."""
        return slice(self.q[0] * self.v_head_dim, (self.q[-1] + 1) * self.v_head_dim)

    def heads(self, projection: str) -> list[int]:
        """Return this rank's heads of a projection with a single kind of heads."""
        return list(self.q if projection.startswith("q") else self.kv)

    def is_partition(self, projection: str) -> bool:
        """Return whether ranks hold equal numbers of a projection's heads, and no head twice."""
        distinct = projection.startswith("q") or len(self.kv) * self.num_heads == len(self.q) * self.num_kv_heads
        return self.is_even and distinct

    def spans(self, norm: nn.Module) -> bool:
        """Return whether a norm spans the features of several heads."""
        weight = getattr(norm, "weight", None)
        return isinstance(weight, Tensor) and weight.dim() == 1 and len(weight) != self.head_dim


def head_share(
    call: AttentionCall, ranks: TensorParallel, name: str, replicate: bool, uneven: bool
) -> HeadShare | None:
    """Return this rank's heads of the calling module; None if every rank holds all heads.

    Args:
        uneven: heads that do not divide among the ranks may be cut unevenly.

    Raises:
        NumericsError: the heads do not divide among the ranks, and ``replicate`` and ``uneven`` are off.
    """
    num_kv_heads, (head_dim, v_head_dim) = call.shape[0], call.head_dims
    if call.num_heads % ranks.size and replicate:
        return None
    if call.num_heads % ranks.size and not uneven:
        fitting = [size for size in range(1, call.num_heads + 1) if call.num_heads % size == 0]
        raise NumericsError(
            f"{name}: {call.num_heads} heads over tp={ranks.size} ranks; choose tp among {fitting}, or pass "
            "replicate_attention=True, and every rank computes all of the attention"
        )
    share = ranks.share(call.num_heads)
    q = range(share.start, max(share.start + 1, share.stop))
    members = call.num_heads // num_kv_heads
    kv = [head // members for head in q[:: math.gcd(q.start, len(q), members)]]
    return HeadShare(
        num_heads=call.num_heads,
        num_kv_heads=num_kv_heads,
        q=tuple(q),
        kv=tuple(kv),
        head_dim=head_dim,
        v_head_dim=v_head_dim,
        is_even=call.num_heads % ranks.size == 0,
        counts=share.stop > share.start,
    )


def features_of(leaf: str, linear: Linear, share: HeadShare, model_type: str, where: str) -> Tensor | None:
    """Return the output features of an attention projection that belong to the rank's heads; None for all.

    Every rank keeps all outputs of the module's last projection, and of one into a latent that all heads read.

    Raises:
        UnsupportedModel: the layout of the projection's features is unknown.
    """
    width = num_features(linear)
    q, k = (heads * share.head_dim for heads in (share.num_heads, share.num_kv_heads))
    v = share.num_kv_heads * share.v_head_dim
    if leaf in OUTPUTS | LATENTS:
        return None
    # A projection may give more features per head than a query has, such as a gate.
    if (leaf in QUERIES or (model_type, leaf) in GATES) and width % share.num_heads == 0:
        return _blocks(share.q, width // share.num_heads)
    if (leaf in KEYS and width == k) or (leaf in VALUES and width == v):
        return _blocks(share.kv, width // share.num_kv_heads)
    # Projections of a latent: each head's key without its rotated part, then its value.
    if leaf == "kv_b_proj" and share.num_kv_heads == share.num_heads and width % share.num_heads == 0:
        return _blocks(share.kv, width // share.num_heads)
    if (model_type, leaf) in PACKED and width == q + k + v:
        parts = [_blocks(share.q, share.head_dim), q + _blocks(share.kv, share.head_dim)]
        return torch.cat([*parts, q + k + _blocks(share.kv, share.v_head_dim)])
    if (model_type, leaf) in GROUPED and width == q + k + v and share.head_dim == share.v_head_dim:
        return _grouped(share)
    if (model_type, leaf) == ("codegen", "qkv_proj") and width == q + k + v and share.num_heads % CODEGEN_PARTS == 0:
        return _in_parts(share)
    raise UnsupportedModel(f"{where}.{leaf}: how its {width} features belong to heads is not known; compile with tp=1")


def _blocks(heads: Sequence[int], size: int) -> Tensor:
    return torch.cat([torch.arange(head * size, (head + 1) * size, device="cpu") for head in heads])


def _grouped(share: HeadShare) -> Tensor:
    members = share.num_heads // share.num_kv_heads
    heads_a_key = len(share.q) // len(share.kv)
    heads = []
    for i, kv in enumerate(share.kv):
        first = kv * (members + 2)
        heads += [first + head % members for head in share.q[i * heads_a_key : (i + 1) * heads_a_key]]
        heads += [first + members, first + members + 1]
    return _blocks(heads, share.head_dim)


def _in_parts(share: HeadShare) -> Tensor:
    """Return this rank's features of CodeGen's fused weight: up to four parts of queries, values and keys."""
    whole, parts = share.num_heads // CODEGEN_PARTS, math.gcd(CODEGEN_PARTS, len(share.q))
    heads_a_part = len(share.q) // parts
    heads = [
        (head // whole * 3 + kind) * whole + head % whole
        for part in range(parts)
        for kind in range(3)
        for head in share.q[part * heads_a_part : (part + 1) * heads_a_part]
    ]
    return _blocks(heads, share.head_dim)
