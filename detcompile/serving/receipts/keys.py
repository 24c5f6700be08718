"""Ed25519 keys in PEM files: the signing key, and its public half for verification."""

import hashlib
import os
import stat
from functools import cached_property
from pathlib import Path

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
    load_pem_public_key,
)

from detcompile.errors import InvalidInput, StorageError


class VerifyKey:
    """A public key.

    Attributes:
        key_id: sha256 of the key's 32 bytes in hex.
    """

    def __init__(self, key: Ed25519PublicKey) -> None:
        self._key = key
        self.key_id = hashlib.sha256(key.public_bytes(Encoding.Raw, PublicFormat.Raw)).hexdigest()

    @cached_property
    def pem(self) -> str:
        """Return the key in PEM."""
        return self._key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo).decode()

    def verifies(self, signature: bytes, message: bytes) -> bool:
        """Return True if the private half signed exactly this message."""
        try:
            self._key.verify(signature, message)
        except InvalidSignature:
            return False
        return True


class SigningKey:
    """A private key.

    Attributes:
        public: the public half.
        key_id: id of the public half.
    """

    def __init__(self, key: Ed25519PrivateKey) -> None:
        self._key = key
        self.public = VerifyKey(key.public_key())
        self.key_id = self.public.key_id

    def sign(self, message: bytes) -> bytes:
        """Return the 64-byte signature of a message."""
        return self._key.sign(message)

    @property
    def pem(self) -> bytes:
        """Return the key in PEM, unencrypted."""
        return self._key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def write_key_pair(path: Path) -> SigningKey:
    """Write a new key to a file that only its owner may read, and its public half to the same name with .pub.

    Raises:
        StorageError: a file exists already or cannot be written.
    """
    key = SigningKey(Ed25519PrivateKey.generate())
    files = ((path, key.pem, 0o600), (Path(f"{path}.pub"), key.public.pem.encode(), 0o644))
    for file, _, _ in files:
        if file.exists():
            raise StorageError(f"{file} exists, and keys are not overwritten: give another name or remove it")
    try:
        for file, content, mode in files:
            with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as opened:
                opened.write(content)
    except OSError as error:
        raise StorageError(f"{path} cannot be written: {error.strerror}") from error
    return key


def read_signing_key(path: Path) -> SigningKey:
    """Return the private key in a file.

    Raises:
        InvalidInput: the file cannot be read, is readable by others, or contains no Ed25519 key.
    """
    data = _read(path)
    if stat.S_IMODE(path.stat().st_mode) & 0o077:
        raise InvalidInput(f"{path} is readable by others, who could sign in your name: chmod 600 {path}")
    try:
        key = load_pem_private_key(data, password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise InvalidInput(f"{path} contains no private key ({error}): create one with `detcompile keygen`") from error
    if not isinstance(key, Ed25519PrivateKey):
        raise InvalidInput(f"{path} does not contain an Ed25519 key: create one with `detcompile keygen`")
    return SigningKey(key)


def read_verify_key(path: Path) -> VerifyKey:
    """Return the public key in a file.

    Raises:
        InvalidInput: the file cannot be read or contains no public Ed25519 key.
    """
    try:
        key = load_pem_public_key(_read(path))
    except (ValueError, UnsupportedAlgorithm) as error:
        raise InvalidInput(f"{path} contains no public key ({error}): give the .pub file") from error
    if not isinstance(key, Ed25519PublicKey):
        raise InvalidInput(f"{path} does not contain an Ed25519 key: give the .pub file")
    return VerifyKey(key)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise InvalidInput(f"{path} cannot be read: {error.strerror}") from error
