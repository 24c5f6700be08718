"""CompiledModel: called like the Hugging Face model it was made from; its bits depend on each row's own tokens."""

from collections.abc import Sequence as SequenceOf
from dataclasses import replace
from functools import cached_property

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

from detcompile.errors import InvalidInput
from detcompile.fingerprints import fingerprint, fingerprint_parts
from detcompile.numerics import Numerics
from detcompile.passes.certificate import Certificate
from detcompile.passes.lowering import Lowered
from detcompile.runtime.block_pool import BlockPool
from detcompile.runtime.runner import KVCache, KVShape, Runner
from detcompile.runtime.sampling import SamplingParams, sample
from detcompile.runtime.sequence import Sequence
from detcompile.runtime.step_builder import build_step, keep_columns, repad, unpad

__all__ = ["CompiledModel"]

IGNORED_LABEL = -100  # Hugging Face's label of a token that the loss leaves out
BLOCK_SIZE = 64


class CompiledModel:
    """A certified causal LM. Made by ``detcompile.compile``.

    Attributes:
        model: the Hugging Face module it was made from, whose row-parallel linears were replaced.
        numerics: the declared orders.
        certificate: the proof; prints as a table.
        max_context: tokens a sequence may hold.
    """

    def __init__(self, model: PreTrainedModel, lowered: Lowered, numerics: Numerics, max_context: int) -> None:
        self.model = model
        self.numerics = numerics
        self.max_context = max_context
        self.certificate: Certificate = lowered.certificate
        self.forward = lowered.forward
        self._kv_shapes = tuple(KVShape(c.kv_heads, c.head_dim, c.v_head_dim) for c in lowered.attention)

    @property
    def device(self) -> torch.device:
        """Where the weights live."""
        return next(self.model.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights, the activations and the KV cache."""
        return self.model.dtype

    @cached_property
    def vocab_size(self) -> int:
        """Ids are 0 … vocab_size - 1."""
        return self.model.get_input_embeddings().weight.shape[0]

    @cached_property
    def fingerprint_parts(self) -> dict[str, str]:
        """What the contract holds fixed, by name."""
        config = self.model.config.to_dict()
        return fingerprint_parts(self.model, config, self.numerics, self.certificate, self.max_context)

    @property
    def fingerprint(self) -> str:
        """sha256 in hex: equal fingerprints give equal bits. Reads every weight once, on first use."""
        return fingerprint(self.fingerprint_parts)

    def new_runner(
        self,
        num_tokens: int,
        *,
        block_size: int = BLOCK_SIZE,
        order: SequenceOf[int] | torch.Generator | None = None,
        cuda_graphs: bool = False,
    ) -> tuple[Runner, BlockPool]:
        """A KV cache for at least ``num_tokens`` tokens, what runs steps over it, and the pool of its blocks.

        Args:
            num_tokens: of all sequences together, each rounded up to whole blocks by the caller.
            order: in which the pool hands out its blocks.
        """
        num_blocks = max(1, -(-num_tokens // block_size))
        cache = KVCache(
            self._kv_shapes, dtype=self.dtype, device=self.device, num_blocks=num_blocks, block_size=block_size
        )
        return Runner(self.forward, cache, cuda_graphs), BlockPool(num_blocks, block_size, order)

    @torch.no_grad()
    def __call__(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        labels: Tensor | None = None,
        logits_to_keep: int | Tensor = 0,
    ) -> CausalLMOutput:
        """Logits of a padded batch, as the Hugging Face model gives them.

        Args:
            input_ids: [B, C] integers; padding on the left, on the right or both, told by attention_mask [B, C].
            position_ids: [B, C] or [1, C]; by default counted from the attention mask, so that padding moves nothing.
            labels: [B, C], -100 where none; the loss is the mean over all labelled tokens of the batch.
            logits_to_keep: only the last so many columns, or those of an index tensor; 0 keeps all.

        Returns:
            CausalLMOutput with logits [B, C, V] in the model's dtype, zeros at padding, and loss (fp32) with labels.

        Raises:
            InvalidInput: shapes, ids or masks that cannot be served.
        """
        batch = unpad(input_ids, attention_mask, position_ids)
        if labels is not None and (
            labels.shape != input_ids.shape or isinstance(logits_to_keep, Tensor) or logits_to_keep
        ):
            raise InvalidInput("labels need the shape of input_ids and all logits: pass logits_to_keep=0")
        self._check_positions(batch.position_ids)
        sequences = [
            Sequence(self._checked(tokens, row), position_ids=positions)
            for row, (tokens, positions) in enumerate(zip(batch.token_ids, batch.position_ids, strict=True))
        ]
        runner, pool = self.new_runner(sum(_whole_blocks(len(s.token_ids)) for s in sequences))
        plan = [(sequence, sequence.num_uncomputed) for sequence in sequences]
        packed = build_step(plan, pool, runner.kv_cache, self.device, all_logits=True)
        rows, mask = keep_columns(batch.mask, logits_to_keep)
        logits = repad(runner.run(*packed._replace(logits_to_keep=rows.to(self.device))), mask)
        loss = None if labels is None else _loss(logits, labels, batch.mask)
        return CausalLMOutput(loss=loss, logits=logits)

    @torch.no_grad()
    def generate(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        *,
        max_new_tokens: int = 20,
        do_sample: bool = False,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        seed: int | SequenceOf[int] | None = None,
        eos_token_id: int | SequenceOf[int] | None = None,
        pad_token_id: int | None = None,
        cuda_graphs: bool | None = None,
    ) -> Tensor:
        """Continue a padded batch of prompts over a paged KV cache.

        Args:
            input_ids, attention_mask: [B, C], as for a call.
            seed: of each row's random numbers: one int a row (a single int only for one row, so that batch-mates
                never share a stream); None draws fresh ones.
            eos_token_id: tokens that end a row; default: the model's generation config; () for none.
            pad_token_id: fills rows that ended early; default: the model's, or the first end token, or 0.
            cuda_graphs: replay decode steps from CUDA graphs; default: on a GPU.

        Returns:
            [B, C + n] int64: the input as it was, then each row's new tokens, then padding.
        """
        batch = unpad(input_ids, attention_mask)
        stop = self._stop_tokens(eos_token_id)
        params = SamplingParams(
            max_tokens=max_new_tokens,
            temperature=temperature if do_sample else 0.0,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            stop_token_ids=stop,
        )
        seeds = _row_seeds(seed, len(batch.token_ids))
        sequences = [
            Sequence(list(self._checked(tokens, row, max_new_tokens)), replace(params, seed=seeds[row]))
            for row, tokens in enumerate(batch.token_ids)
        ]
        self.run_to_end(sequences, cuda_graphs=self.device.type == "cuda" if cuda_graphs is None else cuda_graphs)
        pad = self._pad_token(pad_token_id, stop)
        longest = max(len(sequence.generated_ids) for sequence in sequences)
        new = [s.generated_ids + [pad] * (longest - len(s.generated_ids)) for s in sequences]
        return torch.cat([input_ids.long(), torch.tensor(new, device=input_ids.device)], dim=1)

    @torch.no_grad()
    def run_to_end(
        self, sequences: SequenceOf[Sequence], *, cuda_graphs: bool = False, block_size: int = BLOCK_SIZE
    ) -> None:
        """Prefill every sequence in one step, then decode all that are unfinished together, until none is."""
        most = sum(_whole_blocks(s.num_prompt_tokens + s.sampling.max_tokens, block_size) for s in sequences)
        runner, pool = self.new_runner(most, block_size=block_size, cuda_graphs=cuda_graphs)
        while running := [sequence for sequence in sequences if sequence.finish_reason is None]:
            plan = [(sequence, sequence.num_uncomputed) for sequence in running]
            logits = runner.run(*build_step(plan, pool, runner.kv_cache, self.device))
            positions = [len(sequence.token_ids) for sequence in running]
            tokens = sample(logits, [sequence.sampling for sequence in running], positions).tolist()
            for (sequence, computed), token in zip(plan, tokens, strict=True):
                sequence.num_computed += computed
                sequence.append(token)
                if sequence.finish_reason is not None:
                    pool.free(sequence.block_table)

    def _checked(self, token_ids: list[int], row: int, max_new_tokens: int = 0) -> list[int]:
        if len(token_ids) + max_new_tokens > self.max_context:
            needed = len(token_ids) + max_new_tokens
            raise InvalidInput(
                f"row {row} needs {needed} tokens, the model was compiled for {self.max_context}: shorten it,"
                " or compile with a larger max_context"
            )
        size = self.vocab_size  # walks the module tree
        bad = [token for token in token_ids if not 0 <= token < size]
        if bad:
            raise InvalidInput(f"row {row} holds token {bad[0]}; ids are 0 to {size - 1}")
        return token_ids

    def _check_positions(self, position_ids: list[list[int]]) -> None:
        highest = max(max(positions) for positions in position_ids)
        if highest >= self.max_context:
            raise InvalidInput(f"position {highest}: the model was compiled for positions 0 to {self.max_context - 1}")

    def _stop_tokens(self, given: int | SequenceOf[int] | None) -> tuple[int, ...]:
        config = getattr(self.model, "generation_config", None)
        chosen = getattr(config, "eos_token_id", None) if given is None else given
        return () if chosen is None else (chosen,) if isinstance(chosen, int) else tuple(chosen)

    def _pad_token(self, given: int | None, stop: tuple[int, ...]) -> int:
        own = getattr(getattr(self.model, "generation_config", None), "pad_token_id", None)
        return next(token for token in (given, own, *stop, 0) if token is not None)


def _whole_blocks(num_tokens: int, block_size: int = BLOCK_SIZE) -> int:
    return -(-num_tokens // block_size) * block_size


def _row_seeds(seed: int | SequenceOf[int] | None, rows: int) -> list[int | None]:
    if seed is None:
        return [None] * rows
    seeds = [seed] if isinstance(seed, int) else list(seed)
    if len(set(seeds)) != rows or len(seeds) != rows:
        raise InvalidInput(
            f"{len(set(seeds))} different seeds for {rows} rows: give one a row, so that no rows share random numbers"
        )
    return list(seeds)


def _loss(logits: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    """Mean cross entropy, fp32, of labels one column to the right; a sum over tokens, so it depends on the batch."""
    wanted = labels[:, 1:].to(logits.device)
    counted = (wanted != IGNORED_LABEL) & mask[:, :-1].to(logits.device)
    if not counted.any():
        raise InvalidInput("no token has a label: every label is -100, padding, or in the first column")
    bad = wanted[counted & ((wanted < 0) | (wanted >= logits.shape[-1]))]
    if len(bad):
        raise InvalidInput(f"label {int(bad[0])}: labels are 0 to {logits.shape[-1] - 1}, or {IGNORED_LABEL} for none")
    logprobs = torch.ops.detcompile.log_softmax(logits[:, :-1][counted], torch.float32, [])
    chosen = logprobs.gather(1, wanted[counted].unsqueeze(1)).squeeze(1)
    return -torch.ops.detcompile.row_sum(chosen) / chosen.numel()
