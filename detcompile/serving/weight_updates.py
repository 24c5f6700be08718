"""WeightUpdates: new weights for all engines at once. No answer meets engines of two versions.

Every engine reads and checks the new weights while it serves the old ones. Then all answers are held, every engine
writes, and the answers go on: those that had begun draw their next tokens with the new weights.
"""

import asyncio
from pathlib import Path
from typing import Any

from msgspec import structs

from detcompile.errors import DetcompileError, InvalidInput
from detcompile.serving.engines.protocol import EngineSpec, Weights
from detcompile.serving.http_errors import HTTPError
from detcompile.serving.service import Service
from detcompile.serving.weight_store import Kept, WeightStore

UPDATE = "update"  # reason of a hold
MOST_LETTERS = 200  # of a version's name


class WeightUpdates:
    """Updates a service's weights; calls must not overlap.

    Args:
        store: keeps the current weights; None keeps none.
    """

    def __init__(self, service: Service, store: WeightStore | None = None) -> None:
        self._service = service
        self._store = store

    async def load(self, folder: str, version: str | None) -> None:
        """Serve the weights of a folder, which the engines can read.

        Raises:
            InvalidInput: they do not fit the model or cannot be read; nothing has changed.
            DetcompileError: an engine or the store failed; nothing has changed.
        """
        await self._require_engines()
        try:
            await self._service.fleet.control("load", path=folder)
            place = folder
            if self._store is not None:
                kept = self._store.new_folder(self._current.number + 1)
                await asyncio.to_thread(self._store.copy, Path(folder), kept)
                place = str(kept)
            await self._switch(place, version)
        except BaseException:
            await self._drop()
            raise

    async def digests(self) -> dict[str, Any]:
        """Return the digest of every tensor, and one of all.

        Raises:
            DetcompileError: an engine failed.
            HTTPError: 500 if engines differ, which cannot be.
        """
        await self._require_engines()
        first, *others = await self._service.fleet.control("digests")
        if any(other != first for other in others):
            raise HTTPError(500, "the engines have different weights")
        return first

    @property
    def _current(self) -> Weights:
        weights = self._service.fleet.weights
        assert weights is not None
        return weights

    async def _require_engines(self) -> None:
        """Wait for all engines.

        Raises:
            HTTPError: the server does not serve, its model does not generate, or it sleeps.
        """
        service = self._service
        service.require_ready()
        service.require_causal()
        if service.fleet.is_asleep:
            raise HTTPError(409, "the engines sleep: POST /wake_up first", code="sleeping")
        await service.fleet.all_ready()

    async def _switch(self, place: str | None, version: str | None) -> None:
        """Make the engines serve what they have staged.

        Args:
            place: folder of the weights, for engines that start later; None if there is none.
        """
        service, before = self._service, self._current
        number = before.number + 1
        name = str(number) if version is None else version
        spec: EngineSpec = structs.replace(service.fleet.spec, weights=place)
        kept, store = Kept(Path(place or "").name, name, number), self._store if place is not None else None
        earlier = None if store is None else store.kept
        service.hold(UPDATE, interrupt=True)
        try:
            if store is not None:  # a server that starts from now on has the new weights
                await asyncio.to_thread(store.keep, kept)
            try:
                await service.fleet.commit(spec, Weights(name, number, "", ""))
            except BaseException:
                if store is not None:
                    store.forget() if earlier is None else store.keep(earlier)
                raise
            service.follow_weights()
        finally:
            service.go_on(UPDATE)
        if store is not None:
            await asyncio.to_thread(store.keep, structs.replace(kept, digest=self._current.digest))
            await asyncio.to_thread(store.clean)

    async def _drop(self) -> None:
        """Forget what engines have staged."""
        for link in self._service.fleet.links:
            try:
                await link.control("drop", {})
            except DetcompileError:
                continue  # it was lost, and with it what it had staged


def require_version(version: str | None) -> None:
    """Raise InvalidInput for a name that cannot be shown."""
    if version is not None and not (0 < len(version) <= MOST_LETTERS and version.isprintable()):
        raise InvalidInput(f"weight_version must have 1 to {MOST_LETTERS} printable characters")
