"""Request history: rows for the page's table of open and recently finished requests."""

import time
from collections import deque
from collections.abc import Iterable

import msgspec

from detcompile.serving.engines.answers import Answer, Verification

KEPT_ROWS = 100


class Row(msgspec.Struct, kw_only=True):
    """One prompt and its answer, without text.

    Attributes:
        request_id: counts the server's prompts.
        name: id of the reply and of its receipt.
        state: "waiting" for its first token, "running", the finish reasons, "cancelled" or "failed".
        seed: decimal digits, because JavaScript rounds large numbers; None for a verification.
        engine: index of its current or last engine; None before the first.
        num_moves: how often it moved to another engine.
        first_seconds: time to first token; None before it.
        seconds: time to its end, or until now.
        has_receipt: the server still has the reply's receipt.
    """

    request_id: str
    name: str
    state: str
    seed: str | None
    engine: int | None
    num_prompt_tokens: int
    num_samples: int
    num_tokens: int
    num_cached_tokens: int
    num_preemptions: int
    num_moves: int
    first_seconds: float | None
    seconds: float
    has_receipt: bool = False


class History:
    """Rows of the most recent finished requests."""

    def __init__(self) -> None:
        self._ended: deque[tuple[str, Row]] = deque(maxlen=KEPT_ROWS)

    def ended(self, answer: Answer, *, cancelled: bool) -> None:
        """Add a released answer; ``cancelled``: released before its end."""
        self._ended.append((answer.owner, _row(answer, "cancelled" if cancelled else _state(answer))))

    def rows(self, open_answers: Iterable[Answer], most: int, owner: str) -> list[Row]:
        """Return up to ``most`` rows: open answers, then finished ones, each newest first.

        Args:
            owner: sha256 in hex of the API key whose answers are listed.
        """
        shown = [answer for answer in open_answers if answer.owner == owner][: -most - 1 : -1]
        ended = [row for key, row in reversed(self._ended) if key == owner]
        return [*(_row(answer, _state(answer)) for answer in shown), *ended][:most]


def _row(answer: Answer, state: str) -> Row:
    first = answer.first_token
    return Row(
        request_id=answer.request_id,
        name=answer.name,
        state=state,
        seed=None if isinstance(answer, Verification) else str(answer.params.seed),
        engine=answer.engine,
        num_prompt_tokens=len(answer.prompt_ids),
        num_samples=answer.params.n,
        num_tokens=answer.num_tokens,
        num_cached_tokens=answer.num_cached_tokens,
        num_preemptions=answer.num_preemptions,
        num_moves=max(0, answer.tries - 1),
        first_seconds=None if first is None else first - answer.arrival,
        seconds=time.monotonic() - answer.arrival,
    )


def _state(answer: Answer) -> str:
    if answer.error is not None:
        return "failed"
    if isinstance(answer, Verification):
        return "verified" if answer.finished else "verifying"
    if answer.finished:
        return ", ".join(sorted({sample.finish_reason or "" for sample in answer.samples}))
    return "waiting" if answer.first_token is None else "running"
