"""Start a server over scripted engines, on a free port and with the users' event loop:

python -m tests.serving.scripted_server DRAIN [STALL] [--replicas N] [--spare] [--restarts N] [--api-keys FILE]
"""

import argparse
import asyncio
import socket
import sys
from pathlib import Path

import uvicorn

from detcompile.serving import server
from detcompile.serving.access import KeyFile
from detcompile.serving.app import new_app
from detcompile.serving.logs import write_logs
from tests.serving.scripted_service import SPEC, scripted

SEND_BYTES = 16_384  # kernel buffer of a connection, so the server soon waits for a client that does not read


async def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("seconds", type=float, nargs="+")
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--spare", action="store_true")
    parser.add_argument("--restarts", type=int, default=0)
    parser.add_argument("--api-keys", type=Path)
    given = parser.parse_args()
    service = scripted(replicas=given.replicas, spare=given.spare, most_restarts=given.restarts)
    server.LOST_SECONDS = 0.5
    write_logs(as_json=False)
    with server.listen("127.0.0.1", 0) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BYTES)  # inherited by its connections
        keys = KeyFile(given.api_keys)
        app = new_app(service, "test", keys.digests)
        return await server.serve(service, app, SPEC, sock, *given.seconds, read_keys=keys.read_again)


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvicorn.Config("").get_loop_factory()) as runner:
        sys.exit(runner.run(main()))
