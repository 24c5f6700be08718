"""GGUF files: weights by bytes, tokenizer and settings, and files that are rejected by name."""

import os
import random
import re
import struct
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGUFReader
from gguf.quants import dequantize
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

import detcompile
from detcompile.errors import DetcompileError, InvalidInput, UnsupportedModel
from detcompile.models.gguf import conversion
from detcompile.models.gguf.header import TENSOR_TYPES, read_header
from detcompile.models.gguf.packing import PACKINGS
from detcompile.models.hub import find_checkpoint
from detcompile.models.loading import tokenizer_of
from detcompile.passes.modules.quantized_linear import QuantizedLinear
from tests.bits import assert_bitwise_equal
from tests.models.gguf_cases import HEADS, HIDDEN, KV_HEADS, NAMES, TOKENS, Change, write
from tests.models.hub_cases import COMMIT, put_snapshot, with_cache


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DETCOMPILE_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("small") / "small.gguf", ["Q8_0"])


def values_of(path: Path, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Return the values of gguf's reader under transformers' names, with llama.cpp's order of rotary rows undone."""
    values = {}
    for tensor in GGUFReader(path).tensors:
        weight = dequantize(tensor.data, tensor.tensor_type)
        name = ".".join(NAMES.get(part, part) for part in tensor.name.split("."))
        if "q_proj" in name or "k_proj" in name:
            heads = HEADS if "q_proj" in name else KV_HEADS
            weight = weight.reshape(heads, -1, 2, HIDDEN).swapaxes(1, 2).reshape(weight.shape)
        values[name] = torch.from_numpy(weight.copy()).to(dtype)
    return values


def assert_equal_bytes(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert actual.keys() - {"lm_head.weight"} == expected.keys()
    for name, tensor in expected.items():
        assert actual[name].dtype == tensor.dtype, name
        assert torch.equal(actual[name].view(torch.uint8), tensor.view(torch.uint8)), name


def test_weights_equal_gguf_reader(tmp_path: Path) -> None:
    path = write(tmp_path / "all.gguf", [each.name for each in TENSOR_TYPES.values()])
    weights = detcompile.load_model(path).state_dict()
    assert_equal_bytes(weights, values_of(path, torch.bfloat16))
    assert torch.equal(weights["lm_head.weight"], weights["model.embed_tokens.weight"])


def test_every_quantized_type_can_stay(tmp_path: Path) -> None:
    kinds = [each.name for each in TENSOR_TYPES.values()]
    path = write(tmp_path / "all.gguf", kinds)
    for dtype in (torch.float32, torch.bfloat16):
        model = detcompile.load_model(path, dtype=dtype, dequantize=False)
        values, kept = values_of(path, dtype), set()
        for name, module in model.named_modules():
            if isinstance(module, QuantizedLinear):
                kept.add(name.split(".")[2])
                assert_bitwise_equal(module.dequantized(dtype), values.pop(f"{name}.weight"), name)
        assert kept == {str(layer) for layer, kind in enumerate(kinds) if kind in PACKINGS}
        rounded = {name: tensor.to(torch.bfloat16).to(dtype) for name, tensor in values.items()}
        assert_equal_bytes({name: model.state_dict()[name] for name in rounded}, rounded)


def test_dequantize_is_for_gguf_files(small: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"dequantize=False is for GGUF files, but .*tiny is not one"):
        detcompile.load_model("tiny", dequantize=False)
    with pytest.raises(InvalidInput, match="dequantize cannot be passed with a module"):
        detcompile.compile(detcompile.load_model(small), dequantize=False)
    floats = write(tmp_path / "float.gguf", ["F16"])
    assert not any(
        isinstance(each, QuantizedLinear) for each in detcompile.load_model(floats, dequantize=False).modules()
    )


@pytest.mark.parametrize(
    ("kind", "norm", "dtype"),
    [
        ("F32", "F32", torch.float32),
        ("F16", "F32", torch.float16),
        ("BF16", "F32", torch.bfloat16),
        ("Q4_0", "F16", torch.bfloat16),
    ],
)
def test_float_files_keep_their_dtype(kind: str, norm: str, dtype: torch.dtype, tmp_path: Path) -> None:
    path = write(tmp_path / "float.gguf", [kind], norm=norm)
    model = detcompile.load_model(path)
    assert_equal_bytes(model.state_dict(), values_of(path, dtype))
    read = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model, torch_dtype=dtype)
    assert_equal_bytes(model.state_dict(), read["tensors"])


def test_tokenizer_and_settings_come_from_file(small: Path) -> None:
    model = detcompile.load_model(str(small))
    tokenizer = tokenizer_of(model)
    assert tokenizer is not None
    assert [tokenizer.unk_token, tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token] == [*TOKENS[:3], None]
    assert tokenizer.convert_ids_to_tokens(tokenizer("he <eos>é").input_ids) == ["he", "Ġ", "<eos>", "Ã", "©"]
    assert tokenizer.decode(tokenizer("he , é").input_ids) == "he , é"
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "he"}], tokenize=False)
    assert chat == "<bos>he<turn>"
    settings = model.generation_config
    assert (settings.eos_token_id, settings.bos_token_id) == ([2, 3], 1)
    assert (settings.do_sample, settings.temperature, settings.top_k) == (True, 0.5, 20)
    assert (model.config.max_position_embeddings, model.config.rope_parameters["rope_theta"]) == (512, 10000.0)


@pytest.mark.parametrize(("metadata", "ids"), [(True, [1, 2]), (False, [2])])
def test_add_bos_token_is_kept(metadata: bool, ids: list[int], tmp_path: Path) -> None:
    path = write(tmp_path / "bos.gguf", ["F16"], lambda writer: writer.add_add_bos_token(metadata))
    tokenizer = tokenizer_of(detcompile.load_model(path))
    assert tokenizer is not None and tokenizer("<eos>").input_ids == ids


def test_file_is_converted_once(small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = find_checkpoint(small)
    monkeypatch.setattr(conversion, "_convert", lambda *_: pytest.fail("converted again"))
    copy = tmp_path / "copy.gguf"
    copy.write_bytes(small.read_bytes())
    assert find_checkpoint(copy).folder == first.folder
    assert (first.name, first.title) == (str(small), small.name)


def test_folders_and_repositories_have_gguf_files(small: Path, tmp_path: Path) -> None:
    folder = find_checkpoint(small).folder
    assert detcompile.load_model(small.parent, gguf_file=small.name).name_or_path == str(folder)
    with with_cache(tmp_path, offline=True):
        put_snapshot(tmp_path, "org/name", {"q8/small.gguf": small.read_bytes()})
        result = find_checkpoint("org/name:q8/small.gguf")
        assert result == (folder, "org/name:q8/small.gguf", COMMIT)
        model = detcompile.load_model("org/name", gguf_file="q8/small.gguf")
        assert tokenizer_of(model) is not None and model.config._commit_hash == COMMIT
        with pytest.raises(InvalidInput, match=r"q4\.gguf missing.*`hf download org/name q4\.gguf`"):
            find_checkpoint("org/name:q4.gguf")


@pytest.mark.parametrize("name", ["missing.gguf", "org/missing.gguf", "a/b/c:missing.gguf"])
def test_missing_file_is_named(name: str) -> None:
    with pytest.raises(InvalidInput, match=f"^{re.escape(name)}: there is no such folder or file; pass"):
        find_checkpoint(name)
    with pytest.raises(InvalidInput, match=r"gguf_file='model.bin': pass the name of a file that ends with \.gguf"):
        detcompile.load_model("org/name", gguf_file="model.bin")


def header_and_whole(path: Path) -> tuple[int, int]:
    size = path.stat().st_size
    return size - sum(tensor.num_bytes for tensor in read_header(path).tensors), size


def test_truncated_files_are_rejected(small: Path, tmp_path: Path) -> None:
    path = tmp_path / "cut.gguf"
    path.write_bytes(small.read_bytes())
    header, whole = header_and_whole(path)
    for length in (whole - 1, *range(whole - 2, header, -65_537), *range(header, 0, -7), 3, 0):
        os.truncate(path, length)
        with pytest.raises(InvalidInput, match=re.escape(str(path))):
            read_header(path)


def test_damaged_headers_raise_our_errors(small: Path, tmp_path: Path) -> None:
    path, draw, refused = tmp_path / "damaged.gguf", random.Random(0), 0
    path.write_bytes(small.read_bytes())
    header, _ = header_and_whole(path)
    with path.open("r+b", buffering=0) as file:
        for _ in range(1000):
            at, size = draw.randrange(header), draw.choice([1, 4, 8])
            file.seek(at)
            content = file.read(size)
            file.seek(at)
            file.write(draw.choice([b"\xff" * size, draw.randbytes(size), bytes(size)]))
            try:
                read_header(path)
            except (InvalidInput, UnsupportedModel) as error:
                assert str(path) in str(error)
                refused += 1
            file.seek(at)
            file.write(content)
    assert refused > 200


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def entry(name: str, *dims: int, kind: int = 0, start: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, start)


def header(values: list[bytes], tensors: list[bytes], num_values: int | None = None, num_tensors: int | None = None):
    counts = (num_tensors or len(tensors), num_values or len(values))
    return b"GGUF" + struct.pack("<IQQ", 3, *counts) + b"".join(values + tensors)


ARCHITECTURE = text("general.architecture") + struct.pack("<I", 8) + text("llama")
HUGE = 1 << 62


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is not a GGUF file: it is empty"),
        (b"version https://git-lfs", "Git LFS pointer"),
        (b"GGML", "it begins with b'GGML'"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "version 1 of GGUF; versions 2 and 3"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
        (header([], []), "no general.architecture"),
        (header([ARCHITECTURE, ARCHITECTURE], []), "general.architecture occurs twice"),
        (header([ARCHITECTURE], [], num_values=HUGE), "truncated"),
        (header([ARCHITECTURE], [], num_tensors=HUGE), f"names {HUGE} tensors"),
        (header([struct.pack("<Q", HUGE)], []), "truncated"),
        (
            header([text("a") + struct.pack("<II", 9, 0) + struct.pack("<Q", HUGE)], []),
            "name 4611686018427387904 items",
        ),
        (header([text("a") + struct.pack("<IIQ", 9, 8, 1 << 20)], []), "truncated"),
        (header([text("a") + struct.pack("<IIQ", 9, 9, 1)], []), "items of the type 9"),
        (header([text("a") + struct.pack("<I", 99)], []), "a value has the type 99"),
        (header([ARCHITECTURE], [entry("w", HUGE, HUGE)]), "truncated"),
        (header([ARCHITECTURE], [entry("w", 0)]), r"w is F32 of the shape \[0\]"),
        (header([ARCHITECTURE], [entry("w", 33, kind=8)]), r"w is Q8_0 of the shape \[33\]"),
        (header([ARCHITECTURE], [entry("w", *[1] * 5)]), "w has 5 dimensions"),
        (header([ARCHITECTURE], [entry("w", 1, kind=29)]), "w has ggml's type 29, which is not supported"),
        (header([ARCHITECTURE], [entry("w", 1, start=HUGE)]), "truncated"),
        (header([ARCHITECTURE], [entry("w", 1, start=1)]), "w begins at byte"),
        (header([ARCHITECTURE], [entry("w", 1), entry("w", 1, start=32)]), "w occurs twice"),
        (header([ARCHITECTURE], [entry("w", 1), entry("v", 1)]), "v begins at byte"),
        (header([ARCHITECTURE, text("general.alignment") + struct.pack("<II", 4, 3)], []), "alignment is 3"),
        (header([ARCHITECTURE, text("split.count") + struct.pack("<IH", 2, 3)], []), "one of 3 parts"),
        (header([ARCHITECTURE, text("general.type") + struct.pack("<I", 8) + text("mmproj")], []), "not hold a model"),
    ],
)
def test_header_is_rejected_by_name(content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(content if message == "truncated" or not content else content + bytes(64))
    with pytest.raises((InvalidInput, UnsupportedModel), match=message) as refusal:
        find_checkpoint(path)
    assert str(path) in str(refusal.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda writer: writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR),
            "llama.rope.scaling.type = 'linear'",
        ),
        (lambda writer: writer.add_sliding_window(64), "llama.attention.sliding_window = 64"),
        (lambda writer: writer.add_expert_count(8), "llama.expert_count = 8"),
        (lambda writer: writer.add_value_length(96), "llama.attention.value_length = 96"),
        (lambda writer: writer.add_tensor("rope_freqs.weight", np.ones(32, np.float32)), "place for rope_freqs.weight"),
        (lambda writer: writer.add_tensor("blk.0.attn_q.bias", np.ones(256, np.float32)), "for blk.0.attn_q.bias"),
        (lambda writer: writer.add_vocab_size(1 << 31), r"embed_tokens.weight is \[262, 256\] instead of"),
    ],
)
def test_parts_without_counterpart_are_rejected(change: Change, message: str, tmp_path: Path) -> None:
    path = write(tmp_path / "more.gguf", ["F16"], change)
    with pytest.raises((UnsupportedModel, InvalidInput), match=re.escape(message) if "[" not in message else message):
        detcompile.load_model(path)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (b"llama", b"lIama", r"\(lIama\) cannot be read by transformers"),
        (b"output_norm", b"output_form", "no place for output_form.weight"),
        (b"block_count\4\0\0\0\1\0\0\0", b"block_count\4\0\0\0\xff\xff\xff\x7f", "2147483647 layers, 11 tensors"),
        (b"block_count\4\0\0\0\1", b"block_count\4\0\0\0\2", "lacks model.layers.1"),
        (b"head_count\4\0\0\0\4", b"head_count\4\0\0\0\0", "cannot be read by transformers"),
    ],
)
def test_changed_files_are_rejected(old: bytes, new: bytes, message: str, small: Path, tmp_path: Path) -> None:
    path = tmp_path / "changed.gguf"
    content = small.read_bytes()
    assert old in content
    path.write_bytes(content.replace(old, new))
    with pytest.raises(DetcompileError, match=message):
        detcompile.load_model(path)


def test_missing_package_is_named(small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "other.gguf"
    path.write_bytes(small.read_bytes() + b"\0")
    monkeypatch.setitem(sys.modules, "gguf", None)
    monkeypatch.setitem(sys.modules, "gguf.quants", None)
    with pytest.raises(InvalidInput, match="needs the package gguf: run `pip install gguf`"):
        find_checkpoint(path)
