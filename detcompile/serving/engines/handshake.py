"""The handshake of an engine that connects to a front end over TCP: it proves that it has the front end's secret."""

import hashlib
import hmac
import secrets
import socket
from collections.abc import Sequence

NONCE_BYTES = 32
SECRET_BYTES = 16  # minimum
KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 25_000}  # s, s, 1, ms


def new_nonce() -> bytes:
    """Return a nonce for one connection; a proof is valid for its nonce only."""
    return secrets.token_bytes(NONCE_BYTES)


def proof_of(secret: bytes, nonce: bytes, proof: bytes) -> bool:
    """Return True if a proof matches the secret and the nonce."""
    return hmac.compare_digest(_proof(secret, nonce), proof)


def connected(host: str, port: int, secret: bytes) -> socket.socket:
    """Connect to a front end and send the proof.

    Raises:
        OSError: nobody listens there, or the front end closed the connection.
    """
    connection = socket.create_connection((host, port))
    connection.sendall(_proof(secret, read_exactly(connection, NONCE_BYTES)))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    keep_alive(connection)
    return connection


def keep_alive(connection: socket.socket) -> None:
    """Let TCP keepalive end connections to unreachable machines after 25 s."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEPALIVE.items():
        if hasattr(socket, name):  # Linux
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def proven(connection: socket.socket, secret: bytes) -> bool:
    """Wait for the peer's proof; return True if it has the secret.

    Raises:
        OSError: the peer closed the connection.
    """
    nonce = new_nonce()
    connection.sendall(nonce)
    return proof_of(secret, nonce, read_exactly(connection, NONCE_BYTES))


def read_exactly(connection: socket.socket, size: int) -> bytes:
    """Read ``size`` bytes.

    Raises:
        OSError: the peer closed the connection.
    """
    data = b""
    while len(data) < size:
        part = connection.recv(size - len(data))
        if not part:
            raise OSError("the peer closed the connection")
        data += part
    return data


def front_of(arguments: Sequence[str], secret: bytes) -> socket.socket:
    """Return the engine's end of the connection to its front end.

    Args:
        arguments: the file descriptor of a socket, or ``--dial`` and HOST:PORT.

    Raises:
        OSError: nobody listens there.
    """
    if arguments[0] == "--dial":
        host, _, port = arguments[1].rpartition(":")
        return connected(host.strip("[]"), int(port), secret)
    connection = socket.socket(fileno=int(arguments[0]))
    connection.set_inheritable(False)
    return connection


def _proof(secret: bytes, nonce: bytes) -> bytes:
    return hmac.new(secret, nonce, hashlib.sha256).digest()
