"""The interface between a MoE layer and an expert-parallel transport.

    dispatch    sends every token to the ranks that hold one of its experts, with its ids and weights
    combine     sends every rank's weighted partial sums back; the token's owner adds them up

A back end only launches; it never hands over to another lane: all points of a MoE layer are in `moe.modular_kernel`. It
keeps no state between calls except the transport's own buffers, so all layers and lanes share one; the handle carries
what combine needs from its dispatch. `moe.placement.local_experts` defines which rank holds which experts.

Everything else that a back end may do has a default here, and a trait that says whether it is done (`All2AllTraits`,
which also says what chunks of experts cost).
`tests/support/all2all_contract.py` checks what each back end that is registered promises.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Protocol

import torch
from torch import Tensor

from moe.all2all.layouts import BatchedDispatch, Dispatched, HandleT, cut, ids_of_blocks
from ubatch import ConfigError, ForwardMode, Transfer

if TYPE_CHECKING:
    from moe.kernels.signals import Signals  # imports Triton


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
        obeys_sms: it uses only the SMs that a schedule reserves for communication (`ubatch.SMBudget`).
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


OnCounts = Callable[[Transfer[Tensor]], Transfer[Tensor]]


def at_once(counts: Transfer[Tensor]) -> Transfer[Tensor]:
    """The default of `All2All.on_counts`: counts arrive without an added delay."""
    return counts


@dataclass(frozen=True)
class StepSizes:
    """The sizes of the steps to expect; defaults of options follow from them (`registry.default_all2all_options`).

    Attributes:
        decode: the most tokens of a rank in a decode or verify step.
        prefill: the most tokens of a rank in any other step; None if unknown.
        captured: decode and verify steps are captured into CUDA graphs.
    """

    decode: int
    prefill: int | None = None
    captured: bool = False

    @property
    def largest(self) -> int | None:
        """The most tokens of a rank in any step; None if unknown."""
        return None if self.prefill is None else max(self.decode, self.prefill)

    def shared_by(self, ranks: int) -> StepSizes:
        """The sizes of each rank, if `ranks` ranks share a step's tokens equally."""
        prefill = None if self.prefill is None else -(-self.prefill // ranks)
        return replace(self, decode=-(-self.decode // ranks), prefill=prefill)


class SignalledCombine(Protocol):
    """A combine that was opened before the projection whose results it sends, for one chunk of one lane."""

    @property
    def signals(self) -> Signals:
        """The signals that the projection sets for its finished blocks."""

    def send(self, y: Tensor) -> Transfer[Tensor]:
        """Launch the return of the results; it runs during the projection, which was launched before.

        Args:
            y: `[E_local, C, H]`, the projection's output.

        Returns:
            As `All2All.combine`.
        """


class BlockCombine(Protocol):
    """A combine of one dispatch that is opened before the experts run, and sends results block by block."""

    @property
    def blocks(self) -> Sequence[range]:
        """The blocks of local experts, in the order in which they must run."""

    def send(self, y: Tensor) -> Transfer[Tensor]:
        """Launch the return of the rows that the next block has completed.

        Args:
            y: `[n, H]`, the sums of the rows whose last expert is in that block, in the order in which rows arrived.
        """

    def sum_up(self, arrived: Sequence[Tensor]) -> Tensor:
        """The result of `All2All.combine`, from the results of all blocks' transfers."""


class All2All(ABC, Generic[HandleT]):
    """Carries tokens to experts and results back. A back end sets the first three attributes, and inherits the rest.

    Attributes:
        traits: what it can do.
        num_experts: slots of all ranks, equally many on each. Without a placement they are the experts; else
            `moe.expert_map` gives the slots, which are called experts here.
        experts: this rank's slots.
        on_counts: if a dispatch exchanges token counts first, for which the host waits, gets the launched exchange
            before it is waited for; an emulated link delays it.
        may_signal: whether its traits may say that it serves signalled schedules, with some options.
    """

    traits: All2AllTraits
    num_experts: int
    experts: range
    on_counts: OnCounts = staticmethod(at_once)
    may_signal: ClassVar[bool] = False

    @abstractmethod
    def dispatch(
        self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor
    ) -> Transfer[Dispatched[HandleT]] | Transfer[BatchedDispatch[HandleT]]:
        """Launch the transfer of tokens to their experts.

        Args:
            x: `[T, H]`, this rank's tokens; T may be 0, and differ between ranks.
            topk_ids: `[T, k]` int64. -1, and any id that is not an expert's, is routed nowhere.
            topk_weights: `[T, k]` float32.

        Raises:
            GradientError: `x` or the weights require grad.
            ConfigError, UnvotedCollectiveError, GroupBroken: before anything is launched.
        """

    @abstractmethod
    def combine(self, y: Tensor, handle: HandleT) -> Transfer[Tensor]:
        """Launch the return of the results to the tokens' owners.

        Args:
            y: `[N, H]`, for every dispatched row its weighted sum over the local experts; for a `BatchedDispatch`
                `[E_local, C, H]`, every row's result without a weight.
            handle: from the `Dispatched` or `BatchedDispatch` that `y` was computed from.

        Returns:
            A transfer of `[T, H]`: the sum over all ranks, zeros for tokens routed nowhere.
        """

    # -- before anything is made ----------------------------------------------------------------------------------

    @staticmethod
    def check_options(options: Mapping[str, Any], num_ranks: int) -> None:
        """Refuse options and numbers of ranks that the constructor would refuse.

        Args:
            options: those that are given, of the right types.

        Raises:
            ConfigError: says what is served.
        """

    @staticmethod
    def default_options(sizes: StepSizes, num_ranks: int) -> Mapping[str, Any]:
        """Default options for these steps on `num_ranks` ranks, if the user gives none."""
        return {}

    # -- around a step --------------------------------------------------------------------------------------------

    def traits_for(self, mode: ForwardMode, tokens: int) -> All2AllTraits:
        """The traits in a step of `mode` in which no rank has more than `tokens` tokens; by default those of all."""
        return self.traits

    def listen(self) -> None:
        """Raise if a finished transfer was incomplete. Does not wait.

        Call it after replaying graphs: a replay calls no other method of the back end.
        """

    def inputs_ready(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor, blocks: Sequence[range]) -> None:
        """Prepare the tensors that this lane dispatches next, after it has handed over at `SELECT`.

        For back ends that order their launches by events. Other lanes then launch work on the compute stream; a
        dispatch that waited for that work would not overlap with it. So everything that the dispatches read is computed
        here (masked ids, quantised rows, contiguous copies), and the event is recorded after that. A dispatch of other
        tensors waits for the whole compute stream.

        Args:
            x, topk_ids, topk_weights: see `dispatch`.
            blocks: of local experts, one per dispatch; see `dispatch_chunks`.
        """

    # -- chunks of experts: blocks are of local ones, `range(0, 2)` is every rank's first two ---------------------

    def dispatch_chunks(
        self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor, blocks: Sequence[range]
    ) -> Sequence[Transfer[Any]]:
        """Launch one dispatch per block, all at once. What arrives has no ids but the block's."""
        return [self.dispatch(x, ids, topk_weights) for ids in ids_of_blocks(topk_ids, blocks, len(self.experts))]

    def dispatch_cut(
        self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor, blocks: Sequence[range]
    ) -> Transfer[Sequence[Any]]:
        """Launch one dispatch, which arrives as one `Dispatched` per block, each with a handle of its own.

        By default every chunk has all rows, and no ids but its own: its experts compute no more than with fewer rows,
        but the results of all rows travel home, most of them zeros.

        Raises:
            ConfigError: two combines of one dispatch cannot run at once (`All2AllTraits.cuts_combine`).
        """
        if self.traits.cuts_combine is None:
            raise ConfigError(
                f"{type(self).__name__} cannot have two combines of one dispatch under way. Choose a schedule with "
                "chunk_dispatch."
            )
        transfer: Transfer[Any] = self.dispatch(x, topk_ids, topk_weights)
        return transfer.map(partial(cut, blocks=blocks))

    # -- signalled schedules: a combine begins while its experts are still computed -------------------------------

    def open_combine(self, handle: HandleT) -> SignalledCombine:
        """Prepare the combine, and fork the communication stream: which ignores later work of the compute stream.

        With `All2AllTraits.signals`.

        Args:
            handle: from the `BatchedDispatch` whose results are returned.

        Raises:
            ConfigError: a graph is being captured, and there is no memory for a message of that size.
            SignalTimeout: a combine before this one was not complete.
        """
        raise self._does_not("signals")

    def dispatch_blocks(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Transfer[Dispatched[Any]]:
        """As `dispatch`; `combine_blocks` returns its results. With `All2AllTraits.sends_blocks`."""
        raise self._does_not("sends_blocks")

    def combine_blocks(self, handle: Any) -> BlockCombine:
        """Open the combine of a `Dispatched` of `dispatch_blocks`, which has the handle."""
        raise self._does_not("sends_blocks")

    def _does_not(self, trait: str) -> ConfigError:
        return ConfigError(f"{type(self).__name__} does not serve this: its traits say {trait}=False.")


def traits_in(all2all: All2All[Any], mode: ForwardMode, tokens: int) -> All2AllTraits:
    """A back end's traits in a step of `mode` in which no rank has more than `tokens` tokens."""
    return all2all.traits_for(mode, tokens)
