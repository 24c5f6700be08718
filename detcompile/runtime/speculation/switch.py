"""SpeculationSwitch: decides whether the next step should draft, from the durations and tokens of earlier steps.

For steps of similar load it compares seconds per token of plain steps (overlapping, if the engine overlaps) with those
of drafting steps, drafting included. It reads no clock and draws no random numbers: its answers depend only on the
observed steps.

Its possible loss is bounded by an account in units of plain steps. A drafting step adds its gain or subtracts its loss;
a plain step adds RATE; with an empty account nothing is drafted. The tokens of n plain steps therefore take at most the
time of n * (1 + RATE) + DEPOSIT, plus the overdraft of one step and the WARM_UP drafts of each load, which compile
kernels and capture graphs: in the long run never slower than 0.97 times plain decoding. Later steps that compile or
capture count as at most OUTLIER medians of their kind, because they occur once. A single slow step, because of one
request or the machine, could still cause a debt that stops drafting for all requests. A debt is therefore capped at
DEBT. The cap doubles each time it is reached before drafts have paid off.
"""

import statistics
from collections import deque
from typing import NamedTuple

RATE = 0.02  # fraction of the time that may be spent on trying again
DEPOSIT = 2.0  # plain steps, at the start and before trying again
DEBT = 16.0  # plain steps: the first cap of a debt
SAVINGS = 16.0  # plain steps: most gain that is saved for bad phases
WARM_UP = 3  # first drafting steps of each load, which are not counted
NUM_PLAIN = 3  # plain steps that must be known for a load
NUM_TRIED = 5  # drafting steps before they count
PAUSE = 32  # plain steps before trying again
REFRESH = 256  # consecutive drafting steps after which plain ones are measured again
PLAIN_WINDOW, DRAFTED_WINDOW = 5, 16  # number of steps kept
OUTLIER = 4.0  # a step counts as at most this many medians


class Load(NamedTuple):
    """Contents of a step."""

    num_decodes: int
    num_prefill_tokens: int = 0

    @property
    def bucket(self) -> tuple[int, int]:
        """Bucket of loads whose steps take about as long: two per octave of decodes, one per octave of prefill."""
        size = max(0, self.num_decodes - 1).bit_length()
        lower_half = size > 1 and self.num_decodes <= 3 << (size - 2)
        return 2 * size - lower_half, (self.num_prefill_tokens + 63).bit_length()


class SpeculationSwitch:
    """Decides step by step whether to draft."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, int], _Known] = {}
        self._account = DEPOSIT
        self._saving = False  # the account was emptied: wait until it holds the deposit again
        self._most_debt = DEBT
        self._num_plain = 0  # consecutive plain steps

    def wants(self, load: Load) -> bool:
        """Return True if a step of this load should draft."""
        known = self._known.get(load.bucket)
        if load.num_decodes == 0 or known is None or known.num_fresh < NUM_PLAIN or self._saving:
            return False
        gain = known.gain
        return gain is None or gain > 1.0

    def gain(self, load: Load) -> float | None:
        """Return the measured speedup of drafting at this load; None if unknown."""
        known = self._known.get(load.bucket)
        return None if known is None else known.gain

    def observe(self, load: Load, seconds: float, tokens: float, *, drafted: bool) -> None:
        """Record a finished step.

        Args:
            seconds: from the end of the previous step to its end.
            tokens: average number of tokens per decode.
            drafted: the step was to draft, even if there was nothing to guess.
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
        if self._num_plain == 1:  # it refills the pipeline: a cost of the preceding drafts
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
        """Add gained (or subtract lost) plain steps."""
        self._account = min(self._account + gained, SAVINGS)
        if self._account < -self._most_debt:
            self._account = -self._most_debt
            self._most_debt *= 2
        self._saving = self._saving or self._account <= 0


class _Known:
    """Measurements of steps of one load."""

    def __init__(self) -> None:
        self.plain: deque[float] = deque(maxlen=PLAIN_WINDOW)  # seconds
        self.drafted: deque[tuple[float, float]] = deque(maxlen=DRAFTED_WINDOW)  # seconds, tokens per decode
        self.num_fresh = 0  # plain steps measured since the last refresh
        self.num_drafted = self.num_since_plain = 0
        self.num_waited = 0  # plain steps since the last drafting step of this load

    @property
    def most_seconds(self) -> float:
        """Most seconds that a drafting step counts for."""
        return OUTLIER * statistics.median(seconds for seconds, _ in self.drafted)

    @property
    def gain(self) -> float | None:
        """Tokens per second of drafting steps relative to plain steps."""
        if len(self.drafted) < NUM_TRIED or not self.plain:
            return None
        most = self.most_seconds
        seconds = sum(min(seconds, most) for seconds, _ in self.drafted)
        return statistics.median(self.plain) * sum(tokens for _, tokens in self.drafted) / seconds
