"""The plan of a batch whose linear layers run in Triton; the same as `LinearPlan`, which is its reference.

    accepted of before   convolve, recur           windows and states move on; outputs are not needed
    its tokens           convolve                  of verified drafts the inputs are kept, and windows stay
                         recur                     requests with few tokens
                         prepare and scan          those with more, in chunks

Kernels read everything that differs from step to step in a record per request, on the device (`kernels.records`). So a
captured graph holds the launches for its number of requests, and a replay needs new records at the same address. A
request of padding has a record with no tokens: its programs end at once, and no slot is read or written for it. A
graph is captured full of padding, so neither warm-up nor capture touches a state.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from attention.linear.kernels.convolve import convolve, delta_gates
from attention.linear.kernels.recur import recur
from attention.linear.kernels.scan import ScanChoice, scan_chunks, tune_scan
from attention.linear.plan import CHUNK, LinearPlan, needs_slots
from attention.linear.states import StatePool
from attention.metadata import CommonAttentionMetadata
from ubatch import ConfigError
from ubatch.kernels.triton_jit import power_of_2
from ubatch.streams import to_device

_FEW = 16
"""Most tokens of a request that run one after another; a chunk costs about as much as so many. Not measured."""
_SMALLEST_CHUNK = 16
_SHARED_MEMORY = 185 << 10
"""Bytes that a chunk of 64 tokens and heads of 128 takes at most; see `kernels_sm90.json` among the tests."""
_COUNT, _ACCEPTED, _FIRST_CHUNK, _FIELDS = 3, 4, 5, 6


class TritonLinearPlan(LinearPlan):
    """See `LinearPlan`."""

    _records: Tensor
    _prompts: tuple[Tensor, ScanChoice] | None = None  # their chunks

    def _prepare(self, metadata: CommonAttentionMetadata, slots: Sequence[int]) -> None:
        device, dtype = self._pool.device, self._pool.windows[0].dtype
        records = _records_of(self._pool, metadata, slots)
        longest = max(record[_COUNT] for record in records)
        self._most = max(_FEW, self._pool.num_kept)
        self._chunk = min(
            _largest_chunk(device, dtype), power_of_2(longest, 1 if longest <= self._most else _SMALLEST_CHUNK)
        )
        self._has_padding = metadata.has_padding
        self._has_accepted = any(record[_ACCEPTED] for record in records)
        self._has_few = any(0 < record[_COUNT] <= self._most for record in records)
        chunks: list[tuple[int, int]] = []
        if longest > self._most:
            for request, record in enumerate(records):
                record[_FIRST_CHUNK] = len(chunks)
                chunks += [(request, start) for start in range(0, record[_COUNT], self._chunk)]
        tensors = [torch.tensor(each) for each in (records, chunks) if each]
        self._records, *of_prompts = to_device(tensors, device)
        if of_prompts:
            self._prompts = of_prompts[0], tune_scan(self._pool.shape, dtype, self._chunk, device)

    def gates(self, a: Tensor, b: Tensor, rate: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        """See `LinearPlan.gates`."""
        return delta_gates(a, b, rate, bias)

    def forward(self, qkv: Tensor, g: Tensor, beta: Tensor, conv: Tensor, layer: int) -> Tensor:
        """See `LinearPlan.forward`."""
        pool, shape, write = self._pool, self._pool.shape, not self._verifies
        size = qkv.shape[0], shape.num_v_heads, shape.v_dim
        if not self.num_tokens:
            return g.new_zeros(size)
        if g.stride() != beta.stride():
            g, beta = g.contiguous(), beta.contiguous()
        out = g.new_zeros(size) if self._has_padding else g.new_empty(size)
        kept, kept_gates = (each[layer].flatten(0, 1) for each in pool.kept)
        of_all: dict[str, Any] = {"records": self._records, "num_kept": pool.num_kept}
        mix = partial(convolve, windows=pool.windows[layer], conv=conv, **of_all)
        step = partial(recur, states=pool.states[layer], shape=shape, most=self._most, **of_all)
        if self._has_accepted:
            accepted_g, accepted_beta = kept_gates.chunk(2, dim=-1)
            mixed = mix(inputs=kept, chunks=None, rows=power_of_2(pool.num_kept), of_kept=True, write=True)
            step(mixed=mixed, g=accepted_g, beta=accepted_beta, out=None, write=True)
        chunks = None if self._prompts is None else self._prompts[0]
        mixed = mix(inputs=qkv, chunks=chunks, rows=self._chunk, kept=kept if self._verifies else None, write=write)
        if self._has_few:
            step(mixed=mixed, g=g, beta=beta, out=out, kept=kept_gates if self._verifies else None, write=write)
        if self._prompts is not None:
            scan_chunks(
                *(mixed, g, beta, pool.states[layer], out, self._records, *self._prompts, shape),
                chunk=self._chunk,
                most=self._most,
                write=write,
            )
        return out


class LinearRecords:
    """The records of the captured plans of one lane, or of the whole batch, at one address.

    Args:
        max_reqs: requests of the largest captured step.
    """

    @torch.inference_mode(False)
    def __init__(self, pool: StatePool, max_reqs: int) -> None:
        self.pool = pool
        self.records = torch.zeros(max_reqs, _FIELDS, dtype=torch.int64, device=pool.device)

    def plan_for_graph(self, metadata: CommonAttentionMetadata) -> LinearGraphPlan:
        """A plan for batches of this one's size and mode. It describes padding alone until `replan`.

        Raises:
            ConfigError: see `LinearPlan`.
        """
        return LinearGraphPlan(self, metadata)


class LinearGraphPlan(TritonLinearPlan):
    """A plan for decode or verify whose records stay at one address."""

    def __init__(self, static: LinearRecords, metadata: CommonAttentionMetadata) -> None:
        self._records = static.records[: metadata.num_reqs]
        super().__init__(static.pool, replace(metadata, state_slots=(0,) * metadata.num_reqs))

    def _prepare(self, metadata: CommonAttentionMetadata, slots: Sequence[int]) -> None:
        self._most, self._chunk = max(_FEW, self._pool.num_kept), power_of_2(metadata.max_query_len)
        self._has_accepted, self._has_few, self._has_padding = self._pool.num_kept > 0, True, True
        self._fill([])

    def replan(self, metadata: CommonAttentionMetadata) -> None:
        """Describe another batch of the plan's mode, padded; see `AttentionBackend.replan`.

        Raises:
            ConfigError: the batch has more requests than the plan, or no slots.
        """
        records: list[list[int]] = []
        if metadata.num_actual_tokens:
            if metadata.state_slots is None:
                raise needs_slots()
            records = [each for each in _records_of(self._pool, metadata, metadata.state_slots) if each[_COUNT]]
        if len(records) > self._records.shape[0]:
            raise ConfigError(
                f"a graph of {self._records.shape[0]} requests cannot run a batch of {len(records)}; choose a larger "
                "one."
            )
        self._fill(records)

    def _fill(self, records: list[list[int]]) -> None:
        padding = [[0] * _FIELDS] * (self._records.shape[0] - len(records))
        (there,) = to_device([torch.tensor(records + padding)], self._pool.device)
        self._records.copy_(there)


@cache
def _largest_chunk(device: torch.device, dtype: torch.dtype) -> int:
    """Tokens of a chunk: half as many where the shared memory of a block would not hold the tiles of all, and as few as
    there can be in float32 and float16, where the parts of more would not fit the registers."""
    if device.type != "cuda":
        return CHUNK
    if dtype != torch.bfloat16:
        return _SMALLEST_CHUNK
    properties = torch.cuda.get_device_properties(device)
    room: int = getattr(properties, "shared_memory_per_block_optin", 0)  # not in every torch
    return CHUNK if room >= _SHARED_MEMORY else CHUNK // 2


def _records_of(pool: StatePool, metadata: CommonAttentionMetadata, slots: Sequence[int]) -> list[list[int]]:
    """The requests' records, without chunks; see `kernels.records`."""
    records = []
    starts = metadata.query_start_loc_cpu[:-1]
    each = zip(metadata.query_lens_cpu, metadata.seq_lens_cpu, starts, slots, strict=True)
    for count, seq_len, first, slot in each:
        before = seq_len - count
        accepted = pool.accepted(slot, before) if count else 0
        records.append([slot, int(before == accepted), first, count, accepted, 0])
    return records
