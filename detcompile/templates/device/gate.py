"""The bitwise gate: a schedule may run only after its bits equalled the reference schedule's on this device.

A template's *order* fixes the bits; a *schedule* (tiles, warps, stages, splits) is free within it. Whether a schedule
really keeps the order is a property of the device and the compiler, so it is measured: `Tuner.choose` runs a probe
under the reference schedule and under a candidate, and admits the candidate only if every byte is equal. Speed is
asked last, and only among the admitted (`Tuner.tune`).

On a GPU the reference is a schedule too: the hardware's order inside one ``tl.dot`` group is not documented, so the
gate compares schedules with each other, not with `SumOrder.evaluate`. Row reductions do equal `Row.evaluate`.

Decisions live in ``<cache>/schedules/<template>-<digest>.json``; the digest covers the device, the versions and the
template's source. Writers merge under a file lock and replace the file atomically; a file that does not parse, or that
was written for something else, is rebuilt. One that somebody else could have written is neither read nor written: it
could name schedules that the gate never admitted.
"""

import contextvars
import fcntl
import functools
import gc
import hashlib
import json
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
import triton

from detcompile.config import cache_directory
from detcompile.errors import ScheduleError
from detcompile.storage import CACHE_ADVICE, distrust

__all__ = [
    "Decision",
    "Tuner",
    "capture",
    "capturing",
    "for_graph",
    "graph_seconds",
    "is_for_graph",
    "multiprocessors",
    "template_tuner",
]

_FOR_GRAPH = contextvars.ContextVar("for_graph", default=False)

S = TypeVar("S")  # a schedule: any value with a distinct str


@dataclass(slots=True)
class Decision:
    """What the gate found for one problem: names of schedules, and why the others were refused."""

    admitted: list[str] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)
    chosen: str | None = None
    tuned: bool = False

    def absorb(self, other: "Decision") -> None:
        """Takes over another process's findings. A timed choice outranks an untimed one."""
        self.admitted = list(dict.fromkeys([*self.admitted, *other.admitted]))
        self.refused |= other.refused
        if other.chosen is not None and (other.tuned or not self.tuned):
            self.chosen, self.tuned = other.chosen, other.tuned


class Tuner:
    """Chooses among the schedules of one template on one device. Schedules are any values with a distinct `str`."""

    def __init__(self, template: str, environment: Mapping[str, str], directory: Path) -> None:
        """Args:
        template: name of the op family.
        environment: all that admitted bits depend on: device, versions, digest of the template's source.
        directory: folder of the decision files.
        """
        self.template = template
        self.environment = dict(environment)
        digest = hashlib.sha256(json.dumps(self.environment, sort_keys=True).encode()).hexdigest()[:16]
        self.path = directory / f"{template}-{digest}.json"
        self._distrust = _distrust_of(self.path)
        self._decisions = self._read()

    def choose(
        self,
        problem: str,
        reference: S,
        candidates: Sequence[S],
        bits: Callable[[S], bytes],
    ) -> S:
        """The tuned winner, else the first candidate (they come in heuristic order) that passes the gate.

        Args:
            problem: everything the decision is for; never the exact token count.
            reference: the schedule that defines the bits; it serves where no candidate passes.
            candidates: in order of preference.
            bits: runs the probe under a schedule and returns the outputs' bytes; may raise for what cannot run.

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
        self._write(problem)
        return candidate

    def recall(self, problems: Sequence[str], schedules: Mapping[str, S]) -> S:
        """What was chosen earlier for the first of these problems that has a choice. Launches nothing.

        Raises:
            ScheduleError: none of them has one.
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
        """Gates every candidate; returns those that passed, in the given order."""
        decision = self._decisions.setdefault(problem, Decision())
        expected = _reference_bits(self.template, problem, reference, bits)
        passed = tuple(c for c in candidates if self._admits(decision, c, expected, bits))
        self._write(problem)
        return passed

    def require(self, problem: str, reference: S, forced: S, bits: Callable[[S], bytes]) -> S:
        """The schedule a caller insists on, if it passes the gate.

        Raises:
            ScheduleError: its bits differ from the reference's, or it cannot run here.
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
        """Gates every candidate, times the admitted ones, stores the fastest as the choice for this problem."""
        passed = self.admitted(problem, reference, candidates, bits) or (reference,)
        winner = min(passed, key=seconds)
        decision = self._decisions[problem]
        decision.chosen, decision.tuned = str(winner), True
        self._write(problem)
        return winner

    def table(self) -> list[dict[str, object]]:
        """One row a problem: how many schedules were admitted and refused, and which one serves."""
        return [
            {"problem": p, "admitted": len(d.admitted), "refused": len(d.refused), "chosen": d.chosen, "tuned": d.tuned}
            for p, d in sorted(self._decisions.items())
        ]

    def refusals(self) -> dict[str, dict[str, str]]:
        """problem -> schedule -> why it was refused."""
        return {p: dict(d.refused) for p, d in self._decisions.items() if d.refused}

    def _admits(self, decision: Decision, candidate: S, expected: bytes, bits: Callable[[S], bytes]) -> bool:
        name = str(candidate)
        if name in decision.admitted:
            return True
        try:
            reason = None if bits(candidate) == expected else "its bits differ from the reference schedule's"
        except torch.OutOfMemoryError:
            raise  # it says nothing of the schedule
        except Exception as error:  # compilers and launchers raise what they like; all of it means "cannot run here"
            reason = f"{type(error).__name__}: {str(error)[:200]}"
        if reason is not None:
            decision.refused[name] = reason
            return False
        decision.refused.pop(name, None)
        decision.admitted.append(name)
        return True

    def _read(self) -> dict[str, Decision]:
        if self._distrust:
            return {}
        try:
            content = json.loads(self.path.read_text())
            if content["environment"] != self.environment:
                return {}
            return {problem: _decision(fields) for problem, fields in content["decisions"].items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return {}  # missing, corrupted or foreign: the gate simply runs again

    def _write(self, problem: str) -> None:
        if self._distrust:
            return
        try:
            self.path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
            with _locked(self.path.with_suffix(".lock")):
                merged = self._read()
                merged.setdefault(problem, Decision()).absorb(self._decisions[problem])
                content = {"environment": self.environment, "decisions": {p: asdict(d) for p, d in merged.items()}}
                _replace(self.path, json.dumps(content, indent=1, sort_keys=True))
        except OSError as error:
            reason = error.strerror or error
            warnings.warn(f"schedule decisions are not kept: {self.path}: {reason}. {CACHE_ADVICE}", stacklevel=3)


def template_tuner(template: str, sources: tuple[str | None, ...], device: torch.device) -> Tuner:
    """The tuner of one template on one device, with decisions on disk.

    Args:
        template: name of the op family.
        sources: paths of the files holding the kernels; their text is part of the environment.
        device: "cuda" is the current GPU, whose tensors say "cuda:0": what is tuned for one serves the other.
    """
    return _template_tuner(template, sources, torch.empty(0, device=device).device)


@functools.cache
def _template_tuner(template: str, sources: tuple[str | None, ...], device: torch.device) -> Tuner:
    cuda = device.type == "cuda"
    environment = {
        "device": torch.cuda.get_device_name(device) if cuda else "triton interpreter",
        "capability": ".".join(map(str, torch.cuda.get_device_capability(device))) if cuda else "",
        "torch": torch.__version__,
        "triton": triton.__version__,
        "source": hashlib.sha256(b"".join(Path(source).read_bytes() for source in sources if source)).hexdigest(),
    }
    return Tuner(template, environment, cache_directory() / "schedules")


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Of this device; Triton's interpreter counts as two."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


def capturing() -> bool:
    """True while a CUDA graph is being captured on the current stream."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


@contextmanager
def for_graph() -> Iterator[None]:
    """What runs here is captured, or warms up what will be: many small launches cost nothing when it is replayed."""
    token = _FOR_GRAPH.set(True)
    try:
        yield
    finally:
        _FOR_GRAPH.reset(token)


def is_for_graph() -> bool:
    """Whether this is inside ``for_graph``."""
    return _FOR_GRAPH.get()


@contextmanager
def capture(graph: torch.cuda.CUDAGraph, pool: Any = None) -> Iterator[None]:
    """torch.cuda.graph without garbage collection: graphs that it freed in the middle would spoil the capture."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        with torch.cuda.graph(graph, pool=pool):
            yield
    finally:
        if was_enabled:
            gc.enable()


def graph_seconds(launches: Sequence[Callable[[], object]], repeats: int = 5) -> float:
    """Median seconds of one launch, from replays of one CUDA graph that holds all of them.

    Args:
        launches: the same work over rotated buffers, together larger than the L2 cache.
    """
    for launch in launches[:2]:
        launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with capture(graph):
        for launch in launches:
            launch()
    graph.replay()
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e-3 / len(launches))
    return sorted(times)[len(times) // 2]


def _distrust_of(path: Path) -> str:
    """Why decisions in this file may be somebody else's, which is told; empty if they are not, or there are none."""
    try:
        folder = path.parent
        reason = distrust(folder) if folder.exists() else ""
        reason = reason or (distrust(path) if path.exists() else "")
    except OSError as error:
        reason = f"{path}: {error.strerror}"
    if reason:
        warnings.warn(f"schedule decisions are neither read nor kept: {reason}. {CACHE_ADVICE}", stacklevel=4)
    return reason


def _reference_bits(template: str, problem: str, reference: S, bits: Callable[[S], bytes]) -> bytes:
    try:
        return bits(reference)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        raise ScheduleError(f"{template}: the reference schedule {reference} cannot run {problem}: {error}") from error


def _decision(fields: Mapping[str, object]) -> Decision:
    decision = Decision(**fields)  # type: ignore[arg-type]
    sane = (
        isinstance(decision.admitted, list)
        and isinstance(decision.refused, dict)
        and isinstance(decision.chosen, str | None)
        and isinstance(decision.tuned, bool)
    )
    if not sane:
        raise ValueError("not a decision")
    return decision


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _replace(path: Path, text: str) -> None:
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name)
    try:
        with os.fdopen(descriptor, "w") as handle:
            handle.write(text)
        os.replace(temporary, path)
    except OSError:
        os.unlink(temporary)
        raise
