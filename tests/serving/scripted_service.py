"""A service over the scripted engine, without a model, and a client of it."""

import contextlib
import functools
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx

from detcompile.serving.app import new_app
from detcompile.serving.engines.fleet import Fleet
from detcompile.serving.engines.launchers import LocalProcess
from detcompile.serving.engines.processes import BOUND
from detcompile.serving.engines.protocol import EngineSpec
from detcompile.serving.service import Service

__all__ = ["ENGINE", "ROOT", "SPEC", "running", "scripted"]

ROOT = Path(__file__).parents[2]
ENGINE = [*BOUND, "tests.serving.scripted_engine"]  # found from ROOT: see conftest.in_the_root
SPEC = EngineSpec(model="scripted")


def scripted(*, replicas: int = 1, spare: bool = False, most_restarts: int = 0, **options: Any) -> Service:
    """Return a service over the scripted engine."""
    item = {"replicas": replicas, "spare": spare, "most_restarts": most_restarts}
    return Service(fleet=functools.partial(Fleet, launcher=LocalProcess(ENGINE), **item), **options)


@contextlib.asynccontextmanager
async def running(
    service: Service, digests: list[bytes] | None = None, spec: EngineSpec = SPEC, **options: Any
) -> AsyncIterator[httpx.AsyncClient]:
    """Yield a client of a service whose engine is ready; ``options`` are those of the application."""
    app = new_app(service, "test", digests or [], **options)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test", timeout=30) as client:
        try:
            await service.start(spec)
            yield client
        finally:
            await service.stop()
