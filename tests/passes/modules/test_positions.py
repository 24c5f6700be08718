"""Positions count from 0 for every model, however it numbers the rows of its table; steps reach every attention."""

import pytest
import torch
from torch import nn

from detcompile import InvalidInput, UnsupportedModel
from detcompile.api import compile
from detcompile.passes.capture import probe_attention
from detcompile.passes.layers.structure import view_of
from detcompile.passes.modules.positions import PositionTable, give_positions, position_tables
from tests.model_cases import VOCAB_SIZE, random_model

DECODER = {"is_decoder": True, "max_position_embeddings": 64}
BART = {"d_model": 80, "decoder_layers": 2, "decoder_ffn_dim": 96, "decoder_attention_heads": 4} | DECODER
# first: the row of a first token; given: the row read for position 0, None where the model counts columns
CASES = {
    "bert": (DECODER, 64, 0, 0),
    "roberta": (DECODER | {"pad_token_id": 3}, 64, 4, 0),
    "opt": ({"ffn_dim": 96, "word_embed_proj_dim": 80, "max_position_embeddings": 64}, 66, 2, 2),
    "gpt2": ({"n_positions": 64}, 64, 0, 0),
    "bart": (BART, 66, 2, None),
    "marian": (BART, 64, 0, None),
}
IDS = torch.randint(4, VOCAB_SIZE, (1, 40), generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize("name", CASES)
def test_positions_from_zero_give_model_logits(name: str) -> None:
    changes, rows, first, given = CASES[name]
    model = random_model(name, torch.float32, **changes)
    (table,) = position_tables(model)
    assert table == PositionTable(table.name, rows, first, given)
    assert "position" in table.name or table.name.endswith("wpe")
    with torch.no_grad():
        expected = model(IDS, use_cache=False).logits
        give_positions(model)
        positions = torch.arange(40)[None]
        assert torch.equal(model(input_ids=IDS, position_ids=positions, use_cache=False).logits, expected)
        moved = model(input_ids=IDS, position_ids=positions + 7, use_cache=False).logits
        assert (moved - expected).abs().max() > 1e-3  # not the columns
        view = view_of(model)  # of modules of its own, with hooks that are the model's
        assert torch.equal(view(input_ids=IDS, position_ids=positions + 7, use_cache=False).logits, moved)


def test_rotary_models_have_no_table() -> None:
    assert position_tables(random_model("llama", torch.float32)) == ()


def test_context_is_limited_by_position_table() -> None:
    with pytest.raises(InvalidInput, match=r"position_embeddings has 60 rows for positions"):
        compile(random_model("roberta", torch.float32, **CASES["roberta"][0]), max_context=61)


def test_positions_that_do_not_run_on_are_refused() -> None:
    model = random_model("gpt2", torch.float32, n_positions=64)
    model.transformer.wpe.register_forward_pre_hook(lambda _, args: (args[0] * 2,))
    with pytest.raises(UnsupportedModel, match="read rows 0 and 2"):
        position_tables(model)


def test_tables_that_are_not_read_as_they_are_are_refused() -> None:
    model = random_model("bart", torch.float32, **BART)
    model.model.decoder.embed_positions.register_forward_hook(lambda _, args, output: output * 2)
    with pytest.raises(UnsupportedModel, match="not rows of its table"):
        give_positions(model)


@pytest.mark.parametrize("name", ["stablelm", "nemotron"])
def test_the_step_reaches_attention_past_modules_that_drop_keywords(name: str) -> None:
    model = random_model(name, torch.float32, hidden_size=64, head_dim=16)
    calls, _ = probe_attention(model, 64)
    assert [call.layer for call in calls] == [0, 1]


def test_an_encoder_that_sees_both_ways_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match="create_bidirectional_mask"):
        probe_attention(random_model("bert", torch.float32, is_decoder=False), 64)


def test_unused_window_is_ignored() -> None:
    """qwen2_moe builds the mask of a window, and gives it to no layer unless the configuration says so."""
    layers: dict = {"num_experts": 4, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32}
    calls, _ = probe_attention(random_model("qwen2_moe", torch.float32, **layers), 64)
    assert [call.window for call in calls] == [0, 0]
    assert isinstance(calls[0].module, nn.Module)
