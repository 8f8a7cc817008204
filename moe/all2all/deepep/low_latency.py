"""`deepep_low_latency`: DeepEP's kernels for decode, which need no counts on the host and no SMs while tokens travel.

    dispatch   a short kernel posts the rows to the network cards; every (token, expert) has its place at the receiver
    ...        rows travel; the GPU computes
    hook       a kernel that waits for the rows to be there; `Transfer.wait` launches it, once
    combine    the same way back, and the owner adds up its tokens' rows with their weights

Tokens arrive as batches by expert (`BatchedDispatch`), in bfloat16 or in fp8 with a scale per block of 128.

**Streams.** Both kernels of a transfer run on the stream it was launched on: the compute stream. There is no event, and
nothing to wait for on the host, so it can be captured.

**Buffers.** DeepEP's has two halves: a launch clears the half of the launch before it. So on one buffer a transfer must
have been received before the next one is launched. Within a node a process may have several (DeepEP's source says so:
`moe.all2all.deepep.buffers`), and each lane has its own, for every chunk, which keeps them free of each other:

    2 * (E * M * (2 H + 16) + E * M * (2 H + 4 H / 128 + 16)) bytes each, about, for E experts of all ranks, M tokens
    1.9 GB for 256 experts, 128 tokens a rank and hidden size 7168

Where lanes share one buffer (`share_buffer`), whoever launches receives first what is still under way, as vLLM's lanes
do: a transfer then travels until the next lane's launch, not until the lane's own turn. Beyond one node there is no
choice: a second low-latency buffer of a process fails in DeepEP.

**Larger steps**, such as prefills, go in pieces of `max_tokens_per_rank`, where the ranks voted on them: it works, but
`deepep_auto` sends them by other kernels, which are made for that.

Source: DeepEP's README; vLLM's `DeepEPLLPrepareAndFinalize`.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from moe.all2all.base import All2AllTraits, StepSizes
from moe.all2all.deepep.base import DeepEPTransport, check_ranks
from moe.all2all.deepep.buffers import NODE, BufferSize, SizedBuffer, SizedBuffers, in_one_node
from moe.all2all.layouts import BatchedDispatch, ids_of_blocks
from ubatch import CommGroup, ConfigError, Transfer, dbo_current_ubatch_id, report_sm_use
from ubatch.ranks import check_launch
from ubatch.streams import current_capture

HIDDEN_SIZES = (2048, 2560, 3072, 4096, 5120, 6144, 7168, 8192)
"""What DeepEP's kernels are compiled for (1.2.1)."""
_MAX_TOP_K = 11
_MAX_TOKENS = 511
"""Two entries of a send queue per token, and one token to spare, of NVSHMEM's 1024."""
_FP8_HIDDEN = 512


@dataclass(frozen=True)
class LowLatencyHandle:
    """What combine needs to return results.

    Attributes:
        buffer: through which the tokens came.
        topk_ids, topk_weights: `[T, k]`, as dispatched.
    """

    buffer: SizedBuffer
    layout: Any
    topk_ids: Tensor
    topk_weights: Tensor


def _size_of(deep_ep: Any, max_tokens_per_rank: int, ranks: int, num_experts: int, hidden_size: int) -> BufferSize:
    """What a buffer for `[T, hidden_size]` is made for, for so many tokens of so many ranks."""
    num_bytes = deep_ep.Buffer.get_low_latency_rdma_size_hint(max_tokens_per_rank, hidden_size, ranks, num_experts)
    return BufferSize(0, num_bytes, queues=num_experts // ranks, low_latency=True)


class DeepEPLowLatencyAll2All(DeepEPTransport):
    """Sends each token once to each of its experts, into places that are fixed beforehand.

    Ids must be negative or an expert's: DeepEP does not look, and writes wherever a larger one points.

    Args:
        group: the expert-parallel ranks; all must reach each other by RDMA (IBGDA) or NVLink.
        max_tokens_per_rank: the most tokens that any rank, or lane of it, may dispatch at once. All ranks must give the
            same. Memory is for this many.
        use_fp8: tokens are quantised on their way, half the bytes; results travel in bfloat16.
        share_buffer: whether lanes share one buffer; None lets them where they must, beyond one node.

    Raises:
        ConfigError: DeepEP is missing, limits it does not serve, or a buffer per lane beyond one node.
    """

    def __init__(
        self,
        *,
        group: CommGroup,
        num_experts: int,
        max_tokens_per_rank: int = 128,
        use_fp8: bool = False,
        share_buffer: bool | None = None,
    ) -> None:
        super().__init__("deepep_low_latency", group, num_experts)
        self.check_options({"max_tokens_per_rank": max_tokens_per_rank, "share_buffer": share_buffer}, group.size)
        self.max_tokens_per_rank = max_tokens_per_rank
        self.use_fp8 = use_fp8
        self.share_buffer = not self.one_node if share_buffer is None else share_buffer
        self._size_of = partial(_size_of, self.deep_ep, max_tokens_per_rank, group.size, num_experts)
        self._buffers = SizedBuffers(self.name, self.deep_ep, self._size_of)
        self._shares = False
        self.traits = All2AllTraits(
            is_async=True,
            blocks_host=False,
            capturable=True,
            max_lanes=None,
            max_chunks=1 if self.share_buffer else len(self.experts),
            other_ranks=group.size - 1,
            routed=True,
            batched=True,
            cuts_combine=None,
            per_expert=True,
            max_tokens=max_tokens_per_rank,
        )

    @staticmethod
    def check_options(options: Mapping[str, Any], num_ranks: int) -> None:
        check_ranks("deepep_low_latency", num_ranks)
        room = options.get("max_tokens_per_rank")
        if room is not None and not 1 <= room <= _MAX_TOKENS:
            raise ConfigError(f"max_tokens_per_rank must be 1 to {_MAX_TOKENS}, not {room}.")
        if room is not None and room * num_ranks % 4:
            raise ConfigError(f"max_tokens_per_rank = {room} times {num_ranks} ranks must be a multiple of 4.")
        if options.get("share_buffer") is False and not in_one_node(num_ranks):
            raise ConfigError(
                f"share_buffer=False: beyond one node of {NODE} ranks DeepEP makes one low-latency buffer per process, "
                f"but the group has {num_ranks}. Leave it out."
            )

    @staticmethod
    def default_options(sizes: StepSizes, num_ranks: int) -> Mapping[str, int]:
        """See `All2All`: room for the largest decode or verify step, as far as the queues are deep enough."""
        unit = 4 // math.gcd(num_ranks, 4)
        room = -(-sizes.decode // unit) * unit
        return {"max_tokens_per_rank": min(room, _MAX_TOKENS // unit * unit)}

    def dispatch(
        self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor
    ) -> Transfer[BatchedDispatch[LowLatencyHandle]]:
        return self._dispatch(x, topk_ids, topk_weights, 0)

    def dispatch_chunks(
        self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor, blocks: Sequence[range]
    ) -> Sequence[Transfer[BatchedDispatch[LowLatencyHandle]]]:
        """See `All2All`. Each on a buffer of its own, so that all may be under way."""
        masked = ids_of_blocks(topk_ids, blocks, len(self.experts))
        return [self._dispatch(x, ids, topk_weights, chunk) for chunk, ids in enumerate(masked)]

    def _dispatch(
        self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor, chunk: int
    ) -> Transfer[BatchedDispatch[LowLatencyHandle]]:
        self.check_payload(x, topk_ids, topk_weights)
        self._check_shape(x, topk_ids)
        connection = check_launch(x, self.group, "dispatch")
        place = (0, 0) if self.share_buffer else (dbo_current_ubatch_id(), chunk)
        buffer = self._buffers.buffer_for(x, connection, *place)
        buffer.under_way.wait()
        self._clean(buffer, x.shape[1])
        x, ids, weights = x.contiguous(), self.ids(topk_ids), topk_weights.contiguous()
        arriving, rows_per_expert, layout, _, hook = buffer.deep_ep.low_latency_dispatch(
            x, ids, self.max_tokens_per_rank, self.num_experts, use_fp8=self.use_fp8, return_recv_hook=True
        )
        report_sm_use(self.name, obeys=False)  # its kernels are short, but take what SMs they find
        hidden_states, scales = arriving if self.use_fp8 else (arriving, None)
        handle = LowLatencyHandle(buffer, layout, ids, weights)
        return Transfer(
            "dispatch",
            (buffer.launch(hook),),
            lambda: BatchedDispatch(hidden_states, rows_per_expert, scales, handle, self.experts),
            stream_ordered=True,
            wait_launches=True,
            keep=(x, handle, hidden_states, scales, rows_per_expert),
        )

    def combine(self, y: Tensor, handle: LowLatencyHandle) -> Transfer[Tensor]:
        self.check_results(y)
        check_launch(y, self.group, "combine")
        buffer = handle.buffer
        buffer.under_way.wait()
        results, _, hook = buffer.deep_ep.low_latency_combine(
            y, handle.topk_ids, handle.topk_weights, handle.layout, zero_copy=False, return_recv_hook=True
        )
        return Transfer(
            "combine",
            (buffer.launch(hook),),
            lambda: results,
            stream_ordered=True,
            wait_launches=True,
            keep=(y, handle, results),
        )

    def _check_shape(self, x: Tensor, topk_ids: Tensor) -> None:
        tokens, hidden_size = x.shape
        if hidden_size not in HIDDEN_SIZES or (self.use_fp8 and hidden_size % _FP8_HIDDEN):
            sizes = [size for size in HIDDEN_SIZES if not self.use_fp8 or size % _FP8_HIDDEN == 0]
            raise ConfigError(
                f"all2all back end {self.name!r} is compiled for hidden sizes {sizes}{' in fp8' * self.use_fp8}, not "
                f"{hidden_size}. Use 'deepep_high_throughput' or 'torch_dist'."
            )
        if topk_ids.shape[1] > _MAX_TOP_K:
            raise ConfigError(
                f"all2all back end {self.name!r} serves top_k up to {_MAX_TOP_K}, not {topk_ids.shape[1]}."
            )
        self.check_room(tokens)

    # -- buffers --------------------------------------------------------------------------------------------------

    def share_with(self, other: Callable[[int], BufferSize]) -> SizedBuffers:
        """Have one buffer for normal kernels, too, which run in other steps than the low-latency ones.

        Args:
            other: what they need of it, by hidden size.

        Returns:
            Where they find it.
        """
        own = self._size_of
        self._shares = True
        self._buffers = SizedBuffers(self.name, self.deep_ep, lambda hidden: own(hidden).both(other(hidden)))
        return self._buffers

    def _clean(self, buffer: SizedBuffer, hidden_size: int) -> None:
        """Zero what normal kernels may have left, or what is new. All ranks meet in it, and all come here.

        If there are normal kernels, a graph cleans at its first launch: it is unknown what runs before a replay.
        """
        capture = current_capture()
        if capture is None:
            if not buffer.dirty:
                return
            buffer.dirty = False
        else:
            if not self._shares or capture is buffer.cleaned_in:
                return
            buffer.cleaned_in = capture
        buffer.deep_ep.clean_low_latency_buffer(self.max_tokens_per_rank, hidden_size, self.num_experts)
