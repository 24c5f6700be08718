"""Load a checkpoint's folder.

Reject missing, truncated or corrupt files by path, and missing weights, which would be random.
"""

import json
import re
import sys
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
)

from detcompile.errors import DetcompileError, InvalidInput, UnsupportedModel
from detcompile.models.weight_files import WEIGHTS
from detcompile.passes.modules.quantized_checkpoints import load_quantized, quantization_of
from detcompile.transformers_internals.auto_classes import has_causal_lm

WITHOUT_DOCSTRINGS = sys.flags.optimize > 1
SETTINGS = ("config.json", "generation_config.json")  # transformers ignores a corrupt second one
TOKENIZER_JSON = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.json")
TOKENIZER_FILES = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "merges.txt", "vocab.txt")
LFS_POINTER = b"version https://git-lfs"
AGAIN = "fetch the checkpoint again"
MOST_NAMED = 8
# Scales beside a weight: fp8, compressed-tensors and ModelOpt, also of experts; bitsandbytes; AWQ's activation scales.
SCALES = re.compile(r".*((weight|proj)_(scale|zero_point)\w*|\.SCB|\.scales)")
TASKS = {"generate": AutoModelForCausalLM, "classify": AutoModelForSequenceClassification, "embed": AutoModel}
IN_WORDS = {"generate": "causal LM", "classify": "model for sequence classification", "embed": "base model"}


def task_of(config: PretrainedConfig) -> str:
    """Return a checkpoint's task, a key of TASKS, from the class it was saved from."""
    architecture = (config.architectures or [""])[0]
    if architecture.endswith("ForSequenceClassification"):
        return "classify"
    bare = architecture.endswith(("Model", "ForMaskedLM")) and not architecture.endswith("LMHeadModel")
    return "embed" if bare else "generate"


def load_checkpoint(
    path: Path,
    dtype: torch.dtype | None,
    trust_remote_code: bool = False,
    task: str | None = None,
    dequantize: bool = True,
) -> PreTrainedModel:
    """Load the model of a folder on the CPU, with every weight from the folder's files.

    Args:
        dtype: default: the checkpoint's.
        trust_remote_code: run Python code from the folder, if it has any.
        task: a key of TASKS; None: the task that the checkpoint was saved for.
        dequantize: False to keep the experts of a quantized checkpoint quantized.

    Raises:
        InvalidInput: a file is missing, truncated or corrupt; a weight is in no file; untrusted code would run; or the
            folder holds PEFT adapters.
        UnsupportedModel: the quantization is not supported.
    """
    _require_no_adapters(path)
    require_json(path, SETTINGS)
    require_trust(path / "config.json", trust_remote_code)
    for file in _weight_files(path):
        fault = _fault(file) or (_safetensors_fault(file) if file.suffix == ".safetensors" else _pickle_fault(file))
        if fault:
            raise InvalidInput(f"{file} {fault}: {AGAIN}")
    _require_one_copy(path)
    try:
        reading = {"local_files_only": not trust_remote_code, "trust_remote_code": trust_remote_code}
        config = AutoConfig.from_pretrained(path, **reading)
        settings = quantization_of(config)
        options: dict[str, Any] = {"dtype": dtype or "auto", **reading}
        options |= {"output_loading_info": True, "ignore_mismatched_sizes": True}  # mismatches are rejected below
        task = task or task_of(config)
        if settings is None:
            model, loading_info = TASKS[task].from_pretrained(path, **options)
        elif task == "generate":
            given = (path, _weight_files(path), config, settings, dequantize)
            model, loading_info = load_quantized(*given, **options)
        else:
            raise UnsupportedModel(f"{path}: a quantized {IN_WORDS[task]}; only quantized causal LMs are supported")
    except (DetcompileError, MemoryError):
        raise
    except Exception as error:  # file readers raise anything
        reason = f"{type(error).__name__}: {error}" if isinstance(error, LookupError) else error
        advice = "Run Python without -OO: transformers reads docstrings, which -OO strips"
        advice = advice if WITHOUT_DOCSTRINGS else "Pass a complete local Hugging Face model folder"
        what = IN_WORDS[task or "generate"]
        raise InvalidInput(f"{path} cannot be loaded as a {what}: {reason}\n{advice}") from error
    if task == "embed" and getattr(model, "pooler", None) is not None:
        model.pooler = None  # its output is unused, and a masked LM's checkpoint has none
        loading_info["missing_keys"] = [key for key in loading_info["missing_keys"] if not key.startswith("pooler.")]
    _require_all_weights(path, model, loading_info)
    _require_no_scales(path, loading_info)
    return model


def is_quantized(path: Path) -> bool:
    """Return whether a folder's config names a quantization."""
    file = path / "config.json"
    return file.is_file() and bool({"quantization_config", "compression_config"} & _json_object(file).keys())


def load_tokenizer(name: str, trust_remote_code: bool = False) -> Any | None:
    """Load the tokenizer of a local folder; return None if it has none that works here.

    Args:
        trust_remote_code: run Python code from the folder, if its tokenizer needs it.

    Raises:
        InvalidInput: the tokenizer is damaged.
    """
    path = Path(name)
    require_json(path, TOKENIZER_JSON)
    for file in (path / file_name for file_name in TOKENIZER_FILES):
        if file.is_file() and (fault := _fault(file)):
            raise InvalidInput(f"{file} {fault}: {AGAIN}")
    try:
        return AutoTokenizer.from_pretrained(name, local_files_only=True, trust_remote_code=trust_remote_code)
    except (OSError, ValueError):
        return None
    except Exception as error:  # mainly the tokenizers library's, which has no type of its own
        raise InvalidInput(f"{name}: its tokenizer cannot be loaded ({error}): {AGAIN}") from error


def read_weights(folder: Path) -> dict[str, Tensor]:
    """Return the tensors of a folder's safetensors files by name, in memory of this process.

    Raises:
        InvalidInput: no such files, a damaged or missing file, or a tensor that is in two files or in none.
    """
    try:
        return _read_weights(folder)
    except OSError as error:  # such as a name that is too long
        raise InvalidInput(f"{folder} cannot be read: {error.strerror}") from error


def _read_weights(folder: Path) -> dict[str, Tensor]:
    if not folder.is_dir():
        raise InvalidInput(f"{folder} is not a folder that this process can read")
    files = [path for path in _weight_files(folder) if path.suffix == ".safetensors"]
    if not files:
        raise InvalidInput(f"{folder} has no {WEIGHTS[0]} and no index of its parts")
    for path in files:
        if fault := _fault(path) or _safetensors_fault(path):
            raise InvalidInput(f"{path} {fault}")
    index = folder / f"{WEIGHTS[0]}.index.json"
    places = {} if files == [folder / WEIGHTS[0]] else _json_object(index)["weight_map"]
    tensors: dict[str, Tensor] = {}
    for path in files:
        try:
            with safe_open(path, framework="pt") as file:
                names = file.keys()
                for name in names:
                    if name in tensors or places.get(name, path.name) != path.name:
                        raise InvalidInput(f"{path} has another copy of {name}: leave one")
                    tensors[name] = file.get_tensor(name).clone()  # the file may change later
        except (OSError, SafetensorError) as error:
            raise InvalidInput(f"{path} cannot be read: {error}") from error
    lost = next((name for name in places if name not in tensors), None)
    if lost is not None:
        raise InvalidInput(f"{folder}: {places[lost]} lacks {lost}, which the index names")
    return tensors


def _require_no_adapters(path: Path) -> None:
    """Reject a PEFT adapter folder: transformers would fetch its base model from somewhere else."""
    if (path / "adapter_config.json").is_file():
        raise InvalidInput(
            f"{path} holds PEFT adapters: load their base model by its name, and pass"
            f" peft.PeftModel.from_pretrained(model, {str(path)!r})"
        )


def require_json(path: Path, names: Iterable[str]) -> None:
    """Reject files of the folder that are not JSON objects; missing files are ignored.

    Raises:
        InvalidInput: names the file.
    """
    for file in (path / name for name in names):
        if file.is_file() or file.is_symlink():
            _json_object(file)


def require_trust(file: Path, trust_remote_code: bool) -> None:
    """Reject a config that needs Python code from the checkpoint, unless that is trusted.

    Raises:
        InvalidInput: names the code.
    """
    config = _json_object(file) if file.is_file() and not trust_remote_code else {}
    code, kind = config.get("auto_map"), config.get("model_type")
    if isinstance(code, dict) and not has_causal_lm(kind):
        names = ", ".join(str(code[key]) for key in ("AutoConfig", "AutoModelForCausalLM") if key in code) or str(code)
        raise InvalidInput(
            f"{file.parent} needs Python code that comes with the checkpoint ({names}), because transformers has no"
            f" model {kind!r}: review the code, then pass trust_remote_code=True, or --trust-remote-code to a command"
        )


def _json_object(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise InvalidInput(f"{file} cannot be read as JSON ({_fault(file) or error}): {AGAIN}") from error
    if not isinstance(value, dict):
        raise InvalidInput(f"{file} is not a JSON object: {AGAIN}")
    return value


def _weight_files(path: Path) -> list[Path]:
    """Return the files that transformers will read; none if transformers itself will report the error."""
    for name in WEIGHTS:
        if (path / name).is_file() or (path / name).is_symlink():
            return [path / name]
        index = path / f"{name}.index.json"
        if index.is_file():
            places = _json_object(index).get("weight_map")
            if not isinstance(places, dict) or not all(isinstance(part, str) for part in places.values()) or not places:
                raise InvalidInput(f"{index} has no weight_map from weights to files: {AGAIN}")
            parts = sorted(set(places.values()))
            if any(Path(part).name != part for part in parts):
                raise InvalidInput(f"{index} names files outside its folder: use a checkpoint that you trust")
            return [path / part for part in parts]
    return []


def _require_one_copy(path: Path) -> None:
    """Reject a second copy of a tensor: transformers takes the copy in the file whose name sorts last."""
    index = path / f"{WEIGHTS[0]}.index.json"
    if not index.is_file() or (path / WEIGHTS[0]).exists():
        return
    places = _json_object(index)["weight_map"]
    for part in sorted(set(places.values())):
        with safe_open(path / part, framework="pt") as file:
            stale = next((name for name in file.keys() if places.get(name, part) != part), None)  # noqa: SIM118 - no dict
        if stale is not None:
            raise InvalidInput(
                f"{path / part} holds another copy of {stale}, which {index.name} maps to {places[stale]}: remove the"
                " copy from it, so that one value remains"
            )


def _fault(file: Path) -> str:
    """Return what is wrong with a file of any format, or an empty string."""
    try:
        with file.open("rb") as stream:
            start = stream.read(len(LFS_POINTER))
    except FileNotFoundError:
        return "is missing"
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    if start == LFS_POINTER:
        return "is a Git LFS pointer instead of the file (run git lfs pull)"
    return "" if start else "is empty"


def _safetensors_fault(file: Path) -> str:
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if 8 + length > size:
            return f"is truncated or damaged: {size} bytes, but its header needs {8 + length}"
        try:
            header = json.loads(stream.read(length))
            ends = [int(entry["data_offsets"][1]) for name, entry in header.items() if name != "__metadata__"]
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
            return "is damaged: its header is not a safetensors header"
    expected = 8 + length + max(ends, default=0)
    return "" if size == expected else f"is truncated or damaged: {size} bytes instead of {expected}"


def _pickle_fault(file: Path) -> str:
    with file.open("rb") as stream:
        is_zip = stream.read(2) == b"PK"
    return "is truncated or damaged: its end is missing" if is_zip and not zipfile.is_zipfile(file) else ""


def _require_all_weights(path: Path, model: PreTrainedModel, loading_info: dict[str, Any]) -> None:
    """Reject missing weights: transformers would initialize them randomly, differently in every process."""
    missing = sorted(loading_info["missing_keys"])
    missing += sorted(
        f"{key} ({list(actual)} instead of {list(expected)})"
        for key, actual, expected in loading_info["mismatched_keys"]
    )
    if missing:
        more = f" and {len(missing) - MOST_NAMED} more" if len(missing) > MOST_NAMED else ""
        raise InvalidInput(
            f"{path} lacks weights of {type(model).__name__}: {', '.join(missing[:MOST_NAMED])}{more}; they would be"
            f" random. {AGAIN.capitalize()}, or correct its config.json (tie_word_embeddings, architectures, sizes)"
        )


def _require_no_scales(path: Path, loading_info: dict[str, Any]) -> None:
    """Reject quantization scales that no loader reads: without them the weights are wrong."""
    key = next((key for key in sorted(loading_info["unexpected_keys"]) if SCALES.fullmatch(key)), None)
    if key is not None:
        raise UnsupportedModel(
            f"{path} holds {key}, a quantization scale, but its config.json declares no quantization that reads it:"
            " load an unquantized checkpoint, or one whose config.json has its quantization_config"
        )
