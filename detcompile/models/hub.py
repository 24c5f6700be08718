"""Models by name: an embedded model, a local folder, or a repository of the Hugging Face Hub, cached or fetched.

Files of the Hub lie in its own cache (HF_HUB_CACHE or HF_HOME), shared with transformers and `hf download`.
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
from detcompile.models.weight_files import WEIGHTS, parts_of
from detcompile.progress import aside, stage
from detcompile.runtime.requests.plain_values import shown
from detcompile.storage import disk_failure

__all__ = ["Checkpoint", "EMBEDDED", "TINY", "TINY_FOLDER", "cached_snapshot", "find_checkpoint", "is_hub_id"]

TINY = "tiny"  # the name of the embedded model
TINY_FOLDER = Path(__file__).parents[1] / TINY
EMBEDDED = {TINY: TINY_FOLDER, "tiny-draft": TINY_FOLDER / "draft"}  # the second drafts for the first
SETTINGS = ["*.json", "*.model", "*.txt", "*.tiktoken", "*.jinja"]  # configs, indexes of weights, tokenizer, templates
BELOW = ["*/*"]  # other formats, and checkpoints of a training
TEMPLATES = "additional_chat_templates/*.jinja"
CODE = "*.py"
CHOICES = (
    f"give a local Hugging Face model folder, an embedded model ({' or '.join(map(repr, EMBEDDED))}), or the id of a"
    " repository on the Hugging Face Hub, such as Qwen/Qwen3-0.6B"
)
ADDRESS = (
    r"(?:https?://)?(?:www\.)?(?:huggingface\.co|hf\.co)/(?P<owner>[^/?#]+)/(?P<repository>[^/?#]+)"
    r"(?:/(?:tree|blob|resolve)/(?P<revision>[^/?#]+))?(?:[/?#].*)?"
)
UNREACHABLE = (httpx.TransportError, OfflineModeIsEnabled, LocalEntryNotFoundError)
MOST_NAMED = 3
SHOWN_OF_COMMIT = 12
CACHE_ADVICE = "Free space there or make it writable, or set HF_HUB_CACHE to a folder of yours with room."


class Checkpoint(NamedTuple):
    """A model's files, found.

    Attributes:
        folder: where they lie; a file, if a lone config was given.
        name: what the model is called: the folder, or its id on the Hub.
        commit: the revision of the Hub that they are; None of other folders.
    """

    folder: Path
    name: str
    commit: str | None = None

    @property
    def title(self) -> str:
        """A short name for people."""
        return self.folder.name if self.commit is None else f"{self.name} at {self.commit[:SHOWN_OF_COMMIT]}"


class _Request(NamedTuple):
    """What is wanted of the Hub."""

    name: str
    revision: str | None
    token: str | bool | None

    @property
    def command(self) -> str:
        """The command that fetches it."""
        return f"`hf download {self.name}{f' --revision {self.revision}' if self.revision else ''}`"


def find_checkpoint(
    name: str | Path,
    *,
    revision: str | None = None,
    token: str | bool | None = None,
    weights: bool = True,
    code: bool = False,
) -> Checkpoint:
    """The folder of a model: embedded, local, or of the Hub, from where what the cache lacks is fetched.

    A path that exists wins over an id of the Hub. Only a str with one slash or none is an id.

    Args:
        revision: branch, tag or commit on the Hub; None takes the main branch.
        token: access token of the Hub, True for the one that `hf auth login` keeps; None takes that if there is one.
        weights: also the weights; otherwise what else there is.
        code: also Python files.

    Raises:
        InvalidInput: there is no such model, it cannot be reached, the cache has a part of it, or a revision was given
            for what is not on the Hub.
        StorageError: the cache cannot be written.
    """
    _require_no_address(str(name))
    local = EMBEDDED.get(str(name)) or Path(name)
    if name != "" and _exists(local):
        if revision is not None:
            raise InvalidInput(
                f"revision={revision!r} is of the Hub, and {name} is a local folder: leave revision out, or rename the"
                " folder"
            )
        if local.suffix == ".pt2" and local.is_file():
            raise InvalidInput(f"{name} is an archive, which was compiled before: give it to detcompile.load()")
        local = local.absolute()  # the working directory may change later
        return Checkpoint(local, str(local))
    if not isinstance(name, str) or not is_hub_id(name):
        raise InvalidInput(f"{name or repr(name)}: no such folder; {CHOICES}")
    return _from_hub(_Request(name, revision, token), weights, code)


def _require_no_address(name: str) -> None:
    """Reject an address, and a GGUF file, by the name to write instead.

    Raises:
        InvalidInput: naming it.
    """
    address = re.fullmatch(ADDRESS, name)
    if address is not None:
        repository = f"{address['owner']}/{address['repository']}"
        revision = f", revision={address['revision']!r}" if address["revision"] else ""
        raise InvalidInput(f"{name} is an address: give the repository's id, {repository!r}{revision}")
    if "://" in name:
        raise InvalidInput(f"{name} is an address: {CHOICES}")
    if name.endswith(".gguf"):
        raise InvalidInput(f"{name}: GGUF is not read; give the checkpoint that it was made of, in safetensors")


def is_hub_id(name: str) -> bool:
    """Whether a name may be that of a repository on the Hub."""
    if name.startswith((".", "/", "~")) or name.count("/") > 1 or "\\" in name or Path(name).suffix == ".pt2":
        return False
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return True


def cached_snapshot(name: str, revision: str | None) -> Path | None:
    """The folder that the Hub's cache has of a revision, whole or in part; None if it has none."""
    if not is_hub_id(name):
        return None
    try:
        return Path(snapshot_download(name, revision=revision, local_files_only=True, allow_patterns=[]))
    except LocalEntryNotFoundError:
        return None


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError as error:  # a name too long for the system, a folder that may not be entered
        raise InvalidInput(f"{shown(str(path))} cannot be looked for ({error.strerror}); {CHOICES}") from error


def _from_hub(wanted: _Request, weights: bool, code: bool) -> Checkpoint:
    with stage(f"fetch {wanted.name}") as fetching, aside():
        folder, obstacle = _fetched(wanted, weights, code)
        if obstacle is not None:
            folder = cached_snapshot(wanted.name, wanted.revision)
        if folder is None:
            assert obstacle is not None, "what was fetched lies somewhere"
            raise _refusal(wanted, obstacle) from obstacle
        missing = _missing(folder, weights)
        if missing and isinstance(obstacle, HfHubHTTPError):
            raise _refusal(wanted, obstacle) from obstacle
        if missing:
            raise InvalidInput(_lacking(wanted, folder, missing, obstacle)) from obstacle
        found = Checkpoint(folder, wanted.name, folder.name)
        fetching.becomes(f"fetch {found.title}")
    return found


def _fetched(wanted: _Request, weights: bool, code: bool) -> tuple[Path | None, Exception | None]:
    """The snapshot with what is wanted of it; or what kept it from being fetched, where the cache may have it."""
    if constants.HF_HUB_OFFLINE:
        return None, OfflineModeIsEnabled("HF_HUB_OFFLINE is set")
    try:
        first = [*SETTINGS, CODE] if code else SETTINGS
        folder = _download(wanted, first, ignore_patterns=BELOW)
        wanted = wanted._replace(revision=folder.name)
        if weights:
            _download_weights(wanted, folder)
        _download(wanted, [TEMPLATES])
    except (RevisionNotFoundError, HFValidationError, LocalTokenNotFoundError) as error:
        raise _refusal(wanted, error) from error
    except (*UNREACHABLE, HfHubHTTPError) as error:
        return None, error
    except OSError as error:
        raise disk_failure(error, Path(constants.HF_HUB_CACHE), CACHE_ADVICE) or _refusal(wanted, error) from error
    except (RuntimeError, ValueError, httpx.HTTPError) as error:  # those of what carries large files
        raise _refusal(wanted, error) from error
    return folder, None


def _download(wanted: _Request, patterns: list[str], **options: Any) -> Path:
    name, revision, token = wanted
    return Path(snapshot_download(name, revision=revision, token=token, allow_patterns=patterns, **options))


def _download_weights(wanted: _Request, folder: Path) -> None:
    """The weights that transformers will read, in its order, and no others beside them."""
    for name in WEIGHTS:
        for files in ([name], parts_of(folder, name)):
            if files:
                _download(wanted, [glob.escape(file) for file in files])
            if files and all((folder / file).is_file() for file in files):
                return


def _missing(folder: Path, weights: bool) -> list[str]:
    """Files that a snapshot lacks."""
    missing = [] if (folder / "config.json").is_file() else ["config.json"]
    if not weights or any((folder / name).is_file() for name in WEIGHTS):
        return missing
    parts = next((parts for name in WEIGHTS if (parts := parts_of(folder, name))), list(WEIGHTS[:1]))
    return missing + [part for part in parts if not (folder / part).is_file()]


def _lacking(wanted: _Request, folder: Path, missing: list[str], obstacle: Exception | None) -> str:
    more = f" and {len(missing) - MOST_NAMED} more" if len(missing) > MOST_NAMED else ""
    files = f"{', '.join(missing[:MOST_NAMED])}{more}"
    if obstacle is None:
        return (
            f"{wanted.name} on the Hugging Face Hub, at {folder.name}, lacks {files}: it is no model of transformers'"
            " format; take another repository or revision"
        )
    return (
        f"the cache has {wanted.name} at {folder.name} only in part: {files} missing, and {_why(obstacle)}. Run"
        f" {wanted.command} where there is a network, or give a local folder"
    )


def _refusal(wanted: _Request, error: Exception) -> DetcompileError:
    """What went wrong, and what to do."""
    name, revision, _ = wanted
    if isinstance(error, GatedRepoError):
        return InvalidInput(
            f"{name} is gated on the Hugging Face Hub: ask for access at {constants.ENDPOINT}/{name}, then run `hf auth"
            " login`, set HF_TOKEN, or pass token"
        )
    if isinstance(error, RepositoryNotFoundError):
        return InvalidInput(
            f"{name}: no such folder here, and no such repository on the Hugging Face Hub, or a private one (then pass"
            f" token, or run `hf auth login`); {CHOICES}"
        )
    if isinstance(error, RevisionNotFoundError):
        return InvalidInput(
            f"{name} has no revision {revision!r} on the Hugging Face Hub: give a branch, a tag or a commit of it"
        )
    if isinstance(error, LocalTokenNotFoundError):
        return InvalidInput("token=True, and no token is kept here: run `hf auth login`, or pass the token itself")
    if isinstance(error, UNREACHABLE):
        return InvalidInput(_uncached(wanted, error))
    return InvalidInput(f"{name} cannot be fetched from the Hugging Face Hub: {type(error).__name__}: {error}")


def _uncached(wanted: _Request, error: Exception) -> str:
    snapshots = Path(constants.HF_HUB_CACHE, repo_folder_name(repo_id=wanted.name, repo_type="model"), "snapshots")
    others = sorted(each.name for each in snapshots.glob("*"))
    kept = "nothing of it"
    if others:
        kept = f"no revision {wanted.revision or 'main'!r} of it, but {', '.join(others[:MOST_NAMED])}"
    return (
        f"{wanted.name}: no such folder here, the cache {constants.HF_HUB_CACHE} has {kept}, and {_why(error)}. Run"
        f" {wanted.command} where there is a network, or {CHOICES}"
    )


def _why(error: Exception) -> str:
    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    return f"the Hugging Face Hub cannot be reached ({type(error.__cause__ or error).__name__})"
