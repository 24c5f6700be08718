"""Engines in actors of a Ray cluster of several nodes, all of them on this machine: over scripted engines."""

import asyncio
import functools
import importlib.util
from collections.abc import Iterator
from typing import Any

import pytest

from detcompile.errors import InvalidInput
from detcompile.serving.engines.fleet import Fleet
from detcompile.serving.engines.ray_actors import RayActors
from detcompile.serving.service import Service
from tests.serving.scripted_service import running
from tests.serving.test_recovery import assert_whole, complete, until_drawn

pytestmark = [
    pytest.mark.usefixtures("in_the_root"),
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed: the extra `ray`"),
]
# Ray takes 127.0.0.1 in an address for the name of the whole machine, and looks for its address in the network.
NODE = {"num_cpus": 1, "node_ip_address": "127.0.0.2", "object_store_memory": 80 << 20, "include_dashboard": False}
ENGINE = "tests.serving.scripted_engine"


@pytest.fixture
def cluster(in_the_root: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A head without room for engines, and two nodes with room for one each."""
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    from ray.cluster_utils import Cluster

    actual = Cluster(initialize_head=True, head_node_args=NODE | {"num_cpus": 0})
    for _ in range(2):
        actual.add_node(**{name: value for name, value in NODE.items() if name != "include_dashboard"})
    yield actual
    actual.shutdown()


def node_of_an_engine(cluster: Any) -> Any:
    import ray

    tables = [table for table in ray.util.placement_group_table().values() if table["state"] == "CREATED"]
    places = [node for table in tables for node in table["bundles_to_node_id"].values()]
    return next(node for node in cluster.worker_nodes if node.node_id in places)


def test_an_answer_goes_on_where_its_node_is_lost(cluster: Any) -> None:
    async def scenario() -> None:
        launcher = RayActors(cluster.address, module=ENGINE)
        service = Service(fleet=functools.partial(Fleet, launcher=launcher, replicas=2, most_restarts=2))
        async with running(service) as client:
            tasks = [asyncio.create_task(complete(client, [5 + index])) for index in range(6)]
            await until_drawn(service, 6, 3)
            await asyncio.to_thread(cluster.remove_node, node_of_an_engine(cluster), allow_graceful=False)
            for answer in await asyncio.gather(*tasks):
                assert_whole(answer)
            assert service.fleet.num_resumed >= 1 and sum(link.ready for link in service.fleet.links) == 1
            room = {name: value for name, value in NODE.items() if name != "include_dashboard"}
            cluster.add_node(**room)  # in the main thread, as it sets signal handlers
            while not all(link.ready for link in service.fleet.links):  # it takes the place that waits for room
                await asyncio.sleep(0.05)
            assert_whole(await complete(client, [5]))

    asyncio.run(asyncio.wait_for(scenario(), 80))


def test_without_a_cluster_it_is_said_how_to_begin_one() -> None:
    async def scenario() -> None:
        launcher = RayActors("127.0.0.2:1", module=ENGINE)
        with pytest.raises(InvalidInput, match="ray start --head"):
            await launcher.open()
        await launcher.close()

    asyncio.run(asyncio.wait_for(scenario(), 60))
