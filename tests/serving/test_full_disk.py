"""/ready fails while nothing can be written, and recovers when there is room again."""

import os
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from detcompile.serving.app import new_app
from detcompile.serving.journal.journal import Journal
from detcompile.serving.receipts.issuer import Issuer
from detcompile.serving.receipts.log import ReceiptLog, read_log
from detcompile.serving.service import Service
from tests.serving.instant_fleet import InstantFleet
from tests.serving.scripted_service import SPEC
from tests.serving.test_slots import Kind, Requests


class Disk:
    """A text file on a disk that may be full."""

    full = False

    def write(self, text: str) -> int:
        return len(text)

    def flush(self) -> None:
        if self.full:
            raise OSError(28, "No space left on device")


class FullDatabase:
    """A connection to SQLite that reads."""

    def __init__(self, real: sqlite3.Connection) -> None:
        self._real = real

    def execute(self, statement: str, *values: Any) -> Any:
        if statement.split()[0] in ("INSERT", "UPDATE", "DELETE") or "user_version =" in statement:
            raise sqlite3.OperationalError("database or disk is full")
        return self._real.execute(statement, *values)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


@pytest.mark.parametrize("full", ["journal", "receipt log", "request log"])
async def test_ready_fails_on_full_disk(full: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal, log, disk = Journal(tmp_path / "journal"), ReceiptLog(tmp_path / "log"), Disk()
    service = Service(fleet=InstantFleet, receipts=Issuer(log=log), journal=journal)
    write = os.write

    def fill() -> None:
        if full == "journal":
            monkeypatch.setattr(journal, "_file", FullDatabase(journal._file))
        elif full == "receipt log":
            monkeypatch.setattr(os, "write", lambda file, data: write(file, data[:9]))
        else:
            disk.full = True

    await service.start(SPEC)
    app = new_app(service, "test", request_log=disk)  # type: ignore[arg-type]
    requested = Requests(app, Kind("/v1/completions", {"prompt": [5]}, {"idempotency-key": "{number}"}))
    ready = Requests(app, Kind("/ready", {}, method="GET"))

    async def status(requests: Requests) -> int:
        await requests.ask()
        return requests.status

    assert (await status(requested), await status(ready)) == (200, 200)
    fill()
    assert await status(ready) == 200  # nothing was to be written
    assert await status(requested) == {"journal": 503, "receipt log": 500, "request log": 200}[full]
    for _ in range(2):
        assert await status(ready) == 503 and full.encode() in ready.content, ready.content
    monkeypatch.undo()
    disk.full = False
    assert (await status(ready), await status(requested), await status(ready)) == (200, 200, 200)
    await service.stop()
    assert len(list(read_log(tmp_path / "log"))) == (3 if full == "request log" else 2)
