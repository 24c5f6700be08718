"""SpeculationSwitch: whether the next step should draft, from what steps have taken and given so far.

For steps of like load it compares the seconds a token of plain steps (which overlap, where the engine overlaps) with
those of steps that drafted, drafting included. It reads no clock and draws nothing: its answers follow from what it is
told.

What it may lose is bounded by an account in units of plain steps. A step that drafted pays in what it gained or takes
out what it lost; a plain step pays in RATE; nobody drafts on an empty account. So the tokens of n plain steps take the
time of n * (1 + RATE) + DEPOSIT at most, and beside that the overdraft of one step and the WARM_UP drafts of each load,
in which kernels are compiled and graphs captured: in the long run never slower than 0.97 times plain decoding. Later
steps that compile or capture count for OUTLIER medians of their kind: they come once, and say nothing of the next.
A single step may also take so long, for one request's sake or the machine's, that paying it off would end drafts for
everybody: a debt is cut at DEBT, and at twice as much each time that it is reached again before drafts have paid.
"""

import statistics
from collections import deque
from typing import NamedTuple

__all__ = ["Load", "SpeculationSwitch"]

RATE = 0.02  # of the time may go into trying again
DEPOSIT = 2.0  # plain steps, at the start and before trying again
DEBT = 16.0  # plain steps, the first time
SAVINGS = 16.0  # plain steps; what speculation gained, kept for its bad spells
WARM_UP = 3  # steps that drafted, of each load, that are not counted
NUM_PLAIN = 3  # plain steps that must be known of a load
NUM_TRIED = 5  # steps that drafted, before they count
PAUSE = 32  # plain steps before trying again
REFRESH = 256  # steps that drafted in a row, after which plain ones are measured again
PLAIN_WINDOW, DRAFTED_WINDOW = 5, 16  # steps kept
OUTLIER = 4.0  # medians: what a step counts for at most


class Load(NamedTuple):
    """What a step runs."""

    num_decodes: int
    num_prefill_tokens: int = 0

    @property
    def bucket(self) -> tuple[int, int]:
        """Loads whose steps take about as long: two buckets an octave of decodes, one of prefill tokens."""
        size = max(0, self.num_decodes - 1).bit_length()
        lower_half = size > 1 and self.num_decodes <= 3 << (size - 2)
        return 2 * size - lower_half, (self.num_prefill_tokens + 63).bit_length()


class SpeculationSwitch:
    """Says whether to draft, step after step."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, int], _Known] = {}
        self._account = DEPOSIT
        self._saving = False  # the account was emptied: wait until the deposit is there again
        self._most_debt = DEBT
        self._num_plain = 0  # in a row

    def wants(self, load: Load) -> bool:
        """Whether a step of this load should draft."""
        known = self._known.get(load.bucket)
        if load.num_decodes == 0 or known is None or known.num_fresh < NUM_PLAIN or self._saving:
            return False
        gain = known.gain
        return gain is None or gain > 1.0

    def gain(self, load: Load) -> float | None:
        """How many times sooner tokens come with drafts, as measured; None where that is not known."""
        known = self._known.get(load.bucket)
        return None if known is None else known.gain

    def observe(self, load: Load, seconds: float, tokens: float, *, drafted: bool) -> None:
        """A step has finished.

        Args:
            seconds: from the end of the step before to its own.
            tokens: tokens that each decode got, on average.
            drafted: whether the step should draft, even if there was nothing to guess.
        """
        if load.num_decodes == 0:
            return
        known = self._known.setdefault(load.bucket, _Known())
        if drafted:
            self._num_plain = 0
            self._observe_drafted(known, seconds, tokens)
        else:
            self._num_plain += 1
            self._observe_plain(known, seconds)

    def _observe_drafted(self, known: "_Known", seconds: float, tokens: float) -> None:
        known.num_drafted += 1
        known.num_waited = 0
        known.num_since_plain += 1
        if known.num_since_plain >= REFRESH:
            known.num_fresh = 0
        if known.num_drafted <= WARM_UP or not known.plain:
            return
        known.drafted.append((seconds, tokens))
        counted = min(seconds, known.most_seconds)
        self._pay(tokens - counted / statistics.median(known.plain))
        if self._account >= SAVINGS:
            self._most_debt = DEBT

    def _observe_plain(self, known: "_Known", seconds: float) -> None:
        known.num_waited += 1
        if self._num_plain == 1:  # it filled the pipeline again, which is part of what the drafts before cost
            if known.plain:
                more = seconds / statistics.median(known.plain) - 1.0
                self._pay(-min(max(0.0, more), OUTLIER))
            return
        known.plain.append(seconds)
        known.num_fresh += 1
        known.num_since_plain = 0
        if self._account < DEPOSIT:
            self._account = min(self._account + RATE, DEPOSIT)
        if self._account < DEPOSIT:
            return
        self._saving = self._saving and self._num_plain < PAUSE
        if known.num_waited >= PAUSE and known.gain is not None and known.gain <= 1.0:
            known.drafted.clear()  # try again

    def _pay(self, gained: float) -> None:
        """Plain steps that were gained, or lost."""
        self._account = min(self._account + gained, SAVINGS)
        if self._account < -self._most_debt:
            self._account = -self._most_debt
            self._most_debt *= 2
        self._saving = self._saving or self._account <= 0


class _Known:
    """What is known of steps of one load."""

    def __init__(self) -> None:
        self.plain: deque[float] = deque(maxlen=PLAIN_WINDOW)  # seconds
        self.drafted: deque[tuple[float, float]] = deque(maxlen=DRAFTED_WINDOW)  # seconds, tokens a decode
        self.num_fresh = 0  # plain steps measured since they were last asked for
        self.num_drafted = self.num_since_plain = 0
        self.num_waited = 0  # plain steps since one that drafted, whatever other loads did meanwhile

    @property
    def most_seconds(self) -> float:
        """That a step which drafted counts for."""
        return OUTLIER * statistics.median(seconds for seconds, _ in self.drafted)

    @property
    def gain(self) -> float | None:
        """Tokens a second of steps that drafted over those of plain ones."""
        if len(self.drafted) < NUM_TRIED or not self.plain:
            return None
        most = self.most_seconds
        seconds = sum(min(seconds, most) for seconds, _ in self.drafted)
        return statistics.median(self.plain) * sum(tokens for _, tokens in self.drafted) / seconds
