"""Prompt files are decoded by the encoding that they declare; bytes that are not text are rejected by position."""

import io
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from detcompile.commands import cache
from detcompile.commands.generate import read_prompts
from detcompile.commands.text_files import read_text_file
from detcompile.commands.tuning.report import read_text
from detcompile.errors import InvalidInput
from detcompile.progress import shown, stage
from tests.commands.test_cli import run

TEXT = "def f():\nä€𝄞\n"
MARKED = ("utf-8-sig", "utf-16", "utf-32")  # Python's names of encodings that write a mark
BIG = {"utf-16-be": b"\xfe\xff", "utf-32-be": b"\x00\x00\xfe\xff"}
REFUSED = {
    "latin-1": ("füße\n".encode("latin-1"), r"is not UTF-8 text: byte 1 is 0xfc .*iconv"),
    "half of a character": ("a€".encode()[:-1], r"is not UTF-8 text: byte 1 is 0xe2"),
    "half of a pair": (b"\xff\xfea\x00\x3d\xd8", r"is not UTF-16-LE text: byte 4 is 0x3d"),
    "an odd byte": (b"\xff\xfea\x00b", r"is not UTF-16-LE text: byte 4 is 0x62"),
    "UTF-16 without a mark": ("abc".encode("utf-16-le"), r"a null character at 1: .*UTF-8"),
    "no text": (bytes(range(256)), r"is not UTF-8 text|null character"),
}


def on_input(monkeypatch: pytest.MonkeyPatch, content: bytes) -> None:
    """Make these bytes the standard input, under a locale that only decodes ASCII."""
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content), encoding="ascii"))


@pytest.mark.parametrize("ending", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("encoding", ["utf-8", *MARKED, *BIG])
def test_byte_order_marks_and_line_endings_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, encoding: str, ending: str
) -> None:
    content = BIG.get(encoding, b"") + TEXT.replace("\n", ending).encode(encoding)
    (tmp_path / "prompts").write_bytes(content)
    on_input(monkeypatch, content)
    assert read_prompts([], tmp_path / "prompts") == read_prompts([], None) == ["def f():", "ä€𝄞"]
    assert read_text("code", tmp_path / "prompts") == TEXT


@given(text=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0\r\ufeff")))
def test_any_text_roundtrips(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    file = tmp_path_factory.mktemp("text") / "text"
    for encoding in ("utf-8", *MARKED):
        file.write_bytes(text.encode(encoding))
        assert read_text_file(file) == text


@pytest.mark.parametrize(("content", "reason"), REFUSED.values(), ids=REFUSED)
def test_non_text_input_is_rejected_with_position(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes, reason: str
) -> None:
    file = tmp_path / "prompts"
    file.write_bytes(content)
    with pytest.raises(InvalidInput, match=rf"{file} ({reason}|holds {reason})"):
        read_prompts([], file)
    on_input(monkeypatch, content)
    with pytest.raises(InvalidInput, match=rf"standard input ({reason}|holds {reason})"):
        read_prompts([], None)
    with pytest.raises(InvalidInput, match=rf"--code: {file} "):
        read_text("code", file)


@pytest.mark.parametrize("content", [b"", b"\xef\xbb\xbf", b"\xff\xfe", b"\n \r\n"])
def test_an_empty_file_holds_no_prompt(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "prompts").write_bytes(content)
    with pytest.raises(InvalidInput, match=r"no prompt in .*prompts: give one per line"):
        read_prompts([], tmp_path / "prompts")


def test_unreadable_file_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for path, why in ((tmp_path, "Is a directory"), (tmp_path / "none", "No such file"), (Path("a\0b"), "null")):
        with pytest.raises(InvalidInput, match=f"cannot be read: .*{why}"):
            read_prompts([], path)
    closed = io.TextIOWrapper(io.BytesIO())
    monkeypatch.setattr(sys, "stdin", closed)
    closed.close()
    with pytest.raises(InvalidInput, match="standard input cannot be read"):
        read_prompts([], None)


def test_a_process_without_streams_has_no_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DETCOMPILE_CACHE", str(tmp_path))
    for name in ("stdin", "stdout", "stderr"):
        monkeypatch.setattr(sys, name, None)
    with pytest.raises(InvalidInput, match="standard input cannot be read: it is closed"):
        read_prompts([], None)
    cache.command()
    monkeypatch.setattr(sys, "stdout", printed := io.StringIO())
    with shown(True), stage("a stage"):
        pass
    assert not printed.getvalue()


def test_command_exits_with_position_and_2(tmp_path: Path) -> None:
    file = tmp_path / "prompts"
    file.write_bytes("füße\n".encode("latin-1"))
    done = run("generate", "tiny", "--file", str(file))
    assert done.returncode == 2 and "byte 1 is 0xfc" in done.stderr and "Traceback" not in done.stderr
