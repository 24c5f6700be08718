"""Engines in actors of a Ray cluster whose nodes are raylets on this machine.

The extra `ray` takes 240 MB, so that no other extra contains it: `pip install '.[ray]'`.
"""

import asyncio
import functools
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from detcompile.errors import InvalidInput
from detcompile.serving.engines.engine_link import EngineLink
from detcompile.serving.engines.fleet import Fleet
from detcompile.serving.engines.launchers import LocalProcess
from detcompile.serving.engines.protocol import EngineSpec
from detcompile.serving.engines.ray_actors import RayActors
from detcompile.serving.service import Service
from tests.exhaustive import EXHAUSTIVE
from tests.model_cases import random_model
from tests.serving.scripted_service import running
from tests.serving.test_nodes import bits, drawn, opened, until
from tests.serving.test_recovery import assert_whole, complete, until_drawn

pytestmark = [
    pytest.mark.usefixtures("in_the_root"),
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed: the extra `ray`"),
]
# Ray takes 127.0.0.1 in an address for the name of the whole machine, and looks for its address in the network.
NODE = {"num_cpus": 1, "node_ip_address": "127.0.0.2", "object_store_memory": 80 << 20, "include_dashboard": False}
WORKER = {name: value for name, value in NODE.items() if name != "include_dashboard"}
ENGINE = "tests.serving.scripted_engine"


@pytest.fixture
def cluster(in_the_root: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A cluster: a head without room for engines, and two nodes with room for one engine each."""
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    from ray.cluster_utils import Cluster

    actual = Cluster(initialize_head=True, head_node_args=NODE | {"num_cpus": 0})
    for _ in range(2):
        actual.add_node(**WORKER)
    yield actual
    actual.shutdown()


def node_of_an_engine(cluster: Any) -> Any:
    import ray

    tables = [table for table in ray.util.placement_group_table().values() if table["state"] == "CREATED"]
    places = [node for table in tables for node in table["bundles_to_node_id"].values()]
    return next(node for node in cluster.worker_nodes if node.node_id in places)


async def test_answer_continues_when_its_node_is_lost(cluster: Any) -> None:
    launcher = RayActors(cluster.address, module=ENGINE)
    service = Service(fleet=functools.partial(Fleet, launcher=launcher, replicas=2, most_restarts=2))
    async with running(service) as client:
        tasks = [asyncio.create_task(complete(client, [5 + index])) for index in range(6)]
        await until_drawn(service, 6, 3)
        await asyncio.to_thread(cluster.remove_node, node_of_an_engine(cluster), allow_graceful=False)
        for answer in await asyncio.gather(*tasks):
            assert_whole(answer)
        assert service.fleet.num_resumed >= 1 and sum(link.ready for link in service.fleet.links) == 1
        cluster.add_node(**WORKER)  # in the main thread, as it sets signal handlers
        while not all(link.ready for link in service.fleet.links):  # it takes the place that waits for room
            await asyncio.sleep(0.05)
        assert_whole(await complete(client, [5]))


@EXHAUSTIVE  # 26 CPU seconds, and as many of Ray's processes
def test_models_keep_their_bits_when_a_node_is_killed(cluster: Any, tmp_path: Path) -> None:
    """Two engines of a model on two nodes; the answers of the lost one continue on the other, and then on a third."""
    length = 1500  # seconds of drawing, as a node takes some to die
    sizes = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16, "max_position_embeddings": 2048}
    random_model("llama", torch.float32, num_hidden_layers=2, **sizes).save_pretrained(tmp_path)
    spec = EngineSpec(model=str(tmp_path), device="cpu", config={"num_blocks": 256}, generation_config="vllm")

    async def scenario() -> None:
        alone = EngineLink(launcher=LocalProcess())
        fleet = Fleet(launcher=RayActors(cluster.address), replicas=2, most_restarts=2)
        try:
            hello = await opened(alone, spec)
            expected = bits(await drawn(alone, at_least=length, length=length))
            await fleet.start(spec)
            await fleet.settled()
            await until(lambda: sum(link.ready for link in fleet.links) == 2)
            assert fleet.hello is not None and fleet.hello.fingerprint == hello.fingerprint
            actual = await drawn(fleet, at_least=10, length=length)
            await asyncio.to_thread(cluster.remove_node, node_of_an_engine(cluster), allow_graceful=False)
            await until(lambda: all(answer.finished for answer in actual))
            assert bits(actual) == expected
            assert fleet.num_resumed >= 1
            cluster.add_node(**WORKER)
            await until(lambda: sum(link.ready for link in fleet.links) == 2)
            assert bits(await drawn(fleet, at_least=length, length=length)) == expected
        finally:
            await asyncio.gather(fleet.stop(), alone.stop())

    asyncio.run(asyncio.wait_for(scenario(), 300))


async def test_missing_cluster_error_says_how_to_start_one() -> None:
    launcher = RayActors("127.0.0.2:1", module=ENGINE)
    with pytest.raises(InvalidInput, match="ray start --head"):
        await launcher.open()
    await launcher.close()
