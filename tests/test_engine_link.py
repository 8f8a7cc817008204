"""What an engine reads from its socket before a step."""

from __future__ import annotations

import time
from pathlib import Path

import zmq

from serving.engine.link import EngineLink
from serving.engine.messages import Abort, encode


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
