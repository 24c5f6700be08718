"""AsyncWeightLoad: copy large weights to a device while the model is captured and compiled.

Capture and compilation do not read the values of weights. Until a weight is copied, zeros stand in for it. Code that
reads values calls `wait_for_weights` first.
"""

import contextlib
import threading
from collections.abc import Iterator
from contextvars import ContextVar

import torch
from torch import Tensor, nn

from detcompile.progress import stage

LEAST_BYTES = 1 << 20  # smaller weights are copied at once
UPDATE_SECONDS = 0.25  # between two updates of the progress text


def can_load_async(model: nn.Module) -> bool:
    """Return whether a loaded model of transformers is prepared and captured without reading its large weights.

    All of its large weights must belong to plain linears or to its only embedding.
    """
    tables = {module.weight for module in model.modules() if isinstance(module, nn.Embedding)}
    if not type(model).__module__.startswith("transformers.models.") or len(tables) != 1:
        return False
    plain = {id(module.weight) for module in model.modules() if type(module) in (nn.Linear, nn.Embedding)}
    return all(id(weight) in plain for weight in model.parameters() if weight.nbytes >= LEAST_BYTES)


class AsyncWeightLoad:
    """Copies a model's large weights to a device in a thread. Other weights are copied by the constructor.

    Args:
        model: a model on the CPU; its parameters move to the device.

    Attributes:
        failure: the exception that ended the copy, or None.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._pairs: list[tuple[Tensor, Tensor]] = []  # target and source
        for weight in model.parameters():
            if weight.nbytes >= LEAST_BYTES:
                source = weight.data
                weight.data = torch.zeros_like(source, device=device)
                self._pairs.append((weight.data, source))
        model.to(device)
        self._pairs.reverse()  # the last goes first
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(device))  # that stream writes the zeros
        self._done, self._total = 0, sum(target.nbytes for target, _ in self._pairs)
        self._given_up = threading.Event()
        self.failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="detcompile copying weights", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Wait until all weights are copied, for any stream. Raise the error of a failed copy."""
        if self._thread.is_alive():
            with stage(self._text()) as copying:
                while self._thread.is_alive():
                    self._thread.join(UPDATE_SECONDS)
                    copying.becomes(self._text())
        if self.failure is not None:
            raise self.failure

    def give_up(self) -> None:
        """Stop copying and wait for the thread to end."""
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
        except BaseException as error:  # wait() raises it
            self.failure = error
        self._pairs.clear()

    def _copy(self, target: Tensor, source: Tensor) -> None:
        target.copy_(source)
        self._done += target.nbytes


_under_way: ContextVar[AsyncWeightLoad | None] = ContextVar("under_way", default=None)


@contextlib.contextmanager
def loading_weights(weights: AsyncWeightLoad) -> Iterator[None]:
    """Load weights inside the block. At its end, they are copied, or the copy is stopped."""
    before = _under_way.set(weights)
    try:
        yield
        weights.wait()
    except Exception:
        if weights.failure is not None:  # torch.compile wraps an error that its backend raises
            raise weights.failure from None
        raise
    finally:
        weights.give_up()
        _under_way.reset(before)


def wait_for_weights() -> None:
    """Wait until no weight is being copied. Raise the error of a failed copy."""
    weights = _under_way.get()
    if weights is not None:
        weights.wait()
