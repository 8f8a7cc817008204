"""Derive the settings that nobody gave, from those that were given, the checkpoint and the machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from model_runner import DEFAULT_KV_CACHE_MEMORY, ModelConfig, capture_sizes
from model_runner.parallel import AUTO, choose_all2all
from serving.engine.options import AUTO_DTYPE
from serving.engine.rank.runner_setup import choose_dtype
from serving.options.flags.server_flags import GPU_MEMORY_UTILIZATION, MAX_ENGINE_RESTARTS
from serving.options.flags.tables import SERVE
from serving.options.sources import Settings
from serving.options.speculation import derive_speculation
from serving.scheduler import SchedulerConfig


def derive(s: Settings, model: ModelConfig, stored: Sequence[str], gpus: int) -> Settings:
    """Derive the settings that nobody gave, each after those that it depends on.

    Args:
        stored: data types of the checkpoint; see `choose_dtype`.
    """
    s = _derive_device(s, gpus)
    if s["dtype"] == "auto":
        s = s.derive("dtype", *_chosen_dtype(s, model, stored))
    s = _derive_memory(s)
    s = _derive_transport(s)
    s = _derive_from_checkpoint(s, model)
    s = _derive_steps(s)
    s = _derive_graphs(s)
    s = derive_speculation(s)
    s = s.fill("max_engine_restarts", MAX_ENGINE_RESTARTS if s.table is SERVE else 0)
    return _derive_loop(s)


def _on_gpu(s: Settings) -> tuple[bool, str]:
    """Whether the ranks run on GPUs; also as words."""
    on_gpu = s["device"] == "cuda"
    return on_gpu, "on a GPU" if on_gpu else "on a CPU"


def _derive_device(s: Settings, gpus: int) -> Settings:
    if s["device"] != "auto":
        return s
    return s.derive("device", "cuda" if gpus else "cpu", f"{gpus or 'no'} GPU here")


def _derive_memory(s: Settings) -> Settings:
    on_gpu, where = _on_gpu(s)
    if not on_gpu:
        return s.fill("kv_cache_memory", DEFAULT_KV_CACHE_MEMORY, where)
    return s if s["kv_cache_memory"] is not None else s.fill("gpu_memory_utilization", GPU_MEMORY_UTILIZATION, where)


def _derive_transport(s: Settings) -> Settings:
    if s["all2all_backend"] not in (None, AUTO) or not s["enable_expert_parallel"]:
        return s
    return s.derive("all2all_backend", *choose_all2all(stream_ordered=_on_gpu(s)[0], one_machine=s["nnodes"] == 1))


def _derive_from_checkpoint(s: Settings, model: ModelConfig) -> Settings:
    s = s.fill("max_model_len", model.max_position_embeddings, "the checkpoint's")
    s = s.fill("served_model_name", str(s["model"]), "MODEL")
    if s.given("num_state_snapshots") and not model.linear_layers:
        note = f"{s.spell('num_state_snapshots')} has no effect: no layer of this model has linear attention"
        s = replace(s, notes=(*s.notes, note))
    return s


def _derive_loop(s: Settings) -> Settings:
    on_gpu, where = _on_gpu(s)
    speculates = s["speculative_algorithm"] is not None
    why = "speculation needs the step before" if speculates else where
    return s.fill("overlap_schedule", on_gpu and not speculates, why)


def _chosen_dtype(s: Settings, model: ModelConfig, stored: Sequence[str]) -> tuple[str, str]:
    """The dtype for `auto`, and why."""
    if s["device"] == "cpu" and s["node_rank"] > 0:  # processors may differ, but all ranks must compute alike
        return AUTO_DTYPE, "machine 0 chooses"
    size = s["tensor_parallel_size"]
    threads = 1 if s["data_parallel_size"] * size // s["nnodes"] > 1 else None  # see `pin_rank`
    return choose_dtype(s["device"], stored, model, s["moe_backend"], threads, size)


def _derive_steps(s: Settings) -> Settings:
    tokens, why = SchedulerConfig.max_num_batched_tokens, ""
    if (s["max_num_seqs"] or 0) > tokens:
        tokens, why = s["max_num_seqs"], "one token for each of --max-num-seqs"
    if not s["enable_chunked_prefill"] and s["max_model_len"] > tokens:
        tokens, why = s["max_model_len"], "a whole prompt, as prompts are not chunked"
    s = s.fill("max_num_batched_tokens", tokens, why)
    limited = s["max_num_batched_tokens"] < SchedulerConfig.max_num_seqs
    most = s["max_num_batched_tokens"] if limited else SchedulerConfig.max_num_seqs
    return s.fill("max_num_seqs", most, "as many as a step has tokens" if limited else "")


def _derive_graphs(s: Settings) -> Settings:
    """Derive the CUDA graph settings. Mode `auto` may remain: then the ranks capture if all their back ends can."""
    if s["cudagraph_mode"] == "auto" and (s["device"] == "cpu" or s["enforce_eager"]):
        why = "on a CPU" if s["device"] == "cpu" else s.spell("enforce_eager")
        s = s.derive("cudagraph_mode", "none", why)
    if s["cudagraph_mode"] == "none" or s["device"] == "cpu":
        return s
    sizes = capture_sizes(s["max_num_seqs"], None, s["max_cudagraph_capture_size"])
    s = s.fill("cudagraph_capture_sizes", sizes, "usual ones")
    return s.fill("max_cudagraph_capture_size", max(s["cudagraph_capture_sizes"]), "largest that is captured")
