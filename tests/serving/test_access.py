"""Keys: every route asks for one, and nobody lets other machines in without."""

import asyncio
import hashlib
import subprocess
import sys
from pathlib import Path

import pytest

from detcompile.errors import InvalidInput
from detcompile.serving.access import KeyFile, read_keys
from tests.serving.scripted_service import running, scripted

pytestmark = pytest.mark.usefixtures("in_the_root")


def test_every_route_asks_for_a_key(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    alice, bob = hashlib.sha256(b"secret").hexdigest(), hashlib.sha256(b"other").hexdigest()
    keys.write_text(f"# ours\nalice:{alice}\nbob:{bob}\n")

    async def scenario() -> None:
        async with running(scripted(), read_keys(keys)) as client:
            routes = ["/health", "/ready", "/metrics", "/v1/models", "/v1/fingerprint", "/openapi.json", "/nowhere"]
            for path in routes:
                for header in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic secret"}):
                    refused = await client.get(path, headers=header)
                    assert refused.status_code == 401, path
                    assert refused.json()["error"]["code"] == "invalid_api_key"
            refused = await client.post("/v1/messages", json={}, headers={"X-Api-Key": "wrong"})
            assert refused.status_code == 401 and refused.json()["type"] == "error"
            assert refused.json()["error"]["type"] == "authentication_error"
            assert (await client.post("/v1/completions", json={"prompt": "x"})).status_code == 401
            for key in ("secret", "other"):
                known = await client.get("/v1/models", headers={"Authorization": f"Bearer {key}"})
                assert known.status_code == 200
                assert (await client.get("/v1/models", headers={"X-Api-Key": key})).status_code == 200

    asyncio.run(scenario())


def test_keys_are_read_again(tmp_path: Path) -> None:
    """A revoked key is unknown then, a new one is known; a file that holds none leaves those of before."""
    file = tmp_path / "keys"
    digests = [hashlib.sha256(name.encode()).hexdigest() for name in ("old", "new")]
    file.write_text(f"alice:{digests[0]}\n")
    keys = KeyFile(file)

    async def scenario() -> None:
        async with running(scripted(), keys.digests) as client:

            async def statuses() -> list[int]:
                headers = [{"X-Api-Key": name} for name in ("old", "new")]
                return [(await client.get("/health", headers=header)).status_code for header in headers]

            assert await statuses() == [200, 401]
            file.write_text(f"alice:{digests[1]}\n")
            assert await statuses() == [200, 401]
            keys.read_again()
            assert await statuses() == [401, 200]
            file.write_text("")
            with pytest.raises(InvalidInput, match="holds no key"):
                keys.read_again()
            assert await statuses() == [401, 200]

    asyncio.run(scenario())
    KeyFile(None).read_again()


def test_a_key_is_the_bytes_that_were_sent() -> None:
    async def scenario() -> None:
        async with running(scripted(), [hashlib.sha256("clé".encode()).digest()]) as client:
            for key, status in (("clé", 200), ("cle", 401)):
                header = [(b"authorization", f"Bearer {key}".encode())]
                assert (await client.get("/health", headers=header)).status_code == status

    asyncio.run(scenario())


@pytest.mark.parametrize(
    "text",
    ["", "alice:secret", "alice", ":" + "0" * 64, "alice:" + "g" * 64, "alice:" + hashlib.sha256(b"").hexdigest()],
)
def test_a_file_that_holds_no_keys_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "keys").write_text(text)
    with pytest.raises(InvalidInput, match="--api-keys"):
        read_keys(tmp_path / "keys")
    with pytest.raises(InvalidInput, match="--api-keys"):
        read_keys(tmp_path / "missing")


def test_other_machines_need_a_key() -> None:
    command = [sys.executable, "-m", "detcompile", "serve", "tiny", "--host", "0.0.0.0"]
    finished = subprocess.run(command, capture_output=True, text=True)
    assert finished.returncode == 2 and "add --api-keys FILE, or --insecure" in finished.stderr
