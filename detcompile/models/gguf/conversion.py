"""A GGUF file as a folder in transformers' format, kept in the cache by the file's digest.

The config, the names of weights and the tokenizer are those of transformers' reader. Weights are dequantized to
bfloat16, or keep the file's float type if nothing in it is quantized. With dequantize=False linears stay quantized, as
the method gguf of passes/modules/quantized_layouts.py.
"""

import functools
import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from detcompile.errors import DetcompileError, InvalidInput, UnsupportedModel
from detcompile.models.gguf.header import Header, TensorView, read_header
from detcompile.models.gguf.packing import PACKINGS, dequantized_blocks, packed_linear
from detcompile.progress import stage
from detcompile.storage import CACHE_ADVICE, cache_folder, naming
from detcompile.torch_internals.dynamo import compile_lock
from detcompile.transformers_internals.gguf import names_in_config, row_orders, state_dict_of

FOLDER = "gguf"  # in the cache
FORMAT = 1  # of the folders; raise it if they change
DIGITS = 32  # of the digest, in the name of a folder
FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
# Metadata that transformers' reader drops, and the setting of the config that must have the same value.
SAME_IN_CONFIG = {
    "attention.key_length": "head_dim",
    "attention.value_length": "head_dim",
    "attention.sliding_window": "sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "expert_count": "num_local_experts",
    "final_logit_softcapping": "final_logit_softcapping",
    "rope.dimension_count": "head_dim",
    "vocab_size": "vocab_size",
}
HARMLESS = {"attention.causal": True, "rope.scaling.type": "none", "tensor_data_layout": None}  # None: any value
STOPS = ("eos_token_id", "eot_token_id", "eom_token_id")
SPECIAL = {"bos_token": "bos_token_id", "eos_token": "eos_token_id"}
SPECIAL |= {"unk_token": "unknown_token_id", "pad_token": "padding_token_id"}
SAMPLING = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}
EXTRA = "reading a GGUF file needs the package gguf: run `pip install gguf`"


def converted(path: Path, dequantize: bool = True) -> Path:
    """Return the folder of a GGUF file's model in the cache; convert the file if the cache does not have it.

    Args:
        dequantize: False to keep linears quantized.

    Raises:
        InvalidInput: the file is missing, damaged or not a model, or the package gguf is missing.
        UnsupportedModel: transformers' reader does not know the architecture, or drops a part of the file that changes
            what the model computes.
        StorageError: the cache cannot be written.
    """
    header = read_header(path)
    status = path.stat()
    digest = _digest(path, status.st_size, status.st_mtime_ns, status.st_ino)
    parent = cache_folder(FOLDER) / f"{transformers.__version__}-{FORMAT}"
    key = digest[:DIGITS] + ("" if dequantize else "-quantized")
    folder = next(parent.glob(f"*-{key}"), parent / f"{path.stem}-{key}")
    if not folder.is_dir():
        with stage(f"convert {path.name}"), naming(folder, CACHE_ADVICE):
            parent.mkdir(exist_ok=True)
            temporary = Path(tempfile.mkdtemp(dir=parent, prefix=".new-"))
            try:
                with compile_lock:
                    _convert(path, header, temporary, dequantize)
                _move(temporary, folder)
            finally:
                shutil.rmtree(temporary, ignore_errors=True)
    return folder


@functools.cache
def _digest(path: Path, *state: int) -> str:
    """sha256 of a file; ``state`` changes if the file does."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def is_converted(folder: Path) -> bool:
    """Return True for a folder that `converted` returned."""
    return folder.parent.parent == cache_folder(FOLDER)


def _move(temporary: Path, folder: Path) -> None:
    try:
        os.rename(temporary, folder)
    except OSError:
        if not folder.is_dir():  # another process was faster
            raise


def _convert(path: Path, header: Header, folder: Path, dequantize: bool) -> None:
    """Write config, weights, tokenizer and generation settings of a GGUF file to an empty folder."""
    reading: dict[str, Any] = {"gguf_file": path.name, "local_files_only": True}
    try:
        config = AutoConfig.from_pretrained(path.parent, **reading)
        _require_all_metadata(path, header, config)
        config.dtype = _dtype(header)
        if config.num_hidden_layers > len(header.tensors):
            raise InvalidInput(f"{path} is damaged: {config.num_hidden_layers} layers, {len(header.tensors)} tensors")
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        weights, unused = state_dict_of(model, header.architecture, _values(path, header), config.dtype)
        _require_same_weights(path, model, weights, unused)
        if not dequantize:
            _keep_quantized(path, header, model, weights)
        tokenizer = AutoTokenizer.from_pretrained(path.parent, **reading)
    except (DetcompileError, OSError, MemoryError):
        raise
    except ImportError as error:
        raise InvalidInput(f"{path}: {EXTRA}") from error
    except Exception as error:  # of transformers' reader, which raises anything
        reason = f"{type(error).__name__}: {error}" if isinstance(error, LookupError) else error
        raise UnsupportedModel(
            f"{path} ({header.architecture}) cannot be read by transformers {transformers.__version__}: {reason}\nUse"
            " the checkpoint in transformers' format that it was made from"
        ) from error
    if any(name.endswith(".qweight") for name in weights):
        config.quantization_config = {"quant_method": "gguf"}
    config.architectures = [type(model).__name__]
    config.save_pretrained(folder)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    _special_tokens(tokenizer, header)
    tokenizer.save_pretrained(folder)
    GenerationConfig(**_generation_settings(header)).save_pretrained(folder)


def _dtype(header: Header) -> torch.dtype:
    """Return the dtype of the weights: bfloat16 if a tensor is quantized, else the smallest that the file has."""
    types = {each.type for each in header.tensors}
    if any(each.is_quantized for each in types):
        return torch.bfloat16
    return min((FLOATS[each.name] for each in types), key=lambda dtype: dtype.itemsize, default=torch.float32)


def _values(path: Path, header: Header) -> Iterator[tuple[str, np.ndarray]]:
    """Yield each tensor's name in the file and its values in float32."""
    for each in header.tensors:
        yield each.name, dequantized_blocks(_stored(path, each), each.type)


def _stored(path: Path, tensor: TensorView) -> np.ndarray:
    """Return the bytes of a tensor's rows."""
    data = np.memmap(path, np.uint8, "r", tensor.start, (tensor.num_bytes,))
    return data.reshape(*tensor.shape[:-1], tensor.shape[-1] // tensor.type.block * tensor.type.size)


def _keep_quantized(path: Path, header: Header, model: Any, weights: dict[str, Tensor]) -> None:
    """Replace the weights of linears, without the language-model head, by their quantized parts, in place."""
    quantized = {each.name: each for each in header.tensors if each.type.name in PACKINGS and len(each.shape) == 2}
    orders = row_orders(model, header.architecture, {name: each.shape for name, each in quantized.items()})
    head = model.get_output_embeddings()
    for linear, module in model.named_modules():
        if type(module) is nn.Linear and module is not head and f"{linear}.weight" in orders:
            name, rows = orders[f"{linear}.weight"]
            parts = packed_linear(_stored(path, quantized[name])[rows.numpy()], quantized[name].type)
            del weights[f"{linear}.weight"]
            weights |= {f"{linear}.{part}": tensor for part, tensor in parts.items()}


def _require_all_metadata(path: Path, header: Header, config: Any) -> None:
    """Reject metadata of the architecture that transformers' reader drops.

    Raises:
        UnsupportedModel: naming them.
    """
    known = names_in_config(header.architecture, config.model_type)
    prefix = f"{header.architecture}."
    for key, value in header.metadata.items():
        name = key.removeprefix(prefix)
        if name == key or name in known or (name in HARMLESS and HARMLESS[name] in (None, value)):
            continue
        if name not in SAME_IN_CONFIG or getattr(config, SAME_IN_CONFIG[name], None) != value:
            raise UnsupportedModel(
                f"{path}: transformers {transformers.__version__} has no setting for {key} = {value!r}, without which"
                " the model would compute something else: use the checkpoint in transformers' format"
            )


def _require_same_weights(path: Path, model: Any, weights: dict[str, torch.Tensor], unused: list[str]) -> None:
    """Reject a file whose tensors are not exactly the model's.

    Raises:
        UnsupportedModel: naming a tensor that the model has no place for.
        InvalidInput: naming a weight that is missing, or has another shape.
    """
    if unused:
        raise UnsupportedModel(
            f"{path}: {type(model).__name__} of transformers {transformers.__version__} has no place for {unused[0]}:"
            " use the checkpoint in transformers' format"
        )
    expected = {name: tensor.shape for name, tensor in model.state_dict().items()}
    for name, shape in expected.items():
        if name not in weights and name not in model.all_tied_weights_keys:
            raise InvalidInput(f"{path} is damaged: it lacks {name} of {type(model).__name__}")
        if name in weights and weights[name].shape != shape:
            raise InvalidInput(f"{path} is damaged: {name} is {list(weights[name].shape)} instead of {list(shape)}")


def _special_tokens(tokenizer: Any, header: Header) -> None:
    """Set the tokenizer's special tokens by the file's ids: transformers' reader mistakes some."""
    metadata = {key.removeprefix("tokenizer.ggml."): value for key, value in header.metadata.items()}
    tokens = metadata.get("tokens", [])
    for token, key in SPECIAL.items():
        at = metadata.get(key)
        setattr(tokenizer, token, tokens[at] if isinstance(at, int) and at < len(tokens) else None)
    tokenizer.clean_up_tokenization_spaces = False
    adds = metadata.get("add_bos_token", metadata.get("model") == "llama")  # llama.cpp's default
    if hasattr(tokenizer, "add_bos_token") and tokenizer.bos_token is not None:
        tokenizer.add_bos_token = bool(adds)
    if "tokenizer.chat_template" in header.metadata:
        tokenizer.chat_template = header.metadata["tokenizer.chat_template"]


def _generation_settings(header: Header) -> dict[str, Any]:
    """Return the file's settings under the names of transformers' generation_config."""
    metadata = header.metadata
    stops = [metadata[key] for key in (f"tokenizer.ggml.{name}" for name in STOPS) if key in metadata]
    settings: dict[str, Any] = {"eos_token_id": list(dict.fromkeys(stops)) or None}
    settings["bos_token_id"] = metadata.get("tokenizer.ggml.bos_token_id")
    settings["pad_token_id"] = metadata.get("tokenizer.ggml.padding_token_id")
    for name, setting in SAMPLING.items():
        if (value := metadata.get(f"general.sampling.{name}")) is not None:
            settings[setting] = value
    if "temperature" in settings:
        settings["do_sample"] = settings["temperature"] > 0
        if not settings["do_sample"]:
            del settings["temperature"]
    return {name: value for name, value in settings.items() if value is not None}
