"""Answers continue when their engine is lost, and a request that kills engines ends alone."""

import asyncio
import os
import signal
import time
from pathlib import Path
from typing import Any, Literal

import httpx
import pytest
from msgspec import structs

from detcompile import SamplingParams
from detcompile.runtime.grammars.grammar import Grammar
from detcompile.serving.engines import fleet
from detcompile.serving.engines.answers import Answer, AnswerSignal, Pooling, Verification
from detcompile.serving.engines.placement import Blocklist
from detcompile.serving.http_errors import BlockedRequestError
from detcompile.serving.service import Service
from tests.serving.scripted_engine import HELLO, POISON
from tests.serving.scripted_service import running, scripted

pytestmark = pytest.mark.usefixtures("in_the_root")
LENGTH = 60


async def complete(client: httpx.AsyncClient, prompt: list[Any], **options: object) -> httpx.Response:
    body = {"prompt": prompt, "max_tokens": LENGTH, "return_token_ids": True} | options
    return await client.post("/v1/completions", json=body)


def assert_whole(answer: httpx.Response) -> None:
    """Fail unless no token is lost, and none came twice."""
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["token_ids"] == list(range(40, 40 + LENGTH))


async def until_drawn(service: Service, count: int, num_tokens: int) -> None:
    while sum(answer.num_tokens >= num_tokens for answer in service.open.values()) < count:
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize(("replicas", "spare"), [(1, False), (1, True), (2, False)])
async def test_answer_continues_when_its_engine_is_lost(number: int, replicas: int, spare: bool) -> None:
    service = scripted(replicas=replicas, spare=spare, most_restarts=1)
    async with running(service) as client:
        tasks = [asyncio.create_task(complete(client, [5 + index])) for index in range(6)]
        await until_drawn(service, 6, 3)
        lost = service.fleet.links[0].pid
        os.kill(lost, number)
        later = asyncio.create_task(complete(client, [4]))
        for answer in await asyncio.gather(*tasks, later):
            assert_whole(answer)
        while service.fleet.num_restarts < 1 or not service.fleet.links[0].ready:
            await asyncio.sleep(0.01)
        assert service.fleet.links[0].pid != lost
        text = (await client.get("/metrics")).text
        assert "detcompile:engine_restarts_total 1.0" in text and "answers_resumed_total 0.0" not in text
        assert (await client.get("/ready")).status_code == 200


def test_lost_engine_is_detected_soon() -> None:
    async def scenario(number: int, seconds: float) -> None:
        service = scripted()
        async with running(service):
            start = time.monotonic()
            os.kill(service.fleet.links[0].pid, number)
            while service.fleet.failure is None:
                await asyncio.sleep(0.005)
            assert time.monotonic() - start < seconds

    asyncio.run(scenario(signal.SIGKILL, 1.0))  # 5 ms on idle cores: its socket closes
    asyncio.run(scenario(signal.SIGSTOP, 3.0))  # 0.6 s there


async def test_server_without_engine_is_not_ready() -> None:
    service = scripted(most_restarts=1)
    async with running(service) as client:
        os.kill(service.fleet.links[0].pid, signal.SIGKILL)
        while service.fleet.num_restarts == 0:
            await asyncio.sleep(0.005)
        assert (await client.get("/ready")).status_code == 503
        assert (await client.get("/health")).status_code == 200
        assert_whole(await complete(client, [5]))  # it waits for the engine
        assert (await client.get("/ready")).status_code == 200


@pytest.mark.parametrize("replicas", [1, 2])
async def test_a_request_that_kills_engines_ends_alone(replicas: int) -> None:
    service = scripted(replicas=replicas, most_restarts=5)
    async with running(service) as client:
        others = [asyncio.create_task(complete(client, [5 + index])) for index in range(4)]
        await until_drawn(service, 4, 1)
        poisoned = await complete(client, [7, POISON])
        assert poisoned.status_code == 500, poisoned.text
        assert "served this request alone" in poisoned.json()["error"]["message"]
        for answer in await asyncio.gather(*others):
            assert_whole(answer)
        assert_whole(await complete(client, [5]))
        assert service.fleet.num_restarts == 4  # twice among others, twice alone
        poison: list[Any] = [7, POISON]
        for prompt, options in ((poison, {}), (poison, {"seed": 8, "stream": True}), ([[5], poison], {})):
            refused = await complete(client, prompt, **options)  # as clients do by themselves
            assert refused.status_code == 500 and "not tried again for 10 minutes" in refused.text
            assert refused.headers["x-should-retry"] == poisoned.headers["x-should-retry"] == "false"
        assert service.fleet.num_restarts == 4 and not service.open
        assert_whole(await complete(client, [7, 5]))


def test_blocklist_matches_prompt_not_seed() -> None:
    now = [0.0]
    blocklist = Blocklist(lambda: now[0])

    def answer(prompt: list[int], **complete: Any) -> Answer:
        return Answer("1", prompt, SamplingParams(**complete), AnswerSignal())

    def errands(receipt: bytes, pooling: Literal["last", "mean"]) -> list[Answer]:
        return [Verification("1", receipt, [3, 4]), Pooling("1", [[5], [6]], pooling, normalize=True)]

    grammar = Grammar.regex("a+")
    for item in (answer([1], seed=1, logit_bias={3: 1.0}, grammar=grammar), *errands(b"one", "last")):
        blocklist.add(item)
        assert isinstance(item.error, BlockedRequestError)
    others = (answer([2]), answer([1]), answer([1], logit_bias={3: 1.0}), *errands(b"two", "mean"))
    same = (answer([1], seed=2, logit_bias={3: 1.0}, grammar=grammar), *errands(b"one", "last"))
    for item in others:
        blocklist.require_unblocked(item)
    for item in same:
        with pytest.raises(BlockedRequestError):
            blocklist.require_unblocked(item)
    now[0] = 600.0
    for item in same:
        blocklist.require_unblocked(item)


async def test_canceled_suspect_does_not_delay_others() -> None:
    service = scripted(most_restarts=5)
    async with running(service) as client:
        tasks = [asyncio.create_task(complete(client, [5 + index], max_tokens=2000)) for index in range(2)]
        for _ in range(2):
            await until_drawn(service, 2, 1)
            while not service.fleet.links[0].ready:  # what was drawn may be of the engine before
                await asyncio.sleep(0.01)
            before = service.fleet.num_restarts
            os.kill(service.fleet.links[0].pid, signal.SIGKILL)
            while service.fleet.num_restarts == before or not service.fleet.links[0].ready:
                await asyncio.sleep(0.01)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert_whole(await complete(client, [5]))


@pytest.mark.parametrize("replicas", [1, 2])
async def test_rolling_restart_fails_no_request(replicas: int) -> None:
    service = scripted(replicas=replicas)
    async with running(service) as client:
        tasks = [asyncio.create_task(complete(client, [5 + index])) for index in range(6)]
        await until_drawn(service, 6, 3)
        before = {link.pid for link in service.fleet.links}
        rolling = asyncio.create_task(service.fleet.roll())
        while not rolling.done():
            tasks.append(asyncio.create_task(complete(client, [9])))
            await asyncio.sleep(0.1)
        for answer in await asyncio.gather(*tasks):
            assert_whole(answer)
        assert before.isdisjoint({link.pid for link in service.fleet.links})
        assert service.fleet.num_restarts == 0


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("how", ["killed", "rolled"])
async def test_answer_never_continues_on_another_model(
    how: str, replicas: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Engines of another model are ended before they serve, however slowly they start. Serving engines are kept."""
    model = tmp_path / "model"
    model.write_text("before")
    monkeypatch.setenv("SCRIPTED_MODEL", str(model))
    monkeypatch.setattr(fleet, "RESTART_SECONDS", 0.0)  # of a model that takes longer than a minute to start

    service = scripted(replicas=replicas, most_restarts=2)
    async with running(service) as client:
        tasks = [asyncio.create_task(complete(client, [5 + index], max_tokens=1500)) for index in range(4)]
        await until_drawn(service, 4, 3)
        model.write_text("after")
        kept = service.fleet.links[1:]
        if how == "rolled":
            assert not await service.fleet.roll()
        else:
            os.kill(service.fleet.links[0].pid, signal.SIGKILL)
        while service.fleet.failure is None:
            assert service.fleet.links[1:] == kept
            assert not service.fleet.links[0].ready or service.fleet.num_restarts == 0
            await asyncio.sleep(0.01)
        assert "which differs in weights" in str(service.fleet.failure)
        assert service.fleet.num_restarts == 2
        assert [answer.status_code for answer in await asyncio.gather(*tasks)] == [503] * 4


async def test_fleet_counters_never_decrease_and_gauges_follow_live_engines() -> None:
    """Prometheus treats a lower counter as reset and would count everything twice."""

    service = scripted(replicas=2, most_restarts=5)
    async with running(service) as client:
        fleet = service.fleet
        await asyncio.gather(*(complete(client, [5 + index]) for index in range(4)))
        while min(link.statistics.num_steps for link in fleet.links) < LENGTH:
            await asyncio.sleep(0.01)
        seen = [fleet.statistics]
        for pid in [link.pid for link in fleet.links]:
            os.kill(pid, signal.SIGKILL)
            while all(link.ready for link in fleet.links):
                await asyncio.sleep(0)
            seen.append(fleet.statistics)
            assert seen[-1].num_blocks == HELLO.num_blocks  # of the other one
            while not all(link.ready and link.statistics.num_blocks for link in fleet.links):
                seen.append(fleet.statistics)
                await asyncio.sleep(0.01)
        assert await fleet.roll()
        seen.append(fleet.statistics)
        counts = [item.num_steps for item in seen]
        assert counts == sorted(counts) and counts[0] >= 2 * LENGTH
        bounds = [structs.replace(item, token_bound=bound) for item, bound in zip(seen, (64, 256))]
        assert bounds[0].plus(bounds[1]).token_bound == 256


@pytest.mark.parametrize("how", ["killed", "rolled"])
@pytest.mark.parametrize("replicas", [1, 2])
async def test_failed_process_start_is_retried(how: str, replicas: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """For example, the machine is out of memory, or a node is lost while an engine starts."""
    monkeypatch.setattr(fleet, "RETRY_SECONDS", 0.05)

    service = scripted(replicas=replicas, most_restarts=50)
    async with running(service) as client:
        tasks = [asyncio.create_task(complete(client, [5 + index])) for index in range(4)]
        await until_drawn(service, 4, 3)
        launcher: Any = service.fleet._launcher
        known, launcher._command = launcher._command, ("/no/such/program",)
        if how == "rolled":
            assert not await service.fleet.roll()
        else:
            os.kill(service.fleet.links[0].pid, signal.SIGKILL)
        while service.fleet.num_restarts < 3:
            await asyncio.sleep(0.01)
        assert service.fleet.failure is None and service.fleet.ready == (replicas == 2)
        launcher._command = known
        for answer in await asyncio.gather(*tasks):
            assert_whole(answer)
        while not service.fleet.links[0].ready:
            await asyncio.sleep(0.01)
        assert service.fleet.losses[-1].seconds


def test_differing_engine_parts_are_named() -> None:
    other = structs.replace(HELLO, fingerprint="e" * 64, fingerprint_parts={"torch": "2", "triton": "3"})
    same = structs.replace(HELLO, num_blocks=3, name="elsewhere", default_params={"top_k": 2})
    assert HELLO.differing(same) == [] and HELLO.differing(other) == ["torch", "triton"]
    assert HELLO.differing(structs.replace(HELLO, tokenizer=None)) == ["tokenizer"]
    assert HELLO.differing(structs.replace(other, fingerprint_parts={})) == ["fingerprint"]


async def test_equal_prefixes_share_an_engine_and_others_go_to_idle_one() -> None:
    service = scripted(replicas=2)
    prefix = list(range(100, 100 + 3 * 64))
    async with running(service) as client:
        first, second = service.fleet.links
        for tail in ([1], [2], [3]):
            task = asyncio.create_task(complete(client, [*prefix, *tail], max_tokens=3))
            await until_drawn(service, 1, 1)
            assert first.answers and not second.answers
            await task
        tasks = [asyncio.create_task(complete(client, [index] * 5)) for index in range(10)]
        await until_drawn(service, 10, 1)
        assert len(first.answers) == len(second.answers) == 5
        await asyncio.gather(*tasks)
