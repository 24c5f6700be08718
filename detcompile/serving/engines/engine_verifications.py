"""Replays of receipts between the steps of an engine."""

from collections import deque
from collections.abc import Callable, Generator, Mapping
from typing import Any

import torch

from detcompile.errors import InvalidInput
from detcompile.models.compiled import CompiledModel
from detcompile.serving.engines.protocol import Delta, Refused, Tokens, Verified, Verify
from detcompile.serving.receipts.receipt import decode_receipt
from detcompile.serving.receipts.replay import Replayer
from detcompile.serving.receipts.verdict import Verdict

CHUNK = 256  # tokens that a replay may compute between two steps of the engine


class Verifications:
    """Replays one receipt at a time. Receipts may be added and canceled from any thread.

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
        self._running: tuple[str, Generator[None, None, Verdict]] | None = None
        self._cancelled: set[str] = set()
        self._replayer: Replayer | None = None

    def add(self, command: Verify) -> None:
        """Queue a receipt."""
        self._waiting.append(command)

    def follow(self, parts: Mapping[str, str]) -> None:
        """Take the fingerprint parts of new weights. Receipts that are being replayed were canceled before."""
        self._parts = parts
        self._replayer = self._running = None

    def cancel(self, request_id: str) -> None:
        """Cancel a receipt; unknown ids are ignored."""
        known = {command.request_id for command in list(self._waiting)}
        running = self._running
        if request_id in known or (running is not None and running[0] == request_id):
            self._cancelled.add(request_id)

    def step(self) -> bool:
        """Run a unit of work; return False if there is none.

        Raises:
            torch.AcceleratorError: the device is unusable in this process.
        """
        if self._running is None and not self._waiting:
            return False
        if self._running is None:
            command = self._waiting.popleft()
            self._running = (command.request_id, self._steps(command.receipt))
        name, steps = self._running
        ended = True
        try:
            ended = name in self._cancelled or self._verified(name, steps)
        except InvalidInput as error:
            self._send(Refused(name, str(error)))
        except torch.AcceleratorError:
            raise
        except Exception as error:  # fails this receipt only: out of memory, or a verdict that cannot be encoded
            self._send(Tokens([Delta(name, [], True, None, f"the replay of the receipt failed: {error!r}", 0, None)]))
        if ended:
            self._running = None
            self._cancelled.discard(name)
        return True

    def _verified(self, name: str, steps: Generator[None, None, Verdict]) -> bool:
        """Run a step of a replay; after the last, send the verdict and return True."""
        try:
            next(steps)
            return False
        except StopIteration as end:
            self._send(Verified(name, end.value))
            return True

    def _steps(self, receipt: bytes) -> Generator[None, None, Verdict]:
        if self._replayer is None:
            self._replayer = Replayer(self._model, chunk=CHUNK, parts=self._parts)
        return (yield from self._replayer.steps(decode_receipt(receipt)))
