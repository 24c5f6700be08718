"""The engine's end of the socket: a bad request or frame leaves no client waiting."""

import os
import socket
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from detcompile.errors import InvalidInput
from detcompile.runtime.speculation.speculator import SpeculationConfig
from detcompile.serving.engines import engine_process
from detcompile.serving.engines.command_loop import Wire
from detcompile.serving.engines.controls import Controls
from detcompile.serving.engines.engine_process import EngineServer
from detcompile.serving.engines.engine_verifications import Verifications
from detcompile.serving.engines.protocol import LENGTH, Add, Broken, EngineSpec, Refused, Tokens, decode_report, frame


class Engine:
    """Takes requests without stop strings."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def add_request(self, prompt: list[int], params: Any, *, request_id: str, **how: Any) -> None:
        if params.stop:
            raise RuntimeError("a fault at this request")
        self.names.append(request_id)


def reading(engine: Engine, *frames: bytes) -> tuple[socket.socket, threading.Thread]:
    """The front's end, with frames sent through it, and the thread that reads them."""
    ours, theirs = socket.socketpair()
    ours.settimeout(20)
    for data in frames:
        ours.sendall(data)
    model: Any = SimpleNamespace(device=torch.device("cpu"))
    verifications = Verifications(model, {}, print)
    controls = Controls(model, engine, verifications, print)
    server = EngineServer(engine, Wire(theirs, end_code=3), verifications, controls)
    thread = threading.Thread(target=server._read, daemon=True)
    thread.start()
    return ours, thread


def received(front: socket.socket) -> Any:
    (size,) = LENGTH.unpack(front.recv(LENGTH.size, socket.MSG_WAITALL))
    return decode_report(front.recv(size, socket.MSG_WAITALL))


def test_failed_request_gets_error_and_next_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = threading.Event()
    monkeypatch.setattr(os, "_exit", lambda code: ended.set() if code == 3 else None)
    engine = Engine()
    bad, refused, good = Add("1", [1], {"stop": ["a"]}), Add("2", [1], {"n": 0}), Add("3", [1], {})
    front, thread = reading(engine, frame(bad), frame(refused), frame(good))
    report = received(front)
    assert isinstance(report, Tokens) and report.deltas[0].finished
    assert report.deltas[0].request_id == "1" and "a fault at this request" in report.deltas[0].error
    report = received(front)
    assert isinstance(report, Refused) and report.request_id == "2" and "n 0 must be" in report.message
    front.shutdown(socket.SHUT_WR)
    thread.join(20)
    assert engine.names == ["3"] and ended.is_set()


@pytest.mark.parametrize(
    "body", [b"", b"\xc1", frame(Refused("1", "no command"))[LENGTH.size :]], ids=["empty", "no msgpack", "a report"]
)
def test_invalid_command_ends_process_with_message(body: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    codes: list[int] = []
    monkeypatch.setattr(os, "_exit", codes.append)
    front, thread = reading(Engine(), LENGTH.pack(len(body)) + body)
    report = received(front)
    thread.join(20)
    assert isinstance(report, Broken) and "invalid command" in report.message and codes == [1]


@pytest.mark.parametrize(
    ("requests", "given"),
    [
        ("off", None),
        ("automatic", SpeculationConfig(switch="automatic")),
        ("always", SpeculationConfig(switch="always")),
    ],
)
def test_speculation_setting_reaches_engine(requests: Any, given: Any) -> None:
    class Model:
        def engine(self, config: Any, *, speculation: Any) -> None:
            assert speculation == given
            raise InvalidInput("seen")

    spec = EngineSpec(model="tiny", speculation=requests)
    with pytest.raises(InvalidInput, match="seen"):
        engine_process._start(spec, Wire(socket.socket()), lambda loaded, tp, pp: Model())
