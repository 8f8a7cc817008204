"""The model runner: a checkpoint on this rank, with all that its steps need. How a step runs is in `step_runner`."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from attention import BlockAllocator, CacheSpec, RequestToTokenTable, StatePool, UBatchAttention, make_kv_cache
from model_runner.auto.step_cost import split_cost
from model_runner.auto.step_settings import StepSettings
from model_runner.backend_choice import resolve_attention, resolve_experts, resolve_fp8_blocks
from model_runner.balance import make_mover
from model_runner.decoder.base import ExpertParallel, check_tensor_parallel
from model_runner.drafting import DraftProposer, load_draft
from model_runner.errors import fits_in_memory
from model_runner.memory.host_memory import lasting_memory
from model_runner.memory.memory_profile import CudaMemory, measured_blocks
from model_runner.models.registry import read_model
from model_runner.parallel.expert_parallel import check_schedules, make_placement, make_transport
from model_runner.parallel.tensor_parallel import make_tensor_parallel
from model_runner.settings import DEFAULT_KV_CACHE_MEMORY, RunnerSettings, check_max_model_len, refuse_trees
from model_runner.step.future_map import FutureMap
from model_runner.step.logprobs import PromptCarry
from model_runner.step.streams import StepStreams
from model_runner.step_runner import StepRunner
from model_runner.weights.dummy_weights import open_checkpoint
from model_runner.weights.fp8 import load_kv_scales, log_projections
from model_runner.weights.weights import Checkpoint
from moe import ExpertLoads, ExpertPlacement, StepSizes
from ubatch import ConfigError, UBatchStatistics
from ubatch.ranks import taking_long
from ubatch.schedules import MODE_KEYS
from ubatch.streams import HostCopy, to_host

_DBO_AUTO = "dbo_auto is gone in the next release: dbo_kinds names the kinds of steps that decide for themselves."


class ModelRunner(StepRunner):
    """A model of a checkpoint on this rank, with its KV cache.

    Args:
        model_path: the folder of a Hugging Face checkpoint.
        settings: all settings; None for the defaults.
        keywords: single settings by name, in place of those in `settings`; see `RunnerSettings`.

    Attributes:
        settings: as given.
        dbo: when and how to overlap, with the group.
        link: the emulated link between the ranks; None for the real one.
        states: recurrent states of `max_num_seqs` requests; None for a model without linear attention.
        experts_backend: the resolved name; draft networks use it, too.
        graphs: the captured steps; None if all run eagerly.
        expert_loads: the tokens of every expert so far; None for a dense model. `copy_expert_loads` reads them.
        placement: which expert every slot holds; None for a dense model.
        draft: the loaded draft network; None if there is none.
        mover: moves experts between ranks; None without `enable_eplb`.
        proposer: the proposer around the draft network, see `set_observer`; None if there is none.
        tensor_parallel: this rank's place in its replica; None if the rank is a replica by itself.

    Raises:
        CheckpointError: the checkpoint cannot be loaded; see `model_runner.errors`.
        ConfigError: a back end is unknown, the placement is for other experts or ranks, `tensor_parallel_size` does not
            divide heads or dense MLPs, or settings contradict each other.
    """

    expert_loads: ExpertLoads | None
    placement: ExpertPlacement | None

    def __init__(self, model_path: str | Path, settings: RunnerSettings | None = None, **keywords: Any) -> None:
        own = RunnerSettings(**keywords) if settings is None else replace(settings, **keywords)
        self.settings = own
        self.model_path = Path(model_path)
        self.group, self.link, self.dtype, self.dbo = own.group, own.link, own.dtype, own.overlap
        self.device, self.max_num_seqs = torch.device(own.device), own.max_num_seqs
        if own.dbo_auto:
            warnings.warn(_DBO_AUTO, DeprecationWarning, stacklevel=2)
        with lasting_memory() if self.device.type == "cpu" else nullcontext():
            self._make()
        self.clear_expert_loads()

    def _make(self) -> None:
        """Load the model, and make its caches and streams."""
        own = self.settings
        options = {"dtype": own.dtype, "device": self.device, "streams": own.streams, "progress": own.on_weights}
        checkpoint = open_checkpoint(self.model_path, own.load_format, **options)
        self._load(checkpoint)
        several, size = own.group is not None and own.group.size > 1, own.tensor_parallel_size
        self.split_cost = split_cost(self.model, several_ranks=several, tensor_parallel_size=size)
        kinds = MODE_KEYS if own.dbo_auto else own.dbo_kinds
        self.step_settings = StepSettings(self.dbo, own.group, self.device, kinds)
        self.streams = StepStreams(self.device, own.streams, own.group)
        self._beside = []
        self._size_cache(checkpoint)
        checkpoint.close()

    def _load(self, checkpoint: Checkpoint) -> None:
        """Load the model, and the draft network if there is one."""
        own, stored = self.settings, checkpoint.quantization
        kind, self.config = read_model(checkpoint)
        limits = self.config.max_position_embeddings, self.config.full_attention_length
        self.max_model_len = check_max_model_len(own.max_model_len, *limits, allow_long=own.allow_long_max_model_len)
        if self.max_model_len > self.config.max_position_embeddings:
            self.config = replace(self.config, max_position_embeddings=self.max_model_len)
        check_tensor_parallel(self.config, own.tensor_parallel_size)
        refuse_trees(len(self.config.linear_layers), own.speculative_trees)
        self.tensor_parallel = make_tensor_parallel(own.group, own.tensor_parallel_size, own.link)
        num_experts = self.config.num_experts
        of_experts = None if self.tensor_parallel is not None and not num_experts else own.link
        requests = own.max_num_seqs * (1 + own.num_speculative_tokens)
        steps = StepSizes(requests, own.max_num_batched_tokens, captured=own.captures)
        steps = steps.shared_by(own.tensor_parallel_size)
        placement, slots = None, num_experts
        if self.config.moe_layers:
            ranks, redundant = 1 if own.group is None else own.group.size, own.eplb_config.num_redundant_experts
            placement = make_placement(num_experts, self.config.moe_layers, ranks, redundant, own.placement)
            slots = placement.num_slots
        asked = own.all2all_backend, own.group, of_experts, slots, own.all2all_options
        self.all2all = make_transport(*asked, steps)
        if placement is not None and self.all2all.traits.batched:  # it brings rows for every slot
            placement = placement.filled()
        self.placement = placement
        self.listen = self.all2all.listen
        where = own.dtype, self.device
        how: dict[str, Any] = {"dbo": self.dbo, "group": own.group, "quantization": stored}
        self.experts_backend = resolve_experts(own.experts_backend, self.config, self.all2all, *where, **how)
        if own.enable_eplb and own.experts_backend == "auto" and self.experts_backend == "packed":
            self.experts_backend = "grouped"  # only oneDNN knows the other's layout, so it cannot move
        blocks = resolve_fp8_blocks(self.experts_backend, self.config, stored, *where, dbo=self.dbo)
        if num_experts:
            verifies = own.num_speculative_tokens > 0
            check_schedules(self.dbo, self.all2all, self.experts_backend, self.device, verifies=verifies)
        loads = None if placement is None else ExpertLoads(placement.num_layers, num_experts, self.device)
        parallel = ExpertParallel(
            self.all2all, self.experts_backend, self.tensor_parallel, blocks.experts, loads, placement
        )
        checkpoint.projection_block = blocks.projections
        kept = own.kept if self.device.type == "cpu" else None
        given = {"all2all": self.all2all, "tensor_parallel": self.tensor_parallel, "group": own.group, "link": own.link}
        with taking_long("loading the model"), fits_in_memory(f"the weights of {self.model_path}"):
            loaded = None if kept is None else kept.attach(given)
            if loaded is None:
                self.model = kind.load(self.config, checkpoint, parallel).eval()
                log_projections(checkpoint)
                self.draft = None if own.draft is None else load_draft(own.draft.algorithm, own.draft.path, self)
                loaded = self.model, self.draft, loads
                if kept is not None:
                    loaded = kept.keep(loaded, given)
            self.model, self.draft, self.expert_loads = loaded
            if own.enable_eplb:
                moved = self.placement, own.group, self.device, own.eplb_config
                self.mover = make_mover(self.model, *moved, link=own.link, streams=own.streams)

    def _size_cache(self, checkpoint: Checkpoint) -> None:
        """Make the pool of states, then the KV cache, in the room that is given or left."""
        own, config, shard = self.settings, self.config, self._shard
        self.states = None
        if config.linear is not None and config.linear_layers:
            sizes = own.max_num_seqs, own.dtype, self.device, own.num_speculative_tokens, own.num_state_snapshots
            self.states = StatePool(shard.linear(config.linear), len(config.linear_layers), *sizes)
        self._shape = shape = shard.attention(config.attention)
        spec = shape.cache_spec(config.num_kv_layers, own.block_size, own.dtype, fp8=own.kv_cache_dtype == "fp8")
        open_cache = partial(self._open_cache, checkpoint, spec)
        if own.num_kv_blocks is not None:
            num_blocks = own.num_kv_blocks
        elif own.gpu_memory_utilization is not None:
            num_blocks = self._measured_blocks(spec, own.gpu_memory_utilization, open_cache)
        else:
            num_blocks = spec.blocks_in(DEFAULT_KV_CACHE_MEMORY if own.kv_cache_memory is None else own.kv_cache_memory)
        if self.tensor_parallel is not None:  # memory may differ, but all must admit the same requests
            num_blocks = int(self.tensor_parallel.group.least(num_blocks))
        open_cache(num_blocks)

    def _measured_blocks(self, spec: CacheSpec, share: float, open_cache: Callable[[int], None]) -> int:
        """The KV blocks that fit; those that an earlier process has measured, if every rank knows of its own."""
        own, what = self.settings, "KV blocks"
        known = {} if own.kept is None else own.kept.measured
        taken_over = what in known
        if own.group is not None and own.kept is not None:
            taken_over = bool(own.group.least(taken_over))
        if not taken_over:
            memory = CudaMemory(self.device) if own.memory is None else own.memory
            known[what] = measured_blocks(self, spec, share, open_cache, memory)
        return int(known[what])

    def _open_cache(self, checkpoint: Checkpoint, spec: CacheSpec, num_blocks: int) -> None:
        """Make a KV cache and everything that holds its addresses; a previous cache is closed."""
        own = self.settings
        if hasattr(self, "kv_cache"):
            self.streams.close()
            self._close_cache()
            gc.collect()  # reference cycles may hold tensors
        self.kv_cache = make_kv_cache(spec, num_blocks, self.device)
        if spec.fp8:
            load_kv_scales(checkpoint, self.kv_cache)
        self.allocator = BlockAllocator(self.kv_cache.num_blocks)
        longest = min(spec.blocks_for(self.max_model_len), num_blocks)  # of a request; rows of a made-up length cost GB
        self.request_table = RequestToTokenTable(self.max_num_seqs, longest, spec.block_size)
        prefill = own.prefill_attention_backend or own.attention_backend
        decode = own.decode_attention_backend or own.attention_backend
        names = resolve_attention(prefill, decode, self._shape, self.kv_cache, group=own.group)
        self.attention = UBatchAttention(self._shape, self.kv_cache, *names, states=self.states)
        if not hasattr(self, "wrapper"):
            self._make_wrapper()
        self.graphs = self._make_graph_steps()
        self.future_map, self.prompt_carry = FutureMap(self.max_num_seqs, self.device), PromptCarry()
        self.proposer = None
        if self.draft is not None and own.draft is not None:
            self.proposer = DraftProposer(self, self.draft, own.draft.shape)

    def _close_cache(self) -> None:
        """Drop the KV cache and everything that holds its addresses, to free its memory; the streams are closed."""
        for steps in self.captured_steps:
            steps.drop()
        self._beside.clear()
        self.graphs = self.proposer = None
        del self.kv_cache, self.attention

    def clear_expert_loads(self) -> None:
        """Forget the experts' loads: what ran so far was a warm-up."""
        if self.expert_loads is not None:
            with self.streams.forward():
                self.expert_loads.clear()

    def copy_expert_loads(self) -> HostCopy:
        """Start a copy of `ExpertLoads.counts` after the steps launched so far.

        `HostCopy.wait` has the copy; once `HostCopy.done`, without waiting.

        Raises:
            ConfigError: the experts of this model are not counted, or it has none (`expert_loads` is None).
        """
        if self.expert_loads is None:
            raise ConfigError(f"{self.model_path} has no experts that are counted.")
        with self.streams.forward():
            return to_host(self.expert_loads.snapshot())

    def statistics(self) -> UBatchStatistics:
        """How often steps overlapped, and why not when they did not."""
        return self.wrapper.statistics()

    def close(self) -> None:
        """Stop the lanes' threads, wait for the work queued on the device, and free caches, states and captured steps.

        On a GPU their memory goes back to the driver: of what torch keeps, a large block serves the next small tensor,
        and stays taken as long as that lives. If the group is broken, nothing is waited for and nothing is freed.
        """
        self.wrapper.close()
        if self.closed or not self.streams.close():
            return
        self.closed = True
        self._close_cache()
        self.states = self.observer = None
        gc.collect()  # reference cycles may hold tensors
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def __enter__(self) -> ModelRunner:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
