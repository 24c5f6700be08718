"""Bounds, engines that die or hang, and an orderly end, over a scripted engine."""

import asyncio
import contextlib
import hashlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from detcompile.errors import CompilerNotFound, DetcompileError, InvalidInput, NumericsError, UncertifiedOp, WorkerError
from detcompile.serving.app import new_app
from detcompile.serving.engines.engine_link import EngineLink
from detcompile.serving.engines.launchers import LocalProcess
from detcompile.serving.engines.protocol import Broken, Hello, frame
from detcompile.serving.server import ENGINE_LOST
from detcompile.serving.service import Service
from tests.serving.scripted_service import ENGINE, SPEC, running, scripted

pytestmark = pytest.mark.usefixtures("in_the_root")
LONG = {"prompt": "x", "max_tokens": 2000}


async def until_open(service: Service, count: int) -> None:
    while len(service.open) < count:
        await asyncio.sleep(0.01)


@pytest.mark.parametrize(("number", "message"), [(signal.SIGKILL, "SIGKILL"), (signal.SIGSTOP, "stopped by a signal")])
@pytest.mark.parametrize("stream", [False, True])
async def test_engine_out_of_restarts_is_a_503(number: int, message: str, stream: bool) -> None:
    service = scripted()
    async with running(service) as client:
        requests = asyncio.create_task(client.post("/v1/completions", json=LONG | {"stream": stream}))
        await until_open(service, 1)
        await asyncio.sleep(0.3)
        os.kill(service.fleet.links[0].pid, number)
        answer = await asyncio.wait_for(requests, 10)
        if stream:  # it had begun: the error is an event, and the stream ends
            assert answer.status_code == 200
            assert message in answer.text and answer.text.endswith("data: [DONE]\n\n")
        else:
            assert answer.status_code == 503 and message in answer.json()["error"]["message"]
        assert not service.open
        for path in ("/ready", "/health"):
            assert (await client.get(path)).status_code == 503
        later = await client.post("/v1/completions", json=LONG)
        assert later.status_code == 503 and later.headers["retry-after"]
        assert "detcompile:engine_ready 0.0" in (await client.get("/metrics")).text


def test_engine_start_failure_is_reported() -> None:
    async def scenario(command: list[str], message: str) -> None:
        link = EngineLink(launcher=LocalProcess(command))
        await link.open()
        link.start(SPEC)
        with pytest.raises(WorkerError, match=message):
            await asyncio.wait_for(link.settled(), 20)
        await link.stop()

    asyncio.run(scenario([sys.executable, "-c", "raise SystemExit(3)"], "exit code 3"))
    asyncio.run(scenario([sys.executable, "-c", "import os; os.write(int(os.sys.argv[-1]), bytes(9))"], "invalid"))


@pytest.mark.parametrize("kind", [NumericsError, CompilerNotFound, UncertifiedOp, KeyError])
async def test_engine_start_failure_keeps_its_kind(kind: type[Exception]) -> None:
    """If it is one of detcompile's; else it is a WorkerError."""
    program = f"import os, sys; os.write(int(sys.argv[-1]), {frame(Broken(kind.__name__, 'seen'))})"
    link = EngineLink(launcher=LocalProcess([sys.executable, "-c", program]))
    await link.open()
    link.start(SPEC)
    with pytest.raises(DetcompileError, match="seen") as failure:
        await asyncio.wait_for(link.settled(), 20)
    assert type(failure.value) is (kind if issubclass(kind, DetcompileError) else WorkerError)
    await link.stop()


async def test_paused_container_does_not_lose_engine() -> None:
    """As when a container is paused and resumed."""

    link = EngineLink(launcher=LocalProcess(ENGINE), silence=0.8)
    await link.open()
    link.start(SPEC)
    await link.settled()
    for _ in range(2):
        os.kill(link.pid, signal.SIGSTOP)
        time.sleep(1.2)
        os.kill(link.pid, signal.SIGCONT)
        await asyncio.sleep(0.3)
        assert link.failure is None
    await link.stop()


async def test_requests_wait_until_start_is_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine has connected, but the front has not loaded its tokenizer yet."""

    service, gate = scripted(), asyncio.Event()
    settled = service.fleet.settled

    async def late() -> Hello:
        hello = await settled()
        await gate.wait()
        return hello

    monkeypatch.setattr(service.fleet, "settled", late)
    app = new_app(service, "test")
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
        starting = asyncio.create_task(service.start(SPEC))
        while not service.fleet.ready:
            await asyncio.sleep(0.01)
        assert (await client.get("/ready")).status_code == 503
        assert (await client.post("/v1/completions", json=LONG)).status_code == 503
        gate.set()
        await starting
        assert (await client.get("/ready")).status_code == 200
        await service.fleet.stop()


def test_invalid_template_is_refused_before_engine_starts() -> None:
    with pytest.raises(InvalidInput, match="chat template cannot be read"):
        Service(chat_template="{% if %}")


async def test_requests_beyond_bounds_get_429() -> None:
    service = scripted(max_queue=2)
    async with running(service) as client:
        first = asyncio.create_task(client.post("/v1/completions", json={"prompt": "x", "max_tokens": 60}))
        await until_open(service, 1)
        assert (await client.post("/v1/completions", json=LONG | {"n": 2})).status_code == 429
        refused = await client.post("/v1/completions", json=LONG | {"prompt": ["a", "b"]})
        assert refused.status_code == 429 and 1 <= int(refused.headers["retry-after"]) <= 60
        assert refused.json()["error"]["code"] == "rate_limit_exceeded"
        assert (await client.post("/v1/completions", json={"prompt": "x", "max_tokens": 2})).status_code == 200
        assert (await first).status_code == 200 and not service.open
        assert "detcompile:requests_refused_total 2.0" in (await client.get("/metrics")).text


async def test_cancelled_request_leaves_engine() -> None:
    service = scripted()
    async with running(service) as client:
        for stream in (False, True):
            requests = asyncio.create_task(client.post("/v1/completions", json=LONG | {"stream": stream}))
            await until_open(service, 1)
            requests.cancel()
            await asyncio.gather(requests, return_exceptions=True)
            assert not service.open and not service.fleet.links[0].answers
        while service.fleet.statistics.num_running:
            await asyncio.sleep(0.01)


async def test_late_reader_gets_whole_answer() -> None:
    async with running(scripted()) as client:
        body = {"prompt": "x", "max_tokens": 10, "return_token_ids": True}
        whole = (await client.post("/v1/completions", json=body)).json()["choices"][0]
        assert whole["token_ids"] == list(range(40, 50))
        assert isinstance(whole["text"], str) and whole["finish_reason"] == "length"


@contextlib.contextmanager
def scripted_server(drain: float, *options: object) -> Iterator[tuple[subprocess.Popen[str], str]]:
    command = [sys.executable, "-m", "tests.serving.scripted_server", str(drain), *map(str, options)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        line = process.stderr.readline()
        assert line.startswith("serving scripted on "), line
        yield process, line.split()[3].rstrip(";")
    finally:
        process.kill()
        process.wait()


def test_sigterm_finishes_open_requests_and_refuses_new_ones() -> None:
    with scripted_server(drain=30) as (process, url), ThreadPoolExecutor() as pool:
        requests = pool.submit(httpx.post, f"{url}/v1/completions", json={"prompt": "x", "max_tokens": 60}, timeout=30)
        time.sleep(0.3)
        process.send_signal(signal.SIGTERM)
        time.sleep(0.1)
        assert httpx.get(f"{url}/ready").status_code == 503 and httpx.get(f"{url}/health").status_code == 200
        assert httpx.post(f"{url}/v1/completions", json=LONG).status_code == 503
        answer = requests.result(30)
        assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == 60
        assert process.wait(10) == 0


@pytest.mark.parametrize("signals", [1, 2])
def test_drain_ends_at_timeout_or_second_signal(signals: int) -> None:
    """After one signal it waits for --drain seconds at most, after two it does not wait."""
    with scripted_server(drain=0.3 if signals == 1 else 60) as (process, url), ThreadPoolExecutor() as pool:
        pool.submit(httpx.post, f"{url}/v1/completions", json=LONG, timeout=30)
        time.sleep(0.3)
        for _ in range(signals):
            process.send_signal(signal.SIGTERM)
            time.sleep(0.1)
        assert process.wait(10) == 0


def test_lost_engine_has_its_own_exit_code() -> None:
    with scripted_server(drain=5) as (process, url):
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        os.kill(int(children[0]), signal.SIGKILL)
        while httpx.get(f"{url}/health").status_code != 503:
            time.sleep(0.05)
        assert process.wait(10) == ENGINE_LOST


def test_an_engine_ends_with_its_server() -> None:
    with scripted_server(drain=5) as (process, _):
        (child,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        process.kill()
        end = time.monotonic() + 10
        while Path(f"/proc/{child}").exists() and "State:\tZ" not in Path(f"/proc/{child}/status").read_text():
            assert time.monotonic() < end
            time.sleep(0.05)


def test_the_front_imports_no_torch() -> None:
    code = "import sys, detcompile.commands.serve; print({'torch', 'transformers', 'triton'} & sys.modules.keys())"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "set()"


def test_missing_extra_names_install_command() -> None:
    code = (
        "import importlib.util, sys; found = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda name, *a: None if name == 'msgspec' else found(name, *a)\n"
        "sys.argv = ['detcompile', 'serve', 'tiny']\n"
        "from detcompile.commands.cli import main; main()"
    )
    finished = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert finished.returncode == 2 and "msgspec is not installed: pip install '.[serve]'" in finished.stderr


def test_sighup_reloads_keys(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(f"alice:{hashlib.sha256(b'old').hexdigest()}\n")
    with scripted_server(5, "--api-keys", file) as (process, url):

        def status(key: str) -> int:
            return httpx.get(f"{url}/v1/models", headers={"X-Api-Key": key}).status_code

        assert (status("old"), status("new")) == (200, 401)
        file.write_text(f"alice:{hashlib.sha256(b'new').hexdigest()}\n")
        process.send_signal(signal.SIGHUP)
        end = time.monotonic() + 10
        while status("new") != 200 and time.monotonic() < end:
            time.sleep(0.05)
        assert (status("old"), status("new")) == (401, 200)
        file.write_text("nonsense\n")
        process.send_signal(signal.SIGHUP)
        assert process.stderr is not None
        message = next(line for line in process.stderr if "--api-keys" in line)
        assert "line 1" in message and "previous API keys" in message and status("new") == 200
