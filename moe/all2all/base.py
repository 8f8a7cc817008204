"""What a MoE layer needs from an expert-parallel transport.

    dispatch    every token travels to the ranks that hold one of its experts, with its ids and weights
    combine     every rank's weighted partial sums travel back and are added up at the token's owner

A back end launches and never hands the baton on: all points of a MoE layer are in `moe.modular_kernel`. It keeps no
state between calls but the transport's own buffers, so all layers and lanes share one; what combine must know of its
dispatch travels in the handle. Experts are placed as `moe.placement.local_experts` says.

Tokens arrive in one of two layouts, and every back end says in its traits which one it brings:

    Dispatched          one row per token that visits this rank, with its ids and weights; results come weighted
    BatchedDispatch     one row per token and expert, an equal room for every expert; combine applies the weights
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor

from ubatch import ConfigError, ForwardMode, GradientError, Transfer

if TYPE_CHECKING:
    from moe.kernels.signals import Signals  # imports Triton

__all__ = [
    "All2All",
    "All2AllTraits",
    "BatchedDispatch",
    "BlockCombine",
    "DiffersBySteps",
    "Dispatched",
    "ExchangesCounts",
    "MarksInputs",
    "OnCounts",
    "SendsBlocks",
    "SignalledCombine",
    "SignalsCombine",
    "StepSizes",
    "TellsLater",
    "at_once",
    "check_dispatch",
    "refuse_gradients",
    "traits_in",
]

HandleT = TypeVar("HandleT")
HandleT_contra = TypeVar("HandleT_contra", contravariant=True)


@dataclass(frozen=True)
class All2AllTraits:
    """What a back end can do.

    Attributes:
        is_async: transfers travel while the lane computes; otherwise they are complete when launched.
        blocks_host: every `dispatch` waits on the host, for a small exchange of counts, before its payload leaves.
        capturable: can be captured into a CUDA graph.
        max_lanes: how many lanes it serves at once; None for any number.
        max_chunks: how many blocks of experts a layer may be cut into.
        cuts_combine: where all chunks come with one dispatch, each sends home only rows of its own; else every chunk
            sends all rows. None where no two combines of one dispatch may be under way, so that every chunk needs a
            dispatch of its own.
        other_ranks: how many ranks besides this one it connects.
        routed: a token travels only to ranks that hold one of its experts, not to all.
        batched: tokens may arrive as `BatchedDispatch`, so the experts must serve that layout too.
        once: in chunks, too, a token travels to a rank once, and its results come home once: chunks send no more bytes,
            in uneven shares (`chunk_shares`).
        per_expert: a token travels once for each of its experts, and its results come home one by one; else once for
            all that a rank holds, summed. Where it is not `routed`, only the latter.
        signals: a combine may begin while its down projection still runs, told by the device (`SignalsCombine`).
        sends_blocks: a combine may send what blocks of experts have completed while the host launches, or computes, the
            next ones (`SendsBlocks`).
        obeys_sms: it keeps to the SMs that a schedule reserves for communication (`ubatch.streams.sm_budget`).
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

        Chunks cost up to as many times this as there are: where a token has experts in several chunks, it travels
        several times. `chunk_factors` says what to expect.

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
        """By how much more the dispatches, and the combines, of so many chunks send than those of one.

        Expected, where every choice of `top_k` experts is as likely as any other. A token whose experts on a rank lie
        in several chunks travels there several times: x1.48 for 2 chunks of 32 experts, top-4, on 2 ranks; x1.06 for
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
            apart = sum(_visited(size, num_experts, top_k) for size in blocks) / _visited(held, num_experts, top_k)
        else:
            apart = float(chunks)
        if chunk_dispatch:
            return apart, apart
        return 1.0, apart if self.cuts_combine else float(chunks)

    def chunk_shares(
        self, num_experts: int, top_k: int, chunks: int, *, chunk_dispatch: bool = True
    ) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """What each chunk's dispatch, and its combine, has of all chunks' bytes; the arguments are `chunk_factors`'s.

        Equal shares, but where a token travels `once`: with the first chunk that it visits, and home with the last.
        """
        even = (1.0 / chunks,) * chunks
        if not self.once:
            return (even if chunk_dispatch else (1.0,)), even
        held = num_experts // (self.other_ranks + 1)
        bounds = [chunk * held // chunks for chunk in range(chunks + 1)]
        first = [_visited(bound, num_experts, top_k) for bound in bounds]
        last = [_visited(held - bound, num_experts, top_k) for bound in reversed(bounds)]
        return (_steps(first) if chunk_dispatch else (1.0,)), _steps(last)[::-1]


def _steps(reached: list[float]) -> tuple[float, ...]:
    """What each adds, as a share of all."""
    return tuple((to - before) / reached[-1] for before, to in pairwise(reached))


def _visited(block: int, num_experts: int, top_k: int) -> float:
    """How likely a token has an expert in a block of that many."""
    return 1.0 - math.comb(num_experts - block, top_k) / math.comb(num_experts, top_k)


@dataclass(frozen=True)
class Dispatched(Generic[HandleT]):
    """What arrives where the experts are.

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
    """What arrives where the experts are, sorted by expert, every expert with room for `C` rows.

    Nothing here is read on the host, so that it can be captured. Rows behind an expert's count are undefined, in what
    arrives and in what the experts return.

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

    def dispatch(
        self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor
    ) -> Transfer[Dispatched[HandleT]] | Transfer[BatchedDispatch[HandleT]]:
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
            y: `[N, H]`, for every dispatched row its weighted sum over the experts held here; of a `BatchedDispatch`
                `[E_local, C, H]`, every row's result without a weight.
            handle: from the `Dispatched` or `BatchedDispatch` that `y` was computed from.

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


@runtime_checkable
class MarksInputs(Protocol):
    """A back end that orders itself by events: it marks what it has to wait for before the lane hands on."""

    def inputs_ready(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor, blocks: Sequence[range]) -> None:
        """These will be dispatched next in this lane, after it has handed on at `SELECT`.

        What other lanes compute meanwhile comes later on the compute stream; a dispatch that waited for it would not
        overlap with it. So all that the dispatches read is computed here (masked ids, quantised rows, contiguous
        copies), and marked after that. A dispatch of other tensors than these waits for all that was computed.

        Args:
            x, topk_ids, topk_weights: see `All2All.dispatch`.
            blocks: of local experts, one per dispatch; see `ServesChunks`.
        """


class SignalledCombine(Protocol):
    """A combine that was opened before the projection it brings home, for one chunk of one lane."""

    @property
    def signals(self) -> Signals:
        """What the projection tells its blocks by."""

    def send(self, y: Tensor) -> Transfer[Tensor]:
        """Launch the results' way home, beside the projection, which has been launched.

        Args:
            y: `[E_local, C, H]`, what the projection writes.

        Returns:
            As of `All2All.combine`.
        """


@runtime_checkable
class SignalsCombine(Protocol[HandleT_contra]):
    """A back end whose combine can begin block by block (`All2AllTraits.signals`)."""

    def open_combine(self, handle: HandleT_contra) -> SignalledCombine:
        """Get everything ready, and fork the communication stream: it will not wait for what compute launches next.

        Args:
            handle: from the `BatchedDispatch` whose results come home.

        Raises:
            ConfigError: a graph is being captured, and there is no memory for a message of that size.
            SignalTimeout: a combine before this one was not complete.
        """


class BlockCombine(Protocol):
    """A combine of one dispatch that was opened before the experts ran, and sends as they are done."""

    @property
    def blocks(self) -> Sequence[range]:
        """Of local experts, in the order in which they are to run."""

    def send(self, y: Tensor) -> Transfer[Tensor]:
        """Launch the way home of what the next block has completed.

        Args:
            y: `[n, H]`, the sums of the rows whose last expert is in that block, in the order in which rows arrived.
        """

    def sum_up(self, arrived: Sequence[Tensor]) -> Tensor:
        """What `All2All.combine` brings, from what every block's transfer has brought."""


@runtime_checkable
class SendsBlocks(Protocol):
    """A back end whose combine can go home block by block of experts (`All2AllTraits.sends_blocks`)."""

    def dispatch_blocks(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Transfer[Dispatched[Any]]:
        """As `All2All.dispatch`, for `combine_blocks` to bring home."""

    def combine_blocks(self, handle: Any) -> BlockCombine:
        """Open the way home.

        Args:
            handle: from a `Dispatched` that `dispatch_blocks` brought.
        """


@runtime_checkable
class TellsLater(Protocol):
    """A back end whose transfers may turn out to be incomplete when nobody waits for them on the host any more."""

    def listen(self) -> None:
        """Raise if one that is over was not complete. Waits for nothing.

        For whoever replays graphs, which call nothing else of the back end.
        """


@dataclass(frozen=True)
class StepSizes:
    """What a transport may be asked for: from this follow defaults of its options (`registry.default_all2all_options`).

    Attributes:
        decode: the most tokens of a rank in a decode or verify step.
        prefill: the most tokens of a rank in any other step; None where nobody knows.
        captured: decode and verify steps shall be captured into CUDA graphs.
    """

    decode: int
    prefill: int | None = None
    captured: bool = False

    @property
    def largest(self) -> int | None:
        """The most tokens of a rank in any step; None where nobody knows."""
        return None if self.prefill is None else max(self.decode, self.prefill)

    def shared_by(self, ranks: int) -> StepSizes:
        """Those of each of so many ranks that share a step's tokens equally."""
        prefill = None if self.prefill is None else -(-self.prefill // ranks)
        return replace(self, decode=-(-self.decode // ranks), prefill=prefill)


@runtime_checkable
class DiffersBySteps(Protocol):
    """A back end that can do other things in one step than in another."""

    def traits_for(self, mode: ForwardMode, tokens: int) -> All2AllTraits:
        """What it can do in a step of `mode`, of which no rank has more than `tokens` tokens."""


def traits_in(all2all: All2All[Any], mode: ForwardMode, tokens: int) -> All2AllTraits:
    """What a back end can do in a step of `mode`, of which no rank has more than `tokens` tokens."""
    return all2all.traits_for(mode, tokens) if isinstance(all2all, DiffersBySteps) else all2all.traits


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
