"""Flags of vLLM and SGLang that have another name here, or are not offered, and what to do instead.

Names are in snake case and without dashes, so that they are vLLM's keywords in Python, too. A test walks vLLM's list.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from serving.options.flags.not_offered import NOT_NEEDED, NOT_OFFERED, each_name

Spell = Callable[[str, bool], str]
"""Spells a flag, given without dashes and without `no-`; the second argument says whether it had `no-`."""


FOREIGN: Mapping[str, str] = each_name(
    {
        # the checkpoint
        "--model": "model_path named_model model_weights",
        "a checkpoint's folder with that tokenizer in it": "tokenizer tokenizer_path tokenizer_revision",
        "--max-model-len": "context_length",
        "a checkpoint in fp8, whose config says so, or in bf16, fp16 or fp32": """
            quantization q quantization_config quantization_param_path allow_deprecated_quantization""",
        "a copy of the checkpoint's folder with a changed config.json": """
            hf_config_path hf_overrides rope_scaling rope_theta config_format""",
        "HF_TOKEN in the environment, or `hf auth login`": "hf_token",
        "--download-dir": "download_path",
        # ranks
        "--tensor-parallel-size": "tp tp_size",
        "--data-parallel-size": "dp dp_size",
        "--enable-expert-parallel, which shares the experts among all processes": "ep ep_size",
        "--tensor-parallel-size or --data-parallel-size": """
            pipeline_parallel_size pp_size pp decode_context_parallel_size dcp prefill_context_parallel_size pcp""",
        "--master-addr": "data_parallel_address dpa",
        "--master-port": "data_parallel_rpc_port dpp",
        "--node-rank": "data_parallel_start_rank dpr",
        "--nnodes, among which the ranks are shared out equally": "data_parallel_size_local dpl",
        "--node-rank 1, 2, ... on the machines without a server": "headless",
        "--master-addr and --master-port": "dist_init_addr",
        "--timeout-s": "distributed_timeout_seconds cpu_distributed_timeout_seconds",
        "--all2all-backend": "moe_a2a_backend",
        "--all2all-backend deepep_auto, deepep_high_throughput or deepep_low_latency": "deepep_mode",
        # overlap
        "--no-enable-dbo": "disable_two_batch_overlap",
        "--no-enable-single-batch-overlap": "disable_single_batch_overlap",
        # memory and scheduling
        "--gpu-memory-utilization": "mem_fraction_static",
        "--kv-cache-memory": "kv_cache_memory_bytes",
        "--kv-cache-memory, which is in bytes": "num_gpu_blocks_override",
        "--block-size": "page_size",
        "--no-enable-prefix-caching": "disable_radix_cache",
        "--max-num-seqs": "max_running_requests",
        "--max-num-batched-tokens": "chunked_prefill_size max_prefill_tokens max_num_scheduled_tokens",
        "--max-prefill-tokens-per-mixed-step, which limits the share that prompts have of a step": """
            long_prefill_token_threshold max_num_partial_prefills max_long_partial_prefills
            prefill_schedule_interval""",
        "--scheduling-policy": "schedule_policy",
        "--no-overlap-schedule": "disable_overlap_schedule",
        "--overlap-schedule": "async_scheduling",
        # kernels and graphs
        "--moe-backend": "moe_runner_backend",
        "--attention-backend": "attention_config ac",
        "--eplb-config.window_size, in steps": "eplb_window_size expert_distribution_recorder_buffer_size",
        "--eplb-config.step_interval, with --enable-eplb": "eplb_step_interval eplb_rebalance_num_iterations",
        "--eplb-config.balancedness_fall": "eplb_min_rebalancing_utilization_threshold",
        "--eplb-config.move_bytes_per_step": "eplb_rebalance_layers_per_chunk",
        "--expert-load-out": "expert_distribution_recorder_mode",
        "--eplb-config.log_balancedness": "eplb_log_balancedness",
        "--eplb-config.num_redundant_experts": "num_redundant_experts ep_num_redundant_experts",
        "--moe-backend and --attention-backend": "kernel_config",
        "--max-cudagraph-capture-size": "cuda_graph_max_bs",
        "--max-cudagraph-capture-size, which counts requests": "max_seq_len_to_capture",
        "--cudagraph-capture-sizes": "cuda_graph_bs cuda_graph_sizes",
        "--enforce-eager": "disable_cuda_graph",
        "--cudagraph-mode and --cudagraph-capture-sizes": "compilation_config cc",
        "--cudagraph-mode; nothing else is compiled": "optimization_level o performance_mode",
        # drafts
        "--speculative-algorithm and the other --speculative- flags": "speculative_config sc",
        "--speculative-algorithm": "spec_method",
        "--speculative-draft-model-path": "spec_model speculative_model",
        "--speculative-num-draft-tokens": "spec_tokens num_speculative_tokens speculative_num_tokens",
        "--speculative-ngram-max": "ngram_prompt_lookup_max",
        "--speculative-ngram-min": "ngram_prompt_lookup_min",
        "--speculative-accept": "spec_decoding_acceptance_method",
        # the server
        "--log-level": "uvicorn_log_level",
        "--no-enable-log-requests": "disable_log_requests",
        "--no-access-log": "disable_uvicorn_access_log",
        "--drain-timeout-s": "shutdown_timeout",
        "--max-engine-restarts, 3 by default": "enable_fault_tolerance fault_tolerance_config",
        "--profile-dir": "profiler_config",
        "--profile-ranges": "enable_layerwise_nvtx_tracing",
    }
)
"""Foreign flag -> what to use here."""


def foreign_hint(name: str, spell: Spell | None = None) -> str:
    """What to do about another system's flag: the end of a sentence that begins with the flag; "" if it is none.

    A switch may begin with `no_`. What is behind a point belongs to the value: `speculative_config.method`, `O.level`.

    Args:
        name: in snake case and without dashes.
        spell: spells the flags in the hint, for a file or Python.
    """
    name = re.sub(r"^o[0-3]$", "o", name.partition(".")[0].lower())
    for known in dict.fromkeys((name, name.removeprefix("no_"))):
        hint = ""
        if known in FOREIGN:
            hint = f"; use {FOREIGN[known] if known == name else _turned(FOREIGN[known])}."
        elif known in NOT_NEEDED:
            hint = f": leave it out, {NOT_NEEDED[known]}."
        elif known in NOT_OFFERED:
            hint = f": it is not offered, {NOT_OFFERED[known]}."
        if hint and spell is not None:
            return re.sub(r"--(no-)?([a-z][a-z0-9-]*)", lambda match: spell(match[2], match[1] is not None), hint)
        if hint:
            return hint
    return ""


def _turned(text: str) -> str:
    """A hint for the `no-` form of a flag: the other form of the switch that the hint names, if it names one alone."""
    if text in _SWITCHES:
        return f"--no-{text.removeprefix('--')}"
    return f"--{text.removeprefix('--no-')}" if text.startswith("--no-") else text


_SWITCHES = ("--overlap-schedule", "--enforce-eager", "--profile-ranges")
"""What stands alone in `FOREIGN` and has a `no-` form."""
