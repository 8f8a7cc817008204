"""A batch's description at fixed addresses, where the kernels of a captured CUDA graph read it.

A graph records addresses and scalars, not contents. So the tensors of a batch live here, made once for the largest
step, and every step is copied into them before its graph is replayed:

    query_start_loc  [max_reqs + 1]           a padding request starts where the last real one ends: it has no tokens
    seq_lens         [max_reqs]               `seq_len_fill` for a padding request
    block_table      [max_reqs, max_blocks]   0, a block that exists, past a request's length and for padding requests
    slot_mapping     [max_tokens]             the cache's hidden slot for padding

Graphs of all sizes share one set of buffers: a graph of `n` requests reads the first `n` rows.

Tensors that outlive a step, here and in the back ends, are made outside of inference mode, even if the caller is in it:
a tensor made in inference mode can never be written outside of it.
"""

from __future__ import annotations

import importlib.util

import torch
from torch import Tensor

from attention.interface import GraphLimits
from attention.kv_cache import check_positive
from attention.metadata import CommonAttentionMetadata
from ubatch import ConfigError


class GraphBuffers:
    """The static tensors of one lane's captured plans.

    Args:
        limits: the largest step.
        hidden_slot: the slot that padding is written to, `kv_cache.hidden_slot`.
        seq_len_fill: length of a padding request; see `BackendTraits`.

    Attributes:
        query_start_loc: `[max_reqs + 1]` int32.
        seq_lens: `[max_reqs]` int32.
        block_table: `[max_reqs, max_blocks]` int32.
        slot_mapping: `[max_tokens]` int64.

    Raises:
        ConfigError: a limit below 1.
    """

    @torch.inference_mode(False)
    def __init__(
        self,
        limits: GraphLimits,
        block_size: int,
        device: torch.device | str,
        *,
        hidden_slot: int,
        seq_len_fill: int = 1,
    ) -> None:
        check_positive("graph buffers", limits, "max_reqs", "max_tokens", "max_seq_len")
        self.limits = limits
        self.block_size = block_size
        self.hidden_slot = hidden_slot
        self.seq_len_fill = seq_len_fill
        max_blocks = -(-limits.max_seq_len // block_size)
        int32 = torch.int32
        self.query_start_loc = torch.zeros(limits.max_reqs + 1, dtype=int32, device=device)
        self.seq_lens = torch.full((limits.max_reqs,), seq_len_fill, dtype=int32, device=device)
        self.block_table = torch.zeros(limits.max_reqs, max_blocks, dtype=int32, device=device)
        self.slot_mapping = torch.full((limits.max_tokens,), hidden_slot, dtype=torch.int64, device=device)
        self._fused = self.slot_mapping.device.type == "cuda" and importlib.util.find_spec("triton") is not None
        # Scratch for intermediate results of `fill`, so that it allocates nothing.
        self._columns = torch.arange(max_blocks, dtype=int32, device=device)
        self._num_blocks = torch.zeros(limits.max_reqs, dtype=int32, device=device)
        self._past_end = torch.zeros(limits.max_reqs, max_blocks, dtype=torch.bool, device=device)
        self._is_padding = torch.zeros(limits.max_tokens, dtype=torch.bool, device=device)

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return sum(value.nbytes for value in vars(self).values() if isinstance(value, Tensor))

    def fill(self, metadata: CommonAttentionMetadata, num_reqs: int, num_tokens: int) -> None:
        """Copy a batch in, padded to `num_reqs` requests and `num_tokens` tokens.

        Trailing requests without tokens count as padding, too; their length and table row are ignored. Allocates no
        memory on the buffers' device and moves no pointer; waits for the device only if the metadata's tensors are on
        another one.

        Raises:
            ConfigError: the batch is larger than `num_reqs` or `num_tokens`, or those exceed the limits; nothing is
                copied then.
        """
        self.check(metadata, num_reqs, num_tokens)
        real = _num_real_requests(metadata)
        if self._fused and metadata.slot_mapping.device == self.slot_mapping.device:
            self._fill_fused(metadata, real, num_reqs, num_tokens)
            return
        self._fill_requests(metadata, real, num_reqs)
        self._fill_block_table(metadata, real, num_reqs)
        self._fill_slots(metadata.slot_mapping, num_tokens)

    def _fill_fused(self, metadata: CommonAttentionMetadata, real: int, num_reqs: int, num_tokens: int) -> None:
        """Fill all buffers in one launch: some twenty small ones would cost the host more than a graph's replay."""
        from attention.kernels.batch import fill_batch  # imports Triton

        table = metadata.block_table
        fill_batch(
            (self.query_start_loc, self.seq_lens, self.block_table, self.slot_mapping),
            (
                metadata.query_start_loc,
                metadata.seq_lens,
                table if table.stride(-1) == 1 else table.contiguous(),
                metadata.slot_mapping,
            ),
            num_real=real,
            num_actual_tokens=metadata.num_actual_tokens,
            num_reqs=num_reqs,
            num_tokens=num_tokens,
            block_size=self.block_size,
            seq_len_fill=self.seq_len_fill,
            hidden_slot=self.hidden_slot,
        )

    def _fill_requests(self, metadata: CommonAttentionMetadata, real: int, num_reqs: int) -> None:
        self.query_start_loc[: real + 1].copy_(metadata.query_start_loc[: real + 1])
        self.query_start_loc[real + 1 : num_reqs + 1].fill_(metadata.num_actual_tokens)
        self.seq_lens[:real].copy_(metadata.seq_lens[:real])
        self.seq_lens[real:num_reqs].fill_(self.seq_len_fill)

    def _fill_block_table(self, metadata: CommonAttentionMetadata, real: int, num_reqs: int) -> None:
        table = self.block_table[:real]
        columns = min(table.shape[1], metadata.block_table.shape[1])
        table[:, :columns].copy_(metadata.block_table[:real, :columns])
        # Past a request's length the metadata's entries are undefined, and these buffers hold an earlier batch's.
        num_blocks, past_end = self._num_blocks[:real], self._past_end[:real]
        torch.add(self.seq_lens[:real], self.block_size - 1, out=num_blocks)
        num_blocks.floor_divide_(self.block_size)
        torch.ge(self._columns, num_blocks[:, None], out=past_end)
        table.masked_fill_(past_end, 0)
        self.block_table[real:num_reqs].zero_()

    def _fill_slots(self, slots: Tensor, num_tokens: int) -> None:
        mine, is_padding = self.slot_mapping[:num_tokens], self._is_padding[:num_tokens]
        mine[: slots.shape[0]].copy_(slots)
        mine[slots.shape[0] :].fill_(self.hidden_slot)
        torch.lt(mine, 0, out=is_padding)
        mine.masked_fill_(is_padding, self.hidden_slot)

    def check(self, metadata: CommonAttentionMetadata, num_reqs: int, num_tokens: int) -> None:
        """Check that `fill` would take this batch.

        Raises:
            ConfigError: it would not.
        """
        limits = self.limits
        for what, batch, padded, most in (
            ("requests", metadata.num_reqs, num_reqs, limits.max_reqs),
            ("tokens", metadata.slot_mapping.shape[0], num_tokens, limits.max_tokens),
            ("tokens in a request", metadata.max_seq_len, metadata.max_seq_len, limits.max_seq_len),
        ):
            if batch > padded:
                raise ConfigError(f"a graph of {padded} {what} cannot run a batch of {batch}; choose a larger one.")
            if padded > most:
                raise ConfigError(
                    f"a graph of {padded} {what} exceeds the graph buffers, made for {most}; raise the limits given to "
                    "init_graph_buffers, or run this batch without a graph."
                )


def _num_real_requests(metadata: CommonAttentionMetadata) -> int:
    """Number of requests up to the last one that has tokens."""
    starts = metadata.query_start_loc_cpu
    real = metadata.num_reqs
    while real and starts[real] == starts[real - 1]:
        real -= 1
    return real
