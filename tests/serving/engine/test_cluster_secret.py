"""The cluster's secret: its file, the keys made of it, and what it keeps out."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import os
import pickle
import secrets
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager, closing
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist
import zmq
import zmq.asyncio
from repository import TINY_MOE
from zmq.utils import z85

from serving.engine import EngineOptions
from serving.engine.wire.gate import CurveGate, Seldom
from serving.engine.wire.link import EngineLink
from serving.engine.wire.messages import Failed, FromEngine, NodeAlive, Outputs, Refused, decode_from_engine
from serving.engine.wire.rendezvous import Run, announce_network, check_node, join_run, post_node
from serving.engine.wire.secret import ClusterSecret, CurveKeys, read_secret
from serving.engine.wire.signed_store import SignedStore
from serving.network import listening_store
from serving.options import describe_settings, read_serve_command
from serving.requests import EngineStatistics, RequestOutput
from ubatch import ConfigError, ForgedValue, UBatchError
from ubatch.process.job_store import JobStore

TIMEOUT = timedelta(seconds=5)
TWO_NODES = ("--nnodes", "2", "--data-parallel-size", "2", "--master-addr", "127.0.0.1", "--master-port", "29500")


def make(path: Path, contents: bytes | None = None, mode: int = 0o600) -> Path:
    path.write_bytes(secrets.token_hex(32).encode() + b"\n" if contents is None else contents)
    path.chmod(mode)
    return path


def two_nodes(secret: Path | None, node_rank: int = 0) -> EngineOptions:
    return EngineOptions(
        TINY_MOE, data_parallel_size=2, nnodes=2, node_rank=node_rank, master_port=1, cluster_secret_file=secret
    )


# --------------------------------------------------------------------------------------------------------- the file


def a_pipe(path: Path) -> None:
    os.mkfifo(path, 0o600)


WRONG_FILES: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (lambda path: None, r"cannot be read \(No such file"),
    "a folder": (Path.mkdir, "is no regular file"),
    "a pipe": (a_pipe, "is no regular file"),
    "empty": (lambda path: make(path, b""), "holds nothing; a secret has at least 32"),
    "blank": (lambda path: make(path, b" \n" * 40), "holds nothing"),
    "short": (lambda path: make(path, bytes(range(64, 95))), "holds 31 bytes"),
    "short, and lines": (lambda path: make(path, b"a" + b"\n" * 60), "holds 1 bytes before the white space"),
    "one letter": (lambda path: make(path, b"a" * 40), "holds 1 different bytes only"),
    "seven letters": (lambda path: make(path, b"abcdefg" * 9 + b"\n"), "holds 7 different bytes only"),
    "a letter behind lines": (lambda path: make(path, b"\n" * 60 + b"a"), "holds 2 different bytes only"),
    "too long": (lambda path: make(path, b"x" * 5000), "more than 4096 bytes"),
    "read by the group": (lambda path: make(path, mode=0o640), r"mode 0640\). Run: chmod 600"),
    "read by all": (lambda path: make(path, mode=0o604), r"mode 0604"),
    "written by all": (lambda path: make(path, mode=0o602), r"mode 0602"),
}


@pytest.mark.parametrize(("prepare", "why"), WRONG_FILES.values(), ids=WRONG_FILES)
def test_a_file_that_is_no_secret_is_refused(prepare: Callable[[Path], object], why: str, tmp_path: Path) -> None:
    path = tmp_path / "secret"
    prepare(path)
    with pytest.raises(ConfigError, match=why):
        read_secret(path)
    flags = [*TWO_NODES, "--cluster-secret-file", str(path)]
    with pytest.raises(ConfigError, match=f"^--cluster-secret-file {path}: .*{why}"):
        read_serve_command("ubatch serve", "", [str(TINY_MOE), *flags])


def test_settings_that_do_not_go_together(tmp_path: Path) -> None:
    path = str(make(tmp_path / "secret"))
    with pytest.raises(ConfigError, match="--cluster-secret-file needs --nnodes 2 or more"):
        read_serve_command("ubatch serve", "", [str(TINY_MOE), "--cluster-secret-file", path])
    for address in ("0.0.0.0", "0"):
        flags = [*TWO_NODES, "--master-addr", address]
        with pytest.raises(ConfigError, match="is every address of a machine"):
            read_serve_command("ubatch serve", "", [str(TINY_MOE), *flags])
        with pytest.raises(ConfigError, match="is every address of this machine"):
            listening_store(address, 0, TIMEOUT)


def test_the_secret_is_shown_nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make(tmp_path / "secret")
    text = path.read_text().strip()
    command = read_serve_command("ubatch serve", "", [str(TINY_MOE), *TWO_NODES, "--cluster-secret-file", str(path)])
    assert command.engine.cluster_secret_file == path
    assert f"cluster-secret-file: {path}" in describe_settings(command.settings).replace('"', "")
    secret = read_secret(path)
    assert secret is not None
    curve = secret.curve("run")
    for shown in (repr(secret), str(secret), repr(curve), repr(command.engine), describe_settings(command.settings)):
        assert text not in shown
        assert curve.server_secret.decode() not in shown
    assert text.encode() not in pickle.dumps(command.engine)  # what the ranks' processes are sent
    with pytest.raises(TypeError, match="reads the file by itself"):
        pickle.dumps(secret)
    monkeypatch.setattr(zmq, "has", lambda capability: False)
    with pytest.raises(ConfigError, match="needs CURVE, and this libzmq was built without it"):
        secret.curve("run")


def test_white_space_at_its_end_is_none_of_the_secret(tmp_path: Path) -> None:
    text = secrets.token_hex(32).encode()
    found = [read_secret(make(tmp_path / "secret", text + end)) for end in (b"", b"\n", b"\r\n", b" \n\n")]
    assert len({secret.key("x") for secret in found if secret is not None}) == 1
    other = read_secret(make(tmp_path / "secret", b" " + text))
    assert other is not None
    assert found[0] is not None
    assert other.key("x") != found[0].key("x")


# --------------------------------------------------------------------------------------------------------- the keys


def test_keys_are_the_same_from_the_same_secret_only() -> None:
    one, again, other = ClusterSecret(b"s" * 32), ClusterSecret(b"s" * 32), ClusterSecret(b"t" * 32)
    assert one.key("a", "run") == again.key("a", "run")
    keys = [one.key("a", "run"), one.key("b", "run"), one.key("a", "run 2"), one.key("a"), other.key("a", "run")]
    assert len(set(keys)) == len(keys)
    assert {len(key) for key in keys} == {32}
    curves = [one.curve("run"), one.curve("run 2"), other.curve("run")]
    assert len({key for curve in curves for key in (curve.server_secret, curve.client_secret)}) == 6
    assert vars(one.curve("run")) == vars(again.curve("run"))
    assert zmq.curve_public(curves[0].server_secret) == curves[0].server_public


def test_keys_are_those_of_rfc_5869() -> None:
    """Its test case 1 begins so; ours has another `info`, so only the first half, the extraction, can be compared."""
    extracted = hmac.digest(bytes(range(13)), b"\x0b" * 22, hashlib.sha256)
    assert extracted.hex().startswith("077709362c2e32df0ddc3f0dc47bba63")
    assert hmac.digest(extracted, bytes(range(0xF0, 0xFA)) + b"\x01", hashlib.sha256).hex().startswith("3cb25f25faacd5")
    own = ClusterSecret(b"\x0b" * 22).key("x", bytes(range(13)).decode())
    assert own == hmac.digest(extracted, b"ubatch x\x01", hashlib.sha256)


# ------------------------------------------------------------------------------------------------------ the meeting


PAIRS = {"another": (1, 2), "only node 0": (1, 0), "only node 1": (0, 1)}


@pytest.mark.parametrize(("here", "there"), PAIRS.values(), ids=PAIRS)
def test_nodes_of_different_secrets_both_say_so(here: int, there: int, tmp_path: Path) -> None:
    files = [None, make(tmp_path / "1"), make(tmp_path / "2")]
    store = dist.HashStore()
    secret = read_secret(files[here])
    Run.open(store, secret).post_client_address("tcp://127.0.0.1:5", two_nodes(None))
    post_node(store, two_nodes(files[there], 1))
    with pytest.raises(ConfigError, match=r"^node 0 and node 1 do not have the same cluster secret.*'nodes/1'"):
        check_node(store, secret, two_nodes(None), 1)
    with pytest.raises(ConfigError, match=r"^node 1 and node 0 do not have the same cluster secret.*'client'"):
        join_run(store, two_nodes(files[there], 1))


@pytest.mark.parametrize("signed", [True, False])
def test_nodes_of_one_secret_meet(signed: bool, tmp_path: Path) -> None:
    path = make(tmp_path / "secret") if signed else None
    store = dist.HashStore()
    secret = read_secret(path)
    first = Run.open(store, secret)
    first.post_client_address("tcp://127.0.0.1:5", two_nodes(None))
    assert not check_node(store, secret, two_nodes(None), 1)
    post_node(store, two_nodes(path, 1))
    assert check_node(store, secret, two_nodes(None), 1)
    other, _ = join_run(store, two_nodes(path, 1))
    assert other.address == "tcp://127.0.0.1:5"
    other.said.set("turns/1", "tcp://127.0.0.1:6")
    assert first.said.get("turns/1") == "tcp://127.0.0.1:6"
    assert (first.curve is not None) == signed
    assert first.key("ranks/0") == other.key("ranks/0")

    # What an earlier run said, under the same name and with the same secret, counts for nothing in the next one.
    later = Run.open(store, secret)
    if signed:
        assert later.key("ranks/0") != first.key("ranks/0") != first.key("ranks/1")
        with pytest.raises(ForgedValue, match="'turns/1'"):
            later.said.get("turns/1")


def test_a_node_0_that_does_not_begin_is_named() -> None:
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=0.1))
    with pytest.raises(UBatchError, match=r"^node 0 at 127\.0\.0\.1 has not begun its run .*--node-rank 0"):
        join_run(store, two_nodes(None, 1))
    store, listener = listening_store("127.0.0.1", 0, timedelta(seconds=0.1))
    with listener, pytest.raises(UBatchError, match=r"^node 0 at 127\.0\.0\.1 has not begun its run .*--node-rank 0"):
        join_run(store, two_nodes(None, 1))


def test_what_gloo_keeps_is_signed() -> None:
    """A stranger's address in the place of a rank's would lead its peers to the stranger."""
    raw, address = dist.HashStore(), bytes(range(256))
    store = SignedStore(JobStore(raw, b"k" * 32), timedelta(seconds=0.1))
    within = dist.PrefixStore("group", store)  # C++ calls the methods of the class in Python
    within.set("address", address)
    within.wait(["address"])
    assert within.get("address") == address
    with pytest.raises(dist.DistStoreError, match="nobody has written group/other"):
        within.wait(["other"])
    raw.set("group/address", "a stranger's")
    with pytest.raises(ForgedValue, match="carries no keyed hash"):
        within.get("address")


def test_counters_are_signed() -> None:
    raw = dist.HashStore()
    one, other = JobStore(raw, b"k" * 32), JobStore(raw, b"k" * 32)
    assert [one.add("count", 1), other.add("count", 2)] == [1, 3]
    value = raw.get("count")
    assert one.add("count", 0) == 3
    assert raw.get("count") == value, "to read it is not to write it: all waiting ranks read"
    raw.set("count", "0")
    with pytest.raises(ForgedValue, match="'count' in the rendezvous store carries no keyed hash"):
        other.add("count", 1)


def test_one_line_says_what_protects_the_network(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "serving")
    announce_network(EngineOptions(TINY_MOE))
    assert not caplog.records
    announce_network(two_nodes(None))
    (warning,) = caplog.records
    assert warning.levelno == logging.WARNING
    assert "not authenticated" in warning.getMessage()
    assert warning.getMessage().endswith("what we write to the store are authenticated")
    caplog.clear()
    announce_network(two_nodes(make(tmp_path / "secret")))
    (line,) = caplog.records
    assert line.levelno == logging.INFO
    assert "gloo and NCCL cannot authenticate, so the network of 127.0.0.1 must be private" in line.getMessage()


# --------------------------------------------------------------------------------------------------------- the gate


@asynccontextmanager
async def guarded(keys: CurveKeys) -> AsyncIterator[tuple[zmq.asyncio.Socket, str]]:
    """A socket as node 0 has it, and its address."""
    context = zmq.asyncio.Context()
    router = context.socket(zmq.ROUTER)
    gate = CurveGate(context, router, keys)
    try:
        port = router.bind_to_random_port("tcp://127.0.0.1")
        yield router, f"tcp://127.0.0.1:{port}"
    finally:
        gate.close()
        router.close(linger=0)
        context.term()


def with_keys(server_public: bytes, secret: bytes) -> Callable[[zmq.Socket[bytes]], None]:
    def dress(socket: zmq.Socket[bytes]) -> None:
        socket.curve_serverkey = server_public
        socket.curve_publickey, socket.curve_secretkey = zmq.curve_public(secret), secret

    return dress


def test_strangers_are_not_heard_and_stop_nothing(caplog: pytest.LogCaptureFixture) -> None:
    keys = ClusterSecret(b"s" * 32).curve("run")
    strange = z85.encode(b"x" * 32)
    strangers: list[Callable[[zmq.Socket[bytes]], object]] = [
        lambda socket: None,  # plain
        with_keys(zmq.curve_public(strange), strange),
        with_keys(keys.server_public, strange),  # knows node 0's public key, and that alone is not enough
    ]
    caplog.set_level(logging.WARNING, "serving")

    async def scenario() -> list[list[bytes]]:
        async with guarded(keys) as (router, address):
            context = ends.enter_context(zmq.Context())
            for dress in strangers:
                socket_ = ends.enter_context(context.socket(zmq.DEALER))
                socket_.linger = 0
                socket_.setsockopt(zmq.IDENTITY, b"node-1")  # somebody else's name
                dress(socket_)
                socket_.connect(address)
                for _ in range(20):
                    socket_.send(b"evil", zmq.NOBLOCK)
            host, port = address.removeprefix("tcp://").split(":")
            for garbage in (os.urandom(4096), b"\xff" + b"\0" * 63, b"GET / HTTP/1.1\r\n\r\n"):
                with socket.create_connection((host, int(port))) as raw:
                    raw.sendall(garbage)
            await asyncio.sleep(1.0)
            link = ends.enter_context(closing(EngineLink(address, "node-1", keys)))
            link.send(NodeAlive(1))
            came = [await asyncio.wait_for(router.recv_multipart(), 10)]
            await router.send_multipart([b"node-1", b"back"])
            assert await asyncio.to_thread(link._socket.poll, 5000)
            assert link._socket.recv() == b"back"
            with pytest.raises(TimeoutError):
                came.append(await asyncio.wait_for(router.recv_multipart(), 0.5))
        return came

    with ExitStack() as ends:
        came = asyncio.run(scenario())
    ((name, message),) = came
    assert (name, decode_from_engine(message)) == (b"node-1", NodeAlive(1))
    refused = [each.getMessage() for each in caplog.records if "refused" in each.getMessage()]
    assert len(refused) == 1, "now and then, not for each"


def test_a_node_talks_to_no_stranger_that_took_node_0s_place() -> None:
    """It sends nothing to who has not the key, and believes nothing."""
    keys, strange = ClusterSecret(b"s" * 32).curve("run"), z85.encode(b"x" * 32)
    context = zmq.Context()
    router = context.socket(zmq.ROUTER)
    router.curve_server = True
    router.curve_publickey, router.curve_secretkey = zmq.curve_public(strange), strange
    port = router.bind_to_random_port("tcp://127.0.0.1")
    link = EngineLink(f"tcp://127.0.0.1:{port}", "node-1", keys)
    link._socket.linger = 0
    link.send(NodeAlive(1))
    assert not router.poll(700)
    link.close()
    router.close(linger=0)
    context.term()


def test_what_is_recorded_cannot_be_played_again() -> None:
    """A stranger in the middle hands on what node 1 sends, and then sends the same bytes anew."""
    keys = ClusterSecret(b"s" * 32).curve("run")

    async def scenario() -> None:
        recorded = bytearray()
        async with guarded(keys) as (router, address):
            host, port = address.removeprefix("tcp://").split(":")

            async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, keep: bool) -> None:
                while data := await reader.read(65536):
                    if keep:
                        recorded.extend(data)
                    writer.write(data)
                writer.close()

            async def middle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                there = await asyncio.open_connection(host, int(port))
                await asyncio.gather(pump(reader, there[1], True), pump(there[0], writer, False))

            server = await asyncio.start_server(middle, "127.0.0.1", 0)
            link = EngineLink(f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}", "node-1", keys)
            link.send(NodeAlive(1))
            await asyncio.wait_for(router.recv_multipart(), 10)
            await asyncio.to_thread(link.close)
            assert b"NodeAlive" not in recorded, "it is encrypted"
            _, writer = await asyncio.open_connection(host, int(port))
            writer.write(bytes(recorded))
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(router.recv_multipart(), 1.0)
            writer.close()
            server.close()

    asyncio.run(scenario())


def test_of_a_message_that_node_0_would_not_take_the_longest_request_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And the engine goes on."""
    monkeypatch.setattr("serving.engine.wire.link.MOST_BYTES", 600)
    keys = ClusterSecret(b"s" * 32).curve("run")
    outputs = [RequestOutput(name, (1,) * (900 if name == "c" else 30)) for name in "abcdefgh"]

    async def scenario() -> list[FromEngine]:
        async with guarded(keys) as (router, address):
            with closing(EngineLink(address, "rank-1", keys)) as link:
                link._socket.linger = 0
                link.send(Outputs(1, 7, outputs, EngineStatistics(num_running=8)))
                with pytest.raises(UBatchError, match=r"Failed, has .* bytes for node 0, which takes 600"):
                    link.send(Failed(1, "", "", "x" * 900, "", False))
                link.send(NodeAlive(1))
                came: list[FromEngine] = []
                while not came or came[-1] != NodeAlive(1):
                    _, data = await asyncio.wait_for(router.recv_multipart(), 10)
                    assert len(data) <= 600
                    came.append(decode_from_engine(data))
        return came

    came = asyncio.run(scenario())
    delivered = [each for message in came if isinstance(message, Outputs) for each in message.outputs]
    assert [each.request_id for each in delivered] == list("abdefgh")
    assert all(message.received == 7 for message in came if isinstance(message, Outputs))
    (refused,) = [message for message in came if isinstance(message, Refused)]
    assert (refused.rank, refused.request_id, refused.kind) == (1, "c", "RequestError")
    assert "takes 600 from another machine: ask for fewer log-probabilities" in refused.text


def test_a_longer_message_than_node_0_takes_ends_its_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("serving.engine.wire.gate.MOST_BYTES", 4096)
    keys = ClusterSecret(b"s" * 32).curve("run")

    async def scenario() -> None:
        async with guarded(keys) as (router, address):
            with closing(EngineLink(address, "rank-1", keys)) as link:
                link._socket.linger = 0
                link._socket.send(b"x" * 4096)  # as long as the link sends
                assert await asyncio.wait_for(router.recv_multipart(), 10) == [b"rank-1", b"x" * 4096]
                link._socket.send(b"x" * 8192)
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(router.recv_multipart(), 1.0)

    asyncio.run(scenario())


def test_who_says_nothing_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """By itself zmq would wait for 30 s."""
    monkeypatch.setattr("serving.engine.wire.gate._HANDSHAKE_MS", 300)

    async def scenario() -> None:
        async with guarded(ClusterSecret(b"s" * 32).curve("run")) as (_, address):
            host, port = address.removeprefix("tcp://").split(":")
            reader, writer = await asyncio.open_connection(host, int(port))
            await asyncio.wait_for(reader.read(), 10)  # until the other end closes
            writer.close()

    asyncio.run(scenario())


def test_without_its_authenticator_node_0_lets_nobody_in() -> None:
    keys = ClusterSecret(b"s" * 32).curve("run")

    async def scenario() -> None:
        context = zmq.asyncio.Context()
        router = context.socket(zmq.ROUTER)
        gate = CurveGate(context, router, keys)
        gate._authenticator.stop()
        port = router.bind_to_random_port("tcp://127.0.0.1")
        link = EngineLink(f"tcp://127.0.0.1:{port}", "node-1", keys)
        link._socket.linger = 0
        link.send(NodeAlive(1))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(router.recv_multipart(), 1.0)
        link.close()
        gate.close()
        router.close(linger=0)
        context.term()

    asyncio.run(scenario())


def test_what_strangers_cause_is_logged_seldom(caplog: pytest.LogCaptureFixture) -> None:
    seldom = Seldom(logging.getLogger("serving.test"), "it happened", every_s=0.2)
    for _ in range(50):
        seldom.happened(by="somebody")
    assert [each.getMessage() for each in caplog.records] == ["it happened times=1 by=somebody"]
    seldom._said -= 1
    seldom.happened()
    assert caplog.records[-1].getMessage() == "it happened times=50"
