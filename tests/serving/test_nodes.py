"""Engines whose ranks torchrun has started on several nodes: the same bytes, and one end for all of them."""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from msgspec.structs import replace

from detcompile.config import Place
from detcompile.errors import InvalidInput, NumericsError, WorkerError
from detcompile.executors.ranks import Nodes
from detcompile.experimental import rank
from detcompile.models.spec import ModelSpec
from detcompile.runtime.requests.sampling_params import SamplingParams
from detcompile.serving.engines.answers import Answer, AnswerSignal
from detcompile.serving.engines.engine_link import EngineLink
from detcompile.serving.engines.fleet import Fleet
from detcompile.serving.engines.handshake import connected
from detcompile.serving.engines.launchers import DialIn, LocalProcess
from detcompile.serving.engines.protocol import EngineSpec, Hello
from tests.exhaustive import EXHAUSTIVE
from tests.model_cases import random_model
from tests.serving.test_ending import assert_ended, descendants

pytestmark = pytest.mark.usefixtures("in_the_root")
SECRET = b"0123456789abcdef"
PATIENCE = 240.0
LENGTH = 60
DRAWS = [
    {"temperature": 0.0, "logprobs": 3},
    {"temperature": 1.0, "top_p": 0.9, "seed": 3, "n": 2, "logprobs": 0, "prompt_logprobs": 1},
    {"temperature": 0.7, "seed": 2**63 + 5, "frequency_penalty": 0.4, "repetition_penalty": 1.1, "logprobs": 1},
]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def torchruns(front: int, *, per_node: int = 1, max_restarts: int = 0) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Start two nodes of some ranks each, which connect to a front."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", str(per_node)]
    command += ["--master-addr", "127.0.0.1", "--master-port", str(free_port()), "--max-restarts", str(max_restarts)]
    program = ["-m", "detcompile.experimental.rank", "--dial", f"127.0.0.1:{front}"]
    environment = os.environ | {"DETCOMPILE_ENGINE_SECRET": SECRET.decode()}
    nodes = [
        subprocess.Popen([*command, "--node-rank", str(node), *program], env=environment, stderr=subprocess.DEVNULL)
        for node in range(2)
    ]
    pids: set[int] = set()
    try:
        yield nodes
    finally:
        for node in nodes:
            pids |= descendants(node.pid) | {node.pid}
            node.terminate()
        for node in nodes:
            node.wait(60)
        assert_ended(pids)


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> EngineSpec:
    folder = tmp_path_factory.mktemp("nodes")
    sizes = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16, "max_position_embeddings": 256}
    random_model("llama", torch.float32, num_hidden_layers=2, **sizes).save_pretrained(folder)
    return EngineSpec(model=str(folder), device="cpu", config={"num_blocks": 64}, generation_config="vllm")


def answers(length: int = LENGTH) -> list[Answer]:
    common = {"max_tokens": length, "ignore_eos": True}
    return [
        Answer(str(index), [5 + index, *range(20, 40)], SamplingParams(**common, **draw), AnswerSignal())
        for index, draw in enumerate(DRAWS)
    ]


async def until(holds: Callable[[], object], seconds: float = PATIENCE) -> float:
    """Wait for it; the seconds that it took."""
    since = time.monotonic()
    while not holds():
        assert time.monotonic() - since < seconds, "not in time"
        await asyncio.sleep(0.005)
    return time.monotonic() - since


def bits(actual: list[Answer]) -> list[Any]:
    """Return everything drawn, with log-probabilities to the last bit."""
    for answer in actual:
        assert answer.error is None, answer.error
        assert [len(item.token_ids) for item in answer.samples] == [answer.params.max_tokens] * answer.params.n
    return [
        ([(list(item.token_ids), item.logprobs, item.finish_reason) for item in answer.samples], answer.prompt_logprobs)
        for answer in actual
    ]


async def drawn(link: EngineLink | Fleet, *, at_least: int = LENGTH, length: int = LENGTH) -> list[Answer]:
    """Return the answers once each sample has ``at_least`` tokens."""
    actual = answers(length)
    for answer in actual:
        link.add(answer)
    await until(lambda: all(len(item.token_ids) >= at_least for answer in actual for item in answer.samples))
    return actual


async def opened(link: EngineLink, spec: EngineSpec) -> Hello:
    await link.open()
    link.start(spec)
    return await link.settled()


def ranks_of(node: subprocess.Popen[bytes]) -> list[int]:
    """Return the process that torchrun started on a node, and that process's children."""
    return sorted(descendants(node.pid))


def killed_on_the_second_node(nodes: list[subprocess.Popen[bytes]]) -> None:
    os.kill(ranks_of(nodes[1])[0], signal.SIGKILL)


def stopped_on_the_second_node(nodes: list[subprocess.Popen[bytes]]) -> None:
    os.kill(ranks_of(nodes[1])[0], signal.SIGSTOP)


def killed_on_the_first_node(nodes: list[subprocess.Popen[bytes]]) -> None:
    os.kill(ranks_of(nodes[0])[0], signal.SIGKILL)


def without_their_torchrun(nodes: list[subprocess.Popen[bytes]]) -> None:
    nodes[1].kill()


LOSSES = [
    (2, 1, killed_on_the_second_node, 5.0),
    (1, 2, killed_on_the_second_node, 5.0),
    (2, 2, killed_on_the_second_node, 5.0),
    (2, 1, stopped_on_the_second_node, 15.0),
    (2, 1, killed_on_the_first_node, 5.0),
    (2, 1, without_their_torchrun, 5.0),
]


@EXHAUSTIVE
@pytest.mark.parametrize(("tp", "pp", "lose", "seconds"), LOSSES)
async def test_two_nodes_give_bytes_of_one_rank_and_resume(
    tp: int, pp: int, lose: Callable, seconds: float, spec: EngineSpec
) -> None:
    lost: list[Answer] = []

    dial, alone = DialIn("127.0.0.1", 0, SECRET), EngineLink(launcher=LocalProcess())
    _, port = await dial.address()
    over_nodes = EngineLink(on_lost=lambda _link, answers: lost.extend(answers), launcher=dial)
    with torchruns(port, per_node=tp * pp // 2) as nodes:
        try:
            hello = await opened(alone, spec)
            expected = bits(await drawn(alone))
            shared = await opened(over_nodes, replace(spec, tp=tp, pp=pp))
            assert shared.fingerprint == hello.fingerprint
            assert bits(await drawn(over_nodes)) == expected
            actual = await drawn(over_nodes, at_least=10)
            pids = {*ranks_of(nodes[0]), *ranks_of(nodes[1])}
            lose(nodes)
            assert await until(lambda: over_nodes.failure is not None) < seconds
            assert lost == actual
            assert all(len(item.token_ids) < LENGTH for answer in actual for item in answer.samples)
            for answer in lost:
                alone.add(answer)
            await until(lambda: all(answer.finished for answer in actual))
            assert bits(actual) == expected
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)  # what is stopped ends when it goes on
            await asyncio.to_thread(assert_ended, pids)
            assert await asyncio.to_thread(nodes[0].wait, 20) == 1
        finally:
            await asyncio.gather(over_nodes.stop(), alone.stop())
            await dial.close()


@EXHAUSTIVE
async def test_wrong_number_of_ranks_ends_all_ranks() -> None:
    dial = DialIn("127.0.0.1", 0, SECRET)
    _, port = await dial.address()
    link = EngineLink(launcher=dial)
    with torchruns(port) as nodes:
        try:
            with pytest.raises(InvalidInput, match=r"needs 4 ranks \(tp=4, pp=1\), .* started 2"):
                await opened(link, EngineSpec(model="tiny", tp=4))
            assert [await asyncio.to_thread(node.wait, 20) for node in nodes] == [1, 1]
        finally:
            await link.stop()
            await dial.close()


@EXHAUSTIVE
async def test_torchrun_restart_resumes_answers(spec: EngineSpec) -> None:
    dial = DialIn("127.0.0.1", 0, SECRET)
    _, port = await dial.address()
    fleet = Fleet(launcher=dial, most_restarts=1)
    with torchruns(port, max_restarts=1) as nodes:
        try:
            await fleet.start(replace(spec, tp=2))
            await fleet.settled()
            expected = bits(await drawn(fleet))
            actual = await drawn(fleet, at_least=10)
            killed_on_the_second_node(nodes)
            await until(lambda: fleet.num_restarts == 1, 5.0)
            await until(lambda: all(answer.finished for answer in actual))
            assert bits(actual) == expected
        finally:
            await fleet.stop()


@EXHAUSTIVE
@pytest.mark.parametrize("case", ["waits for its spec", "has nothing to do", "loses its front"])
async def test_idle_engine_ends_when_a_rank_or_front_is_lost(case: str, spec: EngineSpec) -> None:
    dial = DialIn("127.0.0.1", 0, SECRET)
    _, port = await dial.address()
    link = EngineLink(launcher=dial)
    with torchruns(port) as nodes:
        try:
            await link.open()
            if case != "waits for its spec":
                link.start(replace(spec, tp=2))
                await link.settled()
            pids = {*ranks_of(nodes[0]), *ranks_of(nodes[1])}
            if case == "loses its front":
                link.kill()
            else:
                killed_on_the_second_node(nodes)
            await until(lambda: link.failure is not None, 5.0)
            await asyncio.to_thread(assert_ended, pids)
            assert [await asyncio.to_thread(node.wait, 20) for node in nodes] == [1, 1]
        finally:
            await link.stop()
            await dial.close()


@pytest.mark.parametrize(
    ("requested", "error", "text"),
    [
        ({"tp": 4}, InvalidInput, r"4 ranks \(tp=4, pp=1\), but torchrun has started 3 .*--nproc-per-node"),
        ({"tp": 2, "pp": 2}, InvalidInput, r"4 ranks \(tp=2, pp=2\)"),
        ({}, InvalidInput, r"1 ranks \(tp=1, pp=1\), but torchrun has started 3"),
        ({"tp": 3}, NumericsError, "tp=3 is not one of"),
        ({"tp": 3, "name": "model.pt2"}, InvalidInput, "model.pt2: .* cannot load an archive"),
        ({"pp": 3, "dtype": "float64"}, InvalidInput, "dtype float64 is not supported"),
    ],
)
def test_unshareable_model_is_refused(requested: dict[str, Any], error: type[Exception], text: str) -> None:
    given = {"tp": 1, "pp": 1, "name": "tiny", "dtype": None} | requested
    with pytest.raises(error, match=text):
        spec = ModelSpec(given["name"], dtype=given["dtype"])
        rank._compiled(Nodes("127.0.0.1", 3, (None, None)), spec, given["tp"], given["pp"])


class Meeting:
    """Rank 0 as it waits for another one, over a store that still has the address of an earlier try."""

    def __init__(self) -> None:
        self.store = dist.HashStore()
        self.store.set(rank.KEY, f"127.0.0.1 {free_port()}")
        self._stale = self.store.get(rank.KEY)
        self.found: list[Nodes | WorkerError] = []
        with socket.create_server(("127.0.0.1", 0)) as stores:
            place = Place(0, 2, 0, 1, "127.0.0.1", stores.getsockname()[1])
            self.thread = threading.Thread(target=self._meet, args=(place,))
            self.thread.start()
            while self.store.get(rank.KEY) == self._stale:
                time.sleep(0.01)

    def _meet(self, place: Place) -> None:
        time.sleep(0.2)  # so that others find the old address
        try:
            self.found.append(rank._met(self.store, place, SECRET))
        except WorkerError as error:
            self.found.append(error)

    @property
    def address(self) -> tuple[str, int]:
        host, port = self.store.get(rank.KEY).decode().split()
        return host, int(port)


def test_ranks_connect_only_with_secret(capsys: pytest.CaptureFixture[str]) -> None:
    meeting = Meeting()
    with connected(*meeting.address, b"fedcba9876543210") as impostor:
        assert impostor.recv(1) == b""  # it is hung up
    with rank._to_rank_0(meeting.store, 1, SECRET) as connection:
        meeting.thread.join(10)
        [nodes] = meeting.found
        assert isinstance(nodes, Nodes) and nodes.num_ranks == 2 and nodes.host == "127.0.0.1"
        assert nodes.dialed[0].id == os.getpid()
        assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        nodes.dialed[0].channel.close()
    assert "connected without DETCOMPILE_ENGINE_SECRET" in capsys.readouterr().err


def test_rank_retries_stale_address() -> None:
    store = dist.HashStore()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        store.set(rank.KEY, f"127.0.0.1 {free_port()}")
        address = f"127.0.0.1 {listener.getsockname()[1]}"
        threading.Timer(0.7, lambda: store.set(rank.KEY, address)).start()
        greeted: list[socket.socket] = []

        def greet() -> None:
            greeted.append(listener.accept()[0])
            greeted[0].sendall(bytes(32))

        threading.Thread(target=greet, daemon=True).start()
        with rank._to_rank_0(store, 1, SECRET):
            assert len(greeted[0].recv(40, socket.MSG_WAITALL)) == 40
        greeted[0].close()


def test_missing_ranks_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank, "MEETING_SECONDS", 0.5)
    meeting = Meeting()
    meeting.thread.join(10)
    assert str(meeting.found[0]) == "ranks [1] have not connected within 0.5 s"
    with pytest.raises(WorkerError, match=r"rank 0 cannot be reached at 127\.0\.0\.1"):
        rank._to_rank_0(meeting.store, 1, SECRET)
    with pytest.raises(WorkerError, match=r"rank 0 has not started within 0\.5 s"):
        rank._to_rank_0(dist.HashStore(), 1, SECRET)


TORCHRUN = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}


@pytest.mark.parametrize(
    ("arguments", "environment", "text"),
    [
        ([], TORCHRUN | {"MASTER_PORT": "1"}, "--dial HOST:PORT"),
        (["--dial", "127.0.0.1:1"], {}, "start this process with torchrun"),
        (["--dial", "127.0.0.1:1"], TORCHRUN | {"MASTER_PORT": "x"}, "start this process with torchrun"),
        (["--dial", "127.0.0.1:1"], TORCHRUN | {"MASTER_PORT": "1"}, "secret, at least 16 bytes, on every node"),
    ],
)
def test_missing_start_settings_are_named(
    arguments: list[str], environment: dict[str, str], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank, "end_with_parent", lambda: None)
    monkeypatch.setattr(sys, "argv", ["rank", *arguments])
    for name in (*TORCHRUN, "MASTER_PORT", "DETCOMPILE_ENGINE_SECRET"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit, match=text):
        rank.main()
