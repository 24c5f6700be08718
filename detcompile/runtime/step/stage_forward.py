"""StageForward: a stage's program as a forward: rows come from the process of the stage before, and go on to the next.

Legend: T tokens of a step, R rows whose logits are wanted, H features of a row.
"""

import time
from collections import deque
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from detcompile.runtime.step.runner import Forward
from detcompile.step import StepInputs

__all__ = ["StageForward"]

MOST_SENT = 8  # steps whose rows are on their way at a time


class StageForward:
    """Gives the logits [R, V] in the last stage, and nothing, [R, 0], in the others.

    Args:
        program: takes rows [1, T, H], token ids in the first stage, and gives rows, or logits in the last stage.
        rows: an example of what it takes; None in the first stage.
        before: rank, among all of torch.distributed, of the process that sends rows; None in the first stage.
        after: rank of the process that they are sent to; None in the last stage.

    Attributes:
        waited: seconds spent so far on waiting for another stage.
    """

    def __init__(self, program: Forward, rows: Tensor | None, before: int | None, after: int | None) -> None:
        assert (rows is None) == (before is None), "the first stage alone takes token ids"
        self._program = program
        self._rows = rows
        self._before, self._after = before, after
        self.waited = 0.0
        self._sent: deque[tuple[Any, Tensor]] = deque()  # with the memory that is read meanwhile

    @torch.no_grad()
    def __call__(self, input_ids: Tensor, position_ids: Tensor, step: StepInputs, logits_to_keep: Tensor) -> Tensor:
        """Run a step, in the order in which all stages are told to."""
        given = input_ids if self._rows is None else self._receive(self._rows, input_ids.shape[1])
        found: Tensor = self._program(given, position_ids, step, logits_to_keep)
        if self._after is None:
            return found
        self._send(found, self._after)
        return found.new_empty(len(logits_to_keep), 0)

    def _receive(self, rows: Tensor, num_tokens: int) -> Tensor:
        given = rows.new_empty(1, num_tokens, rows.shape[2])
        since = time.perf_counter()
        dist.recv(_as_bytes(given), src=self._before)
        self.waited += time.perf_counter() - since
        return given

    def _send(self, rows: Tensor, rank: int) -> None:
        since = time.perf_counter()
        while len(self._sent) >= MOST_SENT:
            self._sent.popleft()[0].wait()
        self.waited += time.perf_counter() - since
        sent = rows.contiguous()
        self._sent.append((dist.isend(_as_bytes(sent), dst=rank), sent))


def _as_bytes(rows: Tensor) -> Tensor:
    """[bytes]: what every backend moves, whatever the dtype."""
    return rows.view(-1).view(torch.uint8)
