"""Serve from an engine process without a model that speaks the real protocol, to measure the front alone.

    python -m benchmarks.scripted_engine [--interval 0.02] [--port 0]

Every ``interval`` seconds each open request gets its next token, up to its max_tokens, in one message per step as from
a real engine. If the front reads more slowly, the next step starts later. The tokens repeat a text; each request starts
at a different place in it.
"""

import argparse
import asyncio
import functools
import itertools
import os
import socket
import sys
import threading
import time
from pathlib import Path

import uvicorn
from tokenizers import Tokenizer

import detcompile
from detcompile.config import engine_secret
from detcompile.serving.app import new_app
from detcompile.serving.engines import protocol
from detcompile.serving.engines.fleet import Fleet
from detcompile.serving.engines.handshake import front_of
from detcompile.serving.engines.launchers import LocalProcess
from detcompile.serving.logs import write_logs
from detcompile.serving.server import listen, serve
from detcompile.serving.service import Service

__all__ = ["serve_front"]

TOKENIZER = (Path(detcompile.__file__).parent / "tiny" / "tokenizer.json").read_text()
TEXT = Path(__file__).read_text()
HELLO = protocol.Hello(
    name="scripted",
    fingerprint="f" * 64,
    fingerprint_parts={},
    certificate="{}",
    max_context=8192,
    vocab_size=4096,
    num_blocks=9,
    block_size=64,
    token_budget=512,
    default_params={},
    dtype="torch.float32",
    tokenizer=TOKENIZER,
    special_ids=[0, 1],
    special_tokens={},
    chat_template=None,
)


class _Open:
    """An open request."""

    def __init__(self, add: protocol.Add, place: int) -> None:
        self.left = int(add.params.get("max_tokens", 16))
        self.place = place


def draw(connection: socket.socket, sending: threading.Lock, requests: dict[str, _Open], interval: float) -> None:
    """Run steps forever."""
    tokens = Tokenizer.from_str(TOKENIZER).encode(TEXT).ids
    due, steps = time.monotonic(), itertools.count()
    while True:
        due = max(due + interval, time.monotonic())
        time.sleep(max(0.0, due - time.monotonic()))
        statistics = protocol.Statistics(num_steps=next(steps), num_running=len(requests))
        deltas = []
        for name, request in list(requests.items()):
            request.left, request.place = request.left - 1, (request.place + 1) % len(tokens)
            if not request.left:
                requests.pop(name, None)
            reason = None if request.left else "length"
            sample = protocol.SampleDelta(0, [tokens[request.place]], None, reason, None)
            deltas.append(protocol.Delta(name, [sample], not request.left, None, None, 0, None))
        data = protocol.frame(protocol.Heartbeat(statistics))
        with sending:
            connection.sendall(data + protocol.frame(protocol.Tokens(deltas)) if deltas else data)


def run_engine(connection: socket.socket, interval: float) -> None:
    """Serve a front until its connection ends."""
    reader, sending = connection.makefile("rb"), threading.Lock()
    requests: dict[str, _Open] = {}
    reader.read(protocol.LENGTH.unpack(reader.read(4))[0])  # the spec
    connection.sendall(protocol.frame(HELLO))
    threading.Thread(target=draw, args=(connection, sending, requests, interval), daemon=True).start()
    for place in itertools.count():
        head = reader.read(4)
        if not head:
            os._exit(0)
        command = protocol.decode_command(reader.read(protocol.LENGTH.unpack(head)[0]))
        if isinstance(command, protocol.Add):
            requests[command.request_id] = _Open(command, place)
        elif isinstance(command, protocol.Cancel):
            requests.pop(command.request_id, None)


async def serve_front(interval: float, port: int) -> int:
    """Serve HTTP over the scripted engine, until a signal."""
    write_logs(as_json=False)
    command = [sys.executable, "-m", "benchmarks.scripted_engine", "--interval", str(interval), "--engine"]
    fleet = functools.partial(Fleet, launcher=LocalProcess(command))
    with listen("127.0.0.1", port) as sock:
        service = Service(fleet=fleet, max_queue=1 << 16, max_queued_tokens=1 << 30)
        return await serve(service, new_app(service, "benchmark"), protocol.EngineSpec(model="scripted"), sock, 5.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--interval", type=float, default=0.02)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--engine", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.engine is not None:
        run_engine(front_of([arguments.engine], engine_secret()), arguments.interval)
        return
    with asyncio.Runner(loop_factory=uvicorn.Config("").get_loop_factory()) as runner:
        sys.exit(runner.run(serve_front(arguments.interval, arguments.port)))


if __name__ == "__main__":
    main()
