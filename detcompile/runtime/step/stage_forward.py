"""StageForward: the forward of a pipeline stage. It receives rows from the previous stage and sends rows to the next.

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

MOST_SENT = 8  # steps whose rows may be in transit at a time


class StageForward:
    """Returns logits [R, V] of a step in the last stage, and rows [1, T, H] in the others.

    A step is ``receive``, the forward, ``send``. All stages run their steps in the same order. Only the forward is part
    of a CUDA graph; its input stays at one address.

    Args:
        program: takes rows [1, T, H] (token ids in the first stage) and returns rows (logits in the last stage).
        rows: example input on its device; None in the first stage.
        before: global torch.distributed rank of the previous stage; None in the first stage.
        after: global rank of the next stage; None in the last stage.
        hosts: a process group that moves host memory, if the default group cannot move GPU memory; else None.
    """

    def __init__(
        self,
        program: Callable[..., Any],
        rows: Tensor | None,
        before: int | None,
        after: int | None,
        hosts: dist.ProcessGroup | None = None,
    ) -> None:
        assert (rows is None) == (before is None), "only the first stage takes token ids"
        self._program, self._rows = program, rows
        self._before, self._after, self._hosts = before, after, hosts
        self._connected = False
        self._static: Tensor | None = None  # input buffer of the CUDA graphs
        self._given: Tensor | None = None  # input rows of the current step
        if rows is not None:
            most = TOKEN_BUCKETS[-1] if rows.is_cuda else 0
            self._static = rows.new_zeros(1, most, rows.shape[2])
        self._begun = _Moment(torch.device("cpu"))
        self._sent: deque[tuple[Any, Tensor]] = deque()  # sends in progress, with the memory they read

    @property
    def gives_logits(self) -> bool:
        """True in the last stage."""
        return self._after is None

    def unconnected(self) -> "StageForward":
        """Return another forward of the same program, for the calling thread's local steps."""
        return StageForward(self._program, self._rows, self._before, self._after, self._hosts)

    @contextlib.contextmanager
    def connected(self) -> Iterator[None]:
        """Exchange rows with the other stages inside this context; elsewhere steps read zeros and send nothing."""
        self._connected = True
        try:
            yield
        finally:
            self._connected = False

    def receive(self, num_tokens: int, device: torch.device) -> None:
        """Receive the rows of the next step from the previous stage; on a GPU this does not wait."""
        if self._static is not None:
            fits = num_tokens <= self._static.shape[1]
            self._given = (
                self._static[:, :num_tokens] if fits else self._static.new_zeros(1, num_tokens, self._static.shape[2])
            )
            if self._connected:
                received = self._given if self._hosts is None else torch.empty_like(self._given, device="cpu")
                dist.recv(_as_bytes(received), src=self._before, group=self._hosts)
                if self._hosts is not None:
                    self._given.copy_(received)
        self._begun = _Moment(device)

    @torch.no_grad()
    def __call__(self, input_ids: Tensor, position_ids: Tensor, step: StepInputs, logits_to_keep: Tensor) -> Any:
        """Run the program on the rows received last, or in the first stage on ``input_ids`` [1, T]."""
        given = input_ids if self._given is None else self._given
        return self._program(given, position_ids, step, logits_to_keep)

    def send(self, rows: Tensor) -> None:
        """Start to send rows to the next stage."""
        if not self._connected or self._after is None:
            return
        while self._sent and (len(self._sent) == MOST_SENT or self._sent[0][0].is_completed()):
            self._sent.popleft()[0].wait()
        payload = rows.contiguous() if self._hosts is None else rows.cpu()
        payload = payload.clone() if payload.is_cuda else payload  # the next replay overwrites a graph's output
        self._sent.append((dist.isend(_as_bytes(payload), dst=self._after, group=self._hosts), payload))

    def timed(self) -> Callable[[], float]:
        """Mark the end of a step. Return a function that gives its seconds since its rows arrived."""
        begun, ended = self._begun, _Moment(self._begun.device)
        return lambda: ended.since(begun)


class _Moment:
    """A point in time of a device's work."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._seconds = time.perf_counter()
        self._event = torch.cuda.Event(enable_timing=True) if device.type == "cuda" else None
        if self._event is not None:
            self._event.record()

    def since(self, earlier: "_Moment") -> float:
        """Return seconds since ``earlier``; on a GPU, wait until the device has reached this point."""
        if self._event is None or earlier._event is None:
            return self._seconds - earlier._seconds
        self._event.synchronize()
        return float(earlier._event.elapsed_time(self._event)) / 1e3


def _as_bytes(rows: Tensor) -> Tensor:
    """View rows as [bytes], which every backend can move whatever the dtype."""
    return rows.view(-1).view(torch.uint8)
