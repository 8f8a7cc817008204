"""The model runner: a checkpoint on this rank, with all that its steps need. How a step runs is in `step_runner`."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path

import torch

from attention import BlockAllocator, CacheSpec, KVCache, RequestToTokenTable, StatePool, UBatchAttention, make_kv_cache
from model_runner.auto.step_cost import split_cost
from model_runner.auto.step_settings import StepSettings
from model_runner.backend_choice import resolve_attention, resolve_experts, resolve_fp8_blocks
from model_runner.decoder.base import CausalLM, ExpertParallel, check_tensor_parallel
from model_runner.drafting.proposer import DraftProposer
from model_runner.drafting.setting import DraftSetting
from model_runner.errors import fits_in_memory
from model_runner.graphs.batches import CapturedSteps
from model_runner.graphs.mode import GraphsAsked
from model_runner.graphs.runner_graphs import make_graph_steps, make_wrapper
from model_runner.memory.host_memory import keep_freed_memory
from model_runner.memory.kv_memory import KVMemory
from model_runner.memory.memory_profile import CudaMemory, DeviceMemory, measured_blocks
from model_runner.models.registry import read_model
from model_runner.parallel.tensor_parallel import make_tensor_parallel
from model_runner.parallel.transport import check_schedules, make_transport
from model_runner.pending_step import SamplingContext
from model_runner.runner_options import check_max_model_len, is_fp8, refuse_trees, with_group
from model_runner.speculation.accept import Acceptance
from model_runner.step.future_map import FutureMap
from model_runner.step.graph_sizes import GraphShape
from model_runner.step.logprobs import PromptCarry
from model_runner.step.request import Request
from model_runner.step.request_memory import RequestMemory
from model_runner.step.streams import StepStreams
from model_runner.step_runner import StepRunner
from model_runner.weights.dummy_weights import open_checkpoint
from model_runner.weights.fp8_projections import log_projections
from model_runner.weights.kv_scales import load_kv_scales
from model_runner.weights.weight_pass import Progress
from model_runner.weights.weights import Checkpoint
from moe import All2All, EmulatedLink, StepSizes, TellsLater
from ubatch import CapturedGraph, CommGroup, CUDAGraphMode, GraphBackend, UBatchConfig, UBatchStatistics
from ubatch.ranks.long_calls import taking_long
from ubatch.schedules.modes import MODE_KEYS
from ubatch.streams.streams import StreamBackend

__all__ = ["ModelRunner"]

_DBO_AUTO = "dbo_auto is gone in the next release: dbo_kinds names the kinds of steps that decide for themselves."


class ModelRunner(StepRunner):
    """A model of a checkpoint on this rank, with its KV cache.

    Args:
        model_path: the folder of a Hugging Face checkpoint.
        load_format: `dummy` makes random weights, also for a draft network; `auto` and `safetensors` read the files.
        group: all ranks, which share the experts and vote; None for a single rank.
        tensor_parallel_size: ranks that share a replica's attention and dense MLPs, rank = dp_rank * this + tp_rank;
            they launch the same steps. See `model_runner.parallel.tensor_parallel`.
        all2all_backend: how tokens reach their experts; `auto` and None choose, see `model_runner.parallel.transport`.
        all2all_options: its options; those left out are derived from `max_num_seqs`, `max_num_batched_tokens` and
            `num_speculative_tokens`.
        link: emulated link for all transfers between ranks: to experts, gathers and scatters; None for the real one.
        dbo: when and how to overlap; its `group` is set to `group`.
        dbo_kinds: `decode`, `prefill`, `verify`: steps that overlap only if running steps show that it pays; the
            thresholds of the others are obeyed. See `StepSettings`; `step_settings.policy` has the result.
        dbo_auto: deprecated; `dbo_kinds=("decode", "prefill", "verify")` does the same.
        attention_backend: name; `auto` is the fastest that this model can use, see `model_runner.backend_choice`.
        prefill_attention_backend: another one for batches with a prefill.
        decode_attention_backend: another one for decode batches.
        experts_backend: name; `auto` is the fastest, on a GPU of `triton`, `flashinfer` and `grouped_mm`, on a CPU of
            `native`, `packed` and `grouped`. With `native`, projections are packed, too: only the layout of its
            kernels is kept.
        block_size: tokens per KV block (page).
        kv_cache_dtype: `auto` stores the model's dtype; `fp8` one byte per number, with the checkpoint's static scales
            if it has some.
        num_kv_blocks: size of the KV cache in blocks; or
        kv_cache_memory: its size in bytes, 256 MiB by default, without a draft network's cache; or
        gpu_memory_utilization: share of a GPU's memory; the cache gets what everything else leaves of it. This is
            measured: the largest step runs, and graphs are captured and released; collective. See `KVMemory`.
        max_num_seqs: most requests that run at once.
        max_num_batched_tokens: most tokens of a step, to size memory and transports. The caller must keep to it.
        max_model_len: longest sequence in tokens, prompt and output together; by default the model's own limit.
        allow_long_max_model_len: it may be longer than the model's limit, for which the model was not trained.
        cudagraph_mode: `none`; `full` replays decode, verify and draft steps as CUDA graphs, after `capture_graphs`;
            `auto` is `full` on a GPU if attention, experts and transport can be captured. Prefills run eagerly.
        cudagraph_capture_sizes: sizes to capture, in requests; by default those of `dbo`, or the default ones.
        num_state_snapshots: snapshots of recurrent states that a prefix cache may keep; not used by a model without
            linear attention.
        num_speculative_tokens: most drafts of a request in a verify step; 0 for none.
        speculative_trees: drafts may be trees. Captured steps then have a mask even for chains.
        acceptance: when drafts of sampled requests are accepted.
        draft: the draft network, for which memory is reserved; none by default.
        dtype: dtype of the model's computation and of the KV cache.
        device: device of the model.
        streams: stream back end of the device; its own streams by default.
        graphs: back end that captures and replays; CUDA by default.
        memory: measures the device's memory; CUDA by default.
        on_weights: called with the bytes of weights read so far, and the bytes that this rank reads in all.

    Attributes:
        link: the emulated link between the ranks; None for the real one.
        states: recurrent states of `max_num_seqs` requests; None for a model without linear attention.
        experts_backend: the resolved name; draft networks use it, too.
        graphs: the captured steps; None if all run eagerly.
        draft: the loaded draft network; None if there is none.
        proposer: the proposer around the draft network, see `set_observer`; None if there is none.
        tensor_parallel: this rank's place in its replica; None if the rank is a replica by itself.

    Raises:
        CheckpointError: the checkpoint cannot be loaded; see `model_runner.errors`.
        ConfigError: a back end is unknown, the ranks do not divide the experts, `tensor_parallel_size` does not divide
            heads or dense MLPs, or settings contradict each other.
    """

    proposer: DraftProposer | None

    def __init__(
        self,
        model_path: str | Path,
        *,
        load_format: str = "auto",
        group: CommGroup | None = None,
        tensor_parallel_size: int = 1,
        all2all_backend: str | None = None,
        all2all_options: Mapping[str, object] | None = None,
        link: EmulatedLink | None = None,
        dbo: UBatchConfig | None = None,
        dbo_kinds: Sequence[str] = (),
        dbo_auto: bool = False,
        attention_backend: str = "auto",
        prefill_attention_backend: str | None = None,
        decode_attention_backend: str | None = None,
        experts_backend: str = "auto",
        block_size: int = 16,
        kv_cache_dtype: str = "auto",
        num_kv_blocks: int | None = None,
        kv_cache_memory: int | None = None,
        gpu_memory_utilization: float | None = None,
        max_num_seqs: int = 256,
        max_num_batched_tokens: int | None = None,
        max_model_len: int | None = None,
        allow_long_max_model_len: bool = False,
        cudagraph_mode: str = "none",
        cudagraph_capture_sizes: Sequence[int] | None = None,
        num_state_snapshots: int = 0,
        num_speculative_tokens: int = 0,
        speculative_trees: bool = False,
        acceptance: Acceptance = Acceptance.MATCH,
        draft: DraftSetting | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        streams: StreamBackend | None = None,
        graphs: GraphBackend | None = None,
        memory: DeviceMemory | None = None,
        on_weights: Progress | None = None,
    ) -> None:
        self.model_path = Path(model_path)
        self.load_format = load_format
        self.group = group
        self.link = link
        self.device = torch.device(device)
        self.dbo = with_group(dbo if dbo is not None else UBatchConfig(), group)
        self.dtype = dtype
        self.max_num_seqs = max_num_seqs
        self.num_speculative_tokens = num_speculative_tokens
        fp8 = is_fp8(kv_cache_dtype)
        size = KVMemory(self.device, num_kv_blocks, kv_cache_memory, gpu_memory_utilization, memory is not None)
        if self.device.type == "cpu":
            keep_freed_memory()

        options = {"dtype": dtype, "device": self.device, "streams": streams, "progress": on_weights}
        checkpoint = open_checkpoint(model_path, load_format, **options)
        kind, self.config = read_model(checkpoint)
        limits = self.config.max_position_embeddings, self.config.full_attention_length
        self.max_model_len = check_max_model_len(max_model_len, *limits, allow_long=allow_long_max_model_len)
        if self.max_model_len > self.config.max_position_embeddings:
            self.config = replace(self.config, max_position_embeddings=self.max_model_len)
        check_tensor_parallel(self.config, tensor_parallel_size)
        refuse_trees(len(self.config.linear_layers), speculative_trees)
        self.tensor_parallel = make_tensor_parallel(group, tensor_parallel_size, link)
        of_experts = None if self.tensor_parallel is not None and not self.config.num_experts else link
        steps = StepSizes(
            max_num_seqs * (1 + num_speculative_tokens),
            max_num_batched_tokens,
            captured=cudagraph_mode != CUDAGraphMode.NONE and (self.device.type == "cuda" or graphs is not None),
        ).shared_by(tensor_parallel_size)
        self.all2all: All2All = make_transport(
            all2all_backend, group, of_experts, self.config.num_experts, all2all_options, steps
        )
        self.experts_backend = resolve_experts(
            experts_backend,
            self.config,
            self.all2all,
            dtype,
            self.device,
            dbo=self.dbo,
            group=group,
            quantization=checkpoint.quantization,
        )
        blocks = resolve_fp8_blocks(
            self.experts_backend, self.config, checkpoint.quantization, dtype, self.device, dbo=self.dbo
        )
        if self.config.num_experts:
            verifies = num_speculative_tokens > 0
            check_schedules(self.dbo, self.all2all, self.experts_backend, self.device, verifies=verifies)
        parallel = ExpertParallel(self.all2all, self.experts_backend, self.tensor_parallel, blocks.experts)
        checkpoint.projection_block = blocks.projections
        with taking_long("loading the model"), fits_in_memory(f"the weights of {self.model_path}"):
            self.model: CausalLM = kind.load(self.config, checkpoint, parallel).eval()
            log_projections(checkpoint)
            self.draft = None if draft is None else draft.load(self)

        self.split_cost = split_cost(
            self.model, several_ranks=group is not None and group.size > 1, tensor_parallel_size=tensor_parallel_size
        )
        if dbo_auto:
            warnings.warn(_DBO_AUTO, DeprecationWarning, stacklevel=2)
        self.step_settings = StepSettings(self.dbo, group, self.device, MODE_KEYS if dbo_auto else dbo_kinds)
        self.streams = StepStreams(self.device, streams, group)
        self.states: StatePool | None = None
        if self.config.linear is not None and self.config.linear_layers:
            heads = parallel.shard.linear(self.config.linear)
            layers = len(self.config.linear_layers)
            self.states = StatePool(
                heads, layers, max_num_seqs, dtype, self.device, num_speculative_tokens, num_state_snapshots
            )
        shape = parallel.shard.attention(self.config.attention)
        spec = shape.cache_spec(self.config.num_kv_layers, block_size, dtype, fp8=fp8)
        backends = prefill_attention_backend or attention_backend, decode_attention_backend or attention_backend

        def make_attention(kv_cache: KVCache) -> UBatchAttention:
            names = resolve_attention(*backends, shape, kv_cache, group=group)
            return UBatchAttention(shape, kv_cache, *names, states=self.states)

        self._acceptance = acceptance
        self._beside: list[CapturedSteps] = []
        if cudagraph_capture_sizes is None:
            cudagraph_capture_sizes = self.dbo.cudagraph_capture_sizes or None
        asked = GraphsAsked(cudagraph_mode, graphs, cudagraph_capture_sizes, num_speculative_tokens, speculative_trees)
        open_cache = partial(self._open_cache, spec, make_attention, checkpoint, asked)

        def measure(share: float) -> int:
            device = CudaMemory(self.device) if memory is None else memory
            return measured_blocks(self, spec, share, open_cache, device, max_num_batched_tokens)

        num_blocks = size.num_blocks(spec, measure)
        if self.tensor_parallel is not None:  # memory may differ, but all must admit the same requests
            num_blocks = int(self.tensor_parallel.group.least(num_blocks))
        open_cache(num_blocks)
        checkpoint.close()

    def _open_cache(
        self,
        spec: CacheSpec,
        make_attention: Callable[[KVCache], UBatchAttention],
        checkpoint: Checkpoint,
        capture: GraphsAsked,
        num_blocks: int,
    ) -> None:
        """Make a KV cache and everything that holds its addresses; a previous cache is closed."""
        if hasattr(self, "kv_cache"):
            self._close_cache()
            gc.collect()  # reference cycles may hold tensors
        self.kv_cache = make_kv_cache(spec, num_blocks, self.device)
        if spec.fp8:
            load_kv_scales(checkpoint, self.kv_cache)
        self.allocator = BlockAllocator(self.kv_cache.num_blocks)
        longest = min(spec.blocks_for(self.max_model_len), num_blocks)  # of a request; rows of a made-up length cost GB
        self.request_table = RequestToTokenTable(self.max_num_seqs, longest, spec.block_size)
        self._memory = RequestMemory(self.request_table, self.allocator, spec.blocks_for, self.max_model_len)
        self.attention = make_attention(self.kv_cache)
        if not hasattr(self, "wrapper"):
            self.wrapper, self._graph_backend = make_wrapper(self, capture)
        self.graphs = make_graph_steps(self, capture, self._graph_backend)
        self._sampling = SamplingContext(
            compute_logits=lambda hidden: self.model.compute_logits(hidden),
            vocab_size=self.config.vocab_size,
            eos_token_ids=self.config.eos_token_ids,
            future_map=FutureMap(self.max_num_seqs, self.device),
            prompt_carry=PromptCarry(),
            together=self.together,
            streams=self.streams,
            kv_cache=self.kv_cache,
            tensor_parallel=self.tensor_parallel,
            acceptance=self._acceptance,
            listen=self.all2all.listen if isinstance(self.all2all, TellsLater) else None,
        )
        self.proposer = None if self.draft is None else self.draft.proposer(self)

    def _close_cache(self) -> None:
        """Drop the KV cache and everything that holds its addresses, to free its memory."""
        self.streams.close()
        for steps in self.captured_steps:
            steps.drop()
        self._beside.clear()
        del self.kv_cache, self.attention, self.graphs, self._sampling, self.proposer

    # -- requests and their KV ----------------------------------------------------------------------------------

    @property
    def free_kv_tokens(self) -> int:
        """Tokens that the free KV blocks hold."""
        return self._memory.free_tokens

    def admit(self, request: Request, num_tokens: int) -> None:
        """Give a request KV memory for its first `num_tokens` tokens; see `RequestMemory`."""
        self._memory.admit(request, num_tokens)

    def reserve(self, request: Request, num_tokens: int) -> None:
        """Extend an admitted request's KV memory to its first `num_tokens` tokens; see `RequestMemory`."""
        self._memory.reserve(request, num_tokens)

    def release(self, request: Request) -> None:
        """Release a request's KV memory; if it runs again, its tokens are computed again. See `RequestMemory`."""
        self._memory.release(request)

    # -- graphs -------------------------------------------------------------------------------------------------

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

    # -- the rest -----------------------------------------------------------------------------------------------

    def statistics(self) -> UBatchStatistics:
        """How often steps overlapped, and why not when they did not."""
        return self.wrapper.statistics()

    def close(self) -> None:
        """Stop the lanes' threads, and wait for the work queued on the device."""
        self.wrapper.close()
        self.streams.close()

    def __enter__(self) -> ModelRunner:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
