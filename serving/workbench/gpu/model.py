"""A model with random weights, and a batch for it, planned as the model runner does: whole, and in two lanes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attention import CommonAttentionMetadata, GraphLimits, UBatchAttention, make_kv_cache, split_attn_metadata
from model_runner import CausalLM, Checkpoint, ExpertParallel, RandomQwen3Moe, model_class
from model_runner.weights import HFConfig
from moe import All2All, FusedMoEModularKernel
from serving.workbench.arms.cells import scattered_metadata
from serving.workbench.gpu.bench import Bench
from ubatch import (
    CapturedGraph,
    CUDAGraphMode,
    ForwardContext,
    ForwardMode,
    UBatchConfig,
    UBatchWrapper,
    set_forward_context,
    split_requests,
)
from ubatch.streams import to_device

LANES = 2
_PAGE = 16
_ON_DEVICE = ("query_start_loc", "seq_lens", "block_table", "slot_mapping")

QWEN3_30B_A3B = RandomQwen3Moe(
    vocab_size=151_936,
    hidden_size=2048,
    num_hidden_layers=48,
    num_attention_heads=32,
    num_key_value_heads=4,
    head_dim=128,
    num_experts=128,
    num_experts_per_tok=8,
    moe_intermediate_size=768,
    max_position_embeddings=40_960,
    tie_word_embeddings=False,
)
QWEN3_235B_A22B = replace(
    QWEN3_30B_A3B,
    hidden_size=4096,
    num_hidden_layers=94,
    num_attention_heads=64,
    moe_intermediate_size=1536,
)
TINY = RandomQwen3Moe(
    vocab_size=64,
    hidden_size=32,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=16,
    num_experts=2,
    num_experts_per_tok=2,
    moe_intermediate_size=16,
    max_position_embeddings=256,
)


class _RandomWeights(Checkpoint):
    """A checkpoint without files: it fills every tensor that a model asks for with random values, in place."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.path = Path("random")
        self.dtype = dtype
        self.device = device
        self._streams = self._progress = None
        self._file_of = {}  # no tensor is stored

    def _copy(self, name: str, shape: Sequence[object], out: Tensor) -> None:
        """Fill a tensor: vectors (norms) with 1; matrices at random, so that products keep the size of their input."""
        if out.dim() == 1:
            out.fill_(1.0)
        else:
            out.normal_(std=out.shape[-1] ** -0.5)


@dataclass
class Model:
    """A Qwen3-MoE whose transport can be exchanged; `module` takes `(input_ids, positions)` under a forward context."""

    module: CausalLM
    size: RandomQwen3Moe

    @classmethod
    @torch.inference_mode(False)  # graphs use the weights inside and outside inference mode
    def random(cls, bench: Bench, size: RandomQwen3Moe, all2all: All2All[Any]) -> Model:
        """Make a model with random weights on the device, and with this project's kernels for the experts."""
        torch.manual_seed(0)
        kind = model_class("Qwen3MoeForCausalLM")
        empty = HFConfig({}, Path("random"))
        config: Any = kind.read_config(HFConfig(size.hf_config(bench.dtype), Path("random")), empty)
        with torch.no_grad():
            weights = _RandomWeights(bench.dtype, bench.device)
            module = kind.load(config, weights, ExpertParallel(all2all, "triton"))
        return cls(module.eval().requires_grad_(False), size)

    @property
    def kernels(self) -> Iterator[FusedMoEModularKernel]:
        return (module for module in self.module.modules() if isinstance(module, FusedMoEModularKernel))

    def travel_by(self, all2all: All2All[Any]) -> None:
        """Use another transport from now on. Captured graphs keep the old one."""
        for kernel in self.kernels:
            kernel.all2all = all2all

    def wrapped(self, bench: Bench, *, overlapped: bool = True, captured: bool = True) -> UBatchWrapper:
        """The model in lanes (every step must overlap) or in one, with graphs if this device captures."""
        config = UBatchConfig(
            enable_dbo=overlapped,
            require_overlap=overlapped,
            dbo_decode_token_threshold=LANES,
            dbo_prefill_token_threshold=LANES,
            timeout_s=300.0,
        )
        if bench.captures and captured:
            return UBatchWrapper(self.module, config, CUDAGraphMode.FULL, bench.device, graphs=bench.graphs)
        return UBatchWrapper(self.module, config, device=bench.device)


class Step:
    """One batch of requests of equal length, ready to run whole, in halves one after the other, or in lanes.

    Args:
        bench: the device and its tools.
        model: the model that runs the batch; its KV cache is made here.
        requests: number of requests, a multiple of the number of lanes.
        query_len: new tokens per request.
        seq_len: tokens per request, the new ones included.
        static: make attention plans that graphs read and that can be updated before a replay, as the model runner does.

    Attributes:
        input_ids, positions: `[T]` int64.
        whole: the forward context of the batch.
        lanes: the forward context of each half.
        overlapped: the context with which a wrapper runs the halves in lanes.
    """

    def __init__(
        self, bench: Bench, model: Model, requests: int, query_len: int, seq_len: int, *, static: bool = False
    ) -> None:
        self.mode = ForwardMode.DECODE if query_len == 1 else ForwardMode.PREFILL
        config = model.module.config
        spec = config.attention.cache_spec(config.num_layers, _PAGE, bench.dtype)
        cache: Any = make_kv_cache(spec, requests * spec.blocks_for(seq_len), bench.device)
        for pool in (cache.key_pool, cache.value_pool):
            pool.memory.normal_()  # as if earlier steps had written it
        self.attention = UBatchAttention(config.attention, cache, "triton")
        self.metadata = scattered_metadata(requests, query_len, seq_len, _PAGE, bench.device)
        self.slices = split_requests([query_len] * requests, decode=query_len == 1, num_ubatches=LANES)
        parts = split_attn_metadata(self.slices, self.metadata)

        tokens = requests * query_len
        self.input_ids = torch.randint(0, model.size.vocab_size, (tokens,), device=bench.device)
        self.positions = torch.arange(seq_len - query_len, seq_len, device=bench.device).repeat(requests)
        if static:
            self.attention.init_graph_buffers(GraphLimits(requests, tokens, seq_len), LANES)
            plan, plans = self.attention.plan_for_graph(self.metadata), self.attention.plan_lanes_for_graph(parts)
        else:
            plan, plans = self.attention.plan(self.metadata), self.attention.plan_lanes(parts)
        self._plan, self._plans = plan, plans
        self.whole = self._context(self.metadata, plan)
        self.lanes = tuple(self._context(part, plan) for part, plan in zip(parts, plans, strict=True))
        self._on_host = [
            tensor.cpu()
            for tensor in (self.input_ids, self.positions, *(getattr(self.metadata, name) for name in _ON_DEVICE))
        ]
        self.overlapped = ForwardContext(
            num_tokens=tokens, mode=self.mode, ubatch_slices=self.slices, lane_contexts=self.lanes
        )

    def run(self, module: Callable[..., Tensor], context: ForwardContext) -> Tensor:
        """Run the model, or its wrapper, on the whole batch."""
        with set_forward_context(context):
            return module(self.input_ids, self.positions)

    def run_halves(self, module: Callable[..., Tensor]) -> list[Tensor]:
        """Run the model on each lane's part, one after the other."""
        hidden = []
        for context, part in zip(self.lanes, self.slices, strict=True):
            with set_forward_context(context):
                hidden.append(module(self.input_ids[part.token_slice], self.positions[part.token_slice]))
        return hidden

    def capture(
        self, bench: Bench, wrapper: UBatchWrapper, context: ForwardContext, run: Callable[[], Tensor], expected: Tensor
    ) -> CapturedGraph | None:
        """Capture the batch in a graph, if this device captures; `run` replays it, and must give `expected`."""
        graph = None
        with wrapper.no_timeout():
            if bench.captures:
                with set_forward_context(context):
                    graph = wrapper.capture(self.input_ids, self.positions)
            torch.testing.assert_close(run(), expected, atol=2e-2, rtol=2e-2)
        if graph is not None and not wrapper.statistics().graph_replays:
            raise RuntimeError(f"the captured step ran eagerly: {wrapper.statistics()}")
        return graph

    def refresh(self, *, overlapped: bool) -> tuple[Tensor, Tensor]:
        """Do what the model runner does before a replay: copy the batch to the device, and update the static plans.

        Returns the model's arguments as new tensors.
        """
        ids, positions, *tensors = to_device(self._on_host, self.input_ids.device)
        moved: dict[str, Any] = dict(zip(_ON_DEVICE, tensors, strict=True))
        fresh = replace(self.metadata, **moved)
        if overlapped:
            self.attention.replan_lanes(self._plans, split_attn_metadata(self.slices, fresh))
        else:
            self.attention.replan(self._plan, fresh)
        return ids, positions

    def _context(self, metadata: CommonAttentionMetadata, plan: Any) -> ForwardContext:
        return ForwardContext(attn_metadata=plan, num_tokens=metadata.num_actual_tokens, mode=self.mode)
