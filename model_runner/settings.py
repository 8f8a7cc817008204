"""A runner's settings: what they are, and what is checked of them before anything is loaded."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Protocol

import torch

from model_runner.speculation import Acceptance
from model_runner.weights.kept import KeptStart
from model_runner.weights.weight_pass import Progress
from moe import EmulatedLink, ExpertPlacement
from moe.balance import EplbConfig
from ubatch import CommGroup, ConfigError, CUDAGraphMode, GraphBackend, UBatchConfig, Verify, nearest
from ubatch.streams import StreamBackend

_logger = logging.getLogger(__name__)

DEFAULT_KV_CACHE_MEMORY = 256 << 20
"""Bytes of a KV cache if no size is given."""
_SIZES = ("num_kv_blocks", "kv_cache_memory", "gpu_memory_utilization")


class DeviceMemory(Protocol):
    """The memory of one device, in bytes. Call its methods only while no step is running."""

    def held(self) -> int:
        """Memory of this process's tensors; first, the allocator's unused cache is released."""

    def free(self) -> int:
        """Free memory of the device; first, the allocator's unused cache is released."""

    def reset_peak(self) -> None:
        """Reset the peak."""

    def peak(self) -> int:
        """The most that the allocator held since `reset_peak`."""


def most_nodes(num_steps: int, topk: int) -> int:
    """Number of candidate nodes of a tree with `num_steps` levels."""
    return topk + (num_steps - 1) * topk * topk


@dataclass(frozen=True)
class DraftShape:
    """The shape of a proposer's drafts.

    Attributes:
        num_steps: drafts of a chain, or levels of a tree.
        topk: nodes of a level; 1 for chains.
        num_drafts: drafts of a request in a verify step.
        sampled: drafts of sampled requests are drawn at random, for rejection sampling; chains only.

    Raises:
        ConfigError: at construction, if the numbers contradict each other.
    """

    num_steps: int
    topk: int
    num_drafts: int
    sampled: bool

    def __post_init__(self) -> None:
        num_steps, topk = self.num_steps, self.topk
        for name in ("num_steps", "topk", "num_drafts"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, not {getattr(self, name)}.")
        if topk == 1 and self.num_drafts != num_steps:
            raise ConfigError(
                f"num_drafts is {self.num_drafts}, num_steps {num_steps}: a chain has one draft per step. Make them "
                "equal, or choose topk above 1 for a tree."
            )
        if topk > 1 and self.sampled:
            raise ConfigError(f"drafts that are drawn are chains; topk is {topk}. Use 1, or drafts that are not drawn.")
        if self.num_drafts > most_nodes(num_steps, topk):
            raise ConfigError(
                f"num_drafts is {self.num_drafts}; a tree of num_steps {num_steps} and topk {topk} has "
                f"{most_nodes(num_steps, topk)} nodes to choose from."
            )

    @property
    def num_places(self) -> int:
        """Positions after a request's last known token that need KV slots while drafts are made or verified."""
        return max(self.num_drafts, (self.num_steps - 1) * self.topk if self.topk > 1 else 0)


@dataclass(frozen=True)
class DraftSetting:
    """The draft network of a runner, and the shape of its drafts.

    It is loaded with the model, before the KV cache is sized, and gets its cache and graphs together with the model's.
    So its GPU memory is measured with the rest.

    Attributes:
        algorithm, path: see `load_draft`.
        shape: shape of the drafts.
    """

    algorithm: str
    path: Path | None
    shape: DraftShape


@dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """Settings that are the same on every rank, and can be pickled: a server's engines have them, too.

    Attributes:
        load_format: `dummy` makes random weights, also for a draft network; `auto` and `safetensors` read the files.
        tensor_parallel_size: ranks that share a replica's attention and dense MLPs, rank = dp_rank * this + tp_rank;
            they launch the same steps. See `model_runner.parallel.tensor_parallel`.
        all2all_backend: how tokens reach their experts; `auto` and None choose, see
            `model_runner.parallel.expert_parallel`.
        all2all_options: its options; those left out are derived from `max_num_seqs`, `max_num_batched_tokens` and
            `num_speculative_tokens`.
        enable_eplb: experts can move between the ranks while steps run (`ModelRunner.mover`).
        eplb_config: how the load of experts is balanced.
        placement: which expert every slot holds; by default the order of their ids, with the redundant experts of
            `eplb_config` behind them.
        dbo: when and how to overlap; its `group` is set to the runner's. None for the defaults.
        dbo_kinds: `decode`, `prefill`, `verify`: steps that overlap only if running steps show that it pays; the
            thresholds of the others are obeyed. See `StepSettings`; `step_settings.policy` has the result.
        attention_backend: name; `auto` is the fastest that this model can use, see `model_runner.backend_choice`.
        prefill_attention_backend: another one for batches with a prefill.
        decode_attention_backend: another one for decode batches.
        block_size: tokens per KV block (page).
        kv_cache_dtype: `auto` stores the model's dtype; `fp8` one byte per number, with the checkpoint's static scales
            if it has some.
        kv_cache_memory: size of the KV cache in bytes, 256 MiB by default, without a draft network's cache; or
        gpu_memory_utilization: share of a GPU's memory, above 0 and at most 1; the cache gets what weights, the largest
            step and graphs leave of it. This is measured: the largest step runs, and graphs are captured and released;
            collective. Memory of other processes is not counted as the GPU's. See `model_runner.memory`.
        allow_long_max_model_len: it may be longer than the model's limit, for which the model was not trained.
        cudagraph_mode: `none`; `full` replays decode, verify and draft steps as CUDA graphs, after `capture_graphs`;
            `auto` is `full` on a GPU if attention, experts and transport can be captured. Prefills run eagerly.
        cudagraph_capture_sizes: sizes to capture, in requests; by default those of `dbo`, or the default ones.
    """

    load_format: str = "auto"
    tensor_parallel_size: int = 1
    all2all_backend: str | None = None
    all2all_options: Mapping[str, object] | None = None
    enable_eplb: bool = False
    eplb_config: EplbConfig = field(default_factory=EplbConfig)
    placement: ExpertPlacement | None = None
    dbo: UBatchConfig | None = None
    dbo_kinds: Sequence[str] = ()
    attention_backend: str = "auto"
    prefill_attention_backend: str | None = None
    decode_attention_backend: str | None = None
    block_size: int = 16
    kv_cache_dtype: str = "auto"
    kv_cache_memory: int | None = None
    gpu_memory_utilization: float | None = None
    allow_long_max_model_len: bool = False
    cudagraph_mode: str = "none"
    cudagraph_capture_sizes: Sequence[int] | None = None

    def shared(self) -> dict[str, Any]:
        """These settings by name."""
        return {each.name: getattr(self, each.name) for each in fields(ModelSettings)}


@dataclass(frozen=True, kw_only=True)
class RunnerSettings(ModelSettings):
    """All settings of a `ModelRunner`.

    Attributes:
        group: all ranks, which share the experts and vote; None for a single rank.
        link: emulated link for all transfers between ranks: to experts, gathers and scatters; None for the real one.
        dbo_auto: deprecated; `dbo_kinds=("decode", "prefill", "verify")` does the same.
        experts_backend: name; `auto` is the fastest, on a GPU of `triton`, `flashinfer` and `grouped_mm`, on a CPU of
            `native`, `packed` and `grouped`. With `native`, projections are packed, too: only the layout of its
            kernels is kept.
        num_kv_blocks: size of the KV cache in blocks, in place of bytes or a share.
        max_num_seqs: most requests that run at once.
        max_num_batched_tokens: most tokens of a step, to size memory and transports. The caller must keep to it.
        max_model_len: longest sequence in tokens, prompt and output together; by default the model's own limit.
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
        kept: what an earlier process of the rank has prepared, and what this one leaves to the next.

    Raises:
        ConfigError: at construction, if `dbo` has another group, the dtype of the KV cache is unknown, two sizes of it
            are given, the share is out of range, or it is one of a device that is no GPU.
    """

    group: CommGroup | None = None
    link: EmulatedLink | None = None
    dbo_auto: bool = False
    experts_backend: str = "auto"
    num_kv_blocks: int | None = None
    max_num_seqs: int = 256
    max_num_batched_tokens: int | None = None
    max_model_len: int | None = None
    num_state_snapshots: int = 0
    num_speculative_tokens: int = 0
    speculative_trees: bool = False
    acceptance: Acceptance = Acceptance.MATCH
    draft: DraftSetting | None = None
    dtype: torch.dtype = torch.float32
    device: torch.device | str = "cpu"
    streams: StreamBackend | None = None
    graphs: GraphBackend | None = None
    memory: DeviceMemory | None = None
    on_weights: Progress | None = None
    kept: KeptStart | None = None

    def __post_init__(self) -> None:
        if self.dbo is not None and self.dbo.group is not None and self.dbo.group is not self.group:
            raise ConfigError("dbo.group and group are different groups; give the runner `group` alone.")
        if self.kv_cache_dtype not in ("auto", "fp8"):
            hint = nearest(self.kv_cache_dtype, ("auto", "fp8"))
            raise ConfigError(f"unknown kv_cache_dtype {self.kv_cache_dtype!r}{hint}")
        given = [name for name in _SIZES if getattr(self, name) is not None]
        if len(given) > 1:
            raise ConfigError(f"{' and '.join(given)} contradict each other: all give the size of the KV cache.")
        share, device = self.gpu_memory_utilization, torch.device(self.device)
        if share is not None and not 0 < share <= 1:
            raise ConfigError(f"gpu_memory_utilization must be above 0 and at most 1, not {share}.")
        if share is not None and device.type != "cuda" and self.memory is None:
            raise ConfigError(
                f"gpu_memory_utilization is {share}, but the model runs on {device.type!r}; give kv_cache_memory "
                f"(bytes) instead."
            )

    @property
    def overlap(self) -> UBatchConfig:
        """`dbo` with the group, and without verification: tests verify the models of this package."""
        return replace(self.dbo or UBatchConfig(), group=self.group, verify=Verify.OFF.value)

    @property
    def captures(self) -> bool:
        """Whether steps may be captured."""
        on_gpu = torch.device(self.device).type == "cuda" or self.graphs is not None
        return self.cudagraph_mode != CUDAGraphMode.NONE and on_gpu


def check_max_model_len(
    asked: int | None, limit: int, full_attention: int | None = None, *, allow_long: bool = False
) -> int:
    """The longest sequence in tokens: `asked`, or the model's `limit` if None.

    Args:
        full_attention: see `ModelConfig.full_attention_length`.

    Raises:
        ConfigError: `asked` is not positive, or longer than the limit without `allow_long`; or the longest sequence is
            longer than `full_attention`.
    """
    length = limit if asked is None else asked
    if full_attention is not None and length > full_attention:
        raise ConfigError(f"max_model_len is {length}, but {beyond_full_attention(full_attention)}")
    if length < 1 or (length > limit and not allow_long):
        raise ConfigError(
            f"max_model_len must be from 1 to the model's {limit} positions, not {length}. With "
            "allow_long_max_model_len it may be longer; what the model says at later positions may be nonsense."
        )
    if length > limit:
        message = "max_model_len is %d, but the model has %d positions: at later ones its output may be nonsense"
        _logger.warning(message, length, limit)
    return length


def beyond_full_attention(length: int) -> str:
    """Why sequences longer than `ModelConfig.full_attention_length` are refused, and what to do."""
    return (
        f"beyond {length} tokens (dual_chunk_attention_config in config.json) the model was trained for dual chunk "
        f"attention, which is not served. Lower it to {length} at most."
    )


def refuse_trees(linear_layers: int, trees: bool) -> None:
    """Refuse trees of drafts for a model with linear attention.

    Raises:
        ConfigError: some layers have linear attention, and drafts may be trees.
    """
    if linear_layers and trees:
        raise ConfigError(
            f"{linear_layers} layers of this model have linear attention, whose states cannot follow a tree of drafts. "
            "Use chains (topk 1)."
        )
