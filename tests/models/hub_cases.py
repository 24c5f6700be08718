"""A Hugging Face Hub inside the test process, with its cache in a temporary folder."""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from unittest import mock

from huggingface_hub import constants

__all__ = ["COMMIT", "LATER", "Hub", "put_snapshot", "serving", "with_cache"]

COMMIT, LATER = "a" * 40, "b" * 40


@contextmanager
def with_cache(cache: Path, *, offline: bool) -> Iterator[Path]:
    """Set HF_HUB_CACHE and HF_HUB_OFFLINE as if before the start of Python."""
    with mock.patch.multiple(constants, HF_HUB_CACHE=str(cache), HF_HUB_OFFLINE=offline):
        yield cache


def put_snapshot(cache: Path, name: str, files: dict[str, bytes], commit: str = COMMIT, ref: str = "main") -> Path:
    """Write a revision's files as the Hub's cache keeps them: blobs, links to them by name, and the branch's commit."""
    root = cache / f"models--{name.replace('/', '--')}"
    folder = root / "snapshots" / commit
    for path, content in files.items():
        blob = root / "blobs" / hashlib.sha1(content).hexdigest()
        blob.parent.mkdir(parents=True, exist_ok=True)
        blob.write_bytes(content)
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).symlink_to(blob)
    (root / "refs").mkdir(exist_ok=True)
    (root / "refs" / ref).write_text(commit)
    return folder


class Hub:
    """Repositories by id, and the requests so far.

    Args:
        files: files of each commit of the repository "org/name", by path.
        refs: commits by branch.
        refusal: (status, error code) for files, as the Hub answers for a gated repository.
    """

    def __init__(
        self, files: dict[str, dict[str, bytes]], refs: dict[str, str], refusal: tuple[int, str] | None = None
    ) -> None:
        self.files, self.refs, self.refusal = files, refs, refusal
        self.sent: list[str] = []  # paths of files
        self.tokens: set[str | None] = set()

    def answer(self, path: str) -> tuple[int, dict[str, str], bytes]:
        """Return status, headers and content for the path of a URL."""
        parts = path.split("?")[0].strip("/").split("/")
        api = parts[:2] == ["api", "models"]
        name, rest = ("/".join(parts[2:4]), parts[4:]) if api else ("/".join(parts[:2]), parts[2:])
        if name != "org/name":
            return 404, {"X-Error-Code": "RepoNotFound"}, b"{}"
        commit = self.refs.get(rest[1], rest[1])
        if commit not in self.files:
            return 404, {"X-Error-Code": "RevisionNotFound"}, b"{}"
        files = self.files[commit]
        if api and rest[0] == "revision":
            return 200, {}, json.dumps({"id": name, "sha": commit, "siblings": []}).encode()
        if api:
            listed = [
                {"type": "file", "path": file, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
                for file, content in files.items()
            ]
            return 200, {}, json.dumps(listed).encode()
        if self.refusal is not None:
            return self.refusal[0], {"X-Error-Code": self.refusal[1]}, b"{}"
        content = files["/".join(rest[2:])]
        return 200, {"ETag": f'"{hashlib.sha1(content).hexdigest()}"', "X-Repo-Commit": commit}, content


@contextmanager
def serving(hub: Hub) -> Iterator[Hub]:
    """Make huggingface_hub use this Hub inside the block."""

    class Handler(BaseHTTPRequestHandler):
        def _send(self, with_body: bool) -> None:
            if "/org/" in self.path:  # huggingface_hub also sends other requests
                hub.tokens.add(self.headers.get("Authorization"))
            status, headers, content = hub.answer(self.path)
            if with_body and "ETag" in headers:
                hub.sent.append(self.path.split("/", 5)[-1])
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(content))}.items():
                self.send_header(name, value)
            self.end_headers()
            if with_body:
                self.wfile.write(content)

        def do_GET(self) -> None:
            self._send(True)

        def do_HEAD(self) -> None:
            self._send(False)

        def log_message(self, *_: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    url = f"http://127.0.0.1:{server.server_port}"
    try:
        with mock.patch.multiple(
            constants, ENDPOINT=url, HUGGINGFACE_CO_URL_TEMPLATE=url + "/{repo_id}/resolve/{revision}/{filename}"
        ):
            yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
