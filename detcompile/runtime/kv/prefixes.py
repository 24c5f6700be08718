"""Prefixes: move KV blocks between engines of the same model, whatever the tp of either.

Keys and values depend only on the fingerprint and the tokens up to theirs, so a moved block has the same bits that the
other engine would compute. Blocks hold all heads; each rank takes its own.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from detcompile.errors import InvalidInput
from detcompile.runtime.kv.kv_blocks import KVBlocks
from detcompile.runtime.requests.plain_values import kind, shown, token_list
from detcompile.runtime.requests.turns import Turns, without_interrupts
from detcompile.step import ModelFacts

LayerBlocks = tuple[Tensor, Tensor]  # keys and values on the CPU: [blocks, block_size, kv_heads, head_dim]


@dataclass(frozen=True, kw_only=True)
class KVPrefix:
    """Full KV blocks of the beginning of sequences.

    Args:
        fingerprint: fingerprint of the model that computed them.
        block_size: tokens per block.
        token_ids: tokens of the blocks, from position 0 on; a multiple of ``block_size``.
        layers: keys and values of each layer, CPU tensors of [blocks, block_size, kv_heads, head_dim] with all heads.
            A layer with a window has only the last blocks, which later tokens can see.
        digest: blake2b of ``key`` and the bytes of ``layers``, in hex.
    """

    fingerprint: str
    block_size: int
    token_ids: tuple[int, ...]
    layers: tuple[LayerBlocks, ...]
    digest: str

    @property
    def key(self) -> str:
        """sha256, in hex, of what determines the bytes: fingerprint, block size and tokens."""
        tokens = b"".join(int(token).to_bytes(8, "little") for token in self.token_ids)
        return hashlib.sha256(f"{self.fingerprint} {self.block_size} ".encode() + tokens).hexdigest()


class BlockReader(Protocol):
    """Holder of an engine's KV cache: Worker or RemoteWorker.

    Attributes:
        head_shares: number of ranks that hold a share of the heads each, and are read and written together; 0 if whole
            blocks cannot be read.
    """

    head_shares: int

    def read_blocks(self, tables: Sequence[Sequence[int]]) -> list[LayerBlocks]:
        """Return blocks of every layer, given one table per KV group."""

    def write_blocks(self, tables: Sequence[Sequence[int]], layers: Sequence[LayerBlocks]) -> None:
        """Write blocks as returned by ``read_blocks``."""


class Prefixes:
    """Exports prefixes from an engine's cache and imports those of other engines. Thread-safe.

    Args:
        blocks: the engine's blocks.
        facts: heads, widths and dtype of each layer on one rank.
        reader: holds the blocks' contents.
        turns: held while blocks are read or written, so that no step is planned.
        follow_weights: forgets blocks of outdated weights.
        fingerprint: returns the fingerprint of the model with its current weights.
    """

    def __init__(
        self,
        blocks: KVBlocks,
        facts: ModelFacts,
        reader: BlockReader,
        turns: Turns,
        follow_weights: Callable[[], None],
        fingerprint: Callable[[], str],
    ) -> None:
        self._blocks = blocks
        self._facts = facts
        self._reader = reader
        self._turns = turns
        self._follow_weights = follow_weights
        self._fingerprint = fingerprint

    def export(self, token_ids: Sequence[int]) -> KVPrefix | None:
        """Return the longest prefix of these tokens that is cached in full blocks; None if no block is cached.

        Args:
            token_ids: token ids of a prompt, or of a prompt and its answer.

        Raises:
            InvalidInput: a token id is invalid, the engine has no prefix cache, or the model is split into stages or
                over ranks of torchrun.
        """
        self._require_whole()
        token_ids = _ids(token_ids)
        size = self._blocks.pool.block_size
        with without_interrupts(), self._turns:
            fingerprint = self._fingerprint()  # detects every change of the weights
            self._follow_weights()
            digests = self._digests(token_ids)
            num_blocks = self._longest(digests)
            if not num_blocks:
                return None
            tables = [
                [self._cached(index, digest) for digest in digests[first:num_blocks]]
                for index, first in enumerate(self._firsts(num_blocks))
            ]
            layers = tuple(self._reader.read_blocks(tables))
        tokens = tuple(token_ids[: num_blocks * size])
        prefix = KVPrefix(fingerprint=fingerprint, block_size=size, token_ids=tokens, layers=layers, digest="")
        return replace(prefix, digest=_digest_of(prefix))

    def take(self, prefix: KVPrefix) -> int:
        """Import blocks of another engine, so that prompts with these tokens find them.

        Returns:
            The number of tokens now cached here; 0, with nothing changed, if too few blocks are free.

        Raises:
            InvalidInput: the prefix belongs to another model, block size or kind of cache, was changed since
                ``export``, or as ``export``.
        """
        self._require_whole()
        if not isinstance(prefix, KVPrefix):
            raise InvalidInput(f"prefix {shown(prefix)} is {kind(prefix)}: give what an engine's export() returned")
        _ids(prefix.token_ids)
        changed = not _are_pairs(prefix.layers) or _digest_of(prefix) != prefix.digest
        with without_interrupts(), self._turns:
            self._require_fitting(prefix)
            if changed:
                raise InvalidInput("the KV blocks, or their tokens, were changed since export(): export them again")
            self._follow_weights()
            digests, pool = self._digests(prefix.token_ids), self._blocks.pool
            wanted = [
                [(index, digest) for digest in digests[first:]]
                for index, first in enumerate(self._firsts(len(digests)))
            ]
            known = [block for keys in wanted for key in keys if (block := pool.lookup(key)) is not None]
            pool.share(known)  # before the allocation, which could evict them
            missing = [[row for row, key in enumerate(keys) if pool.lookup(key) is None] for keys in wanted]
            if sum(map(len, missing)) > pool.num_free:
                pool.free(known)
                return 0
            fresh = [pool.allocate(len(rows)) for rows in missing]
            try:
                self._write(fresh, missing, prefix.layers)
                for blocks, rows, keys in zip(fresh, missing, wanted):
                    for block, row in zip(blocks, rows):
                        pool.publish(block, keys[row])
            finally:
                for blocks in (known, *fresh):
                    pool.free(blocks)
        return len(prefix.token_ids)

    def _write(
        self, fresh: Sequence[Sequence[int]], missing: Sequence[Sequence[int]], layers: Sequence[LayerBlocks]
    ) -> None:
        """Write the missing rows into newly allocated blocks."""
        if any(missing):
            rows_of = {
                layer: missing[index] for index, group in enumerate(self._blocks.groups) for layer in group.layers
            }
            parts = [(keys[rows_of[layer]], values[rows_of[layer]]) for layer, (keys, values) in enumerate(layers)]
            self._reader.write_blocks(fresh, parts)

    def _digests(self, token_ids: Sequence[int]) -> list[bytes]:
        """Return the keys under which the full blocks of these tokens are published."""
        size, digests = self._blocks.pool.block_size, [self._blocks.salt_digest]
        for start in range(0, len(token_ids) - size + 1, size):
            digests.append(self._blocks.next_digest(digests[-1], token_ids[start : start + size]))
        return digests[1:]

    def _longest(self, digests: Sequence[bytes]) -> int:
        """Return the largest number of blocks such that every group has all keys that later tokens see."""
        lookup = self._blocks.pool.lookup
        for num_blocks in range(len(digests), 0, -1):
            firsts = enumerate(self._firsts(num_blocks))
            keys = ((index, digest) for index, first in firsts for digest in digests[first:num_blocks])
            if all(lookup(key) is not None for key in keys):
                return num_blocks
        return 0

    def _firsts(self, num_blocks: int) -> list[int]:
        """Return, for each group, the first block visible to the token after ``num_blocks`` full blocks."""
        return [
            self._blocks.first_visible(group, num_blocks * self._blocks.pool.block_size)
            for group in self._blocks.groups
        ]

    def _cached(self, group: int, digest: bytes) -> int:
        block = self._blocks.pool.lookup((group, digest))
        assert block is not None, "_longest has found it"
        return block

    def _require_whole(self) -> None:
        if not self._blocks.prefix_caching:
            raise InvalidInput("this engine has no prefix cache: set prefix_caching, and use a model without states")
        if not self._reader.head_shares:
            raise InvalidInput(
                "KV blocks of pipeline stages (pp), or of ranks under torchrun, cannot be exported: compile with tp"
            )

    def _require_fitting(self, prefix: KVPrefix) -> None:
        ours = self._fingerprint()
        if prefix.fingerprint != ours:
            raise InvalidInput(f"the KV blocks are of the model {prefix.fingerprint}, and this one is {ours}")
        size = self._blocks.pool.block_size
        if prefix.block_size != size or len(prefix.token_ids) % size:
            raise InvalidInput(
                f"the KV blocks hold {len(prefix.token_ids)} tokens in blocks of {prefix.block_size}, and this engine's"
                f" hold {size}: make both with one block_size"
            )
        num_blocks = len(prefix.token_ids) // size
        firsts = self._firsts(num_blocks)
        first_of = {layer: firsts[index] for index, group in enumerate(self._blocks.groups) for layer in group.layers}
        shares, dtype = self._reader.head_shares, self._facts.dtype
        expected = [
            [((num_blocks - first_of[layer], size, shape.kv_heads * shares, width), dtype)
             for width in (shape.head_dim, shape.v_head_dim)]
            for layer, shape in enumerate(self._facts.kv_shapes)
        ]  # fmt: skip
        if not _are_pairs(prefix.layers):
            raise InvalidInput("the KV blocks' keys and values must be tensors on the CPU, as export() returned them")
        layouts = [[(tuple(part.shape), part.dtype) for part in parts] for parts in prefix.layers]
        if layouts != expected:
            raise InvalidInput(
                "the KV blocks have other layers, heads or dtypes than this engine's: heads that are replicated over"
                " ranks cannot be moved"
            )


def _ids(values: Any) -> list[int]:
    """Return checked token ids."""
    token_ids = token_list(values, "token_ids")
    bad = next((token for token in token_ids if not 0 <= token < 1 << 63), None)
    if bad is not None:
        raise InvalidInput(f"token_ids hold {shown(bad)}, which is not a token id")
    return token_ids


def _digest_of(prefix: KVPrefix) -> str:
    digest = hashlib.blake2b(prefix.key.encode(), digest_size=32)
    for keys, values in prefix.layers:
        for part in (keys, values):
            digest.update(part.contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _are_pairs(layers: Any) -> bool:
    """Return True if ``layers`` are pairs of CPU tensors."""
    return isinstance(layers, Sequence) and all(
        isinstance(pair, Sequence) and len(pair) == 2 and all(isinstance(part, Tensor) and part.is_cpu for part in pair)
        for pair in layers
    )
