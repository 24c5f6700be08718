"""Give models without a language-model head the forward of a causal LM, with scores or hidden states per row.

These are classifiers and reward models, whose head scores one token of a sequence, and base models, whose hidden states
serve as embeddings.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

from detcompile.errors import UnsupportedModel

FIRST, LAST = "first", "last"  # token that a head reads
NUM_COMPARED = 7  # tokens of the sequence for comparing the two forwards


class PoolingModel(PreTrainedModel):
    """The forward of a causal LM over a base model and its head. Mixed into the model's class.

    Attributes:
        pooled_token: "first" or "last": the token of a sequence that the head reads; None for a base model.
    """

    pooled_token: str | None

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor | None = None,
        logits_to_keep: int | Tensor = 0,
        token_type_ids: Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> CausalLMOutput:
        """Scores [1, R, labels], or hidden states [1, R, H], of the chosen tokens.

        Args:
            input_ids: [1, T] int64.
            position_ids: [1, T] int64; None for the model's default.
            logits_to_keep: [R] indices of tokens; 0 keeps all.
            token_type_ids: [1, T] int64; None for the model's default.
            use_cache: ignored: base models of encoders have no cache.
        """
        given = {"position_ids": position_ids, "token_type_ids": token_type_ids}
        kwargs |= {name: value for name, value in given.items() if value is not None}
        run = super().forward if self.base_model is self else self.base_model
        hidden = run(input_ids=input_ids, **kwargs).last_hidden_state
        rows = hidden[:, logits_to_keep] if isinstance(logits_to_keep, Tensor) else hidden
        return CausalLMOutput(logits=self._head(rows))

    def _head(self, rows: Tensor) -> Tensor:
        """Apply the head to hidden states [B, R, H], each as if it were the pooled token of its sequence."""
        if self.pooled_token is None:
            return rows
        if self.pooled_token == LAST:
            return self.score(rows)
        alone = rows.flatten(0, 1).unsqueeze(1)  # [B * R, 1, H]: heads of encoders take the first token of each
        pooler = getattr(self.base_model, "pooler", None)
        if pooler is not None:
            alone = pooler(alone)
        elif hasattr(self, "pre_classifier"):  # DistilBERT's
            alone = nn.functional.relu(self.pre_classifier(alone[:, 0]))
        return self.classifier(alone).unflatten(0, rows.shape[:2])


def attends_both_ways(model: nn.Module) -> bool:
    """Return whether tokens of a model see later tokens."""
    return isinstance(model, PoolingModel) and not any(
        getattr(module, "is_causal", False) for module in model.modules() if hasattr(module, "layer_idx")
    )


def as_pooling_model(model: PreTrainedModel) -> PreTrainedModel:
    """Give a module the forward of a PoolingModel. It stays the same object, and its parameters keep their names.

    Raises:
        UnsupportedModel: its original forward needs more than token ids, or returns something else.
    """
    kind, name = type(model), type(model).__name__
    pooled = _pooled_token(model)
    _number_attention(model)
    device = next(model.parameters()).device
    padding = getattr(model.config.get_text_config(), "pad_token_id", None)  # some models give it no position
    vocab_size = model.get_input_embeddings().weight.shape[0]
    ids = torch.tensor([[index for index in range(vocab_size) if index != padding][:NUM_COMPARED]], device=device)
    with torch.no_grad():
        try:
            expected = model(input_ids=ids)[0]
            model.__class__ = type(name, (PoolingModel, kind), {"__module__": kind.__module__})
            model.pooled_token = pooled
            actual = _whole(model, ids)
        except Exception as error:  # models raise what they like
            raise UnsupportedModel(f"{name} does not run on token ids alone: {error}") from error
    if torch.equal(actual, expected):
        return model
    raise UnsupportedModel(
        f"{name} does not return what its base model and a head over the {pooled or 'last'} token return: only such"
        " classifiers are compiled"
    )


def has_pooling_head(model: nn.Module) -> bool:
    """Return whether a model has a classifier's head: `score` or `classifier`."""
    return any(isinstance(getattr(model, name, None), nn.Module) for name in ("score", "classifier"))


def _pooled_token(model: PreTrainedModel) -> str | None:
    if model.base_model is model:
        return None
    return LAST if isinstance(getattr(model, "score", None), nn.Linear) else FIRST


def _number_attention(model: PreTrainedModel) -> None:
    """Number the attention modules if they have no layer_idx, as in DistilBERT. Call order is checked later."""
    unnumbered = [module for module in model.modules() if type(module).__name__.endswith("SelfAttention")]
    if not any(hasattr(module, "layer_idx") for module in unnumbered):
        for index, module in enumerate(unnumbered):
            module.layer_idx = index


def _whole(model: Any, ids: Tensor) -> Tensor:
    """Compute with our forward what the original forward returns for one sequence, with equal shapes and bits."""
    if model.pooled_token is None:
        return model(ids).logits
    if model.pooled_token == LAST:
        return model(ids).logits[:, -1]
    return model(ids, logits_to_keep=torch.zeros(1, dtype=torch.int64, device=ids.device)).logits[:, 0]
