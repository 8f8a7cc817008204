"""Two machines: two network namespaces stand in for them, joined by a cable. On each runs a node of one server."""

import ctypes
import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

import pytest
from forked import AsSpawned
from network_namespaces import ip, why_not
from repository import TINY_MOE
from served import family

from serving.cli import main

ADDRESSES = ("10.83.7.1", "10.83.7.2")
MASTER_PORT, PORT = "29417", "8000"


_CLONE_NEWNET = 0x40000000


class Forked:
    """A command forked from what tests have imported, as a `subprocess.Popen`: it need not import that once more."""

    def __init__(self, *args: Any) -> None:
        self._process = AsSpawned().Process(target=_run_in_namespace, args=args)
        self._process.start()
        self.pid: int = self._process.pid

    @property
    def returncode(self) -> int | None:
        return cast("int | None", self._process.exitcode)

    def poll(self) -> int | None:
        return self.returncode

    def send_signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def wait(self) -> None:
        self._process.join()


def _run_in_namespace(namespace: str, log: str, words: list[str]) -> None:
    place = os.open(f"/run/netns/{namespace}", os.O_RDONLY)
    if ctypes.CDLL(None, use_errno=True).setns(place, _CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), f"no way into the namespace {namespace}")
    to = os.open(log, os.O_WRONLY | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(to, stream)
    sys.exit(main(words))


@dataclass
class Host:
    """A namespace, and the engine node in it.

    Attributes:
        cable: its end of the cable.
        master: address of host 0.
    """

    name: str
    log: IO[bytes]
    cable: str
    address: str
    master: str
    process: Forked | None = None

    def run(self, *words: str) -> list[str]:
        return ["ip", "netns", "exec", self.name, *words]

    def start(self, name: str, node_rank: int, secret: Path, *flags: str) -> Forked:
        """Start a command with a rank on each host."""
        shared = ["--data-parallel-size", "2", "--nnodes", "2", "--node-rank", str(node_rank)]
        shared += ["--master-addr", self.master, "--master-port", MASTER_PORT, "--cluster-secret-file", str(secret)]
        self.process = Forked(self.name, self.log.name, [name, str(TINY_MOE), *shared, *flags])
        return self.process

    def output(self) -> str:
        return Path(self.log.name).read_text(errors="replace")


@contextmanager
def two_hosts(addresses: tuple[str, str] = ADDRESSES) -> Iterator[list[Host]]:
    """Two namespaces, joined by a cable; skips the test where there can be none."""
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    names = [f"ubatch{index}-{os.getpid()}" for index in range(2)]
    cable = [f"ub{index}-{os.getpid()}" for index in range(2)]
    bits, more = ("64", ["nodad"]) if ":" in addresses[0] else ("24", [])
    with ExitStack() as stack:
        hosts = []
        for index, name in enumerate(names):
            ip("netns", "add", name)
            stack.callback(ip, "netns", "delete", name)
            log = stack.enter_context(tempfile.NamedTemporaryFile(suffix=".log"))
            hosts.append(Host(name, log, cable[index], addresses[index], addresses[0]))
        ip("link", "add", cable[0], "netns", names[0], "type", "veth", "peer", "name", cable[1], "netns", names[1])
        for name, end, address in zip(names, cable, addresses, strict=True):
            ip("-n", name, "address", "add", f"{address}/{bits}", "dev", end, *more)
            ip("-n", name, "link", "set", end, "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield hosts
        for host in hosts:
            if host.process is not None and host.process.poll() is None:
                for pid in family(host.process.pid):
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                host.process.wait()


def ask(host: Host, path: str, body: dict[str, Any] | None = None) -> str:
    """What the server answers inside its namespace."""
    script = (
        "import sys, urllib.request as u\n"
        "request = u.Request(sys.argv[1], sys.argv[2].encode() or None, {'Content-Type': 'application/json'})\n"
        "print(u.build_opener(u.ProxyHandler({})).open(request, timeout=60).read().decode())\n"
    )
    url = f"http://127.0.0.1:{PORT}{path}"
    command = host.run(sys.executable, "-c", script, url, json.dumps(body) if body is not None else "")
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def engines(host: Host) -> list[int]:
    """The processes of its ranks; none before they are started."""
    assert host.process is not None
    return [pid for pid in family(host.process.pid) if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def make_secret(folder: Path) -> Path:
    path = folder / "secret"
    path.touch(0o600)
    path.write_text(secrets.token_hex(32))
    return path
