"""The tensors that a model's graphs read: digests, change detection and updates."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from detcompile.errors import InvalidInput
from detcompile.passes.programs.async_weights import wait_for_weights
from detcompile.torch_internals.autograd import version_of
from detcompile.weights import read_tensors, tensor_digest, weight_digests

SAMPLES = 256  # elements of each tensor that change detection compares
RELOAD = "load and compile the model again"


class NewWeights(Protocol):
    """New weights in the form that a compiled model holds."""

    @property
    def share(self) -> Mapping[str, Tensor]:
        """This rank's tensors, under every name."""

    @property
    def whole(self) -> Mapping[str, str]:
        """Digests of the whole weights."""


class Shares(Protocol):
    """The whole model before its weights were quantized or sharded (passes.sharding.shares)."""

    def whole(self, *, every_name: bool) -> Mapping[str, Tensor]:
        """Return tensors with the shapes and dtypes of the whole parameters, by name."""

    def take(self, contents: Mapping[int, Tensor]) -> NewWeights:
        """Quantize and cut new weights; ``contents`` maps ids of tensors of ``whole``."""


class LiveWeights:
    """The weights of a compiled model, or the shard that one rank or stage holds of them.

    Args:
        held: returns the local tensors by name, each once.
        named: the same under every name of tied weights; default: ``held``.
        whole: digests of the whole weights that the local tensors do not contain; for a shard, of all weights.
        is_share: the local tensors are a shard.
        shares: quantizes new weights and cuts this rank's shard out of them; None if they can be copied as they are,
            or, for a shard, not at all.
    """

    def __init__(
        self,
        held: Callable[[], Mapping[str, Tensor]],
        named: Callable[[], Mapping[str, Tensor]] | None = None,
        *,
        whole: Mapping[str, str],
        is_share: bool = False,
        shares: Shares | None = None,
    ) -> None:
        wait_for_weights()
        self._held = held
        self._named = named or held
        self._whole, self._shares = dict(whole), shares
        self._share = weight_digests(held()) if is_share else None
        self._last: dict[str, str] | None = None  # digests, if they were read
        self._tensors = tuple(held().values())
        self._samples = _samples(self._tensors)
        self._version, self._writes, self._seen = 0, self._count_writes(), self._look()

    def digests(self) -> dict[str, str]:
        """Return the current digest of every whole weight. Reads all local tensors.

        Raises:
            InvalidInput: a shard was changed in place, so the whole weight is unknown.
        """
        digests = weight_digests(self._held())
        if self._last is not None and digests != self._last:
            self._changed()
        self._last = digests
        if self._share is None:
            return self._whole | digests
        changed = [name for name, digest in digests.items() if self._share.get(name) != digest]
        if changed:
            raise InvalidInput(
                f"a rank's share of {changed[0]} was changed in place, so the whole weight is unknown: {RELOAD}"
            )
        return dict(self._whole)

    def given(self) -> dict[str, str]:
        """Return digests of the whole weights as loaded or updated; reads nothing if the tensors are a shard."""
        return self.digests() if self._share is None else dict(self._whole)

    def version(self, *, look: bool = False) -> int:
        """Return a counter that rises when weights change.

        Torch's version counters detect in-place changes. Changes that bypass them (``.data``, numpy, other libraries)
        are detected with ``look``, which compares some elements of each tensor, or when digests are read.
        """
        if self._count_writes() != self._writes or (look and not _same(self._look(), self._seen)):
            self._changed()
        return self._version

    def update(self, source: Mapping[str, Tensor]) -> int:
        """Copy new contents into the tensors that graphs read. If one does not fit, nothing is changed.

        Args:
            source: tensors of the whole model; or, if this is no shard, those that graphs read.

        Raises:
            InvalidInput: a name, shape or dtype is not the model's; or a parameter is missing, and this is a shard or
                quantized.
        """
        if self._shares is not None and not self._has_held_names(self._shares, source):
            return self._update_from_whole(self._shares, source)
        if self._share is not None:
            raise InvalidInput(f"update_weights: processes that share this model take no new weights: {RELOAD}")
        pairs = _fitting(source, self._named())
        with torch.no_grad():
            for target, source_tensor in pairs:
                target.copy_(source_tensor)
        self._changed()
        return self._version

    def require_whole(self, source: Mapping[str, Tensor]) -> None:
        """Raise InvalidInput unless these are all parameters of the whole model, in the form that ``update`` takes."""
        if self._shares is not None:
            _whole_contents(self._shares, source)

    def _has_held_names(self, shares: Shares, source: Mapping[str, Tensor]) -> bool:
        """Return whether these names are the graph's own tensors, some of them quantized, in a model without shards."""
        names = source.keys()
        held = self._share is None and names <= self._named().keys()
        return held and not names <= shares.whole(every_name=True).keys()

    def _update_from_whole(self, shares: Shares, source: Mapping[str, Tensor]) -> int:
        new = shares.take(_whole_contents(shares, source))
        held = self._named()
        missing = [name for name, target in held.items() if isinstance(target, nn.Parameter) and name not in new.share]
        assert not missing, f"the graph reads {missing[:3]}, which the new weights do not reach"
        with torch.no_grad():
            for name in held.keys() & new.share.keys():  # a stage holds those of its layers
                held[name].copy_(new.share[name])
        if self._share is not None:
            self._whole |= new.whole
            self._share = weight_digests(self._held())
        self._changed()
        return self._version

    def _changed(self) -> None:
        self._version += 1
        self._writes, self._seen, self._last = self._count_writes(), self._look(), None

    def _count_writes(self) -> int:
        return sum(version_of(tensor) for tensor in self._tensors)

    def _look(self) -> list[Tensor]:
        return [torch.cat(views).view(torch.uint8) for views in self._samples]


def _whole_contents(shares: Shares, source: Mapping[str, Tensor]) -> dict[int, Tensor]:
    """Return all parameters of a whole model, for ``Shares.take``.

    Raises:
        InvalidInput: one is missing or does not fit.
    """
    contents = {id(target): given for target, given in _fitting(source, shares.whole(every_name=True))}
    for name, target in shares.whole(every_name=False).items():
        if id(target) not in contents:
            raise InvalidInput(
                f"update_weights: {name} is missing: in exact arithmetic, and where processes share a model, give all"
                " parameters"
            )
    return contents


def tensors_by_name(source: object, what: str) -> dict[str, Tensor]:
    """Convert a module, a mapping or pairs to the argument of ``LiveWeights.update``.

    Args:
        what: the source's name in error messages.

    Raises:
        InvalidInput: the source has another type, or holds values other than plain dense tensors, or overwrites a
            tensor before it has given all of them.
    """
    held: Any = source.state_dict() if isinstance(source, nn.Module) else source
    try:
        pairs = read_tensors(held.items() if isinstance(held, Mapping) else held)
        given = dict(pairs)
    except InvalidInput:
        raise
    except (TypeError, ValueError) as error:
        raise InvalidInput(
            f"update_weights: {what} is neither a module in this process, a mapping, nor pairs of a name and a tensor"
        ) from error
    if len(given) < len(pairs):
        raise InvalidInput("update_weights: a name was given twice")
    for name, tensor in given.items():
        if not isinstance(name, str) or type(tensor) not in (Tensor, nn.Parameter) or tensor.is_meta:
            raise InvalidInput(
                f"update_weights: {name!r} has a {type(tensor).__name__}: give plain tensors, such as a DTensor's"
                " full_tensor()"
            )
        if tensor.layout is not torch.strided or tensor.is_nested:
            what = "nested" if tensor.is_nested else f"of layout {tensor.layout}"
            raise InvalidInput(f"update_weights: {name} is {what}: give dense tensors, such as its to_dense()")
    return given


def _fitting(given: Mapping[str, Tensor], targets: Mapping[str, Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Return (target, new contents) pairs, each target once. New contents share no memory with any target."""
    storages = {target.untyped_storage().data_ptr() for target in targets.values()}
    pairs: dict[int, tuple[str, Tensor, Tensor]] = {}
    for name, tensor in given.items():
        target = targets.get(name)
        if target is None:
            raise InvalidInput(f"update_weights: the model has no {name}. Names are those of its state_dict()")
        for what, expected, actual in (("shape", target.shape, tensor.shape), ("dtype", target.dtype, tensor.dtype)):
            if expected != actual:
                raise InvalidInput(
                    f"update_weights: {name} has {what} {_plain(actual)}, the model's has {_plain(expected)}: give"
                    " tensors as the model has them, so that nothing is rounded on the way"
                )
        tied = pairs.get(id(target))
        if tied is not None and tensor_digest(tied[2]) != tensor_digest(tensor):
            raise InvalidInput(f"update_weights: {tied[0]} and {name} are one weight, but got two values")
        shares_memory = tensor.untyped_storage().data_ptr() in storages
        pairs[id(target)] = (name, target, tensor.detach().clone() if shares_memory else tensor.detach())
    return [(target, tensor) for _, target, tensor in pairs.values()]


def _plain(value: object) -> object:
    return list(value) if isinstance(value, torch.Size) else value


def _samples(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """Return views of elements spread over each tensor, grouped by dtype and device."""
    by_kind: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        if tensor.numel():
            views = by_kind.setdefault((tensor.dtype, tensor.device), [])
            views.append(_sample(tensor.detach()))
    return list(by_kind.values())


def _sample(tensor: Tensor) -> Tensor:
    """Return a 1-D view [n]; for a non-contiguous tensor, along its longest dimension."""
    if tensor.is_contiguous():
        return tensor.view(-1)[:: max(1, tensor.numel() // SAMPLES)]
    longest = max(range(tensor.dim()), key=lambda dim: tensor.shape[dim])
    line = tensor.movedim(longest, -1)[(0,) * (tensor.dim() - 1)]
    return line[:: max(1, len(line) // SAMPLES)]


def _same(now: list[Tensor], before: list[Tensor]) -> bool:
    return all(map(torch.equal, now, before))
