"""CompiledModel: called like the Hugging Face model it was made from; its bits depend on each row's own tokens."""

import threading
from collections.abc import Sequence as SequenceOf
from copy import deepcopy
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

from detcompile.errors import InvalidInput
from detcompile.models.checkpoints import load_tokenizer
from detcompile.models.fingerprints import fingerprint_parts
from detcompile.models.live_weights import LiveWeights, WeightedModel
from detcompile.orders.numerics import Numerics
from detcompile.parallel import TensorParallel
from detcompile.passes.lowering import Lowered, lower_view, lower_with_states
from detcompile.passes.programs.layer_views import layers_of
from detcompile.passes.proof.certificate import Certificate
from detcompile.passes.sharding.modules import GatheredLinear
from detcompile.runtime.dense.end_tokens import pad_token, stop_tokens
from detcompile.runtime.dense.generation_defaults import SERVED, generation_settings, row_params
from detcompile.runtime.dense.padded_batch import check_batch, keep_columns, language_loss, repad, row_seeds, unpad
from detcompile.runtime.dense.step import dense_step
from detcompile.runtime.engine import Engine
from detcompile.runtime.engine_config import EngineConfig
from detcompile.runtime.engine_setup import EngineModel, new_cache, new_engine
from detcompile.runtime.kv.block_pool import BLOCK_SIZE, BlockPool, whole_blocks
from detcompile.runtime.kv.kv_blocks import KVBlocks
from detcompile.runtime.speculation.medusa_drafter import MedusaDrafter
from detcompile.runtime.speculation.medusa_heads import MedusaHeads
from detcompile.runtime.speculation.model_drafter import ModelDrafter, TreeKind
from detcompile.runtime.speculation.speculator import SpeculationConfig
from detcompile.runtime.step.runner import Runner
from detcompile.weights import weight_addresses, weights_in_place

__all__ = ["CompiledModel"]

_MAKING = threading.Lock()  # two threads that generate share the engine that one of them makes

CACHE_TOKENS = 1 << 17  # of a draft model's KV cache, where nobody says


class CompiledModel(WeightedModel):
    """A certified causal LM. Made by ``detcompile.compile``.

    Attributes:
        model: the Hugging Face module it was made from, whose row-parallel linears were replaced.
        numerics: the declared orders.
        certificate: the proof; prints as a table.
        program: digest of the certified graph, over the whole weights.
        max_context: tokens a sequence may hold.
        ranks: with whom this process shares the model, all of which have to make the same calls; None if with none.
        vocab_size: ids are 0 … vocab_size - 1.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        lowered: Lowered,
        numerics: Numerics,
        max_context: int,
        ranks: TensorParallel | None = None,
    ) -> None:
        self.model = model
        self.numerics = numerics
        self.max_context = max_context
        self.ranks = ranks
        self.vocab_size = lowered.facts.num_token_ids
        self._num_logits = lowered.facts.num_logits
        self.program = lowered.program
        held = partial(weights_in_place, model, weight_addresses(model), lowered.constants)
        self._weights = LiveWeights(
            held, partial(held, every_name=True), whole=lowered.whole_weights, is_share=ranks is not None
        )
        self.certificate: Certificate = lowered.certificate
        self.forward = lowered.forward
        self._kv_shapes = lowered.facts.kv_shapes
        self._kv_groups = lowered.facts.kv_groups
        self._state_shapes, self.recurrences = lowered.facts.state_shapes, lowered.recurrences
        self._parts: dict[tuple[int, ...], CompiledModel] = {}  # some of the layers, for drafting
        self._generator: Engine | None = None  # behind generate(); kept, so that its CUDA graphs are

    @cached_property
    def device(self) -> torch.device:
        """Where the weights live."""
        return next(self.model.parameters()).device

    @cached_property
    def dtype(self) -> torch.dtype:
        """Of the weights, the activations and the KV cache."""
        return self.model.dtype

    @cached_property
    def _fixed_parts(self) -> dict[str, str]:
        given = (self.model.config.to_dict(), self.numerics, self.certificate, self.program, self.max_context)
        return fingerprint_parts(*given, self.dtype, self.device)

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
            tokenizer: of transformers; default: this model's own, if it has one.
            speculation: verify guesses at the next tokens in each step; the same tokens and logprobs, sooner.

        Raises:
            InvalidInput: the model, the largest step and a KV cache of one block do not fit the memory; or ranks that
                share a model, with speculation that switches itself.
        """
        tokenizer = self.tokenizer if tokenizer is None else tokenizer
        if self.ranks is not None and speculation is not None and speculation.switch == "automatic":
            raise InvalidInput(
                "ranks that share a model have to take the same steps, and each would switch speculation by its own"
                " clock: pass SpeculationConfig(switch='always')"
            )
        engine = new_engine(self.engine_model, config or EngineConfig(), tokenizer, speculation, self.ranks)
        self._engines.add(engine)
        return engine

    @property
    def engine_model(self) -> EngineModel:
        """What an engine has to know of this model."""
        return EngineModel(
            forward=self.forward,
            kv_shapes=self._kv_shapes,
            kv_groups=self._kv_groups,
            dtype=self.dtype,
            device=self.device,
            max_context=self.max_context,
            num_token_ids=self.vocab_size,
            num_logits=self._num_logits,
            eos_token_ids=stop_tokens(self.model, None),
            hidden_size=self._hidden_size,
            forward_with_states=lambda: self._forward_with_states,
            state_shapes=self._state_shapes,
            weights_version=self._weights.version,
        )

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
        """This model as the drafter of another one's engine: ``SpeculationConfig(drafter=small.drafter())``.

        With ``layers`` it drafts for itself, by early exit or by skipping layers (Zhang et al., "Draft & Verify", ACL
        2024): ``model.engine(speculation=SpeculationConfig(drafter=model.drafter(layers=2)))``. The weights are shared,
        the KV cache of its layers is its own.

        Args:
            num_tokens: of a draft. siblings: more guesses beside each of them.
            tree: "chain", "grown" to ``max_nodes``, or a list of paths (ModelDrafter).
            num_sequences: that it drafts for at a time.
            cache_tokens: that its KV cache holds; default: those of ``num_sequences`` of the longest context, as far as
                CACHE_TOKENS go. What does not fit is not drafted for.
            layers: the first so many of the model's layers, or these ones; None for all. Compiles them.
            cuda_graphs: None: on a GPU.

        Raises:
            InvalidInput: layers that the model has not, that ranks share or that carry a state; no sequence, no token.
        """
        if self._state_shapes:
            raise InvalidInput("this model's layers carry a state, which cannot take guesses back: draft with another")
        if num_sequences < 1 or (cache_tokens is not None and cache_tokens < 1):
            raise InvalidInput(f"drafter: num_sequences={num_sequences} and cache_tokens={cache_tokens}: at least 1")
        chosen = range(layers) if isinstance(layers, int) else layers
        source = self if chosen is None else self._with_layers(tuple(chosen))
        if cache_tokens is None:
            longest = whole_blocks(self.max_context)
            cache_tokens = min(num_sequences * longest, max(longest, CACHE_TOKENS))
        on_gpu = self.device.type == "cuda"
        runner, blocks = source.new_runner(cache_tokens, cuda_graphs=on_gpu if cuda_graphs is None else cuda_graphs)
        return ModelDrafter(
            runner,
            blocks,
            vocab_size=self._num_logits,
            max_context=self.max_context,
            num_tokens=num_tokens,
            num_sequences=num_sequences,
            siblings=siblings,
            tree=tree,
            max_nodes=max_nodes,
            tokenizer=self.tokenizer,
        )

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
            num_nodes, num_candidates: of a tree that grows by probability. paths: a fixed tree instead.

        Raises:
            InvalidInput: heads for another model, a tree that cannot be, or a model without a head of its own.
        """
        if self.engine_model.hidden_size == 0:
            raise InvalidInput("no hidden states: this model has no head of its own: take another drafter")
        loaded = heads if isinstance(heads, MedusaHeads) else MedusaHeads.load(heads)
        return MedusaDrafter(
            deepcopy(loaded).to(self.device, self.dtype),
            self.head_weight(),
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
    ) -> tuple[Runner, KVBlocks]:
        """A KV cache for at least ``num_tokens`` tokens, what runs steps over it, and its blocks.

        Args:
            num_tokens: of all sequences together, each rounded up to whole blocks by the caller.
            order: in which the pool hands out its blocks.
            num_sequences: that have a state at a time; default: as many as there are blocks.
        """
        whole = max(1, -(-num_tokens // block_size))
        num_blocks = whole * len(self._kv_groups) + 1
        states = (num_sequences or whole) if self._state_shapes else 0
        runner = self._runner(num_blocks, block_size, cuda_graphs, states)
        pool = BlockPool(num_blocks, block_size, order)
        return runner, KVBlocks(pool, self._kv_groups, prefix_caching=False, num_state_slots=states)

    def head_weight(self) -> Tensor:
        """[V, H] of the language-model head, of all ranks together; each of them has to call this."""
        head = self.model.get_output_embeddings()
        return head.whole_weight() if isinstance(head, GatheredLinear) else head.weight.detach()

    @cached_property
    def _hidden_size(self) -> int:
        head = self.model.get_output_embeddings()
        return 0 if head is None else head.weight.shape[1]

    @cached_property
    def _forward_with_states(self) -> Any:
        return lower_with_states(self.model, self.numerics, self.certificate)

    def _with_layers(self, layers: tuple[int, ...]) -> "CompiledModel":
        if self.ranks is not None:
            raise InvalidInput("ranks that share a model do not draft with its layers: compile with tp=1")
        if layers not in self._parts:
            view = layers_of(self.model, layers)
            lowered = lower_view(view, self.numerics, self.max_context)
            self._parts[layers] = CompiledModel(view, lowered, self.numerics, self.max_context)
        return self._parts[layers]

    def _runner(self, num_blocks: int, block_size: int, cuda_graphs: bool, num_states: int) -> Runner:
        return Runner(self.forward, new_cache(self.engine_model, num_blocks, block_size, num_states), cuda_graphs)

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
        check_batch(batch, self.vocab_size, self.max_context)
        rows, mask = keep_columns(batch.mask, logits_to_keep)
        arrays, num_blocks = dense_step(batch, len(self._kv_groups), rows)
        num_states = len(batch.lengths) if self._state_shapes else 0
        runner = self._runner(num_blocks, BLOCK_SIZE, cuda_graphs=False, num_states=num_states)
        logits = repad(runner.run(arrays), mask)
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
            seed: of each row's random numbers: one int a row (a single int only for one row, so that batch-mates
                never share a stream); None draws fresh ones.
            eos_token_id: tokens that end a row; default: the model's generation config; () for none.
            pad_token_id: fills rows that ended early; default: the model's, or the first end token, or 0.
            cuda_graphs: replay decode steps from CUDA graphs; default: on a GPU.

        Returns:
            [B, C + n] int64: the input as it was, then each row's new tokens, then padding.

        Raises:
            InvalidInput: what cannot be served, of the arguments or of the ``generation_config``.
        """
        batch = unpad(input_ids, attention_mask)
        prompts = batch.rows()
        given = (do_sample, temperature, top_k, top_p, min_p, repetition_penalty, max_new_tokens)
        settings = generation_settings(self.model, dict(zip(SERVED, given, strict=True)), input_ids.shape[1])
        num_new = settings["max_new_tokens"]
        if self.ranks is not None and settings["do_sample"] and seed is None:
            raise InvalidInput("ranks that share a model have to draw the same tokens: pass seed, the same to each")
        stop = stop_tokens(self.model, eos_token_id, self._num_logits)
        params = row_params(settings, row_seeds(seed, len(prompts)), stop)
        check_batch(batch, self.vocab_size, self.max_context, num_new)
        with _MAKING:
            engine = self._generating_engine(prompts, num_new, cuda_graphs)
        outputs = engine.generate(prompts, params, progress=False)
        for output in outputs:
            if output.error is not None:
                raise output.error
        pad = pad_token(self.model, pad_token_id, stop)
        generated = [output.outputs[0].token_ids for output in outputs]
        longest = max(len(tokens) for tokens in generated)
        new = [tokens + [pad] * (longest - len(tokens)) for tokens in generated]
        return torch.cat([input_ids.long(), torch.tensor(new, device=input_ids.device)], dim=1)

    def _generating_engine(self, prompts: list[list[int]], max_new_tokens: int, cuda_graphs: bool | None) -> Engine:
        """An engine whose cache holds all of these to their ends: the last one if it does, or a new one."""
        longest = whole_blocks(max(len(tokens) for tokens in prompts) + max_new_tokens)
        needed = len(prompts) * longest // BLOCK_SIZE * len(self._kv_groups) + 1
        last = self._generator
        if last is None or last.failed or last.config.cuda_graphs != cuda_graphs or last.stats.num_blocks < needed:
            self._generator = last = None  # frees the old cache first
            seats = min(len(prompts), 1024)
            config = EngineConfig(num_blocks=needed + 1, cuda_graphs=cuda_graphs, max_num_seqs=seats)
            self._generator = last = self.engine(config)
        return last
