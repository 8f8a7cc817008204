"""What a transport can do, and what chunks of experts cost over it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import torch


@dataclass(frozen=True)
class All2AllTraits:
    """What a back end can do.

    Attributes:
        is_async: transfers run while the lane computes; otherwise they are complete when the launch returns.
        blocks_host: every `dispatch` waits on the host, for a small exchange of counts, before its payload leaves.
        capturable: can be captured into a CUDA graph.
        max_lanes: how many lanes it serves at once; None for any number.
        max_chunks: how many blocks of experts a layer may be cut into.
        cuts_combine: if all chunks share one dispatch, each chunk returns only its own rows; else every chunk returns
            all rows. None if two combines of one dispatch cannot run at once, so that every chunk needs its own
            dispatch.
        other_ranks: how many ranks besides this one it connects.
        routed: a token travels only to ranks that hold one of its experts, not to all.
        batched: tokens may arrive as `BatchedDispatch`, so the experts must serve that layout too.
        once: with chunks, too, a token is sent to a rank once, and its result is returned once: chunks send no more
            bytes, but in uneven shares (`chunk_shares`).
        per_expert: a token is sent once for each of its experts, and each result is returned separately; else once per
            rank, and results are summed there. If not `routed`, only the results can be per expert.
        signals: a combine may begin while its down projection still runs, signalled by the device
            (`All2All.open_combine`).
        sends_blocks: a combine may send the rows that a block of experts has completed while the host launches, or
            computes, the next blocks (`All2All.dispatch_blocks`).
        obeys_sms: it uses only the SMs that a schedule reserves for communication (`ubatch.streams.streams`).
        max_tokens: the most tokens of a rank that a dispatch has room for; None for any number. A layer with more sends
            them in pieces, one after the other, as many as the rank with most tokens needs.
    """

    is_async: bool
    blocks_host: bool
    capturable: bool
    max_lanes: int | None
    max_chunks: int
    other_ranks: int
    routed: bool
    batched: bool = False
    obeys_sms: bool = False
    cuts_combine: bool | None = False
    per_expert: bool = False
    once: bool = False
    signals: bool = False
    max_tokens: int | None = None
    sends_blocks: bool = False

    def chunk_bytes(self, num_tokens: int, hidden_size: int, top_k: int, dtype: torch.dtype) -> int:
        """The most bytes that one chunk sends off this rank, dispatch and combine together.

        `n` chunks send up to `n` times this: a token with experts in several chunks is sent several times.
        `chunk_factors` gives the expected factor.

        Args:
            num_tokens: tokens of this rank; its peers are assumed to have as many.
            hidden_size: `H`.
            top_k: experts per token.
            dtype: of the hidden states.
        """
        peers = min(self.other_ranks, top_k) if self.routed else self.other_ranks
        hidden_bytes = hidden_size * dtype.itemsize
        id_and_weight = 8
        return num_tokens * peers * (2 * hidden_bytes + top_k * id_and_weight)

    def chunk_factors(
        self, num_experts: int, top_k: int, chunks: int, *, chunk_dispatch: bool = True
    ) -> tuple[float, float]:
        """The factors by which the dispatches, and the combines, of `chunks` chunks send more bytes than those of one.

        Expected values, if every choice of `top_k` experts is equally likely. A token whose experts on a rank are in
        several chunks is sent there several times: x1.48 for 2 chunks of 32 experts, top-4, on 2 ranks; x1.06 for
        256 experts, top-8, on 32.

        Args:
            num_experts: of all ranks.
            top_k: experts per token.
            chunks: blocks of experts.
            chunk_dispatch: whether each has a dispatch of its own.
        """
        ranks = self.other_ranks + 1
        if (self.per_expert and self.routed) or self.once:
            apart = 1.0
        elif self.routed:
            held = num_experts // ranks
            blocks = [(block + 1) * held // chunks - block * held // chunks for block in range(chunks)]
            apart = sum(visited(size, num_experts, top_k) for size in blocks) / visited(held, num_experts, top_k)
        else:
            apart = float(chunks)
        if chunk_dispatch:
            return apart, apart
        return 1.0, apart if self.cuts_combine else float(chunks)

    def chunk_shares(
        self, num_experts: int, top_k: int, chunks: int, *, chunk_dispatch: bool = True
    ) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Each chunk's share of all dispatch bytes, and of all combine bytes; arguments as for `chunk_factors`.

        Shares are equal, except with `once`: then a token is sent with the first chunk that it visits, and its result
        is returned with the last.
        """
        even = (1.0 / chunks,) * chunks
        if not self.once:
            return (even if chunk_dispatch else (1.0,)), even
        held = num_experts // (self.other_ranks + 1)
        bounds = [chunk * held // chunks for chunk in range(chunks + 1)]
        first = [visited(bound, num_experts, top_k) for bound in bounds]
        last = [visited(held - bound, num_experts, top_k) for bound in reversed(bounds)]
        return (_steps(first) if chunk_dispatch else (1.0,)), _steps(last)[::-1]


def _steps(reached: list[float]) -> tuple[float, ...]:
    """The increase at each step, as a share of the total."""
    return tuple((to - before) / reached[-1] for before, to in pairwise(reached))


@lru_cache(64)
def visited(block: int, num_experts: int, top_k: int) -> float:
    """The probability that a token has an expert in a block of `block` experts."""
    return 1.0 - math.comb(num_experts - block, top_k) / math.comb(num_experts, top_k)
