"""What a worker process runs: commands in, answers out, until its parent is gone. Also the frames that both speak.

Python runs this file by its path and it imports the standard library alone: a rank is there at once, reports even an
import that fails, and the caller's script needs no ``if __name__ == "__main__"``.

A command is (ticket, name, arguments): the target's method of that name is called. An answer is (ticket, kind, value).
"""

import contextlib
import ctypes
import functools
import importlib
import json
import os
import pickle
import select
import signal
import socket
import struct
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from typing import Any

__all__ = ["BEAT", "Channel", "DONE", "NOTE", "RAISED", "encode", "serve"]

DONE, RAISED, NOTE, BEAT = "done", "raised", "note", "beat"  # kinds of answers
BEAT_SECONDS = 0.25
HEADER = struct.Struct("<QQ")  # number of parts; bytes of their lengths and of the parts together
ALIGNMENT = 16  # bytes; each part of a frame begins at a multiple
LEAST_BESIDE = 1 << 14  # bytes; smaller buffers travel inside the pickle
MOST_PARTS = 512  # a call of sendmsg takes no more than 1024
SET_PARENT_DEATH_SIGNAL = 1  # prctl(2)


def encode(message: Any) -> list[memoryview]:
    """A message as a frame: its header, then the pickle, then large buffers, which nobody copies."""
    beside: list[memoryview] = []

    def keep_inside(buffer: pickle.PickleBuffer) -> bool:
        raw = buffer.raw()
        if raw.nbytes >= LEAST_BESIDE:
            beside.append(raw)
        return raw.nbytes < LEAST_BESIDE

    parts = [memoryview(pickle.dumps(message, protocol=5, buffer_callback=keep_inside)), *beside]
    lengths = struct.pack(f"<{len(parts)}Q", *(part.nbytes for part in parts))
    frame = [memoryview(lengths + bytes(-len(lengths) % ALIGNMENT))]
    for part in parts:
        frame += [part, memoryview(bytes(-part.nbytes % ALIGNMENT))]
    return [memoryview(HEADER.pack(len(parts), sum(piece.nbytes for piece in frame))), *frame]


class Channel:
    """Frames over a stream socket; no call but ``receive`` and ``send`` ever waits.

    Attributes:
        moved: when bytes went last, either way, by time.monotonic.
    """

    moved = 0.0

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._socket = connection
        self._unsent: deque[memoryview] = deque()
        self._header = bytearray(HEADER.size)
        self._body: bytearray | None = None  # None while the header is read
        self._num_parts = 0
        self._filled = 0

    def fileno(self) -> int:
        """Descriptor of the socket."""
        return self._socket.fileno()

    def close(self) -> None:
        """The other side reads an end, whoever else holds a copy of the socket."""
        self._unsent.clear()
        with contextlib.suppress(OSError):  # the other side may have gone first
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def push(self, frame: list[memoryview]) -> bool:
        """Send as much of a frame, and of those before it, as the socket takes; returns whether nothing is left."""
        self._unsent.extend(piece for piece in frame if piece.nbytes)
        while self._unsent:
            try:
                sent = self._socket.sendmsg([self._unsent[i] for i in range(min(MOST_PARTS, len(self._unsent)))])
            except BlockingIOError:
                return False
            self.moved = time.monotonic()
            while sent:
                piece = self._unsent.popleft()
                if sent < piece.nbytes:
                    self._unsent.appendleft(piece[sent:])
                sent = max(0, sent - piece.nbytes)
        return True

    def pull(self) -> list[Any]:
        """Messages that have arrived whole.

        Raises:
            EOFError: the other side is gone, and everything that it said was read.
        """
        messages: list[Any] = []
        while True:
            target = self._header if self._body is None else self._body
            try:
                got = self._socket.recv_into(memoryview(target)[self._filled :])
            except BlockingIOError:
                return messages
            except OSError:  # reset, or of a machine that is gone
                got = 0
            if not got:
                if messages:
                    return messages
                raise EOFError
            self.moved = time.monotonic()
            self._filled += got
            if self._filled == len(target):
                self._filled = 0
                if self._body is None:
                    self._num_parts, size = HEADER.unpack(self._header)
                    self._body = bytearray(size)
                else:
                    messages.append(_decode(memoryview(self._body), self._num_parts))
                    self._body = None

    def receive(self) -> list[Any]:
        """Wait for messages, one at least."""
        while True:
            if messages := self.pull():
                return messages
            select.select([self._socket], [], [])

    def send(self, frame: list[memoryview]) -> None:
        """Send a frame, waiting until the socket has taken it."""
        done = self.push(frame)
        while not done:
            select.select([], [self._socket], [])
            done = self.push([])


def _decode(body: memoryview, num_parts: int) -> Any:
    lengths = struct.unpack_from(f"<{num_parts}Q", body)
    parts, start = [], -(-8 * num_parts // ALIGNMENT) * ALIGNMENT
    for length in lengths:
        parts.append(body[start : start + length])
        start += -(-length // ALIGNMENT) * ALIGNMENT
    return pickle.loads(parts[0], buffers=parts[1:])


def main() -> None:
    """Serve the socket named on the command line."""
    given = json.loads(sys.argv[1])
    sys.path[:] = given["path"]
    os.set_inheritable(given["socket"], False)
    connection = socket.socket(fileno=given["socket"])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent's Ctrl-C; it then ends this process
    if given["die_with_thread"] and sys.platform == "linux":
        ctypes.CDLL(None).prctl(SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    serve(connection)


def serve(connection: socket.socket, *, dialled: bool = False) -> None:
    """Obey the commands of a connection. Never returns: the end of the connection is this process's.

    Args:
        dialled: somebody else has started this process. It tells every 0.25 s of a command that it runs, as the caller
            cannot ask its machine, and ends with exit code 1 where it kills its group otherwise.
    """
    end = functools.partial(os._exit, 1) if dialled else _end
    threading.Thread(target=_end_with_caller, args=(connection.fileno(), end), daemon=True).start()
    try:
        _serve(Channel(connection), dialled)
    except (EOFError, OSError):  # of the socket alone: what commands raise is answered
        end()


def _serve(channel: Channel, beats: bool) -> None:
    """The first command builds the target, each later one is a method of it. Commands without a ticket are answered
    only where they fail."""
    sending = threading.Lock()
    busy = threading.Event()

    def send(frame: list[memoryview]) -> None:
        with sending:
            channel.send(frame)

    def note(text: str) -> None:
        send(encode((None, NOTE, text)))

    def beat() -> None:
        with contextlib.suppress(OSError):  # the other thread ends the process
            while busy.wait():
                send(encode((None, BEAT, None)))
                time.sleep(BEAT_SECONDS)

    if beats:
        threading.Thread(target=beat, daemon=True).start()
    target: Any = None
    while True:
        for ticket, name, arguments in channel.receive():
            frame: list[memoryview] = []
            busy.set()
            try:
                if target is None:
                    target, value = _build(name, arguments, note), None
                else:
                    value = getattr(target, name)(*arguments)
                if ticket is not None:
                    frame = encode((ticket, DONE, value))
            except BaseException as error:
                frame = encode((ticket, RAISED, (_portable(error), traceback.format_exc())))
            busy.clear()
            send(frame)


def _build(target: str, arguments: tuple[Any, ...], note: Callable[[str], None]) -> Any:
    module, _, attribute = target.partition(":")
    return getattr(importlib.import_module(module), attribute)(*arguments, note)


def _portable(error: BaseException) -> BaseException | None:
    """The error, if the other side can read it."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return None
    return error


def _end_with_caller(fileno: int, end: Callable[[], None]) -> None:
    """Wait until the other end of the socket is closed, whatever the main thread does; then end at once."""
    poller = select.poll()
    poller.register(fileno, select.POLLRDHUP if sys.platform == "linux" else select.POLLHUP)
    poller.poll()
    end()


def _end() -> None:
    """End this process and those that it started."""
    if os.getpgrp() == os.getpid():
        os.killpg(os.getpgrp(), signal.SIGKILL)
    os._exit(1)


if __name__ == "__main__":
    main()
