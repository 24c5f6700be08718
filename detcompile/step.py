"""StepInputs: every tensor one forward step reads. The only type that passes and runtime share.

Legend: T tokens of this step, S sequences, R rows whose logits are wanted.
"""

from typing import NamedTuple

from torch import Tensor

__all__ = ["PADDING_SLOT", "StepInputs"]

PADDING_SLOT = -1  # a token whose key and value are written nowhere


class StepInputs(NamedTuple):
    """Packed tokens of a step, and where their keys and values live.

    The tokens of sequence s are rows ``cu_seqlens[s]:cu_seqlens[s + 1]``; they are the LAST tokens of that sequence,
    which holds ``seq_lens[s]`` keys once this step has written its own. Key p of sequence s lives in slot
    ``block_table[s, p // block_size] * block_size + p % block_size``. Rows past ``cu_seqlens[S]`` are padding.
    """

    slot_mapping: Tensor  # [T] int64, PADDING_SLOT writes nowhere
    cu_seqlens: Tensor  # [S + 1] int32, ascending from 0
    seq_lens: Tensor  # [S] int32, keys of each sequence after this step's writes
    block_table: Tensor  # [S, max_blocks] int32
    k_caches: tuple[Tensor, ...]  # one a layer: [num_blocks, block_size, kv_heads, head_dim]
    v_caches: tuple[Tensor, ...]  # one a layer: [num_blocks, block_size, kv_heads, v_head_dim]
