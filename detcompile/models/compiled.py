"""CompiledModel: called like the Hugging Face model it was made from; its bits depend only on each row's tokens."""

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
from detcompile.models.certified import CertifiedModel
from detcompile.models.generation import GenerationOutput, Generator
from detcompile.models.model_object import AnyConfig
from detcompile.models.padded_calls import padded_output, require_served, require_tensors, with_config_outputs
from detcompile.other_names import naming_equivalents
from detcompile.runtime.adapters import AdapterSlots
from detcompile.runtime.dense.padded_batch import unpad
from detcompile.runtime.engine import Engine
from detcompile.runtime.engine_config import VLLM_NAMES, EngineConfig
from detcompile.runtime.kv.block_pool import BLOCK_SIZE, whole_blocks
from detcompile.runtime.kv.kv_blocks import KVBlocks, plain_blocks
from detcompile.runtime.requests.plain_values import flag, kind, or_none, shown, token_list, whole_number
from detcompile.runtime.speculation.medusa_drafter import MedusaDrafter
from detcompile.runtime.speculation.medusa_heads import MedusaHeads
from detcompile.runtime.speculation.model_drafter import ModelDrafter, TreeKind
from detcompile.runtime.speculation.speculator import SpeculationConfig
from detcompile.runtime.step.interfaces import StepRunner
from detcompile.templates.device.launcher import on_device

ENGINE_NAMES = {each.name: f"pass config=EngineConfig({each.name}=...)" for each in fields(EngineConfig)}
ENGINE_NAMES |= {name: f"{advice}; settings are config=EngineConfig(...)" for name, advice in VLLM_NAMES.items()}
CACHE_TOKENS = 1 << 17  # default limit of a draft model's KV cache


class CompiledModel(CertifiedModel):
    """A certified causal LM, returned by ``detcompile.compile`` and ``detcompile.load``.

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
        """Create a serving engine over this model: paged KV cache, continuous batching, prefix cache.

        Args:
            tokenizer: a transformers tokenizer; None uses the model's, if it has one.
            speculation: verify guesses of the next tokens in each step; gives the same tokens and logprobs, faster.

        Raises:
            InvalidInput: the model, the largest step and a KV cache of one block do not fit in memory; ranks share the
                model and speculation switches itself; or a setting has the wrong type.
        """
        for name, value, wanted in (("config", config, EngineConfig), ("speculation", speculation, SpeculationConfig)):
            if value is not None and not isinstance(value, wanted):
                raise InvalidInput(f"engine: {name} {shown(value)} is {kind(value)}: pass {wanted.__name__}(...)")
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
        """Create a drafter for another model's engine: ``SpeculationConfig(drafter=small.drafter())``.

        With ``layers`` a model drafts for itself, by early exit or by skipping layers (Zhang et al., "Draft & Verify",
        ACL 2024): ``model.engine(speculation=SpeculationConfig(drafter=model.drafter(layers=2)))``. The weights are
        shared; the drafter has its own KV cache.

        Args:
            num_tokens: tokens per draft.
            siblings: additional guesses beside each token.
            tree: "chain", "grown" to ``max_nodes``, or a list of paths (ModelDrafter).
            num_sequences: maximum of sequences that it drafts for at a time.
            cache_tokens: capacity of its KV cache in tokens; None: ``num_sequences`` of the longest context, at most
                CACHE_TOKENS. Sequences that do not fit get no draft.
            layers: the number of first layers, or a list of layers; None for all. Compiles them.
            cuda_graphs: replay drafts from CUDA graphs; None: True on a GPU.

        Raises:
            InvalidInput: the model lacks a layer, shares it with other ranks, or its layers carry a state; the number
                of sequences or tokens is 0; or the model is in worker processes.
        """
        facts = self.executor.description.facts
        if facts.state_shapes:
            raise InvalidInput("this model's layers carry a state, which cannot roll back guesses: use another drafter")
        num_tokens = whole_number(num_tokens, "drafter: num_tokens")
        siblings, max_nodes = whole_number(siblings, "drafter: siblings"), whole_number(max_nodes, "drafter: max_nodes")
        if max_nodes < 1:
            raise InvalidInput(f"drafter: max_nodes={max_nodes} must be at least 1")
        num_sequences = whole_number(num_sequences, "drafter: num_sequences")
        cache_tokens = or_none(whole_number)(cache_tokens, "drafter: cache_tokens")
        cuda_graphs = or_none(flag)(cuda_graphs, "drafter: cuda_graphs")
        if num_sequences < 1 or (cache_tokens is not None and cache_tokens < 1):
            raise InvalidInput(
                f"drafter: num_sequences={num_sequences} and cache_tokens={cache_tokens} must be at least 1"
            )
        with on_device(self.device):
            source = self.executor.drafting(_chosen(layers))
            if cache_tokens is None:
                longest = whole_blocks(facts.max_context)
                cache_tokens = min(num_sequences * longest, max(longest, CACHE_TOKENS))
            blocks = plain_blocks(source.description.facts, cache_tokens)
            graphs = facts.device.type == "cuda" if cuda_graphs is None else cuda_graphs
            return ModelDrafter(
                source.new_runner(blocks.pool.num_blocks, blocks.pool.block_size, graphs),
                blocks,
                vocab_size=facts.num_logits,
                max_context=facts.max_context,
                num_sequences=num_sequences,
                tokenizer=self.tokenizer,
                num_tokens=num_tokens,
                siblings=siblings,
                tree=tree,
                max_nodes=max_nodes,
            )

    def medusa_drafter(
        self,
        heads: MedusaHeads | str | Path,
        *,
        num_nodes: int = 8,
        num_candidates: int = 4,
        paths: SequenceOf[tuple[int, ...]] | None = None,
    ) -> MedusaDrafter:
        """Create a drafter from Medusa heads on this model's hidden states, for its own engine.

        Args:
            heads: heads trained for this model, or their folder; "tiny" is the embedded model's heads.
            num_nodes, num_candidates: size of a tree grown by probability, and candidates at each node.
            paths: a fixed tree instead.

        Raises:
            InvalidInput: the heads are for another model, the tree is invalid, or the model has no LM head.
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
        prefix_caching: bool = False,
    ) -> tuple[StepRunner, KVBlocks]:
        """Create a KV cache for at least ``num_tokens`` tokens; return a runner of steps over it, and its blocks.

        Args:
            num_tokens: tokens of all sequences together, each rounded up to whole blocks by the caller.
            order: the order in which the pool hands out its blocks.
            num_sequences: sequences that have a state at a time; None: as many as blocks.
            prefix_caching: equal prefixes share blocks; not for models with states.
        """
        blocks = plain_blocks(self.facts, num_tokens, block_size, order, num_sequences, prefix_caching)
        return self.executor.new_runner(blocks.pool.num_blocks, block_size, cuda_graphs, blocks.num_state_slots), blocks

    @property
    def adapters(self) -> AdapterSlots | None:
        """The LoRA adapters that all engines of this model share; None without room for them (``max_lora_rank``)."""
        return self.executor.adapters

    def head_weight(self) -> Tensor:
        """Return the whole language-model head [V, H]; all ranks must call this.

        Raises:
            InvalidInput: the model has no head of its own, or is from an archive.
        """
        return self.executor.head_weight()

    @torch.compiler.disable  # callers may compile around this; the program is already compiled
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
        """Compute the logits of a padded batch, as the Hugging Face model does.

        Args:
            input_ids: [B, C] integers; padding on the left, the right or both, as given by attention_mask [B, C].
            position_ids: [B, C] or [1, C], increasing by one in each row; default: counted from the attention mask, so
                padding shifts nothing.
            labels: [B, C], -100 for none; the loss is the mean over all labels that are not at padding.
            logits_to_keep: the number of last columns, or an index tensor of columns; 0 keeps all.
            return_dict: False returns a tuple of the loss (if any) and the logits; None follows the config.
            **keywords: Hugging Face keywords without effect, such as use_cache.

        Returns:
            CausalLMOutput with logits [B, C, V] in the model's dtype, zeros at padding, and loss (fp32) with labels.

        Raises:
            InvalidInput: shapes, ids, masks or keywords are not supported.
        """
        require_served(with_config_outputs(self.config, keywords))
        batch = unpad(*require_tensors(input_ids, attention_mask, position_ids, labels))
        with on_device(self.device):
            output: Any = padded_output(self.executor, batch, labels, logits_to_keep)
        wanted = self.config.return_dict if return_dict is None else flag(return_dict, "return_dict")
        return output if wanted else output.to_tuple()

    @torch.compiler.disable
    @torch.no_grad()
    def generate(
        self, input_ids: Tensor | None = None, attention_mask: Tensor | None = None, **kwargs: Any
    ) -> Tensor | GenerationOutput:
        """Continue a padded batch of prompts, as Hugging Face's ``generate`` does, over a paged KV cache.

        Missing arguments come from ``generation_config=``, then from the model's generation_config, then from Hugging
        Face's defaults: greedy, 20 tokens; ``top_k=50`` for sampling. None means no filter, penalty or end token. A
        row's tokens depend only on its tokens, seed and arguments; penalties and bad words ignore padding.

        Args:
            input_ids, attention_mask: [B, C], as for a call; ``inputs`` is another name of the first. Without a mask,
                pad tokens are padding, unless the pad token also ends rows.
            max_new_tokens, min_new_tokens, max_length, min_length: columns; the last two include the prompt.
            do_sample, temperature, top_k, top_p, min_p, repetition_penalty: see SamplingParams.
            bad_words_ids, suppress_tokens: tokens that are never drawn.
            eos_token_id, pad_token_id: tokens that end a row, and the token after the end.
            stop_strings, tokenizer: texts that end a row; None uses the model's tokenizer.
            stopping_criteria, streamer: Hugging Face objects; they see every column of the batch as it is generated.
            num_return_sequences: sampled rows per prompt.
            seed: one int, from which each row's seed is derived (``runtime.dense.padded_batch.seed_of_row``; row 0 uses
                it unchanged); or different ints, one per row; None draws them with torch's generator, as set by
                ``torch.manual_seed``.
            return_dict_in_generate, output_scores, output_logits: return a GenerationOutput, with the scores that each
                token was drawn from, and the model's logits; zeros for finished rows.
            use_cache: no effect.
            cuda_graphs: replay decode steps from CUDA graphs; None: True on a GPU.

        Returns:
            [B, C + n] int64: the input, then each row's new tokens, then padding; or a GenerationOutput.

        Raises:
            InvalidInput: an argument of the call or of a ``generation_config`` is unknown or not supported.
        """
        batch = input_ids, attention_mask
        return self._generator.generate(self.executor, self.engine, lambda: self.tokenizer, batch, kwargs)


AutoModelForCausalLM.register(AnyConfig, CompiledModel)


def require_causal(compiled: CertifiedModel, where: str) -> CompiledModel:
    """Return the model if it generates.

    Raises:
        InvalidInput: it has no language-model head; the message names ``where``.
    """
    if isinstance(compiled, CompiledModel):
        return compiled
    raise InvalidInput(
        f"{where} needs a causal LM, but {compiled.name_or_path or type(compiled.model).__name__} is a"
        f" {type(compiled).__name__}, which scores or embeds whole sequences"
    )


def _chosen(layers: Any) -> tuple[int, ...] | None:
    """Return the indices of the first layers or of the listed layers; None for all."""
    if layers is None:
        return None
    if isinstance(layers, int):
        return tuple(range(whole_number(layers, "drafter: layers")))
    return tuple(token_list(layers, "drafter: layers"))
