"""How much KV is kept for what running requests will still generate, and who gives way where it was too little.

Admitting up to the last block would retract somebody at the next step; keeping blocks for the longest possible output
of everybody would leave most of them idle. A ratio of the remaining output is kept. It falls while things go well, and
is estimated anew, from what was really generated, when a request had to be retracted.

Source: SGLang's new-token ratio.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from serving.scheduler.request import TrackedRequest

__all__ = ["NewTokenRatio", "choose_victim"]

_START = 0.7
_LEAST = 0.14 * _START
_STEPS = 600  # from the one to the other
_AHEAD = 20  # tokens that each request should have room for after a retraction
_MOST_REMAINING = 4096  # tokens of output counted per request: few generate what a large `max_tokens` allows


class NewTokenRatio:
    """The ratio, 0 to 1."""

    def __init__(self) -> None:
        self.value = _START

    def decay(self) -> None:
        """A decode step went well."""
        self.value = max(_LEAST, self.value - (_START - _LEAST) / _STEPS)

    def reset(self) -> None:
        """Nothing runs; what was learnt may not hold for what comes."""
        self.value = _START

    def estimate(self, running: Iterable[TrackedRequest]) -> None:
        """After a retraction: what those that still run have generated, and a little more, of what they may."""
        generated = allowed = 0
        for request in running:
            generated += request.num_output_tokens + _AHEAD
            allowed += request.limit - request.num_prompt_tokens
        if allowed:
            self.value = min(1.0, generated / allowed)

    def tokens(self, requests: Iterable[TrackedRequest]) -> int:
        """To keep free for the requests' outputs."""
        remaining = sum(min(request.limit - len(request.token_ids), _MOST_REMAINING) for request in requests)
        return int(self.value * remaining)


def choose_victim(requests: Sequence[TrackedRequest], *, by_priority: bool) -> TrackedRequest:
    """Who is retracted: the fewest outputs, of these the longest prompt; first of all the lowest priority, if asked."""
    return min(
        requests,
        key=lambda r: (-r.priority if by_priority else 0, r.num_output_tokens, -r.num_prompt_tokens, -r.arrival),
    )
