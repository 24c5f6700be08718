"""A server over scripted engines, on a free port and the loop that users have:

    python -m tests.serving.scripted_server DRAIN [STALL] [--replicas N] [--spare] [--restarts N]
"""

import argparse
import asyncio
import sys

import uvicorn

from detcompile.serving import server
from detcompile.serving.app import new_app
from tests.serving.scripted_service import SPEC, scripted


async def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("seconds", type=float, nargs="+")
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--spare", action="store_true")
    parser.add_argument("--restarts", type=int, default=0)
    given = parser.parse_args()
    service = scripted(replicas=given.replicas, spare=given.spare, most_restarts=given.restarts)
    server.LOST_SECONDS = 0.5
    with server.listen("127.0.0.1", 0) as sock:
        app = new_app(service, "test")
        return await server.serve(service, app, SPEC, sock, *given.seconds)


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvicorn.Config("").get_loop_factory()) as runner:
        sys.exit(runner.run(main()))
