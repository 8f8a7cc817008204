"""A batch that verifies drafted tokens: every request brings the same number of them, as a chain or as a tree.

    draft tokens of request r     rows r * D to (r + 1) * D of the batch; row r * D is the tree's root
    custom mask of request r      D rows of (prefix + D) entries: true if draft i sees that token. Requests are
                                  flattened one after the other: r starts at sum((prefix_i + D) * D for i < r)
    retrieve_index[r, i]          the batch's row that holds node i of the request's tree; rebased in a lane
    retrieve_next_*[r, i]         node numbers within the request; not rebased in a lane

Source: EAGLE-2 (2024); the layout is SGLang's.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from ubatch import SplitError


@dataclass(frozen=True)
class SpecVerifyInput:
    """A verify step's metadata other than tokens and lengths. The speculative decoder fills it; it never changes.

    Attributes:
        num_draft_tokens: `D`, rows of every request.
        prefix_lens: tokens of each request in the cache before this step, on the host.
        draft_tokens: `[R * D]` int64.
        positions: `[R * D]` int64, each draft's position in its request; siblings share one.
        custom_mask: flat bool, see above; None is a chain, which needs only causal attention.
        retrieve_index: `[R, D]` int64, the batch's row of each tree node; -1 where the tree has fewer nodes.
        retrieve_next_token: `[R, D]` int64, the first child of a node, -1 for none.
        retrieve_next_sibling: `[R, D]` int64, the next sibling of a node, -1 for none.

    Raises:
        SplitError: the sizes contradict each other.
    """

    num_draft_tokens: int
    prefix_lens: tuple[int, ...]
    draft_tokens: Tensor
    positions: Tensor
    custom_mask: Tensor | None
    retrieve_index: Tensor
    retrieve_next_token: Tensor
    retrieve_next_sibling: Tensor

    def __post_init__(self) -> None:
        requests, drafts = len(self.prefix_lens), self.num_draft_tokens
        if drafts < 1:
            raise SplitError(f"a verify batch needs at least one draft token per request, not {drafts}.")
        expected: dict[str, tuple[int, ...]] = {
            "draft_tokens": (requests * drafts,),
            "positions": (requests * drafts,),
            "retrieve_index": (requests, drafts),
            "retrieve_next_token": (requests, drafts),
            "retrieve_next_sibling": (requests, drafts),
        }
        if self.custom_mask is not None:
            expected["custom_mask"] = (self.mask_offsets[-1],)
        for name, shape in expected.items():
            found = tuple(getattr(self, name).shape)
            if found != shape:
                raise SplitError(
                    f"{name} of a verify batch of {requests} requests with {drafts} draft tokens must be "
                    f"{list(shape)}, not {list(found)}."
                )
        if self.custom_mask is not None and self.custom_mask.dtype != torch.bool:
            raise SplitError(f"custom_mask must be bool, not {self.custom_mask.dtype}.")

    @property
    def num_reqs(self) -> int:
        """Requests of this batch, or lane."""
        return len(self.prefix_lens)

    @property
    def mask_offsets(self) -> tuple[int, ...]:
        """Where each request's part of the custom mask starts, and the total at the end."""
        drafts = self.num_draft_tokens
        return (0, *accumulate((prefix + drafts) * drafts for prefix in self.prefix_lens))

    def mask_of(self, request: int) -> Tensor | None:
        """`[D, prefix + D]` bool, a view; None for a chain."""
        if self.custom_mask is None:
            return None
        start, stop = self.mask_offsets[request : request + 2]
        return self.custom_mask[start:stop].view(self.num_draft_tokens, -1)

    def split(self, requests: slice) -> SpecVerifyInput:
        """One lane's part. Its tensors are views, except the retrieve indices, which are rebased to rows of the lane.

        Args:
            requests: the lane's requests, `slice(start, stop)`.
        """
        drafts = self.num_draft_tokens
        rows = slice(requests.start * drafts, requests.stop * drafts)
        mask = self.custom_mask
        if mask is not None:
            offsets = self.mask_offsets
            mask = mask[offsets[requests.start] : offsets[requests.stop]]
        index = self.retrieve_index[requests]
        if requests.start:
            index = torch.where(index < 0, index, index - rows.start)
        return SpecVerifyInput(
            num_draft_tokens=drafts,
            prefix_lens=self.prefix_lens[requests],
            draft_tokens=self.draft_tokens[rows],
            positions=self.positions[rows],
            custom_mask=mask,
            retrieve_index=index,
            retrieve_next_token=self.retrieve_next_token[requests],
            retrieve_next_sibling=self.retrieve_next_sibling[requests],
        )
