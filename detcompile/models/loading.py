"""Load a checkpoint as the Hugging Face module that compile() takes."""

import contextlib
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, TypedDict

import torch
from transformers import AutoConfig, PreTrainedModel

from detcompile.errors import InvalidInput
from detcompile.models.checkpoints import (
    TASKS,
    is_quantized,
    load_checkpoint,
    load_tokenizer,
    require_json,
    require_trust,
    task_of,
)
from detcompile.models.gguf.conversion import is_converted
from detcompile.models.hub import GGUF, Checkpoint, cached_snapshot, find_checkpoint
from detcompile.models.weight_files import weight_files
from detcompile.passes.modules.low_rank import take_adapters
from detcompile.passes.programs.async_weights import AsyncWeightLoad, can_load_async, loading_weights
from detcompile.progress import stage
from detcompile.read_ahead import read_ahead
from detcompile.runtime.requests.plain_values import flag, kind, shown
from detcompile.torch_internals.dynamo import compile_lock
from detcompile.transformers_internals.configs import commit_of, set_commit
from detcompile.weights import named_weights


class LoadOptions(TypedDict, total=False):
    """Arguments of ``api.load_model``, besides the name."""

    dtype: torch.dtype | str | None
    device: str | torch.device | None
    revision: str | None
    token: str | bool | None
    trust_remote_code: bool
    task: str | None
    gguf_file: str | None
    dequantize: bool | None


class Load(NamedTuple):
    """A checkpoint and how to load it.

    It can be sent to other processes, which read the same files; on another machine they use those of the same commit
    on the Hub.

    Args:
        device: the model's device.
        dtype: dtype of the weights; None: the checkpoint's.
        random: True for random weights for the checkpoint's config.
        trust_remote_code: run the checkpoint's Python code, if it has any.
        task: a key of checkpoints.TASKS; None: the task that the checkpoint was saved for.
        dequantize: False to keep the linears of a GGUF file, or the experts of a checkpoint, quantized.
    """

    checkpoint: Checkpoint
    device: torch.device
    dtype: torch.dtype | None = None
    random: bool = False
    trust_remote_code: bool = False
    task: str | None = None
    dequantize: bool = True

    def on(self, device: torch.device) -> PreTrainedModel:
        """Load the model in eval mode, on this device instead.

        Raises:
            InvalidInput: a file is missing or damaged, a weight is in no file, or untrusted code would run.
            UnsupportedModel: the quantization is not supported.
        """
        folder, name, commit = self.checkpoint
        if not folder.exists() and (commit is not None or name.endswith(GGUF)):  # another machine
            local = find_checkpoint(
                name,
                revision=commit,
                weights=not self.random,
                code=self.trust_remote_code,
                dequantize=self.dequantize,
            )
            return self._replace(checkpoint=local).on(device)
        title = self.checkpoint.title
        with compile_lock, stage(f"load {title}") as loading:  # transformers patches torch while it loads
            if self.random:
                model = self._random(device)
            else:
                how = (self.dtype, self.trust_remote_code, self.task, self.dequantize)
                model = load_checkpoint(folder, *how).to(device).eval()
            if commit is not None:
                set_commit(model.config, commit)
                if not name.endswith(GGUF):  # whose folder has the tokenizer
                    model.name_or_path = model.config.name_or_path = name
            num_bytes = sum(tensor.nbytes for tensor in named_weights(model).values())
            loading.becomes(f"load {title}, {num_bytes / 1e9:.2f} GB")
        return model

    @contextlib.contextmanager
    def under_way(self, *, beside: bool) -> Iterator[PreTrainedModel]:
        """Load the model to be compiled inside this context; raises as ``on``.

        Args:
            beside: True if large weights may still be copied to the device as long as nothing reads them.
        """
        model = None if self.random or not beside else self.on(torch.device("cpu"))
        if model is None:
            yield self.on(self.device)
        elif can_load_async(model):
            with loading_weights(AsyncWeightLoad(model, self.device)):
                yield model
        else:
            with stage(f"copy {self.checkpoint.title} to {self.device}"):
                model.to(self.device)
            yield model

    def _random(self, device: torch.device) -> PreTrainedModel:
        path, trusted = self.checkpoint.folder, self.trust_remote_code
        file = path if path.is_file() else path / "config.json"
        require_json(file.parent, [file.name])
        require_trust(file, trusted)
        try:
            config = AutoConfig.from_pretrained(path, local_files_only=not trusted, trust_remote_code=trusted)
            with torch.random.fork_rng(), torch.device(device):
                torch.manual_seed(0)
                dtype = self.dtype or config.dtype or torch.float32
                kind = TASKS[self.task or task_of(config)]
                return kind.from_config(config, dtype=dtype, trust_remote_code=trusted).eval()
        except MemoryError:
            raise
        except Exception as error:  # a config may contain anything
            raise InvalidInput(f"{path} is not a config of a model: {type(error).__name__}: {error}") from error


def find(
    name: str | Path,
    *,
    random: bool = False,
    dtype: torch.dtype | str | None = None,
    device: str | torch.device | None = None,
    revision: str | None = None,
    token: str | bool | None = None,
    trust_remote_code: bool = False,
    task: str | None = None,
    gguf_file: str | None = None,
    dequantize: bool | None = None,
) -> Load:
    """Find the model of a name and return how to load it; arguments as in ``api.load_model``.

    Missing files are downloaded from the Hub. The weights are read into the page cache in the background, while worker
    processes start, for example.

    Raises:
        InvalidInput: the model, device, dtype or task does not exist, or an argument has the wrong type.
    """
    if revision is not None and not isinstance(revision, str):
        raise InvalidInput(f"revision {shown(revision)} is {kind(revision)}: pass a branch, a tag or a commit")
    if token is not None and not isinstance(token, (str, bool)):
        raise InvalidInput(f"token is {kind(token)}: pass a string, or True for the token of `hf auth login`")
    trust_remote_code, random = flag(trust_remote_code, "trust_remote_code"), flag(random, "random")
    if task is not None and not (isinstance(task, str) and task in TASKS):
        raise InvalidInput(f"task={task!r}: use {', '.join(map(repr, TASKS))}, or None for the checkpoint's task")
    if gguf_file is not None:
        name = _with_file(name, gguf_file)
    place, wanted_dtype = _device(device), _dtype(dtype)
    dequantized = dequantize is None or flag(dequantize, "dequantize")
    checkpoint = find_checkpoint(
        name, revision=revision, token=token, weights=not random, code=trust_remote_code, dequantize=dequantized
    )
    keeps = dequantize is False and is_quantized(checkpoint.folder)
    if dequantize is not None and not keeps and not is_converted(checkpoint.folder):
        raise InvalidInput(
            f"dequantize={dequantize} is for GGUF files, but {checkpoint.name} is not one: linears of other quantized"
            " checkpoints always stay quantized (False keeps their experts quantized, too)"
        )
    if not random:
        read_ahead(weight_files(checkpoint.folder))
    return Load(checkpoint, place, wanted_dtype, random, trust_remote_code, task, dequantized)


def loaded_before(module: PreTrainedModel, **how: object) -> PreTrainedModel:
    """Return the module, without PEFT's wrapper if it has one; reject options of loading.

    Raises:
        InvalidInput: an option of loading is set; the module is not a transformers model; or it was created in
            inference mode.
        UnsupportedModel: PEFT's adapters in it are not plain LoRA.
    """
    module = take_adapters(module)
    if not isinstance(module, PreTrainedModel):
        raise InvalidInput(
            f"compile() takes a transformers model, or the name of one, not a {type(module).__name__}; for other"
            ' modules use torch.compile(module, backend="detcompile")'
        )
    chosen = {name for name, value in how.items() if value is not None}
    options = [name for name in how if name in chosen and (how[name] is not False or name == "dequantize")]
    if options:
        raise InvalidInput(
            f"{' and '.join(options)} cannot be passed with a module, which is already loaded; pass the model's name"
            " instead, or change the module itself first, for example with model.to(device=..., dtype=...)"
        )
    for name, tensor in itertools.chain(module.named_parameters(), module.named_buffers()):
        if tensor.is_inference():
            raise InvalidInput(
                f"{name} was created in torch.inference_mode, where torch does not track changes: load the model"
                " outside of it, or pass its name"
            )
    return module


def tokenizer_of(model: Any) -> Any | None:
    """Load the tokenizer of a module or its stand-in: of its folder, or of its commit in the Hub's cache.

    The tokenizer's code runs if the model's code did.

    Raises:
        InvalidInput: the tokenizer is damaged.
    """
    commit = commit_of(model.config)
    snapshot = None if commit is None else cached_snapshot(model.name_or_path, commit)
    folder = getattr(model, "tokenizer_folder", None) or snapshot or model.name_or_path
    trusted = type(model.config).__module__.startswith("transformers_modules.")
    with compile_lock:
        return load_tokenizer(str(folder), trusted) if folder else None


def _with_file(name: str | Path, gguf_file: object) -> str | Path:
    """Return the name of a GGUF file in a folder or a repository."""
    if not isinstance(gguf_file, str) or not gguf_file.endswith(GGUF):
        raise InvalidInput(f"gguf_file={gguf_file!r}: pass the name of a file that ends with {GGUF}")
    return Path(name) / gguf_file if Path(name).is_dir() else f"{name}:{gguf_file}"


def _dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    """Return a dtype, or the dtype of a name, as transformers does; None for "auto", the checkpoint's."""
    if dtype is None or dtype == "auto":
        return None
    result = getattr(torch, dtype.removeprefix("torch."), None) if isinstance(dtype, str) else dtype
    if not isinstance(result, torch.dtype) or not result.is_floating_point:
        raise InvalidInput(f"dtype={dtype!r} is not supported: use float32, bfloat16, float16 or 'auto'")
    return result


def _device(device: str | torch.device | None) -> torch.device:
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if not isinstance(device, (str, torch.device)):
        raise InvalidInput(f"device {shown(device)} is {kind(device)}: pass cpu or cuda")
    try:
        chosen = torch.device(device)
    except RuntimeError as error:
        raise InvalidInput(f"device={device!r}: pass cpu or cuda") from error
    if chosen.type not in ("cpu", "cuda") or (chosen.type == "cuda" and not torch.cuda.is_available()):
        raise InvalidInput(f"device={device!r}: pass cpu, or cuda where there is a CUDA GPU")
    return chosen
