"""Flags of vLLM and SGLang that have another name here, or that nothing here is like: why, and what to do instead.

Names are in snake case and without dashes, so that they are vLLM's keywords in Python, too. A test walks vLLM's list.
A sentence of `NOT_OFFERED` or `NOT_NEEDED` goes on from "--flag: it is not offered, " or "leave it out, ".
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

Spell = Callable[[str, bool], str]
"""Spells a flag, given without dashes and without `no-`; the second argument says whether it had `no-`."""


def each_name(groups: Mapping[str, str]) -> Mapping[str, str]:
    """Sentence -> names, separated by spaces; turned round."""
    return {name: why for why, names in groups.items() for name in names.split()}


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


NOT_NEEDED: Mapping[str, str] = each_name(
    {
        "usage always has prompt_tokens_details": "enable_prompt_tokens_details",
        "statistics are not logged, and /metrics always has them": """
            disable_log_stats aggregate_engine_logging enable_logging_iteration_details log_stats""",
        "the API always runs in a process of its own": "disable_frontend_multiprocessing engine_use_ray",
        "progress is shown where standard error is a terminal": "use_tqdm_on_load",
        "no code of a checkpoint is ever run, and so none has a revision": "code_revision",
        "nothing is sent to anybody": "disable_usage_stats",
        "all metrics are shown": "show_hidden_metrics_for_version",
        "small messages between ranks never use NCCL": "disable_nccl_for_dp_synchronization",
        "each rank reads only the experts that it has": "enable_ep_weight_filter",
        "blocks are always managed together, for layers of every kind": """
            disable_hybrid_kv_cache_manager use_v2_block_manager""",
        "tables of common prefixes are radix trees without hashes": "prefix_caching_hash_algo prefix_match_unit",
        "the text of an output is always made in the API process, step by step": """
            disable_async_output_proc intial_incremental_detokenization_offset""",
        "a checkpoint that can see is served as its text model alone": "language_model_only",
        "a variable of the environment that is wrong is always refused": "fail_on_environ_validation",
        "ranks are pinned to cores by the command": "numa_bind numa_bind_nodes numa_bind_cpus",
        "attention has one path for prompts that begin alike": "disable_cascade_attn",
        "every model is this project's own": "model_impl",
        "sampling adds up in float64 already": "use_fp64_gumbel",
    }
)
"""Flag -> why it can be left out."""


_STAYS = "weights and KV cache stay in their device's memory; use more ranks, or --kv-cache-memory for a smaller cache"
NOT_OFFERED: Mapping[str, str] = each_name(
    {
        "only text is read and written; serve the model elsewhere for other inputs": """
            allowed_local_media_path allowed_media_domains limit_mm_per_prompt enable_mm_embeds interleave_mm_strings
            media_io_kwargs mm_processor_kwargs mm_processor_cache_gb mm_processor_cache_type mm_hasher_algorithm
            mm_shm_cache_max_object_size_mb mm_encoder_only mm_encoder_tp_mode mm_encoder_attn_backend
            mm_encoder_attn_dtype mm_encoder_fp8_scale_path mm_encoder_fp8_scale_save_path
            mm_encoder_fp8_scale_save_margin skip_mm_profiling video_pruning_rate video_pruning_method mm_tensor_ipc
            mm_processor_device mm_ipc_gpu_memory_gb mm_device_do_normalize io_processor_plugin
            disable_mm_preprocessor_cache disable_chunked_mm_input enable_mm_processor_stats ec_transfer_config
            ec_manager_config image_input_type image_token_id image_input_shape image_feature_size""",
        "there are no LoRA adapters; merge the adapter into a checkpoint, and serve that": """
            enable_lora lora_modules max_loras max_lora_rank lora_dtype max_cpu_loras fully_sharded_loras
            default_mm_loras lora_target_modules enable_tower_connector_lora specialize_active_lora
            enable_mixed_moe_lora_format enable_moe_shared_loras enable_lora_bias lora_extra_vocab_size
            long_lora_scaling_factors qlora_adapter_name_or_path enable_prompt_adapter prompt_adapters
            max_prompt_adapters max_prompt_adapter_token""",
        "no code of others is loaded; put a proxy in front, or change the source": """
            middleware tool_parser_plugin reasoning_parser_plugin logits_processors scheduler_cls worker_cls
            worker_extension_cls additional_config override_neuron_config override_attention_dtype""",
        "TLS is a proxy's; put one such as nginx or Caddy in front, and listen on --host 127.0.0.1": """
            ssl_keyfile ssl_certfile ssl_ca_certs ssl_cert_reqs ssl_ciphers enable_ssl_refresh""",
        "the server listens on an address; use --host and --port": "uds",
        "the size of headers is bounded already; use --max-request-bytes for bodies": """
            h11_max_incomplete_event_size h11_max_header_count""",
        "logs go to standard error; use --log-level, and collect them there": "log_config_file",
        "the access log has every path or none; use --access-log, and filter it": "disable_access_log_for_endpoints",
        "outputs are not logged; keep them where the clients are": "enable_log_outputs enable_log_deltas",
        "tracebacks of faults are always logged, and errors of requests never; leave it out": "log_error_stack",
        "there is no /tokenizer_info; read the checkpoint's tokenizer_config.json": "enable_tokenizer_info_endpoint",
        "/metrics has vllm:num_requests_running and vllm:num_requests_waiting; use these": """
            enable_server_load_tracking enable_per_request_metrics""",
        "/docs loads its page's scripts from the network; /openapi.json works without, use that": "enable_offline_docs",
        "requests never bring a template; use --chat-template": "trust_request_chat_template",
        "the server calls no tools; let the client call them": "tool_server",
        "answers carry no such mark; use X-Request-Id, or GET /version": "fingerprint_mode fingerprint_value",
        "texts are always tokenized and made here; use /v1/completions with token ids": """
            tokens_only skip_tokenizer_init""",
        "the API speaks HTTP; leave it out": "grpc",
        "the tokenizer is transformers', in its fast form; leave it out": """
            tokenizer_mode tokenizer_pool_size tokenizer_pool_type tokenizer_pool_extra_config renderer_num_workers""",
        "models only generate text; serve embeddings and scores elsewhere": """
            task runner convert pooler_config override_pooler_config diffusion_config""",
        "prompts are text or token ids; send one of them": "enable_prompt_embeds",
        "the only architectures are those in docs/serving.md; leave it out": "model_class_overrides",
        "weights are read from safetensors files in one way; leave it out": """
            safetensors_load_strategy safetensors_prefetch_num_threads safetensors_prefetch_block_size
            model_loader_extra_config ignore_patterns pt_load_map_location max_parallel_loading_workers""",
        _STAYS: """
            cpu_offload_gb cpu_offload_params offload_backend offload_group_size offload_num_in_group
            offload_prefetch_step offload_params swap_space kv_offloading_size kv_offloading_backend enable_sleep_mode
            enable_cumem_allocator enable_extensible_kv_cache preemption_mode""",
        "keys and values are not taken from other servers, nor sent to them; leave it out": """
            kv_transfer_config kv_events_config weight_transfer_config""",
        "one API process spreads the requests over all ranks; leave it out": """
            api_server_count asc data_parallel_rank dpn data_parallel_hybrid_lb dph data_parallel_external_lb dpe
            data_parallel_multi_port_external_lb dpm""",
        "ranks are processes that the command starts itself; use --nnodes for more machines": """
            distributed_executor_backend data_parallel_backend dpb worker_use_ray ray_workers_use_nsight""",
        "ranks take the GPUs in order; choose with CUDA_VISIBLE_DEVICES": "device_ids",
        "every process holds the whole context of its requests; leave it out": """
            dcp_comm_backend dcp_kv_cache_interleave_size cp_kv_cache_interleave_size""",
        "--init-expert-location places experts and --enable-eplb moves them; the ranks do not change": """
            expert_placement_strategy enable_elastic_ep""",
        "transfers between ranks are chosen by the device; leave it out": "disable_custom_all_reduce",
        "--moe-backend and --attention-backend choose kernels, the rest follows the device; use these": """
            linear_backend ir_op_priority enable_flashinfer_autotune enable_bf16x3_router_gemm gdn_prefill_backend
            kda_prefill_backend mamba_backend mamba_ssu_algorithm jit_monitor_mode jit_monitor_verbose""",
        "recurrent states are float32, and --num-state-snapshots says how many are kept; leave it out": """
            mamba_config mamba_cache_dtype mamba_ssm_cache_dtype mamba_block_size mamba_cache_mode replayssm_buffer_len
            use_replayssm enable_mamba_cache_stochastic_rounding mamba_cache_philox_rounds""",
        "the cache is fp8 in every layer or in none; use --kv-cache-dtype": """
            calculate_kv_scales kv_cache_dtype_skip_layers""",
        "layers do not share their keys and values; leave it out": "kv_sharing_fast_prefill",
        "windows are part of the model; choose a checkpoint without": "disable_sliding_window",
        "structured outputs have one back end, llguidance, with its own settings; leave it out": """
            structured_outputs_config guided_decoding_backend guided_decoding_disable_fallback
            guided_decoding_disable_any_whitespace guided_decoding_disable_additional_properties
            logits_processor_pattern""",
        "thinking has no budget of tokens of its own; use max_tokens of a request": "reasoning_config",
        "log-probabilities are the model's own, before temperature and penalties; leave it out": "logprobs_mode",
        "the server does not return which experts or tokens were eligible; leave it out": """
            enable_return_routed_experts return_sampling_mask""",
        "each step's tokens are sent as they come; join events in the client": """
            stream_interval multi_step_stream_outputs""",
        "a step makes one token of each request, or those that a draft got right; use --speculative-algorithm": """
            num_scheduler_steps num_lookahead_slots""",
        "a request waits until its whole prompt has room, and is put back if outputs run out of it; leave it out": """
            scheduler_reserve_full_isl watermark scheduler_delay_factor""",
        "drafts are made by the same ranks, in every step; leave it out": """
            speculative_draft_tensor_parallel_size speculative_disable_by_batch_size speculative_max_model_len
            speculative_disable_mqa_scorer speculative_model_quantization disable_logprobs_during_spec_decoding
            typical_acceptance_sampler_posterior_threshold typical_acceptance_sampler_posterior_alpha""",
        "spans are not sent to a collector; use `ubatch trace`, or --profile-dir": """
            otlp_traces_endpoint collect_detailed_traces""",
        "/metrics has what is counted; see ubatch:steps and ubatch:graph_replays": """
            kv_cache_metrics kv_cache_metrics_sample cudagraph_metrics enable_mfu_metrics""",
    }
)
"""Flag -> why it is not offered, and what to do."""


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
