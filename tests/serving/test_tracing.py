"""What operators read: traces of requests, and log messages as JSON lines."""

import asyncio
import importlib.util
import io
import json
import logging
from pathlib import Path
from typing import Any

import httpx
import pytest
from opentelemetry import trace

from detcompile.commands import serve
from detcompile.serving import tracing
from detcompile.serving.app import new_app
from detcompile.serving.logs import JSONLines
from detcompile.serving.service import Service
from tests.serving.instant_fleet import InstantFleet
from tests.serving.scripted_service import SPEC

CALLER = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


class Span(trace.NonRecordingSpan):
    """A span that records its calls."""

    def __init__(self, tracer: "Tracer", name: str, parent: trace.SpanContext, start: int | None) -> None:
        number = len(tracer.spans) + 1
        flags = trace.TraceFlags(trace.TraceFlags.SAMPLED)
        super().__init__(trace.SpanContext(parent.trace_id or 7, number, is_remote=False, trace_flags=flags))
        self.name, self.parent, self.start, self.stop = name, parent.span_id, start, None
        self.attributes: dict[str, Any] = {}
        self.status: Any = None

    def is_recording(self) -> bool:
        return True

    def set_attribute(self, key: str, value: Any) -> None:
        self.attributes[key] = value

    def set_attributes(self, attributes: Any) -> None:
        self.attributes |= attributes

    def update_name(self, name: str) -> None:
        self.name = name

    def set_status(self, status: Any, description: str | None = None) -> None:
        self.status = status

    def end(self, end_time: int | None = None) -> None:
        self.stop = end_time or 1


class Tracer:
    """A tracer that keeps its spans."""

    def __init__(self) -> None:
        self.spans: list[Span] = []

    def start_span(self, name: str, context: Any = None, *rest: Any, start_time: int | None = None) -> Span:
        self.spans.append(Span(self, name, trace.get_current_span(context).get_span_context(), start_time))
        return self.spans[-1]


@pytest.fixture
def tracer(monkeypatch: pytest.MonkeyPatch) -> Tracer:
    made = Tracer()
    monkeypatch.setattr(tracing.trace, "get_tracer", lambda _: made)
    return made


def sent(path: str, body: dict[str, Any] | None = None, **headers: str) -> tuple[httpx.Response, dict[str, Any]]:
    """The response to a request, and its line in the request log."""
    log = io.StringIO()

    async def scenario() -> httpx.Response:
        service = Service(fleet=InstantFleet)
        transport = httpx.ASGITransport(new_app(service, "test", request_log=log))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            await service.start(SPEC)
            method = "GET" if body is None else "POST"
            answer = await client.request(method, path, json=body, headers=headers)
            await service.stop()
            return answer

    answer = asyncio.run(asyncio.wait_for(scenario(), 30))
    return answer, json.loads(log.getvalue())


@pytest.mark.parametrize("stream", [False, True])
def test_request_has_spans_of_its_phases(tracer: Tracer, stream: bool) -> None:
    body = {"prompt": [5, 6, 7], "n": 2, "stream": stream}
    answer, line = sent("/v1/completions", body, traceparent=CALLER, tracestate="a=b")
    server, *phases = tracer.spans
    assert answer.headers["traceparent"] == f"00-{CALLER[3:35]}-{1:016x}-01" and line["trace_id"] == CALLER[3:35]
    assert (server.name, server.parent) == ("POST /v1/completions", int(CALLER[36:52], 16))
    assert server.attributes["http.response.status_code"] == 200 and server.status is None
    assert server.attributes["gen_ai.usage.input_tokens"] == 3
    assert server.attributes["gen_ai.usage.output_tokens"] == 4
    assert [span.name for span in phases] == ["queue", "prefill", "decode"]
    assert {span.parent for span in phases} == {1}
    ends = [time for span in phases for time in (span.start, span.stop)]
    assert ends == sorted(ends) and all(span.stop is not None for span in tracer.spans)


def test_requests_without_answers_have_one_span(tracer: Tracer) -> None:
    answer, line = sent("/v1/models/other")
    assert answer.status_code == 404 and [span.name for span in tracer.spans] == ["GET /v1/models/{name:path}"]
    assert line["trace_id"] == f"{7:032x}"
    sent("/nothing/of/that/name")
    assert tracer.spans[-1].name == "GET"


@pytest.mark.parametrize("caller", [CALLER, None, "00-zz-01"])
def test_trace_context_is_forwarded_without_provider(caller: str | None) -> None:
    answer, line = sent("/v1/completions", {"prompt": [5]}, **({} if caller is None else {"traceparent": caller}))
    known = caller if caller == CALLER else None
    assert answer.headers.get("traceparent") == known and line.get("trace_id") == (known and known[3:35])


@pytest.mark.parametrize("missing", ["opentelemetry", "opentelemetry.trace"])
def test_server_runs_without_opentelemetry(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == missing else find(name))
    answer, line = sent("/v1/models", traceparent=CALLER)
    assert answer.status_code == 200 and "traceparent" not in answer.headers and "trace_id" not in line


def test_log_lines_are_json_objects(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    written = io.StringIO()
    monkeypatch.setattr("sys.stderr", written)
    root, ours = logging.getLogger(), logging.getLogger("detcompile.serving")
    for name in ("uvicorn", "uvicorn.error"):  # which a server in this process may have configured
        monkeypatch.setattr(logging.getLogger(name), "propagate", True)
        monkeypatch.setattr(logging.getLogger(name), "disabled", False)
        monkeypatch.setattr(logging.getLogger(name), "handlers", [])
        monkeypatch.setattr(logging.getLogger(name), "level", logging.NOTSET)

    async def served(*given: Any) -> int:
        logging.getLogger("detcompile.serving.server").info("serving %s", 'a "model"\n')
        try:
            raise ValueError("why")
        except ValueError:
            logging.getLogger("uvicorn.error").exception("failed")
        return 0

    monkeypatch.setattr(serve, "_served", served)
    log = tmp_path / "log"
    log.write_bytes(b'{"payload')
    options = {name.lower(): getattr(serve, name)() for name in ("Chat", "Bounds", "Kept", "Processes", "Loading")}
    options |= {"web": serve.Web(log_format="json"), "receipts": serve.Receipts(receipt_log=log)}
    before = [*root.handlers], ours.level
    try:
        with pytest.raises(SystemExit, match="0"):
            serve.command("tiny", **options, engine=serve.EngineOptions())
    finally:
        root.handlers, ours.level = before
    cut, first, second = map(json.loads, written.getvalue().splitlines())
    assert cut["message"] == f"{log}: cut off 9 bytes of a line without an end" and cut["level"] == "warning"
    assert first["message"] == 'serving a "model"\n' and first["level"] == "info" and first["time"] > 1e9
    assert first["logger"] == "detcompile.serving.server" and "traceback" not in first
    assert second["message"] == "failed" and second["traceback"].endswith("ValueError: why")
    assert isinstance(JSONLines().format(logging.makeLogRecord({"msg": "é"})), str)
