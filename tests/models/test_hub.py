"""Models by name: folders, ids of the Hub, its cache, downloads, and errors with advice."""

import functools
import json
import pickle
import shutil
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import httpx
import pytest
import torch
from huggingface_hub import errors
from transformers import AutoTokenizer, PreTrainedModel

import detcompile
from detcompile import InvalidInput
from detcompile.models import hub, remote
from detcompile.models.hub import TINY_FOLDER, find_checkpoint, is_hub_id
from detcompile.models.loading import find, tokenizer_of
from detcompile.weights import named_weights, weight_digests
from detcompile.workers import load_for_rank
from tests.model_cases import random_model
from tests.models.hub_cases import COMMIT, LATER, Hub, put_snapshot, serving, with_cache

NAME = "org/name"


def digests(model: PreTrainedModel) -> dict[str, str]:
    """Of every weight."""
    return weight_digests(named_weights(model))


@functools.cache
def tiny() -> dict[str, bytes]:
    """Files of the embedded model."""
    return {file.name: file.read_bytes() for file in TINY_FOLDER.iterdir() if file.is_file()}


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """Files of a model in several pieces, with the embedded model's tokenizer."""
    folder = tmp_path_factory.mktemp("small")
    random_model("qwen3", torch.float32, num_hidden_layers=1).save_pretrained(folder, max_shard_size="50KB")
    files = {file.name: file.read_bytes() for file in folder.iterdir()}
    assert sum(name.endswith(".safetensors") for name in files) > 1
    return files | {name: tiny()[name] for name in ("tokenizer.json", "tokenizer_config.json")}


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[Path]:
    """An empty cache, and no network."""
    with with_cache(tmp_path / "cache", offline=True) as folder:
        yield folder


def test_a_cached_model_loads_offline_with_its_commit_and_tokenizer(cache: Path, small: dict[str, bytes]) -> None:
    put_snapshot(cache, NAME, small)
    module = detcompile.load_model(NAME, dtype="bfloat16", device="cpu")
    assert module.name_or_path == module.config.name_or_path == NAME
    assert (module.config._commit_hash, module.dtype) == (COMMIT, torch.bfloat16)
    put_snapshot(cache, NAME, {"config.json": b"{}"}, LATER)  # the branch moves on
    tokenizer = tokenizer_of(module)
    assert tokenizer is not None and tokenizer("def") == AutoTokenizer.from_pretrained(TINY_FOLDER)("def")


def test_a_revision_is_a_branch_or_a_commit(cache: Path, small: dict[str, bytes]) -> None:
    put_snapshot(cache, NAME, small)
    put_snapshot(cache, NAME, small | {"generation_config.json": b'{"eos_token_id": 5}'}, LATER, "dev")
    put_snapshot(cache, "gpt2", small)
    ends = [
        detcompile.load_model(NAME, revision=revision, device="cpu").generation_config.eos_token_id
        for revision in (None, "main", "dev", LATER)
    ]
    assert ends == [None, None, 5, 5]
    assert find_checkpoint("gpt2").commit == COMMIT


def test_random_weights_need_no_weights(cache: Path) -> None:
    put_snapshot(cache, NAME, {"config.json": tiny()["config.json"]})
    model = detcompile.load_model(NAME, random=True, device="cpu")
    assert (model.name_or_path, model.config._commit_hash) == (NAME, COMMIT)
    with pytest.raises(InvalidInput, match=r"only a part of .*: model\.safetensors missing"):
        detcompile.load_model(NAME)


def test_a_path_wins_over_an_id(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_snapshot(cache, NAME, tiny())
    shutil.copytree(TINY_FOLDER / "draft", tmp_path / NAME)
    monkeypatch.chdir(tmp_path)
    assert find_checkpoint(NAME) == (tmp_path / NAME, str(tmp_path / NAME), None)
    assert find_checkpoint("tiny").folder == TINY_FOLDER
    with pytest.raises(InvalidInput, match="revision='main' needs a model of the Hub, but org/name is a local folder"):
        find_checkpoint(NAME, revision="main")
    with pytest.raises(InvalidInput, match="no such folder"):
        find_checkpoint(Path("org/other"))


@pytest.mark.parametrize("name", ["a/b/c", "./name", "../name", "/name", "~/name", "a\\b", "m.pt2", "", "a--b", "a b"])
def test_invalid_id_sends_no_request_to_the_hub(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "snapshot_download", lambda *_, **__: pytest.fail("asked the Hub"))
    monkeypatch.chdir(TINY_FOLDER / "medusa")
    with pytest.raises(InvalidInput, match="pass a local Hugging Face model folder, an embedded model"):
        detcompile.load_model(name)
    assert not is_hub_id(name)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("https://huggingface.co/Qwen/Qwen3-0.6B", "id, 'Qwen/Qwen3-0.6B'$"),
        ("http://www.huggingface.co/Qwen/Qwen3-0.6B/", "id, 'Qwen/Qwen3-0.6B'$"),
        ("huggingface.co/Qwen/Qwen3-0.6B", "id, 'Qwen/Qwen3-0.6B'$"),
        ("https://hf.co/Qwen/Qwen3-0.6B/tree/v1", "id, 'Qwen/Qwen3-0.6B', revision='v1'$"),
        ("https://huggingface.co/Qwen/Qwen3-0.6B/blob/main/config.json", "'Qwen/Qwen3-0.6B', revision='main'$"),
        ("https://huggingface.co/Qwen/Qwen3-0.6B?library=vllm", "id, 'Qwen/Qwen3-0.6B'$"),
        ("hf://Qwen/Qwen3-0.6B", "is a URL: pass a local"),
        ("https://example.com/model", "is a URL: pass a local"),
        ("https://huggingface.co/Qwen/Qwen3-0.6B-GGUF", "id, 'Qwen/Qwen3-0.6B-GGUF'$"),
    ],
)
def test_addresses_are_told_what_to_write(name: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "snapshot_download", lambda *_, **__: pytest.fail("asked the Hub"))
    with pytest.raises(InvalidInput, match=message):
        find_checkpoint(name)


def test_incomplete_cache_differs_from_missing_cache(cache: Path, small: dict[str, bytes]) -> None:
    with pytest.raises(InvalidInput, match=r"no revision of it, and HF_HUB_OFFLINE is set. Run `hf download org/name`"):
        detcompile.compile(NAME)
    pieces = sorted(name for name in small if name.endswith(".safetensors"))
    put_snapshot(cache, NAME, {name: content for name, content in small.items() if name != pieces[1]})
    with pytest.raises(
        InvalidInput, match=f"only a part of {NAME} at {COMMIT}: {pieces[1]} missing, and HF_HUB_OFFLINE"
    ):
        detcompile.load_model(NAME)
    with pytest.raises(InvalidInput, match=rf"no revision 'v2' of it, but {COMMIT}.*download org/name --revision v2`"):
        detcompile.load_model(NAME, revision="v2")


ANSWER = httpx.Response(404, request=httpx.Request("GET", "https://huggingface.co"))
FAULTS = {
    "no such repository on the Hugging Face Hub, or a private": errors.RepositoryNotFoundError("?", response=ANSWER),
    "is gated on the Hugging Face Hub: request access": errors.GatedRepoError("?", response=ANSWER),
    "has no revision 'v2' on the Hugging Face Hub": errors.RevisionNotFoundError("?", response=ANSWER),
    r"cannot be reached \(ConnectError\). Run `hf download": httpx.ConnectError("?"),
    r"cannot be reached \(LocalEntryNotFoundError\)": errors.LocalEntryNotFoundError("?"),
    "no token is stored here: run `hf auth login`": errors.LocalTokenNotFoundError("?"),
    "cannot be downloaded from the Hugging Face Hub: RuntimeError: broken": RuntimeError("broken"),
    "HfHubHTTPError: too many": errors.HfHubHTTPError("too many", response=ANSWER),
}


@pytest.mark.parametrize("text", FAULTS)
def test_hub_errors_say_what_to_do(text: str, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, local_files_only: bool = False, **__: object) -> str:
        raise errors.LocalEntryNotFoundError("not cached") if local_files_only else FAULTS[text]

    monkeypatch.setattr(hub, "snapshot_download", fail)
    with with_cache(cache, offline=False), pytest.raises(InvalidInput, match=text):
        detcompile.load_model(NAME, revision="v2")


def test_a_full_disk_is_a_storage_error(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> str:
        raise OSError(28, "No space left on device", str(cache / "blobs"))

    monkeypatch.setattr(hub, "snapshot_download", fail)
    with with_cache(cache, offline=False), pytest.raises(detcompile.StorageError, match="set HF_HUB_CACHE"):
        detcompile.load_model(NAME)


EXTRAS = {
    "consolidated.safetensors": b"the same weights again",
    "pytorch_model.bin": b"and again",
    "onnx/config.json": b"{}",
    "README.md": b"words",
    "modeling_name.py": b"raise AssertionError('ran')",
    "chat_template.jinja": b"{{ messages }}",
    "additional_chat_templates/tools.jinja": b"{{ tools }}",
}


def test_what_is_needed_is_fetched_once_and_nothing_else(cache: Path, small: dict[str, bytes]) -> None:
    files = small | EXTRAS
    with with_cache(cache, offline=False), serving(Hub({COMMIT: files}, {"main": COMMIT})) as there:
        module = detcompile.load_model(NAME, device="cpu", token="hf_secret")
        unwanted = {*EXTRAS} - {"chat_template.jinja", "additional_chat_templates/tools.jinja"}
        assert sorted(there.sent) == sorted({*files} - unwanted)
        assert there.tokens == {"Bearer hf_secret"}
        again = detcompile.load_model(NAME, device="cpu")
        assert len(there.sent) == len(files) - len(unwanted)
    assert digests(again) == digests(module)
    offline = detcompile.load_model(NAME, device="cpu")
    assert digests(offline) == digests(module) and offline.config._commit_hash == COMMIT


def test_bin_files_are_fetched_without_safetensors(cache: Path, small: dict[str, bytes]) -> None:
    others = {name: content for name, content in small.items() if "safetensors" not in name}
    files = others | {"pytorch_model.bin": b"weights", "training_args.bin": b"others", "modeling_name.py": b"#"}
    with with_cache(cache, offline=False), serving(Hub({COMMIT: files}, {"main": COMMIT})) as there:
        actual = find_checkpoint(NAME, code=True)
        assert sorted(there.sent) == sorted({*files} - {"training_args.bin"})
        assert (actual.folder / "pytorch_model.bin").read_bytes() == b"weights"
    nothing = serving(Hub({COMMIT: others}, {"main": COMMIT}))
    refusal = pytest.raises(InvalidInput, match=r"lacks model\.safetensors: it is not a model in transformers' format")
    with with_cache(cache / "2", offline=False), nothing, refusal:
        find_checkpoint(NAME)


def test_a_branch_that_moved_is_followed_and_a_commit_is_not(cache: Path, small: dict[str, bytes]) -> None:
    there = Hub({COMMIT: small, LATER: small}, {"main": COMMIT})
    with with_cache(cache, offline=False), serving(there):
        assert find_checkpoint(NAME).commit == COMMIT
        there.refs["main"] = LATER
        assert find_checkpoint(NAME).commit == LATER
        assert find_checkpoint(NAME, revision=COMMIT).commit == COMMIT
        with pytest.raises(InvalidInput, match="has no revision 'gone' on the Hugging Face Hub"):
            find_checkpoint(NAME, revision="gone")
        with pytest.raises(InvalidInput, match="no such local folder, and no such repository"):
            find_checkpoint("org/other")
    assert find_checkpoint(NAME, revision=COMMIT).commit == COMMIT  # without a network


def test_a_gated_repository_is_refused_unless_it_is_cached(cache: Path, small: dict[str, bytes]) -> None:
    there = Hub({COMMIT: small}, {"main": COMMIT}, refusal=(403, "GatedRepo"))
    with with_cache(cache, offline=False), serving(there):
        with pytest.raises(InvalidInput, match=r"org/name is gated .*/org/name, then run `hf auth login`"):
            find_checkpoint(NAME)
        there.refusal = None
        folder = find_checkpoint(NAME).folder
        there.refusal = (403, "GatedRepo")
        assert find_checkpoint(NAME).folder == folder


class Stopped(Exception):
    """Raised instead of a start of ranks."""


def test_ranks_load_the_snapshot_that_was_found(cache: Path, small: dict[str, bytes], tmp_path: Path) -> None:
    put_snapshot(cache, NAME, small)
    with mock.patch.object(remote, "start_ranks", side_effect=Stopped) as start, pytest.raises(Stopped):
        detcompile.compile(NAME, tp=2, dtype="bfloat16", device="cpu")
    plan = pickle.loads(pickle.dumps(start.call_args.args[0]))
    assert plan.device_type == "cpu"
    put_snapshot(cache, NAME, {"config.json": b"{}"}, LATER)  # the branch moves on, and ranks have another cache
    with with_cache(tmp_path / "elsewhere", offline=True):
        module = load_for_rank(plan, torch.device("cpu"))
    assert (module.name_or_path, module.config._commit_hash, module.dtype) == (NAME, COMMIT, torch.bfloat16)


OWN_CODE = {
    "configuration_own.py": b"""
from transformers import Qwen3Config

class OwnConfig(Qwen3Config):
    model_type = "own"
""",
    "modeling_own.py": b"""
from transformers import Qwen3ForCausalLM
from .configuration_own import OwnConfig

class OwnForCausalLM(Qwen3ForCausalLM):
    config_class = OwnConfig
""",
}


def with_own_code(files: dict[str, bytes]) -> dict[str, bytes]:
    """The same model, as a kind of its own that brings its code."""
    config = json.loads(files["config.json"])
    config |= {"model_type": "own", "architectures": ["OwnForCausalLM"]}
    config["auto_map"] = {
        "AutoConfig": "configuration_own.OwnConfig",
        "AutoModelForCausalLM": "modeling_own.OwnForCausalLM",
    }
    return files | OWN_CODE | {"config.json": json.dumps(config).encode()}


def test_checkpoint_code_runs_only_if_trusted(
    cache: Path, small: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    put_snapshot(cache, NAME, with_own_code(small))
    text = r"\(configuration_own.OwnConfig, modeling_own.OwnForCausalLM\).*pass trust_remote_code=True"
    for random in (False, True):
        with pytest.raises(InvalidInput, match=text):
            detcompile.load_model(NAME, random=random, device="cpu")
    with pytest.raises(InvalidInput, match=text):
        detcompile.compile(NAME, device="cpu")
    model = detcompile.load_model(NAME, trust_remote_code=True, device="cpu")
    assert type(model).__name__ == "OwnForCausalLM"
    put_snapshot(cache, "org/plain", small)
    assert digests(model) == digests(detcompile.load_model("org/plain", device="cpu"))


def test_tokenizer_code_runs_only_if_model_code_did(
    cache: Path, small: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    ran = tmp_path / "ran"
    own_class = "tokenization_own.OwnTokenizer"
    settings = {"tokenizer_class": "OwnTokenizer", "auto_map": {"AutoTokenizer": [own_class, own_class]}}
    code = (
        f"from transformers import PreTrainedTokenizerFast\nopen({str(ran)!r}, 'w').close()\n"
        "class OwnTokenizer(PreTrainedTokenizerFast): pass\n"  # transformers marks the class
    )
    item = {"tokenizer_config.json": json.dumps(settings).encode(), "tokenization_own.py": code.encode()}
    put_snapshot(cache, NAME, small | item)
    tokenizer_of(detcompile.load_model(NAME, device="cpu"))
    assert not ran.exists()
    put_snapshot(cache, "org/own", with_own_code(small) | item)
    tokenizer_of(detcompile.load_model("org/own", trust_remote_code=True, device="cpu"))
    assert ran.exists()


def test_what_was_found_on_another_machine_is_found_again_by_its_commit(cache: Path, small: dict[str, bytes]) -> None:
    put_snapshot(cache, NAME, small)
    actual = find(NAME, device="cpu")
    assert actual.checkpoint.commit is not None
    elsewhere = actual._replace(checkpoint=actual.checkpoint._replace(folder=Path("/no/such/cache")))
    assert digests(elsewhere.on(torch.device("cpu"))) == digests(actual.on(torch.device("cpu")))
    lone = elsewhere._replace(checkpoint=elsewhere.checkpoint._replace(commit=None))
    with pytest.raises(InvalidInput, match="/no/such/cache"):
        lone.on(torch.device("cpu"))


def test_options_of_loading_are_refused_with_a_module_and_bad_ones_by_name() -> None:
    module = random_model("qwen3", torch.float32, num_hidden_layers=1)
    with pytest.raises(InvalidInput, match=r"dtype and device cannot be passed with a module.*model.to\("):
        detcompile.compile(module, dtype=torch.bfloat16, device="cpu")
    with pytest.raises(InvalidInput, match="revision and token and trust_remote_code cannot be passed with a module"):
        detcompile.compile(module, revision="main", token="x", trust_remote_code=True)
    for dtype in ("int8", torch.int8, "nonsense"):
        with pytest.raises(InvalidInput, match="is not supported: use float32"):
            detcompile.load_model("tiny", dtype=dtype)
    with pytest.raises(InvalidInput, match=r"device='cpu:0' with tp=2: ranks take"):
        detcompile.compile("tiny", tp=2, device="cpu:0")
    dtypes = [detcompile.load_model("tiny-draft", dtype=dtype).dtype for dtype in ("auto", "float32", torch.float16)]
    assert dtypes == [torch.bfloat16, torch.float32, torch.float16]
