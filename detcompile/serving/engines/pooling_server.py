"""PoolingServer: the engine process of a model that says one thing of a sequence. Many requests share its steps."""

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

__all__ = ["PoolingServer"]


class _Share(NamedTuple):
    """Prompts of a request that a step takes."""

    own: "_Open"
    prompts: list[list[int]]


class _Open:
    """A request that has not ended, and the rows that it has so far."""

    def __init__(self, command: Pool) -> None:
        self.command = command
        self.rows: list[Tensor] = []

    @property
    def how(self) -> tuple[Any, ...]:
        """What a step has to be asked for."""
        return self.command.pooling, self.command.normalize

    def next(self, room: int) -> list[list[int]]:
        """Prompts that fit into so many tokens, from where it is."""
        found: list[list[int]] = []
        for prompt in self.command.prompts[len(self.rows) :]:
            room -= len(prompt)
            if room < 0:
                break
            found.append(prompt)
        return found


class PoolingServer(CommandLoop):
    """Serves requests in turn, a step's prompts at a time: long requests do not keep others waiting.

    Args:
        model: what is asked.
        wire: connects to the front.
    """

    def __init__(self, model: CompiledClassifier | CompiledEmbedder, wire: Wire) -> None:
        super().__init__(wire)
        self._model = model
        self._open: dict[str, _Open] = {}  # in the order in which they get their next turn
        self._lock = threading.Lock()

    def take(self, command: Any) -> None:
        """Take a request, or cancel one."""
        with self._lock:
            if isinstance(command, Pool):
                self._open[command.request_id] = _Open(command)
            elif isinstance(command, Cancel):
                self._open.pop(command.request_id, None)

    def step(self) -> bool:
        """Run one step; returns whether there was anything to do.

        Raises:
            torch.AcceleratorError: the device takes no more steps of this process.
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
            rows = list(self._pooled(prompts, shares[0].own.command))
        except torch.AcceleratorError:  # another process takes this one's place, and goes on with what is open
            raise
        except Exception as error:  # of one of these requests, such as memory that is not there
            if len(shares) == 1:
                self._end(shares[0].own, error)
                return
            for share in shares:
                self._run([share])
            return
        self._count(sum(map(len, prompts)), time.monotonic() - start)
        for share in shares:
            share.own.rows += rows[: len(share.prompts)]
            del rows[: len(share.prompts)]
            if len(share.own.rows) == len(share.own.command.prompts):
                self._end(share.own)

    def _shares(self) -> list[_Share]:
        """What the next step takes of which requests; these go behind the others then."""
        shares: list[_Share] = []
        room = STEP_TOKENS
        with self._lock:
            for own in list(self._open.values()):
                if shares and own.how != shares[0].own.how:
                    continue
                prompts = own.next(room)
                if not shares and not prompts:
                    prompts = own.command.prompts[len(own.rows) :][:1]  # longer than a step: alone
                if prompts:
                    shares.append(_Share(own, prompts))
                    room -= sum(map(len, prompts))
            for share in shares:
                name = share.own.command.request_id
                self._open[name] = self._open.pop(name)
        return shares

    def _pooled(self, prompts: list[list[int]], how: Pool) -> Tensor:
        """[N, C] float32 on the host."""
        if isinstance(self._model, CompiledClassifier):
            return self._model.score(prompts).float().cpu()
        return self._model.embed(prompts, pooling=how.pooling, normalize=how.normalize).cpu()

    def _end(self, own: _Open, error: Exception | None = None) -> None:
        """Tell the front what came of a request, unless it has been cancelled."""
        name = own.command.request_id
        with self._lock:
            if self._open.pop(name, None) is None:
                return
        if error is not None:
            self.wire.send(Tokens([Delta(name, [], True, None, f"the request failed: {error!r}", 0, None)]))
            return
        rows: Any = torch.stack(own.rows).numpy()
        self.wire.send(Pooled(name, rows.shape[1], np.ascontiguousarray(rows, "<f4").tobytes()))

    def _count(self, num_tokens: int, seconds: float) -> None:
        known = self.statistics
        self.statistics = Statistics(
            num_steps=known.num_steps + (num_tokens > 0),
            num_prefill_tokens=known.num_prefill_tokens + num_tokens,
            num_running=len(self._open),
            busy_seconds=known.busy_seconds + seconds,
        )
