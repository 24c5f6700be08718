"""Engines that somebody else starts connect over TCP and prove that they know the secret."""

import asyncio
import functools
import os
import signal
import socket
import subprocess
import sys

import pytest

from detcompile.config import visible_gpus
from detcompile.serving.engines.fleet import Fleet
from detcompile.serving.engines.handshake import connected
from detcompile.serving.engines.launchers import DialIn
from detcompile.serving.service import Service
from tests.serving.scripted_service import running
from tests.serving.test_recovery import assert_whole, complete, until_drawn

pytestmark = pytest.mark.usefixtures("in_the_root")
SECRET = b"0123456789abcdef"


def dialed(port: int, secret: bytes = SECRET) -> subprocess.Popen[bytes]:
    """Start an engine that connects to a front."""
    command = [sys.executable, "-m", "tests.serving.scripted_engine", "--dial", f"127.0.0.1:{port}"]
    environment = os.environ | {"DETCOMPILE_ENGINE_SECRET": secret.decode()}
    return subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)


async def test_dialed_in_engines_replace_each_other() -> None:
    dial = DialIn("127.0.0.1", 0, SECRET)
    _, port = await dial.address()
    service = Service(fleet=functools.partial(Fleet, launcher=dial, most_restarts=1))
    impostor, first, engines = dialed(port, b"fedcba9876543210"), dialed(port), []
    try:
        async with running(service) as client:
            tasks = [asyncio.create_task(complete(client, [5 + index])) for index in range(4)]
            await until_drawn(service, 4, 3)
            first.send_signal(signal.SIGKILL)
            while service.fleet.num_restarts == 0:
                await asyncio.sleep(0.01)
            assert (await client.get("/ready")).status_code == 503  # nobody has dialed in yet
            engines.append(dialed(port))
            for answer in await asyncio.gather(*tasks):
                assert_whole(answer)
        assert engines[0].wait(10) == 0  # it ends with its front
        assert impostor.wait(10) != 0 or service.fleet.num_restarts == 1
    finally:
        for process in (impostor, first, *engines):
            process.kill()
            process.wait()


@pytest.mark.parametrize(
    ("visible", "expected"),
    [(None, ["0,1", "2,3"]), ("3,1, GPU-a,7", ["3,1", "GPU-a,7"]), ("4,5", ["4,5", ""]), ("", ["", ""])],
    ids=["all", "named", "too few", "none"],
)
def test_engines_share_gpus_visible_to_the_front(
    visible: str | None, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """GPUs hidden from the front, for example to serve on the CPU, are hidden from engines too."""
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert [visible_gpus(first, 2) for first in (0, 2)] == expected


async def test_engine_lost_with_its_machine_during_start_is_detected() -> None:
    """Before heartbeats begin, the operating system ends the connection at both ends."""

    dial = DialIn("127.0.0.1", 0, SECRET)
    with await asyncio.to_thread(connected, *await dial.address(), SECRET) as engine:
        front = (await dial.open()).writer.get_extra_info("socket")
        for end in (engine, front):
            assert end.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
            assert end.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 25_000
    await dial.close()


async def test_engine_without_secret_is_refused() -> None:
    dial = DialIn("127.0.0.1", 0, SECRET)
    host, port = await dial.address()
    opening = asyncio.create_task(dial.open())
    for proof in (b"", bytes(32), SECRET * 2):
        reader, writer = await asyncio.open_connection(host, port)
        await reader.readexactly(32)
        writer.write(proof)
        writer.write_eof()
        assert await reader.read() == b""  # it is hung up
        writer.close()
    assert not opening.done()
    opening.cancel()
    await dial.close()
