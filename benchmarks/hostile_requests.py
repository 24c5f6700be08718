"""Send 10,000 hostile requests to a server: no status 500, no lost engine, no changed bit in other answers.

    python -m benchmarks.hostile_requests --commit $(git rev-parse --short HEAD) [--requests 10000] [--schemathesis 5]

Half of them are nearly valid bodies and bytes that are not HTTP (tests/serving/test_fuzz.py), a quarter are altered
receipts for /v1/verify, and a quarter use Idempotency-Keys, Last-Event-IDs and ids of other requests or of none.
Before that, Schemathesis, if installed, sends examples of every operation of /openapi.json for that many minutes. Then
the server is stopped, bits of its journal are flipped, a new server starts with that journal, and its entries are
requested. A 503 must have a documented code. Writes
benchmarks/results/hostile-requests-<cores>-cores-<commit>.json.
"""

import argparse
import collections
import concurrent.futures
import importlib.util
import json
import os
import random
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx

from benchmarks.kill_drill import RESULTS, TEMPLATE
from detcompile.models.hub import TINY_FOLDER
from tests.serving.test_fuzz import CANARY, FINE, LEAVES_SECONDS, mutated, odd, other_receipt, raw, send

__all__ = ["Hostile"]

NUM_CLIENTS = 4
KEYS = ["a", "b", "", "x y", "x" * 255, "x" * 256, "é", "'; DROP TABLE requests", "\x7f"]
ALLOWED = FINE | {409, 422}
CODES = {"unavailable", "timeout", "journal_error", "journal_full", "record_damaged"}  # documented codes of a 503
NUM_FLIPS = 200
MOST_TOKENS = 8  # if the request sets no limit


class Hostile:
    """Hostile clients of one server.

    Attributes:
        statuses: how many answers had each, by the kind of request; "left" for those nobody waited for.
        faults: requests whose answer is not allowed.
    """

    def __init__(self, url: str, seed: int) -> None:
        self.statuses: dict[str, Counter[str]] = collections.defaultdict(Counter)
        self.faults: list[str] = []
        self._url = url
        self._seed = seed
        self._lock = threading.Lock()
        with httpx.Client(base_url=url, timeout=300) as http:
            answer = http.post("/v1/completions", json=CANARY | {"receipt": True}).json()
        self._canary, self._envelope = answer["choices"], answer["receipt"]
        self._ids = [answer["id"]]

    def run(self, count: int, seconds: float) -> None:
        """Send ``count`` requests, or fewer if ``seconds`` are over."""
        self._end = time.monotonic() + seconds
        with concurrent.futures.ThreadPoolExecutor(NUM_CLIENTS) as pool:
            list(pool.map(self._client, range(NUM_CLIENTS), [count // NUM_CLIENTS] * NUM_CLIENTS))

    def require_sound(self) -> None:
        """Require that no engine was lost, and that a repeated request gets its earlier answer."""
        with httpx.Client(base_url=self._url, timeout=300) as http:
            assert http.post("/v1/completions", json=CANARY).json()["choices"] == self._canary
            assert "detcompile:engine_restarts_total 0.0" in http.get("/metrics").text

    def ask_for_kept(self, requests: list[tuple[str, str, bytes]]) -> None:
        """Repeat requests that a journal holds, given as keys, endpoints and bodies."""
        with httpx.Client(base_url=self._url, timeout=60) as http:
            for key, path, body in requests:
                self._note("kept", *self._posted(http, "POST", path, body, {"Idempotency-Key": key}), (path, body))

    def _client(self, number: int, count: int) -> None:
        draw = random.Random(f"{self._seed} {number}")
        host, port = self._url.removeprefix("http://").split(":")
        with httpx.Client(base_url=self._url, timeout=LEAVES_SECONDS) as http:
            for _ in range(count):
                if time.monotonic() > self._end:
                    return
                kind = draw.choice(["body", "body", "body", "bytes", "receipt", "receipt", "key", "key"])
                if kind == "bytes":
                    data = raw(draw)
                    statuses = send((host, int(port)), data)
                    for status in statuses or ["left"]:
                        self._note(kind, str(status), "", data)
                    continue
                method, path, body, headers = "POST", "/v1/verify", b"", {}
                if kind == "body":
                    path, body = mutated(draw)
                elif kind == "receipt":
                    body = other_receipt(draw, self._envelope)
                else:
                    method, path, body, headers = self._keyed(draw)
                self._note(kind, *self._posted(http, method, path, body, headers), (method, path, headers, body))

    def _keyed(self, draw: random.Random) -> tuple[str, str, bytes, dict[str, bytes]]:
        """Return a request with a key that another may have used, or one for another request's answer."""
        headers = {"Idempotency-Key": draw.choice(KEYS).encode("latin1")}
        name = draw.choice([*self._ids, "resp_none", "%2e%2e", b"cmpl-\x00".hex(), "x" * 3000])
        if draw.random() < 0.3:
            event = draw.choice([f"{name}:0:1", "-1", "9" * 30, "x:y:z", ""])
            headers |= {"Last-Event-ID": event.encode("latin1")}
        if draw.random() < 0.4:
            after = draw.choice(["-1", "9" * 30, "x"])
            ways = [
                ("GET", f"/v1/receipts/{name}"),
                ("GET", f"/v1/streams/{name}"),
                ("GET", f"/v1/responses/{name}"),
                ("GET", f"/v1/responses/{name}?stream=true&starting_after={after}"),
                ("POST", f"/v1/responses/{name}/cancel"),
                ("DELETE", f"/v1/responses/{name}"),
            ]
            return *draw.choice(ways), b"", headers
        body: dict[str, Any] = {"prompt": [5, draw.randrange(9)], "max_tokens": 3, "seed": 1}
        path = "/v1/completions"
        if draw.random() < 0.3:
            path, body = "/v1/responses", {"input": "x", "max_output_tokens": 3, "previous_response_id": name}
        if draw.random() < 0.3:
            body[draw.choice(list(body))] = odd(draw)
        return "POST", path, json.dumps(body).encode(), headers

    def _posted(
        self, http: httpx.Client, method: str, path: str, body: bytes, headers: dict[str, Any]
    ) -> tuple[str, str]:
        """Send a request; return the status and code of its answer."""
        try:
            answer = http.request(method, path, content=body, headers={"Content-Type": "application/json"} | headers)
        except httpx.ReadTimeout:
            return "left", ""
        if answer.status_code == 200 and path == "/v1/responses" and b'"id":"' in answer.content[:200]:
            self._ids = [*self._ids[-20:], answer.content.split(b'"id":"')[1].split(b'"')[0].decode()]
        error = answer.json().get("error", {}) if answer.status_code == 503 else {}
        return str(answer.status_code), error.get("code") or ""

    def _note(self, kind: str, status: str, code: str, request: Any) -> None:
        with self._lock:
            self.statuses[kind][f"{status} {code}".strip()] += 1
            meant = status == "left" or int(status) in ALLOWED or (status == "503" and code in CODES)
            if not meant and len(self.faults) < 50:
                self.faults.append(f"{status} {code} {request!r}"[:3000])


def started(folder: Path) -> tuple[str | None, "subprocess.Popen[str]", list[str]]:
    """Start a server with a journal; return its URL (None if it ended), its process and its output."""
    (folder / "template").write_text(TEMPLATE)
    model = folder / "tiny"
    if not model.exists():
        shutil.copytree(TINY_FOLDER, model, ignore=shutil.ignore_patterns("draft", "medusa"))
        config = json.loads((model / "generation_config.json").read_text())
        (model / "generation_config.json").write_text(json.dumps(config | {"max_new_tokens": MOST_TOKENS}))
    command = [sys.executable, "-m", "detcompile", "serve", str(model), "--port", "0"]
    command += ["--journal", str(folder / "journal")]
    command += ["--queue-timeout", "600", "--chat-template", str(folder / "template")]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    lines: list[str] = []
    for line in process.stderr:
        lines.append(line)
        if line.startswith("serving "):
            threading.Thread(target=lines.extend, args=(process.stderr,), daemon=True).start()
            return line.split()[3].rstrip(";"), process, lines
    return None, process, lines


def schemathesis(url: str, seconds: float, seed: int) -> dict[str, Any]:
    """Return what Schemathesis finds in this time."""
    command = [sys.executable, "-m", "schemathesis.cli", "run", f"{url}/openapi.json", "--seed", str(seed)]
    command += ["--max-time", str(max(1, int(seconds))), "--checks", "not_a_server_error"]
    command += ["--continue-on-failure", "--no-shrink"]
    command += ["--request-timeout", "120", "--suppress-health-check", "all"]
    with tempfile.TemporaryDirectory() as folder:  # it writes its examples to the working directory
        environment = os.environ | {"PYTHONPATH": os.getcwd()}
        ran = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment)
    cases = re.search(r"(\d+) (?:generated|test cases)|test cases:\s*(\d+)", ran.stdout, re.I)
    return {"exit code": ran.returncode, "cases": cases and cases[0], "tail": ran.stdout.splitlines()[-30:]}


def flip_bits(journal: Path, count: int, draw: random.Random) -> list[tuple[str, str, bytes]]:
    """Flip bits in a journal's records; return the keys, endpoints and bodies of its requests."""
    with sqlite3.connect(journal) as file:
        kept = file.execute("SELECT key, endpoint, body FROM requests").fetchall()
    data = bytearray(journal.read_bytes())
    for _ in range(count):
        data[draw.randrange(4096 * 3, len(data))] ^= 1 << draw.randrange(8)  # behind the schema
    journal.write_bytes(data)
    return kept


def main() -> int:
    """Send all requests. Return 1 if anything was wrong, otherwise 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--schemathesis", type=float, default=5, help="minutes that it runs; 0: none")
    parser.add_argument("--minutes", type=float, default=60, help="minutes after which no more are sent")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    result: dict[str, Any] = {"commit": arguments.commit, "seed": arguments.seed}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        url, process, lines = started(folder)
        try:
            assert url is not None, "".join(lines)
            hostile = Hostile(url, arguments.seed)
            if arguments.schemathesis and importlib.util.find_spec("schemathesis"):
                result["schemathesis"] = schemathesis(url, 60 * arguments.schemathesis, arguments.seed)
            hostile.run(arguments.requests, 60 * arguments.minutes)
            hostile.require_sound()
            process.send_signal(signal.SIGTERM)
            result["exit code"] = process.wait(120)
        finally:
            process.kill()
            process.wait()
        result["requests"] = sum(counts.total() for counts in hostile.statuses.values())
        result["statuses"] = {kind: dict(sorted(counts.items())) for kind, counts in sorted(hostile.statuses.items())}
        result["faults"] = hostile.faults
        result["log"] = [line.rstrip() for line in lines if "Traceback" in line or "lost" in line]
        kept = flip_bits(folder / "journal", NUM_FLIPS, random.Random(arguments.seed))
        url, process, lines = started(folder)
        try:
            if url is None:  # it refuses a file that is no journal any more
                result["damaged journal"] = lines[-1:]
            else:
                again = Hostile(url, arguments.seed)
                again.ask_for_kept(kept)
                again.require_sound()
                result["damaged journal"] = dict(again.statuses["kept"])
                result["faults"] += again.faults
        finally:
            process.kill()
            process.wait()
    name = f"hostile-requests-{os.cpu_count()}-cores-{arguments.commit}.json"
    (RESULTS / name).write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))
    failed = result.get("schemathesis", {}).get("exit code", 0)
    return int(bool(result["faults"] or result["log"] or result["exit code"] or failed))


if __name__ == "__main__":
    sys.exit(main())
