"""The handshake of an engine that connects to a front over TCP: it proves that it has the front's secret."""

import hashlib
import hmac
import secrets
import socket
from collections.abc import Sequence

__all__ = ["NONCE_BYTES", "SECRET_BYTES", "connected", "front_of", "new_nonce", "proof_of"]

NONCE_BYTES = 32
SECRET_BYTES = 16  # at least


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
    nonce = b""
    while len(nonce) < NONCE_BYTES:
        part = found.recv(NONCE_BYTES - len(nonce))
        if not part:
            raise OSError("the front hung up")
        nonce += part
    found.sendall(_proof(secret, nonce))
    found.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
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
