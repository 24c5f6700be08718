"""Releases of torch, transformers and triton beyond the tested ones: probed, then warned of or refused by name."""

import importlib
import inspect
import json
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import detcompile
from detcompile import Numerics, UnsupportedRelease, releases
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


def traced(_: Path) -> None:
    torch.compile(torch.nn.LayerNorm(8).eval(), backend="detcompile")(torch.ones(2, 8))


ENTRIES: dict[str, Callable[[Path], Any]] = {
    "Backend": traced,
    "LLM": lambda _: detcompile.LLM("tiny"),
    "Trainer": lambda _: detcompile.Trainer(detcompile.load_model("tiny"), Numerics(), 64),
    "compile": lambda _: detcompile.compile("tiny"),
    "export": lambda file: detcompile.export(detcompile.load_model("tiny"), file),
    "load": detcompile.load,
    "trainer": lambda _: detcompile.trainer("tiny"),
}


WITHOUT_TEST = {
    "audit": "compiles as check does, for a log of receipts",
    "fetch": "compiles nothing",
    "replay": "compiles as check does, for a receipt",
    "serve": "compiles in a process of its own, which patches do not reach",
}


def install(monkeypatch: pytest.MonkeyPatch, **versions: str) -> None:
    """Pretend that these packages have other releases."""
    real = releases.version
    monkeypatch.setattr(releases, "version", lambda name: versions.get(name) or real(name))


def failing_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, torch="2.16.0")
    monkeypatch.setattr(release_probe, "COMMAND", ENDS)


def test_stored_logits_match_every_row() -> None:
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


def test_every_entry_point_has_a_case() -> None:
    """Each public name whose arguments are a model or a file."""
    takes = re.compile("PreTrainedModel|Path|GraphModule")
    entries = set()
    for name in detcompile.PLACES:
        value = getattr(detcompile, name)
        if callable(value) and not (isinstance(value, type) and issubclass(value, BaseException)):
            called = [value, getattr(value, "__call__", None)] if isinstance(value, type) else [value]  # noqa: B004
            if any(takes.search(str(inspect.signature(one))) for one in called if one is not None):
                entries.add(name)
    assert entries - {"load_model"} == ENTRIES.keys()  # load_model returns a plain module


@pytest.mark.parametrize("entry", ENTRIES)
def test_every_entry_point_refuses(entry: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    failing_probe(monkeypatch)
    file = tmp_path / "model.pt2"
    file.touch()
    with torch.no_grad(), pytest.raises(Exception, match=r"torch 2\.16\.0 .* does not compile the embedded") as refused:
        ENTRIES[entry](file)
    assert entry == "Backend" or refused.type is UnsupportedRelease  # torch.compile wraps what a backend raises


def test_refused_model_is_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    failing_probe(monkeypatch)
    model = detcompile.load_model("tiny")
    before = {name: type(module) for name, module in model.named_modules()}
    for enter in (detcompile.compile, detcompile.trainer, lambda model: detcompile.Trainer(model, Numerics(), 64)):
        with pytest.raises(UnsupportedRelease):
            enter(model)
    assert {name: type(module) for name, module in model.named_modules()} == before


def test_every_command_with_a_model_refuses(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    failing_probe(monkeypatch)
    rest = {"export": [str(tmp_path / "model.pt2")], "generate": ["hello"]}
    modules = {name: importlib.import_module(cli.module_of(name)) for name in cli.COMMANDS}
    with_model = {name for name in modules if "model" in inspect.signature(modules[name].command).parameters}
    assert with_model > WITHOUT_TEST.keys()
    for command in sorted(with_model - WITHOUT_TEST.keys()):
        monkeypatch.setattr(sys, "argv", ["detcompile", command, "tiny", *rest.get(command, [])])
        with pytest.raises(SystemExit, match=r"^2$"):
            cli.main()
        assert "UnsupportedRelease\ntorch 2.16.0 (tested: " in capsys.readouterr().err, command


def test_variable_allows_any_release(monkeypatch: pytest.MonkeyPatch) -> None:
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
def test_each_release_has_its_direct_operations_file(release: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpp_dispatch, "is_intact", lambda path: True)
    before = cpp_dispatch.build_direct_ops()
    monkeypatch.setattr(release, "2.99.0")
    assert cpp_dispatch.build_direct_ops() != before


@pytest.mark.parametrize("release", ["torch.__version__", "triton.__version__"])
def test_each_release_has_its_schedules_file(release: str, monkeypatch: pytest.MonkeyPatch) -> None:
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
