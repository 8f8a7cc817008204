"""Flags of vLLM and SGLang that have another name here, or are not offered, and what to do instead.

Names are in snake case and without dashes, so that they are vLLM's keywords in Python, too. A test walks vLLM's list.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from serving.options.flags.not_offered import NOT_NEEDED, NOT_OFFERED

Spell = Callable[[str, bool], str]
"""Spells a flag, given without dashes and without `no-`; the second argument says whether it had `no-`."""


def spell_hint(text: str, spell: Spell) -> str:
    """A hint for a file or Python, with each flag as `spell` spells it."""
    return re.sub(r"--(no-)?([a-z][a-z0-9-]*)", lambda match: spell(match[2], match[1] is not None), text)


_COPY = "a copy of the checkpoint's folder with a changed config.json"
_DRAFTS = "--speculative-algorithm and the other --speculative- flags"
_PROMPTS_SHARE = "--max-prefill-tokens-per-mixed-step, which limits the share that prompts have of a step"
_CONTEXT = "--tensor-parallel-size or --data-parallel-size"

FOREIGN: Mapping[str, str] = {
    # the checkpoint
    **dict.fromkeys(("model_path", "named_model"), "--model"),
    **dict.fromkeys(
        ("tokenizer", "tokenizer_path", "tokenizer_revision"), "a checkpoint's folder with that tokenizer in it"
    ),
    "context_length": "--max-model-len",
    **dict.fromkeys(
        ("quantization", "q", "quantization_config", "quantization_param_path", "allow_deprecated_quantization"),
        "a checkpoint in fp8, whose config says so, or in bf16, fp16 or fp32",
    ),
    **dict.fromkeys(("hf_config_path", "hf_overrides", "rope_scaling", "rope_theta", "config_format"), _COPY),
    "model_weights": "--model",
    "hf_token": "HF_TOKEN in the environment, or `hf auth login`",
    "download_path": "--download-dir",
    # ranks
    **dict.fromkeys(("tp", "tp_size"), "--tensor-parallel-size"),
    **dict.fromkeys(("dp", "dp_size"), "--data-parallel-size"),
    **dict.fromkeys(("ep", "ep_size"), "--enable-expert-parallel, which shares the experts among all processes"),
    **dict.fromkeys(("pipeline_parallel_size", "pp_size", "pp"), _CONTEXT),
    **dict.fromkeys(("decode_context_parallel_size", "dcp", "prefill_context_parallel_size", "pcp"), _CONTEXT),
    **dict.fromkeys(("data_parallel_address", "dpa"), "--master-addr"),
    **dict.fromkeys(("data_parallel_rpc_port", "dpp"), "--master-port"),
    **dict.fromkeys(("data_parallel_start_rank", "dpr"), "--node-rank"),
    **dict.fromkeys(("data_parallel_size_local", "dpl"), "--nnodes, among which the ranks are shared out equally"),
    "headless": "--node-rank 1, 2, ... on the machines without a server",
    "dist_init_addr": "--master-addr and --master-port",
    **dict.fromkeys(("distributed_timeout_seconds", "cpu_distributed_timeout_seconds"), "--timeout-s"),
    "moe_a2a_backend": "--all2all-backend",
    "deepep_mode": "--all2all-backend deepep_auto, deepep_high_throughput or deepep_low_latency",
    # overlap
    "disable_two_batch_overlap": "--no-enable-dbo",
    "disable_single_batch_overlap": "--no-enable-single-batch-overlap",
    # memory and scheduling
    "mem_fraction_static": "--gpu-memory-utilization",
    "kv_cache_memory_bytes": "--kv-cache-memory",
    "num_gpu_blocks_override": "--kv-cache-memory, which is in bytes",
    "page_size": "--block-size",
    "disable_radix_cache": "--no-enable-prefix-caching",
    "max_running_requests": "--max-num-seqs",
    **dict.fromkeys(
        ("chunked_prefill_size", "max_prefill_tokens", "max_num_scheduled_tokens"), "--max-num-batched-tokens"
    ),
    **dict.fromkeys(
        ("long_prefill_token_threshold", "max_num_partial_prefills", "max_long_partial_prefills"), _PROMPTS_SHARE
    ),
    "prefill_schedule_interval": _PROMPTS_SHARE,
    "schedule_policy": "--scheduling-policy",
    "disable_overlap_schedule": "--no-overlap-schedule",
    "async_scheduling": "--overlap-schedule",
    # kernels and graphs
    "moe_runner_backend": "--moe-backend",
    **dict.fromkeys(("attention_config", "ac"), "--attention-backend"),
    **dict.fromkeys(
        ("eplb_window_size", "expert_distribution_recorder_buffer_size"), "--eplb-config.window_size, in steps"
    ),
    **dict.fromkeys(
        ("eplb_step_interval", "eplb_rebalance_num_iterations"), "--eplb-config.step_interval, with --enable-eplb"
    ),
    "eplb_min_rebalancing_utilization_threshold": "--eplb-config.balancedness_fall",
    "eplb_rebalance_layers_per_chunk": "--eplb-config.move_bytes_per_step",
    "expert_distribution_recorder_mode": "--expert-load-out",
    "eplb_log_balancedness": "--eplb-config.log_balancedness",
    **dict.fromkeys(("num_redundant_experts", "ep_num_redundant_experts"), "--eplb-config.num_redundant_experts"),
    "kernel_config": "--moe-backend and --attention-backend",
    "cuda_graph_max_bs": "--max-cudagraph-capture-size",
    "max_seq_len_to_capture": "--max-cudagraph-capture-size, which counts requests",
    **dict.fromkeys(("cuda_graph_bs", "cuda_graph_sizes"), "--cudagraph-capture-sizes"),
    "disable_cuda_graph": "--enforce-eager",
    **dict.fromkeys(("compilation_config", "cc"), "--cudagraph-mode and --cudagraph-capture-sizes"),
    **dict.fromkeys(("optimization_level", "o", "performance_mode"), "--cudagraph-mode; nothing else is compiled"),
    # drafts
    **dict.fromkeys(("speculative_config", "sc"), _DRAFTS),
    "spec_method": "--speculative-algorithm",
    **dict.fromkeys(("spec_model", "speculative_model"), "--speculative-draft-model-path"),
    **dict.fromkeys(
        ("spec_tokens", "num_speculative_tokens", "speculative_num_tokens"), "--speculative-num-draft-tokens"
    ),
    "ngram_prompt_lookup_max": "--speculative-ngram-max",
    "ngram_prompt_lookup_min": "--speculative-ngram-min",
    "spec_decoding_acceptance_method": "--speculative-accept",
    # the server
    "uvicorn_log_level": "--log-level",
    "disable_log_requests": "--no-enable-log-requests",
    "disable_uvicorn_access_log": "--no-access-log",
    "shutdown_timeout": "--drain-timeout-s",
    **dict.fromkeys(("enable_fault_tolerance", "fault_tolerance_config"), "--max-engine-restarts, 3 by default"),
    "profiler_config": "--profile-dir",
    "enable_layerwise_nvtx_tracing": "--profile-ranges",
}
"""Foreign flag -> what to use here."""


class Kind(StrEnum):
    """What becomes of a flag of vLLM's or SGLang's."""

    CALLED = "has another name"
    NOT_NEEDED = "not needed"
    NOT_OFFERED = "not offered"


@dataclass(frozen=True)
class Foreign:
    """What is known of another system's flag.

    Attributes:
        kind: what becomes of it.
        text: what to use, or why there is nothing to use.
    """

    kind: Kind
    text: str

    def hint(self, spell: Spell | None = None) -> str:
        """What to do, as the end of a sentence that begins with the flag; for a file or Python with `spell`."""
        text = self.text if spell is None else spell_hint(self.text, spell)
        if self.kind is Kind.CALLED:
            return f"; use {text}."
        return f": leave it out, {text}." if self.kind is Kind.NOT_NEEDED else f": it is not offered, {text}."


def find_foreign(name: str) -> Foreign | None:
    """Another system's flag, in snake case and without dashes; None if it is none.

    A switch may begin with `no_`. What is behind a point belongs to the value: `speculative_config.method`, `O.level`.
    """
    name = re.sub(r"^o[0-3]$", "o", name.partition(".")[0].lower())
    positive = name.removeprefix("no_")
    for known in dict.fromkeys((name, positive)):
        if known in FOREIGN:
            text = FOREIGN[known]
            return Foreign(Kind.CALLED, text if known == name else _turned(text))
        for kind, table in ((Kind.NOT_NEEDED, NOT_NEEDED), (Kind.NOT_OFFERED, NOT_OFFERED)):
            if known in table:
                return Foreign(kind, table[known])
    return None


def _turned(text: str) -> str:
    """A hint for the `no-` form of a flag: the other form of the switch that the hint names, if it names one alone."""
    if text in _SWITCHES:
        return f"--no-{text.removeprefix('--')}"
    return f"--{text.removeprefix('--no-')}" if text.startswith("--no-") else text


_SWITCHES = ("--overlap-schedule", "--enforce-eager", "--profile-ranges")
"""What stands alone in `FOREIGN` and has a `no-` form."""
