"""Random load on a server, with clients that leave, slow readers and engines that die: nothing grows."""

import asyncio
from pathlib import Path

from benchmarks.server_soak import ROOM, Soak, growth
from tests.exhaustive import EXHAUSTIVE
from tests.serving.conftest import started


@EXHAUSTIVE
def test_nothing_grows_under_random_load(folder: Path, tmp_path: Path) -> None:
    seconds = 30.0  # benchmarks/server_soak.py runs for hours
    options = ["--max-restarts", "1000", "--queue-timeout", "180", "--journal", str(tmp_path / "journal")]
    server = started(folder, *options)
    try:
        soak = Soak(server.url, server.process.pid)
        asyncio.run(soak.run(seconds, stretch=max(6.0, seconds / 30), kill_every=5.0))
        assert server.stop() == 0
    finally:
        server.process.kill()
    assert soak.counts["answered"] > 20 and soak.counts["left"] and soak.counts["engines disturbed"]
    grown = growth(soak.rests)
    assert all(grown[name] <= room for name, room in ROOM.items()), (grown, soak.rests)
    assert not any("Traceback" in line for line in server.lines), "".join(server.lines)


def test_growth_is_detected() -> None:
    steady = [dict.fromkeys(ROOM, 50.0) for _ in range(9)]
    assert not any(growth(steady).values())
    leaking = [dict.fromkeys(ROOM, 50.0 + 5.0 * number) for number in range(9)]
    assert all(growth(leaking)[name] == 15.0 > ROOM[name] for name in ROOM)
