"""An engine process without a model: it speaks the real protocol and gives each sample the tokens 40, 41, 42, …

A sample gets one token every 20 ms, up to its max_tokens, each with the logprob -0.5 and the next tokens as
alternatives if requested. It starts in tenths of a second. A prompt of one or two tokens with POISON kills it at its
fifth token; one with SILENT draws nothing; the fourth token of one with FICKLE changes at every run. With SCRIPTED_TEXT
in the environment samples are this text and end with it; with SCRIPTED_MODEL the model is the one that this file names.
"""

import hashlib
import itertools
import os
import socket
import sys
import threading
import time
from pathlib import Path

from msgspec import structs
from tokenizers import Tokenizer

import detcompile
from detcompile.config import engine_secret
from detcompile.digests import fingerprint
from detcompile.serving.engines import protocol
from detcompile.serving.engines.handshake import front_of

POISON = 666
SILENT = 667
FICKLE = 668
NEVER, FIRST_FAILS = 1, 2  # ports of transfers
OTHERS = itertools.count(1000)
TEXT = os.environ.get("SCRIPTED_TEXT")
MODEL = os.environ.get("SCRIPTED_MODEL")
TOKENIZER = Path(detcompile.__file__).parent / "tiny" / "tokenizer.json"
WRITTEN = None if TEXT is None else Tokenizer.from_file(str(TOKENIZER)).encode(TEXT, add_special_tokens=False).ids
PARTS = {} if MODEL is None else {"weights": Path(MODEL).read_text()}
HELLO = protocol.Hello(
    name="scripted",
    fingerprint="f" * 64 if MODEL is None else fingerprint(PARTS),
    fingerprint_parts=PARTS,
    certificate="{}",
    max_context=2048,
    vocab_size=4096,
    num_blocks=9,
    block_size=64,
    token_budget=512,
    default_params={},
    dtype="torch.float32",
    tokenizer=TOKENIZER.read_text(),
    special_ids=[0, 1],
    special_tokens={},
    chat_template=None,
)


def holds(add: protocol.Add, token: int) -> bool:
    return len(add.prompt) <= 2 and token in add.prompt


def samples(add: protocol.Add, count: int, ended: bool) -> list[protocol.SampleDelta]:
    token, most = 39 + count if WRITTEN is None else WRITTEN[count - 1], add.params.get("logprobs")
    if holds(add, FICKLE) and count == 4:
        token = next(OTHERS)
    top = [(token + place, -0.5 - place) for place in range(most or 0)][:3]
    logprobs = None if most is None else [protocol.Token(token, -0.25 if add.adapter else -0.5, top)]
    reason = None if not ended else "length" if WRITTEN is None else "stop"
    return [protocol.SampleDelta(place, [token], logprobs, reason, None) for place in range(add.params.get("n", 1))]


def digest_of(path: str) -> str:
    """Return the digest of an adapter."""
    return hashlib.sha256(path.encode()).hexdigest()


def controlled(command: protocol.Control, staged: list[str], adapters: set[str]) -> protocol.Controlled | None:
    """Return the report of a control. Weights are the text of a folder's file; "bad" ones are refused.

    A transfer at port NEVER, or of a tensor of that name, waits for ever. At port FIRST_FAILS rank 1 is refused.
    """
    port = command.arguments.get("port")
    if port == FIRST_FAILS and command.arguments["rank"] == 1:
        return protocol.Controlled(command.call_id, {}, "cannot join", refused=True)
    if port in (NEVER, FIRST_FAILS) or command.arguments.get("names") == ["never"]:
        return None
    if command.action == "load":
        file = Path(command.arguments["path"]) / "model.safetensors"
        if not file.exists() or file.read_text() == "bad":
            return protocol.Controlled(command.call_id, {}, f"{file} does not fit", refused=True)
        staged[:] = [file.read_text()]
    if command.action == "check" and not staged:
        return protocol.Controlled(command.call_id, {}, "w is missing", refused=True)
    if command.action in ("drop", "join", "leave"):
        staged.clear()
    value = {}
    if command.action == "load_adapter":
        adapters.add(command.arguments["name"])
        if command.arguments["path"] == "bad":
            return protocol.Controlled(command.call_id, {}, "bad cannot be read", refused=True)
        value = {"digest": digest_of(command.arguments["path"])}
    elif command.action == "unload_adapter":
        adapters.remove(command.arguments["name"])
    elif command.action == "receive":
        staged[:] = command.arguments["names"][:1]
    elif command.action == "save":
        Path(command.arguments["path"]).write_text(staged[0])
    if command.action == "commit":
        if staged == ["deadly"]:
            os.abort()
        value = {"fingerprint_parts": PARTS | {"weights": staged.pop()}}
    elif command.action == "digests":
        value = {"checksums": {"a": "1", "b": "2"}, "weights": "3"}
    return protocol.Controlled(command.call_id, value)


def heartbeat(num_steps: int, num_decodes: int, names: list[str]) -> protocol.Heartbeat:
    num_blocks = HELLO.num_blocks
    actual = protocol.Statistics(
        num_steps=num_steps,
        num_generated_tokens=num_steps,
        num_running=len(names),
        num_blocks=num_blocks,
        num_free_blocks=max(0, num_blocks - len(names)),
    )
    steps = [protocol.Step(0.02, 0, num_decodes, 0)] if num_decodes else []
    return protocol.Heartbeat(actual, steps, [protocol.Holding(name, 1) for name in names])


def main() -> None:
    serve(front_of(sys.argv[1:], engine_secret()))


def serve(connection: socket.socket) -> None:
    reader, lock = connection.makefile("rb"), threading.Lock()
    open_requests: dict[str, protocol.Add] = {}

    def send(report) -> None:
        with lock:
            connection.sendall(protocol.frame(report))

    def receive():
        try:
            head = reader.read(4)
        except ConnectionResetError:  # the front ended before it had read all reports
            head = b""
        if not head:
            os._exit(0)  # the front is gone
        (size,) = protocol.LENGTH.unpack(head)
        return protocol.decode_command(reader.read(size))

    def draw() -> None:
        drawn: dict[str, int] = {}
        num_steps = 0
        while True:
            time.sleep(0.02 if WRITTEN is None else 0.001)
            deltas = []
            for name, add in [(name, add) for name, add in open_requests.items() if not holds(add, SILENT)]:
                before = len((add.resume or {}).get(0, ()))
                count = drawn[name] = drawn.get(name, before) + 1
                if holds(add, POISON) and count == 5:
                    os.abort()
                ended = count >= (add.params.get("max_tokens", 16) if WRITTEN is None else len(WRITTEN))
                if ended:
                    open_requests.pop(name, None)
                deltas.append(protocol.Delta(name, samples(add, count, ended), ended, None, None, 0, None))
            if deltas:
                send(protocol.Tokens(deltas))
            num_steps += bool(deltas)
            send(heartbeat(num_steps, len(deltas), list(open_requests)))

    spec, staged = receive(), []
    assert isinstance(spec, protocol.EngineSpec)
    hello = structs.replace(HELLO, adapters={name: digest_of(file.path) for name, file in spec.adapters.items()})
    if spec.weights is not None:
        parts = PARTS | {"weights": (Path(spec.weights) / "model.safetensors").read_text()}
        hello = structs.replace(hello, fingerprint=fingerprint(parts), fingerprint_parts=parts)
    adapters = {file.loaded_as for file in spec.adapters.values()}
    send(hello)
    threading.Thread(target=draw, daemon=True).start()
    while True:
        command = receive()
        if isinstance(command, protocol.Add):
            assert not command.adapter or command.adapter in adapters
            open_requests[command.request_id] = command
        elif isinstance(command, protocol.Control):
            if (report := controlled(command, staged, adapters)) is not None:
                send(report)
        else:
            open_requests.pop(command.request_id, None)


if __name__ == "__main__":
    main()
