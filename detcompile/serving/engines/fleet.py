"""Fleet: the engine processes of a server as one. An answer whose engine is lost goes on, with its bits, on another."""

import asyncio
import functools
import logging
import time
from collections import deque
from collections.abc import Callable, Coroutine, Sequence

from msgspec.structs import replace

from detcompile.config import visible_gpus
from detcompile.errors import DetcompileError, WorkerError
from detcompile.runtime.requests.poison_guard import PoisonRequestGuard
from detcompile.serving.engines.answers import Answer
from detcompile.serving.engines.engine_link import SILENCE_SECONDS, EngineLink
from detcompile.serving.engines.launchers import Launcher, LocalProcess
from detcompile.serving.engines.placement.blocklist import Blocklist
from detcompile.serving.engines.placement.loss import Loss
from detcompile.serving.engines.placement.router import Router
from detcompile.serving.engines.placement.spares import Spares
from detcompile.serving.engines.protocol import Delta, EngineSpec, Hello, Statistics

__all__ = ["Fleet"]

KEPT_LOSSES = 20
RETRY_SECONDS = 1.0  # where there was no process to be had
RESTART_SECONDS = 60.0  # in which so many restarts are too many
logger = logging.getLogger(__name__)


class Fleet:
    """Engine processes that serve the same model. All methods are for the event loop's thread.

    Args:
        on_delta: called with every answer and its delta, once the answer has taken it.
        launcher: gives engine processes; None starts them on this machine.
        replicas: how many of them.
        spare: whether another process waits, its imports done, to take the place of one that is lost.
        most_restarts: engines that may be started again in a minute, and without one that serves in between; beyond,
            the fleet has failed.
        silence: seconds without a heartbeat after which an engine counts as hanging.

    Attributes:
        hello: what the engines have said of the model; None before all of them served.
        failure: why nothing is served any more.
        num_restarts: engines that were started again.
        num_resumed: answers that went on elsewhere, counted each time.
        losses: the last engines that were lost, oldest first.
    """

    def __init__(
        self,
        on_delta: Callable[[Answer, Delta], None] = lambda answer, delta: None,
        launcher: Launcher | None = None,
        *,
        replicas: int = 1,
        spare: bool = False,
        most_restarts: int = 5,
        silence: float = SILENCE_SECONDS,
    ) -> None:
        self.hello: Hello | None = None
        self.failure: DetcompileError | None = None
        self.num_restarts = 0
        self.num_resumed = 0
        self.links: list[EngineLink] = []
        self.losses: deque[Loss] = deque(maxlen=KEPT_LOSSES)
        self._on_delta = on_delta
        self._launcher = LocalProcess() if launcher is None else launcher
        self._replicas = replicas
        self._most_restarts = most_restarts
        self._silence = silence
        self._spares = Spares(self._new_link, keeps=spare, most_lost=most_restarts)
        self._waiting: list[Answer] = []
        self._router = Router()
        self._blocklist = Blocklist()
        self._guard = PoisonRequestGuard(self._blocklist.add)
        self._isolated_link: EngineLink | None = None  # serves one suspect, and nothing else
        self._rolling: EngineLink | None = None  # gets nothing new
        self._past = Statistics()  # of engines that others have taken the place of
        self._restarts: list[float] = []
        self._in_vain = 0  # of these, since one came back
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def ready(self) -> bool:
        """Whether an engine serves."""
        return self.hello is not None and any(link.ready for link in self.links)

    @property
    def statistics(self) -> Statistics:
        """The engines' newest counts as one, with those of engines that have ended: they never fall."""
        own = (link.statistics if link.failure is None else link.statistics.past for link in self.links)
        return functools.reduce(Statistics.plus, own, self._past)

    @property
    def restarts_left(self) -> int:
        """Engines that may be lost now before the fleet has failed."""
        now = asyncio.get_running_loop().time()
        self._restarts = [past for past in self._restarts if now - past < RESTART_SECONDS]
        return self._most_restarts - max(len(self._restarts), self._in_vain)

    async def start(self, spec: EngineSpec) -> None:
        """Start the processes; ``settled`` waits until they serve."""
        self._spec = spec
        for index in range(self._replicas):
            self.links.append(await self._spares.open())
            self._start(index)

    async def settled(self) -> Hello:
        """Wait until all engines serve.

        Raises:
            DetcompileError: why one does not.
        """
        try:
            found = [await link.settled() for link in self.links]
            for link in self.links:
                if link.failure is not None:  # it was lost while others started
                    raise link.failure
            if names := {name for hello in found for name in found[0].differing(hello)}:
                said = f"the engines' models differ in {', '.join(sorted(names))}"
                raise WorkerError(f"{said}: give all of them the same files, and devices of one kind")
        except DetcompileError as error:
            self._give_up(error)
            raise
        self.hello = found[0]
        await self._spares.keep()
        return self.hello

    def add(self, answer: Answer) -> None:
        """Have an answer made; what comes is given to it.

        Raises:
            DetcompileError: nothing is served any more; or engines have ended with this request.
        """
        if self.failure is not None:
            raise self.failure
        self._blocklist.require_unblocked(answer)
        self._waiting.append(answer)
        self._place()

    def cancel(self, answer: Answer) -> None:
        """Nobody waits for an answer any more."""
        if answer in self._waiting:
            self._waiting.remove(answer)
        self._guard.forget(answer)
        for link in self.links:
            link.cancel(answer)
        self._place()

    async def roll(self) -> bool:
        """Start every engine anew, one after another; what they serve goes on on the others, or waits.

        Returns:
            Whether all came back: the first that does not is the last that is ended.
        """
        for index, link in enumerate(self.links):
            if self.failure is not None or self.hello is None:
                return False
            if not link.ready:
                continue
            self._rolling = link
            self._hand_over([answer for answer in link.take_back() if answer is not self._guard.isolated])
            if link is self._isolated_link:
                self._isolated_link = None
                self._guard.interrupt()
            self._router.forget(link)
            await self._spares.end(link)
            self._rolling = None
            try:
                await self._replace(index)
            except DetcompileError as error:  # there is no process to be had now
                self.losses.append(loss := Loss(time.time(), str(error), 0))
                self._run(self._restart(index, loss))
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
        """Have the process in this place serve, on devices of its own where there are several."""
        shares, size = self._replicas > 1 and self._launcher.local, self._spec.tp * self._spec.pp
        own = visible_gpus(index * size, size) if shares else None
        self.links[index].start(replace(self._spec, visible_devices=own), self.hello)

    def _new_link(self) -> EngineLink:
        return EngineLink(self._news, self._lost, self._launcher, self._silence)

    def _news(self, answer: Answer, delta: Delta | None) -> None:
        if delta is not None:
            self._on_delta(answer, delta)
        if self._guard.clears(answer):
            assert self._isolated_link is not None
            self._waiting += self._isolated_link.take_back()
            self._place()

    def _lost(self, link: EngineLink, answers: list[Answer]) -> None:
        """An engine serves no more: its answers wait for another one, and its place is taken."""
        if self._spares.lost(link):
            self._run(self._spares.keep())
        if link is self._isolated_link:
            self._isolated_link = None
        self._router.forget(link)
        if self.hello is None or self.failure is not None:
            for answer in answers:
                answer.fail(WorkerError(f"the engine failed: {self.failure or link.failure}"))
            return
        self._hand_over([answer for answer in answers if self._guard.died_with(answer)])
        if link in self.links:
            logger.warning("an engine is lost: %s; %d answers go on on another", link.failure, len(answers))
            self.losses.append(loss := Loss(time.time(), str(link.failure), len(answers)))
            self._run(self._restart(self.links.index(link), loss))

    def _hand_over(self, answers: list[Answer]) -> None:
        """These go on as soon as an engine takes them, before all that have not begun."""
        self.num_resumed += len(answers)
        self._waiting = answers + self._waiting
        self._place()

    async def _restart(self, index: int, loss: Loss) -> None:
        """Take the place of an engine that was lost, unless that happens too often."""
        begun, error = asyncio.get_running_loop().time(), self.links[index].failure
        assert error is not None
        while self.failure is None and self.restarts_left > 0:
            self._restarts.append(asyncio.get_running_loop().time())
            self.num_restarts += 1
            self._in_vain += 1
            try:
                await self._replace(index)
            except DetcompileError as refused:  # there is no process to be had now
                error = refused
                logger.warning("an engine is not started: %s", error)
                await asyncio.sleep(RETRY_SECONDS)
                continue
            if self.links[index].ready:
                loss.seconds = asyncio.get_running_loop().time() - begun
                logger.warning("an engine serves again")
            return
        self._give_up(error)

    async def _replace(self, index: int) -> None:
        """A new engine in the place of one that has ended; where it fails as well, ``_lost`` goes on from there."""
        link = await self._spares.take()
        self._past = self._past.plus(self.links[index].statistics.past)
        self.links[index] = link
        self._start(index)
        await link.over()
        if link.ready:
            self._in_vain = 0
            self._place()
            await self._spares.keep()

    def _give_up(self, error: DetcompileError) -> None:
        self.failure = self.failure or error
        self._spares.close(self.failure)
        waiting, self._waiting = self._waiting + self._guard.suspects, []
        self._guard.suspects = []
        for answer in waiting + [answer for link in self.links for answer in link.take_back()]:
            answer.fail(WorkerError(f"the engine failed: {self.failure}"))

    def _place(self) -> None:
        """Give what waits to engines that serve."""
        ready = [link for link in self.links if link.ready and link is not self._rolling]
        if not ready or self.hello is None:
            return
        self._isolate_suspect(ready)
        open_links = [link for link in ready if link is not self._isolated_link]
        if open_links:
            waiting, self._waiting = self._waiting, []
            for answer in waiting:
                self._give(self._router.choose(open_links, answer), answer)

    def _isolate_suspect(self, ready: Sequence[EngineLink]) -> None:
        """Have the next suspect served alone, on an engine that is cleared for it."""
        if self._guard.isolated is None:
            self._isolated_link = None
            if self._guard.suspects:
                self._isolated_link = min(ready, key=lambda link: len(link.answers))
                self._waiting += self._isolated_link.take_back()
                self._give(self._isolated_link, self._guard.isolate_next())

    def _give(self, link: EngineLink, answer: Answer) -> None:
        answer.engine = self.links.index(link)
        link.add(answer)

    def _run(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
