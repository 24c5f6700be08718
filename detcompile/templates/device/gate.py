"""The bitwise gate: a schedule may run only if its bits equal the reference schedule's on this device.

A template's *order* fixes the bits. A *schedule* (tiles, warps, stages, splits) is free within that order. Whether a
schedule keeps the order depends on the device and the compiler, so it is measured: `Tuner.choose` runs a probe under
the reference schedule and under a candidate, and admits the candidate only if every byte is equal. Speed is compared
only among admitted schedules (`Tuner.tune`).

On a GPU the reference is itself a schedule: the hardware's order inside one ``tl.dot`` group is undocumented, so the
gate compares schedules with each other, not with `SumOrder.evaluate`. Row reductions do equal `Row.evaluate`.

Each family of templates has one `Gate`; a `Tuner` is the gate's state for one device.
"""

import functools
import hashlib
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
import triton
from torch import Tensor

from detcompile.config import cache_directory
from detcompile.errors import ScheduleError
from detcompile.templates.device.decisions import Decision, DecisionFile
from detcompile.templates.device.launcher import next_power_of_2

P = TypeVar("P")  # a problem: a frozen dataclass with a unique str, and a field `bucket` if the gate has buckets
S = TypeVar("S")  # a schedule: any value with a unique str


@dataclass(frozen=True, slots=True)
class Buckets:
    """Token or row counts, rounded up to a power of two and clamped to [smallest, largest]."""

    smallest: int
    largest: int

    def of(self, count: int) -> int:
        """Return the bucket of a count."""
        return min(max(self.smallest, next_power_of_2(count)), self.largest)

    def nearest(self, bucket: int) -> list[int]:
        """Return all buckets: this one, then larger ones, then smaller ones, nearest first."""
        every = [1 << i for i in range(self.smallest.bit_length() - 1, self.largest.bit_length())]
        return sorted(every, key=lambda other: (other != bucket, other < bucket, abs(other - bucket)))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Gate(Generic[P, S]):
    """The gate of one family of templates; it hands out the schedules of launches.

    Attributes:
        family: name of the family and of its decision files.
        sources: paths of the files that bits may depend on; their content is part of the decisions' key.
        reference: returns the schedule that defines a problem's bits.
        candidates: returns a problem's schedules, the likely fastest first.
        probe: draws a problem's data and returns a function that runs a schedule on it and returns the bytes, or
            raises.
        buckets: values of a problem's field `bucket`; None if problems have no such field.
        serves: returns True if a schedule chosen for another bucket can serve a problem.
    """

    family: str
    sources: tuple[str | None, ...]
    reference: Callable[[P], S]
    candidates: Callable[[P], Sequence[S]]
    probe: Callable[[P, torch.device], Callable[[S], bytes]]
    buckets: Buckets | None = None
    serves: Callable[[S, P], bool] = lambda schedule, problem: True
    _chosen: dict[tuple[P, torch.device], S] = field(default_factory=dict, init=False)
    _locks: dict[tuple[P, torch.device], Any] = field(default_factory=dict, init=False)

    def schedule(self, problem: P, device: torch.device) -> S:
        """Return a launch's schedule: chosen at the problem's first launch, or recalled during graph capture.

        Raises:
            ScheduleError: during CUDA graph capture, if this problem was never launched before.
        """
        if (known := self._chosen.get((problem, device))) is not None:
            return known
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return self._recall(problem, device)
        with self._locks.setdefault((problem, device), threading.RLock()):  # other threads wait for the decision
            return self._chosen.get((problem, device)) or self._choose(problem, device)

    def tune(self, problem: P, device: torch.device, seconds: Callable[[S], float]) -> S:
        """Time every admitted schedule; later launches of the problem use the fastest."""
        winner = self.tuner(device).tune(
            str(problem), self.reference(problem), self.candidates(problem), self.probe(problem, device), seconds
        )
        self._chosen.clear()
        return winner

    def tuner(self, device: torch.device) -> "Tuner":
        """Return the state for one device; "cuda" means the current GPU."""
        return _tuner(self.family, self.sources, torch.empty(0, dtype=torch.uint8, device=device).device)

    def _choose(self, problem: P, device: torch.device) -> S:
        reference, candidates = self.reference(problem), self.candidates(problem)
        if tuple(candidates) == (reference,):
            chosen = reference  # nothing to compare
        else:
            bits = functools.cache(lambda: self.probe(problem, device))  # drawn only if the gate must run
            chosen = self.tuner(device).choose(str(problem), reference, candidates, lambda schedule: bits()(schedule))
        self._chosen[problem, device] = chosen
        return chosen

    def _recall(self, problem: P, device: torch.device) -> S:
        """Return this bucket's decision, else that of the next larger bucket, else of smaller ones."""
        if tuple(self.candidates(problem)) == (self.reference(problem),):
            return self.reference(problem)
        alternatives: list[Any] = [problem]
        if self.buckets is not None:
            given: Any = problem
            alternatives = [replace(given, bucket=bucket) for bucket in self.buckets.nearest(given.bucket)]
        schedules = {
            str(schedule): schedule
            for other in alternatives
            for schedule in (*self.candidates(other), self.reference(other))
            if self.serves(schedule, problem)
        }
        return self.tuner(device).recall([str(other) for other in alternatives], schedules)


class Tuner:
    """Chooses among the schedules of one template on one device. Schedules are any values with a unique `str`.

    Args:
        template: name of the op family.
        environment: all that admitted bits depend on: device, versions, digest of the template's source.
        directory: folder of the decision files.
    """

    def __init__(self, template: str, environment: Mapping[str, str], directory: Path) -> None:
        self.template = template
        self._file = DecisionFile(template, environment, directory)
        self._decisions = self._file.read()

    @property
    def path(self) -> Path:
        """The decision file."""
        return self._file.path

    def choose(
        self,
        problem: str,
        reference: S,
        candidates: Sequence[S],
        bits: Callable[[S], bytes],
    ) -> S:
        """Return the tuned winner, else the first candidate (in heuristic order) that passes the gate.

        Args:
            problem: key of the decision; never contains the exact token count.
            reference: the schedule that defines the bits; used if no candidate passes.
            candidates: schedules in order of preference.
            bits: runs the probe under a schedule and returns the outputs' bytes; raises if the schedule cannot run.

        Raises:
            ScheduleError: the reference itself cannot run.
        """
        by_name = {str(schedule): schedule for schedule in (*candidates, reference)}
        decision = self._decisions.setdefault(problem, Decision())
        if decision.chosen is not None and decision.chosen in by_name:
            return by_name[decision.chosen]
        expected = _reference_bits(self.template, problem, reference, bits)
        for candidate in candidates:
            if self._admits(decision, candidate, expected, bits):
                break
        else:
            candidate = reference
        decision.chosen = str(candidate)
        self._file.merge(problem, self._decisions[problem])
        return candidate

    def recall(self, problems: Sequence[str], schedules: Mapping[str, S]) -> S:
        """Return the earlier choice for the first problem that has one. Launches nothing.

        Raises:
            ScheduleError: none of the problems has a choice.
        """
        for problem in problems:
            decision = self._decisions.get(problem)
            if decision is not None and decision.chosen is not None and decision.chosen in schedules:
                return schedules[decision.chosen]
        raise ScheduleError(
            f"{self.template}: no schedule was gated for {problems[0]} before CUDA graph capture, and the gate may not "
            "launch its probe inside one; run the model once at this size before capturing"
        )

    def admitted(
        self, problem: str, reference: S, candidates: Sequence[S], bits: Callable[[S], bytes]
    ) -> tuple[S, ...]:
        """Gate every candidate; return those that passed, in the given order."""
        decision = self._decisions.setdefault(problem, Decision())
        expected = _reference_bits(self.template, problem, reference, bits)
        passed = tuple(c for c in candidates if self._admits(decision, c, expected, bits))
        self._file.merge(problem, self._decisions[problem])
        return passed

    def require(self, problem: str, reference: S, forced: S, bits: Callable[[S], bytes]) -> S:
        """Return a schedule that the caller forces, if it passes the gate.

        Raises:
            ScheduleError: its bits differ from the reference's, or it cannot run on this device.
        """
        if not self.admitted(problem, reference, (forced,), bits):
            reason = self._decisions[problem].refused[str(forced)]
            raise ScheduleError(f"{self.template}: schedule {forced} refused for {problem}: {reason}")
        return forced

    def tune(
        self,
        problem: str,
        reference: S,
        candidates: Sequence[S],
        bits: Callable[[S], bytes],
        seconds: Callable[[S], float],
    ) -> S:
        """Gate every candidate, time the admitted ones, and store the fastest as the choice for this problem."""
        passed = self.admitted(problem, reference, candidates, bits) or (reference,)
        winner = min(passed, key=seconds)
        decision = self._decisions[problem]
        decision.chosen, decision.tuned = str(winner), True
        self._file.merge(problem, self._decisions[problem])
        return winner

    def table(self) -> list[dict[str, object]]:
        """Return one row per problem: how many schedules were admitted and refused, and the choice."""
        return [
            {"problem": p, "admitted": len(d.admitted), "refused": len(d.refused), "chosen": d.chosen, "tuned": d.tuned}
            for p, d in sorted(self._decisions.items())
        ]

    def refusals(self) -> dict[str, dict[str, str]]:
        """Return problem -> schedule -> reason of refusal."""
        return {p: dict(d.refused) for p, d in self._decisions.items() if d.refused}

    def _admits(self, decision: Decision, candidate: S, expected: bytes, bits: Callable[[S], bytes]) -> bool:
        name = str(candidate)
        if name in decision.admitted:
            return True
        try:
            reason = None if bits(candidate) == expected else "its bits differ from the reference schedule's"
        except torch.OutOfMemoryError:
            raise  # not the schedule's fault
        except Exception as error:  # compilers and launchers raise anything; all of it means "cannot run here"
            reason = f"{type(error).__name__}: {str(error)[:200]}"
        if reason is not None:
            decision.refused[name] = reason
            return False
        decision.refused.pop(name, None)
        decision.admitted.append(name)
        return True


def heavy_tailed(*shape: int, generator: torch.Generator, spread: float = 1.0) -> Tensor:
    """Return float32 probe data whose magnitudes differ so much that another summation order changes the result.

    Values are normal, each scaled by exp(spread * another normal value).
    """
    draw = functools.partial(torch.randn, *shape, generator=generator, dtype=torch.float32, device=generator.device)
    normal, exponent = draw(), draw()
    return normal * torch.exp(spread * exponent)


def bytes_of(*tensors: Tensor) -> bytes:
    """Return the concatenated bytes of the tensors."""
    return b"".join(t.cpu().contiguous().view(torch.uint8).numpy().tobytes() for t in tensors)


@functools.cache
def is_hopper(device: torch.device) -> bool:
    """Return True for a GPU of compute capability 9."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Return the number of multiprocessors of a device; 2 for Triton's interpreter."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


@functools.cache
def _tuner(family: str, sources: tuple[str | None, ...], device: torch.device) -> Tuner:
    cuda = device.type == "cuda"
    environment = {
        "device": torch.cuda.get_device_name(device) if cuda else "triton interpreter",
        "capability": ".".join(map(str, torch.cuda.get_device_capability(device))) if cuda else "",
        "torch": torch.__version__,
        "triton": triton.__version__,
        "source": hashlib.sha256(b"".join(Path(source).read_bytes() for source in sources if source)).hexdigest(),
    }
    return Tuner(family, environment, cache_directory() / "schedules")


def _reference_bits(template: str, problem: str, reference: S, bits: Callable[[S], bytes]) -> bytes:
    try:
        return bits(reference)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        raise ScheduleError(f"{template}: the reference schedule {reference} cannot run {problem}: {error}") from error
