"""DeepEP 2's half of `deep_ep_standin`: `ElasticBuffer`, whose rows come with or without a count."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from deep_ep_standin import Route, bring_home, check_rows, check_weights, localized, poisoned
from deep_ep_standin_events import EventHandle, EventOverlap, Launch, launched, note, receive, require
from torch import Tensor

from ubatch import capturing


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
