"""The engine process of an embedding or classification model; requests share its steps."""

import threading
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from detcompile.models.pooling import STEP_TOKENS, CompiledClassifier, CompiledEmbedder
from detcompile.serving.engines.command_loop import CommandLoop, Wire
from detcompile.serving.engines.protocol import Cancel, Delta, Pool, Pooled, Statistics, Tokens


class _Share(NamedTuple):
    """The prompts that a step takes from a request."""

    request: "_Open"
    prompts: list[list[int]]


class _Open:
    """An unfinished request and its rows so far."""

    def __init__(self, command: Pool) -> None:
        self.command = command
        self.rows: list[Tensor] = []

    @property
    def options(self) -> tuple[Any, ...]:
        """Return the options of a step; requests with equal options can share it."""
        return self.command.pooling, self.command.normalize

    def next(self, room: int) -> list[list[int]]:
        """Return the next prompts that fit into ``room`` tokens."""
        prompts: list[list[int]] = []
        for prompt in self.command.prompts[len(self.rows) :]:
            room -= len(prompt)
            if room < 0:
                break
            prompts.append(prompt)
        return prompts


class PoolingServer(CommandLoop):
    """Serves requests round-robin, a step's prompts at a time, so that long requests do not block others.

    Args:
        model: the model.
        wire: connection to the front end.
    """

    def __init__(self, model: CompiledClassifier | CompiledEmbedder, wire: Wire) -> None:
        super().__init__(wire)
        self._model = model
        self._open: dict[str, _Open] = {}  # next turn first
        self._lock = threading.Lock()

    def take(self, command: Any) -> None:
        """Handle a request or a cancellation."""
        with self._lock:
            if isinstance(command, Pool):
                self._open[command.request_id] = _Open(command)
            elif isinstance(command, Cancel):
                self._open.pop(command.request_id, None)

    def step(self) -> bool:
        """Run one step; return False if there was no work.

        Raises:
            torch.AcceleratorError: the device is unusable in this process.
        """
        shares = self._shares()
        if not shares:
            self._count(0, 0.0)
            return False
        self._run(shares)
        return True

    def _run(self, shares: Sequence[_Share]) -> None:
        prompts, start = [prompt for share in shares for prompt in share.prompts], time.monotonic()
        try:
            rows = list(self._pooled(prompts, shares[0].request.command))
        except torch.AcceleratorError:  # another process replaces this one and continues
            raise
        except Exception as error:  # caused by one of the requests, such as out of memory
            if len(shares) == 1:
                self._end(shares[0].request, error)
                return
            for share in shares:
                self._run([share])
            return
        self._count(sum(map(len, prompts)), time.monotonic() - start)
        for share in shares:
            share.request.rows += rows[: len(share.prompts)]
            del rows[: len(share.prompts)]
            if len(share.request.rows) == len(share.request.command.prompts):
                self._end(share.request)

    def _shares(self) -> list[_Share]:
        """Choose the next step's prompts; their requests go to the end of the queue."""
        shares: list[_Share] = []
        room = STEP_TOKENS
        with self._lock:
            for request in list(self._open.values()):
                if shares and request.options != shares[0].request.options:
                    continue
                prompts = request.next(room)
                if not shares and not prompts:
                    prompts = request.command.prompts[len(request.rows) :][:1]  # longer than a step: alone
                if prompts:
                    shares.append(_Share(request, prompts))
                    room -= sum(map(len, prompts))
            for share in shares:
                name = share.request.command.request_id
                self._open[name] = self._open.pop(name)
        return shares

    def _pooled(self, prompts: list[list[int]], command: Pool) -> Tensor:
        """Return the model's rows, float32 [N, C], on the host."""
        if isinstance(self._model, CompiledClassifier):
            return self._model.score(prompts).float().cpu()
        return self._model.embed(prompts, pooling=command.pooling, normalize=command.normalize).cpu()

    def _end(self, request: _Open, error: Exception | None = None) -> None:
        """Report a request's result unless it was canceled."""
        name = request.command.request_id
        with self._lock:
            if self._open.pop(name, None) is None:
                return
        if error is not None:
            self.wire.send(Tokens([Delta(name, [], True, None, f"the request failed: {error!r}", 0, None)]))
            return
        rows: Any = torch.stack(request.rows).numpy()
        self.wire.send(Pooled(name, rows.shape[1], np.ascontiguousarray(rows, "<f4").tobytes()))

    def _count(self, num_tokens: int, seconds: float) -> None:
        last = self.statistics
        self.statistics = Statistics(
            num_steps=last.num_steps + (num_tokens > 0),
            num_prefill_tokens=last.num_prefill_tokens + num_tokens,
            num_running=len(self._open),
            busy_seconds=last.busy_seconds + seconds,
        )
