"""The client's end of a rank's link, without a socket."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from serving.engine.wire.messages import FromEngine, ToEngine


class FakeLink:
    """What the client says, and what it hears."""

    def __init__(self, *messages: ToEngine) -> None:
        self.to_engine: list[ToEngine] = list(messages)
        self.heard: list[FromEngine] = []

    def send(self, message: FromEngine) -> None:
        self.heard.append(message)

    def decide(self, messages: Sequence[ToEngine]) -> Sequence[ToEngine]:
        return messages

    def receive(self, wait_s: float = 0.0) -> Iterator[ToEngine]:
        if wait_s and not self.to_engine:
            time.sleep(0.001)
        while self.to_engine:
            yield self.to_engine.pop(0)

    def close(self) -> None:
        pass
