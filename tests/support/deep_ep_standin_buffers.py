"""Of `deep_ep_standin`: DeepEP 2's `ElasticBuffer`, whose rows come with or without a count; low latency; NVSHMEM."""

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import deep_ep_standin as base
import torch
import torch.distributed as dist
from deep_ep_standin import Route, bring_home, check_ids, check_rows, check_weights, localized, poisoned
from deep_ep_standin_events import EventHandle, EventOverlap, Launch, launched, note, place, receive, require
from fake_graphs import run_kernel
from torch import Tensor

from moe import quantize_blocks
from ubatch import capturing, dbo_current_ubatch_id


class EPHandle:
    """What a dispatch leaves; only what the adapter may know has DeepEP's name."""

    def __init__(self, num_sms: int, topk_idx: Tensor, psum: Tensor, route: Route, room: int, buffer: object) -> None:
        self.num_sms = num_sms
        self.topk_idx = topk_idx
        self.psum_num_recv_tokens_per_scaleup_rank = psum
        self._route, self._room, self._buffer = route, room, buffer


class ElasticBuffer:
    def __init__(
        self, group: dist.ProcessGroup, num_bytes: int | None = None, num_cpu_bytes: int = 0,
        num_max_tokens_per_rank: int = 0, hidden: int = 0, num_topk: int = 0, use_fp8_dispatch: bool = False,
        deterministic: bool = False, allow_hybrid_mode: bool = True, allow_multiple_reduction: bool = True,
        prefer_overlap_with_compute: bool = True, sl_idx: int = 3, num_allocated_qps: int = 0,
        num_cpu_timeout_secs: int = 300, num_gpu_timeout_secs: int = 100, explicitly_destroy: bool = False,
    ) -> None:  # fmt: skip
        require(num_max_tokens_per_rank > 0 and hidden > 0, "the size of the buffer")
        self.group = group
        self.rank_idx, self.num_ranks = group.rank(), group.size()
        self.num_max_tokens_per_rank = num_max_tokens_per_rank
        self._made_for = (hidden, num_topk, use_fp8_dispatch)
        note("make", self)
        dist.barrier(group=group)

    @staticmethod
    def capture() -> EventHandle:
        return EventHandle()

    def dispatch(
        self, x: Tensor | tuple[Tensor, Tensor], topk_idx: Tensor | None = None, topk_weights: Tensor | None = None,
        cumulative_local_expert_recv_stats: Tensor | None = None, num_experts: int | None = None,
        num_max_tokens_per_rank: int | None = None, expert_alignment: int | None = None, num_sms: int = 0,
        num_qps: int = 0, previous_event: EventHandle | None = None,
        previous_event_before_epilogue: EventHandle | None = None, async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False, handle: EPHandle | None = None, do_handle_copy: bool = True,
        do_cpu_sync: bool | None = None, do_expand: bool = False, do_zero_padding: bool = False,
        use_tma_aligned_col_major_sf: bool = False,
    ) -> tuple[Any, Tensor | None, Tensor | None, EPHandle, EventOverlap]:  # fmt: skip
        note("dispatch" if handle is None else "dispatch again", self)
        require(num_sms or num_experts is not None, "the number of SMs follows from num_experts")
        assert num_experts is not None
        most = num_max_tokens_per_rank or self.num_max_tokens_per_rank
        topk = topk_idx, topk_weights
        with launched("dispatch", previous_event, async_with_compute_stream, allocate_on_comm_stream) as launch:
            if handle is not None:
                return self._again(launch, x, handle, topk_idx, num_experts, num_sms, do_cpu_sync)
            return self._dispatch(launch, x, topk, num_experts, most, num_sms, counted=do_cpu_sync is not False)

    def _dispatch(
        self, launch: Launch, x: Any, topk: Any, num_experts: int, most: int, num_sms: int, *, counted: bool
    ) -> tuple[Any, Tensor | None, Tensor | None, EPHandle, EventOverlap]:
        topk_idx, topk_weights = topk
        rows, scales = x if isinstance(x, tuple) else (x, None)
        require((rows.shape[1], topk_idx.shape[1], scales is not None) == self._made_for, "a buffer of another shape")
        require(rows.shape[0] <= most <= self.num_max_tokens_per_rank, "more tokens than num_max_tokens_per_rank")
        held = num_experts // self.num_ranks
        route, arriving = Route(self.group, rows.shape[0]), list[Any]()

        def send() -> None:
            check_rows(x, topk_idx, num_experts)
            check_weights(topk_weights, topk_idx)
            everyone: list[Any] = [None] * self.num_ranks
            dist.all_gather_object(everyone, most, self.group)
            require(set(everyone) == {most}, f"ranks have room for different numbers of tokens: {everyone}")
            ranks = torch.arange(self.num_ranks)[:, None]
            route.agree((topk_idx.div(held, rounding_mode="floor")[:, None] == ranks).any(-1))
            arriving[:] = [route.forward(topk_idx), route.forward(topk_weights)]

        if counted:
            require(not capturing(), "the host waits for counts while a graph is captured")
            send()
        else:
            launch.kernel(send, [rows, scales, topk_idx, topk_weights])
        room = sum(route.received) if counted else most * self.num_ranks
        psum = torch.full((self.num_ranks,), -7, dtype=torch.int32)
        out, arrive_rows = _launch(launch, route, rows, scales, room)
        out_ids = torch.zeros(room, topk_idx.shape[1], dtype=torch.int64)
        out_weights = poisoned(room, topk_idx.shape[1], dtype=torch.float32)

        def arrive() -> None:
            arrive_rows()
            for _, work in arriving:
                receive(work)
            got, (ids, weights) = sum(route.received), (value for value, _ in arriving)
            out_ids[:got], out_weights[:got] = localized(ids, weights, self.rank_idx * held, held)
            psum.copy_(torch.tensor(route.received).cumsum(0))

        kept = EPHandle(num_sms or 24, topk_idx.clone(), psum, route, room, self)
        event = launch.finished(arrive, [rows, scales, topk_idx, topk_weights], [*out, out_ids, out_weights, psum])
        return _received(out), out_ids, out_weights, kept, event

    def _again(
        self, launch: Launch, x: Any, handle: EPHandle, topk_idx: Any, num_experts: int, num_sms: int, do_cpu_sync: Any
    ) -> tuple[Any, None, None, EPHandle, EventOverlap]:
        require(topk_idx is None and not do_cpu_sync, "a cached handle brings its ids, and no count")
        require(handle._buffer is self and num_sms == handle.num_sms, "the handle of another buffer, or other SMs")
        rows, scales = check_rows(x, handle.topk_idx, num_experts)
        out, arrive = _launch(launch, handle._route, rows, scales, handle._room)
        return _received(out), None, None, handle, launch.finished(arrive, [rows, scales], out)

    def combine(
        self, x: Tensor, handle: EPHandle, topk_weights: Tensor | None = None, bias: Any = None, num_sms: int = 0,
        num_qps: int = 0, previous_event: EventHandle | None = None,
        previous_event_before_epilogue: EventHandle | None = None, async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Tensor, Tensor | None, EventOverlap]:  # fmt: skip
        note("combine", self)
        require(handle._buffer is self, "the handle of another buffer")
        require(num_sms in (0, handle.num_sms), "combine with other SMs than dispatch")
        require(x.dtype == torch.bfloat16 and x.is_contiguous(), f"x is {x.dtype}")
        require(x.shape[0] == handle._room, f"{x.shape[0]} rows for a dispatch of {handle._room}")
        with launched("combine", previous_event, async_with_compute_stream, allocate_on_comm_stream) as launch:
            combined, arrive = bring_home(launch, handle._route, x)
            return combined, None, launch.finished(arrive, [x], [combined])


def _launch(launch: Launch, route: Route, rows: Tensor, scales: Tensor | None, room: int) -> tuple[list[Tensor], Any]:
    """Hidden states on their way: where they will be, and what makes them be there."""
    sources = [rows] if scales is None else [rows, scales]
    out = [poisoned(room, source.shape[1], dtype=source.dtype) for source in sources]
    sent: list[Any] = []
    launch.kernel(lambda: sent.extend(route.forward(source) for source in sources), sources)

    def arrive() -> None:
        for target, (value, work) in zip(out, sent, strict=True):
            receive(work)
            target[: sum(route.received)] = value
        sent.clear()

    return out, arrive


def _received(out: list[Tensor]) -> Any:
    """Hidden states, with their scales if they have any."""
    return tuple(out) if len(out) > 1 else out[0]


# -- low latency: fixed places, two halves of a buffer, hooks ----------------------------------------------------------

HIDDEN_SIZES = (2048, 2560, 3072, 4096, 5120, 6144, 7168, 8192)


class LowLatency:
    """One buffer's state.

    A launch clears the flags of the launch before it on the same buffer. If that one was not received yet, it never
    will be: so its hook must have been called.
    """

    def __init__(self, buffer: Any) -> None:
        self._buffer = weakref.ref(buffer)
        self.size, self.rank = buffer.group_size, buffer.rank
        self.cleaned: tuple[int, int, int] | None = None
        self.lane: int | None = None
        self.under_way: str | None = None

    @property
    def buffer(self) -> Any:
        buffer = self._buffer()
        require(buffer is not None, "a buffer that is gone")
        return buffer

    def clean(self, max_tokens: int, hidden: int, num_experts: int) -> None:
        require(self.buffer.low_latency_mode, "a buffer without low_latency_mode")
        require(self.under_way is None, "cleaned while a transfer is under way")
        self.cleaned, self.buffer.dirty = (max_tokens, hidden, num_experts), False
        self.buffer.memory.zero_()
        dist.barrier(group=self.buffer.group)

    def _launch(self, what: str) -> None:
        note(what, self.buffer)
        lane = dbo_current_ubatch_id()
        require(self.buffer.low_latency_mode, "a buffer without low_latency_mode")
        require(not self.buffer.dirty, f"{what} on a buffer that normal kernels left dirty")
        require(self.under_way is None, f"{what} clears the flags of a {self.under_way} that nobody has received")
        require(base.Buffer.shared_by_lanes or self.lane in (None, lane), f"lane {lane} uses lane {self.lane}'s buffer")
        self.lane, self.under_way = lane, what
        self.buffer.memory.add_(1)

    def _received(self) -> None:
        note(f"hook of {self.under_way}", self.buffer)
        self.buffer.memory.add_(1)
        self.under_way = None

    def _check_x(self, x: Tensor, max_tokens: int, num_experts: int) -> None:
        hidden = x.shape[-1]
        require(x.dtype == torch.bfloat16 and x.is_contiguous(), f"x is {x.dtype}")
        require(hidden in HIDDEN_SIZES, f"no kernel for hidden {hidden}")
        require(self.cleaned == (max_tokens, hidden, num_experts), "a buffer that was not cleaned for this shape")
        require(self.buffer.shmem.queues >= num_experts // self.size, "a queue per local expert")
        needed = base.Buffer.get_low_latency_rdma_size_hint(max_tokens, hidden, self.size, num_experts)
        require(needed <= self.buffer.num_rdma_bytes, "buffer size")

    def dispatch(
        self, x: Tensor, topk_idx: Tensor, max_tokens: int, num_experts: int, use_fp8: bool
    ) -> tuple[Any, Tensor, tuple[Any, ...], EventOverlap, Callable[[], None]]:
        self._launch("low_latency_dispatch")
        self._check_x(x, max_tokens, num_experts)
        require(x.shape[0] <= max_tokens, "more tokens than num_max_dispatch_tokens_per_rank")
        require(topk_idx.shape[1] <= 11 and max_tokens * self.size % 4 == 0, "top-k, or tokens that TMA cannot take")
        require(not use_fp8 or x.shape[1] % 512 == 0, "fp8 needs a multiple of 512")
        require(max_tokens * 2 + 2 <= 1024, "the queues' depth")
        held, hidden = num_experts // self.size, x.shape[1]
        arriving: list[tuple[Tensor, Any]] = []

        def send() -> None:
            check_ids(topk_idx, x.shape[0], num_experts)
            tokens_of = [(topk_idx == expert).any(1).nonzero().flatten() for expert in range(num_experts)]
            posted = x.new_zeros(num_experts, max_tokens, hidden)
            source = torch.full((num_experts, max_tokens), -1, dtype=torch.int32)
            for expert, tokens in enumerate(tokens_of):
                posted[expert, : len(tokens)] = x[tokens]
                source[expert, : len(tokens)] = tokens.int()
            sources = [*(quantize_blocks(posted) if use_fp8 else (posted,)), source]
            arriving[:] = [self._post(each) for each in sources]

        run_kernel("low_latency_dispatch", send, [x, topk_idx])
        room = self.size * max_tokens
        out = [poisoned(held, room, hidden, dtype=torch.float8_e4m3fn if use_fp8 else x.dtype)]
        if use_fp8:  # column-major, as the real ones
            out.append(poisoned(held, hidden // 128, room, dtype=torch.float32).transpose(1, 2))
        src_info = torch.full((held, room), -7, dtype=torch.int32)
        layout_range = torch.full((held, self.size), -7, dtype=torch.int64)
        count = torch.full((held,), -7, dtype=torch.int32)

        def arrive() -> None:
            for _, work in arriving:
                receive(work)
            values = [value.view(self.size, held, max_tokens, -1) for value, _ in arriving]
            for expert in range(held):
                begin = 0
                for rank in reversed(range(self.size)):  # in whatever order they come
                    rows = int((values[-1][rank, expert] >= 0).sum())
                    for target, value in zip([*out, src_info.unsqueeze(-1)], values, strict=True):
                        target[expert, begin : begin + rows] = value[rank, expert, :rows]
                    layout_range[expert, rank] = begin << 32 | rows
                    begin += rows
                count[expert] = begin

        def hook() -> None:
            run_kernel("hook", arrive, [*out, src_info, layout_range, count])
            self._received()

        handle = (src_info, layout_range, max_tokens, hidden, num_experts)
        return (tuple(out) if use_fp8 else out[0]), count, handle, EventOverlap(None), hook

    def combine(
        self, x: Tensor, topk_idx: Tensor, topk_weights: Tensor, handle: tuple[Any, ...]
    ) -> tuple[Tensor, EventOverlap, Callable[[], None]]:
        self._launch("low_latency_combine")
        src_info, layout_range, max_tokens, hidden, num_experts = handle
        self._check_x(x, max_tokens, num_experts)
        held = num_experts // self.size
        require(x.shape == (held, self.size * max_tokens, hidden), f"x is {list(x.shape)}")
        sent: list[tuple[Tensor, Any]] = []

        def send() -> None:
            require(int(layout_range.min()) >= 0, "combine before its dispatch was received")
            check_ids(topk_idx, topk_idx.shape[0], num_experts)
            check_weights(topk_weights, topk_idx)
            posted = poisoned(self.size, held, max_tokens, hidden, dtype=torch.bfloat16)
            for expert in range(held):
                for rank in range(self.size):
                    begin, rows = divmod(int(layout_range[expert, rank]), 1 << 32)
                    place = src_info[expert, begin : begin + rows].long()
                    posted[rank, expert, place] = x[expert, begin : begin + rows]
            sent.append(self._post(posted))

        run_kernel("low_latency_combine", send, [x, topk_idx, topk_weights, src_info, layout_range])
        combined = poisoned(topk_idx.shape[0], hidden, dtype=torch.bfloat16)

        def arrive() -> None:
            arriving, work = sent.pop()
            receive(work)
            results = arriving.view(num_experts, max_tokens, hidden)
            for token, (ids, weights) in enumerate(zip(topk_idx.tolist(), topk_weights, strict=True)):
                chosen = [(expert, weight) for expert, weight in zip(ids, weights, strict=True) if expert >= 0]
                total = torch.zeros(hidden)
                for expert, weight in chosen:
                    total += weight * results[expert, token].float()
                combined[token] = total.to(torch.bfloat16)

        def hook() -> None:
            run_kernel("hook", arrive, [combined, topk_idx, topk_weights])
            self._received()

        return combined, EventOverlap(None), hook

    def _post(self, rows: Tensor) -> tuple[Tensor, Any]:
        """Equal blocks, one to each rank."""
        sent = rows.contiguous().view(torch.uint8)
        arriving = torch.empty_like(sent)
        work = dist.all_to_all_single(arriving.view(-1), sent.view(-1), group=self.buffer.group, async_op=True)
        return arriving.view(rows.dtype), work


# -- NVSHMEM: what a process may join, and what DeepEP asserts of it ---------------------------------------------------


@dataclass
class Shmem:
    """NVSHMEM, of which a process has one. The first buffer with RDMA memory starts it, the last one ends it.

    Source: DeepEP 2.1, `Buffer::sync` in `csrc/legacy/buffer.hpp` and `init` in `csrc/kernels/backend/nvshmem.cu`. The
    real assertion is that a rank's number is the one that NVSHMEM knows; here it fails on every rank, as on most there.

    Attributes:
        ranks: global, that it joins.
        queues: to each of them, as the first buffer asked.
        users: buffers.
        team: whether a buffer split a team off, which only one may.
    """

    ranks: list[int]
    queues: int
    users: int = 0
    team: bool = False


_shmem: list[Shmem] = []


def join(buffer: Any, ranks: list[int], queues: int) -> Shmem:
    """What `Buffer::sync` and `nvshmem::init` do."""
    joined = ranks if buffer.low_latency_mode else ranks[buffer.rank % place.node :: place.node]
    if not _shmem:
        _shmem.append(Shmem(joined, queues))
    (shmem,) = _shmem
    require(shmem.ranks == joined, f"NVSHMEM has joined ranks {shmem.ranks}, not {joined}")
    if buffer.low_latency_mode and buffer.num_nodes > 1:
        require(not shmem.team, "cpu_rdma_team == NVSHMEM_TEAM_INVALID: a second low-latency buffer")
        shmem.team = True
    shmem.users += 1
    weakref.finalize(buffer, _leave, shmem).atexit = False
    return shmem


def _leave(shmem: Shmem) -> None:
    shmem.users, shmem.team = shmem.users - 1, False
    if not shmem.users:
        _shmem.clear()
