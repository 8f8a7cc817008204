"""Steps as CUDA graphs: captured once, largest first, then replayed with one launch and no lane threads.

    once       capture     for every shape: static attention plans, one forward context, `UBatchWrapper.capture`
    a step     offer       for the vote: the kind of graph this rank could replay
               agree       after the vote: the shape, the same on every rank, or none
               replay      copy ids and positions to static tensors, replan attention in place, one launch

A graph reads fixed addresses and freezes every number of the host. So all values that change from step to step are in
tensors made here or by the attention back ends. One of them is each lane's count of real tokens: it masks the padding,
so that padding visits no expert. A padding token has id and position 0 and writes to the cache's hidden slot; a padding
request has no tokens and the sequence length that its attention back end requires.

A draft network's steps are captured in the same way (`CapturedSteps`). A batch to capture is full of sequences of the
shortest possible length, and writes nothing to the KV cache.
"""

from __future__ import annotations

import importlib.util
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from attention import (
    CommonAttentionMetadata,
    GraphLimits,
    KVCache,
    SpecVerifyInput,
    UBatchAttention,
    split_attn_metadata,
)
from model_runner.parallel.tensor_parallel import padded_len
from model_runner.step.graph_sizes import GraphFamily, GraphShape, tokens_needed
from model_runner.step.step import Step
from ubatch import (
    CapturedGraph,
    ConfigError,
    Decision,
    DeclineReason,
    ForwardContext,
    ForwardMode,
    GraphBackend,
    UBatchWrapper,
    fingerprint,
    set_forward_context,
)


@dataclass(frozen=True)
class GraphSetting:
    """A runner's settings for CUDA graphs.

    Attributes:
        asked: the `cudagraph_mode` it was made with.
        sizes: sizes to capture, in requests, ascending.
        max_seq_len: tokens of the longest possible sequence.
        backend: captures and replays; all graphs share its pool, as they never run at the same time.
        num_ranks: number of ranks that step together.
        tensor_parallel_size: number of ranks that share a replica.
    """

    asked: str
    sizes: tuple[int, ...]
    max_seq_len: int
    backend: GraphBackend
    planning: Callable[[], AbstractContextManager[None]]
    num_ranks: int
    tensor_parallel_size: int


class CapturedSteps(ABC):
    """The captured steps of one network: a runner's model, or a draft network (`ModelRunner.capture_beside`)."""

    families: tuple[GraphFamily, ...]
    _captured: dict[GraphShape, Any]

    @property
    def shapes(self) -> tuple[GraphShape, ...]:
        """Shapes to capture, in the order of capture: largest first, so that smaller graphs reuse its memory."""
        shapes = [shape for family in self.families for shape in family.shapes]
        return tuple(sorted(shapes, key=lambda shape: (shape.num_tokens, shape), reverse=True))

    @torch.inference_mode()
    def capture(
        self, progress: Callable[[CapturedGraph], None] | None = None, only: Sequence[GraphShape] | None = None
    ) -> list[CapturedGraph]:
        """Capture every shape.

        Args:
            progress: called after each graph.
            only: some of `shapes`, in their order; all by default.

        Raises:
            CaptureFailed: a capture failed; no step is replayed then.
        """
        graphs, captured = [], {}
        for shape in self.shapes if only is None else only:
            graph, captured[shape] = self._capture(shape)
            graphs.append(graph)
            if progress is not None:
                progress(graph)
        self._captured = captured
        return graphs

    @abstractmethod
    def drop(self) -> None:
        """Release all graphs; steps run eagerly until the next capture."""

    @abstractmethod
    def _capture(self, shape: GraphShape) -> tuple[CapturedGraph, Any]:
        """Capture one shape: the graph, and what its replay needs."""


def batch_to_capture(shape: GraphShape, kv_cache: KVCache) -> CommonAttentionMetadata:
    """A full batch for one lane of a graph. Keys and values are not stored; drafts with a tree mask are chains."""
    requests, tokens, device = shape.lane_requests, shape.tokens_per_request, kv_cache.device
    lens = [tokens] * requests
    table = torch.zeros(requests, kv_cache.spec.blocks_for(tokens), dtype=torch.int32, device=device)
    slots = torch.full((requests * tokens,), -1, dtype=torch.int64, device=device)
    drafts = _masked_chains(requests, tokens, device) if shape.tree else None
    return CommonAttentionMetadata.build(lens, lens, table, slots, shape.mode, drafts)


def _masked_chains(requests: int, nodes: int, device: torch.device) -> SpecVerifyInput:
    mask = torch.ones(nodes, nodes, dtype=torch.bool, device=device).tril().flatten().repeat(requests)
    links = torch.full((requests, nodes), -1, dtype=torch.int64, device=device)
    rows = torch.zeros(requests * nodes, dtype=torch.int64, device=device)
    return SpecVerifyInput(nodes, (0,) * requests, rows, rows, mask, links, links, links)


_logger = logging.getLogger(__name__)
_ANY_GRAPH = 1
"""The offer of a rank without tokens: it can replay any graph."""


@dataclass(frozen=True)
class _Captured:
    """The runner's data of one graph.

    Attributes:
        context: the forward context of capture and replays, with the static plans.
        plans: attention plans of its lanes, or of the whole batch.
        rows: every rank's rows in each lane, padding included.
    """

    context: ForwardContext
    plans: tuple[Any, ...]
    rows: tuple[tuple[int, ...], ...]


class GraphSteps(CapturedSteps):
    """The captured steps of one runner.

    Attributes:
        families: see above.
        setting: see above.
        takes_trees: verify steps are captured with a tree mask, so their batches must have one.

    Raises:
        ConfigError: the attention back end cannot be captured.
    """

    @torch.inference_mode(False)
    def __init__(
        self, families: Sequence[GraphFamily], attention: UBatchAttention, wrapper: UBatchWrapper, setting: GraphSetting
    ) -> None:
        self.families = tuple(families)
        self.setting = setting
        self.takes_trees = any(family.tree for family in families)
        self._by_kind = {(family.mode, family.tokens_per_request): family for family in families}
        self._by_fingerprint = {family.fingerprint: family for family in families}
        self._attention = attention
        self._wrapper = wrapper
        self._captured: dict[GraphShape, _Captured] = {}
        self._said: set[ForwardMode] = set()

        device = attention.kv_cache.device
        shapes = self.shapes
        rows = max(shape.num_tokens for shape in shapes)
        self._num_lanes = max(shape.lanes for shape in shapes)
        self._ids = torch.zeros(rows, dtype=torch.int64, device=device)
        self._positions = torch.zeros(rows, dtype=torch.int64, device=device)
        self._num_valid = torch.zeros(self._num_lanes, dtype=torch.int64, device=device)
        self._static = (self._ids, self._positions, self._num_valid)
        self._place = _placement(device)
        requests = max(shape.lanes * shape.lane_requests for shape in shapes)
        per_request = max(family.tokens_per_request for family in families)
        limits = GraphLimits(requests, requests * per_request, self.setting.max_seq_len)
        attention.init_graph_buffers(limits, self._num_lanes if self._num_lanes > 1 else 0)

    # -- capture ------------------------------------------------------------------------------------------------

    @property
    def captured(self) -> bool:
        """Whether `capture` has succeeded."""
        return bool(self._captured)

    def capture(
        self, progress: Callable[[CapturedGraph], None] | None = None, only: Sequence[GraphShape] | None = None
    ) -> list[CapturedGraph]:
        """See `CapturedSteps`. With several ranks all must call it: captured steps are collective, too.

        Raises:
            ConfigError: the graphs were captured before.
        """
        if self._captured:
            raise ConfigError("the graphs of this runner were captured already; capture them once.")
        return super().capture(progress, only)

    def _capture(self, shape: GraphShape) -> tuple[CapturedGraph, _Captured]:
        with self.setting.planning():
            prepared = self._prepare(shape)
        with set_forward_context(prepared.context):
            graph = self._wrapper.capture(self._ids[: shape.num_tokens], self._positions[: shape.num_tokens])
        return graph, prepared

    def drop(self) -> None:
        """See `CapturedSteps`."""
        self._wrapper.drop_graphs()
        self._captured = {}

    def _prepare(self, shape: GraphShape) -> _Captured:
        """Make a shape's static plans and context, and fill its inputs with tokens 0, which write no KV.

        It launches every kernel that a replay launches outside the graph, so that all are compiled before the first
        step.
        """
        rows = shape.lane_tokens
        zeros = torch.zeros(rows, dtype=torch.int64, device=self._ids.device)
        for number in range(shape.lanes):
            self._place(self._static, (zeros, zeros), slice(0, rows), number * rows, rows, number)
        lane = batch_to_capture(shape, self._attention.kv_cache)
        if shape.lanes == 1:
            plans = [self._attention.plan_for_graph(lane)]
        else:
            plans = self._attention.plan_lanes_for_graph([lane] * shape.lanes)
        all_rows = ((rows,) * shape.lanes,) * self.setting.num_ranks
        return _Captured(self._context(shape, plans, all_rows), tuple(plans), all_rows)

    def _context(self, shape: GraphShape, plans: Sequence[Any], rows: tuple[tuple[int, ...], ...]) -> ForwardContext:
        # Tensor-parallel ranks of a replica have equal shares, of which the last ones are padding.
        size, ranks = self.setting.tensor_parallel_size, self.setting.num_ranks
        lane_rows = padded_len(shape.lane_tokens, size)
        share = lane_rows // size
        schedule = self._wrapper.ubatch_config.for_mode(shape.mode).schedule if shape.engaged else None
        reason = None if shape.engaged else DeclineReason.NOT_REQUESTED
        kind, modes = self._by_kind[shape.mode, shape.tokens_per_request], (fingerprint(shape.mode),) * ranks
        decision = Decision(shape.engaged, reason, None, rows, graph_mode=kind.fingerprint, modes=modes)
        lanes = tuple(
            ForwardContext(
                attn_metadata=plan,
                num_tokens=shape.lane_tokens,
                mode=shape.mode,
                tokens_across_ranks=(share,) * ranks,
                decision=decision,
                num_valid=self._num_valid[lane],
                schedule=schedule if shape.single else None,
                local_dp_buffer_len=lane_rows,
                global_dp_buffer_len=share * ranks,
            )
            for lane, plan in enumerate(plans)
        )
        if shape.lanes == 1:
            return lanes[0]
        return ForwardContext(
            num_tokens=shape.num_tokens,
            mode=shape.mode,
            tokens_across_ranks=(share * shape.lanes,) * ranks,
            ubatch_slices=shape.slices,
            lane_contexts=lanes,
            decision=decision,
            schedule=schedule,
        )

    # -- a step -------------------------------------------------------------------------------------------------

    def offer(self, step: Step) -> int:
        """This rank's offer in the vote: 0 if the step must run eagerly here; see `Offer.graph_mode`."""
        if not self._captured:
            return 0
        requests, metadata = len(step.query_lens), step.metadata
        if not requests:
            return _ANY_GRAPH
        family = self._by_kind.get((step.mode, step.query_lens[0]))
        if family is None or family.tree is not metadata.has_tree or metadata.max_seq_len > self.setting.max_seq_len:
            return 0
        if requests > family.max_requests():
            self._say_once(family, requests, "", family.max_requests())
            return 0
        return family.fingerprint

    def _say_once(self, family: GraphFamily, requests: int, kind: str, room: int) -> None:
        if family.mode not in self._said:
            self._said.add(family.mode)
            message = (
                "a %s step of %d requests runs eagerly: the largest CUDA graph%s has room for %d "
                "(--cudagraph-capture-sizes, --max-cudagraph-capture-size). Said once."
            )
            _logger.warning(message, family.mode, requests, kind, room)

    def agree(self, step: Step) -> Step:
        """Add the shape that all ranks replay in this step; if none fits, all run eagerly, with a warning.

        Raises:
            ConfigError: other ranks replay graphs that this rank has not captured.
        """
        decision = step.decision
        if not decision.graph_mode:
            return step
        family = self._by_fingerprint.get(decision.graph_mode)
        if family is None:
            raise ConfigError(
                "the other ranks replay graphs that this rank has not captured. Give all ranks the same "
                "cudagraph_capture_sizes, thresholds and drafts."
            )
        shape = family.fit(*tokens_needed(decision), single=decision.engaged and decision.num_lanes == 1)
        if shape is None and not decision.engaged:
            requests = tokens_needed(decision)[1] // family.tokens_per_request
            self._say_once(family, requests, " without overlap", family.max_requests(plain=True))
        return replace(step, graph=shape, decision=decision if shape is not None else replace(decision, graph_mode=0))

    def replay(self, step: Step, shape: GraphShape) -> Tensor:
        """Run a step as its graph, which has `shape`; without requests, the whole graph is padding.

        Returns:
            `[T, hidden_size]`, as of an eager step: in the batch's order, without padding.
        """
        captured, rows = self._captured[shape], shape.num_tokens
        pieces = _pieces(step, shape)
        for lane, (start, tokens) in enumerate(pieces):
            self._place(self._static, (step.input_ids, step.positions), tokens, start, shape.lane_tokens, lane)
        with self.setting.planning():
            if step.slices is None:
                self._attention.replan(captured.plans[0], step.metadata)
            else:
                self._attention.replan_lanes(captured.plans, split_attn_metadata(step.slices, step.metadata))
        # The graph's row counts (tokens and padding) take the place of the step's token counts.
        context = replace(captured.context, decision=replace(step.decision, tokens=captured.rows))
        with set_forward_context(context):
            hidden: Tensor = self._wrapper(self._ids[:rows], self._positions[:rows])
        if shape.lanes == 1:
            return hidden[: step.num_tokens]
        return torch.cat([hidden[start : start + tokens.stop - tokens.start] for start, tokens in pieces])


def place_in_torch(
    static: tuple[Tensor, Tensor, Tensor], batch: tuple[Tensor, Tensor], tokens: slice, start: int, rows: int, lane: int
) -> None:
    """Reference of `model_runner.kernels.tokens.place_lane`, in torch."""
    count = tokens.stop - tokens.start
    for room, values in zip(static, batch, strict=False):
        room[start : start + count].copy_(values[tokens])
        room[start + count : start + rows].zero_()
    static[2][lane].fill_(count)


def _placement(device: torch.device) -> Callable[..., None]:
    """The function that copies ids and positions to the static inputs: one Triton launch if possible, else torch."""
    if device.type == "cuda" and importlib.util.find_spec("triton") is not None:
        from model_runner.kernels.tokens import place_lane

        return place_lane
    return place_in_torch


def _pieces(step: Step, shape: GraphShape) -> list[tuple[int, slice]]:
    """For each lane: its first row in the graph, and its tokens in the step."""
    if step.slices is None:
        return [(0, slice(0, step.num_tokens))]
    return [(lane * shape.lane_tokens, piece.token_slice) for lane, piece in enumerate(step.slices)]
