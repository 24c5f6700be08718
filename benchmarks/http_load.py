"""An open-loop client of completions: every request is sent when its time comes, whatever became of those before.

    python -m benchmarks.http_load < plan.json > found.json

A process of its own, so that it takes none of a server's or of an engine's time; it needs httptools, and takes uvloop
where it is. ``plan`` has ``url``, ``requests`` (a list of seconds and body) and perhaps ``key``, ``texts`` (give the
answers' texts back) and ``firsts`` (seconds to the first event of each; null for an error). Seconds of what is found
count from the start of the plan. A gap is the time between two events of a stream that hold text; an event may hold
several tokens.
"""

import asyncio
import itertools
import json
import re
import resource
import sys
import time
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

import httptools

__all__ = ["Stream", "percentiles"]

PATIENCE_SECONDS = 600.0  # for an answer
USAGE = re.compile(rb'"completion_tokens":(\d+)')
EVENT = b"data: "
DONE = b"data: [DONE]"


class Stream(asyncio.Protocol):
    """One request, and what comes back.

    Args:
        request: its bytes.
        keeps: whether the whole body is kept.

    Attributes:
        times: when each piece of the answer came.
        num_events: events of all pieces, [DONE] and that of usage among them.
        ended: set once nothing more comes.
    """

    def __init__(self, request: bytes, *, keeps: bool = False) -> None:
        self.started = self.finished = 0.0
        self.times: list[float] = []
        self.num_events = 0
        self.status = 0
        self.tail = b""
        self.parts: list[bytes] = []
        self.failure: str | None = None
        self.ended = asyncio.get_running_loop().create_future()
        self._request = request
        self._keeps = keeps
        self._parser = httptools.HttpResponseParser(self)

    def connection_made(self, transport: Any) -> None:
        """Send the request."""
        self._transport = transport
        self.started = time.monotonic()
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        """Bytes of the answer."""
        self._parser.feed_data(data)

    def on_status(self, _status: bytes) -> None:
        """The head has begun."""
        self.status = self._parser.get_status_code()

    def on_body(self, data: bytes) -> None:
        """A piece of the body: one event or several."""
        self.times.append(time.monotonic())
        self.num_events += data.count(EVENT)
        self.tail = self.tail[-1000:] + data if len(data) < 200 else data
        if self._keeps:
            self.parts.append(data)

    def on_message_complete(self) -> None:
        """The answer is whole."""
        self._end(None)
        self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """Nothing more comes."""
        self._end("the connection was lost" if exc is None else f"{type(exc).__name__}: {exc}")

    @property
    def num_tokens(self) -> int:
        """Tokens drawn, as the last event says."""
        found = USAGE.search(self.tail)
        return 0 if found is None else int(found[1])

    @property
    def error(self) -> str | None:
        """Why this is no answer; None where it is one."""
        if self.failure is not None:
            return self.failure
        if self.status != 200:
            return f"status {self.status}"
        return None if self.num_tokens and self.tail.rstrip().endswith(DONE) else "an answer without its end"

    def text(self) -> str:
        """The text of the first choice, of a stream that was kept."""
        lines = b"".join(self.parts).split(b"\n")
        events = [json.loads(line.removeprefix(EVENT)) for line in lines if line.startswith(EVENT) and line != DONE]
        return "".join(event["choices"][0]["text"] for event in events if event["choices"])

    def _end(self, failure: str | None) -> None:
        if not self.ended.done():
            self.failure, self.finished = failure, time.monotonic()
            self.ended.set_result(None)


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """P50, P90, P99 and the largest of seconds, in milliseconds."""
    if not values:
        return {}
    found = sorted(values)
    at = {f"P{share}": found[min(len(found) - 1, len(found) * share // 100)] for share in (50, 90, 99)}
    return {name: round(1e3 * value, 2) for name, value in (at | {"most": found[-1]}).items()}


async def load(plan: dict[str, Any]) -> dict[str, Any]:
    """Send what the plan has, and wait for all answers."""
    address = urlsplit(plan["url"])
    key = f"Authorization: Bearer {plan['key']}\r\n" if plan.get("key") else ""
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {address.netloc}\r\nContent-Type: application/json\r\n{key}"
    loop = asyncio.get_running_loop()
    texts = bool(plan.get("texts"))

    async def ask(seconds: float, body: dict[str, Any]) -> Stream:
        data = json.dumps(body).encode()
        stream = Stream(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data, keeps=texts)
        await asyncio.sleep(begin + seconds - time.monotonic())
        asked = time.monotonic()
        try:
            await loop.create_connection(lambda: stream, address.hostname, address.port)
            await asyncio.wait_for(stream.ended, PATIENCE_SECONDS)
        except (OSError, TimeoutError) as error:
            stream.failure = f"{type(error).__name__}: {error}"
        stream.started = asked
        return stream

    begin = time.monotonic() + 0.5
    streams = await asyncio.gather(*(ask(seconds, body) for seconds, body in plan["requests"]))
    found = summary(streams, begin)
    if plan.get("firsts"):
        found["firsts"] = [None if own.error is not None else own.times[0] - own.started for own in streams]
    return found | {"texts": [stream.text() for stream in streams]} if texts else found


def summary(streams: Sequence[Stream], begin: float) -> dict[str, Any]:
    """What came of all streams."""
    errors = [stream.error for stream in streams if stream.error is not None]
    fine = [stream for stream in streams if stream.error is None]
    # the last two pieces hold usage and [DONE] and no text, where they are pieces of their own
    told = [stream.times[: max(1, len(stream.times) - 2)] for stream in fine]
    gaps = [after - before for times in told for before, after in itertools.pairwise(times)]
    seconds = max((stream.finished for stream in streams), default=begin) - begin
    num_tokens = sum(stream.num_tokens for stream in fine)
    used = resource.getrusage(resource.RUSAGE_SELF)
    return {
        "requests": len(streams),
        "errors": len(errors),
        "first errors": errors[:5],
        "seconds": round(seconds, 3),
        "tokens": num_tokens,
        "tokens a second": round(num_tokens / seconds, 1),
        "events": sum(stream.num_events for stream in fine),
        "ms to the first event": percentiles([stream.times[0] - stream.started for stream in fine]),
        "ms between events": percentiles(gaps),
        "client CPU seconds": round(used.ru_utime + used.ru_stime, 2),
    }


def main() -> None:
    plan = json.load(sys.stdin)
    try:
        from uvloop import new_event_loop
    except ImportError:
        new_event_loop = asyncio.new_event_loop
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        json.dump(runner.run(load(plan)), sys.stdout)


if __name__ == "__main__":
    main()
