"""Large weights of a model travel to a device while it is captured and compiled, which reads none of their values.

Until they are there zeros stand in their place. Who reads a weight's value calls `wait_for_weights` first.
"""

import contextlib
import threading
from collections.abc import Iterator
from contextvars import ContextVar

import torch
from torch import Tensor, nn

from detcompile.progress import stage

__all__ = ["TravellingWeights", "may_travel", "travelling", "wait_for_weights"]

LEAST_BYTES = 1 << 20  # of a weight that a thread copies; smaller ones are copied at once
LOOK = 0.25  # seconds between two looks at how far the copy is


def may_travel(model: nn.Module) -> bool:
    """Whether a model of transformers, as it was loaded, is prepared and captured without a look at its large weights.

    They are those of plain linears, and of the one table of embeddings, which a run reads as a whole or not at all.
    """
    tables = {module.weight for module in model.modules() if isinstance(module, nn.Embedding)}
    if not type(model).__module__.startswith("transformers.models.") or len(tables) != 1:
        return False
    plain = {id(module.weight) for module in model.modules() if type(module) in (nn.Linear, nn.Embedding)}
    return all(id(weight) in plain for weight in model.parameters() if weight.nbytes >= LEAST_BYTES)


class TravellingWeights:
    """A copy of a model's large weights to a device, in a thread that begins with it; all else is there at once.

    Args:
        model: a model on the CPU, whose parameters get their place on the device here.

    Attributes:
        failure: what the copy failed with; None as long as it did not.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._pairs: list[tuple[Tensor, Tensor]] = []  # where a weight shall be, and where it is
        for weight in model.parameters():
            if weight.nbytes >= LEAST_BYTES:
                source = weight.data
                weight.data = torch.zeros_like(source, device=device)
                self._pairs.append((weight.data, source))
        model.to(device)
        self._pairs.reverse()  # the last goes first
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(device))  # the zeros are written there
        self._done, self._total = 0, sum(target.nbytes for target, _ in self._pairs)
        self._given_up = threading.Event()
        self.failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="detcompile copying weights", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Return when all weights are there, for any stream; raise what the copy failed with."""
        if self._thread.is_alive():
            with stage(self._text()) as copying:
                while self._thread.is_alive():
                    self._thread.join(LOOK)
                    copying.becomes(self._text())
        if self.failure is not None:
            raise self.failure

    def give_up(self) -> None:
        """Copy no further weight; returns when the thread has ended."""
        self._given_up.set()
        self._thread.join()

    def _text(self) -> str:
        return f"copy weights {self._done / 1e9:.1f}/{self._total / 1e9:.1f} GB"

    def _run(self) -> None:
        try:
            with contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
                while self._pairs and not self._given_up.is_set():
                    self._copy(*self._pairs.pop())
                if self._stream is not None:
                    self._stream.synchronize()
        except BaseException as error:  # whatever it is, wait() raises it
            self.failure = error
        self._pairs.clear()

    def _copy(self, target: Tensor, source: Tensor) -> None:
        target.copy_(source)
        self._done += target.nbytes


_under_way: ContextVar[TravellingWeights | None] = ContextVar("under_way", default=None)


@contextlib.contextmanager
def travelling(weights: TravellingWeights) -> Iterator[None]:
    """Weights are under way within; they are there, or the copy is given up, when the block ends."""
    before = _under_way.set(weights)
    try:
        yield
        weights.wait()
    except Exception:
        if weights.failure is not None:  # torch.compile, in whose backend it was waited, wraps it in its own
            raise weights.failure from None
        raise
    finally:
        weights.give_up()
        _under_way.reset(before)


def wait_for_weights() -> None:
    """Return when no weight is under way; raise what the copy of one failed with."""
    weights = _under_way.get()
    if weights is not None:
        weights.wait()
