"""An incomplete checkpoint is rejected by its path, and none of its weights is left random."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import detcompile
from detcompile import DetcompileError, InvalidInput
from detcompile.models.checkpoints import load_checkpoint, load_tokenizer
from detcompile.models.hub import TINY_FOLDER
from detcompile.weights import named_weights, weight_digests
from tests.bits import assert_bitwise_equal
from tests.model_cases import ARCHITECTURES, STATEFUL, random_model

WEIGHTS = "model.safetensors"
INDEX = f"{WEIGHTS}.index.json"
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n"
DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda content: b"",
    "a few bytes": lambda content: content[:5],
    "half a header": lambda content: content[:60],
    "cut short": lambda content: content[:-100],
    "longer": lambda content: content + bytes(8),
    "a pointer": lambda content: POINTER,
    "a page of HTML": lambda content: b"<!doctype html><html><body>404 Not Found</body></html>",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """One file of weights."""
    random_model("llama", torch.float32, num_hidden_layers=1).save_pretrained(tmp_path)
    return tmp_path


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    """Several files of weights and an index."""
    random_model("llama", torch.float32, num_hidden_layers=1).save_pretrained(tmp_path, max_shard_size="100KB")
    return tmp_path


def changed(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    weights = load_file(folder / WEIGHTS)
    change(weights)
    save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})


def settled(folder: Path, name: str, **settings: object) -> None:
    content = json.loads((folder / name).read_text())
    (folder / name).write_text(json.dumps(content | settings))


@pytest.mark.parametrize("name", [*ARCHITECTURES, *STATEFUL])
@pytest.mark.parametrize("tied", [False, True])
def test_a_whole_checkpoint_is_loaded(tmp_path: Path, name: str, tied: bool) -> None:
    model = random_model(name, torch.float32, num_hidden_layers=2, tie_word_embeddings=tied)
    model.save_pretrained(tmp_path)
    loaded = load_checkpoint(tmp_path, None)
    for key, weight in model.state_dict().items():
        assert_bitwise_equal(loaded.state_dict()[key], weight, key)


@pytest.mark.parametrize("name", ["llama", "mixtral"])
@pytest.mark.parametrize("tied", [False, True])
def test_several_files_give_the_weights_and_buffers_of_from_pretrained(tmp_path: Path, name: str, tied: bool) -> None:
    made = random_model(name, torch.bfloat16, num_hidden_layers=2, tie_word_embeddings=tied)
    made.save_pretrained(tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    plain = named_weights(AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto"), every_name=True)
    loaded = named_weights(detcompile.load_model(tmp_path, device="cpu"), every_name=True)
    assert loaded.keys() == plain.keys()
    for key, weight in plain.items():
        assert_bitwise_equal(loaded[key], weight, key)
    assert weight_digests(loaded) == weight_digests(plain)


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_weights_are_named(folder: Path, damage: str) -> None:
    file = folder / WEIGHTS
    file.write_bytes(DAMAGES[damage](file.read_bytes()))
    with pytest.raises(InvalidInput, match=rf"{file} (is|cannot) .*fetch the checkpoint again"):
        detcompile.compile(folder)


@pytest.mark.parametrize("damage", [*DAMAGES, "gone", "a dangling link"])
def test_the_damaged_one_of_several_files_is_named(shards: Path, damage: str) -> None:
    file = sorted(shards.glob("*.safetensors"))[2]
    content = file.read_bytes()
    file.unlink()
    if damage == "a dangling link":
        file.symlink_to(shards / "blob")
    elif damage != "gone":
        file.write_bytes(DAMAGES[damage](content))
    with pytest.raises(InvalidInput, match=rf"{file} (is|cannot) "):
        load_checkpoint(shards, None)


@settings(max_examples=40)
@given(end=st.floats(0, 1, exclude_max=True))
def test_weights_that_end_anywhere_are_named(tmp_path_factory: pytest.TempPathFactory, end: float) -> None:
    folder = tmp_path_factory.mktemp("short")
    (folder / "config.json").write_bytes((TINY_FOLDER / "config.json").read_bytes())
    content = (TINY_FOLDER / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(content[: int(end * len(content))])
    with pytest.raises(InvalidInput, match=str(folder / WEIGHTS)):
        load_checkpoint(folder, None)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", INDEX])
@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe", b"null", b"[" * 100_000, POINTER])
def test_settings_that_are_no_json_object_are_named(shards: Path, name: str, content: bytes) -> None:
    (shards / name).write_bytes(content)
    with pytest.raises(InvalidInput, match=str(shards / name)):
        load_checkpoint(shards, None)


@pytest.mark.parametrize("places", [None, {}, [], {"a": 1}, {"a": "../elsewhere.safetensors"}])
def test_an_index_that_leads_nowhere_is_named(shards: Path, places: object) -> None:
    settled(shards, INDEX, weight_map=places)
    with pytest.raises(InvalidInput, match=str(shards / INDEX)):
        load_checkpoint(shards, None)


@pytest.mark.parametrize("first", [True, False])
def test_a_second_copy_of_a_tensor_is_named(shards: Path, first: bool) -> None:
    """In a listed file that sorts before or behind the one that the index names."""
    places = json.loads((shards / INDEX).read_text())["weight_map"]
    files = sorted(set(places.values()))
    name = next(name for name, file in places.items() if file == files[-1 if first else 0])
    stale = shards / files[0 if first else -1]
    save_file(load_file(stale) | {name: torch.zeros(3)}, stale, metadata={"format": "pt"})
    with pytest.raises(
        InvalidInput, match=rf"{stale} holds another copy of {name}, which {INDEX} maps to {places[name]}"
    ):
        load_checkpoint(shards, None)


def test_a_folder_without_a_model_is_named(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    with pytest.raises(InvalidInput, match=rf"{folder} cannot be loaded"):
        load_checkpoint(folder, None)
    (folder / "config.json").unlink()
    for random in (False, True):
        with pytest.raises(InvalidInput, match=str(folder)):
            detcompile.load_model(folder, random=random)


@pytest.mark.parametrize("fields", [{"hidden_size": "x"}, {"num_attention_heads": 0}, {"model_type": "no such"}])
def test_a_config_that_makes_no_model_is_refused_by_its_path(folder: Path, fields: dict[str, object]) -> None:
    settled(folder, "config.json", **fields)
    for random in (False, True):
        with pytest.raises(InvalidInput, match=str(folder)):
            detcompile.load_model(folder, random=random)


def test_truncated_pickle_is_named(folder: Path) -> None:
    torch.save(load_file(folder / WEIGHTS), folder / "pytorch_model.bin")
    (folder / WEIGHTS).unlink()
    load_checkpoint(folder, None)
    file = folder / "pytorch_model.bin"
    file.write_bytes(file.read_bytes()[:-200])
    with pytest.raises(InvalidInput, match=rf"{file} is truncated"):
        load_checkpoint(folder, None)


@pytest.mark.parametrize("missing", ["lm_head.weight", "model.embed_tokens.weight", "model.norm.weight"])
def test_a_checkpoint_that_lacks_a_weight_is_refused_by_its_name(folder: Path, missing: str) -> None:
    changed(folder, lambda weights: weights.pop(missing))
    with pytest.raises(InvalidInput, match=rf"{folder} lacks weights of LlamaForCausalLM: {missing}; .*random"):
        detcompile.compile(folder)


def test_a_checkpoint_of_the_bare_model_has_no_head(tmp_path: Path) -> None:
    random_model("llama", torch.float32, num_hidden_layers=1).model.save_pretrained(tmp_path)
    with pytest.raises(InvalidInput, match=r"lacks weights of LlamaForCausalLM: lm_head\.weight;"):
        load_checkpoint(tmp_path, None, task="generate")
    assert load_checkpoint(tmp_path, None).base_model_prefix == "model"  # it is the bare model by itself


def test_a_tied_head_may_be_absent_and_its_embedding_may_not(tmp_path: Path) -> None:
    random_model("llama", torch.float32, num_hidden_layers=1, tie_word_embeddings=True).save_pretrained(tmp_path)
    assert "lm_head.weight" not in load_file(tmp_path / WEIGHTS)
    load_checkpoint(tmp_path, None)
    changed(tmp_path, lambda weights: weights.pop("model.embed_tokens.weight"))
    with pytest.raises(InvalidInput, match=r"lacks weights .*model\.embed_tokens\.weight"):
        load_checkpoint(tmp_path, None)


def test_a_weight_of_another_shape_is_refused_with_both(folder: Path) -> None:
    changed(folder, lambda weights: weights.update({"model.norm.weight": torch.ones(79)}))
    with pytest.raises(InvalidInput, match=r"model\.norm\.weight \(\[79\] instead of \[80\]\)"):
        load_checkpoint(folder, None)


def test_a_weight_that_nobody_asks_for_changes_nothing(folder: Path) -> None:
    before = load_checkpoint(folder, None).state_dict()
    changed(folder, lambda weights: weights.update({"extra": torch.ones(3)}))
    for key, weight in load_checkpoint(folder, None).state_dict().items():
        assert_bitwise_equal(weight, before[key], key)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("content", [b"", b"{", b'{"model": {"type": "BPE"}}'])
def test_damaged_tokenizer_is_named_and_missing_one_is_none(tmp_path: Path, name: str, content: bytes) -> None:
    assert load_tokenizer(str(tmp_path)) is None
    AutoTokenizer.from_pretrained(TINY_FOLDER).save_pretrained(tmp_path)
    assert load_tokenizer(str(tmp_path)) is not None
    if name == "tokenizer_config.json" and content.endswith(b"}"):
        return
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DetcompileError, match=str(tmp_path)):
        load_tokenizer(str(tmp_path))
