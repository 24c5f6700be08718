"""An open-loop client of completions: each request is sent at its time, whether or not earlier ones have finished.

    python -m benchmarks.http_load < plan.json > found.json

A separate process, so that it takes no time from the server or engine. It needs httptools, and uses uvloop if
installed. ``plan`` has ``url``, ``requests`` (pairs of seconds and body) and optionally ``key``, ``texts`` (return the
answers' texts) and ``firsts`` (return seconds to each first event; null for an error). Reported seconds count from the
start of the plan. A gap is the time between two events of a stream that hold text; an event may hold several tokens.
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
    """One request and its answer.

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
        """Parse bytes of the answer."""
        self._parser.feed_data(data)

    def on_status(self, _status: bytes) -> None:
        """Note that the head has begun."""
        self.status = self._parser.get_status_code()

    def on_body(self, data: bytes) -> None:
        """Take a piece of the body: one or several events."""
        self.times.append(time.monotonic())
        self.num_events += data.count(EVENT)
        self.tail = self.tail[-1000:] + data if len(data) < 200 else data
        if self._keeps:
            self.parts.append(data)

    def on_message_complete(self) -> None:
        """Note that the answer is complete."""
        self._end(None)
        self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """End the stream with an error."""
        self._end("the connection was lost" if exc is None else f"{type(exc).__name__}: {exc}")

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens drawn, according to the last event."""
        match = USAGE.search(self.tail)
        return 0 if match is None else int(match[1])

    @property
    def error(self) -> str | None:
        """Return why the answer failed or is incomplete; None for a complete answer."""
        if self.failure is not None:
            return self.failure
        if self.status != 200:
            return f"status {self.status}"
        return None if self.num_tokens and self.tail.rstrip().endswith(DONE) else "an answer without its end"

    def text(self) -> str:
        """Return the text of the first choice. The stream must have been created with ``keeps``."""
        lines = b"".join(self.parts).split(b"\n")
        events = [json.loads(line.removeprefix(EVENT)) for line in lines if line.startswith(EVENT) and line != DONE]
        return "".join(event["choices"][0]["text"] for event in events if event["choices"])

    def _end(self, failure: str | None) -> None:
        if not self.ended.done():
            self.failure, self.finished = failure, time.monotonic()
            self.ended.set_result(None)


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """Return P50, P90, P99 and the maximum, in milliseconds, of values in seconds."""
    if not values:
        return {}
    ordered = sorted(values)
    at = {f"P{share}": ordered[min(len(ordered) - 1, len(ordered) * share // 100)] for share in (50, 90, 99)}
    return {name: round(1e3 * value, 2) for name, value in (at | {"most": ordered[-1]}).items()}


async def load(plan: dict[str, Any]) -> dict[str, Any]:
    """Send the plan's requests and wait for all answers."""
    address = urlsplit(plan["url"])
    key = f"Authorization: Bearer {plan['key']}\r\n" if plan.get("key") else ""
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {address.netloc}\r\nContent-Type: application/json\r\n{key}"
    loop = asyncio.get_running_loop()
    texts = bool(plan.get("texts"))

    async def ask(seconds: float, body: dict[str, Any]) -> Stream:
        data = json.dumps(body).encode()
        stream = Stream(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data, keeps=texts)
        await asyncio.sleep(begin + seconds - time.monotonic())
        sent = time.monotonic()
        try:
            await loop.create_connection(lambda: stream, address.hostname, address.port)
            await asyncio.wait_for(stream.ended, PATIENCE_SECONDS)
        except (OSError, TimeoutError) as error:
            stream.failure = f"{type(error).__name__}: {error}"
        stream.started = sent
        return stream

    begin = time.monotonic() + 0.5
    streams = await asyncio.gather(*(ask(seconds, body) for seconds, body in plan["requests"]))
    result = summary(streams, begin)
    if plan.get("firsts"):
        result["firsts"] = [each.times[0] - each.started if each.error is None else None for each in streams]
    return result | {"texts": [stream.text() for stream in streams]} if texts else result


def summary(streams: Sequence[Stream], begin: float) -> dict[str, Any]:
    """Return counts, throughput and latency over all streams."""
    errors = [stream.error for stream in streams if stream.error is not None]
    fine = [stream for stream in streams if stream.error is None]
    # usage and [DONE], which hold no text, may arrive as two pieces at the end
    token_times = [stream.times[: max(1, len(stream.times) - 2)] for stream in fine]
    gaps = [after - before for times in token_times for before, after in itertools.pairwise(times)]
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
