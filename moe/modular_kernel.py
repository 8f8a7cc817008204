"""One MoE layer between router and residual, and every point at which its lane may hand over to the next.

    Contract: routed tokens in, their weighted expert outputs (plus the shared expert's) out, same order.

    comp:  | prepare |~~~~~~~~~| experts |~~~~~~~~~| finalize |
    comm:            |dispatch |         | combine |
                     ^         ^         ^         ^
                  SELECT    DISPATCH     |      COMBINE, then OUTPUT
                (before)  (after launch) launch

At `~` this lane waits and another one computes. The shared expert, which needs no communication, can fill a gap of its
own lane: after dispatch's launch, after combine's launch, or when the lane resumes after `COMBINE`.

Under a signalled schedule a combine begins block by block while its experts' down projection still runs:

    comp:  | prepare |~~~~~~~~~|  up  |   down    |~~~~~~~~~| finalize |
    comm:            |dispatch |      ~| combine       |

Such a combine is opened, and forked from the compute stream, between the two projections. It is launched after them, at
the same place among the points as any other combine. A transport without signals on the device may send the rows that a
block of experts has completed, as soon as the host has launched, or computed, that block:

    comp:  | prepare |~~~~~~~~~| block 0 | block 1 | block 2 |~~~~~~~~~| finalize |
    comm:            |dispatch |         | rows 0  | rows 1  | rows 2 |

With chunks (blocks of experts, `moe.all2all.layouts`) the lane hides a part of its own communication, with another lane
or alone:

    comp:  | prepare |~~~~~~~~~~~~| experts 0 | experts 1 |~~~~~~~~~~~| finalize |
    comm:            |dispatch 0  |dispatch 1 | combine 0 | combine 1 |

All dispatches are launched together, so that the link never idles while there is something to send, and a chunk's
combine leaves as soon as its experts are done. Between chunks there is no point: the peer would take over just when
this lane's next chunk has arrived. `ubatch.schedules.lane_program` is the same for the simulator; a test compares the
two.

If a rank has more tokens than a dispatch has room for (`All2AllTraits.max_tokens`), the layer runs in pieces of the
batch: the first as drawn, the others one after the other in its experts' place, without a point between them. All ranks
run the same number of pieces, which they know from the vote; an idle rank's pieces are empty.

A token's output is the sum of its partial outputs from all chunks, added in the order of the chunks. Within rounding it
is the same as with one chunk, and it does not depend on how the batch is split into lanes.

Outside a lane the same code runs without handing over. A receive hook then runs as soon as it is registered, so hooks
are registered only after everything that should overlap with the transfer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from moe.all2all.base import All2All, All2AllTraits
from moe.all2all.layouts import BatchedDispatch, Dispatched, blocks_of
from moe.all2all.registry import adopt
from moe.expert_map import ExpertMap, LayerLoad, map_and_count
from moe.experts.base import BatchedExperts, BlockwiseExperts, Experts, SignallingExperts
from moe.schedule_checks import check_schedule, check_signalled_experts
from ubatch import (
    ConfigError,
    Point,
    Schedule,
    SharedExpert,
    Transfer,
    capturing,
    current_schedule,
    dbo_maybe_run_recv_hook,
    dbo_register_recv_hook,
    dbo_yield,
    get_forward_context,
)
from ubatch.kernels import add


class FusedMoEModularKernel(nn.Module):
    """prepare -> experts -> finalize, from a transport and the experts of this rank.

    Args:
        all2all: carries tokens to experts and back.
        experts: those of this rank, in its first slots; the others are idle.
        shared_experts: applied to every token in addition to the routed ones, `[T, H] -> [T, H]`.
        expert_map: the slots of the layer's experts; None if every expert is in the slot of its number.
        load: gets the number of tokens of every expert; None if nobody wants it.

    Raises:
        ConfigError: `all2all` is no `All2All`, or sends other tokens here than `experts` are for, or
            batches of rows by expert to experts that take only tokens.

    Source: vLLM's `FusedMoEModularKernel` and its `MLP_SHARED_OVERLAP` schedule; SGLang's two-batch operations.
    """

    def __init__(
        self,
        all2all: All2All[Any],
        experts: Experts,
        shared_experts: nn.Module | None = None,
        *,
        expert_map: ExpertMap | None = None,
        load: LayerLoad | None = None,
    ) -> None:
        super().__init__()
        all2all = adopt(all2all)
        held, slots = experts.expert_range, all2all.experts
        if held.start != slots.start or len(held) > len(slots) or (all2all.traits.batched and held != slots):
            batches = " in batches, one for each" if all2all.traits.batched else ""
            raise ConfigError(
                f"the experts hold {held}, but the all2all back end sends this rank the tokens of {slots}{batches}. "
                "Slice the weights by local_experts(), or by ExpertPlacement.held()."
            )
        if all2all.traits.batched and not isinstance(experts, BatchedExperts):
            raise ConfigError(
                f"{type(all2all).__name__} delivers rows in batches by expert, which {type(experts).__name__} does not "
                "take (it has no run_batched). Choose other experts, such as 'grouped' or 'triton_batched'."
            )
        self.all2all = all2all
        self.experts = experts
        self.shared_experts = shared_experts
        self.expert_map = expert_map
        self.load = load
        self._usable: tuple[Schedule | None, All2AllTraits | None] = (None, None)  # checked last

    def forward(self, hidden_states: Tensor, topk_weights: Tensor, topk_ids: Tensor) -> Tensor:
        """Run the layer.

        Args:
            hidden_states: `[T, H]`, floating; T may be 0 and differ between ranks.
            topk_weights: `[T, k]` float32.
            topk_ids: `[T, k]` int64, expert ids as the router gives them; -1 for no expert (padding: `mask_padding`).

        Returns:
            `[T, H]`, dtype of `hidden_states`.

        Raises:
            ConfigError: wrong shapes or dtypes; `k` above the number of experts; a schedule with more lanes or chunks
                than the transport supports; a signalled schedule that the transport or the experts do not support; a
                graph capture that the transport or the experts do not support.
        """
        schedule, shared = current_schedule(), self.shared_experts
        self._check(hidden_states, topk_weights, topk_ids, schedule)
        if capturing():
            self._check_capturable()
        if self.expert_map is not None or self.load is not None:
            topk_ids = map_and_count(topk_ids, self.expert_map, self.load)
        first, others = (hidden_states, topk_weights, topk_ids), []
        if self.all2all.traits.max_tokens is not None:
            first, *others = self._pieces(*first, self.all2all.traits.max_tokens)

        # --- prepare: tokens travel to their experts ---
        blocks = blocks_of(len(self.all2all.experts), schedule.chunks if schedule.chunk_dispatch else 1)
        self.all2all.inputs_ready(first[0], first[2], first[1], blocks)
        dbo_yield(Point.SELECT)
        dbo_maybe_run_recv_hook()
        arrivals = self._dispatch(*first, schedule)
        shared_out: Tensor | None = None
        if shared is not None and schedule.shared_expert is SharedExpert.DISPATCH:
            shared_out = shared(hidden_states)
        dbo_register_recv_hook(arrivals.transfers[0].wait, joins=False)  # only the first: the other chunks travel on
        dbo_yield(Point.DISPATCH)

        # --- experts: when a chunk's experts are done, its partial sums travel home ---
        combines: list[_Combine] = []
        while arrivals.transfers:
            for received in arrivals.next():
                results_of = self._results_of if schedule.signalled else self._computed
                combines.append(results_of(received))
                del received  # meanwhile only the transfers keep the tensors they need
        for piece in others:
            dbo_maybe_run_recv_hook()
            arrivals = self._dispatch(*piece, schedule)
            while arrivals.transfers:
                combines += [self._computed(received) for received in arrivals.next()]

        # --- finalize: the sums arrive ---
        if schedule.shared_expert is not SharedExpert.COMBINE_RETURN:  # else no hook: the wait comes later
            if shared is not None and schedule.shared_expert is SharedExpert.COMBINE:
                shared_out = shared(hidden_states)
            dbo_register_recv_hook(combines[0].wait if len(combines) == 1 else partial(_wait_for_all, combines))
        dbo_yield(Point.COMBINE)
        if shared is not None and schedule.shared_expert is SharedExpert.COMBINE_RETURN:
            shared_out = shared(hidden_states)
        output = combines[0].wait() if len(combines) == 1 else _put_together(combines, schedule.chunks)
        del combines
        dbo_yield(Point.OUTPUT)
        return output if shared_out is None else add(output, shared_out)

    @staticmethod
    def _pieces(x: Tensor, topk_weights: Tensor, topk_ids: Tensor, room: int) -> list[tuple[Tensor, Tensor, Tensor]]:
        """The arguments of as many dispatches as the rank with most tokens needs, one after the other.

        If the ranks did not vote they cannot know the number, so there is one piece; a transport refuses it if it is
        too large.
        """
        context = get_forward_context()
        voted = context.tokens_across_ranks if context is not None else None
        count = -(-max(voted) // room) if voted else 1
        if count <= 1:
            return [(x, topk_weights, topk_ids)]
        tokens = x.shape[0]
        bounds = [slice(piece * tokens // count, (piece + 1) * tokens // count) for piece in range(count)]
        return [(x[rows], topk_weights[rows], topk_ids[rows]) for rows in bounds]

    def _dispatch(self, x: Tensor, topk_weights: Tensor, topk_ids: Tensor, schedule: Schedule) -> _Arrivals:
        """Launch the dispatches of all chunks."""
        if schedule.signalled and self.all2all.traits.sends_blocks:
            return _Arrivals([self.all2all.dispatch_blocks(x, topk_ids, topk_weights)])
        if schedule.chunks == 1:
            return _Arrivals([self.all2all.dispatch(x, topk_ids, topk_weights)])
        blocks = blocks_of(len(self.all2all.experts), schedule.chunks)
        if schedule.chunk_dispatch:
            return _Arrivals(list(self.all2all.dispatch_chunks(x, topk_ids, topk_weights, blocks)))
        return _Arrivals([self.all2all.dispatch_cut(x, topk_ids, topk_weights, blocks)], cut=True)

    def _results_of(self, received: _Received) -> _Combine:
        """Run the experts of a chunk, and launch its combine, which begins before they are done."""
        return self._in_blocks(received) if self.all2all.traits.sends_blocks else self._signalled(received)

    def _computed(self, received: _Received) -> Transfer[Tensor]:
        """Run the experts, then launch the combine of their results."""
        if isinstance(received, BatchedDispatch):
            experts = cast(BatchedExperts, self.experts)  # checked when this kernel was made
            results = experts.run_batched(received.hidden_states, received.rows_per_expert, received.scales)
        else:
            rows = (received.hidden_states, received.topk_ids, received.topk_weights)
            results = self.experts(*rows) if received.scales is None else self.experts(*rows, received.scales)
            del rows
        dbo_maybe_run_recv_hook()
        return self.all2all.combine(results, received.handle)

    def _signalled(self, received: _Received) -> Transfer[Tensor]:
        """The same, but results are sent while the down projection still computes."""
        batches, experts = cast(BatchedDispatch[Any], received), cast(SignallingExperts, self.experts)  # see `_check`
        rows = experts.project_up_batched(batches.hidden_states, batches.rows_per_expert, batches.scales)
        combine = self.all2all.open_combine(batches.handle)
        results = experts.project_down_signalling(rows, batches.rows_per_expert, combine.signals)
        dbo_maybe_run_recv_hook()
        return combine.send(results)

    def _in_blocks(self, received: _Received) -> _InBlocks:
        """The same, but the rows that a block of experts has completed are sent while the next block is computed."""
        rows, experts = cast(Dispatched[Any], received), cast(BlockwiseExperts, self.experts)  # see `_check`
        combine, held = self.all2all.combine_blocks(rows.handle), len(self.experts.expert_range)
        blocks = [range(min(block.start, held), min(block.stop, held)) for block in combine.blocks]  # no idle slots
        sums = experts.run_blocks(rows.hidden_states, rows.topk_ids, rows.topk_weights, blocks, rows.scales)
        transfers = []
        for y in sums:
            dbo_maybe_run_recv_hook()
            transfers.append(combine.send(y))
        return _InBlocks(transfers, combine.sum_up)

    def _check_capturable(self) -> None:
        if not self.all2all.traits.capturable:
            raise ConfigError(
                f"{type(self.all2all).__name__} cannot be captured into a CUDA graph, as it waits on the host. Use "
                "another all2all back end, or cudagraph_mode=NONE."
            )
        if not self.experts.capturable:
            raise ConfigError(
                f"{type(self.experts).__name__} cannot be captured into a CUDA graph, as they read on the host. Use "
                "other experts, such as 'triton', or cudagraph_mode=NONE."
            )

    def _check(self, hidden_states: Tensor, topk_weights: Tensor, topk_ids: Tensor, schedule: Schedule) -> None:
        if hidden_states.dim() != 2 or not hidden_states.is_floating_point():
            raise ConfigError(
                f"hidden_states must be floating [tokens, hidden], not {hidden_states.dtype} "
                f"{list(hidden_states.shape)}. Flatten batch and sequence."
            )
        if topk_weights.dtype != torch.float32 or topk_ids.dtype != torch.int64:
            raise ConfigError(
                f"topk_weights must be float32 and topk_ids int64, not {topk_weights.dtype} and {topk_ids.dtype}."
            )
        tokens, num_experts = hidden_states.shape[0], self.all2all.num_experts
        if topk_ids.dim() != 2 or topk_ids.shape != topk_weights.shape or topk_ids.shape[0] != tokens:
            raise ConfigError(
                f"topk_weights {list(topk_weights.shape)} and topk_ids {list(topk_ids.shape)} must both be "
                f"[{tokens}, k], one row per token."
            )
        if not 1 <= topk_ids.shape[1] <= num_experts:
            raise ConfigError(f"top_k = {topk_ids.shape[1]} must be between 1 and the {num_experts} experts there are.")
        traits = self.all2all.traits
        if schedule is not self._usable[0] or traits is not self._usable[1]:
            check_schedule(schedule, self.all2all, traits)
            if schedule.signalled:
                self._check_signals(schedule, hidden_states.device)
            self._usable = schedule, traits

    def _check_signals(self, schedule: Schedule, device: torch.device) -> None:
        check_signalled_experts(schedule, self.all2all.traits, type(self.experts), device)
        if isinstance(self.experts, SignallingExperts) and not self.all2all.traits.sends_blocks:
            self.experts.check_signalling()


_Received = Dispatched[Any] | BatchedDispatch[Any]


class _InBlocks:
    """A combine whose results return in several transfers.

    Args:
        transfers: in the order in which they were launched.
        sum_up: sums what the transfers deliver to the output.
    """

    def __init__(self, transfers: Sequence[Transfer[Tensor]], sum_up: Callable[[Sequence[Tensor]], Tensor]) -> None:
        self._transfers, self._sum_up = list(transfers), sum_up
        self._output: Tensor | None = None

    def wait(self) -> Tensor:
        """`[T, H]`; a second call returns the same."""
        if self._output is None:
            self._output = self._sum_up(_wait_for_all(self._transfers))
            self._transfers = []
        return self._output


_Combine = Transfer[Tensor] | _InBlocks


@dataclass(frozen=True, slots=True)
class _Arrivals:
    """The chunks of one layer that are being dispatched to this rank.

    Attributes:
        transfers: in order; each delivers one chunk, or with `cut` several.
    """

    transfers: list[Transfer[Any]]
    cut: bool = False

    def next(self) -> Sequence[_Received]:
        """Wait for the next transfer, and drop it; returns its chunks."""
        arrived: Any = self.transfers.pop(0).wait()
        return cast("Sequence[_Received]", arrived if self.cut else (arrived,))


def _wait_for_all(transfers: Sequence[_Combine]) -> list[Tensor]:
    return [transfer.wait() for transfer in transfers]


def _put_together(combines: Sequence[_Combine], chunks: int) -> Tensor:
    """Sum the chunks of every piece, and concatenate the pieces."""
    parts = _wait_for_all(combines)
    sums = [_sum_of_chunks(parts[start : start + chunks]) for start in range(0, len(parts), chunks)]
    return sums[0] if len(sums) == 1 else torch.cat(sums)


def _sum_of_chunks(parts: list[Tensor]) -> Tensor:
    """The sum over the chunks, in their order and in at least float32."""
    if len(parts) == 1:
        return parts[0]
    total = parts[0] if parts[0].dtype == torch.float64 else parts[0].float()
    for part in parts[1:]:
        total = total + part
    return total.to(parts[0].dtype)
