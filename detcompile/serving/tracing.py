"""OpenTelemetry traces: a span per request, with spans of its answers' queue, prefill and decode.

Spans go to the tracer provider of the process, which `opentelemetry-instrument` sets up from OTEL_* variables. Without
one, only the caller's ``traceparent`` is passed on.
"""

import time
from collections.abc import Sequence
from typing import Any

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from detcompile.serving.engines.answers import Answer
from detcompile.serving.request_log import TRACE_ID
from detcompile.serving.responses import ANSWERS

PROPAGATOR = TraceContextTextMapPropagator()  # W3C


class Tracing:
    """ASGI layer that records each request in the trace of its caller, and returns its ``traceparent``.

    Args:
        inside: the application.
    """

    def __init__(self, inside: ASGIApp) -> None:
        self._inside = inside
        self._tracer = trace.get_tracer("detcompile.serving")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run a request and record it."""
        if scope["type"] != "http":
            await self._inside(scope, receive, send)
            return
        headers = Headers(scope=scope)
        parent = PROPAGATOR.extract({name: headers[name] for name in ("traceparent", "tracestate") if name in headers})
        method, started = scope["method"], time.monotonic()
        kind = trace.SpanKind.SERVER
        span = self._tracer.start_span(method, parent, kind, {"http.request.method": method})
        context = trace.set_span_in_context(span, parent)
        outgoing: dict[str, str] = {}
        PROPAGATOR.inject(outgoing, context)
        if outgoing:
            scope[TRACE_ID] = f"{span.get_span_context().trace_id:032x}"

        async def traced_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                span.set_attribute("http.response.status_code", message["status"])
                if message["status"] >= 500:
                    span.set_status(trace.StatusCode.ERROR)
                added = [(name.encode(), value.encode()) for name, value in outgoing.items()]
                message = {**message, "headers": [*message.get("headers", ()), *added]}
            await send(message)

        try:
            await self._inside(scope, receive, traced_send)
        finally:
            if span.is_recording():
                path = getattr(scope.get("route"), "path", "")  # names of routes are few, unlike paths
                span.update_name(f"{method} {path}".strip())
                span.set_attribute("http.route", path)
                answers = [each for each in scope.get(ANSWERS, ()) if each.arrival >= started]
                self._record(span, context, answers)
            span.end()

    def _record(self, span: trace.Span, context: Context, answers: Sequence[Answer]) -> None:
        """Add the tokens of a request's answers, and a span for each of their phases."""
        now, clock = time.monotonic(), time.time_ns()
        for answer in answers:
            for name, start, end in _phases(answer, now):
                begun, ended = (clock - round(1e9 * (now - each)) for each in (start, end))
                self._tracer.start_span(name, context, start_time=begun).end(ended)
        counts: dict[str, Any] = {
            "gen_ai.usage.input_tokens": sum(len(answer.prompt_ids) for answer in answers),
            "gen_ai.usage.output_tokens": sum(answer.num_tokens for answer in answers),
        }
        span.set_attributes(counts if answers else {})


def _phases(answer: Answer, now: float) -> list[tuple[str, float, float]]:
    """Return the phases of an answer that has ended, with their start and end in the clock of time.monotonic."""
    if answer.first_token is None and answer.queued_seconds is None:
        return [("queue", answer.arrival, now)]
    scheduled = answer.arrival + (answer.queued_seconds or 0.0)
    phases = [("queue", answer.arrival, scheduled), ("prefill", scheduled, answer.first_token or now)]
    return phases if answer.first_token is None else [*phases, ("decode", answer.first_token, now)]
