"""WeightUpdates: new weights for all engines at once, so that engines never serve different versions.

Every engine reads and checks the new weights while it serves the old ones. Then all answers pause, every engine
writes, and the answers continue: those that had started draw their next tokens with the new weights.
"""

import asyncio
import logging
import time
from collections.abc import Coroutine, Iterable
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, structs

from detcompile.errors import DetcompileError, InvalidInput
from detcompile.serving.engines.engine_link import EngineLink
from detcompile.serving.engines.protocol import EngineSpec, Weights
from detcompile.serving.http_errors import HTTPError
from detcompile.serving.service import Service
from detcompile.serving.weight_store import Kept, WeightStore

UPDATE = "update"  # reason of a hold
MOST_LETTERS = 200  # of a version's name
MOST_RANKS = 1 << 20
MOST_SECONDS = 3600.0
BUCKET_BYTES, TIMEOUT_SECONDS = 1 << 30, 300.0  # weight_transfer's, which imports torch
SAVED = "model.safetensors"
MOST_DIMS = 16
Size = Annotated[int, Meta(ge=1, lt=1 << 40)]
logger = logging.getLogger(__name__)


class InitInfo(msgspec.Struct):
    """A trainer's address and sending mode, by vLLM's names. The trainer is rank 0."""

    master_address: Annotated[str, Meta(min_length=1, max_length=255)]
    master_port: Annotated[int, Meta(ge=1, le=65535)]
    rank_offset: Annotated[int, Meta(ge=1, le=MOST_RANKS)]
    world_size: Annotated[int, Meta(ge=2, le=MOST_RANKS)]
    packed: bool = False
    packed_buffer_size_bytes: Size = BUCKET_BYTES
    timeout_seconds: Annotated[float, Meta(gt=0, le=MOST_SECONDS)] = TIMEOUT_SECONDS  # to join, and for each broadcast


class UpdateInfo(msgspec.Struct):
    """Tensors that a trainer is about to send, or has in the memory of the engines' GPUs, by vLLM's names.

    Trainers for vLLM before 0.28 say here whether tensors are packed, later ones in ``InitInfo``.
    """

    names: list[str]
    dtype_names: list[str]
    shapes: list[Annotated[list[Annotated[int, Meta(ge=0, lt=1 << 40)]], Meta(max_length=MOST_DIMS)]]
    packed: bool | None = None
    packed_buffer_size_bytes: Size | None = None
    update_kind: Literal["dense"] = "dense"
    ipc_handles_pickled: str | None = None
    tensor_sizes: list[int] | None = None  # bytes in a packed CUDA IPC buffer; they follow from dtypes and shapes


class WeightUpdates:
    """Updates a service's weights. Updates run one after another.

    Args:
        changing: held while engines change what they serve.
        store: keeps the current weights; None keeps none.

    Attributes:
        updating: held by an update from its start, also while engines wait for a trainer.
    """

    def __init__(self, service: Service, changing: asyncio.Lock, store: WeightStore | None = None) -> None:
        self._service = service
        self._changing = changing
        self._store = store
        self.updating = asyncio.Lock()
        self._members: list[EngineLink] = []  # engines that have joined a weight transfer
        self._transfer: list[asyncio.Task[dict[str, Any]]] = []  # actions of engines that wait for a trainer
        self._buckets = {"packed": False, "bucket_bytes": BUCKET_BYTES}  # how the trainer sends, by its ``InitInfo``
        self._started = False  # between ``begin`` and ``finish``
        self._partial = False  # keep the weights that this update does not send
        self._received: list[str] = []  # names of this update

    async def load(self, folder: str, version: str | None, *, partial: bool = False) -> None:
        """Serve the weights of a folder, which the engines can read.

        Args:
            partial: keep the weights that the folder lacks.

        Raises:
            InvalidInput: they do not fit the model or cannot be read; nothing has changed.
            DetcompileError: an engine or the store failed; nothing has changed.
        """
        await self._require_engines()
        fleet = self._service.fleet
        how = {"partial": True, "current": fleet.spec.weights} if partial else {}
        try:
            await fleet.control("load", path=folder, **how)
            await fleet.control("check")
            served: str | None = folder
            if partial:
                served = await self._saved()
            elif self._store is not None:
                copy = self._store.new_folder(self._current.number + 1)
                await asyncio.to_thread(self._store.copy, Path(folder), copy)
                served = str(copy)
            await self._switch(served, version)
        except BaseException:
            await self._drop()
            raise

    async def join(self, info: InitInfo) -> None:
        """Make every engine join a weight transfer. This ends a transfer that runs.

        Raises:
            InvalidInput: the group is too small, or it does not come together in time.
            DetcompileError: an engine failed.
            HTTPError: 409 if a later call ended this one.
        """
        await self._require_engines()
        links = list(self._service.fleet.links)
        if info.rank_offset + len(links) > info.world_size:
            raise InvalidInput(
                f"world_size {info.world_size} is too small: {len(links)} engines join from rank {info.rank_offset} on"
            )
        self._end_transfer()
        self._buckets = {"packed": info.packed, "bucket_bytes": info.packed_buffer_size_bytes}
        where: dict[str, Any] = {"address": info.master_address, "port": info.master_port, "size": info.world_size}
        where["seconds"] = info.timeout_seconds
        await self._wait(link.control("join", {**where, "rank": info.rank_offset + i}) for i, link in enumerate(links))
        self._members = links

    async def prepare_ipc(self) -> None:
        """Check that every engine can map the memory of another process.

        Raises:
            InvalidInput: an engine is not on a GPU.
            DetcompileError: an engine failed.
        """
        await self._require_engines()
        await self._service.fleet.control("prepare_ipc")

    async def leave(self) -> None:
        """Make every engine leave the weight transfer. This ends a transfer that runs.

        Raises:
            DetcompileError: an engine failed.
        """
        self._end_transfer()
        await self._require_engines()
        await self._service.fleet.control("leave")

    def _end_transfer(self) -> None:
        self._members = []
        for task in self._transfer:
            task.cancel()

    async def _wait(self, actions: Iterable[Coroutine[Any, Any, dict[str, Any]]]) -> None:
        """Run actions of engines that wait for a trainer, up to the first failure."""
        self._transfer = tasks = [asyncio.create_task(action) for action in actions]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            if any(task.cancelled() for task in done):
                raise HTTPError(409, "another call ended this weight transfer", code="transfer_ended")
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()

    async def begin(self, *, partial: bool = False) -> None:
        """Start an update of several ``receive``. One that was not finished is forgotten.

        Args:
            partial: keep the weights that it does not send.
        """
        await self._require_engines()
        await self._drop()
        self._started, self._partial = True, partial

    async def receive(self, info: UpdateInfo, *, partial: bool = False) -> None:
        """Receive tensors in every engine. Without ``begin`` they are the whole update, which is finished at once.

        Args:
            partial: without ``begin``: keep the weights that are not sent.

        Raises:
            InvalidInput: the lists differ in length, or the transfer broke off; nothing has changed.
            DetcompileError: an engine failed.
            HTTPError: 409 if a later call ended the transfer.
        """
        lengths = {len(info.names), len(info.dtype_names), len(info.shapes)}
        if len(lengths) > 1:
            raise InvalidInput("names, dtype_names and shapes must have the same length")
        if partial and self._started and not self._partial:
            raise InvalidInput("partial: this update was started without it: give it to /start_weight_update")
        await self._require_engines()
        tensors: dict[str, Any] = {"names": info.names, "dtype_names": info.dtype_names, "shapes": info.shapes}
        given = {"packed": info.packed, "bucket_bytes": info.packed_buffer_size_bytes}
        buckets = self._buckets | {name: value for name, value in given.items() if value is not None}
        links = self._service.fleet.links
        if info.ipc_handles_pickled is not None:
            tensors["ipc_handles"] = info.ipc_handles_pickled
        elif self._members != links:
            raise InvalidInput(
                "an engine has not joined the weight transfer, perhaps because it was restarted: init it again"
            )
        try:
            await self._wait(link.control("receive", {**tensors, **buckets}) for link in links)
        except BaseException:
            await self._drop()
            raise
        self._received += info.names
        if not self._started:
            self._partial = partial
            await self._finish(None)

    async def finish(self, version: str | None) -> None:
        """Serve what was received since ``begin``.

        Raises:
            HTTPError: 409 without ``begin``.
            InvalidInput: the tensors do not fit or some are missing; nothing has changed.
            DetcompileError: an engine or the store failed; nothing has changed.
        """
        await self._require_engines()
        if not self._started:
            raise HTTPError(409, "no weight update was started: POST /start_weight_update", code="not_started")
        self._started = False
        await self._finish(version)

    async def _finish(self, version: str | None) -> None:
        fleet = self._service.fleet
        try:
            if self._partial:
                await fleet.control("keep", names=self._received, current=fleet.spec.weights)
            await fleet.control("check")
            await self._switch(await self._saved(), version)
        except BaseException:
            await self._drop()
            raise
        self._received = []

    async def _saved(self) -> str | None:
        """Write the new weights of an engine into the store; return their folder, None without a store."""
        if self._store is None:
            return None
        copy = self._store.new_folder(self._current.number + 1)
        await self._service.fleet.links[0].control("save", {"path": str(copy / SAVED)})
        return str(copy)

    async def rename(self, version: str) -> None:
        """Rename the served weights. Tokens drawn from now on carry the new name.

        Raises:
            StorageError: the store cannot be written; the name is the old one.
        """
        service = self._service
        service.require_ready()
        service.require_causal()
        async with self._changing:
            weights = structs.replace(self._current, version=version, number=self._current.number + 1)
            if self._store is not None and self._store.kept is not None:
                kept = structs.replace(self._store.kept, version=version, number=weights.number)
                await asyncio.to_thread(self._store.keep, kept)
            service.fleet.weights = weights
            service.model = service.model.with_weights(weights)
            for answer in service.open.values():
                if answer.weights is not None:
                    answer.weights = weights

    async def digests(self) -> dict[str, Any]:
        """Return the digest of every tensor, and one of all.

        Raises:
            DetcompileError: an engine failed.
            HTTPError: 500 if the engines' weights differ, which is a bug.
        """
        await self._require_engines()
        first, *others = await self._service.fleet.control("digests")
        if any(other != first for other in others):
            raise HTTPError(500, "the engines have different weights: restart the server")
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
        await service.engines_awake()

    async def _switch(self, folder: str | None, version: str | None) -> None:
        """Make the engines serve what they have staged.

        Args:
            folder: the weights, for engines that start later; None if they are in no folder.
        """
        async with self._changing:
            await self._switch_now(folder, version)

    async def _switch_now(self, folder: str | None, version: str | None) -> None:
        service, before = self._service, self._current
        number = before.number + 1
        name = str(number) if version is None else version
        spec: EngineSpec = structs.replace(service.fleet.spec, weights=folder)
        kept, store = Kept(Path(folder or "").name, name, number), self._store if folder is not None else None
        earlier = None if store is None else store.kept
        start = time.monotonic()
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
            service.end_hold(UPDATE)
        held = time.monotonic() - start
        fingerprint = self._current.fingerprint
        logger.info("serving weights %s; answers were held for %.3f s; fingerprint %s", name, held, fingerprint)
        if store is not None:
            await asyncio.to_thread(store.keep, structs.replace(kept, digest=self._current.digest))
            await asyncio.to_thread(store.clean)

    async def _drop(self) -> None:
        """Drop what engines have staged."""
        self._received = []
        for link in self._service.fleet.links:
            try:
                await link.control("drop", {})
            except DetcompileError:
                continue  # the engine was lost with what it had staged


def require_version(version: str | None) -> None:
    """Raise InvalidInput for a name that cannot be shown."""
    if version is not None and not (0 < len(version) <= MOST_LETTERS and version.isprintable()):
        raise InvalidInput(f"weight_version must have 1 to {MOST_LETTERS} printable characters")
