"""The tensors that a model's graphs read: what they hold now, whether that was changed, and new contents for them."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from detcompile.errors import InvalidInput
from detcompile.passes.programs.travelling_weights import wait_for_weights
from detcompile.weights import tensor_digest, weight_digests

__all__ = ["LiveWeights", "tensors_by_name"]

SAMPLES = 256  # elements of each tensor that a look reads
RELOAD = "load and compile the model again"


class Shares(Protocol):
    """What knows a model before ranks took shares of it (passes.sharding.shares)."""

    def whole(self, *, every_name: bool) -> Mapping[str, Tensor]:
        """Tensors of the shapes and dtypes of the whole parameters, by name."""

    def take(self, contents: Mapping[int, Tensor]) -> Mapping[str, Tensor]:
        """What this rank keeps of every parameter, by name; ``contents`` are by the id of each tensor of ``whole``."""


class LiveWeights:
    """The weights of a compiled model, or a rank's share of them.

    Args:
        held: the tensors here by name, each once.
        named: the same with every name of each; default: ``held``.
        whole: digests of the whole weights that the tensors here do not tell; of a share, all of them.
        is_share: the tensors here are a rank's share.
        shares: what takes that share of new weights.
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
        self._last: dict[str, str] | None = None  # digests, as far as they were read
        self._tensors = tuple(held().values())
        self._samples = _samples(self._tensors)
        self._version, self._writes, self._seen = 0, self._count_writes(), self._look()

    def digests(self) -> dict[str, str]:
        """The digest of every weight as it is now, whole. Reads all that is here.

        Raises:
            InvalidInput: a share was changed by something that did not tell what the whole is now.
        """
        found = weight_digests(self._held())
        if self._last is not None and found != self._last:
            self._changed()
        self._last = found
        if self._share is None:
            return self._whole | found
        changed = [name for name, digest in found.items() if self._share.get(name) != digest]
        if changed:
            raise InvalidInput(
                f"a rank's share of {changed[0]} was changed in place, which does not tell what the whole weight is"
                f" now: {RELOAD}"
            )
        return dict(self._whole)

    def given(self) -> dict[str, str]:
        """Digests of the whole weights as they were loaded, or given to ``update``; a share reads nothing for it."""
        return self.digests() if self._share is None else dict(self._whole)

    def version(self, *, look: bool = False) -> int:
        """Counts the contents that the weights have had.

        A change in place is seen by torch's version counters; those that go past them (``.data``, numpy, other
        libraries) with ``look``, which reads some elements of each tensor, or when all are read for their digests.
        """
        if self._count_writes() != self._writes or (look and not _same(self._look(), self._seen)):
            self._changed()
        return self._version

    def update(self, source: Mapping[str, Tensor]) -> int:
        """Copy new contents into the tensors that graphs read: all of them, or none if one does not fit.

        Raises:
            InvalidInput: a name, a shape or a dtype that is not the model's; or, of a share, not all parameters.
        """
        if self._share is not None:
            return self._update_share(source)
        pairs = _fitting(source, self._named())
        with torch.no_grad():
            for target, given in pairs:
                target.copy_(given)
        self._changed()
        return self._version

    def _update_share(self, source: Mapping[str, Tensor]) -> int:
        if self._shares is None:
            raise InvalidInput(f"update_weights: ranks that share this model take no new weights: {RELOAD}")
        contents = {id(target): given for target, given in _fitting(source, self._shares.whole(every_name=True))}
        canonical = self._shares.whole(every_name=False)
        missing = next((name for name, target in canonical.items() if id(target) not in contents), None)
        if missing is not None:
            raise InvalidInput(f"update_weights: {missing} is missing: where ranks share a model, give all parameters")
        named = self._named()
        with torch.no_grad():
            for name, tensor in self._shares.take(contents).items():
                named[name].copy_(tensor)
        self._whole |= weight_digests({name: contents[id(target)] for name, target in canonical.items()})
        self._share = weight_digests(self._held())
        self._changed()
        return self._version

    def _changed(self) -> None:
        self._version += 1
        self._writes, self._seen, self._last = self._count_writes(), self._look(), None

    def _count_writes(self) -> int:
        return sum(tensor._version for tensor in self._tensors)

    def _look(self) -> list[Tensor]:
        return [torch.cat(views).view(torch.uint8) for views in self._samples]


def tensors_by_name(source: object, what: str) -> dict[str, Tensor]:
    """What ``LiveWeights.update`` takes, from a module, a mapping or pairs.

    Args:
        what: a word for the source, for messages.

    Raises:
        InvalidInput: it is none of these, or holds something else than plain tensors.
    """
    held: Any = source.state_dict() if isinstance(source, nn.Module) else source
    try:
        pairs = list(held.items() if isinstance(held, Mapping) else held)
        given = dict(pairs)
    except (TypeError, ValueError) as error:
        raise InvalidInput(
            f"update_weights: {what} is neither a module in this process, a mapping, nor pairs of a name and a tensor"
        ) from error
    if len(given) < len(pairs):
        raise InvalidInput("update_weights: a name was given twice")
    for name, tensor in given.items():
        if not isinstance(name, str) or type(tensor) not in (Tensor, nn.Parameter) or tensor.is_meta:
            raise InvalidInput(
                f"update_weights: {name!r} has a {type(tensor).__name__}: give plain tensors, of a DTensor its"
                " full_tensor()"
            )
        if tensor.layout is not torch.strided or tensor.is_nested:
            what = "nested" if tensor.is_nested else f"of layout {tensor.layout}"
            raise InvalidInput(f"update_weights: {name} is {what}: give dense tensors, such as its to_dense()")
    return given


def _fitting(given: Mapping[str, Tensor], targets: Mapping[str, Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Each tensor that is to be written, once, and its new contents, which share no memory with any of them."""
    storages = {target.untyped_storage().data_ptr() for target in targets.values()}
    pairs: dict[int, tuple[str, Tensor, Tensor]] = {}
    for name, tensor in given.items():
        target = targets.get(name)
        if target is None:
            raise InvalidInput(f"update_weights: the model has no {name}. Its names are those of state_dict()")
        for what, own, other in (("shape", target.shape, tensor.shape), ("dtype", target.dtype, tensor.dtype)):
            if own != other:
                raise InvalidInput(
                    f"update_weights: {name} has {what} {_plain(other)}, the model's has {_plain(own)}: give tensors as"
                    " the model has them, so that nothing is rounded on the way"
                )
        tied = pairs.get(id(target))
        if tied is not None and tensor_digest(tied[2]) != tensor_digest(tensor):
            raise InvalidInput(f"update_weights: {tied[0]} and {name} are one weight, and were given two contents")
        own_memory = tensor.untyped_storage().data_ptr() in storages
        pairs[id(target)] = (name, target, tensor.detach().clone() if own_memory else tensor.detach())
    return [(target, tensor) for _, target, tensor in pairs.values()]


def _plain(value: object) -> object:
    return list(value) if isinstance(value, torch.Size) else value


def _samples(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """Views of some elements, spread over each tensor; together where torch can join them."""
    by_kind: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        if tensor.numel():
            views = by_kind.setdefault((tensor.dtype, tensor.device), [])
            views.append(_sample(tensor.detach()))
    return list(by_kind.values())


def _sample(tensor: Tensor) -> Tensor:
    """[n]: a view; along the longest dimension of what does not lie in one piece."""
    if tensor.is_contiguous():
        return tensor.view(-1)[:: max(1, tensor.numel() // SAMPLES)]
    longest = max(range(tensor.dim()), key=lambda dim: tensor.shape[dim])
    line = tensor.movedim(longest, -1)[(0,) * (tensor.dim() - 1)]
    return line[:: max(1, len(line) // SAMPLES)]


def _same(found: list[Tensor], seen: list[Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(found, seen))
