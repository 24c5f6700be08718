"""The handshake of an engine that connects to a front over TCP: it proves that it has the front's secret."""

import hashlib
import hmac
import secrets
import socket
from collections.abc import Sequence

__all__ = [
    "NONCE_BYTES", "SECRET_BYTES", "connected", "front_of", "keep_alive", "new_nonce", "proof_of", "proven",
    "read_exactly",
]  # fmt: skip

NONCE_BYTES = 32
SECRET_BYTES = 16  # at least
KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 25_000}  # s, s, 1, ms


def new_nonce() -> bytes:
    """What the front sends first: a proof is of this connection alone."""
    return secrets.token_bytes(NONCE_BYTES)


def proof_of(secret: bytes, nonce: bytes, proof: bytes) -> bool:
    """Whether a proof is of the secret and this nonce."""
    return hmac.compare_digest(_proof(secret, nonce), proof)


def connected(host: str, port: int, secret: bytes) -> socket.socket:
    """The engine's end of a connection to a front that listens there.

    Raises:
        OSError: nobody listens there, or hangs up.
    """
    found = socket.create_connection((host, port))
    found.sendall(_proof(secret, read_exactly(found, NONCE_BYTES)))
    found.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    keep_alive(found)
    return found


def keep_alive(connection: socket.socket) -> None:
    """Have the system end a TCP connection to a machine that is gone, in 25 s."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEPALIVE.items():
        if hasattr(socket, name):  # Linux
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def proven(connection: socket.socket, secret: bytes) -> bool:
    """Whether who has connected to us has the secret; waits for the proof.

    Raises:
        OSError: it hung up.
    """
    nonce = new_nonce()
    connection.sendall(nonce)
    return proof_of(secret, nonce, read_exactly(connection, NONCE_BYTES))


def read_exactly(connection: socket.socket, size: int) -> bytes:
    """So many bytes of a connection.

    Raises:
        OSError: the other side hung up.
    """
    found = b""
    while len(found) < size:
        part = connection.recv(size - len(found))
        if not part:
            raise OSError("the other side hung up")
        found += part
    return found


def front_of(arguments: Sequence[str], secret: bytes) -> socket.socket:
    """The engine's end of a connection to its front.

    Args:
        arguments: the number of a socket, or ``--dial`` and HOST:PORT.

    Raises:
        OSError: nobody listens there.
    """
    if arguments[0] == "--dial":
        host, _, port = arguments[1].rpartition(":")
        return connected(host.strip("[]"), int(port), secret)
    found = socket.socket(fileno=int(arguments[0]))
    found.set_inheritable(False)
    return found


def _proof(secret: bytes, nonce: bytes) -> bytes:
    return hmac.new(secret, nonce, hashlib.sha256).digest()
