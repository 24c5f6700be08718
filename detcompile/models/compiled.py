"""CompiledModel: called like the Hugging Face model it was made from; its bits depend on each row's own tokens."""

import contextlib
import weakref
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as SequenceOf
from copy import deepcopy
from functools import cached_property
from pathlib import Path
from typing import Any, Union

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import CausalLMOutput

from detcompile.digests import fingerprint
from detcompile.errors import InvalidInput
from detcompile.executors.executor import Executor
from detcompile.executors.live_weights import tensors_by_name
from detcompile.models.checkpoints import load_tokenizer
from detcompile.models.drafting import draft_with
from detcompile.models.padded_calls import Generator, append_rows, padded_logits
from detcompile.runtime.dense.end_tokens import pad_token, stop_tokens
from detcompile.runtime.dense.generation_defaults import SERVED, generation_settings, row_params
from detcompile.runtime.dense.padded_batch import check_batch, language_loss, row_seeds, unpad
from detcompile.runtime.engine import Engine
from detcompile.runtime.engine_config import EngineConfig
from detcompile.runtime.kv.block_pool import BLOCK_SIZE
from detcompile.runtime.kv.kv_blocks import KVBlocks
from detcompile.runtime.kv.plain_blocks import plain_blocks
from detcompile.runtime.requests.turns import without_interrupts
from detcompile.runtime.speculation.medusa_drafter import MedusaDrafter
from detcompile.runtime.speculation.medusa_heads import MedusaHeads
from detcompile.runtime.speculation.model_drafter import ModelDrafter, TreeKind
from detcompile.runtime.speculation.speculator import SpeculationConfig
from detcompile.runtime.step.interfaces import StepRunner

__all__ = ["CompiledModel", "WeightSource"]

WeightSource = Union[nn.Module, Mapping[str, Tensor], Iterable[tuple[str, Tensor]], "CompiledModel"]


class CompiledModel:
    """A certified causal LM. Made by ``detcompile.compile`` and ``detcompile.load``.

    Args:
        executor: runs its steps, in this process or in others.

    Attributes:
        model: the Hugging Face module it was made from, whose row-parallel linears were replaced; what stands for one
            that is not in this process (executors.description).
        numerics: the declared orders.
        certificate: the proof; prints as a table.
        program: digest of the certified graph, over the whole weights.
        facts: the model's sizes.
        max_context: tokens a sequence may hold.
        vocab_size: one more than the largest id that a prompt may hold.
        dtype: dtype of the weights, the activations and the KV cache.
        device: where the weights live; of several ranks, those of the first.
        ranks: the ranks with which this process shares the model, all of which have to make the same calls; None if
            with none.
    """

    def __init__(self, executor: Executor) -> None:
        self.executor = executor
        known, facts = executor.description, executor.description.facts
        self.model, self.numerics, self.certificate = known.module, known.numerics, known.certificate
        self.program, self.facts, self.ranks = known.program, facts, executor.ranks
        self.max_context, self.vocab_size = facts.max_context, facts.num_token_ids
        self.dtype, self.device = facts.dtype, facts.device
        self._engines: weakref.WeakSet[Engine] = weakref.WeakSet()
        self._generator = Generator()

    @cached_property
    def tokenizer(self) -> Any | None:
        """The tokenizer in the folder that the model was loaded from; None if there is none.

        Raises:
            InvalidInput: it is damaged.
        """
        return load_tokenizer(self.model.name_or_path)

    def engine(
        self,
        config: EngineConfig | None = None,
        *,
        tokenizer: Any | None = None,
        speculation: SpeculationConfig | None = None,
    ) -> Engine:
        """A serving engine over this model: paged KV cache, continuous batching, prefix cache.

        Args:
            tokenizer: a tokenizer of transformers; None takes this model's own, if it has one.
            speculation: verify guesses at the next tokens in each step; the same tokens and logprobs, sooner.

        Raises:
            InvalidInput: the model, the largest step and a KV cache of one block do not fit the memory; or ranks that
                share a model, with speculation that switches itself.
        """
        tokenizer = self.tokenizer if tokenizer is None else tokenizer
        engine = self.executor.new_engine(config or EngineConfig(), tokenizer, speculation)
        self._engines.add(engine)
        return engine

    def drafter(
        self,
        num_tokens: int = 5,
        *,
        siblings: int = 0,
        tree: TreeKind = "chain",
        max_nodes: int = 16,
        num_sequences: int = 32,
        cache_tokens: int | None = None,
        layers: int | SequenceOf[int] | None = None,
        cuda_graphs: bool | None = None,
    ) -> ModelDrafter:
        """A drafter for another model's engine: ``SpeculationConfig(drafter=small.drafter())``.

        With ``layers`` it drafts for itself, by early exit or by skipping layers (Zhang et al., "Draft & Verify", ACL
        2024): ``model.engine(speculation=SpeculationConfig(drafter=model.drafter(layers=2)))``. The weights are shared,
        the KV cache of its layers is its own.

        Args:
            num_tokens: tokens per draft.
            siblings: more guesses beside each of them.
            tree: "chain", "grown" to ``max_nodes``, or a list of paths (ModelDrafter).
            num_sequences: sequences that it drafts for at a time.
            cache_tokens: tokens that its KV cache holds; None takes those of ``num_sequences`` of the longest context,
                as far as drafting.CACHE_TOKENS go. What does not fit is not drafted for.
            layers: the first so many of the model's layers, or these ones; None for all. Compiles them.
            cuda_graphs: replay drafts from CUDA graphs; None does on a GPU.

        Raises:
            InvalidInput: layers that the model has not, that ranks share or that carry a state; no sequence, no token;
                or a model in worker processes.
        """
        shape = {"num_tokens": num_tokens, "siblings": siblings, "tree": tree, "max_nodes": max_nodes}
        return draft_with(self.executor, layers, num_sequences, cache_tokens, cuda_graphs, self.tokenizer, shape)

    def medusa_drafter(
        self,
        heads: MedusaHeads | str | Path,
        *,
        num_nodes: int = 8,
        num_candidates: int = 4,
        paths: SequenceOf[tuple[int, ...]] | None = None,
    ) -> MedusaDrafter:
        """Medusa heads on this model's hidden states as the drafter of its own engine.

        Args:
            heads: trained for this model, or a folder of them; "tiny" has those of the embedded model.
            num_nodes, num_candidates: size of a tree that grows by probability, and its candidates at each node.
            paths: a fixed tree instead.

        Raises:
            InvalidInput: heads for another model, a tree that cannot be, or a model without a head of its own.
        """
        head = self.head_weight()
        loaded = heads if isinstance(heads, MedusaHeads) else MedusaHeads.load(heads)
        return MedusaDrafter(
            deepcopy(loaded).to(self.device, self.dtype),
            head,
            num_nodes=num_nodes,
            num_candidates=num_candidates,
            paths=paths,
        )

    def new_runner(
        self,
        num_tokens: int,
        *,
        block_size: int = BLOCK_SIZE,
        order: SequenceOf[int] | torch.Generator | None = None,
        cuda_graphs: bool = False,
        num_sequences: int | None = None,
    ) -> tuple[StepRunner, KVBlocks]:
        """A KV cache for at least ``num_tokens`` tokens, what runs steps over it, and its blocks.

        Args:
            num_tokens: tokens of all sequences together, each rounded up to whole blocks by the caller.
            order: the pool hands out its blocks in this order.
            num_sequences: sequences that have a state at a time; None takes as many as there are blocks.
        """
        blocks = plain_blocks(self.facts, num_tokens, block_size, order, num_sequences)
        return self.executor.new_runner(blocks.pool.num_blocks, block_size, cuda_graphs, blocks.num_state_slots), blocks

    def head_weight(self) -> Tensor:
        """[V, H] of the language-model head, of all ranks together; each of them has to call this.

        Raises:
            InvalidInput: a model without a head of its own, or one from an archive.
        """
        return self.executor.head_weight()

    def update_weights(self, source: WeightSource) -> int:
        """New contents for weights, in place: compiled graphs stay, CUDA graphs too, and prefix caches forget.

        Some of the weights suffice. Nothing is written unless all fit.

        Args:
            source: a module or compiled model of the same architecture, or tensors by the names that Hugging Face's
                model has for them, as a mapping or as pairs; on any device. Buffers may be among them.

        Returns:
            The version of the weights, which counts up.

        Raises:
            InvalidInput: a name, a shape or a dtype that is not the model's; requests are running on one of its
                engines; or ranks share the model.
        """
        given = tensors_by_name(source.model if isinstance(source, CompiledModel) else source, type(source).__name__)
        with without_interrupts(), contextlib.ExitStack() as paused:
            for engine in list(self._engines):
                paused.enter_context(engine.idle())
            return self.executor.weights.update(given)

    @property
    def weights_version(self) -> int:
        """Counts the contents that the weights have had, by update_weights or by changes in place that were seen."""
        return self.executor.weights.version()

    def weight_digests(self) -> dict[str, str]:
        """The digest of every parameter and buffer as it is now, whole; raises as ``fingerprint_parts``."""
        return self.executor.weights.digests()

    @property
    def fingerprint_parts(self) -> dict[str, str]:
        """What the contract holds fixed, by name. Reads every weight, so that it follows changes in place.

        Raises:
            InvalidInput: a weight was given another storage since; or a rank's share of one was changed by something
                that did not tell what the whole is now.
        """
        return self.executor.fingerprint_parts()

    @property
    def fingerprint(self) -> str:
        """sha256 in hex: equal fingerprints give equal bits. Reads every weight, as ``fingerprint_parts``.

        It is the same at every tensor-parallel size; there the whole weights were read before the ranks took shares.
        """
        return fingerprint(self.fingerprint_parts)

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
            labels: [B, C], -100 where none; the loss is the mean over all labelled tokens of the batch, labels at
                padding and of rows' first tokens left out.
            logits_to_keep: only the last so many columns, or those of an index tensor; 0 keeps all.

        Returns:
            CausalLMOutput with logits [B, C, V] in the model's dtype, zeros at padding, and loss (fp32) with labels.

        Raises:
            InvalidInput: shapes, ids or masks that cannot be served.
        """
        batch = unpad(input_ids, attention_mask, position_ids)
        keeps_all = not isinstance(logits_to_keep, Tensor) and not logits_to_keep
        if labels is not None and not (keeps_all and labels.shape == input_ids.shape):
            raise InvalidInput("labels need the shape of input_ids and all logits: pass logits_to_keep=0")
        logits = padded_logits(self.executor, batch, logits_to_keep)
        loss = None if labels is None else language_loss(logits, labels, batch.mask)
        return CausalLMOutput(loss=loss, logits=logits)

    @torch.no_grad()
    def generate(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        *,
        max_new_tokens: int | None = None,
        do_sample: bool | None = None,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
        repetition_penalty: float | None = None,
        seed: int | SequenceOf[int] | None = None,
        eos_token_id: int | SequenceOf[int] | None = None,
        pad_token_id: int | None = None,
        cuda_graphs: bool | None = None,
    ) -> Tensor:
        """Continue a padded batch of prompts over a paged KV cache.

        What is not given is what the model's ``generation_config`` says; where that says nothing: greedy, 20 tokens,
        no filter and no penalty.

        Args:
            input_ids, attention_mask: [B, C], as for a call.
            seed: seeds of the rows' random numbers: one int a row (a single int only for one row, so that batch-mates
                never share a stream); None draws fresh ones.
            eos_token_id: tokens that end a row; None takes the model's generation config's, () none.
            pad_token_id: fills rows that ended early; None takes the model's, or the first end token, or 0.
            cuda_graphs: replay decode steps from CUDA graphs; None does on a GPU.

        Returns:
            [B, C + n] int64: the input as it was, then each row's new tokens, then padding.

        Raises:
            InvalidInput: what cannot be served, of the arguments or of the ``generation_config``.
        """
        batch = unpad(input_ids, attention_mask)
        prompts = batch.rows()
        given = (do_sample, temperature, top_k, top_p, min_p, repetition_penalty, max_new_tokens)
        settings = generation_settings(self.model, dict(zip(SERVED, given, strict=True)), input_ids.shape[1])
        if self.ranks is not None and settings["do_sample"] and seed is None:
            raise InvalidInput("ranks that share a model have to draw the same tokens: pass seed, the same to each")
        stop = stop_tokens(self.model, eos_token_id, self.facts.num_logits)
        params = row_params(settings, row_seeds(seed, len(prompts)), stop)
        check_batch(batch, self.vocab_size, self.max_context, settings["max_new_tokens"])
        new = self._generator.continued(prompts, params, self.engine, len(self.facts.kv_groups), cuda_graphs)
        return append_rows(input_ids, new, pad_token(self.model, pad_token_id, stop))
