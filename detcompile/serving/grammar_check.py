"""Checks grammars by compiling them in a helper process that can be killed; most compile in microseconds.

Some grammars of a few hundred characters compile for hours, others may crash the compiling process. Engines never see
those. Run as ``python -m detcompile.serving.grammar_check``, this module is the helper process: it reads a tokenizer
and then grammars from standard input, and answers each with an error message or an empty one.
"""

import asyncio
import contextlib
import math
import resource
import socket
import struct
import sys
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager
from pathlib import Path
from types import SimpleNamespace

import msgspec
from tokenizers import Tokenizer

from detcompile.errors import EngineError, InvalidInput, WorkerError
from detcompile.runtime.grammars.compiler import COMPILE_SECONDS, GrammarCompiler
from detcompile.runtime.grammars.grammar import Grammar, Kind
from detcompile.serving.engines.processes import BOUND, Child
from detcompile.serving.http_errors import OverdueError

LENGTH = struct.Struct(">I")  # prefix of every frame
START_SECONDS = 60.0
MOST_MEMORY = 4 << 30  # bytes of address space that grammars may add
MOST_KEPT = 4096  # cached results, by digest
REFUSED_SECONDS = 300.0  # lifetime of a cached rejection: the machine may have been busy


class GrammarCheck:
    """Rejects grammars that do not compile in time. All methods must be called in the event loop's thread.

    Args:
        tokenizer: the model's tokenizer as JSON.
        seconds: longest wait for the helper process.
        waiting: counts a waiting request, given its owner and how many of the owner's wait; may refuse it.
    """

    def __init__(
        self,
        tokenizer: str | None,
        seconds: float,
        waiting: Callable[[str, int], AbstractContextManager[None]],
    ) -> None:
        self._tokenizer = tokenizer
        self._seconds = seconds
        self._waiting = waiting
        self._known: dict[str, tuple[str, float]] = {}  # error message or "", and expiry
        self._process: Child | None = None
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self._lock = FairLock()

    async def require(self, grammar: Grammar | None, owner: str) -> None:
        """Reject a grammar that is invalid, too large or too slow to compile.

        Args:
            owner: owner of its API key; one grammar per owner is checked at a time, in fair order.

        Raises:
            InvalidInput: the grammar is rejected.
            HTTPError: too many requests wait.
            OverdueError: it waited too long.
            WorkerError: the helper process does not start.
        """
        if grammar is None:
            return
        if self._tokenizer is None:
            raise InvalidInput("a grammar needs the text of tokens, but this model has no tokenizer")
        refusal = self._find(grammar)
        if refusal is None:
            refusal = await self._with_lock(self._tokenizer, grammar, owner)
        if refusal:
            raise InvalidInput(refusal)

    async def stop(self) -> None:
        """Kill the helper process."""
        process, self._process = self._process, None
        streams, self._streams = self._streams, None
        if streams is not None:
            streams[1].close()
        if process is not None:
            process.kill()
            await process.wait()

    def _find(self, grammar: Grammar) -> str | None:
        """Return a cached result."""
        refusal, end = self._known.get(grammar.digest, ("", -math.inf))
        return refusal if time.monotonic() < end else None

    async def _with_lock(self, tokenizer: str, grammar: Grammar, owner: str) -> str:
        with contextlib.ExitStack() as waiting:
            waiting.enter_context(self._waiting(owner, self._lock.num_waiting(owner)))
            try:
                async with self._lock.hold(owner, self._seconds):
                    waiting.close()
                    refusal = self._find(grammar)  # it may have been checked for another request
                    if refusal is None:
                        refusal = await self._refusal(tokenizer, grammar)
                        self._keep(grammar, refusal)
                    return refusal
            except TimeoutError as error:
                message = f"the request waited for the check of its grammar for over {self._seconds:g} s"
                raise OverdueError(message, 503) from error

    def _keep(self, grammar: Grammar, refusal: str) -> None:
        self._known.pop(grammar.digest, None)
        self._known[grammar.digest] = refusal, time.monotonic() + REFUSED_SECONDS if refusal else math.inf
        if len(self._known) > MOST_KEPT:
            del self._known[next(iter(self._known))]

    async def _refusal(self, tokenizer: str, grammar: Grammar) -> str:
        try:
            if self._process is None or self._process.returncode is not None:
                await self._start(tokenizer)
        except (TimeoutError, OSError, asyncio.IncompleteReadError) as error:
            reason = await self._reason(error)
            await self.stop()
            raise WorkerError(f"the process that checks grammars does not start: {reason}") from error
        except asyncio.CancelledError:
            await self.stop()
            raise
        try:
            async with asyncio.timeout(2 * COMPILE_SECONDS):
                return await self._ask([grammar.kind, grammar.source])
        except (TimeoutError, OSError, asyncio.IncompleteReadError):
            await self.stop()
            seconds = 2 * COMPILE_SECONDS
            return f"grammar: this {grammar.kind} takes over {seconds:g} s, or too much memory: give a smaller one"
        except asyncio.CancelledError:
            await self.stop()  # its answer would be read as another grammar's
            raise

    async def _start(self, tokenizer: str) -> None:
        await self.stop()
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        with theirs:
            self._streams = await asyncio.open_connection(sock=ours)
            command = (*BOUND, "detcompile.serving.grammar_check")  # BOUND: a grammar could keep it alive for hours
            self._process = Child(command, stdin=theirs.fileno(), stdout=theirs.fileno())
        async with asyncio.timeout(START_SECONDS):
            await self._ask(tokenizer)

    async def _reason(self, error: Exception) -> str:
        """Return why the helper process did not start."""
        if self._process is not None and not isinstance(error, TimeoutError):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1):
                    await self._process.wait()
            return f"it ended with exit code {self._process.returncode}, and its output is in the server's log"
        return repr(error)

    async def _ask(self, content: str | list[str]) -> str:
        assert self._streams is not None
        reader, writer = self._streams
        data = msgspec.msgpack.encode(content)
        writer.write(LENGTH.pack(len(data)) + data)
        await writer.drain()
        (size,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
        return (await reader.readexactly(size)).decode()


class FairLock:
    """A lock that goes to the owner with the least time so far.

    All methods must be called in the event loop's thread.
    """

    def __init__(self) -> None:
        self._queues: dict[str, deque[asyncio.Future[None]]] = {}  # no empty queues
        self._seconds: dict[str, float] = {}  # used by owners since all queues were last empty
        self._busy = False

    def num_waiting(self, owner: str) -> int:
        """Return how many tasks of an owner wait."""
        return len(self._queues.get(owner, ()))

    @contextlib.asynccontextmanager
    async def hold(self, owner: str, seconds: float) -> AsyncIterator[None]:
        """Wait for the lock and hold it within the context.

        Raises:
            TimeoutError: waited longer than ``seconds``.
        """
        await self._begin(owner, seconds)
        clock = asyncio.get_running_loop().time
        start = clock()
        try:
            yield
        finally:
            self._busy = False
            self._seconds[owner] = self._seconds.get(owner, 0.0) + clock() - start
            self._grant_next()

    async def _begin(self, owner: str, seconds: float) -> None:
        granted = asyncio.get_running_loop().create_future()
        self._queues.setdefault(owner, deque()).append(granted)
        self._grant_next()
        try:
            async with asyncio.timeout(seconds):
                await granted
        except (TimeoutError, asyncio.CancelledError):
            if granted.done() and not granted.cancelled():  # it got the lock at the same time
                self._busy = False
                self._grant_next()
            else:
                self._drop(owner, granted)
            raise

    def _drop(self, owner: str, granted: asyncio.Future[None]) -> None:
        queue = self._queues[owner]
        queue.remove(granted)
        if not queue:
            del self._queues[owner]

    def _grant_next(self) -> None:
        if self._busy:
            return
        if not self._queues:
            self._seconds.clear()
            return
        owner = min(self._queues, key=lambda waiter: self._seconds.get(waiter, 0.0))
        granted = self._queues[owner][0]
        self._drop(owner, granted)
        self._busy = True
        granted.set_result(None)


def main() -> None:
    """Check the grammars on standard input until it ends."""
    frames = iter(_read, None)
    first = next(frames, None)
    if first is None:
        return
    backend = Tokenizer.from_str(msgspec.msgpack.decode(first, type=str))
    tokenizer = SimpleNamespace(backend_tokenizer=backend)
    compiler = GrammarCompiler(tokenizer, backend.get_vocab_size(), (), seconds=START_SECONDS)
    _refusal(compiler, Grammar.json_object())  # warmup: the first compile takes longer
    # Limits only what grammars add: libraries alone map gigabytes on a machine of many cores.
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + MOST_MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    _answer("")
    for frame in frames:
        _answer(_refusal(compiler, Grammar(*msgspec.msgpack.decode(frame, type=tuple[Kind, str]))))


def _refusal(compiler: GrammarCompiler, grammar: Grammar) -> str:
    try:
        compiler.matcher(grammar, ())
    except (InvalidInput, EngineError) as error:
        return str(error)
    return ""


def _read() -> bytes | None:
    head = sys.stdin.buffer.read(LENGTH.size)
    return sys.stdin.buffer.read(LENGTH.unpack(head)[0]) if len(head) == LENGTH.size else None


def _answer(text: str) -> None:
    data = text.encode()
    sys.stdout.buffer.write(LENGTH.pack(len(data)) + data)
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
