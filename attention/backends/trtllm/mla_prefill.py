"""The expanded half of `trtllm_mla`: prompts attend over keys and values.

    new tokens    causally among themselves, from the layer's inputs
    prefix        all of a chunk is visible to all new tokens; latents are gathered from the cache, expanded with `w_uk`
                  and `w_uv`, attended and dropped; the result is merged into the result so far, by its LSE

A chunk starts at a page boundary and takes an equal share of every request's prefix. It skips requests whose prefix has
ended: the kernel's output is undefined for a request without keys.

Source: chunked prefix as in SGLang; merging in `attention.lse`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from attention.backends.flashinfer_kernels import RequestBatch, Workspace, ragged_positions, rows_of
from attention.backends.torch.groups import as_stored
from attention.interface import MLAInputs, MLAShape
from attention.kv_cache import MLAKVCache
from attention.lse import merge_states
from ubatch.streams import to_device

EXPANDED_TOKENS = 32 << 10
"""Tokens of all prefixes together that are expanded at once; with 128 heads a token takes 80 kB in bfloat16."""
_LN_2 = math.log(2.0)  # the kernel's LSE is a base-2 logarithm


class RaggedBackend(Protocol):
    """The members of the back end that this module uses.

    Attributes:
        ragged: the kernel that attends over concatenated sequences.
    """

    shape: MLAShape
    kv_cache: MLAKVCache
    ragged: Any
    workspace: Workspace


@dataclass(frozen=True)
class _Ragged:
    """Concatenated sequences. On the device: where each starts, `[n + 1]` int32, and how long it is."""

    start_loc: Tensor
    lens: Tensor
    longest: int

    @classmethod
    def of(cls, lens: Sequence[int], device: torch.device) -> _Ragged:
        host = torch.tensor((*accumulate(lens, initial=0), *lens), dtype=torch.int32)
        (both,) = to_device((host,), device)
        return cls(both[: len(lens) + 1], both[len(lens) + 1 :], max(lens))


@dataclass(frozen=True)
class _Chunk:
    """A piece of the prefixes of some requests.

    Attributes:
        rows: the rows of these requests' queries in the part.
        queries: starts and lengths of the queries.
        keys: starts and lengths of the prefix tokens in this chunk.
        slots: `[keys]` int64, the prefix tokens' slots in the cache.
    """

    rows: slice | Tensor
    queries: _Ragged
    keys: _Ragged
    slots: Tensor


@dataclass(frozen=True)
class ExpandedPart:
    """Requests that attend over keys and values.

    Attributes:
        rows: the rows of their tokens in the step.
        slots: `[n]` int64, the slots of their latents.
        queries: starts and lengths of their queries in this step.
    """

    rows: slice | Tensor
    slots: Tensor
    queries: _Ragged
    chunks: tuple[_Chunk, ...]

    def store(self, backend: RaggedBackend, inputs: MLAInputs, layer: int) -> tuple[Tensor, Tensor]:
        """Write the latents; return the queries `[n, heads, nope + rope]` and the rotated key parts `[n, rope]`."""
        k_rope = inputs.rope.rotate(inputs.k_rope)
        backend.kv_cache.write(layer, inputs.latent, k_rope, self.slots)
        return torch.cat((inputs.q_nope, inputs.rope.rotate(inputs.q_rope)), dim=-1), k_rope

    def attend(self, backend: RaggedBackend, state: tuple[Tensor, Tensor], inputs: MLAInputs, layer: int) -> Tensor:
        """`[n, heads, v_head_dim]`."""
        query, k_rope = state
        pool = backend.kv_cache.pool
        # Rounded as the cache stores them, so that a result does not depend on where a prompt is cut.
        key, value = _expand(inputs, as_stored(pool, inputs.latent, layer), as_stored(pool, k_rope, layer))
        out, lse = self._attend_keys(backend, query, key, value, self.queries, self.queries, causal=True)
        if not self.chunks:
            return out
        out = out.float()
        rank, rows = backend.shape.kv_lora_rank, backend.kv_cache.rows(layer).flatten(0, 1)
        for chunk in self.chunks:
            cached = pool.decode(rows.index_select(0, chunk.slots), layer)
            key, value = _expand(inputs, cached[:, :rank], cached[:, rank:])
            more = self._attend_keys(backend, query[chunk.rows], key, value, chunk.queries, chunk.keys, causal=False)
            out[chunk.rows], lse[chunk.rows] = merge_states(out[chunk.rows], lse[chunk.rows], more[0].float(), more[1])
        return out.to(inputs.q_nope.dtype)

    def _attend_keys(
        self,
        backend: RaggedBackend,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        queries: _Ragged,
        keys: _Ragged,
        *,
        causal: bool,
    ) -> tuple[Tensor, Tensor]:
        """Output `[n, heads, v_head_dim]` and natural LSE `[n, heads]` over some keys."""
        out, lse = backend.ragged(
            query=query,
            key=key,
            value=value,
            workspace_buffer=backend.workspace.get(),
            seq_lens=keys.lens,
            max_q_len=queries.longest,
            max_kv_len=keys.longest,
            bmm1_scale=backend.shape.softmax_scale,
            bmm2_scale=1.0,
            o_sf_scale=1.0,
            batch_size=keys.lens.shape[0],
            window_left=-1,
            cum_seq_lens_q=queries.start_loc,
            cum_seq_lens_kv=keys.start_loc,
            enable_pdl=False,
            is_causal=causal,
            return_lse=True,
        )
        return out, lse * _LN_2


def plan_expanded(kv_cache: MLAKVCache, batch: RequestBatch, rows: slice | Tensor, slots: Tensor) -> ExpandedPart:
    """Plan the part of those requests that have a prompt, or a piece of one, in this step.

    Args:
        rows: the rows of their tokens in the step.
        slots: `[n]` int64, the slots of those tokens.
    """
    block_size = kv_cache.spec.block_size
    share = max(1, EXPANDED_TOKENS // batch.num_reqs // block_size) * block_size
    starts = range(0, max(batch.prefixes), share)
    chunks = tuple(_plan_chunk(batch, start, share, block_size) for start in starts)
    return ExpandedPart(rows, slots, _Ragged.of(batch.query_lens, slots.device), chunks)


def _plan_chunk(batch: RequestBatch, start: int, share: int, block_size: int) -> _Chunk:
    """The chunk with each prefix's tokens from `start` to `start + share`; both are multiples of the page size."""
    device, prefixes = batch.seq_lens.device, batch.prefixes
    members = [request for request, prefix in enumerate(prefixes) if prefix > start]
    lens = [min(share, prefixes[request] - start) for request in members]
    here = batch.select(members)
    owner, place = ragged_positions(lens, device)
    place += start
    pages = here.block_table[owner, place // block_size].long()
    return _Chunk(
        rows=rows_of(batch.query_lens, members, device),
        queries=_Ragged.of(here.query_lens, device),
        keys=_Ragged.of(lens, device),
        slots=pages * block_size + place % block_size,
    )


def _expand(inputs: MLAInputs, latent: Tensor, k_rope: Tensor) -> tuple[Tensor, Tensor]:
    """Keys `[n, heads, nope + rope]` and values `[n, heads, v_head_dim]` of latents `[n, kv_lora_rank]`."""
    heads = inputs.w_uk.shape[0]
    k_nope = F.linear(latent, inputs.w_uk.flatten(0, 1)).unflatten(-1, (heads, -1))
    # One product for all heads. The transpose restores the layout that the values' weights have in the checkpoint.
    value = F.linear(latent, inputs.w_uv.transpose(1, 2).flatten(0, 1)).unflatten(-1, (heads, -1))
    key = torch.cat((k_nope, k_rope[:, None].expand(-1, heads, -1)), dim=-1)
    return key, value
