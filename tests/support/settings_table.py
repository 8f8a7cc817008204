"""A value for every setting of every command that is not its default, and what must be given with it to count."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from repository import TINY_MOE

HEAD = TINY_MOE.parent / "tiny-moe-eagle"


@dataclass(frozen=True)
class Case:
    """How to set a setting.

    Attributes:
        words: after its flag; a switch has none.
        beside: what else is given, with and without it.
        without: what is given in its place, where there has to be something.
        gpus: of the machine.
        yaml: the value in a file, where `words` are not it.
        off: the flag is the one with `no-` in front.
    """

    words: tuple[str, ...] = ()
    beside: tuple[str, ...] = ()
    without: tuple[str, ...] = ()
    gpus: int = 0
    yaml: str = ""
    off: bool = False


EP = ("--data-parallel-size", "2", "--enable-expert-parallel")
DBO = (*EP, "--enable-dbo")
NODES = ("--data-parallel-size", "2", "--nnodes", "2", "--master-addr", "10.0.0.1", "--master-port", "29500")
NGRAM = ("--speculative-algorithm", "ngram")
EAGLE = ("--speculative-algorithm", "eagle", "--speculative-draft-model-path", str(HEAD))
CORS = ("--allowed-origins", "*")
SAMPLED = ("--temperature", "0.7")

CASES: Mapping[str, Case] = {
    # the checkpoint; `model` is MODEL, `named_model` is --model, see the tests of the hub for the next two
    "model": Case((str(TINY_MOE),), without=("tiny-lab/tiny",)),
    "revision": Case(("v1",), ("tiny-lab/tiny",)),
    "download_dir": Case(("HUB",), ("tiny-lab/tiny", "--revision", "only-there"), without=("--revision", "v1")),
    "load_format": Case(("dummy",)),
    "trust_remote_code": Case(),
    "dtype": Case(("bfloat16",)),
    "device": Case(("cpu",), gpus=2),
    "max_model_len": Case(("64",)),
    "allow_long_max_model_len": Case(),
    # ranks
    "data_parallel_size": Case(("4",)),
    "tensor_parallel_size": Case(("2",), EP),
    "enable_expert_parallel": Case((), ("--data-parallel-size", "2")),
    "all2all_backend": Case(("allgather_reducescatter",), EP),
    "all2all_options": Case(("use_fp8=true",), (*EP, "--all2all-backend", "deepep_auto"), yaml="{use_fp8: true}"),
    "enable_eplb": Case((), EP),
    "eplb_config": Case(('{"num_redundant_experts": 2}',), EP, yaml="{num_redundant_experts: 2}"),
    "init_expert_location": Case(("PLACEMENT.json",), EP),
    "moe_backend": Case(("grouped",)),
    "emulated_link": Case(("10", "100"), EP, yaml="[10, 100]"),
    "nnodes": Case(("2",), NODES, without=("--nnodes", "1", "--master-addr", "127.0.0.1")),
    "node_rank": Case(("1",), NODES),
    "master_addr": Case(("10.0.0.2",), NODES),
    "master_port": Case(("29501",), NODES),
    "cluster_secret_file": Case(("SECRET",), NODES),
    # overlap
    "enable_dbo": Case((), EP),
    "dbo_auto": Case((), DBO),
    "ubatch_size": Case(("3",), DBO),
    "dbo_decode_token_threshold": Case(("33",), DBO),
    "dbo_prefill_token_threshold": Case(("513",), DBO),
    "schedule": Case(("two_batch_prefill",), DBO),
    "schedule_decode": Case(("two_batch_decode",), DBO),
    "schedule_prefill": Case(("two_batch_prefill",), DBO),
    "schedule_verify": Case(("two_batch_decode",), (*DBO, *NGRAM)),
    "comm_sms": Case(("8",), ("--enable-dbo",), gpus=2),
    "split_by": Case(("cost",), DBO),
    "tbo_token_distribution_threshold": Case(("0.3",), DBO),
    "timeout_s": Case(("61",)),
    "profile_ranges": Case((), DBO),
    "enable_single_batch_overlap": Case((), EP),
    "schedules": Case((), DBO, yaml="{mine: {lanes: 2, lead: 1}}"),
    "decode": Case((), DBO, yaml="{token_threshold: 40}"),
    "prefill": Case((), DBO, yaml="{token_threshold: 600}"),
    "verify": Case((), (*DBO, *NGRAM), yaml="{token_threshold: 40}"),
    # memory and scheduling
    "block_size": Case(("32",)),
    "kv_cache_memory": Case(("8M",)),
    "gpu_memory_utilization": Case(("0.5",), gpus=2),
    "kv_cache_dtype": Case(("fp8",)),
    "enable_prefix_caching": Case(off=True),
    "num_state_snapshots": Case(("5",)),
    "max_num_seqs": Case(("3",)),
    "max_num_batched_tokens": Case(("1024",)),
    "max_prefill_tokens_per_mixed_step": Case(("auto",)),
    "enable_chunked_prefill": Case(off=True),
    "scheduling_policy": Case(("lpm",)),
    "prefill_first": Case(),
    "overlap_schedule": Case(),
    # kernels and graphs
    "attention_backend": Case(("torch",)),
    "prefill_attention_backend": Case(("torch",)),
    "decode_attention_backend": Case(("torch",)),
    "cudagraph_mode": Case(("full",), gpus=2),
    "cudagraph_capture_sizes": Case(("1",), ("--max-num-seqs", "4"), gpus=2, yaml="[1]"),
    "max_cudagraph_capture_size": Case(("2",), ("--max-num-seqs", "4"), gpus=2),
    "enforce_eager": Case(gpus=2),
    # the experts' load
    "expert_load_out": Case(("loads.npy",)),
    # engines that have failed
    "max_engine_restarts": Case(("5",)),
    "engine_restart_window_s": Case(("60",), ("--max-engine-restarts", "1")),
    # the server
    "host": Case(("127.0.0.2",)),
    "port": Case(("8001",)),
    "api_key": Case(("hush",), ("--url", "http://x")),
    "served_model_name": Case(("mine",)),
    "max_waiting_requests": Case(("5",)),
    "max_request_bytes": Case(("1M",)),
    "max_outputs_per_request": Case(("5",)),
    "max_connections": Case(("5",)),
    "drain_timeout_s": Case(("0",)),
    "resume_timeout_s": Case(("5",)),
    "profile_dir": Case(("profiles",)),
    "log_level": Case(("debug",)),
    "access_log": Case(),
    "enable_log_requests": Case(),
    "max_log_len": Case(("5",), ("--enable-log-requests", "--log-level", "debug")),
    "enable_request_id_headers": Case(off=True),
    "enable_auto_tool_choice": Case(beside=("--tool-call-parser", "hermes")),
    "tool_call_parser": Case(("hermes",), ("--enable-auto-tool-choice",), without=("--tool-call-parser", "mistral")),
    "reasoning_parser": Case(("qwen3",)),
    "exclude_tools_when_tool_choice_none": Case(),
    "root_path": Case(("/models/a",)),
    "disable_fastapi_docs": Case(),
    "allowed_origins": Case(("https://a.example",)),
    "allowed_methods": Case(("GET",), CORS),
    "allowed_headers": Case(("X-Own",), CORS),
    "allow_credentials": Case((), CORS),
    "max_logprobs": Case(("5",)),
    "return_tokens_as_token_ids": Case(),
    "enable_force_include_usage": Case(),
    "response_role": Case(("bot",)),
    "chat_template": Case(("{{ messages }}",), yaml="'{{ messages }}'"),
    "default_chat_template_kwargs": Case(('{"mood": "good"}',)),
    "generation_config": Case((".",)),
    "override_generation_config": Case(('{"temperature": 0.25}',)),
    # speculation
    "speculative_algorithm": Case(("ngram",)),
    "speculative_draft_model_path": Case((str(HEAD),), EAGLE[:2], without=(EAGLE[2], "tiny-lab/head")),
    "speculative_num_steps": Case(("2",), EAGLE),
    "speculative_eagle_topk": Case(("2",), EAGLE),
    "speculative_num_draft_tokens": Case(("2",), NGRAM),
    "speculative_accept": Case(("rejection",), NGRAM),
    "speculative_ngram_max": Case(("5",), NGRAM),
    "speculative_ngram_min": Case(("1",), NGRAM),
    # generate
    "prompt": Case(("something", "else"), yaml="[something, else]"),
    "max_tokens": Case(("5",)),
    "temperature": Case(("0.5",)),
    "top_k": Case(("5",), SAMPLED),
    "top_p": Case(("0.5",), SAMPLED),
    "seed": Case(("5",), SAMPLED),
    # trace
    "url": Case(("http://y",), without=("--url", "http://x")),
    "seconds": Case(("1.5",), ("--url", "http://x")),
    "files": Case(("a.json",), without=("--files", "b.json"), yaml="[a.json]"),
    "serial": Case(("a.json",), yaml="[a.json]"),
    "expert_loads": Case(("a.npy",), ("--ranks", "2"), without=("--expert-loads", "b.npy")),
    "ranks": Case(("3",), ("--expert-loads", "a.npy"), without=("--ranks", "2")),
    "expert_placement": Case(("placement.yaml",), ("--expert-loads", "a.npy"), without=("--ranks", "2")),
    "out": Case(("elsewhere",)),
    # tune
    "modes": Case(("decode",), yaml="[decode]"),
    "lanes": Case(("2",), yaml="[2]"),
    "search_best": Case(("0",)),
    "max_decode_tokens": Case(("64",)),
    "max_prefill_tokens": Case(("64",)),
    "context": Case(("32",)),
    "prompt_len": Case(("32",)),
    "draft_tokens": Case(("2",)),
    "rounds": Case(("2",)),
    "max_seconds": Case(("10",)),
}
