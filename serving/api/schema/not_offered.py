"""Paths of OpenAI, vLLM, SGLang and others that this server does not have: what to use instead, one sentence each.

They answer 404 with `code: endpoint_not_offered`. Clients do not retry it, and show the sentence; a 501 is retried as a
failure of the server.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

_LONGEST = 6  # most segments of a path that are looked at, with the empty one in front

_OTHERS = "this server only generates text; serve a model for embeddings, ranking or classes with another one"
_GROUPS: Mapping[str, str] = {
    _OTHERS: """
        /v1/embeddings /v2/embed /api/embed /api/embeddings /encode /pooling /classify /v1/classify /rerank /v1/rerank
        /v2/rerank""",
    f"{_OTHERS}. prompt_logprobs of /v1/completions tells the log-probabilities of a prompt": """
        /score /v1/score /generative_scoring /v1/decisions /v1/systemone""",
    "nothing is moderated; ask a model that is made for it in /v1/chat/completions": "/v1/moderations",
    "only text is read and written": """
        /v1/audio /v1/images /v1/videos /v1/realtime /v1/live /v1/content_provenance_checks""",
    "nothing is stored; send what is needed with each request": """
        /v1/files /v1/uploads /v1/vector_stores /v1/containers /v1/skills /v1/chat/completions/*""",
    "send the requests one by one, many at once; the server batches them": "/v1/batches /v1/chat/completions/batch",
    "conversations are not stored; keep them in the client, and send them to /v1/chat/completions": """
        /v1/assistants /v1/threads /v1/conversations /v1/chatkit""",
    "agents are not run here; run them in the client, over /v1/chat/completions": "/v1/agents /v1/vaults",
    "models are only served; train elsewhere": "/v1/fine_tuning /v1/fine-tunes",
    "outputs are not judged; use a program for evaluations over /v1/completions": "/v1/evals",
    "there are no accounts; the server has one key, --api-key": """
        /v1/organization /v1/projects /v1/safety /v1/webhook_endpoints /v1/webhook_event_types""",
    # the same under other names: Anthropic's, Cohere's, Ollama's, those of clouds, SGLang's own
    "use /v1/chat/completions": "/v1/edits /v1/messages /cohere/v2/chat /api/chat",
    "use /v1/completions": "/generate /inference/v1/generate /vertex_generate /api/generate",
    "use /v1/completions or /v1/chat/completions": "/invocations",
    "use /v1/models": "/v1/engines /api/tags /api/show",
    "use /tokenize": "/v1/completions/render",
    "use /tokenize with messages": "/v1/messages/count_tokens /v1/messages/render /v1/chat/completions/render",
    "use /detokenize": "/v1/chat/completions/derender /v1/completions/derender",
    "use /health": "/health_generate /ready /readyz",
    "use /live": "/livez",
    "use /v1/models, /version and /metrics": """
        /server_info /get_server_info /model_info /get_model_info /load /v1/loads /get_world_size /weight_info""",
    "use /start_profile and /stop_profile": "/dumper",
    # parts of a request
    "the checkpoint's folder has tokenizer_config.json": "/tokenizer_info",
    "tool calls are parsed in /v1/chat/completions alone": "/parse_function_call",
    "reasoning is separated in /v1/chat/completions alone": "/separate_reasoning",
    "there are no sessions; send the whole prompt": "/open_session /close_session",
    "close the connection, which ends its request": "/abort_request /abort_requests /inference/v1/abort_requests",
    # running the server
    "there are no LoRA adapters; merge one into the checkpoint, and serve that": """
        /v1/load_lora_adapter /v1/unload_lora_adapter /load_lora_adapter /load_lora_adapter_from_tensors
        /unload_lora_adapter""",
    "the server keeps its memory while it runs; stop it, and start it again": """
        /sleep /wake_up /is_sleeping /release_kv_cache_memory /release_memory_occupation /resume_memory_occupation""",
    "generation cannot be paused; send requests later": """
        /pause /resume /is_paused /pause_generation /continue_generation /slow_down""",
    "requests cannot run code in the engines": "/collective_rpc",
    "the cache makes room by itself; to serve without one, start with --no-enable-prefix-caching": """
        /reset_prefix_cache /reset_mm_cache /reset_encoder_cache /flush_cache /hicache /get_hicache_l3_cache_layout
        /kv_event_sources""",
    "weights do not change while they are served; start a server with the other checkpoint": """
        /init_weight_transfer_engine /shutdown_weight_transfer_engine /start_weight_update /start_draft_weight_update
        /finish_weight_update /begin_weight_update /end_weight_update /update_weights /update_weight_version
        /update_weights_from_disk /update_weights_from_distributed /update_weights_from_ipc
        /update_weights_from_tensor /get_weights_by_name /weights_checker /weight_checker /init_weights_update_group
        /destroy_weights_update_group /init_weights_send_group_for_remote_instance /send_weights_to_remote_instance
        /get_transfer_engine_info /register_transfer_engine_info /get_remote_instance_transfer_engine_info
        /remote_instance_transfer_engine_info""",
    "ranks are set when the server starts": """
        /scale_elastic_ep /is_scaling_elastic_ep /pd_role_switch""",
    "engines that fail are started again by themselves; --max-engine-restarts says how often": "/fault_tolerance",
    "settings are given when the server starts; see `ubatch serve --help`": """
        /configure_logging /set_internal_state /set_trace_level /freeze_gc""",
    "/metrics has the load of the experts at all times, and --expert-load-out writes it to a file": """
        /start_expert_distribution_record /stop_expert_distribution_record /dump_expert_distribution_record""",
    "n-gram speculation looks in the request's own tokens alone": """
        /add_external_corpus /remove_external_corpus /list_external_corpora""",
}
"""What to do instead -> paths."""

NOT_OFFERED: Mapping[str, str] = {path: why for why, paths in _GROUPS.items() for path in paths.split()}
"""Path, with all that lies below it -> what to do instead. `/*` at the end is for what lies below alone."""


def why_not(path: str) -> str | None:
    """What to do instead of asking for a path; None if nobody knows the path."""
    parts = path.rstrip("/").split("/")
    for length in range(min(len(parts), _LONGEST), 1, -1):
        begin = "/".join(parts[:length])
        why = NOT_OFFERED.get(begin) or (NOT_OFFERED.get(f"{begin}/*") if length < len(parts) else None)
        if why is not None:
            return why
    return None


def elsewhere(path: str, known: Collection[str]) -> str | None:
    """One of the `known` paths that is the same but for `/v1` in front, which a client's base URL has too much or not
    at all; None if there is none."""
    candidates = (f"/v1{path}", path.removeprefix("/v1"), path.replace("/v1/v1/", "/v1/", 1))
    return next((candidate for candidate in candidates if candidate != path and candidate in known), None)
