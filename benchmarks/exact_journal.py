"""Begin answers on one device, kill the server, and continue from its journal on another, in exact arithmetic.

    python -m benchmarks.exact_journal begin FOLDER [--numerics exact8x16] [--tokens 256] [--device cuda]
    python -m benchmarks.exact_journal resume FOLDER [--device cpu]

`begin` generates one answer of each kind without an interruption. Then it starts them again and kills the server while
they are streamed. FOLDER gets the journal and everything that the clients received. `resume` starts a server with a
copy of the journal, reads the rest of each stream, and verifies its receipt. It prints a table, and fails if an answer
differs from the uninterrupted one, if a receipt is not reproduced, or if no answer was unfinished.
"""

import base64
import json
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from benchmarks.cpu import device_name
from benchmarks.exact_receipts import arguments_of
from benchmarks.kill_drill import KINDS, started

BEGUN = 12  # tokens of every answer before the server is killed
JOURNAL, CLIENTS = "journal", "clients.json"


class Client:
    """A client of one streamed answer.

    Attributes:
        name: the answer's id.
        last: id of the last event.
        samples: the samples received so far, by index.
        receipt: the signed receipt; None before the last event.
    """

    def __init__(self, kept: dict[str, Any] | None = None) -> None:
        kept = kept or {}
        self.name: str = kept.get("name", "")
        self.last: str = kept.get("last", "")
        self.samples: dict[str, Any] = kept.get("samples", {})
        self.receipt: Any = None

    @property
    def num_tokens(self) -> int:
        """The tokens received so far."""
        return sum(len(sample["ids"]) for sample in self.samples.values())

    def read(self, response: httpx.Response) -> None:
        """Read events until the stream ends or the server dies."""
        event = ""
        self.name = response.headers.get("x-request-id", self.name)
        for line in response.iter_lines():
            if line.startswith("id: "):
                event = line.removeprefix("id: ")
            elif line.startswith("data: {"):
                chunk = json.loads(line.removeprefix("data: "))
                for choice in chunk["choices"]:
                    new = {"ids": [], "text": "", "logprobs": [], "end": None}
                    sample = self.samples.setdefault(str(choice["index"]), new)
                    sample["ids"] += choice["token_ids"] or []
                    sample["text"] += choice["text"]
                    sample["logprobs"] += (choice.get("logprobs") or {}).get("token_logprobs", [])
                    sample["end"] = choice["finish_reason"] or sample["end"]
                self.receipt = chunk.get("receipt") or self.receipt
                self.last = event

    def kept(self) -> dict[str, Any]:
        """Return what a later process needs to continue the stream."""
        return {"name": self.name, "last": self.last, "samples": self.samples}


@contextmanager
def serving(
    model: str, numerics: str, device: str | None, journal: Path
) -> Iterator[tuple[httpx.Client, subprocess.Popen[str]]]:
    """Serve a model. Yield a client and the process, which is killed at the end."""
    command = [sys.executable, "-m", "detcompile", "serve", model, "--name", "model", "--port", "0"]
    command += ["--numerics", numerics, "--journal", str(journal), "--journal-hours", "87600", "--num-blocks", "256"]
    command += [] if device is None else ["--device", device]
    url, process = started(command)
    try:
        with httpx.Client(base_url=url, timeout=300) as client:
            yield client, process
    finally:
        process.kill()
        process.wait()


def requests(tokens: int) -> list[dict[str, Any]]:
    """Return the body of a request of each kind."""
    common = {"model": "model", "stream": True, "ignore_eos": True, "max_tokens": tokens}
    common |= {"return_token_ids": True, "receipt": True}
    return [
        common | {"prompt": [3 + index, *range(5, 25 + index)], "seed": index} | kind
        for index, kind in enumerate(KINDS)
    ]


def begin(folder: Path, model: str, numerics: str, device: str | None, tokens: int) -> None:
    """Begin answers of each kind, then kill the server."""
    bodies = requests(tokens)
    whole, begun = [Client() for _ in bodies], [Client() for _ in bodies]
    with serving(model, numerics, device, folder / JOURNAL) as (http, process):

        def stream(number: int, client: Client, headers: dict[str, str]) -> None:
            try:
                with http.stream("POST", "/v1/completions", json=bodies[number], headers=headers) as response:
                    client.read(response)
            except httpx.TransportError:
                pass

        for clients, key in ((whole, ""), (begun, "key")):
            threads = [
                threading.Thread(target=stream, args=(n, client, {"Idempotency-Key": f"{key}{n}"} if key else {}))
                for n, client in enumerate(clients)
            ]
            for thread in threads:
                thread.start()
            while key and any(client.num_tokens < BEGUN for client in clients):
                time.sleep(0.0005)
            if key:
                process.kill()
            for thread in threads:
                thread.join()
    payload = json.loads(base64.b64decode(whole[0].receipt["payload"]))
    about = {
        "machine": device_name(device),
        "model": model,
        "numerics": numerics,
        "fingerprint": payload["fingerprint"],
        "requests": bodies,
        "whole": [client.samples for client in whole],
        "begun": [client.kept() for client in begun],
    }
    (folder / CLIENTS).write_text(json.dumps(about) + "\n")
    print(f"{len(bodies)} answers begun on {about['machine']}; fingerprint {about['fingerprint']}")


def resume(folder: Path, device: str | None) -> int:
    """Read the rest of each answer. Return 1 if one differs or none was unfinished, otherwise 0."""
    about = json.loads((folder / CLIENTS).read_text())
    with tempfile.TemporaryDirectory() as copies:
        for file in folder.glob(f"{JOURNAL}*"):
            shutil.copyfile(file, Path(copies, file.name))
        journal = Path(copies, JOURNAL)
        with serving(about["model"], about["numerics"], device, journal) as (http, _):
            fingerprint = http.get("/v1/models").json()["data"][0]["fingerprint"]
            print(f"begun on {about['machine']}, fingerprint {about['fingerprint']}")
            print(f"resumed on {device_name(device)}, fingerprint {fingerprint}\n")
            print("| request | tokens before | after | seconds | bits | receipt |\n|---|---|---|---|---|---|")
            failures = unfinished = 0
            for number, (body, kept) in enumerate(zip(about["requests"], about["begun"], strict=True)):
                client = Client(kept)
                before = client.num_tokens
                unfinished += not all(sample["end"] for sample in client.samples.values())
                start = time.perf_counter()
                by_name = number % 2 == 0  # like EventSource; odd ones send the request again
                path = ("GET", f"/v1/streams/{client.name}") if by_name else ("POST", "/v1/completions")
                headers = {"Last-Event-ID": client.last, "Idempotency-Key": f"key{number}"}
                with http.stream(*path, json=None if by_name else body, headers=headers) as response:
                    if response.status_code != 200:
                        print(f"| {number} | {before} | | | {response.read().decode()} | |")
                        failures += 1
                        continue
                    client.read(response)
                seconds = time.perf_counter() - start
                equal = client.samples == about["whole"][number]
                verdict = http.post("/v1/verify", json=client.receipt).json()["outcome"]
                failures += not equal or verdict != "equal"
                after = client.num_tokens - before
                bits = "equal" if equal else "DIFFER"
                print(f"| {number} | {before} | {after} | {seconds:.2f} | {bits} | {verdict} |", flush=True)
    print(f"{unfinished} of {len(about['begun'])} answers were unfinished, {failures} failed")
    return 1 if failures or not unfinished else 0


def main() -> int:
    """Begin or resume."""
    given = arguments_of(("begin", "resume"), 256, __doc__)
    if given.action == "resume":
        return resume(given.folder, given.device)
    begin(given.folder, given.model, given.numerics or "exact8x16", given.device, given.tokens)
    return 0


if __name__ == "__main__":
    sys.exit(main())
