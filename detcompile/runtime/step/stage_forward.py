"""StageForward: a stage's program as a forward: rows come from the process of the stage before, and go on to the next.

Legend: T tokens of a step, padding included, H features of a row.
"""

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from detcompile.runtime.step.layout import TOKEN_BUCKETS
from detcompile.step import StepInputs

__all__ = ["StageForward"]

MOST_SENT = 8  # steps whose rows are on their way at a time


class StageForward:
    """Logits [R, V] of a step in the last stage, and its rows [1, T, H] in the others.

    A step is ``receive``, the forward, ``send``, in this order and in the order in which all stages are told of steps.
    Only the forward is a part of a CUDA graph: what it reads stays in one place.

    Args:
        program: takes rows [1, T, H], token ids in the first stage, and gives rows, or logits in the last stage.
        rows: an example of what it takes, on its device; None in the first stage.
        before: rank, among all of torch.distributed, of the process that sends rows; None in the first stage.
        after: rank of the process that they are sent to; None in the last stage.
        hosts: a group of all processes that moves the host's memory, where theirs cannot move a GPU's; else None.
    """

    def __init__(
        self,
        program: Callable[..., Any],
        rows: Tensor | None,
        before: int | None,
        after: int | None,
        hosts: dist.ProcessGroup | None = None,
    ) -> None:
        assert (rows is None) == (before is None), "the first stage alone takes token ids"
        self._program, self._rows = program, rows
        self._before, self._after, self._hosts = before, after, hosts
        self._connected = False
        self._static: Tensor | None = None  # what CUDA graphs read
        self._given: Tensor | None = None  # rows of the step
        if rows is not None:
            most = TOKEN_BUCKETS[-1] if rows.is_cuda else 0
            self._static = rows.new_zeros(1, most, rows.shape[2])
        self._begun = _Moment(torch.device("cpu"))
        self._sent: deque[tuple[Any, Tensor]] = deque()  # with the memory that is read meanwhile

    @property
    def gives_logits(self) -> bool:
        """Whether this is the last stage."""
        return self._after is None

    def unconnected(self) -> "StageForward":
        """Another forward of the same program, whose steps are nobody's but those of the thread that asks."""
        return StageForward(self._program, self._rows, self._before, self._after, self._hosts)

    @contextlib.contextmanager
    def connected(self) -> Iterator[None]:
        """Steps inside are the pipeline's. Others, of one stage alone, read zeros and go nowhere."""
        self._connected = True
        try:
            yield
        finally:
            self._connected = False

    def receive(self, num_tokens: int, device: torch.device) -> None:
        """Take the rows of the next step from the stage before; on a GPU nothing waits for them here."""
        if self._static is not None:
            fits = num_tokens <= self._static.shape[1]
            self._given = self._static[:, :num_tokens] if fits else self._static.new_zeros(
                1, num_tokens, self._static.shape[2]
            )
            if self._connected:
                came = self._given if self._hosts is None else torch.empty_like(self._given, device="cpu")
                dist.recv(_as_bytes(came), src=self._before, group=self._hosts)
                if self._hosts is not None:
                    self._given.copy_(came)
        self._begun = _Moment(device)

    @torch.no_grad()
    def __call__(self, input_ids: Tensor, position_ids: Tensor, step: StepInputs, logits_to_keep: Tensor) -> Any:
        """The program over the rows that came last, or in the first stage over ``input_ids`` [1, T]."""
        given = input_ids if self._given is None else self._given
        return self._program(given, position_ids, step, logits_to_keep)

    def send(self, rows: Tensor) -> None:
        """Start to hand rows to the next stage."""
        if not self._connected or self._after is None:
            return
        while self._sent and (len(self._sent) == MOST_SENT or self._sent[0][0].is_completed()):
            self._sent.popleft()[0].wait()
        own = rows.contiguous() if self._hosts is None else rows.cpu()
        own = own.clone() if own.is_cuda else own  # the next replay of a graph writes there
        self._sent.append((dist.isend(_as_bytes(own), dst=self._after, group=self._hosts), own))

    def timed(self) -> Callable[[], float]:
        """Ends the time of a step; what is returned gives its seconds, from when its rows were there."""
        begun, ended = self._begun, _Moment(self._begun.device)
        return lambda: ended.since(begun)


class _Moment:
    """A moment of a device's work."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._seconds = time.perf_counter()
        self._event = torch.cuda.Event(enable_timing=True) if device.type == "cuda" else None
        if self._event is not None:
            self._event.record()

    def since(self, earlier: "_Moment") -> float:
        """Seconds; of a GPU's, once it has come there."""
        if self._event is None or earlier._event is None:
            return self._seconds - earlier._seconds
        self._event.synchronize()
        return float(earlier._event.elapsed_time(self._event)) / 1e3


def _as_bytes(rows: Tensor) -> Tensor:
    """[bytes]: what every backend moves, whatever the dtype."""
    return rows.view(-1).view(torch.uint8)
