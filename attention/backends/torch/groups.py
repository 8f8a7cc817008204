"""How the torch back ends batch a step: requests sorted into groups, each of which is one call per layer.

Request       one request of the step, on the host
bundle        requests of one kind, cut into groups in which padding costs little
TokenRows     the rows of a group's new tokens in the step
indices       copies host lists to the device, in one copy
KeyPages      which blocks of the cache a group gathers, and which token each gathered key is
visible_mask  which keys each query sees: causal, sliding window, tree of drafts
Workspace     the buffer that keys are gathered into: one per lane, kept over all its steps
TorchBackend  the base of both back ends: a shape, a cache, a workspace
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attention.interface import EagerOnly
from attention.kv_cache import CacheSpec, TokenPool, quantize_fp8
from attention.metadata import CommonAttentionMetadata, SpecVerifyInput
from ubatch.streams import to_device

_MAX_PADDING = 0.25  # padding's largest share of a group's work; beyond it, a new group starts
_FREE_PADDING = 64  # rows of padding that cost less than another call
_GATHER_BYTES = 4 << 20  # bytes that a group gathers from one pool: they fit a core's share of the processor's cache


@dataclass(frozen=True)
class Request:
    """One request of the step, on the host.

    Attributes:
        index: its place in the batch.
        start: its first row in the batch.
        query_len: its new tokens.
        seq_len: its total tokens.
        first_visible: the first token that any of its queries sees; 0 without a sliding window.
        first_key: the first token of `first_visible`'s block; gathering starts there.
    """

    index: int
    start: int
    query_len: int
    seq_len: int
    first_visible: int = 0
    first_key: int = 0

    @property
    def prefix(self) -> int:
        """Tokens that were in the cache before this step."""
        return self.seq_len - self.query_len

    @property
    def num_keys(self) -> int:
        """Tokens to gather, from `first_key` on."""
        return self.seq_len - self.first_key


def list_requests(metadata: CommonAttentionMetadata, spec: CacheSpec, window: int | None = None) -> list[Request]:
    """The requests that have tokens in this step, in the batch's order."""
    requests = []
    starts = metadata.query_start_loc_cpu
    for index, (query_len, seq_len) in enumerate(zip(metadata.query_lens_cpu, metadata.seq_lens_cpu, strict=True)):
        if query_len:
            visible = 0 if window is None else max(0, seq_len - query_len + 1 - window)
            first_key = visible // spec.block_size * spec.block_size
            requests.append(Request(index, starts[index], query_len, seq_len, visible, first_key))
    return requests


# -- groups ------------------------------------------------------------------------------------------------------------


@dataclass
class _Bundle:
    """A group while it is formed. Requests come longest first, so the first one sets the query length."""

    requests: list[Request]
    queries: int = 0
    keys: int = 0
    most_keys: int = 0

    def accepts(self, request: Request, max_keys: float, max_requests: float) -> bool:
        """Whether the group with `request` has little padding and stays within its limits."""
        count = len(self.requests) + 1
        padded_queries = count * self.requests[0].query_len
        padded_keys = count * max(self.most_keys, request.num_keys)
        if padded_keys > max_keys or count > max_requests:
            return False
        return _cheap(padded_queries, self.queries + request.query_len) and _cheap(
            padded_keys, self.keys + request.num_keys
        )

    def add(self, request: Request) -> None:
        """Add `request` to the group."""
        self.requests.append(request)
        self.queries += request.query_len
        self.keys += request.num_keys
        self.most_keys = max(self.most_keys, request.num_keys)


def _cheap(padded: int, useful: int) -> bool:
    return padded - useful <= max(_FREE_PADDING, _MAX_PADDING * padded)


def bundle(
    requests: Sequence[Request], max_keys: float = math.inf, max_requests: float = math.inf
) -> list[list[Request]]:
    """Divide requests of one kind into few groups with little padding; a group keeps the batch's order.

    Args:
        max_keys: most keys of a group, padding included; a single request may have more.
        max_requests: most requests of a group.
    """
    bundles: list[_Bundle] = []
    for request in sorted(requests, key=lambda request: (request.query_len, request.num_keys), reverse=True):
        if not bundles or not bundles[-1].accepts(request, max_keys, max_requests):
            bundles.append(_Bundle([]))
        bundles[-1].add(request)
    return [sorted(found.requests, key=lambda request: request.index) for found in bundles]


def gathered_tokens(numbers_per_token: int, dtype: torch.dtype) -> int:
    """How many keys a group may gather so that they are still in the processor's cache when attention reads them."""
    return max(1, _GATHER_BYTES // (numbers_per_token * dtype.itemsize))


# -- rows and keys of a group -----------------------------------------------------------------------------------------


class TokenRows:
    """The rows of a group's tokens in the step: a slice if they are contiguous, else an index.

    Args:
        requests: the group; all are padded to the length `L` of the longest query.
    """

    def __init__(self, requests: Sequence[Request], device: torch.device) -> None:
        self.count = len(requests)
        self.length = length = max(request.query_len for request in requests)
        first = requests[0].start
        uniform = all(request.query_len == length for request in requests)
        adjacent = all(request.start == first + place * length for place, request in enumerate(requests))
        self.rows: slice | Tensor
        self._index: Tensor | None = None
        self._kept: Tensor | None = None
        if uniform and adjacent:
            self.rows = slice(first, first + self.count * length)
            return
        starts = torch.tensor([request.start for request in requests])[:, None]
        lens = torch.tensor([request.query_len for request in requests])[:, None]
        step = torch.arange(length)
        # Padding repeats the request's last token: with causal attention no earlier token sees the padding.
        index = (starts + torch.minimum(step, lens - 1)).flatten()
        kept = (step < lens).flatten().nonzero().flatten()
        self._index, kept, rows = to_device((index, kept, index[kept]), device)
        self.rows = rows
        if not uniform:
            self._kept = kept

    def covers(self, num_rows: int) -> bool:
        """Whether the group has all rows of the step, in order."""
        return isinstance(self.rows, slice) and self.rows == slice(0, num_rows)

    def pick(self, x: Tensor) -> Tensor:
        """This group's part of `x` `[T, ...]`, as `[n, L, ...]`."""
        part = x[self.rows] if self._index is None else x.index_select(0, self._index)
        return part.view(self.count, self.length, *x.shape[1:])

    def flatten(self, out: Tensor) -> Tensor:
        """The group's results `[n, L, heads, d]` as one row per token, in the order of `rows`."""
        flat = out.reshape(self.count * self.length, *out.shape[2:])
        return flat.contiguous() if self._kept is None else flat.index_select(0, self._kept)


class KeyPages:
    """A range of tokens of each request of a group, as blocks to gather.

    Args:
        ranges: the first token (at the start of a block) and the end of the range, one pair per request.

    Attributes:
        num_keys: `K`, gathered keys per request, whole blocks.
        unread: indices of the `n * K` gathered keys that are past their request's range.
        blocks: `[n * K / block_size]`, the blocks to gather.
        positions: `[n, K]` int64, each gathered key's token position in its request, also past the range's end.
    """

    def __init__(
        self,
        requests: Sequence[Request],
        ranges: Sequence[tuple[int, int]],
        metadata: CommonAttentionMetadata,
        block_size: int,
    ) -> None:
        device = metadata.slot_mapping.device
        count = max(1, *(-(-(stop - first) // block_size) for first, stop in ranges))
        self.count = len(requests)
        self.num_keys = count * block_size
        firsts, ends, rows = indices(
            device,
            [first for first, _ in ranges],
            [-(-stop // block_size) for _, stop in ranges],
            [request.index for request in requests],
        )
        first_key = firsts[:, None]
        self.positions = first_key + torch.arange(self.num_keys, device=device)
        # Past a request's own blocks a table may hold anything, also -1, and it may end there.
        columns = first_key // block_size + torch.arange(count, device=device)
        table = metadata.block_table.index_select(0, rows)
        named = table.gather(1, columns.clamp_max(table.shape[1] - 1))
        self.blocks = torch.where(columns < ends[:, None], named, 0).flatten()
        lens = torch.tensor([stop - first for first, stop in ranges])
        unread = (torch.arange(self.num_keys) >= lens[:, None]).flatten().nonzero().flatten()
        (self.unread,) = to_device((unread,), device)

    def gather(self, pool: TokenPool, layer: int, buffer: Tensor) -> Tensor:
        """The layer's keys (or values, or latents), `[n, K, *row]`, in the compute dtype, gathered into `buffer`.

        Entries past a request's range are set to 0. The pool has other requests' or stale data there, and a mask on the
        scores would not stop a nan, because 0 * nan is nan.

        Args:
            buffer: `buffer_shape(row)`, of the pool's storage dtype.
        """
        torch.index_select(pool.blocks(layer), 0, self.blocks, out=buffer)
        if self.unread.shape[0]:
            buffer.view(self.count * self.num_keys, -1).index_fill_(0, self.unread, 0)
        return pool.decode(buffer, layer).view(self.count, self.num_keys, *buffer.shape[2:])

    def buffer_shape(self, *row: int) -> tuple[int, ...]:
        """`[blocks, block_size, *row]`."""
        blocks = self.blocks.shape[0]
        return (blocks, self.count * self.num_keys // blocks, *row)


def visible_mask(
    requests: Sequence[Request],
    positions: Tensor,
    metadata: CommonAttentionMetadata,
    dtype: torch.dtype,
    window: int | None = None,
) -> Tensor:
    """Which keys each query of a group sees, as an additive mask `[n, 1, L, K]`.

    The mask of a padded query is undefined: its result is dropped.

    Args:
        positions: `[n, K]`, each key's token position in its request.
        metadata: the step's metadata; a custom mask replaces the causal one.
        window: how many positions back a query sees, itself included; drafts use `SpecVerifyInput.positions`.
    """
    device = positions.device
    length = max(request.query_len for request in requests)
    prefixes, rows = indices(device, [each.prefix for each in requests], [each.index for each in requests])
    prefix = prefixes[:, None]
    verify = metadata.spec_verify
    if verify is None or verify.custom_mask is None:
        keys, queries = positions, prefix + torch.arange(length, device=device)
        visible = keys[:, None, :] <= queries[:, :, None]
    else:
        visible = _shown(requests, positions, verify, verify.custom_mask)
        queries = verify.positions.view(-1, length)[rows]
        keys = torch.where(positions < prefix, positions, queries.gather(1, (positions - prefix).clamp(0, length - 1)))
    if window is not None:
        visible &= keys[:, None, :] > queries[:, :, None] - window
    return additive_mask(visible, dtype)


def _shown(requests: Sequence[Request], positions: Tensor, verify: SpecVerifyInput, custom_mask: Tensor) -> Tensor:
    """`[n, D, K]` bool: request r's D rows of (prefix + D) entries start at its offset in the flat mask."""
    device = positions.device
    offsets = verify.mask_offsets
    both = indices(device, [offsets[each.index] for each in requests], [each.seq_len for each in requests])
    offset, total = (each[:, None, None] for each in both)
    keys = positions[:, None, :]
    row = torch.arange(verify.num_draft_tokens, device=device)[:, None]
    inside = (keys < total).expand(-1, verify.num_draft_tokens, -1)
    return inside & custom_mask[torch.where(inside, offset + row * total + keys, 0)]


def additive_mask(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """`[n, L, K]` bool as `[n, 1, L, K]`: 0 where visible, -inf elsewhere."""
    return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(~visible, -math.inf).unsqueeze(1)


# -- memory ------------------------------------------------------------------------------------------------------------


class Workspace:
    """A lane's scratch memory: zeroed when allocated, grown when a step needs more, shared by all steps and layers."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._memory = torch.empty(0, dtype=dtype, device=device)

    @property
    def nbytes(self) -> int:
        """Bytes held now."""
        return self._memory.nbytes

    def reserve(self, numbers: int) -> None:
        """Grow to at least `numbers` elements; to a power of two, so that growing sequences rarely grow it."""
        if numbers > self._memory.numel():
            # It outlives the step, and a tensor made in inference mode can never be written outside of it.
            with torch.inference_mode(False):
                self._memory = self._memory.new_zeros(1 << (numbers - 1).bit_length())

    def take(self, *shape: int) -> Tensor:
        """A view of the first elements, in `shape`; the next `take` returns the same memory."""
        return self.take_several(shape)[0]

    def take_several(self, *shapes: Sequence[int]) -> list[Tensor]:
        """As `take`: a view in each of these shapes, one behind the other."""
        numbers = [math.prod(shape) for shape in shapes]
        self.reserve(sum(numbers))
        parts = self._memory[: sum(numbers)].split(numbers)
        return [part.view(*shape) for part, shape in zip(parts, shapes, strict=True)]


class TorchBackend(EagerOnly):
    """The base of the torch back ends; a subclass plans."""

    def __init__(self, shape: Any, kv_cache: Any) -> None:
        self.shape = shape
        self.kv_cache = kv_cache
        self._workspace = Workspace(kv_cache.spec.storage_dtype, kv_cache.device)

    @property
    def nbytes(self) -> int:
        return self._workspace.nbytes


def as_stored(pool: TokenPool, x: Tensor, layer: int) -> Tensor:
    """`x` as it would be read back from the pool: rounded to fp8 and dequantised; unchanged if the pool is not fp8.

    New tokens are rounded like this before attention, so that a result does not depend on where a batch is cut.
    """
    return pool.decode(quantize_fp8(x, pool.scales[layer]), layer) if pool.fp8 else x


def indices(device: torch.device, *values: Sequence[int]) -> tuple[Tensor, ...]:
    """Copy lists of equal length `n` to the device, as `[n]` int64 tensors, in one copy."""
    (all_of_them,) = to_device((torch.tensor(values, dtype=torch.int64),), device)
    return all_of_them.unbind()
