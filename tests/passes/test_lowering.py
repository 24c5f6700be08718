"""A model whose tokens have no visible tables is rejected by name before it is changed."""

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from detcompile import UnsupportedModel
from tests.model_cases import certified, random_model


def split_head(model: PreTrainedModel) -> None:
    model.lm_head = nn.Sequential(nn.Linear(80, 20), nn.Linear(20, 160))


def wrapped_embedding(model: PreTrainedModel) -> None:
    model.model.embed_tokens = nn.Sequential(model.model.embed_tokens, nn.LayerNorm(80))


@pytest.mark.parametrize(("change", "what"), [(split_head, "head"), (wrapped_embedding, "token embedding")])
def test_embedding_without_a_weight_table_is_rejected(change, what: str) -> None:
    model = random_model("llama", torch.float32, num_hidden_layers=1)
    change(model)
    with pytest.raises(UnsupportedModel, match=f"its {what} is a Sequential without one weight row"):
        certified(model)
