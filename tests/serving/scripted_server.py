"""A server over the scripted engine, on a free port: python -m tests.serving.scripted_server DRAIN [STALL], seconds."""

import asyncio
import sys

from detcompile.serving import server
from detcompile.serving.app import new_app
from tests.serving.scripted_service import SPEC, scripted


async def main() -> int:
    service = scripted()
    server.LOST_SECONDS = 0.5
    with server.listen("127.0.0.1", 0) as sock:
        app = new_app(service, "test")
        return await server.serve(service, app, SPEC, sock, *map(float, sys.argv[1:]))


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
