"""Attention classes with their own softmax, and masks made in other ways, keep their meaning."""

import sys
from typing import Any, ClassVar

import pytest
import torch
import transformers
from torch import Tensor
from transformers.masking_utils import create_causal_mask
from transformers.models.llama.modeling_llama import LlamaModel

from detcompile import UnsupportedModel
from detcompile.passes.adapters.attention_classes import ATTENTION_FORWARDS
from detcompile.passes.capture import freeze_rope, probe_attention
from detcompile.passes.modules.positions import give_positions
from detcompile.releases import numbers
from tests.model_cases import VOCAB_SIZE, random_model
from tools.model_configs import ARCHITECTURES, tiny_model

IDS = torch.randint(4, VOCAB_SIZE, (2, 90), generator=torch.Generator().manual_seed(5))
POSITIONS = {"max_position_embeddings": 128}
BART = {"d_model": 80, "decoder_layers": 2, "decoder_ffn_dim": 96, "decoder_attention_heads": 4} | POSITIONS
BERT = {"num_hidden_layers": 2, "num_attention_heads": 4, "is_decoder": True} | POSITIONS
GPT = {"n_embd": 80, "n_layer": 2, "n_head": 4, "n_positions": 128}
XLM = {"emb_dim": 80, "n_layers": 2, "n_heads": 4, "pad_token_id": 2} | POSITIONS
READS_ITS_MASK = ("axk2", "deepseek_v32", "glm_moe_dsa", "hy_v4", "qwen4_exp_text")  # by an indexer
TYPES = ["sliding_attention", "full_attention"]
CASES = {
    "codegen": (GPT | {"rotary_dim": 12}, [0, 0]),
    "codegen turned whole": (GPT | {"rotary_dim": 20}, [0, 0]),
    "gpt_neo": (
        {"num_layers": 2, "attention_types": [[["global", "local"], 1]], "num_heads": 4, "window_size": 33} | POSITIONS,
        [0, 33],
    ),
    "gpt_neox_japanese": (POSITIONS, [0, 0]),
    "llama4_text": (
        {"head_dim": 20, "intermediate_size_mlp": 96, "no_rope_layers": [1, 0, 1], "num_hidden_layers": 3}
        | {"attention_chunk_size": 33, "floor_scale": 16, "num_local_experts": 4},
        [33, 0, 33],
    ),
    "mpt": ({"d_model": 80, "n_heads": 5, "n_layers": 2, "max_seq_len": 128}, [0, 0]),
    "mvp": (BART, [0, 0]),
    "openai-gpt": (GPT, [0, 0]),
    "trocr": (BART, [0, 0]),
    "xlm": (XLM | {"causal": True}, [0, 0]),
    "xlm with languages": (XLM | {"causal": True, "n_langs": 2, "sinusoidal_embeddings": True}, [0, 0]),
    "gemma3": (
        {
            "text_config": {"hidden_size": 80, "intermediate_size": 96, "num_hidden_layers": 2}
            | {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 20}
            | {"layer_types": TYPES, "sliding_window": 33, "vocab_size": 160},
            "vision_config": {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "image_size": 8}
            | {"num_attention_heads": 2, "patch_size": 4},
        },
        [33, 0],
    ),
}
BERTS = {
    "big_bird": BERT | {"attention_type": "original_full"},
    "megatron-bert": BERT,
    "rembert": BERT | {"input_embedding_size": 80, "output_embedding_size": 80},
    "roformer": BERT | {"embedding_size": 80},
    "roformer with turned values": BERT | {"embedding_size": 80, "rotary_value": True},
}


@pytest.mark.parametrize("case", CASES)
def test_logits_and_windows_are_the_models_own(case: str) -> None:
    changes, windows = CASES[case]
    require_equal_logits(case.partition(" ")[0], changes, windows)


@pytest.mark.parametrize("case", BERTS)
def test_berts_that_mask_as_decoders_are_taken(case: str) -> None:
    """In transformers 5.24; earlier ones see both ways, whatever the config says."""
    name = case.partition(" ")[0]
    with torch.no_grad():
        model = random_model(name, torch.float32, **BERTS[case])
        if hasattr(sys.modules[type(model).__module__], "create_causal_mask"):
            require_equal_logits(name, BERTS[case], [0, 0])
        else:
            with pytest.raises(UnsupportedModel, match="asks for create_bidirectional_mask"):
                probe_attention(model, 64)


def require_equal_logits(name: str, changes: dict[str, Any], windows: list[int]) -> None:
    with torch.no_grad():
        plain = random_model(name, torch.float32, **changes)
        if plain._can_set_attn_implementation():
            plain.set_attn_implementation("eager")
        expected = plain(IDS, use_cache=False).logits
        model = random_model(name, torch.float32, **changes)
        give_positions(model)
        freeze_rope(model, 128)
        calls, _ = probe_attention(model, 64)
        assert [call.window for call in calls] == windows
        positions = torch.arange(90).repeat(2, 1)
        logits = model(input_ids=IDS, position_ids=positions, use_cache=False).logits
    assert (logits - expected).norm() < 1e-5 * expected.norm()


def test_angles_of_float32_turn_states_of_bfloat16() -> None:
    """A checkpoint of codegen is loaded in a dtype that its table of angles does not take."""
    model = random_model("codegen", torch.bfloat16, **CASES["codegen"][0])
    for module in model.modules():  # each attention, or one for all of them
        if hasattr(module, "embed_positions"):
            module.embed_positions = module.embed_positions.float()
    with torch.no_grad():
        give_positions(model)
        probe_attention(model, 64)
        logits = model(input_ids=IDS, position_ids=torch.arange(90).repeat(2, 1), use_cache=False).logits
    assert logits.dtype == torch.bfloat16 and bool(logits.isfinite().all())


def test_a_class_of_the_same_name_from_elsewhere_is_left_alone() -> None:
    assert all(name.count(".") == 2 and "modeling_" in name for name in ATTENTION_FORWARDS)
    model = random_model("mvp", torch.float32, **BART)
    for layer in model.model.decoder.layers:
        item = type(layer.self_attn)
        layer.self_attn.__class__ = type(item.__name__, (item,), {"__module__": __name__})
    give_positions(model)
    with pytest.raises(UnsupportedModel, match=r"called the attention interface for layers \[\]"):
        probe_attention(model, 64)


@pytest.mark.parametrize("name", [name for name in READS_ITS_MASK if name in ARCHITECTURES])
def test_code_that_reads_its_mask_is_named(name: str) -> None:
    with pytest.raises(
        UnsupportedModel, match=r"attention_mask.* at modeling_\w+\.py:\d+ in forward: the model's code reads"
    ):
        probe_attention(tiny_model(name), 64)


@pytest.mark.skipif(
    numbers(transformers.__version__) >= (5, 24),
    reason="checks that a moshi without a causal mask is refused; transformers 5.24 always makes the mask",
)
def test_a_model_that_makes_no_causal_mask_is_refused() -> None:
    """moshi attends both ways unless it is given a mask."""
    with pytest.raises(UnsupportedModel, match="attention is bidirectional"):
        probe_attention(random_model("moshi", torch.float32, ffn_dim=96, head_dim=20), 64)


@pytest.mark.parametrize(("changes", "message"), [({}, "causal=False"), ({"causal": True, "asm": True}, "asm=True")])
def test_xlm_that_is_not_causal_or_has_another_head_is_refused(changes: dict[str, bool], message: str) -> None:
    if "asm" in changes:
        changes = changes | {"asm_cutoffs": [80], "asm_div_value": 4.0}
    with pytest.raises(UnsupportedModel, match=message):
        probe_attention(random_model("xlm", torch.float32, **XLM, **changes), 64)


def test_attention_chunks_unknown_to_layers_are_rejected() -> None:
    """As of code that is not transformers' own, which asks for the mask and hands its attention no chunk."""
    model = random_model("llama4_text", torch.float32, head_dim=20, intermediate_size_mlp=96, num_local_experts=4)
    for module in [model.model.rotary_emb, *(layer.self_attn for layer in model.model.layers)]:
        item = type(module)
        module.__class__ = type(item.__name__, (item,), {"__module__": __name__})
    with pytest.raises(UnsupportedModel, match=r"for layers \[0, 1\] but tells layers \[\] their chunks"):
        probe_attention(model, 64)


class _Shaped(LlamaModel):
    """Asks for a mask that an argument changes."""

    SHAPED: ClassVar[dict[str, Any]] = {}

    def forward(self, input_ids: Tensor, **kwargs: Any) -> Any:
        create_causal_mask(self.config, self.embed_tokens(input_ids), None, None, **self.SHAPED)
        return super().forward(input_ids, **kwargs)


def _any(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return key >= 0


BLOCKS = torch.tensor([[0, 0]])
SHAPES: dict[str, Any] = {"or_mask_function": _any, "and_mask_function": _any, "block_sequence_ids": BLOCKS}


@pytest.mark.parametrize("argument", SHAPES)
def test_arguments_that_change_a_mask_are_refused(argument: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = random_model("llama", torch.float32)
    model.model.__class__ = _Shaped
    probe_attention(model, 64)
    monkeypatch.setattr(_Shaped, "SHAPED", {argument: SHAPES[argument]})
    with pytest.raises(UnsupportedModel, match=f"changes create_causal_mask by {argument}"):
        probe_attention(model, 64)
