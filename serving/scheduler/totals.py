"""Counters of a scheduler."""

from __future__ import annotations

from dataclasses import dataclass

from serving.requests import DraftCounts

__all__ = ["Totals"]


@dataclass
class Totals:
    """Totals since the scheduler was made; the fields are those of `EngineStatistics`."""

    prefix_queries: int = 0
    prefix_hits: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    preemptions: int = 0
    corrupted_requests: int = 0
    num_drafts: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    accepted_per_position: tuple[int, ...] = ()

    def verified(self, drafts: DraftCounts) -> None:
        """Count the verified drafts of one request in one step."""
        self.num_drafts += drafts.verified
        self.drafted_tokens += drafts.drafted
        self.accepted_tokens += drafts.accepted
        known, accepted = self.accepted_per_position, drafts.accepted
        longer = (*known, *[0] * (accepted - len(known)))
        self.accepted_per_position = tuple(count + (place < accepted) for place, count in enumerate(longer))
