"""The parts of a runner, and its graphs: the wrapper, made once, and the captured steps, made for each KV cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import chain
from pathlib import Path

import torch

from attention import StatePool, UBatchAttention
from model_runner.decoder.base import CausalLM, ModelConfig
from model_runner.graphs.batches import CapturedSteps, GraphSetting
from model_runner.graphs.mode import capturable_families, resolve_graph_mode
from model_runner.graphs.steps import GraphSteps
from model_runner.parallel.tensor_parallel import WHOLE, Shard, TensorParallel
from model_runner.settings import RunnerSettings
from model_runner.speculation.proposer import StepObserver
from model_runner.step.future_map import FutureMap
from model_runner.step.graph_sizes import GraphShape, capture_sizes, graph_families
from model_runner.step.logprobs import PromptCarry
from model_runner.step.request_memory import RequestMemory
from model_runner.step.streams import StepStreams
from moe import All2All
from ubatch import CapturedGraph, CommGroup, CUDAGraphMode, CudaGraphs, GraphBackend, UBatchConfig, UBatchWrapper


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
