"""Check padded batches, and convert them to packed rows and back.

Legend: B rows and C columns of a padded batch, R rows of logits, V vocabulary size.
"""

import hashlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from detcompile.errors import InvalidInput
from detcompile.runtime.kv.block_pool import BLOCK_SIZE, NULL_BLOCK
from detcompile.runtime.requests.plain_values import token_list, whole_number
from detcompile.runtime.sampling.filters import log_softmax
from detcompile.runtime.step.builder import NOT_PENDING, StepArrays, token_places
from detcompile.templates.cpu.fp_mode import float_mode

IGNORED_LABEL = -100  # Hugging Face's label of a token without loss


class UnpaddedBatch(NamedTuple):
    """A padded batch without its padding, on the host: the rows' tokens one after another."""

    token_ids: NDArray[np.int64]  # [T]
    position_ids: NDArray[np.int64]  # [T]
    lengths: NDArray[np.int64]  # [B], at least 1
    mask: NDArray[np.bool_]  # [B, C]: true at tokens, false at padding

    def rows(self) -> list[list[int]]:
        """Return the token ids, one list per row."""
        return [tokens.tolist() for tokens in np.split(self.token_ids, self.lengths.cumsum()[:-1])]


def unpad(input_ids: Tensor, attention_mask: Tensor | None = None, position_ids: Tensor | None = None) -> UnpaddedBatch:
    """Remove padding on the left, on the right, or on both sides of each row.

    Args:
        input_ids: [B, C] integers.
        attention_mask: [B, C] of zeros and ones; None is all ones.
        position_ids: [B, C] or [1, C], counting up by one over the tokens of a row from any start; default: from 0.

    Raises:
        InvalidInput: wrong shapes or values, a row with only padding, padding between two tokens, or a row with several
            packed texts.
    """
    require_ids(input_ids)
    mask = _checked_mask(attention_mask, input_ids)
    if position_ids is None:
        positions = mask.cumsum(axis=1) - 1
    else:
        positions = _checked_positions(position_ids, mask)
    token_ids = input_ids.cpu().numpy().astype(np.int64, copy=False)
    return UnpaddedBatch(token_ids[mask], positions[mask], mask.sum(axis=1), mask)


def check_batch(batch: UnpaddedBatch, vocab_size: int, max_context: int, max_new_tokens: int = 0) -> None:
    """Raise InvalidInput unless a model can read every row and continue it by ``max_new_tokens``."""
    longest = int(batch.lengths.max()) + max_new_tokens
    if longest > max_context:
        raise InvalidInput(
            f"row {batch.lengths.argmax()} needs {longest} tokens, the model was compiled for {max_context}:"
            " shorten it, or compile with a larger max_context"
        )
    if batch.token_ids.min() < 0 or batch.token_ids.max() >= vocab_size:
        wrong = int(((batch.token_ids < 0) | (batch.token_ids >= vocab_size)).argmax())
        row = int(batch.lengths.cumsum().searchsorted(wrong, side="right"))
        raise InvalidInput(f"input_ids: row {row} holds token {batch.token_ids[wrong]}; ids are 0 to {vocab_size - 1}")
    if batch.position_ids.max() >= max_context:
        raise InvalidInput(
            f"position {batch.position_ids.max()}: the model was compiled for positions 0 to {max_context - 1}"
        )


def keep_columns(mask: NDArray[np.bool_], logits_to_keep: int | Tensor) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Translate Hugging Face's ``logits_to_keep`` of a padded batch to packed tokens.

    Args:
        mask: [B, C], from ``unpad``.
        logits_to_keep: number of last columns, 0 for all; or a tensor of column indices [K] or bools [C].

    Returns:
        Packed token indices [R] whose logits are wanted, row by row, and the mask [B, K] for ``repad`` (``mask`` itself
        if all are kept).

    Raises:
        InvalidInput: an invalid count, or columns outside the batch.
    """
    if isinstance(logits_to_keep, Tensor):
        columns = _columns_of(logits_to_keep, mask.shape[1])
    else:
        count = whole_number(logits_to_keep, "logits_to_keep")
        if count < 0:
            raise InvalidInput(f"logits_to_keep={count}: give the number of last columns, or 0 for all")
        if count == 0:
            return np.arange(np.count_nonzero(mask)), mask
        columns = np.arange(mask.shape[1])[-count:]
    packed_index = (mask.cumsum() - 1).reshape(mask.shape)
    kept = mask[:, columns]
    return packed_index[:, columns][kept], kept


def repad(logits: Tensor, mask: NDArray[np.bool_]) -> Tensor:
    """Scatter [R, V] to [B, C, V]: rows in order to the R true places of ``mask`` [B, C], zeros elsewhere."""
    count = np.count_nonzero(mask)
    if count != logits.shape[0]:
        raise InvalidInput(f"{logits.shape[0]} rows of logits for {count} tokens: give one row per token")
    if count == mask.size:
        return logits.view(*mask.shape, logits.shape[-1])
    padded = logits.new_zeros(*mask.shape, logits.shape[-1])
    padded[torch.from_numpy(mask).to(logits.device)] = logits
    return padded


def language_loss(logits: Tensor, labels: Tensor, mask: NDArray[np.bool_], is_exact: bool = False) -> Tensor:
    """Return the mean cross entropy, fp32, of labels one column to the right; a sum over tokens of the whole batch.

    A label counts only if both it and the column that predicts it are tokens. Labels at padding count as IGNORED_LABEL,
    and a row's first token has no prediction, so padding changes nothing.

    Args:
        logits: [B, C, V] of any float dtype.
        labels: [B, C] token ids, or IGNORED_LABEL.
        mask: [B, C], true at tokens.
        is_exact: by the definition of docs/exact.md.

    Raises:
        InvalidInput: there are no labels, or one is outside the vocabulary.
    """
    wanted = labels[:, 1:].to(logits.device)
    counted = (wanted != IGNORED_LABEL) & torch.from_numpy(mask[:, 1:] & mask[:, :-1]).to(logits.device)
    if not counted.any():
        raise InvalidInput("no token has a label: every label is -100, at padding, or of a row's first token")
    bad = wanted[counted & ((wanted < 0) | (wanted >= logits.shape[-1]))]
    if len(bad):
        raise InvalidInput(f"label {int(bad[0])}: labels are 0 to {logits.shape[-1] - 1}, or {IGNORED_LABEL} for none")
    with float_mode(logits.device):
        logprobs = log_softmax(logits[:, :-1][counted], is_exact)
        chosen = logprobs.gather(1, wanted[counted].unsqueeze(1)).squeeze(1)
        if is_exact:
            total = torch.ops.detcompile.exact_sum(chosen)
            return -torch.ops.detcompile.exact_divide(total, torch.full_like(total, chosen.numel()))
        return -torch.ops.detcompile.row_sum(chosen) / chosen.numel()


def inferred_mask(input_ids: Tensor, pad_token_id: int | None, eos_token_ids: Sequence[int]) -> Tensor | None:
    """Infer the attention mask of a batch without one, like Hugging Face: pad tokens are padding.

    Returns None (all ones) if there is no pad token, or if it is also an end token and may therefore be real.

    Raises:
        InvalidInput: a pad token stands between two others.
    """
    if pad_token_id is None or pad_token_id in eos_token_ids:
        return None
    mask = (input_ids.long() != pad_token_id).long()
    if bool(((mask.cumsum(1) > 0) & (mask.flip(1).cumsum(1).flip(1) > 0) & (mask == 0)).any()):
        raise InvalidInput(
            f"input_ids hold the pad token {pad_token_id} between two others, and no attention_mask says whether it is"
            " padding there: pass attention_mask, of ones if it is a token"
        )
    return mask


def row_seeds(seed: int | Sequence[int] | None, rows: int) -> list[int]:
    """Return a seed per row: drawn by torch for None, derived by ``seed_of_row`` from one int, or taken from a list.

    Raises:
        InvalidInput: the list does not have one distinct seed per row, or a seed is out of range.
    """
    if seed is None:
        return torch.empty(rows, dtype=torch.int64, device="cpu").random_().tolist()
    if isinstance(seed, Sequence) or getattr(seed, "ndim", 0) > 0:
        seeds = token_list(seed, "seed")
    else:
        seeds = [seed_of_row(_checked_seed(whole_number(seed, "seed")), row) for row in range(rows)]
    if len(set(seeds)) != rows or len(seeds) != rows:
        raise InvalidInput(
            f"{len(set(seeds))} different seeds for {rows} rows: give each row its own, so that rows share no random"
            " numbers, or one int, from which each row's seed is derived"
        )
    return [_checked_seed(row_seed) for row_seed in seeds]


def seed_of_row(seed: int, row: int) -> int:
    """Return the seed of a row, whatever the batch's size: ``seed`` itself for row 0.

    For other rows it is the first eight bytes, little-endian, of sha256("{seed}/{row}") in decimal ASCII.
    """
    if row == 0:
        return seed
    return int.from_bytes(hashlib.sha256(f"{seed}/{row}".encode()).digest()[:8], "little")


def _checked_seed(seed: int) -> int:
    if not 0 <= seed < 1 << 64:
        raise InvalidInput(f"seed {seed} must be in [0, 2^64)")
    return seed


def _checked_mask(attention_mask: Tensor | None, input_ids: Tensor) -> NDArray[np.bool_]:
    """Return the mask [B, C], after checking that each row is one run of tokens."""
    if attention_mask is None:
        return np.ones(input_ids.shape, np.bool_)
    require_values(attention_mask, "attention_mask")
    if attention_mask.shape != input_ids.shape:
        raise InvalidInput(
            f"attention_mask {list(attention_mask.shape)} must have the shape of input_ids {list(input_ids.shape)};"
            " 4-D and other masks are not accepted"
        )
    is_token = attention_mask == 1
    if not (is_token | (attention_mask == 0)).all():
        raise InvalidInput("attention_mask must hold zeros (padding) and ones (tokens) only")
    mask: NDArray[np.bool_] = is_token.cpu().numpy()
    lengths = mask.sum(axis=1)
    if not lengths.all():
        raise InvalidInput(
            f"row {int(lengths.argmin())} of attention_mask is all padding: a row needs at least one token"
        )
    runs = mask[:, 0] + (mask[:, 1:] & ~mask[:, :-1]).sum(axis=1)
    if runs.max() > 1:
        raise InvalidInput(
            f"row {int(runs.argmax())} of attention_mask has padding between two tokens: remove those tokens from"
            " input_ids and pad on the left or on the right"
        )
    return mask


def _checked_positions(position_ids: Tensor, mask: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Return positions [B, C]. transformers reads a jump in positions as the start of another text in the row."""
    batch_size, length = mask.shape
    require_values(position_ids, "position_ids")
    if not _holds_integers(position_ids) or position_ids.shape not in {(batch_size, length), (1, length)}:
        raise InvalidInput(
            f"position_ids must be integers {[batch_size, length]} or {[1, length]};"
            f" got {position_ids.dtype} {list(position_ids.shape)}"
        )
    positions: NDArray[np.int64] = position_ids.cpu().long().expand(batch_size, length).numpy()
    if (positions[mask] < 0).any():
        raise InvalidInput("position_ids of tokens must not be negative")
    breaks = np.argwhere(mask[:, 1:] & mask[:, :-1] & (np.diff(positions) != 1))
    if len(breaks):
        row, column = breaks[0]
        before, after = positions[row, column : column + 2]
        raise InvalidInput(
            f"position_ids of row {row} go from {before} to {after} at column {column + 1}: they must count up by one,"
            " because a row is one text. If the row holds several packed texts, give each its own row and pad: padding"
            " is not computed"
        )
    return positions


def _columns_of(wanted: Tensor, length: int) -> NDArray[np.int64]:
    """Return the columns [K] that a tensor selects, as in torch's indexing."""
    require_values(wanted, "logits_to_keep")
    flags = wanted.dtype is torch.bool
    if wanted.dim() != 1 or not (flags or _holds_integers(wanted)) or (flags and len(wanted) != length):
        raise InvalidInput(
            f"logits_to_keep is {wanted.dtype} {list(wanted.shape)}: give an integer, or one axis of column indices or"
            f" of {length} truth values"
        )
    named = wanted.cpu() if flags else wanted.cpu().long()
    if not flags and ((named < -length) | (named >= length)).any():
        raise InvalidInput(f"logits_to_keep names a column outside the batch: input_ids have 0 to {length - 1}")
    columns: NDArray[np.int64] = torch.arange(length, device="cpu")[named].numpy()
    return columns


def require_ids(input_ids: Tensor) -> None:
    """Raise InvalidInput unless input_ids are a padded batch of integers, not empty."""
    require_values(input_ids, "input_ids")
    if input_ids.dim() != 2 or input_ids.numel() == 0 or not _holds_integers(input_ids):
        raise InvalidInput(
            f"input_ids must be integers [batch, length], not empty; got {input_ids.dtype} {list(input_ids.shape)}"
        )


def require_integers(tensor: Tensor, name: str) -> None:
    """Raise InvalidInput, naming the tensor, unless it holds integers."""
    require_values(tensor, name)
    if not _holds_integers(tensor):
        raise InvalidInput(f"{name}: it holds {tensor.dtype}: give integers")


def require_values(tensor: Tensor, name: str) -> None:
    """Raise InvalidInput if a tensor has no values (meta device), or is sparse, nested or a negated view."""
    if tensor.is_meta:
        raise InvalidInput(f"{name}: it is on the meta device, which holds no values: pass a tensor of a real device")
    if tensor.layout is not torch.strided or tensor.is_nested:
        what = "a nested tensor" if tensor.is_nested else f"of layout {tensor.layout}"
        raise InvalidInput(f"{name}: it is {what}: pass a dense tensor")
    if tensor.is_neg():  # code that reads memory would leave out the sign
        raise InvalidInput(f"{name}: it is a negated view: pass its resolve_neg()")


def _holds_integers(tensor: Tensor) -> bool:
    """Return True for integer dtypes; bool does not count."""
    return not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype is torch.bool)


def dense_step(batch: UnpaddedBatch, num_groups: int, logits_to_keep: NDArray[np.int64]) -> tuple[StepArrays, int]:
    """Return what ``build_step`` gives for new sequences, and the number of blocks of BLOCK_SIZE that the cache needs.

    Args:
        logits_to_keep: [R] indices of packed tokens.
    """
    counts = -(-batch.lengths // BLOCK_SIZE)
    ends = counts.cumsum()
    columns = np.arange(counts.max())
    blocks = (ends - counts)[:, None] + columns + (NULL_BLOCK + 1)
    groups = np.arange(num_groups)[:, None, None] * ends[-1]  # offset of each group's blocks
    tables = np.where(columns < counts[:, None], blocks + groups, NULL_BLOCK).astype(np.int32)
    cu_seqlens, _, slots = token_places(np.zeros_like(batch.lengths), batch.lengths, tables, BLOCK_SIZE)
    arrays = StepArrays(
        input_ids=batch.token_ids,
        position_ids=batch.position_ids,
        pending=np.full(len(batch.token_ids), NOT_PENDING, np.int64),
        logits_to_keep=logits_to_keep,
        slot_mappings=slots[:, None],
        cu_seqlens=cu_seqlens.astype(np.int32),
        seq_lens=batch.lengths.astype(np.int32),
        block_tables=tables,
        state_slots=np.arange(len(batch.lengths), dtype=np.int32),
    )
    return arrays, int(num_groups * ends[-1]) + 1


def two_way_step(batch: UnpaddedBatch, num_groups: int, logits_to_keep: NDArray[np.int64]) -> tuple[StepArrays, int]:
    """Return ``dense_step`` for a model with bidirectional attention.

    Each token becomes its own sequence, which shares its row's blocks and ends at the row's end. Keys are written
    before any token attends, so each token sees all keys, in the order in which a last token would.
    """
    arrays, num_blocks = dense_step(batch, num_groups, logits_to_keep)
    row = np.repeat(np.arange(len(batch.lengths)), batch.lengths)
    apart = arrays._replace(
        cu_seqlens=np.arange(len(row) + 1, dtype=np.int32),
        seq_lens=arrays.seq_lens[row],
        block_tables=np.ascontiguousarray(arrays.block_tables[:, row]),
        state_slots=np.arange(len(row), dtype=np.int32),
    )
    return apart, num_blocks
