"""Fields of requests: every one is done, refused by name, or named once in the log; and the list of them is true."""

import re
from collections.abc import Mapping
from typing import Any

import pytest
from api_clients import app_of, call, post
from fake_engine import FakeEngine
from pydantic import BaseModel
from repository import ROOT

from serving.api.sampling import MAX_ALLOWED_OF_ALL
from serving.api.schema import unsupported_fields
from serving.api.schema.request_models import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    StreamOptions,
    TokenizeRequest,
)
from serving.api.schema.responses_request import ReasoningConfig, ResponsesRequest, TextConfig
from serving.api.schema.unsupported_fields import MAX_NAME_CHARACTERS, MAX_NAMED, UNUSED
from serving.text.words import MAX_BAD_WORD_CHARACTERS, MAX_BAD_WORDS, MAX_STOP_CHARACTERS, MAX_STOP_STRINGS

pytestmark = pytest.mark.long

DOCUMENT = ROOT / "docs" / "api.md"
MESSAGES = [{"role": "user", "content": "a"}]
BODIES: Mapping[str, tuple[type[Any], dict[str, Any]]] = {
    "/v1/completions": (CompletionRequest, {"prompt": "a"}),
    "/v1/chat/completions": (ChatCompletionRequest, {"messages": MESSAGES}),
    "/v1/responses": (ResponsesRequest, {"input": "a"}),
    "/tokenize": (TokenizeRequest, {"messages": MESSAGES}),
    "/detokenize": (DetokenizeRequest, {"tokens": [65]}),
}
# What vLLM takes, from 0.10 on; what SGLang and OpenAI take besides. Names are all that counts.
SAMPLED = """
model frequency_penalty logit_bias logprobs max_tokens n presence_penalty seed stop stream stream_options temperature
top_p user use_beam_search top_k min_p repetition_penalty watermarking length_penalty stop_token_ids
include_stop_str_in_output ignore_eos min_tokens skip_special_tokens spaces_between_special_tokens
truncate_prompt_tokens truncation_side prompt_logprobs logprob_token_ids add_special_tokens response_format
structured_outputs priority request_id session_id return_tokens_as_token_ids return_token_ids
routed_experts_prompt_start return_token_offsets return_mm_kwargs cache_salt kv_transfer_params ec_transfer_params
vllm_xargs repetition_detection thinking_token_budget stream_interval echo best_of guided_json guided_regex
guided_choice guided_grammar guided_decoding_backend guided_whitespace_pattern logits_processors
regex ebnf json_schema stop_regex no_stop_trim lora_path session_params custom_logit_processor custom_params
images_config bootstrap_host bootstrap_port bootstrap_room routed_dp_rank disagg_prefill_dp_rank data_parallel_rank
rid extra_key ngram_corpus_id return_hidden_states return_routed_experts routed_experts_start_len
return_cached_tokens_details min_new_tokens input_ids
"""
CONVERSATION = """
messages add_generation_prompt continue_final_message chat_template chat_template_kwargs documents media_io_kwargs
mm_processor_kwargs tools
"""
KNOWN: Mapping[str, str] = {
    "/v1/completions": f"""{SAMPLED} {CONVERSATION} prompt suffix prompt_embeds custom_labels reasoning_effort
        enable_thinking tool_choice functions function_call""",
    "/v1/chat/completions": f"""{SAMPLED} {CONVERSATION} prompt top_logprobs max_completion_tokens tool_choice
        reasoning_effort include_reasoning parallel_tool_calls
        structural_tag separate_reasoning stream_reasoning return_prompt_text
        return_prompt_token_ids return_meta_info task max_dynamic_patch min_dynamic_patch use_audio_in_video audio
        function_call functions metadata modalities moderation prediction prompt_cache_key prompt_cache_options
        prompt_cache_retention safety_identifier service_tier store verbosity web_search_options""",
    "/v1/responses": f"""{SAMPLED} {CONVERSATION} prompt top_logprobs max_completion_tokens tool_choice background
        conversation context_management include input instructions max_output_tokens max_tool_calls metadata moderation
        parallel_tool_calls previous_response_id prompt_cache_key prompt_cache_options prompt_cache_retention reasoning
        safety_identifier service_tier store text truncation verbosity reasoning_effort""",
    "/tokenize": f"{CONVERSATION} model prompt add_special_tokens return_token_strs",
    "/detokenize": "model tokens",
}
# The fields whose value must have a certain form to be understood at all.
ECHOED = {"metadata"}  # a response repeats it
ASKING: Mapping[str, Any] = {"length_penalty": 1.5, "spaces_between_special_tokens": False, "include_reasoning": False}


@pytest.fixture(autouse=True)
def _nothing_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unsupported_fields, "_named", set())
    monkeypatch.setattr(unsupported_fields, "_known_named", set())


def named(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Fields that were named in the log."""
    return [found[1] for line in caplog.messages if (found := re.search(r"is not used field=(.*)$", line))]


@pytest.mark.parametrize("path", BODIES)
def test_every_field_of_others_is_done_or_refused_or_logged(path: str, caplog: pytest.LogCaptureFixture) -> None:
    model, body = BODIES[path]
    app = app_of(FakeEngine())
    for name in KNOWN[path].split():
        if name in model.model_fields or name in ("bad_words", "allowed_token_ids"):
            continue
        caplog.clear()
        asking = ASKING.get(name, "sixteen")
        response = post(app, path, {**body, name: asking})
        if name in model.refused:
            assert response.status_code == 400, name
            error = response.json()["error"]
            assert error["param"] == name
            assert error["message"].startswith(f"{name} is not supported: ")
            assert not named(caplog)
        else:
            assert response.status_code == 200, response.text
            assert name in UNUSED, f"{name} is in no list"
            assert named(caplog) == [name]


@pytest.mark.parametrize("path", BODIES)
def test_neutral_values_ask_for_nothing(path: str, caplog: pytest.LogCaptureFixture) -> None:
    model, body = BODIES[path]
    app = app_of(FakeEngine())
    longest = max((len(rule.neutral) for rule in model.refused.values()), default=0)
    for place in range(longest + 1):
        values = {name: [None, *rule.neutral][min(place, len(rule.neutral))] for name, rule in model.refused.items()}
        assert post(app, path, {**body, **values}).status_code == 200
    assert not named(caplog)


def test_tools_are_nothing_where_none_may_be_called(caplog: pytest.LogCaptureFixture) -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    body = {"messages": MESSAGES, "tools": tools, "tool_choice": "none"}
    assert post(FakeEngine(), "/v1/chat/completions", body).status_code == 200
    assert named(caplog) == ["tools"]
    assert post(FakeEngine(), "/v1/chat/completions", {**body, "tool_choice": None}).status_code == 400


def test_functions_are_nothing_where_none_may_be_called() -> None:
    body = {"messages": MESSAGES, "functions": [{"name": "f"}]}
    assert post(FakeEngine(), "/v1/chat/completions", {**body, "function_call": "none"}).status_code == 200
    for call_of in ({}, {"function_call": "auto"}, {"function_call": {"name": "f"}}):
        error = post(FakeEngine(), "/v1/chat/completions", {**body, **call_of}).json()["error"]
        assert "set function_call to 'none'" in error["message"]


def test_known_names_are_told_whatever_others_came_before(caplog: pytest.LogCaptureFixture) -> None:
    many = {f"field{number}": 1 for number in range(1000)}
    assert post(FakeEngine(), "/v1/completions", {"prompt": "a", **many}).status_code == 200
    caplog.clear()
    for _ in range(2):
        assert post(FakeEngine(), "/v1/completions", {"prompt": "a", "user": "me", "wish": 1}).status_code == 200
    assert named(caplog) == ["user"]


def test_unknown_fields_are_named_once_wherever_they_stand(caplog: pytest.LogCaptureFixture) -> None:
    body = {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "a", "cache_control": 1}], "mood": "good"}],
        "stream": True,
        "stream_options": {"include_usage": True, "chunk_size": 5},
        "chat_template_kwargs": {"enable_thinking": True},
        "reasoning_effort": "low",
        "wish": 1,
    }
    for _ in range(2):
        assert post(FakeEngine(), "/v1/chat/completions", body).status_code == 200
    assert sorted(named(caplog)) == [
        "chat_template_kwargs.enable_thinking",
        "messages.content.cache_control",
        "messages.mood",
        "reasoning_effort",
        "stream_options.chunk_size",
        "wish",
    ]


def test_names_are_cut_and_shown_safely_and_not_remembered_without_end(caplog: pytest.LogCaptureFixture) -> None:
    body = {"prompt": "a", "x" * 5000: 1, "new\nline=\u202e": 2}
    assert post(FakeEngine(), "/v1/completions", body).status_code == 200
    long, strange = named(caplog)
    assert len(long) <= MAX_NAME_CHARACTERS + 3
    assert strange == '"new\\nline=\\u202e"'
    for first in (0, 1000):
        many = {f"field{number}": 1 for number in range(first, first + 1000)}
        assert post(FakeEngine(), "/v1/completions", {"prompt": "a", **many}).status_code == 200
    assert len(named(caplog)) == len(unsupported_fields._named) == MAX_NAMED
    assert sum("no more such fields are named" in line for line in caplog.messages) == 1


@pytest.mark.parametrize("path", BODIES)
def test_the_schema_says_what_is_refused(path: str) -> None:
    model, _ = BODIES[path]
    properties = model.model_json_schema()["properties"]
    told = {name: field for name, field in properties.items() if name in model.refused and field}
    for name, field in told.items():
        assert field["description"] == f"not supported: {model.refused[name].why}"
        assert model.refused[name].unless or field["enum"] == [None, *model.refused[name].neutral]
    assert {"use_beam_search", "cache_salt"} <= told.keys() or path.endswith("tokenize")


def test_no_field_is_in_two_lists() -> None:
    for model, _ in BODIES.values():
        assert not model.model_fields.keys() & model.refused.keys()
        assert not (model.model_fields.keys() & UNUSED.keys()) - ECHOED
        assert not model.refused.keys() & UNUSED.keys()


def test_every_field_is_described() -> None:
    description = call(app_of(FakeEngine(), described=True), "GET", "/openapi.json").json()
    for model in (*(model for model, _ in BODIES.values()), StreamOptions, TextConfig, ReasoningConfig):
        schema = description["components"]["schemas"][model.__name__]
        undescribed = [name for name, field in schema["properties"].items() if not field.get("description")]
        assert not undescribed, model.__name__


INT64 = {"minimum": -(2**63), "maximum": 2**63 - 1}  # as a float, the greatest would be one more
STRING = {"minLength": 1, "maxLength": MAX_STOP_CHARACTERS}
LIMITS: Mapping[str, Any] = {
    "seed.0": INT64,
    "priority.0": INT64,
    "top_k.0": {"minimum": -1, "maximum": 2**63 - 1},
    "stop.0": STRING,
    "stop.1": {"maxItems": MAX_STOP_STRINGS},
    "stop.1.items": STRING,
    "bad_words.0": {"maxItems": MAX_BAD_WORDS},
    "bad_words.0.items": {"maxLength": MAX_BAD_WORD_CHARACTERS},
    "allowed_token_ids.0": {"minItems": 1, "maxItems": MAX_ALLOWED_OF_ALL},
    "allowed_token_ids.0.items": {"minimum": 0, "maximum": 2047},
}


@pytest.mark.parametrize("name", ["CompletionRequest", "ChatCompletionRequest", "ResponsesRequest"])
def test_the_description_says_the_limits(name: str) -> None:
    app = app_of(FakeEngine(), max_request_bytes=5000, max_outputs_per_request=7)
    response = call(app, "GET", "/openapi.json")
    assert "e18" not in response.text.replace("+", "")
    properties = response.json()["components"]["schemas"][name]["properties"]
    for place, limits in LIMITS.items():
        field, number, *inner = place.split(".")
        schema = properties[field]["anyOf"][int(number)]
        for key in inner:
            schema = schema[key]
        assert schema.items() >= limits.items(), place
    if name == "CompletionRequest":
        assert [kind.get("maxItems") for kind in properties["prompt"]["anyOf"]] == [None, 7, None, 7]
    for path in BODIES:
        assert "413" in response.json()["paths"][path]["post"]["responses"]


def documented(heading: str) -> set[str]:
    """Names in the document's part below a heading, before any explanation."""
    (part,) = re.findall(rf"^## {heading}$(.*?)(?=^## |\Z)", DOCUMENT.read_text(encoding="utf-8"), re.DOTALL | re.M)
    rows = [line for line in part.splitlines() if line.startswith(("| `", "`"))]
    return {name for row in rows for name in re.findall(r"`([a-z_0-9]+)`", row.split(" | ")[0])}


def test_the_document_lists_all_fields() -> None:
    models: list[type[BaseModel]] = [model for model, _ in BODIES.values()]
    assert documented("Done") == {name for model in models for name in model.model_fields}
    assert documented("Refused") == {name for model, _ in BODIES.values() for name in model.refused}
    assert documented("Taken, and not used") == set(UNUSED)
