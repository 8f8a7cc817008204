"""A batch's way through the linear layers, prepared once per step and lane.

    windows of the requests | their tokens    -> short convolution, SiLU -> queries, keys, values
    requests with one token                   -> `one_token`, all at once
    requests with more                        -> `chunks`, all at once, the last chunk of each padded

A request that is cut between lanes needs nothing more: its first part writes window and state in the earlier lane, and
lanes run every layer in lane order, so the next part reads them there, as it reads keys and values (`kv_order`).

Every index of padding is one of the same request: values that are not finite never reach another request.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from attention.linear.delta_rule import chunks, normalised, one_token
from attention.linear.states import StatePool
from attention.metadata import CommonAttentionMetadata
from ubatch import ConfigError, ForwardMode
from ubatch.streams.small_copies import to_device

__all__ = ["CHUNK", "LinearPlan"]

CHUNK = 64
"""Tokens of a chunk. A longer one spends more on its triangle, a shorter one more on its state."""


@dataclass(frozen=True)
class _Chunked:
    """The requests with several tokens, in an order of falling length.

    Attributes:
        requests: `[M]`, their numbers in the batch.
        tokens: `[N, C]`, the tokens of every chunk; in padding, the request's last token.
        padding: `[N, 1, C]` bool; None if there is none.
        places: `[T']`, the place of each of their tokens in the flattened chunks, in batch order.
        running: see `chunks`.
    """

    requests: Tensor
    tokens: Tensor
    padding: Tensor | None
    places: Tensor
    running: tuple[int, ...]


class LinearPlan:
    """The plan of one batch or one lane. Valid for that step, and for all of its layers.

    Args:
        metadata: with the requests' slots.

    Raises:
        ConfigError: the metadata has no slots, or verifies drafts: a state cannot forget a rejected one.
    """

    def __init__(self, pool: StatePool, metadata: CommonAttentionMetadata) -> None:
        if metadata.state_slots is None:
            raise ConfigError("a model with linear attention needs CommonAttentionMetadata.state_slots in every step.")
        if metadata.mode in (ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_EXTEND):
            raise ConfigError(f"linear attention has no {metadata.mode} steps: a state cannot forget rejected drafts.")
        self._pool = pool
        self.num_tokens = metadata.num_actual_tokens
        if self.num_tokens:
            self._prepare(metadata, metadata.state_slots)

    def _prepare(self, metadata: CommonAttentionMetadata, slots: Tensor) -> None:
        lens = metadata.query_lens_cpu
        present = [request for request, length in enumerate(lens) if length]
        fresh = [lens[request] == metadata.seq_lens_cpu[request] for request in present]
        starts = [metadata.query_start_loc_cpu[request] for request in present]
        lens = tuple(lens[request] for request in present)
        device, behind = self._pool.device, self._pool.shape.conv_kernel - 1

        # Rows of the convolution's input: before its tokens, every request has its window.
        ends = torch.tensor(lens).cumsum(0) + behind * torch.arange(1, len(lens) + 1)
        window = ends[:, None] - torch.tensor(lens)[:, None] - behind + torch.arange(behind)
        inside = torch.ones(self.num_tokens + behind * len(lens), dtype=torch.bool)
        inside[window.flatten()] = False
        host = [torch.tensor(fresh), window.flatten(), inside.nonzero().flatten(), ends[:, None] - behind]
        if len(present) < len(metadata.query_lens_cpu):
            host.append(torch.tensor(present))
        self._fresh, self._window_rows, self._token_rows, last, *kept = to_device(host, device)
        self._last_rows = (last + torch.arange(behind, device=device)).flatten()
        self._slots = slots.index_select(0, kept[0]) if kept else slots
        self._any_fresh = any(fresh)

        ones = [request for request, length in enumerate(lens) if length == 1]
        self._chunked = None if len(ones) == len(lens) else _chunked(lens, starts, device)
        self._ones: tuple[Tensor, Tensor] | None = None  # requests, tokens
        if ones and self._chunked is not None:
            requests, tokens = to_device([torch.tensor(ones), torch.tensor([starts[each] for each in ones])], device)
            self._ones = requests, tokens

    def forward(self, qkv: Tensor, g: Tensor, beta: Tensor, conv: Tensor, layer: int) -> Tensor:
        """Convolve, then update and read the states.

        Args:
            qkv: `[T, conv_dim]`: queries, keys and values of all heads, before the convolution.
            g: `[T, num_v_heads]` float32, logarithm of the decay.
            beta: `[T, num_v_heads]`, strength of writing, 0 to 1.
            conv: `[conv_kernel, conv_dim]`, the convolution's weights, oldest token first.
            layer: number of the layer among the linear ones.

        Returns:
            `[T, num_v_heads, v_dim]` float32; rows of padding are 0.
        """
        rows, shape = qkv.shape[0], self._pool.shape
        if not self.num_tokens:
            return g.new_zeros(rows, shape.num_v_heads, shape.v_dim, dtype=torch.float32)
        used = slice(0, self.num_tokens)
        mixed = self._convolved(qkv[used], conv, layer)
        q, k, v = mixed.split((shape.key_size, shape.key_size, shape.value_size), dim=-1)
        groups = shape.num_v_heads // shape.num_k_heads
        heads = (self.num_tokens, shape.num_k_heads, shape.k_dim)
        q = normalised(q.view(heads), shape.k_dim**-0.5, groups)
        k = normalised(k.view(heads), 1.0, groups)
        v = v.reshape(self.num_tokens, shape.num_v_heads, shape.v_dim).float()
        out = self._recurrent(q, k, v, g[used].float(), beta[used].float(), layer)
        return out if rows == self.num_tokens else F.pad(out, (0, 0, 0, 0, 0, rows - self.num_tokens))

    def _convolved(self, qkv: Tensor, conv: Tensor, layer: int) -> Tensor:
        """The convolution's output after SiLU, `[T, conv_dim]`; the windows move on."""
        windows = self._pool.windows[layer]
        held = windows.index_select(0, self._slots)
        if self._any_fresh:
            held.masked_fill_(self._fresh[:, None, None], 0)
        rows = qkv.new_empty(self._token_rows.shape[0] + self._window_rows.shape[0], qkv.shape[1])
        rows.index_copy_(0, self._window_rows, held.flatten(0, 1)).index_copy_(0, self._token_rows, qkv)
        windows.index_copy_(0, self._slots, rows.index_select(0, self._last_rows).view_as(held))
        wide, behind = rows.float(), conv.shape[0] - 1
        count = wide.shape[0] - behind
        summed = wide[behind:] * conv[behind]
        for place in range(behind):
            summed.addcmul_(wide[place : place + count], conv[place])
        return F.silu(summed.index_select(0, self._token_rows - behind)).to(qkv.dtype)

    def _recurrent(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, layer: int) -> Tensor:
        states = self._pool.states[layer]
        held = states.index_select(0, self._slots)
        if self._any_fresh:
            held.masked_fill_(self._fresh[:, None, None, None], 0)
        if self._chunked is None:
            out = one_token(q, k, v, g, beta, held)
        elif self._ones is None:
            out = self._in_chunks(q, k, v, g, beta, held, self._chunked)
        else:
            out = self._in_chunks(q, k, v, g, beta, held, self._chunked)
            requests, tokens = self._ones
            own = held.index_select(0, requests)
            q, k, v, g, beta = (each.index_select(0, tokens) for each in (q, k, v, g, beta))
            out.index_copy_(0, tokens, one_token(q, k, v, g, beta, own))
            held.index_copy_(0, requests, own)
        states.index_copy_(0, self._slots, held)
        return out

    def _in_chunks(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, held: Tensor, batch: _Chunked
    ) -> Tensor:
        """`[T, heads, v_dim]`, with undefined rows for requests with one token; changes the others' states."""
        q, k, v, g, beta = (each[batch.tokens].transpose(1, 2).contiguous() for each in (q, k, v, g, beta))
        if batch.padding is not None:
            g, beta = (gate.masked_fill_(batch.padding, 0) for gate in (g, beta))
        own = held.index_select(0, batch.requests)
        out = chunks(q, k, v, g, beta, own, batch.running)
        held.index_copy_(0, batch.requests, own)
        flat = out.transpose(1, 2).flatten(0, 1)
        return flat.index_select(0, batch.places)


def _chunked(lens: tuple[int, ...], starts: list[int], device: torch.device) -> _Chunked:
    order = sorted((request for request, length in enumerate(lens) if length > 1), key=lambda each: -lens[each])
    size = min(CHUNK, lens[order[0]])
    counts = [-(-lens[request] // size) for request in order]
    running = tuple(sum(count > number for count in counts) for number in range(counts[0]))
    firsts = [0]
    for count in running:
        firsts.append(firsts[-1] + count)
    tokens = torch.empty(firsts[-1], size, dtype=torch.int64)
    padding = torch.zeros(firsts[-1], 1, size, dtype=torch.bool)
    places = torch.zeros(sum(lens), dtype=torch.int64)  # tokens of other requests: any place
    for rank, request in enumerate(order):
        length, start = lens[request], starts[request]
        rows = torch.tensor(firsts[: counts[rank]]) + rank
        token = torch.arange(counts[rank] * size).view(-1, size)
        tokens[rows] = start + token.clamp_max(length - 1)
        padding[rows, 0] = token >= length
        places[start : start + length] = (rows[:, None] * size + torch.arange(size)).flatten()[:length]
    requests, tokens, padding_here, places = to_device([torch.tensor(order), tokens, padding, places], device)
    return _Chunked(requests, tokens, padding_here if bool(padding.any()) else None, places, running)
