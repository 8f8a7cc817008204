"""Batches with few queries per request, the same number for each: decode kernels take them, and graphs capture them.

A decode kernel wants `[R, Q]` queries. Decode and verify batches have them. In a draft-extend batch some requests have
fewer, so their queries are padded:

    request a      q0 q1 q2      ->    q0 q1 q2      sees prefix + 1, prefix + 2, prefix + 3 tokens
    request b      q0            ->    q0  .  .      the same, if its length is taken to be prefix + 3

A causal kernel aligns the last query with the last token. So a padded request must have length `prefix + Q`: then its
real queries see the right tokens, and the padded queries' results are dropped. Its block table must cover that length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import Tensor

from attention.backends.flashinfer_kernels import RequestBatch, Workspace
from attention.graph_buffers import GraphBuffers
from attention.interface import BackendTraits, GraphLimits
from attention.kv_cache import MLAKVCache, PagedKVCache
from attention.metadata import CommonAttentionMetadata
from attention.modes import MODES
from ubatch import ConfigError, ForwardMode

T = TypeVar("T")
GraphsT = TypeVar("GraphsT", bound="GraphState")


def queries_per_request(name: str, metadata: CommonAttentionMetadata) -> int:
    """Rows per request in a captured graph of this batch, the same for all requests.

    Raises:
        ConfigError: batches of this mode are not captured, or the rows do not divide evenly among the requests.
    """
    if not MODES[metadata.mode].graph:
        raise ConfigError(
            f"attention back end {name!r} captures decode, verify and draft-extend batches, not {metadata.mode.value}."
        )
    rows, expected = metadata.slot_mapping.shape[0], None
    if metadata.mode is ForwardMode.DECODE:
        expected = 1
    elif metadata.spec_verify is not None:
        expected = metadata.spec_verify.num_draft_tokens
    per_request, rest = divmod(rows, max(1, metadata.num_reqs))
    if rest or per_request < 1 or per_request != (expected or per_request) or metadata.max_query_len > per_request:
        raise ConfigError(
            f"a {metadata.mode.value} batch of {metadata.num_reqs} requests and {rows} rows cannot be captured: it "
            f"must be padded to {expected or max(1, metadata.max_query_len)} rows for every request."
        )
    return per_request


class FewQueryBuffers:
    """Tensors of a batch with few queries per request: shared by the graphs of all sizes, or made for one step.

    Args:
        max_reqs: the most requests.
        max_tokens: the most rows of queries, padding included.
    """

    @torch.inference_mode(False)
    def __init__(self, max_reqs: int, max_tokens: int, device: torch.device) -> None:
        self.seq_lens = torch.zeros(max_reqs, dtype=torch.int32, device=device)
        self.query_lens = torch.zeros(max_reqs, dtype=torch.int32, device=device)
        self.query_start_loc = torch.zeros(max_reqs + 1, dtype=torch.int32, device=device)
        self.is_padding = torch.zeros(max_tokens, dtype=torch.bool, device=device)

    @property
    def nbytes(self) -> int:
        """Bytes of all of them."""
        return sum(value.nbytes for value in vars(self).values() if isinstance(value, Tensor))


class FewQueries:
    """The queries of one batch, or of one captured size.

    `update` allocates nothing and moves no pointer, because the kernels of a captured graph read the buffers.

    Args:
        buffers: large enough for these requests and rows.
        num_queries: `Q`.
        num_rows: rows of the step, `T`.
        ragged: whether requests may have fewer than `Q` queries; if not, row `i` belongs to request `i // Q`.

    Attributes:
        seq_lens: `[R]` int32, the lengths passed to the kernel.
        is_padding: `[T]` bool, rows that belong to no request; set in a graph only.
    """

    def __init__(
        self, buffers: FewQueryBuffers, num_reqs: int, num_queries: int, num_rows: int, *, ragged: bool
    ) -> None:
        self.num_reqs = num_reqs
        self.num_queries = num_queries
        self.num_rows = num_rows
        self.ragged = ragged
        self.seq_lens = buffers.seq_lens[:num_reqs]
        self.is_padding = buffers.is_padding[:num_rows]
        self._query_lens = buffers.query_lens[:num_reqs]
        self._query_start_loc = buffers.query_start_loc[: num_reqs + 1]

    @classmethod
    def for_step(cls, batch: RequestBatch) -> FewQueries:
        """The queries of a batch that is not captured."""
        num_queries, num_rows = max(batch.query_lens), batch.num_tokens
        padded = batch.num_reqs * num_queries
        buffers = FewQueryBuffers(batch.num_reqs, padded, batch.seq_lens.device)
        queries = cls(buffers, batch.num_reqs, num_queries, num_rows, ragged=padded != num_rows)
        queries.update(batch.query_start_loc(), batch.seq_lens)
        return queries

    def check(self, metadata: CommonAttentionMetadata) -> None:
        """Check that this captured size can run the batch.

        Raises:
            ConfigError: a request has more queries, or has fewer in a graph that cannot pad them.
        """
        lens = metadata.query_lens_cpu
        if max(lens, default=0) > self.num_queries:
            raise ConfigError(
                f"a graph of {self.num_queries} queries per request cannot run a batch with {max(lens)}; capture a "
                "larger one."
            )
        real = -(-metadata.num_actual_tokens // self.num_queries)
        if not self.ragged and any(length != self.num_queries for length in lens[:real]):
            raise ConfigError(
                f"a graph of {self.num_queries} queries for every request cannot run queries of {list(lens)}: requests "
                "without any must come last."
            )

    def update(self, query_start_loc: Tensor, seq_lens: Tensor) -> None:
        """Describe a batch.

        Args:
            query_start_loc: `[R + 1]` int32.
            seq_lens: `[R]` int32. A padding request gets a length of at least `Q`, so that each of its rows sees a key.
        """
        if not self.ragged:
            torch.clamp(seq_lens, min=self.num_queries, out=self.seq_lens)
            return
        self._query_start_loc.copy_(query_start_loc)
        torch.sub(query_start_loc[1:], query_start_loc[:-1], out=self._query_lens)
        torch.sub(seq_lens, self._query_lens, out=self.seq_lens).add_(self.num_queries)

    def pad(self, x: Tensor) -> Tensor:
        """`[T, ...]` as `[R * Q, ...]`; padding rows are 0."""
        if not self.ragged:
            return x[: self.num_reqs * self.num_queries]
        from attention.kernels.batch import pad_ragged  # imports Triton

        # fp8 is copied as bytes, because only some GPUs support fp8.
        return pad_ragged(_as_bytes(x), self._query_start_loc, self.num_queries).view(x.dtype).flatten(0, 1)

    def unpad(self, x: Tensor) -> Tensor:
        """`[R * Q, ...]` as rows of the step, `[T, ...]`; if `ragged`, rows that belong to no request are 0."""
        if not self.ragged:
            return x
        from attention.kernels.batch import unpad_ragged  # imports Triton

        padded = x.unflatten(0, (self.num_reqs, self.num_queries))
        return unpad_ragged(padded, self._query_start_loc, self.num_rows)

    def zero_padding(self, out: Tensor) -> Tensor:
        """Zero the rows of `out` `[T, heads, d]` that belong to no request, in place; in a graph only."""
        return out.masked_fill_(self.is_padding[:, None, None], 0)

    def finish(self, out: Tensor) -> Tensor:
        """The kernel's output `[R * Q, heads, d]` as the step's rows `[T, heads, d]`, in a graph."""
        return self.zero_padding(self.unpad(out))


class GraphState:
    """The buffers of one lane's graphs: a batch, and its queries.

    Args:
        limits: the largest captured step.
        seq_len_fill: see `BackendTraits`.

    Attributes:
        longest: most tokens of a request, padded queries included; a row of the block table covers all of them.
    """

    def __init__(self, limits: GraphLimits, kv_cache: PagedKVCache | MLAKVCache, seq_len_fill: int) -> None:
        self.limits = limits
        self.longest = limits.max_seq_len + limits.max_tokens
        self.batch = GraphBuffers(
            replace(limits, max_seq_len=self.longest),
            kv_cache.spec.block_size,
            kv_cache.device,
            hidden_slot=kv_cache.hidden_slot,
            seq_len_fill=seq_len_fill,
        )
        self._queries = FewQueryBuffers(limits.max_reqs, limits.max_tokens, kv_cache.device)

    @property
    def nbytes(self) -> int:
        """Bytes of all of them."""
        return self.batch.nbytes + self._queries.nbytes

    def few_queries(self, name: str, metadata: CommonAttentionMetadata) -> FewQueries:
        """The `FewQueries` for this batch's size.

        Raises:
            ConfigError: requests are not padded to the same number of rows, see `queries_per_request`; or there are
                more than the limits allow.
        """
        num_reqs, num_queries = metadata.num_reqs, queries_per_request(name, metadata)
        ragged = metadata.mode is ForwardMode.DRAFT_EXTEND
        self.batch.check(metadata, num_reqs, num_reqs * num_queries)
        return FewQueries(self._queries, num_reqs, num_queries, num_reqs * num_queries, ragged=ragged)

    def fill(self, queries: FewQueries, metadata: CommonAttentionMetadata) -> None:
        """Copy a batch in, padded to the captured size; allocates nothing on the device.

        Raises:
            ConfigError: the batch does not fit the captured size.
        """
        queries.check(metadata)
        if metadata.max_seq_len > self.limits.max_seq_len:
            raise ConfigError(
                f"a request of {metadata.max_seq_len} tokens exceeds the graph buffers, made for "
                f"{self.limits.max_seq_len}; raise the limits given to init_graph_buffers, or run this batch without a "
                "graph."
            )
        batch, num_reqs = self.batch, queries.num_reqs
        batch.fill(metadata, num_reqs, queries.num_rows)
        torch.eq(batch.slot_mapping[: queries.num_rows], batch.hidden_slot, out=queries.is_padding)
        queries.update(batch.query_start_loc[: num_reqs + 1], batch.seq_lens[:num_reqs])


class KernelBackend(Generic[GraphsT]):
    """The base of the back ends on flashinfer's kernels, which compute in `dtypes`: scratch and graph buffers."""

    name: ClassVar[str]
    traits: ClassVar[BackendTraits]
    graphs_kind: type[GraphsT]

    def __init__(self, shape: Any, kv_cache: Any, workspace_bytes: int, dtypes: Sequence[torch.dtype]) -> None:
        dtype = kv_cache.spec.dtype
        if kv_cache.device.type == "cuda" and dtype not in dtypes:  # stand-ins on a CPU take any
            raise ConfigError(
                f"attention back end {self.name!r} computes in {' or '.join(map(str, dtypes))}, not in {dtype}. Choose "
                "another dtype, or another back end."
            )
        self.shape = shape
        self.kv_cache = kv_cache
        self.workspace = Workspace(workspace_bytes, kv_cache.device)
        self._graphs: GraphsT | None = None

    @property
    def nbytes(self) -> int:
        return self.workspace.nbytes + (0 if self._graphs is None else self._graphs.nbytes)

    def init_graph_buffers(self, limits: GraphLimits) -> None:
        self._graphs = self.graphs_kind(limits, self.kv_cache, self.traits.seq_len_fill)

    @property
    def graphs(self) -> GraphsT:
        """The graph buffers; `ConfigError` before `init_graph_buffers`."""
        return self.captured(self._graphs)

    def captured(self, part: T | None) -> T:
        """What only a captured plan has; `ConfigError` if it is None."""
        if part is None:
            raise ConfigError(
                f"attention back end {self.name!r} has no graph buffers; call init_graph_buffers before a capture."
            )
        return part


def _as_bytes(x: Tensor) -> Tensor:
    return x.view(torch.uint8) if x.dtype.itemsize == 1 else x
