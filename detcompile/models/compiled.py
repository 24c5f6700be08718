"""CompiledModel: called like the Hugging Face model it was made from; its bits depend on each row's own tokens."""

from collections.abc import Sequence as SequenceOf
from copy import deepcopy
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.modeling_outputs import CausalLMOutput

from detcompile.errors import InvalidInput
from detcompile.executors.executor import Executor
from detcompile.models.call_arguments import require_served, require_tensors
from detcompile.models.certified import CertifiedModel
from detcompile.models.drafting import draft_with
from detcompile.models.generation import GenerationOutput, Generator
from detcompile.models.model_object import AnyConfig
from detcompile.models.padded_calls import padded_output
from detcompile.other_names import naming_equivalents
from detcompile.runtime.dense.padded_batch import unpad
from detcompile.runtime.engine import Engine
from detcompile.runtime.engine_config import VLLM_NAMES, EngineConfig
from detcompile.runtime.kv.block_pool import BLOCK_SIZE
from detcompile.runtime.kv.kv_blocks import KVBlocks
from detcompile.runtime.kv.plain_blocks import plain_blocks
from detcompile.runtime.requests.plain_values import flag, kind, shown
from detcompile.runtime.speculation.medusa_drafter import MedusaDrafter
from detcompile.runtime.speculation.medusa_heads import MedusaHeads
from detcompile.runtime.speculation.model_drafter import ModelDrafter, TreeKind
from detcompile.runtime.speculation.speculator import SpeculationConfig
from detcompile.runtime.step.interfaces import StepRunner

__all__ = ["CompiledModel", "require_causal"]

ENGINE_NAMES = {own.name: f"pass config=EngineConfig({own.name}=...)" for own in fields(EngineConfig)}
ENGINE_NAMES |= {name: f"{there}; settings are config=EngineConfig(...)" for name, there in VLLM_NAMES.items()}


class CompiledModel(CertifiedModel):
    """A certified causal LM. Made by ``detcompile.compile`` and ``detcompile.load``.

    Args:
        executor: runs its steps, in this process or in others.
    """

    def __init__(self, executor: Executor) -> None:
        super().__init__(executor)
        self._generator = Generator()

    @naming_equivalents("engine()", ENGINE_NAMES)
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
                share a model, with speculation that switches itself; or settings of another type.
        """
        for name, value, wanted in (("config", config, EngineConfig), ("speculation", speculation, SpeculationConfig)):
            if value is not None and not isinstance(value, wanted):
                raise InvalidInput(f"engine: {name} {shown(value)} is {kind(value)}: give {wanted.__name__}(...)")
        tokenizer = self.tokenizer if tokenizer is None else tokenizer
        engine = self.executor.new_engine(EngineConfig() if config is None else config, tokenizer, speculation)
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

    @torch.no_grad()
    def __call__(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        labels: Tensor | None = None,
        logits_to_keep: int | Tensor = 0,
        return_dict: bool | None = None,
        **keywords: Any,
    ) -> CausalLMOutput:
        """Logits of a padded batch, as the Hugging Face model gives them.

        Args:
            input_ids: [B, C] integers; padding on the left, on the right or both, told by attention_mask [B, C].
            position_ids: [B, C] or [1, C], counting up by one in each row; by default counted from the attention mask,
                so that padding moves nothing.
            labels: [B, C], -100 where none; the loss is the mean over the batch's labels but those at padding.
            logits_to_keep: only the last so many columns, or those of an index tensor; 0 keeps all.
            return_dict: False gives a tuple, of the loss if there is one, and the logits; None does as the config says.
            **keywords: Hugging Face's that change nothing, such as use_cache.

        Returns:
            CausalLMOutput with logits [B, C, V] in the model's dtype, zeros at padding, and loss (fp32) with labels.

        Raises:
            InvalidInput: shapes, ids, masks or keywords that cannot be served.
        """
        require_served(keywords)
        batch = unpad(*require_tensors(input_ids, attention_mask, position_ids, labels))
        output: Any = padded_output(self.executor, batch, labels, logits_to_keep)
        wanted = self.config.return_dict if return_dict is None else flag(return_dict, "return_dict")
        return output if wanted else output.to_tuple()

    @torch.no_grad()
    def generate(
        self, input_ids: Tensor | None = None, attention_mask: Tensor | None = None, **kwargs: Any
    ) -> Tensor | GenerationOutput:
        """Continue a padded batch of prompts, as Hugging Face's ``generate`` does, over a paged KV cache.

        What is not given is what ``generation_config=`` says, then the model's own one, then Hugging Face's defaults:
        greedy, 20 tokens; of sampling, ``top_k=50``. None stands for no filter, penalty or end token. A row's tokens
        hang on its own tokens, seed and arguments: penalties and bad words do not see padding.

        Args:
            input_ids, attention_mask: [B, C], as for a call; ``inputs`` is another name of the first. Without a mask,
                padding is where the pad token stands, unless that also ends rows.
            max_new_tokens, min_new_tokens, max_length, min_length: columns; the last two count the prompts'.
            do_sample, temperature, top_k, top_p, min_p, repetition_penalty: how to draw (SamplingParams).
            bad_words_ids, suppress_tokens: tokens that are not drawn.
            eos_token_id, pad_token_id: tokens that end a row, and the one behind it.
            stop_strings, tokenizer: texts that end a row; None takes the model's tokenizer.
            stopping_criteria, streamer: Hugging Face's; they see every column of the batch as it comes.
            num_return_sequences: rows of the answer for each prompt, where they are sampled.
            seed: one int, of which each row's is made (``runtime.dense.padded_batch.seed_of_row``; row 0 takes it as
                it is); or different ones, one a row; None has torch's generator draw them, as ``torch.manual_seed``
                set it.
            return_dict_in_generate, output_scores, output_logits: give a GenerationOutput, with what each token was
                drawn from, and with the model's own logits; zeros of rows that had ended.
            use_cache: changes nothing.
            cuda_graphs: replay decode steps from CUDA graphs; None does on a GPU.

        Returns:
            [B, C + n] int64: the input as it was, then each row's new tokens, then padding; or a GenerationOutput.

        Raises:
            InvalidInput: an argument that is unknown or cannot be served, of the call or of a ``generation_config``.
        """
        batch = input_ids, attention_mask
        return self._generator.generate(self.executor, self.engine, lambda: self.tokenizer, batch, kwargs)


AutoModelForCausalLM.register(AnyConfig, CompiledModel)


def require_causal(compiled: CertifiedModel, where: str) -> CompiledModel:
    """The model, if it generates.

    Raises:
        InvalidInput: it has no language-model head; naming ``where`` one is needed.
    """
    if isinstance(compiled, CompiledModel):
        return compiled
    raise InvalidInput(
        f"{where} takes causal LMs, and {compiled.name_or_path or type(compiled.model).__name__} is a"
        f" {type(compiled).__name__}: it scores or embeds whole sequences"
    )
