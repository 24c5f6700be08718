"""keygen, replay and audit as a user runs them: what they print, and their exit codes."""

import contextlib
import io
import json
import subprocess
import sys
from pathlib import Path
from unittest import mock

import httpx
import msgspec
import pytest
import torch

from detcompile.commands import cli
from detcompile.commands.options import Loading
from detcompile.commands.receipts.replay import spec_of
from detcompile.models.compiled import CompiledModel
from detcompile.models.spec import ModelSpec
from detcompile.serving.receipts.envelope import payload_digest, payload_of, read_envelope, seal
from detcompile.serving.receipts.keys import read_signing_key, write_key_pair
from detcompile.serving.receipts.log import ReceiptLog
from detcompile.serving.receipts.receipt import decode_receipt, encode_receipt
from tests.model_cases import compiled
from tests.serving.conftest import Server
from tests.serving.receipts.receipt_cases import PROMPT, TAMPERINGS, changed

ASKED = {"prompt": PROMPT, "max_tokens": 12, "seed": 5, "n": 2, "receipt": True, "temperature": 0.9, "logprobs": 1}


def compiled_here(*_: object) -> CompiledModel:
    return compiled("tiny", torch.bfloat16)


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    out, err = io.StringIO(), io.StringIO()
    named = [str(argument) for argument in arguments]
    with (
        mock.patch.object(sys, "argv", ["detcompile", *named]),
        mock.patch.object(ModelSpec, "compile", compiled_here),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            cli.main()
            code = 0
        except SystemExit as ended:
            code = int(ended.code or 0)
    return subprocess.CompletedProcess(named, code, out.getvalue(), err.getvalue())


@pytest.fixture(scope="module")
def answer(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("receipts") / "answer.json"
    path.write_bytes(httpx.post(f"{server.url}/v1/completions", json=ASKED, timeout=120).content)
    return path


def test_replay_verifies_answer(answer: Path, folder: Path, tmp_path: Path) -> None:
    done = run("replay", answer, "--key", folder / "key.pub")
    assert done.returncode == 0 and "equal: all 24 tokens were reproduced" in done.stdout
    assert "signature valid" in done.stdout
    actual = json.loads(run("replay", answer, "tiny", "--json", "--chunk", "5").stdout)
    assert (actual["outcome"], actual["num_tokens"], actual["signature"]) == ("equal", 24, "unchecked")
    assert run("replay", answer, "--decode").returncode == 0
    assert "except those that no receipt covers: usage.prompt_tokens_details.cached_tokens" in done.stdout
    forged = json.loads(answer.read_bytes())
    forged["choices"][1]["text"] = "another text"
    (tmp_path / "forged.json").write_text(json.dumps(forged))
    done = run("replay", tmp_path / "forged.json", "--key", folder / "key.pub")
    assert done.returncode == 1 and "differs: answer.choices[1].text: " in done.stdout
    assert "signature valid" in done.stdout


@pytest.mark.parametrize(
    ("kind", "code", "message"),
    [
        ("another token", 1, "token_ids: sample 0, position 5: token "),
        ("another text", 1, "text: sample 0: text is 'aaaa"),
        ("other weights", 2, "weights differs: other weights"),
        ("another tokenizer", 2, "tokenizer differs: another tokenizer"),
    ],
)
def test_replay_prints_differences(
    kind: str, code: int, message: str, answer: Path, folder: Path, tmp_path: Path
) -> None:
    wrong = changed(read_envelope(answer.read_bytes()), TAMPERINGS[kind].change, read_signing_key(folder / "key"))
    (tmp_path / "wrong.json").write_bytes(msgspec.json.encode(wrong))
    done = run("replay", tmp_path / "wrong.json", "--key", folder / "key.pub")
    assert done.returncode == code and message in done.stdout, done.stdout


def test_wrong_key_is_reported_without_loading_model(answer: Path, tmp_path: Path) -> None:
    write_key_pair(tmp_path / "other")
    with mock.patch.object(ModelSpec, "compile", side_effect=AssertionError):
        done = run("replay", answer, "--key", tmp_path / "other.pub")
    assert done.returncode == 1 and "signatures: key" in done.stdout


def test_unreadable_input_has_its_own_exit_code(answer: Path, tmp_path: Path) -> None:
    (tmp_path / "none.json").write_text("{}")
    archive = changed(read_envelope(answer.read_bytes()), lambda p: p.update(model="model.pt2"), None)
    (tmp_path / "archive.json").write_bytes(msgspec.json.encode(archive))
    other = {"receipt": json.loads(answer.read_bytes())["receipt"], "text": "x"}
    (tmp_path / "other.json").write_text(json.dumps(other))
    for arguments, message in (
        (["none.json"], "not a receipt"),
        (["missing.json"], "cannot be read"),
        (["other.json"], "which is not an answer of"),
        (["archive.json"], "which holds code: name it as MODEL"),
        ([answer, "--key", answer], "contains no public key"),
        ([answer, "--opening", answer], "contains no opening"),
    ):
        done = run("replay", tmp_path / arguments[0], *arguments[1:])
        assert done.returncode == 3 and message in " ".join(done.stderr.split()), done.stderr


def test_audit_checks_log(server: Server, answer: Path, folder: Path) -> None:
    count = len((folder / "log").read_bytes().splitlines())
    done = run("audit", folder / "log", "--key", folder / "key.pub", "--sample", "0.3", "--seed", "1")
    assert done.returncode == 0, done.stdout
    assert f"{count} receipt{'s' * (count != 1)}, chained and signed" in done.stdout
    again = run("audit", folder / "log", "--key", folder / "key.pub", "--sample", "0.3", "--seed", "1")
    assert again.stdout == done.stdout
    assert "missed it" in run("audit", folder / "log", "--sample", "0").stdout
    whole = run("audit", folder / "log", "--key", folder / "key.pub", "--sample", "1")
    assert whole.returncode == 0 and f"all {count} checked" in whole.stderr and "missed it" not in whole.stdout
    digest = payload_digest(read_envelope(answer.read_bytes()))
    assert run("audit", folder / "log", "--sample", "0", "--head", digest).returncode == 0
    done = run("audit", folder / "log", "--sample", "0", "--head", "0" * 64)
    assert done.returncode == 1 and "cut off before it" in done.stdout


def test_audit_finds_forged_answer(answer: Path, tmp_path: Path) -> None:
    """The server chained and signed a false answer, so only a replay of that line finds it."""
    honest = payload_of(read_envelope(answer.read_bytes()))
    key, log = write_key_pair(tmp_path / "key"), ReceiptLog(tmp_path / "log")
    for number in range(4):
        receipt = decode_receipt(honest)
        receipt.log = log.place
        if number == 2:
            receipt.prompts[0].samples[1].token_ids[3] ^= 1
        log.append(seal(encode_receipt(receipt), key))
    done = run("audit", tmp_path / "log", "--key", tmp_path / "key.pub", "--sample", "1")
    assert done.returncode == 1 and "line 3" in done.stdout and "sample 1, position 3" in done.stdout
    assert "1 of 4 were not reproduced" in done.stdout
    assert run("audit", tmp_path / "log", "--sample", "0").returncode == 0
    assert run("audit", tmp_path / "none").returncode == 2


@pytest.mark.parametrize("wrong", [False, True])
def test_audit_reports_skipped_receipts(wrong: bool, answer: Path, tmp_path: Path) -> None:
    """Receipts with another fingerprint or with hashes only are not failures, but do not count as equal."""
    sealed, log = read_envelope(answer.read_bytes()), ReceiptLog(tmp_path / "log")
    for number in range(4):
        changes = TAMPERINGS["other weights"].change if number == 1 else lambda payload: None
        receipt = decode_receipt(payload_of(changed(sealed, changes, None)))
        receipt.log = log.place
        if number == 2:
            receipt.level = "hashes"
            receipt.prompts[0].token_ids = receipt.prompts[0].samples[0].token_ids = "0" * 64
        if number == 3 and wrong:
            receipt.prompts[0].samples[1].token_ids[3] ^= 1
        log.append(seal(encode_receipt(receipt), None))
    done = run("audit", tmp_path / "log", "--sample", "1")
    assert done.returncode == (1 if wrong else 3), done.stdout
    assert "line 2, " in done.stdout and ": not checked: fingerprint_parts.weights: " in done.stdout
    assert "line 3, " in done.stdout and ": not checked: the receipt holds hashes" in done.stdout
    assert "2 of 4 were not checked" in done.stdout and ("1 of 2 were not reproduced" in done.stdout) == wrong
    assert wrong or f"missed it with probability {0.9**2:.3g}" in done.stdout


def test_receipt_names_exact_arithmetic(answer: Path) -> None:
    receipt = decode_receipt(payload_of(read_envelope(answer.read_bytes())))
    receipt.fingerprint_parts["numerics"] = "exact8"
    assert spec_of(receipt, "tiny", Loading(), False).arithmetic == "exact8"
    assert spec_of(receipt, "tiny", Loading(numerics="exact16"), False).arithmetic == "exact16"
    assert spec_of(receipt, "model.pt2", Loading(), False) == ModelSpec("model.pt2")  # an archive takes no options


def test_keygen_does_not_overwrite_key(tmp_path: Path) -> None:
    done = run("keygen", tmp_path / "key")
    assert done.returncode == 0 and "--sign" in done.stdout and (tmp_path / "key.pub").exists()
    assert run("keygen", tmp_path / "key").returncode == 2


def test_missing_extra_names_install_command() -> None:
    code = (
        "import importlib.util, sys; found = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda name, *a: None if name == 'cryptography' else found(name, *a)\n"
        "sys.argv = ['detcompile', 'keygen', 'x']\n"
        "from detcompile.commands.cli import main; main()"
    )
    finished = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    message = "cryptography is not installed: pip install '.[serve]' in a checkout"
    assert finished.returncode == 2 and message in finished.stderr
