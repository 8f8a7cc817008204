"""Which addresses gloo and NCCL listen on: the network of --master-addr, loopback on one machine, or an error.

What engines listen on; several nodes with a cluster secret, which serve as without, with strangers around; and what
another user of the machine can do to a run: connect to nothing but the API, read nothing, write nothing.
"""

import asyncio
import json
import logging
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch.distributed as dist
import zmq
from engine_mains import secret_file, started, tiny, tokens_of, two_nodes
from network_namespaces import ip, why_not

from model_runner import SamplingParams
from ranks import free_port
from serving import network
from serving.engine import EngineClient
from serving.engine.rank import listeners
from serving.engine.rank.listeners import refuse_strangers
from serving.engine.wire.messages import Failed, NodeAlive, encode
from serving.engine.wire.rendezvous import Run, init_ranks
from serving.network import choose_interface, warn_of_loopback
from ubatch import ConfigError

# -- addresses ---------------------------------------------------------------------------------------------------------


VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def levels(caplog: pytest.LogCaptureFixture) -> list[int]:
    return [each.levelno for each in caplog.records if each.name.startswith("serving")]


@pytest.mark.usefixtures("no_interface")
def test_an_empty_variable_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.setenv(name, "")
    choose_interface("127.0.0.1")
    assert [os.environ[name] for name in VARIABLES] == ["lo", "=lo"]
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    dist.destroy_process_group()


@pytest.mark.usefixtures("no_interface")
@pytest.mark.parametrize(
    ("chosen", "several", "level"),
    [
        ("lo", False, logging.INFO),
        ("eth7", False, logging.WARNING),
        ("lo,eth7", False, logging.WARNING),
        ("eth7", True, logging.INFO),
    ],
)
def test_who_takes_one_machine_off_loopback_is_told(
    chosen: str, several: bool, level: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "serving")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", chosen)
    choose_interface("127.0.0.1", several=several)
    assert [os.environ[name] for name in VARIABLES] == [chosen, "=lo"], "each variable is a choice of its own"
    assert levels(caplog) == [level]


def test_a_variable_of_nccl_that_nobody_reads_is_no_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in VARIABLES:
        monkeypatch.setenv(name, {"NCCL_SOCKET_IFNAME": "=eth7"}.get(name, "lo"))
    for has_gpu, level in ((False, logging.INFO), (True, logging.WARNING)):
        caplog.clear()
        caplog.set_level(logging.INFO, "serving")
        monkeypatch.setattr("torch.cuda.is_available", lambda has_gpu=has_gpu: has_gpu)
        choose_interface("127.0.0.1")
        assert levels(caplog) == [logging.INFO, level]


@pytest.mark.usefixtures("no_interface")
def test_an_unknown_interface_is_an_error_only_with_several_machines(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(network, "_interfaces", list)
    with pytest.raises(ConfigError, match="Set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME"):
        choose_interface("127.0.0.1", several=True)
    with pytest.raises(ConfigError, match=r"no network interface leads to master_addr no-such-host\.invalid"):
        choose_interface("no-such-host.invalid", several=True)
    choose_interface("127.0.0.1")
    assert levels(caplog) == [logging.WARNING]
    assert not set(VARIABLES) & set(os.environ)


def test_a_name_that_is_loopback_is_told_at_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(network, "numeric_address", {"own": "127.0.1.1", "other": "10.1.2.3"}.__getitem__)
    for host in ("127.0.0.1", "127.0.0.2", "10.1.2.3", "other"):
        warn_of_loopback(host)
    assert not caplog.records
    warn_of_loopback("own")
    assert levels(caplog) == [logging.WARNING]
    assert "own is 127.0.1.1 on this machine" in caplog.records[0].getMessage()


SCRIPT = """
import os, sys
import psutil
import torch.distributed as dist
from serving.network import choose_interface
from ubatch import ConfigError
for address in sys.argv[1:]:
    os.environ.pop("GLOO_SOCKET_IFNAME", None)
    os.environ.pop("NCCL_SOCKET_IFNAME", None)
    try:
        choose_interface(address, several=True)
    except ConfigError as error:
        print(address, "|", error)
        continue
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    found = {each.laddr.ip for each in psutil.Process().net_connections("inet") if each.status == psutil.CONN_LISTEN}
    print(address, "|", *found)
    dist.destroy_process_group()
"""


@pytest.fixture
def namespace() -> Iterator[str]:
    """One interface with addresses of three networks; those of one have a label."""
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    name = f"ubatch-addresses-{os.getpid()}"
    ip("netns", "add", name)
    try:
        ip("-n", name, "link", "add", "u0", "type", "veth", "peer", "name", "u1")
        addresses = (["10.91.1.1/24"], ["10.92.1.1/24"], ["10.93.1.1/24", "label", "u0:1"], ["10.91.1.7/24"])
        for address, *label in addresses:
            ip("-n", name, "address", "add", address, "dev", "u0", *label)
        for interface in ("lo", "u0", "u1"):
            ip("-n", name, "link", "set", interface, "up")
        yield name
    finally:
        ip("netns", "delete", name)


@pytest.mark.slow
def test_gloo_listens_on_the_network_of_node_0_or_not_at_all(namespace: str) -> None:
    hosts = ("10.91.1.1", "10.91.1.7", "10.91.1.9", "10.92.1.1", "10.92.1.9", "10.93.1.1", "10.93.1.9", "10.99.1.1")
    command = ["ip", "netns", "exec", namespace, sys.executable, "-c", SCRIPT, *hosts]
    ran = subprocess.run(command, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}, capture_output=True)
    told = dict(line.split(" | ") for line in ran.stdout.decode().splitlines())
    assert set(told) == set(hosts), ran.stderr.decode()
    for host in hosts[:3]:
        assert told[host] == "10.91.1.1"
    for host in hosts[3:5]:
        assert "u0 has 10.91.1.1 before it, in another network. Give 10.92.1.1 an interface of its own" in told[host]
    for host in hosts[5:7]:
        assert told[host] == "10.93.1.1"
    assert told["10.99.1.1"].startswith("no network interface leads to master_addr 10.99.1.1")


# -- strangers ---------------------------------------------------------------------------------------------------------


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
    file = secret_file(tmp_path / "secret")
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


# -- another user of the machine ---------------------------------------------------------------------------------------


NOBODY = 65534
CONNECTIONS = 300

STRANGER = """
import encodings.idna, json, os, socket, sys
from pathlib import Path

os.setgroups([])
os.setgid(65534)
os.setuid(65534)
ports, folder, many = json.loads(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
open_, told = [], {"uid": os.geteuid(), "connected": 0, "read": [], "written": []}
for host, port in ports:
    for _ in range(many):
        try:
            open_.append(socket.create_connection((host, port), timeout=0.1))
            told["connected"] += 1
        except OSError:
            break
try:
    told["read"] = os.listdir(folder)
except OSError:
    pass
for name in ("store/client", "client", "turns-1", "store/ranks%2F0.part/failed"):
    try:
        (folder / name).write_text("127.0.0.1:1")
        told["written"].append(name)
    except OSError:
        pass
    with socket.socket(socket.AF_UNIX) as end:
        try:
            end.connect(str(folder / name))
            told["connected"] += 1
        except OSError:
            pass
print(json.dumps(told), flush=True)
sys.stdin.read()
"""


def as_nobody(*args: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", STRANGER, *args], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd="/"
    )


def told_by(stranger: subprocess.Popen[str]) -> dict[str, Any]:
    told: dict[str, Any] = json.loads(stranger.stdout.readline())
    assert told["uid"] == NOBODY
    return told


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root may run a process as another user")


def descriptors(client: EngineClient) -> dict[int, int]:
    return {rank: psutil.Process(pid).num_fds() for rank, pid in client.pids.items()}


@needs_root
@pytest.mark.wide
async def test_another_user_reaches_nothing_of_a_run() -> None:
    before = sockets()
    async with started(tiny(2, expert_parallel=True)) as client:
        expected = [await tokens_of(client, name, prompt, SHORT) for name, prompt in PROMPTS.items()]
        ports, held = sorted(sockets() - before), descriptors(client)
        assert ports, "gloo listens"
        stranger = as_nobody(json.dumps(ports), str(client._runs.run.host._folder.path), str(CONNECTIONS))
        try:
            told = await asyncio.to_thread(told_by, stranger)
            assert (told["connected"], told["read"], told["written"]) == (0, [], [])
            assert descriptors(client) == held
            tokens = [await tokens_of(client, f"{name} again", prompt, SHORT) for name, prompt in PROMPTS.items()]
            assert tokens == expected
        finally:
            stranger.communicate("")


@needs_root
@pytest.mark.parametrize("accepted", ["before", "while the ports are closed to strangers"])
def test_a_strangers_connection_that_came_during_the_start_is_ended(
    accepted: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shown with a listening socket of this process. gloo keeps such connections for good."""
    strangers: list[socket.socket] = []

    def accept_and_admit_no_more(each: socket.socket) -> None:
        if not strangers and each.getsockname() == listener.getsockname():
            strangers.append(listener.accept()[0])
        network.admit_no_more(each)

    monkeypatch.setattr(listeners, "admit_no_more", accept_and_admit_no_more)
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname()) as own,
        listener.accept()[0] as taken,
    ):
        stranger = as_nobody(json.dumps([listener.getsockname()]), str(tmp_path), "1")
        try:
            assert told_by(stranger)["connected"] == 1
            if accepted == "before":
                strangers.append(listener.accept()[0])
            refuse_strangers()
            with strangers[0] as strange:
                strange.settimeout(5)
                assert strange.recv(1) == b"", "it was ended"
            own.sendall(b"x")
            assert taken.recv(1) == b"x", "this user's is not"
            with pytest.raises(TimeoutError):
                socket.create_connection(listener.getsockname(), timeout=0.2)
        finally:
            stranger.communicate("")
