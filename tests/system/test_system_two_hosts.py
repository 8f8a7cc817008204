"""Two machines, one server or one measurement: two network namespaces stand in for the machines.

host 0   API and rank 0   10.83.7.1 --- 10.83.7.2   host 1   rank 1
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import pytest
from network_namespaces import ip, why_not
from repository import TINY_MOE
from served import family, parse_metrics, values, wait_until

from serving.workbench.bench.server.process import UBATCH

pytestmark = pytest.mark.server

ADDRESSES = ("10.83.7.1", "10.83.7.2")
MASTER_PORT, PORT = "29417", "8000"


@dataclass
class Host:
    """A namespace, and the engine node in it."""

    name: str
    log: IO[bytes]
    process: subprocess.Popen[bytes] | None = None

    def run(self, *words: str) -> list[str]:
        return ["ip", "netns", "exec", self.name, *words]

    def start(self, name: str, node_rank: int, secret: Path, *flags: str) -> subprocess.Popen[bytes]:
        """Start a command with a rank on each host."""
        shared = ["--data-parallel-size", "2", "--nnodes", "2", "--node-rank", str(node_rank)]
        shared += ["--master-addr", ADDRESSES[0], "--master-port", MASTER_PORT, "--cluster-secret-file", str(secret)]
        command = self.run(*UBATCH, name, str(TINY_MOE), *shared, *flags)
        self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=self.log, stderr=self.log)
        return self.process

    def output(self) -> str:
        return Path(self.log.name).read_text(errors="replace")


@pytest.fixture
def hosts() -> Iterator[list[Host]]:
    """Two namespaces, joined by a cable."""
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    names = [f"ubatch{index}-{os.getpid()}" for index in range(2)]
    cable = [f"ub{index}-{os.getpid()}" for index in range(2)]
    with ExitStack() as stack:
        hosts = []
        for name in names:
            ip("netns", "add", name)
            stack.callback(ip, "netns", "delete", name)
            hosts.append(Host(name, stack.enter_context(tempfile.NamedTemporaryFile(suffix=".log"))))
        ip("link", "add", cable[0], "netns", names[0], "type", "veth", "peer", "name", cable[1], "netns", names[1])
        for name, end, address in zip(names, cable, ADDRESSES, strict=True):
            ip("-n", name, "address", "add", f"{address}/24", "dev", end)
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


def listening(host: Host) -> set[str]:
    """The addresses that anything in its namespace listens on."""
    found = subprocess.run(host.run("ss", "-ltnH"), capture_output=True, text=True, check=True).stdout
    return {line.split()[3].rpartition(":")[0] for line in found.splitlines()}


def engines(host: Host) -> list[int]:
    assert host.process is not None
    spawned = [pid for pid in family(host.process.pid) if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    assert spawned
    return spawned


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    path = tmp_path / "secret"
    path.touch(0o600)
    path.write_text(secrets.token_hex(32))
    return path


@pytest.mark.slow
def test_two_hosts_serve_together_and_end_together(hosts: list[Host], secret: Path) -> None:
    flags = ["--enable-expert-parallel", "--port", PORT]
    first, second = (host.start("serve", node_rank, secret, *flags) for node_rank, host in enumerate(hosts))
    wait_until(lambda: first.poll() is not None or "ready on http" in hosts[0].output(), "ready", 90)
    assert first.poll() is None, hosts[0].output() + hosts[1].output()

    # Two outputs, one from each rank.
    body = {"model": str(TINY_MOE), "prompt": "def main(", "max_tokens": 8, "n": 2, "seed": 1, "ignore_eos": True}
    answer = json.loads(ask(hosts[0], "/v1/completions", body))
    assert [choice["finish_reason"] for choice in answer["choices"]] == ["length", "length"]
    generated = parse_metrics(ask(hosts[0], "/metrics"))
    assert values(generated, "vllm:generation_tokens_total") == [8.0, 8.0]

    # Only the API is on loopback; everything else is on the network of --master-addr, and nothing on any other.
    assert listening(hosts[0]) == {"127.0.0.1", ADDRESSES[0]}
    assert listening(hosts[1]) == {ADDRESSES[1]}
    assert not any(secret.read_text() in host.output() for host in hosts)

    # Rank 1 is killed on the other host: both end, and host 0 says who it was.
    os.kill(engines(hosts[1])[0], signal.SIGKILL)
    wait_until(lambda: first.poll() is not None and second.poll() is not None, "both nodes end")
    assert first.poll() != 0
    assert second.poll() != 0
    assert "rank 1" in hosts[0].output().splitlines()[-1]


@pytest.mark.slow
def test_two_hosts_tune_together(hosts: list[Host], secret: Path, tmp_path: Path) -> None:
    out = tmp_path / "dbo.yaml"
    flags = ["--out", str(out), "--load-format", "dummy", "--dtype", "float32", "--modes", "decode", "--lanes", "2"]
    flags += ["--max-decode-tokens", "8", "--rounds", "1"]
    first, second = (host.start("tune", node_rank, secret, *flags) for node_rank, host in enumerate(hosts))
    wait_until(lambda: first.poll() is not None and second.poll() is not None, "both nodes end", 90)
    assert (first.poll(), second.poll()) == (0, 0), hosts[0].output() + hosts[1].output()
    assert "# ranks: 2, on 2 machines, experts shared" in out.read_text(encoding="utf-8")
    assert f"machine 0 ({ADDRESSES[0]}) writes {out}" in hosts[1].output()
