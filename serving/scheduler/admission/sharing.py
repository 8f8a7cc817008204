"""Requests with a common prefix compute it once: the others wait until the first request has written it.

The prefix cache only has pages that are written. Without this module, equal prompts that arrive together, such as those
of `n` > 1, would all be computed in the same step. A request waits only for a running one, so no request waits forever.
"""

from __future__ import annotations

from serving.scheduler.radix_cache import common_prefix
from serving.scheduler.request import TrackedRequest

_WORTH_WAITING = 32  # least shared tokens (or one page, if larger): below, the delay of a step costs more than it saves


class PrefixWaits:
    """The requests that compute prompts now, and those that wait for one of them.

    Args:
        block_size: tokens per page; only whole pages are shared.
        snapshots: what is shared must end with a snapshot, so a request waits for a checkpoint of the other one only.
    """

    def __init__(self, block_size: int, *, snapshots: bool = False) -> None:
        self._block_size = block_size
        self._snapshots = snapshots
        self._worth = max(_WORTH_WAITING, block_size)
        self._writers: dict[str, tuple[TrackedRequest, int]] = {}
        # Waiting request -> (writer, its incarnation, tokens to be written): makes `still_waits` cheap.
        self._waits: dict[str, tuple[TrackedRequest, int, int]] = {}

    def start(self, request: TrackedRequest) -> None:
        """A request was admitted and computes its tokens."""
        self._waits.pop(request.name, None)
        self._writers[request.name] = (request, len(request.token_ids))

    def drop(self, request: TrackedRequest) -> None:
        """A request ended or was retracted."""
        self._waits.pop(request.name, None)
        self._writers.pop(request.name, None)

    def wrote(self, request: TrackedRequest) -> None:
        """A request's step was processed."""
        entry = self._writers.get(request.name)
        if entry is not None and request.num_written_tokens >= entry[1]:
            del self._writers[request.name]

    def still_waits(self, request: TrackedRequest) -> bool:
        """Whether the wait that `should_wait` found still holds; cheap."""
        entry = self._waits.get(request.name)
        if entry is None:
            return False
        writer, incarnation, shared = entry
        if writer.name in self._writers and writer.incarnation == incarnation and writer.num_written_tokens < shared:
            return True
        del self._waits[request.name]
        return False

    def should_wait(self, request: TrackedRequest, num_cached: int) -> bool:
        """Whether a running request computes enough of this prompt beyond its `num_cached` tokens in the cache."""
        tokens = request.token_ids
        stop = num_cached + self._worth
        if len(tokens) <= stop or request.params.prompt_logprobs is not None:
            return False
        for writer, _ in self._writers.values():
            if writer.token_ids[num_cached:stop] != tokens[num_cached:stop]:
                continue
            shared = min(common_prefix(writer.token_ids, tokens), len(tokens) - 1)
            shared -= shared % self._block_size
            if self._snapshots:
                shared = max((stop for stop in writer.checkpoints if stop <= shared), default=0)
            if shared - num_cached >= self._worth and writer.num_written_tokens < shared:
                self._waits[request.name] = (writer, writer.incarnation, shared)
                return True
        return False
