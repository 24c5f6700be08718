"""Asynchronous tests, and one server of the embedded model for all tests of the session, as a user starts it."""

import asyncio
import importlib.util
import inspect
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest

from detcompile.models.hub import TINY_FOLDER
from detcompile.serving.receipts.keys import write_key_pair

ROOT = Path(__file__).parents[2]
TEMPLATE = (
    "{% if tools %}<tools>{{ tools | tojson }} as <tool_call></tool_call></tools>{% endif %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% for call in m.tool_calls or () %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    "{{ '\\n' }}{% endfor %}<assistant>"
)
START_SECONDS = 240
TEST_SECONDS = 240  # of an asynchronous test
# GPU machines may lack the extra's packages; tests/test_package.py checks that the extra `test` has them.
NEEDED = ("anthropic", "cryptography", "fastapi", "msgspec", "openai", "prometheus_client", "uvicorn")
collect_ignore_glob = [] if all(map(importlib.util.find_spec, NEEDED)) else ["test_*.py"]
DEFAULTS = {"temperature": 0.9, "top_p": 0.95}  # of the model's generation_config


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run an asynchronous test in an event loop of its own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in inspect.signature(pyfuncitem.obj).parameters}

    async def bounded() -> None:
        async with asyncio.timeout(TEST_SECONDS):
            await pyfuncitem.obj(**arguments)

    asyncio.run(bounded())
    return True


@pytest.fixture
def in_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run in the root, where the scripted engine is importable."""
    monkeypatch.chdir(ROOT)


class Server(NamedTuple):
    """A server process, and the lines of its standard error."""

    process: subprocess.Popen[str]
    url: str
    lines: list[str]

    def stop(self) -> int:
        """Send SIGTERM; return the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)


def model_of(folder: Path) -> Path:
    """Return a folder with the embedded model and a generation_config with DEFAULTS."""
    model = folder / "model"
    if not model.exists():
        shutil.copytree(TINY_FOLDER, model, ignore=shutil.ignore_patterns("draft", "medusa"))
        config = json.loads((model / "generation_config.json").read_text())
        (model / "generation_config.json").write_text(json.dumps(config | {"do_sample": True} | DEFAULTS))
    return model


def started(folder: Path, *options: str, model: Path | None = None, name: str = "tiny") -> Server:
    """Start a server of a model, or of the embedded one, on a free port; return it once it is ready."""
    template = folder / "template.jinja"
    template.write_text(TEMPLATE)
    command = [sys.executable, "-m", "detcompile", "serve", str(model or model_of(folder))]
    command += ["--name", name, "--port", "0"]
    command += ["--chat-template", str(template)]
    item = {"DETCOMPILE_KEEP_PROGRAMS": "1", "DETCOMPILE_PROGRESS": "0"}
    environment = os.environ | item
    process = subprocess.Popen([*command, *options], stderr=subprocess.PIPE, text=True, env=environment, cwd=folder)
    lines: list[str] = []

    def read() -> None:
        assert process.stderr is not None
        lines.extend(iter(process.stderr.readline, ""))

    lines_of = threading.Thread(target=read, daemon=True)
    lines_of.start()
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end and process.poll() is None:
        for line in list(lines):
            if line.startswith(f"serving {name} on "):
                return Server(process, line.split()[3].rstrip(";"), lines)
        time.sleep(0.05)
    process.kill()
    raise AssertionError("".join(lines))


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder where the session's servers find their chat template."""
    return tmp_path_factory.mktemp("serving")


@pytest.fixture(scope="session")
def server(folder: Path) -> Iterator[Server]:
    """The session's server. It signs its receipts with the key in ``folder`` and logs them there."""
    write_key_pair(folder / "key")
    actual = started(folder, "--sign", str(folder / "key"), "--receipt-log", str(folder / "log"))
    yield actual
    if actual.process.poll() is None:
        assert actual.stop() == 0
    assert not any("Traceback" in line for line in actual.lines), "".join(actual.lines)


@pytest.fixture
def http(server: Server) -> Iterator[httpx.Client]:
    """A client of the session's server."""
    with httpx.Client(base_url=server.url, timeout=120) as client:
        yield client
