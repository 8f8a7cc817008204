"""Two machines, one server or one measurement.

host 0   API and rank 0   10.83.7.1 --- 10.83.7.2   host 1   rank 1
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from repository import TINY_MOE
from served import parse_metrics, values, wait_until
from two_hosts import ADDRESSES, PORT, Host, ask, engines, make_secret, two_hosts

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
