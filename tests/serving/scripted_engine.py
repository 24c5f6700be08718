"""An engine process without a model: it speaks the real protocol and gives each sample the tokens 40, 41, 42, …

A sample gets one token every 20 ms, up to its max_tokens. It starts in tenths of a second. A request whose prompt holds
POISON kills it at its fifth token; one whose prompt holds SILENT draws nothing.
"""

import os
import socket
import sys
import threading
import time
from pathlib import Path

import detcompile
from detcompile.config import engine_secret
from detcompile.serving.engines import protocol
from detcompile.serving.engines.handshake import front_of

POISON = 666
SILENT = 667
TOKENIZER = Path(detcompile.__file__).parent / "tiny" / "tokenizer.json"
HELLO = protocol.Hello(
    name="scripted",
    fingerprint="f" * 64,
    fingerprint_parts={},
    certificate="{}",
    max_context=2048,
    vocab_size=4096,
    num_blocks=9,
    block_size=64,
    default_params={},
    tokenizer=TOKENIZER.read_text(),
    special_ids=[0, 1],
    special_tokens={},
    chat_template=None,
)


def main() -> None:
    serve(front_of(sys.argv[1:], engine_secret()))


def serve(connection: socket.socket) -> None:
    reader, lock = connection.makefile("rb"), threading.Lock()
    open_requests: dict[str, protocol.Add] = {}

    def send(report) -> None:
        with lock:
            connection.sendall(protocol.frame(report))

    def receive():
        head = reader.read(4)
        if not head:
            os._exit(0)  # the front is gone
        (size,) = protocol.LENGTH.unpack(head)
        return protocol.decode_command(reader.read(size))

    def draw() -> None:
        drawn: dict[str, int] = {}
        while True:
            time.sleep(0.02)
            send(protocol.Heartbeat(protocol.Statistics(num_running=len(open_requests))))
            deltas = []
            for name, add in [(name, add) for name, add in open_requests.items() if SILENT not in add.prompt]:
                before = len((add.resume or {}).get(0, ()))
                count = drawn[name] = drawn.get(name, before) + 1
                if POISON in add.prompt and count == 5:
                    os.abort()
                ended = count >= add.params.get("max_tokens", 16)
                if ended:
                    open_requests.pop(name, None)
                sample = protocol.SampleDelta(0, [39 + count], None, "length" if ended else None, None)
                deltas.append(protocol.Delta(name, [sample], ended, None, None, 0, None))
            if deltas:
                send(protocol.Tokens(deltas))

    assert isinstance(receive(), protocol.EngineSpec)
    send(HELLO)
    threading.Thread(target=draw, daemon=True).start()
    while True:
        command = receive()
        if isinstance(command, protocol.Add):
            open_requests[command.request_id] = command
        else:
            open_requests.pop(command.request_id, None)


if __name__ == "__main__":
    main()
