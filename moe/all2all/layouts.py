"""The two layouts in which tokens arrive at a rank's experts; a back end's traits say which.

Dispatched          one row per token that visits this rank, with its ids and weights; results come weighted
BatchedDispatch     one row per token and expert, an equal room for every expert; combine applies the weights
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

from torch import Tensor

HandleT = TypeVar("HandleT")


@dataclass(frozen=True)
class Dispatched(Generic[HandleT]):
    """The rows that a dispatch delivers to a rank's experts.

    Attributes:
        hidden_states: `[N, H]`, tokens of all ranks that visit `experts`; rows may be strided.
        topk_ids: `[N, k]` int32 or int64, global expert ids; those outside `experts` are for other ranks.
        topk_weights: `[N, k]` float32.
        handle: what this back end's `combine` needs to send the results home.
        experts: the block of experts these rows are for: all of the rank's, unless it came for one of several chunks.
        scales: `[N, H / 128]` float32 where `hidden_states` are float8_e4m3fn in blocks of 128, else None.
    """

    hidden_states: Tensor
    topk_ids: Tensor
    topk_weights: Tensor
    handle: HandleT
    experts: range
    scales: Tensor | None = None


@dataclass(frozen=True)
class BatchedDispatch(Generic[HandleT]):
    """The rows that a dispatch delivers to a rank's experts, sorted by expert, with room for `C` rows each.

    Nothing here is read on the host, so that it can be captured. Rows behind an expert's count are undefined, in the
    input and in the experts' results.

    Attributes:
        hidden_states: `[E_local, C, H]`; a token is there once for each of its experts.
        rows_per_expert: `[E_local]` int32, on the device.
        scales: `[E_local, C, H / 128]` float32 where `hidden_states` are float8_e4m3fn in blocks of 128, else None.
            Not always contiguous.
        handle: what this back end's `combine` needs to send the results home.
        experts: the block of experts these rows are for: all of the rank's, unless it came for one of several chunks.
    """

    hidden_states: Tensor
    rows_per_expert: Tensor
    scales: Tensor | None
    handle: HandleT
    experts: range
