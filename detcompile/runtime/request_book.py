"""RequestBook: the requests of an engine, from their admission to their last output, and what happens to each.

The pipeline tells it what happened to sequences (``on_token`` and the like). What raises on the way of one request ends
that request with the error, and no other: it leaves before the next step is planned, as one that was cancelled does.
"""

import threading
import time
from collections import deque
from collections.abc import Callable
from itertools import count

from detcompile.errors import EngineError, GenerationError, InvalidInput
from detcompile.runtime.kv.block_pool import NULL_BLOCK
from detcompile.runtime.processes.isolation import Isolation
from detcompile.runtime.requests.deliveries import Deliveries
from detcompile.runtime.requests.outputs import Logprobs, RequestMetrics, RequestOutput
from detcompile.runtime.requests.plain_values import string
from detcompile.runtime.requests.poison_guard import ALONE_DEATHS
from detcompile.runtime.requests.request import Request, undrawable
from detcompile.runtime.requests.sequence import Sequence
from detcompile.runtime.scheduler import Scheduler
from detcompile.runtime.step.builder import StepEntry

__all__ = ["CHANGED", "RequestBook"]

LOST = f"its workers ended {ALONE_DEATHS} times while they served it alone"
CHANGED = "the weights were changed in place while it ran: change them by update_weights(), when nothing runs"


class RequestBook:
    """Follows requests. ``admit``, ``cancel`` and the properties may be used from any thread, the rest between steps.

    Args:
        together: start all samples of a request at once; otherwise the others start when the first has the prompt in
            the cache.
        vocab_size: number of ids that the model can read.
        forget: called with a sequence that has ended and is still scheduled.
        deliveries: where outputs go.
        weights_version: returns another number once the weights are others; ``look`` may take a while.
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
        self._admitting = threading.Lock()  # of ``_names``
        self._names: set[str] = set()  # of requests whose last output was not handed on
        self._numbers = count()
        self._inbox: deque[Request | str] = deque()  # to start, or to cancel by name, between steps
        self._requests: dict[str, Request] = {}
        self._owner: dict[Sequence, Request] = {}
        self._touched: dict[Request, None] = {}  # moved on since they were last delivered
        self._broken: list[Request] = []  # failed, and still scheduled
        self._isolation = Isolation(scheduler.serve_alone, lambda request: self._break(request, LOST))

    @property
    def is_empty(self) -> bool:
        """Whether no request is queued or runs, and none has an output that was not handed on."""
        return not (self._inbox or self._requests or self._touched)

    def admit(self, request: Request, kind: str | None, check: Callable[[str], None]) -> str:
        """Queue a request and return its name from now on. Two of one name never get in.

        Args:
            kind: gives the request a name of this kind that nobody has; None where it has a name.
            check: called with the name before it is queued, and may raise.

        Raises:
            InvalidInput: the name is in use.
        """
        with self._admitting:
            if kind is not None:
                name = next(name for number in self._numbers if (name := f"{kind}-{number}") not in self._names)
                request.output.request_id = name
            name = request.output.request_id
            if name in self._names:
                raise InvalidInput(f"request_id {name!r} is in use: give every request its own")
            check(name)
            self._names.add(name)
            self._inbox.append(request)
        return name

    def cancel(self, request_id: str) -> None:
        """End a request before the next step; unknown or finished ones are left alone, and what is no name refused."""
        self._inbox.append(string(request_id, "request_id"))

    def update(self) -> None:
        """Prepare a step: let go of what has ended, and start and cancel what other threads asked for."""
        for request in list(self._touched):
            self._settle(request)
        self._let_go()
        while self._inbox:
            asked = self._inbox[0]  # taken out when it is done, so that the book never seems empty meanwhile
            if isinstance(asked, str):
                self._attempt(self._cancel, self._requests.get(asked))
            else:
                self._attempt(self._start, asked)
            self._inbox.popleft()
        self._let_go()
        self.follow_weights()
        self._isolation.update()

    def deliver(self) -> None:
        """Finish a step: bring text that streams up to date, and hand on the outputs that got longer or ended."""
        for request in list(self._touched):
            try:
                for sequence in request.stream():
                    self._forget_sequence(sequence)
            except Exception as error:
                self._break(request, error)
            self._settle(request)
        self._let_go()
        touched, self._touched = self._touched, {}
        for request in touched:
            self._deliver(request.output)

    def fail(self, error: BaseException, text: str) -> None:
        """The engine failed: every request ends, and whoever waits for one is told the text."""
        for request in self._requests.values():
            request.fail(EngineError(f"the engine failed: {error}"))
        self._deliveries.fail(text, error)

    def is_open(self, sequence: Sequence) -> bool:
        """Whether anybody still waits for the tokens of a sequence."""
        return sequence in self._owner

    def num_held_blocks(self) -> dict[str, int]:
        """Blocks of the KV cache that each request has, by its name; those that have none are left out."""
        held: dict[str, int] = {}
        for sequence, request in self._owner.items():
            if sequence.block_tables:
                name = request.output.request_id
                own = sum(len(table) - table.count(NULL_BLOCK) for table in sequence.block_tables)
                held[name] = held.get(name, 0) + own
        return held

    def on_admission(self, entry: StepEntry) -> None:
        """A sequence got its first seat, or one again; ``entry.start`` tokens came from the cache."""
        metrics = self._metrics_of(entry.sequence)
        if metrics is not None and metrics.first_scheduled is None:
            metrics.first_scheduled, metrics.num_cached_tokens = time.monotonic(), entry.start

    def on_preemption(self, sequence: Sequence) -> None:
        """A sequence lost its seat and waits again."""
        metrics = self._metrics_of(sequence)
        if metrics is not None:
            metrics.num_preemptions += 1

    def on_loss(self, ran: list[Sequence]) -> None:
        """The workers are lost that ran these."""
        self._isolation.died_with(dict.fromkeys(self._owner[sequence] for sequence in ran if sequence in self._owner))

    def on_token(self, sequence: Sequence, token: int | None, logprobs: Logprobs | None) -> bool:
        """A sequence has its next token, or None where its logits are not numbers; returns whether it goes on."""
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

    def on_prompt_logprobs(self, sequence: Sequence, start: int, found: list[Logprobs]) -> None:
        """A sequence has logprobs of its prompt's tokens from ``start`` on."""
        request = self._owner[sequence]
        try:
            request.add_prompt_logprobs(start, found)
        except Exception as error:
            self._break(request, error)

    def on_draft(self, sequence: Sequence, num_drafted: int, num_accepted: int) -> None:
        """So many drafts of a sequence were tried, and so many were right."""
        metrics = self._metrics_of(sequence)
        if metrics is not None:
            metrics.num_drafted_tokens += num_drafted
            metrics.num_accepted_tokens += num_accepted

    def on_error(self, sequence: Sequence, error: Exception | str) -> None:
        """What a sequence's request asks for raised, or finds no memory: it ends, and the others go on."""
        request = self._owner.get(sequence)
        if request is not None:
            self._break(request, error)

    def _deliver(self, output: RequestOutput) -> None:
        """Hand an output on; the last one of a request frees its name, which another one may have from now on."""
        if not self._deliveries.give(output) and not output.finished:
            self.cancel(output.request_id)
        if output.finished:
            with self._admitting:
                self._names.discard(output.request_id)

    def _attempt(self, act: Callable[[Request], None], request: Request | None) -> None:
        try:
            if request is not None:
                act(request)
        except Exception as error:
            assert request is not None
            self._break(request, error)

    def follow_weights(self) -> None:
        """End what has tokens or keys of other weights than there are now, and let no prefix of theirs be found."""
        version = self._weights_version(look=not self._scheduler.running)
        if version == self._version:
            return
        self._version = version
        for request in list(self._requests.values()):
            if any(s in self._scheduler.running or s.num_generated for s in request.sequences):
                self._break(request, CHANGED)
        self._let_go()
        self._scheduler.forget_prefixes(version)

    def _settle(self, request: Request) -> None:
        """Let go of what has ended; let the other samples start once the first has the prompt in the cache."""
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
        """End a request as it stands. Its sequences stay scheduled until nobody goes through them."""
        name = f"request {request.output.request_id} failed, and it alone"
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

    def _let_go(self) -> None:
        broken, self._broken = self._broken, []
        for request in broken:
            for sequence in request.sequences:
                if sequence in self._scheduler:
                    self._forget_sequence(sequence)
            self._forget(request)

    def _forget(self, request: Request) -> None:
        """A request has ended; its name stays in use until its last output is handed on."""
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
        """None of a request that has just ended."""
        request = self._owner.get(sequence)
        return None if request is None else request.output.metrics


def _no_token(request: Request, sequence: Sequence, token: int | None) -> EngineError:
    return undrawable(f"request {request.output.request_id}, token {len(sequence.token_ids)}", request.params, token)
