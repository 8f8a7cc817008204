"""A batch's way through the linear layers, prepared once per step and lane.

    windows of the requests | their tokens    -> short convolution, SiLU -> queries, keys, values
    on a CPU, in C                            -> `scan`, token by token
    else requests with one token              -> `one_token`, all at once
    and requests with more                    -> `chunks`, all at once, the last chunk of each padded
    on a GPU, in Triton                       -> `triton_plan`, for which this is the reference

A request that is cut between lanes needs nothing more: its first part writes window and state in the earlier lane, and
lanes run every layer in lane order, so the next part reads them there, as it reads keys and values (`kv_order`).

Drafts: a step that verifies them moves no state. It keeps the inputs of its tokens, and the request's next step, which
knows how many were accepted, runs these again before its own. So no state ever saw a rejected token:

    verify      accepted of before -> state | root, drafts -> outputs only; their inputs are kept
    any step    accepted of before -> state | its tokens -> state, outputs

Every index of padding is one of the same request: values that are not finite never reach another request.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn import functional as F

from attention.linear.delta_rule import chunks, normalised, one_token, scan
from attention.linear.states import StatePool
from attention.metadata import CommonAttentionMetadata
from ubatch import ConfigError, ForwardMode
from ubatch.kernels import runs_in_c
from ubatch.streams import to_device

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
        ConfigError: the metadata has no slots, or drafts that the pool has no room for, or a tree of drafts: states
            follow a chain.
    """

    def __init__(self, pool: StatePool, metadata: CommonAttentionMetadata) -> None:
        if metadata.state_slots is None:
            raise needs_slots()
        self._verifies = metadata.mode is ForwardMode.TARGET_VERIFY
        if metadata.has_tree or metadata.mode is ForwardMode.DRAFT_EXTEND:
            raise ConfigError("linear attention verifies chains of drafts only: a state cannot follow a tree.")
        if self._verifies and metadata.max_query_len > pool.num_kept:
            raise ConfigError(
                f"{metadata.max_query_len - 1} drafts, but linear attention keeps the inputs of {pool.num_kept} tokens;"
                " set num_speculative_tokens."
            )
        self._pool = pool
        self.num_tokens = metadata.num_actual_tokens
        if self.num_tokens:
            self._prepare(metadata, metadata.state_slots)

    def _prepare(self, metadata: CommonAttentionMetadata, slots: Sequence[int]) -> None:
        each = zip(metadata.query_lens_cpu, metadata.seq_lens_cpu, slots, strict=True)
        present = [(length, seq_len - length, slot) for length, seq_len, slot in each if length]
        lens, starts, slots = zip(*present, strict=True)
        self._new = _Tokens(self._pool, lens, slots, [start == 0 for start in starts])
        self._accepted: tuple[_Tokens, Tensor] | None = None
        accepted = [(self._pool.accepted(slot, start), slot, start) for _, start, slot in present]
        if accepted := [each for each in accepted if each[0]]:
            counts, slots_of, starts = zip(*accepted, strict=True)
            fresh = [count == start for count, start in zip(counts, starts, strict=True)]
            rows = self._kept_rows(zip(counts, slots_of, strict=True))
            self._accepted = _Tokens(self._pool, counts, slots_of, fresh), rows
        if self._verifies:
            self._rows = self._kept_rows([(length, slot) for length, _, slot in present])

    def _kept_rows(self, requests: Iterable[tuple[int, int]]) -> Tensor:
        """Where the pool keeps the inputs of these requests' first tokens: (count, slot) of each."""
        rows = [torch.arange(count) + slot * self._pool.num_kept for count, slot in requests]
        (placed,) = to_device([torch.cat(rows)], self._pool.device)
        return placed

    def gates(self, a: Tensor, b: Tensor, rate: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        """The logarithm of the decay, `rate softplus(a + bias)`, and the strength of writing, `sigmoid(b)`.

        Args:
            a, b: `[T, num_v_heads]`.
            rate, bias: `[num_v_heads]` float32.

        Returns:
            `g` and `beta`, `[T, num_v_heads]` float32.
        """
        return rate * F.softplus(a.float() + bias), b.float().sigmoid()

    def replan(self, metadata: CommonAttentionMetadata) -> None:
        """Describe another batch, in place: for plans of captured steps only.

        Raises:
            ConfigError: this is not one.
        """
        raise ConfigError("a plan of linear attention that was not made for a graph serves one batch. Plan anew.")

    def forward(self, qkv: Tensor, g: Tensor, beta: Tensor, conv: Tensor, layer: int) -> Tensor:
        """Convolve, then update and read the states.

        Args:
            qkv: `[T, conv_dim]`: queries, keys and values of all heads, before the convolution.
            g: `[T, num_v_heads]` float32, logarithm of the decay.
            beta: `[T, num_v_heads]` float32, strength of writing, 0 to 1.
            conv: `[conv_kernel, conv_dim]` float32, the convolution's weights, oldest token first.
            layer: number of the layer among the linear ones.

        Returns:
            `[T, num_v_heads, v_dim]` float32; rows of padding are 0.
        """
        rows, shape = qkv.shape[0], self._pool.shape
        if not self.num_tokens:
            return g.new_zeros(rows, shape.num_v_heads, shape.v_dim)
        used = slice(0, self.num_tokens)
        inputs = qkv[used], torch.cat((g[used], beta[used]), dim=-1)
        if self._accepted is not None:
            tokens, places = self._accepted
            mixed, gates = (kept[layer].flatten(0, 1).index_select(0, places) for kept in self._pool.kept)
            tokens.run(mixed, gates, conv, layer)
        out = self._new.run(*inputs, conv, layer, write=not self._verifies)
        if self._verifies:
            for kept, new in zip(self._pool.kept, inputs, strict=True):
                kept[layer].flatten(0, 1).index_copy_(0, self._rows, new)
        return out if rows == self.num_tokens else F.pad(out, (0, 0, 0, 0, 0, rows - self.num_tokens))


def needs_slots() -> ConfigError:
    """The error of a batch that does not say where its states are."""
    return ConfigError("a model with linear attention needs CommonAttentionMetadata.state_slots in every step.")


class _Tokens:
    """The way of some requests' tokens through a layer.

    Args:
        lens: tokens of each request, at least 1.
        fresh: whether they are the request's first ones.
    """

    def __init__(self, pool: StatePool, lens: Sequence[int], slots: Sequence[int], fresh: Sequence[bool]) -> None:
        self._pool = pool
        self._num_tokens, device, behind = sum(lens), pool.device, pool.shape.conv_kernel - 1
        starts = [0, *accumulate(lens)]
        # Rows of the convolution's input: before its tokens, every request has its window.
        ends = torch.tensor(starts[1:]) + behind * torch.arange(1, len(lens) + 1)
        window = ends[:, None] - torch.tensor(lens)[:, None] - behind + torch.arange(behind)
        inside = torch.ones(self._num_tokens + behind * len(lens), dtype=torch.bool)
        inside[window.flatten()] = False
        last = ends[:, None] - behind + torch.arange(behind)
        ones = [request for request, length in enumerate(lens) if length == 1]
        of_ones = [torch.tensor(ones, dtype=torch.int64), torch.tensor([starts[each] for each in ones])]
        rows = [torch.tensor(starts), window.flatten(), inside.nonzero().flatten(), last.flatten()]
        on_device = to_device([torch.tensor(fresh), torch.tensor(slots), *rows, *of_ones], device)
        self._fresh, self._slots, self._starts, self._window_rows, self._token_rows, *rest = on_device
        self._last_rows, *of_ones = rest
        self._any_fresh = any(fresh)
        self._chunked = None if len(ones) == len(lens) else _chunked(lens, starts, device)
        self._ones = of_ones if ones and self._chunked is not None else None  # requests, tokens

    def run(self, qkv: Tensor, gates: Tensor, conv: Tensor, layer: int, *, write: bool = True) -> Tensor:
        """Arguments as of `LinearPlan.forward`; `gates` are `g` and `beta` side by side.

        Args:
            write: windows and states move on. Else they stay where they are, as if the tokens had not been.
        """
        shape = self._pool.shape
        mixed = self._convolved(qkv, conv, layer, write)
        q, k, v = mixed.split((shape.key_size, shape.key_size, shape.value_size), dim=-1)
        groups = shape.num_v_heads // shape.num_k_heads
        heads = (self._num_tokens, shape.num_k_heads, shape.k_dim)
        q, k = normalised(q.view(heads), shape.k_dim**-0.5), normalised(k.view(heads), 1.0)
        v = v.reshape(self._num_tokens, shape.num_v_heads, shape.v_dim).float()
        g, beta = gates.chunk(2, dim=-1)
        states = self._pool.states[layer]
        if runs_in_c(states, q):
            v = v.contiguous()
            return scan(q, k, v, g, beta, states, self._slots, self._fresh, self._starts, write=write)
        q, k = (each if groups == 1 else each.repeat_interleave(groups, dim=1) for each in (q, k))
        return self._recurrent(q, k, v, g, beta, states, write)

    def _convolved(self, qkv: Tensor, conv: Tensor, layer: int, write: bool) -> Tensor:
        """The convolution's output after SiLU, `[T, conv_dim]`."""
        windows = self._pool.windows[layer]
        held = windows.index_select(0, self._slots)
        if self._any_fresh:
            held.masked_fill_(self._fresh[:, None, None], 0)
        rows = qkv.new_empty(self._token_rows.shape[0] + self._window_rows.shape[0], qkv.shape[1])
        rows.index_copy_(0, self._window_rows, held.flatten(0, 1)).index_copy_(0, self._token_rows, qkv)
        if write:
            windows.index_copy_(0, self._slots, rows.index_select(0, self._last_rows).view_as(held))
        wide, behind = rows.float(), conv.shape[0] - 1
        count = wide.shape[0] - behind
        summed = wide[behind:] * conv[behind]
        for place in range(behind):
            summed.addcmul_(wide[place : place + count], conv[place])
        return F.silu(summed.index_select(0, self._token_rows - behind)).to(qkv.dtype)

    def _recurrent(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, states: Tensor, write: bool
    ) -> Tensor:
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
        if write:
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


def _chunked(lens: Sequence[int], starts: Sequence[int], device: torch.device) -> _Chunked:
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
