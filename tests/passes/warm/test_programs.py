"""The folder of kept programs is listed and cleared, whatever lies in it, and compiling works beside it."""

import json
from pathlib import Path

import pytest

from detcompile.passes.warm import programs
from detcompile.storage import cache_folder
from tests.commands.test_cli import run_here

LABELS = [b'["x"]', b"[" * 5000, b"null", b"\xff", b'{"model": 5, "program": null}', b'{"model": "[/x]"}']


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DETCOMPILE_CACHE", str(tmp_path))
    return cache_folder("programs")


@pytest.mark.parametrize("label", LABELS)
def test_odd_files_are_listed_and_cleared(label: bytes, folder: Path) -> None:
    (folder / "aa.program").write_bytes(b"detcompile program 1\nabc\n" + label + b"\n\nzz")
    (folder / "bb.program").mkdir()
    (folder / "cc.program").symlink_to("nowhere")
    programs.write("dd", b"whole", {"model": "Qwen3ForCausalLM"})
    listed = run_here("cache")
    assert listed.returncode == 0 and "Qwen3ForCausalLM" in listed.stdout, listed.stderr
    calls = json.loads(run_here("cache", "--json").stdout)
    assert [Path(entry["path"]).name for entry in calls["programs"]] == ["aa.program", "dd.program"]
    assert "Removed" in run_here("cache", "--clear").stdout
    assert programs.entries() == [] and not (folder / "aa.program").exists()


@pytest.mark.parametrize("refusal", [PermissionError(13, "Permission denied"), OSError(5, "Input/output error")])
def test_a_program_that_cannot_be_read_is_not_taken(refusal: OSError, monkeypatch: pytest.MonkeyPatch) -> None:
    programs.write("aa", b"whole", {})
    assert programs.read("aa") == b"whole"

    def refuse(path: Path) -> bytes:
        raise refusal

    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.warns(UserWarning, match=f"is not used: .*aa.program cannot be read: {refusal.strerror}"):
        assert programs.read("aa") is None


def test_folder_in_place_of_a_program_is_ignored(folder: Path) -> None:
    (folder / "aa.program").mkdir()
    with pytest.warns(UserWarning, match="cannot be read: Is a directory"):
        assert programs.read("aa") is None
    with pytest.warns(UserWarning, match="is not kept"):
        programs.write("aa", b"whole", {})
