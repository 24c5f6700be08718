"""Control routes, by vLLM's names and with its bodies: pause, sleep, caches, LoRA adapters, facts for a trainer.

They exist only with ``--admin-key``. access.py lets only admin keys pass.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from fastapi import FastAPI, Query, Request
from msgspec import Meta
from starlette.responses import Response

from detcompile.digests import weights_digest
from detcompile.errors import StorageError
from detcompile.serving.access import owner_of
from detcompile.serving.engines.answers import AuxiliaryTask
from detcompile.serving.engines.fleet import POLL_SECONDS, SLEEP
from detcompile.serving.http_errors import HTTPError
from detcompile.serving.limiter import Reservation
from detcompile.serving.openai.schema import decode_body, decoded_body
from detcompile.serving.responses import JSON
from detcompile.serving.service import Service
from detcompile.serving.weight_store import WeightStore
from detcompile.serving.weight_updates import InitInfo, UpdateInfo, WeightUpdates, require_version

CONTROL_PATHS = frozenset((
    "/abort_requests", "/collective_rpc", "/finish_weight_update", "/get_world_size", "/init_weight_transfer_engine",
    "/is_paused",
    "/is_sleeping", "/pause", "/reset_prefix_cache", "/resume", "/server_info", "/shutdown_weight_transfer_engine",
    "/sleep", "/start_weight_update", "/update_weight_version", "/update_weights", "/wake_up", "/weight_checker",
    "/weight_info",
))  # fmt: skip
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
RELOADS = "/load_lora_adapter", "/skyrl/v1/load_lora_adapter"  # of prime-rl and SkyRL: replace a loaded adapter
ADAPTER_PATHS = frozenset((LOAD, UNLOAD, *RELOADS))
PAUSE, CLEAR = "pause", "clear"  # reasons of holds
MOST_PATH_BYTES = 4095
MOST_ADAPTERS = 1 << 20  # reported as vLLM's max_loras; any number of adapters can be loaded
Mode = Literal["abort", "wait", "keep"]
Tag = Literal["weights", "kv_cache"]
Name = Annotated[str, Meta(min_length=1, max_length=255)]
Body = TypeVar("Body")


class AbortRequest(msgspec.Struct):
    """Body of POST /abort_requests: ids of requests to end; all requests without ids."""

    request_ids: list[str] | None = None


class InitRequest(msgspec.Struct):
    """Body of POST /init_weight_transfer_engine: the address of a trainer as ``InitInfo``; none for CUDA IPC."""

    init_info: dict[str, Any]


class StartRequest(msgspec.Struct):
    """Body of POST /start_weight_update; tensors have the names and shapes of checkpoints.

    Attributes:
        partial: keep the weights that are not sent.
    """

    is_checkpoint_format: Literal[True] | None = None
    partial: bool = False


class UpdateRequest(msgspec.Struct):
    """Body of POST /update_weights: a folder of safetensors files and its version, or tensors that a trainer sends.

    Attributes:
        partial: keep the weights that the folder lacks, or that are not sent.
    """

    weight_dir: str | None = None
    partial: bool = False
    weight_version: str | None = None
    update_info: UpdateInfo | None = None


class FinishRequest(msgspec.Struct):
    """Body of POST /finish_weight_update: the version of the new weights."""

    weight_version: str | None = None


class CallRequest(msgspec.Struct):
    """Body of POST /collective_rpc: SkyRL's calls of methods of its vLLM workers, for the routes of weight updates."""

    method: Literal[
        "skyrl_start_weight_update", "update_weights_nccl", "update_weights_ipc", "skyrl_finish_weight_update"
    ]
    kwargs: dict[str, Any] = {}


class VersionRequest(msgspec.Struct):
    """Body of POST /update_weight_version: a new version for the served weights."""

    new_version: str


class CheckRequest(msgspec.Struct):
    """Body of POST /weight_checker: digests of tensors to return or compare."""

    action: Literal["checksum", "compare", "reset"]
    baseline: dict[str, str] | None = None
    checksums: list[dict[str, str]] | None = None


class LoadAdapter(msgspec.Struct):
    """Body of POST /v1/load_lora_adapter."""

    lora_name: Name
    lora_path: Name
    load_inplace: bool = False


class UnloadAdapter(msgspec.Struct):
    """Body of POST /v1/unload_lora_adapter."""

    lora_name: Name
    lora_int_id: int | None = None


def add_control(app: FastAPI, service: Service, store: WeightStore | None = None) -> None:
    """Add the control routes.

    Args:
        store: keeps new weights; None keeps none.
    """
    changing = asyncio.Lock()  # held by one change at a time
    updates = WeightUpdates(service, changing, store)

    async def updated(update: Awaitable[None]) -> None:
        async with updates.updating:
            try:
                await update
            except StorageError as error:
                raise HTTPError(503, str(error), code="storage_error") from error

    async def pause(
        mode: Mode = "abort", wait_for_inflight_requests: bool = False, clear_cache: bool = True
    ) -> Response:
        async with changing:
            mode = "wait" if wait_for_inflight_requests else mode
            await _stop(service, PAUSE, mode)
            if clear_cache and mode != "keep":
                await _clear_caches(service)
        return _json({"status": "paused"})

    async def resume() -> Response:
        service.end_hold(PAUSE)
        return _json({"status": "resumed"})

    async def is_paused() -> Response:
        return _json({"is_paused": service.fleet.holds(PAUSE)})

    async def abort_requests(request: Request) -> Response:
        body = await _body_of(request, service, AbortRequest)
        return _json({"status": "aborted", "aborted": _abort(service, body.request_ids)})

    async def reset_prefix_cache() -> Response:
        async with changing:
            service.require_ready()
            await _clear_caches(service)
        return _json({"success": True})

    async def sleep(level: int = 1, mode: Mode = "abort") -> Response:
        if level not in (1, 2):
            raise HTTPError(400, f"level must be 1 or 2, got {level}: POST /pause stops answers only", param="level")
        async with updates.updating, changing:
            if not service.fleet.keeps_weights:
                advice = "give --weights FOLDER, or send whole ones from a folder"
                raise HTTPError(
                    409, f"the new weights are not stored, so sleep would lose them: {advice}", code="not_kept"
                )
            if not service.fleet.holds(SLEEP):
                await _stop(service, SLEEP, mode)
                await service.fleet.all_ready()
                await service.fleet.sleep()
        return Response()

    async def wake_up(tags: list[Tag] = Query(default=[])) -> Response:
        async with changing:
            if service.fleet.holds(SLEEP):
                await service.fleet.wake()
                if not tags or "kv_cache" in tags:
                    service.end_hold(SLEEP)
        return Response()

    async def is_sleeping() -> Response:
        return _json({"is_sleeping": service.fleet.holds(SLEEP)})

    async def get_world_size(include_dp: bool = True) -> Response:
        return _json({"world_size": len(service.fleet.links) if include_dp else 1})

    async def server_info(config_format: Literal["text", "json"] = "text") -> Response:
        service.require_ready()
        config = _config(service)
        return _json({"vllm_config": config if config_format == "json" else str(config)})

    async def update_weights(request: Request) -> Response:
        body = await _body_of(request, service, UpdateRequest)
        require_version(body.weight_version)
        if (body.weight_dir is None) == (body.update_info is None):
            raise HTTPError(400, "weight_dir or update_info: give one of them", param="weight_dir")
        if body.weight_dir is not None:
            if not 0 < len(body.weight_dir.encode()) <= MOST_PATH_BYTES or "\0" in body.weight_dir:
                raise HTTPError(400, "weight_dir: give the path of a folder", param="weight_dir")
            await updated(updates.load(body.weight_dir, body.weight_version, partial=body.partial))
        elif body.update_info is not None:
            await updated(updates.receive(body.update_info, partial=body.partial))
        return _json({"status": "ok", "message": "Weights updated", **_weight_info(service)})

    async def init_weight_transfer_engine(request: Request) -> Response:
        body = await _body_of(request, service, InitRequest)
        if body.init_info.keys() - {"packed"}:  # CUDA IPC needs no address
            await updates.join(decode_body(msgspec.json.encode(body.init_info), InitInfo))
        else:
            await updates.prepare_ipc()
        return _json({"message": "Weight transfer initialized"})

    async def shutdown_weight_transfer_engine() -> Response:
        await updates.leave()
        return _json({"message": "Weight transfer shut down"})

    async def start_weight_update(request: Request) -> Response:
        body = await _body_of(request, service, StartRequest)
        await updated(updates.begin(partial=body.partial))
        return _json({"message": "Weight update started"})

    async def finish_weight_update(request: Request) -> Response:
        body = await _body_of(request, service, FinishRequest)
        require_version(body.weight_version)
        await updated(updates.finish(body.weight_version))
        return _json({"message": "Weight update finished", **_weight_info(service)})

    async def collective_rpc(request: Request) -> Response:
        body = await _body_of(request, service, CallRequest)
        given = msgspec.json.encode(body.kwargs)
        if body.method == "skyrl_start_weight_update":
            await updated(updates.begin(partial=decode_body(given, StartRequest).partial))
        elif body.method == "skyrl_finish_weight_update":
            await updated(updates.finish(decode_body(given, FinishRequest).weight_version))
        else:
            info = decode_body(given, UpdateRequest).update_info
            if info is None:
                raise HTTPError(400, "kwargs: update_info is missing", param="kwargs")
            await updated(updates.receive(info))
        return _json({"results": [None] * len(service.fleet.links)})

    async def update_weight_version(request: Request) -> Response:
        body = await _body_of(request, service, VersionRequest)
        require_version(body.new_version)
        await updated(updates.rename(body.new_version))
        return _json({"success": True, "new_version": body.new_version})

    async def weight_checker(request: Request) -> Response:
        body = await _body_of(request, service, CheckRequest)
        if body.action == "reset":
            raise HTTPError(400, "action: reset is not supported, it would serve random weights", param="action")
        if body.action == "compare" and body.baseline is None:
            raise HTTPError(400, "baseline: action compare needs the digests of a baseline", param="baseline")
        async with changing:
            digests = await updates.digests()
        return _json(digests if body.baseline is None else _comparison(body, digests["checksums"]))

    async def weight_info() -> Response:
        service.require_ready()
        return _json(_weight_info(service))

    for post in (
        pause, resume, abort_requests, reset_prefix_cache, sleep, wake_up, weight_checker, update_weights,
        update_weight_version, collective_rpc,
        init_weight_transfer_engine, shutdown_weight_transfer_engine, start_weight_update, finish_weight_update,
    ):  # fmt: skip
        app.add_api_route(f"/{post.__name__}", post, methods=["POST"], name=post.__name__, response_model=None)
    gets: tuple[Callable[..., Awaitable[Response]], ...] = (
        is_paused, is_sleeping, get_world_size, server_info, weight_info,
    )  # fmt: skip
    for get in gets:
        name = get.__name__
        app.add_api_route(f"/{name}", get, methods=["GET"], name=name, response_model=None)
        app.add_api_route(f"/{name}", get, methods=["HEAD"], include_in_schema=False, response_model=None)


def add_adapters(app: FastAPI, service: Service) -> None:
    """Add the routes that load and unload LoRA adapters."""

    async def load(request: Request) -> Response:
        body = await _body_of(request, service, LoadAdapter)
        service.require_ready()
        in_place = body.load_inplace or request.url.path in RELOADS
        await service.load_adapter(body.lora_name, body.lora_path, replace_loaded=in_place)
        return Response(f"Success: LoRA adapter '{body.lora_name}' added successfully.", media_type="text/plain")

    async def unload(request: Request) -> Response:
        body = await _body_of(request, service, UnloadAdapter)
        service.require_ready()
        await service.unload_adapter(body.lora_name)
        return Response(f"Success: LoRA adapter '{body.lora_name}' removed successfully.", media_type="text/plain")

    for path, route in ((LOAD, load), (UNLOAD, unload), *((path, load) for path in RELOADS)):
        name = path.strip("/").replace("/", "_")
        app.add_api_route(path, route, methods=["POST"], name=name, response_model=None)


async def _stop(service: Service, reason: str, mode: Mode) -> None:
    """Hold all answers. ``mode`` says whether running ones are aborted, finish first, or are held, too.

    Raises:
        HTTPError: 409 if the hold was ended meanwhile.
    """
    service.require_ready()
    if mode == "abort":
        _abort(service, None)
    service.hold(reason, interrupt=mode != "wait")
    while service.fleet.has_running:
        await asyncio.sleep(POLL_SECONDS)
        if not service.fleet.holds(reason):
            raise HTTPError(409, "resumed while requests were still running", code="resumed")


def _abort(service: Service, names: list[str] | None) -> int:
    """End running answers with the finish reason "abort"; return the number of their requests.

    Args:
        names: ids of replies, or ids that clients gave; None or none for all answers.
    """
    chosen = [
        answer
        for answer in service.open.values()
        if not answer.finished
        and not isinstance(answer, AuxiliaryTask)
        and (not names or not {answer.name, *answer.client_ids}.isdisjoint(names))
    ]
    for answer in chosen:
        service.fleet.cancel(answer)
        answer.abort()
    return len({answer.name for answer in chosen})


async def _clear_caches(service: Service) -> None:
    """Drop the prefixes that engines have cached. Running answers continue afterwards."""
    if service.fleet.holds(SLEEP) or service.hello.pooling is not None:  # there are none
        return
    service.hold(CLEAR, interrupt=True)
    try:
        await service.fleet.all_ready()
        await service.fleet.control("forget_prefixes")
    finally:
        service.end_hold(CLEAR)


def _config(service: Service) -> dict[str, Any]:
    """Return the parts of vLLM's configuration that this server has, by their names there."""
    hello, spec = service.hello, service.fleet.spec
    rank = spec.max_lora_rank
    return {
        "model_config": {
            "model": hello.name,
            "served_model_name": service.name,
            "dtype": hello.dtype,
            "max_model_len": hello.max_context,
            "logprobs_mode": "raw_logprobs",
        },
        "parallel_config": {
            "tensor_parallel_size": spec.tp,
            "pipeline_parallel_size": spec.pp,
            "data_parallel_size": len(service.fleet.links),
            "world_size": spec.tp * spec.pp,
        },
        "cache_config": {"block_size": hello.block_size, "num_gpu_blocks": hello.num_blocks},
        "lora_config": None if rank is None else {"max_lora_rank": rank, "max_loras": MOST_ADAPTERS},
        "weight_transfer_config": {"backend": "nccl"} if rank is None else None,
    }


def _weight_info(service: Service) -> dict[str, Any]:
    weights = service.fleet.weights
    assert weights is not None
    return {"weight_version": weights.version, "fingerprint": weights.fingerprint, "weights": weights.digest}


def _comparison(body: CheckRequest, ours: dict[str, str]) -> dict[str, Any]:
    """Compare the engines' digests, and those of others, with a baseline, by the baseline's names."""
    baseline = body.baseline or {}
    reports = [ours, *(body.checksums or [])]
    mismatches = sorted({name for name in baseline for report in reports if report.get(name) != baseline[name]})
    return {
        "match": not mismatches,
        "mismatches": mismatches,
        "ranks": [],
        "weights": weights_digest({name: ours[name] for name in baseline if name in ours}),
        "baseline": weights_digest(baseline),
    }


async def _body_of(request: Request, service: Service, kind: type[Body]) -> Body:
    """Return a request's body; an empty one is an empty object."""
    headers, reservation = request.headers, Reservation()
    if headers.get("content-length", "0") == "0" and "transfer-encoding" not in headers:
        return decode_body(b"{}", kind)
    try:
        return await decoded_body(await service.bodies.read(request, owner_of(request), reservation), kind)
    finally:
        reservation.release()


def _json(content: Any) -> Response:
    return Response(json.dumps(content), media_type=JSON)
