"""The parts of a runner, and its graphs: the wrapper, made once, and the captured steps, made for each KV cache.

Whether steps are captured is one of three modes: `none`, `full`, or `auto` (`full` if everything can be captured).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from itertools import chain
from pathlib import Path

import torch
from torch import nn

from attention import StatePool, UBatchAttention
from model_runner.decoder.base import CausalLM, ModelConfig
from model_runner.graphs.steps import CapturedSteps, GraphSetting, GraphSteps
from model_runner.parallel.tensor_parallel import WHOLE, Shard, TensorParallel
from model_runner.settings import RunnerSettings
from model_runner.speculation import StepObserver
from model_runner.step.future_map import FutureMap
from model_runner.step.graph_sizes import GraphFamily, GraphShape, capture_sizes, graph_families
from model_runner.step.logprobs import PromptCarry
from model_runner.step.request import RequestMemory
from model_runner.step.streams import StepStreams
from moe import All2All, FusedMoEModularKernel, traits_in
from ubatch import (
    CapturedGraph,
    CommGroup,
    ConfigError,
    CUDAGraphMode,
    CudaGraphs,
    ForwardMode,
    GraphBackend,
    UBatchConfig,
    UBatchWrapper,
    nearest,
)

_logger = logging.getLogger(__name__)

AUTO = "auto"
_MODES = (AUTO, *(mode.value for mode in CUDAGraphMode))


def resolve_graph_mode(
    asked: str,
    model: nn.Module,
    attention: UBatchAttention,
    *,
    simulated: bool = False,
    tensor_parallel: TensorParallel | None = None,
    steps: str = "steps",
) -> CUDAGraphMode:
    """Resolve the mode to `none` or `full`.

    Args:
        simulated: graphs are captured by something other than CUDA, so any device is allowed.
        tensor_parallel: the ranks of a replica, whose gathers must be capturable.
        steps: name of the steps to capture, for the log.

    Raises:
        ConfigError: the mode is unknown, or it is `full` and something cannot be captured.
    """
    if asked not in _MODES:
        raise ConfigError(f"unknown cudagraph_mode {asked!r}{nearest(asked, _MODES)}")
    if asked == CUDAGraphMode.NONE:
        return CUDAGraphMode.NONE
    device = attention.kv_cache.device
    on_gpu = device.type == "cuda" or simulated
    obstacle = _obstacle(model, attention) if on_gpu else f"CUDA graphs need a GPU, and the model runs on {device}"
    if obstacle is None and tensor_parallel is not None:
        obstacle = _obstacle_to_gathers(tensor_parallel)
    if obstacle is None:
        return CUDAGraphMode.FULL
    if asked == CUDAGraphMode.FULL:
        raise ConfigError(f"cudagraph_mode full: {obstacle}. Change that, or use cudagraph_mode none.")
    if on_gpu:
        _logger.warning("%s are not captured as CUDA graphs: %s", steps, obstacle)
    return CUDAGraphMode.NONE


def _obstacle(model: nn.Module, attention: UBatchAttention) -> str | None:
    """The first part of the model that cannot be captured, as the end of a sentence."""
    if not attention.linear_capturable:
        return "steps of linear attention can be captured with its Triton kernels only, which need a GPU and Triton"
    if not attention.capturable:
        return f"attention back end {attention.decode_name!r} cannot be captured"
    for kernel in model.modules():
        if not isinstance(kernel, FusedMoEModularKernel):
            continue
        if not traits_in(kernel.all2all, ForwardMode.DECODE, 1).capturable:
            return f"the all2all back end {type(kernel.all2all).__name__} cannot be captured in decode steps"
        if not kernel.experts.capturable:
            return f"the experts back end {type(kernel.experts).__name__} cannot be captured"
    return None


def _obstacle_to_gathers(tensor_parallel: TensorParallel) -> str | None:
    """Why transfers between the ranks of a replica cannot be captured, as the end of a sentence; None if they can."""
    if tensor_parallel.carry is not None:
        return "an emulated link holds back what tensor-parallel ranks send each other, which no graph can do"
    if not tensor_parallel.group.stream_ordered(torch.device("cuda")):
        return (
            f"tensor-parallel ranks (tensor_parallel_size {tensor_parallel.size}) gather over "
            f"{tensor_parallel.group.backend}, which blocks the host, and only NCCL's gathers can be captured"
        )
    return None


def capturable_families(
    families: Sequence[GraphFamily], all2all: All2All, asked: str, tensor_parallel_size: int = 1
) -> list[GraphFamily]:
    """The families that the transport can capture: large steps may need a transport path that cannot be captured.

    Args:
        all2all: the model's transport; it can be captured in decode steps of one token.
        asked: `auto` leaves out shapes that cannot be captured, with a warning; `full` raises.

    Raises:
        ConfigError: the mode is `full`, and a shape cannot be captured.
    """

    def fits(shape: GraphShape) -> bool:
        return traits_in(all2all, shape.mode, -(-shape.lane_tokens // tensor_parallel_size)).capturable

    too_large = [shape for family in families for shape in family.shapes if not fits(shape)]
    if not too_large:
        return list(families)
    least = min(too_large, key=lambda shape: shape.lane_tokens)
    what = (
        f"{least.mode} steps of {least.lane_tokens} tokens or more do not fit the way of "
        f"{type(all2all).__name__} that can be captured"
    )
    advice = (
        "Raise max_tokens_per_rank or set worst_case among the all2all options (--all2all-options), or lower "
        "--cudagraph-capture-sizes"
    )
    if asked == CUDAGraphMode.FULL:
        raise ConfigError(f"cudagraph_mode full: {what}. {advice}, or use cudagraph_mode auto.")
    _logger.warning("%s: such steps run eagerly, unless their lanes do fit. %s.", what, advice)
    kept = [replace(family, shapes=tuple(filter(fits, family.shapes))) for family in families]
    return [family for family in kept if any(not shape.engaged for shape in family.shapes)]


class CapturingRunner(RequestMemory):
    """What `ModelRunner` is made of, and its captured steps. Draft networks see their target's runner as one.

    Attributes:
        listen: raises if a step's transfers were incomplete, which a replayed step reports late.
        future_map: tokens that the host does not know yet.
        prompt_carry: state of prompts that run in chunks.
        observer: gets each step's hidden states and tokens, in the steps' order.
    """

    model_path: Path
    settings: RunnerSettings
    group: CommGroup | None
    tensor_parallel: TensorParallel | None
    device: torch.device
    dtype: torch.dtype
    dbo: UBatchConfig
    config: ModelConfig
    model: CausalLM
    all2all: All2All
    listen: Callable[[], None]
    experts_backend: str
    max_num_seqs: int
    states: StatePool | None
    streams: StepStreams
    wrapper: UBatchWrapper
    attention: UBatchAttention
    graphs: GraphSteps | None
    future_map: FutureMap
    prompt_carry: PromptCarry
    observer: StepObserver | None = None
    _graph_backend: GraphBackend | None
    _beside: list[CapturedSteps]

    @property
    def tensor_parallel_size(self) -> int:
        """Number of ranks that share this rank's replica."""
        return 1 if self.tensor_parallel is None else self.tensor_parallel.size

    @property
    def _shard(self) -> Shard:
        """This rank's part of its replica's attention and dense MLPs."""
        return WHOLE if self.tensor_parallel is None else self.tensor_parallel.shard

    def together(self) -> AbstractContextManager[None]:
        """Context for collective work: an error in the `with` block fails the other ranks at once, naming this one.

        After an error the group needs `reset()` on every rank. See `CommGroup.step`.
        """
        return nullcontext() if self.group is None else self.group.step()

    @property
    def graph_shapes(self) -> tuple[GraphShape, ...]:
        """Shapes that `capture_graphs` captures, in its order; empty if all steps run eagerly."""
        return tuple(chain(*(steps.shapes for steps in self.captured_steps)))

    @property
    def captured_steps(self) -> tuple[CapturedSteps, ...]:
        """The captured steps: the model's, and those added by `capture_beside`."""
        return () if self.graphs is None else (self.graphs, *self._beside)

    def capture_beside(self, steps: CapturedSteps) -> None:
        """Add other steps (a draft network's): captured by `capture_graphs`, or at once if that was called before."""
        self._beside.append(steps)
        if self.graphs is not None and self.graphs.captured:
            with self.streams.forward():
                steps.capture()

    def capture_graphs(
        self,
        progress: Callable[[CapturedGraph], None] | None = None,
        choose: Callable[[Sequence[GraphShape]], Sequence[GraphShape]] | None = None,
    ) -> list[CapturedGraph]:
        """Capture decode (and verify) steps, plain and in lanes, and a draft network's steps. Collective; call it once,
        before the first step.

        Args:
            progress: called after each graph.
            choose: selects from the shapes of each of `captured_steps`, in their order; all by default.

        Raises:
            CaptureFailed: a capture failed; the runner then runs its steps eagerly.
            ConfigError: the graphs were captured before.
        """
        graphs: list[CapturedGraph] = []
        with self.together(), self.streams.forward():
            for steps in self.captured_steps:
                graphs += steps.capture(progress, steps.shapes if choose is None else choose(steps.shapes))
        return graphs

    def _make_wrapper(self) -> None:
        """Make the wrapper that runs the model in lanes, and the graph back end; None if nothing is captured.

        Raises:
            ConfigError: the model cannot be captured; see `resolve_graph_mode`.
        """
        asked, backend = self.settings.cudagraph_mode, self.settings.graphs
        simulated, parallel = backend is not None, self.tensor_parallel
        mode = resolve_graph_mode(asked, self.model, self.attention, simulated=simulated, tensor_parallel=parallel)
        if backend is None and mode is CUDAGraphMode.FULL:
            backend = CudaGraphs(self.device)
        self._graph_backend = backend if mode is CUDAGraphMode.FULL else None
        self.wrapper = UBatchWrapper(self.model, self.dbo, mode, self.device, self._graph_backend)

    def _make_graph_steps(self) -> GraphSteps | None:
        """The steps to capture; None if all run eagerly."""
        if self._graph_backend is None:
            return None
        own, ranks = self.settings, self.tensor_parallel_size
        sizes = own.cudagraph_capture_sizes
        sizes = capture_sizes(self.max_num_seqs, self.dbo.cudagraph_capture_sizes or None if sizes is None else sizes)
        families = graph_families(sizes, self.dbo, own.num_speculative_tokens, trees=own.speculative_trees)
        families = capturable_families(families, self.all2all, own.cudagraph_mode, ranks)
        if not families:
            return None
        longest = self.request_table.max_blocks * self.kv_cache.spec.block_size
        all_ranks = 1 if self.group is None else self.group.size
        asked, backend = own.cudagraph_mode, self._graph_backend
        setting = GraphSetting(asked, sizes, longest, backend, self.streams.planning, all_ranks, ranks)
        return GraphSteps(families, self.attention, self.wrapper, setting)
