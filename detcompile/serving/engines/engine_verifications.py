"""Replays of receipts between the steps of an engine."""

from collections import deque
from collections.abc import Callable, Generator, Mapping
from typing import Any

import torch

from detcompile.errors import InvalidInput
from detcompile.models.compiled import CompiledModel
from detcompile.serving.engines.protocol import Delta, Refused, Tokens, Verified, Verify
from detcompile.serving.receipts.receipt import decode_receipt
from detcompile.serving.receipts.replay import Pause, Replayer
from detcompile.serving.receipts.verdict import Verdict

CHUNK = 256  # tokens that a replay may compute between two steps of the engine


class Verifications:
    """Replays receipts, several in a step. Receipts may be added and canceled from any thread.

    Args:
        model: the served model.
        parts: fingerprint_parts of the model.
        send: sends reports to the front end.
    """

    def __init__(self, model: CompiledModel, parts: Mapping[str, str], send: Callable[[Any], None]) -> None:
        self._model = model
        self._parts = parts
        self._send = send
        self._waiting: deque[Verify] = deque()
        self._running: dict[str, Generator[Pause, None, Verdict]] = {}
        self._cancelled: set[str] = set()
        self._replayer: Replayer | None = None

    def add(self, command: Verify) -> None:
        """Queue a receipt."""
        self._waiting.append(command)

    def follow(self, parts: Mapping[str, str]) -> None:
        """Take the fingerprint parts of new weights. Receipts that are being replayed were canceled before."""
        self._parts = parts
        self._replayer = None
        self._running = {}

    def cancel(self, request_id: str) -> None:
        """Cancel a receipt; unknown ids are ignored."""
        known = {command.request_id for command in list(self._waiting)}
        if request_id in known or request_id in self._running:
            self._cancelled.add(request_id)

    def step(self) -> bool:
        """Run a unit of work; return False if there is none.

        Raises:
            torch.AcceleratorError: the device is unusable in this process.
        """
        if not self._running and not self._waiting:
            return False
        if self._replayer is not None:
            self._replayer.forcing.step()
        pause: Pause = "waits"
        for name in list(self._running):
            if pause == "waits":
                pause = self._advance(name)
        while pause == "waits" and self._waiting and self._has_room:
            command = self._waiting.popleft()
            self._running[command.request_id] = self._steps(command.receipt)
            pause = self._advance(command.request_id)
        if self._replayer is not None and not self._running and not self._waiting:
            self._replayer.forcing.free()
        return True

    @property
    def _has_room(self) -> bool:
        return not self._running or (self._replayer is not None and self._replayer.forcing.has_room)

    def _advance(self, name: str) -> Pause:
        """Advance a receipt's check until it pauses or ends."""
        steps = self._running[name]
        try:
            pause = None if name in self._cancelled else self._paused(name, steps)
            if pause is not None:
                return pause
        except InvalidInput as error:
            self._send(Refused(name, str(error)))
        except torch.AcceleratorError:
            raise
        except Exception as error:  # fails this receipt only: out of memory, or a verdict that cannot be encoded
            self._send(Tokens([Delta(name, [], True, None, f"the replay of the receipt failed: {error!r}", 0, None)]))
        steps.close()
        del self._running[name]
        self._cancelled.discard(name)
        return "waits"

    def _paused(self, name: str, steps: Generator[Pause, None, Verdict]) -> Pause | None:
        """Advance a check; at its end send the verdict and return None."""
        try:
            return next(steps)
        except StopIteration as end:
            self._send(Verified(name, end.value))
            return None

    def _steps(self, receipt: bytes) -> Generator[Pause, None, Verdict]:
        if self._replayer is None:
            self._replayer = Replayer(self._model, chunk=CHUNK, parts=self._parts)
        return (yield from self._replayer.steps(decode_receipt(receipt)))
