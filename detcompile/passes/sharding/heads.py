"""The heads of an attention module that a rank holds, and the features of its projections that these are.

A rank has H / tp query heads that lie side by side, and the key heads that they read. Where there are fewer key heads
than ranks, or the ranks' borders cut a group of query heads, several ranks hold a key head, and a rank may hold it
more than once, so that each of its key heads serves equally many of its query heads.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import Conv1D

from detcompile.errors import NumericsError, UnsupportedModel
from detcompile.parallel import TensorParallel
from detcompile.passes.adapters.attention_classes import CODEGEN_PARTS
from detcompile.passes.modules.attention import AttentionCall

__all__ = ["HeadShare", "features_of", "head_share"]

QUERIES = {"q_proj", "q_b_proj", "query", "Wq", "q_lin"}
KEYS, VALUES = {"k_proj", "key", "Wk", "k_lin"}, {"v_proj", "value", "Wv", "v_lin"}
LATENTS = {"q_a_proj", "kv_a_proj_with_mqa"}  # what every head reads
OUTPUTS = {"o_proj", "out_proj", "c_proj", "dense", "Wo", "out_lin"}
# (architecture, projection) whose features are those of the query heads, gates of what the heads found
GATES = {("afmoe", "gate_proj"), ("laguna", "g_proj")}
# ... whose features are all queries, then all keys, then all values
PACKED = {
    ("gpt2", "c_attn"),
    ("mpt", "Wqkv"),
    ("openai-gpt", "c_attn"),
    ("phi3", "qkv_proj"),
    ("phi4_multimodal", "qkv_proj"),
}
# ... whose features are, for each key head, its query heads, its key and its value
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
    """

    num_heads: int
    num_kv_heads: int
    q: tuple[int, ...]
    kv: tuple[int, ...]
    head_dim: int
    v_head_dim: int

    def heads(self, projection: str) -> list[int]:
        """The heads of a projection that has one kind of them."""
        return list(self.q if projection.startswith("q") else self.kv)

    def is_partition(self, projection: str) -> bool:
        """Whether no two ranks hold the same head of a projection."""
        return projection.startswith("q") or len(self.kv) * self.num_heads == len(self.q) * self.num_kv_heads

    def spans(self, norm: nn.Module) -> bool:
        """Whether a norm goes over the features of several heads at once."""
        weight = getattr(norm, "weight", None)
        return isinstance(weight, Tensor) and weight.dim() == 1 and len(weight) != self.head_dim


def head_share(call: AttentionCall, ranks: TensorParallel, name: str, replicate: bool) -> HeadShare | None:
    """The heads that this rank holds of the module that made the call; None if every rank is to hold all of them.

    Raises:
        NumericsError: the heads do not divide, and they are not to be replicated.
    """
    num_kv_heads, head_dim, v_head_dim = call.shape
    if call.num_heads % ranks.size:
        if replicate:
            return None
        fitting = [size for size in range(1, call.num_heads + 1) if call.num_heads % size == 0]
        raise NumericsError(
            f"{name}: {call.num_heads} heads over tp={ranks.size} ranks; choose tp among {fitting}, or pass "
            "replicate_attention=True, and every rank computes all of the attention"
        )
    q = range(call.num_heads)[ranks.share(call.num_heads)]
    members = call.num_heads // num_kv_heads
    kv = [head // members for head in q[:: math.gcd(len(q), members)]]
    return HeadShare(
        num_heads=call.num_heads,
        num_kv_heads=num_kv_heads,
        q=tuple(q),
        kv=tuple(kv),
        head_dim=head_dim,
        v_head_dim=v_head_dim,
    )


def features_of(leaf: str, linear: nn.Linear | Conv1D, share: HeadShare, model_type: str, where: str) -> Tensor | None:
    """The output features of an attention module's projection that belong to the rank's heads; None for all of them.

    Every rank has all outputs of a module's last projection, and of one into a latent that all heads read.

    Raises:
        UnsupportedModel: what the projection's features are is not known.
    """
    width = linear.weight.shape[1 if isinstance(linear, Conv1D) else 0]
    q, k = (heads * share.head_dim for heads in (share.num_heads, share.num_kv_heads))
    v = share.num_kv_heads * share.v_head_dim
    if leaf in OUTPUTS | LATENTS:
        return None
    # A head may have more than its query, as a gate.
    if (leaf in QUERIES or (model_type, leaf) in GATES) and width % share.num_heads == 0:
        return _blocks(share.q, width // share.num_heads)
    if (leaf in KEYS and width == k) or (leaf in VALUES and width == v):
        return _blocks(share.kv, width // share.num_kv_heads)
    # Of a latent: each head's key without its rotated part, and its value.
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
    """Of four parts, each its queries, values and keys, the same in as many parts as the rank's heads fill."""
    whole, parts = share.num_heads // CODEGEN_PARTS, math.gcd(CODEGEN_PARTS, len(share.q))
    heads_a_part = len(share.q) // parts
    heads = [
        (head // whole * 3 + kind) * whole + head % whole
        for part in range(parts)
        for kind in range(3)
        for head in share.q[part * heads_a_part : (part + 1) * heads_a_part]
    ]
    return _blocks(heads, share.head_dim)
