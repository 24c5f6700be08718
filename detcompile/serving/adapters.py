"""Routes that load and unload LoRA adapters, with vLLM's bodies.

They exist only with ``--admin-key``, as those of control.py.
"""

from typing import Annotated

import msgspec
from fastapi import FastAPI, Request
from msgspec import Meta
from starlette.responses import Response

from detcompile.serving.control import body_of
from detcompile.serving.service import Service

ADAPTER_PATHS = frozenset(("/v1/load_lora_adapter", "/v1/unload_lora_adapter"))
Name = Annotated[str, Meta(min_length=1, max_length=255)]


class LoadAdapter(msgspec.Struct):
    """Body of POST /v1/load_lora_adapter."""

    lora_name: Name
    lora_path: Name
    load_inplace: bool = False


class UnloadAdapter(msgspec.Struct):
    """Body of POST /v1/unload_lora_adapter."""

    lora_name: Name
    lora_int_id: int | None = None


def add_adapters(app: FastAPI, service: Service) -> None:
    """Add the routes."""

    async def load(request: Request) -> Response:
        body = await body_of(request, service, LoadAdapter)
        service.require_ready()
        await service.load_adapter(body.lora_name, body.lora_path, replace_loaded=body.load_inplace)
        return Response(f"Success: LoRA adapter '{body.lora_name}' added successfully.", media_type="text/plain")

    async def unload(request: Request) -> Response:
        body = await body_of(request, service, UnloadAdapter)
        service.require_ready()
        await service.unload_adapter(body.lora_name)
        return Response(f"Success: LoRA adapter '{body.lora_name}' removed successfully.", media_type="text/plain")

    for path, route in (("/v1/load_lora_adapter", load), ("/v1/unload_lora_adapter", unload)):
        name = path.strip("/").replace("/", "_")
        app.add_api_route(path, route, methods=["POST"], name=name, response_model=None)
