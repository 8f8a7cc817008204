"""Makes the parts of a runner that capture steps: the wrapper, made once, and the steps, made for each KV cache."""

from __future__ import annotations

from typing import Protocol

import torch

from attention import KVCache, RequestToTokenTable, UBatchAttention
from model_runner.decoder.base import CausalLM
from model_runner.graphs.batches import GraphSetting
from model_runner.graphs.mode import GraphsAsked, capturable_families, resolve_graph_mode
from model_runner.graphs.steps import GraphSteps
from model_runner.parallel.tensor_parallel import TensorParallel
from model_runner.step.graph_sizes import capture_sizes, graph_families
from model_runner.step.streams import StepStreams
from moe import All2All
from ubatch import CommGroup, CUDAGraphMode, CudaGraphs, GraphBackend, UBatchConfig, UBatchWrapper

__all__ = ["CapturingRunner", "make_graph_steps", "make_wrapper"]


class CapturingRunner(Protocol):
    """The runner whose steps are captured; `ModelRunner` documents each attribute.

    `make_wrapper` needs the first block of attributes, `make_graph_steps` all of them.
    """

    device: torch.device
    dbo: UBatchConfig
    model: CausalLM
    attention: UBatchAttention
    tensor_parallel: TensorParallel | None

    group: CommGroup | None
    all2all: All2All
    max_num_seqs: int
    streams: StepStreams
    kv_cache: KVCache
    request_table: RequestToTokenTable
    wrapper: UBatchWrapper

    @property
    def tensor_parallel_size(self) -> int:
        """Ranks of a replica."""
        ...


def make_wrapper(runner: CapturingRunner, asked: GraphsAsked) -> tuple[UBatchWrapper, GraphBackend | None]:
    """The wrapper that runs the model in lanes, and the graph back end; None if nothing is captured.

    Raises:
        ConfigError: the model cannot be captured; see `resolve_graph_mode`.
    """
    mode = resolve_graph_mode(
        asked.mode,
        runner.device,
        runner.model,
        runner.attention,
        simulated=asked.backend is not None,
        tensor_parallel=runner.tensor_parallel,
    )
    backend = None
    if mode is CUDAGraphMode.FULL:
        backend = CudaGraphs(runner.device) if asked.backend is None else asked.backend
    return UBatchWrapper(runner.model, runner.dbo, mode, runner.device, backend), backend


def make_graph_steps(runner: CapturingRunner, asked: GraphsAsked, backend: GraphBackend | None) -> GraphSteps | None:
    """The steps to capture; None if all run eagerly."""
    if backend is None:
        return None
    sizes = capture_sizes(runner.max_num_seqs, asked.sizes)
    families = graph_families(sizes, runner.dbo, asked.num_speculative_tokens, trees=asked.trees)
    families = capturable_families(families, runner.all2all, asked.mode, runner.tensor_parallel_size)
    if not families:
        return None
    longest = runner.request_table.max_blocks * runner.kv_cache.spec.block_size
    return GraphSteps(
        families,
        runner.attention,
        runner.wrapper,
        GraphSetting(asked.mode, sizes, longest, backend, runner.streams.planning),
        num_ranks=1 if runner.group is None else runner.group.size,
        tensor_parallel_size=runner.tensor_parallel_size,
    )
