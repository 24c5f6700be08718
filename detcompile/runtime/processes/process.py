"""Main program of a worker process: runs its parent's commands until the parent is gone. Also the frames they exchange.

Python runs this file by its path, and it imports only the standard library. A rank therefore starts at once, can report
even a failing import, and the caller's script needs no ``if __name__ == "__main__"``.

A command is (ticket, name, arguments): call the target's method of that name. An answer is (ticket, kind, value).
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

DONE, RAISED, NOTE, BEAT = "done", "raised", "note", "beat"  # kinds of answers
BEAT_SECONDS = 0.25
HEADER = struct.Struct("<QQ")  # number of parts; bytes of the lengths and the parts together
ALIGNMENT = 16  # bytes; each part of a frame begins at a multiple
LEAST_BESIDE = 1 << 14  # bytes; smaller buffers go inside the pickle
MOST_PARTS = 512  # sendmsg accepts at most 1024
SET_PARENT_DEATH_SIGNAL = 1  # prctl(2)


def encode(message: Any) -> list[memoryview]:
    """Encode a message as a frame: header, pickle, then large buffers, which are not copied."""
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
    """Frames over a stream socket; only ``receive`` and ``send`` block.

    Attributes:
        moved: time of the last transfer in either direction (time.monotonic).
    """

    moved = 0.0

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._socket = connection
        self._unsent: deque[memoryview] = deque()
        self._header = bytearray(HEADER.size)
        self._body: bytearray | None = None  # None while reading the header
        self._num_parts = 0
        self._filled = 0

    def fileno(self) -> int:
        """Return the socket's descriptor."""
        return self._socket.fileno()

    def close(self) -> None:
        """Close the connection for both sides, even if others hold a copy of the socket."""
        self._unsent.clear()
        with contextlib.suppress(OSError):  # the other side may have closed first
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def push(self, frame: list[memoryview]) -> bool:
        """Send as much of this and earlier frames as the socket accepts. Return True if everything was sent."""
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
        """Return the messages that have arrived completely.

        Raises:
            EOFError: the other side is gone, and all its messages were read.
        """
        messages: list[Any] = []
        while True:
            target = self._header if self._body is None else self._body
            try:
                got = self._socket.recv_into(memoryview(target)[self._filled :])
            except BlockingIOError:
                return messages
            except OSError:  # connection reset, or the machine is gone
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
        """Wait for messages and return at least one."""
        while True:
            if messages := self.pull():
                return messages
            select.select([self._socket], [], [])

    def send(self, frame: list[memoryview]) -> None:
        """Send a frame; wait until the socket has accepted it."""
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
    """Serve the socket given on the command line."""
    given = json.loads(sys.argv[1])
    sys.path[:] = given["path"]
    os.set_inheritable(given["socket"], False)
    connection = socket.socket(fileno=given["socket"])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C and ends this process
    if given["die_with_thread"] and sys.platform == "linux":
        ctypes.CDLL(None).prctl(SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    serve(connection)


def serve(connection: socket.socket, *, dialed: bool = False) -> None:
    """Run the commands of a connection. Never returns: this process ends with the connection.

    Args:
        dialed: the process was started by someone else. While a command runs it sends a beat every 0.25 s, because the
            caller cannot watch it; and it ends with exit code 1 instead of killing its process group.
    """
    end = functools.partial(os._exit, 1) if dialed else _end
    threading.Thread(target=_end_with_caller, args=(connection.fileno(), end), daemon=True).start()
    try:
        _serve(Channel(connection), dialed)
    except (EOFError, OSError):  # from the socket only: exceptions of commands are sent back
        end()


def _serve(channel: Channel, beats: bool) -> None:
    """Run commands. The first builds the target; the others are its methods.

    A command without a ticket is answered only if it fails.
    """
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
    """Return the error if it can be pickled, else None."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return None
    return error


def _end_with_caller(fileno: int, end: Callable[[], None]) -> None:
    """Wait until the other end of the socket is closed, whatever the main thread does; then end the process at once."""
    poller = select.poll()
    poller.register(fileno, select.POLLRDHUP if sys.platform == "linux" else select.POLLHUP)
    poller.poll()
    end()


def _end() -> None:
    """Kill this process and its children."""
    if os.getpgrp() == os.getpid():
        os.killpg(os.getpgrp(), signal.SIGKILL)
    os._exit(1)


if __name__ == "__main__":
    main()
