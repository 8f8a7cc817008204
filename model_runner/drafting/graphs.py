"""A draft network's steps as CUDA graphs: captured with the model's, and replayed for every batch that fits one.

    chain     all drafts of a chain in one graph: choose a token, run it, choose the next, run it, ...
    level     one level of the trees of drafts: a verify batch with a mask, `topk` nodes of every request
    extend    the tokens that a step of the model has accepted: a draft-extend batch, 1 to D + 1 of every request

A draft network calls no collective, so its steps need no vote. A batch is padded to the smallest graph with room for
its requests; a batch that fits none (mostly prompts) runs eagerly. Inputs are copied to static tensors, and padding is
as in `model_runner.graphs.steps`: token and position 0, no slot, no expert.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from attention import CommonAttentionMetadata, GraphLimits, MultiStepDraftAttention, UBatchAttention
from model_runner.drafting.network import DraftBatch, DraftDraws, DraftNetwork, draft_chain
from model_runner.graphs.runner_graphs import resolve_graph_mode
from model_runner.graphs.steps import CapturedSteps, GraphSetting, batch_to_capture
from model_runner.settings import DraftShape
from model_runner.step.graph_sizes import GraphFamily, GraphShape
from ubatch import CapturedGraph, ConfigError, CUDAGraphMode, ForwardContext, ForwardMode, GraphKey, set_forward_context
from ubatch.graphs import PLAIN, GraphOutput, record
from ubatch.ranks import taking_long
from ubatch.streams import Capture

_logger = logging.getLogger(__name__)


def can_capture(network: DraftNetwork, attention: UBatchAttention, setting: GraphSetting) -> bool:
    """Whether the network's steps are captured; if not, and the mode is `auto`, the log says why.

    Raises:
        ConfigError: graphs are required by name, but the network or its attention cannot be captured.
    """
    if not isinstance(network, nn.Module):
        raise ConfigError(
            f"{type(network).__name__} drafts, but is no nn.Module, so it cannot be checked for CUDA graphs. Make it "
            "one, or use cudagraph_mode none."
        )
    mode = resolve_graph_mode(setting.asked, network, attention, simulated=True, steps="draft steps")
    return mode is CUDAGraphMode.FULL


_Input = tuple[Tensor, Tensor, int]
"""A static input tensor, the values to copy into it, and the fill value for padding rows."""


@dataclass(frozen=True)
class _Captured:
    """One captured graph, its output, and its attention plan (a chain has one plan per step)."""

    graph: CapturedGraph
    output: GraphOutput
    plan: Any


class DraftGraphs(CapturedSteps):
    """The captured steps of one draft network.

    Args:
        network: the draft network; `can_capture` must hold for it.
        attention: attention of its extends and levels.
        steps: attention of its chains.

    Attributes:
        replays: number of replays so far.

    Raises:
        ConfigError: drafts are trees, but the attention back end has no tree masks.
    """

    @torch.inference_mode(False)
    def __init__(
        self,
        network: DraftNetwork,
        attention: UBatchAttention,
        steps: MultiStepDraftAttention,
        setting: GraphSetting,
        shape: DraftShape,
    ) -> None:
        self.replays = 0
        self._network = network
        self._attention = attention
        self._steps = steps
        self._setting = setting
        self._captured: dict[GraphShape, _Captured] = {}
        sizes, several = setting.sizes, shape.num_steps > 1
        chains, trees = several and shape.topk == 1, several and shape.topk > 1
        extends = GraphFamily.plain(sizes, ForwardMode.DRAFT_EXTEND, 1 + shape.num_drafts)
        self._batches = {ForwardMode.DECODE: extends, ForwardMode.DRAFT_EXTEND: extends}
        if trees:
            levels = GraphFamily.plain(sizes, ForwardMode.TARGET_VERIFY, shape.topk, tree=True)
            self._batches[ForwardMode.TARGET_VERIFY] = levels
        self._chains = GraphFamily.plain(sizes, ForwardMode.DECODE, 1) if chains else None
        self.families = tuple({*self._batches.values(), *([] if self._chains is None else [self._chains])})

        most, longest, cache = sizes[-1], setting.max_seq_len, attention.kv_cache
        rows = most * max(family.tokens_per_request for family in self._batches.values())
        attention.init_graph_buffers(GraphLimits(most, rows, longest))
        if chains:
            steps.init_graph_buffers(GraphLimits(most, most, longest))
        self._num_valid = torch.zeros((), dtype=torch.int64, device=cache.device)
        self._ids = torch.zeros(rows, dtype=torch.int64, device=cache.device)
        self._positions = torch.zeros_like(self._ids)
        # A network that reads only tokens needs hidden states for the first drafts of its chains alone.
        read = rows if network.reads_hidden else most
        self._hidden = torch.zeros(read, network.config.hidden_size, dtype=cache.spec.dtype, device=cache.device)
        self._draws: DraftDraws | None = None
        if shape.sampled:
            self._draws = DraftDraws(
                torch.ones(most, 1, device=cache.device),
                torch.zeros(most, shape.num_steps, dtype=torch.float64, device=cache.device),
                torch.zeros(most, dtype=torch.bool, device=cache.device),
            )

    # -- capture ------------------------------------------------------------------------------------------------

    def capture(
        self, progress: Callable[[CapturedGraph], None] | None = None, only: Sequence[GraphShape] | None = None
    ) -> list[CapturedGraph]:
        """See `CapturedSteps`. It is not collective, but peers are told that it takes long, and wait."""
        with taking_long("capturing draft steps"):
            graphs = super().capture(progress, only)
        nbytes, seconds = sum(graph.nbytes for graph in graphs), sum(graph.seconds for graph in graphs)
        message = "captured %d graphs of a draft network, %.1f MiB, in %.1f s"
        _logger.info(message, len(graphs), nbytes / 2**20, seconds)
        return graphs

    def drop(self) -> None:
        """See `CapturedSteps`."""
        for each in self._captured.values():
            each.graph.recording.release()
        self._captured = {}

    def _capture(self, shape: GraphShape) -> tuple[CapturedGraph, _Captured]:
        batch, rows = batch_to_capture(shape, self._attention.kv_cache), shape.num_tokens
        is_chain = shape.mode is ForwardMode.DECODE
        with self._setting.planning():
            plan: Any = (self._steps if is_chain else self._attention).plan_for_graph(batch)
        self._num_valid.fill_(rows)
        context = ForwardContext(attn_metadata=plan, num_tokens=rows, mode=shape.mode, num_valid=self._num_valid)
        inputs = {"positions": self._positions[:rows], "hidden": self._hidden[:rows]}
        body: Callable[[], Any]
        if is_chain:
            draws = None if self._draws is None else DraftDraws(*(each[:rows] for each in self._draws))
            body = partial(draft_chain, self._network, context, plan, **inputs, draws=draws)
        else:
            inputs["input_ids"] = self._ids[:rows]
            body = partial(self._network, **inputs)

        def run(capture: Capture | None) -> Any:
            with set_forward_context(context):
                if capture is None:
                    return body()
                capture.begin()
                with capture.part():
                    return body()

        key = GraphKey((rows,), PLAIN, shape.mode)
        graph, output = record(self._setting.backend, key, inputs, run, lambda: None)
        return graph, _Captured(graph, output, plan)

    # -- a step -------------------------------------------------------------------------------------------------

    def find(self, metadata: CommonAttentionMetadata) -> GraphShape | None:
        """The graph for an extend or a level; None if it must run eagerly."""
        family = self._batches.get(metadata.mode)
        if family is None or metadata.has_tree is not family.tree:
            return None
        if max(metadata.max_query_len, 1) > family.tokens_per_request:
            return None
        return self._fit(family, metadata.num_reqs, metadata.max_seq_len)

    def find_chain(self, starts: Sequence[int]) -> GraphShape | None:
        """The graph for chains whose first drafts have these positions; None if they must be drafted eagerly."""
        if self._chains is None:
            return None
        return self._fit(self._chains, len(starts), max(starts) + self._steps.num_steps)

    def _fit(self, family: GraphFamily, requests: int, longest: int) -> GraphShape | None:
        if not self._captured or longest > self._setting.max_seq_len:
            return None
        return family.fit(1, requests * family.tokens_per_request)

    def step(
        self, shape: GraphShape, metadata: CommonAttentionMetadata, ids: Tensor, positions: Tensor, hidden: Tensor
    ) -> Tensor:
        """Replay the graph that `find` returned for an extend or a level; arguments and result as of `DraftNetwork`."""
        with self._setting.planning():
            self._attention.replan(self._captured[shape].plan, metadata)
        inputs: list[_Input] = [(self._ids, ids, 0), (self._positions, positions, 0)]
        if self._network.reads_hidden:
            inputs.append((self._hidden, hidden, 0))
        out: Tensor = self._replay(shape, ids.shape[0], inputs)
        return out[: ids.shape[0]]

    def chain(
        self, shape: GraphShape, batch: DraftBatch, slots: Tensor, hidden: Tensor, draws: DraftDraws | None
    ) -> tuple[Tensor, Tensor | None]:
        """Draft whole chains by replaying the graph that `find_chain` returned.

        Args:
            slots: `[drafts - 1, R]` int64, KV slots of the drafts; -1 for drafts that are not needed.
            draws: random numbers for drafts that are drawn; None if none is.

        Returns:
            As `draft_chain`.
        """
        count = len(batch.starts)
        with self._setting.planning():
            self._steps.replan(self._captured[shape].plan, batch.starts, batch.block_table, slots)
        inputs: list[_Input] = [(self._positions, batch.starts_device, 0), (self._hidden, hidden, 0)]
        if self._draws is not None and draws is not None:
            inputs += zip(self._draws, draws, (1, 0, 0), strict=True)
        drafts, sources = self._replay(shape, count, inputs)
        return drafts[:count], None if sources is None else sources[:count]

    def _replay(self, shape: GraphShape, count: int, inputs: Sequence[_Input]) -> Any:
        """Copy `count` rows to the static inputs, pad the rest, launch the graph, and copy its output."""
        captured = self._captured[shape]
        captured.graph.recording.take_turn()
        for static, values, padding in inputs:
            static[:count].copy_(values)
            static[count : shape.num_tokens].fill_(padding)
        self._num_valid.fill_(count)
        captured.graph.recording.replay()
        self.replays += 1
        return captured.output.copy()
