"""The shared secret of a cluster's machines, and the keys that a run derives from it.

    secret file --HKDF-SHA256, salted with the run-->  keys of the rendezvous store (`ubatch.process.job_store`)
                                                       CURVE key pairs, of node 0 and of the processes that connect

Node 0 makes a new random name for each run, so that recorded messages of earlier runs are invalid. All processes that
connect share one key pair: every process with the secret is trusted.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import stat
from dataclasses import dataclass
from pathlib import Path

import zmq
from zmq.utils import z85

from ubatch import ConfigError

_FEWEST_BYTES, _MOST_BYTES = 32, 4096
_FEWEST_DISTINCT = 8
"""Least number of different byte values; 64 random hexadecimal digits have fewer in less than one of 10^18 files."""
_HOW = "Make one with: (umask 077; openssl rand -hex 32 > FILE), and copy it to every machine."


class ClusterSecret:
    """The contents of a secret file; never printed."""

    __slots__ = ("_secret",)

    def __init__(self, secret: bytes) -> None:
        self._secret = secret

    def __repr__(self) -> str:
        return "ClusterSecret(...)"

    def __reduce__(self) -> str:
        raise TypeError("a secret is never sent to another process, which reads the file by itself.")

    def key(self, purpose: str, run: str = "") -> bytes:
        """A 32-byte key for one purpose in one run: the first block of HKDF (RFC 5869)."""
        extracted = hmac.digest(run.encode(), self._secret, hashlib.sha256)
        return hmac.digest(extracted, f"ubatch {purpose}\x01".encode(), hashlib.sha256)

    def curve(self, run: str) -> CurveKeys:
        """The key pairs of a run's zmq connections.

        Raises:
            ConfigError: the installed zmq library has no CURVE.
        """
        if not zmq.has("curve"):
            raise ConfigError(
                "cluster_secret_file needs CURVE, and this libzmq was built without it. Install the wheel of pyzmq: "
                "pip install --force-reinstall --only-binary=pyzmq pyzmq."
            )
        server, client = (z85.encode(self.key(f"curve {side}", run)) for side in ("server", "client"))
        return CurveKeys(zmq.curve_public(server), server, zmq.curve_public(client), client)


@dataclass(frozen=True, repr=False)
class CurveKeys:
    """Key pairs of CURVE, in zmq's Z85 encoding."""

    server_public: bytes
    server_secret: bytes
    client_public: bytes
    client_secret: bytes


def read_secret(path: Path | None) -> ClusterSecret | None:
    """The secret in a file; None without a file. White space at its end is ignored, as editors differ in it.

    Raises:
        ConfigError: the file cannot be read, other users have access to it, or it is too short, too long or guessable.
    """
    if path is None:
        return None
    name = f"cluster_secret_file {path}"
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a pipe would block
    except OSError as error:
        raise ConfigError(f"{name}: cannot be read ({error.strerror}). {_HOW}") from error
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise ConfigError(f"{name}: is no regular file. {_HOW}")
        if status.st_mode & 0o077:
            mode = stat.S_IMODE(status.st_mode)
            raise ConfigError(f"{name}: others than its owner may use it (mode {mode:04o}). Run: chmod 600 {path}")
        secret = os.read(descriptor, _MOST_BYTES + 1)
    finally:
        os.close(descriptor)
    if len(secret) > _MOST_BYTES:
        raise ConfigError(f"{name}: has more than {_MOST_BYTES} bytes, too many for a secret. {_HOW}")
    secret = secret.rstrip()
    if len(secret) < _FEWEST_BYTES:
        held = f"{len(secret)} bytes before the white space at its end" if secret else "nothing"
        raise ConfigError(f"{name}: holds {held}; a secret has at least {_FEWEST_BYTES} random bytes. {_HOW}")
    if (distinct := len(set(secret))) < _FEWEST_DISTINCT:
        raise ConfigError(f"{name}: holds {distinct} different bytes only, so it could be guessed. {_HOW}")
    return ClusterSecret(secret)
