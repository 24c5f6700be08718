"""Keys, envelopes and the log: faults are reported, and the half-written line of a killed server is none."""

import base64
import json
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from detcompile.errors import InvalidInput, StorageError
from detcompile.serving.receipts import envelope as envelopes
from detcompile.serving.receipts.envelope import Envelope, payload_of, read_envelope, seal, unsealed
from detcompile.serving.receipts.keys import SigningKey, read_signing_key, read_verify_key, write_key_pair
from detcompile.serving.receipts.log import ReceiptLog, checked_lines, is_sampled, miss_probability, read_log
from detcompile.serving.receipts.receipt import Prompt, Receipt, Sample, Served, encode_receipt


@pytest.fixture
def key(tmp_path: Path) -> SigningKey:
    return write_key_pair(tmp_path / "key")


def receipt(number: int, log: ReceiptLog | None = None) -> bytes:
    sample = Sample(index=0, token_ids=[number], finish_reason="length", stop_reason=None, text=None, logprobs=None)
    actual = Receipt(
        id=f"cmpl-{number}", created=number, model="m", level="tokens", fingerprint="f" * 64, fingerprint_parts={},
        served=Served(detcompile="1", tokenizer=None, chat_template=None), params={}, seed="1",
        prompts=[Prompt(token_ids=[1], logprobs=None, samples=[sample])], log=None if log is None else log.place,
    )  # fmt: skip
    return encode_receipt(actual)


def written(path: Path, key: SigningKey | None, count: int = 5, start: int = 0) -> list[bytes]:
    log = ReceiptLog(path)
    for number in range(start, start + count):
        log.append(seal(receipt(number, log), key))
    log.close()
    return path.read_bytes().splitlines(keepends=True)


def test_log_roundtrip(tmp_path: Path, key: SigningKey) -> None:
    written(tmp_path / "log", key)
    written(tmp_path / "log", key, start=5)  # by a server that was started again
    lines = list(checked_lines(tmp_path / "log", key.public, None))
    assert [line.receipt.created for line in lines] == list(range(10))
    assert [line.receipt.log.previous for line in lines] == [None, *(line.digest for line in lines[:-1])]
    assert (tmp_path / "log").stat().st_mode & 0o077 == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda lines: lines[1:], "line 1 was line 2"),
        (lambda lines: lines[:2] + lines[3:], "line 3 was line 4"),
        (lambda lines: [lines[0], lines[2], lines[1], *lines[3:]], "line 2 was line 3"),
        (lambda lines: [*lines[:3], lines[3][:-9]], "line 4 is cut short"),
        (lambda lines: [*lines[:2], b"{}\n", *lines[3:]], "line 3: not a receipt"),
        (lambda lines: [*lines[:2], lines[2].replace(b"payload", b"pay"), *lines[3:]], "line 3: not a receipt"),
        (lambda lines: [*lines, lines[0]], "line 6 was line 1"),
        (lambda lines: [*lines, msgspec.json.encode(seal(receipt(9), None)) + b"\n"], "line 6: its receipt was"),
    ],
)
def test_removed_moved_or_changed_line_is_named(change, message: str, tmp_path: Path) -> None:
    lines = written(tmp_path / "log", None)
    (tmp_path / "log").write_bytes(b"".join(change(lines)))
    with pytest.raises(InvalidInput, match=message):
        list(read_log(tmp_path / "log"))


def test_rewritten_line_breaks_next_line(tmp_path: Path, key: SigningKey) -> None:
    lines = written(tmp_path / "log", key)
    payload = json.loads(payload_of(read_envelope(lines[2])))
    payload["prompts"][0]["samples"][0]["token_ids"] = [7]
    lines[2] = msgspec.json.encode(seal(json.dumps(payload).encode(), key)) + b"\n"
    (tmp_path / "log").write_bytes(b"".join(lines))
    with pytest.raises(InvalidInput, match="line 4 does not follow"):
        list(read_log(tmp_path / "log"))


def test_published_head_reveals_truncated_log(tmp_path: Path, key: SigningKey) -> None:
    path = tmp_path / "log"
    lines = written(path, key)
    *_, last = read_log(path)
    for head in (last.digest, last.payload):
        assert len(list(checked_lines(path, key.public, head))) == 5
    path.write_bytes(b"".join(lines[:4]))
    assert len(list(checked_lines(path, key.public, None))) == 4  # nothing in it says that there was more
    for head in (last.digest, last.payload):
        with pytest.raises(InvalidInput, match="cut off before it"):
            list(checked_lines(path, key.public, head))


def test_line_signed_by_other_key_is_named(tmp_path: Path, key: SigningKey) -> None:
    written(tmp_path / "log", key, 3)
    written(tmp_path / "log", write_key_pair(tmp_path / "other"), 1, start=3)
    with pytest.raises(InvalidInput, match=r"line 4: key .* signed it, not key"):
        list(checked_lines(tmp_path / "log", key.public, None))


def test_partial_last_line_is_dropped_and_chain_continues(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "log"
    lines = written(path, None)
    path.write_bytes(b"".join(lines)[:-20])
    log = ReceiptLog(path)
    assert caplog.messages == [f"{path}: cut off {len(lines[-1]) - 20} bytes of a line without an end"]
    log.append(seal(receipt(99, log), None))
    assert [line.receipt.created for line in read_log(path)] == [0, 1, 2, 3, 99]


def test_log_longer_than_read_buffer_continues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("detcompile.serving.receipts.log.TAIL", 7)
    written(tmp_path / "log", None, 3)
    written(tmp_path / "log", None, 2, start=3)
    assert len(list(read_log(tmp_path / "log"))) == 5


def test_log_allows_one_writer_and_only_receipts(tmp_path: Path) -> None:
    log = ReceiptLog(tmp_path / "log")
    with pytest.raises(InvalidInput, match="another server writes to it"):
        ReceiptLog(tmp_path / "log")
    log.close()
    for text in ("what is no receipt\n", "without an end of a line", "{x", '{"payload": '):
        (tmp_path / "text").write_text(text)
        with pytest.raises(InvalidInput, match="its end is not a receipt"):
            ReceiptLog(tmp_path / "text")
        assert (tmp_path / "text").read_text() == text
    with pytest.raises(StorageError, match="cannot be opened"):
        ReceiptLog(tmp_path)


def test_full_disk_leaves_valid_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = ReceiptLog(tmp_path / "log")
    log.append(seal(receipt(0, log), None))
    write = os.write
    monkeypatch.setattr("os.write", lambda file, data: write(file, data[:11]))
    with pytest.raises(StorageError, match="cannot be written"):
        log.append(seal(receipt(1, log), None))
    monkeypatch.undo()
    log.append(seal(receipt(2, log), None))
    assert [line.receipt.created for line in read_log(tmp_path / "log")] == [0, 2]


def test_audit_sample_depends_on_seed(tmp_path: Path) -> None:
    written(tmp_path / "log", None, 400)
    lines = list(read_log(tmp_path / "log"))
    chosen = {seed: [line.number for line in lines if is_sampled(line, 0.1, seed)] for seed in (1, 2)}
    assert chosen[1] == [line.number for line in lines if is_sampled(line, 0.1, 1)] != chosen[2]
    assert all(15 < len(actual) < 75 for actual in chosen.values())
    assert not any(is_sampled(line, 0, 1) for line in lines) and all(is_sampled(line, 1, 1) for line in lines)
    assert miss_probability(0.5, 3) == 0.125


def test_envelope_follows_dsse() -> None:
    """The pre-authentication encoding, by the example of DSSE's protocol.md."""
    assert envelopes._signed("http://example.com/HelloWorld", b"hello world") == (
        b"DSSEv1 29 http://example.com/HelloWorld 11 hello world"
    )


def test_only_owner_can_read_key_file(tmp_path: Path, key: SigningKey) -> None:
    path = tmp_path / "key"
    assert path.stat().st_mode & 0o777 == 0o600
    again, public = read_signing_key(path), read_verify_key(tmp_path / "key.pub")
    sealed = seal(b"payload", again)
    assert unsealed(sealed, public) is None and public.key_id == key.key_id
    with pytest.raises(StorageError, match="are not overwritten"):
        write_key_pair(path)
    for mode in (0o640, 0o604, 0o620, 0o602):
        path.chmod(mode)
        with pytest.raises(InvalidInput, match="chmod 600"):
            read_signing_key(path)
    path.chmod(0o600)
    for read, file in ((read_signing_key, "key.pub"), (read_verify_key, "key")):
        (tmp_path / file).chmod(0o600)
        with pytest.raises(InvalidInput, match="contains no"):
            read(tmp_path / file)
    with pytest.raises(InvalidInput, match="cannot be read"):
        read_verify_key(tmp_path / "none")


@pytest.mark.parametrize("at", range(0, 64, 9))
def test_any_changed_signature_bit_is_rejected(at: int, key: SigningKey) -> None:
    sealed = seal(b"payload", key)
    raw = bytearray(base64.b64decode(sealed.signatures[0].sig))
    raw[at] ^= 1
    sealed.signatures[0].sig = base64.b64encode(raw).decode()
    assert "was changed after" in (unsealed(sealed, key.public) or "")


@pytest.mark.parametrize(
    "data", [b"", b"[]", b"{", b"\xff", b'{"payload": "a"}', b'{"receipt": 1}', b'{"receipt": {}}', b"[" * 10**5]
)
def test_invalid_envelope_is_refused(data: bytes) -> None:
    with pytest.raises(InvalidInput, match="not a receipt"):
        read_envelope(data)


def test_other_payload_type_is_refused(key: SigningKey) -> None:
    sealed = seal(b"{}", key)
    other = Envelope(payloadType="text/plain", payload=sealed.payload, signatures=sealed.signatures)
    with pytest.raises(InvalidInput, match="text/plain"):
        payload_of(other)
    for payload in ("%%%", "ü", "YQ="):
        with pytest.raises(InvalidInput, match="not valid base64"):
            payload_of(Envelope(payloadType=sealed.payloadType, payload=payload, signatures=[]))


def test_process_that_read_a_receipt_ends() -> None:
    """With msgspec 0.22 a third of such processes crashed at their end."""
    program = (
        "import sys; from detcompile.serving.receipts.receipt import decode_receipt\n"
        "decode_receipt(sys.stdin.buffer.read())"
    )
    command = [sys.executable, "-c", program]
    assert [subprocess.run(command, input=receipt(1)).returncode for _ in range(12)] == [0] * 12
