"""Paths of others that there are not: each answers with what to use instead, and the document lists them."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from api_clients import app_of, call
from fake_engine import FakeEngine
from repository import ROOT

from serving.api.http.routes import router
from serving.api.schema.errors import NOT_OFFERED, elsewhere, why_not

DOCUMENT = ROOT / "docs" / "api.md"
OURS = {getattr(route, "path", "") for route in router.routes}
# Paths of openai's client 3.57, below /v1.
OPENAI = """
agents agents/automations/x/pause agents/environments agents/sessions/x/events assistants assistants/x audio/speech
audio/transcriptions audio/translations audio/voices batches batches/x/cancel chat/completions chat/completions/x
chat/completions/x/messages chatkit/sessions chatkit/threads/x/items completions containers/x/files/x/content
content_provenance_checks conversations conversations/x/items decisions embeddings evals evals/x/runs/x files files/x
files/x/content fine_tuning/alpha/graders/run fine_tuning/jobs fine_tuning/jobs/x/cancel images/edits
images/generations images/variations live/sessions models models/x moderations organization/costs projects/x/roles
realtime/sessions realtime/client_secrets safety/alerts/x skills skills/x/versions threads threads/x/messages
threads/x/runs/x/submit_tool_outputs threads/runs uploads uploads/x/parts vaults vector_stores vector_stores/x/search
videos videos/x/remix webhook_endpoints webhook_event_types
"""
VLLM = """
abort_requests classify cohere/v2/chat collective_rpc detokenize fault_tolerance/apply fault_tolerance/status
finish_weight_update generative_scoring get_world_size health inference/v1/abort_requests inference/v1/generate
init_weight_transfer_engine invocations is_paused is_scaling_elastic_ep is_sleeping kv_event_sources load pause ping
pooling ready readyz release_kv_cache_memory rerank reset_encoder_cache reset_mm_cache reset_prefix_cache resume
scale_elastic_ep score server_info shutdown_weight_transfer_engine sleep start_draft_weight_update start_profile
start_weight_update stop_profile tokenize tokenizer_info update_weight_version update_weights v1/audio/transcriptions
v1/audio/translations v1/chat/completions v1/chat/completions/batch v1/chat/completions/derender
v1/chat/completions/render v1/completions v1/completions/derender v1/completions/render v1/embeddings
v1/load_lora_adapter v1/messages v1/messages/count_tokens v1/messages/render v1/models v1/realtime v1/rerank v1/score
v1/systemone v1/unload_lora_adapter v2/embed v2/rerank version wake_up weight_checker weight_info
"""
SGLANG = """
abort_request add_external_corpus api/chat api/generate api/show api/tags begin_weight_update classify close_session
configure_logging continue_generation destroy_weights_update_group detokenize dump_expert_distribution_record
dumper/x encode end_weight_update flush_cache freeze_gc generate get_hicache_l3_cache_layout get_model_info
get_remote_instance_transfer_engine_info get_server_info get_transfer_engine_info get_weights_by_name health
health_generate hicache/storage-backend hicache/storage-backend/clear init_weights_send_group_for_remote_instance
init_weights_update_group invocations is_scaling_elastic_ep list_external_corpora load_lora_adapter
load_lora_adapter_from_tensors model_info open_session parse_function_call pause_generation pd_role_switch ping ready
register_transfer_engine_info release_memory_occupation remote_instance_transfer_engine_info remove_external_corpus
resume_memory_occupation scale_elastic_ep send_weights_to_remote_instance separate_reasoning server_info
set_internal_state set_trace_level slow_down start_expert_distribution_record start_profile
stop_expert_distribution_record stop_profile tokenize unload_lora_adapter update_weight_version
update_weights_from_disk update_weights_from_distributed update_weights_from_ipc update_weights_from_tensor
v1/audio/transcriptions v1/chat/completions v1/classify v1/completions v1/decisions v1/detokenize v1/embeddings
v1/loads v1/messages v1/messages/count_tokens v1/models v1/models/x v1/realtime v1/rerank v1/score v1/systemone
v1/tokenize vertex_generate weights_checker
"""
KNOWN = [*(f"/v1/{path}" for path in OPENAI.split()), *(f"/{path}" for path in (*VLLM.split(), *SGLANG.split()))]


def test_every_path_of_others_is_ours_or_says_what_to_use() -> None:
    for path in KNOWN:
        ours = path in OURS or path.startswith("/v1/models/")
        assert ours is (why_not(path) is None and elsewhere(path, OURS) is None), path


@pytest.mark.parametrize(
    ("method", "path", "code", "sentence"),
    [
        ("POST", "/v1/embeddings", "endpoint_not_offered", "/v1/embeddings is not offered: this server only generates"),
        ("GET", "/v1/files/x/content", "endpoint_not_offered", "/v1/files/x/content is not offered: nothing is stored"),
        ("POST", "/v1/messages/", "endpoint_not_offered", "/v1/messages/ is not offered: use /v1/chat/completions."),
        ("DELETE", "/v1/chat/completions/x", "endpoint_not_offered", "completions/x is not offered: nothing is stored"),
        ("POST", "/chat/completions", "unknown_endpoint", "use /v1/chat/completions, and check the client's base URL."),
        ("POST", "/v1/v1/completions", "unknown_endpoint", "use /v1/completions, and"),
        ("POST", "/v1/tokenize", "unknown_endpoint", "use /tokenize, and"),
        ("GET", "/nowhere", "unknown_endpoint", "There is no GET /nowhere; /openapi.json lists what there is."),
        ("GET", "/v1/embeddingsx", "unknown_endpoint", "There is no GET /v1/embeddingsx; /openapi.json"),
        ("GET", "/x" * 20_000, "unknown_endpoint", "/openapi.json lists what there is."),
    ],
)
def test_the_sentence_comes_as_an_error(method: str, path: str, code: str, sentence: str) -> None:
    """With a code of its own: clients take a bare 404 for an unknown model."""
    response = call(app_of(FakeEngine()), method, path)
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["type"]) == (404, code, "invalid_request_error")
    assert sentence in error["message"]
    assert len(response.content) < 1000


def test_a_long_path_takes_no_longer() -> None:
    """Every part of it would take the square of its length: minutes."""
    assert why_not("/x" * 500_000) is None


def test_a_path_that_is_not_offered_needs_the_key() -> None:
    assert call(app_of(FakeEngine(), api_key="k"), "POST", "/v1/embeddings").status_code == 401


def test_no_path_is_both() -> None:
    assert not OURS & NOT_OFFERED.keys()
    for why in NOT_OFFERED.values():
        assert not why.endswith(".")
        for used in re.findall(r" (/[a-z0-9_/]+)", why):
            assert used in {*OURS, "/metrics"}, f"{used} is recommended, and is not there"


def documented() -> Iterator[tuple[str, str]]:
    """(path, sentence) in the document's table."""
    text = DOCUMENT.read_text(encoding="utf-8")
    (part,) = re.findall(r"^## End points that are not offered$(.*?)(?=^## |\Z)", text, re.DOTALL | re.M)
    for row in (line for line in part.splitlines() if line.startswith("| `")):
        _, paths, why, _ = row.split("|")
        yield from ((path, why.strip()) for path in re.findall(r"`([^`]+)`", paths))


def test_the_document_lists_all() -> None:
    rows = list(documented())
    assert len(rows) == len(dict(rows))
    assert dict(rows) == NOT_OFFERED
