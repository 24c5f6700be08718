"""The engine processes of a server as one. If an engine is lost, its answers continue bit for bit on another."""

import asyncio
import functools
import logging
import time
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace

from detcompile.config import visible_gpus
from detcompile.digests import fingerprint
from detcompile.errors import DetcompileError, InvalidInput, WorkerError
from detcompile.runtime.requests.poison_guard import PoisonRequestGuard
from detcompile.serving.engines.answers import Answer
from detcompile.serving.engines.engine_link import EngineLink
from detcompile.serving.engines.launchers import Launcher, LocalProcess
from detcompile.serving.engines.placement import Blocklist, Router
from detcompile.serving.engines.protocol import Delta, EngineSpec, Hello, Statistics, Weights
from detcompile.serving.engines.spares import Spares

KEPT_LOSSES = 20
RETRY_SECONDS = 1.0  # after a failed launch
RESTART_SECONDS = 60.0  # window for ``most_restarts``
POLL_SECONDS = 0.02
SLEEP = "sleep"  # reason of a hold while no engine process runs
logger = logging.getLogger(__name__)


@dataclass
class EngineFailure:
    """A lost engine, for the dashboard.

    Attributes:
        at: Unix time in seconds.
        num_answers: answers that moved to other engines.
        seconds: time until a replacement served; None before.
    """

    at: float
    why: str
    num_answers: int
    seconds: float | None = None


class Fleet:
    """Engine processes that serve the same model. All methods must be called in the event loop's thread.

    Args:
        on_delta: called with every answer and its delta, after the answer was extended.
        launcher: launches engine processes; None starts them on this machine.
        replicas: number of engines.
        spare: keep an idle process with its imports done, to replace a lost engine.
        most_restarts: restarts per minute, and failed restarts in a row, after which the fleet fails.

    Attributes:
        spec: what engines load; set by ``start``.
        hello: the engines' description of the model; None until all of them serve.
        weights: the version that all engines have; None if the weights cannot change.
        keeps_weights: True if an engine that starts loads these weights.
        failure: why the fleet no longer serves.
        num_restarts: restarted engines.
        num_resumed: answers moved to another engine, counted at each move.
        losses: the most recent losses of engines, oldest first.
    """

    def __init__(
        self,
        on_delta: Callable[[Answer, Delta], None] = lambda answer, delta: None,
        launcher: Launcher | None = None,
        *,
        replicas: int = 1,
        spare: bool = False,
        most_restarts: int = 5,
    ) -> None:
        self.hello: Hello | None = None
        self.weights: Weights | None = None
        self.keeps_weights = True
        self.failure: DetcompileError | None = None
        self.num_restarts = 0
        self.num_resumed = 0
        self.links: list[EngineLink] = []
        self.losses: deque[EngineFailure] = deque(maxlen=KEPT_LOSSES)
        self._on_delta = on_delta
        self._launcher = LocalProcess() if launcher is None else launcher
        self._replicas = replicas
        self._most_restarts = most_restarts
        self._spares = Spares(self._new_link, keeps=spare, most_lost=most_restarts)
        self._waiting: list[Answer] = []
        self._router = Router()
        self._blocklist = Blocklist()
        self._guard = PoisonRequestGuard(self._blocklist.add)
        self._isolated_link: EngineLink | None = None  # serves one suspect and nothing else
        self._rolling: EngineLink | None = None  # gets no new answers
        self._holds: set[str] = set()  # reasons why engines get no answers
        self._past = Statistics()  # of replaced engines
        self._restarts: list[float] = []
        self._num_failed_restarts = 0  # since the last success
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def ready(self) -> bool:
        """Return True if an engine serves."""
        return self.hello is not None and any(link.ready for link in self.links)

    @property
    def statistics(self) -> Statistics:
        """Return the sum of all engines' counts, including ended engines, so that counters never decrease."""
        current = (link.statistics if link.failure is None else link.statistics.past for link in self.links)
        return functools.reduce(Statistics.plus, current, self._past)

    @property
    def restarts_left(self) -> int:
        """Return how many engines may be lost now before the fleet fails."""
        now = asyncio.get_running_loop().time()
        self._restarts = [past for past in self._restarts if now - past < RESTART_SECONDS]
        return self._most_restarts - max(len(self._restarts), self._num_failed_restarts)

    async def start(self, spec: EngineSpec) -> None:
        """Start the processes; ``settled`` waits until they serve."""
        self.spec = spec
        for index in range(self._replicas):
            self.links.append(await self._spares.open())
            self._start(index)

    async def settled(self) -> Hello:
        """Wait until all engines serve.

        Raises:
            DetcompileError: an engine failed to start.
        """
        try:
            hellos = [await link.settled() for link in self.links]
            for link in self.links:
                if link.failure is not None:  # lost while others started
                    raise link.failure
            if names := {name for hello in hellos for name in hellos[0].differing(hello)}:
                message = f"the engines' models differ in {', '.join(sorted(names))}"
                raise WorkerError(f"{message}: give all of them the same files and the same kind of device")
        except DetcompileError as error:
            self._give_up(error)
            raise
        self.hello = hellos[0]
        await self._spares.keep()
        return self.hello

    def add(self, answer: Answer) -> None:
        """Queue an answer.

        Raises:
            DetcompileError: the fleet has failed, or the request is blocked.
        """
        if self.failure is not None:
            raise self.failure
        self._blocklist.require_unblocked(answer)
        self._waiting.append(answer)
        self._place()

    def cancel(self, answer: Answer) -> None:
        """Cancel an answer."""
        if answer in self._waiting:
            self._waiting.remove(answer)
        self._guard.forget(answer)
        for link in self.links:
            link.cancel(answer)
        self._place()

    def hold(self, reason: str, *, interrupt: bool) -> None:
        """Give no answers to engines until ``end_hold`` is called with the same reason.

        Args:
            interrupt: take back the answers that engines have. Their tokens are kept, and they continue after these.
        """
        self._holds.add(reason)
        if interrupt:
            self._guard.interrupt()
            self._isolated_link = None
            drained = [answer for link in self.links for answer in link.drain()]
            self._waiting = [answer for answer in drained if answer not in self._guard.suspects] + self._waiting

    def end_hold(self, reason: str) -> None:
        """End a hold; answers run once no other reason is left."""
        self._holds.discard(reason)
        self._place()

    def holds(self, reason: str) -> bool:
        """Return True if answers are held for this reason."""
        return reason in self._holds

    @property
    def is_held(self) -> bool:
        """Return True if answers are held for any reason."""
        return bool(self._holds)

    @property
    def is_asleep(self) -> bool:
        """Return True if no engine process runs because of ``sleep``."""
        return SLEEP in self._holds and not any(link.ready for link in self.links)

    @property
    def has_running(self) -> bool:
        """Return True if an engine has answers."""
        return any(link.answers for link in self.links)

    async def all_ready(self) -> None:
        """Wait until every engine serves.

        Raises:
            DetcompileError: the fleet has failed.
        """
        while not all(link.ready for link in self.links):
            if self.failure is not None:
                raise self.failure
            await asyncio.sleep(POLL_SECONDS)

    async def control(self, action: str, **arguments: Any) -> list[dict[str, Any]]:
        """Run an action in every engine; return the results in the order of the engines.

        Raises:
            DetcompileError: the first error, after the action has ended everywhere.
        """
        calls = (link.control(action, arguments) for link in self.links)
        results = await asyncio.gather(*calls, return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return [result for result in results if not isinstance(result, BaseException)]

    async def commit(self, spec: EngineSpec, weights: Weights) -> None:
        """Make every engine serve the weights that it has staged. Answers must be held.

        An engine that is lost meanwhile is replaced by one with the new weights.

        Args:
            spec: what engines that start from now on load.
            weights: the new weights' name and number.

        Raises:
            DetcompileError: no engine took the weights; all have the old ones.
        """
        assert self.is_held and self.hello is not None
        before, self.spec = self.spec, spec
        calls = (link.control("commit", {}) for link in self.links)
        results = await asyncio.gather(*calls, return_exceptions=True)
        taken = next((result for result in results if not isinstance(result, BaseException)), None)
        if taken is None:
            self.spec = before
            raise next(result for result in results if isinstance(result, BaseException))
        parts: dict[str, str] = taken["fingerprint_parts"]
        whole = fingerprint(parts)
        self.weights = Weights(weights.version, weights.number, whole, parts["weights"])
        self.keeps_weights = spec.weights is not None
        self.hello = replace(self.hello, fingerprint=whole, fingerprint_parts=parts)
        for link, result in zip(self.links, results):
            if result != taken:
                link.kill()

    async def sleep(self) -> None:
        """End all engine processes, which frees their memory. Answers are held until ``wake`` and ``end_hold``."""
        self.hold(SLEEP, interrupt=True)
        for link in self.links:
            self._router.forget(link)
            await self._spares.end(link)

    async def wake(self) -> None:
        """Start the engines again after ``sleep``; ``end_hold`` lets answers run.

        Raises:
            DetcompileError: the fleet has failed.
        """
        for index, link in enumerate(self.links):
            if not link.ready:
                await self._renew(index)
        await self.all_ready()

    async def roll(self) -> bool:
        """Restart the engines one after another. Their answers continue on the others, or wait.

        Returns False at the first engine that does not come back; later ones are not restarted. Restarts nothing and
        returns False if a new engine could not load the current weights.
        """
        if not self.keeps_weights:
            return False
        for index, link in enumerate(self.links):
            if self.failure is not None or self.hello is None:
                return False
            if not link.ready:
                continue
            self._rolling = link
            self._requeue([answer for answer in link.drain() if answer is not self._guard.isolated])
            if link is self._isolated_link:
                self._isolated_link = None
                self._guard.interrupt()
            self._router.forget(link)
            await self._spares.end(link)
            self._rolling = None
            await self._renew(index)
            if not self.links[index].ready:
                return False
        return True

    async def stop(self) -> None:
        """End all processes and wait for their end."""
        self._give_up(WorkerError("the server stops"))
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(self._spares.end(link) for link in self._spares.owned))
        await self._launcher.close()

    def _start(self, index: int) -> None:
        """Start the engine at an index; local replicas get GPUs of their own."""
        shares, size = self._replicas > 1 and self._launcher.local, self.spec.tp * self.spec.pp
        gpus = visible_gpus(index * size, size) if shares else None
        self.links[index].start(replace(self.spec, visible_devices=gpus), lambda: self.hello)

    def _new_link(self) -> EngineLink:
        return EngineLink(self._on_progress, self._lost, self._launcher)

    def _on_progress(self, answer: Answer, delta: Delta | None) -> None:
        if delta is not None:
            self._on_delta(answer, delta)
        if self._guard.clears(answer):
            assert self._isolated_link is not None
            self._waiting += self._isolated_link.drain()
            self._place()

    def _lost(self, link: EngineLink, answers: list[Answer]) -> None:
        """Requeue a failed engine's answers, and replace the engine."""
        if self._spares.lost(link):
            self._run(self._spares.keep())
        if link is self._isolated_link:
            self._isolated_link = None
        self._router.forget(link)
        if self.hello is None or self.failure is not None:
            for answer in answers:
                answer.fail(WorkerError(f"the engine failed: {self.failure or link.failure}"))
            return
        self._requeue([answer for answer in answers if self._guard.died_with(answer)])
        if link in self.links:
            logger.warning("lost an engine: %s; %d answers continue on another", link.failure, len(answers))
            self.losses.append(loss := EngineFailure(time.time(), str(link.failure), len(answers)))
            self._run(self._restart(self.links.index(link), loss))

    def _requeue(self, answers: list[Answer]) -> None:
        """Put answers in front of the queue."""
        self.num_resumed += len(answers)
        self._waiting = answers + self._waiting
        self._place()

    async def _restart(self, index: int, loss: EngineFailure) -> None:
        """Replace a lost engine unless the restarts are used up."""
        start, error = asyncio.get_running_loop().time(), self.links[index].failure
        assert error is not None
        while self.failure is None and self.restarts_left > 0:
            self._restarts.append(asyncio.get_running_loop().time())
            self.num_restarts += 1
            self._num_failed_restarts += 1
            try:
                await self._replace(index)
            except DetcompileError as launch_error:  # the launch failed
                error = launch_error
                logger.warning("an engine could not be launched: %s", error)
                await asyncio.sleep(RETRY_SECONDS)
                continue
            if self.links[index].ready:
                loss.seconds = asyncio.get_running_loop().time() - start
                logger.warning("an engine serves again")
            return
        self._give_up(error)

    async def _renew(self, index: int) -> None:
        """Put a new engine in place of an ended one; if it cannot be launched, ``_restart`` tries again."""
        try:
            await self._replace(index)
        except DetcompileError as error:
            self.losses.append(loss := EngineFailure(time.time(), str(error), 0))
            self._run(self._restart(index, loss))

    async def _replace(self, index: int) -> None:
        """Put a new engine at an index. If it fails, too, ``_lost`` handles it."""
        link = await self._spares.take()
        self._past = self._past.plus(self.links[index].statistics.past)
        self.links[index] = link
        self._start(index)
        await link.start_ended()
        if link.ready:
            self._num_failed_restarts = 0
            self._place()
            await self._spares.keep()

    def _give_up(self, error: DetcompileError) -> None:
        self.failure = self.failure or error
        self._spares.close(self.failure)
        waiting, self._waiting = self._waiting + self._guard.suspects, []
        self._guard.suspects = []
        for answer in waiting + [answer for link in self.links for answer in link.drain()]:
            answer.fail(WorkerError(f"the engine failed: {self.failure}"))

    def _place(self) -> None:
        """Send waiting answers to engines that serve."""
        ready = [link for link in self.links if link.ready and link is not self._rolling]
        if not ready or self.hello is None or self._holds:
            return
        self._isolate_suspect(ready)
        open_links = [link for link in ready if link is not self._isolated_link]
        if open_links:
            waiting, self._waiting = self._waiting, []
            for answer in waiting:
                self._give(self._router.choose(open_links, answer), answer)

    def _isolate_suspect(self, ready: Sequence[EngineLink]) -> None:
        """Serve the next suspect alone, on a drained engine."""
        if self._guard.isolated is None:
            self._isolated_link = None
            if self._guard.suspects:
                self._isolated_link = min(ready, key=lambda link: len(link.answers))
                self._waiting += self._isolated_link.drain()
                self._give(self._isolated_link, self._guard.isolate_next())

    def _give(self, link: EngineLink, answer: Answer) -> None:
        file = self.spec.adapters.get(answer.adapter)
        if answer.adapter_digest != ("" if file is None else file.digest):
            answer.fail(InvalidInput(f"adapter {answer.adapter!r} was unloaded or replaced before the answer ended"))
            self._on_progress(answer, None)
            return
        answer.loaded_adapter = "" if file is None else file.loaded_as
        answer.engine = self.links.index(link)
        answer.weights = self.weights
        link.add(answer)

    def _run(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
