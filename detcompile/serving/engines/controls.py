"""Controls: what the front end makes an engine do between steps, while it has no request."""

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from detcompile.errors import DetcompileError, InvalidInput
from detcompile.runtime.engine import Engine
from detcompile.serving.engines.protocol import Control, Controlled


class Controls:
    """Runs one action at a time. Commands may be added from any thread.

    Args:
        engine: the engine.
        send: sends reports to the front end.
    """

    def __init__(self, engine: Engine, send: Callable[[Any], None]) -> None:
        self._engine = engine
        self._send = send
        self._waiting: deque[Control] = deque()
        self._actions: Mapping[str, Callable[..., dict[str, Any]]] = {"forget_prefixes": self._forget_prefixes}

    def add(self, command: Control) -> None:
        """Queue an action."""
        self._waiting.append(command)

    def step(self) -> bool:
        """Run the next action; return False if there is none."""
        if not self._waiting:
            return False
        command = self._waiting.popleft()
        self._send(_result(command, self._actions[command.action]))
        return True

    def _forget_prefixes(self) -> dict[str, Any]:
        self._end_cancelled()
        self._engine.forget_prefixes()
        return {}

    def _end_cancelled(self) -> None:
        """Run the steps that end requests which the front end has cancelled."""
        while self._engine.has_unfinished_requests:
            self._engine.step()


def _result(command: Control, action: Callable[..., dict[str, Any]]) -> Controlled:
    """Return the report of an action. Only errors of this package are reported; others end the engine."""
    try:
        return Controlled(command.call_id, action(**command.arguments))
    except DetcompileError as error:
        return Controlled(command.call_id, {}, str(error), isinstance(error, InvalidInput))
