"""`host_loopback_batched`: `host_loopback` for experts that take batches; can send results while others are computed.

    dispatch    pack tokens (compute) | device -> pinned host -> device (comm) | unpack, sort by expert (compute)
    combine     a row per choice      | device -> pinned host -> device (comm) | weighted sum, in the order of choices

Each token is sent once. Results are returned one by one, a row for each of a token's choices: at most that many of the
`E x C` rows can exist. A row for a choice without an expert is sent, too, because the host does not know the ids.

**Signalled.** Under a schedule that is `signalled`, the first half of combine's way is a kernel's:

    compute   | up | down: block 0 | block 1 | block 2 |         | sum
    comm           ~~~~~~~~~~~~~~~~| copy 0  | copy 1  | copy 2 | pinned host -> device |
                   ^               ^
                 fork           signals (`moe.kernels.signals`)

`open_combine` forks the communication stream before the down projection is launched, and allocates all that the way
home writes, as compute that is launched later is not waited for. `send`, once the projection is launched, launches the
copy. It writes the rows that exist to pinned host memory, over PCIe, from as many SMs as the schedule leaves to
communication; the copy engines bring them back.

A copy that gives up is always reported: sums are NaN until then, the next dispatch or combine raises `SignalTimeout`,
and `check` asks the device at once. Replaying a graph calls none of them, so call `listen` after a replay: the model
runner does, whenever it reads a step's tokens. Signals, like the memory of `host_loopback`, are made once per lane and
chunk, and never while a graph is captured.

**Batches.** Tokens are sorted by expert, and results summed, in torch; nothing is read on the host.

    pair    (token, choice), number token * k + choice
    row     where a pair lies in the batches: expert * C + how many pairs of that expert come before it

All sizes follow from the number of tokens, so that a graph can capture it: `C` is the number of tokens, as many rows as
an expert gets if all of them choose it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from moe.all2all.base import All2All
from moe.all2all.host_loopback import HostLoopbackAll2All, Message, Staging, lane_here
from moe.all2all.layouts import BatchedDispatch, only_block
from moe.all2all.payload import check_dispatch, pack_rows, refuse_gradients, unpack_rows
from ubatch import CommGroup, Transfer, UBatchError, capturing, current_sm_budget, fork_comm_stream, report_sm_use
from ubatch.streams import Event

if TYPE_CHECKING:
    from moe.kernels.signals import Alarm, Signals  # imports Triton


@dataclass(frozen=True)
class Batches:
    """Tokens, sorted by expert.

    Attributes:
        hidden_states: `[E, C, H]`, contiguous; undefined behind an expert's rows.
        rows_per_expert: `[E]` int32.
        row_of_pair: `[T * k]` int64; `E * C` for a pair that has none.
        overflowed: `[T, k]` bool: pairs that found no room at their expert; this happens only if a token has chosen an
            expert twice.
    """

    hidden_states: Tensor
    rows_per_expert: Tensor
    row_of_pair: Tensor
    overflowed: Tensor


def sort_pairs(x: Tensor, topk_ids: Tensor, num_experts: int) -> Batches:
    """Give every pair a row; the pairs of one expert keep their order.

    Args:
        x: `[T, H]`.
        topk_ids: `[T, k]`, any integer dtype; ids outside `range(num_experts)` have no row.
    """
    tokens, top_k = topk_ids.shape
    is_expert = (topk_ids >= 0) & (topk_ids < num_experts)
    experts = torch.where(is_expert, topk_ids, num_experts).flatten().long()
    counts = experts.new_zeros(num_experts + 1).scatter_add_(0, experts, torch.ones_like(experts))
    starts = counts.cumsum(0) - counts
    order = experts.argsort(stable=True)
    sorted_experts = experts.index_select(0, order)
    nth = torch.arange(tokens * top_k, device=x.device) - starts.index_select(0, sorted_experts)
    nowhere = num_experts * tokens
    has_room = (sorted_experts < num_experts) & (nth < tokens)
    rows = torch.where(has_room, sorted_experts * tokens + nth, nowhere)
    row_of_pair = torch.empty_like(rows).scatter_(0, order, rows)

    # On a CPU zeros: Triton's interpreter warns of large numbers that happen to be there.
    batches = (x.new_empty if x.is_cuda else x.new_zeros)(nowhere + 1, x.shape[1])
    batches.index_copy_(0, row_of_pair, x[:, None].expand(-1, top_k, -1).reshape(-1, x.shape[1]))
    return Batches(
        batches[:nowhere].view(num_experts, tokens, -1) if nowhere else x.new_empty(num_experts, 0, x.shape[1]),
        counts[:num_experts].clamp(max=tokens).int(),
        row_of_pair,
        is_expert & (row_of_pair == nowhere).view(tokens, top_k),
    )


def sum_pairs(
    rows: Tensor, topk_ids: Tensor, topk_weights: Tensor, num_experts: int, gave_up: Tensor | None = None
) -> Tensor:
    """`out[t] = sum over j of topk_weights[t, j] * rows[t, j]`, in float32 and in the order of the choices.

    Args:
        rows: `[T, k, H]`, contiguous; undefined where there is no expert.
        topk_ids: `[T, k]`; ids outside `range(num_experts)` count for nothing.
        topk_weights: `[T, k]` float32.
        gave_up: `[1]` int32, not 0 if the rows are incomplete: then all sums are NaN.

    Returns:
        `[T, H]`, dtype of `rows`.
    """
    if rows.is_cuda:
        from moe.kernels.reduce import sum_choices  # imports Triton

        return sum_choices(rows, topk_ids, 0, num_experts, topk_weights, gave_up)
    is_expert = ((topk_ids >= 0) & (topk_ids < num_experts))[:, :, None]
    total = rows.new_zeros(rows.shape[0], rows.shape[2], dtype=torch.float32)
    for choice in range(rows.shape[1]):
        weighted = rows[:, choice].float() * topk_weights[:, choice, None]
        total = total + torch.where(is_expert[:, choice], weighted, 0.0)
    if gave_up is not None:
        total = torch.where(gave_up != 0, float("nan"), total)
    return total.to(rows.dtype)


_NAME = "host_loopback_batched"
_PROGRAMS = 2  # programs of the copy in the interpreter, where there are no SMs to divide


@dataclass(frozen=True)
class BatchedHandle:
    """What combine needs to return results.

    Attributes:
        topk_ids, topk_weights: `[T, k]`, as dispatched; the weight is NaN where there was no room for a row.
        rows_per_expert: `[E]` int32, of this chunk.
        like: `[0, H]`, of the results' dtype and device.
    """

    topk_ids: Tensor
    topk_weights: Tensor
    row_of_pair: Tensor
    rows_per_expert: Tensor
    like: Tensor
    chunk: int


class HostLoopbackBatchedAll2All(All2All[BatchedHandle]):
    """Sends every token, and every result, through host memory; experts get batches.

    Args:
        group: None, or a group of one rank.

    Raises:
        ConfigError: the group has more than one rank, or a factor below 1.
    """

    may_signal: ClassVar[bool] = True

    def __init__(self, *, group: CommGroup | None = None, num_experts: int, bytes_factor: float = 1.0) -> None:
        self._host = HostLoopbackAll2All(group=group, num_experts=num_experts, bytes_factor=bytes_factor)
        self.num_experts = num_experts
        self.experts = self._host.experts
        self.traits = replace(self._host.traits, batched=True, per_expert=True, signals=True, obeys_sms=True)
        self._slots: dict[tuple[int | None, int, torch.device], _Slot] = {}
        self._alarm: Alarm | None = None

    check_options = staticmethod(HostLoopbackAll2All.check_options)

    @property
    def pinned_bytes(self) -> int:
        """Host memory held for messages, of all lanes."""
        return self._host.pinned_bytes

    def dispatch(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Transfer[BatchedDispatch[BatchedHandle]]:
        """See `All2All`. A token's ids must differ; an expert has room for each token once.

        Raises:
            SignalTimeout: a combine before this one was not complete.
        """
        return self._dispatch(x, topk_ids, topk_weights, 0)

    def dispatch_chunks(
        self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor, blocks: Sequence[range]
    ) -> Sequence[Transfer[BatchedDispatch[BatchedHandle]]]:
        """See `All2All`. Each has signals of its own, so that all may be under way."""
        masked = [only_block(topk_ids, block, self.num_experts) for block in blocks]
        return [self._dispatch(x, ids, topk_weights, chunk) for chunk, ids in enumerate(masked)]

    def dispatch_cut(
        self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor, blocks: Sequence[range]
    ) -> Transfer[Sequence[BatchedDispatch[BatchedHandle]]]:
        """See `All2All`. Chunks share the rows, and count their own."""
        whole = self._dispatch(x, topk_ids, topk_weights, 0)
        return whole.map(lambda arrived: [self._cut(arrived, block, chunk) for chunk, block in enumerate(blocks)])

    def combine(self, y: Tensor, handle: BatchedHandle) -> Transfer[Tensor]:
        """See `All2All`.

        Raises:
            SignalTimeout: a combine before this one was not complete.
        """
        refuse_gradients(y, name=_NAME)
        self.listen()
        rows = y.flatten(0, 1)
        rows = rows.index_select(0, handle.row_of_pair.clamp(max=max(rows.shape[0] - 1, 0)))
        return self._host.travel("combine", rows).map(lambda arrived: self._sum(arrived, handle))

    def open_combine(self, handle: BatchedHandle) -> _SignalledCombine:
        from moe.kernels.signals import make_signals

        self.listen()
        (pairs,), device = handle.row_of_pair.shape, handle.like.device
        (tokens, _), columns = handle.topk_ids.shape, handle.like.shape[1]
        message = self._host.prepare((pairs, columns), handle.like.dtype, device)
        key = lane_here(), handle.chunk, device
        if key not in self._slots:
            self._slots[key] = _Slot(Staging(device, for_signals=True))
        slot = self._slots[key]
        slot.signals = make_signals(self.num_experts, tokens, columns, device, memory=slot.at_least, alarm=self._alarm)
        self._alarm = slot.signals.alarm
        slot.zero_signals()
        numbers = torch.arange(pairs, dtype=torch.int32, device=device)
        pair_of_row = numbers.new_empty(self.num_experts * tokens + 1).scatter_(0, handle.row_of_pair, numbers)
        return _SignalledCombine(self, handle, message, slot.signals, pair_of_row, fork_comm_stream())

    def check(self) -> None:
        """Ask the device whether all signalled combines so far were complete. The host waits for it.

        Raises:
            SignalTimeout: one was not, and its results are NaN. Later combines may be complete.
        """
        if self._alarm is None:
            return
        try:
            self._alarm.check(*(slot.signals for slot in self._slots.values() if slot.signals is not None))
        except UBatchError:  # graphs may have signalled in memory that was outgrown
            for slot in self._slots.values():
                slot.clear()
            raise

    def listen(self) -> None:
        """See `All2All`.

        Raises:
            SignalTimeout: as `check`.
        """
        if self._alarm is not None and not capturing() and self._alarm.rung():
            self.check()

    def _dispatch(
        self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor, chunk: int
    ) -> Transfer[BatchedDispatch[BatchedHandle]]:
        check_dispatch(x, topk_ids, topk_weights, name=_NAME)
        self.listen()
        hidden_size = x.shape[1]

        def arrive(rows: Tensor) -> BatchedDispatch[BatchedHandle]:
            return self._sort(*unpack_rows(rows, hidden_size), chunk)

        return self._host.travel("dispatch", pack_rows(x, topk_ids, topk_weights)).map(arrive)

    def _sort(self, x: Tensor, ids: Tensor, weights: Tensor, chunk: int) -> BatchedDispatch[BatchedHandle]:
        batches = sort_pairs(x, ids, self.num_experts)
        weights = torch.where(batches.overflowed, float("nan"), weights)
        counts = batches.rows_per_expert
        handle = BatchedHandle(
            ids.contiguous(), weights, batches.row_of_pair, counts, x.new_empty(0, x.shape[1]), chunk
        )
        return BatchedDispatch(batches.hidden_states, counts, None, handle, self.experts)

    def _cut(self, arrived: BatchedDispatch[BatchedHandle], block: range, chunk: int) -> BatchedDispatch[BatchedHandle]:
        handle, here = arrived.handle, slice(block.start, block.stop)
        counts = torch.zeros_like(arrived.rows_per_expert)
        counts[here] = arrived.rows_per_expert[here]
        ids = only_block(handle.topk_ids, block, self.num_experts)
        handle = replace(handle, topk_ids=ids, rows_per_expert=counts, chunk=chunk)
        return replace(arrived, rows_per_expert=counts, handle=handle, experts=block)

    def _sum(self, rows: Tensor, handle: BatchedHandle) -> Tensor:
        """The sum of the returned rows, `[T * k, H]`, per token."""
        ids = handle.topk_ids
        gave_up = None if self._alarm is None else self._alarm.gave_up
        return sum_pairs(rows.view(*ids.shape, rows.shape[1]), ids, handle.topk_weights, self.num_experts, gave_up)


@dataclass
class _Slot:
    """The signals of one lane's one chunk.

    Attributes:
        memory: for them.
    """

    memory: Staging
    signals: Signals | None = None

    def at_least(self, num_bytes: int) -> Tensor:
        return self.memory.at_least(max(num_bytes, 1))  # refused in a capture, unless it was used before

    @torch.inference_mode()
    def zero_signals(self) -> None:
        """A lane that failed before it sent leaves some behind, for a graph's replay as well: zeros are part of it."""
        if self.signals is not None:
            self.signals.counts.zero_()

    @torch.inference_mode()
    def clear(self) -> None:
        for memory in (*self.memory.outgrown, self.memory.memory):
            memory.zero_()


@dataclass(frozen=True)
class _SignalledCombine:
    """See `SignalledCombine`.

    Attributes:
        message: where the rows pass, and arrive.
        pair_of_row: `[E * C + 1]` int32, which row of the message each row is.
        fork: of the communication stream.
    """

    transport: HostLoopbackBatchedAll2All
    handle: BatchedHandle
    message: Message
    signals: Signals
    pair_of_row: Tensor
    fork: Event | None

    def send(self, y: Tensor) -> Transfer[Tensor]:
        from moe.kernels.signals import copy_signalled

        refuse_gradients(y, name=_NAME)
        transport, handle, signals, pair_of_row = self.transport, self.handle, self.signals, self.pair_of_row
        arrived, counts = self.message.arrived, handle.rows_per_expert
        budget = current_sm_budget()
        report_sm_use(_NAME, obeys=True)

        def copy(host: Tensor) -> None:
            rows = host.view(arrived.dtype).view(arrived.shape)
            copy_signalled(y, counts, signals, rows, budget.comm if budget else _PROGRAMS, pair_of_row)

        kept = (y, counts, pair_of_row, signals)
        home = transport._host.launch("combine", self.message, copy, fork=self.fork, keep=kept)
        return home.map(lambda rows: transport._sum(rows, handle))
