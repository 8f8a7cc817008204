"""What an engine reads from its socket before a step."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
import zmq
import zmq.asyncio
from engine_mains import tiny, tokens_of

from model_runner import RequestError, SamplingParams
from serving.engine.client import EngineClient
from serving.engine.wire.link import EngineLink
from serving.engine.wire.messages import Abort, Add, Refused, ToEngine, decode_to_engine, encode


@contextmanager
def connected(folder: Path) -> Iterator[tuple[Callable[..., object], EngineLink]]:
    """What sends to an engine all at once, and the engine's end."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as client:
        client.bind(f"ipc://{folder}/client")
        with closing(EngineLink(f"ipc://{folder}/client", "rank-0")) as link:
            link.send(Abort("hello"))  # type: ignore[arg-type]
            client.recv_multipart()
            yield lambda *messages: client.send_multipart([b"rank-0", *map(encode, messages)]), link


def slowly(messages: Iterator[ToEngine]) -> list[str]:
    """Take messages in, at a millisecond each."""
    taken = []
    for message in messages:
        assert isinstance(message, Abort)
        taken.append(message.request_id)
        time.sleep(0.001)
    return taken


@pytest.mark.long
def test_a_flood_of_messages_is_taken_in_over_several_steps(tmp_path: Path) -> None:
    """Those that run must not wait until all of a large body's requests are read."""
    names = [str(number) for number in range(300)]
    with connected(tmp_path) as (send, link):
        for name in names:
            send(Abort(name))
        parts: list[list[str]] = []
        while sum(map(len, parts)) < 300:
            parts.append(slowly(link.receive(5.0)))
        assert 2 < len(parts) < 300
        assert [name for part in parts for name in part] == names
        assert list(link.receive()) == []
        for name in names:
            send(Abort(name))
        time.sleep(1.0)  # a long step
        assert len(slowly(link.receive())) > max(map(len, parts)), "what takes no longer than the step does not wait"


def test_what_was_sent_together_is_taken_together_where_no_step_waits(tmp_path: Path) -> None:
    """So that all prompts of an offline run are in the first step, and ranks that share experts begin alike."""
    with connected(tmp_path) as (send, link):
        taken: list[int] = []
        for wait_s in (5.0, 0.0):
            send(*(Abort(str(number)) for number in range(30)))
            time.sleep(0.05)
            link._received_at = time.monotonic()
            taken.append(len(slowly(link.receive(wait_s))))
        assert taken[0] == 30
        assert 0 < taken[1] < 30, "a step does not wait for all of them"
        assert taken[1] + len(slowly(link.receive(1.0))) == 30


async def test_a_request_that_is_refused_while_it_runs_is_aborted() -> None:
    """Its rank goes on with it otherwise, where only an output was too long for node 0."""
    client = EngineClient(tiny())
    client._runs.serves = True
    address = f"tcp://127.0.0.1:{client._runs.run.socket.bind_to_random_port('tcp://127.0.0.1')}"
    receiving = asyncio.create_task(client._runs.run.receive())
    context = zmq.asyncio.Context()
    rank = context.socket(zmq.DEALER)
    rank.setsockopt_string(zmq.IDENTITY, "rank-0")
    rank.connect(address)
    await rank.send(encode(Refused(0, "nobody", "RequestError", "no")))
    await asyncio.sleep(0.3)
    asked = asyncio.create_task(tokens_of(client, "a", [1, 2], SamplingParams()))
    assert isinstance(decode_to_engine(await asyncio.wait_for(rank.recv(), 10)), Add)
    await rank.send(encode(Refused(0, "a", "RequestError", "too long")))
    with pytest.raises(RequestError, match="too long"):
        await asked
    assert decode_to_engine(await asyncio.wait_for(rank.recv(), 10)) == Abort("a")
    assert client.num_outstanding == 0
    receiving.cancel()
    await client._end(0.0)
    rank.close(linger=0)
    context.term()
