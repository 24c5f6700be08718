"""Where outputs go: to whoever waits for a request, as a copy of their own, or else to the next ``step``."""

import threading
from collections import deque
from collections.abc import Callable

from detcompile.errors import EngineError
from detcompile.runtime.requests.outputs import CompletionOutput, RequestMetrics, RequestOutput
from detcompile.runtime.requests.turns import Place, Turns

__all__ = ["Deliveries", "Mailbox", "Receiver", "copy_of", "dropped"]

Receiver = Callable[[RequestOutput | EngineError], None]


def dropped(_output: RequestOutput | EngineError) -> None:
    """The receiver of a request that nobody waits for any more."""


class Mailbox:
    """Finished outputs of the requests of one ``generate``, put there by whichever thread made them.

    Args:
        turns: the turns in which ``place`` waits; it is excused when something has come.
    """

    def __init__(self, turns: Turns) -> None:
        self.place = Place()
        self.error: EngineError | None = None
        self._turns = turns
        self._outputs: deque[RequestOutput] = deque()

    def receive(self, output: RequestOutput | EngineError) -> None:
        """A Receiver."""
        if isinstance(output, EngineError):
            self.error = output
        elif output.finished:
            self._outputs.append(output)
        self._turns.excuse(self.place)

    def taken(self) -> list[RequestOutput]:
        """What has come since."""
        return [self._outputs.popleft() for _ in range(len(self._outputs))]


class Deliveries:
    """The receivers of an engine's requests, and what has none. Any thread may call."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._receivers: dict[str, tuple[Receiver, bool]] = {}
        self._kept: dict[str, RequestOutput] = {}

    @property
    def any_kept(self) -> bool:
        """Whether ``take`` has anything."""
        return bool(self._kept)

    def expect(self, request_id: str, receiver: Receiver, *, only_last: bool) -> None:
        """Give the outputs of a request to ``receiver``: all of them, or the one that is finished."""
        with self._lock:
            self._receivers[request_id] = receiver, only_last

    def drop(self, request_id: str) -> None:
        """Nobody waits for a request any more, which somebody did."""
        with self._lock:
            if request_id in self._receivers:
                self._receivers[request_id] = dropped, True

    def give(self, output: RequestOutput) -> bool:
        """Hand on a copy of an output; False if its receiver cannot be reached any more."""
        with self._lock:
            receiver, only_last = self._receivers.get(output.request_id, (None, False))
            if receiver is not None and output.finished:
                del self._receivers[output.request_id]
        if receiver is None:
            copy = copy_of(output)
            with self._lock:
                self._kept[output.request_id] = copy
        elif output.finished or not only_last:
            try:
                receiver(copy_of(output))
            except Exception:  # a coroutine's loop that is closed, say: its neighbours go on
                return False
        return True

    def take(self) -> list[RequestOutput]:
        """Outputs without a receiver, the newest of each request."""
        with self._lock:
            kept, self._kept = self._kept, {}
        return list(kept.values())

    def fail(self, text: str, cause: BaseException) -> None:
        """Tell every receiver that nothing comes any more."""
        with self._lock:
            receivers, self._receivers = self._receivers, {}
        for receiver, _ in receivers.values():
            error = EngineError(text)  # one each: a traceback grows on it
            error.__cause__ = cause
            try:
                receiver(error)
            except Exception:
                continue


def copy_of(output: RequestOutput) -> RequestOutput:
    """An output as it is now, for the caller to keep and to change. Written out: a step makes one a request."""
    metrics, known = output.metrics, output.prompt_logprobs
    return RequestOutput(
        output.request_id,
        output.prompt,
        output.prompt_token_ids[:],
        output.seed,
        [_copy_of_sample(sample) for sample in output.outputs],
        output.finished,
        None if known is None else known[:],
        output.error,
        None if metrics is None else _copy_of_metrics(metrics),
    )


def _copy_of_sample(sample: CompletionOutput) -> CompletionOutput:
    return CompletionOutput(
        sample.index,
        sample.text,
        sample.token_ids[:],
        None if sample.logprobs is None else sample.logprobs[:],
        sample.finish_reason,
        sample.stop_reason,
    )


def _copy_of_metrics(metrics: RequestMetrics) -> RequestMetrics:
    return RequestMetrics(
        metrics.arrival,
        metrics.first_scheduled,
        metrics.token_times[:],
        metrics.finished,
        metrics.num_cached_tokens,
        metrics.num_preemptions,
        metrics.num_drafted_tokens,
        metrics.num_accepted_tokens,
    )
