"""Flags of vLLM and SGLang that have another name here, and what to write instead."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping


def spell_hint(text: str, spell: Callable[[str, bool], str]) -> str:
    """A hint for a file or Python. `spell(flag, off)` spells each flag, given without dashes and without `no-`."""
    return re.sub(r"--(no-)?([a-z][a-z0-9-]*)", lambda match: spell(match[2], match[1] is not None), text)


FOREIGN: Mapping[str, str] = {
    **dict.fromkeys(("model_path", "named_model"), "--model"),
    **dict.fromkeys(("tokenizer", "tokenizer_path"), "a checkpoint's folder with that tokenizer in it"),
    "context_length": "--max-model-len",
    "quantization": "a checkpoint in fp8, whose config says so, or in bf16, fp16 or fp32",
    **dict.fromkeys(("tp", "tp_size"), "--tensor-parallel-size"),
    **dict.fromkeys(("dp", "dp_size"), "--data-parallel-size"),
    **dict.fromkeys(("ep", "ep_size"), "--enable-expert-parallel, which shares the experts among all processes"),
    **dict.fromkeys(("pipeline_parallel_size", "pp_size"), "--tensor-parallel-size or --data-parallel-size"),
    "data_parallel_address": "--master-addr",
    "data_parallel_rpc_port": "--master-port",
    "dist_init_addr": "--master-addr and --master-port",
    "moe_a2a_backend": "--all2all-backend",
    "deepep_mode": "--all2all-backend deepep_auto, deepep_high_throughput or deepep_low_latency",
    "moe_runner_backend": "--moe-backend",
    "disable_two_batch_overlap": "--no-enable-dbo",
    "disable_single_batch_overlap": "--no-enable-single-batch-overlap",
    "mem_fraction_static": "--gpu-memory-utilization",
    "kv_cache_memory_bytes": "--kv-cache-memory",
    "page_size": "--block-size",
    "disable_radix_cache": "--no-enable-prefix-caching",
    "max_running_requests": "--max-num-seqs",
    **dict.fromkeys(("chunked_prefill_size", "max_prefill_tokens"), "--max-num-batched-tokens"),
    "schedule_policy": "--scheduling-policy",
    "disable_overlap_schedule": "--no-overlap-schedule",
    "async_scheduling": "--overlap-schedule",
    "cuda_graph_max_bs": "--max-cudagraph-capture-size",
    **dict.fromkeys(("cuda_graph_bs", "cuda_graph_sizes"), "--cudagraph-capture-sizes"),
    "disable_cuda_graph": "--enforce-eager",
    "compilation_config": "--cudagraph-mode and --cudagraph-capture-sizes",
    "speculative_config": "--speculative-algorithm and the other --speculative- flags",
    "speculative_num_tokens": "--speculative-num-draft-tokens",
    "disable_log_requests": "--no-enable-log-requests",
    "disable_uvicorn_access_log": "--no-access-log",
    "download_path": "--download-dir",
}
"""Foreign flag, in snake case and without dashes -> the equivalent here."""
