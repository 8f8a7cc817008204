"""What engines listen on, and several nodes with a cluster secret: they serve as without, with strangers around."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import threading
from pathlib import Path

import psutil
import pytest
import torch.distributed as dist
import zmq
from engine_mains import started, tiny, tokens_of, two_nodes

from model_runner import SamplingParams
from ranks import free_port
from serving.engine import EngineClient
from serving.engine.wire.messages import Failed, NodeAlive, encode
from serving.engine.wire.rendezvous import Run, init_ranks

PROMPTS = {"a": [1, 2], "b": [5, 6, 7], "c": [9]}
SHORT = SamplingParams(max_tokens=4, ignore_eos=True)


_left: set[tuple[str, int]] = set()
"""What tests of other files have left behind in this process."""


def sockets(*processes: psutil.Process) -> set[tuple[str, int]]:
    """Addresses and ports on which these listen; by default this process, and all that it has started."""
    me = psutil.Process()
    return {
        (connection.laddr.ip, connection.laddr.port)
        for process in processes or (me, *me.children(recursive=True))
        for connection in process.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    }


def listening() -> set[str]:
    """The addresses on which they do since the tests here have begun."""
    return {address for address, _ in sockets() - _left}


@pytest.fixture(scope="module", autouse=True)
def _see_what_was_left() -> None:
    _left.update(sockets())


async def tokens(client: EngineClient) -> list[list[int]]:
    return await asyncio.gather(*[tokens_of(client, name, prompt, SHORT) for name, prompt in PROMPTS.items()])


@pytest.fixture(scope="module")
def without() -> tuple[list[list[int]], set[str]]:
    """What one node without a secret gives, and what it listens on."""

    async def scenario() -> tuple[list[list[int]], set[str]]:
        async with started(tiny(2, expert_parallel=True)) as client:
            return await tokens(client), listening()

    return asyncio.run(scenario())


def make_secret(path: Path) -> Path:
    path.touch(0o600)
    path.write_text(secrets.token_hex(32))
    return path


class Stranger:
    """Connects to all that this process listens on, and sends what would end the engines, until stopped."""

    def __init__(self) -> None:
        self.reached: set[tuple[str, int]] = set()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        context, opened = zmq.Context(), []
        ends = (Failed(1, "forged", name="ValueError", traceback="forged"), NodeAlive(7))
        while not self._stop.wait(0.1):
            found = sockets(psutil.Process())
            for host, port in found - self.reached:
                for name in ("rank-1", "node-1", "x"):
                    socket = context.socket(zmq.DEALER)
                    socket.linger = 0
                    socket.setsockopt_string(zmq.IDENTITY, name)
                    socket.connect(f"tcp://{host}:{port}")
                    for message in (*map(encode, ends), b"\xff", b""):
                        socket.send(message)
                    opened.append(socket)
            self.reached |= found
        context.destroy(linger=0)


def test_one_node_listens_on_loopback_only(without: tuple[list[list[int]], set[str]]) -> None:
    assert without[1] == {"127.0.0.1"}


@pytest.mark.usefixtures("no_interface")
def test_gloo_and_nccl_stay_on_loopback() -> None:
    """Also where the host's name resolves to another address, which gloo would take."""
    init_ranks(Run.open(dist.HashStore(), None), 0, tiny())
    dist.destroy_process_group()
    assert (os.environ["GLOO_SOCKET_IFNAME"], os.environ["NCCL_SOCKET_IFNAME"]) == ("lo", "=lo")


@pytest.mark.timeout(140)
async def test_two_nodes_with_a_secret_serve_as_one_without(
    without: tuple[list[list[int]], set[str]], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "serving")
    file = make_secret(tmp_path / "secret")
    secured = {"master_addr": "127.0.0.2", "cluster_secret_file": file, "expert_parallel": True}
    stranger = Stranger()
    try:
        async with two_nodes(**secured) as (client, node):
            for _ in range(2):
                assert await tokens(client) == without[0]
            assert listening() == {"127.0.0.1", "127.0.0.2"}  # gloo takes the first address of the interface
            assert len(stranger.reached) >= 2, "store and messages"
    finally:
        stranger.stop()
    assert await node == 0
    texts = [each.getMessage() for each in caplog.records]
    assert not [text for text in texts if "not authenticated" in text]
    assert len([text for text in texts if "must be private" in text]) == 1
    assert len([text for text in texts if "connections refused" in text]) <= 2
    assert file.read_text() not in "".join(texts)


async def test_without_a_secret_one_warning_says_so(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "serving")
    options = tiny(2, nnodes=2, master_port=free_port())
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(EngineClient.start(options), 1.0)

    warnings = [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING]
    assert len(warnings) == 1
    assert "not authenticated" in warnings[0]
