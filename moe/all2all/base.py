"""What a MoE layer needs from an expert-parallel transport.

    dispatch    every token travels to the ranks that hold one of its experts, with its ids and weights
    combine     every rank's weighted partial sums travel back and are added up at the token's owner

A back end launches and never hands the baton on: all points of a MoE layer are in `moe.modular_kernel`. It keeps no
state between calls, so all layers and lanes share one; what combine must know of its dispatch travels in the handle.
Experts are placed as `moe.placement.local_experts` says.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor

from ubatch import ConfigError, GradientError, Transfer

__all__ = [
    "All2All",
    "All2AllTraits",
    "Dispatched",
    "ExchangesCounts",
    "OnCounts",
    "at_once",
    "check_dispatch",
    "refuse_gradients",
]

HandleT = TypeVar("HandleT")


@dataclass(frozen=True)
class All2AllTraits:
    """What a back end can do.

    Attributes:
        is_async: transfers travel while the lane computes; otherwise they are complete when launched.
        blocks_host: every `dispatch` waits on the host, for a small exchange of counts, before its payload leaves.
        capturable: can be captured into a CUDA graph.
        max_lanes: how many lanes it serves at once; None for any number.
        max_chunks: how many blocks of experts a layer may be cut into.
        other_ranks: how many ranks besides this one it connects.
        routed: a token travels only to ranks that hold one of its experts, not to all.
    """

    is_async: bool
    blocks_host: bool
    capturable: bool
    max_lanes: int | None
    max_chunks: int
    other_ranks: int
    routed: bool

    def chunk_bytes(self, num_tokens: int, hidden_size: int, top_k: int, dtype: torch.dtype) -> int:
        """The most bytes that one chunk sends off this rank, dispatch and combine together.

        Every chunk dispatches anew, so `c` chunks cost up to `c` times this: where a token has experts in several
        chunks, it travels several times.

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


@dataclass(frozen=True)
class Dispatched(Generic[HandleT]):
    """What arrives where the experts are.

    Attributes:
        hidden_states: `[N, H]`, tokens of all ranks that visit `experts`; rows may be strided.
        topk_ids: `[N, k]` int32 or int64, global expert ids; those outside `experts` are for other ranks.
        topk_weights: `[N, k]` float32.
        handle: what this back end's `combine` needs to send the results home.
        experts: the block of experts these rows are for: all of the rank's, as long as a layer is one chunk.
    """

    hidden_states: Tensor
    topk_ids: Tensor
    topk_weights: Tensor
    handle: HandleT
    experts: range


class All2All(Protocol[HandleT]):
    """Carries tokens to experts and results back."""

    @property
    def traits(self) -> All2AllTraits:
        """What this back end can do."""

    @property
    def num_experts(self) -> int:
        """Experts of all ranks."""

    @property
    def experts(self) -> range:
        """Global ids of the experts that this rank holds."""

    def dispatch(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Transfer[Dispatched[HandleT]]:
        """Launch the tokens' way to their experts.

        Args:
            x: `[T, H]`, this rank's tokens; T may be 0, and differ between ranks.
            topk_ids: `[T, k]` int64. -1, and any id that is no expert's, is routed nowhere.
            topk_weights: `[T, k]` float32.

        Raises:
            GradientError: `x` or the weights require grad.
            ConfigError, UnvotedCollectiveError, GroupBroken: before anything is launched.
        """

    def combine(self, y: Tensor, handle: HandleT) -> Transfer[Tensor]:
        """Launch the results' way home.

        Args:
            y: `[N, H]`, for every dispatched row its weighted sum over the experts held here.
            handle: from the `Dispatched` that `y` was computed from.

        Returns:
            A transfer of `[T, H]`: the sum over all ranks, zeros for tokens routed nowhere.
        """


OnCounts = Callable[[Transfer[Tensor]], Transfer[Tensor]]


def at_once(counts: Transfer[Tensor]) -> Transfer[Tensor]:
    """The default of `ExchangesCounts.on_counts`: counts arrive when the transport brings them."""
    return counts


@runtime_checkable
class ExchangesCounts(Protocol):
    """A back end whose dispatch may exchange token counts first, for which the host waits.

    Attributes:
        on_counts: gets the launched exchange before it is waited for; an emulated link delays it.
    """

    on_counts: OnCounts


def check_dispatch(x: Tensor, topk_ids: Tensor, topk_weights: Tensor, *, name: str) -> None:
    """Refuse what cannot travel between ranks.

    Raises:
        GradientError: gradients would be lost on the way.
        ConfigError: a dtype without a place in the payload.
    """
    refuse_gradients(x, topk_weights, name=name)
    if not x.is_floating_point() or topk_weights.dtype != torch.float32 or topk_ids.dtype != torch.int64:
        raise ConfigError(
            f"dispatch needs floating hidden states, float32 weights and int64 ids, not {x.dtype}, "
            f"{topk_weights.dtype} and {topk_ids.dtype}."
        )


def refuse_gradients(*tensors: Tensor, name: str) -> None:
    """Gradients do not travel between ranks, inside a lane or not.

    Raises:
        GradientError: a tensor requires grad, and grad mode is on.
    """
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        raise GradientError(
            f"all2all back end {name!r} got a tensor that requires grad, but gradients do not travel between ranks. "
            "Run under torch.no_grad() or torch.inference_mode()."
        )
