"""What an engine reads from its socket before a step."""

from __future__ import annotations

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
            parts.append([each.request_id for each in link.receive(5.0) if isinstance(each, Abort)])
        assert max(map(len, parts)) <= 128
        assert [name for part in parts for name in part] == [str(number) for number in range(300)]
        link.close()
