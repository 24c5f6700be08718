"""A rank of an engine whose ranks torchrun has started, on one machine or several. Rank 0 is the engine as well.

Run as ``torchrun … -m detcompile.serving.engines.rank --dial HOST:PORT``, with the front's secret in
DETCOMPILE_ENGINE_SECRET, by which the ranks know each other, too. Whatever ends one of them ends all, with exit code 1,
and torchrun begins anew as often as its --max-restarts says.
"""

import functools
import os
import select
import socket
import struct
import sys
import threading
import time
from datetime import timedelta
from typing import NoReturn

import torch.distributed as dist

from detcompile.api import require_declared
from detcompile.config import Place, engine_secret, place_of_torchrun
from detcompile.errors import DetcompileError, InvalidInput, WorkerError
from detcompile.executors.ranks import Nodes
from detcompile.models.loading import find
from detcompile.models.remote import RemoteModel, compile_in_workers
from detcompile.models.spec import ARCHIVE_SUFFIX, ModelSpec
from detcompile.orders.numerics import Numerics
from detcompile.runtime.processes.dialled_rank import DialledRank
from detcompile.runtime.processes.process import serve as obey
from detcompile.serving.engines.engine_process import serve
from detcompile.serving.engines.handshake import SECRET_BYTES, connected, front_of, keep_alive, proven, read_exactly
from detcompile.serving.engines.processes import end_with_parent

__all__ = ["main"]

KEY = "detcompile/rank 0"  # of the store: where rank 0 listens
GREETING = struct.Struct(">II")  # behind the proof: rank and process id
MEETING_SECONDS = 300.0  # for imports, which begin about when torchrun has found all machines
HANDSHAKE_SECONDS = 10.0
SILENCE_SECONDS = 10.0  # without a beat, which a rank gives every 0.25 s of a step
LAST_WORDS_SECONDS = 2.0  # for the engine to say which rank was lost


def main() -> None:
    """Be the rank that torchrun says, until the engine ends."""
    end_with_parent()
    try:
        secret, place = engine_secret(), place_of_torchrun()
        if sys.argv[1:2] != ["--dial"] or len(sys.argv) != 3:
            raise InvalidInput("give --dial HOST:PORT, where `detcompile serve --dial-in HOST:PORT` listens")
        if len(secret) < SECRET_BYTES:
            raise InvalidInput(
                f"set DETCOMPILE_ENGINE_SECRET to {SECRET_BYTES} bytes at least, the front's, on every node"
            )
        store, _rank, _size = next(dist.rendezvous("env://"))
        if place.rank:
            obey(_to_rank_0(store, place.rank, secret), dialled=True)
        nodes = _met(store, place, secret)
    except DetcompileError as error:
        sys.exit(f"rank: {error}")
    threading.Thread(target=_end_with, args=(nodes,), daemon=True).start()
    serve(front_of(sys.argv[1:], secret), functools.partial(_compiled, nodes), end_code=1)


def _compiled(nodes: Nodes, spec: ModelSpec, tp: int, pp: int) -> RemoteModel:
    """The model, shared by all ranks.

    Raises:
        InvalidInput: there are more or fewer ranks than the front asks for, or the model is an archive.
        Also what compile() raises.
    """
    if tp * pp != nodes.num_ranks:
        raise InvalidInput(
            f"the front asks for tp={tp} and pp={pp}, which is {tp * pp} ranks, and torchrun has started"
            f" {nodes.num_ranks} for this engine: give `detcompile serve` a --tp and --pp of that product, or torchrun"
            " other --nnodes and --nproc-per-node"
        )
    if spec.name.endswith(ARCHIVE_SUFFIX):
        raise InvalidInput(f"{spec.name}: ranks that torchrun has started compile a checkpoint, and load no archive")
    numerics = Numerics(tp_sizes=spec.tp_sizes)
    require_declared(tp, numerics)
    found = find(spec.name, **spec.options)
    model = compile_in_workers(found, tp=tp, pp=pp, numerics=numerics, nodes=nodes)
    for dialled in nodes.dialled:  # before, a rank may be in an import or a driver that lets no thread of it run
        dialled.silence_seconds = SILENCE_SECONDS
    return model


def _met(store: dist.Store, place: Place, secret: bytes) -> Nodes:
    """The other ranks, once all have connected.

    Raises:
        WorkerError: some have not.
    """
    host = _own_address(place)
    found: dict[int, DialledRank] = {}
    end = time.monotonic() + MEETING_SECONDS
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    with socket.create_server(("", 0), family=family, dualstack_ipv6=both) as listener:
        store.set(KEY, f"{host} {listener.getsockname()[1]}")
        while missing := set(range(1, place.size)) - set(found):
            listener.settimeout(max(0.01, end - time.monotonic()))
            try:
                connection, address = listener.accept()
            except TimeoutError as error:
                raise WorkerError(f"ranks {sorted(missing)} have not connected within {MEETING_SECONDS:g} s") from error
            if (greeting := _greeting(connection, secret)) is None:
                connection.close()
                print(f"rank 0: {address[0]} connected without DETCOMPILE_ENGINE_SECRET", file=sys.stderr)
            else:
                found[greeting[0]] = DialledRank(connection, greeting[1])  # a later one of the same rank is the living
    return Nodes(host, place.local_size, [found[rank] for rank in range(1, place.size)])


def _greeting(connection: socket.socket, secret: bytes) -> tuple[int, int] | None:
    """Rank and process id of who has connected; None if it has not the secret, or says nothing."""
    connection.settimeout(HANDSHAKE_SECONDS)
    try:
        if not proven(connection, secret):
            return None
        rank, process_id = GREETING.unpack(read_exactly(connection, GREETING.size))
    except OSError:
        return None
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    keep_alive(connection)
    return rank, process_id


def _to_rank_0(store: dist.Store, rank: int, secret: bytes) -> socket.socket:
    """A connection to rank 0, whose address may be that of an earlier try of torchrun's until it has listened.

    Raises:
        WorkerError: it is not to be reached.
    """
    end = time.monotonic() + MEETING_SECONDS
    try:
        store.wait([KEY], timedelta(seconds=MEETING_SECONDS))
    except dist.DistError as error:
        raise WorkerError(f"rank 0 has not begun within {MEETING_SECONDS:g} s: {error}") from error
    while True:
        host, port = store.get(KEY).decode().split()
        try:
            connection = connected(host, int(port), secret)
            connection.sendall(GREETING.pack(rank, os.getpid()))
        except OSError as error:
            if time.monotonic() > end:
                raise WorkerError(f"rank 0 is not to be reached at {host}:{port}: {error}") from error
            time.sleep(0.5)
        else:
            return connection


def _own_address(place: Place) -> str:
    """The address of this machine, rank 0's, in the network of the store."""
    with socket.create_connection((place.host, place.port)) as probe:
        found: str = probe.getsockname()[0]
    return place.host if found.startswith("127.") or found == "::1" else found  # its own name, as others resolve it


def _end_with(nodes: Nodes) -> NoReturn:
    """End this process when another rank has ended, also while no step waits for it."""
    poller = select.poll()
    for dialled in nodes.dialled:
        poller.register(dialled.channel.fileno(), select.POLLRDHUP if sys.platform == "linux" else select.POLLHUP)
    poller.poll()
    time.sleep(LAST_WORDS_SECONDS)
    os._exit(1)


if __name__ == "__main__":
    main()
