"""LoRA adapters by name: read from PEFT's files, and copied into the slots of a compiled model before a step.

A step has rows of one adapter, or of none, so a row's bits are those of the model with this adapter alone.
"""

import contextlib
import hashlib
import json
import math
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from detcompile.errors import InvalidInput
from detcompile.weights import tensor_digest

PREFIX = "base_model.model."  # of PEFT's names
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PLAIN: dict[str, tuple[Any, ...]] = {  # supported values of fields of PEFT's LoraConfig that change the arithmetic
    "alora_invocation_tokens": (None,),
    "alpha_pattern": ({}, None),
    "arrow_config": (None,),
    "bias": ("none",),
    # PEFT changes the linear's own weight for others: pissa, olora, corda and loftq subtract what the adapter starts as
    "init_lora_weights": (True, False, None, "eva", "gaussian", "lora_ga", "mica", "orthogonal"),
    "layer_replication": (None,),
    "lora_bias": (False,),
    "modules_to_save": (None, []),
    "peft_type": ("LORA",),
    "rank_pattern": ({}, None),
    "target_parameters": (None, []),
    "trainable_token_indices": (None,),
    "use_dora": (False,),
    "use_qalora": (False,),
}
Slot = tuple[Tensor, Tensor, Tensor]  # A [R, K], B [N, R], scaling []


class Adapter(NamedTuple):
    """A loaded adapter.

    Attributes:
        name: its name in requests.
        digest: sha256 of its weights and scaling.
        parts: A [r, K] and B [N, r] by the linear's name, in the model's dtype and on its device.
        scaling: factor of B(A(x)).
    """

    name: str
    digest: str
    parts: Mapping[str, tuple[Tensor, Tensor]]
    scaling: float

    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return id(self)


class AdapterSlots:
    """The adapters of one compiled model. Thread-safe.

    Args:
        slots: A, B and scaling of every linear by name; the graph reads them.
    """

    def __init__(self, slots: Mapping[str, Slot]) -> None:
        self._slots = slots
        self._loaded: dict[str, Adapter] = {}
        self._active: Adapter | None = None
        self._lock, self._stepping = threading.Lock(), threading.RLock()

    @property
    def names(self) -> list[str]:
        """Names of the loaded adapters."""
        return list(self._loaded)

    def load(self, name: str, path: str | Path) -> Adapter:
        """Read an adapter from a folder in PEFT's format; requests may name it from then on.

        Raises:
            InvalidInput: the name is taken or empty, the folder cannot be read, or the adapter does not fit the model.
        """
        if not isinstance(name, str) or not name:
            raise InvalidInput(f"the adapter's name {name!r} must be a text that is not empty")
        adapter = read_adapter(name, Path(path), self._slots)
        with self._lock:
            if name in self._loaded:
                raise InvalidInput(f"adapter {name!r} is loaded already: unload it, or choose another name")
            self._loaded[name] = adapter
        return adapter

    def unload(self, name: str) -> None:
        """Forget an adapter. Requests that have it keep it to their end.

        Raises:
            InvalidInput: no adapter has this name.
        """
        with self._lock:
            self._require(name)
            del self._loaded[name]

    def find(self, name: str) -> Adapter:
        """Return an adapter by its name.

        Raises:
            InvalidInput: no adapter has this name.
        """
        with self._lock:
            return self._require(name)

    def with_digest(self, digest: str) -> Adapter | None:
        """Return a loaded adapter by its sha256; None if there is none."""
        with self._lock:
            return next((adapter for adapter in self._loaded.values() if adapter.digest == digest), None)

    @contextlib.contextmanager
    def active(self, adapter: Adapter | None) -> Iterator[None]:
        """Launch a step with an adapter inside, one at a time; None for the plain model."""
        with self._stepping:
            self._activate(adapter)
            yield

    @torch.no_grad()
    def _activate(self, adapter: Adapter | None) -> None:
        """Copy an adapter into the slots, unless it is there; the copies are enqueued on the device."""
        if adapter is self._active:
            return
        before = {} if self._active is None else self._active.parts
        after = {} if adapter is None else adapter.parts
        for name in before.keys() | after.keys():
            A, B, scaling = self._slots[name]
            rank = 0
            if adapter is not None and name in after:
                rank = len(after[name][0])
                A[:rank].copy_(after[name][0])
                B[:, :rank].copy_(after[name][1])
            A[rank:].zero_()
            B[:, rank:].zero_()
            scaling.fill_(adapter.scaling if adapter is not None and rank else -1.0)
        self._active = adapter

    def _require(self, name: str) -> Adapter:
        if not isinstance(name, str) or name not in self._loaded:
            raise InvalidInput(f"unknown adapter {name!r}: loaded are {', '.join(self._loaded) or 'none'}")
        return self._loaded[name]


class AdaptedForward:
    """A forward with slots, which ``Runner`` fills before each step.

    Args:
        forward: runs a step, as for Runner.
    """

    def __init__(self, forward: Any, slots: AdapterSlots) -> None:
        self._forward = forward
        self.slots = slots

    def __call__(self, *arguments: Any) -> Any:
        """Run a step."""
        return self._forward(*arguments)


def read_adapter(name: str, folder: Path, slots: Mapping[str, Slot]) -> Adapter:
    """Read an adapter in PEFT's format and check it against a model's slots.

    Raises:
        InvalidInput: the folder cannot be read, the adapter is not a plain LoRA of the model's linears, or a tensor is
            missing or has another shape; the message names it.
    """
    config = _config(folder)
    try:
        tensors = load_file(folder / WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise InvalidInput(f"adapter {folder / WEIGHTS} cannot be read: {error}") from error
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if (
        type(rank) is not int
        or rank < 1
        or not isinstance(alpha, (int, float))
        or not 0 < abs(alpha) <= torch.finfo(torch.float32).max
    ):
        raise InvalidInput(f"adapter {folder / CONFIG}: r {rank!r} must be 1 or more, lora_alpha {alpha!r} not 0")
    parts: dict[str, tuple[Tensor, Tensor]] = {}
    for key in sorted(tensors):
        module, _, part = key.removeprefix(PREFIX).rpartition(".lora_")
        if part not in ("A.weight", "B.weight") or module not in slots:
            raise InvalidInput(f"adapter {folder}: {key} is not a LoRA weight of a linear with a slot")
        if part == "A.weight":
            other = f"{key.removesuffix(part)}B.weight"
            parts[module] = _pair(folder, key, rank, (tensors[key], tensors.get(other)), slots[module])
    missing = next((key for key in tensors if key.removeprefix(PREFIX).rpartition(".lora_")[0] not in parts), None)
    if missing is not None or not parts:
        raise InvalidInput(f"adapter {folder}: the other half of {missing or 'every weight'} is missing")
    scaling = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
    content = sorted((module, tensor_digest(A), tensor_digest(B)) for module, (A, B) in parts.items())
    return Adapter(name, hashlib.sha256(repr((content, scaling)).encode()).hexdigest(), parts, scaling)


def _config(folder: Path) -> dict[str, Any]:
    try:
        config = json.loads((folder / CONFIG).read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise InvalidInput(f"adapter {folder / CONFIG} cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise InvalidInput(f"adapter {folder / CONFIG} is not a JSON object")
    for field, values in PLAIN.items():
        if field in config and config[field] not in values:
            raise InvalidInput(
                f"adapter {folder}: {field}={config[field]!r} is not supported: plain LoRA of linears is"
            )
    return config


def _pair(folder: Path, key: str, rank: int, pair: tuple[Tensor, Tensor | None], slot: Slot) -> tuple[Tensor, Tensor]:
    """Return A and B of a linear in the model's dtype and on its device."""
    (most, k), n = slot[0].shape, slot[1].shape[0]
    if rank > most:
        raise InvalidInput(f"adapter {folder}: rank {rank} is above max_lora_rank={most}: compile with a larger one")
    A, B = pair
    if B is None or A.shape != (rank, k) or B.shape != (n, rank):
        shapes = f"{list(A.shape)} and {None if B is None else list(B.shape)}"
        raise InvalidInput(f"adapter {folder}: {key} and its B have shapes {shapes}, not {[rank, k]} and {[n, rank]}")
    like: dict[str, Any] = {"device": slot[0].device, "dtype": slot[0].dtype}
    rounded = A.to(**like).contiguous(), B.to(**like).contiguous()
    is_float = A.is_floating_point() and B.is_floating_point()
    if not is_float or not all(bool(part.isfinite().all()) for part in rounded):
        raise InvalidInput(f"adapter {folder}: {key} or its B has values that are not finite {like['dtype']}")
    return rounded
