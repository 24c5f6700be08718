"""FolderWeightTransfer: new weights for ``detcompile serve`` through a folder that trainer and server can read."""

import json
import shutil
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from detcompile.errors import EngineError, TrainerMismatch
from detcompile.models.weight_files import WEIGHTS
from detcompile.storage import naming
from detcompile.weights import weight_digests

POLL_SECONDS = 0.5


class FolderWeightTransfer:
    """Sends weights as safetensors in a folder; TRL's ``WeightTransferProtocol``.

    Running answers pause and continue with the new weights. Afterwards the server's digests of the tensors
    must be the trainer's. The folder keeps the newest weights: an engine that restarts reads them.

    Args:
        url: the server's address.
        folder: where weights are written; the server reads the same path.
        key: an admin key, if the server has keys.
        timeout: seconds for a request, and for the server to start.
    """

    def __init__(self, url: str, folder: str | Path, *, key: str | None = None, timeout: float = 1800.0) -> None:
        self._url, self._folder, self._timeout = url.rstrip("/"), Path(folder).absolute(), timeout
        authorization = {} if key is None else {"authorization": f"Bearer {key}"}
        self._headers = {"content-type": "application/json"} | authorization
        self._written: Path | None = None

    def init_weight_transfer(self) -> None:
        """Wait until the server is ready.

        Raises:
            EngineError: it was not within the timeout.
        """
        end = time.monotonic() + self._timeout
        while True:
            try:
                urllib.request.urlopen(f"{self._url}/health", timeout=self._timeout).close()
                return
            except OSError as error:
                if time.monotonic() > end:
                    raise EngineError(f"{self._url}/health: {error}") from error
            time.sleep(POLL_SECONDS)

    def pause(self) -> None:
        """Hold the server's answers.

        Raises:
            EngineError: the server refused, or did not answer.
        """
        self._post("/pause?mode=keep")

    def send_weights(self, iterator: Iterator[tuple[str, Tensor]]) -> None:
        """Write (name, tensor) pairs, let the server read them, and compare its digests.

        Raises:
            EngineError: the server refused them and kept its old weights, or did not answer.
            TrainerMismatch: the server's weights differ from the trainer's.
            StorageError: the folder cannot be written.
        """
        named = list(iterator)
        once = {id(tensor): (name, tensor) for name, tensor in reversed(named)}  # the first name of tied weights
        weights = {name: tensor.detach().cpu().contiguous() for name, tensor in reversed(once.values())}
        folder = self._folder / f"version-{time.time_ns()}"
        with naming(folder):
            folder.mkdir(parents=True)
            save_file(weights, folder / WEIGHTS[0])
        self._post("/update_weights", {"weight_dir": str(folder)})
        answer = self._post("/weight_checker", {"action": "compare", "baseline": weight_digests(weights)})
        if not answer["match"]:
            names = tuple(answer["mismatches"])
            raise TrainerMismatch(f"{self._url} has other weights than the trainer: {', '.join(names)}", names)
        if self._written is not None:
            shutil.rmtree(self._written, ignore_errors=True)
        self._written = folder

    def resume(self) -> None:
        """Resume the server's answers.

        Raises:
            EngineError: the server refused, or did not answer.
        """
        self._post("/resume")

    def destroy(self) -> None:
        """Do nothing: the server still needs the newest weights."""

    def _post(self, path: str, body: Any = None) -> Any:
        content = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{self._url}{path}", content, self._headers, method="POST")
        try:
            with urllib.request.urlopen(request, timeout=self._timeout) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            message = error.read().decode(errors="replace")
            raise EngineError(f"POST {self._url}{path}: {error.code} {message}") from error
        except OSError as error:
            raise EngineError(f"POST {self._url}{path}: {error}") from error
