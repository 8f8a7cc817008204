"""Whom node 0's socket admits: only who has the cluster's secret, and no message that is too long."""

import asyncio
import logging
import os
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, closing, contextmanager

import pytest
import zmq
import zmq.asyncio
from zmq.auth.asyncio import AsyncioAuthenticator
from zmq.utils import z85

from serving.engine.wire.link import CurveGate, EngineLink, Seldom
from serving.engine.wire.messages import Failed, FromEngine, NodeAlive, Outputs, Refused, decode_from_engine
from serving.engine.wire.secret import ClusterSecret, CurveKeys
from serving.requests import EngineStatistics, RequestOutput
from ubatch import UBatchError

KEYS = ClusterSecret(b"s" * 32).curve("run")


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


@contextmanager
def linked(address: str, identity: str, keys: CurveKeys) -> Iterator[EngineLink]:
    """A link that loses what it has not sent."""
    with closing(EngineLink(address, identity, keys)) as link:
        link._socket.linger = 0
        yield link


async def hears_nothing(router: zmq.asyncio.Socket, seconds: float = 1.0) -> None:
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(router.recv_multipart(), seconds)


def with_keys(server_public: bytes, secret: bytes) -> Callable[[zmq.Socket[bytes]], None]:
    def dress(socket: zmq.Socket[bytes]) -> None:
        socket.curve_serverkey = server_public
        socket.curve_publickey, socket.curve_secretkey = zmq.curve_public(secret), secret

    return dress


@pytest.mark.long
async def test_strangers_are_not_heard_and_stop_nothing(caplog: pytest.LogCaptureFixture) -> None:
    strange = z85.encode(b"x" * 32)
    strangers: list[Callable[[zmq.Socket[bytes]], object]] = [
        lambda socket: None,  # plain
        with_keys(zmq.curve_public(strange), strange),
        with_keys(KEYS.server_public, strange),  # knows node 0's public key, and that alone is not enough
    ]
    caplog.set_level(logging.WARNING, "serving")
    async with guarded(KEYS) as (router, address):
        with ExitStack() as ends:
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
            link = ends.enter_context(closing(EngineLink(address, "node-1", KEYS)))
            link.send(NodeAlive(1))
            name, message = await asyncio.wait_for(router.recv_multipart(), 10)
            await router.send_multipart([b"node-1", b"back"])
            assert await asyncio.to_thread(link._socket.poll, 5000)
            assert link._socket.recv() == b"back"
            await hears_nothing(router, 0.5)
    assert (name, decode_from_engine(message)) == (b"node-1", NodeAlive(1))
    refused = [each.getMessage() for each in caplog.records if "refused" in each.getMessage()]
    assert len(refused) == 1, "now and then, not for each"


def test_a_node_talks_to_no_stranger_that_took_node_0s_place() -> None:
    """It sends nothing to who has not the key, and believes nothing."""
    strange = z85.encode(b"x" * 32)
    context = zmq.Context()
    router = context.socket(zmq.ROUTER)
    router.curve_server = True
    router.curve_publickey, router.curve_secretkey = zmq.curve_public(strange), strange
    port = router.bind_to_random_port("tcp://127.0.0.1")
    with linked(f"tcp://127.0.0.1:{port}", "node-1", KEYS) as link:
        link.send(NodeAlive(1))
        assert not router.poll(700)
    router.close(linger=0)
    context.term()


@pytest.mark.long
async def test_what_is_recorded_cannot_be_played_again() -> None:
    """A stranger in the middle hands on what node 1 sends, and then sends the same bytes anew."""
    recorded = bytearray()
    async with guarded(KEYS) as (router, address):
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
        link = EngineLink(f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}", "node-1", KEYS)
        link.send(NodeAlive(1))
        await asyncio.wait_for(router.recv_multipart(), 10)
        await asyncio.to_thread(link.close)
        assert b"NodeAlive" not in recorded, "it is encrypted"
        _, writer = await asyncio.open_connection(host, int(port))
        writer.write(bytes(recorded))
        await hears_nothing(router)
        writer.close()
        server.close()


async def test_of_a_message_that_node_0_would_not_take_the_longest_request_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And the engine goes on."""
    monkeypatch.setattr("serving.engine.wire.link.MOST_BYTES", 600)
    outputs = [RequestOutput(name, (1,) * (900 if name == "c" else 30)) for name in "abcdefgh"]
    async with guarded(KEYS) as (router, address):
        with linked(address, "rank-1", KEYS) as link:
            link.send(Outputs(1, 7, outputs, EngineStatistics(num_running=8)))
            with pytest.raises(UBatchError, match=r"Failed, has .* bytes for node 0, which takes 600"):
                link.send(Failed(1, "x" * 900))
            link.send(NodeAlive(1))
            came: list[FromEngine] = []
            while not came or came[-1] != NodeAlive(1):
                _, data = await asyncio.wait_for(router.recv_multipart(), 10)
                assert len(data) <= 600
                came.append(decode_from_engine(data))
    delivered = [each for message in came if isinstance(message, Outputs) for each in message.outputs]
    assert [each.request_id for each in delivered] == list("abdefgh")
    assert all(message.received == 7 for message in came if isinstance(message, Outputs))
    (refused,) = [message for message in came if isinstance(message, Refused)]
    assert (refused.rank, refused.request_id, refused.kind) == (1, "c", "RequestError")
    assert "takes 600 from another machine: ask for fewer log-probabilities" in refused.text


@pytest.mark.long
async def test_a_longer_message_than_node_0_takes_ends_its_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("serving.engine.wire.link.MOST_BYTES", 4096)
    async with guarded(KEYS) as (router, address):
        with linked(address, "rank-1", KEYS) as link:
            link._socket.send(b"x" * 4096)  # as long as the link sends
            assert await asyncio.wait_for(router.recv_multipart(), 10) == [b"rank-1", b"x" * 4096]
            link._socket.send(b"x" * 8192)
            await hears_nothing(router)


async def test_who_says_nothing_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """By itself zmq would wait for 30 s."""
    monkeypatch.setattr("serving.engine.wire.link._HANDSHAKE_MS", 300)
    async with guarded(KEYS) as (_, address):
        host, port = address.removeprefix("tcp://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        await asyncio.wait_for(reader.read(), 10)  # until the other end closes
        writer.close()


@pytest.mark.long
async def test_without_its_authenticator_node_0_lets_nobody_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AsyncioAuthenticator, "start", lambda self: None)
    async with guarded(KEYS) as (router, address):
        with linked(address, "node-1", KEYS) as link:
            link.send(NodeAlive(1))
            await hears_nothing(router)


def test_what_strangers_cause_is_logged_seldom(caplog: pytest.LogCaptureFixture) -> None:
    seldom = Seldom(logging.getLogger("serving.test"), "it happened")
    for _ in range(50):
        seldom.happened(by="somebody")
    assert [each.getMessage() for each in caplog.records] == ["it happened times=1 by=somebody"]
    seldom._said -= 60.0
    seldom.happened()
    assert caplog.records[-1].getMessage() == "it happened times=50"
