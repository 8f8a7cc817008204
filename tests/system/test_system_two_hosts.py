"""Two machines, one server or one measurement; if the link goes away, both end by themselves, and name the other one.

host 0   API and rank 0   10.83.7.1 --- 10.83.7.2   host 1   rank 1
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from network_namespaces import ip
from repository import TINY_MOE
from served import parse_metrics, values, wait_until
from two_hosts import ADDRESSES, MASTER_PORT, PORT, Host, ask, engines, make_secret, two_hosts

pytestmark = pytest.mark.server


@pytest.fixture
def hosts() -> Iterator[list[Host]]:
    with two_hosts() as made:
        yield made


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    return make_secret(tmp_path)


def listening(host: Host) -> set[str]:
    """The addresses that anything in its namespace listens on."""
    found = subprocess.run(host.run("ss", "-ltnH"), capture_output=True, text=True, check=True).stdout
    return {line.split()[3].rpartition(":")[0] for line in found.splitlines()}


@pytest.mark.slow
def test_two_hosts_serve_together_and_end_together(hosts: list[Host], secret: Path) -> None:
    flags = ["--enable-expert-parallel", "--port", PORT, "--max-engine-restarts", "0"]
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


# -- the link between them goes away -----------------------------------------------------------------------------------


TIMEOUT_S = 5
IPV6 = ("fd83::1", "fd83::2")
LOAD = f"""
import json, threading, urllib.request as u

body = {{"model": {str(TINY_MOE)!r}, "prompt": [1, 2, 3], "max_tokens": 400, "ignore_eos": True}}
url, headers = "http://127.0.0.1:{PORT}/v1/completions", {{"Content-Type": "application/json"}}
request = u.Request(url, json.dumps(body).encode(), headers)

def ask():
    for _ in range(100):
        u.build_opener(u.ProxyHandler({{}})).open(request, timeout=60).read()

for _ in range(4):
    threading.Thread(target=ask).start()
"""


def pull_out(hosts: list[Host]) -> None:
    ip("-n", hosts[1].name, "link", "set", hosts[1].cable, "down")


def swallow(hosts: list[Host]) -> None:
    """Send all packets to a machine that does not exist."""
    for host, other in zip(hosts, reversed(hosts), strict=True):
        to = ["lladdr", "02:00:00:00:00:99", "dev", host.cable, "nud", "permanent"]
        ip("-n", host.name, "neigh", "replace", other.address, *to)


def ready(hosts: list[Host]) -> bool:
    return "ready on http" in hosts[0].output() or any(host.process and host.process.poll() for host in hosts)


@pytest.mark.wide
@pytest.mark.parametrize(
    ("break_link", "when", "addresses"),
    [
        (pull_out, "under load", ADDRESSES),
        pytest.param(swallow, "at the start", ADDRESSES, marks=pytest.mark.slow),
        pytest.param(swallow, "under load", ADDRESSES, marks=pytest.mark.slow),
        pytest.param(pull_out, "while draining", ADDRESSES, marks=pytest.mark.slow),
        pytest.param(pull_out, "at the start", ADDRESSES, marks=pytest.mark.slow),
        pytest.param(pull_out, "idle", IPV6, marks=pytest.mark.slow),
    ],
)
def test_both_nodes_end_and_name_the_other(
    break_link: Callable[[list[Host]], None], when: str, addresses: tuple[str, str], secret: Path
) -> None:
    flags = ["--enable-expert-parallel", "--port", PORT, "--timeout-s", str(TIMEOUT_S), "--dtype", "float32"]
    with two_hosts(addresses) as hosts:
        nodes = [host.start("serve", node_rank, secret, *flags) for node_rank, host in enumerate(hosts)]
        load = None
        if when == "at the start":
            wait_until(lambda: bool(engines(hosts[1])), "node 1 has joined", 90)
        else:
            wait_until(lambda: ready(hosts), "ready", 90)
            assert "ready on http" in hosts[0].output(), "\n".join(host.output() for host in hosts)
            assert not is_reached(hosts[1], addresses[0]), "the store accepts strangers no more"
        if when in ("under load", "while draining"):
            load = subprocess.Popen(hosts[0].run(sys.executable, "-c", LOAD), stderr=subprocess.DEVNULL)
            time.sleep(0.7)
        if when == "while draining":
            nodes[0].send_signal(signal.SIGTERM)
            wait_until(lambda: "draining" in hosts[0].output(), "draining")
        break_link(hosts)
        begun = time.monotonic()
        try:
            wait_until(lambda: all(node.poll() is not None for node in nodes), "both nodes end", 60)
        finally:
            if load is not None:
                load.kill()
                load.wait()
        took_s = time.monotonic() - begun
        said = [host.output() for host in hosts]
        assert [node.returncode for node in nodes] == [1, 1], "\n".join(said)
        assert "node 1 cannot be reached" in said[0]
        assert re.search("node 1 (cannot be reached|has not joined)", said[0].splitlines()[-1])
        assert f"node 0 at {addresses[0]} cannot be reached" in said[1]
        assert took_s < 3 * TIMEOUT_S, f"{took_s:.1f} s"


def is_reached(host: Host, address: str) -> bool:
    """Whether a stranger on this host gets a connection to the store."""
    script = "import socket, sys; socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=1)"
    command = host.run(sys.executable, "-c", script, address, MASTER_PORT)
    return subprocess.run(command, stderr=subprocess.DEVNULL, check=False).returncode == 0
