"""RequestBook: an engine's requests, from admission to the last output.

The pipeline reports what happens to sequences (``on_token`` and the like). An exception on behalf of one request ends
only that request: it leaves before the next step is planned, like a canceled one.
"""

import threading
import time
from collections import deque
from collections.abc import Callable
from itertools import count

from detcompile.errors import EngineError, GenerationError, InvalidInput
from detcompile.runtime.kv.block_pool import NULL_BLOCK
from detcompile.runtime.requests.deliveries import Deliveries
from detcompile.runtime.requests.outputs import Logprobs, RequestMetrics
from detcompile.runtime.requests.plain_values import string
from detcompile.runtime.requests.poison_guard import ALONE_DEATHS, Isolation
from detcompile.runtime.requests.request import Request, undrawable
from detcompile.runtime.requests.sequence import Sequence
from detcompile.runtime.scheduler import Scheduler
from detcompile.runtime.step.builder import StepEntry

LOST = f"its workers crashed {ALONE_DEATHS} times while they served it alone"
CHANGED = "the weights were changed in place while it ran: use update_weights() while no request runs"


class RequestBook:
    """Tracks requests. ``admit``, ``cancel`` and the properties are thread-safe; call the rest between steps.

    Args:
        together: start all samples of a request at once. Otherwise the other samples start once the first one has the
            prompt in the cache.
        vocab_size: number of ids that the model can read.
        forget: called with a sequence that has ended and is still scheduled.
        deliveries: receives the outputs.
        weights_version: returns a new number when the weights change; with ``look`` it may take a while.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        *,
        together: bool,
        vocab_size: int,
        forget: Callable[[Sequence], None],
        deliveries: Deliveries,
        weights_version: Callable[..., int],
    ) -> None:
        self._scheduler = scheduler
        self._together = together
        self._vocab_size = vocab_size
        self._forget_sequence = forget
        self._deliveries = deliveries
        self._weights_version = weights_version
        self._version = weights_version(look=True)
        self._admitting = threading.Lock()  # guards ``_names``
        self._names: set[str] = set()  # requests whose last output was not delivered yet
        self._numbers = count()
        self._inbox: deque[Request | str] = deque()  # requests to start and ids to cancel, between steps
        self._requests: dict[str, Request] = {}
        self._owner: dict[Sequence, Request] = {}
        self._touched: dict[Request, None] = {}  # changed since the last delivery
        self._broken: list[Request] = []  # failed but still scheduled
        self._isolation = Isolation(scheduler.serve_alone, lambda request: self._break(request, LOST))

    @property
    def is_empty(self) -> bool:
        """True if no request is queued, running or waiting for delivery."""
        return not (self._inbox or self._requests or self._touched)

    def admit(self, request: Request, kind: str | None, check: Callable[[str], None]) -> str:
        """Queue a request and return its id. An id in use is rejected.

        Args:
            kind: prefix of a generated id; None if the request has an id.
            check: called with the id before the request is queued; may raise.

        Raises:
            InvalidInput: the id is in use.
        """
        with self._admitting:
            if kind is not None:
                name = next(name for number in self._numbers if (name := f"{kind}-{number}") not in self._names)
                request.output.request_id = name
            name = request.output.request_id
            if name in self._names:
                raise InvalidInput(f"request_id {name!r} is in use: give every request a unique id")
            check(name)
            self._names.add(name)
            self._inbox.append(request)
        return name

    def cancel(self, request_id: str) -> None:
        """Cancel a request before the next step. Unknown or finished ids are ignored; a non-string id is rejected."""
        self._inbox.append(string(request_id, "request_id"))

    def update(self) -> None:
        """Prepare a step: drop requests that have ended; start and cancel requests as other threads asked."""
        for request in list(self._touched):
            self._release(request)
        self._drop_broken()
        while self._inbox:
            item = self._inbox[0]  # removed only when done, so that ``is_empty`` stays false
            if isinstance(item, str):
                self._attempt(self._cancel, self._requests.get(item))
            else:
                self._attempt(self._start, item)
            self._inbox.popleft()
        self._drop_broken()
        self.follow_weights()
        self._isolation.update()

    def deliver(self) -> None:
        """Finish a step: update streamed text, and deliver the outputs that grew or ended."""
        for request in list(self._touched):
            try:
                for sequence in request.stream():
                    self._forget_sequence(sequence)
            except Exception as error:
                self._break(request, error)
            self._release(request)
        self._drop_broken()
        touched, self._touched = self._touched, {}
        for request in touched:
            if not self._deliveries.give(request.output) and not request.output.finished:
                self.cancel(request.output.request_id)
            if request.output.finished:
                with self._admitting:
                    self._names.discard(request.output.request_id)

    def fail(self, error: BaseException, text: str) -> None:
        """Fail every request after an engine failure, and send ``text`` to every receiver."""
        for request in self._requests.values():
            request.fail(EngineError(f"the engine failed: {error}"))
        self._deliveries.fail(text, error)

    def is_open(self, sequence: Sequence) -> bool:
        """Return True if someone still waits for the sequence's tokens."""
        return sequence in self._owner

    def num_held_blocks(self) -> dict[str, int]:
        """Return the number of KV blocks per request id, without requests that hold none."""
        held: dict[str, int] = {}
        for sequence, request in self._owner.items():
            if sequence.block_tables:
                name = request.output.request_id
                num_blocks = sum(len(table) - table.count(NULL_BLOCK) for table in sequence.block_tables)
                held[name] = held.get(name, 0) + num_blocks
        return held

    def on_admission(self, entry: StepEntry) -> None:
        """Record that a sequence was admitted, with ``entry.start`` tokens from the cache."""
        metrics = self._metrics_of(entry.sequence)
        if metrics is not None and metrics.first_scheduled is None:
            metrics.first_scheduled, metrics.num_cached_tokens = time.monotonic(), entry.start

    def on_preemption(self, sequence: Sequence) -> None:
        """Record that a sequence was preempted and waits again."""
        metrics = self._metrics_of(sequence)
        if metrics is not None:
            metrics.num_preemptions += 1

    def on_loss(self, ran: list[Sequence]) -> None:
        """Handle the crash of the workers that ran these sequences."""
        self._isolation.died_with(dict.fromkeys(self._owner[sequence] for sequence in ran if sequence in self._owner))

    def on_token(self, sequence: Sequence, token: int | None, logprobs: Logprobs | None) -> bool:
        """Append a token (None if the logits were NaN or infinite). Return True if the sequence continues."""
        request = self._owner[sequence]
        self._touched[request] = None
        try:
            if token is None or token >= self._vocab_size:
                request.end(sequence.sample_index, "error", _no_token(request, sequence, token))
            else:
                request.add_token(sequence.sample_index, token, logprobs)
        except Exception as error:
            self._break(request, error)
        return sequence.finish_reason is None

    def on_prompt_logprobs(self, sequence: Sequence, start: int, entries: list[Logprobs]) -> None:
        """Add logprobs of the prompt's tokens from ``start`` on."""
        request = self._owner[sequence]
        try:
            request.add_prompt_logprobs(start, entries)
        except Exception as error:
            self._break(request, error)

    def on_draft(self, sequence: Sequence, num_drafted: int, num_accepted: int) -> None:
        """Count drafted and accepted tokens of a sequence."""
        metrics = self._metrics_of(sequence)
        if metrics is not None:
            metrics.num_drafted_tokens += num_drafted
            metrics.num_accepted_tokens += num_accepted

    def on_error(self, sequence: Sequence, error: Exception | str) -> None:
        """End only this sequence's request, with the error."""
        request = self._owner.get(sequence)
        if request is not None:
            self._break(request, error)

    def _attempt(self, act: Callable[[Request], None], request: Request | None) -> None:
        try:
            if request is not None:
                act(request)
        except Exception as error:
            assert request is not None
            self._break(request, error)

    def follow_weights(self) -> None:
        """Detect changed weights: end requests with tokens or keys of the old weights, and forget their prefixes."""
        version = self._weights_version(look=not self._scheduler.running)
        if version == self._version:
            return
        self._version = version
        for request in list(self._requests.values()):
            if any(s in self._scheduler.running or s.num_generated for s in request.sequences):
                self._break(request, CHANGED)
        self._drop_broken()
        self._scheduler.forget_prefixes(version)

    def _release(self, request: Request) -> None:
        """Drop samples that have ended; start the other samples once the first one has the prompt in the cache."""
        try:
            for sequence in request.sequences:
                if sequence.finish_reason is not None:
                    self._owner.pop(sequence, None)
            self._start_held(request)
        except Exception as error:
            self._break(request, error)
        if request.output.finished:
            self._forget(request)

    def _break(self, request: Request, error: Exception | str) -> None:
        """Fail a request as it is. Its sequences stay scheduled until it is safe to remove them."""
        name = f"request {request.output.request_id} failed (other requests continue)"
        if isinstance(error, GenerationError):
            failure: EngineError = GenerationError(f"{name}: {error}")
        else:
            failure = EngineError(f"{name}: {error if isinstance(error, str) else repr(error)}")
        failure.__cause__ = error if isinstance(error, Exception) else None
        request.fail(failure)
        request.held = []
        for sequence in request.sequences:
            self._owner.pop(sequence, None)
        self._touched[request] = None
        self._broken.append(request)

    def _drop_broken(self) -> None:
        """Remove the sequences of failed requests from the scheduler."""
        broken, self._broken = self._broken, []
        for request in broken:
            for sequence in request.sequences:
                if sequence in self._scheduler:
                    self._forget_sequence(sequence)
            self._forget(request)

    def _forget(self, request: Request) -> None:
        """Drop a request that has ended; its id stays in use until the last output is delivered."""
        self._isolation.forget(request)
        self._requests.pop(request.output.request_id, None)

    def _start(self, request: Request) -> None:
        self._requests[request.output.request_id] = request
        self._owner |= dict.fromkeys(request.sequences, request)
        self._scheduler.add(request.sequences[0])
        if self._together:
            self._start_held(request)

    def _start_held(self, request: Request) -> None:
        for sequence in request.held:
            if sequence in self._owner:
                self._scheduler.add(sequence)
        request.held = []

    def _cancel(self, request: Request) -> None:
        for sequence in request.held:
            del self._owner[sequence]
        for sequence in request.sequences:
            if sequence.finish_reason is None:
                request.end(sequence.sample_index, "abort")
            if self._owner.pop(sequence, None) is not None:
                self._forget_sequence(sequence)
        self._touched[request] = None
        self._forget(request)

    def _metrics_of(self, sequence: Sequence) -> RequestMetrics | None:
        """Return the metrics of a sequence's request; None if the request has just ended."""
        request = self._owner.get(sequence)
        return None if request is None else request.output.metrics


def _no_token(request: Request, sequence: Sequence, token: int | None) -> EngineError:
    return undrawable(f"request {request.output.request_id}, token {len(sequence.token_ids)}", request.params, token)
