"""The low-latency half of `deep_ep_standin`: fixed places, two halves of a buffer, hooks."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import deep_ep_standin as base
import torch
import torch.distributed as dist
from deep_ep_standin import check_ids, check_weights, poisoned
from deep_ep_standin_events import EventOverlap, note, receive, require
from fake_graphs import run_kernel
from torch import Tensor

from moe import quantize_blocks
from ubatch import dbo_current_ubatch_id

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
