"""What the API tells whoever counts requests (metrics)."""

from __future__ import annotations

from typing import Protocol

from serving.requests import DraftCounts

__all__ = ["NoObserver", "RequestObserver"]


class RequestObserver(Protocol):
    """Is told what happens to each output that is generated. Called in the event loop: must return at once."""

    def started(self, request_id: str, num_prompt_tokens: int) -> None:
        """An output was asked for."""

    def tokens(self, request_id: str, count: int) -> None:
        """So many new tokens came."""

    def drafts(self, request_id: str, counts: DraftCounts) -> None:
        """Some of these tokens were guessed ahead."""

    def finished(self, request_id: str, reason: str) -> None:
        """It ended: `stop`, `length`, `abort` (the client left, or it was taken back) or `error`."""


class NoObserver:
    """Where nobody counts."""

    def started(self, request_id: str, num_prompt_tokens: int) -> None:
        """Not counted."""

    def tokens(self, request_id: str, count: int) -> None:
        """Not counted."""

    def drafts(self, request_id: str, counts: DraftCounts) -> None:
        """Not counted."""

    def finished(self, request_id: str, reason: str) -> None:
        """Not counted."""
