"""The interface by which the API reports events of requests to the metrics."""

from __future__ import annotations

from typing import Protocol

from serving.requests import DraftCounts

__all__ = ["NoObserver", "RequestObserver"]


class RequestObserver(Protocol):
    """Receives the events of each generated output. Called in the event loop, so its methods must return at once."""

    def started(self, request_id: str, num_prompt_tokens: int) -> None:
        """An output was requested."""

    def tokens(self, request_id: str, count: int) -> None:
        """The output got `count` new tokens."""

    def drafts(self, request_id: str, counts: DraftCounts) -> None:
        """A step verified draft tokens of the output."""

    def finished(self, request_id: str, reason: str) -> None:
        """The output ended. `reason`: `stop`, `length`, `abort` (the client left, or it was aborted) or `error`."""


class NoObserver(RequestObserver):
    """An observer that ignores all events."""
