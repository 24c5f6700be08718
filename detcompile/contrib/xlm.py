"""XLM as a causal language model."""

from typing import Any

from torch import Tensor

from detcompile.passes.adapters.forwards import Adapter, attend
from detcompile.step import StepInputs


def _xlm(model: Any, input_ids: Tensor, position_ids: Tensor, step: StepInputs | None, keep: Any) -> Tensor:
    """Run without language embeddings, like Hugging Face's forward without ``langs``."""
    body = model.transformer
    hidden = body.layer_norm_emb(body.embeddings(input_ids) + body.position_embeddings(position_ids))
    layers = zip(body.attentions, body.layer_norm1, body.ffns, body.layer_norm2, strict=True)
    for attention, first_norm, mlp, second_norm in layers:
        hidden = first_norm(hidden + attention(hidden, step)[0])
        hidden = second_norm(hidden + mlp.ff_chunk(hidden))
    return model.pred_layer.proj(hidden[:, keep])


def _xlm_attention(self: Any, hidden_states: Tensor, step: StepInputs | None) -> tuple[Tensor, None]:
    query, key, value = (
        project(hidden_states).unflatten(-1, (self.n_heads, self.head_dim))
        for project in (self.q_lin, self.k_lin, self.v_lin)
    )
    return self.out_lin(attend(self, query, key, value, step)), None


def _xlm_number(model: Any, attention: Any) -> None:
    attention.layer_idx = attention.layer_id


def _xlm_obstacle(config: Any) -> str:
    if not config.causal:
        return "causal=False (bidirectional attention)"
    return "asm=True (a head that is not linear)" if config.asm else ""


ADAPTERS = {
    "xlm.modeling_xlm.XLMWithLMHeadModel": Adapter(
        "", _xlm, _xlm_attention, _xlm_obstacle, _xlm_number, blocks="attentions"
    )
}
