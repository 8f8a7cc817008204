"""What an engine is made from, on every rank: values that were checked and resolved already. It can be pickled."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from serving.scheduler import SchedulerConfig
from ubatch import UBatchConfig

__all__ = ["EngineOptions"]


def _no_overlap() -> UBatchConfig:
    return UBatchConfig(enable_dbo=False)


@dataclass(frozen=True)
class EngineOptions:
    """A model, its ranks, and how they run.

    Attributes:
        model: folder of a Hugging Face checkpoint.
        dbo: when and how to overlap; its group is set on the rank.
        scheduler: how steps are filled.
        data_parallel_size: ranks in all, over all nodes.
        enable_expert_parallel: the ranks share the experts, and step together.
        all2all_backend: how tokens reach their experts.
        emulated_link: latency in microseconds and bandwidth in MB/s of a link to deliver over; None for none.
        attention_backend: see `ModelRunner`, also for the next three.
        prefill_attention_backend: another one for prefills.
        decode_attention_backend: another one for decodes.
        kv_cache_dtype: `auto` or `fp8`.
        block_size: tokens per KV block.
        kv_cache_memory: bytes of the KV cache of a rank; None for the default.
        gpu_memory_utilization: share of a GPU's memory that a rank may use, weights included; None on a CPU.
        dtype: `float32`, `bfloat16` or `float16`: what the model computes in.
        device: `cpu` or `cuda`.
        overlap_schedule: schedule the next step beside the running one; None where the device runs by itself.
        nnodes: machines.
        node_rank: this one.
        master_addr: where node 0 is reached by the others.
        master_port: the port of the rendezvous; 0 picks one (one node only).
    """

    model: Path
    dbo: UBatchConfig = field(default_factory=_no_overlap)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    data_parallel_size: int = 1
    enable_expert_parallel: bool = False
    all2all_backend: str | None = None
    emulated_link: tuple[float, float] | None = None
    attention_backend: str = "auto"
    prefill_attention_backend: str | None = None
    decode_attention_backend: str | None = None
    kv_cache_dtype: str = "auto"
    block_size: int = 16
    kv_cache_memory: int | None = None
    gpu_memory_utilization: float | None = None
    dtype: str = "float32"
    device: str = "cpu"
    overlap_schedule: bool | None = None
    nnodes: int = 1
    node_rank: int = 0
    master_addr: str = "127.0.0.1"
    master_port: int = 0
