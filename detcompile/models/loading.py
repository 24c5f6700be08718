"""A checkpoint that was found, loaded as the Hugging Face module that compile() takes."""

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
    load_checkpoint,
    load_tokenizer,
    require_json,
    require_trust,
    task_of,
)
from detcompile.models.hub import Checkpoint, cached_snapshot, find_checkpoint
from detcompile.models.weight_files import weight_files
from detcompile.passes.modules.low_rank import take_adapters
from detcompile.passes.programs.travelling_weights import TravellingWeights, may_travel, travelling
from detcompile.progress import stage
from detcompile.read_ahead import read_ahead
from detcompile.runtime.requests.plain_values import flag, kind, shown
from detcompile.torch_internals.dynamo import compile_lock
from detcompile.transformers_internals.configs import commit_of, set_commit
from detcompile.weights import named_weights

__all__ = ["Load", "LoadOptions", "find", "loaded_before", "tokenizer_of"]


class LoadOptions(TypedDict, total=False):
    """How to load a model by its name, as ``api.load_model`` takes it."""

    dtype: torch.dtype | str | None
    device: str | torch.device | None
    revision: str | None
    token: str | bool | None
    trust_remote_code: bool
    task: str | None


class Load(NamedTuple):
    """What to load, and how. It can be sent to other processes, which read the same files, or on another machine
    those of the same commit on the Hub.

    Args:
        device: where the model shall be.
        dtype: dtype of the weights; None takes the checkpoint's own.
        random: take random weights for the checkpoint's config.
        trust_remote_code: run the checkpoint's own Python code, if it has any.
        task: a key of checkpoints.TASKS; None takes what the checkpoint was saved as.
    """

    checkpoint: Checkpoint
    device: torch.device
    dtype: torch.dtype | None = None
    random: bool = False
    trust_remote_code: bool = False
    task: str | None = None

    def on(self, device: torch.device) -> PreTrainedModel:
        """The model, in eval mode, on this device instead.

        Raises:
            InvalidInput: a file is missing or damaged, a weight is in none, or code would run that is not trusted.
            UnsupportedModel: quantised in a way that is not read.
        """
        folder, name, commit = self.checkpoint
        if commit is not None and not folder.exists():  # another machine
            found = find_checkpoint(name, revision=commit, weights=not self.random, code=self.trust_remote_code)
            return self._replace(checkpoint=found).on(device)
        title = self.checkpoint.title
        with compile_lock, stage(f"load {title}") as loading:  # transformers patches torch while it loads
            if self.random:
                model = self._random(device)
            else:
                model = load_checkpoint(folder, self.dtype, self.trust_remote_code, self.task).to(device).eval()
            if commit is not None:
                model.name_or_path = model.config.name_or_path = name
                set_commit(model.config, commit)
            num_bytes = sum(tensor.nbytes for tensor in named_weights(model).values())
            loading.becomes(f"load {title}, {num_bytes / 1e9:.2f} GB")
        return model

    @contextlib.contextmanager
    def under_way(self, *, beside: bool) -> Iterator[PreTrainedModel]:
        """The model on its device, to be compiled within; as ``on``.

        Args:
            beside: large weights may still be on their way to the device, where nothing looks at them before.
        """
        model = None if self.random or not beside else self.on(torch.device("cpu"))
        if model is None:
            yield self.on(self.device)
        elif may_travel(model):
            with travelling(TravellingWeights(model, self.device)):
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
        except Exception as error:  # a config may say anything
            raise InvalidInput(f"{path} is no config of a model: {type(error).__name__}: {error}") from error


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
) -> Load:
    """What to load for a name; what the Hub's cache lacks of it is fetched. ``api.load_model`` has the arguments.

    From here on the weights come from the disk, while worker processes start, say.

    Raises:
        InvalidInput: no such model, device, dtype or task, or an argument of another type.
    """
    if revision is not None and not isinstance(revision, str):
        raise InvalidInput(f"revision {shown(revision)} is {kind(revision)}: give a branch, a tag or a commit")
    if token is not None and not isinstance(token, (str, bool)):
        raise InvalidInput(f"token is {kind(token)}: give a string, or True for the one that `hf auth login` keeps")
    trust_remote_code, random = flag(trust_remote_code, "trust_remote_code"), flag(random, "random")
    if task is not None and not (isinstance(task, str) and task in TASKS):
        raise InvalidInput(f"task={task!r}: take {', '.join(map(repr, TASKS))}, or None for the checkpoint's own")
    place, chosen = _device(device), _dtype(dtype)
    found = find_checkpoint(name, revision=revision, token=token, weights=not random, code=trust_remote_code)
    if not random:
        read_ahead(weight_files(found.folder))
    return Load(found, place, chosen, random, trust_remote_code, task)


def loaded_before(module: PreTrainedModel, **how: object) -> PreTrainedModel:
    """The module, out of PEFT's wrapper if it has one, if nothing says how to load it.

    Raises:
        InvalidInput: naming what does; it is no model of transformers; or it was made in inference mode.
        UnsupportedModel: PEFT's adapters in it are not plain LoRA.
    """
    module = take_adapters(module)
    if not isinstance(module, PreTrainedModel):
        raise InvalidInput(
            f"compile() takes a model of transformers, or the name of one, and not a {type(module).__name__}; for any"
            ' other module there is torch.compile(module, backend="detcompile")'
        )
    given = [name for name, value in how.items() if value is not None and value is not False]
    if given:
        raise InvalidInput(
            f"{' and '.join(given)}: given with a module, which was loaded before; give a model's name with them, or"
            " change the module itself first, such as by model.to(device=..., dtype=...)"
        )
    for name, tensor in itertools.chain(module.named_parameters(), module.named_buffers()):
        if tensor.is_inference():
            raise InvalidInput(
                f"{name} was made in torch.inference_mode, where torch keeps no count of its changes: load the model"
                " outside of it, or give its name"
            )
    return module


def tokenizer_of(model: Any) -> Any | None:
    """The tokenizer of a module, or of what stands for it: of its folder, or of its commit in the Hub's cache.

    Code that came with the tokenizer runs where the model's did.

    Raises:
        InvalidInput: it is damaged.
    """
    commit = commit_of(model.config)
    snapshot = None if commit is None else cached_snapshot(model.name_or_path, commit)
    folder = getattr(model, "tokenizer_folder", None) or snapshot or model.name_or_path
    trusted = type(model.config).__module__.startswith("transformers_modules.")
    with compile_lock:
        return load_tokenizer(str(folder), trusted) if folder else None


def _dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    """A dtype, or the name of one, as transformers takes them; None for "auto", the checkpoint's own."""
    if dtype is None or dtype == "auto":
        return None
    found = getattr(torch, dtype.removeprefix("torch."), None) if isinstance(dtype, str) else dtype
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise InvalidInput(f"dtype={dtype!r} is no dtype of a model here: take float32, bfloat16 or float16, or 'auto'")
    return found


def _device(device: str | torch.device | None) -> torch.device:
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if not isinstance(device, (str, torch.device)):
        raise InvalidInput(f"device {shown(device)} is {kind(device)}: give cpu or cuda")
    try:
        chosen = torch.device(device)
    except RuntimeError as error:
        raise InvalidInput(f"device={device!r}: give cpu or cuda") from error
    if chosen.type not in ("cpu", "cuda") or (chosen.type == "cuda" and not torch.cuda.is_available()):
        raise InvalidInput(f"device={device!r}: give cpu, or cuda where there is a CUDA GPU")
    return chosen
