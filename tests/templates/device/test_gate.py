"""The gate admits equal bits only; its decisions survive corruption and concurrent writers."""

import json
import multiprocessing
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from detcompile.errors import ScheduleError
from detcompile.templates.device import gate
from detcompile.templates.device.gate import Buckets, Gate, Tuner

ENVIRONMENT = {"device": "a device", "triton": "3", "source": "digest"}
BITS = {"reference": b"right", "slow": b"right", "fast": b"right", "planted": b"wrong"}
SECONDS = {"reference": 9.0, "slow": 3.0, "fast": 1.0, "planted": 0.001}


class Probe:
    """Counts what was launched; a name it does not know cannot run."""

    def __init__(self) -> None:
        self.launched: list[str] = []

    def __call__(self, schedule: str) -> bytes:
        self.launched.append(schedule)
        return BITS[schedule]


@dataclass(frozen=True)
class Problem:
    name: str
    bucket: int


def schedules_of(probe: Probe, **changes: Any) -> Gate[Problem, str]:
    fields: dict[str, Any] = {
        "family": "op",
        "sources": (__file__,),
        "reference": lambda problem: "reference",
        "candidates": lambda problem: ("slow", "fast"),
        "probe": lambda problem, device: probe,
        "buckets": Buckets(8, 64),
    }
    return Gate(**fields | changes)


@pytest.fixture
def tuner(tmp_path: Path) -> Tuner:
    return Tuner("matmul", ENVIRONMENT, tmp_path)


def test_the_first_candidate_with_the_reference_bits_wins(tuner: Tuner) -> None:
    assert tuner.choose("p", "reference", ["slow", "fast"], Probe()) == "slow"


def test_a_planted_schedule_is_refused_however_fast(tuner: Tuner) -> None:
    candidates = ["planted", "slow", "fast"]
    assert tuner.choose("untimed", "reference", candidates, Probe()) == "slow"
    assert tuner.tune("timed", "reference", candidates, Probe(), SECONDS.__getitem__) == "fast"
    assert tuner.refusals()["timed"]["planted"] == "its bits differ from the reference schedule's"
    assert [(row["admitted"], row["refused"]) for row in tuner.table()] == [(2, 1), (1, 1)]


def test_reference_runs_if_every_candidate_fails_the_gate(tuner: Tuner) -> None:
    assert tuner.choose("p", "reference", ["planted", "does not compile"], Probe()) == "reference"
    assert "KeyError" in tuner.refusals()["p"]["does not compile"]
    assert tuner.tune("q", "reference", ["planted"], Probe(), SECONDS.__getitem__) == "reference"


def test_a_forced_schedule_must_pass(tuner: Tuner) -> None:
    assert tuner.require("p", "reference", "fast", Probe()) == "fast"
    with pytest.raises(ScheduleError, match="planted refused for p: its bits differ"):
        tuner.require("p", "reference", "planted", Probe())


def test_a_reference_that_cannot_run_is_an_error(tuner: Tuner) -> None:
    with pytest.raises(ScheduleError, match="reference schedule unknown cannot run p"):
        tuner.choose("p", "unknown", ["fast"], Probe())


def test_recall_launches_nothing(tuner: Tuner) -> None:
    schedules = {name: name for name in BITS}
    with pytest.raises(ScheduleError, match="before CUDA graph capture"):
        tuner.recall(["p", "q"], schedules)
    tuner.choose("q", "reference", ["fast"], Probe())
    assert tuner.recall(["p", "q"], schedules) == "fast"


def test_decisions_are_kept_on_disk(tuner: Tuner, tmp_path: Path) -> None:
    tuner.tune("p", "reference", ["planted", "slow", "fast"], Probe(), SECONDS.__getitem__)
    probe = Probe()
    again = Tuner("matmul", ENVIRONMENT, tmp_path)
    assert again.choose("p", "reference", ["slow", "fast"], probe) == "fast"
    assert probe.launched == []


def test_another_environment_starts_anew(tuner: Tuner, tmp_path: Path) -> None:
    tuner.choose("p", "reference", ["fast"], Probe())
    for field in ENVIRONMENT:
        probe = Probe()
        Tuner("matmul", ENVIRONMENT | {field: "other"}, tmp_path).choose("p", "reference", ["fast"], probe)
        assert probe.launched == ["reference", "fast"]


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        "null",
        '{"environment": {}, "decisions": {}}',
        json.dumps({"environment": ENVIRONMENT}),
        json.dumps({"environment": ENVIRONMENT, "decisions": {"p": {"chosen": 3}}}),
        json.dumps({"environment": ENVIRONMENT, "decisions": {"p": {"unknown": 3}}}),
        json.dumps({"environment": ENVIRONMENT | {"device": "other"}, "decisions": {"p": {"chosen": "planted"}}}),
    ],
)
def test_a_corrupted_or_foreign_cache_is_rebuilt(tuner: Tuner, tmp_path: Path, content: str) -> None:
    tuner.path.parent.mkdir(exist_ok=True)
    tuner.path.write_text(content)
    probe = Probe()
    assert Tuner("matmul", ENVIRONMENT, tmp_path).choose("p", "reference", ["planted", "fast"], probe) == "fast"
    assert probe.launched == ["reference", "planted", "fast"]
    assert json.loads(tuner.path.read_text())["decisions"]["p"]["chosen"] == "fast"


def test_a_choice_that_no_longer_exists_is_made_again(tuner: Tuner, tmp_path: Path) -> None:
    tuner.choose("p", "reference", ["fast"], Probe())
    assert Tuner("matmul", ENVIRONMENT, tmp_path).choose("p", "reference", ["slow"], Probe()) == "slow"


def test_a_timed_choice_outranks_an_untimed_one(tuner: Tuner, tmp_path: Path) -> None:
    late = Tuner("matmul", ENVIRONMENT, tmp_path)
    tuner.tune("p", "reference", ["slow", "fast"], Probe(), SECONDS.__getitem__)
    late.choose("p", "reference", ["slow", "fast"], Probe())
    assert Tuner("matmul", ENVIRONMENT, tmp_path).choose("p", "reference", ["slow", "fast"], Probe()) == "fast"


def _decide(directory: Path, worker: int) -> None:
    tuner = Tuner("matmul", ENVIRONMENT, directory)
    for i in range(10):
        tuner.choose(f"{worker}/{i}", "reference", ["planted", "fast"], Probe())


def test_concurrent_writers_lose_nothing(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=_decide, args=(tmp_path, worker)) for worker in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
        assert worker.exitcode == 0
    rows = Tuner("matmul", ENVIRONMENT, tmp_path).table()
    assert {row["problem"] for row in rows} == {f"{worker}/{i}" for worker in range(4) for i in range(10)}
    assert {row["chosen"] for row in rows} == {"fast"}
    assert [path.suffix for path in tmp_path.iterdir() if path.suffix not in (".json", ".lock")] == []


def test_unwritable_cache_warns_and_continues(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    with pytest.warns(UserWarning, match="not kept"):
        assert Tuner("matmul", ENVIRONMENT, blocked).choose("p", "reference", ["fast"], Probe()) == "fast"


def test_one_device_by_two_names_has_one_tuner() -> None:
    """What is tuned for "cuda" serves the launches of tensors, which say "cuda:0"."""
    named, numbered = torch.device("cpu"), torch.device("cpu", 0)
    assert named != numbered
    gate = schedules_of(Probe())
    assert gate.tuner(named) is gate.tuner(numbered)


def test_a_launch_asks_the_gate_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DETCOMPILE_CACHE", str(tmp_path))
    probe = Probe()
    gate, device = schedules_of(probe, family="once"), torch.device("cpu")
    assert [gate.schedule(Problem("once", 16), device) for _ in range(2)] == ["slow", "slow"]
    assert probe.launched == ["reference", "slow"]
    assert gate.tune(Problem("once", 16), device, SECONDS.__getitem__) == "fast"
    assert gate.schedule(Problem("once", 16), device) == "fast"


def test_a_capture_takes_the_nearest_bucket_that_was_chosen_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_current_stream_capturing", lambda: True)
    tuner = Tuner("capture", ENVIRONMENT, tmp_path)
    monkeypatch.setattr("detcompile.templates.device.gate._tuner", lambda *arguments: tuner)
    monkeypatch.setattr("torch.empty", lambda *arguments, dtype, device: torch.zeros(0))
    probe, device = Probe(), torch.device("cuda")
    gate = schedules_of(probe, serves=lambda schedule, problem: schedule != "slow" or problem.bucket <= 32)
    with pytest.raises(ScheduleError, match="before CUDA graph capture"):
        gate.schedule(Problem("p", 64), device)
    tuner.choose(str(Problem("p", 32)), "reference", ["slow"], probe)
    assert gate.schedule(Problem("p", 16), device) == "slow"
    with pytest.raises(ScheduleError, match="before CUDA graph capture"):
        gate.schedule(Problem("p", 64), device)
    tuner.choose(str(Problem("p", 8)), "reference", ["fast"], probe)
    assert gate.schedule(Problem("p", 64), device) == "fast"
    assert gate.schedule(Problem("p", 16), device) == "slow"


def test_threads_that_need_the_same_verdict_wait_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DETCOMPILE_CACHE", str(tmp_path))
    started = threading.Barrier(4)

    class Slow(Probe):
        def __call__(self, schedule: str) -> bytes:
            time.sleep(0.05)
            return super().__call__(schedule)

    probe = Slow()
    gate = schedules_of(probe, family="threads")

    def launch(_: int) -> str:
        started.wait()
        return gate.schedule(Problem("p", 8), torch.device("cpu"))

    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(launch, range(4))) == ["slow"] * 4
    assert probe.launched == ["reference", "slow"]


def test_the_reference_alone_needs_no_probe() -> None:
    gate = schedules_of(Probe(), family="alone", candidates=lambda problem: ("reference",))
    assert gate.schedule(Problem("alone", 16), torch.device("cpu")) == "reference"
    assert not gate.tuner(torch.device("cpu")).table()


def test_buckets() -> None:
    buckets = Buckets(8, 64)
    assert [buckets.of(count) for count in (1, 8, 9, 33, 64, 1000)] == [8, 8, 16, 64, 64, 64]
    assert buckets.nearest(16) == [16, 32, 64, 8]
    assert buckets.nearest(64) == [64, 32, 16, 8]


def test_decisions_are_for_the_sources_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DETCOMPILE_CACHE", str(tmp_path))
    monkeypatch.setattr(gate, "_tuner", gate._tuner.__wrapped__)
    source, paths = tmp_path / "kernel.py", []
    for text in ("one", "other", "one"):
        source.write_text(text)
        paths.append(schedules_of(Probe(), sources=(str(source),)).tuner(torch.device("cpu")).path)
    assert paths[0] == paths[2] != paths[1]
