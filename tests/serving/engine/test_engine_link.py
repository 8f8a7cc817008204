"""What an engine reads from its socket before a step."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest
import zmq
import zmq.asyncio
from engine_mains import tiny, tokens_of

from model_runner import RequestError, SamplingParams
from serving.engine.client import EngineClient
from serving.engine.wire.link import EngineLink
from serving.engine.wire.messages import Abort, Add, Refused, decode_to_engine, encode


def test_a_flood_of_messages_is_taken_in_over_several_steps(tmp_path: Path) -> None:
    """Those that run must not wait until all of a large body's requests are read."""
    address = f"ipc://{tmp_path}/client"
    with zmq.Context() as context, context.socket(zmq.ROUTER) as client:
        client.setsockopt(zmq.ROUTER_MANDATORY, 1)
        client.bind(address)
        link = EngineLink(address, "rank-0")
        link.send(Abort("hello"))  # type: ignore[arg-type]
        client.recv_multipart()
        for number in range(300):
            client.send_multipart([b"rank-0", encode(Abort(str(number)))])
        parts: list[list[str]] = []
        while sum(map(len, parts)) < 300:
            parts.append([])
            for message in link.receive(5.0):
                assert isinstance(message, Abort)
                parts[-1].append(message.request_id)
                time.sleep(0.001)  # to take it in
        assert 2 < len(parts) < 300
        assert [name for part in parts for name in part] == [str(number) for number in range(300)]
        assert list(link.receive()) == []
        for number in range(300):
            client.send_multipart([b"rank-0", encode(Abort(str(number)))])
        time.sleep(1.0)  # a long step
        taken = 0
        for _ in link.receive():
            taken += 1
            time.sleep(0.001)
        assert taken > max(map(len, parts)), "what takes no longer than the step does not wait"
        link.close()


def test_what_was_sent_together_is_taken_together_where_no_step_waits(tmp_path: Path) -> None:
    """So that all prompts of an offline run are in the first step, and ranks that share experts begin alike."""
    address = f"ipc://{tmp_path}/client"
    with zmq.Context() as context, context.socket(zmq.ROUTER) as client:
        client.bind(address)
        link = EngineLink(address, "rank-0")
        link.send(Abort("hello"))  # type: ignore[arg-type]
        client.recv_multipart()
        together = [encode(Abort(str(number))) for number in range(30)]
        taken: list[int] = []
        for wait_s in (5.0, 0.0):
            client.send_multipart([b"rank-0", *together])
            time.sleep(0.05)
            link._received_at = time.monotonic()
            taken.append(0)
            for _ in link.receive(wait_s):
                taken[-1] += 1
                time.sleep(0.001)
        assert taken[0] == 30
        assert 0 < taken[1] < 30, "a step does not wait for all of them"
        assert taken[1] + sum(1 for _ in link.receive()) == 30
        link.close()


def test_a_request_that_is_refused_while_it_runs_is_aborted() -> None:
    """Its rank goes on with it otherwise, where only an output was too long for node 0."""

    async def scenario() -> None:
        client = EngineClient(tiny())
        address = f"tcp://127.0.0.1:{client._socket.bind_to_random_port('tcp://127.0.0.1')}"
        receiving = asyncio.create_task(client._receive())
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

    asyncio.run(scenario())
