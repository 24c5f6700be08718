"""Models with one result per sequence: classifiers, reward models and embedders.

A row's result depends only on its tokens.
"""

from collections.abc import Iterator, Mapping
from collections.abc import Sequence as SequenceOf
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Encoding
from torch import Tensor
from transformers import AutoModelForSequenceClassification
from transformers.modeling_outputs import BaseModelOutput, SequenceClassifierOutput
from transformers.utils import ModelOutput

from detcompile.errors import InvalidInput
from detcompile.models.certified import CertifiedModel
from detcompile.models.model_object import AnyConfig
from detcompile.models.padded_calls import require_served, require_tensors, with_config_outputs
from detcompile.passes.modules.pooling_heads import FIRST, LAST, attends_both_ways
from detcompile.runtime.dense.padded_batch import UnpaddedBatch, check_batch, dense_step, repad, two_way_step, unpad
from detcompile.runtime.kv.block_pool import BLOCK_SIZE
from detcompile.runtime.requests.plain_values import flag, kind, shown, token_list
from detcompile.runtime.requests.prompts import Prompt, private_copy, prompts_of, read_prompt, tokenized
from detcompile.templates.cpu.fp_mode import float_mode
from detcompile.templates.ops import ours

Prompts = Prompt | SequenceOf[Prompt]
SERVED = "input_ids, attention_mask, position_ids and return_dict"
STEP_TOKENS = 4096  # of prompts that share a step; a longer prompt runs alone


class _Pooling(CertifiedModel):
    """Common parts of classifiers and embedders."""

    _copied: tuple[Any, Any] = (None, None)  # the tokenizer, and the private copy that reads prompts

    @torch.compiler.disable  # callers may compile around this; the program is already compiled
    @torch.no_grad()
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        return_dict: bool | None = None,
        use_cache: bool | None = None,
        **keywords: Any,
    ) -> Any:
        """Run a padded batch, as the Hugging Face model does.

        Args:
            input_ids: [B, C] integers; padding on the left, the right or both, as given by attention_mask [B, C].
            position_ids: [B, C] or [1, C]; default: counted from the attention mask.
            return_dict: False returns a tuple; None follows the config.
            use_cache: no effect; a call keeps no cache.
            **keywords: Hugging Face keywords without effect.

        Returns:
            For a classifier a SequenceClassifierOutput with logits [B, labels] in the model's dtype; for a base model a
            BaseModelOutput with last_hidden_state [B, C, H], zeros at padding.

        Raises:
            InvalidInput: shapes, ids, masks or keywords are not supported.
        """
        batch = self._batch(input_ids, attention_mask, position_ids, keywords)
        output = self._output(batch)
        wanted = self.config.return_dict if return_dict is None else flag(return_dict, "return_dict")
        return output if wanted else output.to_tuple()

    __call__ = forward

    def can_generate(self) -> bool:
        """Return False: the model does not generate."""
        return False

    def _run(self, batch: UnpaddedBatch, tokens: NDArray[np.int64]) -> Tensor:
        """Return the model's results [R, ...] for the packed ``tokens`` [R] of a batch, from one step."""
        check_batch(batch, self.vocab_size, self.max_context)
        build = two_way_step if attends_both_ways(self.model) else dense_step
        arrays, num_blocks = build(batch, len(self.facts.kv_groups), tokens)
        num_states = len(batch.lengths) if self.facts.state_shapes else 0
        return self.executor.new_runner(num_blocks, BLOCK_SIZE, False, num_states).run(arrays)

    def _output(self, batch: UnpaddedBatch) -> ModelOutput:
        """Compute the output of ``forward``."""
        raise NotImplementedError

    def _batch(self, input_ids: Any, mask: Any, position_ids: Any, keywords: dict[str, Any]) -> UnpaddedBatch:
        _require_one_type(keywords.pop("token_type_ids", None))
        require_served(with_config_outputs(self.config, keywords), SERVED)
        return unpad(*require_tensors(input_ids, mask, position_ids, None))

    def _packs(self, prompts: Prompts) -> list[UnpaddedBatch]:
        """Pack the prompts, in order, into batches of one step each."""
        lengths, packs = 0, []
        rows: list[SequenceOf[int]] = []
        for row in self._token_ids(prompts):
            if rows and lengths + len(row) > STEP_TOKENS:
                packs.append(_batch_of(rows))
                rows, lengths = [], 0
            rows.append(row)
            lengths += len(row)
        return [*packs, _batch_of(rows)]

    def _token_ids(self, prompts: Any) -> list[list[int]]:
        items = prompts_of(list(prompts) if isinstance(prompts, Iterator) else prompts)
        if not items:
            raise InvalidInput("no prompts: pass a text, a list of texts, or a list of lists of token ids")
        rows = [self._row(index, prompt) for index, prompt in enumerate(items)]
        for index, row in enumerate(rows):
            if not row:
                raise InvalidInput(f"prompt {index} has no tokens")
            bad = next((token for token in row if not 0 <= token < self.vocab_size), None)
            if bad is not None:
                raise InvalidInput(f"prompt {index} holds token {bad}; ids are 0 to {self.vocab_size - 1}")
        return rows

    def _row(self, index: int, prompt: Any) -> list[int]:
        text, token_ids = prompt if isinstance(prompt, str) else None, None
        if isinstance(prompt, (Mapping, Encoding)):
            try:
                text, token_ids, _ = read_prompt(prompt)
            except InvalidInput as error:
                raise InvalidInput(f"prompt {index}: {error}") from error
            _require_one_type(prompt.get("token_type_ids") if isinstance(prompt, Mapping) else prompt.type_ids)
        elif text is None:
            token_ids = token_list(prompt, f"prompts are texts, or lists of token ids: {index}")
        if token_ids is not None:
            return token_ids
        if self.tokenizer is None:
            raise InvalidInput("the model has no tokenizer: pass lists of token ids")
        if self._copied[0] is not self.tokenizer:
            self._copied = (self.tokenizer, private_copy(self.tokenizer))
        return tokenized(self._copied[1], text or "")


class CompiledClassifier(_Pooling):
    """A certified classifier or reward model, compiled from a model for sequence classification.

    If the head reads the last token, a call without a mask treats trailing pad tokens of a row as padding, as
    transformers does.

    Args:
        executor: runs its steps.
    """

    @torch.compiler.disable
    @torch.no_grad()
    def score(self, prompts: Prompts) -> Tensor:
        """Return the scores [N, labels] of prompts; a step holds as many prompts as fit.

        Args:
            prompts: a text, texts, lists of token ids, or a tokenizer's output without padding. Texts get the
                tokenizer's special tokens.

        Raises:
            InvalidInput: prompts are not supported, or there is no tokenizer for texts.
        """
        return torch.cat([self._run(batch, self._pooled(batch)) for batch in self._packs(prompts)])

    def _batch(self, input_ids: Any, mask: Any, position_ids: Any, keywords: dict[str, Any]) -> UnpaddedBatch:
        padding: Any = getattr(self.config.get_text_config(), "pad_token_id", None)
        reads_last = padding is not None and self.model.pooled_token == LAST
        if mask is None and reads_last and isinstance(input_ids, Tensor) and input_ids.dim() == 2:
            mask = _without_trailing(input_ids, padding)
        return super()._batch(input_ids, mask, position_ids, keywords)

    def _output(self, batch: UnpaddedBatch) -> ModelOutput:
        return SequenceClassifierOutput(logits=self._run(batch, self._pooled(batch)))

    def _pooled(self, batch: UnpaddedBatch) -> NDArray[np.int64]:
        """Return the index of the packed token that the head reads, for each row: [B]."""
        return _first(batch) if self.model.pooled_token == FIRST else _last(batch)


AutoModelForSequenceClassification.register(AnyConfig, CompiledClassifier)


class CompiledEmbedder(_Pooling):
    """A certified model without a head, for its hidden states, compiled from a base model.

    Args:
        executor: runs its steps.
    """

    @torch.compiler.disable
    @torch.no_grad()
    def embed(
        self,
        prompts: Prompts,
        *,
        pooling: Literal["last", "first", "mean"] | None = None,
        normalize: bool = True,
    ) -> Tensor:
        """Return embeddings [N, H] float32 of prompts; a step holds as many prompts as fit.

        Args:
            prompts: as in ``CompiledClassifier.score``.
            pooling: the hidden state of a prompt's last or first token, or the mean over its tokens, summed in Row
                order
                (``orders.Row``); None uses "mean" for models with bidirectional attention, else "last".
            normalize: divide by the Euclidean norm.

        Raises:
            InvalidInput: prompts or the pooling are not supported, or there is no tokenizer for texts.
        """
        default = "mean" if attends_both_ways(self.model) else "last"
        chosen, divide = default if pooling is None else pooling, flag(normalize, "normalize")
        places = {"last": _last, "first": _first, "mean": lambda batch: np.arange(len(batch.token_ids))}
        if chosen not in list(places):
            raise InvalidInput(f"pooling={pooling!r}: use {', '.join(map(repr, places))}, or None")
        pooled, is_exact = [], self.facts.is_exact
        for batch in self._packs(prompts):
            states = self._run(batch, places[chosen](batch)).float()
            with float_mode(states.device):
                pooled.append(_means(states, batch.lengths, is_exact) if chosen == "mean" else states)
        embeddings = torch.cat(pooled)
        if not divide:
            return embeddings
        with float_mode(embeddings.device):
            if is_exact:
                norms = ours.exact_function(ours.exact_sum(embeddings * embeddings), "sqrt")
                return ours.exact_divide(embeddings, norms[:, None])
            return embeddings / ours.row_sum(embeddings * embeddings).sqrt()[:, None]

    def _output(self, batch: UnpaddedBatch) -> ModelOutput:
        return BaseModelOutput(last_hidden_state=repad(self._run(batch, np.arange(len(batch.token_ids))), batch.mask))


def _means(states: Tensor, lengths: NDArray[np.int64], is_exact: bool) -> Tensor:
    """Return means [B, H] over the tokens of each row of [T, H]."""
    columns = [rows.t().contiguous() for rows in states.split(lengths.tolist())]
    if is_exact:  # a GPU would multiply by the reciprocal of a number
        counts = torch.from_numpy(lengths).to(states)[:, None]
        return ours.exact_divide(torch.stack([ours.exact_sum(column) for column in columns]), counts)
    return torch.stack([ours.row_sum(column) / column.shape[1] for column in columns])


def _require_one_type(types: Any) -> None:
    """Reject token types other than zeros."""
    try:
        pairs = types is not None and bool(torch.as_tensor(types, device="cpu").any())
    except (TypeError, ValueError, RuntimeError) as error:
        raise InvalidInput(f"token_type_ids {shown(types)} is {kind(types)}: pass a tensor of zeros") from error
    if pairs:
        raise InvalidInput("token_type_ids other than 0 are not supported: use a model that reads pairs as plain text")


def _first(batch: UnpaddedBatch) -> NDArray[np.int64]:
    return batch.lengths.cumsum() - batch.lengths


def _last(batch: UnpaddedBatch) -> NDArray[np.int64]:
    return batch.lengths.cumsum() - 1


def _batch_of(rows: SequenceOf[SequenceOf[int]]) -> UnpaddedBatch:
    """Pack rows of any lengths, like ``unpad`` of a padded batch."""
    lengths = np.array([len(row) for row in rows])
    mask = np.arange(lengths.max()) < lengths[:, None]
    positions = np.concatenate([np.arange(length) for length in lengths])
    return UnpaddedBatch(np.concatenate([np.asarray(row, np.int64) for row in rows]), positions, lengths, mask)


def _without_trailing(input_ids: Tensor, padding: int) -> Tensor:
    """Return a mask [B, C] with zeros at trailing pad tokens; a row of only padding keeps its first token."""
    kept = (input_ids != padding).flip(1).cumsum(1).flip(1) > 0
    kept[:, 0] = True
    return kept.long()
