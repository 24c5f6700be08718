"""The kill switch of `detcompile serve --demo`: an engine is killed while it answers, and the answer goes on."""

import msgspec
from starlette.responses import Response

from detcompile.serving.http_errors import HTTPError
from detcompile.serving.journal.jobs import Call
from detcompile.serving.responses import JSON
from detcompile.serving.service import Service

__all__ = ["KillRequest", "kill_engine"]

RETRY_SECONDS = 20


class KillRequest(msgspec.Struct):
    """The engine with the client's answer of this id is killed; without an id, or where none has it, the busiest is."""

    id: str | None = None


async def kill_engine(service: Service, asked: KillRequest, call: Call) -> Response:
    """SIGKILL to an engine process of this machine; tells its place in the fleet and its process.

    Raises:
        HTTPError: 503 where none serves, 429 where one engine more that is lost would end the server.
    """
    service.require_engine()
    fleet = service.fleet
    if fleet.restarts_left <= 0:
        said = "as many engines were lost in a minute as the server starts again (--max-restarts): wait"
        raise HTTPError(429, said, retry_after=RETRY_SECONDS)
    own = [link for link in fleet.links if link.ready and link.pid is not None]
    if not own:
        raise HTTPError(503, "the engines run on other machines: end one there", code="unavailable")
    wanted = (call.owner, asked.id)
    serving = {answer.engine for answer in service.open.values() if (answer.owner, answer.name) == wanted}
    link = max(own, key=lambda link: (fleet.links.index(link) in serving, len(link.answers)))
    told = {"engine": fleet.links.index(link), "pid": link.pid}
    link.kill()
    return Response(msgspec.json.encode(told), media_type=JSON)
