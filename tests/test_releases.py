"""Releases of torch, transformers and triton beyond the tested ones: probed, then warned of or refused by name."""

import json
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import detcompile
from detcompile import UnsupportedRelease, releases
from detcompile.commands import cli
from detcompile.passes import release_probe
from detcompile.passes.release_probe import LOGITS, require_release
from detcompile.templates import cpp_dispatch
from detcompile.templates.device import gate
from tools.canary import RESULTS

PASSES = [sys.executable, "-c", f"print({json.dumps(json.dumps(LOGITS))})"]
ENDS = [sys.executable, "-c", "raise NameError('u1')"]
NEWER = {"torch": "2.16.0a0+git12", "transformers": "5.25.0", "triton": "3.10.0"}
OLDER = {"torch": "2.10.1+cpu", "transformers": "4.57.0", "triton": "3.5.1"}


@pytest.fixture(autouse=True)
def empty_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setenv("DETCOMPILE_CACHE", str(tmp_path))
    monkeypatch.delenv("DETCOMPILE_ANY_RELEASE", raising=False)
    release_probe._require.cache_clear()
    yield
    release_probe._require.cache_clear()


def install(monkeypatch: pytest.MonkeyPatch, **versions: str) -> None:
    """Have the releases of these packages be others."""
    real = releases.version
    monkeypatch.setattr(releases, "version", lambda name: versions.get(name) or real(name))


def failing_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, torch="2.16.0")
    monkeypatch.setattr(release_probe, "COMMAND", ENDS)


def test_stored_logits_are_those_of_every_row() -> None:
    rows = json.loads(RESULTS.read_text(encoding="utf-8")).values()
    assert [row["logits"] for row in rows] == [LOGITS] * len(rows)


def test_installed_releases_need_no_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(release_probe, "COMMAND", ENDS)
    require_release()


@pytest.mark.parametrize("name", NEWER)
def test_newer_release_that_passes_warns_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, **{name: NEWER[name]})
    monkeypatch.setattr(release_probe, "COMMAND", PASSES)
    with pytest.warns(UserWarning, match=rf"^{name} {NEWER[name].replace('+', '.')} \(tested: .*stored bits") as warned:
        require_release()
        require_release()
    assert len(warned) == 1


def test_passed_probe_is_kept_for_other_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, torch="2.16.0")
    monkeypatch.setattr(release_probe, "COMMAND", PASSES)
    with pytest.warns(UserWarning):
        require_release()
    release_probe._require.cache_clear()  # as another process
    monkeypatch.setattr(release_probe, "COMMAND", ENDS)
    with pytest.warns(UserWarning):
        require_release()
    install(monkeypatch, torch="2.16.1")
    with pytest.raises(UnsupportedRelease, match=r"torch 2\.16\.1"):
        require_release()


@pytest.mark.parametrize("dtype", LOGITS)
def test_other_bits_of_one_dtype_are_refused(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, transformers="6.0.0")
    other = json.dumps(LOGITS | {dtype: "0" * 64})
    monkeypatch.setattr(release_probe, "COMMAND", [sys.executable, "-c", f"print({other!r})"])
    with pytest.raises(UnsupportedRelease, match=rf"^transformers 6\.0\.0 .*{dtype} logits have sha256 000000000000 "):
        require_release()


@pytest.mark.parametrize(
    "command, message",
    [
        (ENDS, "ended with 1: NameError: u1"),
        ([sys.executable, "-c", "import os; os.kill(os.getpid(), 11)"], "ended with -11"),
        ([sys.executable, "-c", "import time; time.sleep(60)"], "timed out"),
        ([sys.executable, "-c", "print('{}')"], "reported no logits"),
        ([sys.executable, "-c", "pass"], "reported no logits"),
    ],
)
def test_probe_that_fails_is_refused(command: list[str], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, torch="3.0.0")
    monkeypatch.setattr(release_probe, "COMMAND", command)
    monkeypatch.setattr(release_probe, "TIME_LIMIT", 1.0)
    for _ in range(2):  # no failure is kept
        with pytest.raises(UnsupportedRelease, match=rf"^torch 3\.0\.0 \(tested: 2\.11 to below 2\.16\) .*{message}"):
            require_release()


@pytest.mark.parametrize("name", OLDER)
def test_older_release_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, **{name: OLDER[name]})
    monkeypatch.setattr(release_probe, "COMMAND", PASSES)
    with pytest.raises(UnsupportedRelease, match=f"^{name} .* is too old"):
        require_release()


def test_every_entry_point_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    failing_probe(monkeypatch)
    for enter in (detcompile.compile, detcompile.trainer, detcompile.LLM):
        with pytest.raises(UnsupportedRelease, match=r"torch 2\.16\.0"):
            enter("tiny")
    compiled = torch.compile(torch.nn.LayerNorm(8).eval(), backend="detcompile")
    with torch.no_grad(), pytest.raises(Exception, match=r"torch 2\.16\.0 .* does not compile the embedded model"):
        compiled(torch.ones(2, 8))


def test_variable_takes_any_release(monkeypatch: pytest.MonkeyPatch) -> None:
    failing_probe(monkeypatch)
    monkeypatch.setenv("DETCOMPILE_ANY_RELEASE", "1")
    with warnings.catch_warnings(action="error"):
        require_release()


@pytest.mark.parametrize("versions", [{"torch": "2.16.0"}, {"transformers": "5.16.0"}])
@pytest.mark.parametrize("error", [ImportError("no name 'x'"), AttributeError("no attribute 'x'")])
def test_failed_import_names_an_untested_release(
    versions: dict[str, str], error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(name: str) -> None:
        raise error

    monkeypatch.setattr("importlib.import_module", broken)
    for load in (lambda: detcompile.__getattr__("compile"), lambda: cli._loaded("check")):
        with pytest.raises(type(error), match="no"):
            load()
    install(monkeypatch, **versions)
    [(name, version)] = versions.items()
    for load in (lambda: detcompile.__getattr__("compile"), lambda: cli._loaded("check")):
        with pytest.raises(UnsupportedRelease, match=rf"^{name} {version} .*lacks what detcompile imports \(no "):
            load()


@pytest.mark.parametrize("release", ["torch.__version__", "torch.version.git_version"])
def test_direct_operations_of_another_torch_are_another_file(release: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpp_dispatch, "is_intact", lambda path: True)
    before = cpp_dispatch.build_direct_ops()
    monkeypatch.setattr(release, "2.99.0")
    assert cpp_dispatch.build_direct_ops() != before


@pytest.mark.parametrize("release", ["torch.__version__", "triton.__version__"])
def test_schedules_of_another_release_are_another_file(release: str, monkeypatch: pytest.MonkeyPatch) -> None:
    of = lambda: gate._tuner.__wrapped__("matmul", (), torch.device("cpu")).path  # noqa: E731
    before = of()
    monkeypatch.setattr(release, "2.99.0")
    assert of() != before


@pytest.mark.exhaustive
def test_probe_passes_under_the_installed_releases(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, torch="2.16.0")
    with pytest.warns(UserWarning, match="stored bits"):
        detcompile.compile("tiny", device="cpu")
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "default")  # Inductor's float32 without vectors has other bits
    install(monkeypatch, torch="2.16.1")
    with pytest.raises(UnsupportedRelease, match="float32 logits have sha256"):
        require_release()
