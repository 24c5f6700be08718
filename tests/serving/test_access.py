"""Keys: every route requires one, and a server without keys listens on this machine only."""

import asyncio
import hashlib
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import pytest

from detcompile.commands import cli, serve
from detcompile.errors import InvalidInput
from detcompile.serving.access import KeyFile, read_keys
from detcompile.serving.app import new_app
from tests.serving.scripted_service import running, scripted

IMAGES = sorted((Path(__file__).parents[2] / "docker").glob("*.Dockerfile"))

pytestmark = pytest.mark.usefixtures("in_the_root")


async def test_every_route_requires_a_key(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    alice, bob = hashlib.sha256(b"secret").hexdigest(), hashlib.sha256(b"other").hexdigest()
    keys.write_text(f"# ours\nalice:{alice}\nbob:{bob}\n")

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


def test_changed_key_file_is_reloaded(tmp_path: Path) -> None:
    """A revoked key stops working and a new one starts. A file without keys keeps the previous keys."""
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
            with pytest.raises(InvalidInput, match="contains no key"):
                keys.read_again()
            assert await statuses() == [401, 200]

    asyncio.run(scenario())
    KeyFile(None).read_again()


async def test_other_keys_cannot_find_a_request() -> None:
    """Only the owner learns its id; to other keys it is unknown."""
    template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    requests = {"input": "x", "max_output_tokens": 2}
    digests = [hashlib.sha256(key).digest() for key in (b"alice", b"bob")]

    async with running(scripted(chat_template=template), digests) as client:

        async def ask(key: str, method: str, path: str, body: Any = None) -> Any:
            return await client.request(method, path, json=body, headers={"Authorization": f"Bearer {key}"})

        async def names_of(key: str) -> set[str]:
            state = (await ask(key, "GET", "/dashboard/state")).json()
            numbers = {row["request_id"] for row in state["requests"]}
            held = {number for engine in state["engines"] for number, _ in engine["holdings"]}
            assert held - {""} <= numbers and state["num_open"] == 1
            return {row["name"] for row in state["requests"]}

        long = requests | {"max_output_tokens": 1000, "background": True}
        open_one = (await ask("alice", "POST", "/v1/responses", long)).json()["id"]
        done = (await ask("alice", "POST", "/v1/responses", requests)).json()["id"]
        assert await names_of("alice") == {open_one, done} and await names_of("bob") == set()
        for name in (open_one, done):
            for method, path, body in (
                ("GET", "/v1/responses/{}", None),
                ("GET", "/v1/responses/{}?stream=true&starting_after=0", None),
                ("POST", "/v1/responses", requests | {"previous_response_id": "{}"}),
                ("POST", "/v1/responses/{}/cancel", None),
                ("DELETE", "/v1/responses/{}", None),
                ("GET", "/v1/receipts/{}", None),
            ):
                actual = [
                    await ask("bob", method, path.format(item), json.loads(json.dumps(body).replace("{}", item)))
                    for item in (name, "resp_unknown")
                ]
                assert [item.status_code for item in actual] == [404, 404], (path, actual)
                assert actual[0].content == actual[1].content
        assert (await ask("alice", "GET", f"/v1/receipts/{done}")).status_code == 200
        going_on = await ask("alice", "POST", "/v1/responses", requests | {"previous_response_id": done})
        assert going_on.status_code == 200
        assert (await ask("alice", "GET", f"/v1/responses/{open_one}")).json()["status"] == "in_progress"
        assert (await ask("alice", "POST", f"/v1/responses/{open_one}/cancel")).json()["status"] == "cancelled"
        assert (await ask("alice", "DELETE", f"/v1/responses/{done}")).status_code == 200


@pytest.mark.parametrize("keys", [(), ("alice", "bob")])
async def test_prefixes_are_shared_only_within_key_and_salt(keys: tuple[str, ...]) -> None:
    chat = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
    bodies = {
        "/v1/completions": {"prompt": "x", "max_tokens": 1},
        "/v1/chat/completions": chat,
        "/v1/messages": chat,
        "/v1/responses": {"input": "x", "max_output_tokens": 1},
    }

    service = scripted(chat_template="{{ messages[0].content }}")
    async with running(service, [hashlib.sha256(key.encode()).digest() for key in keys]) as client:
        salts: list[str] = []
        add = service.fleet.add
        service.fleet.add = lambda answer: (salts.append(answer.cache_salt), add(answer))
        groups: dict[tuple[str, str | None], set[str]] = {}
        for key in keys or ("",):
            for salt in (None, "a", "b"):
                for path, body in bodies.items():
                    sent = body | {"cache_salt": salt}
                    answer = await client.post(path, json=sent, headers={"X-Api-Key": key})
                    assert answer.status_code == 200, answer.text
                groups[key, salt] = set(salts)
                salts.clear()
            empty = bodies["/v1/completions"] | {"cache_salt": ""}
            refused = await client.post("/v1/completions", json=empty, headers={"X-Api-Key": key})
            assert refused.status_code == 400 and "cache_salt" in refused.json()["error"]["message"]
    one_each = [actual.pop() for actual in groups.values() if len(actual) == 1]
    assert len(set(one_each)) == len(one_each) == len(groups)
    assert ("" in one_each) == (not keys)


def test_server_works_behind_proxy_path() -> None:
    """Whether the proxy strips the path or not."""

    async def scenario() -> None:
        digests = [hashlib.sha256(b"secret").digest()]
        async with running(scripted(), digests, root_path="/ai/tiny") as client:
            for before in ("", "/ai/tiny"):
                assert (await client.get(f"{before}/")).status_code == 200
                assert (await client.get(f"{before}/health")).status_code == 401
                client.headers["X-Api-Key"] = "secret"
                assert (await client.get(f"{before}/health")).status_code == 200
                answer = await client.post(f"{before}/v1/completions", json={"prompt": [5], "max_tokens": 1})
                assert (await client.get(f"{before}/v1/receipts/{answer.json()['id']}")).status_code == 200
                assert (await client.get(f"{before}/openapi.json")).json()["servers"] == [{"url": "/ai/tiny"}]
                del client.headers["X-Api-Key"]
            assert (await client.get("/ai/tiny")).status_code == 200
            client.headers["X-Api-Key"] = "secret"
            for path in ("/ai", "/ai/health", "/ai/tinyhealth", "/ai/tiny/ai/tiny/health"):
                assert (await client.get(path)).status_code == 404, path

    asyncio.run(scenario())
    for path in ("ai", "/ai/", "/", "//", "/v1", "/v1/models", "/dashboard"):
        with pytest.raises(InvalidInput, match="--root-path"):
            new_app(scripted(), "test", root_path=path)


async def test_key_is_compared_as_bytes() -> None:
    async with running(scripted(), [hashlib.sha256("clé".encode()).digest()]) as client:
        for key, status in (("clé", 200), ("cle", 401)):
            header = [(b"authorization", f"Bearer {key}".encode())]
            assert (await client.get("/health", headers=header)).status_code == status


@pytest.mark.parametrize(
    "text",
    ["", "alice:secret", "alice", ":" + "0" * 64, "alice:" + "g" * 64, "alice:" + hashlib.sha256(b"").hexdigest()],
)
def test_key_file_without_keys_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "keys").write_text(text)
    with pytest.raises(InvalidInput, match="--api-keys"):
        read_keys(tmp_path / "keys")
    with pytest.raises(InvalidInput, match="--api-keys"):
        read_keys(tmp_path / "missing")


def test_listening_to_other_machines_requires_keys() -> None:
    command = [sys.executable, "-m", "detcompile", "serve", "tiny", "--host", "0.0.0.0"]
    finished = subprocess.run(command, capture_output=True, text=True)
    message = " ".join(finished.stderr.split())
    assert finished.returncode == 2 and "add --api-keys FILE, or --insecure" in message


@pytest.mark.parametrize("file", IMAGES, ids=lambda file: file.stem)
def test_command_of_an_image_starts_a_server(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    [arguments] = re.findall(r"^CMD (\[.*\])$", file.read_text(), re.MULTILINE)
    served = AsyncMock(return_value=0)
    monkeypatch.setattr(sys, "argv", ["detcompile", *json.loads(arguments)])
    monkeypatch.setattr(serve, "_served", served)
    with pytest.raises(SystemExit, match=r"^0$"):
        cli.main()
    served.assert_awaited_once()
