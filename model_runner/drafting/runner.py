"""A draft network with its own KV cache, and the batches that it runs.

    extend    new positions of each request, any number of them: tokens that the target ran, or accepted
    chain     steps of one position per request; all of them are planned before the first one runs
    level     the nodes of one level of each request's tree; a node sees the prefix, its ancestors and itself

If the target's steps are captured as CUDA graphs, these are, too (`model_runner.drafting.graphs`).

The draft cache has few layers, and the same pages and slots as the target's cache. So allocation, sharing of prefixes
and retraction of pages apply to both.

Draft steps are never split into lanes: they are too short to hide a transfer behind them.

The batch of draft extend, in which a draft model runs the tokens that a step of the target has accepted:

    target's step     root  d1  d2  d3     root  d1  d2  d3        rows, as verified
    accepted          root  d1             root                    a path from each root; in a tree, with gaps
    draft extend      root  d1  root                               ragged: 1 to D + 1 rows per request

Positions and slots are the target's, in which the accepted tokens follow each other. Back ends whose kernels need
equally many rows of every request pad the queries to the longest and unpad the output
(`attention.backends.few_queries`).

After a step without drafts the draft model runs all of its rows, at the same positions.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from attention import (
    CacheSpec,
    CommonAttentionMetadata,
    MultiStepDraftAttention,
    SpecVerifyInput,
    UBatchAttention,
    make_kv_cache,
)
from model_runner.drafting.graphs import DraftGraphs, can_capture
from model_runner.drafting.network import DraftBatch, DraftDraws, DraftNetwork, draft_chain
from model_runner.graphs.runner_graphs import CapturingRunner
from model_runner.settings import DraftShape
from model_runner.step.request import Request
from model_runner.step.step import Step
from ubatch import ConfigError, ForwardContext, ForwardMode, set_forward_context
from ubatch.streams import to_device, to_host


@dataclass(frozen=True)
class DraftExtendBatch:
    """The batch that a draft model runs after a step.

    Attributes:
        rows: `[T]` int64, indices of the target's rows (hidden states and input ids).
        positions: `[T]` int64, each token's position in its request.
        metadata: for attention; mode DRAFT_EXTEND, or after a step without drafts that step's mode.
        last_rows: `[R]` int64, index of each request's last row in this batch; only of requests that have rows.
    """

    rows: Tensor
    positions: Tensor
    metadata: CommonAttentionMetadata
    last_rows: Tensor


def draft_extend_batch(step: Step, accepted_rows: Sequence[Sequence[int]]) -> DraftExtendBatch:
    """Build the draft-extend batch of a step.

    Args:
        accepted_rows: as `StepObserver.observe` gets them; used for a verify step only.

    Raises:
        ConfigError: in a verify step, `accepted_rows` lacks a share's root and accepted drafts.
    """
    metadata, device = step.metadata, step.input_ids.device
    if step.mode is not ForwardMode.TARGET_VERIFY:
        rows, ends = torch.arange(step.num_tokens), torch.tensor(metadata.query_start_loc_cpu[1:], dtype=torch.int64)
        rows, last = to_device((rows, ends - 1), device)
        return DraftExtendBatch(rows, step.positions, metadata, last)

    firsts = list(metadata.query_start_loc_cpu[:-1])
    if [rows[0] if rows else None for rows in accepted_rows] != firsts:
        raise ConfigError(
            f"the roots of the verify step's requests are its rows {firsts}; accepted rows are "
            f"{[list(rows) for rows in accepted_rows]}. Give the root of each, and its accepted drafts."
        )
    lens = [len(rows) for rows in accepted_rows]
    prefixes = [seq - query for seq, query in zip(metadata.seq_lens_cpu, metadata.query_lens_cpu, strict=True)]
    host = (
        [row for rows in accepted_rows for row in rows],
        [first + place for first, length in zip(firsts, lens, strict=True) for place in range(length)],
        [prefix + place for prefix, length in zip(prefixes, lens, strict=True) for place in range(length)],
        [end - 1 for end in accumulate(lens)],
    )
    rows, places, positions, last = to_device([torch.tensor(each, dtype=torch.int64) for each in host], device)
    seq_lens = [prefix + length for prefix, length in zip(prefixes, lens, strict=True)]
    slots = metadata.slot_mapping.index_select(0, places)
    extend = CommonAttentionMetadata.build(lens, seq_lens, metadata.block_table, slots, ForwardMode.DRAFT_EXTEND)
    return DraftExtendBatch(rows, positions, extend, last)


def draft_cache_spec(network: DraftNetwork, spec: CacheSpec) -> CacheSpec:
    """The draft cache: the network's own layers, with the page size and dtype of the target's cache (`spec`)."""
    config = network.config
    return config.attention.cache_spec(config.num_kv_layers, spec.block_size, spec.dtype)


class DraftRunner:
    """Runs a draft network over its own cache.

    Args:
        runner: the target's runner; its device, pages and attention back ends are used.

    Attributes:
        graphs: its captured steps; None if all run eagerly.

    Raises:
        ConfigError: graphs are required by name, but the network cannot be captured.
    """

    def __init__(self, runner: CapturingRunner, network: DraftNetwork, shape: DraftShape) -> None:
        self.network = network
        self.device = runner.device
        self._table = runner.request_table
        self._shape = shape
        heads, spec = network.config.attention, draft_cache_spec(network, runner.kv_cache.spec)
        self.kv_cache = make_kv_cache(spec, runner.kv_cache.num_blocks, runner.device)
        target = runner.attention
        names = (target.prefill_name, target.decode_name)
        if type(target.shape) is not type(heads):  # the target's back ends may not support this kind of attention
            names = ("auto", "auto")
        self.attention = UBatchAttention(heads, self.kv_cache, *names)
        self._streams = runner.streams
        self._tensor_parallel = runner.tensor_parallel
        num_steps = max(1, shape.num_steps - 1)  # the last draft is not run
        self._steps = MultiStepDraftAttention(heads, self.kv_cache, num_steps, self.attention.decode_name)
        self.graphs: DraftGraphs | None = None
        setting = None if runner.graphs is None else runner.graphs.setting
        if setting is not None and can_capture(network, self.attention, setting):
            self.graphs = DraftGraphs(network, self.attention, self._steps, setting, shape)
            runner.capture_beside(self.graphs)

    def batch(self, requests: Sequence[Request], starts: Sequence[int]) -> DraftBatch:
        """The requests of a call; see `DraftBatch`."""
        rows = [row for request in requests if (row := request.row) is not None]
        on_host = (torch.tensor(starts, dtype=torch.int64), self._table.page_table(rows))
        starts_device, pages = to_device(on_host, self.device)
        return DraftBatch(tuple(requests), tuple(starts), starts_device, torch.tensor(rows), pages)

    def extend(self, metadata: CommonAttentionMetadata, ids: Tensor, positions: Tensor, hidden: Tensor) -> Tensor:
        """Run the positions in the metadata; see `DraftNetwork.__call__`."""
        graph = None if self.graphs is None else self.graphs.find(metadata)
        if self.graphs is not None and graph is not None:
            return self.graphs.step(graph, metadata, ids, positions, hidden)
        with self._streams.planning():  # extends and levels come one after the other, over the same back end
            plan = self.attention.plan(metadata)
        context = ForwardContext(attn_metadata=plan, num_tokens=ids.shape[0], mode=metadata.mode)
        with set_forward_context(context):
            return self.network(ids, positions, hidden)

    def catch_up(self, batch: DraftBatch, ids: Sequence[Sequence[int]], hidden: Tensor) -> Tensor:
        """Run the last positions before each request's `start`, from tokens alone.

        Args:
            ids: the tokens at these positions, at least one per request.
            hidden: `[*, hidden_size]`; passed on, but not used.

        Returns:
            `[R, hidden_size]`, the result at each request's last position.
        """
        lens = [len(tokens) for tokens in ids]
        ranges = [range(start - length, start) for start, length in zip(batch.starts, lens, strict=True)]
        flat, places = (torch.tensor([each for own in parts for each in own]) for parts in (ids, ranges))
        slots = self._table.slots(batch.rows.repeat_interleave(torch.tensor(lens)), places)
        last = torch.tensor(lens).cumsum(0) - 1
        flat, places, slots, last = to_device((flat, places, slots, last), self.device)
        metadata = CommonAttentionMetadata.build(lens, batch.starts, batch.block_table, slots, ForwardMode.DRAFT_EXTEND)
        return self.extend(metadata, flat, places, hidden).index_select(0, last)

    def chain(self, batch: DraftBatch, hidden: Tensor, num_drafts: int) -> tuple[Tensor, Tensor | None]:
        """A chain for every request: draft `i` is run at position `start + i`, except the last draft.

        Args:
            hidden: `[R, hidden_size]`, input of the first drafts' logits.
            num_drafts: number of drafts wanted; a replayed graph always makes its full number.

        Returns:
            Drafts `[R, drafts]` int64, and the probabilities they were drawn from, `[R, drafts, vocab]` float32, or
            None if none was drawn.
        """
        graph = None if self.graphs is None else self.graphs.find_chain(batch.starts)
        made = num_drafts if graph is None else self._shape.num_steps
        draws = None
        if self._shape.sampled and (graph is not None or not all(each.params.greedy for each in batch.requests)):
            draws = DraftDraws.of(batch.requests, made, self.device)
        places = torch.tensor(batch.starts) + torch.arange(num_drafts - 1)[:, None]
        slots = torch.full((made - 1, len(batch.starts)), -1)  # drafts that are not needed are not stored
        slots[: num_drafts - 1] = self._table.slots(batch.rows.expand(num_drafts - 1, -1), places)
        (slots,) = to_device([slots], self.device)
        if self.graphs is not None and graph is not None:
            return self.graphs.chain(graph, batch, slots, hidden, draws)
        plans = self._steps.plan(batch.starts, batch.block_table, slots)
        context = ForwardContext(num_tokens=len(batch.starts), mode=ForwardMode.DECODE)
        return draft_chain(self.network, context, plans, batch.starts_device, hidden, draws)

    def level(self, batch: DraftBatch, depth: int, ids: Tensor, hidden: Tensor, ancestors: Tensor) -> Tensor:
        """Run the nodes of one level of the trees; returns `[R * width, hidden_size]`.

        Args:
            depth: number of levels already run.
            ids: `[R, width]` int64.
            hidden: `[R * width, hidden_size]`.
            ancestors: `[R, width, (depth + 1) * width]` bool: the nodes of this and earlier levels that each node
                sees. In the cache they follow the prefix, level by level.
        """
        requests, width = ids.shape
        prefix_lens = tuple(start + depth * width for start in batch.starts)
        prefixes = torch.tensor(prefix_lens)
        places = prefixes[:, None] + torch.arange(width)
        slots = self._table.slots(batch.rows[:, None].expand(-1, width), places).flatten()
        # In the flat mask each node has a row over prefix and tree; the tree's part is the end of that row.
        row_lens = (prefixes + width).repeat_interleave(width)
        tree = row_lens.cumsum(0)[:, None] - torch.arange((depth + 1) * width, 0, -1)
        where, slots, links = to_device((tree.flatten(), slots, torch.full((requests, width), -1)), self.device)
        mask = torch.ones(int(row_lens.sum()), dtype=torch.bool, device=self.device)
        mask.index_copy_(0, where, ancestors.flatten())
        positions = (batch.starts_device + depth).repeat_interleave(width)
        verify = SpecVerifyInput(width, prefix_lens, ids.flatten(), positions, mask, links, links, links)
        lens, ends = [width] * requests, [prefix + width for prefix in prefix_lens]
        mode = ForwardMode.TARGET_VERIFY
        metadata = CommonAttentionMetadata.build(lens, ends, batch.block_table, slots, mode, verify)
        return self.extend(metadata, ids.flatten(), positions, hidden)

    def read(self, drafts: Tensor) -> list[Any]:
        """Copy drafts `[R, ...]` int64 to the host; all ranks of a replica get those of its first rank."""
        if self._tensor_parallel is not None:
            drafts = self._tensor_parallel.of_first_rank(drafts)
        return to_host(drafts).wait().tolist()
