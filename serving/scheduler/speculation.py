"""Which drafts a decode step carries along, so that one step may give several tokens of a request.

Every request of a verify step has equally many drafts, because the step is split by requests: those with fewer, or
none, are filled up. Filled-up drafts cost compute, and are right as rarely as one would think. Where steps are replayed
as CUDA graphs all are filled up to the most there may be (`fill_drafts`): an eager step costs more.
"""

from __future__ import annotations

from collections.abc import Sequence

from serving.scheduler.config import SchedulerConfig
from serving.scheduler.kv_manager import KVManager
from serving.scheduler.ngram import NgramIndex
from serving.scheduler.request import TrackedRequest

__all__ = ["Speculation"]


class Speculation:
    """N-gram speculation for decode steps.

    Args:
        config: how many drafts, how long the runs.
        kv: where the drafts' keys and values go.
        max_tokens: of a request, prompt, output and drafts.
    """

    def __init__(self, config: SchedulerConfig, kv: KVManager, max_tokens: int) -> None:
        self._config = config
        self._kv = kv
        self._max_tokens = max_tokens

    def draft(self, requests: Sequence[TrackedRequest]) -> tuple[list[tuple[int, ...]], list[int]] | None:
        """Drafts for a step of these requests, with KV blocks reserved; None where the step should be a plain one.

        Nobody is retracted for drafts, and a step has drafts only if all tokens are known.

        Returns:
            The drafts of each request, and how many of each are real.
        """
        if self._config.num_speculative_tokens == 0:
            return None
        longest = max(len(request.token_ids) for request in requests)
        most = min(
            self._config.num_speculative_tokens,
            self._config.max_num_batched_tokens // len(requests) - 1,
            self._max_tokens - longest,
        )
        if most < 1 or not all(request.tokens_known for request in requests):
            return None
        found = [self._look_up(request, most) for request in requests]
        count = max(map(len, found))
        if count and self._config.fill_drafts:
            count = most
        if count == 0 or not self._reserve(requests, count):
            return None
        filled = [
            (*draft, *([draft[-1] if draft else request.token_ids[-1]] * (count - len(draft))))
            for request, draft in zip(requests, found, strict=True)
        ]
        return filled, [len(draft) for draft in found]

    def _look_up(self, request: TrackedRequest, most: int) -> list[int]:
        if request.ngrams is None:
            request.ngrams = NgramIndex(self._config.prompt_lookup_min, self._config.prompt_lookup_max)
        # The step gives one token more than it has drafts that are right.
        return request.ngrams.draft(request.token_ids, min(most, request.limit - len(request.token_ids) - 1))

    def _reserve(self, requests: Sequence[TrackedRequest], count: int) -> bool:
        needed = [
            max(0, self._kv.blocks_for(len(request.token_ids) + count) - request.num_kv_blocks) for request in requests
        ]
        if sum(needed) > self._kv.num_available:
            return False
        for request, blocks in zip(requests, needed, strict=True):
            if blocks:
                self._kv.reserve(request, len(request.token_ids) + count)
        return True
